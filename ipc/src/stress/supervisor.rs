//! The one who watches: starts the owner and the workers, replaces the dead, and counts from outside.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond_allocator::timeline::POISON;
use rustix::event::{poll, PollFd, PollFlags};
use rustix::process::{kill_process, pidfd_open, Pid, PidfdFlags, Signal};

use super::worker::MEANT;
use super::{Options, Report, Spread};
use crate::control::ClientState;
use crate::observer::Observer;

/// A worker that says nothing for so long hangs.
const SILENCE: Duration = Duration::from_secs(30);
/// How long the end of anything may take.
const BOUND: Duration = Duration::from_secs(20);

/// What the supervisor hears: of whom, and what.
enum Heard {
    Line(u64, String),
    /// Its output has ended.
    End(u64),
    /// Its process has gone: microseconds until its waiters were released, milliseconds until nothing of it was left.
    Buried(u64, Option<f64>, Option<f64>),
}

struct Life {
    id: u64,
    child: Child,
    stdin: Option<ChildStdin>,
    heard: Instant,
    ops: u64,
    transfers: u64,
    idle: bool,
    over: bool,
}

struct Supervisor<'a> {
    options: &'a Options,
    program: PathBuf,
    socket: PathBuf,
    key: String,
    owner: Child,
    observer: Arc<Observer>,
    report: Report,
    lives: Vec<Life>,
    next: u64,
    sender: Sender<Heard>,
    reclaim: Vec<f64>,
    release: Vec<f64>,
    killed: Vec<u64>,
    draining: bool,
}

/// Runs workers for a while; the report says what was found.
///
/// # Errors
/// A sentence, where it could not even start.
pub fn run(options: &Options, program: &Path) -> Result<Report, String> {
    let (mut owner, socket, key) = start_owner(options, program)?;
    let observer = match Observer::connect(&socket, &key, BOUND) {
        Ok(observer) => Arc::new(observer),
        Err(error) => {
            let _ = owner.kill();
            return Err(error.to_string());
        }
    };
    let (sender, heard) = channel();
    let mut supervisor = Supervisor {
        options,
        program: program.to_owned(),
        socket,
        key,
        owner,
        observer,
        report: Report::default(),
        lives: Vec::new(),
        next: 0,
        sender,
        reclaim: Vec::new(),
        release: Vec::new(),
        killed: Vec::new(),
        draining: false,
    };
    let result = supervisor.work(&heard);
    supervisor.lives.iter_mut().for_each(|life| drop(life.child.kill().and_then(|()| life.child.wait())));
    let _ = supervisor.owner.kill();
    let _ = supervisor.owner.wait();
    // The socket's directory goes with an owner that ends by itself.
    if let Some(directory) = supervisor.socket.parent() {
        let _ = std::fs::remove_dir_all(directory);
    }
    result?;
    supervisor.report.reclaim_ms = Spread::of(supervisor.reclaim);
    supervisor.report.release_us = Spread::of(supervisor.release);
    Ok(supervisor.report)
}

fn start_owner(options: &Options, program: &Path) -> Result<(Child, PathBuf, String), String> {
    let driver = if options.cuda { ["--driver", "cuda", "--limit", "8G"] } else { ["--driver", "host", "--limit", "1G"] };
    let mut owner = Command::new(program)
        .arg("serve")
        .args(driver)
        .args(["--json", "--chunk-bytes", "32M", "--parent-pid", &std::process::id().to_string()])
        .env_remove("MILLPOND_KEY")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{}: {error}", program.display()))?;
    let mut line = String::new();
    if let Some(out) = owner.stdout.take() {
        let _ = BufReader::new(out).read_line(&mut line);
    }
    let here: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
    match (here.get("socket").and_then(|v| v.as_str()), here.get("key").and_then(|v| v.as_str())) {
        (Some(socket), Some(key)) => Ok((owner, socket.into(), key.to_owned())),
        _ => {
            let _ = owner.kill();
            Err(format!("the owner did not start: {line}"))
        }
    }
}

impl Supervisor<'_> {
    fn work(&mut self, heard: &Receiver<Heard>) -> Result<(), String> {
        let fds = self.fds_of_owner();
        for place in 0..self.options.workers {
            self.start(place)?;
        }
        let start = Instant::now();
        let mut shown = start;
        while start.elapsed().as_secs() < self.options.seconds && self.report.is_clean() {
            self.hear(heard, Duration::from_millis(50))?;
            if shown.elapsed() >= Duration::from_secs(2) {
                shown = Instant::now();
                self.show(start);
            }
        }
        self.drain(heard)?;
        self.finish(heard, fds)
    }

    fn show(&self, start: Instant) {
        let (ops, transfers) = self.totals();
        let reserved: u64 = self.observer.ledger().devices.iter().map(|device| device.reserved).sum();
        eprintln!(
            "stress: {:>4} s  {ops} operations, {transfers} transfers, {} kills, {} MiB reserved, {} corruptions, {} hung",
            start.elapsed().as_secs(),
            self.report.kills,
            reserved >> 20,
            self.report.corruptions,
            self.report.hung
        );
    }

    fn totals(&self) -> (u64, u64) {
        let alive = self.lives.iter().fold((0, 0), |(ops, transfers), life| (ops + life.ops, transfers + life.transfers));
        (self.report.ops + alive.0, self.report.transfers + alive.1)
    }

    fn start(&mut self, place: u32) -> Result<(), String> {
        let id = self.next;
        self.next += 1;
        let mut command = Command::new(&self.program);
        command
            .arg("stress-worker")
            .env("MILLPOND_SOCKET", &self.socket)
            .env("MILLPOND_KEY", &self.key)
            .env("MILLPOND_STRESS_ME", place.to_string())
            .env("MILLPOND_STRESS_WORKERS", self.options.workers.to_string())
            .env("MILLPOND_STRESS_LIFE", id.to_string())
            .env("MILLPOND_STRESS_SEED", self.options.seed.to_string())
            .env("MILLPOND_STRESS_KILL", if self.draining { 0 } else { self.options.kill_every_ops }.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(fault) = &self.options.fault {
            command.env("MILLPOND_FAULT", fault);
        }
        let mut child = command.spawn().map_err(|error| format!("{}: {error}", self.program.display()))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let sender = self.sender.clone();
        let observer = self.observer.clone();
        let pidfd = i32::try_from(child.id()).ok().and_then(Pid::from_raw).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        std::thread::spawn(move || {
            let mut pidfd = pidfd;
            for line in stdout.into_iter().flat_map(|out| BufReader::new(out).lines()).map_while(Result::ok) {
                if let (Some((slot, serial)), Some(pidfd)) = (slot_of(&line), pidfd.take_if(|_| line.starts_with("at "))) {
                    mourn(observer.clone(), sender.clone(), id, pidfd, slot, serial);
                }
                let _ = sender.send(Heard::Line(id, line));
            }
            let _ = sender.send(Heard::End(id));
        });
        let life = Life { id, child, stdin, heard: Instant::now(), ops: 0, transfers: 0, idle: false, over: false };
        let place = place as usize;
        if place < self.lives.len() {
            if let Some(old) = self.lives.get_mut(place) {
                *old = life;
            }
        } else {
            self.lives.push(life);
        }
        Ok(())
    }

    fn place_of(&self, id: u64) -> Option<usize> {
        self.lives.iter().position(|life| life.id == id)
    }

    fn hear(&mut self, heard: &Receiver<Heard>, time: Duration) -> Result<(), String> {
        let mut next = heard.recv_timeout(time).ok();
        while let Some(one) = next {
            match one {
                Heard::Line(id, line) => self.line(id, &line),
                Heard::End(id) => self.ended(id)?,
                Heard::Buried(id, released, reclaimed) => self.buried(id, released, reclaimed),
            }
            next = heard.try_recv().ok();
        }
        for place in 0..self.lives.len() {
            let silent = self.lives.get(place).is_some_and(|life| !life.over && life.heard.elapsed() > SILENCE && !self.draining);
            if silent {
                self.report.hung += 1;
                self.report.finding(format!("w{place} has said nothing for {SILENCE:?}"));
                self.lives.iter_mut().skip(place).take(1).for_each(|life| drop(life.child.kill()));
            }
        }
        Ok(())
    }

    fn line(&mut self, id: u64, line: &str) {
        let Some(place) = self.place_of(id) else { return };
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let Some(life) = self.lives.get_mut(place) else { return };
        life.heard = Instant::now();
        match word {
            "p" => {
                let mut numbers = rest.split(' ').filter_map(|text| text.parse().ok());
                (life.ops, life.transfers) = (numbers.next().unwrap_or(life.ops), numbers.next().unwrap_or(life.transfers));
            }
            "bad" => {
                self.report.corruptions += 1;
                self.report.finding(format!("w{place} received something else than was sent: {rest}"));
            }
            "odd" => {
                self.report.unexpected += 1;
                self.report.finding(format!("w{place}: {rest}"));
            }
            "stuck" => {
                self.report.hung += 1;
                self.report.finding(rest.to_owned());
            }
            "idle" => life.idle = true,
            "stop" => {
                // Long enough that others have met it stopped.
                std::thread::sleep(Duration::from_millis(3));
                if let Some(pid) = i32::try_from(life.child.id()).ok().and_then(Pid::from_raw) {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
            _ => {}
        }
    }

    fn ended(&mut self, id: u64) -> Result<(), String> {
        let Some(place) = self.place_of(id) else { return Ok(()) };
        let Some(life) = self.lives.get_mut(place).filter(|life| !life.over) else { return Ok(()) };
        let status = life.child.wait().map_err(|error| error.to_string())?;
        life.over = true;
        self.report.ops += std::mem::take(&mut life.ops);
        self.report.transfers += std::mem::take(&mut life.transfers);
        let meant = matches!(status.signal(), Some(libc::SIGKILL | libc::SIGSEGV)) || status.code() == Some(MEANT);
        match (meant, status.success() && life.idle) {
            (true, _) if self.options.kill_every_ops > 0 => {
                self.report.kills += 1;
                self.killed.push(id);
                if !self.draining {
                    self.start(place as u32)?;
                }
            }
            (_, true) => {}
            _ => {
                self.report.unexpected += 1;
                self.report.finding(format!("w{place} ended by itself: {status}"));
            }
        }
        Ok(())
    }

    fn buried(&mut self, id: u64, released: Option<f64>, reclaimed: Option<f64>) {
        if !self.killed.contains(&id) && released.is_some() && reclaimed.is_some() {
            return;
        }
        match (released, reclaimed) {
            (Some(released), Some(reclaimed)) => {
                self.release.push(released);
                self.reclaim.push(reclaimed);
            }
            (released, _) => {
                self.report.hung += 1;
                let what = if released.is_none() { "its waiters are not released" } else { "something of it is left" };
                self.report.finding(format!("worker {id} has ended, and after {BOUND:?} {what}"));
            }
        }
    }

    /// Ends the work, and looks at the books when nobody uses anything.
    fn drain(&mut self, heard: &Receiver<Heard>) -> Result<(), String> {
        self.draining = true;
        for life in &mut self.lives {
            if let Some(stdin) = &mut life.stdin {
                let _ = writeln!(stdin, "drain");
            }
        }
        let until = Instant::now() + BOUND + BOUND;
        while self.lives.iter().any(|life| !life.idle && !life.over) {
            self.hear(heard, Duration::from_millis(20))?;
            if Instant::now() > until {
                self.report.hung += 1;
                self.report.finding("workers do not come to an end".to_owned());
                return Ok(());
            }
        }
        self.look_at_the_books()
    }

    /// What the ledger says when nobody uses anything, beside what can be seen from outside.
    fn look_at_the_books(&mut self) -> Result<(), String> {
        let until = Instant::now() + Duration::from_secs(5);
        loop {
            let ledger = self.observer.ledger();
            let mut wrong = Vec::new();
            let mut bytes = 0;
            for device in &ledger.devices {
                let mut sum = device.retired + device.orphaned;
                for client in &device.clients {
                    sum += client.reserved;
                    let said = client.allocated + client.leased_in + client.leased_out;
                    if said > 0 && client.state == "alive" {
                        bytes += said;
                        wrong.push(format!(
                            "the ledger says that {} uses {} bytes, lends {} and holds {}: it uses nothing",
                            client.name, client.allocated, client.leased_out, client.leased_in
                        ));
                    }
                }
                if sum != device.reserved {
                    bytes += sum.abs_diff(device.reserved);
                    wrong.push(format!("the ledger's parts of {} are {sum} bytes, the whole {}", device.id, device.reserved));
                }
            }
            let reserved: u64 = ledger.devices.iter().map(|device| device.reserved).sum();
            if let Some(outside) = self.memory_of_owner().filter(|outside| *outside != reserved) {
                bytes += outside.abs_diff(reserved);
                wrong.push(format!("the ledger says {reserved} bytes, the owner's files have {outside}"));
            }
            if wrong.is_empty() {
                return Ok(());
            }
            if Instant::now() > until {
                self.report.leaked_bytes += bytes;
                wrong.into_iter().for_each(|what| self.report.finding(what));
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn finish(&mut self, heard: &Receiver<Heard>, fds: usize) -> Result<(), String> {
        self.lives.iter_mut().for_each(|life| drop(life.stdin.take()));
        let until = Instant::now() + BOUND;
        while self.lives.iter().any(|life| !life.over) || self.release.len() < self.killed.len() {
            self.hear(heard, Duration::from_millis(20))?;
            if Instant::now() > until {
                let left = self.lives.iter().filter(|life| !life.over).count();
                if left > 0 {
                    self.report.hung += left as u64;
                    self.report.finding(format!("{left} workers do not end"));
                }
                break;
            }
        }
        let until = Instant::now() + Duration::from_secs(5);
        loop {
            let reserved: u64 = self.observer.ledger().devices.iter().map(|device| device.reserved).sum();
            let more = self.fds_of_owner().saturating_sub(fds);
            if (reserved, more) == (0, 0) {
                return Ok(());
            }
            if Instant::now() > until {
                self.report.leaked_bytes += reserved;
                self.report.leaked_fds += more as u64;
                self.report
                    .finding(format!("nobody is left, {reserved} bytes are reserved, the owner has {more} descriptors more than before"));
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn fds_of_owner(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.owner.id())).map_or(0, Iterator::count)
    }

    /// Bytes of the chunks' files that the owner has open. On a GPU they are not files.
    fn memory_of_owner(&self) -> Option<u64> {
        if self.options.cuda {
            return None;
        }
        let fds = std::fs::read_dir(format!("/proc/{}/fd", self.owner.id())).ok()?;
        let size = |entry: std::fs::DirEntry| {
            let target = std::fs::read_link(entry.path()).ok()?;
            let target = target.to_string_lossy();
            let chunk = target.contains("memfd:") && !target.contains("millpond-control");
            chunk.then(|| entry.path().metadata().map(|data| data.len()).ok()).flatten()
        };
        Some(fds.filter_map(Result::ok).filter_map(size).sum())
    }
}

fn slot_of(line: &str) -> Option<(u32, u64)> {
    let (slot, serial) = line.strip_prefix("at ")?.split_once(' ')?;
    Some((slot.parse().ok()?, serial.parse().ok()?))
}

/// Waits for a process to end, and measures what follows in the control memory.
fn mourn(observer: Arc<Observer>, sender: Sender<Heard>, id: u64, pidfd: OwnedFd, slot: u32, serial: u64) {
    std::thread::spawn(move || {
        while poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], None).is_err() {}
        let gone = Instant::now();
        let control = observer.control();
        let until = |condition: &dyn Fn() -> bool, pause: Duration| {
            while !condition() {
                if gone.elapsed() > BOUND {
                    return None;
                }
                std::thread::sleep(pause);
            }
            Some(gone.elapsed().as_secs_f64())
        };
        let row = || control.client(slot).and_then(|cell| cell.read());
        let another = || row().is_some_and(|row| row.serial != serial);
        let poisoned = || control.timelines(slot).and_then(|words| words.last()).is_some_and(|word| word.value() >= POISON);
        let released = until(&|| poisoned() || another(), Duration::from_micros(20));
        let vacated = || row().is_some_and(|row| row.serial != serial || ClientState::from_word(row.state) == ClientState::Gone);
        let reclaimed = until(&vacated, Duration::from_micros(200));
        let _ = sender.send(Heard::Buried(id, released.map(|s| s * 1e6), reclaimed.map(|s| s * 1e3)));
    });
}
