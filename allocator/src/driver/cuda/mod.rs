//! CUDA's driver library, called by plain symbols that are looked up at run time.
//!
//! millpond never links libcuda or cudart, and never closes the library. [`CudaPlatform::load`] finds it and its symbols
//! without calling any of them, since `CUDA_VISIBLE_DEVICES` may still change; `cuInit` waits for the first
//! [`Platform::devices`](super::Platform::devices) or [`Platform::open`](super::Platform::open).
//!
//! * `library`: which file is the driver.
//! * `api`: its functions, as a table; every call of it goes through there.
//! * `survey`: what a device is, and what it lacks.
//! * `context`: the primary context, and what a thread's state is put back to.
//! * `handles`: the physical memory that a driver holds.
//! * `kind`: in what form memory is shared.
//! * `platform`, `driver`: the seam's two traits; `sharing`: its third, for memory that is not the arena's.
//!
//! cudarc supplies struct layouts and constants, and nothing that runs.

mod api;
mod context;
mod driver;
mod handles;
mod kind;
mod library;
mod platform;
mod sharing;
mod survey;

#[cfg(test)]
mod sharing_tests;
#[cfg(test)]
mod stub;
#[cfg(test)]
mod tests;

pub use driver::CudaDriver;
pub use kind::HandleKind;
pub use platform::CudaPlatform;

// Sizes cross the seam as u64 and reach the driver as size_t.
const _: () = assert!(usize::BITS == u64::BITS);
