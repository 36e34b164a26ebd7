//! Every step of the contract, and every way in which a process can end there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::time::Duration;

use common::{eventually, is_all, link, plainly, send_late, tree, Arena, Worker, BOUND, MIB};
use millpond_ipc::client::{Client, Error, Options, Place};
use millpond_ipc::wire::Role;

#[test]
fn role() {
    common::role();
}

/// Where in a lease's life its two processes are.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    /// The hold is made, the frame has not left: the socket is full.
    Export,
    /// The frame is out, the value not ready.
    Unready,
    /// The frame is out, the value ready.
    Ready,
    /// Taken up, mapped nowhere, not ready.
    ImportUnready,
    /// Taken up, mapped nowhere, ready.
    Import,
    /// The consumer's stream is about to write it.
    Write,
    /// Let go of; the consumer's stream is not past.
    Done,
    /// Acknowledged with a DONE that is not reached.
    Ack,
    /// Acknowledged and reached; the producer has not looked.
    Release,
}

const STEPS: [Step; 9] =
    [Step::Export, Step::Unready, Step::Ready, Step::ImportUnready, Step::Import, Step::Write, Step::Done, Step::Ack, Step::Release];

struct Pair {
    a: Worker,
    b: Worker,
    ab: u64,
    ba: u64,
}

/// Brings a new pair to a step. `a` produces, `b` consumes.
fn bring(arena: &Arena, step: Step) -> Pair {
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    let bytes = if step == Step::Export { 512 } else { MIB };
    a.ok(&format!("alloc {bytes} 1"));
    a.ok("fill 0 1");
    let unready = matches!(step, Step::Unready | Step::ImportUnready);
    if unready {
        a.ok("stall 1");
        a.ok("fill 0 1 1");
    }
    match step {
        Step::Export => a.ask(&format!("flood {ab} 0")),
        _ => drop(a.ok(&format!("send {ab} 0 {}", if unready { "1" } else { "-" }))),
    }
    match step {
        Step::Export | Step::Unready | Step::Ready => {}
        Step::ImportUnready | Step::Import => drop(b.ok(&format!("recv {ba} lazy"))),
        Step::Write | Step::Done | Step::Ack | Step::Release => {
            b.ok(&format!("alloc {MIB} 1"));
            b.ok(&format!("recv {ba} 1"));
            b.ok("stall 1");
            b.ok("touch 0 2 1");
            if step != Step::Write {
                b.ok("release 0");
            }
            if matches!(step, Step::Ack | Step::Release) {
                // The next call that is handed the stream queues the DONE.
                b.ok(&format!("send {ba} 0 1"));
            }
            if step == Step::Release {
                b.ok("go 1");
                b.ok("sync 1");
            }
        }
    }
    if step == Step::Export {
        // It blocks in the send: no answer.
        assert_eq!(a.answers_within(Duration::from_millis(100)), None);
    }
    Pair { a, b, ab, ba }
}

fn the_producer_dies(arena: &Arena, step: Step, how: &str) {
    let Pair { mut a, mut b, ba, .. } = bring(arena, step);
    // A process that blocks takes no command.
    a.die(if step == Step::Export && !matches!(how, "kill" | "stop") { "kill" } else { how });
    match step {
        Step::Export => {
            // What left is good; then the channel is at its end.
            let mut whole = 0;
            loop {
                let answer = b.tell(&format!("recv {ba}"));
                if answer.starts_with("err Closed") {
                    break;
                }
                assert!(answer.starts_with("ok "), "{answer}");
                b.ok(&format!("check {whole} 1"));
                b.ok(&format!("release {whole}"));
                whole += 1;
            }
            assert!(whole > 0);
        }
        Step::Unready => {
            b.fails("PeerDied", &format!("recv {ba} wait"));
            assert_eq!(b.number("imported"), 0);
            b.fails("Closed", &format!("recv {ba}"));
        }
        Step::Ready => {
            b.ok(&format!("recv {ba}"));
            b.ok("check 0 1");
            b.ok("release 0");
        }
        Step::ImportUnready => {
            b.fails("PeerDied", "ready 0");
            b.fails("PeerDied", "open 0");
            b.ok("release 0");
        }
        Step::Import => {
            b.ok("ready 0");
            b.ok("open 0");
            b.ok("check 0 1");
            b.ok("release 0");
        }
        Step::Write => {
            b.ok("go 1");
            b.ok("sync 1");
            b.ok("check 0 2");
            b.ok("release 0");
        }
        Step::Done | Step::Ack => drop(b.ok("go 1")),
        Step::Release => {}
    }
    b.ok(&format!("close {ba}"));
    let own = arena.row("b").unwrap().reserved;
    arena.settles_at(own);
    eventually("the dead one is gone", || arena.row("a").is_none());
}

fn the_consumer_dies(arena: &Arena, step: Step, how: &str) {
    let Pair { mut a, mut b, ab, .. } = bring(arena, step);
    b.die(how);
    if step == Step::Export {
        assert!(a.answer().starts_with("err Closed"));
    }
    if matches!(step, Step::Unready | Step::ImportUnready) {
        a.ok("go 1");
    }
    eventually("the lease ends", || a.number("leases") == 0);
    a.ok("waitdone 0 - 1000");
    a.fails("Closed", &format!("send {ab} 0"));
    // What the dead one sent and nobody received is held until here.
    a.ok(&format!("close {ab}"));
    a.ok("free 0");
    a.ok("sync 1");
    a.ok("trim");
    arena.settles_at(0);
    eventually("the dead one is gone", || arena.row("b").is_none());
}

fn fds_of(pid: i32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

fn every_step(how: &str) {
    let arena = Arena::new();
    let before = fds_of(arena.owner.pid());
    for step in STEPS {
        eprintln!("{step:?}, {how}");
        the_producer_dies(&arena, step, how);
        eventually("nobody is attached", || arena.ledger().devices[0].clients.is_empty());
        the_consumer_dies(&arena, step, how);
        eventually("nobody is attached", || arena.ledger().devices[0].clients.is_empty());
    }
    arena.settles_at(0);
    eventually("the owner has no more descriptors than before", || fds_of(arena.owner.pid()) <= before);
}

#[test]
fn killed_at_every_step() {
    every_step("kill");
}

#[test]
fn stopped_and_killed_at_every_step() {
    every_step("stop");
}

#[test]
fn ended_without_a_word_at_every_step() {
    every_step("exit");
}

#[test]
fn crashed_at_every_step() {
    every_step("segv");
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
    let child: i32 = a.ok("fork").parse().unwrap();
    a.die("kill");
    eventually("its process has ended", || arena.row("a").is_some_and(|row| row.state == "dying"));
    // The child holds the driver's files: the work may run on, so nobody is told anything, and nothing is used again.
    assert_eq!(b.number("idle 1"), 0);
    b.fails("Timeout", "ready 0 100");
    assert!(arena.row("a").unwrap().reserved >= MIB);
    // SAFETY: a grandchild of ours that only pauses.
    unsafe { libc::kill(child, libc::SIGKILL) };
    b.ok("sync 1");
    b.fails("PeerDied", "ready 0");
    b.ok("release 0");
    b.ok(&format!("close {ba}"));
    arena.settles_at(0);
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
    let after = (a.number("fds"), a.number("vm"), fds_of(arena.owner.pid()));
    assert!(after.0 <= before.0 && after.1 <= before.1 + 4096 && after.2 <= before.2, "{before:?}, then {after:?}");
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
