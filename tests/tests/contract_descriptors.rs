//! A process that may have no more file descriptors: what needs one fails by name, nothing else does, and nothing is lost by it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, not only tests

mod common;

use common::*;

#[test]
fn role() {
    common::role();
}

/// The books of a worker: chunks that it has, and all that are reserved.
fn has(arena: &Arena, name: &str) -> (u64, u64) {
    (arena.row(name).unwrap().reserved, arena.books().0)
}

#[test]
fn a_growth_without_descriptors_fails_by_name_and_its_chunks_go_back() {
    let arena = Arena::with(4 << 30, 32 * MIB);
    let mut a = arena.worker("a");
    a.ok(&format!("alloc {MIB}"));
    let before = has(&arena, "a");
    let fds = a.number("fds");
    // Of three chunks' descriptors none come, one, two.
    for spare in 0..3 {
        a.ok(&format!("nofile {spare}"));
        let said = a.fails("Internal", &format!("alloc {}", 96 * MIB));
        assert!(said.contains(&format!("{spare} of 3 descriptors came")) && said.contains("RLIMIT_NOFILE is "), "{said}");
        assert!(said.contains("raise the limit"), "{said}");
        eventually("they are back", || has(&arena, "a") == before);
        assert_eq!(a.number("owner"), 1, "the owner lives");
    }
    a.ok("nofile");
    assert_eq!(a.number("fds"), fds, "those that came are closed");
    let n = a.number(&format!("alloc {}", 96 * MIB));
    a.ok(&format!("fill {n} 7"));
    a.ok(&format!("checkblock {n} 7"));
    assert_eq!(has(&arena, "a").1, before.1 + 96 * MIB);
    a.die("kill");
    arena.settles_at(0);
}

/// It is not taken for the owner's end: who is to end with the owner lives.
#[test]
fn who_ends_with_the_owner_does_not_end() {
    let arena = Arena::new();
    let mut a = arena.worker_with("a", &[("MILLPOND_TEST_EXIT", "1")]);
    a.ok("nofile 0");
    a.fails("Internal", &format!("alloc {MIB}"));
    a.fails("Internal", &format!("alloc {MIB}"));
    a.ok("nofile");
    a.ok(&format!("alloc {MIB}"));
}

#[test]
fn an_import_without_descriptors_fails_by_name_and_the_next_one_works() {
    let arena = Arena::with(4 << 30, 32 * MIB);
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let n = a.number(&format!("alloc {}", 64 * MIB));
    a.ok(&format!("fill {n} 3"));
    for _ in 0..3 {
        a.ok(&format!("send {ab} {n}"));
    }
    // The first needs a descriptor of its maker's process, the second those of two chunks.
    for (spare, came) in [(0, "0 of 1"), (1, "1 of 2")] {
        b.ok(&format!("nofile {spare}"));
        let said = b.fails("Internal", &format!("recv {ba}"));
        assert!(said.contains(came) && said.contains("RLIMIT_NOFILE is "), "{said}");
    }
    assert_eq!(b.number("imported"), 0);
    b.ok("nofile");
    let i = b.number(&format!("recv {ba}"));
    b.ok(&format!("check {i} 3"));
    b.ok(&format!("release {i}"));
    eventually("nothing is held", || a.number("leases") == 0);
    a.ok(&format!("free {n}"));
    a.ok("trim");
    arena.settles_at(0);
}

/// Who gets no socket is told so; the other side's end is closed, and what it sent until then comes back.
#[test]
fn a_channel_without_descriptors_is_closed_at_its_other_end() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let n = a.number(&format!("alloc {MIB}"));
    b.ok("nofile 0");
    a.ask("connect b 10000");
    let said = b.fails("Internal", "connect a 10000");
    assert!(said.contains("0 of 2 descriptors came"), "{said}");
    let ab = a.answer();
    let ab = ab.strip_prefix("ok ").unwrap();
    a.fails("Closed", &format!("send {ab} {n}"));
    eventually("nothing is on its way", || a.number("leases") == 0);
    b.ok("nofile");
    let (ab, ba) = link(&mut a, &mut b);
    a.ok(&format!("send {ab} {n}"));
    let i = b.number(&format!("recv {ba}"));
    b.ok(&format!("release {i}"));
}
