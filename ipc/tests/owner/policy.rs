//! Killing by policy, of real processes: who is killed, who is not, and what is said of it.

use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use millpond_ipc::control::Cause;
use millpond_ipc::wire::{Answer, Ask, Reason, Request, Role};
use rustix::process::Signal;

use crate::puppet::Puppet;
use crate::raw::*;

const AFTER_MS: u64 = 150;

fn parent(served: &Served) -> Raw {
    Raw::attach(&served.socket, &hello(&served.key, "parent", Role::Parent)).unwrap()
}

fn policy(of: &Raw, slot: u32, after_ms: Option<u64>) -> Request {
    Request::Policy { client: slot, serial: of.ledger_of(slot).unwrap().serial, kill_stopped_after_ms: after_ms }
}

/// The signal that a puppet ended by.
fn ended_by(puppet: &mut Puppet) -> Option<i32> {
    puppet.0.wait().unwrap().signal()
}

/// Writes the beat of a client of this process, which has no thread for that.
fn beat(raw: &Raw) {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let ms = now.tv_sec as u64 * 1_000 + now.tv_nsec as u64 / 1_000_000;
    raw.control.beat(raw.slot()).unwrap().store(ms, std::sync::atomic::Ordering::Relaxed);
}

#[test]
fn one_that_stays_stopped_is_killed_and_its_death_says_why() {
    let served = Served::start(config());
    let mut parent = parent(&served);
    let (mut sleeper, slot) = Puppet::ready(&served, &parent, "sleeper", "grow:2");
    let (other, other_slot) = Puppet::ready(&served, &parent, "other", "grow:2");
    assert_eq!(parent.call(policy(&parent, slot, Some(AFTER_MS))).0, Answer::Done);
    let start = Instant::now();
    // Of the other nothing was said: it is only reported.
    other.signal(Signal::STOP);
    sleeper.signal(Signal::STOP);
    beat(&parent);
    assert_eq!(ended_by(&mut sleeper), Some(Signal::KILL.as_raw()));
    assert!(start.elapsed() >= Duration::from_millis(AFTER_MS), "{:?}", start.elapsed());
    let (_, Ask::Died { peer, cause: Some(Cause::Stopped { ms }) }) = parent.next_ask() else { panic!("its death says nothing") };
    assert_eq!((peer.client, peer.name.as_str()), (slot, "sleeper"));
    assert!((AFTER_MS..20_000).contains(&ms), "{ms}");
    until("it is buried", || parent.state_of(slot) == "gone");
    let row = parent.control.client(slot).unwrap().read().unwrap();
    assert_eq!((row.serial, Cause::from_word(row.cause)), (peer.serial, Some(Cause::Stopped { ms })));
    let ledger = parent.ledger();
    assert_eq!((ledger.deaths, ledger.kills_stopped, ledger.kills_call, ledger.reserved), (1, 1, 0, UNIT));
    assert_ne!(parent.state_of(other_slot), "gone");
}

#[test]
fn one_that_goes_on_in_time_lives_and_so_does_one_whose_policy_was_taken_back() {
    let served = Served::start(config());
    let mut parent = parent(&served);
    let (puppet, slot) = Puppet::ready(&served, &parent, "sleeper", "grow:2");
    assert_eq!(parent.call(policy(&parent, slot, Some(400))).0, Answer::Done);
    puppet.signal(Signal::STOP);
    std::thread::sleep(Duration::from_millis(150));
    puppet.signal(Signal::CONT);
    std::thread::sleep(Duration::from_millis(350));
    assert_ne!(parent.state_of(slot), "gone");
    assert_eq!(parent.call(policy(&parent, slot, Some(100))).0, Answer::Done);
    assert_eq!(parent.call(policy(&parent, slot, None)).0, Answer::Done);
    puppet.signal(Signal::STOP);
    std::thread::sleep(Duration::from_millis(300));
    assert_ne!(parent.state_of(slot), "gone");
}

/// As Ctrl-Z does it: the parent stands still too, so nobody waits for the worker.
#[test]
fn one_that_is_stopped_with_its_parent_is_killed_only_after_the_parent_has_gone_on() {
    let served = Served::start(config());
    let watcher = served.attach("watcher");
    let (mut worker, slot) = Puppet::ready(&served, &watcher, "worker", "grow:2");
    let (parent, _) = Puppet::ready(&served, &watcher, "its", &format!("parent policy:{slot}"));
    parent.signal(Signal::STOP);
    worker.signal(Signal::STOP);
    std::thread::sleep(Duration::from_millis(3 * AFTER_MS));
    assert_eq!(worker.0.try_wait().unwrap(), None);
    let start = Instant::now();
    parent.signal(Signal::CONT);
    assert_eq!(ended_by(&mut worker), Some(Signal::KILL.as_raw()));
    assert!(start.elapsed() >= Duration::from_millis(AFTER_MS / 2), "its time begins when the parent goes on: {:?}", start.elapsed());
}

#[test]
fn a_call_that_does_not_obey_is_ended_by_the_parents_word() {
    let served = Served::start(config());
    let mut parent = parent(&served);
    let (mut puppet, slot) = Puppet::ready(&served, &parent, "stubborn", "grow:2");
    let serial = parent.ledger_of(slot).unwrap().serial;
    let kill = Request::Kill { client: slot, serial, waited_ms: 1_500 };
    assert_eq!(parent.call(kill.clone()).0, Answer::Done);
    assert_eq!(ended_by(&mut puppet), Some(Signal::KILL.as_raw()));
    let (_, Ask::Died { cause, .. }) = parent.next_ask() else { panic!() };
    assert_eq!(cause, Some(Cause::Call { ms: 1_500 }));
    until("it is counted", || parent.ledger().kills_call == 1);
    let (Answer::Refused { reason, .. }, _) = parent.call(kill) else { panic!("it is gone") };
    assert_eq!(reason, Reason::PeerDied);
}

#[test]
fn nobody_else_has_a_say_and_nobody_else_is_meant() {
    let served = Served::start(config());
    let (mut parent, mut worker) = (parent(&served), served.attach("worker"));
    let (puppet, slot) = Puppet::ready(&served, &parent, "victim", "grow:2");
    let serial = parent.ledger_of(slot).unwrap().serial;
    let refused = |raw: &mut Raw, call: Request| match raw.call(call).0 {
        Answer::Refused { reason, message, .. } => (reason, message),
        other => panic!("{other:?}"),
    };
    let kill = |client, serial| Request::Kill { client, serial, waited_ms: 0 };
    let quick = |client, serial, ms| Request::Policy { client, serial, kill_stopped_after_ms: Some(ms) };
    // A worker, of another and of itself.
    for client in [slot, worker.slot(), parent.slot()] {
        assert_eq!(refused(&mut worker, kill(client, serial)).0, Reason::Refused);
        assert_eq!(refused(&mut worker, quick(client, serial, 1_000)).0, Reason::Refused);
    }
    // Another client of that slot, a slot that is none, the parent itself, no time at all.
    assert_eq!(refused(&mut parent, kill(slot, serial + 1)).0, Reason::PeerDied);
    assert_eq!(refused(&mut parent, kill(63, 1)).0, Reason::PeerDied);
    assert_eq!(refused(&mut parent, kill(u32::MAX, serial)).0, Reason::PeerDied);
    let own = (parent.slot(), parent.welcome.serial);
    assert_eq!(refused(&mut parent, kill(own.0, own.1)).0, Reason::InvalidArgument);
    assert_eq!(refused(&mut parent, quick(slot, serial, 99)).0, Reason::InvalidArgument);
    puppet.signal(Signal::STOP);
    std::thread::sleep(Duration::from_millis(150));
    assert_ne!(parent.state_of(slot), "gone");
}
