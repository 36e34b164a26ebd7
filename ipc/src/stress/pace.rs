//! How often a worker dies where deaths are asked for by number or by time: by how fast the workers turn out to be.

use std::time::Duration;

use super::Options;

/// Without a number of deaths to come to.
const USUAL: u64 = 2_000;
/// Lives before anything is known of the pace. Short, since a first life says what the pace is.
const FIRST: u64 = 60;
/// Of the time that there is, so much is planned: the rest is for those who come up, and for chance.
const PLANNED: f64 = 0.6;
/// No life is planned to be shorter or longer.
const FEWEST: u64 = 20;
const MOST: u64 = 20_000;

/// Operations after which the next worker dies on average. `ops` were done by all workers in `worked` of their time together.
pub(super) fn kill_every(options: &Options, ops: u64, worked: Duration) -> u64 {
    // Between two deaths, in seconds.
    let pause = match (options.kill_every_ops, options.kill_every_ms, options.kills) {
        (Some(ops), ..) => return ops,
        (_, Some(ms), _) => ms as f64 / 1e3,
        (.., Some(kills)) => options.seconds as f64 * PLANNED / kills.max(1) as f64,
        (None, None, None) => return USUAL,
    };
    if ops < FIRST || worked.is_zero() {
        return FIRST;
    }
    let life = pause * f64::from(options.workers);
    ((ops as f64 / worked.as_secs_f64() * life) as u64).clamp(FEWEST, MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(kills: Option<u64>, kill_every_ops: Option<u64>) -> Options {
        Options { cuda: false, workers: 4, seconds: 100, kill_every_ops, kill_every_ms: None, kills, spares: 0, seed: 1, fault: None }
    }

    #[test]
    fn the_pace_follows_the_workers() {
        let second = Duration::from_secs(1);
        assert_eq!(kill_every(&options(None, None), 10_000, second), USUAL);
        assert_eq!(kill_every(&options(Some(100), Some(7)), 10_000, second), 7, "who says it has it");
        assert_eq!(kill_every(&options(Some(100), None), 0, second), FIRST);
        // 100 deaths of 4 workers in 60 s: a life of 2.4 s.
        assert_eq!(kill_every(&options(Some(100), None), 1_000, second), 2_400);
        let timed = Options { kill_every_ms: Some(500), ..options(Some(100), None) };
        assert_eq!(kill_every(&timed, 1_000, second), 2_000, "one of four each half second: each lives two");
        assert_eq!(kill_every(&timed, 0, second), FIRST);
        assert_eq!(kill_every(&options(Some(1_000_000), None), 1_000, second), FEWEST);
        assert_eq!(kill_every(&options(Some(1), None), 1_000_000, second), MOST);
    }
}
