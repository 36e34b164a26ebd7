//! What an owner costs when it serves as many clients as it can.

use std::process::Command;

use millpond_allocator::driver::Stream;
use millpond_ipc::client::{Client, Options};
use millpond_ipc::wire::Role;
use serde_json::{json, Value};

use super::bench::{at, text, Bench, MIB};
use super::Figures;

const CLIENTS: usize = 64;
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
        let options = Options::new(owner.socket.clone(), owner.key.clone(), format!("client {n}"));
        clients.push(Client::attach(&options).map_err(|error| format!("client {n}: {error}"))?);
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
