#![allow(clippy::unwrap_used)]

use millpond_allocator::record::{Event, Kind, Recording};
use serde_json::Value;

use super::*;

fn process(pid: u32, serial: u64, events: Vec<Event>) -> Process {
    let text = format!(
        "{{\"client\":{pid},\"serial\":{serial},\"token\":\"t\",\"pid\":{pid},\"name\":\"w{pid}\"}}\nnonsense\n\
         {{\"f\":[1,\"a.py\",3,\"f\"]}}\n{{\"s\":[9,[1,7]]}}\n{{\"device\":0,\"name\":\"H200\"}}\n"
    );
    Process::of(PathBuf::new(), Recording { pid, began: 1000, began_wall: 5_000_000, events, text, ..Recording::default() })
}

fn event(kind: Kind, time: u64, value: u64) -> Event {
    Event { time, value, thread: 4, bytes: 512, ..Event::new(kind, 0) }
}

fn chrome(processes: &[Process], blocks: bool) -> (Vec<Value>, Written) {
    let mut out = Vec::new();
    let written = write_chrome(processes, Chrome { blocks }, &mut out).unwrap();
    let page: Value = serde_json::from_slice(&out).unwrap();
    (page["traceEvents"].as_array().unwrap().clone(), written)
}

#[test]
fn a_send_and_its_receipt_are_joined_and_a_death_is_put_on_its_process() {
    let processes = [
        process(10, 1, vec![event(Kind::Send, 2000, 77), event(Kind::Send, 2500, 78), event(Kind::Died, 9000, 2)]),
        process(20, 2, vec![event(Kind::Receive, 3000, 77), Event { peer: 2, ..event(Kind::Grow, 8000, 64) }]),
    ];
    let (events, written) = chrome(&processes, false);
    assert_eq!(written, Written { events: 5, arrows: 1, deaths: 1 });
    let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
    let (from, to) = (of("s")[0], of("f")[0]);
    assert_eq!((&from["id"], &from["pid"], &to["pid"]), (&to["id"], &Value::from(10), &Value::from(20)));
    assert_eq!((from["ts"].as_f64(), to["ts"].as_f64()), (Some(1.0), Some(2.0)), "microseconds from the first recording's start");
    assert!(of("X").iter().any(|slice| slice["name"] == "send" && slice["ts"] == from["ts"] && slice["dur"] == 1.0));
    let growth = of("X").into_iter().find(|slice| slice["name"] == "growth").unwrap();
    assert_eq!((growth["ts"].as_f64(), growth["dur"].as_f64()), (Some(5.0), Some(2.0)));
    assert!(of("i").iter().any(|mark| mark["name"] == "died" && mark["pid"] == 20 && mark["ts"] == 8.0));
    assert!(of("M").iter().any(|name| name["args"]["name"] == "w10 (10)"));
}

#[test]
fn counters_and_blocks_with_their_stacks() {
    let block = Event { stack: 9, ..event(Kind::Allocate, 1500, 4096) };
    let (events, _) = chrome(&[process(1, 1, vec![block])], true);
    let counter = events.iter().find(|event| event["ph"] == "C").unwrap();
    assert_eq!((&counter["name"], &counter["args"]["bytes"]), (&Value::from("allocated, GPU 0"), &Value::from(4096)));
    let mark = events.iter().find(|event| event["name"] == "allocate").unwrap();
    assert_eq!(mark["args"]["frames"], serde_json::json!(["a.py:3 f"]), "a frame that is not there is passed over");
    let (events, written) = chrome(&[process(1, 1, vec![block])], false);
    assert!(written.events == 1 && events.iter().all(|event| event["name"] != "allocate"));
}

#[test]
fn nothing_is_a_page_too_and_strange_files_are_named() {
    let (events, written) = chrome(&[], false);
    assert_eq!((events, written), (Vec::new(), Written::default()));
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("x.millpond"), "hello").unwrap();
    std::fs::write(folder.path().join("other.txt"), "hello").unwrap();
    let (found, failed) = read(&[folder.path().to_path_buf(), folder.path().join("missing")]);
    assert!(found.is_empty());
    assert_eq!(failed.len(), 2);
    assert!(failed[0].1.to_string().contains("not a recording"), "{failed:?}");
}
