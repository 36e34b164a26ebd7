//! millpond's allocator: one device's memory, seen by one process.
//!
//! * [`driver`]: the calls that are made of a device, CUDA's or the host's.
//! * [`heap`]: a process's own blocks, reused in stream order.
//! * [`pins`]: host memory that a device copies at the rate of its bus.
//! * [`record`]: what was done, event by event, where somebody wants to know.
//! * [`scatter`]: maps by numbers.
//! * [`timeline`]: the words that streams of several processes write and wait on.
//! * [`tlsf`]: where blocks lie, with all bookkeeping outside the memory.
#![deny(unsafe_code)]

pub mod driver;
mod futex;
pub mod heap;
pub mod origin;
pub mod pins;
pub mod record;
#[cfg(feature = "replay")]
pub mod replay;
pub mod scatter;
pub mod timeline;
pub mod tlsf;
pub mod window;

/// A list that seldom holds more than two: those need no memory of their own.
pub type Few<T> = smallvec::SmallVec<[T; 2]>;
