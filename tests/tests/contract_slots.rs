//! Who a value is from when its maker's slot is another client's: a number says it for good, a slot does not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{eventually, link, Arena, Worker, MIB};

#[test]
fn role() {
    common::role();
}

/// Until a slot is the next that is given out: the one that was used longest ago always is.
fn pass_the_slots_to(arena: &Arena, slot: u32) {
    for n in 0..256 {
        let client = arena.client(&format!("passing {n}"));
        let its = client.welcome().client;
        client.detach();
        drop(client);
        if its == slot {
            eventually("it is free again", || arena.ledger().devices[0].clients.iter().all(|row| row.client != slot));
            return pass_the_others(arena, slot);
        }
    }
    panic!("slot {slot} is never given out");
}

/// All other free slots, once.
fn pass_the_others(arena: &Arena, slot: u32) {
    for n in 0..256 {
        let client = arena.client(&format!("passing again {n}"));
        let next = (client.welcome().client + 1) % 64;
        client.detach();
        let taken: Vec<u32> = arena.ledger().devices[0].clients.iter().map(|row| row.client).collect();
        let between = (0..64).map(|step| (next + step) % 64).take_while(|other| *other != slot).all(|other| taken.contains(&other));
        if between {
            return;
        }
    }
    panic!("slot {slot} does not come next");
}

fn slot_of(arena: &Arena, name: &str) -> u32 {
    arena.row(name).unwrap().client
}

/// `a` makes a value, `b` receives it, and its stalled stream has yet to write it when it is passed on over `bc`.
fn pass_on_late(a: &mut Worker, b: &mut Worker, bc: u64) {
    let (ab, ba) = link(a, b);
    a.ok(&format!("alloc {MIB}"));
    a.ok("fill 0 1");
    a.ok(&format!("send {ab} 0"));
    b.ok(&format!("recv {ba} 1"));
    b.ok("stall 1");
    b.ok("touch 0 2 1");
    b.ok(&format!("forward {bc} 0 1"));
}

/// `b` passes on to `c` what `a` made and what `b`'s stalled stream has yet to write; then `b` dies, and `next` is in its slot. `c`'s tender
/// has heard of nothing. `late`: `c`'s stream 1 has the wait for it behind other work.
fn succeeded(arena: &Arena, late: bool) -> (Worker, Worker, Worker) {
    let (mut a, mut b, mut c) = (arena.worker("a"), arena.worker("b"), arena.worker("c"));
    let (bc, cb) = link(&mut b, &mut c);
    pass_on_late(&mut a, &mut b, bc);
    if late {
        c.ok("stall 1");
        c.ok(&format!("recv {cb} 1"));
    } else {
        c.ok(&format!("recv {cb} lazy"));
    }
    c.fails("Timeout", "ready 0 10");
    c.ok("listen");
    c.ok("deaf");
    let slot = slot_of(arena, "b");
    b.die("kill");
    pass_the_slots_to(arena, slot);
    let next = arena.worker("next");
    assert_eq!(slot_of(arena, "next"), slot);
    (a, c, next)
}

#[test]
fn a_late_notice_of_a_death_says_nothing_of_the_next_in_its_slot() {
    let arena = Arena::new();
    let (_a, mut c, mut next) = succeeded(&arena, false);
    c.ask("connect next");
    next.ask("connect c");
    assert_eq!((c.answer(), next.answer()), ("ok 1".to_owned(), "ok 0".to_owned()));
    next.ok(&format!("alloc {MIB} 1"));
    next.ok("stall 1");
    next.ok("fill 0 7 1");
    next.ok("send 0 0 1");
    c.ok("recv 1 lazy");
    c.fails("Timeout", "ready 1 10");
    c.ok("hear");
    c.ok("hearsof b");
    c.fails("PeerDied", "ready 0");
    c.fails("Timeout", "ready 1 10");
    next.ok("go 1");
    c.ok("ready 1");
    c.ok("open 1");
    c.ok("check 1 7");
}

#[test]
fn what_the_next_in_its_slot_does_makes_nothing_of_a_dead_ones_ready() {
    let arena = Arena::new();
    let (_a, mut c, mut next) = succeeded(&arena, false);
    let said = c.fails("PeerDied", "ready 0 0");
    assert!(said.contains("received from b"), "{said}");
    // As many signals on each of its timelines as the dead one ever gave.
    c.ask("connect next");
    next.ask("connect c");
    assert_eq!((c.answer(), next.answer()), ("ok 1".to_owned(), "ok 0".to_owned()));
    next.ok(&format!("alloc {MIB} 1"));
    for _ in 0..4 {
        next.ok("send 0 0 1");
    }
    next.ok("sync 1");
    c.fails("PeerDied", "ready 0 0");
    c.fails("PeerDied", "open 0");
    let mut d = arena.worker("d");
    let (cd, _) = link(&mut c, &mut d);
    c.fails("PeerDied", &format!("forward {cd} 0"));
    c.ok("hear");
    c.ok("hearsof b");
    c.fails("PeerDied", "open 0");
    c.ok("release 0");
}

#[test]
fn a_stream_that_comes_to_a_dead_ones_value_after_its_slot_was_given_on_goes_past_it() {
    let arena = Arena::new();
    let (_a, mut c, _next) = succeeded(&arena, true);
    assert_eq!(c.number("idle 1"), 0);
    c.ok("go 1");
    c.ok("sync 1");
    c.fails("PeerDied", "ready 0 0");
    c.ok("hear");
    c.ok("release 0");
}

#[test]
fn who_passes_a_value_on_says_whose_signal_it_waits_for() {
    let arena = Arena::new();
    let (mut a, mut b, mut c, mut d) = (arena.worker("a"), arena.worker("b"), arena.worker("c"), arena.worker("d"));
    let ((bc, cb), (cd, dc)) = (link(&mut b, &mut c), link(&mut c, &mut d));
    pass_on_late(&mut a, &mut b, bc);
    c.ok(&format!("recv {cb} lazy"));
    c.ok(&format!("forward {cd} 0"));
    let slot = slot_of(&arena, "b");
    b.die("kill");
    pass_the_slots_to(&arena, slot);
    let mut next = arena.worker("next");
    assert_eq!(slot_of(&arena, "next"), slot);
    // d takes it up now: the signal's timeline is the next one's, which has nothing to do with it.
    d.ok(&format!("recv {dc} lazy"));
    d.fails("PeerDied", "ready 0 0");
    next.ok(&format!("alloc {MIB} 1"));
    d.fails("PeerDied", "open 0");
    d.ok("release 0");
}
