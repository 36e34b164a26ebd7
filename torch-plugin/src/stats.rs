//! A heap's figures in torch's shapes: `memory_stats` (flat) and `memory_snapshot` (segments).

use std::collections::BTreeMap;

use millpond_allocator::heap::{BlockView, Heap, Stat, Stats};
use parking_lot::Mutex;
use serde_json::{json, Map, Value};

fn put(map: &mut Map<String, Value>, name: &str, stat: Stat) {
    for (kind, value) in [("current", stat.current), ("peak", stat.peak), ("allocated", stat.allocated), ("freed", stat.freed)] {
        map.insert(format!("{name}.{kind}"), value.into());
    }
}

/// Scopes that have begun and not ended, by number.
static SCOPES: Mutex<(u64, BTreeMap<u64, Stats>)> = Mutex::new((0, BTreeMap::new()));

/// Keeps what the end of a scope needs; its number.
pub fn begin_scope(begin: &Stats) -> u64 {
    let mut scopes = SCOPES.lock();
    scopes.0 += 1;
    let number = scopes.0;
    scopes.1.insert(number, *begin);
    number
}

/// What was kept, once.
pub fn end_scope(number: u64) -> Option<Stats> {
    SCOPES.lock().1.remove(&number)
}

/// The counters by torch's names.
#[must_use]
pub fn counters(stats: &Stats) -> Map<String, Value> {
    let mut map = Map::new();
    for (pool, of) in [("all", stats.all), ("small_pool", stats.small), ("large_pool", stats.large)] {
        of.named().into_iter().for_each(|(name, stat)| put(&mut map, &format!("{name}.{pool}"), stat));
    }
    for (name, value) in [
        ("num_alloc_retries", stats.retries),
        ("num_ooms", stats.out_of_memory),
        ("num_sync_all_streams", 0),
        ("num_device_alloc", stats.growths),
        ("num_device_free", stats.trims),
    ] {
        map.insert(name.to_owned(), value.into());
    }
    map
}

/// The flat dictionary of `torch.cuda.memory_stats`.
#[must_use]
pub fn flat(heap: &Heap) -> Map<String, Value> {
    let mut map = counters(&heap.stats());
    let (pieces, bytes) = heap.inactive_split();
    for pool in ["all", "small_pool", "large_pool"] {
        let share = |stat: Stat| if pool == "small_pool" { Stat::default() } else { stat };
        put(&mut map, &format!("inactive_split.{pool}"), share(pieces));
        put(&mut map, &format!("inactive_split_bytes.{pool}"), share(bytes));
    }
    put(&mut map, "oversize_allocations", Stat::default());
    put(&mut map, "oversize_segments", Stat::default());
    map.insert("max_split_size".to_owned(), (-1).into());
    map
}

fn block(view: &BlockView) -> Value {
    let state = match (view.used, view.pending) {
        (true, _) => "active_allocated",
        (_, true) => "active_awaiting_free",
        _ => "inactive",
    };
    json!({"address": view.addr, "size": view.bytes, "requested_size": view.requested, "state": state, "pins": view.pins, "frames": []})
}

/// The list of segments of `torch.cuda.memory_snapshot`.
#[must_use]
pub fn segments(heap: &Heap) -> Value {
    let ordinal = heap.driver().device().ordinal;
    let segment = |region: &millpond_allocator::heap::RegionView| {
        let sum = |wanted: fn(&BlockView) -> bool| region.blocks.iter().filter(|b| wanted(b)).map(|b| b.bytes).sum::<u64>();
        json!({
            "device": ordinal,
            "address": region.addr,
            "total_size": region.bytes,
            "allocated_size": sum(|b| b.used),
            "active_size": sum(|b| b.used || b.pending),
            "requested_size": region.blocks.iter().map(|b| b.requested).sum::<u64>(),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": [0, 0],
            "is_expandable": false,
            "frames": [],
            "blocks": region.blocks.iter().map(block).collect::<Vec<_>>(),
        })
    };
    Value::Array(heap.regions().iter().map(segment).collect())
}
