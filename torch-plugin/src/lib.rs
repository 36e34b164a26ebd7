//! torch's CUDA allocator and millpond's C API: the only `extern "C"` of millpond. The header is `include/millpond.h`.
//!
//! * [`torch`]: `malloc`, `free` and torch's optional hooks. No GIL, no message, no wait but for growth.
//! * [`control`]: everything that is not hot, as one JSON request and one JSON answer.
//! * [`tensor`]: blocks, messages, imports; [`segments`]: what torch's caching allocator cuts into tensors itself.
//! * [`foreign`]: memory that is not the arena's, by tokens of the driver's.
//! * [`ticket`]: values for receivers that are not known yet.
//! * [`dlpack`]: tensors for other libraries, with a deleter of ours.
//! * [`throw`]: torch's own out-of-memory exception, by symbols found at run time; [`cache_info`]: the one answer that
//!   torch's allocator interface has no hook for.
//! * `frames`: Python's call stacks for recorded allocations; `recording`: recordings as JSON.
//!
//! Every entry catches panics. One client a process: [`state`].
#![deny(unsafe_code)]
#![allow(non_camel_case_types)] // C's names

pub mod cache_info;
pub mod control;
mod copies;
pub mod dlpack;
pub mod error;
pub mod foreign;
mod frames;
mod recording;
pub mod segments;
pub mod state;
pub mod stats;
pub mod tensor;
pub mod throw;
pub mod ticket;
pub mod torch;
