//! Clients in processes of their own: this test binary again, told what to do, so that they can be stopped and killed.
//!
//! A puppet attaches, does its script word by word, and then beats until it is killed.

use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use millpond_ipc::control::Claim;
use millpond_ipc::wire::Role;

use crate::raw::*;

const SOCKET: &str = "MILLPOND_TEST_SOCKET";
const KEY: &str = "MILLPOND_TEST_KEY";
const NAME: &str = "MILLPOND_TEST_NAME";
const SCRIPT: &str = "MILLPOND_TEST_SCRIPT";

/// A client's process. It is killed when dropped.
pub(crate) struct Puppet(pub(crate) Child, Option<ChildStdin>);

impl Puppet {
    pub(crate) fn start(served: &Served, name: &str, script: &str) -> Self {
        Self::start_at(&served.socket, &served.key, name, script)
    }

    pub(crate) fn start_at(socket: &std::path::Path, key: &str, name: &str, script: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "puppet::puppet", "--ignored", "--nocapture"]);
        command.env(SOCKET, socket).env(KEY, key).env(NAME, name).env(SCRIPT, script);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        // Kept apart: waiting for the child would close it.
        let stdin = child.stdin.take();
        Self(child, stdin)
    }

    /// Starts it and waits until it has done its script. Returns its slot too.
    pub(crate) fn ready(served: &Served, watcher: &Raw, name: &str, script: &str) -> (Self, u32) {
        let puppet = Self::start(served, name, script);
        let mut slot = None;
        until("the puppet is ready", || {
            let clients = watcher.ledger().clients;
            slot = clients.iter().find(|client| client.name == name && client.out_of_memory == READY).map(|client| client.client);
            slot.is_some()
        });
        (puppet, slot.unwrap())
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.0), signal).unwrap();
    }

    /// Kills it and reaps it.
    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Lets the child go that a `fork` in its script made.
    pub(crate) fn end_fork(&mut self) {
        drop(self.1.take());
    }

    pub(crate) fn wait_code(&mut self) -> Option<i32> {
        self.0.wait().unwrap().code()
    }

    /// What it exits with where it is refused.
    pub(crate) fn refused_code(field: &str) -> i32 {
        100 + field.len() as i32
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        self.end_fork();
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Said in the live row by a puppet that has done its script.
const READY: u64 = 4711;

#[test]
#[ignore = "a process for other tests"]
fn puppet() {
    let Ok(socket) = std::env::var(SOCKET) else { return };
    let script = std::env::var(SCRIPT).unwrap();
    if script == "user" {
        // SAFETY: takes a number.
        assert_eq!(unsafe { libc::setuid(65_534) }, 0);
    }
    let role = if script.contains("parent") { Role::Parent } else { Role::Worker };
    let hello = hello(&std::env::var(KEY).unwrap(), &std::env::var(NAME).unwrap(), role);
    let mut raw = match Raw::attach(socket.as_ref(), &hello) {
        Ok(raw) => raw,
        Err(refusal) => std::process::exit(Puppet::refused_code(&refusal.field)),
    };
    let (mut chunks, mut allocated) = (Vec::new(), u64::MAX);
    for word in script.split_whitespace() {
        let (what, number) = word.split_once(':').unwrap_or((word, "0"));
        let number: u64 = number.parse().unwrap();
        match what {
            "grow" => chunks = raw.grow(number * MIB),
            // A hold for this receiver on the first unit of the last growth.
            "hold" => {
                let claim = Claim { lease: 1, window: raw.window(), offset: chunks[0].offset, bytes: UNIT };
                raw.control.marks(raw.slot()).unwrap().reach(0);
                raw.control.hold(raw.slot(), 0).unwrap().make(raw.slot() as u8, number as u8, claim).unwrap();
            }
            // All that the only other window has.
            "import" => {
                let (answer, _) = raw.call(millpond_ipc::wire::Request::Import { window: number as u32, epochs: vec![1] });
                assert!(matches!(answer, millpond_ipc::wire::Answer::Granted { .. }), "{answer:?}");
            }
            // A child that has the socket, and lives until the test closes our stdin.
            "fork" => {
                // SAFETY: the child only reads one descriptor and ends, in system calls.
                unsafe {
                    if libc::fork() == 0 {
                        let mut byte = 0_u8;
                        libc::read(0, (&raw mut byte).cast(), 1);
                        libc::_exit(0);
                    }
                }
            }
            // That client is killed when it has been stopped for 150 ms.
            "policy" => {
                let serial = raw.ledger_of(number as u32).unwrap().serial;
                let policy = millpond_ipc::wire::Request::Policy { client: number as u32, serial, kill_stopped_after_ms: Some(150) };
                assert_eq!(raw.call(policy).0, millpond_ipc::wire::Answer::Done);
            }
            // It uses nothing of what it has.
            "idle" => allocated = 0,
            "detach" => assert_eq!(raw.call(millpond_ipc::wire::Request::Detach).0, millpond_ipc::wire::Answer::Done),
            "exit" => return,
            _ => {}
        }
    }
    let live = millpond_ipc::control::LiveRow { out_of_memory: READY, allocated, ..Default::default() };
    raw.control.live(raw.slot(), 0).unwrap().write(&live);
    loop {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let ms = now.tv_sec as u64 * 1_000 + now.tv_nsec as u64 / 1_000_000;
        raw.control.beat(raw.slot()).unwrap().store(ms, std::sync::atomic::Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(10));
    }
}
