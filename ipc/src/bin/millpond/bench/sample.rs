//! Many measurements of one thing, as percentiles.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde_json::{json, Value};

/// The longest that can be told apart: an hour, in nanoseconds.
const LONGEST: u64 = 3_600_000_000_000;

/// Measurements in nanoseconds, to three digits.
#[derive(Debug, Clone)]
pub(super) struct Sample(Histogram<u64>);

impl Sample {
    pub(super) fn new() -> Result<Self, String> {
        Histogram::new_with_max(LONGEST, 3).map(Self).map_err(|error| error.to_string())
    }

    pub(super) fn add(&mut self, took: Duration) {
        self.0.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(super) fn merge(&mut self, other: &Self) -> Result<(), String> {
        self.0.add(&other.0).map_err(|error| error.to_string())
    }

    /// Half of them took no longer, in nanoseconds.
    pub(super) fn median(&self) -> u64 {
        self.0.value_at_quantile(0.5)
    }

    /// Percentiles in nanoseconds.
    pub(super) fn json(&self) -> Value {
        let at = |share| self.0.value_at_quantile(share);
        json!({ "unit": "ns", "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "p999": at(0.999), "max": self.0.max(), "n": self.0.len() })
    }
}

/// What reading the clock twice costs: it is in every figure.
pub(super) fn clock() -> Result<Value, String> {
    let mut sample = Sample::new()?;
    for _ in 0..20_000 {
        let start = Instant::now();
        sample.add(start.elapsed());
    }
    Ok(sample.json())
}

fn time(ns: u64) -> String {
    match ns {
        0..=9_999 => format!("{ns} ns"),
        10_000..=9_999_999 => format!("{:.1} us", ns as f64 / 1e3),
        10_000_000..=9_999_999_999 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

/// One figure for people.
pub(super) fn line(name: &str, value: &Value) -> String {
    if value.get("unit").and_then(Value::as_str) != Some("ns") {
        return format!("{name:<46} {value}");
    }
    let at = |key: &str| value.get(key).and_then(Value::as_u64).unwrap_or_default();
    let figures = ["p50", "p99", "p999", "max"].map(|key| format!("{key} {:>9}", time(at(key)))).join("  ");
    format!("{name:<46} {figures}  n {}", at("n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_what_was_added() {
        let mut sample = Sample::new().unwrap();
        (1..=1000).for_each(|us| sample.add(Duration::from_micros(us)));
        let value = sample.json();
        assert_eq!((value["n"].as_u64(), value["max"].as_u64().map(|ns| ns / 1_000_000)), (Some(1000), Some(1)));
        assert!((499_000..=502_000).contains(&value["p50"].as_u64().unwrap()), "{value}");
        let mut other = Sample::new().unwrap();
        other.merge(&sample).unwrap();
        assert_eq!(other.json(), value);
        assert!(line("a", &value).starts_with("a   ") && line("a", &value).contains("p99  990."), "{}", line("a", &value));
    }
}
