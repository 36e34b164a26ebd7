//! Replays allocation traces against the real heap, over addresses alone: no byte of the memory is touched.
//!
//! A trace is a log of RMM: CSV with the columns `Thread,Time,Action,Pointer,Size,Stream`, plain or gzipped; actions are
//! `allocate`, `allocate failure` and `free`, pointers and streams are hexadecimal (or `(nil)`). The events run one after
//! another in the order of the file; each stream of the trace is a stream of a host device (0: the legacy stream).

mod recorded;
mod rmm;

pub use recorded::{recorded, Recorded};
pub use rmm::{parse, read, Action, Event, Recorder, HEADER};

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use crate::driver::host::{HostConfig, HostPlatform};
use crate::driver::{Access, Addr, DeviceId, Driver, DriverError, Platform, Stream};
use crate::heap::{Heap, HeapConfig, LocalSource};
use crate::window::Window;

/// Addresses of the window that a replay runs in, in bytes: as far as blocks can lie.
const WINDOW: u64 = (2 << 40) - (4 << 20);

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

/// What a replay found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// Lines that were replayed.
    pub events: u64,
    /// Lines that failed, and why.
    pub failed: Vec<(u64, String)>,
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
/// [`ReplayError::Driver`]. An event that fails is in the report.
pub fn replay(events: &[Event], config: HeapConfig) -> Result<Report, ReplayError> {
    replay_often(events, config, 1)
}

/// Replays events so many times, each with a heap of its own. The report is that of the last, its times those of each call's median:
/// what the call takes, without what else the machine did in one replay, and without the first one's cold code. Where the replays
/// did not grow at the same calls, the times are the last one's.
///
/// # Errors
/// As [`replay`].
pub fn replay_often(events: &[Event], config: HeapConfig, replays: usize) -> Result<Report, ReplayError> {
    let mut all: Vec<Vec<(u64, u64)>> = Vec::new();
    loop {
        let mut run = Run::new(config)?;
        for event in events {
            run.step(event)?;
        }
        if all.len() + 1 >= replays {
            all.push(std::mem::take(&mut run.times));
            run.times = medians(all);
            return Ok(run.report());
        }
        all.push(run.times);
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

/// One replay under way.
struct Run {
    driver: Arc<dyn Driver>,
    source: Arc<LocalSource>,
    heap: Heap,
    streams: HashMap<u64, Stream>,
    /// Live blocks of the trace: where they are here, and how large.
    live: HashMap<u64, (Addr, u64)>,
    /// The same by address here, to find overlaps.
    taken: BTreeMap<Addr, u64>,
    live_bytes: u64,
    /// Calls that needed no growth: the line and nanoseconds.
    times: Vec<(u64, u64)>,
    report: Report,
}

impl Run {
    fn new(config: HeapConfig) -> Result<Self, ReplayError> {
        let platform = HostPlatform::new(HostConfig { total_bytes: Some(u64::MAX), ..HostConfig::default() });
        let driver = platform.open(DeviceId::host(0))?;
        driver.attach_context()?;
        let source = Arc::new(LocalSource::new(driver.clone(), WINDOW, config.chunk_bytes));
        let window = Window::reserve(driver.clone(), WINDOW, Access::ReadWrite)?;
        let heap = Heap::new(driver.clone(), window, source.clone(), None, None, config);
        Ok(Self {
            driver,
            source,
            heap,
            streams: HashMap::from([(0, Stream::LEGACY)]),
            live: HashMap::new(),
            taken: BTreeMap::new(),
            live_bytes: 0,
            times: Vec::new(),
            report: Report::default(),
        })
    }

    fn step(&mut self, event: &Event) -> Result<(), ReplayError> {
        self.report.events += 1;
        let failed = match event.action {
            Action::Allocate => self.allocate(event)?,
            Action::Free => self.free(event),
            Action::AllocateFailure => {
                self.report.recorded_failures += 1;
                None
            }
        };
        self.report.failed.extend(failed.map(|reason| (event.line, reason)));
        Ok(())
    }

    fn allocate(&mut self, event: &Event) -> Result<Option<String>, ReplayError> {
        let stream = match self.streams.get(&event.stream) {
            Some(stream) => *stream,
            None => *self.streams.entry(event.stream).or_insert(self.driver.stream_create()?),
        };
        if event.bytes > 0 && self.live.contains_key(&event.pointer) {
            return Ok(Some(format!("the trace allocates {:#x}, which is live", event.pointer)));
        }
        let growths = self.heap.stats().growths;
        let start = Instant::now();
        let result = self.heap.allocate(event.bytes, stream);
        let took = start.elapsed().as_nanos() as u64;
        if self.heap.stats().growths > growths {
            self.report.growth_ns = self.report.growth_ns.max(took);
        } else {
            self.times.push((event.line, took));
        }
        let addr = match result {
            Ok(addr) => addr,
            Err(error) => return Ok(Some(error.to_string())),
        };
        if event.bytes == 0 {
            return Ok(None);
        }
        let rounded = event.bytes.div_ceil(512) * 512;
        let before = self.taken.range(..addr + rounded).next_back().filter(|(at, bytes)| *at + **bytes > addr);
        let overlap = before.map(|(at, bytes)| format!("{addr:#x}+{rounded} overlaps the live block {at:#x}+{bytes}"));
        self.taken.insert(addr, rounded);
        self.live.insert(event.pointer, (addr, rounded));
        self.live_bytes += rounded;
        self.report.peak_live = self.report.peak_live.max(self.live_bytes);
        Ok(overlap)
    }

    fn free(&mut self, event: &Event) -> Option<String> {
        if event.pointer == 0 || event.bytes == 0 {
            return None;
        }
        let Some((addr, bytes)) = self.live.remove(&event.pointer) else {
            return Some(format!("the trace frees {:#x}, which is not live", event.pointer));
        };
        self.taken.remove(&addr);
        self.live_bytes -= bytes;
        let start = Instant::now();
        let result = self.heap.free(addr);
        self.times.push((event.line, start.elapsed().as_nanos() as u64));
        result.err().map(|error| error.to_string())
    }

    fn report(mut self) -> Report {
        let (counts, stats) = (self.source.counts(), self.heap.stats());
        let mut report = self.report;
        if stats.all.allocated_bytes.current != self.live_bytes {
            report.failed.push((0, format!("{} bytes count as live, not {}", stats.all.allocated_bytes.current, self.live_bytes)));
        }
        report.peak_reserved = counts.peak;
        report.ratio = if report.peak_live == 0 { 0.0 } else { counts.peak as f64 / report.peak_live as f64 };
        report.growths = stats.growths;
        report.chunks = counts.chunks;
        self.times.sort_unstable_by_key(|(_, took)| *took);
        let at = |part: f64| self.times.get((self.times.len() as f64 * part) as usize).or(self.times.last()).map_or(0, |(_, took)| *took);
        report.slowest = self.times.iter().rev().take(SLOWEST).copied().collect();
        report.ns = Nanoseconds { p50: at(0.5), p99: at(0.99), p99_9: at(0.999), max: at(1.0) };
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: HeapConfig =
        HeapConfig { chunk_bytes: 8 << 20, min_growth: 2 << 20, growth_divisor: 16, own_chunk: 8 << 20, drain: std::time::Duration::ZERO };

    #[test]
    fn a_trace_is_replayed() {
        let events = parse(
            "Thread,Time,Action,Pointer,Size,Stream\n\
             1,15:47:02.841961,allocate,0x10012400000,1048576,0\n\
             1,15:47:02.841962,allocate,0x10012500000,3000,0x7f00\n\
             1,15:47:02.841963,allocate failure,(nil),99,0x0\n\
             1,15:47:02.841964,free,0x10012400000,1048576,0\n\
             1,15:47:02.841965,allocate,0x10012400000,512,0x7f00\n\n",
        )
        .unwrap();
        assert_eq!(events.len(), 5);
        assert_eq!((events[1].stream, events[1].bytes, events[1].line), (0x7f00, 3000, 3));
        let report = replay(&events, SMALL).unwrap();
        assert_eq!(report.failed, []);
        assert_eq!((report.events, report.recorded_failures), (5, 1));
        assert_eq!(report.peak_live, (1 << 20) + 3072);
        assert!(report.peak_reserved >= report.peak_live && report.growths >= 1);
    }

    #[test]
    fn times_of_many_replays_are_medians_of_each_call() {
        let calls = |times: [u64; 2]| vec![(2, times[0]), (3, times[1])];
        assert_eq!(medians(vec![calls([5, 9_000]), calls([6, 8]), calls([4, 9])]), calls([5, 9]));
        assert_eq!(medians(vec![calls([5, 9]), vec![(3, 7)]]), [(3, 7)], "they did not grow at the same calls");
        assert_eq!(medians(Vec::new()), []);
        let text = format!("{HEADER}\n0,0,allocate,0x1000,512,0\n0,0,free,0x1000,512,0\n0,0,allocate,0x1000,512,0\n");
        let report = replay_often(&parse(&text).unwrap(), SMALL, 3).unwrap();
        assert_eq!((report.events, report.growths, report.failed.len()), (3, 1, 0), "the counts are one replay's");
        let mut lines: Vec<u64> = report.slowest.iter().map(|(line, _)| *line).collect();
        lines.sort_unstable();
        assert_eq!(lines, [3, 4], "the first grew");
        assert!(report.slowest.is_sorted_by(|one, next| one.1 >= next.1));
    }

    #[test]
    fn failures_name_their_line() {
        let text = format!("{HEADER}\n0,0,allocate,0x1000,512,0\n0,0,free,0x2000,512,0\n0,0,allocate,0x1000,512,0\n");
        let report = replay(&parse(&text).unwrap(), SMALL).unwrap();
        assert_eq!(report.failed.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [3, 4]);
        assert!(report.failed[0].1.contains("0x2000"), "{:?}", report.failed);
    }

    /// `MILLPOND_TRACES=folder cargo test --release -p millpond-allocator --features replay --lib replay -- --ignored --nocapture`
    #[test]
    #[ignore = "needs MILLPOND_TRACES, a folder of traces; prints figures"]
    fn real_traces() {
        let folder = std::env::var("MILLPOND_TRACES").expect("MILLPOND_TRACES names a folder of *.csv.gz");
        let setting = |name: &str, or: u64| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(or);
        let or = HeapConfig::default();
        let config = HeapConfig {
            chunk_bytes: setting("CHUNK", or.chunk_bytes),
            min_growth: setting("MIN", or.min_growth),
            growth_divisor: setting("DIV", or.growth_divisor),
            own_chunk: setting("OWN", or.own_chunk),
            ..or
        };
        let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.retain(|path| path.to_string_lossy().ends_with(".csv.gz"));
        paths.sort();
        for path in paths {
            let report = replay(&read(&path).unwrap(), config).unwrap();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            println!(
                "{name:36} {:6} failed {} live {:8.1} reserved {:8.1} MiB ratio {:.4} growths {:3} chunks {:3} {:?} growth {} ns",
                report.events,
                report.failed.len(),
                report.peak_live as f64 / f64::from(1 << 20),
                report.peak_reserved as f64 / f64::from(1 << 20),
                report.ratio,
                report.growths,
                report.chunks,
                report.ns,
                report.growth_ns
            );
            assert_eq!(report.failed, []);
        }
    }
}
