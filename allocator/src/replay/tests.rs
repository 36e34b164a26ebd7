use super::*;

pub(super) const SMALL: HeapConfig =
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
    assert_eq!(rules(&report.failed), [(3, Rule::Free), (4, Rule::Twice)]);
    assert!(report.failed[0].reason.contains("0x2000"), "{:?}", report.failed);
    let report =
        replay(&trace("0,0,allocate,0x1000,512,0 0,0,allocate,0x2000,4398046511104,0 0,0,allocate,0x3000,18446744073709551615,0"), SMALL)
            .unwrap();
    assert_eq!(rules(&report.failed), [(3, Rule::Allocation), (4, Rule::Allocation)]);
}

pub(super) fn trace(lines: &str) -> Vec<Event> {
    parse(&format!("{HEADER}\n{}\n", lines.replace(' ', "\n"))).unwrap()
}

fn rules(failed: &[Failure]) -> Vec<(u64, Rule)> {
    failed.iter().map(|failure| (failure.line, failure.rule)).collect()
}

/// A block is freed on one stream and there is room for another's nowhere else.
pub(super) const HANDED_OVER: &str = "0,0,allocate,0x1000,8388608,0x10 0,0,free,0x1000,8388608,0x10 0,0,allocate,0x2000,8388608,0x20";

#[test]
fn a_block_that_another_stream_had_is_seen_to_be_over_or_waited_for() {
    let report = replay(&trace(HANDED_OVER), SMALL).unwrap();
    assert_eq!(report.failed, []);
    assert_eq!((report.streams, report.threads, report.peak_reserved), (2, 1, 8 << 20));
    // Where memory is short the first allocation waits too, though there is nobody: it is tried before an error.
    assert_eq!(report.checks, Checks { allocations: 6, crossed: 3, waits: 3 });
}

#[test]
fn a_block_that_another_stream_frees_is_in_use_there() {
    let lines = "0,0,allocate,0x1000,8388608,0x10 0,0,free,0x1000,8388608,0x20 0,0,allocate,0x2000,8388608,0x10";
    let report = replay(&trace(lines), SMALL).unwrap();
    assert_eq!((report.failed.as_slice(), report.checks.crossed), ([].as_slice(), 3));
}

#[test]
fn threads_and_their_own_streams_are_replayed() {
    let lines = "7,0,allocate,0x1000,512,0x2 8,0,allocate,0x2000,512,0x2 8,0,free,0x1000,512,0x2 7,0,free,0x2000,512,0x2 9,0,allocate,0x1000,512,0x0";
    let report = replay_often(&trace(lines), SMALL, 2).unwrap();
    assert_eq!((report.threads, report.streams, report.events), (3, 3, 5));
    assert_eq!((report.failed.as_slice(), report.peak_live), ([].as_slice(), 1024));
}

/// Blocks of many sizes on four streams, allocated and freed by three threads, some freed on another stream.
fn busy() -> Vec<Event> {
    let (mut dice, mut live, mut events) = (7_u64, Vec::new(), Vec::new());
    let mut roll = |below: u64| {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (dice >> 33) % below
    };
    for line in 2..4_000 {
        let thread = roll(30) / 10;
        let (action, pointer, bytes, stream) = if live.len() > 40 || (!live.is_empty() && roll(2) == 0) {
            let (pointer, bytes, stream) = live.swap_remove(roll(live.len() as u64) as usize);
            (Action::Free, pointer, bytes, if roll(20) == 0 { roll(4) * 16 } else { stream })
        } else {
            let block = (line << 12, 512 << roll(13), roll(4) * 16);
            live.push(block);
            (Action::Allocate, block.0, block.1, block.2)
        };
        events.push(Event { line, thread, action, pointer, bytes, stream });
    }
    events
}

#[test]
fn a_busy_trace_is_checked_and_each_time_alike() {
    let events = busy();
    let first = Trace::of(&events).check(SMALL, |driver| driver).unwrap();
    assert_eq!(first.0, []);
    assert!(first.1.crossed > 100 && first.1.waits > 20, "{:?}", first.1);
    assert_eq!(Trace::of(&events).check(SMALL, |driver| driver).unwrap(), first);
}

#[test]
fn a_heap_that_hands_out_a_live_block_is_found_out() {
    let events = trace("0,0,allocate,0x1000,512,0x10 0,0,allocate,0x2000,512,0x10");
    let mut run = Run::new(SMALL, Pass::Ample, |driver| driver).unwrap();
    run.step(&events[0]).unwrap();
    run.forget_blocks();
    run.step(&events[1]).unwrap();
    run.end();
    assert_eq!(rules(&run.report.failed), [(3, Rule::Overlap), (0, Rule::Count)]);
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
