//! A value that leaves by host memory in pieces: its message goes ahead of its bytes, and each side may end at any of them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::time::Duration;

use common::{eventually, link, Arena, Worker, MIB};

#[test]
fn role() {
    common::role();
}

const BYTES: u64 = 8 * MIB;

/// Blocks 0 (the value, 7 all over, as soon as stream 1 may go on) and 1 (host memory), and the value's copy under way to there, in
/// two pieces.
struct Out {
    number: String,
    pieces: Vec<String>,
}

fn leave_late(a: &mut Worker) -> Out {
    a.ok(&format!("alloc {BYTES} 1"));
    a.ok(&format!("alloc {BYTES}"));
    a.ok("fill 1 1");
    a.ok("stall 1");
    a.ok("fill 0 7 1");
    out(a)
}

fn out(a: &mut Worker) -> Out {
    let answer = a.ok("copyout 1 0 1");
    let (number, pieces) = answer.split_once(' ').unwrap();
    Out { number: number.to_owned(), pieces: pieces.split(' ').map(str::to_owned).collect() }
}

#[test]
fn the_message_goes_ahead_and_each_piece_is_waited_for() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let Out { number, pieces } = leave_late(&mut a);
    assert!(pieces[0].starts_with("4194304:") && pieces[1].starts_with("8388608:"), "{pieces:?}");
    a.ok(&format!("send {ab} 1"));
    b.ok(&format!("alloc {BYTES}"));
    b.ok("fill 0 2");
    b.ok(&format!("recv {ba} lazy"));
    let (first, second) = (&pieces[0], &pieces[1]);
    assert_eq!(b.ok(&format!("copyin 0 0 20 0 {first} {second}")), "0", "nothing is there yet");
    b.ok("checkblock 0 2");
    a.ok("go 1");
    assert_eq!(b.number(&format!("copyin 0 0 10000 0 {first} {second}")), BYTES);
    b.ok("checkblock 0 7");
    a.ok(&format!("copiedout {number}"));
    b.ok("release 0");
    eventually("the lease ends", || a.number("leases") == 0);
    // What is over is no longer waited for: the block is sent as any other.
    a.ok(&format!("send {ab} 1"));
    let again = b.number(&format!("recv {ba} plain 1000"));
    b.ok(&format!("check {again} 7"));
}

#[test]
fn a_receiver_of_host_memory_waits_for_all_of_it_wherever_it_came_by() {
    let arena = Arena::new();
    let (mut a, mut b, mut c) = (arena.worker("a"), arena.worker("b"), arena.worker("c"));
    let (ab, ba) = link(&mut a, &mut b);
    let (bc, cb) = link(&mut b, &mut c);
    let leaving = leave_late(&mut a);
    a.ok(&format!("send {ab} 1"));
    b.ok(&format!("recv {ba} lazy"));
    b.ok(&format!("forward {bc} 0"));
    b.ok("release 0");
    b.fails("Timeout", "recv 0 plain 20");
    c.ask(&format!("recv {cb}"));
    assert_eq!(c.answers_within(Duration::from_millis(30)), None, "it is not there yet");
    a.ok("go 1");
    assert_eq!(c.answer(), "ok 0");
    c.ok("check 0 7");
    a.ok(&format!("copiedout {}", leaving.number));
}

#[test]
fn the_sender_ends_in_the_middle_of_a_value() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    // A piece of an earlier copy stands for a first piece that is there; the second never comes.
    a.ok(&format!("alloc {BYTES} 1"));
    a.ok(&format!("alloc {BYTES}"));
    let early = out(&mut a);
    a.ok(&format!("copiedout {}", early.number));
    a.ok("stall 1");
    let late = out(&mut a);
    a.ok(&format!("send {ab} 1"));
    b.ok(&format!("alloc {BYTES}"));
    b.ok(&format!("recv {ba} lazy"));
    let pieces = format!("{} {}", early.pieces[0], late.pieces[1]);
    assert_eq!(b.number(&format!("copyin 0 0 20 0 {pieces}")), BYTES / 2, "the first piece does not wait for the second");
    b.ask(&format!("copyin 0 0 20000 {} {pieces}", BYTES / 2));
    assert_eq!(b.answers_within(Duration::from_millis(20)), None);
    a.die("kill");
    let answer = b.answer();
    assert!(answer.starts_with("err PeerDied") && answer.contains("received from a"), "{answer}");
    b.fails("PeerDied", &format!("copyin 0 0 20000 0 {pieces}"));
    b.ok("release 0");
    b.ok("free 0");
    b.ok("trim");
    arena.settles_at(0);
}

#[test]
fn the_receiver_ends_in_the_middle_of_a_value() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let Out { number, pieces } = leave_late(&mut a);
    a.ok(&format!("send {ab} 1"));
    b.ok(&format!("alloc {BYTES}"));
    b.ok(&format!("recv {ba} lazy"));
    b.ask(&format!("copyin 0 0 20000 0 {}", pieces.join(" ")));
    assert_eq!(b.answers_within(Duration::from_millis(20)), None);
    b.die("kill");
    a.ok("go 1");
    a.ok(&format!("copiedout {number}"));
    eventually("the lease ends", || a.number("leases") == 0);
    a.ok("checkblock 1 7");
    a.ok("free 0");
    a.ok("free 1");
    a.die("exit");
    arena.settles_at(0);
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let Out { number, pieces } = leave_late(&mut a);
    a.ok("go 1");
    a.ok(&format!("send {ab} 1"));
    b.ok(&format!("alloc {BYTES}"));
    b.ok(&format!("recv {ba} lazy"));
    let (first, second) = (&pieces[0], &pieces[1]);
    for wrong in [format!("{second} {first}"), first.clone(), format!("{first} 99999999:1:1"), "8388608:4000000000:1".to_owned()] {
        let answer = b.fails("Protocol", &format!("copyin 0 0 1000 0 {wrong}"));
        assert!(answer.contains("pieces that end") || answer.contains("no timeline"), "{answer}");
    }
    b.fails("Protocol", &format!("copyin 0 0 1000 {} {first} {second}", BYTES + 1));
    b.ok("release 0");
    b.fails("InvalidArgument", &format!("copyin 0 0 1000 0 {first} {second}"));
    a.ok(&format!("copiedout {number}"));
    a.fails("InvalidArgument", &format!("copiedout {number}"));
}
