//! A client that is killed in the middle of its work.

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
    let start = Instant::now();
    kill_now(pid)?;
    let (mut is_gone, mut is_released, mut is_told) = (None, None, None);
    while is_gone.is_none() || is_released.is_none() || is_told.is_none() {
        let now = start.elapsed();
        if is_gone.is_none() && ended(pid) {
            is_gone = Some(now);
        }
        if is_released.is_none() && parent.driver.stream_query(stream).map_err(text)? {
            is_released = Some(now);
        }
        if is_told.is_none() {
            match parent.client.import_ready(tensor.import, Some(Duration::ZERO)) {
                Ok(()) => return Err("the value of a killed producer counts as ready".to_owned()),
                Err(error) if error.code() == "PeerDied" => is_told = Some(now),
                Err(error) if error.code() == "Timeout" => {}
                Err(error) => return Err(format!("the value of a killed producer: {error}")),
            }
        }
        if now > Duration::from_secs(10) {
            return Err(format!("10 s after the kill: process gone {is_gone:?}, stream released {is_released:?}, PeerDied {is_told:?}"));
        }
        std::thread::sleep(Duration::from_micros(50));
    }
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
    for (sample, took) in [(gone, is_gone), (released, is_released), (told, is_told), (ledger, Some(is_back)), (usable, Some(is_usable))] {
        sample.add(took.unwrap_or_default());
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
    let (mut gone, mut released, mut told) = (Sample::default(), Sample::default(), Sample::default());
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
        let watch = watch(victim.process.pid())?;
        let start = Instant::now();
        kill_now(victim.process.pid())?;
        let (on, dead) = seen(&parent, stream, tensor.import)?;
        let end = watch.join().map_err(|_| "the watcher panicked".to_owned())??;
        gone.add(end.saturating_duration_since(start));
        released.add(on.saturating_duration_since(end));
        told.add(dead.saturating_duration_since(end));
        victim.process.kill();
        parent.client.release(tensor.import).map_err(text)?;
        parent.driver.stream_synchronize(stream).map_err(text)?;
    }
    Ok(json!({
        "kills": kills, "gone_after_kill_ms": gone.json(1e6),
        "released_after_gone_us": released.json(1e3), "peer_died_after_gone_us": told.json(1e3),
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

/// A thread that says when a process was gone: when its pidfd was readable.
fn watch(pid: u32) -> Result<JoinHandle<Result<Instant, String>>, String> {
    let pid = Pid::from_raw(pid as i32).ok_or("no pid")?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(text)?;
    Ok(std::thread::spawn(move || {
        let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
        match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit)).map_err(text)? {
            0 => Err("the process did not end within 20 s".to_owned()),
            _ => Ok(Instant::now()),
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

/// Whether a process has ended (a zombie has).
fn ended(pid: u32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    let letter = state.as_deref().and_then(|stat| stat.rsplit_once(") ")).and_then(|(_, rest)| rest.chars().next());
    matches!(letter, None | Some('Z' | 'X'))
}
