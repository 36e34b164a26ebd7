//! Many measurements of one thing.

use std::time::Duration;

use serde_json::{json, Value};

/// Measurements in nanoseconds.
#[derive(Debug, Default, Clone)]
pub struct Sample(Vec<u64>);

impl Sample {
    /// Adds one.
    pub fn add(&mut self, took: Duration) {
        self.0.push(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds all of another's.
    pub fn merge(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }

    /// The value below which this share (0 to 1) of the measurements lies; 0 where there are none.
    #[must_use]
    pub fn quantile(&mut self, share: f64) -> u64 {
        self.0.sort_unstable();
        let last = self.0.len().saturating_sub(1);
        self.0.get(((last as f64) * share).round() as usize).copied().unwrap_or_default()
    }

    /// Median, tails and count, in units of `unit` nanoseconds.
    #[must_use]
    pub fn json(&mut self, unit: f64) -> Value {
        let mut at = |share| ((self.quantile(share) as f64) / unit * 1000.0).round() / 1000.0;
        json!({ "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "p999": at(0.999), "min": at(0.0), "max": at(1.0), "n": self.0.len() })
    }
}
