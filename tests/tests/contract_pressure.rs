//! Many transfers, many clients, full tables; memory that goes back while others map it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{block, eventually, link, outgoing, plainly, tree, Arena, Worker, BOUND, MIB};
use millpond_allocator::driver::Stream;
use millpond_allocator::heap::HeapError;
use millpond_ipc::client::{Client, Error, Options, Place};
use millpond_ipc::owner::Config;
use std::sync::Barrier;
use std::time::{Duration, Instant};

#[test]
fn role() {
    common::role();
}

#[test]
fn what_was_given_back_a_moment_ago_is_at_hand_and_then_the_drivers() {
    let arena = Arena::with(1 << 30, 16 * MIB);
    let client = arena.client("a");
    let heap = client.heap(Place::Host).unwrap();
    assert_eq!(client.at_hand(Place::Host), 0);
    let addr = heap.allocate(64 * MIB, Stream::LEGACY).unwrap();
    assert_eq!(client.at_hand(Place::Host), 0, "what it has is not what it could have");
    heap.free(addr).unwrap();
    assert_eq!((heap.empty_cache(), heap.reserved_bytes()), (64 * MIB, 0));
    // On its way to the owner first, then with it; never neither.
    assert_eq!(client.at_hand(Place::Host), 64 * MIB);
    eventually("the driver's", || client.at_hand(Place::Host) == 0);
    assert_eq!(client.at_hand(Place::Ordinal(7)), 0, "no such device");
}

/// ComfyUI's formula, what may be reserved and what is cached, is what can be allocated, to the byte.
#[test]
fn the_room_is_what_the_least_of_the_limits_leaves() {
    let arena = Arena::with(256 * MIB, 16 * MIB);
    let other = arena.client("other");
    let held = other.heap(Place::Host).unwrap().allocate(64 * MIB, Stream::LEGACY).unwrap();
    for (own, fraction, expected) in
        [(None, u64::MAX, 192), (Some(96 * MIB), u64::MAX, 96), (Some(96 * MIB), 48 * MIB, 48), (None, 304 * MIB, 192)]
    {
        let client = Client::attach(&Options { limit: own, ..arena.options("limited") }).unwrap();
        let expected = expected * MIB;
        assert_eq!(client.room(Place::Host), Some(own.unwrap_or(192 * MIB)), "before the device is in use");
        let heap = client.heap(Place::Host).unwrap();
        heap.set_limit(fraction);
        let formula = || client.room(Place::Host).unwrap() + heap.reserved_bytes() - heap.stats().all.active_bytes.current;
        assert_eq!(formula(), expected);
        let kept = heap.allocate(16 * MIB, Stream::LEGACY).unwrap();
        let freed = heap.allocate(16 * MIB, Stream::LEGACY).unwrap();
        heap.free(freed).unwrap();
        assert_eq!((formula(), heap.reserved_bytes()), (expected - 16 * MIB, 32 * MIB), "cached");
        heap.empty_cache();
        assert_eq!(heap.reserved_bytes(), 16 * MIB);
        // On its way to the owner, or there.
        assert_eq!(formula(), expected - 16 * MIB, "given back");
        let mut blocks = vec![kept];
        while let Ok(block) = heap.allocate(16 * MIB, Stream::LEGACY) {
            blocks.push(block);
        }
        assert_eq!((blocks.len() as u64 * 16 * MIB, formula()), (expected, 0), "{own:?} {fraction}");
        blocks.into_iter().for_each(|block| heap.free(block).unwrap());
        drop(heap);
        client.detach();
        arena.settles_at(64 * MIB);
    }
    other.heap(Place::Host).unwrap().free(held).unwrap();
    assert_eq!(other.room(Place::Ordinal(7)), None, "no such device");
}

#[test]
fn sixty_four_clients_race_for_the_last_gib() {
    let arena = Arena::with(1 << 30, 16 * MIB);
    let clients: Vec<_> = (0..64).map(|n| arena.client(&format!("c{n}"))).collect();
    assert!(matches!(Client::attach(&arena.options("one too many")), Err(Error::Refused(_))));
    let start = Barrier::new(64);
    let got: u64 = std::thread::scope(|scope| {
        let racers: Vec<_> = clients
            .iter()
            .map(|client| {
                scope.spawn(|| {
                    let heap = client.heap(Place::Host).unwrap();
                    start.wait();
                    let mut got = 0;
                    while heap.allocate(16 * MIB, Stream::LEGACY).is_ok() {
                        got += 16 * MIB;
                    }
                    got
                })
            })
            .collect();
        racers.into_iter().map(|racer| racer.join().unwrap()).sum()
    });
    assert_eq!(got, 1 << 30, "all of it, and no more");
    assert_eq!(arena.books(), (1 << 30, 0, 0));
    let error = clients[0].heap(Place::Host).unwrap().allocate(16 * MIB, Stream::LEGACY).unwrap_err();
    assert!(error.to_string().contains("reserved of its limit"), "{error}");
}

/// Threads of one process read each other's answers, and the owner asks them to give back while they wait for it.
#[test]
fn many_threads_of_two_clients_grow_while_the_owner_asks_for_it_back() {
    let arena = Arena::with(256 * MIB, 16 * MIB);
    let clients = [arena.client("a"), arena.client("b")];
    let heaps = clients.each_ref().map(|client| client.heap(Place::Host).unwrap());
    let start = std::time::Instant::now();
    let got: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16_u64)
            .map(|n| {
                let heap = &heaps[n as usize % 2];
                scope.spawn(move || {
                    let fits = |round: u64| match heap.allocate((8 + (n * 7 + round * 5) % 40) * MIB, Stream::LEGACY) {
                        Ok(addr) => {
                            heap.free(addr).unwrap();
                            if round.is_multiple_of(3) {
                                heap.empty_cache();
                            }
                            true
                        }
                        // All of it is others' just now.
                        Err(HeapError::OutOfMemory(_)) => false,
                        Err(error) => panic!("{error}"),
                    };
                    (0..20).filter(|round| fits(*round)).count() as u64
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(got > 100, "{got} of 320");
    assert!(start.elapsed() < BOUND, "somebody waited for nothing: {:?}", start.elapsed());
    heaps.iter().for_each(|heap| _ = heap.empty_cache());
    arena.settles_at(0);
}

#[test]
fn a_thousand_transfers_leave_nothing_behind() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let mut flat = (0, 0, 0);
    for k in 0..1_000 {
        let n = a.number(&format!("alloc {MIB} 1"));
        a.ok(&format!("fill {n} {} 1", k % 251));
        a.ok(&format!("send {ab} {n} 1"));
        a.ok(&format!("free {n}"));
        let i = b.number(&format!("recv {ba}"));
        b.ok(&format!("check {i} {}", k % 251));
        b.ok(&format!("release {i}"));
        let now = |a: &mut Worker, b: &mut Worker| (a.number("fds"), b.number("fds"), b.number("vm"));
        match k {
            100 => flat = now(&mut a, &mut b),
            999 => {
                let end = now(&mut a, &mut b);
                assert_eq!((end.0, end.1), (flat.0, flat.1), "descriptors");
                assert!(end.2 <= flat.2 + 4096, "address space: {} kB, then {} kB", flat.2, end.2);
            }
            _ => {}
        }
    }
    assert!(arena.row("a").unwrap().reserved <= 64 * MIB, "blocks come back while it goes on: {}", arena.ledger());
}

/// Bytes of this process's address space.
fn address_space() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().next().unwrap().parse::<usize>().unwrap() * rustix::param::page_size()
}

#[test]
fn holds_are_used_again_and_a_full_table_has_a_name() {
    let arena = Arena::new();
    let (a, b) = (arena.client("a"), arena.client("b"));
    let (to_b, to_a) = common::channels(&a, &b);
    let addr = block(&a, 512, 1);
    let pass = || {
        a.send(&to_b, tree(), &[outgoing(addr, 512)], None)?;
        b.receive(&to_a, &plainly(true)).map(|message| message.tensors[0].import)
    };
    let mut addresses = 0;
    for k in 0..20_000 {
        b.release(pass().unwrap()).unwrap();
        if k == 1000 {
            addresses = address_space();
        }
    }
    assert!(address_space() <= addresses + (4 << 20), "imports take address space: {addresses} bytes, then {}", address_space());
    let held: Vec<u64> = (0..8192).map(|_| pass().unwrap()).collect();
    let error = pass().unwrap_err();
    assert!(matches!(&error, Error::OutOfMemory(why) if why.contains("8192")), "{error}");
    b.release(held[17]).unwrap();
    let one = pass().unwrap();
    held.into_iter().enumerate().filter(|(n, _)| *n != 17).for_each(|(_, import)| b.release(import).unwrap());
    assert_eq!(a.leases(), 1);
    b.release(one).unwrap();
    eventually("the lease ends", || a.leases() == 0);
}

#[test]
fn what_is_given_back_is_dropped_by_those_who_map_it() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    a.ok(&format!("alloc {}", 32 * MIB));
    a.ok("fill 0 1");
    a.ok(&format!("send {ab} 0"));
    b.ok(&format!("recv {ba}"));
    // While it is read it cannot be given back.
    a.ok("free 0");
    assert_eq!(a.number("trim"), 0);
    b.ok("check 0 1");
    b.ok("release 0");
    eventually("the lease ends", || a.number("leases") == 0);
    // A reader that is stopped keeps its mapping, and the ledger says so.
    b.said.signal(libc::SIGSTOP);
    a.ok("trim");
    eventually("retired", || arena.books() == (32 * MIB, 32 * MIB, 0));
    b.said.signal(libc::SIGCONT);
    arena.settles_at(0);
}

#[test]
fn idle_clients_give_way() {
    let arena = Arena::with(256 * MIB, 32 * MIB);
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    a.ok(&format!("alloc {}", 192 * MIB));
    a.ok("free 0");
    b.ok(&format!("alloc {}", 192 * MIB));
    assert!(arena.row("a").unwrap().reserved <= 64 * MIB);
}

fn bound() -> Duration {
    Duration::from_millis(Config::default().trim_timeout_ms)
}

/// How long an allocation takes that must be refused.
fn refused(worker: &mut Worker, bytes: u64) -> Duration {
    let start = Instant::now();
    worker.fails("OutOfMemory", &format!("alloc {bytes}"));
    start.elapsed()
}

/// The first that is refused waits for one that does not answer; who comes later does not.
fn assert_delays(first: &mut Worker, later: &mut Worker, bytes: u64) {
    let took = refused(first, bytes);
    assert!(took >= bound(), "it was not asked, or not waited for: {took:?}");
    assert!(took < bound() + Duration::from_secs(2), "{took:?}");
    assert_waits_for_nobody(later, bytes);
}

/// The best of a few, since the machine may be busy.
fn assert_waits_for_nobody(worker: &mut Worker, bytes: u64) {
    let best = (0..3).map(|_| refused(worker, bytes)).min().unwrap();
    assert!(best < bound(), "{best:?}");
}

#[test]
fn a_stopped_client_delays_nobody_beyond_the_bound() {
    let arena = Arena::with(256 * MIB, 32 * MIB);
    let (mut a, mut b, mut c) = (arena.worker("a"), arena.worker("b"), arena.worker("c"));
    a.ok(&format!("alloc {}", 192 * MIB));
    a.ok("free 0");
    a.said.signal(libc::SIGSTOP);
    assert_delays(&mut b, &mut c, 192 * MIB);
    // What there is without it is had.
    b.ok(&format!("alloc {}", 64 * MIB));
    assert_waits_for_nobody(&mut b, MIB);
    // When it goes on it does as it was asked.
    a.said.signal(libc::SIGCONT);
    eventually("it gives way", || arena.row("a").unwrap().reserved <= 64 * MIB);
    c.ok(&format!("alloc {}", 128 * MIB));
}

#[test]
fn a_stopped_reader_of_what_was_given_back_delays_nobody_beyond_the_bound() {
    let arena = Arena::with(256 * MIB, 32 * MIB);
    let (mut a, mut b, mut c) = (arena.worker("a"), arena.worker("b"), arena.worker("c"));
    let (ab, ba) = link(&mut a, &mut b);
    a.ok(&format!("alloc {}", 128 * MIB));
    a.ok(&format!("send {ab} 0"));
    b.ok(&format!("recv {ba}"));
    b.ok("release 0");
    eventually("the lease ends", || a.number("leases") == 0);
    b.said.signal(libc::SIGSTOP);
    a.ok("free 0");
    a.ok("trim");
    eventually("retired", || arena.books() == (128 * MIB, 128 * MIB, 0));
    assert_delays(&mut c, &mut a, 192 * MIB);
    b.said.signal(libc::SIGCONT);
    arena.settles_at(0);
    c.ok(&format!("alloc {}", 192 * MIB));
}
