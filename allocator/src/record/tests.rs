#![allow(clippy::unwrap_used)]

use super::ring::Ring;
use super::*;

fn event(addr: u64) -> Event {
    Event {
        time: addr,
        thread: 7,
        addr,
        bytes: 512,
        stream: 3,
        value: 9,
        stack: 2,
        peer: 5,
        flags: Event::PENDING,
        ..Event::new(Kind::Free, -1)
    }
}

#[test]
fn the_newest_events_are_read_back_in_order() {
    let mut ring = Ring::new(4, 4096, None, 10).unwrap();
    ring.note("{\"a\":1}");
    (1..=6).for_each(|addr| ring.push(&event(addr)));
    let read = Recording::of(&ring.image()).unwrap();
    assert_eq!(read.events, [3, 4, 5, 6].map(event));
    assert_eq!((read.dropped, read.text.as_str(), read.ended, read.began), (2, "{\"a\":1}\n", None, 10));
    assert_eq!(read.pid, std::process::id());
}

#[test]
fn a_file_holds_them_without_its_writer_and_a_half_written_one_is_left_out() {
    let folder = std::env::temp_dir().join(format!("millpond-record-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("a.millpond");
    let mut ring = Ring::new(8, 100, Some(&path), 1).unwrap();
    assert!(Ring::new(8, 100, Some(&path), 1).is_err(), "an old file is not written over");
    (1..=3).for_each(|addr| ring.push(&event(addr)));
    assert_eq!(Recording::read(&path).unwrap().events.len(), 3, "while it is written");
    drop(ring);
    let mut bytes = std::fs::read(&path).unwrap();
    // The writer was killed while it wrote the second.
    bytes[4096 + 4096 + 64..][..8].fill(0);
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(Recording::read(&path).unwrap().events, [event(1), event(3)]);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn what_does_not_fit_and_what_is_no_recording() {
    let mut ring = Ring::new(4, 4096, None, 1).unwrap();
    ring.note(&"x".repeat(4096));
    ring.note("y");
    let read = Recording::of(&ring.image()).unwrap();
    assert_eq!((read.text.as_str(), read.text_lost), ("y\n", 4096));
    let image = ring.image();
    for cut in [0, 8, 100, 4100] {
        assert!(Recording::of(&image[..cut]).is_err(), "{cut}");
    }
    // Nonsense figures end in an error or in nothing, never in a crash.
    for (word, value) in [(1, 0), (1, u64::MAX), (2, u64::MAX), (2, 4097), (3, 1 << 40), (4, u64::MAX)] {
        let mut bad = image.clone();
        bad[word * 8..][..8].copy_from_slice(&u64::to_ne_bytes(value));
        assert!(Recording::of(&bad).is_ok_and(|read| read.events.is_empty()) || Recording::of(&bad).is_err());
    }
}

#[test]
fn two_processes_on_one_clock() {
    let before = now();
    assert!(now() >= before && before > 0);
}
