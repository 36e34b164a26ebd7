//! Callers, the reader's thread and an owner that answers late, in pieces, out of order, or not at all.
#![allow(unsafe_code)] // a forked child

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{channel, Receiver};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rustix::fs::{fstat, ftruncate, memfd_create, MemfdFlags};
use rustix::time::{clock_gettime, ClockId};

use super::*;
use crate::wire::{Chunk, Peer, Role, PROTOCOL};

/// Longer than anything here takes: who comes to it was forgotten.
const BOUND: Duration = Duration::from_secs(20);
const SOON: Duration = Duration::from_millis(30);

/// The owner's end.
struct Owner {
    stream: UnixStream,
    reader: FrameReader,
}

impl Owner {
    /// The next call, and its number.
    fn hear(&mut self) -> (u64, Request) {
        let frame = self.reader.read_frame(self.stream.as_fd(), Some(BOUND), false).unwrap();
        match serde_json::from_slice(&frame).unwrap() {
            FromClient::Call { call_id, call } => (call_id, call),
            other => panic!("{other:?}"),
        }
    }

    fn say(&mut self, frame: &FromOwner) {
        self.stream.write_all(&bytes_of(frame)).unwrap();
    }

    fn say_with(&mut self, frame: &FromOwner, fds: &[OwnedFd]) {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        send_frame(self.stream.as_fd(), &serde_json::to_vec(frame).unwrap(), &fds, Some(BOUND)).unwrap();
    }
}

fn bytes_of(frame: &FromOwner) -> Vec<u8> {
    let body = serde_json::to_vec(frame).unwrap();
    [(body.len() as u32).to_be_bytes().to_vec(), body].concat()
}

fn done(call_id: u64) -> FromOwner {
    FromOwner::Answer { call_id, answer: Answer::Done, fds: 0 }
}

fn granted(call_id: u64, epochs: &[u64]) -> FromOwner {
    let chunks: Vec<Chunk> = epochs.iter().map(|epoch| Chunk { epoch: *epoch, offset: 0, bytes: 4096 }).collect();
    FromOwner::Answer { call_id, fds: chunks.len(), answer: Answer::Granted { chunks } }
}

fn ask(ask_id: u64) -> FromOwner {
    FromOwner::Ask { ask_id, ask: Ask::Trim { device: 0, bytes: ask_id }, fds: 0 }
}

/// A file of so many bytes.
fn file(bytes: u64) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

/// A link and its owner's end. `behind`: frames that come in one piece with the welcome.
fn connected(behind: &[FromOwner]) -> (Arc<Link>, Owner) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let hello = Hello {
        protocol: PROTOCOL,
        layout: 0,
        key: String::new(),
        name: "test".to_owned(),
        role: Role::Worker,
        pid: std::process::id(),
        limit: None,
        library: String::new(),
        python: None,
        torch: None,
        capabilities: Vec::new(),
        fds: 0,
    };
    let welcome = Welcome { client: 1, serial: 1, token: String::new(), owner_pid: 1, pid_namespace: None, devices: Vec::new(), fds: 0 };
    thread::scope(|scope| {
        let owner = scope.spawn(|| {
            let (mut stream, mut reader) = (listener.accept().unwrap().0, FrameReader::default());
            let hello: Hello = serde_json::from_slice(&reader.read_frame(stream.as_fd(), Some(BOUND), false).unwrap()).unwrap();
            drop(reader.take_fds(hello.fds).unwrap());
            let mut bytes = bytes_of(&FromOwner::Welcome { welcome });
            behind.iter().for_each(|frame| bytes.extend(bytes_of(frame)));
            stream.write_all(&bytes).unwrap();
            Owner { stream, reader }
        });
        let (link, ..) = Link::connect(&path, &hello, BOUND).unwrap();
        (Arc::new(link), owner.join().unwrap())
    })
}

/// The same with a reader's thread, and what the tender hears.
fn started(behind: &[FromOwner]) -> (Arc<Link>, Owner, Receiver<Notice>, JoinHandle<()>) {
    let (link, owner) = connected(behind);
    let (sender, notices) = channel();
    link.notify(sender);
    let reads = thread::spawn({
        let link = link.clone();
        move || link.read()
    });
    (link, owner, notices, reads)
}

fn asked(notices: &Receiver<Notice>) -> u64 {
    match notices.recv_timeout(BOUND).unwrap() {
        Notice::Ask(id, Ask::Trim { bytes, .. }) if id == bytes => id,
        other => panic!("{other:?}"),
    }
}

/// Waits until somebody reads.
fn until_led(link: &Link) {
    let start = Instant::now();
    // Its own thread holds it too, but only for moments.
    while !(link.reading.is_locked() && link.pending.lock().waiting.values().any(|awaited| *awaited == Awaited::Yes)) {
        assert!(start.elapsed() < BOUND);
        thread::yield_now();
    }
}

fn ended(reads: JoinHandle<()>) {
    let start = Instant::now();
    while !reads.is_finished() {
        assert!(start.elapsed() < BOUND, "the reader's thread does not end");
        thread::yield_now();
    }
    reads.join().unwrap();
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }
}

#[test]
fn what_comes_behind_the_welcome_is_heard() {
    let (link, _owner, notices, reads) = started(&[ask(1), ask(2)]);
    assert_eq!([asked(&notices), asked(&notices)], [1, 2], "no poll tells of what was read already");
    link.close();
    ended(reads);
}

#[test]
fn a_call_before_the_thread_reads_what_comes_behind_the_welcome_too() {
    let (link, mut owner) = connected(&[ask(1)]);
    let (sender, notices) = channel();
    link.notify(sender);
    thread::scope(|scope| {
        scope.spawn(|| link.call(Request::Detach, BOUND).unwrap());
        let (call_id, _) = owner.hear();
        owner.say(&done(call_id));
    });
    assert_eq!(asked(&notices), 1);
}

/// Sixteen threads call, the owner answers a few at once in any order, its frames torn apart and glued together, and asks in
/// between. Everybody gets what is theirs, descriptors too, and nobody waits for anything but the owner.
#[test]
fn everybody_gets_their_own_answer() {
    const THREADS: u64 = 16;
    const CALLS: u64 = 60;
    let (link, mut owner, notices, reads) = started(&[]);
    let asks = thread::scope(|scope| {
        for thread in 0..THREADS {
            let link = &link;
            scope.spawn(move || {
                for n in (0..CALLS).map(|n| 1 + thread * CALLS + n) {
                    if n % 3 == 0 {
                        let (answer, fds) = link.call(Request::Import { window: 0, epochs: vec![n, n] }, BOUND).unwrap();
                        assert!(matches!(answer, Answer::Granted { chunks } if chunks.iter().all(|chunk| chunk.epoch == n)));
                        assert_eq!(fds.iter().map(|fd| fstat(fd).unwrap().st_size as u64).collect::<Vec<_>>(), [n, n]);
                    } else {
                        let (answer, fds) = link.call(Request::Window { window: n as u32 }, BOUND).unwrap();
                        assert!(matches!(answer, Answer::Window { window, .. } if u64::from(window) == n), "{n}: {answer:?}");
                        assert!(fds.is_empty());
                    }
                }
            });
        }
        let (mut dice, mut asks, mut left) = (Dice(1), 0, THREADS * CALLS);
        while left > 0 {
            // At least one calls as long as any is left.
            let mut calls = vec![owner.hear()];
            let more = dice.roll(THREADS as usize);
            while calls.len() < more && owner.reader.fill(owner.stream.as_fd()).unwrap() {
                while let Some(frame) = owner.reader.next_frame().unwrap() {
                    let FromClient::Call { call_id, call } = serde_json::from_slice(&frame).unwrap() else { panic!() };
                    calls.push((call_id, call));
                }
            }
            left -= calls.len() as u64;
            let mut bytes = Vec::new();
            while !calls.is_empty() {
                if dice.roll(3) == 0 {
                    asks += 1;
                    bytes.extend(bytes_of(&ask(asks)));
                }
                let (call_id, call) = calls.swap_remove(dice.roll(calls.len()));
                match call {
                    Request::Window { window } => {
                        let peer = Peer { client: 1, serial: 1, name: "x".repeat(dice.roll(200)), pid: 1 };
                        let answer = Answer::Window { window, device: 0, bytes: 0, peer };
                        bytes.extend(bytes_of(&FromOwner::Answer { call_id, answer, fds: 0 }));
                    }
                    Request::Import { epochs, .. } => {
                        // Descriptors travel with a first byte of their own.
                        tear(&mut owner.stream, &mut dice, &std::mem::take(&mut bytes));
                        let fds: Vec<OwnedFd> = epochs.iter().map(|epoch| file(*epoch)).collect();
                        owner.say_with(&granted(call_id, &epochs), &fds);
                    }
                    other => panic!("{other:?}"),
                }
            }
            tear(&mut owner.stream, &mut dice, &bytes);
        }
        asks
    });
    assert_eq!((0..asks).map(|_| asked(&notices)).collect::<Vec<_>>(), (1..=asks).collect::<Vec<_>>());
    let pending = link.pending.lock();
    assert!(pending.waiting.is_empty() && pending.answers.is_empty());
    drop(pending);
    link.close();
    ended(reads);
}

/// Writes in pieces, some of which end within a length, with others running in between.
fn tear(stream: &mut UnixStream, dice: &mut Dice, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let (piece, rest) = bytes.split_at(bytes.len().min(1 + dice.roll(400)));
        stream.write_all(piece).unwrap();
        thread::yield_now();
        bytes = rest;
    }
}

#[test]
fn who_waits_is_served_when_the_leader_has_left() {
    let (link, mut owner, _notices, reads) = started(&[]);
    for _ in 0..50 {
        thread::scope(|scope| {
            let first = scope.spawn(|| link.call(Request::Detach, BOUND).unwrap());
            let (one, _) = owner.hear();
            let second = scope.spawn(|| link.call(Request::Detach, BOUND).unwrap());
            let (two, _) = owner.hear();
            owner.say(&done(one));
            first.join().unwrap();
            owner.say(&done(two));
            second.join().unwrap();
        });
    }
    link.close();
    ended(reads);
}

#[test]
fn death_in_the_middle_of_a_frame_ends_every_call_and_is_said_once() {
    let (link, mut owner, notices, reads) = started(&[]);
    thread::scope(|scope| {
        let calls: Vec<_> = (0..16).map(|_| scope.spawn(|| link.call(Request::Detach, BOUND))).collect();
        let heard: Vec<u64> = calls.iter().map(|_| owner.hear().0).collect();
        heard.iter().take(8).for_each(|call_id| owner.say(&done(*call_id)));
        owner.say(&ask(7));
        let half = bytes_of(&done(heard[8]));
        owner.stream.write_all(&half[..half.len() / 2]).unwrap();
        drop(owner);
        let ends: Vec<_> = calls.into_iter().map(|call| call.join().unwrap()).collect();
        assert_eq!(ends.iter().filter(|end| end.is_ok()).count(), 8);
        assert!(ends.iter().filter_map(|end| end.as_ref().err()).all(|error| matches!(error, Error::OwnerDied)));
    });
    ended(reads);
    assert!(matches!(link.call(Request::Detach, BOUND), Err(Error::OwnerDied)));
    assert_eq!(asked(&notices), 7, "what came before the end is said before it");
    assert!(matches!(notices.try_recv(), Ok(Notice::OwnerDied)));
    assert!(notices.try_recv().is_err());
}

#[test]
fn behind_a_frame_that_means_nothing_nothing_is_believed() {
    let (link, mut owner, notices, reads) = started(&[]);
    thread::scope(|scope| {
        let calls: Vec<_> = (0..4).map(|_| scope.spawn(|| link.call(Request::Import { window: 0, epochs: vec![1] }, BOUND))).collect();
        let heard: Vec<u64> = calls.iter().map(|_| owner.hear().0).collect();
        // Its descriptor would be the next frame's.
        send_frame(owner.stream.as_fd(), b"nonsense", &[file(9).as_fd()], Some(BOUND)).unwrap();
        heard.iter().for_each(|call_id| owner.say(&granted(*call_id, &[1])));
        owner.say(&ask(1));
        assert!(calls.into_iter().all(|call| matches!(call.join().unwrap(), Err(Error::OwnerDied))));
    });
    link.close();
    ended(reads);
    assert!(matches!(notices.try_recv(), Ok(Notice::OwnerDied)));
    assert!(notices.try_recv().is_err());
}

/// Who gave up is granted something after all: it goes back, whoever reads the grant.
#[test]
fn late_grants_go_back() {
    let (link, mut owner, _notices, reads) = started(&[]);
    let give_up = |call: Request| match link.call(call, SOON) {
        Err(Error::Timeout(_)) => {}
        other => panic!("{other:?}"),
    };
    for led in [false, true] {
        give_up(Request::Grow { device: 0, bytes: 4096, press: true });
        give_up(Request::Import { window: 3, epochs: vec![5] });
        give_up(Request::Detach);
        let late: Vec<u64> = (0..3).map(|_| owner.hear().0).collect();
        thread::scope(|scope| {
            let mut other = None;
            if led {
                scope.spawn(|| link.call(Request::Detach, BOUND).unwrap());
                other = Some(owner.hear().0);
                until_led(&link);
            }
            owner.say(&done(late[2]));
            owner.say_with(&granted(late[0], &[4]), &[file(4)]);
            owner.say_with(&granted(late[1], &[5]), &[file(5)]);
            assert!(matches!(owner.hear().1, Request::Release { epochs } if epochs == [4]));
            assert!(matches!(owner.hear().1, Request::Unmapped { epochs } if epochs == [5]));
            if let Some(call_id) = other {
                owner.say(&done(call_id));
            }
        });
        assert!(link.pending.lock().waiting.is_empty());
    }
    link.close();
    ended(reads);
}

#[test]
fn a_deadline_in_the_middle_of_a_frame_loses_nothing_of_it() {
    let (link, mut owner, notices, reads) = started(&[]);
    let halves = bytes_of(&ask(1));
    for _ in 0..3 {
        for cut in [1, 3, 4, 5, halves.len() - 1] {
            thread::scope(|scope| {
                let first = scope.spawn(|| link.call(Request::Detach, SOON));
                let (one, _) = owner.hear();
                owner.stream.write_all(&halves[..cut]).unwrap();
                assert!(matches!(first.join().unwrap(), Err(Error::Timeout(_))));
                let second = scope.spawn(|| link.call(Request::Detach, BOUND).unwrap());
                let (two, _) = owner.hear();
                owner.stream.write_all(&halves[cut..]).unwrap();
                owner.say(&done(one));
                owner.say(&done(two));
                second.join().unwrap();
            });
            assert_eq!(asked(&notices), 1);
        }
    }
    link.close();
    ended(reads);
}

#[test]
fn an_owner_that_never_stops_talking_puts_off_no_deadline() {
    let (link, mut owner, notices, reads) = started(&[]);
    drop(notices);
    let noise: Vec<u8> = (0..400).flat_map(|_| bytes_of(&ask(1))).collect();
    let talks = thread::spawn(move || while owner.stream.write_all(&noise).is_ok() {});
    let start = Instant::now();
    for _ in 0..5 {
        assert!(matches!(link.call(Request::Detach, SOON), Err(Error::Timeout(_))));
    }
    assert!(start.elapsed() < BOUND / 4, "{:?}", start.elapsed());
    link.close();
    ended(reads);
    talks.join().unwrap();
}

#[test]
fn closing_ends_the_calls_of_others() {
    let (link, mut owner, notices, reads) = started(&[]);
    thread::scope(|scope| {
        let calls: Vec<_> = (0..3).map(|_| scope.spawn(|| link.call(Request::Detach, LONGEST))).collect();
        calls.iter().for_each(|_| drop(owner.hear()));
        until_led(&link);
        link.close();
        assert!(calls.into_iter().all(|call| matches!(call.join().unwrap(), Err(Error::OwnerDied))));
    });
    ended(reads);
    assert!(matches!(notices.recv_timeout(BOUND), Ok(Notice::OwnerDied)));
}

/// What is looked for again and again is not looked for all the time.
#[test]
fn a_slow_owner_costs_no_processor() {
    let (link, mut owner, _notices, reads) = started(&[]);
    let cpu = || {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    };
    let answers = thread::spawn(move || {
        for turn in 0..40 {
            let (call_id, _) = owner.hear();
            if turn >= 30 {
                thread::sleep(Duration::from_millis(20));
            }
            owner.say(&done(call_id));
        }
        owner
    });
    // Fast ones first, which make it patient.
    (0..30).for_each(|_| drop(link.call(Request::Detach, BOUND).unwrap()));
    let before = cpu();
    (0..10).for_each(|_| drop(link.call(Request::Detach, BOUND).unwrap()));
    assert!(cpu() - before < Duration::from_millis(40), "{:?} of some 200 ms", cpu() - before);
    drop(answers.join().unwrap());
    link.close();
    ended(reads);
}

/// The child's copy of the locks may be held for ever, and what comes is the parent's.
#[test]
fn a_forked_child_is_refused_while_somebody_leads() {
    let (link, mut owner, _notices, reads) = started(&[]);
    thread::scope(|scope| {
        let call = scope.spawn(|| link.call(Request::Detach, BOUND).unwrap());
        let (call_id, _) = owner.hear();
        until_led(&link);
        let (pending, sending) = (link.pending.lock(), link.sending.lock());
        // SAFETY: the child calls what allocates nothing and takes no lock, and ends without unwinding or running destructors.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = matches!(link.ask(Request::Detach, BOUND), Err(Error::Forked)) && matches!(link.answer(1, 0), Err(Error::Forked));
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        drop((pending, sending));
        let mut status = -1;
        let start = Instant::now();
        // SAFETY: the status is this frame's own, and the child is ours.
        while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
            if start.elapsed() > BOUND / 4 {
                // SAFETY: our own child, which was not waited for yet.
                unsafe { libc::kill(child, libc::SIGKILL) };
            }
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(status, 0, "the child hung, or was not refused");
        owner.say(&done(call_id));
        call.join().unwrap();
    });
    link.close();
    ended(reads);
}
