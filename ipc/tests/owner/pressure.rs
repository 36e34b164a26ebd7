//! Lack of memory: others are asked to give back, with a bound.

use std::time::{Duration, Instant};

use millpond_ipc::owner::Config;
use millpond_ipc::wire::{Answer, Ask, Reason, Request, Role};

use crate::puppet::Puppet;
use crate::raw::*;

#[test]
fn an_idle_client_is_asked_to_trim_and_the_growth_is_granted() {
    let served = Served::start(Config { trim_timeout_ms: 20_000, ..config() });
    let (mut idle, mut busy) = (served.attach("idle"), served.attach("busy"));
    let chunks = idle.grow(64 * MIB);
    let rest = busy.grow(192 * MIB);
    busy.say_used(192 * MIB);
    let call = busy.post(Request::Grow { device: 0, bytes: 8 * MIB, press: true });
    let (ask, Ask::Trim { device, bytes }) = idle.next_ask() else { panic!() };
    assert_eq!((device, bytes), (0, 8 * MIB));
    idle.release(&chunks);
    idle.answered(ask, 64 * MIB);
    let (Answer::Granted { chunks }, _) = busy.answer(call) else { panic!() };
    assert_eq!(chunks[0].bytes, 8 * MIB);
    assert_sums(&busy.ledger());
    drop(rest);
}

#[test]
fn a_parent_that_listens_is_told_of_pressure_and_of_refusal() {
    let served = Served::start(Config { trim_timeout_ms: 20_000, ..config() });
    let mut parent = served.attach_as("main", Role::Parent);
    let (mut idle, mut busy) = (served.attach("idle"), served.attach("busy"));
    assert!(matches!(idle.call(Request::Listen).0, Answer::Refused { reason: Reason::Refused, .. }), "a worker is told of its own alone");
    assert_eq!(parent.call(Request::Listen).0, Answer::Done);
    let chunks = idle.grow(64 * MIB);
    busy.grow(192 * MIB);
    busy.say_used(192 * MIB);
    let call = busy.post(Request::Grow { device: 0, bytes: 8 * MIB, press: true });
    let told = |ask| match ask {
        Ask::Pressure { device: 0, by, asked, limit, reserved, refused } => (by.name, asked / MIB, limit / MIB, reserved / MIB, refused),
        ask => panic!("{ask:?}"),
    };
    assert_eq!(told(parent.next_ask().1), ("busy".to_owned(), 8, 256, 256, false));
    let (ask, Ask::Trim { .. }) = idle.next_ask() else { panic!() };
    idle.release(&chunks);
    idle.answered(ask, 64 * MIB);
    assert!(matches!(busy.answer(call).0, Answer::Granted { .. }));
    let call = busy.post(Request::Grow { device: 0, bytes: 512 * MIB, press: true });
    assert!(matches!(busy.answer(call).0, Answer::Refused { .. }));
    assert_eq!(told(parent.next_ask().1), ("busy".to_owned(), 512, 256, 200, true));
    let counts = |slot| busy.ledger_of(slot).unwrap().counts;
    assert_eq!((counts(busy.slot()).growths, counts(busy.slot()).refusals, counts(busy.slot()).trims), (2, 1, 0));
    assert_eq!((counts(idle.slot()).trims, counts(idle.slot()).trimmed_bytes), (1, 64 * MIB));
}

#[test]
fn where_nobody_has_slack_the_refusal_comes_at_once() {
    let served = Served::start(Config { trim_timeout_ms: 20_000, ..config() });
    let mut client = served.attach("only");
    client.grow(256 * MIB);
    let start = Instant::now();
    let (answer, _) = client.call(Request::Grow { device: 0, bytes: UNIT, press: true });
    assert!(matches!(answer, Answer::Refused { reason: Reason::OutOfMemory, .. }), "{answer:?}");
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_client_that_answers_that_it_has_nothing_is_not_waited_for() {
    let served = Served::start(Config { trim_timeout_ms: 20_000, ..config() });
    let (mut idle, mut busy) = (served.attach("idle"), served.attach("busy"));
    idle.grow(256 * MIB);
    let call = busy.post(Request::Grow { device: 0, bytes: UNIT, press: true });
    let (ask, Ask::Trim { .. }) = idle.next_ask() else { panic!() };
    idle.answered(ask, 0);
    let start = Instant::now();
    assert!(matches!(busy.answer(call).0, Answer::Refused { reason: Reason::OutOfMemory, .. }));
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_stuck_client_delays_nobody_beyond_the_bound() {
    let bound = Duration::from_millis(200);
    let served = Served::start(Config { trim_timeout_ms: 200, ..config() });
    let mut busy = served.attach("busy");
    let (stuck, slot) = Puppet::ready(&served, &busy, "stuck", "grow:256 idle");
    stuck.signal(rustix::process::Signal::STOP);
    until("it is seen to be stopped", || busy.state_of(slot) == "stopped");
    let start = Instant::now();
    let (answer, _) = busy.call(Request::Grow { device: 0, bytes: UNIT, press: true });
    let took = start.elapsed();
    assert!(matches!(answer, Answer::Refused { reason: Reason::OutOfMemory, .. }), "{answer:?}");
    assert!(took >= bound, "it was not waited for: {took:?}");
    assert!(took < bound + Duration::from_secs(2), "{took:?}");
}

#[test]
fn where_the_first_is_stuck_the_others_are_asked_in_time() {
    let served = Served::start(Config { trim_timeout_ms: 4_000, ..config() });
    let (mut stuck, mut idle, mut busy) = (served.attach("stuck"), served.attach("idle"), served.attach("busy"));
    stuck.grow(192 * MIB);
    let chunks = idle.grow(64 * MIB);
    let call = busy.post(Request::Grow { device: 0, bytes: UNIT, press: true });
    // The one with most slack is asked first; it says nothing.
    assert!(matches!(stuck.next_ask().1, Ask::Trim { .. }));
    let (ask, Ask::Trim { .. }) = idle.next_ask() else { panic!() };
    idle.release(&chunks);
    idle.answered(ask, 64 * MIB);
    assert!(matches!(busy.answer(call).0, Answer::Granted { .. }));
}

#[test]
fn waiting_growths_are_served_in_order() {
    let served = Served::start(Config { trim_timeout_ms: 20_000, ..config() });
    let (mut idle, mut first, mut second) = (served.attach("idle"), served.attach("first"), served.attach("second"));
    let chunks = idle.grow(128 * MIB);
    let more = idle.grow(128 * MIB);
    let large = first.post(Request::Grow { device: 0, bytes: 130 * MIB, press: true });
    let (ask, Ask::Trim { .. }) = idle.next_ask() else { panic!() };
    let small = second.post(Request::Grow { device: 0, bytes: UNIT, press: true });
    idle.release(&chunks);
    // There is room for the small one, but the large one was first.
    assert_eq!(idle.ledger_of(second.slot()).unwrap().reserved, 0);
    idle.release(&more);
    idle.answered(ask, 256 * MIB);
    assert!(matches!(first.answer(large).0, Answer::Granted { .. }));
    assert!(matches!(second.answer(small).0, Answer::Granted { .. }));
}

#[test]
fn a_retired_chunk_is_waited_for() {
    let served = Served::start(Config { trim_timeout_ms: 20_000, ..config() });
    let (mut maker, mut reader) = (served.attach("maker"), served.attach("reader"));
    let chunks = maker.grow(256 * MIB);
    reader.import(maker.window(), &chunks);
    assert_eq!(maker.release(&chunks), (256 * MIB, 256 * MIB));
    let call = maker.post(Request::Grow { device: 0, bytes: 256 * MIB, press: true });
    let (ask, Ask::Revoke { .. }) = reader.next_ask() else { panic!() };
    reader.answered(ask, 0);
    let (Answer::Granted { chunks: again }, _) = maker.answer(call) else { panic!() };
    assert!(again[0].epoch > chunks[0].epoch);
}

#[test]
fn a_stopped_client_is_asked_once_however_often_memory_is_short() {
    let served = Served::start(Config { trim_timeout_ms: 20, ..config() });
    let (mut stuck, mut busy) = (served.attach("stuck"), served.attach("busy"));
    stuck.grow(256 * MIB);
    for _ in 0..5 {
        assert!(matches!(busy.call(Request::Grow { device: 0, bytes: UNIT, press: true }).0, Answer::Refused { .. }));
    }
    let (ask, Ask::Trim { .. }) = stuck.next_ask() else { panic!() };
    // Nothing else was asked: the next thing that it hears is an answer of its own.
    let (answer, _) = stuck.call(Request::Ledger);
    assert!(matches!(answer, Answer::Ledger { .. }) && stuck.heard_nothing());
    stuck.answered(ask, 0);
    let call = busy.post(Request::Grow { device: 0, bytes: UNIT, press: true });
    assert!(matches!(stuck.next_ask().1, Ask::Trim { .. }));
    assert!(matches!(busy.answer(call).0, Answer::Refused { .. }));
}

/// A client that has another way asks without pressing: the answer comes at once, the idle one hears nothing, nobody listens to
/// a refusal that is none.
#[test]
fn a_growth_that_does_not_press_is_answered_at_once_and_asks_nobody() {
    let served = Served::start(Config { trim_timeout_ms: 20_000, ..config() });
    let mut parent = served.attach_as("main", Role::Parent);
    assert_eq!(parent.call(Request::Listen).0, Answer::Done);
    let (mut idle, mut busy) = (served.attach("idle"), served.attach("busy"));
    let chunks = idle.grow(256 * MIB);
    let at_once = Request::Grow { device: 0, bytes: UNIT, press: false };
    let (answer, _) = busy.call(at_once.clone());
    assert!(matches!(answer, Answer::Refused { reason: Reason::OutOfMemory, asked: UNIT, .. }), "{answer:?}");
    assert!(matches!(idle.call(Request::Ledger).0, Answer::Ledger { .. }) && idle.heard_nothing());
    assert!(matches!(parent.call(Request::Ledger).0, Answer::Ledger { .. }) && parent.heard_nothing());
    assert_eq!((busy.ledger_of(busy.slot()).unwrap().counts.refusals, busy.ledger().refusals), (0, 0));
    // The same, pressing.
    let call = busy.post(Request::Grow { device: 0, bytes: UNIT, press: true });
    assert!(matches!(parent.next_ask().1, Ask::Pressure { refused: false, .. }));
    let (ask, Ask::Trim { .. }) = idle.next_ask() else { panic!() };
    idle.release(&chunks);
    idle.answered(ask, 256 * MIB);
    assert!(matches!(busy.answer(call).0, Answer::Granted { .. }));
    assert!(matches!(busy.call(at_once).0, Answer::Granted { .. }), "now there is room");
}

#[test]
fn a_growth_that_does_not_press_overtakes_nobody() {
    let served = Served::start(Config { trim_timeout_ms: 20_000, ..config() });
    let (mut idle, mut first, mut second) = (served.attach("idle"), served.attach("first"), served.attach("second"));
    let chunks = idle.grow(128 * MIB);
    let more = idle.grow(128 * MIB);
    let large = first.post(Request::Grow { device: 0, bytes: 130 * MIB, press: true });
    let (ask, Ask::Trim { .. }) = idle.next_ask() else { panic!() };
    idle.release(&chunks);
    // There is room for it, and it is refused: it was not first.
    let (answer, _) = second.call(Request::Grow { device: 0, bytes: UNIT, press: false });
    assert!(matches!(answer, Answer::Refused { reason: Reason::OutOfMemory, .. }), "{answer:?}");
    idle.release(&more);
    idle.answered(ask, 256 * MIB);
    assert!(matches!(first.answer(large).0, Answer::Granted { .. }));
}

/// A client that does not say whether it presses does.
#[test]
fn a_growth_presses_where_it_does_not_say() {
    let call = serde_json::from_str::<Request>(r#"{"kind":"grow","device":0,"bytes":2097152}"#).unwrap();
    assert_eq!(call, Request::Grow { device: 0, bytes: 2 * MIB, press: true });
}
