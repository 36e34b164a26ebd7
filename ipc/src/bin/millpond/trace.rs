//! `millpond trace`: recordings of several processes as one picture in time.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use millpond_ipc::trace::{read, write_chrome, Chrome, Process};
use serde_json::{json, Value};

const AFTER: &str = "\
Example: record what a program and its workers do, and look at it in https://ui.perfetto.dev.
  $ MILLPOND_TRACE=/tmp/run python main.py
  $ millpond trace /tmp/run -o run.json

Each process that attaches while MILLPOND_TRACE is set keeps its last 262144 events (MILLPOND_TRACE_EVENTS says how many) in a
file of that folder. The file is there whatever becomes of the process, and can be read while it runs.
In the picture: allocated and reserved bytes, growth, trims, refusals, waits, deaths, and an arrow from each send to its receipt.

Exit code 1 where a file could not be read; the others are written.";

/// One trace for Perfetto out of the recordings of several processes (MILLPOND_TRACE).
#[derive(Debug, ClapArgs)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Folders of recordings, or recordings.
    #[arg(required = true, value_name = "FOLDER")]
    places: Vec<PathBuf>,
    /// Write the trace there. Without: only say what there is.
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Every block's allocation and free too, with its Python frames where they were recorded.
    #[arg(long)]
    blocks: bool,
    /// JSON: {"processes":[{"name","pid","events","dropped","ended",…}],"arrows",…}.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let (processes, failed) = read(&args.places);
    for (path, error) in &failed {
        eprintln!("millpond: {}: {error}", path.display());
    }
    if processes.is_empty() {
        eprintln!("millpond: no recordings there: start the program with MILLPOND_TRACE=FOLDER");
        return ExitCode::FAILURE;
    }
    let mut written = None;
    if let Some(out) = &args.out {
        let result = File::create(out).and_then(|file| {
            let mut file = BufWriter::new(file);
            let written = write_chrome(&processes, Chrome { blocks: args.blocks }, &mut file)?;
            file.flush().map(|()| written)
        });
        match result {
            Ok(done) => written = Some(done),
            Err(error) => {
                eprintln!("millpond: {}: {error}", out.display());
                return ExitCode::FAILURE;
            }
        }
    }
    if args.json {
        let listed: Vec<Value> = processes.iter().map(as_json).collect();
        let figures = written.map(|w| json!({ "events": w.events, "arrows": w.arrows, "deaths": w.deaths }));
        println!("{}", json!({ "processes": listed, "failed": failed.len(), "written": figures }));
    } else {
        processes.iter().for_each(show);
        if let (Some(written), Some(out)) = (written, &args.out) {
            println!("{}: {} events, {} hand-offs, {} deaths", out.display(), written.events, written.arrows, written.deaths);
        }
    }
    if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn as_json(process: &Process) -> Value {
    let recording = &process.recording;
    json!({
        "file": process.path.display().to_string(), "name": process.text.identity.as_ref().map(|identity| &identity.name),
        "pid": recording.pid, "events": recording.events.len(), "dropped": recording.dropped, "text_lost": recording.text_lost,
        "began_ns": recording.began, "ended_ns": recording.ended,
    })
}

fn show(process: &Process) {
    let recording = &process.recording;
    let dropped = if recording.dropped > 0 { format!(", {} older ones overwritten", recording.dropped) } else { String::new() };
    let end = if recording.ended.is_some() { "" } else { ", not ended: it runs, or was killed" };
    println!("{:<40} {} events{dropped}{end}", process.label(), recording.events.len());
}
