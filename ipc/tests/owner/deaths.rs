//! Deaths of real processes.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Instant;

use millpond_allocator::timeline::{Reached, POISON};
use millpond_ipc::control::{Claim, Control, Hold, HoldState, HoldWord, HOLDS_PER_CLIENT, TIMELINES_PER_CLIENT};
use millpond_ipc::owner::Config;
use millpond_ipc::wire::{Answer, Ask, Request};
use rustix::process::Signal;

use crate::puppet::Puppet;
use crate::raw::*;

/// Makes the client's first hold.
fn make_hold<'a>(control: &'a Control, client: &Raw, receiver: u32) -> (&'a Hold, u32) {
    control.marks(client.slot()).unwrap().reach(0);
    let hold = control.hold(client.slot(), 0).unwrap();
    let claim = Claim { lease: 9, window: client.window(), offset: 0, bytes: UNIT };
    (hold, hold.make(client.slot() as u8, receiver as u8, claim).unwrap())
}

#[test]
fn sigkill_gives_the_memory_back() {
    let served = Served::start(config());
    let mut watcher = served.attach("watcher");
    let (mut puppet, slot) = Puppet::ready(&served, &watcher, "victim", "grow:64");
    let timeline = slot * TIMELINES_PER_CLIENT as u32 + 3;
    let word = watcher.control.timeline(timeline).unwrap();
    word.store(5);
    let row = watcher.ledger_of(slot).unwrap();
    assert_eq!((row.reserved, row.pid), (64 * MIB, u64::from(puppet.0.id())));
    assert!(row.start_time > 0);
    let start = Instant::now();
    puppet.kill();
    until("the memory is back", || watcher.ledger().reserved == 0);
    println!("SIGKILL to memory back: {:?}", start.elapsed());
    assert_eq!((watcher.state_of(slot), watcher.ledger().deaths), ("gone", 1));
    assert_eq!((word.reached(5), word.reached(6)), (Reached::Yes, Reached::Never));
    assert!(word.value() >= POISON);
    let (_, Ask::Died { peer, cause: None }) = watcher.next_ask() else { panic!() };
    assert_eq!((peer.client, peer.name.as_str()), (slot, "victim"));
    watcher.grow(256 * MIB);
}

#[test]
fn a_forked_child_that_has_the_socket_keeps_everything_in_quarantine() {
    let served = Served::start(config());
    let watcher = served.attach("watcher");
    let (mut puppet, slot) = Puppet::ready(&served, &watcher, "forker", "grow:64 fork");
    let timeline = watcher.control.timeline(slot * TIMELINES_PER_CLIENT as u32).unwrap();
    puppet.kill();
    until("it is dying", || watcher.state_of(slot) == "dying");
    // The dead process's work may still run: nothing is poisoned, nothing is used again.
    assert_eq!((watcher.ledger().reserved, timeline.value()), (64 * MIB, 0));
    puppet.end_fork();
    until("the memory is back", || watcher.ledger().reserved == 0);
    assert_eq!(watcher.state_of(slot), "gone");
    assert!(timeline.value() >= POISON);
}

#[test]
fn a_socket_that_ends_alone_is_quarantine_too() {
    let served = Served::start(config());
    let (watcher, mut client) = (served.attach("watcher"), served.attach("hangs-up"));
    client.grow(UNIT);
    let slot = client.slot();
    drop(client);
    until("it is dying", || watcher.state_of(slot) == "dying");
    assert_eq!(watcher.ledger().reserved, UNIT);
    assert_sums(&watcher.ledger());
}

#[test]
fn who_leaves_in_good_order_with_nothing_is_gone_at_once() {
    let served = Served::start(config());
    let (mut watcher, mut client) = (served.attach("watcher"), served.attach("leaves"));
    let chunks = client.grow(UNIT);
    client.release(&chunks);
    let slot = client.slot();
    client.detach();
    until("it is gone", || watcher.state_of(slot) == "gone");
    assert!(matches!(watcher.next_ask().1, Ask::Died { .. }));
}

#[test]
fn who_leaves_with_memory_in_its_hands_is_gone_when_its_process_is() {
    let served = Served::start(config());
    let watcher = served.attach("watcher");
    let mut puppet = Puppet::start(&served, "leaver", "grow:2 detach exit");
    puppet.wait_code();
    until("it came and went", || watcher.ledger().deaths == 1);
    assert_eq!(watcher.ledger().reserved, 0);
}

#[test]
fn a_stopped_client_is_reported_and_so_is_its_return() {
    let served = Served::start(Config { stopped_after_ms: 200, ..config() });
    let watcher = served.attach("watcher");
    let (puppet, slot) = Puppet::ready(&served, &watcher, "sleeper", "grow:2");
    assert_eq!(watcher.state_of(slot), "alive");
    puppet.signal(Signal::STOP);
    until("it is stopped", || watcher.state_of(slot) == "stopped");
    assert_eq!(watcher.ledger().reserved, UNIT);
    puppet.signal(Signal::CONT);
    until("it is alive again", || watcher.state_of(slot) == "alive");
}

#[test]
fn a_dead_producers_leased_chunk_stays_until_its_last_hold_is_done() {
    let served = Served::start(config());
    let mut reader = served.attach("reader");
    // 64 MiB that nobody reads, and 2 MiB that the reader does.
    let (mut puppet, slot) = Puppet::ready(&served, &reader, "producer", &format!("grow:64 grow:2 hold:{}", reader.slot()));
    let control = Arc::clone(&reader.control);
    let hold = control.hold(slot, 0).unwrap();
    let (window, generation) = (hold.window.load(Ordering::Relaxed) as u32, hold.word().generation());
    puppet.kill();
    until("only the leased chunk is left", || reader.ledger().reserved == UNIT);
    let ledger = reader.ledger();
    assert_sums(&ledger);
    assert_eq!((ledger.orphaned, reader.state_of(slot)), (UNIT, "orphaned"));
    // It can still be imported, for the first time even.
    let (Answer::Granted { .. }, fds) = reader.call(Request::Import { window, epochs: vec![2] }) else { panic!() };
    assert_eq!(fds.len(), 1);
    assert!(hold.take(generation, reader.slot() as u8));
    // Done, but only when this stream has got there.
    let own = reader.slot() * TIMELINES_PER_CLIENT as u32;
    assert!(hold.finish(generation, reader.slot() as u8, Some((own, 7))));
    assert!(matches!(reader.call(Request::Ledger).0, Answer::Ledger { .. }));
    assert_eq!(reader.ledger().orphaned, UNIT);
    reader.control.timeline(own).unwrap().store(7);
    until("it is asked back", || reader.ledger().orphaned == 0);
    assert_eq!(reader.ledger().retired, UNIT);
    assert_sums(&reader.ledger());
    assert!(matches!(reader.next_ask().1, Ask::Died { .. }));
    let (ask, Ask::Revoke { epochs, .. }) = reader.next_ask() else { panic!() };
    assert_eq!(epochs, [2]);
    reader.answered(ask, 0);
    until("all is back", || reader.ledger().reserved == 0 && reader.state_of(slot) == "gone");
    assert_eq!(hold.word().state(), HoldState::Free);
}

#[test]
fn a_dead_consumers_holds_are_done_and_its_mappings_gone() {
    let served = Served::start(config());
    let mut maker = served.attach("maker");
    let chunks = maker.grow(UNIT);
    assert_eq!(chunks[0].epoch, 1);
    let window = maker.window();
    let (mut puppet, slot) = Puppet::ready(&served, &maker, "consumer", &format!("import:{window}"));
    let control = Arc::clone(&maker.control);
    let (hold, generation) = make_hold(&control, &maker, slot);
    assert!(hold.take(generation, slot as u8));
    puppet.kill();
    until("its hold is done", || hold.word().state() == HoldState::Done);
    assert_eq!(hold.done(), None);
    until("it is gone", || maker.state_of(slot) == "gone");
    // Nobody maps it any more.
    assert_eq!(maker.release(&chunks), (UNIT, 0));
}

#[test]
fn a_done_that_the_dead_never_reached_holds_nothing_up() {
    let served = Served::start(config());
    let mut maker = served.attach("maker");
    maker.grow(UNIT);
    let (mut puppet, slot) = Puppet::ready(&served, &maker, "consumer", "");
    let control = Arc::clone(&maker.control);
    let (hold, generation) = make_hold(&control, &maker, slot);
    let timeline = slot * TIMELINES_PER_CLIENT as u32 + 1;
    // More than a new client goes on above by itself.
    let far = 1 << 30;
    assert!(hold.finish(generation, slot as u8, Some((timeline, far))));
    let word = maker.control.timeline(timeline).unwrap();
    assert_eq!(word.reached(far), Reached::No);
    puppet.kill();
    until("it is gone", || maker.state_of(slot) == "gone");
    assert_eq!(word.reached(far), Reached::Never);
    // The slot's next clients go on above it, so that nobody waits for it.
    let others: Vec<Raw> = (0..63).map(|n| served.attach(&format!("next-{n}"))).collect();
    assert!(others.iter().any(|other| other.slot() == slot));
    assert_eq!((word.reached(far), word.value()), (Reached::Yes, far));
}

#[test]
fn a_forwarded_hold_keeps_a_dead_producers_chunk_too() {
    let served = Served::start(config());
    let (mut reader, forwarder) = (served.attach("reader"), served.attach("forwarder"));
    let (mut puppet, slot) = Puppet::ready(&served, &reader, "producer", &format!("grow:2 hold:{}", forwarder.slot()));
    let control = Arc::clone(&reader.control);
    let first = control.hold(slot, 0).unwrap();
    let (window, generation) = (first.window.load(Ordering::Relaxed) as u32, first.word().generation());
    assert!(first.take(generation, forwarder.slot() as u8));
    // The forwarder's hold for the reader is in the upper half of the producer's table.
    let place = HOLDS_PER_CLIENT as u32 / 2 + 2;
    control.marks(slot).unwrap().reach(place);
    let second = control.hold(slot, place).unwrap();
    let claim = Claim { lease: 1, window, offset: 0, bytes: UNIT };
    let forwarded = second.make(forwarder.slot() as u8, reader.slot() as u8, claim).unwrap();
    assert!(first.finish(generation, forwarder.slot() as u8, None));
    puppet.kill();
    until("its chunk is the owner's", || reader.state_of(slot) == "orphaned");
    assert_eq!(reader.ledger().orphaned, UNIT);
    assert!(matches!(reader.call(Request::Import { window, epochs: vec![1] }).0, Answer::Granted { .. }));
    assert!(second.finish(forwarded, reader.slot() as u8, None));
    reader.post(Request::Unmapped { epochs: vec![1] });
    until("all is back", || reader.ledger().reserved == 0 && reader.state_of(slot) == "gone");
}

#[test]
fn a_hold_that_the_dead_was_making_is_ended() {
    let served = Served::start(config());
    let mut maker = served.attach("maker");
    maker.grow(UNIT);
    let (mut puppet, slot) = Puppet::ready(&served, &maker, "forwarder", "");
    // It died between the first and the last word of a hold in the maker's table.
    let control = Arc::clone(&maker.control);
    let place = HOLDS_PER_CLIENT as u32 / 2;
    control.marks(maker.slot()).unwrap().reach(place);
    let hold = control.hold(maker.slot(), place).unwrap();
    // SAFETY: a hold begins with its word, an atomic of 64 bits in shared memory that lives as long as `control`.
    let word = unsafe { &*std::ptr::from_ref(hold).cast::<std::sync::atomic::AtomicU64>() };
    word.store(HoldWord::new(1, HoldState::Making, slot as u8, 3).0, Ordering::Release);
    puppet.kill();
    until("it is ended", || hold.word().state() == HoldState::Done);
    assert_eq!(hold.word().generation(), 1);
}

#[test]
fn a_faulted_client_is_in_quarantine_until_it_ends() {
    let served = Served::start(config());
    let (mut watcher, mut client) = (served.attach("watcher"), served.attach("faulty"));
    client.grow(UNIT);
    let first = client.slot() * TIMELINES_PER_CLIENT as u32;
    let of_another = watcher.slot() * TIMELINES_PER_CLIENT as u32;
    client.post(Request::Faulted { device: 0, timelines: vec![first, of_another, u32::MAX] });
    until("it is faulted", || watcher.state_of(client.slot()) == "faulted");
    let reached = |timeline| watcher.control.timeline(timeline).unwrap().reached(1);
    assert_eq!((watcher.ledger().reserved, reached(first)), (UNIT, Reached::Never));
    assert_eq!(reached(first + 1), Reached::No, "streams of its other devices run on");
    assert_eq!(reached(of_another), Reached::No, "it speaks for itself alone");
    assert!(matches!(client.call(Request::Grow { device: 0, bytes: UNIT, press: true }).0, Answer::Refused { .. }));
    watcher.grow(UNIT);
}
