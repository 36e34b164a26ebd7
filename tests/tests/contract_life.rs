//! A lease's life, step by step, between processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{channels, eventually, link, outgoing, tree, Arena, BOUND, MIB};
use millpond_allocator::driver::Stream;
use millpond_ipc::client::{Place, ReceiveOptions};
use std::time::Duration;

#[test]
fn role() {
    common::role();
}

#[test]
fn a_value_goes_each_way_and_the_block_comes_back() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let pass = |from: &mut common::Worker, out: u64, to: &mut common::Worker, back: u64, byte: u8| {
        let n = from.number(&format!("alloc {MIB}"));
        from.ok(&format!("fill {n} {byte}"));
        from.ok(&format!("send {out} {n}"));
        from.ok(&format!("free {n}"));
        let i = to.number(&format!("recv {back}"));
        to.ok(&format!("check {i} {byte}"));
        assert_eq!(from.number("leases"), 1);
        to.ok(&format!("release {i}"));
        eventually("the lease ends", || from.number("leases") == 0);
    };
    pass(&mut a, ab, &mut b, ba, 7);
    pass(&mut b, ba, &mut a, ab, 8);
}

#[test]
fn a_forwarded_block_is_pinned_until_its_last_reader() {
    let arena = Arena::new();
    let (mut a, mut parent, mut b) = (arena.worker("a"), arena.worker("parent"), arena.worker("b"));
    let (ap, pa) = link(&mut a, &mut parent);
    let (pb, bp) = link(&mut parent, &mut b);
    let n = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("fill {n} 9"));
    a.ok(&format!("send {ap} {n}"));
    a.ok(&format!("free {n}"));
    let i = parent.number(&format!("recv {pa} lazy"));
    parent.ok(&format!("forward {pb} {i}"));
    parent.ok(&format!("release {i}"));
    // Both have let go; the block is b's alone, though b has not even received it.
    assert_eq!(a.number("leases"), 1);
    let other = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("fill {other} 1"));
    let j = b.number(&format!("recv {bp}"));
    b.ok(&format!("check {j} 9"));
    assert_eq!(a.number("leases"), 1);
    b.ok(&format!("release {j}"));
    eventually("the lease ends", || a.number("leases") == 0);
    // A parent that only passes on has mapped nothing.
    assert_eq!(parent.number("imported"), 0);
}

#[test]
fn a_value_may_come_back_to_its_producer() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let n = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("fill {n} 5"));
    let addr = a.ok(&format!("addr {n}"));
    a.ok(&format!("send {ab} {n}"));
    a.ok(&format!("free {n}"));
    let i = b.number(&format!("recv {ba}"));
    b.ok(&format!("forward {ba} {i}"));
    b.ok(&format!("release {i}"));
    let j = a.number(&format!("recv {ab} lazy"));
    assert_eq!(a.ok(&format!("open {j}")), addr, "it is where it always was");
    a.ok(&format!("check {j} 5"));
    assert_eq!(a.number("leases"), 1);
    a.ok(&format!("release {j}"));
    eventually("the lease ends", || a.number("leases") == 0);
}

#[test]
fn one_export_is_read_by_eight() {
    let arena = Arena::new();
    let mut a = arena.worker("a");
    let n = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("fill {n} 3"));
    let mut readers: Vec<_> = (0..8)
        .map(|k| {
            let mut reader = arena.worker(&format!("r{k}"));
            let (out, back) = link(&mut a, &mut reader);
            a.ok(&format!("send {out} {n}"));
            (reader, back)
        })
        .collect();
    a.ok(&format!("free {n}"));
    assert_eq!(a.number("leases"), 1, "one lease, eight holds");
    for (reader, back) in &mut readers {
        let i = reader.number(&format!("recv {back}"));
        reader.ok(&format!("check {i} 3"));
        assert_eq!(a.number("leases"), 1);
        reader.ok(&format!("release {i}"));
    }
    eventually("the last one ends it", || a.number("leases") == 0);
}

#[test]
fn parts_of_a_block_keep_their_places() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    // Many small ones in one chunk, each with a pattern of its own.
    for (k, bytes) in [1, 511, 512, 513, 4095, 65536, 2 * MIB].into_iter().enumerate() {
        let n = a.number(&format!("alloc {bytes}"));
        a.ok(&format!("fill {n} {}", k + 1));
        a.ok(&format!("send {ab} {n}"));
        a.ok(&format!("free {n}"));
    }
    for k in 0..7 {
        let i = b.number(&format!("recv {ba}"));
        b.ok(&format!("check {i} {}", k + 1));
    }
    let n = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("fill {n} 77"));
    a.ok(&format!("sendpart {ab} {n} 1000 48"));
    let i = b.number(&format!("recv {ba}"));
    b.ok(&format!("check {i} 77"));
    a.fails("InvalidArgument", &format!("sendpart {ab} {n} 1000 {MIB}"));
    a.fails("InvalidArgument", &format!("sendpart {ab} {n} 1000 {}", u64::MAX - 900));
}

#[test]
fn other_peoples_memory_is_copied_and_the_copy_is_the_leases() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    assert_eq!(a.ok(&format!("copy {ab} 6 {MIB}")), "1", "copied");
    let i = b.number(&format!("recv {ba}"));
    b.ok(&format!("check {i} 6"));
    b.ok(&format!("release {i}"));
    eventually("the lease ends", || a.number("leases") == 0);
    eventually("the copy is free", || arena.row("a").unwrap().blocks == 0);
}

#[test]
fn ready_is_waited_for_by_stream_and_by_cpu() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let n = a.number(&format!("alloc {MIB} 1"));
    a.ok(&format!("fill {n} 1 1"));
    a.ok("sync 1");
    a.ok("stall 1");
    a.ok(&format!("fill {n} 2 1"));
    a.ok(&format!("send {ab} {n} 1"));
    a.ok(&format!("send {ab} {n} 1"));
    // On a stream: the receive is at once, the stream waits.
    let i = b.number(&format!("recv {ba} 4"));
    assert_eq!(b.number("idle 4"), 0);
    // On the CPU: the receive waits, until its time is up; then nothing of the message is held.
    b.fails("Timeout", &format!("recv {ba} plain 100"));
    assert_eq!(b.number("imported"), MIB);
    // A value that is passed on unready is unready where it comes to.
    let mut c = arena.worker("c");
    let (bc, cb) = link(&mut b, &mut c);
    b.ok(&format!("forward {bc} {i}"));
    let k = c.number(&format!("recv {cb} lazy"));
    c.fails("Timeout", &format!("ready {k} 50"));
    a.ok("go 1");
    b.ok("sync 4");
    b.ok(&format!("check {i} 2"));
    c.ok(&format!("ready {k}"));
    c.ok(&format!("open {k}"));
    c.ok(&format!("check {k} 2"));
}

/// A receiver that does not read: a message that nothing has left of is not held for it, and the channel goes on.
#[test]
fn a_send_that_times_out_is_undone_and_the_channel_goes_on() {
    let arena = Arena::new();
    let (a, b) = (arena.client("a"), arena.client("b"));
    let (to_b, to_a) = channels(&a, &b);
    let addr = a.heap(Place::Host).unwrap().allocate(MIB, Stream::LEGACY).unwrap();
    let send = |ms| a.send(&to_b, tree(), &[outgoing(addr, MIB)], Some(Duration::from_millis(ms)));
    let mut sent = 0;
    let error = loop {
        match send(20) {
            Ok(_) => sent += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), "Timeout", "{error}");
    let received = |_| {
        let options = ReceiveOptions { timeout: Some(BOUND), lazy: true, wait: false, stream: &|_| None };
        b.release(b.receive(&to_a, &options).unwrap().tensors[0].import).unwrap();
    };
    (0..sent).for_each(received);
    eventually("nothing is held for the message that did not leave", || a.leases() == 0);
    send(5_000).unwrap();
    received(0);
    eventually("nothing is held", || a.leases() == 0);
}

#[test]
fn a_block_is_not_handed_out_before_the_consumers_stream_is_past() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let n = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("fill {n} 1"));
    a.ok(&format!("send {ab} {n}"));
    a.ok(&format!("free {n}"));
    let i = b.number(&format!("recv {ba} 1"));
    b.ok("stall 1");
    b.ok(&format!("touch {i} 2 1"));
    // Letting go does not block, whatever the stream does.
    b.ok(&format!("release {i}"));
    std::thread::sleep(Duration::from_millis(100)); // many ticks of both
    assert_eq!(a.number("leases"), 1);
    let other = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("fill {other} 9"));
    assert_ne!(a.ok(&format!("addr {n}")), a.ok(&format!("addr {other}")), "still the consumer's");
    b.ok("go 1");
    eventually("the lease ends", || a.number("leases") == 0);
    a.ok(&format!("checkblock {other} 9"));
}

#[test]
fn done_is_every_stream_that_was_recorded() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let n = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("send {ab} {n}"));
    let i = b.number(&format!("recv {ba} 1"));
    b.ok("stall 2");
    b.ok(&format!("touch {i} 4 2"));
    b.ok(&format!("release {i}"));
    b.ok("sync 1");
    a.fails("Timeout", &format!("waitdone {n} - 60"));
    b.ok("go 2");
    a.ok(&format!("waitdone {n} - 10000"));
    a.ok(&format!("checkblock {n} 4"));
}

#[test]
fn wait_done_holds_the_producers_stream() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let n = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("fill {n} 1"));
    a.ok(&format!("send {ab} {n}"));
    let i = b.number(&format!("recv {ba} 1"));
    let j = b.number(&format!("alloc {MIB} 1"));
    b.ok("stall 1");
    b.ok(&format!("touch {i} 2 1"));
    b.ok(&format!("release {i}"));
    // The DONE is queued by the next call that is handed the stream.
    b.ok(&format!("send {ba} {j} 1"));
    a.ok(&format!("waitdone {n} 5"));
    a.ok(&format!("fill {n} 3 5"));
    assert_eq!(a.number("idle 5"), 0, "it stands behind the consumer");
    b.ok("go 1");
    a.ok("sync 5");
    a.ok(&format!("checkblock {n} 3"));
}

#[test]
fn acks_of_others_change_nothing() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let n = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("send {ab} {n}"));
    a.ok(&format!("send {ab} {n}"));
    let (i, j) = (b.number(&format!("recv {ba}")), b.number(&format!("recv {ba}")));
    b.ok(&format!("release {i}"));
    b.fails("InvalidArgument", &format!("release {i}"));
    assert_eq!(a.number("leases"), 1, "the second hold is not ended by the first's second ack");
    b.ok(&format!("release {j}"));
    eventually("the lease ends", || a.number("leases") == 0);
}

/// Its chunks are one run on the wire; parts of it, what is passed on, and what lies over a chunk that was given back in between
/// are named as what they are.
#[test]
fn a_value_over_many_chunks_goes_whole_and_in_parts() {
    const CHUNK: u64 = 2 * MIB;
    let arena = Arena::with(4 << 30, CHUNK);
    let (mut a, mut b, mut c) = (arena.worker("a"), arena.worker("b"), arena.worker("c"));
    let (ab, ba) = link(&mut a, &mut b);
    let (bc, cb) = link(&mut b, &mut c);
    let n = a.number(&format!("alloc {}", 64 * CHUNK));
    a.ok(&format!("fill {n} 5"));
    a.ok(&format!("send {ab} {n}"));
    let whole = b.number(&format!("recv {ba}"));
    b.ok(&format!("check {whole} 5"));
    // Over one seam, over several, from seam to seam, the last byte: each mapped anew by another, who has not seen the rest.
    for (at, bytes) in [(CHUNK - 1, 2), (CHUNK / 2, 5 * CHUNK), (7 * CHUNK, 9 * CHUNK), (64 * CHUNK - 1, 1), (0, 64 * CHUNK)] {
        a.ok(&format!("sendpart {ab} {n} {at} {bytes}"));
        let part = b.number(&format!("recv {ba}"));
        b.ok(&format!("check {part} 5"));
        b.ok(&format!("forward {bc} {part}"));
        let far = c.number(&format!("recv {cb}"));
        c.ok(&format!("check {far} 5"));
        c.ok(&format!("release {far}"));
        b.ok(&format!("release {part}"));
    }
    b.ok(&format!("release {whole}"));
    a.ok(&format!("free {n}"));
    eventually("the lease ends", || a.number("leases") == 0);
    // Some of the addresses stay, the others come back under later epochs: what then lies over both is several runs.
    a.ok("trim");
    let small = a.number(&format!("alloc {CHUNK}"));
    let more = a.number(&format!("alloc {}", 3 * CHUNK));
    a.ok(&format!("free {small}"));
    a.ok(&format!("fill {more} 6"));
    a.ok("trim");
    let again = a.number(&format!("alloc {}", 16 * CHUNK));
    a.ok(&format!("fill {again} 7"));
    for (block, byte) in [(more, 6), (again, 7)] {
        a.ok(&format!("send {ab} {block}"));
        let i = b.number(&format!("recv {ba}"));
        b.ok(&format!("check {i} {byte}"));
        b.ok(&format!("release {i}"));
    }
}

#[test]
fn a_read_only_lease_is_mapped_so() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let n = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("fill {n} 1"));
    a.ok(&format!("send {ab} {n} - ro"));
    a.ok(&format!("send {ab} {n}"));
    let (i, j) = (b.number(&format!("recv {ba} 1")), b.number(&format!("recv {ba} 1")));
    assert_eq!((b.number(&format!("readonly {i}")), b.number(&format!("readonly {j}"))), (1, 0));
    b.ok(&format!("check {i} 1"));
    b.fails("Test", &format!("touch {i} 2 1"));
    b.ok(&format!("touch {j} 2 1"));
    b.ok("sync 1");
    b.ok(&format!("check {i} 2"));
    // Passed on, it stays so; sent back, its producer may still write.
    b.ok(&format!("forward {ba} {i}"));
    let k = a.number(&format!("recv {ab}"));
    assert_eq!(a.number(&format!("readonly {k}")), 1);
    a.ok(&format!("checkblock {n} 2"));
}

#[test]
fn a_forked_child_lets_go_of_nothing() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let n = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("fill {n} 1"));
    a.ok(&format!("send {ab} {n}"));
    let i = b.number(&format!("recv {ba}"));
    assert_eq!(b.number("forkend"), 0);
    assert_eq!(a.number("forkend"), 0);
    b.ok(&format!("check {i} 1"));
    assert_eq!(a.number("leases"), 1);
    a.ok(&format!("send {ab} {n}"));
    b.ok(&format!("recv {ba}"));
}

#[test]
fn what_is_not_received_is_let_go_of_when_the_channel_ends() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let n = a.number(&format!("alloc {MIB}"));
    (0..3).for_each(|_| drop(a.ok(&format!("send {ab} {n}"))));
    assert_eq!(a.number("leases"), 1);
    b.ok(&format!("close {ba}"));
    eventually("the lease ends", || a.number("leases") == 0);
    a.fails("Closed", &format!("send {ab} {n}"));
    assert_eq!(a.number("leases"), 0, "a send that fails holds nothing");
}

#[test]
fn detaching_lets_go_of_what_is_not_in_use() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let n = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("fill {n} 4"));
    a.ok(&format!("send {ab} {n}"));
    let i = b.number(&format!("recv {ba}"));
    // With a live lease: its chunk stays until its reader is done.
    a.ok("detach");
    a.die("exit");
    b.ok(&format!("check {i} 4"));
    b.ok(&format!("release {i}"));
    arena.settles_at(0);
    b.ok("detach");
    b.fails("Closed", "alloc 512");
    b.fails("Closed", "connect a");
    b.ok("detach");
    eventually("b is gone, though its process is not", || arena.row("b").is_none());
}

#[test]
fn detaching_unmaps_nothing_under_queued_work() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let n = a.number(&format!("alloc {MIB}"));
    a.ok(&format!("fill {n} 4"));
    a.ok(&format!("send {ab} {n}"));
    let i = b.number(&format!("recv {ba} 1"));
    b.ok("stall 1");
    b.ok(&format!("touch {i} 2 1"));
    b.ok(&format!("release {i}"));
    // The message's signal is DONE for what was let go of, and stands behind the stall.
    let m = b.number("alloc 512");
    b.ok(&format!("send {ba} {m} 1"));
    b.ok("detach");
    assert_eq!(a.number("leases"), 1);
    b.ok("go 1");
    b.ok("sync 1");
    eventually("the write is over", || a.number("leases") == 0);
    a.ok(&format!("checkblock {n} 2"));
}

#[test]
fn who_opens_a_device_while_another_thread_leaves_has_it_or_is_told() {
    let arena = Arena::new();
    for n in 0..40 {
        let client = arena.client(&format!("leaving {n}"));
        let opened = std::thread::scope(|scope| {
            let thread = scope.spawn(|| client.heap(Place::Host).map_err(|error| error.code()));
            client.detach();
            thread.join().unwrap()
        });
        match opened {
            Ok(heap) => assert_eq!(client.heap_if_open(Place::Host).map(|open| std::sync::Arc::ptr_eq(&open, &heap)), Some(true)),
            Err(code) => assert_eq!((code, client.heap_if_open(Place::Host).is_none()), ("Closed", true)),
        }
    }
    eventually("all are gone", || arena.ledger().devices[0].clients.is_empty());
}
