//! What the heap reserves for the traces that this project recorded, beside what torch's own allocators would have.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod heap_lab;

use std::path::Path;

use heap_lab::MIB;
use millpond_allocator::heap::HeapConfig;
use millpond_allocator::replay::{read, replay};

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
        let report = replay(&read(&traces.join(format!("{name}.csv.gz"))).unwrap(), config).unwrap();
        assert_eq!(report.failed, []);
        let found = (report.peak_reserved / MIB, report.ratio);
        assert!(report.peak_reserved <= native * MIB, "{name}: {found:?}, natively {native} MiB");
        assert!(report.peak_reserved <= expandable * MIB + config.min_growth, "{name}: {found:?}, expandable {expandable} MiB");
        assert!(name != "training" || report.ratio <= 1.10, "{name}: {found:?}");
    }
}
