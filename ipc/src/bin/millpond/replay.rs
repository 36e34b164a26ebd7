//! `millpond replay`: allocation traces against the real heap.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use millpond_allocator::heap::HeapConfig;
use millpond_allocator::replay::{read, replay, Report};
use millpond_ipc::ledger::size;
use millpond_ipc::owner::parse_bytes;
use serde_json::{json, Value};

const AFTER: &str = "\
Example: how much memory a program would have reserved here, and how fast; the worst ratio of many as JSON.
  $ millpond replay training.csv.gz
  $ millpond replay traces/*.csv.gz --json | jq '[.traces[].ratio] | max'

A trace is a log of RMM: CSV with the columns Thread,Time,Action,Pointer,Size,Stream, plain or gzipped.
No memory is touched, so a trace of a larger machine runs on a smaller one.

Exit code 1 where an event failed (its line is named), or a trace cannot be read.";

/// Replay allocation traces against the heap: what is reserved, what each call takes.
#[derive(Debug, ClapArgs)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Traces.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The largest chunk. Default: as an owner has it.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    chunk_bytes: Option<u64>,
    /// JSON: {"traces":[{"file","events","failed",…}]}.
    #[arg(long)]
    json: bool,
}

/// The most failed events that are printed for people.
const NAMED: usize = 10;

pub(crate) fn run(args: &Args) -> ExitCode {
    let mut config = HeapConfig::default();
    config.chunk_bytes = args.chunk_bytes.unwrap_or(config.chunk_bytes);
    let (mut traces, mut ok) = (Vec::new(), true);
    for path in &args.files {
        let file = path.display().to_string();
        match read(path).and_then(|events| replay(&events, config)) {
            Ok(report) => {
                ok &= report.failed.is_empty();
                if args.json {
                    traces.push(as_json(&file, &report));
                } else {
                    show(&file, &report);
                }
            }
            Err(error) => {
                ok = false;
                let error = error.to_string();
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
    let failed: Vec<Value> = report.failed.iter().map(|(line, reason)| json!({ "line": line, "reason": reason })).collect();
    let ns = json!({ "p50": report.ns.p50, "p99": report.ns.p99, "p999": report.ns.p99_9, "max": report.ns.max });
    json!({
        "file": file, "events": report.events, "failed": failed, "recorded_failures": report.recorded_failures,
        "peak_live": report.peak_live, "peak_reserved": report.peak_reserved, "ratio": report.ratio, "ns": ns,
        "longest_growth_ns": report.growth_ns, "growths": report.growths, "chunks": report.chunks,
    })
}

fn show(file: &str, report: &Report) {
    let Report { events, peak_live, peak_reserved, ratio, growths, ns, .. } = report;
    println!("{file}");
    println!(
        "  {events} events; {} live at most, {} reserved for it ({ratio:.3} times) by {growths} growths",
        size(*peak_live),
        size(*peak_reserved)
    );
    println!(
        "  p50 {} ns, p99 {} ns, p99.9 {} ns, longest {} ns; longest with a growth {} ns",
        ns.p50, ns.p99, ns.p99_9, ns.max, report.growth_ns
    );
    if report.recorded_failures > 0 {
        println!("  {} allocations failed when it was recorded; they are left out", report.recorded_failures);
    }
    for (line, reason) in report.failed.iter().take(NAMED) {
        eprintln!("millpond: {file}: line {line}: {reason}");
    }
    if report.failed.len() > NAMED {
        eprintln!("millpond: {file}: and {} more", report.failed.len() - NAMED);
    }
}
