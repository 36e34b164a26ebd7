//! What a lease costs the CPU over its whole life: exported, taken up, opened, let go of and ended, between two clients of this
//! process. Measured over messages of many tensors, less a message without any: what is left is the tensors' own.

use std::time::{Duration, Instant};

use millpond_ipc::client::{Channel, Outgoing};
use millpond_ipc::wire::Role;
use serde_json::json;

use super::party::{text, Owner, Party, KIB, PATIENCE};
use super::sample::Sample;
use super::{Figures, Plan};

/// Tensors of a message, each a block of its own.
const MANY: u32 = 64;
/// What a whole life may cost beside its two stream operations, in nanoseconds.
const AT_MOST: u64 = 2_000;
const STEPS: [&str; 5] =
    ["send: pin, hold, describe", "receive: take the hold up", "open: where it is mapped", "release", "end: every hold done, unpin"];

pub(super) fn measure(plan: &Plan<'_>) -> Figures {
    let owner = Owner::start(plan, &[])?;
    let (maker, taker) = (owner.attach("parent", Role::Parent)?, owner.attach("taker", Role::Worker)?);
    let (out, back) = std::thread::scope(|scope| {
        let back = scope.spawn(|| taker.client.connect("parent", PATIENCE));
        let out = maker.client.accept(PATIENCE).map_err(text);
        Ok::<_, String>((out?, back.join().map_err(|_| "a thread died".to_owned())?.map_err(text)?))
    })?;
    let mut tensors = Vec::new();
    for _ in 0..MANY {
        tensors.push(maker.outgoing(maker.heap.allocate(4 * KIB, maker.stream).map_err(text)?, 4 * KIB));
    }
    let count = plan.pick(500, 5000);
    let full = lives(&maker, &taker, (&out, &back), &tensors, count)?;
    let bare = lives(&maker, &taker, (&out, &back), &[], count)?;
    let mut figures: Vec<_> = STEPS.iter().zip(&full.steps).map(|(name, sample)| ((*name).to_owned(), sample.json())).collect();
    let own = full.whole.median().saturating_sub(bare.whole.median() / u64::from(MANY));
    figures.push(("a whole life, the message's share in it".to_owned(), full.whole.json()));
    figures.push(("a message without a tensor, the same way".to_owned(), bare.whole.json()));
    figures.push(("a whole life, less the message".to_owned(), json!({ "ns": own, "at_most": AT_MOST, "met": own <= AT_MOST })));
    Ok(figures)
}

/// Times for one tensor each; of a message without any, for the message.
struct Lives {
    steps: Vec<Sample>,
    whole: Sample,
}

fn lives(maker: &Party, taker: &Party, (out, back): (&Channel, &Channel), tensors: &[Outgoing], count: u32) -> Result<Lives, String> {
    let mut found = Lives { steps: (0..STEPS.len()).map(|_| Sample::new()).collect::<Result<_, _>>()?, whole: Sample::new()? };
    let share = u32::try_from(tensors.len()).unwrap_or(1).max(1);
    for turn in 0..count / 10 + count {
        let mut at = vec![Instant::now()];
        maker.send(out, tensors)?;
        at.push(Instant::now());
        let message = taker.receive(back, PATIENCE)?;
        at.push(Instant::now());
        for tensor in &message.tensors {
            taker.open(tensor)?;
        }
        at.push(Instant::now());
        for tensor in &message.tensors {
            taker.client.release(tensor.import).map_err(text)?;
        }
        at.push(Instant::now());
        let until = Instant::now() + PATIENCE;
        while maker.client.leases() > 0 {
            if Instant::now() > until {
                return Err("a lease did not end".to_owned());
            }
            // On a GPU its DONE follows the stream.
            std::thread::sleep(Duration::from_micros(50));
        }
        at.push(Instant::now());
        if turn < count / 10 {
            continue;
        }
        for (sample, times) in found.steps.iter_mut().zip(at.windows(2)) {
            if let [from, to] = times {
                sample.add((*to - *from) / share);
            }
        }
        if let [from, .., to] = at.as_slice() {
            found.whole.add((*to - *from) / share);
        }
    }
    Ok(found)
}
