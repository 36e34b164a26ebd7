//! `millpond-conformance --platform cuda|host [--json FILE]`: the driver conformance suite on every device of a machine.
//!
//! Cases run one after another in a child process, which is replaced when one of them crashes it or hangs: each case costs
//! itself at most. Those that kill their context have a process each. Exit code 1 if anything failed.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use millpond_allocator::driver::conformance::{self, Case};
use millpond_allocator::driver::DeviceId;
use millpond_tests::flags::Flags;
use millpond_tests::lines::{Lines, Next};
use millpond_tests::platform::platform;
use serde_json::{json, Value};

const HANGS_AFTER: Duration = Duration::from_secs(30);
const TWO: &str = "two processes share a chunk and words";

fn main() -> ExitCode {
    let flags = Flags::of_process();
    let outcome = match flags.value("part") {
        None => whole(&flags),
        Some("devices") => devices(&flags),
        Some("cases") => cases(&flags),
        Some("two") => two(&flags),
        Some("other") => other(&flags),
        Some(part) => Err(format!("--part {part:?} is none")),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("millpond-conformance: {error}");
            ExitCode::FAILURE
        }
    }
}

fn all() -> Vec<&'static Case> {
    conformance::cases().chain(conformance::FATAL_CASES).collect()
}

/// One case on one device.
struct Found {
    device: String,
    case: String,
    message: Option<String>,
    ms: u64,
}

/// Runs everything, in child processes.
fn whole(flags: &Flags) -> Result<bool, String> {
    let name = flags.value("platform").unwrap_or("host").to_owned();
    let mut found = Vec::new();
    let seen = list(&name)?;
    for (device, _) in &seen {
        let cases = all();
        let mut from = 0;
        while from < cases.len() {
            from = some_cases(&name, device, &cases, from, &mut found)?;
        }
        let outcome = watch(&["--part", "two", "--platform", &name, "--device", device]);
        report(&mut found, device, TWO, outcome);
    }
    let failed = found.iter().filter(|one| one.message.is_some()).count();
    if let Some(path) = flags.value("json") {
        let cases: Vec<Value> = found.iter().map(Found::json).collect();
        let devices: Vec<Value> = seen.iter().map(|(_, info)| info.clone()).collect();
        let all = json!({ "platform": name, "passed": found.len() - failed, "failed": failed, "devices": devices, "cases": cases });
        std::fs::write(path, all.to_string()).map_err(|error| format!("{path}: {error}"))?;
    }
    println!("{} passed, {failed} failed", found.len() - failed);
    Ok(failed == 0 && !found.is_empty())
}

impl Found {
    fn json(&self) -> Value {
        json!({ "device": self.device, "case": self.case, "ok": self.message.is_none(), "message": self.message, "ms": self.ms })
    }
}

fn report(found: &mut Vec<Found>, device: &str, case: &str, outcome: (Option<String>, u64)) {
    let (message, ms) = outcome;
    match &message {
        None => println!("ok    {device} {case} ({ms} ms)"),
        Some(text) => println!("FAIL  {device} {case} ({ms} ms): {text}"),
    }
    found.push(Found { device: device.to_owned(), case: case.to_owned(), message, ms });
}

/// The devices, as a child sees them: this process never calls the driver.
fn list(name: &str) -> Result<Vec<(String, Value)>, String> {
    let mut child = Lines::of_self(&["--part", "devices", "--platform", name])?;
    let mut devices = Vec::new();
    loop {
        match child.next(HANGS_AFTER) {
            Next::Line(line) => {
                let info: Value = serde_json::from_str(&line).map_err(|error| format!("{line:?}: {error}"))?;
                devices.push((info["id"].as_str().unwrap_or_default().to_owned(), info));
            }
            Next::Silent => return Err(format!("listing the devices hung for {HANGS_AFTER:?}")),
            Next::Ended(how) if devices.is_empty() => return Err(format!("no devices: the child {how}")),
            Next::Ended(_) => return Ok(devices),
        }
    }
}

/// Runs cases from `from` on in one child, until it ends. Returns where to go on.
fn some_cases(name: &str, device: &str, cases: &[&Case], from: usize, found: &mut Vec<Found>) -> Result<usize, String> {
    let mut child = Lines::of_self(&["--part", "cases", "--platform", name, "--device", device, "--from", &from.to_string()])?;
    let mut at = from;
    let mut start = Instant::now();
    loop {
        let next = child.next(HANGS_AFTER);
        let ms = start.elapsed().as_millis() as u64;
        let case = cases.get(at).map_or("", |case| case.name);
        match next {
            Next::Line(line) => {
                let text = line.strip_prefix("FAIL ");
                report(found, device, case, (text.map(str::to_owned), ms));
                at += 1;
                start = Instant::now();
            }
            Next::Silent => {
                report(found, device, case, (Some(format!("hung: nothing for {HANGS_AFTER:?}, killed")), ms));
                return Ok(at + 1);
            }
            Next::Ended(_) if at > from => return Ok(at),
            Next::Ended(how) => {
                report(found, device, case, (Some(format!("its process {how}")), ms));
                return Ok(at + 1);
            }
        }
    }
}

/// Runs a part that says one line.
fn watch(arguments: &[&str]) -> (Option<String>, u64) {
    let start = Instant::now();
    let message = match Lines::of_self(arguments).map(|mut child| child.next(2 * HANGS_AFTER)) {
        Ok(Next::Line(line)) => line.strip_prefix("FAIL ").map(str::to_owned),
        Ok(Next::Silent) => Some(format!("hung: nothing for {:?}, killed", 2 * HANGS_AFTER)),
        Ok(Next::Ended(how)) => Some(format!("its process {how}")),
        Err(error) => Some(error),
    };
    (message, start.elapsed().as_millis() as u64)
}

fn devices(flags: &Flags) -> Result<bool, String> {
    let platform = platform(flags.value("platform").unwrap_or("host"))?;
    for info in platform.devices().map_err(|error| error.to_string())? {
        let line = json!({
            "id": info.id.to_string(), "name": info.name, "total": info.total_bytes, "granularity": info.granularity,
            "context_events": info.context_events, "stream_words": info.stream_words,
        });
        println!("{line}");
    }
    Ok(true)
}

fn device(flags: &Flags) -> Result<DeviceId, String> {
    flags.read("device")
}

/// Cases from `--from` on, up to and with the first one that kills the context, or crashes.
fn cases(flags: &Flags) -> Result<bool, String> {
    let (platform, id, from) = (platform(flags.value("platform").unwrap_or("host"))?, device(flags)?, flags.read_or("from", 0)?);
    for case in all().into_iter().skip(from) {
        say(conformance::run_case(platform.as_ref(), id, case));
        if case.fatal {
            // The context is dead: nothing is taken down.
            let _ = std::io::stdout().flush();
            std::process::exit(0);
        }
    }
    Ok(true)
}

fn say(outcome: Result<(), String>) {
    match outcome {
        Ok(()) => println!("ok"),
        Err(text) => println!("FAIL {}", text.replace('\n', " / ")),
    }
    let _ = std::io::stdout().flush();
}

fn two(flags: &Flags) -> Result<bool, String> {
    let (name, id) = (flags.value("platform").unwrap_or("host"), device(flags)?);
    let platform = platform(name)?;
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let id_text = id.to_string();
    let mut spawn = |socket: UnixStream| {
        Command::new(&program)
            .args(["--part", "other", "--platform", name, "--device", &id_text])
            .stdin(OwnedFd::from(socket))
            .stdout(Stdio::null())
            .spawn()
    };
    say(conformance::parent(platform.as_ref(), id, &mut spawn));
    Ok(true)
}

fn other(flags: &Flags) -> Result<bool, String> {
    let platform = platform(flags.value("platform").unwrap_or("host"))?;
    let socket = std::io::stdin().as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
    conformance::child(platform.as_ref(), device(flags)?, UnixStream::from(socket)).map(|()| true)
}
