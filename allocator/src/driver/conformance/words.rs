//! Words in host memory that streams write and wait on.

use std::sync::Arc;

use super::lab::{ok, refused, want, Lab};
use super::{Case, Outcome};
use crate::driver::{CuResult, Driver};

pub(super) const CASES: &[Case] = &[
    Case::new("a written word is seen by the CPU after earlier work", written),
    Case::new("a written word has all its bits", whole_words),
    Case::new("a stream waits until the CPU stores", released_by_cpu),
    Case::new("a stream waits until another stream writes", released_by_stream),
    Case::new("a wait that is met does not block", met),
    Case::new("a wait is for at least the value, cyclically", cyclic),
    Case::new("a waiting stream holds up no stream of another hardware queue", others_run),
    Case::new("a word must be aligned and registered", bad_words),
    Case::new("memory is registered once", registered_once),
    Case::new("memory that is not registered is not unregistered", not_registered),
];

fn written(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = 8 * lab.unit();
    let (addr, words, stream) = (lab.chunk(bytes)?, lab.words()?, lab.stream()?);
    for value in 1..=5 {
        ok(driver.fill(addr, value, bytes, stream))?;
        ok(driver.write_value(stream, words.at(0), value.into()))?;
        words.await_cpu(0, value.into())?;
        lab.holds(addr, value, bytes)?;
    }
    Ok(())
}

fn whole_words(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (words, stream) = (lab.words()?, lab.stream()?);
    ok(driver.write_value(stream, words.at(1), 0xfedc_ba98_7654_3210))?;
    lab.drain(stream)?;
    want(words.load(1) == 0xfedc_ba98_7654_3210, || format!("{:#x}", words.load(1)))?;
    want(words.load(0) == 0 && words.load(2) == 0, || "a neighbour was written".to_owned())
}

fn released_by_cpu(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (words, stream) = (lab.words()?, lab.stream()?);
    ok(driver.wait_value(stream, words.at(0), 3))?;
    ok(driver.write_value(stream, words.at(1), 1))?;
    for value in 0..3 {
        words.store(0, value);
        want(!ok(driver.stream_query(stream))? && words.load(1) == 0, || format!("released by {value}, not 3"))?;
    }
    words.store(0, 3);
    words.await_cpu(1, 1)
}

fn released_by_stream(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (words, waiter, writer) = (lab.words()?, lab.stream()?, lab.stream()?);
    ok(driver.wait_value(waiter, words.at(0), 7))?;
    ok(driver.write_value(waiter, words.at(1), 1))?;
    ok(driver.write_value(writer, words.at(0), 7))?;
    words.await_cpu(1, 1)
}

fn met(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (words, stream) = (lab.words()?, lab.stream()?);
    words.store(0, 9);
    ok(driver.wait_value(stream, words.at(0), 9))?;
    ok(driver.wait_value(stream, words.at(0), 2))?;
    lab.drain(stream)
}

fn cyclic(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (words, stream) = (lab.words()?, lab.stream()?);
    for (word, value) in [(1 << 62, 5), (2, u64::MAX - 1), (5, 5)] {
        words.store(0, word);
        ok(driver.wait_value(stream, words.at(0), value))?;
        lab.drain(stream)?;
    }
    // Half the circle ahead is behind.
    words.store(0, u64::MAX);
    ok(driver.wait_value(stream, words.at(0), 2))?;
    want(!ok(driver.stream_query(stream))?, || format!("{} was taken for past 2", u64::MAX))?;
    words.store(0, 2);
    lab.drain(stream)
}

fn others_run(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (addr, words) = (lab.chunk(lab.unit())?, lab.words()?);
    // Made one after the other: in two hardware queues, where there are two.
    let (waiter, other) = (lab.stream()?, lab.stream()?);
    ok(driver.wait_value(waiter, words.at(0), 1))?;
    ok(driver.fill(addr, 1, lab.unit(), other))?;
    ok(driver.write_value(other, words.at(1), 1))?;
    words.await_cpu(1, 1)?;
    want(!ok(driver.stream_query(waiter))?, || "the wait was released by nothing".to_owned())
}

fn bad_words(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let (words, stream) = (lab.words()?, lab.stream()?);
    for offset in [1, 2, 4] {
        let word = words.at(0) + offset;
        refused(driver.write_value(stream, word, 1), CuResult::INVALID_VALUE, &format!("a write {offset} past a word"))?;
        refused(driver.wait_value(stream, word, 1), CuResult::INVALID_VALUE, &format!("a wait {offset} past a word"))?;
    }
    let local = 0_u64;
    let word = std::ptr::from_ref(&local) as u64;
    refused(driver.write_value(stream, word, 1), CuResult::INVALID_VALUE, "a write to memory that is not registered")?;
    refused(driver.wait_value(stream, word, 1), CuResult::INVALID_VALUE, "a wait on memory that is not registered")
}

fn registered_once(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let words = lab.words()?;
    refused(words.register_again(&**driver), CuResult::HOST_MEMORY_ALREADY_REGISTERED, "registering twice")?;
    let found = ok(driver.host_address(words.as_ptr()))?;
    want(found == words.at(0), || format!("registered memory is at {found:#x}, not at {:#x}", words.at(0)))?;
    let mut other = vec![0_u8; 2 * rustix::param::page_size()];
    refused(driver.host_address(other.as_mut_ptr()), CuResult::INVALID_VALUE, "the address of memory that is not registered")
}

fn not_registered(driver: &Arc<dyn Driver>) -> Outcome {
    let mut page = vec![0_u8; 2 * rustix::param::page_size()];
    refused(driver.host_unregister(page.as_mut_ptr()), CuResult::HOST_MEMORY_NOT_REGISTERED, "unregistering ordinary memory")
}
