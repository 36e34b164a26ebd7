//! The program itself: `millpond serve`, `ledger` and `doctor`.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use millpond_ipc::control::MAX_CLIENTS;
use millpond_ipc::wire::{Ask, Request, Role};
use rustix::process::{kill_process, Pid, Signal};

use crate::puppet::Puppet;
use crate::raw::*;

struct Program {
    child: Child,
    socket: PathBuf,
    key: String,
}

impl Program {
    fn start(args: &[&str]) -> Self {
        let mut command = Command::new(program());
        command.args(["serve", "--driver", "host", "--host-bytes", "256M", "--json"]).args(args);
        command.env_remove("MILLPOND_KEY").env("MILLPOND_LOG", "error").stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(ready["pid"], child.id());
        let text = |field: &str| ready[field].as_str().unwrap().to_owned();
        assert_eq!(text("key").len(), 64);
        Self { child, socket: text("socket").into(), key: text("key") }
    }

    fn attach(&self, name: &str, role: Role) -> Raw {
        Raw::attach(&self.socket, &hello(&self.key, name, role)).unwrap()
    }

    fn status(&self, field: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn ledger(&self, key: &str) -> Output {
        Command::new(program()).args(["ledger", "--json", "--socket"]).arg(&self.socket).env("MILLPOND_KEY", key).output().unwrap()
    }

    fn assert_ends_clean(mut self) {
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        assert!(!self.socket.parent().unwrap().exists());
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = self.socket.parent().map(std::fs::remove_dir_all);
    }
}

#[test]
fn it_is_small_with_64_clients() {
    let program = Program::start(&[]);
    let mut clients: Vec<Raw> = (0..MAX_CLIENTS).map(|n| program.attach(&format!("w{n}"), Role::Worker)).collect();
    clients.iter_mut().for_each(|client| drop(client.grow(UNIT)));
    assert_eq!(clients[0].ledger().clients.len(), MAX_CLIENTS);
    let (rss, anonymous) = (program.status("VmRSS:"), program.status("RssAnon:"));
    println!("owner with 64 clients: VmRSS {rss} KiB, of which anonymous {anonymous} KiB");
    assert!(rss < 20 << 10, "{rss} KiB");
}

#[test]
fn it_leaks_no_descriptors() {
    let program = Program::start(&[]);
    let mut witness = program.attach("witness", Role::Worker);
    // Each call here makes sure that what went before is sent, and closed.
    witness.call(Request::Ledger);
    let before = program.descriptors();
    for round in 0..8 {
        let script = if round % 2 == 0 { "grow:4" } else { "grow:4 detach exit" };
        let mut puppet = Puppet::start_at(&program.socket, &program.key, &format!("puppet-{round}"), script);
        until("it came", || witness.ledger().growths > round);
        puppet.kill();
        until("it went", || witness.ledger().deaths > round);
        let mut bad = Wire::connect(&program.socket);
        bad.send(b"{}", &[std::fs::File::open("/").unwrap().as_fd()]).unwrap();
        assert!(bad.is_cut());
    }
    use std::os::fd::AsFd;
    until("all are closed", || program.descriptors() == before);
    let chunks = witness.grow(UNIT);
    witness.call(Request::Ledger);
    assert_eq!(program.descriptors(), before + 1);
    witness.release(&chunks);
    // It stays at hand for a moment.
    until("it is closed", || program.descriptors() == before);
}

#[test]
fn signals_end_it_clean() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let program = Program::start(&[]);
        let mut client = program.attach("worker", Role::Worker);
        program.signal(signal);
        assert_eq!(client.next_ask().1, Ask::Goodbye);
        program.assert_ends_clean();
    }
}

#[test]
fn it_ends_with_its_parent_however_that_ends() {
    let mut parent = Sleeper::start();
    let program = Program::start(&["--parent-pid", &parent.0.id().to_string()]);
    let mut client = program.attach("worker", Role::Worker);
    // Ctrl-C is the parent's matter.
    program.signal(Signal::INT);
    client.grow(UNIT);
    parent.kill();
    assert_eq!(client.next_ask().1, Ask::Goodbye);
    program.assert_ends_clean();
}

#[test]
fn the_line_that_says_where_it_is_goes_to_the_descriptor_and_holds_errors_too() {
    let serve = |args: &str| {
        let script = format!("exec {} serve --driver host --ready-fd 3 {args} 3>&1 >/dev/null", program());
        Command::new("sh").args(["-c", &script]).env("MILLPOND_KEY", "").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
    };
    let output = serve("--chunk-bytes 4G").wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(line["error"]["code"], "InvalidArgument");
    assert!(line["error"]["message"].as_str().unwrap().contains("4294967296"), "{line}");
    // Exactly one line, and then the end, though the owner runs on.
    let mut child = serve("--host-bytes 64M");
    let lines: Vec<String> = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap).collect();
    assert_eq!(lines.len(), 1);
    assert!(serde_json::from_str::<serde_json::Value>(&lines[0]).unwrap()["socket"].is_string());
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn the_ledger_is_read_from_outside_and_its_exit_codes_tell() {
    let mut program = Program::start(&[]);
    let mut client = program.attach("worker", Role::Worker);
    client.grow(4 * MIB);
    let output = program.ledger(&program.key);
    assert_eq!(output.status.code(), Some(0));
    let ledger: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let device = &ledger["devices"][0];
    assert_eq!(
        (&device["id"], &device["reserved"], &device["clients"][0]["name"]),
        (&"HOST-0".into(), &(4 * MIB).into(), &"worker".into())
    );
    let wrong = program.ledger("0000");
    let error = String::from_utf8(wrong.stderr).unwrap();
    assert!(wrong.status.code() == Some(4) && error.contains("key") && !error.contains(&program.key), "{error}");
    program.child.kill().unwrap();
    program.child.wait().unwrap();
    assert_eq!(program.ledger(&program.key).status.code(), Some(2));
    assert_eq!(Command::new(crate::raw::program()).arg("nonsense").stderr(Stdio::null()).status().unwrap().code(), Some(64));
}

#[test]
fn the_doctor_looks_at_everything() {
    let output = Command::new(program()).args(["doctor", "--json"]).env_remove("MILLPOND_SOCKET").output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<&str> = report["checks"].as_array().unwrap().iter().map(|check| check["name"].as_str().unwrap()).collect();
    for name in ["libcuda", "host device", "memfd", "pidfd", "SO_PEERPIDFD", "WSL2", "MPS", "yama", "/dev/shm", "owner"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
}

#[test]
fn help_teaches() {
    for command in ["serve", "ledger", "top", "map", "explain", "metrics", "bench", "replay", "doctor", "demo"] {
        let output = Command::new(program()).args([command, "--help"]).output().unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && help.matches("\n  $ millpond").count() >= 2 || help.contains("eval"), "{help}");
    }
    let version = Command::new(program()).arg("--version").output().unwrap();
    assert_eq!(String::from_utf8(version.stdout).unwrap(), format!("millpond {}\n", env!("CARGO_PKG_VERSION")));
}
