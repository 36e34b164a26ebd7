//! What a run found.

use std::collections::BTreeMap;

use serde::Serialize;

/// Half and all of some times were no longer than this.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Half of them.
    pub p50: f64,
    /// All of them.
    pub max: f64,
}

impl Spread {
    pub(super) fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let round = |time: f64| (time * 1000.0).round() / 1000.0;
        let at = |index: usize| times.get(index).copied().map_or(0.0, round);
        Self { p50: at(times.len() / 2), max: at(times.len().saturating_sub(1)) }
    }
}

/// The last line of a run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// Steps of workers: an allocation, a send, a receipt, a look at content, a release.
    pub ops: u64,
    /// Values that were received.
    pub transfers: u64,
    /// Workers that died as they were to.
    pub kills: u64,
    /// Those of them that a timer killed, at a moment that the seed drew, wherever they were then.
    pub timed_kills: u64,
    /// Those of these that were inside a call of the library, by its name.
    pub killed_inside: BTreeMap<String, u64>,
    /// Values that were not what was sent.
    pub corruptions: u64,
    /// Workers, or the dead's memory, that did not come to an end.
    pub hung: u64,
    /// Bytes that are reserved, or said to be in use, when nobody uses any.
    pub leaked_bytes: u64,
    /// Descriptors that the owner has more than before.
    pub leaked_fds: u64,
    /// Bytes that are left in the end by a count that is not ours: on the host device those of the owner's files, on a GPU what the
    /// driver counts more than before. `None`: that was not checked.
    pub outside_bytes: Option<u64>,
    /// Why it was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outside_not_checked: Option<String>,
    /// Errors that the contract does not know.
    pub unexpected: u64,
    /// Deaths that were to be and for which there was no time.
    #[serde(skip_serializing_if = "is_zero")]
    pub missed_kills: u64,
    /// How long the workers worked, in seconds.
    pub seconds: f64,
    /// From a process's end until nothing of it is left, its readers' part too, in milliseconds.
    pub reclaim_ms: Spread,
    /// From a process's end until those who waited for it are released, in microseconds.
    pub release_us: Spread,
    /// The first findings, in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<String>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // as serde calls it
const fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Report {
    /// Whether the run did something, and all is as it should be.
    #[must_use]
    pub const fn is_clean(&self) -> bool {
        self.transfers > 0 && self.is_well()
    }

    /// Whether nothing is wrong so far.
    pub(super) const fn is_well(&self) -> bool {
        self.corruptions == 0
            && self.hung == 0
            && self.leaked_bytes == 0
            && self.leaked_fds == 0
            && self.unexpected + self.missed_kills == 0
    }

    pub(super) fn finding(&mut self, text: String) {
        eprintln!("stress: {text}");
        if self.findings.len() < 10 {
            self.findings.push(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_transferred_nothing_is_not_clean() {
        let idle = Report { ops: 1_000, ..Report::default() };
        assert!(idle.is_well() && !idle.is_clean());
        let busy = Report { transfers: 1, ..idle };
        assert!(busy.is_clean());
        assert!(!Report { hung: 1, ..busy }.is_clean());
    }

    #[test]
    fn a_spread_is_of_what_there_is() {
        assert_eq!(Spread::of(Vec::new()), Spread::default());
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { p50: 2.0, max: 3.0 });
    }
}
