//! What a lease costs the CPU over its whole life, with one tensor a message.
#![allow(unsafe_code)] // a page of words that streams write

use std::time::{Duration, Instant};

use millpond_ipc::client::{Channel, Outgoing};
use millpond_ipc::wire::Role;
use millpond_tests::sample::Sample;
use rustix::mm::{mmap_anonymous, MapFlags, ProtFlags};
use rustix::time::{clock_gettime, ClockId};
use serde_json::{json, Map};

use super::bench::{at, text, Bench, Party, KIB, PATIENCE};
use super::Figures;

/// Messages of a batch: the clock of a whole process is read once for so many.
const BATCH: u32 = 1000;
/// What a whole life may cost beside its two stream operations, in nanoseconds.
const AT_MOST: u64 = 2_000;

/// CPU time of this whole process (both clients, and the threads that tend them) for one message that carries one tensor of 4 KiB:
/// sent, received, opened on a stream, let go of, its DONE queued, its lease ended; less the same message with a tensor of no bytes, which
/// is described as any other but takes no lease, and on a GPU with the two stream operations of a lease: a `cuStreamWriteValue64` by
/// itself on the sender's stream before it leaves, and one on the receiver's when it has come. READY is reached before the tensor is
/// opened, so no stream waits; this thread's time until then is not counted, nor is what it spends waiting for the last lease of a
/// batch to end. To ask who the stream is (twice) counts as the lease's, and is shown, and so is a message without any tensor. The host
/// device has no stream operations here: the CPU wrote the bytes. p50 over pairs of batches of 1,000 messages, one behind the other: a
/// machine that changes its speed changes both.
pub(crate) fn life(bench: &Bench) -> Figures {
    let owner = bench.owner(&[])?;
    let (maker, taker) = (owner.attach("parent", Role::Parent)?, owner.attach("taker", Role::Worker)?);
    let (out, back) = std::thread::scope(|scope| {
        let back = scope.spawn(|| taker.client.connect("parent", PATIENCE));
        let out = maker.client.accept(PATIENCE).map_err(text)?;
        Ok::<_, String>((out, back.join().map_err(|_| "a thread died".to_owned())?.map_err(text)?))
    })?;
    let addr = maker.heap.allocate(4 * KIB, maker.stream).map_err(text)?;
    let (tensor, empty) = (maker.outgoing(addr, 4 * KIB), maker.outgoing(addr, 0));
    let [mut life, mut with, mut without, mut bare, mut asked] = std::array::from_fn(|_| Sample::default());
    let batches = bench.pick(6, 30);
    let words = if bench.gpu() { Some((page(&maker)?, page(&taker)?)) } else { None };
    // In turn, so that a slower minute of the machine is all of theirs.
    for batch in 0..batches + 2 {
        at(format_args!("batch {batch}"));
        let leased = messages(&maker, &taker, (&out, &back), &[tensor], None)?;
        let same = messages(&maker, &taker, (&out, &back), &[empty], words)?;
        let nothing = messages(&maker, &taker, (&out, &back), &[], None)?;
        let questions = two_questions(&maker, &taker)?;
        if batch >= 2 {
            life.add(leased.saturating_sub(same));
            with.add(leased);
            without.add(same);
            bare.add(nothing);
            asked.add(questions);
        }
    }
    let life = life.quantile(0.5);
    let mut figures = Map::new();
    figures.insert("life_ns".to_owned(), json!({ "p50": life, "at_most": AT_MOST, "met": life <= AT_MOST }));
    figures.insert("message_with_a_tensor_ns".to_owned(), with.json(1.0));
    figures.insert("message_with_an_empty_one_and_the_stream_operations_ns".to_owned(), without.json(1.0));
    figures.insert("message_without_ns".to_owned(), bare.json(1.0));
    if bench.gpu() {
        figures.insert("two_questions_ns".to_owned(), asked.json(1.0));
    }
    Ok(figures.into())
}

/// CPU time of one message of a batch; with `words`, a stream of each side writes one where a tensor's would.
fn messages(
    maker: &Party,
    taker: &Party,
    (out, back): (&Channel, &Channel),
    tensors: &[Outgoing],
    words: Option<(u64, u64)>,
) -> Result<Duration, String> {
    let start = now(ClockId::ProcessCPUTime);
    let mut apart = Duration::ZERO;
    for value in 0..u64::from(BATCH) {
        if let Some((ready, _)) = words {
            maker.driver.write_value(maker.stream, ready, value).map_err(text)?;
        }
        maker.send(out, "0", tensors)?;
        apart += catch_up(maker)?;
        let message = taker.receive(back, PATIENCE)?;
        if let Some((_, done)) = words {
            taker.driver.write_value(taker.stream, done, value).map_err(text)?;
        }
        for tensor in message.tensors.iter().filter(|tensor| tensor.import != 0) {
            taker.open(tensor)?;
            taker.client.release(tensor.import).map_err(text)?;
        }
    }
    let (before, until) = (now(ClockId::ThreadCPUTime), Instant::now() + PATIENCE);
    while maker.client.leases() > 0 {
        if Instant::now() > until {
            return Err("a lease did not end".to_owned());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    apart += now(ClockId::ThreadCPUTime).saturating_sub(before);
    Ok(now(ClockId::ProcessCPUTime).saturating_sub(start).saturating_sub(apart) / BATCH)
}

/// A word of this process's that a stream may write.
fn page(party: &Party) -> Result<u64, String> {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let memory = unsafe { mmap_anonymous(std::ptr::null_mut(), 4096, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
    // SAFETY: it is never unmapped.
    unsafe { party.driver.host_register(memory.map_err(text)?.cast(), 4096) }.map_err(text)
}

/// What this thread spends until a GPU has done what was queued.
fn catch_up(party: &Party) -> Result<Duration, String> {
    let before = now(ClockId::ThreadCPUTime);
    if party.gpu {
        party.synchronize()?;
    }
    Ok(now(ClockId::ThreadCPUTime).saturating_sub(before))
}

/// CPU time of asking who each of the two streams is.
fn two_questions(maker: &Party, taker: &Party) -> Result<Duration, String> {
    let start = now(ClockId::ProcessCPUTime);
    for _ in 0..BATCH {
        for party in [maker, taker] {
            party.driver.stream_identity(party.stream).map_err(text)?;
        }
    }
    Ok(now(ClockId::ProcessCPUTime).saturating_sub(start) / BATCH)
}

fn now(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or_default(), u32::try_from(time.tv_nsec).unwrap_or_default())
}
