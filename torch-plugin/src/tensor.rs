//! Blocks, messages and imports in C.
#![allow(unsafe_code)] // extern "C"

use std::collections::HashMap;
use std::ffi::c_char;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use millpond_allocator::driver::{DeviceInfo, Stream};
use millpond_ipc::client::{Channel, Incoming, Message, Outgoing, Place, ReceiveOptions, Way};
use millpond_ipc::control::Tier;
use parking_lot::Mutex;

use crate::error::{guard, ApiError, Result, FAILED};
use crate::{frames, segments, state};

/// Set by a send: the bytes were copied into the arena first.
pub const COPIED: u32 = 1;
/// Asked of a send: the receiver maps it read-only. Set by a receive: it is so.
pub const READ_ONLY: u32 = 2;
/// Set by a ticket: the bytes lie in a segment of torch's caching allocator ([`segments`]), which is pinned as a whole: the caller keeps
/// the tensor itself until `lent` says that nobody uses its bytes any more.
pub const IN_SEGMENT: u32 = 16;
/// The same in the result of [`millpond_send`], of one tensor or more of the message.
pub const ANY_IN_SEGMENT: i64 = 1 << 62;
/// Asked of a receive: map nothing, wait for nothing.
pub const LAZY: u32 = 1;
/// Asked of a receive or an open: block until READY is reached, or its producer has died.
pub const WAIT: u32 = 2;

/// Asked of a lazy receive: open in the same call what can be had without waiting: CPU memory whose READY is reached, and GPU
/// memory on the stream of `streams` that is its GPU's. What is not opened has address 0, as ever.
pub const EAGER: u32 = 4;
/// Asked of a send: what these bytes stand for and are counted as, in four bits from this one on: 0 what they are, 1 to 7 a value of a
/// tier (arena, copy, pool, ipc, pinned, host, inline), 15 nothing, as they only go with a value that is counted.
pub const WAY_SHIFT: u32 = 8;
/// Set by a receive: READY was reached.
pub const READY: u32 = 8;

/// A tensor's bytes, going or coming.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_tensor {
    /// Send: its first byte. Receive: where it is mapped here (0: lazily received).
    pub address: u64,
    /// Bytes from the address that belong to it.
    pub bytes: u64,
    /// Send: the stream that wrote it (0: the legacy default stream).
    pub stream: u64,
    /// Send: forward this import (address 0: all of it). Receive: the import, to be released exactly once.
    pub import_: u64,
    /// GPU ordinal; -1 for CPU memory.
    pub device: i32,
    /// `MILLPOND_COPIED`, `MILLPOND_READ_ONLY`.
    pub flags: u32,
}

/// A message that was received.
#[repr(C)]
#[derive(Debug)]
pub struct millpond_message {
    /// The sender's JSON. Not terminated.
    pub tree: *const c_char,
    /// Its length.
    pub tree_bytes: usize,
    /// Its tensors.
    pub tensors: *mut millpond_tensor,
    /// How many.
    pub count: usize,
    /// The sender's slot.
    pub sender: u64,
    owned: *mut Owned,
}

#[derive(Debug)]
struct Owned {
    tree: String,
    tensors: Vec<millpond_tensor>,
}

static CHANNELS: LazyLock<Mutex<HashMap<u64, Arc<Channel>>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Gives a channel a number.
pub fn keep(channel: Channel) -> u64 {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    CHANNELS.lock().insert(number, Arc::new(channel));
    number
}

/// The channel of a number.
///
/// # Errors
/// For a number that is none's.
pub fn channel(number: u64) -> Result<Arc<Channel>> {
    CHANNELS
        .lock()
        .get(&number)
        .cloned()
        .ok_or_else(|| ApiError::Client(millpond_ipc::client::Error::Closed("the channel is closed here".to_owned())))
}

/// Closes and forgets a channel.
pub fn close(number: u64) {
    if let Some(channel) = CHANNELS.lock().remove(&number) {
        channel.close();
    }
}

/// Bytes that went over all open channels' sockets: (sent, received).
#[must_use]
pub fn socket_bytes() -> (u64, u64) {
    CHANNELS.lock().values().map(|channel| channel.socket_bytes()).fold((0, 0), |(s, r), (sent, received)| (s + sent, r + received))
}

fn timeout(ms: i64) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

/// Where a device is, as C and Python name it.
pub(crate) fn place(device: i32) -> Place {
    u32::try_from(device).map_or(Place::Host, Place::Ordinal)
}

/// A stream, where the device has streams: CPU memory has none.
fn stream(device: i32, stream: u64) -> Option<Stream> {
    (device >= 0).then_some(Stream(stream))
}

/// A block: device is a GPU's ordinal, or -1 for the host device. 0 and the last error where there is none.
#[no_mangle]
pub extern "C" fn millpond_allocate(device: i32, bytes: u64, on: u64) -> u64 {
    guard(0, || {
        let heap = state::client()?.heap(place(device))?;
        // The GIL may be taken there: no lock of ours is held.
        Ok(heap.allocate_from(bytes, Stream(on), frames::of_allocation()).map_err(millpond_ipc::client::Error::from)?)
    })
}

/// Frees a block of [`millpond_allocate`].
#[no_mangle]
pub extern "C" fn millpond_deallocate(address: u64) -> i32 {
    guard(FAILED, || {
        deallocate(address)?;
        Ok(0)
    })
}

pub(crate) fn deallocate(address: u64) -> Result<()> {
    segments::remove(address);
    if let Some(heap) = state::heap_of(address, 0) {
        return Ok(heap.free(address).map_err(millpond_ipc::client::Error::from)?);
    }
    Ok(state::client()?.free(address)?)
}

/// How many tensors [`millpond_send`] can speak of in what it returns.
const IN_RESULT: usize = 62;

/// Sends one message with all its tensors. Every hold is made before the frame leaves. Returns which of the first 62 tensors were copied
/// into the arena first, a bit each, and in bit 62 whether any lies in a segment of torch's caching allocator (`MILLPOND_IN_SEGMENT`); `copied`, if
/// it is not null, gets a byte each, 1 for what was copied. -1 and the last error where nothing was sent.
///
/// # Safety
/// `tree` has `tree_bytes` bytes, `tensors` has `count` entries (it need not be aligned), `copied` is null or has room for `count` bytes.
#[no_mangle]
pub unsafe extern "C" fn millpond_send(
    number: u64,
    tree: *const c_char,
    tree_bytes: usize,
    tensors: *const millpond_tensor,
    count: usize,
    timeout_ms: i64,
    copied: *mut u8,
) -> i64 {
    guard(i64::from(FAILED), || {
        if tree.is_null() || (tensors.is_null() && count > 0) {
            return Err(ApiError::argument("tree or tensors is null"));
        }
        // SAFETY: by this function's contract.
        let tree = unsafe { std::slice::from_raw_parts(tree.cast::<u8>(), tree_bytes) };
        let tree: Box<serde_json::value::RawValue> =
            serde_json::from_slice(tree).map_err(|error| ApiError::argument(format!("the tree is not JSON: {error}")))?;
        // SAFETY: by this function's contract; every pattern of bits is a tensor.
        let tensors: Vec<_> = (0..count).map(|n| unsafe { tensors.add(n).read_unaligned() }).collect();
        let made = state::client()?.send(&*channel(number)?, tree, &outgoing(&tensors), timeout(timeout_ms))?;
        if !copied.is_null() {
            // SAFETY: by this function's contract.
            made.iter().enumerate().for_each(|(n, made)| unsafe { *copied.add(n) = u8::from(*made) });
        }
        let in_segment = segments::any() && tensors.iter().any(|tensor| segments::holds(tensor.address));
        let bits: i64 = made.iter().take(IN_RESULT).enumerate().map(|(n, made)| i64::from(*made) << n).sum();
        Ok(if in_segment { bits | ANY_IN_SEGMENT } else { bits })
    })
}

pub(crate) fn outgoing(tensors: &[millpond_tensor]) -> Vec<Outgoing> {
    let one = |t: &millpond_tensor| Outgoing {
        addr: t.address,
        bytes: t.bytes,
        place: place(t.device),
        stream: stream(t.device, t.stream),
        import: (t.import_ != 0).then_some(t.import_),
        read_only: t.flags & READ_ONLY != 0,
        way: way(t.flags),
    };
    tensors.iter().map(one).collect()
}

fn way(flags: u32) -> Way {
    match (flags >> WAY_SHIFT) & 15 {
        15 => Way::Uncounted,
        number => number.checked_sub(1).and_then(|n| Tier::ALL.get(n as usize).copied()).map_or(Way::Found, Way::As),
    }
}

pub(crate) fn mark(tensors: &mut [millpond_tensor], copied: &[bool]) {
    for (tensor, copied) in tensors.iter_mut().zip(copied) {
        let in_segment = if segments::holds(tensor.address) { IN_SEGMENT } else { 0 };
        tensor.flags = tensor.flags & !(COPIED | IN_SEGMENT) | if *copied { COPIED } else { in_segment };
    }
}

fn of(incoming: &Incoming, client: &millpond_ipc::client::Client) -> millpond_tensor {
    // An ordinal is known once the device is in use; a lazy tensor of a device that is not says i32::MAX.
    let device = match incoming.place {
        Place::Host => -1,
        place => client.ordinal(place).and_then(|n| i32::try_from(n).ok()).unwrap_or(i32::MAX),
    };
    millpond_tensor {
        address: incoming.addr,
        bytes: incoming.bytes,
        stream: 0,
        import_: incoming.import,
        device,
        flags: if incoming.read_only { READ_ONLY } else { 0 },
    }
}

pub(crate) fn of_message(message: &Message, client: &millpond_ipc::client::Client) -> Vec<millpond_tensor> {
    message.tensors.iter().map(|incoming| of(incoming, client)).collect()
}

pub(crate) fn pack(tree: Box<serde_json::value::RawValue>, tensors: Vec<millpond_tensor>, sender: u64) -> *mut millpond_message {
    let mut owned = Box::new(Owned { tree: Box::<str>::from(tree).into_string(), tensors });
    let packed = millpond_message {
        tree: owned.tree.as_ptr().cast(),
        tree_bytes: owned.tree.len(),
        tensors: owned.tensors.as_mut_ptr(),
        count: owned.tensors.len(),
        sender,
        owned: null_mut(),
    };
    Box::into_raw(Box::new(millpond_message { owned: Box::into_raw(owned), ..packed }))
}

/// Receives one message. `streams[i]`: the stream of GPU ordinal i that later work will use (missing: the legacy default);
/// it is made to wait for READY. CPU values are waited for here. A message that fits goes to `buffer`: the number of its tensors and the
/// sender's slot (8 bytes each), the tensors, the tree; its length is returned. Of one that does not, `out` is set and 0 returned. -1
/// and the last error where there is none.
///
/// # Safety
/// `streams` is null or has `stream_count` entries (it need not be aligned), `buffer` is null or has room for `capacity` bytes, `out` may be written.
#[no_mangle]
pub unsafe extern "C" fn millpond_receive(
    number: u64,
    timeout_ms: i64,
    flags: u32,
    streams: *const u64,
    stream_count: usize,
    buffer: *mut u8,
    capacity: usize,
    out: *mut *mut millpond_message,
) -> i64 {
    guard(i64::from(FAILED), || {
        if out.is_null() {
            return Err(ApiError::argument("out is null"));
        }
        let stream_count = if streams.is_null() { 0 } else { stream_count };
        // SAFETY: by this function's contract.
        let streams: Vec<u64> = (0..stream_count).map(|n| unsafe { streams.add(n).read_unaligned() }).collect();
        let on = |info: &DeviceInfo| match info.id.host_number() {
            Some(_) => None,
            None => Some(Stream(streams.get(info.ordinal as usize).copied().unwrap_or(0))),
        };
        let options = ReceiveOptions { timeout: timeout(timeout_ms), lazy: flags & LAZY != 0, wait: flags & WAIT != 0, stream: &on };
        let (client, channel) = (state::client()?, channel(number)?);
        let message = client.receive(&channel, &options)?;
        let mut tensors = of_message(&message, &client);
        if flags & (LAZY | EAGER) == LAZY | EAGER {
            tensors.iter_mut().filter(|tensor| tensor.import_ != 0).for_each(|tensor| open_now(&client, tensor, &streams));
        }
        let (sender, tree) = (u64::from(channel.peer().client), message.tree.get());
        let bytes = 16 + tensors.len() * size_of::<millpond_tensor>() + tree.len();
        if buffer.is_null() || bytes > capacity {
            // SAFETY: by this function's contract.
            unsafe { *out = pack(message.tree, tensors, sender) };
            return Ok(0);
        }
        // SAFETY: by this function's contract, and `bytes` are what is written: two numbers, the tensors, the tree.
        unsafe {
            buffer.cast::<u64>().write_unaligned(tensors.len() as u64);
            buffer.cast::<u64>().add(1).write_unaligned(sender);
            let at = buffer.add(16).cast::<millpond_tensor>();
            tensors.iter().enumerate().for_each(|(n, tensor)| at.add(n).write_unaligned(*tensor));
            at.add(tensors.len()).cast::<u8>().copy_from_nonoverlapping(tree.as_ptr(), tree.len());
        }
        Ok(bytes as i64)
    })
}

/// Opens a tensor if that needs no waiting; else, and where it fails, it stays lazy: whoever touches it is told why.
fn open_now(client: &millpond_ipc::client::Client, tensor: &mut millpond_tensor, streams: &[u64]) {
    let opened = if tensor.device == -1 {
        client.open_import(tensor.import_, None, false, Some(Duration::ZERO)).ok().map(|addr| (addr, 0, READY))
    } else if streams.is_empty() {
        None
    } else {
        client.import_ordinal(tensor.import_).ok().flatten().and_then(|ordinal| {
            let stream = *streams.get(ordinal as usize)?;
            let addr = client.open_import(tensor.import_, Some(Stream(stream)), false, None).ok()?;
            tensor.device = i32::try_from(ordinal).unwrap_or(i32::MAX);
            Some((addr, stream, 0))
        })
    };
    if let Some((addr, stream, ready)) = opened {
        (tensor.address, tensor.stream) = (addr, stream);
        tensor.flags |= ready;
    }
}

/// Frees a message's buffers, not its imports. Null is nothing.
///
/// # Safety
/// `message` came from [`millpond_receive`] and was not freed before.
#[no_mangle]
pub unsafe extern "C" fn millpond_message_free(message: *mut millpond_message) {
    if !message.is_null() {
        // SAFETY: both boxes were made in pack().
        unsafe {
            let message = Box::from_raw(message);
            drop(Box::from_raw(message.owned));
        }
    }
}

/// Maps an import and makes the stream wait for READY; may be called often. With `MILLPOND_WAIT`, and for CPU memory, this
/// thread waits instead.
///
/// # Safety
/// `out` may be written.
#[no_mangle]
pub unsafe extern "C" fn millpond_import_open(import: u64, on: u64, flags: u32, out: *mut millpond_tensor) -> i32 {
    guard(FAILED, || {
        if out.is_null() {
            return Err(ApiError::argument("out is null"));
        }
        let client = state::client()?;
        let incoming = client.open_on(import, Stream(on), flags & WAIT != 0)?;
        // SAFETY: by this function's contract.
        unsafe { *out = of(&incoming, &client) };
        Ok(0)
    })
}

/// Blocks until READY is reached, its producer has died, or the time is up (negative: for ever).
#[no_mangle]
pub extern "C" fn millpond_import_ready(import: u64, timeout_ms: i64) -> i32 {
    guard(FAILED, || {
        state::client()?.import_ready(import, timeout(timeout_ms))?;
        Ok(0)
    })
}

/// Makes a received value this process's own: it outlives its maker, under this process's account. The import, or with 0 the
/// value that is mapped at an address. Waits for READY (negative: for ever).
#[no_mangle]
pub extern "C" fn millpond_adopt(import: u64, address: u64, timeout_ms: i64) -> i32 {
    guard(FAILED, || {
        let client = state::client()?;
        match import {
            0 => client.adopt_at(address, timeout(timeout_ms))?,
            import => client.adopt(import, timeout(timeout_ms))?,
        }
        Ok(0)
    })
}

/// Notes that a stream uses the block or import at an address: its reuse, or its DONE, follows that stream too.
#[no_mangle]
pub extern "C" fn millpond_import_record_stream(address: u64, on: u64) -> i32 {
    guard(FAILED, || {
        state::client()?.record_anywhere(address, Stream(on))?;
        Ok(0)
    })
}

/// Lets go of an import. Never blocks, from any thread, without the GIL; in a forked child, nothing happens.
#[no_mangle]
pub extern "C" fn millpond_import_release(import: u64) -> i32 {
    guard(FAILED, || {
        if state::is_forked() {
            return Ok(0);
        }
        state::client()?.release(import)?;
        Ok(0)
    })
}

/// Waits until every receiver of the block at an address is done with it: the stream, once all have let go on their side;
/// this thread until then, and altogether with `MILLPOND_WAIT` or for CPU memory.
#[no_mangle]
pub extern "C" fn millpond_wait_done(address: u64, on: u64, flags: u32, timeout_ms: i64) -> i32 {
    guard(FAILED, || {
        state::client()?.wait_done_at(address, Stream(on), flags & WAIT != 0, timeout(timeout_ms))?;
        Ok(0)
    })
}
