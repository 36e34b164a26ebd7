//! Why the owner killed a client: said in the client's row before the signal, so that whoever sees it end can say why.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The bits of a cause's word that hold its time.
const MS: u64 = (1 << 56) - 1;

/// What a client was killed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Cause {
    /// It was stopped (`SIGSTOP`, a debugger) for longer than its connection's policy allows.
    Stopped {
        /// For how long, in milliseconds.
        ms: u64,
    },
    /// A call that it ran was cancelled and did not end.
    Call {
        /// How long after its cancel, in milliseconds.
        ms: u64,
    },
}

impl Cause {
    /// As a row has it; zero is none.
    #[must_use]
    pub fn to_word(self) -> u64 {
        match self {
            Self::Stopped { ms } => 1 << 56 | ms.min(MS),
            Self::Call { ms } => 2 << 56 | ms.min(MS),
        }
    }

    /// From a word that may be anything.
    #[must_use]
    pub const fn from_word(word: u64) -> Option<Self> {
        let ms = word & MS;
        match word >> 56 {
            1 => Some(Self::Stopped { ms }),
            2 => Some(Self::Call { ms }),
            _ => None,
        }
    }
}

/// What follows "the process was".
impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Stopped { ms } | Self::Call { ms }) = *self;
        let seconds = ms as f64 / 1000.0;
        let seconds = if ms >= 10_000 { format!("{seconds:.0}") } else { format!("{seconds:.1}") };
        match self {
            Self::Stopped { .. } => write!(f, "killed by policy: stopped for {seconds} s"),
            Self::Call { .. } => write!(f, "killed by policy: a call did not end within {seconds} s of its cancel"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_survives_its_word_and_says_its_time() {
        for cause in [Cause::Stopped { ms: 12_345 }, Cause::Call { ms: 0 }] {
            assert_eq!(Cause::from_word(cause.to_word()), Some(cause));
        }
        assert_eq!(Cause::from_word(0), None);
        assert_eq!(Cause::from_word(u64::MAX), None);
        assert_eq!(Cause::Stopped { ms: 12_345 }.to_string(), "killed by policy: stopped for 12 s");
        assert_eq!(Cause::Call { ms: 1_500 }.to_string(), "killed by policy: a call did not end within 1.5 s of its cancel");
    }
}
