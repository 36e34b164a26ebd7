//! Tensors over many chunks: written here, read and written there, at every seam.

use millpond_ipc::wire::Role;
use serde_json::json;

use super::bench::{at, text, Bench, Party, GIB, MIB};
use super::Figures;

/// How many bytes are looked at on either side of a place.
const REACH: u64 = 2048;

pub(crate) fn six(bench: &Bench) -> Figures {
    // On the host every byte costs the machine's memory: only the places are touched there.
    span(bench, 6 * GIB)
}

pub(crate) fn sixteen(bench: &Bench) -> Figures {
    span(bench, 16 * GIB)
}

fn span(bench: &Bench, bytes: u64) -> Figures {
    let owner = bench.owner(&[])?;
    let parent = owner.attach("parent", Role::Parent)?;
    let worker = owner.worker(&parent, "other side")?;
    at("malloc");
    let addr = parent.heap.allocate(bytes, parent.stream).map_err(text)?;
    let offset = addr - parent.heap.window().base();
    let chunks = parent.heap.window().chunks_in(offset, bytes);
    let seams: Vec<u64> =
        chunks.iter().map(|chunk| chunk.end()).filter(|end| *end > offset && *end < offset + bytes).map(|end| end - offset).collect();
    // Every seam, both ends, and places in between.
    let mut places = seams.clone();
    places.extend([REACH, bytes - REACH]);
    places.extend((1..bytes / (256 * MIB)).map(|n| n * 256 * MIB + 12_345));
    places.sort_unstable();
    places.dedup_by(|a, b| a.abs_diff(*b) < 2 * REACH);
    if bench.gpu() {
        at("a fill of it all");
        parent.driver.fill(addr, 0xee, bytes, parent.stream).map_err(text)?;
    }
    at("marks");
    mark(&parent, addr, bytes, &places, 1)?;
    at("the other side");
    let ask = json!({ "op": "seams", "places": places, "expect": 1, "write": 2 });
    let answer = parent.ask(&worker.channel, &ask.to_string(), &[parent.outgoing(addr, bytes)])?;
    at("what it wrote");
    let checked = check(&parent, addr, bytes, &places, 2)?;
    let largest = chunks.iter().map(|chunk| chunk.bytes).max();
    Ok(json!({
        "bytes": bytes, "chunks": chunks.len(), "largest_chunk": largest, "seams": seams.len(),
        "bytes_checked_there": answer["checked"], "bytes_checked_here": checked,
    }))
}

/// What belongs at a byte of the tensor.
fn pattern(at: u64, seed: u8) -> u8 {
    let mixed = (at ^ (at >> 9) ^ (at >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
    (mixed as u8).wrapping_add(seed)
}

/// Writes the pattern around every place.
pub(crate) fn mark(party: &Party, addr: u64, bytes: u64, places: &[u64], seed: u8) -> Result<(), String> {
    let mut kept = Vec::new();
    for place in places {
        let (from, to) = (place.saturating_sub(REACH), (place + REACH).min(bytes));
        let data: Vec<u8> = (from..to).map(|at| pattern(at, seed)).collect();
        party.driver.copy(addr + from, data.as_ptr() as u64, to - from, party.stream).map_err(text)?;
        kept.push(data);
    }
    party.synchronize()
}

/// Reads around every place and compares. Returns how many bytes.
pub(crate) fn check(party: &Party, addr: u64, bytes: u64, places: &[u64], seed: u8) -> Result<u64, String> {
    let mut checked = 0;
    for place in places {
        let (from, to) = (place.saturating_sub(REACH), (place + REACH).min(bytes));
        let mut data = vec![0_u8; (to - from) as usize];
        party.driver.copy(data.as_mut_ptr() as u64, addr + from, to - from, party.stream).map_err(text)?;
        party.synchronize()?;
        if let Some((at, found)) = (from..to).zip(&data).find(|(at, found)| pattern(*at, seed) != **found) {
            return Err(format!("byte {at} of {bytes} (near {place}) is {found:#04x}, expected {:#04x}", pattern(at, seed)));
        }
        checked += to - from;
    }
    Ok(checked)
}
