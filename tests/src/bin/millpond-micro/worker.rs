//! The other process: does what it is asked, message by message.

use std::time::{Duration, Instant};

use millpond_allocator::driver::Access;
use millpond_allocator::window::{Chunk, Window};
use millpond_ipc::client::{Channel, Message};
use millpond_ipc::wire::Role;
use millpond_tests::flags::Flags;
use serde_json::{json, Value};

use super::bench::{text, Party, PATIENCE};
use super::seams;

pub(crate) fn run(flags: &Flags, name: &str) -> Result<(), String> {
    let key = std::env::var("MILLPOND_KEY").map_err(|_| "MILLPOND_KEY is not set".to_owned())?;
    let socket: String = flags.read("socket")?;
    let party = Party::attach(socket.into(), key, name, Role::Worker, flags.value("driver") == Some("cuda"))?;
    let channel = party.client.connect("parent", PATIENCE).map_err(text)?;
    loop {
        let Ok(message) = party.receive(&channel, Duration::from_secs(600)) else { return Ok(()) };
        if message.tree.get() == "0" {
            // A round trip: import, let go, answer. Nothing else is on this path.
            for tensor in &message.tensors {
                party.open(tensor)?;
                party.client.release(tensor.import).map_err(text)?;
            }
            party.send(&channel, "0", &[])?;
            continue;
        }
        if let Err(error) = answer(&party, &channel, &message) {
            party.send(&channel, &json!({ "error": error }).to_string(), &[])?;
        }
        message.tensors.iter().for_each(|tensor| drop(party.client.release(tensor.import)));
    }
}

fn answer(party: &Party, channel: &Channel, message: &Message) -> Result<(), String> {
    let ask: Value = serde_json::from_str(message.tree.get()).map_err(text)?;
    let number = |key: &str| ask[key].as_u64().ok_or_else(|| format!("{key} is missing in {ask}"));
    let answer = match ask["op"].as_str() {
        Some("open") => {
            let mut took = Vec::new();
            for tensor in &message.tensors {
                let start = Instant::now();
                party.open(tensor)?;
                took.push(start.elapsed().as_nanos() as u64);
            }
            json!({ "ns": took })
        }
        Some("map") => json!({ "ns": map(party, number("bytes")?, number("count")?)? }),
        Some("seams") => {
            let tensor = message.tensors.first().ok_or("no tensor came")?;
            let addr = party.open(tensor)?;
            let places: Vec<u64> = ask["places"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
            let checked = seams::check(party, addr, tensor.bytes, &places, number("expect")? as u8)?;
            seams::mark(party, addr, tensor.bytes, &places, number("write")? as u8)?;
            party.synchronize()?;
            json!({ "checked": checked })
        }
        Some("hog") => return hog(party, channel, number("bytes")?, number("fills")?),
        other => return Err(format!("no operation {other:?}")),
    };
    party.send(channel, &answer.to_string(), &[])
}

/// Chunks that no other process made, imported, mapped and made accessible: the driver's part of a first use. Nanoseconds of each.
fn map(party: &Party, bytes: u64, count: u64) -> Result<Vec<u64>, String> {
    let window = Window::reserve(party.driver.clone(), bytes * count, Access::ReadWrite).map_err(text)?;
    let mut took = Vec::new();
    for epoch in 0..count {
        let memory = party.driver.create(bytes).map_err(text)?;
        let exported = party.driver.export(memory);
        party.driver.release(memory).map_err(text)?;
        let chunks = [(Chunk { offset: epoch * bytes, bytes, epoch }, exported.map_err(text)?)];
        let start = Instant::now();
        window.map(&chunks).map_err(text)?;
        took.push(start.elapsed().as_nanos() as u64);
    }
    (0..count).try_for_each(|epoch| window.unmap(epoch).map(drop)).map_err(text)?;
    Ok(took)
}

/// Takes memory, queues more work on it than could run soon, and sends it off at once: READY stands behind the work.
fn hog(party: &Party, channel: &Channel, bytes: u64, fills: u64) -> Result<(), String> {
    let addr = party.heap.allocate(bytes, party.stream).map_err(text)?;
    for fill in 0..fills {
        party.driver.fill(addr, fill as u8, bytes, party.stream).map_err(text)?;
    }
    let tensor = millpond_ipc::client::Outgoing { stream: Some(party.stream), ..party.outgoing(addr, bytes) };
    party.send(channel, &json!({ "queued": fills }).to_string(), &[tensor])
}
