//! What an owner costs when it serves as many clients as it can.

use std::process::Command;
use std::sync::{Arc, Barrier};
use std::time::Instant;

use millpond_allocator::driver::Stream;
use millpond_allocator::heap::Heap;
use millpond_ipc::client::{Client, Options, Place};
use millpond_ipc::wire::Role;
use serde_json::{json, Value};

use super::bench::{at, text, Bench, Owner, GIB, MIB};
use super::Figures;

const CLIENTS: usize = 64;
/// What a client asks for at a time in the race: a whole number of them fits what a heap grows by.
const BLOCK: u64 = 8 * MIB;
/// The target of the owner's resident memory.
const RSS_KIB: u64 = 20 << 10;

/// The owner with 64 clients attached, one of which uses the device.
pub(crate) fn sixty_four(bench: &Bench) -> Figures {
    let owner = bench.owner(&[])?;
    let before = rss(owner.pid())?;
    let parent = owner.attach("parent", Role::Parent)?;
    let mut clients = Vec::new();
    for n in 1..CLIENTS {
        at(format_args!("client {n}"));
        clients.push(attach(&owner, n)?);
    }
    at("their memory");
    let _own = parent.heap.allocate(MIB, parent.stream).map_err(text)?;
    let mut blocks = 0;
    for client in &clients {
        // All in this process: one context.
        let heap = client.heap(parent.place).map_err(text)?;
        heap.allocate(2 * MIB, Stream::LEGACY).map_err(text)?;
        blocks += 1;
    }
    let after = rss(owner.pid())?;
    let context = vram_of(owner.pid());
    let figures = json!({
        "clients": clients.len() + 1, "clients_with_memory": blocks + 1, "rss_KiB": after, "rss_KiB_without_clients": before,
        "nvidia_smi_lists_the_owner": context, "nvidia_device_files": device_files(owner.pid()),
    });
    if after > RSS_KIB {
        return Err(format!("the owner's resident memory is {after} KiB, above {RSS_KIB}: {figures}"));
    }
    if context.as_str().is_some_and(|row| !row.is_empty()) {
        return Err(format!("the owner has a context on the card: {figures}"));
    }
    Ok(figures)
}

/// As many clients as there can be ask for blocks of the arena's only GiB at once, until each is refused: all of it is given out, no byte
/// of it twice.
pub(crate) fn race(bench: &Bench) -> Figures {
    let owner = bench.owner(&["--limit", &GIB.to_string()])?;
    let clients = (0..CLIENTS).map(|n| attach(&owner, n)).collect::<Result<Vec<_>, _>>()?;
    let place = if bench.gpu() { Place::Ordinal(0) } else { Place::Host };
    // Contexts are made before the race.
    let heaps = clients.iter().map(|client| client.heap(place)).collect::<Result<Vec<_>, _>>().map_err(text)?;
    at("the race");
    let (line, start) = (Barrier::new(CLIENTS), Instant::now());
    let taken: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let run = |heap: &Arc<Heap>| {
            line.wait();
            let blocks = std::iter::from_fn(|| heap.allocate(BLOCK, Stream::LEGACY).ok());
            blocks.take(2 * (GIB / BLOCK) as usize).collect()
        };
        let threads: Vec<_> = heaps.iter().map(|heap| scope.spawn(move || run(heap))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
    });
    let took = start.elapsed();
    let ledger = clients.first().ok_or("no client")?.ledger();
    let device = ledger.devices.first().ok_or("no device")?;
    let blocks: usize = taken.iter().map(Vec::len).sum();
    let won = taken.iter().filter(|blocks| !blocks.is_empty()).count();
    let figures = json!({ "clients": CLIENTS, "blocks": blocks, "clients_with_blocks": won, "reserved": device.reserved, "ms": took.as_millis() as u64 });
    if (blocks as u64 * BLOCK, device.reserved) != (GIB, GIB) {
        return Err(format!("not the whole GiB, or more of it: {figures}"));
    }
    at("who has what");
    let drivers = clients.iter().map(|client| client.driver(place)).collect::<Result<Vec<_>, _>>().map_err(text)?;
    let all = || drivers.iter().zip(&taken).flat_map(|(driver, blocks)| blocks.iter().map(move |addr| (driver, *addr))).zip(1_u8..);
    for ((driver, addr), mark) in all() {
        driver.fill(addr, mark, BLOCK, Stream::LEGACY).map_err(text)?;
    }
    drivers.iter().try_for_each(|driver| driver.stream_synchronize(Stream::LEGACY)).map_err(text)?;
    for ((driver, addr), mark) in all() {
        let mut ends = [[0_u8; 64]; 2];
        for (end, place) in ends.iter_mut().zip([addr, addr + BLOCK - 64]) {
            driver.copy(end.as_mut_ptr() as u64, place, 64, Stream::LEGACY).map_err(text)?;
        }
        driver.stream_synchronize(Stream::LEGACY).map_err(text)?;
        if ends.as_flattened().iter().any(|byte| *byte != mark) {
            return Err(format!("block {mark} is another's too: {figures}"));
        }
    }
    Ok(figures)
}

fn attach(owner: &Owner, n: usize) -> Result<Arc<Client>, String> {
    let options = Options::new(owner.socket.clone(), owner.key.clone(), format!("client {n}"));
    Client::attach(&options).map_err(|error| format!("client {n}: {error}"))
}

fn rss(pid: u32) -> Result<u64, String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).map_err(|error| format!("the owner: {error}"))?;
    let row = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).and_then(|rest| rest.split_whitespace().next());
    row.and_then(|kib| kib.parse().ok()).ok_or_else(|| "no VmRSS".to_owned())
}

/// The owner's row in `nvidia-smi`, empty if it has none; null where there is no such program.
fn vram_of(pid: u32) -> Value {
    let asked = Command::new("nvidia-smi").args(["--query-compute-apps=pid,used_memory", "--format=csv,noheader"]).output();
    let Ok(output) = asked else { return Value::Null };
    let rows = String::from_utf8_lossy(&output.stdout).into_owned();
    let own = rows.lines().find(|line| line.split(',').next().is_some_and(|first| first.trim() == pid.to_string()));
    Value::from(own.unwrap_or_default())
}

fn device_files(pid: u32) -> usize {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    open.filter_map(|entry| std::fs::read_link(entry.path()).ok()).filter(|path| path.starts_with("/dev/nvidia0")).count()
}
