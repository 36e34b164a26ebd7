//! What kills a context, and what a dead one answers.

use std::sync::Arc;

use super::lab::{ok, refused, until, want, Lab};
use super::{Case, Outcome};
use crate::driver::{CuResult, Driver, Stream};

pub(super) const CASES: &[Case] = &[
    Case::fatal("an unmap does not wait, and work that comes to a fill there dies", unmap_under_fill),
    Case::fatal("an unmap does not wait, and work that comes to a copy from there dies", unmap_under_copy),
];

fn unmap_under_fill(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = 2 * lab.unit();
    let addr = lab.chunk(bytes)?;
    die(&lab, |stream| ok(driver.fill(addr, 1, bytes, stream)), || lab.unmap(addr, bytes))
}

fn unmap_under_copy(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = 2 * lab.unit();
    let (from, to) = (lab.chunk(bytes)?, lab.chunk(bytes)?);
    die(&lab, |stream| ok(driver.copy(to, from, bytes, stream)), || lab.unmap(from, bytes))
}

/// Queues work behind a word, unmaps under it, lets it run, and wants the context dead.
fn die(lab: &Lab, work: impl FnOnce(Stream) -> Outcome, unmap: impl FnOnce() -> Outcome) -> Outcome {
    let driver = &lab.driver;
    let (words, stream, other, event) = (lab.words()?, lab.stream()?, lab.stream()?, lab.event()?);
    ok(driver.wait_value(stream, words.at(0), 1))?;
    work(stream)?;
    ok(driver.event_record(event, stream))?;
    unmap()?;
    want(!ok(driver.stream_query(stream))?, || "the unmap waited for the work, or the work for nothing".to_owned())?;
    words.store(0, 1);
    until("the work did not die", || match driver.stream_query(stream) {
        Ok(false) => Ok(false),
        Ok(true) => Err("the work ran on memory that was unmapped".to_owned()),
        Err(error) if error.result() == Some(CuResult::ILLEGAL_ADDRESS) => Ok(true),
        Err(error) => Err(format!("the work died of {error}")),
    })?;
    let dead = CuResult::ILLEGAL_ADDRESS;
    refused(driver.stream_query(other), dead, "a query of another stream")?;
    refused(driver.stream_synchronize(other), dead, "a synchronisation with another stream")?;
    refused(driver.event_query(event), dead, "a query of an event")?;
    refused(driver.event_record(event, other), dead, "an event")?;
    refused(driver.write_value(other, words.at(1), 1), dead, "a write")?;
    want(words.load(1) == 0, || "a dead context wrote".to_owned())
}
