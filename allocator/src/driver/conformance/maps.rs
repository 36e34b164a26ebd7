//! Addresses: reserve, map, access, unmap.

use std::sync::Arc;

use super::lab::{ok, refused, want, Lab};
use super::{Case, Outcome};
use crate::driver::{Access, CuResult, Driver, PointerInfo};

pub(super) const CASES: &[Case] = &[
    Case::new("several TiB of addresses are reserved, aligned", large_reservation),
    Case::new("a free hint is honoured", hint),
    Case::new("no size but whole units is reserved", reservation_sizes),
    Case::new("a reservation goes back whole", unreserve_whole),
    Case::new("a reservation with a mapping does not go back", unreserve_mapped),
    Case::new("a chunk is mapped whole", whole_maps),
    Case::new("a map at an unaligned address is refused", unaligned_map),
    Case::new("a map outside a reservation is refused", unreserved_map),
    Case::new("a map over another is refused", double_map),
    Case::new("one chunk is mapped at two addresses", two_addresses),
    Case::new("part of a mapping is not unmapped", partial_unmap),
    Case::new("an address is mapped again with other memory", map_again),
    Case::new("one access grant covers a span of chunks", span),
    Case::new("access to what is not mapped is refused", access_unmapped),
    Case::new("read-only memory takes no copy", read_only),
    Case::new("a pointer's chunk is known", pointers),
];

fn large_reservation(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    for bytes in [256 << 30, 4 << 40, 8 << 40] {
        let addr = lab.reserve(bytes)?;
        want(addr != 0 && addr.is_multiple_of(lab.unit()), || format!("{bytes} bytes at {addr:#x}"))?;
    }
    Ok(())
}

fn hint(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = 8 * lab.unit();
    // Free: it was given a moment ago and went back. Another thread of this process may be quicker, so there are some tries.
    let mut tries = 0;
    let (free, addr) = loop {
        let free = lab.reserve(bytes)?;
        lab.unreserve(free, bytes)?;
        let addr = ok(driver.reserve(bytes, free))?;
        tries += 1;
        if addr == free || tries == 20 {
            break (free, addr);
        }
        ok(driver.unreserve(addr, bytes))?;
    };
    let taken = driver.reserve(bytes, free);
    ok(driver.unreserve(addr, bytes))?;
    want(addr == free, || format!("asked for {free:#x}, got {addr:#x}"))?;
    let elsewhere = ok(taken)?;
    ok(driver.unreserve(elsewhere, bytes))?;
    want(elsewhere != free, || "one address was reserved twice".to_owned())
}

fn reservation_sizes(driver: &Arc<dyn Driver>) -> Outcome {
    let unit = driver.device().granularity;
    for bytes in [0, 1, unit + 1] {
        refused(driver.reserve(bytes, 0), CuResult::INVALID_VALUE, &format!("a reservation of {bytes} bytes"))?;
    }
    Ok(())
}

fn unreserve_whole(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let unit = lab.unit();
    let addr = lab.reserve(4 * unit)?;
    refused(driver.unreserve(addr, 2 * unit), CuResult::INVALID_VALUE, "giving back the first half")?;
    refused(driver.unreserve(addr + 2 * unit, 2 * unit), CuResult::INVALID_VALUE, "giving back the second half")?;
    lab.unreserve(addr, 4 * unit)?;
    refused(driver.unreserve(addr, 4 * unit), CuResult::INVALID_VALUE, "giving back twice")
}

fn unreserve_mapped(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = lab.unit();
    let addr = lab.chunk(bytes)?;
    refused(driver.unreserve(addr, bytes), CuResult::INVALID_VALUE, "giving back a reservation with a mapping")?;
    lab.unmap(addr, bytes)?;
    lab.unreserve(addr, bytes)
}

fn whole_maps(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let unit = lab.unit();
    let memory = lab.create(2 * unit)?;
    let addr = lab.reserve(4 * unit)?;
    for bytes in [0, 1, unit, 4 * unit] {
        refused(driver.map(addr, bytes, memory), CuResult::INVALID_VALUE, &format!("a map of {bytes} of {} bytes", 2 * unit))?;
    }
    lab.map(addr, 2 * unit, memory)
}

fn unaligned_map(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let unit = lab.unit();
    let memory = lab.create(unit)?;
    let addr = lab.reserve(4 * unit)?;
    for offset in [1, 4096, unit / 2] {
        refused(driver.map(addr + offset, unit, memory), CuResult::INVALID_VALUE, &format!("a map at {offset} past a unit"))?;
    }
    Ok(())
}

fn unreserved_map(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let unit = lab.unit();
    let memory = lab.create(2 * unit)?;
    let addr = lab.reserve(2 * unit)?;
    // Driver 580 maps past the end of a reservation: the bounds are the caller's to check, and `Window` does.
    lab.unreserve(addr, 2 * unit)?;
    refused(driver.map(addr, 2 * unit, memory), CuResult::INVALID_VALUE, "a map outside a reservation")
}

fn double_map(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let unit = lab.unit();
    let (one, two) = (lab.create(2 * unit)?, lab.create(2 * unit)?);
    let addr = lab.reserve(4 * unit)?;
    lab.map(addr, 2 * unit, one)?;
    refused(driver.map(addr, 2 * unit, two), CuResult::INVALID_VALUE, "a map over another")?;
    refused(driver.map(addr + unit, 2 * unit, two), CuResult::INVALID_VALUE, "a map over half of another")?;
    lab.map(addr + 2 * unit, 2 * unit, two)
}

fn two_addresses(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = 2 * lab.unit();
    let memory = lab.create(bytes)?;
    let one = lab.place(memory, bytes, Access::ReadWrite)?;
    let two = lab.place(memory, bytes, Access::ReadWrite)?;
    lab.fill(one, 0x44, bytes)?;
    lab.holds(two, 0x44, bytes)?;
    lab.unmap(one, bytes)?;
    lab.holds(two, 0x44, bytes)
}

fn partial_unmap(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let unit = lab.unit();
    let addr = lab.chunk(4 * unit)?;
    refused(driver.unmap(addr, unit), CuResult::INVALID_VALUE, "unmapping the first quarter")?;
    refused(driver.unmap(addr + 2 * unit, 2 * unit), CuResult::INVALID_VALUE, "unmapping the second half")?;
    lab.fill(addr, 0x55, 4 * unit)?;
    lab.holds(addr, 0x55, 4 * unit)
}

fn map_again(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = lab.unit();
    let (one, two) = (lab.create(bytes)?, lab.create(bytes)?);
    let addr = lab.place(one, bytes, Access::ReadWrite)?;
    lab.fill(addr, 0x66, bytes)?;
    lab.unmap(addr, bytes)?;
    lab.map(addr, bytes, two)?;
    ok(driver.set_access(addr, bytes, Access::ReadWrite))?;
    lab.fill(addr, 0x77, bytes)?;
    let elsewhere = lab.place(one, bytes, Access::ReadOnly)?;
    lab.holds(elsewhere, 0x66, bytes)
}

fn span(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = 4 * lab.unit();
    let addr = lab.reserve(2 * bytes)?;
    lab.map(addr, bytes, lab.create(bytes)?)?;
    lab.map(addr + bytes, bytes, lab.create(bytes)?)?;
    ok(driver.set_access(addr, 2 * bytes, Access::ReadWrite))?;
    lab.fill(addr, 0x12, 2 * bytes)?;
    lab.fill(addr + bytes - 1000, 0x34, 2000)?;
    lab.holds(addr, 0x12, bytes - 1000)?;
    lab.holds(addr + bytes - 1000, 0x34, 2000)?;
    lab.holds(addr + bytes + 1000, 0x12, bytes - 1000)?;
    let other = lab.chunk(bytes)?;
    let stream = lab.stream()?;
    ok(driver.copy(other, addr + bytes / 2, bytes, stream))?;
    lab.drain(stream)?;
    lab.holds(other + bytes / 2 - 1000, 0x34, 2000)
}

fn access_unmapped(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = lab.unit();
    let addr = lab.reserve(3 * bytes)?;
    let grant = |addr, bytes| driver.set_access(addr, bytes, Access::ReadWrite);
    refused(grant(addr, bytes), CuResult::INVALID_VALUE, "access to an empty reservation")?;
    lab.map(addr, bytes, lab.create(bytes)?)?;
    lab.map(addr + 2 * bytes, bytes, lab.create(bytes)?)?;
    refused(grant(addr, 2 * bytes), CuResult::INVALID_VALUE, "access past a mapping")?;
    // Driver 580 grants across a gap, and unmaps what is not mapped, in silence: neither is relied on.
    ok(grant(addr, bytes))
}

fn read_only(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = lab.unit();
    let memory = lab.create(bytes)?;
    let (writable, readable) = (lab.place(memory, bytes, Access::ReadWrite)?, lab.place(memory, bytes, Access::ReadOnly)?);
    lab.fill(writable, 0x1f, bytes)?;
    lab.holds(readable, 0x1f, bytes)?;
    let other = lab.chunk(bytes)?;
    let stream = lab.stream()?;
    refused(driver.copy(readable, other, bytes, stream), CuResult::INVALID_VALUE, "a copy into read-only memory")?;
    lab.drain(stream)?;
    lab.holds(readable, 0x1f, bytes)
}

fn pointers(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = 2 * lab.unit();
    let addr = lab.reserve(2 * bytes)?;
    lab.map(addr, bytes, lab.create(bytes)?)?;
    lab.map(addr + bytes, bytes, lab.create(bytes)?)?;
    ok(driver.set_access(addr, 2 * bytes, Access::ReadWrite))?;
    for (at, base) in [(addr, addr), (addr + 12345, addr), (addr + bytes, addr + bytes), (addr + 2 * bytes - 1, addr + bytes)] {
        let found = ok(driver.pointer_info(at))?;
        want(found == Some(PointerInfo { base, bytes }), || format!("{at:#x}: {found:?}, not {bytes} bytes at {base:#x}"))?;
    }
    let local = 0_u64;
    let found = ok(driver.pointer_info(std::ptr::from_ref(&local) as u64))?;
    want(found.is_none(), || format!("a local variable: {found:?}"))
}
