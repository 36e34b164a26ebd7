//! Requests of the control plane about copies through host memory.

use std::time::Duration;

use millpond_allocator::driver::Stream;
use millpond_allocator::pins::Copied;
use millpond_allocator::timeline::Signal;
use millpond_ipc::client::Piece;
use serde::Deserialize;
use serde_json::{json, Value};

use crate::error::Result;
use crate::state;
use crate::tensor::place;

/// `copy_out`: from a GPU to the host arena, queued.
#[derive(Debug, Deserialize)]
pub(crate) struct Out {
    device: i32,
    to: u64,
    from: u64,
    bytes: u64,
    stream: u64,
}

/// `copy_in`: a received value from the host arena to a GPU.
#[derive(Debug, Deserialize)]
pub(crate) struct In {
    device: i32,
    import: u64,
    offset: u64,
    bytes: u64,
    #[serde(default)]
    done: u64,
    to: u64,
    stream: u64,
    /// (end, timeline, value): as `copy_out` gave them, in the sender's process.
    pieces: Vec<(u64, u32, u64)>,
    #[serde(default)]
    timeout_ms: Option<u64>,
}

fn said(copied: Copied) -> Value {
    json!({"pinned": copied.pinned, "pageable": copied.pageable})
}

/// One side is host memory; the bytes are there when this returns.
pub(crate) fn by_host(device: i32, to: u64, from: u64, bytes: u64, stream: u64) -> Result<Value> {
    Ok(said(state::client()?.copy_by_host(place(device), to, from, bytes, Stream(stream))?))
}

pub(crate) fn out(op: &Out) -> Result<Value> {
    let (number, pieces, copied) = state::client()?.copy_out(place(op.device), op.to, op.from, op.bytes, Stream(op.stream))?;
    let pieces: Vec<_> = pieces.into_iter().map(|(end, signal)| (end, signal.timeline, signal.value)).collect();
    let mut answer = said(copied);
    answer["number"] = number.into();
    answer["pieces"] = json!(pieces);
    Ok(answer)
}

pub(crate) fn into(op: &In) -> Result<Value> {
    let pieces: Vec<Piece> = op.pieces.iter().map(|(end, timeline, value)| (*end, Signal { timeline: *timeline, value: *value })).collect();
    let (range, timeout) = ((op.offset, op.bytes, op.done), op.timeout_ms.map(Duration::from_millis));
    let (done, copied) = state::client()?.copy_in(place(op.device), op.import, range, op.to, Stream(op.stream), &pieces, timeout)?;
    let mut answer = said(copied);
    answer["done"] = done.into();
    Ok(answer)
}
