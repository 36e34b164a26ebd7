//! `millpond-micro --driver cuda|host --owner PROGRAM [--json FILE] [--quick] [--part NAME]`: figures of the Rust side, each part
//! against an owner of its own (`PROGRAM serve`) and in a process of its own, with a time limit.

mod bench;
mod death;
mod handoff;
mod lease;
mod malloc;
mod owner;
mod seams;
mod worker;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use bench::Bench;
use millpond_tests::flags::Flags;
use millpond_tests::lines::{Lines, Next};
use serde_json::{json, Map, Value};

/// What a part gives: its figures, or what was wrong.
type Figures = Result<Value, String>;

/// A part: its name, its time limit (full, quick) in seconds, and what it does.
type Part = (&'static str, (u64, u64), fn(&Bench) -> Figures);

const PARTS: &[Part] = &[
    ("handoff", (25, 8), handoff::round_trips),
    ("lease", (15, 6), lease::life),
    ("first_use", (20, 8), handoff::first_use),
    ("growth", (15, 6), malloc::growth),
    ("malloc", (25, 8), malloc::pairs),
    ("seams_6GiB", (20, 10), seams::six),
    ("seams_16GiB", (25, 10), seams::sixteen),
    ("kill", (30, 12), death::kill),
    ("death", (40, 20), death::release),
    ("owner", (20, 8), owner::sixty_four),
    ("race", (20, 8), owner::race),
];

fn main() -> ExitCode {
    let flags = Flags::of_process();
    let outcome = match (flags.value("worker"), flags.value("part"), flags.has("child")) {
        (Some(name), ..) => worker::run(&flags, name).map(|()| true),
        (None, Some(part), true) => one(&flags, part),
        _ => whole(&flags),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("millpond-micro: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the parts, each in a child process, and writes the file after each.
fn whole(flags: &Flags) -> Result<bool, String> {
    let driver = flags.value("driver").unwrap_or("host");
    let owner = flags.value("owner").map_or_else(beside, |path| Ok(path.to_owned()))?;
    let quick = flags.has("quick");
    let budget = std::env::var("MILLPOND_STAGE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(600);
    let end = Instant::now() + Duration::from_secs(budget);
    let (mut figures, mut cases, mut failed) = (Map::new(), Vec::new(), 0);
    for (name, (full, short), _) in PARTS {
        if flags.value("part").is_some_and(|wanted| !name.contains(wanted)) {
            continue;
        }
        let limit = Duration::from_secs(if quick { *short } else { *full }).min(end.saturating_duration_since(Instant::now()));
        let mut arguments = vec!["--child", "--part", name, "--driver", driver, "--owner", &owner];
        if quick {
            arguments.push("--quick");
        }
        let start = Instant::now();
        let found = child(&arguments, limit);
        let ms = start.elapsed().as_millis() as u64;
        let case = match found {
            Ok(value) => {
                println!("ok    {name} ({ms} ms): {value}");
                figures.insert((*name).to_owned(), value);
                json!({ "case": name, "ok": true, "ms": ms })
            }
            Err(message) => {
                println!("FAIL  {name} ({ms} ms): {message}");
                failed += 1;
                json!({ "case": name, "ok": false, "message": message, "ms": ms })
            }
        };
        cases.push(case);
        if let Some(path) = flags.value("json") {
            let all = json!({ "driver": driver, "quick": quick, "passed": cases.len() - failed, "failed": failed, "cases": cases, "figures": figures });
            std::fs::write(path, all.to_string()).map_err(|error| format!("{path}: {error}"))?;
        }
    }
    println!("{} passed, {failed} failed", cases.len() - failed);
    Ok(failed == 0 && !cases.is_empty())
}

/// The `millpond` program beside this one.
fn beside() -> Result<String, String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    Ok(own.with_file_name("millpond").to_string_lossy().into_owned())
}

fn child(arguments: &[&str], limit: Duration) -> Figures {
    if limit < Duration::from_secs(2) {
        return Err("not run: no time left".to_owned());
    }
    let mut child = Lines::of_self(arguments)?;
    let end = Instant::now() + limit;
    let mut last = "its start".to_owned();
    loop {
        match child.next(end.saturating_duration_since(Instant::now())) {
            Next::Line(line) => match (line.strip_prefix("at "), line.strip_prefix("FAIL ")) {
                (Some(step), _) => last = step.to_owned(),
                (_, Some(message)) => return Err(message.to_owned()),
                _ => return serde_json::from_str(&line).map_err(|error| format!("{line:?}: {error}")),
            },
            Next::Silent => return Err(format!("hung: out of its {limit:?} at {last}; killed")),
            Next::Ended(how) => return Err(format!("its process {how}, at {last}")),
        }
    }
}

/// One part, in this process.
fn one(flags: &Flags, name: &str) -> Result<bool, String> {
    let (_, _, part) = PARTS.iter().find(|(known, ..)| *known == name).ok_or_else(|| format!("no part {name:?}"))?;
    let bench = Bench::new(flags)?;
    match part(&bench) {
        Ok(value) => println!("{value}"),
        Err(message) => println!("FAIL {}", message.replace('\n', " / ")),
    }
    Ok(true)
}
