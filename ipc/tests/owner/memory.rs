//! Growth, release, import and revoke.

use std::collections::BTreeSet;
use std::os::fd::AsRawFd;

use millpond_ipc::control::MAX_CLIENTS;
use millpond_ipc::owner::Config;
use millpond_ipc::wire::{Answer, Ask, Hello, Reason, Request, Role, MAX_FDS};

use crate::raw::*;

fn reason(answer: &Answer) -> Reason {
    match answer {
        Answer::Refused { reason, .. } => *reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_growth_comes_in_chunks_contiguous_in_address_with_the_rest_last() {
    let served = Served::start(Config { chunk_bytes: Some(8 * MIB), ..config() });
    let mut client = served.attach("worker");
    let sizes = |chunks: &[millpond_ipc::wire::Chunk]| chunks.iter().map(|chunk| chunk.bytes / MIB).collect::<Vec<_>>();
    let first = client.grow(20 * MIB);
    assert_eq!(sizes(&first), [8, 8, 4]);
    assert!(first.windows(2).all(|pair| pair[0].offset + pair[0].bytes == pair[1].offset));
    assert_eq!(sizes(&client.grow(2 * MIB)), [2]);
    let ledger = client.ledger_of(client.slot()).unwrap();
    assert_eq!((ledger.reserved, ledger.peak_reserved, ledger.chunks), (22 * MIB, 22 * MIB, 4));
    assert_eq!(client.ledger().growths, 2);
    assert_sums(&client.ledger());
}

#[test]
fn descriptors_are_of_the_right_size_and_close_on_exec() {
    let served = Served::start(config());
    let mut client = served.attach("worker");
    let (Answer::Granted { .. }, fds) = client.call(Request::Grow { device: 0, bytes: 4 * MIB, press: true }) else { panic!() };
    assert_eq!(rustix::fs::fstat(&fds[0]).unwrap().st_size, 4 << 20);
    assert!(rustix::io::fcntl_getfd(&fds[0]).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn more_chunks_than_one_frame_carries_come_by_import() {
    let served = Served::start(Config { host_bytes: Some(1 << 30), chunk_bytes: Some(UNIT), ..config() });
    let mut client = served.attach("worker");
    let (Answer::Granted { chunks }, fds) = client.call(Request::Grow { device: 0, bytes: 300 * UNIT, press: true }) else { panic!() };
    assert_eq!((chunks.len(), fds.len()), (300, MAX_FDS));
    let window = client.window();
    let (Answer::Granted { chunks: rest }, fds) = client.import(window, &chunks[MAX_FDS..]) else { panic!() };
    assert_eq!((rest.as_slice(), fds.len()), (&chunks[MAX_FDS..], 100));
    assert_eq!(reason(&client.import(window, &chunks).0), Reason::InvalidArgument);
    // Its own import holds nothing up.
    assert_eq!(client.release(&chunks), (300 * UNIT, 0));
}

#[test]
fn sizes_and_devices_that_are_none_are_refused() {
    let served = Served::start(config());
    let mut client = served.attach("worker");
    for (device, bytes) in [(0, 0), (0, 1), (0, UNIT + 1), (1, UNIT), (u32::MAX, UNIT), (0, u64::MAX)] {
        assert_eq!(reason(&client.call(Request::Grow { device, bytes, press: true }).0), Reason::InvalidArgument, "{device} {bytes}");
    }
    let huge = client.call(Request::Grow { device: 0, bytes: 1 << 63, press: true }).0;
    assert_eq!(reason(&huge), Reason::OutOfMemory);
    assert_eq!(client.ledger().reserved, 0);
}

#[test]
fn admission_is_exact_with_64_clients_racing() {
    let served = Served::start(config());
    let clients: Vec<Raw> = (0..MAX_CLIENTS).map(|n| served.attach(&format!("racer-{n}"))).collect();
    let granted: u64 = std::thread::scope(|scope| {
        let racer = |mut client: Raw| {
            client.say_used(u64::MAX);
            let mut granted = 0;
            while let (Answer::Granted { .. }, _) = client.call(Request::Grow { device: 0, bytes: UNIT, press: true }) {
                granted += UNIT;
                assert_eq!(client.ledger_of(client.slot()).unwrap().reserved, granted);
            }
            (granted, client)
        };
        let threads: Vec<_> = clients.into_iter().map(|client| scope.spawn(move || racer(client))).collect();
        let ended: Vec<(u64, Raw)> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let ledger = ended[0].1.ledger();
        assert_sums(&ledger);
        assert_eq!((ledger.reserved, ledger.growths, ledger.refusals), (256 * MIB, 128, 64));
        ended.iter().map(|(granted, _)| granted).sum()
    });
    assert_eq!(granted, 256 * MIB);
}

#[test]
fn out_of_memory_says_asked_limit_and_holders() {
    let served = Served::start(config());
    let (mut hog, mut client) = (served.attach("hog"), served.attach("late"));
    hog.grow(250 * MIB);
    hog.say_used(u64::MAX);
    let (Answer::Refused { reason, message, asked, limit, reserved, holders }, _) =
        client.call(Request::Grow { device: 0, bytes: 8 * MIB, press: true })
    else {
        panic!()
    };
    assert_eq!((reason, asked, limit, reserved), (Reason::OutOfMemory, 8 * MIB, 256 * MIB, 250 * MIB));
    assert_eq!((holders[0].name.as_str(), holders[0].reserved, holders[0].pid), ("hog", 250 * MIB, std::process::id()));
    assert!(message.contains("hog") && message.contains("HOST-0"), "{message}");
    assert_eq!(client.ledger().refusals, 1);
}

/// Whichever limit was hit: the arena's, the client's own, the window's. (The driver's: `contract_miss`.)
#[test]
fn every_refusal_for_lack_of_memory_names_the_holders() {
    let (plain, narrow) = (Served::start(config()), Served::start(Config { window_factor: 1, ..config() }));
    let cases = [(&plain, None, 512 * MIB, "of its limit"), (&plain, Some(4 * MIB), 6 * MIB, "own limit")];
    let cases = cases.into_iter().chain([(&narrow, None, 200 * MIB, "is exhausted")]);
    for (n, (served, own, bytes, why)) in cases.enumerate() {
        let mut hog = served.attach(&format!("hog-{n}"));
        hog.grow(2 * MIB);
        hog.say_used(u64::MAX);
        let mut client = Raw::attach(&served.socket, &Hello { limit: own, ..hello(&served.key, "late", Role::Worker) }).unwrap();
        if why == "is exhausted" {
            let chunks = client.grow(100 * MIB);
            client.grow(2 * MIB);
            client.release(&chunks);
        }
        let (Answer::Refused { reason, message, holders, .. }, _) = client.call(Request::Grow { device: 0, bytes, press: true }) else {
            panic!("{why}")
        };
        assert!(reason == Reason::OutOfMemory && message.contains(why), "{message}");
        let named = format!("Held by hog-{n} (pid {}): 2.00 MiB", std::process::id());
        assert!(message.contains(&named) || message.contains(&format!(", {}", &named[8..])), "{message}");
        assert!(holders.iter().any(|holder| holder.name == format!("hog-{n}") && holder.reserved == 2 * MIB));
    }
}

#[test]
fn a_clients_own_limit_holds() {
    let served = Served::start(config());
    let mut limited = hello(&served.key, "limited", millpond_ipc::wire::Role::Worker);
    limited.limit = Some(4 * MIB);
    let mut client = Raw::attach(&served.socket, &limited).unwrap();
    client.grow(4 * MIB);
    let (Answer::Refused { reason, limit, reserved, .. }, _) = client.call(Request::Grow { device: 0, bytes: UNIT, press: true }) else {
        panic!()
    };
    assert_eq!((reason, limit, reserved), (Reason::OutOfMemory, 4 * MIB, 4 * MIB));
    assert_eq!(client.ledger_of(client.slot()).unwrap().limit, 4 * MIB);
    // Others are not held by it.
    served.attach("other").grow(64 * MIB);
}

#[test]
fn a_window_can_be_exhausted_by_name() {
    let served = Served::start(Config { window_factor: 1, ..config() });
    let mut client = served.attach("worker");
    let chunks: Vec<_> = (0..128).flat_map(|_| client.grow(UNIT)).collect();
    // Every second one is free: there is memory, but no range.
    let back: Vec<_> = chunks.iter().copied().step_by(2).collect();
    client.release(&back);
    let (Answer::Refused { reason, message, .. }, _) = client.call(Request::Grow { device: 0, bytes: 2 * UNIT, press: true }) else {
        panic!()
    };
    assert_eq!(reason, Reason::OutOfMemory);
    assert!(message.contains("is exhausted"), "{message}");
    assert_eq!(client.grow(UNIT)[0].offset, 0);
}

#[test]
fn what_is_released_can_be_had_again_under_another_epoch() {
    let served = Served::start(config());
    let mut client = served.attach("worker");
    let mut seen = BTreeSet::new();
    for _ in 0..3 {
        let chunks = client.grow(256 * MIB);
        assert!(chunks.iter().all(|chunk| seen.insert(chunk.epoch)));
        assert_eq!(chunks[0].offset, 0);
        assert_eq!(client.release(&chunks), (256 * MIB, 0));
    }
    assert_eq!(client.ledger().reserved, 0);
}

#[test]
fn only_its_own_chunks_can_a_client_release() {
    let served = Served::start(config());
    let (mut one, mut other) = (served.attach("one"), served.attach("other"));
    let (own, foreign) = (one.grow(UNIT), other.grow(UNIT));
    for epochs in [vec![foreign[0].epoch], vec![own[0].epoch, foreign[0].epoch], vec![999], vec![0]] {
        assert_eq!(reason(&one.call(Request::Release { epochs }).0), Reason::Stale);
    }
    assert_eq!(one.ledger().reserved, 2 * UNIT);
    // Named twice, it comes back once.
    let (Answer::Released { bytes, .. }, _) = one.call(Request::Release { epochs: vec![own[0].epoch; 2] }) else { panic!() };
    assert_eq!((bytes, one.ledger().reserved), (UNIT, UNIT));
    assert_eq!(reason(&one.call(Request::Release { epochs: epochs(&own) }).0), Reason::Stale);
}

#[test]
fn a_window_is_told_with_its_clients_pidfd() {
    let served = Served::start(config());
    let (mut one, other) = (served.attach("one"), served.attach("other"));
    let (Answer::Window { window, device, bytes, peer }, fds) = one.call(Request::Window { window: other.window() }) else { panic!() };
    assert_eq!((window, device, bytes), (other.window(), 0, 512 * MIB));
    assert_eq!((peer.client, peer.name.as_str(), peer.pid), (other.slot(), "other", std::process::id()));
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fds[0].as_raw_fd())).unwrap();
    assert!(info.contains(&format!("Pid:\t{}", std::process::id())), "{info}");
    assert_eq!(reason(&one.call(Request::Window { window: 999 }).0), Reason::Stale);
}

#[test]
fn a_released_chunk_is_retired_until_every_importer_has_answered() {
    let served = Served::start(config());
    let (mut maker, mut first, mut second) = (served.attach("maker"), served.attach("first"), served.attach("second"));
    let chunks = maker.grow(UNIT);
    for client in [&mut first, &mut second] {
        let (Answer::Granted { chunks: got }, fds) = client.import(maker.window(), &chunks) else { panic!() };
        assert_eq!((got.as_slice(), fds.len()), (chunks.as_slice(), 1));
    }
    assert_eq!(maker.release(&chunks), (UNIT, UNIT));
    let ledger = maker.ledger();
    assert_sums(&ledger);
    assert_eq!((ledger.reserved, ledger.retired, maker.ledger_of(maker.slot()).unwrap().retired), (UNIT, UNIT, UNIT));
    // Its range is not given again yet, and nobody can import it any more.
    assert_eq!(maker.grow(UNIT)[0].offset, UNIT);
    assert_eq!(reason(&second.import(maker.window(), &chunks).0), Reason::Stale);
    let (ask, Ask::Revoke { window, epochs: revoked }) = first.next_ask() else { panic!() };
    assert_eq!((window, revoked.as_slice()), (maker.window(), epochs(&chunks).as_slice()));
    first.answered(ask, 0);
    // The second says first that it still maps it, and later that it does not.
    let (ask, Ask::Revoke { .. }) = second.next_ask() else { panic!() };
    second.answered(ask, UNIT);
    assert!(matches!(second.call(Request::Ledger).0, Answer::Ledger { .. }));
    assert!(matches!(first.call(Request::Ledger).0, Answer::Ledger { .. }));
    assert_eq!(maker.ledger().retired, UNIT);
    let changes = maker.control.changes().seen();
    second.post(Request::Unmapped { epochs: epochs(&chunks) });
    until("the retired chunk is free", || maker.ledger().retired == 0);
    assert!(maker.control.changes().seen() > changes);
    assert_sums(&maker.ledger());
    assert_eq!(maker.grow(UNIT)[0].offset, 0);
}

#[test]
fn stale_epochs_and_foreign_windows_are_refused() {
    let served = Served::start(config());
    let (mut maker, mut reader) = (served.attach("maker"), served.attach("reader"));
    let chunks = maker.grow(UNIT);
    assert_eq!(reason(&reader.import(reader.window(), &chunks).0), Reason::Stale);
    assert_eq!(reason(&reader.import(u32::MAX, &chunks).0), Reason::Stale);
    assert_eq!(reason(&reader.call(Request::Import { window: maker.window(), epochs: vec![] }).0), Reason::InvalidArgument);
    maker.release(&chunks);
    let again = maker.grow(UNIT);
    assert_eq!(again[0].offset, chunks[0].offset);
    assert_eq!(reason(&reader.import(maker.window(), &chunks).0), Reason::Stale);
    // An import that was refused has left nothing behind.
    assert_eq!(maker.release(&again), (UNIT, 0));
}
