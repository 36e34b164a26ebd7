//! The owner, spoken to in raw frames: what a hostile, a dying or an honest client sees of it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, not only tests
mod adopt;
mod channels;
mod deaths;
mod golden;
#[cfg(feature = "cli")]
mod gpu;
mod hello;
mod hostile;
mod memory;
mod policy;
mod pressure;
#[cfg(feature = "cli")]
mod program;
mod puppet;
mod raw;
