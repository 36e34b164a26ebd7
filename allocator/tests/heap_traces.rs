//! What the heap reserves for the traces that this project recorded, beside what torch's own allocators would have; and that it
//! keeps order in them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod heap_lab;

use std::path::Path;

use heap_lab::MIB;
use millpond_allocator::heap::HeapConfig;
use millpond_allocator::replay::{read, replay, Action};

/// The most that torch would reserve in MiB, by the rules of its allocator: natively, and with expandable segments.
const TORCH: [(&str, u64, u64); 7] = [
    ("diffusion", 1256, 744),
    ("exchanging_worker_1", 68, 64),
    ("exchanging_worker_2", 68, 64),
    ("generation", 152, 144),
    ("prefetch", 116, 120),
    ("swapping", 204, 184),
    ("training", 590, 546),
];

#[test]
fn no_trace_takes_more_than_under_torch() {
    let (traces, config) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/traces"), HeapConfig::default());
    for (name, native, expandable) in TORCH {
        let events = read(&traces.join(format!("{name}.csv.gz"))).unwrap();
        let report = replay(&events, config).unwrap();
        assert_eq!(report.failed, []);
        let (allocations, checks) = (events.iter().filter(|event| event.action == Action::Allocate).count() as u64, report.checks);
        assert_eq!(checks.allocations, 3 * allocations, "{name}: each is checked in three replays");
        assert!(name != "prefetch" || (checks.crossed > 500 && checks.waits > 500), "its streams take each other's: {checks:?}");
        assert_eq!(report.threads, if name == "training" { 2 } else { 1 });
        let found = (report.peak_reserved / MIB, report.ratio);
        assert!(report.peak_reserved <= native * MIB, "{name}: {found:?}, natively {native} MiB");
        assert!(report.peak_reserved <= expandable * MIB + config.min_growth, "{name}: {found:?}, expandable {expandable} MiB");
        assert!(name != "training" || report.ratio <= 1.10, "{name}: {found:?}");
    }
}
