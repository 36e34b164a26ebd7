//! The one who watches: starts the owner and the workers, replaces the dead, and counts from outside.

use std::collections::{HashMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{kill_process, pidfd_open, Pid, PidfdFlags, Signal};

use super::count::mourn;
use super::pace::kill_every;
use super::worker::{BETWEEN, MEANT};
use super::{Options, Report, Spread};
use crate::nvml::Nvml;
use crate::observer::Observer;

/// A worker that says nothing for so long hangs.
const SILENCE: Duration = Duration::from_secs(30);
/// How long the end of anything may take.
pub(super) const BOUND: Duration = Duration::from_secs(20);

/// What the supervisor hears: of whom, and what.
pub(super) enum Heard {
    Line(u64, String),
    /// Its output has ended.
    End(u64),
    /// Its process has gone: microseconds until its waiters were released, milliseconds until nothing of it was left.
    Buried(u64, Option<f64>, Option<f64>),
}

pub(super) struct Life {
    id: u64,
    child: Child,
    pub(super) stdin: Option<ChildStdin>,
    heard: Instant,
    /// When it was attached.
    since: Option<Instant>,
    ops: u64,
    transfers: u64,
    idle: bool,
    /// A timer kills it.
    due: bool,
    pub(super) over: bool,
}

pub(super) struct Supervisor<'a> {
    pub(super) options: &'a Options,
    program: PathBuf,
    socket: PathBuf,
    key: String,
    pub(super) owner: Child,
    /// What the driver says of the GPUs, on which chunks are no files.
    pub(super) nvml: Result<Nvml, String>,
    pub(super) card_before: Result<u64, String>,
    pub(super) observer: Arc<Observer>,
    pub(super) report: Report,
    pub(super) lives: Vec<Life>,
    /// Started, and waiting for a place.
    spares: VecDeque<Life>,
    /// How long those worked that are dead, together.
    worked: Duration,
    next: u64,
    sender: Sender<Heard>,
    reclaim: Vec<f64>,
    pub(super) release: Vec<f64>,
    pub(super) killed: Vec<u64>,
    /// What was measured of those whose end was not heard yet.
    early: HashMap<u64, (f64, f64)>,
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
        nvml: if options.cuda { Nvml::open() } else { Err("no GPU is used".to_owned()) },
        card_before: Err("it was not looked at before".to_owned()),
        observer,
        report: Report::default(),
        lives: Vec::new(),
        spares: VecDeque::new(),
        worked: Duration::ZERO,
        next: 0,
        sender,
        reclaim: Vec::new(),
        release: Vec::new(),
        killed: Vec::new(),
        early: HashMap::new(),
        draining: false,
    };
    let result = supervisor.work(&heard);
    let all = supervisor.lives.iter_mut().chain(&mut supervisor.spares);
    all.for_each(|life| drop(life.child.kill().and_then(|()| life.child.wait())));
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
        self.card_before = self.card();
        for place in 0..self.options.workers {
            self.start(place)?;
        }
        let start = Instant::now();
        let mut shown = start;
        let enough = |report: &Report| self.options.kills.is_some_and(|kills| report.kills >= kills);
        while start.elapsed().as_secs() < self.options.seconds && self.report.is_well() && !enough(&self.report) {
            self.hear(heard, Duration::from_millis(50))?;
            if shown.elapsed() >= Duration::from_secs(2) {
                shown = Instant::now();
                self.show(start);
            }
        }
        self.report.seconds = (start.elapsed().as_secs_f64() * 10.0).round() / 10.0;
        self.drain(heard)?;
        self.finish(heard, fds)?;
        let missed = self.options.kills.map_or(0, |kills| kills.saturating_sub(self.report.kills));
        if missed > 0 && self.report.is_well() {
            self.report.missed_kills = missed;
            let (kills, seconds) = (self.report.kills, self.options.seconds);
            self.report.finding(format!("{kills} deaths in {seconds} s, {missed} fewer than asked: give it more time or more workers"));
        }
        if self.report.transfers == 0 && self.report.is_well() {
            self.report.finding(format!("no value was received in {} s: nothing was tested", self.report.seconds));
        }
        Ok(())
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

    /// Puts a worker in a place: one that waits for it, or a new one.
    fn start(&mut self, place: u32) -> Result<(), String> {
        let mut life = match self.spares.pop_front() {
            Some(life) => life,
            None => self.spawn()?,
        };
        let kill = if self.draining { 0 } else { kill_every(self.options, self.totals().0, self.worked_so_far()) };
        life.heard = Instant::now();
        if let Some(stdin) = &mut life.stdin {
            // One that has ended meanwhile is noticed by its end.
            let _ = writeln!(stdin, "be {place} {} {kill}", life.id);
        }
        let place = place as usize;
        match self.lives.get_mut(place) {
            Some(old) => *old = life,
            None => self.lives.push(life),
        }
        while !self.draining && self.spares.len() < self.options.spares as usize {
            let spare = self.spawn()?;
            self.spares.push_back(spare);
        }
        Ok(())
    }

    fn worked_so_far(&self) -> Duration {
        self.worked
            + self.lives.iter().filter(|life| !life.over).filter_map(|life| life.since).map(|since| since.elapsed()).sum::<Duration>()
    }

    fn spawn(&mut self) -> Result<Life, String> {
        let id = self.next;
        self.next += 1;
        let mut command = Command::new(&self.program);
        command
            .arg("stress-worker")
            .env("MILLPOND_SOCKET", &self.socket)
            .env("MILLPOND_KEY", &self.key)
            .env("MILLPOND_STRESS_WORKERS", self.options.workers.to_string())
            .env("MILLPOND_STRESS_SEED", self.options.seed.to_string())
            .env("MILLPOND_STRESS_CUDA", u8::from(self.options.cuda).to_string())
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
        Ok(Life { id, child, stdin, heard: Instant::now(), since: None, ops: 0, transfers: 0, idle: false, due: false, over: false })
    }

    fn place_of(&self, id: u64) -> Option<usize> {
        self.lives.iter().position(|life| life.id == id)
    }

    pub(super) fn hear(&mut self, heard: &Receiver<Heard>, time: Duration) -> Result<(), String> {
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
        if self.spares.iter().any(|spare| spare.id == id) {
            self.report.unexpected += 1;
            return self.report.finding(format!("a spare worker: {line}"));
        }
        let Some(place) = self.place_of(id) else { return };
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let Some(life) = self.lives.get_mut(place) else { return };
        life.heard = Instant::now();
        match word {
            "at" => life.since = Some(Instant::now()),
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
            "due" => life.due = true,
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
        if let Some(at) = self.spares.iter().position(|spare| spare.id == id && !self.draining) {
            self.report.unexpected += 1;
            self.report.finding("a spare worker ended by itself".to_owned());
            self.spares.remove(at).into_iter().for_each(|mut spare| drop(spare.child.wait()));
            return Ok(());
        }
        let Some(place) = self.place_of(id) else { return Ok(()) };
        let Some(life) = self.lives.get_mut(place).filter(|life| !life.over) else { return Ok(()) };
        // A thread's name says what it was doing. It is there until its process has been waited for.
        let inside = std::fs::read_to_string(format!("/proc/{}/comm", life.child.id())).unwrap_or_default();
        let due = life.due;
        let status = life.child.wait().map_err(|error| error.to_string())?;
        life.over = true;
        self.worked += life.since.map_or(Duration::ZERO, |since| since.elapsed());
        self.report.ops += std::mem::take(&mut life.ops);
        self.report.transfers += std::mem::take(&mut life.transfers);
        let meant = matches!(status.signal(), Some(libc::SIGKILL | libc::SIGSEGV)) || status.code() == Some(MEANT);
        match (meant, status.success() && life.idle) {
            (true, _) if self.options.kill_every_ops != Some(0) => {
                self.report.kills += 1;
                self.report.timed_kills += u64::from(due);
                if let Some(call) = Some(inside.trim()).filter(|name| due && !BETWEEN.to_bytes().eq(name.as_bytes())) {
                    *self.report.killed_inside.entry(call.to_owned()).or_default() += 1;
                }
                self.killed.push(id);
                if let Some((released, reclaimed)) = self.early.remove(&id) {
                    self.buried(id, Some(released), Some(reclaimed));
                }
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
        if let (false, Some(released), Some(reclaimed)) = (self.killed.contains(&id), released, reclaimed) {
            // It left in good order, or its end is heard later.
            self.early.insert(id, (released, reclaimed));
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
        self.spares.iter_mut().for_each(|spare| drop(spare.stdin.take()));
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
}

fn slot_of(line: &str) -> Option<(u32, u64)> {
    let (slot, serial) = line.strip_prefix("at ")?.split_once(' ')?;
    Some((slot.parse().ok()?, serial.parse().ok()?))
}
