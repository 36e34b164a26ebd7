//! What goes wrong in the field and no other test is about: tests/README.md has the whole table.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel as queue;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use common::{apart_works, channels, eventually, is_all, link, outgoing, plainly, send_late, Arena, Worker, BOUND, MIB};
use millpond_allocator::driver::Stream;
use millpond_ipc::client::{Channel, Error, Place};

#[test]
fn role() {
    common::role();
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides as u64) as usize
    }
}

/// One value's readers, as they are and as they must be. Number 0 is its producer.
struct Readers {
    arena: Arena,
    workers: Vec<Worker>,
    /// (of whom, to whom): the number that the first knows the channel by.
    channels: HashMap<(usize, usize), u64>,
    /// (from whom, for whom): frames on the way.
    on_the_way: HashMap<(usize, usize), usize>,
    /// Of each: imports, by the number that it knows them by.
    held: Vec<Vec<u64>>,
    lives: usize,
}

impl Readers {
    fn new(count: usize) -> Self {
        let mut readers = Self {
            arena: Arena::new(),
            workers: Vec::new(),
            channels: HashMap::new(),
            on_the_way: HashMap::new(),
            held: vec![Vec::new(); count + 1],
            lives: 0,
        };
        (0..=count).for_each(|number| readers.start(number));
        readers
    }

    /// Starts one, in the place of one that is dead, with channels to all others.
    fn start(&mut self, number: usize) {
        self.lives += 1;
        let worker = self.arena.worker(&format!("r{number}-{}", self.lives));
        if number < self.workers.len() {
            self.workers[number] = worker;
        } else {
            self.workers.push(worker);
        }
        for other in (0..self.workers.len()).filter(|other| *other != number) {
            let (low, high) = (number.min(other), number.max(other));
            let (left, right) = self.workers.split_at_mut(high);
            let (of_low, of_high) = link(&mut left[low], &mut right[0]);
            self.channels.insert((low, high), of_low);
            self.channels.insert((high, low), of_high);
        }
    }

    fn take(&mut self, from: usize, to: usize) {
        let import = self.workers[to].number(&format!("recv {}", self.channels[&(to, from)]));
        self.workers[to].ok(&format!("check {import} 7"));
        self.held[to].push(import);
        *self.on_the_way.get_mut(&(from, to)).unwrap() -= 1;
    }

    fn send(&mut self, from: usize, to: usize, command: &str) {
        self.workers[from].ok(command);
        *self.on_the_way.entry((from, to)).or_default() += 1;
    }

    fn release(&mut self, of: usize, at: usize) {
        let import = self.held[of].swap_remove(at);
        self.workers[of].ok(&format!("release {import}"));
    }

    /// One dies, with what it holds and what is on its way to it. What it sent whole is still to be had: each of the others takes just so
    /// many, and then the channel is at its end.
    fn kill(&mut self, number: usize) {
        self.workers[number].die("kill");
        self.held[number].clear();
        self.on_the_way.retain(|(_, to), _| *to != number);
        for other in (0..self.workers.len()).filter(|other| *other != number) {
            for _ in 0..self.on_the_way.remove(&(number, other)).unwrap_or_default() {
                let import = self.workers[other].number(&format!("recv {}", self.channels[&(other, number)]));
                self.workers[other].ok(&format!("check {import} 7"));
                self.held[other].push(import);
            }
            let channel = self.channels.remove(&(other, number)).unwrap();
            self.workers[other].fails("Closed", &format!("recv {channel}"));
            self.workers[other].ok(&format!("close {channel}"));
        }
        self.start(number);
    }

    /// What the producer, the readers and the owner say is what there is.
    fn agree(&mut self) {
        let live = self.held.iter().map(Vec::len).sum::<usize>() + self.on_the_way.values().sum::<usize>();
        for (worker, held) in self.workers.iter_mut().zip(&self.held) {
            assert_eq!(worker.number("imported"), held.len() as u64 * MIB, "{}", worker.name);
        }
        let leases = u64::from(live > 0);
        let Self { arena, workers, .. } = self;
        eventually("the lease stands as long as anybody holds anything, and no longer", || workers[0].number("leases") == leases);
        let row = arena.row(&workers[0].name).unwrap();
        // As of its last write: at most the block, once, however many hold it.
        assert!([0, MIB].contains(&row.leased_out), "{row:?}");
    }
}

/// vllm#51258: one export, many who take it up, pass it on and let go, in any order, some of whom die in between.
#[test]
fn one_export_many_readers_in_any_order_and_deaths_in_between() {
    for seed in [0x9e37_79b9, 0x51ed_270b_7f4a_7c15] {
        eprintln!("seed {seed}");
        let (mut dice, mut readers) = (Dice(seed), Readers::new(3));
        readers.workers[0].ok(&format!("alloc {MIB}"));
        readers.workers[0].ok("fill 0 7");
        for turn in 0..160 {
            let (one, other) = (1 + dice.roll(3), 1 + dice.roll(3));
            let waiting: Vec<_> = readers.on_the_way.iter().filter(|(_, count)| **count > 0).map(|(way, _)| *way).collect();
            match dice.roll(12) {
                0..=2 => {
                    let command = format!("send {} 0 - {}", readers.channels[&(0, one)], if dice.roll(2) == 0 { "ro" } else { "rw" });
                    readers.send(0, one, &command);
                }
                3..=5 if !waiting.is_empty() => {
                    let mut waiting = waiting;
                    waiting.sort_unstable();
                    let (from, to) = waiting[dice.roll(waiting.len())];
                    readers.take(from, to);
                }
                6 | 7 if one != other && !readers.held[one].is_empty() => {
                    let import = readers.held[one][dice.roll(readers.held[one].len())];
                    let command = format!("forward {} {import}", readers.channels[&(one, other)]);
                    readers.send(one, other, &command);
                }
                8..=10 if !readers.held[one].is_empty() => {
                    let at = dice.roll(readers.held[one].len());
                    readers.release(one, at);
                }
                11 if turn % 3 == 0 => readers.kill(one),
                _ => {}
            }
            if turn % 8 == 0 {
                readers.agree();
            }
        }
        readers.agree();
        // The producer has let go of its block; the readers let go one after the other.
        readers.workers[0].ok("free 0");
        for ((from, to), count) in readers.on_the_way.clone() {
            (0..count).for_each(|_| readers.take(from, to));
        }
        for of in 1..readers.workers.len() {
            while !readers.held[of].is_empty() {
                readers.release(of, 0);
            }
        }
        readers.agree();
        readers.workers[0].ok("sync");
        readers.workers[0].ok("trim");
        readers.arena.settles_at(0);
    }
}

struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// cuda-python#2784: exports on several threads while chunks go back, channels close and the client leaves. (That none of it comes to a
/// driver's call on memory that is gone is modelled elsewhere; here real threads run into each other.)
#[test]
fn exports_beside_every_way_to_close() {
    const SENDS: u64 = 300;
    let arena = Arena::with(256 * MIB, 4 * MIB);
    let (a, b) = (arena.client("a"), arena.client("b"));
    let (ends, received_on) = queue::<Channel>();
    let ends = Mutex::new(Some(ends));
    let open = || {
        let (to_b, to_a) = channels(&a, &b);
        ends.lock().unwrap().as_ref().unwrap().send(to_a).unwrap();
        Arc::new(to_b)
    };
    let current = Mutex::new(open());
    let (sent, tried, received, over) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let send = |byte: u8| {
        let channel = current.lock().unwrap().clone();
        let heap = a.heap(Place::Host)?;
        let addr = heap.allocate(3 * MIB, Stream::LEGACY)?;
        // SAFETY: a live block of so many bytes, which nobody else uses yet.
        unsafe { std::ptr::write_bytes(addr as *mut u8, byte, 3 << 20) };
        let tree = serde_json::value::RawValue::from_string(byte.to_string()).unwrap();
        let result = a.send(&channel, tree, &[outgoing(addr, 3 * MIB)], Some(BOUND));
        heap.free(addr)?;
        tried.fetch_add(1, Ordering::Relaxed);
        result.map(|_| _ = sent.fetch_add(1, Ordering::Relaxed))
    };
    let closed = |error: &Error| matches!(error, Error::Closed(_) | Error::OutOfMemory(_));
    std::thread::scope(|scope| {
        // Where this fails, the others end too.
        let _over = SetAtEnd(&over);
        let (received, over, sent) = (&received, &over, &sent);
        let (received_on, reader) = (received_on, b.clone());
        scope.spawn(move || {
            for channel in received_on {
                loop {
                    match reader.receive(&channel, &plainly(false)) {
                        Ok(message) => {
                            let (byte, tensor) = (message.tree.get().parse().unwrap(), message.tensors[0]);
                            assert!(is_all(tensor.addr, tensor.bytes, byte), "not what was sent");
                            reader.release(tensor.import).unwrap();
                            received.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(Error::Closed(_)) => break,
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        });
        let trimmer = scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                a.heap(Place::Host).unwrap().trim(u64::MAX);
                std::thread::yield_now();
            }
        });
        let senders: Vec<_> = (1..=3)
            .map(|byte| {
                let (send, closed) = (&send, &closed);
                scope.spawn(move || {
                    let (mut left, end) = (SENDS / 3, Instant::now() + BOUND);
                    while left > 0 && Instant::now() < end {
                        let result = send(byte);
                        assert!(result.as_ref().err().is_none_or(closed), "{result:?}");
                        left -= u64::from(result.is_ok());
                    }
                    assert_eq!(left, 0, "not sent in time");
                })
            })
            .collect();
        while senders.iter().any(|sender| !sender.is_finished()) {
            let before = tried.load(Ordering::Relaxed);
            while tried.load(Ordering::Relaxed) < before + 8 && senders.iter().any(|sender| !sender.is_finished()) {
                std::thread::yield_now();
            }
            let next = open();
            std::mem::replace(&mut *current.lock().unwrap(), next).close();
        }
        senders.into_iter().for_each(|sender| sender.join().unwrap());
        over.store(true, Ordering::Release);
        trimmer.join().unwrap();
        eventually("all has come", || received.load(Ordering::Relaxed) == sent.load(Ordering::Relaxed));
        eventually("the leases end", || a.leases() == 0);
        a.heap(Place::Host).unwrap().trim(u64::MAX);
        arena.settles_at(0);
        // The client leaves while two threads send. What it has lent then is its own until its process ends.
        let last: Vec<_> = (4..=5)
            .map(|byte| {
                let send = &send;
                let end = Instant::now() + BOUND;
                scope.spawn(move || loop {
                    match send(byte) {
                        Ok(()) | Err(Error::OutOfMemory(_)) if Instant::now() < end => {}
                        Ok(()) => break Error::Timeout("it goes on".to_owned()),
                        Err(error) => break error,
                    }
                })
            })
            .collect();
        let before = sent.load(Ordering::Relaxed);
        eventually("they are at it", || sent.load(Ordering::Relaxed) > before + 4);
        a.detach();
        for thread in last {
            let error = thread.join().unwrap();
            assert!(matches!(error, Error::Closed(_)), "{error}");
        }
        current.lock().unwrap().close();
        ends.lock().unwrap().take();
    });
    assert_eq!(received.into_inner(), sent.into_inner(), "what was sent whole has come, and nothing else");
    eventually("it is gone, or has lent something", || arena.row("a").is_none_or(|row| row.state == "dying"));
}

/// pytorch#149196: a device's index is each process's own. What crosses is its identity.
#[test]
fn devices_are_known_by_identity_whatever_each_process_sees_of_them() {
    let two = ("MILLPOND_HOST_DEVICES", "2");
    let arena = Arena::with_vars(256 * MIB, 32 * MIB, &[two]);
    let mut plain = arena.worker_with("plain", &[two]);
    let mut swapped = arena.worker_with("swapped", &[two, ("MILLPOND_HOST_VISIBLE", "1,0")]);
    let mut second = arena.worker_with("second", &[two, ("MILLPOND_HOST_VISIBLE", "1")]);
    let (to_swapped, from_plain) = link(&mut plain, &mut swapped);
    let (to_second, at_second) = link(&mut plain, &mut second);
    let reserved = |device: usize, name: &str| {
        let ledger = arena.ledger();
        ledger.devices[device].clients.iter().find(|row| row.name == name).map(|row| row.reserved)
    };
    for (n, id) in ["HOST-1", "HOST-0"].into_iter().enumerate() {
        plain.ok(&format!("on {id}"));
        plain.ok(&format!("alloc {MIB}"));
        plain.ok(&format!("fill {n} {n}"));
        plain.ok(&format!("send {to_swapped} {n}"));
        swapped.ok(&format!("recv {from_plain}"));
        swapped.ok(&format!("check {n} {n}"));
        let ordinal = usize::from(id == "HOST-0");
        assert_eq!(swapped.ok(&format!("device {n}")), format!("{id} {ordinal}"), "the identity, and its index there");
    }
    assert!(reserved(0, "plain") > Some(0) && reserved(1, "plain") > Some(0));
    assert_eq!((reserved(0, "swapped"), reserved(1, "swapped")), (Some(0), Some(0)), "nothing was copied to what is first there");
    // And back, from what the other calls its first.
    swapped.ok("on HOST-1");
    swapped.ok(&format!("alloc {MIB}"));
    swapped.ok("fill 0 9");
    swapped.ok(&format!("send {from_plain} 0"));
    let import = plain.number(&format!("recv {to_swapped}"));
    assert_eq!(plain.ok(&format!("device {import}")), "HOST-1 1");
    plain.ok(&format!("check {import} 9"));
    assert_eq!((reserved(0, "swapped"), reserved(1, "swapped") > Some(0)), (Some(0), true));
    // Who does not see a device is told so by its identity, keeps nothing, and goes on.
    plain.ok(&format!("send {to_second} 1"));
    let said = second.tell(&format!("recv {at_second}"));
    assert!(said.starts_with("err ") && said.contains("HOST-0"), "{said}");
    assert_eq!(second.number("imported"), 0);
    plain.ok("on HOST-1");
    plain.ok(&format!("send {to_second} 0"));
    let import = second.number(&format!("recv {at_second}"));
    assert_eq!(second.ok(&format!("device {import}")), "HOST-1 0");
    second.ok(&format!("check {import} 0"));
}

/// pytorch#165685: a receiver that takes descriptors out of the sender finds them closed. Here the owner has them.
#[test]
fn a_sender_may_close_every_descriptor_of_memory_after_the_send() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker("b"));
    let (ab, ba) = link(&mut a, &mut b);
    a.ok(&format!("alloc {MIB}"));
    a.ok("fill 0 5");
    a.ok(&format!("send {ab} 0"));
    let closed = a.ok("closememory");
    assert!(closed.contains("millpond-control") && closed.contains("millpond-chunk"), "{closed}");
    b.ok(&format!("recv {ba}"));
    b.ok("check 0 5");
    b.ok("release 0");
    eventually("the lease ends", || a.number("leases") == 0);
    // And on, with new memory, which comes from the owner.
    a.ok(&format!("alloc {}", 64 * MIB));
    a.ok("fill 1 6");
    a.ok(&format!("send {ab} 1"));
    assert!(a.ok("closememory").contains("millpond-chunk"));
    a.die("kill");
    b.ok(&format!("recv {ba}"));
    b.ok("check 1 6");
}

/// LMCache#4550: without a shared `/dev/shm` the driver's interprocess events do not work. A value that is not ready when it arrives is
/// waited for all the same, by stream and by CPU, into such a box and out of it.
#[test]
fn what_is_not_ready_yet_is_waited_for_without_a_shared_dev_shm() {
    if !apart_works() {
        return;
    }
    let mark = format!("/dev/shm/millpond-test-{}", std::process::id());
    std::fs::write(&mark, "").unwrap();
    for into in [true, false] {
        let arena = Arena::new();
        let (mut a, mut b) = if into { (arena.worker("a"), arena.apart("b")) } else { (arena.apart("a"), arena.worker("b")) };
        let (inside, outside) = if into { (&mut b, &mut a) } else { (&mut a, &mut b) };
        assert_eq!(inside.number("files /dev/shm"), 0);
        assert!(outside.number("files /dev/shm") > 0);
        send_late(&mut a, &mut b);
        b.fails("Timeout", "ready 0 10");
        assert_eq!(b.number("idle 1"), 0, "nothing is waited for");
        a.ok("go 1");
        b.ok("sync 1");
        b.ok("ready 0");
        b.ok("check 0 1");
        b.ok("release 0");
        eventually("the lease ends", || a.number("leases") == 0);
    }
    std::fs::remove_file(&mark).unwrap();
}
