//! `millpond bench`: what this machine does, measured the same way each time. Every part runs against an owner of its own.

mod compare;
mod handoff;
mod lease;
mod ledger;
mod machine;
mod malloc;
mod party;
mod reclaim;
mod sample;
mod trace;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args as ClapArgs, ValueEnum};
use serde_json::{json, Map, Value};

const AFTER: &str = "\
Example: everything on CPU memory; hand-offs and growth of the first GPU, as JSON.
  $ millpond bench
  $ millpond bench handoff growth --driver cuda --json > bench.json

  malloc   allocate and free in a warm heap: sizes, threads, a live set, recorded
  handoff  one tensor to another process and back, by size; first use of a peer's memory
  lease    what one tensor costs the CPU from its send until its block is free again, without the message
  growth   from a malloc that must grow to a pointer, and giving it back
  reclaim  memory that another client holds but does not use: from asking to having it
  ledger   a snapshot of 64 clients from shared memory
  trace    a replay of an allocation trace (--trace FILE; without: one that is made up)
  compare  ours beside torch's allocators, RMM and the other ways of handing over, in turn; by Python, and only when asked for:
           $ millpond bench compare --out compared
           $ millpond bench compare --driver cuda -- --help
           $ millpond bench compare --trace training.csv.gz -- replay

Each figure is a percentile over many runs after a warm-up; the clock's own cost is in it and is printed.
What cannot run here is named.";

/// Measure malloc, hand-offs, growth, reclaim, the ledger and traces on this machine.
#[derive(Debug, ClapArgs)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// What to measure. Default: all.
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// Whose memory.
    /// Default: host; compare: the GPU where there is one.
    #[arg(long, value_enum)]
    driver: Option<Driver>,
    /// Fewer runs: seconds instead of a minute, and less to be trusted.
    #[arg(long)]
    quick: bool,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// A trace to replay, as RMM logs them; may be given again.
    #[arg(long, value_name = "FILE")]
    trace: Vec<PathBuf>,
    /// compare: write its JSON, its table and its plots to this folder.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// compare: its own arguments.
    #[arg(last = true, value_name = "ARGS")]
    more: Vec<OsString>,
    /// Be the other process of a measurement.
    #[arg(long, hide = true, value_name = "NAME")]
    worker: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Malloc,
    Handoff,
    Lease,
    Growth,
    Reclaim,
    Ledger,
    Trace,
    Compare,
}

/// Whose memory is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Driver {
    /// CPU memory.
    Host,
    /// The first GPU.
    Cuda,
}

impl Driver {
    fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        }
    }
}

/// How this run is.
#[derive(Debug, Clone, Copy)]
struct Plan<'a> {
    driver: Driver,
    quick: bool,
    traces: &'a [PathBuf],
}

impl Plan<'_> {
    fn gpu(&self) -> bool {
        self.driver == Driver::Cuda
    }

    /// One of two, the first in a quick run.
    fn pick<T>(&self, quick: T, full: T) -> T {
        if self.quick {
            quick
        } else {
            full
        }
    }
}

/// Figures of one part by name, or what was wrong.
type Figures = Result<Vec<(String, Value)>, String>;

fn measure(part: Part, plan: &Plan<'_>) -> Figures {
    match part {
        Part::Malloc => malloc::measure(plan),
        Part::Handoff => handoff::measure(plan),
        Part::Lease => lease::measure(plan),
        Part::Growth => malloc::growth(plan),
        Part::Reclaim => reclaim::measure(plan),
        Part::Ledger => ledger::measure(plan),
        Part::Trace => trace::measure(plan),
        Part::Compare => Err("it is measured alone: millpond bench compare".to_owned()),
    }
}

pub(crate) fn run(args: &Args) -> ExitCode {
    if let Some(name) = &args.worker {
        return match party::work(name, args.driver.unwrap_or(Driver::Host)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("millpond: bench worker {name}: {error}");
                ExitCode::FAILURE
            }
        };
    }
    if args.parts == [Part::Compare] {
        return compare::run(args);
    }
    let driver = args.driver.unwrap_or(Driver::Host);
    let all = [Part::Malloc, Part::Handoff, Part::Lease, Part::Growth, Part::Reclaim, Part::Ledger, Part::Trace];
    let parts = if args.parts.is_empty() { all.as_slice() } else { &args.parts };
    let plan = Plan { driver, quick: args.quick, traces: &args.trace };
    let machine = machine::header(driver.name());
    if !args.json {
        machine.iter().for_each(|(key, value)| println!("{key:<12} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned)));
    }
    let (mut found, mut failed) = (Map::new(), Map::new());
    for part in parts {
        let name = part.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        let figures = measure(*part, &plan);
        match figures {
            Ok(figures) => {
                if !args.json {
                    println!("\n{name}");
                    figures.iter().for_each(|(name, value)| println!("  {}", sample::line(name, value)));
                }
                found.insert(name, Map::from_iter(figures).into());
            }
            Err(error) => {
                eprintln!("millpond: bench {name}: {error}");
                failed.insert(name, error.into());
            }
        }
    }
    let ok = failed.is_empty();
    if args.json {
        println!("{}", json!({ "machine": Map::from_iter(machine), "quick": args.quick, "figures": found, "failed": failed }));
    }
    if ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
