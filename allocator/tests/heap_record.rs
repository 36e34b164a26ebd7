//! What a heap writes to a recording. One recording a process, so this is one test.
#![allow(clippy::unwrap_used, clippy::panic)]

mod heap_lab;

use heap_lab::{Lab, CHUNK, KIB, MIB};
use millpond_allocator::driver::Stream;
use millpond_allocator::record::{self, Event, Kind};
use millpond_allocator::replay::{recorded, Action};

#[test]
fn a_block_and_its_chunk_are_recorded_from_growth_to_trim() {
    let lab = Lab::new();
    lab.touch(KIB, Stream::LEGACY);
    assert!(record::so_far().is_none() && record::settings().is_none(), "nothing is recorded until somebody asks");

    record::start(1000, None).unwrap();
    let (one, two) = (lab.stream(), lab.stream());
    let before = record::now();
    let small = lab.alloc(KIB + 1, one);
    let large = lab.heap.allocate_from(3 * CHUNK, two, Some(77)).unwrap();
    lab.heap.record_stream(small, two).unwrap();
    lab.free(small);
    let pin = lab.heap.pin(large).unwrap();
    lab.free(large);
    lab.heap.unpin(pin);
    lab.freeze();
    lab.heap.allocate(64 * CHUNK, one).unwrap_err();
    lab.tick_until("everything is given back", || {
        lab.heap.trim(u64::MAX);
        lab.reserved() == 0
    });
    let recording = record::stop().unwrap();
    assert!(record::so_far().is_none(), "it has ended");
    lab.touch(KIB, one);

    let events = &recording.events;
    let of = |kind| events.iter().filter(move |event| event.kind == kind).collect::<Vec<_>>();
    assert!(events.windows(2).all(|two| two[0].time <= two[1].time) && events[0].time >= before);
    assert!(events.iter().all(|event| event.device == -1 && event.thread == rustix::thread::gettid().as_raw_nonzero().get() as u32));
    let allocated = of(Kind::Allocate);
    assert_eq!(allocated.iter().map(|e| (e.addr, e.bytes, e.stack)).collect::<Vec<_>>(), [(small, KIB + 1, 0), (large, 3 * CHUNK, 77)]);
    assert_ne!(allocated[0].stream, allocated[1].stream);
    assert_eq!(allocated.iter().map(|e| e.value).collect::<Vec<_>>(), [KIB + 512, KIB + 512 + 3 * CHUNK]);
    let freed = of(Kind::Free);
    assert_eq!(
        freed.iter().map(|e| (e.addr, e.flags, e.value)).collect::<Vec<_>>(),
        [(small, Event::PENDING | Event::ELSEWHERE, 3 * CHUNK), (large, Event::PENDING, 0)]
    );
    assert_eq!(u64::from(freed[0].peer), allocated[1].stream, "the stream that was named");
    let traces = recorded(&recording);
    let frees: Vec<_> = traces[0].events.iter().filter(|event| event.action == Action::Free).map(|event| event.stream).collect();
    assert_eq!(frees, [allocated[1].stream; 2], "a trace says it by the stream of the free");
    let mut reusable: Vec<_> = of(Kind::Reusable).iter().map(|e| e.addr).collect();
    reusable.sort_unstable();
    let mut both = [small, large];
    both.sort_unstable();
    assert_eq!(reusable, both, "each pending block is reusable once");
    assert_eq!(of(Kind::OutOfMemory).iter().map(|e| e.bytes).collect::<Vec<_>>(), [64 * CHUNK]);
    let grown: u64 = of(Kind::Grow).iter().map(|e| e.bytes).sum();
    assert_eq!(of(Kind::Grow).first().map(|e| e.stack), Some(77), "the first chunk was there; the growth has its block's stack");
    assert_eq!(of(Kind::Trim).iter().map(|e| e.bytes).sum::<u64>(), grown + CHUNK);
    assert_eq!(of(Kind::Trim).last().map(|e| e.value), Some(0));
    assert!(grown >= 3 * CHUNK && CHUNK > MIB);
}
