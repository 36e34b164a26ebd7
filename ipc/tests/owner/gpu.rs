//! On a machine with a GPU: `cargo test -p millpond-ipc --features cli --test owner gpu -- --ignored --nocapture`.
//! `MILLPOND_PROGRAM` names the program where it is not where cargo built it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

use millpond_ipc::wire::{Answer, Request, Role};

use crate::puppet::Puppet;
use crate::raw::*;

const GIB: u64 = 1 << 30;

fn smi(query: &str) -> String {
    let output = Command::new("nvidia-smi").args([query, "--format=csv,noheader,nounits"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn used_mib() -> u64 {
    smi("--query-gpu=memory.used").lines().next().unwrap().trim().parse().unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn the_owner_of_a_gpu_has_no_context_and_gives_everything_back() {
    let before = used_mib();
    let start = Instant::now();
    let mut child = Command::new(program()).args(["serve", "--driver", "cuda", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    println!("start to ready: {:?}", start.elapsed());
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap();
    let (socket, key) = (ready["socket"].as_str().unwrap(), ready["key"].as_str().unwrap());
    let mut client = Raw::attach(socket.as_ref(), &hello(key, "worker", Role::Worker)).unwrap();
    let grant = &client.welcome.devices[0];
    println!("{grant:?}");
    assert!(grant.device.starts_with("GPU-"));
    assert_eq!(client.welcome.devices.last().unwrap().device, "HOST-0");
    println!("with an owner, nothing granted: {} MiB more on the card", used_mib().saturating_sub(before));

    let start = Instant::now();
    let chunks = client.grow(8 * GIB);
    println!("growth of 8 GiB in {} chunks: {:?}", chunks.len(), start.elapsed());
    let held = used_mib();
    println!("{} MiB more on the card", held - before);
    assert!((8192..8192 + 64).contains(&(held - before)));
    let apps = smi("--query-compute-apps=pid,used_memory");
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let rss = status.lines().find(|line| line.starts_with("VmRSS")).unwrap().to_owned();
    println!("compute apps: {apps:?}; owner {rss}");
    assert_eq!(client.release(&chunks), (8 * GIB, 0));
    until("the card has it back", || used_mib() < before + 64);

    // A client that dies with memory.
    let mut puppet = Puppet::start_at(socket.as_ref(), key, "victim", "grow:8192");
    until("it has memory", || client.ledger().reserved == 8 * GIB);
    let start = Instant::now();
    puppet.kill();
    until("the ledger has it back", || client.ledger().reserved == 0);
    println!("SIGKILL to 8 GiB back in the ledger: {:?}", start.elapsed());
    until("the card has it back", || used_mib() < before + 64);
    let (answer, _) = client.call(Request::Grow { device: 0, bytes: 1 << 50, press: true });
    assert!(matches!(answer, Answer::Refused { .. }), "{answer:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    let _ = std::fs::remove_dir_all(std::path::Path::new(socket).parent().unwrap());
}
