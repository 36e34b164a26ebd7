//! A client that is killed in the middle of its work.
#![allow(unsafe_code)] // a channel's socket is borrowed by its number

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use millpond_allocator::driver::Stream;
use millpond_ipc::client::ReceiveOptions;
use millpond_ipc::wire::Role;
use millpond_tests::sample::Sample;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::process::{pidfd_open, Pid, PidfdFlags};
use serde_json::json;

use super::bench::{at, text, Bench, Owner, Party, GIB, MIB, PATIENCE};
use super::Figures;

/// SIGKILL while much work is queued on much memory, with a stream here that waits for it.
pub(crate) fn kill(bench: &Bench) -> Figures {
    let held = if bench.gpu() { 8 * GIB } else { 256 * MIB };
    // So little that the memory of the dead is needed.
    let limit = (held + held / 2).to_string();
    let owner = bench.owner(&["--limit", &limit, "--chunk-bytes", &(held / 8).to_string()])?;
    let parent = owner.attach("parent", Role::Parent)?;
    let (mut gone, mut released, mut told, mut ledger, mut usable) = Default::default();
    let turns = bench.pick(2, 5);
    for turn in 0..turns {
        at(format_args!("kill {turn}"));
        let samples = (&mut gone, &mut released, &mut told, &mut ledger, &mut usable);
        once(&owner, &parent, (bench.gpu(), held), turn as u8, samples)?;
    }
    Ok(json!({
        "held_bytes": held, "kills": turns,
        "process_gone_ms": gone.json(1e6),
        "waiting_stream_released_ms_after_kill": released.json(1e6),
        "peer_died_reported_ms_after_kill": told.json(1e6),
        "ledger_zero_ms_after_kill": ledger.json(1e6),
        "bytes_usable_by_another_ms_after_kill": usable.json(1e6),
    }))
}

type Samples<'a> = (&'a mut Sample, &'a mut Sample, &'a mut Sample, &'a mut Sample, &'a mut Sample);

fn once(owner: &Owner, parent: &Party, (gpu, held): (bool, u64), turn: u8, samples: Samples<'_>) -> Result<(), String> {
    let mut victim = owner.worker(parent, &format!("victim {turn}"))?;
    let pid = victim.process.pid();
    // Some seconds of fills at 4 TB/s; on the host a fill of 256 MiB takes some 50 ms.
    let ask = json!({ "op": "hog", "bytes": held, "fills": if gpu { 2000 } else { 60 } });
    parent.send(&victim.channel, &ask.to_string(), &[])?;
    let options = ReceiveOptions { timeout: Some(PATIENCE), lazy: true, wait: false, stream: &|_| None };
    let message = parent.client.receive(&victim.channel, &options).map_err(text)?;
    let tensor = message.tensors.first().ok_or_else(|| format!("no tensor came: {}", message.tree))?;
    let stream = parent.driver.stream_create().map_err(text)?;
    parent.client.open_import(tensor.import, Some(stream), false, Some(PATIENCE)).map_err(text)?;
    if parent.driver.stream_query(stream).map_err(text)? {
        return Err("the stream did not wait: the victim's work was over before it was killed".to_owned());
    }
    let watch = watch(pid, victim.channel.raw_fd())?;
    let start = Instant::now();
    kill_now(pid)?;
    let (on, dead) = seen(parent, stream, tensor.import)?;
    let end = watch.join().map_err(|_| "the watcher panicked".to_owned())??;
    victim.process.kill();
    // Our own hold keeps the dead one's chunks: let go, then they come back.
    parent.client.release(tensor.import).map_err(text)?;
    parent.driver.stream_synchronize(stream).map_err(text)?;
    let is_back = loop {
        let ours = parent.client.ledger();
        let left: u64 = ours
            .devices
            .iter()
            .flat_map(|device| &device.clients)
            .filter(|client| client.pid == u64::from(pid))
            .map(|client| client.reserved)
            .sum();
        let orphaned: u64 = ours.devices.iter().map(|device| device.orphaned).sum();
        if left + orphaned == 0 {
            break start.elapsed();
        }
        if start.elapsed() > Duration::from_secs(10) {
            return Err(format!("10 s after the kill the ledger says: reserved {left}, orphaned {orphaned}: {}", json!(ours)));
        }
        std::thread::sleep(Duration::from_micros(200));
    };
    let addr = parent.heap.allocate(held, parent.stream).map_err(text)?;
    parent.driver.fill(addr, 0x42, held, parent.stream).map_err(text)?;
    parent.synchronize()?;
    let is_usable = start.elapsed();
    check(parent, addr, held)?;
    parent.heap.free(addr).map_err(text)?;
    parent.synchronize()?;
    parent.heap.tick();
    parent.heap.trim(u64::MAX);
    parent.driver.stream_destroy(stream).map_err(text)?;
    let (gone, released, told, ledger, usable) = samples;
    let since = |at: Instant| at.saturating_duration_since(start);
    for (sample, took) in [(gone, since(end.process)), (released, since(on)), (told, since(dead)), (ledger, is_back), (usable, is_usable)] {
        sample.add(took);
    }
    Ok(())
}

/// SIGKILL, again and again, with a stream here that waits for the dead one's work: how long after the process is gone (its pidfd
/// is readable) the stream goes on, and `PeerDied` can be had.
pub(crate) fn release(bench: &Bench) -> Figures {
    let held = if bench.gpu() { 4 * GIB } else { 256 * MIB };
    let owner = bench.owner(&[])?;
    let parent = owner.attach("parent", Role::Parent)?;
    let stream = parent.driver.stream_create().map_err(text)?;
    let (mut gone, mut closed, mut released, mut both, mut told) = Default::default();
    let mut all: [&mut Sample; 5] = [&mut gone, &mut closed, &mut released, &mut both, &mut told];
    let kills = bench.pick(5, 10);
    for turn in 0..kills {
        at(format_args!("kill {turn}"));
        let mut victim = owner.worker(&parent, &format!("victim {turn}"))?;
        // A second of fills, which a queue takes at once.
        let ask = json!({ "op": "hog", "bytes": held, "fills": if bench.gpu() { 1000 } else { 30 } });
        parent.send(&victim.channel, &ask.to_string(), &[])?;
        let message = parent.receive(&victim.channel, PATIENCE)?;
        let tensor = message.tensors.first().ok_or_else(|| format!("no tensor came: {}", message.tree))?;
        parent.client.open_import(tensor.import, Some(stream), false, Some(PATIENCE)).map_err(text)?;
        if parent.driver.stream_query(stream).map_err(text)? {
            return Err("the stream did not wait: the victim's work was over before it was killed".to_owned());
        }
        let watch = watch(victim.process.pid(), victim.channel.raw_fd())?;
        let start = Instant::now();
        kill_now(victim.process.pid())?;
        let (on, dead) = seen(&parent, stream, tensor.import)?;
        let Ends { process, socket } = watch.join().map_err(|_| "the watcher panicked".to_owned())??;
        let times = [(process, start), (socket, process), (on, process), (on, process.max(socket)), (dead, process)];
        for (sample, (at, since)) in all.iter_mut().zip(times) {
            sample.add(at.saturating_duration_since(since));
        }
        victim.process.kill();
        parent.client.release(tensor.import).map_err(text)?;
        parent.driver.stream_synchronize(stream).map_err(text)?;
    }
    Ok(json!({
        "kills": kills, "gone_after_kill_ms": gone.json(1e6), "socket_end_after_gone_us": closed.json(1e3),
        "released_after_gone_us": released.json(1e3), "released_after_both_us": both.json(1e3),
        "peer_died_after_gone_us": told.json(1e3),
    }))
}

/// When the stream went on, and when it could be known that the value never will be ready.
fn seen(parent: &Party, stream: Stream, import: u64) -> Result<(Instant, Instant), String> {
    let start = Instant::now();
    let (mut on, mut dead) = (None, None);
    loop {
        if on.is_none() && parent.driver.stream_query(stream).map_err(text)? {
            on = Some(Instant::now());
        }
        if dead.is_none() {
            match parent.client.import_ready(import, Some(Duration::ZERO)) {
                Ok(()) => return Err("the value of a killed producer counts as ready".to_owned()),
                Err(error) if error.code() == "PeerDied" => dead = Some(Instant::now()),
                Err(error) if error.code() == "Timeout" => {}
                Err(error) => return Err(format!("the value of a killed producer: {error}")),
            }
        }
        if let (Some(on), Some(dead)) = (on, dead) {
            return Ok((on, dead));
        }
        if start.elapsed() > Duration::from_secs(10) {
            return Err(format!("10 s after the kill: stream released {on:?}, PeerDied {dead:?}"));
        }
        // The owner may need this processor.
        std::thread::yield_now();
    }
}

/// When a process was gone (its pidfd was readable), and when nobody held the other end of a socket any more.
#[derive(Debug)]
struct Ends {
    process: Instant,
    socket: Instant,
}

/// A thread that says when a process and our channel to it have ended. The channel must stay.
fn watch(pid: u32, channel: RawFd) -> Result<JoinHandle<Result<Ends, String>>, String> {
    let pid = Pid::from_raw(pid as i32).ok_or("no pid")?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(text)?;
    // SAFETY: a channel's socket, open as long as the channel is: here, for the moment of the duplication.
    let channel = unsafe { BorrowedFd::borrow_raw(channel) }.try_clone_to_owned().map_err(text)?;
    Ok(std::thread::spawn(move || {
        let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
        let (mut process, mut socket) = (None, None);
        loop {
            // What has ended is not looked at again: it would end every wait.
            let wanted: [(&OwnedFd, PollFlags, &mut Option<Instant>); 2] =
                [(&pidfd, PollFlags::IN, &mut process), (&channel, PollFlags::empty(), &mut socket)];
            let mut wanted: Vec<_> = wanted.into_iter().filter(|(_, _, seen)| seen.is_none()).collect();
            let mut fds: Vec<_> = wanted.iter().map(|(fd, flags, _)| PollFd::new(*fd, *flags)).collect();
            if poll(&mut fds, Some(&limit)).map_err(text)? == 0 {
                return Err("the process, or its channel, did not end within 20 s".to_owned());
            }
            let now = Instant::now();
            let ended: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            wanted.iter_mut().zip(ended).filter(|(_, ended)| *ended).for_each(|((_, _, seen), _)| **seen = Some(now));
            if let (Some(process), Some(socket)) = (process, socket) {
                return Ok(Ends { process, socket });
            }
        }
    }))
}

/// No late write of the dead: what was filled stays so.
fn check(parent: &Party, addr: u64, bytes: u64) -> Result<(), String> {
    for place in (0..16).map(|n| bytes / 16 * n) {
        let mut data = [0_u8; 256];
        parent.driver.copy(data.as_mut_ptr() as u64, addr + place, 256, parent.stream).map_err(text)?;
        parent.synchronize()?;
        if let Some(byte) = data.iter().find(|byte| **byte != 0x42) {
            return Err(format!("a late write: byte {byte:#04x} at {place}"));
        }
    }
    Ok(())
}

fn kill_now(pid: u32) -> Result<(), String> {
    let pid = Pid::from_raw(pid as i32).ok_or("no pid")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).map_err(text)
}
