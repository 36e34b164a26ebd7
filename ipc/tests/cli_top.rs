//! `millpond top` on a terminal of its own.
#![cfg(all(feature = "cli", feature = "tui"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, not only tests

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);

fn program() -> String {
    std::env::var("MILLPOND_PROGRAM").unwrap_or_else(|_| env!("CARGO_BIN_EXE_millpond").to_owned())
}

/// What was written, without the sequences that move and colour it, and without spaces.
fn plain(text: &str) -> String {
    let mut rest = text.chars();
    let mut plain = String::new();
    while let Some(c) = rest.next() {
        match c {
            '\x1b' => drop(rest.by_ref().skip(1).find(|c| c.is_ascii_alphabetic())),
            c if c.is_whitespace() => {}
            c => plain.push(c),
        }
    }
    plain
}

/// A pseudo-terminal with a program on it.
struct Terminal {
    child: Child,
    keyboard: File,
    screen: Receiver<Vec<u8>>,
    seen: String,
}

impl Terminal {
    fn start(command: &mut Command, columns: u16, lines: u16) -> Self {
        let size = libc::winsize { ws_row: lines, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let (mut ours, mut theirs) = (0, 0);
        // SAFETY: two places for descriptors, no name asked for, the defaults, and a size.
        let made = unsafe { libc::openpty(&mut ours, &mut theirs, std::ptr::null_mut(), std::ptr::null(), &size) };
        assert_eq!(made, 0);
        // SAFETY: openpty has just made both, and nobody else has them.
        let (ours, theirs) = unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
        let side = || Stdio::from(theirs.try_clone().unwrap());
        let child = command.stdin(side()).stdout(side()).stderr(side()).env("TERM", "xterm-256color").spawn().unwrap();
        drop(theirs);
        let (sender, screen) = std::sync::mpsc::channel();
        let mut output = ours.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            // The terminal ends with an error when the program does.
            while let Ok(n @ 1..) = output.read(&mut part) {
                if sender.send(part[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { child, keyboard: ours, screen, seen: String::new() }
    }

    /// Waits until this has been drawn. Spaces are not looked at: what is blank already is stepped over.
    fn see(&mut self, text: &str) {
        let end = Instant::now() + PATIENCE;
        let wanted = text.replace(' ', "");
        while !plain(&self.seen).contains(&wanted) {
            match self.screen.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(part) => self.seen.push_str(&String::from_utf8_lossy(&part)),
                Err(RecvTimeoutError::Timeout) => panic!("{text:?} not seen in {PATIENCE:?}: {}", self.seen),
                Err(RecvTimeoutError::Disconnected) => panic!("ended without {text:?}: {}", self.seen),
            }
        }
        self.seen.clear();
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    fn resize(&self, columns: u16, lines: u16) {
        let size = libc::winsize { ws_row: lines, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the terminal's own descriptor, and a size.
        assert_eq!(unsafe { libc::ioctl(self.keyboard.as_raw_fd(), libc::TIOCSWINSZ, &size) }, 0);
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), rustix::process::Signal::WINCH).unwrap();
    }

    fn ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    fn end(mut self) -> Option<i32> {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            // Whatever it still draws is taken, or it could not end.
            let _ = self.screen.recv_timeout(Duration::from_millis(5));
        }
        panic!("it does not end");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Owner {
    child: Child,
    socket: String,
    key: String,
}

impl Owner {
    fn start() -> Self {
        let mut command = Command::new(program());
        command.args(["serve", "--driver", "host", "--host-bytes", "4G", "--json"]).env_remove("MILLPOND_KEY").stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready: serde_json::Value = serde_json::from_str(&line).unwrap();
        let text = |field: &str| ready[field].as_str().unwrap().to_owned();
        Self { child, socket: text("socket"), key: text("key") }
    }

    fn top(&self, columns: u16, lines: u16) -> Terminal {
        let mut command = Command::new(program());
        command.arg("top").env("MILLPOND_SOCKET", &self.socket).env("MILLPOND_KEY", &self.key);
        Terminal::start(&mut command, columns, lines)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::path::Path::new(&self.socket).parent().map(std::fs::remove_dir_all);
    }
}

#[test]
fn it_draws_sorts_resizes_and_leaves() {
    let owner = Owner::start();
    let mut top = owner.top(100, 20);
    top.see("nobody is attached");
    top.press("s");
    top.see("alloc");
    top.resize(20, 6);
    top.see("q quit  s allocated");
    top.resize(12, 3);
    top.see("too small");
    top.press("q");
    assert_eq!(top.end(), Some(0));
}

#[test]
fn it_ends_with_its_owner() {
    let mut owner = Owner::start();
    let mut top = owner.top(80, 24);
    top.see("q quit");
    owner.child.kill().unwrap();
    top.see("the owner has ended");
    assert_eq!(top.end(), Some(0));
}

/// `cargo test -p millpond-ipc --features cli --test cli_top --release -- --ignored --nocapture`
#[test]
#[ignore = "takes ten seconds; prints a figure"]
fn it_takes_little_of_a_core() {
    let owner = Owner::start();
    let clients: Vec<_> = (0..32)
        .map(|n| {
            let options = millpond_ipc::client::Options::new(owner.socket.clone().into(), owner.key.clone(), format!("w{n}"));
            let client = millpond_ipc::client::Client::attach(&options).unwrap();
            client.heap(millpond_ipc::client::Place::Host).unwrap().allocate(2 << 20, millpond_allocator::driver::Stream::LEGACY).unwrap();
            client
        })
        .collect();
    let mut top = owner.top(120, 40);
    top.see("q quit");
    let (start, before) = (Instant::now(), top.ticks());
    std::thread::sleep(Duration::from_secs(10));
    let share = (top.ticks() - before) as f64 / 100.0 / start.elapsed().as_secs_f64() * 100.0;
    println!("top at 2 Hz with {} clients: {share:.2} % of a core", clients.len());
    assert!(share < 2.0, "{share} %");
    top.press("q");
    assert_eq!(top.end(), Some(0));
}
