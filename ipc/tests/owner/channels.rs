//! Channels: sockets between clients, made by the owner.

use std::os::fd::OwnedFd;

use millpond_ipc::wire::{Answer, Peer, Reason, Request, Role};

use crate::puppet::Puppet;
use crate::raw::*;

fn channel((answer, mut fds): (Answer, Vec<OwnedFd>)) -> (Peer, OwnedFd) {
    match answer {
        Answer::Channel { peer } => (peer, fds.remove(0)),
        other => panic!("{other:?}"),
    }
}

fn reason((answer, _): (Answer, Vec<OwnedFd>)) -> Reason {
    match answer {
        Answer::Refused { reason, .. } => reason,
        other => panic!("{other:?}"),
    }
}

fn connect(peer: &str) -> Request {
    Request::Connect { peer: peer.to_owned(), timeout_ms: 20_000 }
}

const ACCEPT: Request = Request::Accept { timeout_ms: 20_000 };

fn assert_joined(one: &OwnedFd, other: &OwnedFd) {
    rustix::io::write(one, b"ping").unwrap();
    let mut bytes = [0; 4];
    rustix::io::read(other, &mut bytes).unwrap();
    assert_eq!(&bytes, b"ping");
    assert!(rustix::io::fcntl_getfd(one).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn a_worker_meets_its_parent_whoever_asks_first() {
    let served = Served::start(config());
    let (mut parent, mut worker) = (served.attach_as("main", Role::Parent), served.attach("denoiser"));
    for accept_first in [true, false] {
        let (accept, ask) = if accept_first {
            (parent.post(ACCEPT), worker.post(connect("parent")))
        } else {
            let ask = worker.post(connect("parent"));
            (parent.post(ACCEPT), ask)
        };
        let (worker_peer, parent_end) = channel(parent.answer(accept));
        let (parent_peer, worker_end) = channel(worker.answer(ask));
        assert_eq!((worker_peer.name.as_str(), worker_peer.client), ("denoiser", worker.slot()));
        assert_eq!((parent_peer.name.as_str(), parent_peer.client), ("main", parent.slot()));
        assert_joined(&worker_end, &parent_end);
        assert_joined(&parent_end, &worker_end);
    }
}

#[test]
fn a_worker_may_ask_before_there_is_a_parent() {
    let served = Served::start(config());
    let mut worker = served.attach("early");
    let ask = worker.post(connect("parent"));
    let mut parent = served.attach_as("main", Role::Parent);
    let (_, parent_end) = channel(parent.call(ACCEPT));
    assert_joined(&channel(worker.answer(ask)).1, &parent_end);
}

#[test]
fn workers_come_in_the_order_in_which_they_asked() {
    let served = Served::start(config());
    let mut workers: Vec<Raw> = (0..3).map(|n| served.attach(&format!("w{n}"))).collect();
    let mut parent = served.attach_as("main", Role::Parent);
    for worker in &mut workers {
        worker.post(connect("parent"));
        // The next one asks when this one's request is in.
        let ledger = worker.post(Request::Ledger);
        worker.answer(ledger);
    }
    for worker in &workers {
        assert_eq!(channel(parent.call(ACCEPT)).0.client, worker.slot());
    }
}

#[test]
fn workers_meet_by_name_and_by_slot() {
    let served = Served::start(config());
    let (mut one, mut other) = (served.attach("one"), served.attach("other"));
    let first = one.post(connect("other"));
    let (peer, end) = channel(other.call(connect(&one.slot().to_string())));
    assert_eq!(peer.name, "one");
    assert_joined(&end, &channel(one.answer(first)).1);
    // One that just accepts is met too.
    let accept = one.post(ACCEPT);
    let (_, end) = channel(other.call(connect("one")));
    assert_joined(&end, &channel(one.answer(accept)).1);
    assert_eq!(reason(one.call(connect("one"))), Reason::InvalidArgument);
}

#[test]
fn a_time_out_is_said() {
    let served = Served::start(config());
    let mut client = served.attach("alone");
    assert_eq!(reason(client.call(Request::Accept { timeout_ms: 20 })), Reason::Timeout);
    assert_eq!(reason(client.call(Request::Connect { peer: "nobody".to_owned(), timeout_ms: 20 })), Reason::Timeout);
    assert_eq!(reason(client.call(Request::Connect { peer: "parent".to_owned(), timeout_ms: 0 })), Reason::Timeout);
    client.post(Request::Accept { timeout_ms: u64::MAX });
}

#[test]
fn a_peer_that_dies_ends_the_wait_for_it() {
    let served = Served::start(config());
    let mut client = served.attach("waiter");
    let (mut puppet, _) = Puppet::ready(&served, &client, "mayfly", "");
    let call = client.post(connect("mayfly"));
    let ledger = client.post(Request::Ledger);
    client.answer(ledger);
    puppet.kill();
    assert_eq!(reason(client.answer(call)), Reason::PeerDied);
}

#[test]
fn too_many_requests_of_one_client_are_refused() {
    let served = Served::start(config());
    let mut client = served.attach("eager");
    for _ in 0..256 {
        client.post(ACCEPT);
    }
    assert_eq!(reason(client.call(ACCEPT)), Reason::Refused);
}
