//! Events: what they cover, and who waits for them. Slow work is staged by a word that the CPU stores.

use std::sync::Arc;

use super::lab::{ok, until, want, Lab};
use super::{Case, Outcome};
use crate::driver::{Driver, Event};

pub(super) const CASES: &[Case] = &[
    Case::new("an event never recorded is done", never_recorded),
    Case::new("an event is done after the work before it", query),
    Case::new("an event does not cover later work", later_work),
    Case::new("an event recorded again covers the later work", recorded_again),
    Case::new("a stream waits for another's event", waits),
    Case::new("a wait is for what was recorded when it was queued", waits_for_then),
    Case::new("a wait for an event never recorded is none", waits_for_nothing),
    Case::new("an event may be destroyed while something waits for it", destroyed_while_waited),
    Case::new("a context's event covers its streams", context_event),
];

fn done(lab: &Lab, event: Event) -> Outcome {
    until("the event is not done", || ok(lab.driver.event_query(event)))
}

fn pending(lab: &Lab, event: Event) -> Outcome {
    want(!ok(lab.driver.event_query(event))?, || "the event was done too early".to_owned())
}

fn never_recorded(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    want(ok(driver.event_query(lab.event()?))?, || "it is not".to_owned())
}

fn query(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (words, stream, event) = (lab.words()?, lab.stream()?, lab.event()?);
    ok(driver.wait_value(stream, words.at(0), 1))?;
    ok(driver.event_record(event, stream))?;
    pending(&lab, event)?;
    want(!ok(driver.stream_query(stream))?, || "the stream was done too early".to_owned())?;
    words.store(0, 1);
    done(&lab, event)
}

fn later_work(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (words, stream, event) = (lab.words()?, lab.stream()?, lab.event()?);
    ok(driver.write_value(stream, words.at(1), 1))?;
    ok(driver.event_record(event, stream))?;
    ok(driver.wait_value(stream, words.at(0), 1))?;
    done(&lab, event)?;
    want(words.load(1) == 1, || "the event was done before its work".to_owned())?;
    want(!ok(driver.stream_query(stream))?, || "the stream was done too early".to_owned())
}

fn recorded_again(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (words, stream, event) = (lab.words()?, lab.stream()?, lab.event()?);
    ok(driver.event_record(event, stream))?;
    done(&lab, event)?;
    ok(driver.wait_value(stream, words.at(0), 1))?;
    ok(driver.event_record(event, stream))?;
    pending(&lab, event)?;
    words.store(0, 1);
    done(&lab, event)
}

fn waits(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = lab.unit();
    let (one, two) = (lab.chunk(bytes)?, lab.chunk(bytes)?);
    let (words, event, last) = (lab.words()?, lab.event()?, lab.event()?);
    let (producer, consumer) = (lab.stream()?, lab.stream()?);
    lab.fill(one, 0, bytes)?;
    ok(driver.wait_value(producer, words.at(0), 1))?;
    ok(driver.fill(one, 0x61, bytes, producer))?;
    ok(driver.event_record(event, producer))?;
    ok(driver.stream_wait_event(consumer, event))?;
    ok(driver.copy(two, one, bytes, consumer))?;
    ok(driver.event_record(last, consumer))?;
    pending(&lab, last)?;
    words.store(0, 1);
    done(&lab, last)?;
    lab.holds(two, 0x61, bytes)
}

fn waits_for_then(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (words, event, last) = (lab.words()?, lab.event()?, lab.event()?);
    let (producer, consumer) = (lab.stream()?, lab.stream()?);
    ok(driver.write_value(producer, words.at(1), 1))?;
    ok(driver.event_record(event, producer))?;
    ok(driver.stream_wait_event(consumer, event))?;
    // From here on the event stands for work that does not finish; the consumer must not care.
    ok(driver.wait_value(producer, words.at(0), 1))?;
    ok(driver.event_record(event, producer))?;
    ok(driver.event_record(last, consumer))?;
    done(&lab, last)?;
    pending(&lab, event)
}

fn waits_for_nothing(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (stream, event) = (lab.stream()?, lab.event()?);
    ok(driver.stream_wait_event(stream, event))?;
    lab.drain(stream)
}

fn destroyed_while_waited(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (words, last) = (lab.words()?, lab.event()?);
    let (producer, consumer) = (lab.stream()?, lab.stream()?);
    let event = ok(driver.event_create())?;
    ok(driver.wait_value(producer, words.at(0), 1))?;
    ok(driver.event_record(event, producer))?;
    ok(driver.stream_wait_event(consumer, event))?;
    ok(driver.event_destroy(event))?;
    ok(driver.event_record(last, consumer))?;
    pending(&lab, last)?;
    words.store(0, 1);
    done(&lab, last)
}

fn context_event(driver: &Arc<dyn Driver>) -> Outcome {
    if !driver.device().context_events {
        return Ok(());
    }
    let lab = Lab::new(driver);
    let (words, event) = (lab.words()?, lab.event()?);
    let (one, two, destroyed) = (lab.stream()?, lab.stream()?, lab.stream()?);
    for (n, stream) in [one, two, destroyed].into_iter().enumerate() {
        ok(driver.wait_value(stream, words.at(n), 1))?;
    }
    lab.destroy_stream(destroyed)?;
    ok(driver.event_record_context(event))?;
    pending(&lab, event)?;
    for (n, stream) in [one, two].into_iter().enumerate() {
        words.store(n, 1);
        lab.drain(stream)?;
        pending(&lab, event)?;
    }
    words.store(2, 1);
    done(&lab, event)
}
