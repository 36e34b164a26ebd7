//! Tickets: a message for whoever comes, once or often; what ends one, and what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::{block, eventually, is_all, outgoing, tree, Arena, BOUND, MIB};
use millpond_ipc::client::{Client, Error, Message};

#[test]
fn role() {
    common::role();
}

/// A ticket for a new block of one byte's value, and the block.
fn ticket(client: &Client, byte: u8, many: bool) -> (String, u64) {
    let addr = block(client, MIB, byte);
    let tensor = outgoing(addr, MIB);
    let (text, copied) = client.ticket(tree(), &[tensor], many).unwrap();
    assert_eq!(copied, [false]);
    (text, addr)
}

fn holds(client: &Client, message: &Message, byte: u8) -> u64 {
    let import = message.tensors[0].import;
    let addr = client.open_import(import, None, true, Some(BOUND)).unwrap();
    assert!(is_all(addr, MIB, byte));
    import
}

fn stale(client: &Arc<Client>, text: &str) -> String {
    match client.redeem(text) {
        Err(Error::Stale(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_ticket_is_redeemed_once_and_its_block_lives_until_then() {
    let arena = Arena::new();
    let (a, b, c) = (arena.client("a"), arena.client("b"), arena.client("c"));
    let (text, addr) = ticket(&a, 5, false);
    a.free(addr).unwrap();
    assert_eq!(a.leases(), 1, "freed by its maker, kept by the ticket");
    let import = holds(&b, &b.redeem(&text).unwrap(), 5);
    assert!(stale(&c, &text).contains("redeemed"));
    assert!(stale(&b, &text).contains("redeemed"));
    assert_eq!(a.leases(), 1);
    b.release(import).unwrap();
    assert!(b.is_parted(import));
    eventually("the lease ends", || a.leases() == 0);
}

#[test]
fn one_for_many_is_redeemed_until_it_is_cancelled_and_what_was_taken_stays() {
    let arena = Arena::new();
    let (a, b, c) = (arena.client("a"), arena.client("b"), arena.client("c"));
    let (text, addr) = ticket(&a, 6, true);
    a.free(addr).unwrap();
    let first = holds(&b, &b.redeem(&text).unwrap(), 6);
    let second = holds(&c, &c.redeem(&text).unwrap(), 6);
    let own = holds(&a, &a.redeem(&text).unwrap(), 6);
    a.cancel_ticket(&text).unwrap();
    assert!(stale(&b, &text).contains("withdrawn"));
    assert!(!b.is_parted(first), "it is still held");
    holds(&b, &Message { tree: tree(), tensors: Vec::new() }.with(&b, first), 6);
    for (client, import) in [(&b, first), (&c, second), (&a, own)] {
        assert_eq!(a.leases(), 1);
        client.release(import).unwrap();
    }
    eventually("the lease ends", || a.leases() == 0);
}

/// For looking at an import again.
trait With {
    fn with(self, client: &Client, import: u64) -> Self;
}

impl With for Message {
    fn with(mut self, client: &Client, import: u64) -> Self {
        self.tensors.push(client.open_on(import, millpond_allocator::driver::Stream::LEGACY, true).unwrap());
        self
    }
}

#[test]
fn a_cancelled_ticket_gives_its_block_back_and_only_its_maker_cancels() {
    let arena = Arena::new();
    let (a, b) = (arena.client("a"), arena.client("b"));
    let (text, addr) = ticket(&a, 7, false);
    a.free(addr).unwrap();
    b.cancel_ticket(&text).unwrap();
    assert_eq!(a.leases(), 1, "another's word ends nothing");
    a.cancel_ticket(&text).unwrap();
    assert_eq!(a.leases(), 0);
    assert!(stale(&b, &text).contains("cancelled"));
    a.cancel_ticket(&text).unwrap();
}

#[test]
fn what_is_no_ticket_of_this_arena_is_refused() {
    let (arena, other) = (Arena::new(), Arena::new());
    let (a, b) = (arena.client("a"), other.client("b"));
    let (text, _) = ticket(&a, 9, false);
    assert!(stale(&b, &text).contains("of another arena"));
    for wrong in ["", "{}", "[]", "null", r#"{"token":"x"}"#, "\u{0}"] {
        assert!(matches!(b.redeem(wrong), Err(Error::Protocol(_))), "{wrong:?}");
        assert!(matches!(b.cancel_ticket(wrong), Err(Error::Protocol(_))), "{wrong:?}");
    }
    // Its range or hold changed on the way: refused, and nothing is left held.
    let c = arena.client("c");
    let longer = text.replace(&MIB.to_string(), &(2 * MIB).to_string());
    assert_ne!(longer, text);
    assert!(matches!(c.redeem(&longer), Err(Error::Protocol(_) | Error::Stale(_))));
    a.detach();
}
