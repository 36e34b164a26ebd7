//! The framer alone: whatever comes it gives whole frames or an error, and good frames as they were sent.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use millpond_ipc::wire::{FrameReader, FRAME_LIMIT, MAX_FDS};
use serde_json::json;

use crate::material::Dice;

#[test]
fn the_framer_gives_whole_frames_or_an_error() {
    crate::campaign("framer", 400, |seed| {
        let mut dice = Dice(seed);
        let corpus = [json!({"call_id": 1, "call": {"kind": "ledger"}}), json!(null), json!("x".repeat(dice.below(70_000)))];
        let good = dice.percent(50);
        let mut bodies = Vec::new();
        let mut bytes = Vec::new();
        for _ in 0..1 + dice.below(6) {
            if good {
                let body = loop {
                    let body = dice.body(&corpus);
                    if !body.is_empty() {
                        break body;
                    }
                };
                bytes.extend_from_slice(&(body.len() as u32).to_be_bytes());
                bytes.extend_from_slice(&body);
                bodies.push(body);
            } else {
                bytes.extend(dice.frame(&corpus));
            }
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || dice.write(theirs.as_fd(), &bytes));
        let mut reader = if seed % 2 == 0 { FrameReader::default() } else { FrameReader::exact() };
        let mut found = Vec::new();
        let end = loop {
            match reader.read_frame(ours.as_fd(), Some(std::time::Duration::from_secs(10)), false) {
                Ok(frame) => {
                    assert!(!frame.is_empty() && frame.len() <= FRAME_LIMIT);
                    found.push(frame);
                    let _ = reader.take_fds((seed % 3) as usize);
                }
                Err(error) => break error,
            }
        };
        drop(ours);
        let all = writer.join().unwrap();
        // Descriptors that no frame speaks for, or too many, are an error of their own; without it, all is as it was sent.
        let descriptors = matches!(end, millpond_ipc::wire::FrameError::Descriptors { .. });
        assert!(!matches!(end, millpond_ipc::wire::FrameError::Timeout), "{end}");
        if good && all && !descriptors {
            assert_eq!(found, bodies, "{end}");
        }
        assert!(reader.take_fds(2 * MAX_FDS + 254).is_err(), "no more descriptors are kept than two frames may have");
    });
}
