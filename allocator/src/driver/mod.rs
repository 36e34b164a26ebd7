//! The driver seam: the calls that millpond makes of a device, as one trait with two implementations.
//!
//! [`cuda`] calls NVIDIA's driver library; [`host`] keeps the same contract on memfds, `mmap` and threads. Whatever the
//! real driver refuses, the host driver refuses too, with the same result code: a test that passes on the host and fails on
//! a GPU is a fault of the host driver. One suite ([`conformance`]) runs against both.
//!
//! A [`Driver`] speaks for one device. Physical memory ([`Memory`]) can be created, exported and released without a
//! context, which is how the owner lives; everything that touches addresses, streams or events needs
//! [`Driver::attach_context`] first.

pub mod cuda;
pub mod host;

#[cfg(feature = "conformance")]
pub mod conformance;

mod device;
mod error;
mod sharing;

pub use device::{DeviceId, DeviceInfo, ParseDeviceIdError};
pub use error::{CuResult, DriverError};
pub use sharing::{pieces, Pool, PoolUse, Sharing, Token, POOL_PIECE, POOL_PIECES};

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Result of a driver call.
pub type Result<T> = std::result::Result<T, DriverError>;

/// An address in the device's (unified) address space, in bytes.
pub type Addr = u64;

/// A physical allocation (`cuMemCreate`): owned by whoever created or imported it, until [`Driver::release`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Memory(pub u64);

/// A raw stream handle, as torch hands it over. 0 and 1 are the legacy default stream, 2 the per-thread default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Stream(pub u64);

impl Stream {
    /// The legacy default stream: always valid, never destroyed.
    pub const LEGACY: Self = Self(0);

    /// Whether it is a name of the driver's, which stands for a stream of whichever context is meant.
    #[must_use]
    pub const fn is_named(self) -> bool {
        self.0 <= 2
    }
}

/// The identity of a stream (`cuStreamGetId`): a handle that is destroyed and made again has another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

impl StreamId {
    /// Set in the identity of a stream that is known by its handle alone: while it captures, it may not be asked.
    pub const BY_HANDLE: u64 = 1 << 63;

    /// The number to show: the driver's own, or the handle of a stream that was seen capturing.
    #[must_use]
    pub const fn shown(self) -> u64 {
        self.0 & !Self::BY_HANDLE
    }
}

/// An event without timing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Event(pub u64);

/// Free and total bytes of a device, as its driver sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemInfo {
    /// Bytes that the driver could still hand out.
    pub free: u64,
    /// Bytes of the whole device.
    pub total: u64,
}

/// What a mapping allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Loads only; a store is a fault of the storing context.
    ReadOnly,
    /// Loads and stores.
    ReadWrite,
}

/// Whether a stream is being captured into a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capture {
    /// Not capturing: work runs.
    None,
    /// Capturing: work is recorded.
    Active,
    /// A capture that failed and was not ended yet.
    Invalidated,
}

/// What the driver knows of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PointerInfo {
    /// First byte of the mapping that holds the address (one chunk, for mapped memory).
    pub base: Addr,
    /// Bytes of that mapping.
    pub bytes: u64,
}

/// A library of devices: CUDA's, or the host's.
pub trait Platform: Send + Sync + Debug {
    /// The devices that this process may use, in the driver's order.
    ///
    /// # Errors
    /// Where the driver cannot be initialised; see [`DriverError`].
    fn devices(&self) -> Result<Vec<DeviceInfo>>;

    /// A driver for the device with this identity.
    ///
    /// # Errors
    /// [`DriverError::NoSuchDevice`] where it is not visible to this process.
    fn open(&self, id: DeviceId) -> Result<Arc<dyn Driver>>;
}

/// The calls that millpond makes of one device.
///
/// Sizes and addresses are in bytes. Every method may be called from any thread, whatever context is current there, and
/// leaves the thread's current context as it was.
pub trait Driver: Send + Sync + Debug {
    /// The device that this driver speaks for.
    fn device(&self) -> &DeviceInfo;

    /// Whether addresses of this device can be read and written by the CPU (the host device).
    fn is_host(&self) -> bool;

    /// The host driver behind this, which stages what a GPU would do; `None` for a GPU.
    fn host(&self) -> Option<&host::HostDriver> {
        None
    }

    /// What this device can do with memory that is not the arena's. `None` on the host device, as on one that has none of it.
    fn sharing(&self) -> Option<&dyn Sharing> {
        None
    }

    /// Makes the device's primary context usable from here on. Idempotent. Costs hundreds of MiB on a GPU: an owner never calls it.
    ///
    /// # Errors
    /// What the driver says.
    fn attach_context(&self) -> Result<()>;

    /// Free and total bytes. Needs a context.
    ///
    /// # Errors
    /// [`CuResult::INVALID_CONTEXT`] without one.
    fn mem_info(&self) -> Result<MemInfo>;

    // Physical memory. No context needed.

    /// Creates physical memory that can be exported. `bytes` is a multiple of the device's granularity.
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`] for a size that is no multiple, [`CuResult::OUT_OF_MEMORY`] where the device is full.
    fn create(&self, bytes: u64) -> Result<Memory>;

    /// A descriptor that another process can import. Close-on-exec. It keeps the memory alive by itself.
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`] for a handle that is not live.
    fn export(&self, memory: Memory) -> Result<OwnedFd>;

    /// Takes memory that another process exported. `bytes` is its size as the exporter states it; it is checked where the driver can.
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`] for a descriptor that is no exported memory, or of another size.
    fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> Result<Memory>;

    /// Gives a handle up. The bytes live on until the last mapping, handle and descriptor anywhere are gone.
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`] for a handle that is not live.
    fn release(&self, memory: Memory) -> Result<()>;

    // Addresses.

    /// Reserves address space, aligned to the granularity, at `hint` where that is free (0: anywhere).
    ///
    /// # Errors
    /// [`CuResult::OUT_OF_MEMORY`] where no range is left.
    fn reserve(&self, bytes: u64, hint: Addr) -> Result<Addr>;

    /// Gives address space back, whole, as it was reserved, with nothing mapped in it.
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`] otherwise.
    fn unreserve(&self, addr: Addr, bytes: u64) -> Result<()>;

    /// Maps a whole handle at an address inside a reservation. No access is granted yet.
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`] for a part of a handle, an unaligned or unreserved address, or one that is mapped already.
    fn map(&self, addr: Addr, bytes: u64, memory: Memory) -> Result<()>;

    /// Unmaps exactly one mapping. Does not wait: work in flight on it dies with [`CuResult::ILLEGAL_ADDRESS`]. Drain first.
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`] for part of a mapping.
    fn unmap(&self, addr: Addr, bytes: u64) -> Result<()>;

    /// Grants access to a contiguous range of mappings, to this device and to those of its visible peers that can reach it.
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`] where part of the range is not mapped.
    fn set_access(&self, addr: Addr, bytes: u64, access: Access) -> Result<()>;

    /// The mapping that holds an address, if the driver knows one.
    ///
    /// # Errors
    /// What the driver says, other than that it does not know the address.
    fn pointer_info(&self, addr: Addr) -> Result<Option<PointerInfo>>;

    // Streams. Any call on a destroyed stream is undefined on a GPU: pass only streams that the caller was handed alive.

    /// A new non-blocking stream.
    ///
    /// # Errors
    /// What the driver says.
    fn stream_create(&self) -> Result<Stream>;

    /// Destroys a stream; queued work still runs.
    ///
    /// # Errors
    /// What the driver says.
    fn stream_destroy(&self, stream: Stream) -> Result<()>;

    /// The identity of a live stream. The legacy stream (0, 1) has [`StreamId`] 0, with no driver call.
    ///
    /// # Errors
    /// [`CuResult::STREAM_CAPTURE_UNSUPPORTED`] for a stream that captures, and the capture is lost: ask
    /// [`Driver::stream_capture`] first.
    fn stream_id(&self, stream: Stream) -> Result<StreamId>;

    /// Blocks until all work queued so far has run.
    ///
    /// # Errors
    /// What the work died of, if it did.
    fn stream_synchronize(&self, stream: Stream) -> Result<()>;

    /// Whether all work queued so far has run.
    ///
    /// # Errors
    /// What the work died of, if it did.
    fn stream_query(&self, stream: Stream) -> Result<bool>;

    /// Whether the stream is being captured.
    ///
    /// # Errors
    /// What the driver says.
    fn stream_capture(&self, stream: Stream) -> Result<Capture>;

    /// Who a stream is, unless it is being captured: then asking would end the capture, and the answer is `None`.
    ///
    /// # Errors
    /// What the driver says.
    fn stream_identity(&self, stream: Stream) -> Result<Option<StreamId>> {
        match self.stream_capture(stream)? {
            Capture::None => self.stream_id(stream).map(Some),
            Capture::Active | Capture::Invalidated => Ok(None),
        }
    }

    /// Whether a stream is of this device's context. Of one of the driver's own names ([`Stream::is_named`]), always.
    ///
    /// # Errors
    /// What the driver says. Not of a stream that captures: see [`Driver::stream_capture`].
    fn owns(&self, stream: Stream) -> Result<bool>;

    /// Queues a copy between any two addresses (device or host).
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`] for a destination without write access.
    fn copy(&self, dst: Addr, src: Addr, bytes: u64, stream: Stream) -> Result<()>;

    /// Queues a fill with one byte.
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`] for a destination without write access.
    fn fill(&self, dst: Addr, byte: u8, bytes: u64, stream: Stream) -> Result<()>;

    // Events.

    /// A new event without timing.
    ///
    /// # Errors
    /// What the driver says.
    fn event_create(&self) -> Result<Event>;

    /// Destroys an event. Work that waits on it is not disturbed.
    ///
    /// # Errors
    /// What the driver says.
    fn event_destroy(&self, event: Event) -> Result<()>;

    /// Records all work queued so far on the stream. Never call it on a capturing stream.
    ///
    /// # Errors
    /// What the driver says.
    fn event_record(&self, event: Event, stream: Stream) -> Result<()>;

    /// Records all work queued so far on every stream of the context (`cuCtxRecordEvent`, CUDA 12.5).
    ///
    /// # Errors
    /// [`CuResult::NOT_SUPPORTED`] on an older driver, [`CuResult::STREAM_CAPTURE_UNSUPPORTED`] while any stream captures.
    fn event_record_context(&self, event: Event) -> Result<()>;

    /// Whether everything recorded has run; true for an event never recorded. Disturbs no thread's capture.
    ///
    /// # Errors
    /// What the work died of, if it did.
    fn event_query(&self, event: Event) -> Result<bool>;

    /// Makes the stream's later work wait for what the event recorded.
    ///
    /// # Errors
    /// What the driver says.
    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()>;

    // Words in host memory that streams write and wait on.

    /// Makes host memory reachable by every device of this process and by stream operations; returns its address on this one.
    /// Page-aligned.
    ///
    /// # Safety
    /// The range must stay mapped until [`Driver::host_unregister`].
    ///
    /// # Errors
    /// [`CuResult::HOST_MEMORY_ALREADY_REGISTERED`] for memory that this process has registered, by whichever device: see
    /// [`Driver::host_address`].
    #[allow(unsafe_code)]
    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<Addr>;

    /// The address on this device of memory that a device of this process has registered.
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`] for other memory.
    fn host_address(&self, ptr: *mut u8) -> Result<Addr>;

    /// Ends [`Driver::host_register`], for every device.
    ///
    /// # Errors
    /// [`CuResult::HOST_MEMORY_NOT_REGISTERED`] for another pointer.
    fn host_unregister(&self, ptr: *mut u8) -> Result<()>;

    /// Queues a store of a 64-bit word in registered memory, after all earlier work of the stream.
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`] for an address that is unaligned or not registered.
    fn write_value(&self, stream: Stream, word: Addr, value: u64) -> Result<()>;

    /// Makes the stream's later work wait until the word is at least `value` (cyclic: `(word - value) as i64 >= 0`).
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`] for an address that is unaligned or not registered.
    fn wait_value(&self, stream: Stream, word: Addr, value: u64) -> Result<()>;
}
