//! Arbitrary bytes and arbitrary descriptors, to the framer, to an owner's loop and to a client: at the handshake, after it, and
//! on a channel; and arbitrary words in the memory that they share. Nothing panics, nothing hangs, and afterwards the others are served and nothing is left.
//!
//! As a test each runs for a moment from fixed seeds. `MILLPOND_FUZZ_SECONDS=600 cargo test -p millpond-ipc --test fuzz` goes on
//! with new ones; a failure names its seed, and `MILLPOND_FUZZ_SEED` starts there.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)] // helpers of tests, not only tests

mod client;
mod framer;
mod material;
mod memory;
#[path = "../owner/raw.rs"]
mod raw;
mod server;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Once;
use std::time::{Duration, Instant};

static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Runs cases, each from its own seed, until the time is up and at least `least` were run.
fn campaign(name: &str, least: u64, mut case: impl FnMut(u64)) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::Relaxed);
            usual(info);
        }));
    });
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seconds = number("MILLPOND_FUZZ_SECONDS").unwrap_or(0);
    let first = number("MILLPOND_FUZZ_SEED").unwrap_or(1);
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut seed = first;
    while seed < first + least || Instant::now() < until {
        let before = PANICS.load(Ordering::Relaxed);
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(seed)));
        // Those of threads count too: an owner's, a client's.
        let panics = PANICS.load(Ordering::Relaxed) - before;
        assert!(done.is_ok() && panics == 0, "{name}: failed at MILLPOND_FUZZ_SEED={seed}");
        seed += 1;
    }
    println!("{name}: {} cases", seed - first);
}
