//! Every step of the contract, and every way in which a process can end there. On the host driver, and where `MILLPOND_TEST_DRIVER` is
//! `cuda` on a GPU (tests/gpu/run.sh, stage `contract`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use common::{eventually, fds_of, link, send_late, Arena, Worker, MIB};

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
    /// Freed, and its chunk given back; the consumer, which still maps it, has not answered.
    Unimport,
}

const STEPS: [Step; 10] = [
    Step::Export,
    Step::Unready,
    Step::Ready,
    Step::ImportUnready,
    Step::Import,
    Step::Write,
    Step::Done,
    Step::Ack,
    Step::Release,
    Step::Unimport,
];

/// What a heap grows by at first, in one chunk.
const CHUNK: u64 = 24 * MIB;

/// A step, and what is done there.
#[derive(Debug, Clone, Copy)]
struct Case {
    step: Step,
    /// How a process ends: as in [`Worker::die`], or `fork`, killed with a forked child left alive.
    how: &'static str,
    /// The producer frees its block right after the send, and makes another of the same size.
    freed: bool,
}

struct Pair {
    a: Worker,
    b: Worker,
    ab: u64,
    ba: u64,
}

/// Brings a new pair to a step. `a` produces, `b` consumes. `early`: before the producer blocks, it forks.
fn bring(arena: &Arena, Case { step, freed, .. }: Case, early: bool) -> Pair {
    let (mut a, mut b) = arena.pair("a", "b");
    let (ab, ba) = link(&mut a, &mut b);
    let bytes = if step == Step::Export { 512 } else { MIB };
    a.ok(&format!("alloc {bytes} 1"));
    a.ok("fill 0 1");
    let unready = matches!(step, Step::Unready | Step::ImportUnready);
    if unready {
        a.ok("stall 1");
        a.ok("fill 0 1 1");
    }
    if step == Step::Export {
        if early {
            a.fork();
        }
        a.ask(&format!("flood {ab} 0"));
    } else {
        a.ok(&format!("send {ab} 0 {}", if unready { "1" } else { "-" }));
    }
    if freed {
        a.ok("free 0");
        a.ok(&format!("alloc {MIB} 1"));
        a.ok("fill 1 9");
    }
    match step {
        Step::Export | Step::Unready | Step::Ready => {}
        Step::ImportUnready | Step::Import => drop(b.ok(&format!("recv {ba} lazy"))),
        Step::Write | Step::Done | Step::Ack | Step::Release => {
            b.ok(&format!("alloc {MIB} 1"));
            b.ok(&format!("recv {ba} 1"));
            b.ok("check 0 1");
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
        Step::Unimport => {
            b.ok(&format!("recv {ba}"));
            b.ok("check 0 1");
            b.ok("release 0");
            eventually("the lease ends", || a.number("leases") == 0);
            a.ok("free 0");
            a.ok("sync 1");
            b.ok("deaf");
            a.ok("trim");
            eventually("its chunk is retired", || arena.books() == (CHUNK, CHUNK, 0));
        }
    }
    if step == Step::Export {
        // It blocks in the send: no answer.
        assert_eq!(a.answers_within(Duration::from_millis(100)), None);
    }
    Pair { a, b, ab, ba }
}

/// Ends a process. While it is stopped, or its child lives, it is reported so, is not taken for dead, and `unchanged` holds.
fn end(arena: &Arena, worker: &mut Worker, how: &str, unchanged: impl FnOnce()) {
    let deaths = || arena.ledger().devices[0].deaths;
    let before = deaths();
    let state = match how {
        "stop" => {
            worker.said.signal(libc::SIGSTOP);
            "stopped"
        }
        "fork" => {
            worker.fork();
            worker.die("kill");
            "dying"
        }
        how => return worker.die(how),
    };
    let is_seen = || arena.row(&worker.name).is_some_and(|row| row.state == state);
    eventually(state, is_seen);
    unchanged();
    assert!(is_seen() && deaths() == before, "{} is taken for dead: {}", worker.name, arena.ledger());
    match how {
        "stop" => worker.die("kill"),
        _ => worker.end_child(),
    }
}

fn the_producer_dies(arena: &Arena, case: Case) {
    let Pair { mut a, mut b, ba, .. } = bring(arena, case, case.how == "fork");
    end(arena, &mut a, case.how, || match case.step {
        Step::Unimport => assert_eq!(arena.books(), (CHUNK, CHUNK, 0)),
        step => {
            if step == Step::ImportUnready {
                b.fails("Timeout", "ready 0 10");
            }
            assert_eq!(arena.row("a").unwrap().reserved, CHUNK);
        }
    });
    match case.step {
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
        Step::Unimport => {
            eventually("it is buried", || arena.row("a").is_some_and(|row| row.state == "orphaned"));
            assert_eq!(arena.books(), (CHUNK, CHUNK, 0), "what is still mapped is not used again");
            b.ok("hear");
        }
    }
    b.ok(&format!("close {ba}"));
    let own = arena.row("b").unwrap().reserved;
    arena.settles_at(own);
    eventually("the dead one is gone", || arena.row("a").is_none());
}

fn the_consumer_dies(arena: &Arena, case: Case) {
    let Pair { mut a, mut b, ab, .. } = bring(arena, case, false);
    end(arena, &mut b, case.how, || match case.step {
        // It blocks; what is over may be seen to be.
        Step::Export | Step::Release => {}
        Step::Unimport => assert_eq!(arena.books(), (CHUNK, CHUNK, 0)),
        _ => {
            assert_eq!(a.number("leases"), 1);
            if !case.freed {
                a.fails("Timeout", "waitdone 0 - 10");
            }
        }
    });
    match case.step {
        Step::Export => assert!(a.answer().starts_with("err Closed")),
        Step::Unready | Step::ImportUnready => drop(a.ok("go 1")),
        // By the death alone.
        Step::Unimport => arena.settles_at(0),
        _ => {}
    }
    eventually("the lease ends", || a.number("leases") == 0);
    let block = u64::from(case.freed);
    if case.step != Step::Unimport {
        a.ok(&format!("waitdone {block} - 1000"));
        a.fails("Closed", &format!("send {ab} {block}"));
    }
    // What the dead one sent and nobody received is held until here.
    a.ok(&format!("close {ab}"));
    if case.freed {
        a.ok("checkblock 1 9");
    }
    if case.step != Step::Unimport {
        a.ok(&format!("free {block}"));
    }
    a.ok("sync 1");
    a.ok("trim");
    arena.settles_at(0);
    eventually("the dead one is gone", || arena.row("b").is_none());
}

/// Two that have nothing to do with the dead: they allocate, hand over, let go, grow and give back, all the time. Meanwhile one waits for a
/// value that the other's stream has yet to write: nobody else's death may release it.
struct Beside {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Beside {
    fn start(arena: &Arena) -> Self {
        let (mut c, mut d) = (arena.worker("c"), arena.worker("d"));
        let (cd, dc) = send_late(&mut c, &mut d);
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, round) = (Arc::clone(&stop), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Acquire) {
                let byte = round.load(Ordering::Relaxed) % 251;
                let block = c.number(&format!("alloc {MIB}"));
                c.ok(&format!("fill {block} {byte}"));
                c.ok(&format!("send {cd} {block}"));
                c.ok(&format!("free {block}"));
                let import = d.number(&format!("recv {dc}"));
                d.ok(&format!("check {import} {byte}"));
                d.ok(&format!("release {import}"));
                let large = c.number(&format!("alloc {}", 40 * MIB));
                c.ok(&format!("free {large}"));
                c.ok("trim");
                assert_eq!(d.number("idle 1"), 0, "a wait for the living is released");
                round.fetch_add(1, Ordering::Release);
                std::thread::sleep(Duration::from_millis(1));
            }
            c.ok("go 1");
            d.ok("sync 1");
            d.ok("check 0 1");
            d.ok("release 0");
            assert_eq!(d.number("imported"), 0);
            eventually("the leases end", || c.number("leases") == 0);
        });
        Self { stop, rounds, thread: Some(thread) }
    }

    /// Lets some death happen; they come further meanwhile, and afterwards.
    fn during(&self, death: impl FnOnce()) {
        let before = self.rounds.load(Ordering::Acquire);
        death();
        eventually("those beside go on", || self.rounds.load(Ordering::Acquire) >= before + 2);
    }

    fn end(mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread.take().unwrap().join().unwrap();
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}

fn every_step(how: &'static str, freed: bool) {
    let mut arena = Arena::new();
    arena.beside = "c";
    let before = fds_of(arena.owner.pid());
    let beside = Beside::start(&arena);
    let alone = || eventually("nobody else is attached", || arena.ledger().devices[0].clients.len() == 2);
    // A producer that blocks in its send, or has freed its block anyway, frees none.
    for step in STEPS.into_iter().filter(|step| !(freed && matches!(step, Step::Export | Step::Unimport))) {
        let case = Case { step, how, freed };
        eprintln!("{case:?}");
        beside.during(|| the_producer_dies(&arena, case));
        alone();
        beside.during(|| the_consumer_dies(&arena, case));
        alone();
    }
    beside.end();
    eventually("nobody is attached", || arena.ledger().devices[0].clients.is_empty());
    arena.settles_at(0);
    eventually("the owner has no more descriptors than before", || fds_of(arena.owner.pid()) <= before);
}

#[test]
fn killed_at_every_step() {
    every_step("kill", false);
}

#[test]
fn stopped_and_killed_at_every_step() {
    every_step("stop", false);
}

#[test]
fn ended_without_a_word_at_every_step() {
    every_step("exit", false);
}

#[test]
fn crashed_at_every_step() {
    every_step("segv", false);
}

#[test]
fn killed_at_every_step_with_a_forked_child_left() {
    every_step("fork", false);
}

#[test]
fn freed_right_after_the_send_and_killed_at_every_step() {
    every_step("kill", true);
}
