//! Streams that share a hardware queue. A stream that waits for an unmet word holds up what comes into its queue after it, from
//! whatever stream (facts/driver.md), and so two processes could stand still though neither has a cycle. They do not, since
//! nothing is ever waited for whose write was not queued before: along the order in which things were queued, in all
//! processes together, everything depends on earlier things only.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{link, Arena, Worker};
use std::time::Duration;

#[test]
fn role() {
    common::role();
}

const ONE_QUEUE: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "1");

/// Each of two workers sends what is not ready from one stream and waits for the other's on the next one, which shares its
/// hardware queue, and sends that on; then both are let go.
fn both_ways(arena: &Arena, vars: &[(&str, &str)], streams: u64, rounds: u64) {
    let (mut a, mut b) = (arena.worker_with("a", vars), arena.worker_with("b", vars));
    let (ab, ba) = link(&mut a, &mut b);
    let mut pair = [(a, ab), (b, ba)];
    for (worker, channel) in &mut pair {
        worker.ok("alloc 4096 1");
        worker.ok("stall 1");
        worker.ok("fill 0 1 1");
        worker.ok(&format!("send {channel} 0 1"));
    }
    for round in 0..rounds {
        let on = 2 + round % (streams - 1);
        for (worker, channel) in &mut pair {
            let import = worker.number(&format!("recv {channel} {on}"));
            worker.ok(&format!("touch {import} {} {on}", round + 2));
            worker.ok(&format!("forward {channel} {import} {on}"));
            worker.ok(&format!("release {import}"));
        }
    }
    let idle = |worker: &mut Worker, on: u64| worker.number(&format!("idle {on}")) == 1;
    assert!(pair.iter_mut().all(|(worker, _)| (1..=streams).all(|on| !idle(worker, on))), "all of it stands behind the two stalls");
    pair.iter_mut().for_each(|(worker, _)| drop(worker.ok("go 1")));
    for (worker, channel) in &mut pair {
        for on in 1..=streams {
            worker.ok(&format!("sync {on}"));
        }
        let last = worker.number(&format!("recv {channel}"));
        worker.ok(&format!("check {last} {}", rounds + 1));
    }
}

#[test]
fn waits_in_both_directions_over_one_hardware_queue_come_to_an_end() {
    both_ways(&Arena::new(), &[ONE_QUEUE], 4, 12);
}

#[test]
fn and_over_as_many_as_worker_env_sets() {
    both_ways(&Arena::new(), &[("CUDA_DEVICE_MAX_CONNECTIONS", "8")], 40, 60);
}

/// `wait="host"`: the value is waited for before anything is queued, so no stream ever stands at another process's word.
#[test]
fn who_waits_on_the_host_holds_up_none_of_its_streams() {
    let arena = Arena::new();
    let mut a = arena.worker("a");
    let mut b = arena.worker_with("b", &[ONE_QUEUE, ("MILLPOND_TEST_HOST_WAITS", "1")]);
    let (ab, ba) = link(&mut a, &mut b);
    a.ok("alloc 4096 1");
    b.ok("alloc 4096 3");
    a.ok("stall 1");
    a.ok("fill 0 5 1");
    a.ok(&format!("send {ab} 0 1"));
    b.ok(&format!("recv {ba} lazy"));
    b.fails("Timeout", "open 0 2 20");
    // It waited in vain, and its one hardware queue is free.
    b.ok("fill 0 7 3");
    b.ok("sync 3");
    b.ask("open 0 2");
    assert_eq!(b.answers_within(Duration::from_millis(20)), None);
    a.ok("go 1");
    assert!(b.answer().starts_with("ok "));
    b.ok("check 0 5");
    b.ok("sync 2");
}

/// The same wait on a stream: everything that shares its hardware queue stands still until the value is there.
#[test]
fn who_waits_on_a_stream_holds_up_those_that_share_its_queue() {
    let arena = Arena::new();
    let (mut a, mut b) = (arena.worker("a"), arena.worker_with("b", &[ONE_QUEUE]));
    let (ab, ba) = link(&mut a, &mut b);
    a.ok("alloc 4096 1");
    b.ok("alloc 4096 3");
    a.ok("stall 1");
    a.ok("fill 0 5 1");
    a.ok(&format!("send {ab} 0 1"));
    b.ok(&format!("recv {ba} 2"));
    b.ok("fill 0 7 3");
    assert_eq!(b.number("idle 3"), 0);
    // The death of the one who was to signal lets them go.
    a.die("kill");
    b.ok("sync 3");
    b.ok("checkblock 0 7");
}
