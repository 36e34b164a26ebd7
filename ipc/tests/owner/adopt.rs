//! Adoption as an owner sees it: only a hold that the asking client has can be adopted.

use millpond_ipc::control::Claim;
use millpond_ipc::wire::{Answer, Reason, Request};

use crate::raw::*;

#[test]
fn a_hold_that_is_not_the_askers_is_refused_by_name() {
    let served = Served::start(config());
    let (mut maker, mut taker) = (served.attach("maker"), served.attach("taker"));
    maker.grow(UNIT);
    let (from, to) = (maker.slot(), taker.slot());
    maker.control.marks(from).unwrap().reach(2);
    let make = |place: u32, receiver: u32, window: u32, offset: u64| {
        let hold = maker.control.hold(from, place).unwrap();
        let claim = Claim { lease: 9, window, offset, bytes: 64 };
        let generation = hold.make(from as u8, receiver as u8, claim).unwrap();
        assert!(hold.take(generation, receiver as u8));
        generation
    };
    let good = make(0, to, maker.window(), 0);
    let another = make(1, to, taker.window(), 0);
    let nowhere = make(2, to, maker.window(), 64 * UNIT);
    let adopt = |producer, index, generation| Request::Adopt { producer, index, generation };
    let wrong = [
        adopt(from, 0, good.wrapping_add(1)),
        adopt(from, 1, another),
        adopt(from, 2, nowhere),
        adopt(from, u32::MAX, good),
        adopt(63, 0, good),
        adopt(u32::MAX, 0, good),
    ];
    for call in wrong {
        let (answer, _) = taker.call(call.clone());
        assert!(matches!(answer, Answer::Refused { reason: Reason::Stale, .. }), "{call:?}: {answer:?}");
    }
    let (answer, _) = maker.call(adopt(from, 0, good));
    assert!(matches!(answer, Answer::Refused { reason: Reason::InvalidArgument, .. }), "{answer:?}");
    for _ in 0..2 {
        assert_eq!(taker.call(adopt(from, 0, good)).0, Answer::Done);
    }
}
