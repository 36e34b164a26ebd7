//! The owner's death: clients go on with what they have, and nobody hangs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{eventually, link, send_late, Arena, MIB};
use std::time::Duration;

#[test]
fn role() {
    common::role();
}

#[test]
fn clients_go_on_without_an_owner() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    a.ok(&format!("alloc {MIB}"));
    a.ok("fill 0 1");
    a.ok(&format!("send {ab} 0"));
    b.ok(&format!("recv {ba}"));
    arena.owner.signal(libc::SIGKILL);
    for worker in [&mut a, &mut b] {
        eventually("it is known", || worker.number("owner") == 0);
    }
    // What is there works: memory within the chunk, sends both mapped and new in it, acks.
    a.ok(&format!("alloc {MIB}"));
    a.ok("fill 1 2");
    a.ok(&format!("send {ab} 1"));
    b.ok(&format!("recv {ba}"));
    b.ok("check 0 1");
    b.ok("check 1 2");
    b.ok("release 0");
    b.ok("release 1");
    eventually("the leases end", || a.number("leases") == 0);
    // What needs an owner fails by its name, at once.
    a.fails("OwnerDied", "alloc 1073741824");
    a.fails("OwnerDied", "connect b 60000");
    a.ok("detach");
}

#[test]
fn the_dead_are_seen_by_those_who_wait_for_them() {
    let arena = Arena::new();
    let (mut a, mut b, mut c) = (arena.worker("a"), arena.worker("b"), arena.worker("c"));
    let (ab, ba) = link(&mut a, &mut b);
    let (bc, cb) = link(&mut b, &mut c);
    a.ok(&format!("alloc {MIB} 1"));
    a.ok("stall 1");
    a.ok("fill 0 1 1");
    a.ok(&format!("send {ab} 0 1"));
    b.ok(&format!("recv {ba} 1"));
    b.ok(&format!("forward {bc} 0"));
    c.ok(&format!("recv {cb} lazy"));
    // And something of b's that a holds.
    b.ok(&format!("alloc {MIB}"));
    b.ok(&format!("send {ba} 0"));
    a.ok(&format!("recv {ab}"));
    arena.owner.signal(libc::SIGKILL);
    c.ask("ready 0 60000");
    assert_eq!(c.answers_within(Duration::from_millis(100)), None, "a lives: it is waited for");
    assert_eq!(b.number("leases"), 1);
    a.die("kill");
    assert!(c.answer().starts_with("err PeerDied"), "c never imported from a");
    b.ok("sync 1");
    b.fails("PeerDied", "ready 0");
    eventually("what a held is b's again", || b.number("leases") == 0);
}

#[test]
fn a_client_ends_with_its_owner_where_it_was_told_to() {
    let arena = Arena::new();
    let mut a = arena.worker_with("a", &[("MILLPOND_TEST_EXIT", "1")]);
    arena.owner.signal(libc::SIGKILL);
    a.said.wait();
}

#[test]
fn an_owner_that_is_stopped_is_not_taken_for_dead() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    arena.owner.signal(libc::SIGSTOP);
    // Each of its threads stops when it next enters the kernel.
    let threads = || std::fs::read_dir(format!("/proc/{}/task", arena.owner.pid())).unwrap().map(|thread| thread.unwrap().path());
    let state = |path: std::path::PathBuf| std::fs::read_to_string(path.join("stat")).unwrap();
    eventually("the owner stops", || {
        threads().map(state).all(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')))
    });
    a.ask(&format!("alloc {MIB}"));
    assert_eq!(a.answers_within(Duration::from_millis(300)), None);
    arena.owner.signal(libc::SIGCONT);
    assert_eq!(a.answer(), "ok 0");
    a.ok(&format!("send {ab} 0"));
    b.ok(&format!("recv {ba}"));
    assert_eq!(b.number("owner"), 1);
}

/// Processes in PID namespaces of their own: the number that a client has for itself is another's, or nobody's, elsewhere.
#[test]
fn a_client_in_another_pid_namespace_dies_as_any_other() {
    if !common::boxes_work() {
        return;
    }
    let arena = Arena::new();
    let (mut a, mut b) = (arena.boxed("a"), arena.boxed("b"));
    let (_, ba) = send_late(&mut a, &mut b);
    b.ask("ready 0 60000");
    a.die("kill");
    assert!(b.answer().starts_with("err PeerDied"));
    b.ok("sync 1");
    b.ok("release 0");
    b.ok(&format!("close {ba}"));
    arena.settles_at(0);
    eventually("the dead one is gone", || arena.row("a").is_none());
}

#[test]
fn without_an_owner_a_peer_in_another_pid_namespace_is_watched_by_those_that_import_from_it() {
    if !common::boxes_work() {
        return;
    }
    let mut arena = Arena::new();
    let (mut a, mut b) = (arena.boxed("a"), arena.boxed("b"));
    send_late(&mut a, &mut b);
    arena.owner.signal(libc::SIGKILL);
    arena.owner.wait();
    eventually("the owner's death is seen", || b.number("owner") == 0);
    b.fails("Timeout", "ready 0 50");
    assert_eq!(b.number("idle 1"), 0);
    a.die("kill");
    b.ok("sync 1");
    b.fails("PeerDied", "ready 0");
}

/// Neither by a pidfd that the owner gave, for a channel or a window, nor by a number that is good here.
#[test]
fn without_an_owner_a_peer_that_cannot_be_watched_keeps_what_it_holds() {
    if !common::boxes_work() {
        return;
    }
    let mut arena = Arena::new();
    let (mut a, mut b) = (arena.boxed("a"), arena.boxed("b"));
    let (mut p, mut d) = (arena.worker("p"), arena.worker("d"));
    // What a made came to b over p, which waits for something of b's.
    let (ap, pa) = link(&mut a, &mut p);
    a.ok(&format!("alloc {MIB}"));
    a.ok("fill 0 1");
    a.ok(&format!("send {ap} 0"));
    p.ok(&format!("recv {pa}"));
    send_late(&mut b, &mut p);
    let (pb, bp) = link(&mut p, &mut b);
    p.ok(&format!("forward {pb} 0"));
    b.ok(&format!("recv {bp}"));
    p.ok("release 0");
    let (ad, da) = link(&mut a, &mut d);
    a.ok(&format!("alloc {MIB}"));
    a.ok(&format!("send {ad} 1"));
    d.ok(&format!("recv {da}"));
    arena.owner.signal(libc::SIGKILL);
    arena.owner.wait();
    d.die("kill");
    // When a has looked at d it has looked at b.
    a.ok("waitdone 1");
    assert_eq!(a.number("leases"), 1, "b lives");
    p.fails("Timeout", "ready 1 50");
    assert_eq!(p.number("idle 1"), 0);
    a.ok("free 0");
    a.ok(&format!("alloc {MIB}"));
    a.ok("fill 2 9");
    b.ok("check 0 1");
    b.ok("release 0");
    eventually("the lease ends", || a.number("leases") == 0);
}

#[test]
fn without_an_owner_a_peer_in_another_pid_namespace_is_watched_by_those_that_have_a_channel_to_it() {
    if !common::boxes_work() {
        return;
    }
    let mut arena = Arena::new();
    let (mut a, mut b) = (arena.boxed("a"), arena.boxed("b"));
    let (ab, ba) = link(&mut a, &mut b);
    a.ok(&format!("alloc {MIB}"));
    a.ok(&format!("send {ab} 0"));
    b.ok(&format!("recv {ba}"));
    arena.owner.signal(libc::SIGKILL);
    arena.owner.wait();
    eventually("the owner's death is seen", || a.number("owner") == 0);
    assert_eq!(a.number("leases"), 1);
    b.die("kill");
    eventually("what b held is a's again", || a.number("leases") == 0);
}

/// Its work may run on: who has a channel to it sees that the child has it too. Who has none releases its waiters, which is no word on that.
#[test]
fn without_an_owner_a_forked_child_is_waited_for() {
    let mut arena = Arena::new();
    let (mut a, mut b, mut c) = (arena.worker("a"), arena.worker("b"), arena.worker("c"));
    let (ab, ba) = link(&mut a, &mut b);
    let (ac, ca) = link(&mut a, &mut c);
    for block in 0..2 {
        a.ok(&format!("alloc {MIB}"));
        a.ok(&format!("fill {block} 1"));
        a.ok(&format!("send {ab} {block}"));
        b.ok(&format!("recv {ba} 1"));
    }
    // One it holds; of the other the DONE is recorded, and stands behind its stalled stream, as a value of its own does.
    b.ok("stall 1");
    b.ok("touch 0 2 1");
    b.ok("release 0");
    b.ok(&format!("alloc {MIB} 1"));
    b.ok("fill 0 1 1");
    b.ok(&format!("send {ba} 0 1"));
    a.ok("waitdone 0 2 10000");
    a.ok(&format!("recv {ab} lazy"));
    a.ok(&format!("forward {ac} 0"));
    c.ok(&format!("recv {ca} lazy"));
    a.ok(&format!("alloc {MIB}"));
    a.ok(&format!("send {ac} 2"));
    c.ok(&format!("recv {ca}"));
    arena.owner.signal(libc::SIGKILL);
    arena.owner.wait();
    b.fork();
    b.die("kill");
    c.fails("PeerDied", "ready 0");
    c.die("kill");
    // When a has looked at c it has looked at b.
    a.ok("waitdone 2");
    assert_eq!(a.number("leases"), 2);
    for block in 0..2 {
        a.fails("Timeout", &format!("waitdone {block} - 50"));
    }
    b.end_child();
    a.ok("waitdone 0");
    a.ok("waitdone 1");
    eventually("the leases end", || a.number("leases") == 0);
}

#[test]
fn without_an_owner_one_that_passes_on_may_die_while_it_sends() {
    let mut arena = Arena::new();
    let (mut a, mut s, mut b, mut c) = (arena.worker("a"), arena.worker("s"), arena.worker("b"), arena.worker("c"));
    let (sb, bs) = link(&mut s, &mut b);
    let (bc, cb) = link(&mut b, &mut c);
    b.ok(&format!("alloc {MIB}"));
    b.ok(&format!("send {bc} 0"));
    c.ok(&format!("recv {cb}"));
    let (as_, sa) = link(&mut a, &mut s);
    a.ok(&format!("alloc {MIB}"));
    a.ok(&format!("send {as_} 0"));
    s.ok(&format!("recv {sa}"));
    s.ask(&format!("floodon {sb} 0"));
    // It blocks in the send: no answer.
    assert_eq!(s.answers_within(Duration::from_millis(100)), None);
    arena.owner.signal(libc::SIGKILL);
    arena.owner.wait();
    s.die("kill");
    c.die("kill");
    // When b has looked at c it has looked at s.
    b.ok("waitdone 0");
    b.ok(&format!("close {bs}"));
    eventually("nothing is lent", || a.number("leases") == 0);
}
