//! The control plane: one JSON request, one JSON answer.
#![allow(unsafe_code)] // extern "C"

mod request;
mod session;

use std::ffi::c_char;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::time::Duration;

use millpond_ipc::client::{Client, Error, Located};
use millpond_ipc::control::Count;
use millpond_ipc::observer::{ObserveError, Observer};
use serde_json::{json, Value};

use crate::error::{give, guard, take, ApiError, Result, FAILED};
use crate::tensor::place;
use crate::{copies, foreign, recording, segments, state, stats, tensor, torch};
use request::Op;
use session::{attach, channel, serve_inline, status, stop_inline};

/// The version of this interface. It changes when a function or a structure does.
pub const ABI_VERSION: u32 = 2;

/// [`ABI_VERSION`].
#[no_mangle]
pub extern "C" fn millpond_abi_version() -> u32 {
    ABI_VERSION
}

/// millpond's version.
#[no_mangle]
pub extern "C" fn millpond_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// The control plane: one JSON request `{"op": ..., ...}`, one JSON answer, or null and the last error. May block up to the
/// request's `timeout_ms`. Devices are GPU ordinals; -1 is the host device.
///
/// | op | with | answer |
/// | --- | --- | --- |
/// | attach | socket, key, name, role (parent, worker), limit, on_owner_death (continue, exit), wait (stream, host), python, torch, timeout_ms | client, serial, token, owner_pid, devices: [id, ordinal, host, name, total, limit, chunk_bytes, window, window_bytes] |
/// | detach, status | | {}; attached, and what attach answered |
/// | serve_inline, stop_inline | driver (auto, host, cuda), limit (bytes or "80%"), chunk_bytes, handle_kind (posix_fd) | socket, key |
/// | accept | timeout_ms | channel, peer: {client, serial, name, pid} |
/// | connect | peer ("parent", a name, a slot), timeout_ms | the same |
/// | close, channel_fd | channel | {}; fd, for poll: it stays the library's |
/// | policy | channel, kill_stopped_after_ms (absent: only reported) | {}: what is done with the process at the other end if it stops; for a parent |
/// | kill | channel, waited_ms (since the cancel of its call) | {}: the owner kills it, by its pidfd; for a parent |
/// | ledger; read_ledger | ; socket, key | the ledger |
/// | stats, reset_peak_stats, reset_accumulated_stats, snapshot | device | torch's memory_stats and growths, {}, {}, memory_snapshot |
/// | begin_scope; end_scope | device; device, scope | scope; the counters of `stats` since then, allocated and freed from zero |
/// | trim, get_fraction, set_fraction | device; fraction | bytes; fraction; {} |
/// | at_hand | device | bytes: given back a moment ago, not free for the driver yet, this process's for the asking; room: what its limits (the arena's, its own, a fraction) leave it to reserve, null where the owner does not serve the device |
/// | context_events | device (absent: every one, those not in use yet too), allowed: not where graphs are captured that the hooks do not tell of | {} |
/// | counters | | messages, tensors, copies and socket bytes so far; leases, imported_bytes, foreign_frees |
/// | listen | | {}: from here on growths that do not fit are told of (a parent, everybody's; else its own refusals), and deaths |
/// | next_event | timeout_ms | event: {kind (pressure, refusal, death), cause (of a death, if it was killed by policy), device, by, asked, limit, reserved, free, missed}, or null |
/// | locate | address | kind (block, import, foreign), window, offset, device |
/// | lent | ranges: [[address, bytes]] | lent: [whether a receiver may still use a byte of it], segment: [whether it lies in one of torch's] |
/// | copy_by_host | device, to, from, bytes, stream: one side is host memory; returns when it is there | pinned, pageable: bytes |
/// | copy_out | as copy_by_host, from a GPU: it is queued, and a message with the block may leave | number, pieces: [end, timeline, value], pinned, pageable |
/// | copied_out | number: must follow | {}: that copy is over |
/// | copy_in | device, import, offset, bytes, done, to, stream, pieces | done: less than bytes where the time was up; pinned, pageable |
/// | import_parted | import | parted: it was let go of and no stream can reach it |
/// | pool_swap; pool_fd, pool_use; pool_import | device; ; device, peer (serial), theirs (its GPU), fd | id; fd (the caller closes it), reserved, used and their peaks; {} |
/// | foreign_export | device, address: memory that is not the arena's | kind (ipc, pool), token, offset, bytes |
/// | foreign_open; foreign_close | device, peer, kind, token, theirs | address, bytes; closed: it was the last |
/// | dma_buf | device, address, bytes | fd (the caller closes it), offset, bytes |
/// | record | events (kept), frames (of Python, at most), free_frames, folder (a file there), fresh (not the one that is on) | events, path, frames |
/// | record_stop | file (one in a file too) | path |
/// | recording | device, last (events) | on, events: [action, address, bytes, stream, µs since 1970, stack, pending], stacks, frames, dropped |
/// | merge_traces | folder, out, blocks | processes, events, arrows, deaths, failed |
/// | doctor | | checks: [name, ok, detail, fix] |
///
/// # Safety
/// `request` ends with a zero byte.
#[no_mangle]
pub unsafe extern "C" fn millpond_control(request: *const c_char) -> *mut c_char {
    guard(null_mut(), || {
        // SAFETY: by this function's contract.
        let text = unsafe { take(request) }?;
        let op: Op = serde_json::from_str(text).map_err(|error| ApiError::argument(format!("no such request: {error}")))?;
        Ok(give(run(op)?.to_string()))
    })
}

fn run(op: Op) -> Result<Value> {
    Ok(match op {
        Op::Attach(attach_op) => attach(*attach_op)?,
        Op::Detach => {
            state::detach()?;
            json!({})
        }
        Op::Status => status(),
        Op::Accept { timeout_ms } => {
            let (client, timeout) = (state::client()?, wait(timeout_ms));
            channel(client.accept(timeout)?)
        }
        Op::Connect { peer, timeout_ms } => {
            let peer = match peer {
                None => "parent".to_owned(),
                Some(Value::String(name)) => name,
                Some(other) => other.to_string(),
            };
            channel(state::client()?.connect(&peer, wait(timeout_ms))?)
        }
        Op::Close { channel } => {
            tensor::close(channel);
            json!({})
        }
        Op::Policy { channel, kill_stopped_after_ms } => {
            let after = kill_stopped_after_ms.map(Duration::from_millis);
            state::client()?.set_policy(tensor::channel(channel)?.peer(), after)?;
            json!({})
        }
        Op::Kill { channel, waited_ms } => {
            state::client()?.kill(tensor::channel(channel)?.peer(), Duration::from_millis(waited_ms))?;
            json!({})
        }
        Op::ChannelFd { channel } => json!({ "fd": tensor::channel(channel)?.raw_fd() }),
        Op::Ledger => to_value(&state::client()?.ledger())?,
        Op::ReadLedger { socket, key } => read_ledger(&PathBuf::from(socket), key.as_deref().unwrap_or_default())?,
        Op::ServeInline(settings) => serve_inline(&settings)?,
        Op::StopInline => {
            stop_inline();
            json!({})
        }
        Op::Stats { device } => with_heap(device, |heap| Value::Object(stats::flat(heap)), || json!({}))?,
        Op::ResetPeakStats { device } => with_heap(
            device,
            |heap| {
                heap.reset_peaks();
                json!({})
            },
            || json!({}),
        )?,
        Op::ResetAccumulatedStats { device } => with_heap(
            device,
            |heap| {
                heap.reset_accumulated();
                json!({})
            },
            || json!({}),
        )?,
        Op::Snapshot { device } => with_heap(device, stats::segments, || json!([]))?,
        Op::BeginScope { device } => {
            json!({ "scope": stats::begin_scope(&with_heap(device, |heap| heap.begin_scope(), Default::default)?) })
        }
        Op::EndScope { device, scope } => {
            let begin = stats::end_scope(scope).ok_or_else(|| ApiError::argument(format!("no scope {scope}, or it has ended")))?;
            with_heap(device, |heap| Value::Object(stats::counters(&heap.end_scope(&begin))), || json!({}))?
        }
        Op::Trim { device } => with_heap(device, |heap| json!({ "bytes": heap.empty_cache() }), || json!({ "bytes": 0 }))?,
        Op::AtHand { device } => {
            let (client, place) = (state::client()?, place(device));
            json!({ "bytes": client.at_hand(place), "room": client.room(place) })
        }
        Op::SetFraction { device, fraction } => {
            let heap = state::client()?.heap(place(device))?;
            heap.set_limit(torch::limit_of(fraction, heap.driver().device().total_bytes));
            json!({})
        }
        Op::ContextEvents { device, allowed } => {
            state::client()?.set_context_events(device.map(place), allowed)?;
            json!({})
        }
        Op::GetFraction { device } => with_heap(device, |heap| json!({ "fraction": fraction(heap) }), || json!({ "fraction": 1.0 }))?,
        Op::Listen => {
            state::client()?.listen()?;
            json!({})
        }
        Op::NextEvent { timeout_ms } => json!({ "event": state::client()?.next_event(wait(timeout_ms))? }),
        Op::Counters => counters(&*state::client()?),
        Op::Locate { address } => locate(&*state::client()?, address),
        Op::Lent { ranges } => {
            let segment: Vec<bool> = ranges.iter().map(|(addr, _)| segments::holds(*addr)).collect();
            json!({ "lent": state::client()?.lent(&ranges), "segment": segment })
        }
        Op::CopyByHost { device, to, from, bytes, stream } => copies::by_host(device, to, from, bytes, stream)?,
        Op::CopyOut(op) => copies::out(&op)?,
        Op::CopiedOut { number } => {
            state::client()?.copied_out(number)?;
            json!({})
        }
        Op::CopyIn(op) => copies::into(&op)?,
        Op::ImportParted { import } => json!({ "parted": state::client()?.is_parted(import) }),
        Op::PoolSwap { device } => foreign::swap(device)?,
        Op::PoolFd { device } => foreign::pool_fd(device)?,
        Op::PoolUse { device } => foreign::pool_use(device)?,
        Op::PoolImport { device, peer, theirs, fd } => foreign::pool_import(device, peer, theirs, fd)?,
        Op::ForeignExport { device, address } => foreign::export(device, address)?,
        Op::ForeignOpen { device, peer, kind, token, theirs } => foreign::open(device, peer, kind, &token, theirs)?,
        Op::ForeignClose { device, peer, kind, token } => foreign::close(device, peer, kind, &token)?,
        Op::DmaBuf { device, address, bytes } => foreign::dma_buf(device, address, bytes)?,
        // A lock of the recording may be held for ever there: by a thread that is the parent's.
        Op::Record(_) | Op::RecordStop { .. } | Op::Recording { .. } if state::is_forked() => return Err(Error::Forked.into()),
        Op::Record(settings) => recording::start(&settings)?,
        Op::RecordStop { file } => recording::stop(file),
        Op::Recording { device, last } => recording::so_far(device, last),
        Op::MergeTraces { folder, out, blocks } => recording::merge(&folder, &out, blocks)?,
        Op::Doctor => {
            let owner = state::if_attached().map(|client| client.socket().clone());
            let key = std::env::var("MILLPOND_KEY").unwrap_or_default();
            json!({ "checks": millpond_ipc::doctor::examine(owner.as_deref().map(|socket| (socket, key.as_str()))) })
        }
    })
}

fn to_value(value: &impl serde::Serialize) -> Result<Value> {
    serde_json::to_value(value).map_err(|error| ApiError::Client(Error::Internal(error.to_string())))
}

fn wait(timeout_ms: Option<u64>) -> Duration {
    Duration::from_millis(timeout_ms.unwrap_or(30_000))
}

/// Answers from a heap; from `idle` where the device has not been used yet.
fn with_heap<T>(device: i32, f: impl FnOnce(&millpond_allocator::heap::Heap) -> T, idle: impl FnOnce() -> T) -> Result<T> {
    let client = state::client()?;
    Ok(client.heap_if_open(place(device)).map_or_else(idle, |heap| f(&heap)))
}

fn fraction(heap: &millpond_allocator::heap::Heap) -> f64 {
    let total = heap.driver().device().total_bytes.max(1);
    match heap.limit() {
        u64::MAX => 1.0,
        limit => limit as f64 / total as f64,
    }
}

fn counters(client: &Client) -> Value {
    let c = &client.counters;
    let get = |n: &std::sync::atomic::AtomicU64| n.load(Ordering::Relaxed);
    let (sent, received) = tensor::socket_bytes();
    json!({
        "sent_messages": get(&c.sent_messages), "sent_tensors": get(&c.sent_tensors),
        "received_messages": get(&c.received_messages), "received_tensors": get(&c.received_tensors),
        "copied_tensors": get(&c.copied_tensors), "copied_bytes": get(&c.copied_bytes),
        "socket_bytes_sent": sent, "socket_bytes_received": received,
        "leases": client.leases(), "imported_bytes": client.imported_bytes(),
        "pinned_bytes": client.pinned_bytes(),
        "foreign_frees": get(&state::FOREIGN_FREES),
    })
}

fn locate(client: &Client, address: u64) -> Value {
    match client.locate(address) {
        Located::Foreign => json!({ "kind": "foreign" }),
        Located::Window { window, own, offset, device } => {
            json!({"kind": if own { "block" } else { "import" }, "window": window, "offset": offset, "device": device.id.to_string()})
        }
    }
}

/// Adds to one of this process's counters in the ledger, which every reader of it sees: `sent.TIER`, `received.TIER`,
/// `fell.REASON`, `copies`, `copied_bytes`. What this library sends and receives it counts itself; this is for what goes by other
/// ways. Device: a GPU's ordinal; -1 is the host, and what has no device. One addition to shared memory, no call.
///
/// # Safety
/// `name` ends with a zero byte.
#[no_mangle]
pub unsafe extern "C" fn millpond_count(device: i32, name: *const c_char, n: u64) -> i32 {
    guard(FAILED, || {
        // SAFETY: by this function's contract.
        let name = unsafe { take(name) }?;
        let count = Count::named(name).ok_or_else(|| ApiError::argument(format!("no counter {name:?}")))?;
        state::client()?.count(place(device), count, n)?;
        Ok(0)
    })
}

fn read_ledger(socket: &Path, key: &str) -> Result<Value> {
    let observer = Observer::connect(socket, key, Duration::from_secs(5)).map_err(|error| {
        ApiError::Client(match error {
            ObserveError::NoOwner { path, error } => Error::OwnerUnavailable { socket: path.display().to_string(), why: error.to_string() },
            error => Error::Refused(error.to_string()),
        })
    })?;
    to_value(&observer.ledger())
}
