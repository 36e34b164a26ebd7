//! Replays allocation traces of real programs: how much memory they need here, and how long a call takes.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::{Domain, Handle, Tlsf, GRANULE};

/// Granules of 2 MiB, the step of the sizes that are tried.
const STEP: u32 = ((2 << 20) / GRANULE) as u32;

/// One call of a trace. Blocks are numbered in the order of their allocation.
#[derive(Clone, Copy)]
enum Event {
    Allocate { block: usize, granules: u32 },
    Free { block: usize },
}

struct Trace {
    events: Vec<Event>,
    blocks: usize,
    /// Highest sum of live granules.
    peak: u64,
}

/// Reads a trace in the columns of RMM's log: `Thread,Time,Action,Pointer,Size,Stream`.
fn read(path: &Path) -> Trace {
    let mut text = String::new();
    let file = std::fs::File::open(path).unwrap();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    let mut live: HashMap<String, (usize, u32)> = HashMap::new();
    let mut trace = Trace { events: Vec::new(), blocks: 0, peak: 0 };
    let mut now = 0;
    for line in text.lines().skip(1) {
        let columns: Vec<&str> = line.split(',').collect();
        if columns[2] == "allocate" {
            let granules = columns[4].parse::<u64>().unwrap().div_ceil(GRANULE).max(1) as u32;
            assert!(live.insert(columns[3].to_owned(), (trace.blocks, granules)).is_none(), "{line}: already live");
            trace.events.push(Event::Allocate { block: trace.blocks, granules });
            trace.blocks += 1;
            now += u64::from(granules);
            trace.peak = trace.peak.max(now);
        } else {
            let (block, granules) = live.remove(columns[3]).unwrap();
            trace.events.push(Event::Free { block });
            now -= u64::from(granules);
        }
    }
    trace
}

/// One region of `granules`, in one domain.
fn one_region(granules: u32) -> (Tlsf, Domain) {
    let mut tlsf = Tlsf::new();
    let domain = tlsf.add_domain();
    tlsf.add_region(0, granules, domain, 0).unwrap();
    (tlsf, domain)
}

/// Replays `trace`; false at the first allocation that fails.
fn replay(trace: &Trace, tlsf: &mut Tlsf, domain: Domain, handles: &mut [Option<Handle>]) -> bool {
    for &event in &trace.events {
        match event {
            Event::Allocate { block, granules } => match tlsf.allocate(domain, granules) {
                Some(allocation) => handles[block] = Some(allocation.handle),
                None => return false,
            },
            Event::Free { block } => {
                let Some(handle) = handles[block].take() else { return false };
                if tlsf.free(handle, domain, 0).is_err() {
                    return false;
                }
            }
        }
    }
    true
}

fn fits(trace: &Trace, granules: u32) -> bool {
    let (mut tlsf, domain) = one_region(granules);
    replay(trace, &mut tlsf, domain, &mut vec![None; trace.blocks])
}

/// The smallest region in steps of 2 MiB that completes `trace`, by bisection between its peak and four times that.
///
/// A larger region may fail where a smaller one did, so this may find a lucky size: see [`settled_region`].
fn smallest_region(trace: &Trace) -> u32 {
    let (mut low, mut high) = ((trace.peak / u64::from(STEP)) as u32, (trace.peak * 4 / u64::from(STEP)) as u32 + 4);
    while low < high {
        let middle = (low + high) / 2;
        if fits(trace, middle * STEP) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low * STEP
}

/// The smallest region from which every larger one completes `trace`, in steps of 2 MiB up to 12 % above its peak.
fn settled_region(trace: &Trace) -> u32 {
    let peak = (trace.peak / u64::from(STEP)) as u32;
    let failed = (peak..=peak + peak * 12 / 100).rev().find(|&steps| !fits(trace, steps * STEP));
    failed.map_or(peak, |steps| steps + 1) * STEP
}

/// Nanoseconds of one call, in the fastest and the median of 51 replays in a region of `granules`.
fn nanoseconds(trace: &Trace, granules: u32) -> (f64, f64) {
    let mut handles = vec![None; trace.blocks];
    let mut times: Vec<f64> = (0..51)
        .map(|_| {
            handles.fill(None);
            let (mut tlsf, domain) = one_region(granules);
            let start = Instant::now();
            assert!(replay(trace, &mut tlsf, domain, &mut handles));
            start.elapsed().as_secs_f64() * 1e9 / trace.events.len() as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[0], times[25])
}

fn traces() -> Vec<PathBuf> {
    let folder = std::env::var("MILLPOND_TRACES").expect("MILLPOND_TRACES names a folder of *.csv.gz");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == "gz"));
    paths.sort();
    paths
}

/// `MILLPOND_TRACES=folder cargo test --release -p millpond-allocator --lib tlsf::replay -- --ignored --nocapture`
#[test]
#[ignore = "needs MILLPOND_TRACES, a folder of traces; prints figures"]
fn real_traces_pack_within_three_percent_of_their_peak() {
    let paths = traces();
    assert!(!paths.is_empty(), "MILLPOND_TRACES has no *.csv.gz");
    for path in paths {
        let trace = read(&path);
        let (smallest, settled) = (smallest_region(&trace), settled_region(&trace));
        let over = |granules: u32| f64::from(granules) / trace.peak as f64;
        let (best, median) = nanoseconds(&trace, settled);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        println!(
            "{name:36} {:6} calls  bisected {:.4}  settled {:.4}  {best:5.1} ns best {median:5.1} ns median",
            trace.events.len(),
            over(smallest),
            over(settled)
        );
        assert!(over(settled) < 1.03, "{name}: {settled} granules for a peak of {}", trace.peak);
    }
}
