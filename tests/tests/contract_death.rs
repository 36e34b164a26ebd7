//! What the end of a process means for others: who is released, what stays, what comes back. Step by step: `contract_steps.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::time::Duration;

use common::{eventually, fds_of, is_all, link, plainly, send_late, tree, wait_for, Arena, BOUND, MIB};
use millpond_ipc::client::{Client, Error, Options, Place};
use millpond_ipc::wire::Role;

#[test]
fn role() {
    common::role();
}

/// A stream that waits goes on after the process is gone and not before, and so does a thread; neither waits for anything else.
/// `owner`: whether there is one. How soon is measured by `millpond-micro --part death`.
fn who_waits_is_released_by_the_end_of_the_process(arena: &mut Arena, owner: bool) {
    let (mut a, b) = (arena.worker("a"), arena.client("b"));
    a.ask("connect b");
    let to_a = b.connect("a", BOUND).unwrap();
    assert_eq!(a.answer(), "ok 0");
    a.ok(&format!("alloc {MIB} 1"));
    a.ok("stall 1");
    a.ok("fill 0 1 1");
    a.ok("send 0 0 1");
    let import = b.receive(&to_a, &plainly(true)).unwrap().tensors[0].import;
    let driver = b.driver(Place::Host).unwrap();
    let stream = driver.stream_create().unwrap();
    b.open_import(import, Some(stream), false, None).unwrap();
    assert!(!driver.stream_query(stream).unwrap());
    if !owner {
        arena.owner.signal(libc::SIGKILL);
        arena.owner.wait();
        eventually("the owner's death is seen", || !b.owner_alive());
    }
    let pid = rustix::process::Pid::from_raw(a.said.pid()).unwrap();
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    let is_gone = || {
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)], Some(&now)).unwrap() == 1
    };
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let error = b.import_ready(import, Some(BOUND)).unwrap_err();
            assert!(is_gone(), "a thread was told before the process was gone: {error}");
            error
        });
        a.said.signal(libc::SIGKILL);
        while !driver.stream_query(stream).unwrap() {
            std::thread::yield_now();
        }
        assert!(is_gone(), "the stream went on before the process was gone");
        assert_eq!(thread.join().unwrap().code(), "PeerDied");
    });
    b.release(import).unwrap();
    driver.stream_destroy(stream).unwrap();
    b.detach();
}

#[test]
fn who_waits_is_released_when_the_process_is_gone_and_not_before() {
    let mut arena = Arena::new();
    for _ in 0..3 {
        who_waits_is_released_by_the_end_of_the_process(&mut arena, true);
    }
    who_waits_is_released_by_the_end_of_the_process(&mut arena, false);
}

/// By the parent's word. What it made and was ready stays good; what was not, and the channel, say why it is gone; so does a forward.
#[test]
fn a_worker_that_is_killed_by_policy_leaves_its_reason() {
    let arena = Arena::new();
    let parent = Client::attach(&Options { role: Role::Parent, ..arena.options("parent") }).unwrap();
    let mut a = arena.worker("a");
    a.ask("connect parent");
    let to_a = parent.accept(BOUND).unwrap();
    assert_eq!(a.answer(), "ok 0");
    a.ok(&format!("alloc {MIB}"));
    a.ok("fill 0 3");
    a.ok("send 0 0");
    a.ok(&format!("alloc {MIB} 1"));
    a.ok("stall 1");
    a.ok("fill 1 1 1");
    a.ok("send 0 1 1");
    let [ready, late] = [(); 2].map(|()| parent.receive(&to_a, &plainly(true)).unwrap().tensors[0].import);
    parent.set_policy(to_a.peer(), Some(Duration::from_millis(100))).unwrap();
    a.said.signal(libc::SIGSTOP);
    let says = |result: Result<(), Error>, what: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.code(), "PeerDied", "{what}: {error}");
        assert!(error.to_string().contains("killed by policy: stopped for 0."), "{what}: {error}");
    };
    says(parent.import_ready(late, Some(BOUND)), "a thread that waits");
    eventually("it is buried", || arena.row("a").is_none_or(|row| row.state == "orphaned"));
    says(parent.open_import(late, None, false, Some(BOUND)).map(drop), "opening what was not ready");
    says(parent.receive(&to_a, &plainly(true)).map(drop), "receiving");
    says(parent.send(&to_a, tree(), &[], None).map(drop), "sending");
    let addr = parent.open_import(ready, None, false, Some(BOUND)).unwrap();
    assert!(is_all(addr, MIB, 3));
    let (row, device) = (arena.row("a").unwrap(), arena.ledger().devices[0].clone());
    assert!(row.killed.unwrap().starts_with("killed by policy: stopped for 0."));
    assert_eq!((device.deaths, device.kills_stopped, device.kills()), (1, 1, 1));
    parent.release(ready).unwrap();
    parent.release(late).unwrap();
    arena.settles_at(0);
    assert_eq!(parent.set_policy(to_a.peer(), None).unwrap_err().code(), "PeerDied");
}

#[test]
fn a_forked_child_is_waited_for() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (_, ba) = send_late(&mut a, &mut b);
    a.fork();
    a.die("kill");
    eventually("its process has ended", || arena.row("a").is_some_and(|row| row.state == "dying"));
    // The child holds the driver's files: the work may run on, so nobody is told anything, and nothing is used again.
    assert_eq!(b.number("idle 1"), 0);
    b.fails("Timeout", "ready 0 100");
    assert!(arena.row("a").unwrap().reserved >= MIB);
    a.end_child();
    b.ok("sync 1");
    b.fails("PeerDied", "ready 0");
    b.ok("release 0");
    b.ok(&format!("close {ba}"));
    arena.settles_at(0);
}

#[test]
fn a_chunk_of_which_a_part_is_lent_is_the_owners_whole() {
    let arena = Arena::new();
    let (mut a, mut b, mut c) = (arena.worker("a"), arena.worker("b"), arena.worker("c"));
    let (ab, ba) = link(&mut a, &mut b);
    let (ac, ca) = link(&mut a, &mut c);
    // Of one chunk a part is lent, of the other nothing.
    for block in 0..2 {
        a.ok(&format!("alloc {}", 32 * MIB));
        a.ok(&format!("fill {block} 5"));
    }
    for channel in [ab, ac] {
        a.ok(&format!("sendpart {channel} 0 {} {MIB}", 7 * MIB));
    }
    b.ok(&format!("recv {ba}"));
    c.ok(&format!("recv {ca} lazy"));
    assert_eq!((arena.books(), arena.row("a").unwrap().chunks), ((64 * MIB, 0, 0), 2));
    a.die("kill");
    let whole = (32 * MIB, 0, 32 * MIB);
    eventually("it is the owner's", || arena.books() == whole);
    b.ok("check 0 5");
    b.ok("release 0");
    // With a death the owner looks at all that the dead left.
    b.die("kill");
    eventually("one of its readers is gone", || arena.row("b").is_none());
    assert_eq!(arena.books(), whole, "the last still reads");
    c.ok("open 0");
    c.ok("check 0 5");
    assert_eq!(arena.books(), whole);
    c.ok("release 0");
    arena.settles_at(0);
    eventually("the dead one is gone", || arena.row("a").is_none());
}

#[test]
fn one_that_passes_on_may_die_anywhere() {
    let arena = Arena::new();
    for late in [false, true] {
        let (mut a, mut p, mut b) = (arena.worker("a"), arena.worker("p"), arena.worker("b"));
        let (ap, pa) = link(&mut a, &mut p);
        let (pb, bp) = link(&mut p, &mut b);
        a.ok(&format!("alloc {MIB}"));
        a.ok("fill 0 6");
        a.ok(&format!("send {ap} 0"));
        p.ok(&format!("recv {pa} 1"));
        if late {
            // It wrote in place, and its write is not over: what it passes on is never ready.
            p.ok("stall 1");
            p.ok("touch 0 7 1");
            p.ok(&format!("forward {pb} 0 1"));
            b.ok(&format!("recv {bp} lazy"));
        } else {
            p.ok(&format!("forward {pb} 0"));
        }
        p.die("kill");
        if late {
            b.fails("PeerDied", "ready 0");
        } else {
            b.ok(&format!("recv {bp}"));
            b.ok("check 0 6");
        }
        assert_eq!(a.number("leases"), 1);
        b.ok("release 0");
        eventually("the lease ends", || a.number("leases") == 0);
        drop((a, b));
        arena.settles_at(0);
    }
}

/// A crash blocks no restart, and leaves nothing that adds up.
#[test]
fn a_worker_is_killed_and_started_again_a_hundred_times() {
    let arena = Arena::new();
    let mut a = arena.worker("a");
    let mut before = (0, 0, 0);
    for n in 0..100_u64 {
        let mut b = arena.worker("b");
        let (ab, ba) = link(&mut a, &mut b);
        let block = a.number("alloc 4096");
        a.ok(&format!("fill {block} {}", n % 251));
        a.ok(&format!("send {ab} {block}"));
        if n % 2 == 0 {
            b.ok(&format!("recv {ba}"));
            b.ok(&format!("check 0 {}", n % 251));
        }
        b.die("kill");
        a.ok(&format!("close {ab}"));
        a.ok(&format!("free {block}"));
        eventually("its hold is done", || a.number("leases") == 0);
        if n == 9 {
            eventually("it is gone", || arena.row("b").is_none());
            before = (a.number("fds"), a.number("vm"), fds_of(arena.owner.pid()));
        }
    }
    eventually("the last is gone", || arena.row("b").is_none());
    let mut after = (0, 0, 0);
    // a hears of the last death a moment later, and keeps its pidfd until then.
    let no_more = wait_for(|| {
        after = (a.number("fds"), a.number("vm"), fds_of(arena.owner.pid()));
        after.0 <= before.0 && after.1 <= before.1 + 4096 && after.2 <= before.2
    });
    assert!(no_more, "{before:?}, then {after:?}");
}

#[test]
fn the_dead_take_their_addresses_with_them() {
    let arena = Arena::new();
    let mut b = arena.worker("b");
    let before = b.number("vm");
    for n in 0..10 {
        let mut a = arena.worker("a");
        let (ab, ba) = link(&mut a, &mut b);
        a.ok(&format!("alloc {MIB}"));
        a.ok("fill 0 1");
        a.ok(&format!("send {ab} 0"));
        b.ok(&format!("recv {ba}"));
        b.ok(&format!("check {n} 1"));
        a.die("kill");
        b.ok(&format!("check {n} 1"));
        b.ok(&format!("release {n}"));
        b.ok(&format!("close {n}"));
        arena.settles_at(0);
    }
    let window = 128 << 20; // kB: twice 64 GiB
    eventually("no window of a dead client is kept", || b.number("vm") < before + window / 2);
}

#[test]
fn what_is_opened_or_received_after_its_makers_death_leaves_nothing_behind() {
    let arena = Arena::new();
    let mut b = arena.worker("b");
    let before = (b.number("fds"), b.number("vm"));
    for n in 0..6 {
        let mut a = arena.worker("a");
        let (ab, ba) = link(&mut a, &mut b);
        a.ok(&format!("alloc {MIB}"));
        a.ok("fill 0 1");
        a.ok(&format!("send {ab} 0"));
        if n % 2 == 0 {
            b.ok(&format!("recv {ba} lazy"));
        }
        a.die("kill");
        eventually("it is buried", || arena.row("a").is_none_or(|row| row.state == "orphaned"));
        if n % 2 == 0 {
            b.ok(&format!("open {n}"));
        } else {
            b.ok(&format!("recv {ba}"));
        }
        b.ok(&format!("check {n} 1"));
        b.ok(&format!("release {n}"));
        b.ok(&format!("close {n}"));
        arena.settles_at(0);
    }
    let window = 128 << 20; // kB: twice 64 GiB
    eventually("no window of a dead client is kept", || b.number("vm") < before.1 + window / 2);
    eventually("no descriptor of one either", || b.number("fds") <= before.0);
}
