//! A heap's figures in torch's shapes: `memory_stats` (flat) and `memory_snapshot` (segments).

use std::collections::BTreeMap;

use millpond_allocator::driver::StreamId;
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

/// The counters by torch's names, and `growths`, which torch has none of. A chunk is what torch calls a segment: each that is mapped
/// counts as one allocation of the device's, each that went back as one free.
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
        ("num_device_alloc", stats.all.segment.allocated),
        ("num_device_free", stats.all.segment.freed),
        ("growths", stats.growths),
    ] {
        map.insert(name.to_owned(), value.into());
    }
    map
}

/// The flat dictionary of `torch.cuda.memory_stats`, and `growths`. What `inactive_split` gained and lost in all stays 0: that would
/// take words of its own in every malloc and free.
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
    json!({
        "address": view.addr,
        "size": view.bytes,
        "requested_size": view.requested,
        "state": state,
        "pins": view.pins,
        "stream": stream(view),
        "segment_pool_id": pool(view),
        "frames": [],
    })
}

/// The stream's number, as the trace has it: its handle, where it captures. That of the legacy stream, 0, where the block is everybody's.
fn stream(view: &BlockView) -> u64 {
    view.stream.map_or(0, StreamId::shown)
}

fn pool(view: &BlockView) -> [u64; 2] {
    view.pool.map_or([0, 0], |pool| [pool.graph, pool.user])
}

/// What most of the bytes of a chunk that are in use have, or most of its bytes where none are. torch's segments are one stream's
/// and one pool's; of our chunks every block says it for itself.
fn most<T: Ord + Copy>(blocks: &[BlockView], of: fn(&BlockView) -> T) -> Option<T> {
    let mut sums: BTreeMap<T, (u64, u64)> = BTreeMap::new();
    for block in blocks {
        let (active, all) = sums.entry(of(block)).or_default();
        *active += if block.used || block.pending { block.bytes } else { 0 };
        *all += block.bytes;
    }
    sums.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(value, _)| value)
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
            "stream": most(&region.blocks, stream).unwrap_or(0),
            "segment_type": "large",
            "segment_pool_id": most(&region.blocks, pool).unwrap_or([0, 0]),
            "is_expandable": false,
            "frames": [],
            "blocks": region.blocks.iter().map(block).collect::<Vec<_>>(),
        })
    };
    Value::Array(heap.regions().iter().map(segment).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use std::sync::Arc;

    use millpond_allocator::driver::host::{HostConfig, HostDriver, HostPlatform};
    use millpond_allocator::driver::{Access, Driver, Stream};
    use millpond_allocator::heap::{HeapConfig, LocalSource, PoolId};
    use millpond_allocator::window::Window;

    use super::*;

    const MIB: u64 = 1 << 20;
    const CHUNK: u64 = 8 * MIB;

    #[test]
    fn the_device_s_allocations_and_frees_are_its_chunks_and_start_anew_with_the_totals() {
        let platform = HostPlatform::new(HostConfig { total_bytes: Some(1 << 30), ..HostConfig::default() });
        let (_, heap) = heap(&platform);
        let names = ["num_device_alloc", "num_device_free", "segment.all.current", "growths"];
        let count = || names.map(|name| flat(&heap)[name].as_u64().unwrap());
        let blocks: Vec<u64> = (0..24).map(|_| heap.allocate(CHUNK, Stream::LEGACY).unwrap()).collect();
        assert_eq!(count(), [24, 0, 24, 24]);
        blocks[1..].iter().for_each(|block| heap.free(*block).unwrap());
        heap.empty_cache();
        assert_eq!(count(), [24, 23, 1, 24]);
        heap.reset_accumulated();
        assert_eq!(count(), [0, 0, 1, 24]);
        let begin = heap.begin_scope();
        heap.free(heap.allocate(3 * CHUNK, Stream::LEGACY).unwrap()).unwrap();
        heap.empty_cache();
        let scope = counters(&heap.end_scope(&begin));
        assert_eq!(names.map(|name| scope[name].as_u64().unwrap()), [3, 3, 1, 1], "one growth of three chunks");
    }

    fn heap(platform: &HostPlatform) -> (Arc<HostDriver>, Heap) {
        let driver = platform.driver(0).unwrap();
        driver.attach_context().unwrap();
        let config = HeapConfig { chunk_bytes: CHUNK, min_growth: CHUNK, own_chunk: CHUNK, ..HeapConfig::default() };
        let source = Arc::new(LocalSource::new(driver.clone(), 1 << 30, CHUNK));
        let window = Window::reserve(driver.clone(), 1 << 30, Access::ReadWrite).unwrap();
        (driver.clone(), Heap::new(driver, window, source, None, None, config))
    }

    /// (address, size, stream, pool, state) of every segment, and of every block.
    type Seen = (u64, u64, u64, [u64; 2], String);

    fn seen(value: &Value) -> Seen {
        let number = |key: &str| value[key].as_u64().unwrap();
        let pool = value["segment_pool_id"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect::<Vec<_>>();
        let size = value.get("size").or(value.get("total_size")).unwrap().as_u64().unwrap();
        (number("address"), size, number("stream"), pool.try_into().unwrap(), value["state"].as_str().unwrap_or_default().to_owned())
    }

    fn snapshot(heap: &Heap) -> (Vec<Seen>, Vec<Seen>) {
        let segments = segments(heap);
        let all = segments.as_array().unwrap();
        let blocks = all.iter().flat_map(|segment| segment["blocks"].as_array().unwrap());
        (all.iter().map(seen).collect(), blocks.map(seen).collect())
    }

    fn find(all: &[Seen], addr: u64) -> &Seen {
        all.iter().rfind(|seen| seen.0 <= addr).unwrap()
    }

    #[test]
    fn every_block_and_every_segment_says_whose_it_is() {
        let platform = HostPlatform::new(HostConfig { total_bytes: Some(1 << 30), ..HostConfig::default() });
        let (driver, heap) = heap(&platform);
        let streams = [Stream::LEGACY, driver.stream_create().unwrap(), driver.stream_create().unwrap()];
        let number = |stream| driver.stream_id(stream).unwrap().0;
        let plain: Vec<u64> = streams.iter().map(|stream| heap.allocate(CHUNK, *stream).unwrap()).collect();
        assert_eq!(number(streams[0]), 0);
        let pool = PoolId { graph: 7, user: 3 };
        heap.begin_pool(pool);
        driver.begin_capture(streams[1]).unwrap();
        let (small, whole) = (heap.allocate(2 * MIB, streams[1]).unwrap(), heap.allocate(2 * CHUNK, streams[1]).unwrap());
        let gone = heap.allocate(CHUNK, streams[1]).unwrap();
        heap.free(gone).unwrap();
        driver.end_capture(streams[1]).unwrap();
        heap.end_pool(pool);
        // What the capture did not need of its chunk is everybody's, and most of it in use now.
        let rest = heap.allocate(4 * MIB, streams[2]).unwrap();

        let (segments, blocks) = snapshot(&heap);
        assert_eq!(find(&segments, rest), find(&segments, small));
        let allocated = "active_allocated".to_owned();
        for (stream, addr) in streams.iter().zip(&plain) {
            let expected = (*addr, CHUNK, number(*stream), [0, 0], allocated.clone());
            assert_eq!(find(&blocks, *addr), &expected);
            assert_eq!(find(&segments, *addr), &(*addr, CHUNK, number(*stream), [0, 0], String::new()));
        }
        // While it captures, the stream may not be asked for its number.
        let (one, two) = (streams[1].0, number(streams[2]));
        assert_eq!(find(&blocks, small), &(small, 2 * MIB, one, [7, 3], allocated.clone()));
        assert_eq!(find(&blocks, whole), &(whole, 2 * CHUNK, one, [7, 3], allocated.clone()));
        assert_eq!(find(&blocks, gone), &(gone, CHUNK, one, [7, 3], "inactive".to_owned()), "private, though nobody uses it");
        assert_eq!(find(&blocks, rest), &(rest, 4 * MIB, two, [0, 0], allocated));
        assert_eq!(find(&segments, whole), &(whole, 2 * CHUNK, one, [7, 3], String::new()));
        assert_eq!(find(&segments, gone), &(gone, CHUNK, one, [7, 3], String::new()));
        let mixed = find(&segments, small);
        assert_eq!((mixed.2, mixed.3), (two, [0, 0]), "most of what is in use there");

        heap.release_pool(pool);
        let (_, blocks) = snapshot(&heap);
        assert!(blocks.iter().all(|block| block.3 == [0, 0]), "{blocks:?}");
    }
}
