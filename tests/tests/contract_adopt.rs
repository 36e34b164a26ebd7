//! Adoption: what was received outlives its maker, under the account of the one that adopted it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{block, eventually, is_all, link, plainly, Arena, Worker, BOUND, MIB};
use millpond_ipc::client::{Client, Error, Options, Place};

#[test]
fn role() {
    common::role();
}

/// `a` makes two values, one of a whole chunk and one that shares its chunk with nothing that is lent; `b` receives the first.
struct Pair {
    a: Worker,
    b: Worker,
    ab: u64,
    ba: u64,
}

fn pair(arena: &Arena) -> Pair {
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    a.ok(&format!("alloc {}", 32 * MIB));
    a.ok("fill 0 5");
    a.ok(&format!("alloc {}", 32 * MIB));
    a.ok("fill 1 9");
    a.ok(&format!("send {ab} 0"));
    b.ok(&format!("recv {ba}"));
    Pair { a, b, ab, ba }
}

/// (reserved, adopted) of a client.
fn account(arena: &Arena, name: &str) -> (u64, u64) {
    arena.row(name).map_or((0, 0), |row| (row.reserved, row.adopted))
}

fn becomes_the_adopters(how: &str) {
    let arena = Arena::new();
    let Pair { mut a, mut b, .. } = pair(&arena);
    b.ok("adopt 0");
    b.ok("adopt 0");
    assert_eq!((account(&arena, "a"), account(&arena, "b")), ((64 * MIB, 0), (0, 0)), "while its maker lives nothing moves");
    match how {
        // In good order: the process detaches and ends.
        "detach" => {
            a.ok("detach");
            a.die("exit");
        }
        how => a.die(how),
    }
    // Exactly the chunk that was adopted stays: the other one is free.
    eventually("it is the adopter's", || account(&arena, "b") == (32 * MIB, 32 * MIB));
    arena.settles_at(32 * MIB);
    b.ok("check 0 5");
    // It may do with it what it may with its own.
    b.ok("touch 0 6 1");
    b.ok("sync 1");
    b.ok("check 0 6");
    b.ok("release 0");
    eventually("let go of, it is free to the byte", || arena.books() == (0, 0, 0));
    assert_eq!(account(&arena, "b"), (0, 0));
    eventually("the maker's slot is free", || arena.row("a").is_none());
}

#[test]
fn its_maker_leaves_in_good_order() {
    becomes_the_adopters("detach");
}

#[test]
fn its_maker_ends_without_a_word() {
    becomes_the_adopters("exit");
}

#[test]
fn its_maker_is_killed() {
    becomes_the_adopters("kill");
}

#[test]
fn its_maker_crashes() {
    becomes_the_adopters("segv");
}

#[test]
fn its_maker_frees_it_and_fills_the_size_again() {
    let arena = Arena::new();
    let Pair { mut a, mut b, .. } = pair(&arena);
    b.ok("adopt 0");
    a.ok("free 0");
    a.ok("trim");
    let n = a.number(&format!("alloc {}", 32 * MIB));
    a.ok(&format!("fill {n} 77"));
    b.ok("check 0 5");
    assert_eq!(a.number("leases"), 1);
    b.ok("release 0");
    eventually("the block is its maker's again", || a.number("leases") == 0);
    a.ok(&format!("free {n}"));
    a.ok("free 1");
    a.ok("trim");
    arena.settles_at(0);
}

#[test]
fn what_never_got_ready_cannot_be_adopted() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    a.ok(&format!("alloc {MIB} 1"));
    a.ok("stall 1");
    a.ok("fill 0 5 1");
    a.ok(&format!("send {ab} 0 1"));
    b.ok(&format!("recv {ba} lazy"));
    b.fails("Timeout", "adopt 0 20");
    a.die("kill");
    b.fails("PeerDied", "adopt 0");
    b.ok("release 0");
    b.ok(&format!("close {ba}"));
    arena.settles_at(0);
}

#[test]
fn what_is_ready_may_be_adopted_after_its_makers_death_and_unmapped() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    a.ok(&format!("alloc {MIB}"));
    a.ok("fill 0 5");
    a.ok(&format!("send {ab} 0"));
    b.ok(&format!("recv {ba} lazy"));
    a.die("kill");
    let chunk = millpond_allocator::heap::HeapConfig::default().min_growth;
    eventually("it is the reader's", || arena.books().2 == chunk);
    b.ok("adopt 0");
    assert_eq!((arena.books(), account(&arena, "b")), ((chunk, 0, 0), (chunk, chunk)), "at once");
    b.ok("open 0");
    b.ok("check 0 5");
    b.ok("release 0");
    arena.settles_at(0);
}

#[test]
fn only_a_writable_value_of_another_can_be_adopted() {
    let arena = Arena::new();
    let Pair { mut a, mut b, ab, ba } = pair(&arena);
    assert!(b.fails("InvalidArgument", "adoptat foreign").contains("not memory of the arena"));
    b.ok(&format!("alloc {MIB}"));
    assert!(b.fails("InvalidArgument", "adoptat block 0").contains("own memory"));
    a.ok(&format!("send {ab} 1 - ro"));
    b.ok(&format!("recv {ba}"));
    assert!(b.fails("InvalidArgument", "adopt 1").contains("read-only"));
    assert!(b.fails("InvalidArgument", "adoptat import 1").contains("read-only"));
    b.ok(&format!("forward {ba} 0"));
    a.ok(&format!("recv {ab}"));
    assert!(a.fails("InvalidArgument", "adopt 0").contains("own memory"), "what comes back is not adopted");
    b.ok("adoptat import 0");
    b.ok("release 0");
    b.fails("InvalidArgument", "adopt 0");
    b.fails("Stale", "adoptat import 0");
}

#[test]
fn a_reader_keeps_what_its_adopter_lets_go_of() {
    let arena = Arena::new();
    let mut c = arena.worker("c");
    let Pair { mut a, mut b, .. } = pair(&arena);
    let (bc, cb) = link(&mut b, &mut c);
    b.ok("adopt 0");
    b.ok(&format!("forward {bc} 0"));
    c.ok(&format!("recv {cb} lazy"));
    a.die("kill");
    eventually("it is the adopter's", || arena.books() == (32 * MIB, 0, 0));
    c.ok("open 0");
    b.ok("release 0");
    eventually("it is nobody's, and still read", || arena.books() == (32 * MIB, 0, 32 * MIB));
    c.ok("check 0 5");
    c.ok("release 0");
    arena.settles_at(0);
}

#[test]
fn an_adopter_that_dies_leaves_it_to_the_next_one_and_the_last_to_nobody() {
    let arena = Arena::new();
    let mut c = arena.worker("c");
    let Pair { mut a, mut b, .. } = pair(&arena);
    let (bc, cb) = link(&mut b, &mut c);
    b.ok(&format!("forward {bc} 0"));
    c.ok(&format!("recv {cb}"));
    b.ok("adopt 0");
    c.ok("adopt 0");
    a.die("kill");
    eventually("it is one's", || account(&arena, "b").1 + account(&arena, "c").1 == 32 * MIB);
    b.die("kill");
    eventually("it is the other's", || account(&arena, "c") == (32 * MIB, 32 * MIB) && arena.books() == (32 * MIB, 0, 0));
    c.ok("check 0 5");
    c.die("kill");
    arena.settles_at(0);
    eventually("nobody is left", || arena.ledger().devices[0].clients.is_empty());
}

#[test]
fn it_counts_against_the_adopters_own_limit() {
    let arena = Arena::new();
    let mut a = arena.worker("a");
    let options = Options { limit: Some(48 * MIB), ..arena.options("b") };
    let b = Client::attach(&options).unwrap();
    a.ask("connect b");
    let channel = b.connect("a", BOUND).unwrap();
    assert_eq!(a.answer(), "ok 0");
    for byte in 1..3 {
        let n = a.number(&format!("alloc {}", 32 * MIB));
        a.ok(&format!("fill {n} {byte}"));
        a.ok(&format!("send 0 {n}"));
    }
    let take = || b.receive(&channel, &plainly(false)).unwrap().tensors[0];
    let (first, second) = (take(), take());
    let own = block(&b, 32 * MIB, 3);
    let error = b.adopt(first.import, None).unwrap_err();
    assert!(matches!(&error, Error::OutOfMemory(text) if text.contains(&(48 * MIB).to_string())), "{error}");
    b.free(own).unwrap();
    eventually("what is free of its own makes room", || b.adopt(first.import, None).is_ok());
    a.die("kill");
    eventually("it is the adopter's", || account(&arena, "b") == (32 * MIB, 32 * MIB));
    assert!(matches!(b.adopt(second.import, None), Err(Error::OutOfMemory(_))));
    assert!(b.heap(Place::Host).unwrap().allocate(32 * MIB, millpond_allocator::driver::Stream::LEGACY).is_err());
    assert!(is_all(first.addr, first.bytes, 1) && is_all(second.addr, second.bytes, 2));
    b.release(first.import).unwrap();
    eventually("one is free, the other is still read", || arena.books() == (32 * MIB, 0, 32 * MIB));
    let own = block(&b, 32 * MIB, 4);
    b.free(own).unwrap();
    b.release(second.import).unwrap();
    eventually("everything is back", || {
        b.heap(Place::Host).unwrap().empty_cache();
        arena.books() == (0, 0, 0)
    });
}

#[test]
fn adopted_memory_is_not_asked_back_as_slack() {
    let arena = Arena::with(96 * MIB, 32 * MIB);
    let Pair { mut a, mut b, .. } = pair(&arena);
    b.ok("adopt 0");
    a.die("kill");
    eventually("it is the adopter's", || arena.row("b").is_some_and(|row| row.adopted == 32 * MIB && row.slack() == 0));
    let mut c = arena.worker("c");
    c.ok(&format!("alloc {}", 64 * MIB));
    let refused = c.fails("OutOfMemory", &format!("alloc {}", 32 * MIB));
    assert!(refused.contains(&format!("b (pid {}): 32.00 MiB", b.said.pid())), "it says who holds it: {refused}");
    b.ok("check 0 5");
}

#[test]
fn without_an_owner_nothing_is_adopted_and_nothing_is_lost() {
    let mut arena = Arena::new();
    let Pair { mut a, mut b, .. } = pair(&arena);
    b.ok("adopt 0");
    arena.owner.signal(libc::SIGKILL);
    arena.owner.wait();
    b.ok("adopt 0");
    a.die("kill");
    b.ok("check 0 5");
    b.ok("release 0");
}
