//! Tests with real processes, and the two programs that run on a GPU machine without Rust: `millpond-conformance` and
//! `millpond-micro`. What both need is here.
#![deny(unsafe_code)]

pub mod flags;
pub mod lines;
pub mod platform;
pub mod sample;
