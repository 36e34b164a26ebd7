//! Timelines: values never go back, whatever the streams do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{block, is_all, link, outgoing, plainly, sniff, tree, Arena, MIB};
use millpond_allocator::driver::Driver;
use millpond_ipc::client::{Error, Outgoing, Place, ReceiveOptions};
use serde_json::json;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

#[test]
fn role() {
    common::role();
}

#[test]
fn more_streams_than_slots_share_them_and_stay_in_order() {
    let arena = Arena::new();
    let (a, b) = (arena.client("a"), arena.client("b"));
    let (to_b, to_a) = common::channels(&a, &b);
    let driver = a.driver(Place::Host).unwrap();
    let mut seen: HashMap<u64, u64> = HashMap::new();
    let mut used = HashSet::new();
    for n in 0..300_u64 {
        let stream = driver.stream_create().unwrap();
        let addr = block(&a, 4096, 0);
        driver.fill(addr, n as u8, 4096, stream).unwrap();
        a.send(&to_b, tree(), &[Outgoing { stream: Some(stream), ..outgoing(addr, 4096) }], None).unwrap();
        // Every other frame is read off the wire: it names the signal.
        if n % 2 == 0 {
            let frame: serde_json::Value = serde_json::from_slice(&sniff(&to_a)).unwrap();
            let (timeline, value) = (frame["ready"][0][0].as_u64().unwrap(), frame["ready"][0][1].as_u64().unwrap());
            assert!(seen.insert(timeline, value).is_none_or(|before| before < value));
            used.insert(timeline);
        } else {
            let options = ReceiveOptions { wait: true, ..plainly(false) };
            let message = b.receive(&to_a, &options).unwrap();
            assert!(is_all(message.tensors[0].addr, 4096, n as u8));
            b.release(message.tensors[0].import).unwrap();
        }
        a.free(addr).unwrap();
    }
    assert!(used.len() <= 128, "{}", used.len());
}

#[test]
fn one_signal_serves_a_message() {
    let arena = Arena::new();
    let (a, b) = (arena.client("a"), arena.client("b"));
    let (to_b, to_a) = common::channels(&a, &b);
    let driver = a.driver(Place::Host).unwrap();
    let stream = driver.stream_create().unwrap();
    let tensors: Vec<_> = (0..20).map(|_| Outgoing { stream: Some(stream), ..outgoing(block(&a, 512, 3), 512) }).collect();
    a.send(&to_b, tree(), &tensors, None).unwrap();
    let frame: serde_json::Value = serde_json::from_slice(&sniff(&to_a)).unwrap();
    assert_eq!((frame["ready"].as_array().unwrap().len(), frame["tensors"].as_array().unwrap().len()), (1, 20));
}

/// Which signals a tensor needs is said only where that is not the message's only one; it waits for those and no others.
#[test]
fn each_tensor_waits_for_its_own_streams_signal() {
    let arena = Arena::new();
    let (a, b) = (arena.client("a"), arena.client("b"));
    let (to_b, to_a) = common::channels(&a, &b);
    let driver = a.driver(Place::Host).unwrap();
    let streams = [driver.stream_create().unwrap(), driver.stream_create().unwrap()];
    let by = |stream| Outgoing { stream, ..outgoing(block(&a, 512, 3), 512) };
    let (first, second, cpu, nothing) = (by(Some(streams[0])), by(Some(streams[1])), by(None), outgoing(0, 0));
    for (tensors, named) in [
        (vec![cpu, nothing], json!([null, null])),
        (vec![first, first, nothing], json!([null, null, null])),
        (vec![first, cpu, nothing], json!([null, [], null])),
        (vec![first, second, cpu, nothing], json!([[0], [1], [], null])),
    ] {
        a.send(&to_b, tree(), &tensors, None).unwrap();
        let frame: serde_json::Value = serde_json::from_slice(&sniff(&to_a)).unwrap();
        let said: Vec<_> = frame["tensors"].as_array().unwrap().iter().map(|tensor| tensor["r"].clone()).collect();
        assert_eq!(serde_json::Value::from(said), named);
    }
    // Held up by its own stream, not by another's.
    let stall = driver.host().unwrap().stall(streams[1]);
    a.send(&to_b, tree(), &[first, second, cpu], None).unwrap();
    let message = b.receive(&to_a, &ReceiveOptions { lazy: true, ..plainly(false) }).unwrap();
    let [one, two, three] = [0, 1, 2].map(|n| message.tensors[n].import);
    for ready in [one, three] {
        b.import_ready(ready, Some(common::BOUND)).unwrap();
    }
    assert!(matches!(b.import_ready(two, Some(Duration::from_millis(1))), Err(Error::Timeout(_))));
    drop(stall);
    b.import_ready(two, Some(common::BOUND)).unwrap();
}

/// One write for READY, one wait for it, one write for DONE, and once in each call who the stream is. Nothing else, nothing for the
/// tensor's size, and nothing at all to let go.
#[test]
fn a_warm_hand_off_asks_the_driver_for_one_write_one_wait_and_one_write() {
    use millpond_allocator::driver::host::HostCall::{StreamCapture, StreamId, WaitValue, WriteValue};
    let arena = Arena::new();
    let (a, b) = (arena.client("a"), arena.client("b"));
    let (to_b, to_a) = common::channels(&a, &b);
    let (ours, theirs) = (a.driver(Place::Host).unwrap(), b.driver(Place::Host).unwrap());
    let (stream, other) = (ours.stream_create().unwrap(), theirs.stream_create().unwrap());
    let on_other = |_: &_| Some(other);
    let options = ReceiveOptions { stream: &on_other, ..plainly(false) };
    for bytes in [4096, 48 * MIB] {
        let addr = a.heap(Place::Host).unwrap().allocate(bytes, stream).unwrap();
        let tensor = Outgoing { stream: Some(stream), ..outgoing(addr, bytes) };
        let hand_over = || {
            a.send(&to_b, tree(), &[tensor], None).unwrap();
            let message = b.receive(&to_a, &options).unwrap();
            b.release(message.tensors[0].import).unwrap();
        };
        // Mapped, its timelines known, and no READY yet that the CPU could see: the waits are queued.
        let stall = ours.host().unwrap().stall(stream);
        hand_over();
        [&ours, &theirs].into_iter().for_each(|driver| driver.host().unwrap().note_calls());
        hand_over();
        assert_eq!(ours.host().unwrap().take_calls(), [StreamCapture, StreamId, WriteValue], "READY");
        // The DONE is that of the one before: it comes with the next call that is handed the stream.
        assert_eq!(theirs.host().unwrap().take_calls(), [StreamCapture, StreamId, WaitValue, WriteValue], "READY, DONE");
        stall.release();
        common::eventually("the leases end", || a.leases() == 0);
        assert_eq!(
            (ours.host().unwrap().take_calls(), theirs.host().unwrap().take_calls()),
            (vec![], vec![]),
            "to acknowledge costs no call"
        );
        a.free(addr).unwrap();
    }
}

/// A replay would signal again; and to ask a capturing stream who it is ends its capture, on a GPU too.
#[test]
fn nothing_is_sent_or_taken_in_a_capture_and_the_capture_goes_on() {
    let arena = Arena::new();
    let (a, b) = (arena.client("a"), arena.client("b"));
    let (to_b, to_a) = common::channels(&a, &b);
    let (driver, there) = (a.driver(Place::Host).unwrap(), b.driver(Place::Host).unwrap());
    let (here, there) = (driver.host().unwrap(), there.host().unwrap());
    let (stream, reader) = (driver.stream_create().unwrap(), b.driver(Place::Host).unwrap().stream_create().unwrap());
    let addr = block(&a, 4096, 5);
    let tensor = Outgoing { stream: Some(stream), ..outgoing(addr, 4096) };
    here.begin_capture(stream).unwrap();
    let refused = a.send(&to_b, tree(), &[tensor], None).unwrap_err();
    assert!(refused.to_string().contains("captur"), "{refused}");
    assert_eq!(here.end_capture(stream).unwrap().len(), 0, "nothing of ours is in it");
    assert_eq!(a.leases(), 0, "and nothing is held");
    a.send(&to_b, tree(), &[tensor], None).unwrap();

    let message = b.receive(&to_a, &plainly(true)).unwrap();
    let import = message.tensors[0].import;
    there.begin_capture(reader).unwrap();
    let refused = b.open_import(import, Some(reader), false, None).unwrap_err();
    assert!(refused.to_string().contains("captur"), "{refused}");
    assert!(b.record_import_stream(addr, Place::Host, reader).is_err());
    assert_eq!(there.end_capture(reader).unwrap().len(), 0);
    let opened = b.open_import(import, Some(reader), false, None).unwrap();
    there.stream_synchronize(reader).unwrap();
    assert!(is_all(opened, 4096, 5));
    b.release(import).unwrap();
}

/// A graph may be captured on a device before anything of the arena is used there.
#[test]
fn a_device_keeps_to_what_was_said_of_context_events_before_it_was_in_use() {
    use millpond_allocator::driver::host::HostCall::EventRecordContext;
    let arena = Arena::new();
    let a = arena.client("a");
    for (place, allowed) in [(None, false), (Some(Place::Host), true), (Some(Place::Host), false), (None, true), (None, false)] {
        a.set_context_events(place, allowed).unwrap();
        let (heap, driver) = (a.heap(Place::Host).unwrap(), a.driver(Place::Host).unwrap());
        let stream = driver.stream_create().unwrap();
        driver.host().unwrap().note_calls();
        heap.free(heap.allocate(MIB, stream).unwrap()).unwrap();
        heap.empty_cache();
        assert_eq!(driver.host().unwrap().take_calls().contains(&EventRecordContext), allowed, "{place:?}");
    }
    assert!(a.set_context_events(Some(Place::Ordinal(0)), false).is_err(), "the owner serves none");
}

#[test]
fn a_context_that_dies_is_reported_and_its_waiters_are_released() {
    let arena = Arena::new();
    // The second synchronisation fails as after an illegal address: the context is dead, the process is not.
    let mut a = arena.worker_with("a", &[("MILLPOND_HOST_FAIL", "stream_synchronize:2:700")]);
    let mut b = arena.worker("b");
    let (ab, ba) = link(&mut a, &mut b);
    a.ok(&format!("alloc {MIB} 1"));
    a.ok("sync 1");
    a.ok("stall 1");
    a.ok("fill 0 1 1");
    a.ok(&format!("send {ab} 0 1"));
    b.ok(&format!("recv {ba} 1"));
    b.ask("ready 0 60000");
    a.fails("Test", "sync 1");
    assert!(b.answer().starts_with("err PeerDied"));
    b.ok("sync 1");
    common::eventually("the ledger says so", || arena.row("a").is_some_and(|row| row.state == "faulted"));
    // Its memory is in quarantine until it ends.
    b.ok("release 0");
    assert!(arena.row("a").unwrap().reserved >= MIB);
    a.die("kill");
    arena.settles_at(0);
}

#[test]
fn a_reader_whose_context_dies_keeps_what_its_work_could_reach_until_it_ends() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker_with("b", &[("MILLPOND_HOST_FAIL", "stream_synchronize:2:700")]));
    let (ab, ba) = link(&mut a, &mut b);
    a.ok(&format!("alloc {MIB} 1"));
    a.ok("fill 0 1");
    a.ok(&format!("send {ab} 0"));
    b.ok(&format!("recv {ba} 1"));
    b.ok("sync 1");
    b.ok("stall 1");
    b.ok("touch 0 2 1");
    b.fails("Test", "sync 1");
    common::eventually("the ledger says so", || arena.row("b").is_some_and(|row| row.state == "faulted"));
    a.fails("Timeout", "waitdone 0 - 50");
    assert_eq!(a.number("leases"), 1, "it has not let go");
    b.fails("DriverUnavailable", &format!("alloc {MIB}"));
    // It lets go, but there is no telling when its work is over.
    b.ok("release 0");
    a.fails("Timeout", "waitdone 0 - 50");
    assert_eq!(a.number("leases"), 1);
    b.die("kill");
    common::eventually("the lease ends", || a.number("leases") == 0);
    a.ok("waitdone 0 - 1000");
    a.ok("checkblock 0 1");
    a.ok(&format!("close {ab}"));
    a.ok("free 0");
    a.ok("trim");
    arena.settles_at(0);
}

#[test]
fn one_wait_serves_a_message() {
    let arena = Arena::new();
    // A second wait of the receiver's would fail.
    let (mut a, mut b) = (arena.worker("a"), arena.worker_with("b", &[("MILLPOND_HOST_FAIL", "wait_value:2:999")]));
    let (ab, ba) = link(&mut a, &mut b);
    a.ok("alloc 4096 1");
    a.ok("stall 1");
    a.ok("fill 0 9 1");
    a.ok(&format!("sendmany {ab} 0 20 1"));
    let imports = b.ok(&format!("recv {ba} 1"));
    assert_eq!(imports.split_whitespace().count(), 20);
    assert_eq!(b.number("idle 1"), 0);
    a.ok("go 1");
    b.ok("sync 1");
    for n in 0..20 {
        b.ok(&format!("check {n} 9"));
        b.ok(&format!("release {n}"));
    }
    // What comes later is waited for again.
    a.ok("stall 1");
    a.ok(&format!("send {ab} 0 1"));
    b.fails("DriverUnavailable", &format!("recv {ba} 1"));
}
