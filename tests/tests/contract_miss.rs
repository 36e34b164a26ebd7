//! In which order a client that has no room looks for it, and what it says where there is none.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Arena, Worker, MIB};
use millpond_allocator::driver::Stream;
use millpond_allocator::heap::HeapError;
use millpond_ipc::client::{Client, Options, Place};

const CHUNK: u64 = 32 * MIB;

#[test]
fn role() {
    common::role();
}

/// An arena that is full: half is free in a client that does nothing, half is another's, used on its stream 1.
fn full() -> (Arena, Worker, Worker) {
    let arena = Arena::with(8 * CHUNK, CHUNK);
    let (mut idle, mut busy) = (arena.worker("idle"), arena.worker("busy"));
    for n in 0..4 {
        idle.ok(&format!("alloc {CHUNK}"));
        busy.ok(&format!("alloc {CHUNK} 1"));
        assert_eq!(arena.books().0, 2 * (n + 1) * CHUNK);
    }
    (0..4).for_each(|n| _ = idle.ok(&format!("free {n}")));
    (arena, idle, busy)
}

/// How often the idle one was asked to give way, with how much it has; how often the busy one was refused.
fn seen(arena: &Arena) -> (u64, u64, u64) {
    let (idle, busy) = (arena.row("idle").unwrap(), arena.row("busy").unwrap());
    (idle.counts.trims, idle.reserved, busy.counts.refusals)
}

/// malloc of one block, and of one over two chunks.
#[test]
fn what_another_stream_has_freed_comes_before_what_an_idle_client_has() {
    for chunks in [1, 2] {
        let (arena, _idle, mut busy) = full();
        busy.ok("stall 1");
        (0..chunks).for_each(|n| _ = busy.ok(&format!("free {n}")));
        let first = busy.number("addr 0");
        let block = busy.number(&format!("alloc {} 2", chunks * CHUNK));
        assert_eq!(busy.number(&format!("addr {block}")), first, "a wait on the GPU");
        assert_eq!(seen(&arena), (0, 4 * CHUNK, 0), "nobody was asked, and nothing was refused");
        // Nothing of its own is left in reach: now the idle one gives way.
        busy.ok(&format!("alloc {} 2", chunks * CHUNK));
        let (trims, left, refusals) = seen(&arena);
        assert!(trims >= 1 && left <= (4 - chunks) * CHUNK && refusals == 0, "{trims} {left} {refusals}");
        busy.ok("go 1");
    }
}

#[test]
fn where_nothing_is_in_reach_the_idle_client_gives_way_at_once() {
    let (arena, _idle, mut busy) = full();
    busy.ok(&format!("alloc {CHUNK} 2"));
    let (trims, left, refusals) = seen(&arena);
    assert!(trims == 1 && left < 4 * CHUNK && refusals == 0, "{trims} {left} {refusals}");
}

/// What an idle client has freed may still be in reach of its own work when it is asked: it says that it is on its way.
#[test]
fn what_is_on_its_way_is_waited_for() {
    let (arena, mut idle, mut busy) = full();
    idle.ok("stall 3");
    // The whole context is behind that stream now.
    idle.ok("fill 0 7 3");
    busy.ask(&format!("alloc {CHUNK} 2"));
    assert_eq!(busy.answers_within(std::time::Duration::from_millis(50)), None);
    idle.ok("go 3");
    assert!(busy.answer().starts_with("ok"));
    assert_eq!(seen(&arena).2, 0);
}

#[test]
fn own_free_chunks_come_before_an_idle_client_s_too() {
    let (arena, _idle, mut busy) = full();
    // Two free chunks that are no neighbours: a block of two fits in neither.
    busy.ok("free 0");
    busy.ok("free 2");
    busy.ok("sync 1");
    busy.ok(&format!("alloc {} 1", 2 * CHUNK));
    assert_eq!(seen(&arena), (0, 4 * CHUNK, 0), "its own went back and came again as one");
}

/// Whatever limit was hit: the client's by its owner, the process's own, the arena's, the window's.
#[test]
fn every_lack_of_memory_says_who_holds_what() {
    let arena = Arena::with(8 * CHUNK, CHUNK);
    let mut hog = arena.worker("hog");
    hog.ok(&format!("alloc {}", 3 * CHUNK));
    let limited = Client::attach(&Options { limit: Some(2 * CHUNK), ..arena.options("limited") }).unwrap();
    let plain = arena.client("plain");
    let fraction = arena.client("fraction");
    fraction.heap(Place::Host).unwrap().set_limit(CHUNK);
    let cases = [
        (&limited, 3 * CHUNK, "own limit"),
        (&fraction, 2 * CHUNK, "own limit"),
        (&plain, 6 * CHUNK, "of its limit"),
        (&plain, 1 << 42, ""),
    ];
    for (client, bytes, why) in cases {
        let heap = client.heap(Place::Host).unwrap();
        let kept = heap.allocate(CHUNK / 2, Stream::LEGACY).unwrap();
        let Err(HeapError::OutOfMemory(error)) = heap.allocate(bytes, Stream::LEGACY) else { panic!("{bytes} bytes fit") };
        let text = error.to_string();
        assert!(text.contains(why), "{text}");
        assert!(text.contains(&format!("hog (pid {}): 96.00 MiB", hog.said.pid())), "{text}");
        assert!(text.contains(&format!("{} (pid {}): ", client.name(), std::process::id())), "{text}");
        heap.free(kept).unwrap();
        heap.allocate(CHUNK / 2, Stream::LEGACY).and_then(|addr| heap.free(addr)).unwrap();
    }
}

#[test]
fn a_full_device_says_who_holds_what_too() {
    let arena =
        Arena::with_vars(8 * CHUNK, CHUNK, &[("MILLPOND_HOST_FAIL", "create:2:2,create:3:2,create:4:2,create:5:2,create:6:2,create:7:2")]);
    let mut hog = arena.worker("hog");
    hog.ok(&format!("alloc {CHUNK}"));
    let text = arena.client("late").heap(Place::Host).unwrap().allocate(CHUNK, Stream::LEGACY).unwrap_err().to_string();
    assert!(text.contains("the driver says") && text.contains(&format!("Held by hog (pid {}): 32.00 MiB", hog.said.pid())), "{text}");
}

/// Asks until it has a block: what the refusals before said. They end when the driver's failures do, so nothing of one sticks.
fn until_allocated(worker: &mut Worker, bytes: u64) -> Vec<String> {
    let mut said = Vec::new();
    while said.len() < 10 {
        match worker.tell(&format!("alloc {bytes}")) {
            answer if answer.starts_with("ok") => return said,
            answer => said.push(answer),
        }
    }
    panic!("it never has one: {said:?}")
}

/// A call of the driver's that fails otherwise than for lack of memory: in the owner, which makes memory, and in a client, which maps it.
#[test]
fn a_driver_that_fails_says_sizes_and_who_holds_what_and_nothing_sticks() {
    let fails = |call: &str, from: u32| (from..from + 4).map(|n| format!("{call}:{n}:999")).collect::<Vec<_>>().join(",");
    let sizes = |text: &str, hog: &Worker| {
        assert!(text.starts_with("err Internal 24.00 MiB could not be allocated on host memory (HOST-0). "), "{text}");
        assert!(text.contains("This process has 16.00 MiB allocated and 16.00 MiB reserved from millpond's arena."), "{text}");
        assert!(text.contains(&format!("hog (pid {}): 32.00 MiB", hog.said.pid())) && text.contains("(999)"), "{text}");
    };
    let refused = |hog: &mut Worker, late: &mut Worker| {
        hog.ok(&format!("alloc {CHUNK}"));
        late.ok(&format!("alloc {}", 16 * MIB));
        let said = until_allocated(late, 24 * MIB);
        assert!(!said.is_empty(), "nothing failed");
        said.iter().for_each(|text| sizes(text, hog));
        said
    };
    // The hog's chunk is the first that the owner makes, and the small block's the second.
    let arena = Arena::with_vars(8 * CHUNK, CHUNK, &[("MILLPOND_HOST_FAIL", &fails("create", 3))]);
    let (mut hog, mut late) = (arena.worker("hog"), arena.worker("late"));
    for text in refused(&mut hog, &mut late) {
        assert!(text.contains("On HOST-0 the owner has 48.00 MiB reserved of its limit of 256.00 MiB; 24.00 MiB were asked"), "{text}");
    }
    arena.settles_at(CHUNK + 40 * MIB);

    for call in ["map", "set_access"] {
        let arena = Arena::with(8 * CHUNK, CHUNK);
        let mut hog = arena.worker("hog");
        let mut late = arena.worker_with("late", &[("MILLPOND_HOST_FAIL", &fails(call, 2))]);
        for text in refused(&mut hog, &mut late) {
            assert!(text.contains(&format!("could not be mapped, and went back: {call}: ")), "{text}");
        }
        arena.settles_at(CHUNK + 40 * MIB);
        late.ok("fill 1 7");
        late.ok("checkblock 1 7");
    }
}
