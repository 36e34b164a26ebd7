//! `millpond stress` finds nothing where nothing is wrong, and what is wrong where it is.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::{Command, Output};

fn stress(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_millpond")).args(["stress", "--driver", "host", "--json"]).args(args).output().unwrap()
}

fn report(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

#[test]
fn nothing_is_found_where_workers_die_all_the_time() {
    let output = stress(&["--workers", "4", "--seconds", "4", "--kill-every-ops", "700", "--seed", "3"]);
    let report = report(&output);
    assert!(output.status.success(), "{report}");
    assert!(report["kills"].as_u64().unwrap() > 3 && report["transfers"].as_u64().unwrap() > 100, "{report}");
    assert!(report.get("findings").is_none());
    assert_eq!((report["outside_bytes"].as_u64(), report.get("outside_not_checked")), (Some(0), None), "{report}");
}

#[test]
fn so_many_deaths_and_no_more_time_than_they_need() {
    let output = stress(&["--workers", "4", "--seconds", "30", "--kills", "12"]);
    let report = report(&output);
    assert!(output.status.success(), "{report}");
    assert!(report["kills"].as_u64().unwrap() >= 12 && report["seconds"].as_f64().unwrap() < 30.0, "{report}");
    assert!(report["transfers"].as_u64() > report["kills"].as_u64(), "they died at work: {report}");
}

#[test]
fn some_are_killed_in_the_middle_of_a_call() {
    let output = stress(&["--workers", "4", "--seconds", "30", "--kills", "60", "--kill-every-ops", "300"]);
    let report = report(&output);
    assert!(output.status.success(), "{report}");
    let calls = report["killed_inside"].as_object().unwrap();
    let inside: u64 = calls.values().filter_map(serde_json::Value::as_u64).sum();
    let timed = report["timed_kills"].as_u64().unwrap();
    assert!(inside > 0 && inside <= timed && timed < report["kills"].as_u64().unwrap(), "{report}");
}

#[test]
fn fewer_deaths_than_asked_is_a_failure_that_says_so() {
    let output = stress(&["--workers", "2", "--seconds", "1", "--kills", "500", "--kill-every-ops", "100000"]);
    let report = report(&output);
    assert_eq!(
        (output.status.code(), report["missed_kills"].as_u64()),
        (Some(1), Some(500 - report["kills"].as_u64().unwrap())),
        "{report}"
    );
    assert!(report["findings"].to_string().contains("fewer than asked"), "{report}");
}

/// Each fault is found, and by its name.
#[cfg(feature = "faults")]
fn is_found(fault: &str, field: &str, said: &str) {
    // A fault that needs luck gets several chances.
    let mut last = serde_json::Value::Null;
    for seed in ["1", "2", "3"] {
        let output = stress(&["--workers", "4", "--seconds", "8", "--kill-every-ops", "1500", "--seed", seed, "--fault", fault]);
        last = report(&output);
        if output.status.code() == Some(1) && last[field].as_u64().is_some_and(|count| count > 0) {
            assert!(last["findings"].to_string().contains(said), "{last}");
            return;
        }
    }
    panic!("{fault}: {last}");
}

#[cfg(feature = "faults")]
#[test]
fn a_release_before_done_is_found() {
    is_found("release-before-done", "corruptions", "something else than was sent");
}

#[cfg(feature = "faults")]
#[test]
fn a_wait_for_ready_that_is_skipped_is_found() {
    is_found("skip-ready-wait", "corruptions", "something else than was sent");
}

#[cfg(feature = "faults")]
#[test]
fn a_stale_mapping_is_found() {
    is_found("stale-map", "corruptions", "something else than was sent");
}

#[cfg(feature = "faults")]
#[test]
fn a_dropped_ack_is_found() {
    is_found("drop-ack", "hung", "held by nobody who would let go");
}

#[cfg(feature = "faults")]
#[test]
fn a_lost_hold_is_found() {
    is_found("lost-hold", "corruptions", "something else than was sent");
}

#[cfg(feature = "faults")]
#[test]
fn a_ledger_that_is_off_is_found() {
    is_found("ledger-skew", "leaked_bytes", "the ledger says");
}
