//! An owner's loop, from connections of processes that end afterwards: as after any misbehaviour, their part comes back.

use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use millpond_ipc::wire::{FromClient, Request, Role};
use serde_json::Value;

use crate::material::Dice;
use crate::raw::*;

const CONNECTIONS: u64 = 30;

/// Good messages, to be changed.
fn corpus(key: &str, window: u32, epochs: &[u64]) -> Vec<Value> {
    let epochs = epochs.to_vec();
    let calls = [
        Request::Grow { device: 0, bytes: UNIT, press: true },
        Request::Release { epochs: epochs.clone() },
        Request::Window { window },
        Request::Import { window, epochs: epochs.clone() },
        Request::Adopt { producer: 0, index: 0, generation: 1 },
        Request::Unmapped { epochs },
        Request::Accept { timeout_ms: 1 },
        Request::Connect { peer: "witness".to_owned(), timeout_ms: 1 },
        Request::Ledger,
        Request::Windows,
        Request::Faulted { device: 0, timelines: vec![0, u32::MAX] },
        // Nobody is stopped here. No kill: a seed could come to mean the test itself.
        Request::Policy { client: 0, serial: 1, kill_stopped_after_ms: Some(1 << 40) },
        Request::Detach,
    ];
    let mut corpus: Vec<Value> =
        calls.into_iter().map(|call| serde_json::to_value(FromClient::Call { call_id: 7, call }).unwrap()).collect();
    corpus.push(serde_json::to_value(FromClient::Answered { ask_id: 1, bytes: 0 }).unwrap());
    corpus.push(serde_json::to_value(hello(key, "fuzz", Role::Observer)).unwrap());
    corpus
}

/// Not a test: the misbehaving process, where it is asked for.
#[test]
fn a_misbehaving_process() {
    let Ok(asked) = std::env::var("MILLPOND_FUZZ_TARGET") else { return };
    let (seed, rest) = asked.split_once(' ').unwrap();
    let (key, socket) = rest.split_once(' ').unwrap();
    let mut dice = Dice(seed.parse().unwrap());
    // What was sent is thrown away with the connection, or kept open until the end.
    let mut open = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut wire = Wire::connect(socket.as_ref());
        let (mut window, mut epochs) = (1, vec![1]);
        if dice.percent(60) {
            let role = *dice.of(&[Role::Worker, Role::Worker, Role::Parent, Role::Observer]);
            let Ok(mut raw) = Raw::attach(socket.as_ref(), &hello(key, "fuzz", role)) else { continue };
            if role != Role::Observer && dice.percent(70) {
                epochs = crate::raw::epochs(&raw.grow(UNIT));
            }
            window = raw.welcome.devices[0].window;
            wire = raw.wire;
        }
        let corpus = corpus(key, window, &epochs);
        for _ in 0..1 + dice.below(12) {
            let bytes = if dice.percent(95) { dice.frame(&corpus) } else { (0..dice.below(64)).map(|_| dice.next() as u8).collect() };
            if !dice.write(wire.socket.as_fd(), &bytes) {
                break;
            }
            if dice.percent(30) {
                let _ = wire.reader.fill(wire.socket.as_fd());
            }
        }
        if dice.percent(30) {
            open.push(wire);
        }
    }
}

#[test]
fn an_owner_serves_the_others_whatever_comes() {
    let served = Served::start(config());
    let mut witness = served.attach("witness");
    let fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = fds();
    crate::campaign("server", 12, |seed| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "server::a_misbehaving_process", "--nocapture", "--test-threads", "1"])
            .env("MILLPOND_FUZZ_TARGET", format!("{seed} {} {}", served.key, served.socket.display()))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // While it goes on, and when it has ended.
        let chunks = witness.grow(UNIT);
        // Rows are whole; together they are not one moment.
        until("the books fit", || {
            let ledger = witness.ledger();
            ledger.clients.iter().map(|client| client.reserved).sum::<u64>() + ledger.retired + ledger.orphaned == ledger.reserved
        });
        assert_eq!(witness.release(&chunks).0, UNIT);
        until("the process ends", || child.try_wait().unwrap().is_some());
        assert!(child.wait().unwrap().success(), "the fuzzing process itself failed");
        let mut next = 0;
        until("everything of it is gone", || {
            next += 1;
            let ledger = witness.ledger();
            ledger.reserved == 0 && ledger.clients.len() == 1
        });
        assert_sums(&witness.ledger());
        until("its connections are gone", || fds() <= before);
    });
    witness.detach();
}
