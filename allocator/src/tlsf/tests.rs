//! Each rule of the allocator, by example.

use super::bins::{bin_of, is_exact};
use super::*;

/// A region of `granules` at 0, in one domain, with mark 0.
fn one_region(granules: u32) -> (Tlsf, Domain) {
    let mut tlsf = Tlsf::new();
    let domain = tlsf.add_domain();
    tlsf.add_region(0, granules, domain, 0).unwrap();
    (tlsf, domain)
}

fn blocks(tlsf: &Tlsf, region: u32) -> Vec<(u32, u32, bool)> {
    tlsf.blocks(region).map(|block| (block.offset, block.granules, block.used)).collect()
}

#[test]
fn bins_never_fall_as_sizes_grow_and_are_a_32nd_wide() {
    let mut sizes: Vec<u32> = (1..5000).chain((0..31).flat_map(|e| [(1 << e) - 1, 1 << e, (1 << e) + 1])).collect();
    sizes.extend([u32::MAX - 1, u32::MAX]);
    sizes.retain(|&size| size > 0);
    sizes.sort_unstable();
    let mut lowest = (0, 0);
    for size in sizes {
        let bin = bin_of(size);
        assert!(bin >= lowest.0, "{size} is in bin {bin}, below {}", lowest.0);
        if bin != lowest.0 {
            lowest = (bin, size);
        }
        assert!(u64::from(size - lowest.1) * 32 <= u64::from(lowest.1), "{size} shares a bin with {}", lowest.1);
        assert!(size == lowest.1 || !is_exact(size));
    }
    assert_eq!((bin_of(1), bin_of(63), bin_of(64), bin_of(u32::MAX)), (1, 63, 64, 895));
}

#[test]
fn the_low_end_is_handed_out_and_the_rest_keeps_its_mark() {
    let mut tlsf = Tlsf::new();
    let domain = tlsf.add_domain();
    tlsf.add_region(1000, 100, domain, 7).unwrap();
    let taken = tlsf.allocate(domain, 30).unwrap();
    assert_eq!((taken.offset, taken.granules, taken.mark), (1000, 30, 7));
    let rest = Block { offset: 1030, granules: 70, used: false, domain, mark: 7 };
    assert_eq!(tlsf.blocks(1000).last(), Some(rest));
    assert_eq!((tlsf.free_granules(), tlsf.used_granules(), tlsf.largest_free()), (70, 30, 70));
    tlsf.check().unwrap();
}

#[test]
fn a_freed_block_merges_with_both_neighbours_and_takes_the_highest_mark() {
    let (mut tlsf, domain) = one_region(90);
    let three = [30; 3].map(|granules| tlsf.allocate(domain, granules).unwrap().handle);
    tlsf.free(three[0], domain, 5).unwrap();
    tlsf.free(three[2], domain, 9).unwrap();
    assert_eq!(blocks(&tlsf, 0), [(0, 30, false), (30, 30, true), (60, 30, false)]);
    tlsf.free(three[1], domain, 2).unwrap();
    assert_eq!(tlsf.region(0), Some(RegionState { granules: 90, free: Some((domain, 9)) }));
    tlsf.check().unwrap();
}

#[test]
fn free_neighbours_of_two_domains_stay_apart_until_one_domain_goes() {
    let (mut tlsf, one) = one_region(60);
    let two = tlsf.add_domain();
    let low = tlsf.allocate(one, 30).unwrap();
    tlsf.free(low.handle, two, 4).unwrap();
    assert_eq!(blocks(&tlsf, 0), [(0, 30, false), (30, 30, false)]);
    assert!(tlsf.allocate(one, 60).is_none() && tlsf.allocate(two, 60).is_none());
    assert_eq!(tlsf.region(0).unwrap().free, None);
    tlsf.remove_domain(two, one, 6).unwrap();
    assert_eq!(tlsf.region(0).unwrap().free, Some((one, 6)));
    tlsf.check().unwrap();
}

#[test]
fn a_block_never_reaches_over_the_end_of_its_region() {
    let mut tlsf = Tlsf::new();
    let domain = tlsf.add_domain();
    tlsf.add_region(0, 64, domain, 0).unwrap();
    tlsf.add_region(64, 64, domain, 0).unwrap();
    assert!(tlsf.allocate(domain, 65).is_none());
    let both = [64; 2].map(|granules| tlsf.allocate(domain, granules).unwrap().handle);
    for handle in both {
        tlsf.free(handle, domain, 0).unwrap();
    }
    assert_eq!(tlsf.regions().map(|(offset, granules, _)| (offset, granules)).collect::<Vec<_>>(), [(0, 64), (64, 64)]);
    assert_eq!(tlsf.largest_free(), 64);
    tlsf.check().unwrap();
}

#[test]
fn a_second_free_and_a_handle_of_an_earlier_use_are_refused() {
    let (mut tlsf, domain) = one_region(64);
    let first = tlsf.allocate(domain, 64).unwrap().handle;
    tlsf.free(first, domain, 0).unwrap();
    let stale = TlsfError::StaleHandle { index: first.index, generation: first.generation };
    assert_eq!(tlsf.free(first, domain, 0), Err(stale));
    let second = tlsf.allocate(domain, 64).unwrap().handle;
    assert_eq!(second.index(), first.index());
    assert_eq!(tlsf.free(first, domain, 0), Err(stale));
    assert_eq!(tlsf.block(first), Err(stale));
    assert_eq!(tlsf.remove_used_region(first), Err(stale));
    assert!(tlsf.block(second).unwrap().used);
    assert!(tlsf.free(Handle { index: 77, generation: 1 }, domain, 0).is_err());
}

#[test]
fn a_removed_domain_is_refused_after_its_slot_is_used_again() {
    let (mut tlsf, one) = one_region(64);
    let old = tlsf.add_domain();
    tlsf.remove_domain(old, one, 0).unwrap();
    let new = tlsf.add_domain();
    assert_ne!(old, new);
    let held = tlsf.allocate(one, 8).unwrap().handle;
    assert_eq!(tlsf.free(held, old, 0), Err(TlsfError::UnknownDomain(old.0)));
    assert_eq!(tlsf.add_region(64, 8, old, 0), Err(TlsfError::UnknownDomain(old.0)));
    assert_eq!(tlsf.remove_domain(old, one, 0), Err(TlsfError::UnknownDomain(old.0)));
    assert_eq!(tlsf.remove_domain(one, one, 0), Err(TlsfError::UnknownDomain(one.0)));
    assert!(tlsf.allocate(old, 1).is_none() && tlsf.allocate_ready(Domain::NONE, 1, 0).is_none());
    assert_eq!((tlsf.move_ready(old, one, 9), tlsf.move_ready(one, old, 9)), (0, 0));
    tlsf.free(held, new, 0).unwrap();
    tlsf.check().unwrap();
}

#[test]
fn a_slot_of_domains_is_left_when_its_numbers_are_used_up() {
    let (mut tlsf, keep) = one_region(1);
    let mut seen = std::collections::HashSet::from([keep]);
    for _ in 0..5000 {
        let domain = tlsf.add_domain();
        assert!(seen.insert(domain) && domain != Domain::NONE);
        tlsf.remove_domain(domain, keep, 0).unwrap();
    }
    tlsf.check().unwrap();
}

#[test]
fn only_blocks_with_a_low_enough_mark_are_ready() {
    let mut tlsf = Tlsf::new();
    let (one, two) = (tlsf.add_domain(), tlsf.add_domain());
    tlsf.add_region(0, 100, one, 8).unwrap();
    tlsf.add_region(100, 200, one, 3).unwrap();
    assert!(tlsf.allocate_ready(one, 100, 2).is_none());
    let ready = tlsf.allocate_ready(one, 100, 3).unwrap();
    assert_eq!((ready.offset, ready.mark), (100, 3));
    tlsf.free(ready.handle, one, 3).unwrap();
    assert_eq!(tlsf.move_ready(one, two, 3), 1);
    assert_eq!(tlsf.region(100).unwrap().free, Some((two, 0)));
    assert_eq!(tlsf.region(0).unwrap().free, Some((one, 8)));
    assert_eq!(tlsf.move_ready(one, one, 8), 1);
    assert_eq!(tlsf.region(0).unwrap().free, Some((one, 0)));
    tlsf.check().unwrap();
}

#[test]
fn a_request_looks_at_eight_blocks_of_its_bin_then_goes_up() {
    let mut tlsf = Tlsf::new();
    let domain = tlsf.add_domain();
    // 1024 to 1055 share a bin. The newest block is looked at first.
    tlsf.add_region(0, 1050, domain, 0).unwrap();
    for k in 1..=7 {
        tlsf.add_region(k * 10_000, 1024, domain, 0).unwrap();
    }
    let eighth = tlsf.allocate(domain, 1040).unwrap();
    assert_eq!(eighth.offset, 0);
    tlsf.free(eighth.handle, domain, 0).unwrap();
    for k in 1..=8 {
        let region = k * 10_000;
        if k == 8 {
            tlsf.add_region(region, 1024, domain, 0).unwrap();
        } else {
            tlsf.remove_region(region).unwrap();
            tlsf.add_region(region, 1024, domain, 0).unwrap();
        }
    }
    assert_eq!(tlsf.largest_free(), 1050);
    assert!(tlsf.allocate(domain, 1040).is_none());
    tlsf.add_region(500_000, 4096, domain, 0).unwrap();
    assert_eq!(tlsf.allocate(domain, 1040).unwrap().offset, 500_000);
}

#[test]
fn regions_are_refused_by_cause() {
    let (mut tlsf, domain) = one_region(64);
    let over = |offset, granules| TlsfError::RegionOverlap { offset, granules, other: 0, other_granules: 64 };
    assert_eq!(tlsf.add_region(63, 1, domain, 0), Err(over(63, 1)));
    assert_eq!(tlsf.add_used_region(0, 64), Err(over(0, 64)));
    assert_eq!(tlsf.add_region(64, 0, domain, 0), Err(TlsfError::OutOfRange { offset: 64, granules: 0 }));
    assert_eq!(tlsf.add_region(u32::MAX, 2, domain, 0), Err(TlsfError::OutOfRange { offset: u32::MAX, granules: 2 }));
    assert_eq!(tlsf.remove_region(1), Err(TlsfError::RegionNotFound(1)));
    let held = tlsf.allocate(domain, 10).unwrap().handle;
    let in_use = TlsfError::RegionInUse { offset: 0, granules: 64, used: 10, blocks: 2 };
    assert_eq!(tlsf.remove_region(0), Err(in_use));
    assert_eq!(tlsf.remove_used_region(held), Err(in_use));
    assert_eq!(in_use.to_string(), "region at granule 0 is in use: 10 of 64 granules are used, in 2 blocks, free ones counted");
    tlsf.add_region(u32::MAX, 1, domain, 0).unwrap();
    tlsf.check().unwrap();
}

#[test]
fn a_region_of_one_used_block_goes_at_once_or_after_its_free() {
    let (mut tlsf, domain) = one_region(64);
    let large = tlsf.add_used_region(1 << 20, u32::MAX - (1 << 20)).unwrap();
    assert_eq!(tlsf.block(large.handle).unwrap().domain, Domain::NONE);
    assert!(tlsf.remove_region(1 << 20).is_err());
    assert_eq!(tlsf.remove_used_region(large.handle), Ok((1 << 20, u32::MAX - (1 << 20))));
    let again = tlsf.add_used_region(1 << 20, 500).unwrap();
    tlsf.free(again.handle, domain, 3).unwrap();
    assert_eq!(tlsf.region(1 << 20).unwrap().free, Some((domain, 3)));
    assert_eq!(tlsf.remove_region(1 << 20), Ok(500));
    assert_eq!((tlsf.free_granules(), tlsf.used_granules()), (64, 0));
    tlsf.check().unwrap();
}

#[test]
fn nothing_is_found_for_nothing() {
    let (mut tlsf, domain) = one_region(64);
    assert!(tlsf.allocate(domain, 0).is_none() && tlsf.allocate_ready(domain, 0, 9).is_none());
    assert_eq!(Tlsf::new().largest_free(), 0);
    assert_eq!(tlsf.blocks(1).count(), 0);
}
