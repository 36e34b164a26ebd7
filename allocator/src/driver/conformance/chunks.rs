//! Physical memory: create, export, import, release.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::fs::MemfdFlags;

use super::lab::{ok, refused, want, Lab};
use super::{Case, Outcome};
use crate::driver::{Access, CuResult, Driver, Memory};

pub(super) const CASES: &[Case] = &[
    Case::new("bytes cross by export and import", bytes_cross),
    Case::new("no size but whole units is created or imported", sizes),
    Case::new("a chunk larger than the device is out of memory", out_of_memory),
    Case::new("a released handle is refused", stale_handle),
    Case::new("a released chunk stays mapped", released_stays_mapped),
    Case::new("an exported descriptor keeps the bytes alive", descriptor_keeps_bytes),
    Case::new("an exported descriptor closes on exec", closes_on_exec),
    Case::new("other descriptors are not imported", foreign_descriptors),
    Case::new("memory info falls and rises by a chunk", memory_info),
];

fn bytes_cross(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = 4 * lab.unit();
    let made = lab.create(bytes)?;
    let fd = ok(driver.export(made))?;
    let here = lab.place(made, bytes, Access::ReadWrite)?;
    let there = lab.place(lab.import(&fd, bytes)?, bytes, Access::ReadWrite)?;
    want(here != there, || "two mappings at one address".to_owned())?;
    lab.fill(here, 0x5a, bytes)?;
    lab.holds(there, 0x5a, bytes)?;
    lab.fill(there + bytes / 2, 0xa5, bytes / 2)?;
    lab.holds(here, 0x5a, bytes / 2)?;
    lab.holds(here + bytes / 2, 0xa5, bytes / 2)
}

fn sizes(driver: &Arc<dyn Driver>) -> Outcome {
    let unit = driver.device().granularity;
    for bytes in [0, 1, unit - 1, unit + 1, unit + unit / 2] {
        refused(driver.create(bytes), CuResult::INVALID_VALUE, &format!("a chunk of {bytes} bytes"))?;
    }
    Ok(())
}

fn out_of_memory(driver: &Arc<dyn Driver>) -> Outcome {
    let unit = driver.device().granularity;
    let bytes = (driver.device().total_bytes + unit).next_multiple_of(unit);
    let error = driver.create(bytes).err().ok_or_else(|| format!("{bytes} bytes were created"))?;
    want(error.is_out_of_memory(), || format!("not out of memory but {error}"))
}

fn stale_handle(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = lab.unit();
    let stale = lab.create(bytes)?;
    let addr = lab.reserve(bytes)?;
    lab.release(stale)?;
    refused(driver.export(stale), CuResult::INVALID_VALUE, "export of a released handle")?;
    refused(driver.map(addr, bytes, stale), CuResult::INVALID_VALUE, "map of a released handle")?;
    refused(driver.release(stale), CuResult::INVALID_VALUE, "a second release")
}

fn released_stays_mapped(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = lab.unit();
    let made = lab.create(bytes)?;
    let addr = lab.place(made, bytes, Access::ReadWrite)?;
    lab.fill(addr, 0x11, bytes)?;
    lab.release(made)?;
    lab.holds(addr, 0x11, bytes)?;
    lab.fill(addr, 0x22, bytes)?;
    lab.holds(addr, 0x22, bytes)
}

fn descriptor_keeps_bytes(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = lab.unit();
    let made = lab.create(bytes)?;
    let fd = ok(driver.export(made))?;
    let addr = lab.place(made, bytes, Access::ReadWrite)?;
    lab.fill(addr, 0x33, bytes)?;
    lab.unmap(addr, bytes)?;
    lab.release(made)?;
    let again: Memory = lab.import(&fd, bytes)?;
    drop(fd);
    let addr = lab.place(again, bytes, Access::ReadOnly)?;
    lab.holds(addr, 0x33, bytes)
}

fn closes_on_exec(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let fd = ok(driver.export(lab.create(lab.unit())?))?;
    let flags = rustix::io::fcntl_getfd(&fd).map_err(|error| error.to_string())?;
    want(flags.contains(rustix::io::FdFlags::CLOEXEC), || "the descriptor would survive an exec".to_owned())
}

fn foreign_descriptors(driver: &Arc<dyn Driver>) -> Outcome {
    let bytes = driver.device().granularity;
    let directory = File::open("/").map_err(|error| error.to_string())?;
    let (pipe, _other_end) = rustix::pipe::pipe().map_err(|error| error.to_string())?;
    let (socket, _other_end) = std::os::unix::net::UnixStream::pair().map_err(|error| error.to_string())?;
    let program = std::env::current_exe().and_then(File::open).map_err(|error| error.to_string())?;
    let empty = rustix::fs::memfd_create("empty", MemfdFlags::CLOEXEC).map_err(|error| error.to_string())?;
    let loose = rustix::fs::memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(|error| error.to_string())?;
    rustix::fs::ftruncate(&loose, bytes).map_err(|error| error.to_string())?;
    let wrong = [
        ("a directory", directory.as_fd()),
        ("a pipe", pipe.as_fd()),
        ("a socket", socket.as_fd()),
        ("an ordinary file", program.as_fd()),
        ("an empty memfd", empty.as_fd()),
        ("a memfd that can shrink", loose.as_fd()),
    ];
    for (what, fd) in wrong {
        refused(driver.import(fd, bytes), CuResult::INVALID_VALUE, &format!("import of {what}"))?;
    }
    Ok(())
}

fn memory_info(driver: &Arc<dyn Driver>) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = 32 * lab.unit();
    let before = ok(driver.mem_info())?;
    want(before.free <= before.total && before.total > 0, || format!("{before:?}"))?;
    let made = lab.create(bytes)?;
    let during = ok(driver.mem_info())?;
    want(during.total == before.total && during.free + bytes <= before.free, || format!("{before:?}, then {during:?}"))?;
    lab.release(made)?;
    let after = ok(driver.mem_info())?;
    want(after.free >= during.free + bytes, || format!("{during:?}, then {after:?}"))
}
