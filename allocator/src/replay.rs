//! Replays allocation traces against the real heap, over addresses alone: no byte of the memory is touched.
//!
//! A trace is a log of RMM: CSV with the columns `Thread,Time,Action,Pointer,Size,Stream`, plain or gzipped; actions are
//! `allocate`, `allocate failure` and `free`, pointers and streams are hexadecimal (or `(nil)`). The events run one after
//! another in the order of the file, each on a thread of its own if the trace has several; each stream of the trace is a stream
//! of a host device (0: the legacy stream; 2: one of each thread). A block that is freed on another stream than it was allocated
//! on is in use on both.
//!
//! Each trace is replayed several times. Three replays are checked, by a model ([`Order`]) that hears what the heap asks of its
//! driver: with ample memory, as in the timed ones; with memory so short that streams take each other's; and so short with streams
//! that stay behind, so that they have to wait for each other. The rest are timed, and nothing is checked in them: the heap does
//! there what it did in the first.

#[cfg(test)]
mod lies;
mod order;
mod recorded;
mod rmm;
mod run;
#[cfg(test)]
mod tests;
mod turns;
mod watched;

pub use order::{Checks, Fault, Moment, Order, Rule, Who};
pub use recorded::{recorded, Recorded};
pub use rmm::{parse, read, Action, Event, Recorder, HEADER};
pub use watched::Watched;

use std::fmt;
use std::sync::Arc;

use crate::driver::{Driver, DriverError};
use crate::heap::HeapConfig;
use run::{Pass, Run, LOOKS};
use turns::{take_turns, turns, Turn};

/// So many of the slowest calls are named.
const SLOWEST: usize = 10;

/// Why a trace could not be replayed at all.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The file could not be read.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: String,
        /// The system's answer.
        error: std::io::Error,
    },
    /// A line is no event.
    #[error("line {line}: {reason}")]
    Parse {
        /// The line, the header being 1.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// A thread of the trace could not be started.
    #[error("{threads} threads could not be started: {error}")]
    Thread {
        /// How many the trace has.
        threads: usize,
        /// The system's answer.
        error: std::io::Error,
    },
    /// The host device could not be set up.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Nanoseconds of the calls of malloc and free.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Nanoseconds {
    /// Half took no longer.
    pub p50: u64,
    /// Of a hundred, 99 took no longer.
    pub p99: u64,
    /// Of a thousand, 999 took no longer.
    pub p99_9: u64,
    /// The longest.
    pub max: u64,
}

/// An event that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Its line in the file; 0: no event's.
    pub line: u64,
    /// What it broke.
    pub rule: Rule,
    /// How.
    pub reason: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, rule, reason } = self;
        match line {
            0 => write!(f, "at the end: {rule}: {reason}"),
            _ => write!(f, "line {line}: {rule}: {reason}"),
        }
    }
}

/// What a replay found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// Lines that were replayed.
    pub events: u64,
    /// Threads that they ran on.
    pub threads: u64,
    /// Streams that they name.
    pub streams: u64,
    /// What was checked, in all checked replays together.
    pub checks: Checks,
    /// Events that failed in any replay, in the order of their lines, each rule once a line; what is no event's comes last.
    pub failed: Vec<Failure>,
    /// Failures that the trace itself has; they are not replayed.
    pub recorded_failures: u64,
    /// The most bytes that were live, rounded to 512 each.
    pub peak_live: u64,
    /// The most bytes that were reserved.
    pub peak_reserved: u64,
    /// Peak reserved by peak live.
    pub ratio: f64,
    /// How long the calls took that needed no growth, in nanoseconds, the clock's own time included.
    pub ns: Nanoseconds,
    /// The slowest of those calls, the slowest first: the line and nanoseconds.
    pub slowest: Vec<(u64, u64)>,
    /// How long the longest call with a growth took, in nanoseconds.
    pub growth_ns: u64,
    /// Growths.
    pub growths: u64,
    /// Chunks at the end.
    pub chunks: u64,
}

/// Replays events with a heap of these settings.
///
/// # Errors
/// [`ReplayError::Driver`], [`ReplayError::Thread`]. An event that fails is in the report.
pub fn replay(events: &[Event], config: HeapConfig) -> Result<Report, ReplayError> {
    replay_often(events, config, 1)
}

/// Checks events, and then times them so often, each time with a heap of its own. The report is that of the last, its times those of
/// each call's median: what the call takes, without what else the machine did in one replay, and without the first one's cold code.
/// Where the replays did not grow at the same calls, the times are the last one's.
///
/// # Errors
/// As [`replay`].
pub fn replay_often(events: &[Event], config: HeapConfig, replays: usize) -> Result<Report, ReplayError> {
    let trace = Trace::of(events);
    let (failed, checks) = trace.check(config, |driver| driver)?;
    let (mut report, mut all, mut failed) = (Report::default(), Vec::new(), failed);
    for _ in 0..replays.max(1) {
        let run = trace.run(config, Pass::Timed, |driver| driver)?;
        all.push(run.times);
        failed.extend(run.report.failed.iter().cloned());
        report = run.report;
    }
    failed.sort_by_key(|failure| (failure.line == 0, failure.line, failure.rule));
    failed.dedup_by_key(|failure| (failure.line, failure.rule));
    (report.threads, report.failed, report.checks) = (trace.threads as u64, failed, checks);
    report.time(medians(all));
    Ok(report)
}

/// Events, and which thread has its turn when.
struct Trace<'a> {
    events: &'a [Event],
    turns: Vec<Turn>,
    threads: usize,
}

impl<'a> Trace<'a> {
    fn of(events: &'a [Event]) -> Self {
        let (turns, threads) = turns(events.iter().map(|event| event.thread));
        Self { events, turns, threads }
    }

    fn run(&self, config: HeapConfig, pass: Pass, between: impl Fn(Arc<dyn Driver>) -> Arc<dyn Driver>) -> Result<Run, ReplayError> {
        let mut run = take_turns(&self.turns, self.threads, Run::new(config, pass, between)?, |run, places| {
            self.events.get(places).unwrap_or_default().iter().try_for_each(|event| run.step(event))
        })?;
        run.end();
        Ok(run)
    }

    /// The checked replays: what failed, and what was checked.
    fn check(
        &self,
        config: HeapConfig,
        between: impl Fn(Arc<dyn Driver>) -> Arc<dyn Driver>,
    ) -> Result<(Vec<Failure>, Checks), ReplayError> {
        let (mut failed, mut checks) = (Vec::new(), Checks::default());
        for pass in [Pass::Ample, Pass::Short { looks: 0 }, Pass::Short { looks: LOOKS }] {
            let report = self.run(config, pass, &between)?.report;
            failed.extend(report.failed);
            checks.allocations += report.checks.allocations;
            checks.crossed += report.checks.crossed;
            checks.waits += report.checks.waits;
        }
        Ok((failed, checks))
    }
}

impl Report {
    /// Takes the times of calls that needed no growth: (line, nanoseconds).
    fn time(&mut self, mut times: Vec<(u64, u64)>) {
        times.sort_unstable_by_key(|(_, took)| *took);
        let at = |part: f64| times.get((times.len() as f64 * part) as usize).or(times.last()).map_or(0, |(_, took)| *took);
        self.slowest = times.iter().rev().take(SLOWEST).copied().collect();
        self.ns = Nanoseconds { p50: at(0.5), p99: at(0.99), p99_9: at(0.999), max: at(1.0) };
    }
}

/// The median of each call, which are (line, nanoseconds); the last list's where they are not equally long.
fn medians(mut all: Vec<Vec<(u64, u64)>>) -> Vec<(u64, u64)> {
    let Some(last) = all.pop() else { return Vec::new() };
    if all.iter().any(|times| times.len() != last.len()) {
        return last;
    }
    let median = |(place, (line, own)): (usize, &(u64, u64))| {
        let mut times: Vec<u64> = all.iter().filter_map(|times| Some(times.get(place)?.1)).chain([*own]).collect();
        times.sort_unstable();
        (*line, times.get(times.len() / 2).copied().unwrap_or(*own))
    };
    last.iter().enumerate().map(median).collect()
}
