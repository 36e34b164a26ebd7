//! Streams: order, identity, ends.

use std::collections::HashSet;
use std::sync::Arc;

use super::lab::{ok, want, Lab};
use super::{Case, Outcome};
use crate::driver::{Capture, Driver, Stream, StreamId};

pub(super) const CASES: &[Case] = &[
    Case::new("attaching a context twice is fine", attach_twice),
    Case::new("a stream runs its work in order", in_order),
    Case::new("an idle stream is done", idle),
    Case::new("a stream made again has another identity", identities),
    Case::new("the legacy stream has identity 0, and works", legacy),
    Case::new("a destroyed stream's queued work still runs", destroyed_runs),
    Case::new("a stream is not being captured", not_captured),
    Case::new("a copy of nothing is fine", empty_copy),
    Case::new("bytes go to the device and back", host_round_trip),
];

fn attach_twice(driver: &Arc<dyn Driver>) -> Outcome {
    ok(driver.attach_context())?;
    ok(driver.attach_context())
}

fn in_order(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = 2 * lab.unit();
    let (one, two) = (lab.chunk(bytes)?, lab.chunk(bytes)?);
    let stream = lab.stream()?;
    for round in 0..20 {
        ok(driver.fill(one, round, bytes, stream))?;
        ok(driver.copy(two, one, bytes, stream))?;
    }
    ok(driver.fill(one, 0xff, bytes, stream))?;
    lab.drain(stream)?;
    lab.holds(two, 19, bytes)?;
    lab.holds(one, 0xff, bytes)
}

fn idle(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let stream = lab.stream()?;
    want(ok(driver.stream_query(stream))?, || "a new stream has work".to_owned())?;
    ok(driver.stream_synchronize(stream))?;
    let addr = lab.chunk(lab.unit())?;
    ok(driver.fill(addr, 1, lab.unit(), stream))?;
    ok(driver.stream_synchronize(stream))?;
    want(ok(driver.stream_query(stream))?, || "work is left after a synchronisation".to_owned())
}

fn identities(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let mut seen = HashSet::from([StreamId(0)]);
    for _ in 0..4 {
        let (one, two) = (lab.stream()?, lab.stream()?);
        for stream in [one, two] {
            let id = ok(driver.stream_id(stream))?;
            want(id == ok(driver.stream_id(stream))?, || "an identity changed".to_owned())?;
            want(seen.insert(id), || format!("{id:?} twice"))?;
        }
        lab.destroy_stream(one)?;
        lab.destroy_stream(two)?;
    }
    Ok(())
}

fn legacy(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    for stream in [Stream::LEGACY, Stream(1)] {
        let id = ok(driver.stream_id(stream))?;
        want(id == StreamId(0), || format!("{stream:?} is {id:?}"))?;
    }
    let addr = lab.chunk(lab.unit())?;
    ok(driver.fill(addr, 0x21, lab.unit(), Stream::LEGACY))?;
    lab.drain(Stream(1))?;
    lab.holds(addr, 0x21, lab.unit())
}

fn destroyed_runs(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = lab.unit();
    let addr = lab.chunk(bytes)?;
    let words = lab.words()?;
    let (stream, event) = (lab.stream()?, lab.event()?);
    ok(driver.wait_value(stream, words.at(0), 1))?;
    ok(driver.fill(addr, 0x43, bytes, stream))?;
    ok(driver.write_value(stream, words.at(1), 1))?;
    ok(driver.event_record(event, stream))?;
    lab.destroy_stream(stream)?;
    want(words.load(1) == 0 && !ok(driver.event_query(event))?, || "the destroy let the work run too early".to_owned())?;
    words.store(0, 1);
    words.await_cpu(1, 1)?;
    lab.holds(addr, 0x43, bytes)
}

fn not_captured(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let capture = ok(driver.stream_capture(lab.stream()?))?;
    want(capture == Capture::None, || format!("{capture:?}"))
}

fn empty_copy(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (addr, stream) = (lab.chunk(lab.unit())?, lab.stream()?);
    ok(driver.copy(addr, addr, 0, stream))?;
    lab.drain(stream)
}

fn host_round_trip(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = 3 * lab.unit();
    let (addr, stream) = (lab.chunk(bytes)?, lab.stream()?);
    let sent: Vec<u8> = (0..bytes).map(|n| (n * 31 + n / 4096) as u8).collect();
    ok(driver.copy(addr, sent.as_ptr() as u64, bytes, stream))?;
    ok(driver.stream_synchronize(stream))?;
    want(lab.read(addr, bytes)? == sent, || "other bytes came back".to_owned())?;
    want(lab.read(addr + 7777, 100)? == sent.get(7777..7877).unwrap_or_default(), || "other bytes at an odd offset".to_owned())
}
