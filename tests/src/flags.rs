//! The few flags of our two programs.

/// What was on the command line: flags with and without a value.
#[derive(Debug)]
pub struct Flags(Vec<String>);

impl Flags {
    /// This process's.
    #[must_use]
    pub fn of_process() -> Self {
        Self(std::env::args().skip(1).collect())
    }

    /// The value after `--name`, if it is there.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&str> {
        let at = self.0.iter().position(|word| word.strip_prefix("--") == Some(name))?;
        self.0.get(at + 1).map(String::as_str)
    }

    /// Whether `--name` is there.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|word| word.strip_prefix("--") == Some(name))
    }

    /// The value after `--name`, read.
    ///
    /// # Errors
    /// Where it is missing or cannot be read.
    pub fn read<T: std::str::FromStr>(&self, name: &str) -> Result<T, String> {
        let text = self.value(name).ok_or_else(|| format!("--{name} is missing"))?;
        text.parse().map_err(|_| format!("--{name} {text:?} cannot be read"))
    }

    /// The same, or a default where the flag is missing.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn read_or<T: std::str::FromStr>(&self, name: &str, default: T) -> Result<T, String> {
        if self.has(name) {
            self.read(name)
        } else {
            Ok(default)
        }
    }
}
