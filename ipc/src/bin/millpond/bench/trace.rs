//! A replay of allocation traces against the real heap; addresses alone, no memory is touched.

use std::fmt::Write as _;

use millpond_allocator::heap::HeapConfig;
use millpond_allocator::replay::{parse, read, replay, Event, HEADER};
use serde_json::{json, Value};

use super::party::text;
use super::{Figures, Plan};

pub(super) fn measure(plan: &Plan<'_>) -> Figures {
    let mut traces: Vec<(String, Vec<Event>)> = Vec::new();
    for path in plan.traces {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        traces.push((name, read(path).map_err(text)?));
    }
    if traces.is_empty() {
        traces.push(("steps of layers, made up".to_owned(), parse(&made_up(plan.pick(20, 200))).map_err(text)?));
    }
    let mut figures = Vec::new();
    for (name, events) in traces {
        figures.push((name, one(&events)?));
    }
    Ok(figures)
}

fn one(events: &[Event]) -> Result<Value, String> {
    let report = replay(events, HeapConfig::default()).map_err(text)?;
    if let Some(failure) = report.failed.first() {
        return Err(failure.to_string());
    }
    let ns = report.ns;
    Ok(json!({
        "events": report.events, "peak_live": report.peak_live, "peak_reserved": report.peak_reserved, "reserved_by_live": report.ratio,
        "growths": report.growths, "p50_ns": ns.p50, "p99_ns": ns.p99, "p999_ns": ns.p99_9, "max_ns": ns.max,
    }))
}

/// Steps of a network as a trace: activations that grow, are kept, and are freed the other way round; with scratch between.
fn made_up(steps: u64) -> String {
    const LAYERS: u64 = 48;
    let mut text = format!("{HEADER}\n");
    let mut next = 0_u64;
    let mut line = |action: &str, pointer: u64, bytes: u64| {
        let _ = writeln!(text, "0,0,{action},{pointer:#x},{bytes},0x0");
    };
    for step in 0..steps {
        let mut kept = Vec::new();
        for layer in 0..LAYERS {
            let bytes = ((layer % 7 + 1) << 20) + (step % 5) * 4096 + layer * 512;
            next += 0x1_0000;
            kept.push((next, bytes));
            line("allocate", next, bytes);
            next += 0x1_0000;
            line("allocate", next, bytes / 3);
            line("free", next, bytes / 3);
        }
        kept.iter().rev().for_each(|(pointer, bytes)| line("free", *pointer, *bytes));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_made_up_trace_replays() {
        let value = one(&parse(&made_up(3)).unwrap()).unwrap();
        assert_eq!(value["events"], 3 * 48 * 4);
        assert!(value["reserved_by_live"].as_f64().unwrap() >= 1.0, "{value}");
    }
}
