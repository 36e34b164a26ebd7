//! Clients that keep no rules. Whatever they send, the owner serves the others.

use std::os::fd::AsFd;
use std::time::Duration;

use millpond_ipc::owner::Config;
use millpond_ipc::wire::{send_frame, Answer, FrameError, FromClient, Request};

use crate::raw::*;

/// Sends raw bytes as an attached client, and sees itself cut off and the witness served.
fn assert_cut(name: &str, bytes: &[u8], fds: usize) {
    let served = Served::start(config());
    let mut witness = served.attach("witness");
    let mut client = served.attach(name);
    client.grow(UNIT);
    let directory = std::fs::File::open("/").unwrap();
    let fds = vec![directory.as_fd(); fds];
    send_raw(&client.wire, bytes, &fds);
    assert!(client.wire.is_cut(), "{name}");
    until("it is in quarantine", || witness.state_of(client.slot()) == "dying");
    assert_eq!(witness.ledger().reserved, UNIT, "{name}");
    witness.grow(UNIT);
}

fn send_raw(wire: &Wire, bytes: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) {
    use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let sent = sendmsg(&wire.socket, &[std::io::IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
    assert_eq!(sent, bytes.len());
}

fn frame(body: &str) -> Vec<u8> {
    let mut frame = (body.len() as u32).to_be_bytes().to_vec();
    frame.extend_from_slice(body.as_bytes());
    frame
}

#[test]
fn lengths_that_are_none() {
    assert_cut("zero", &[0, 0, 0, 0], 0);
    assert_cut("huge", &[0xff; 8], 0);
    assert_cut("over", &(64_u32 << 20 | 1).to_be_bytes(), 0);
}

#[test]
fn a_frame_longer_than_a_client_needs() {
    let served = Served::start(config());
    let mut client = served.attach("talker");
    let body = vec![b' '; 8 << 20];
    let sent = send_frame(client.wire.socket.as_fd(), &body, &[], Some(Duration::from_millis(500)));
    assert!(matches!(sent, Err(FrameError::Torn(_) | FrameError::Timeout | FrameError::Closed(_))), "{sent:?}");
    assert!(client.wire.is_cut());
    served.attach("good").grow(UNIT);
}

#[test]
fn json_that_is_no_message() {
    assert_cut("deep", &frame(&"[".repeat(100_000)), 0);
    assert_cut("deep-object", &frame(&"{\"call\":".repeat(10_000)), 0);
    assert_cut("binary", &frame("\u{0}\u{1}"), 0);
    assert_cut("types", &frame(r#"{"call_id":"1","call":{"kind":"ledger"}}"#), 0);
    assert_cut("negative", &frame(r#"{"call_id":1,"call":{"kind":"grow","device":0,"bytes":-1}}"#), 0);
    assert_cut("beyond", &frame(r#"{"call_id":1,"call":{"kind":"grow","device":0,"bytes":18446744073709551616}}"#), 0);
    assert_cut("unknown", &frame(r#"{"call_id":1,"call":{"kind":"format_disk"}}"#), 0);
    assert_cut("second-hello", &frame(r#"{"protocol":1}"#), 0);
}

#[test]
fn unknown_fields_are_ignored() {
    let served = Served::start(config());
    let mut client = served.attach("newer");
    send_raw(&client.wire, &frame(r#"{"call_id":7,"colour":"red","call":{"kind":"ledger","depth":3}}"#), &[]);
    assert!(matches!(client.answer(7).0, Answer::Ledger { .. }));
    client.answered(12_345, 9); // an answer to nothing
    client.grow(UNIT);
}

#[test]
fn descriptors_that_nobody_asked_for() {
    assert_cut("one", &frame(r#"{"call_id":1,"call":{"kind":"ledger"}}"#), 1);
    assert_cut("many", &frame(r#"{"call_id":1,"call":{"kind":"ledger"}}"#), 253);
}

#[test]
fn frames_byte_by_byte_are_served() {
    let served = Served::start(config());
    let mut client = served.attach("slow");
    for byte in frame(r#"{"call_id":3,"call":{"kind":"grow","device":0,"bytes":2097152}}"#) {
        send_raw(&client.wire, &[byte], &[]);
    }
    assert!(matches!(client.answer(3).0, Answer::Granted { .. }));
}

#[test]
fn a_client_that_never_reads_is_cut_off() {
    let served = Served::start(Config { outbox_bytes: 64 << 10, ..config() });
    let witness = served.attach("witness");
    let client = served.attach("deaf");
    let call = serde_json::to_vec(&FromClient::Call { call_id: 1, call: Request::Ledger }).unwrap();
    until("it is cut off", || {
        // Its own sending fails when the owner no longer reads.
        let _ = send_frame(client.wire.socket.as_fd(), &call, &[], Some(Duration::ZERO));
        witness.state_of(client.slot()) == "dying"
    });
    served.attach("good").grow(UNIT);
}

#[test]
fn descriptors_for_a_client_that_never_reads_end_too() {
    let served = Served::start(Config { host_bytes: Some(1 << 30), chunk_bytes: Some(UNIT), ..config() });
    let witness = served.attach("witness");
    let mut client = served.attach("deaf");
    let chunks = client.grow(100 * UNIT);
    let call = Request::Import { window: client.window(), epochs: epochs(&chunks) };
    let call = serde_json::to_vec(&FromClient::Call { call_id: 1, call }).unwrap();
    until("it is cut off", || {
        let _ = send_frame(client.wire.socket.as_fd(), &call, &[], Some(Duration::ZERO));
        witness.state_of(client.slot()) == "dying"
    });
    served.attach("good").grow(UNIT);
}

#[test]
fn a_hello_that_never_ends() {
    let served = Served::start(config());
    let mut wire = Wire::connect(&served.socket);
    let _ = send_frame(wire.socket.as_fd(), &vec![b' '; 1 << 20], &[], Some(Duration::from_millis(500)));
    assert!(wire.is_cut());
    served.attach("good");
}
