//! `millpond ledger`: who holds how much.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use millpond_ipc::counts::CountTable;
use millpond_ipc::ledger::Ledger;
use millpond_ipc::nvml::Nvml;
use millpond_ipc::observer::Observer;
use millpond_ipc::picture::Picture;

use crate::observe::Target;

const AFTER: &str = "\
Example: who holds what of the arena that MILLPOND_SOCKET and MILLPOND_KEY name, now; with what each has done so far; once a second, as JSON.
  $ millpond ledger
  $ millpond ledger --counts
  $ millpond ledger --watch --json | jq '.devices[0].reserved'

As a picture; as a page that shows the last minute of it; as a page that renews itself until the owner ends.
  $ millpond ledger --svg memory.svg
  $ millpond ledger --html memory.html --seconds 60
  $ millpond ledger --html memory.html --watch

reserved is what the owner granted, and adds up; allocated, blocks and leases are what each client said last. The memory of a
lease counts at the client that lends it.";

/// The most moments that a page shows.
const MOMENTS: usize = 600;

/// Show who holds how much of an arena. The owner is not disturbed: the figures are read from shared memory.
#[derive(Debug, ClapArgs)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// JSON instead of a table; one line each time.
    #[arg(long)]
    json: bool,
    /// Also what each client has done so far: growths, refusals, trims, values by tier, copies, falls. JSON has it always.
    #[arg(long)]
    counts: bool,
    /// Again every second, until the owner ends.
    #[arg(long)]
    watch: bool,
    /// Write a picture to this file; with --watch, write it anew every second.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write a page to this file that needs nothing else: bars, maps, clients over time, tables.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Look for so long first, so that the picture shows clients over time.
    #[arg(long, value_name = "N", conflicts_with = "watch")]
    seconds: Option<u32>,
    #[command(flatten)]
    target: Target,
}

impl Args {
    fn draws(&self) -> bool {
        self.svg.is_some() || self.html.is_some()
    }
}

pub(crate) fn run(args: &Args) -> ExitCode {
    match args.target.connect() {
        Ok(observer) if args.draws() => draw(args, observer),
        Ok(observer) => show(args, &observer),
        Err(code) => code,
    }
}

fn look(observer: &Observer, nvml: &Result<Nvml, String>) -> Ledger {
    let mut ledger = observer.ledger();
    ledger.look_outside(nvml);
    ledger
}

fn show(args: &Args, observer: &Observer) -> ExitCode {
    let nvml = Nvml::open();
    let screen = args.watch && !args.json && io::stdout().is_terminal();
    loop {
        let ledger = look(observer, &nvml);
        let counts = if args.counts { CountTable(&ledger).to_string() } else { String::new() };
        let text = if args.json { serde_json::to_string(&ledger).unwrap_or_default() + "\n" } else { format!("{ledger}{counts}") };
        let clear = if screen { "\x1b[H\x1b[2J" } else { "" };
        let mut out = io::stdout().lock();
        if write!(out, "{clear}{text}").and_then(|()| out.flush()).is_err() {
            // Whoever read has gone.
            return ExitCode::SUCCESS;
        }
        if !args.watch || !observer.is_alive() {
            return ExitCode::SUCCESS;
        }
        drop(out);
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn draw(args: &Args, mut observer: Observer) -> ExitCode {
    let nvml = Nvml::open();
    let start = Instant::now();
    let mut seen: Vec<(Instant, Ledger)> = Vec::new();
    // Twenty moments at least, one a second at most.
    let pace = args.seconds.map_or(1.0, |seconds| (f64::from(seconds) / 20.0).clamp(0.05, 1.0));
    let end = args.seconds.map(|seconds| start + Duration::from_secs(seconds.into()));
    loop {
        seen.push((Instant::now(), look(&observer, &nvml)));
        if seen.len() > MOMENTS {
            seen.remove(0);
        }
        let last = !observer.is_alive() || !args.watch && end.is_none_or(|end| Instant::now() >= end);
        if (last || args.watch) && !write(args, &mut observer, &seen) {
            return ExitCode::FAILURE;
        }
        if last {
            return ExitCode::SUCCESS;
        }
        std::thread::sleep(Duration::from_secs_f64(pace));
    }
}

fn write(args: &Args, observer: &mut Observer, seen: &[(Instant, Ledger)]) -> bool {
    let Some((now, ledger)) = seen.last() else { return true };
    // Without an owner there is nobody to ask; the rest is in shared memory.
    let windows = observer.windows().unwrap_or_default();
    let history = seen.iter().map(|(at, ledger)| (-now.duration_since(*at).as_secs_f64(), ledger.clone())).collect();
    let picture = Picture { ledger: ledger.clone(), windows, history };
    let svg = args.svg.as_ref().map(|path| (path, picture.svg()));
    let html = args.html.as_ref().map(|path| (path, picture.html(args.watch.then_some(2))));
    svg.into_iter().chain(html).all(|(path, text)| match replace(path, &text) {
        Ok(()) => true,
        Err(error) => {
            eprintln!("millpond: {}: {error}", path.display());
            false
        }
    })
}

/// Writes a file whole: a reader sees the old one or the new one. What is no plain file (a pipe, /dev/stdout) is written to.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return std::fs::write(path, text);
    }
    let mut part = path.as_os_str().to_owned();
    part.push(format!(".{}", std::process::id()));
    std::fs::write(&part, text)?;
    std::fs::rename(&part, path).inspect_err(|_| drop(std::fs::remove_file(&part)))
}
