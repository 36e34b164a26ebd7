//! `millpond top`: who holds how much, live.

mod screen;

use std::collections::VecDeque;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use millpond_ipc::ledger::{ClientLedger, DeviceLedger, Ledger};
use millpond_ipc::nvml::Nvml;
use millpond_ipc::observer::Observer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::DefaultTerminal;

use crate::observe::Target;

const AFTER: &str = "\
Example: at the usual pace; ten times a second.
  $ millpond top
  $ millpond top --every-ms 100

Keys:
  s  sort by the next column: reserved, allocated, name, pid    r  the other way round
  d  the next device    arrows  scroll    q  quit

For a pipe or a log: millpond ledger --watch --json.";

/// Moments that the line of reserved memory keeps.
const MOMENTS: usize = 512;
/// How often the driver is asked what is outside of the arena.
const OUTSIDE: Duration = Duration::from_secs(2);

/// Watch who holds how much of an arena, on a terminal. The owner is not disturbed.
#[derive(Debug, ClapArgs)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// How often it is drawn, in milliseconds.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    every_ms: u64,
    #[command(flatten)]
    target: Target,
}

/// The column that clients are sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sort {
    Reserved,
    Allocated,
    Name,
    Pid,
}

impl Sort {
    fn next(self) -> Self {
        match self {
            Self::Reserved => Self::Allocated,
            Self::Allocated => Self::Name,
            Self::Name => Self::Pid,
            Self::Pid => Self::Reserved,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Reserved => "reserved",
            Self::Allocated => "allocated",
            Self::Name => "name",
            Self::Pid => "pid",
        }
    }
}

/// What is shown and how.
#[derive(Debug)]
struct View {
    ledger: Ledger,
    /// Reserved bytes of each device, oldest first.
    history: Vec<VecDeque<u64>>,
    sort: Sort,
    reverse: bool,
    device: usize,
    scroll: usize,
}

impl View {
    fn new(ledger: Ledger) -> Self {
        // The device that is used most is what one wants to see first.
        let used = ledger.devices.iter().enumerate().max_by_key(|(at, device)| (device.reserved, std::cmp::Reverse(*at)));
        let device = used.map_or(0, |(at, _)| at);
        let mut view = Self { history: Vec::new(), sort: Sort::Reserved, reverse: false, device, scroll: 0, ledger: ledger.clone() };
        view.update(ledger);
        view
    }

    fn update(&mut self, ledger: Ledger) {
        self.history.resize_with(ledger.devices.len(), VecDeque::new);
        for (past, device) in self.history.iter_mut().zip(&ledger.devices) {
            if past.len() >= MOMENTS {
                past.pop_front();
            }
            past.push_back(device.reserved);
        }
        self.ledger = ledger;
    }

    fn shown(&self) -> Option<&DeviceLedger> {
        self.ledger.devices.get(self.device)
    }

    /// The shown device's clients, sorted: most first, names and pids from the least.
    fn clients(&self) -> Vec<&ClientLedger> {
        let mut clients: Vec<&ClientLedger> = self.shown().into_iter().flat_map(|device| &device.clients).collect();
        match self.sort {
            Sort::Reserved => clients.sort_by_key(|client| std::cmp::Reverse(client.reserved)),
            Sort::Allocated => clients.sort_by_key(|client| std::cmp::Reverse(client.allocated)),
            Sort::Name => clients.sort_by(|a, b| a.name.cmp(&b.name)),
            Sort::Pid => clients.sort_by_key(|client| client.pid),
        }
        if self.reverse {
            clients.reverse();
        }
        clients
    }

    /// Does what a key says. False: leave.
    fn key(&mut self, key: KeyCode, modifiers: KeyModifiers) -> bool {
        match key {
            KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char('d') | KeyCode::Tab => {
                self.device = (self.device + 1) % self.ledger.devices.len().max(1);
                self.scroll = 0;
            }
            KeyCode::Down => self.scroll = (self.scroll + 1).min(self.clients().len().saturating_sub(1)),
            KeyCode::Up => self.scroll = self.scroll.saturating_sub(1),
            _ => {}
        }
        true
    }
}

pub(crate) fn run(args: &Args) -> ExitCode {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        eprintln!("millpond: top needs a terminal: for a pipe or a log use `millpond ledger --watch`");
        return ExitCode::FAILURE;
    }
    if std::env::var_os("TERM").is_some_and(|term| term == "dumb") {
        eprintln!("millpond: top cannot draw on a dumb terminal (TERM=dumb): use `millpond ledger --watch`");
        return ExitCode::FAILURE;
    }
    let observer = match args.target.connect() {
        Ok(observer) => observer,
        Err(code) => return code,
    };
    let mut terminal = match ratatui::try_init() {
        Ok(terminal) => terminal,
        Err(error) => {
            eprintln!("millpond: top cannot have the terminal: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = watch(&mut terminal, &observer, Duration::from_millis(args.every_ms));
    ratatui::restore();
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("millpond: the owner has ended");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("millpond: top: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Draws until the user leaves (true) or the owner ends (false).
fn watch(terminal: &mut DefaultTerminal, observer: &Observer, every: Duration) -> io::Result<bool> {
    let nvml = Nvml::open();
    let mut first = observer.ledger();
    first.look_outside(&nvml);
    let mut view = View::new(first);
    let mut looked = Instant::now();
    let mut due = Instant::now() + every;
    loop {
        terminal.draw(|frame| screen::draw(frame, &view))?;
        // Keys are answered at once; figures come at their pace.
        let left = due.saturating_duration_since(Instant::now());
        if event::poll(left)? {
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release && !view.key(key.code, key.modifiers) => return Ok(true),
                _ => {}
            }
            continue;
        }
        due = Instant::now() + every;
        if !observer.is_alive() {
            return Ok(false);
        }
        let mut ledger = observer.ledger();
        if nvml.is_ok() && looked.elapsed() < OUTSIDE {
            for (new, old) in ledger.devices.iter_mut().zip(&view.ledger.devices) {
                new.outside.clone_from(&old.outside);
            }
        } else {
            ledger.look_outside(&nvml);
            looked = Instant::now();
        }
        view.update(ledger);
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
