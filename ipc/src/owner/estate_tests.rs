//! The books hold whatever is done to them.

use std::collections::BTreeMap;

use millpond_allocator::driver::host::{FailPlan, HostCall, HostConfig, HostPlatform};
use millpond_allocator::driver::{CuResult, DeviceId, Platform};
use proptest::prelude::*;

use super::*;

const UNIT: u64 = 2 << 20;
const KEEP: Duration = Duration::from_secs(60);

fn estate(limit: u64, window_bytes: u64, fail: Option<FailPlan>) -> Estate {
    let platform = HostPlatform::new(HostConfig { total_bytes: Some(1 << 30), fail, ..HostConfig::default() });
    let driver = platform.open(DeviceId::host(0)).unwrap();
    let info = driver.device().clone();
    Estate::new(vec![Served { driver, info, limit, chunk_bytes: 2 * UNIT, window_bytes }], KEEP)
}

/// What must be true at every moment.
fn check(estate: &Estate) {
    let device = &estate.devices[0];
    let reserved: u64 = device.shares.iter().map(|share| share.reserved).sum();
    let retired: u64 = device.shares.iter().map(|share| share.retired).sum();
    assert_eq!(retired, device.row.retired);
    assert_eq!(reserved + device.row.retired + device.row.orphaned, device.row.reserved);
    assert!(device.row.reserved <= device.row.limit && device.row.reserved <= device.row.peak);
    let all: u64 = estate.chunks.values().map(|holding| holding.chunk.bytes).sum();
    assert_eq!(all, device.row.reserved);
    assert!(all + estate.spares.bytes_on(0) <= device.row.limit, "spares beyond the limit");
    let told: u64 = device.shares.iter().map(|share| share.spare).sum();
    assert_eq!(told, estate.spares.bytes_on(0), "what is at hand is said");
    for (id, window) in &estate.windows {
        let mut end = 0;
        for (offset, epoch) in &window.taken {
            let holding = &estate.chunks[epoch];
            assert_eq!((holding.window, holding.chunk.offset), (*id, *offset));
            assert!(*offset >= end, "two chunks at {offset}");
            end = offset + holding.chunk.bytes;
        }
        assert!(end <= device.served.window_bytes);
    }
    for (slot, share) in (0..).zip(&device.shares) {
        let its = estate.chunks.values().filter(|h| h.account == slot && matches!(h.fate, Fate::Held | Fate::Adopted));
        let adopted = estate.inherited(slot).iter().map(|epoch| estate.chunks[epoch].chunk.bytes).sum::<u64>();
        assert_eq!((its.count() as u64, adopted), (share.chunks, share.adopted));
    }
    let strange = |h: &&Holding| h.account != h.slot && h.fate != Fate::Adopted;
    assert_eq!(estate.chunks.values().filter(strange).count(), 0, "only what was adopted is under another's account");
}

#[test]
fn a_driver_that_fails_half_way_leaves_nothing() {
    let fail = FailPlan::new().fail_nth(HostCall::Create, 3, CuResult::OUT_OF_MEMORY).fail_nth(HostCall::Export, 4, CuResult::UNKNOWN);
    let mut estate = estate(64 * UNIT, 64 * UNIT, Some(fail));
    let window = estate.open_windows(0, None)[0];
    for _ in 0..2 {
        assert!(matches!(estate.grow(0, window, 0, 8 * UNIT), Err(Denial::Driver(_))));
        assert_eq!(estate.devices[0].row, DeviceRow { growths: 0, ..estate.devices[0].row });
        assert_eq!((estate.devices[0].row.reserved, estate.chunks.len()), (0, 0));
        check(&estate);
    }
    let epochs = estate.grow(0, window, 0, 8 * UNIT).unwrap();
    assert_eq!(estate.holding(epochs[0]).unwrap().chunk.offset, 0);
    check(&estate);
}

/// The driver's calls for memory fail from the second on, eight of them.
fn no_more() -> Option<FailPlan> {
    let plan = FailPlan::new();
    Some((2..10).fold(plan, |plan, n| plan.fail_nth(HostCall::Create, n, CuResult::OUT_OF_MEMORY)))
}

#[test]
fn what_a_client_gave_back_is_its_own_again_without_the_driver() {
    let mut estate = estate(64 * UNIT, 64 * UNIT, no_more());
    let window = estate.open_windows(0, None)[0];
    for _ in 0..3 {
        let epochs = estate.grow(0, window, 0, 2 * UNIT).unwrap();
        assert_eq!(estate.give_back(epochs[0]), None);
        assert_eq!((estate.devices[0].row.reserved, estate.spares.bytes_on(0), estate.share(0, 0).spare), (0, 2 * UNIT, 2 * UNIT));
        check(&estate);
    }
    assert!(matches!(estate.grow(0, window, 0, UNIT), Err(Denial::Driver(_))), "of another size there is none");
    assert_eq!((estate.spares.bytes_on(0), estate.share(0, 0).spare), (0, 0), "and it was given up where the driver had no more");
}

#[test]
fn a_spare_is_for_no_other_client() {
    let mut estate = estate(64 * UNIT, 64 * UNIT, no_more());
    let windows = [0, 1].map(|slot| estate.open_windows(slot, None)[0]);
    let epochs = estate.grow(0, windows[0], 0, 2 * UNIT).unwrap();
    estate.give_back(epochs[0]);
    assert!(matches!(estate.grow(1, windows[1], 0, 2 * UNIT), Err(Denial::Driver(_))));
}

#[test]
fn what_another_client_may_map_is_no_spare() {
    let mut estate = estate(64 * UNIT, 64 * UNIT, None);
    let window = estate.open_windows(0, None)[0];
    let epochs = estate.grow(0, window, 0, 4 * UNIT).unwrap();
    estate.note_importer(epochs[0], 1);
    assert!(!estate.drop_importer(epochs[0], 1));
    assert_eq!(estate.give_back(epochs[0]), None);
    assert_eq!(estate.spares.bytes_on(0), 0, "it was mapped by another once");
    estate.note_importer(epochs[1], 1);
    assert_eq!(estate.give_back(epochs[1]), Some(Fate::Retired));
    assert!(estate.drop_importer(epochs[1], 1));
    assert_eq!(estate.spares.bytes_on(0), 0, "it was retired");
}

#[test]
fn spares_make_room_for_others_and_go_with_their_client_and_with_time() {
    let mut estate = estate(32 * UNIT, 64 * UNIT, None);
    let windows = [0, 1].map(|slot| estate.open_windows(slot, None)[0]);
    let spare = |estate: &mut Estate| {
        let epochs = estate.grow(0, windows[0], 0, 4 * UNIT).unwrap();
        epochs.iter().for_each(|epoch| _ = estate.give_back(*epoch));
        assert_eq!(estate.spares.bytes_on(0), 4 * UNIT, "an eighth of the limit");
    };
    spare(&mut estate);
    let epochs = estate.grow(1, windows[1], 0, 30 * UNIT).unwrap();
    assert_eq!(estate.spares.bytes_on(0), 2 * UNIT, "as many were given up as the limit asked for");
    check(&estate);
    epochs.iter().for_each(|epoch| _ = estate.give_back(*epoch));
    assert_eq!(estate.spares.bytes_on(0), 4 * UNIT);
    assert!(estate.close_windows(1));
    assert_eq!(estate.spares.bytes_on(0), 0, "the newest were the second client's");
    spare(&mut estate);
    let due = estate.spares_due().unwrap();
    estate.expire_spares(due - Duration::from_nanos(1));
    assert_eq!(estate.spares.bytes_on(0), 4 * UNIT);
    estate.expire_spares(due);
    assert_eq!(estate.spares.bytes_on(0), 2 * UNIT, "one at a time");
}

#[test]
fn a_range_touches_the_chunks_that_it_overlaps_and_no_others() {
    let mut estate = estate(64 * UNIT, 64 * UNIT, None);
    let window = estate.open_windows(3, None)[0];
    let epochs = estate.grow(3, window, 0, 6 * UNIT).unwrap();
    let touched = |offset, bytes| {
        let mut found = estate.overlapping(window, offset, bytes);
        found.sort_unstable();
        found
    };
    assert_eq!(touched(0, 1), epochs[..1]);
    assert_eq!(touched(2 * UNIT - 1, 1), epochs[..1]);
    assert_eq!(touched(2 * UNIT, 1), epochs[1..2]);
    assert_eq!(touched(2 * UNIT - 1, 2), epochs[..2]);
    assert_eq!(touched(0, u64::MAX), epochs);
    assert_eq!(touched(6 * UNIT, u64::MAX), [0_u64; 0]);
    assert_eq!(touched(u64::MAX, u64::MAX), [0_u64; 0]);
    // A claim of no bytes still names its place.
    assert_eq!(touched(UNIT, 0), epochs[..1]);
}

#[derive(Debug, Clone)]
enum Step {
    Grow(u32, u64),
    GiveBack(usize),
    Import(usize, u32),
    Drop(usize, u32),
    Die(u32),
    Orphan(usize),
    Inherit(usize, u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0..4_u32, 1..9_u64).prop_map(|(slot, units)| Step::Grow(slot, units)),
        any::<usize>().prop_map(Step::GiveBack),
        (any::<usize>(), 0..4_u32).prop_map(|(chunk, slot)| Step::Import(chunk, slot)),
        (any::<usize>(), 0..4_u32).prop_map(|(chunk, slot)| Step::Drop(chunk, slot)),
        (0..4_u32).prop_map(Step::Die),
        any::<usize>().prop_map(Step::Orphan),
        (any::<usize>(), 0..4_u32).prop_map(|(chunk, slot)| Step::Inherit(chunk, slot)),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_books_hold(steps in steps()) {
        let mut estate = estate(24 * UNIT, 16 * UNIT, None);
        let windows: BTreeMap<u32, u32> = (0..4).map(|slot| (slot, estate.open_windows(slot, (slot == 3).then_some(8 * UNIT))[0])).collect();
        let mut last_epoch = 0;
        for step in steps {
            let nth = |n: usize| estate.chunks.keys().nth(n % estate.chunks.len().max(1)).copied();
            match step {
                Step::Grow(slot, units) => {
                    let admitted = estate.admit(slot, 0, units * UNIT);
                    match estate.grow(slot, windows[&slot], 0, units * UNIT) {
                        Ok(epochs) => {
                            prop_assert!(admitted.is_ok());
                            prop_assert!(epochs.iter().all(|epoch| *epoch > last_epoch));
                            last_epoch = *epochs.last().unwrap();
                        }
                        Err(denial) => prop_assert!(admitted.is_err() || denial == Denial::Window),
                    }
                }
                Step::GiveBack(n) => {
                    if let Some(epoch) = nth(n).filter(|epoch| estate.holding(*epoch).unwrap().fate != Fate::Retired) {
                        estate.give_back(epoch);
                    }
                }
                Step::Import(n, slot) => {
                    if let Some(epoch) = nth(n).filter(|epoch| estate.holding(*epoch).unwrap().fate != Fate::Retired) {
                        estate.note_importer(epoch, slot);
                    }
                }
                Step::Drop(n, slot) => {
                    nth(n).map(|epoch| estate.drop_importer(epoch, slot));
                }
                Step::Die(slot) => {
                    estate.drop_importer_everywhere(slot);
                }
                Step::Inherit(n, slot) => {
                    let left = |epoch: &u64| matches!(estate.holding(*epoch).unwrap().fate, Fate::Orphaned | Fate::Adopted);
                    if let Some(epoch) = nth(n).filter(left) {
                        estate.inherit(epoch, slot);
                    }
                }
                Step::Orphan(n) => {
                    if let Some(epoch) = nth(n).filter(|epoch| estate.holding(*epoch).unwrap().fate == Fate::Held) {
                        estate.orphan(epoch);
                    }
                }
            }
            check(&estate);
        }
        // When all are gone, nothing is left.
        for slot in 0..4 {
            estate.drop_importer_everywhere(slot);
        }
        let left: Vec<u64> = estate.chunks.keys().copied().collect();
        for epoch in left {
            estate.give_back(epoch);
        }
        check(&estate);
        prop_assert_eq!(estate.devices[0].row.reserved, 0);
        prop_assert!((0..4).all(|slot| estate.close_windows(slot)));
    }
}
