//! What recordings hold of hand-offs: every step of a lease on one clock, from both sides, and the deaths.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{eventually, link, Arena, MIB};
use millpond_allocator::record::{Event, Kind};
use millpond_ipc::trace::{read, Process};

#[test]
fn role() {
    common::role();
}

fn events(process: &Process, kind: Kind) -> Vec<Event> {
    process.recording.events.iter().filter(|event| event.kind == kind).copied().collect()
}

#[test]
fn a_hand_off_is_recorded_by_both_and_outlives_their_deaths() {
    let folder = std::env::temp_dir().join(format!("millpond-trace-{}", std::process::id()));
    let arena = Arena::new();
    let vars = [("MILLPOND_TRACE", folder.to_str().unwrap()), ("MILLPOND_TRACE_EVENTS", "1000")];
    let (mut a, mut b) = (arena.worker_with("a", &vars), arena.worker_with("b", &vars));
    let (ab, ba) = link(&mut a, &mut b);

    let n = a.number(&format!("alloc {MIB} 1"));
    a.ok("sync 1");
    a.ok("stall 1");
    a.ok(&format!("fill {n} 7 1"));
    a.ok(&format!("send {ab} {n} 1"));
    a.ok(&format!("free {n}"));
    let i = b.number(&format!("recv {ba} 1"));
    b.fails("Timeout", &format!("ready {i} 5"));
    a.ok("go 1");
    b.ok("sync 1");
    b.ok(&format!("check {i} 7"));
    b.ok(&format!("release {i}"));
    eventually("the lease ends", || a.number("leases") == 0);
    a.die("kill");

    let recordings = || {
        let (found, failed) = read(std::slice::from_ref(&folder));
        assert!(failed.is_empty(), "{failed:?}");
        let named = |name: &str| found.iter().find(|process| process.text.identity.as_ref().is_some_and(|who| who.name == name)).cloned();
        (named("a").expect("a's recording"), named("b").expect("b's recording"))
    };
    eventually("b has seen a die", || !events(&recordings().1, Kind::Died).is_empty());
    let (a, b) = recordings();
    let one = |process: &Process, kind| match events(process, kind)[..] {
        [event] => event,
        ref other => panic!("{kind:?}: {other:?}"),
    };
    let (sent, received, released) = (one(&a, Kind::Send), one(&b, Kind::Receive), one(&b, Kind::Release));
    assert_eq!((sent.value, sent.bytes, sent.addr), (received.value, received.bytes, received.addr), "the same hold on the same bytes");
    assert_eq!(received.value, released.value);
    let (allocated, freed) = (one(&a, Kind::Allocate), one(&a, Kind::Free));
    assert_eq!((allocated.bytes, freed.flags & Event::PENDING), (MIB, Event::PENDING), "freed, and still lent");
    let (reusable, returned) = (one(&a, Kind::Reusable), one(&a, Kind::Returned));
    let waits = events(&b, Kind::Wait);
    assert_eq!(waits.iter().map(|wait| wait.flags).collect::<Vec<_>>(), [0, Event::ON_CPU], "the stream waits, then the thread");
    assert_eq!((waits[0].peer, waits[0].value), (waits[1].peer, waits[1].value), "for the same signal");
    assert!(waits[1].bytes >= 5_000_000, "nanoseconds");
    let order = [one(&a, Kind::Grow), allocated, sent, received, waits[1], released, returned, reusable, one(&b, Kind::Died)];
    let times: Vec<u64> = order.iter().map(|event| event.time).collect();
    assert!(times.is_sorted() && sent.time <= freed.time && freed.time <= released.time, "one clock: {times:?}");
    assert_eq!(order.last().map(|died| died.value), a.text.identity.as_ref().map(|who| who.serial));
    assert_eq!((a.recording.ended, a.text.devices.contains_key(&-1)), (None, true));
    std::fs::remove_dir_all(&folder).unwrap();
}
