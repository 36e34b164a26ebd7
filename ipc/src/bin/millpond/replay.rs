//! `millpond replay`: allocation traces against the real heap.

use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args as ClapArgs;
use millpond_allocator::heap::HeapConfig;
use millpond_allocator::replay::{read, recorded, replay_often, Checks, Event, Failure, Recorded, Report};
use millpond_ipc::ledger::size;
use millpond_ipc::owner::parse_bytes;
use millpond_ipc::trace::{self, EXTENSION};
use serde_json::{json, Value};

const AFTER: &str = "\
Example: how much memory a program would have reserved here, and how fast; the worst ratio of many as JSON.
  $ millpond replay training.csv.gz
  $ millpond replay traces/*.csv.gz --json | jq '[.traces[].ratio] | max'

A trace is a log of RMM: CSV with the columns Thread,Time,Action,Pointer,Size,Stream, plain or gzipped. A recording of a process
(MILLPOND_TRACE, see millpond trace --help), or a folder of them, does as well, also while it is written; --record keeps it as CSV:
  $ MILLPOND_TRACE=/tmp/run MILLPOND_TRACE_EVENTS=10000000 python train.py
  $ millpond replay --record traces/ /tmp/run
No memory is touched, so a trace of a larger machine runs on a smaller one.

Events run one after another in the order of the file, each on its own thread where the trace has several, so that blocks are freed
by other threads than allocated them. A block that is freed on another stream than its own is in use there too.

Each trace is first replayed three times to be checked: no block over a live one (overlap); none handed to a stream, and no memory
unmapped, but behind all work that had it (order), by what the heap asks of its driver: events recorded, waits queued, events seen to
be over. Once as it is timed; once with memory so short that streams take each other's; once so short with streams that stay behind, so
that they have to wait for each other. Then it is replayed --repeat times to be timed, with nothing checked.

A time is one call's alone: neither the change of threads nor waiting for another thread's call is in it, so with many threads too it
is what a call takes that has no rival. The first call after a change runs on another processor, whose caches are cold.

Exit code 1 where an event failed (its line and the rule are named), or a trace cannot be read.";

/// Replay allocation traces against the heap: whether it keeps order, what is reserved, what each call takes.
#[derive(Debug, ClapArgs)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Traces, recordings, folders of recordings.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write each recording there, as CSV that replay and RMM's tools read: NAME-PID-….csv, one for each device.
    #[arg(long, value_name = "FOLDER")]
    record: Option<PathBuf>,
    /// The largest chunk. Default: as an owner has it.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    chunk_bytes: Option<u64>,
    /// Time each trace so often; times are of each call's median, which leaves out what else the machine did in one of them.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,
    /// JSON: {"traces":[{"file","events","failed":[{"line","rule","reason"}],"checks",…}]}.
    #[arg(long)]
    json: bool,
}

/// The events of a trace, or of each device of each recording, by the name of what was read; a recording is also written to a
/// folder, if there is one.
fn events_of(path: &Path, record: Option<&Path>) -> Vec<(String, Result<Vec<Event>, String>)> {
    let file = path.display().to_string();
    if !path.is_dir() && path.extension().is_none_or(|end| end != EXTENSION) {
        return vec![(file, read(path).map_err(|error| error.to_string()))];
    }
    let (found, failed) = trace::read(&[path.to_path_buf()]);
    if found.is_empty() && failed.is_empty() {
        return vec![(file, Err("no recordings there".to_owned()))];
    }
    let mut all: Vec<_> = failed.into_iter().map(|(path, error)| (path.display().to_string(), Err(error.to_string()))).collect();
    for process in found {
        if process.recording.dropped > 0 {
            eprintln!(
                "millpond: {}: {} older events were overwritten: set MILLPOND_TRACE_EVENTS higher for a whole run",
                process.path.display(),
                process.recording.dropped
            );
        }
        for trace in recorded(&process.recording) {
            let device = u16::try_from(trace.device).map_or_else(|_| "host".to_owned(), |gpu| format!("gpu{gpu}"));
            let stem = process.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let kept = record.map(|folder| keep(&trace, &folder.join(format!("{stem}-{device}.csv"))));
            let name = format!("{} ({device})", process.path.display());
            all.push((name, kept.transpose().map(|_| trace.events)));
        }
    }
    all
}

fn keep(trace: &Recorded, path: &Path) -> Result<(), String> {
    let made = path.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| std::fs::File::create(path));
    made.and_then(|file| trace.write(BufWriter::new(file))).map(drop).map_err(|error| format!("{}: {error}", path.display()))
}

/// The most failed events that are printed for people.
const NAMED: usize = 10;

pub(crate) fn run(args: &Args) -> ExitCode {
    let mut config = HeapConfig::default();
    config.chunk_bytes = args.chunk_bytes.unwrap_or(config.chunk_bytes);
    let (mut traces, mut ok) = (Vec::new(), true);
    for (file, events) in args.files.iter().flat_map(|path| events_of(path, args.record.as_deref())) {
        match events.and_then(|events| replay_often(&events, config, args.repeat as usize).map_err(|error| error.to_string())) {
            Ok(report) => {
                ok &= report.failed.is_empty();
                if args.json {
                    traces.push(as_json(&file, &report));
                } else {
                    show(&file, &report);
                }
                name_failures(&file, &report);
            }
            Err(error) => {
                ok = false;
                let error = if error.starts_with(&file) { error } else { format!("{file}: {error}") };
                eprintln!("millpond: {error}");
                traces.push(json!({ "file": file, "error": error }));
            }
        }
    }
    if args.json {
        println!("{}", json!({ "traces": traces }));
    }
    if ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn as_json(file: &str, report: &Report) -> Value {
    let failure = |f: &Failure| json!({ "line": f.line, "rule": f.rule.name(), "reason": f.reason });
    let failed: Vec<Value> = report.failed.iter().map(failure).collect();
    let Checks { allocations, crossed, waits } = report.checks;
    let checks = json!({ "allocations": allocations, "crossed": crossed, "waits": waits });
    let ns = json!({ "p50": report.ns.p50, "p99": report.ns.p99, "p999": report.ns.p99_9, "max": report.ns.max });
    json!({
        "file": file, "events": report.events, "threads": report.threads, "streams": report.streams,
        "failed": failed, "checks": checks, "recorded_failures": report.recorded_failures,
        "peak_live": report.peak_live, "peak_reserved": report.peak_reserved, "ratio": report.ratio, "ns": ns,
        "slowest": report.slowest, "longest_growth_ns": report.growth_ns, "growths": report.growths, "chunks": report.chunks,
    })
}

fn show(file: &str, report: &Report) {
    let Report { events, threads, streams, peak_live, peak_reserved, ratio, growths, ns, checks, .. } = report;
    let many = |n: u64, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    println!("{file}");
    println!(
        "  {}, {}, {}; {} live at most, {} reserved for it ({ratio:.3} times) by {growths} growths",
        many(*events, "event"),
        many(*threads, "thread"),
        many(*streams, "stream"),
        size(*peak_live),
        size(*peak_reserved)
    );
    println!(
        "  {} checked, {} of them where another stream had work; {} for other streams; {} failed",
        many(checks.allocations, "allocation"),
        checks.crossed,
        many(checks.waits, "wait"),
        many(report.failed.len() as u64, "event")
    );
    println!(
        "  p50 {} ns, p99 {} ns, p99.9 {} ns, longest {} ns; longest with a growth {} ns",
        ns.p50, ns.p99, ns.p99_9, ns.max, report.growth_ns
    );
    if report.recorded_failures > 0 {
        println!("  {} allocations failed when it was recorded; they are left out", report.recorded_failures);
    }
}

fn name_failures(file: &str, report: &Report) {
    for failure in report.failed.iter().take(NAMED) {
        eprintln!("millpond: {file}: {failure}");
    }
    if report.failed.len() > NAMED {
        eprintln!("millpond: {file}: and {} more", report.failed.len() - NAMED);
    }
}
