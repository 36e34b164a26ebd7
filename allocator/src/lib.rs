//! millpond's allocator: one device's memory, seen by one process.
//!
//! * [`driver`]: the calls that are made of a device, CUDA's or the host's.
//! * [`tlsf`]: where blocks lie, with all bookkeeping outside the memory.
#![deny(unsafe_code)]

pub mod driver;
pub mod tlsf;
