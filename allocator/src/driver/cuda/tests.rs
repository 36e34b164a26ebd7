//! Against a stub of the driver library, which counts its calls and checks what it is passed. What a real driver does is the
//! conformance suite's to say.
#![allow(unsafe_code)]

use std::io::{PipeReader, Read, Write};
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::Arc;

use cudarc::driver::sys::{CUmemAccessDesc, CUmemAllocationProp, CUmemLocation};
use rustix::io::FdFlags;

use super::stub::{stub, Counts, Stub};
use super::{survey, CudaPlatform};
use crate::driver::{Access, Capture, CuResult, DeviceId, Driver, DriverError, Event, MemInfo, Memory, Platform, PointerInfo};
use crate::driver::{Stream, StreamId};

const MIB: u64 = 1 << 20;
const SECOND_CONTEXT: u64 = 0xd0;

fn refused<T: std::fmt::Debug>(answer: Result<T, DriverError>) -> CuResult {
    answer.unwrap_err().result().unwrap()
}

#[test]
fn no_library_names_all_that_were_tried() {
    let error = CudaPlatform::load_from(&["/nowhere/libcuda.so.1", "libmillpond-none.so"]).unwrap_err();
    let DriverError::Unavailable { tried } = &error else { panic!("{error:?}") };
    assert!(tried.contains("/nowhere/libcuda.so.1 ("), "{tried}");
    assert!(tried.contains("libmillpond-none.so (libmillpond-none.so: cannot open shared object file"), "{tried}");
}

#[test]
fn this_machine_has_a_driver_or_is_told_so() {
    match CudaPlatform::load() {
        Ok(_) | Err(DriverError::TooOld { .. }) => {}
        Err(DriverError::Unavailable { tried }) => {
            for name in ["libcuda.so.1 (", "libcuda.so (", "/usr/lib/wsl/lib/libcuda.so.1 ("] {
                assert!(tried.contains(name), "{tried}");
            }
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn loading_calls_nothing() {
    let stub = stub!();
    let platform = stub.load().unwrap();
    assert_eq!(stub.counts().calls, 0);
    platform.grant_peers(true);
    assert_eq!(stub.counts().calls, 0);
    assert_eq!(platform.devices().unwrap().len(), 2);
    assert!(stub.counts().calls > 0);
}

#[test]
fn the_first_file_that_loads_is_taken() {
    let stub = stub!();
    let platform = CudaPlatform::load_from(&[Path::new("/nowhere/libcuda.so.1"), &stub.path()]).unwrap();
    assert_eq!(platform.devices().unwrap().len(), 2);
}

#[test]
fn a_missing_function_is_named_with_the_drivers_version() {
    let stub = stub!("-DWITHOUT_CREATE", "-DVERSION=10010");
    assert_eq!(stub.load().unwrap_err(), DriverError::TooOld { symbol: "cuMemCreate", version: Some(10_010) });
    let stub = stub!("-DOLD", "-DVERSION=11080");
    let error = stub.load().unwrap_err();
    assert_eq!(error, DriverError::TooOld { symbol: "cuStreamGetId", version: Some(11_080) });
    assert!(error.to_string().starts_with("the CUDA driver (CUDA 11.8) has no cuStreamGetId"), "{error}");
}

#[test]
fn a_stub_for_linking_is_told_as_such() {
    let stub = stub!("-DINIT=34");
    let error = stub.load().unwrap().devices().unwrap_err();
    let DriverError::Unavailable { tried } = &error else { panic!("{error:?}") };
    assert!(tried.contains(&stub.path().display().to_string()), "{tried}");
    assert!(tried.contains("is a stub to link against and no driver (cuInit: CUDA_ERROR_STUB_LIBRARY (34))"), "{tried}");
}

#[test]
fn no_device_is_an_empty_list_and_other_failures_are_errors() {
    let stub = stub!("-DINIT=100");
    let platform = stub.load().unwrap();
    assert_eq!(platform.devices(), Ok(Vec::new()));
    let error = platform.open(DeviceId::host(0)).unwrap_err();
    assert!(error.to_string().contains("it sees none"), "{error}");
    let stub = stub!("-DINIT=803");
    assert_eq!(refused(stub.load().unwrap().devices()), CuResult::SYSTEM_DRIVER_MISMATCH);
}

#[test]
fn devices_are_described() {
    let stub = stub!();
    let platform = stub.load().unwrap();
    let devices = platform.devices().unwrap();
    let second = &devices[1];
    assert_eq!(second.id, DeviceId::from_uuid([0xb1; 16]));
    assert_eq!((second.ordinal, second.name.as_str(), second.total_bytes), (1, "Stub B", 80 << 30));
    assert_eq!((second.granularity, second.context_events, second.stream_words), (2 * MIB, true, true));
    let driver = platform.open(second.id).unwrap();
    assert_eq!(driver.device(), second);
    assert!(!driver.is_host());
    let error = platform.open(DeviceId::from_uuid([7; 16])).unwrap_err();
    assert!(matches!(&error, DriverError::NoSuchDevice { visible, .. } if visible.matches("GPU-b").count() == 2), "{error}");
}

#[test]
fn a_device_that_cannot_hold_an_arena_is_listed_and_refused_by_name() {
    for (setting, lack) in [
        ("-DVMM=0", "virtual memory management"),
        ("-DPOSIX_FD=0", "memory that can be shared as a file descriptor"),
        ("-DWORDS2=0", "64-bit stream memory operations"),
        ("-DCOMPUTE_MODE=3", "compute mode"),
        ("-DCOMPUTE_MODE=2", "compute mode"),
        ("-DMPS=1", "MPS"),
    ] {
        let Some(stub) = Stub::build(&[setting]) else { return };
        let platform = stub.load().unwrap();
        let devices = platform.devices().unwrap();
        let error = platform.open(devices[0].id).unwrap_err();
        let DriverError::Unsupported { device, missing } = &error else { panic!("{error:?}") };
        assert!(missing.contains(lack), "{setting}: {error}");
        assert!(device.starts_with("Stub A (GPU-b0b0"), "{device}");
    }
}

#[test]
fn wsl_and_mps_are_seen() {
    let folder = std::env::temp_dir().join(format!("millpond-survey-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let version = folder.join("version");
    std::fs::write(&version, "Linux version 6.6.36.3-microsoft-standard-WSL2 (root@x)").unwrap();
    assert!(survey::is_wsl(&version));
    std::fs::write(&version, "Linux version 6.18.0 (gcc)").unwrap();
    assert!(!survey::is_wsl(&version) && !survey::is_wsl(&folder.join("none")));
    assert!(!survey::has_mps(&folder));
    std::fs::write(folder.join("control"), "").unwrap();
    assert!(survey::has_mps(&folder));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn layouts_are_those_of_c() {
    let stub = stub!();
    // SAFETY: the stub's prototype.
    let size = |which| unsafe { stub.library.get::<extern "C" fn(i32) -> u64>("stub_size").unwrap()(which) };
    assert_eq!(
        [size_of::<CUmemAllocationProp>() as u64, size_of::<CUmemAccessDesc>() as u64, size_of::<CUmemLocation>() as u64],
        [32, 12, 8]
    );
    assert_eq!([size(0), size(1), size(2)], [32, 12, 8]);
}

#[test]
fn memory_needs_no_context_and_the_rest_says_so() {
    let stub = stub!();
    let platform = stub.load().unwrap();
    let driver = platform.open_cuda(DeviceId::from_uuid([0xb1; 16])).unwrap();
    let memory = driver.create(4 * MIB).unwrap();
    let fd = driver.export(memory).unwrap();
    assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
    let imported = driver.import(fd.as_fd(), 4 * MIB).unwrap();
    assert_eq!(stub.counts().import_fd, fd.as_raw_fd());
    assert!(rustix::io::fcntl_getfd(&fd).is_ok(), "the descriptor stays the caller's");
    let addr = driver.reserve(8 * MIB, 0x6000_0000_0000).unwrap();
    assert_eq!(addr, 0x6000_0000_0000);
    driver.map(addr, 4 * MIB, memory).unwrap();
    driver.unmap(addr, 4 * MIB).unwrap();
    driver.unreserve(addr, 8 * MIB).unwrap();
    driver.release(memory).unwrap();
    driver.release(imported).unwrap();
    let counts = stub.counts();
    assert_eq!((counts.retains, counts.pushes), (0, 0));

    let before = stub.counts().calls;
    assert_eq!(refused(driver.mem_info()), CuResult::INVALID_CONTEXT);
    assert_eq!(refused(driver.set_access(addr, 4 * MIB, Access::ReadWrite)), CuResult::INVALID_CONTEXT);
    assert_eq!(refused(driver.pointer_info(addr)), CuResult::INVALID_CONTEXT);
    assert_eq!(refused(driver.stream_create()), CuResult::INVALID_CONTEXT);
    assert_eq!(refused(driver.stream_query(Stream::LEGACY)), CuResult::INVALID_CONTEXT);
    assert_eq!(refused(driver.event_create()), CuResult::INVALID_CONTEXT);
    assert_eq!(refused(driver.event_record_context(Event(0xe1))), CuResult::INVALID_CONTEXT);
    assert_eq!(refused(driver.wait_value(Stream(0x51), 0x4000, 1)), CuResult::INVALID_CONTEXT);
    assert_eq!(stub.counts().calls, before, "none of these reached the driver");
}

#[test]
fn a_handle_reaches_the_driver_only_while_it_is_live() {
    let stub = stub!();
    let driver = stub.attached();
    let memory = driver.create(4 * MIB).unwrap();
    assert_eq!(refused(driver.create(3 * MIB)), CuResult::INVALID_VALUE);
    assert_eq!(refused(driver.create(0)), CuResult::INVALID_VALUE);
    let fd = driver.export(memory).unwrap();
    let addr = driver.reserve(8 * MIB, 0).unwrap();
    assert_eq!(refused(driver.map(addr, 2 * MIB, memory)), CuResult::INVALID_VALUE, "part of a handle");
    // The stub gives the same handle for every import, as a driver may: it lives until it was released as often.
    let twice = [driver.import(fd.as_fd(), 4 * MIB).unwrap(), driver.import(fd.as_fd(), 4 * MIB).unwrap()];
    assert_eq!(twice[0], twice[1]);
    driver.release(twice[0]).unwrap();
    driver.map(addr, 4 * MIB, twice[1]).unwrap();
    driver.release(twice[1]).unwrap();
    driver.release(memory).unwrap();
    let before = stub.counts().calls;
    for dead in [memory, twice[0], Memory(0), Memory(0xdead)] {
        assert_eq!(refused(driver.release(dead)), CuResult::INVALID_VALUE);
    }
    assert_eq!(stub.counts().calls, before, "none of these reached the driver");
    assert_eq!(refused(driver.export(memory)), CuResult::INVALID_VALUE);
    assert_eq!(refused(driver.map(addr, 4 * MIB, memory)), CuResult::INVALID_VALUE);
}

#[test]
fn what_is_no_memory_is_not_imported() {
    let stub = stub!();
    let driver = stub.attached();
    let before = stub.counts().calls;
    let folder = std::fs::File::open("/").unwrap();
    let (reader, writer): (PipeReader, _) = std::io::pipe().unwrap();
    let socket = std::os::unix::net::UnixDatagram::unbound().unwrap();
    let memfd = rustix::fs::memfd_create("chunk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memfd, 2 * MIB).unwrap();
    for fd in [folder.as_fd(), reader.as_fd(), writer.as_fd(), socket.as_fd(), memfd.as_fd()] {
        assert_eq!(refused(driver.import(fd, 2 * MIB)), CuResult::INVALID_VALUE);
    }
    assert_eq!(stub.counts().calls, before, "none of these reached the driver");
}

#[test]
fn the_context_is_pushed_only_where_another_is_current() {
    let stub = stub!();
    let driver = stub.attached();
    driver.attach_context().unwrap();
    assert_eq!(stub.counts().retains, 1);

    // None current: pushed, and none current afterwards.
    assert_eq!(driver.mem_info(), Ok(MemInfo { free: 7, total: 9 }));
    assert_eq!((stub.counts().pushes, stub.counts().pops, stub.number("stub_depth")), (1, 1, 0));
    // Another current: likewise.
    stub.push(SECOND_CONTEXT);
    driver.mem_info().unwrap();
    assert_eq!((stub.counts().pushes, stub.counts().pops, stub.number("stub_depth")), (2, 2, 1));
    stub.pop();
    // Ours current: neither.
    stub.push(0xc0);
    driver.mem_info().unwrap();
    assert_eq!((stub.counts().pushes, stub.counts().pops, stub.number("stub_depth")), (2, 2, 1));
    stub.pop();
    // A call that fails puts the context back too.
    assert_eq!(refused(driver.copy(1, 2, 3, Stream(4))), CuResult::INVALID_VALUE);
    assert_eq!((stub.counts().pushes, stub.counts().pops, stub.number("stub_depth")), (3, 3, 0));
    // Another thread has a current context of its own.
    let elsewhere = Arc::clone(&driver);
    std::thread::spawn(move || elsewhere.mem_info()).join().unwrap().unwrap();
    assert_eq!((stub.counts().pushes, stub.counts().pops), (4, 4));
}

#[test]
fn streams_and_events() {
    let stub = stub!();
    let driver = stub.attached();
    let stream = driver.stream_create().unwrap();
    let event = driver.event_create().unwrap();
    assert_eq!(driver.stream_query(stream), Ok(false));
    assert_eq!(driver.stream_query(Stream::LEGACY), Ok(true));
    assert_eq!(driver.event_query(event), Ok(false));
    assert_eq!(driver.event_query(Event(0xe3)), Ok(true));
    assert_eq!(refused(driver.event_query(Event(0xe2))), CuResult::ILLEGAL_ADDRESS);
    driver.event_record(event, stream).unwrap();
    driver.event_record_context(event).unwrap();
    driver.stream_wait_event(stream, event).unwrap();
    driver.copy(0x2000, 0x3000, 5, stream).unwrap();
    driver.fill(0x2000, 0xee, 5, stream).unwrap();
    driver.stream_synchronize(Stream::LEGACY).unwrap();
    // A code that nobody knows stays a number.
    assert_eq!(refused(driver.stream_synchronize(stream)), CuResult(987));
    assert_eq!([3, 4, 5].map(|s| driver.stream_capture(Stream(s)).unwrap()), [Capture::None, Capture::Active, Capture::Invalidated]);
    driver.event_destroy(event).unwrap();
    driver.stream_destroy(stream).unwrap();
    assert_eq!((stub.number("stub_mode"), stub.number("stub_depth")), (0, 0), "the thread is as it was");
}

#[test]
fn the_legacy_stream_has_identity_0_without_a_call() {
    let stub = stub!();
    let driver = stub.attached();
    let before = stub.counts().calls;
    assert_eq!((driver.stream_id(Stream(0)), driver.stream_id(Stream(1))), (Ok(StreamId(0)), Ok(StreamId(0))));
    assert_eq!(stub.counts().calls, before);
    assert_eq!((driver.stream_id(Stream(2)), driver.stream_id(Stream(0x51))), (Ok(StreamId(1002)), Ok(StreamId(1081))));
    assert_eq!(stub.counts().ids, 2);
}

#[test]
fn a_stream_of_another_context_is_not_owned() {
    let stub = stub!();
    let driver = stub.attached();
    assert_eq!([0, 2, 0x51, 0x52].map(|stream| driver.owns(Stream(stream)).unwrap()), [true, true, true, false]);
    assert_eq!(stub.number("stub_mode"), 0, "the thread is as it was");
}

#[test]
fn words_go_through_the_operations_that_the_device_has() {
    let stub = stub!();
    let driver = stub.attached();
    driver.write_value(Stream(0x51), 0x4000, 1 << 63).unwrap();
    assert_eq!((stub.counts().writes_v2, stub.counts().last_value), (1, 1 << 63));
    driver.wait_value(Stream(0x51), 0x4000, 42).unwrap();
    assert_eq!((stub.counts().writes_v2, stub.counts().last_value, stub.counts().waits), (1, 42, 2));
    assert_eq!(refused(driver.write_value(Stream(0x51), 0x4004, 1)), CuResult::INVALID_VALUE);
    assert_eq!(refused(driver.wait_value(Stream(0x51), 0x4004, 1)), CuResult::INVALID_VALUE);

    for settings in [["-DFIRST_WORDS", "-DWORDS1=1"], ["-DWORDS2=0", "-DWORDS1=1"]] {
        let Some(stub) = Stub::build(&settings) else { return };
        let driver = stub.attached();
        driver.wait_value(Stream(0x51), 0x4000, 42).unwrap();
        driver.write_value(Stream(0x51), 0x4000, 43).unwrap();
        assert_eq!((stub.counts().writes_v2, stub.counts().last_value), (0, 43));
    }
}

/// What a hand-off asks of the driver (`tests/tests/contract_timelines.rs` says how often), call by call.
#[test]
fn a_word_is_one_operation_and_who_a_stream_is_four_small_questions() {
    let stub = stub!();
    let driver = stub.attached();
    stub.push(0xc0);
    let stream = Stream(0x51);
    let calls = |act: &dyn Fn()| {
        let before = stub.counts().calls;
        act();
        stub.counts().calls - before
    };
    assert_eq!(calls(&|| driver.write_value(stream, 0x4000, 1).unwrap()), 2, "current, write");
    assert_eq!(calls(&|| driver.wait_value(stream, 0x4000, 1).unwrap()), 2, "current, wait");
    assert_eq!(calls(&|| assert!(driver.stream_identity(stream).unwrap().is_some())), 4, "capturing, mode, id, mode");
    stub.pop();
}

#[test]
fn an_older_driver_records_no_context_events() {
    let stub = stub!("-DVERSION=12040");
    let driver = stub.attached();
    assert!(!driver.device().context_events);
    assert_eq!(refused(driver.event_record_context(Event(0xe1))), CuResult::NOT_SUPPORTED);
}

#[test]
fn peers_are_granted_access_only_when_asked() {
    let stub = stub!("-DDEVICES=3");
    let driver = stub.attached();
    driver.set_access(0x1000, 2 * MIB, Access::ReadWrite).unwrap();
    assert_eq!((stub.counts().grants, stub.counts().last_id), (1, 0));
    driver.set_peer_access(true);
    driver.set_access(0x1000, 2 * MIB, Access::ReadOnly).unwrap();
    assert_eq!((stub.counts().grants, stub.counts().last_id), (3, 2));
    let asked = stub.counts().calls;
    driver.set_access(0x1000, 2 * MIB, Access::ReadOnly).unwrap();
    assert_eq!(stub.counts().calls - asked, 6, "current, push, mode, access, mode, pop: peers are asked for once");

    let stub = stub!("-DPEER=0");
    let driver = stub.attached();
    driver.set_peer_access(true);
    driver.set_access(0x1000, 2 * MIB, Access::ReadWrite).unwrap();
    assert_eq!((stub.counts().grants, stub.counts().last_id), (1, 0));
}

#[test]
fn addresses_and_host_memory() {
    let stub = stub!();
    let driver = stub.attached();
    assert_eq!(driver.pointer_info(0x2345), Ok(Some(PointerInfo { base: 0x2000, bytes: 0x1000 })));
    assert_eq!(driver.pointer_info(0x10), Ok(None));
    let pages = 0x7000 as *mut u8;
    // SAFETY: the stub does not read through the pointer.
    assert_eq!(unsafe { driver.host_register(pages, 4096) }, Ok(0x17000));
    driver.host_unregister(pages).unwrap();
    assert_eq!(refused(driver.host_unregister(0x7001 as *mut u8)), CuResult::HOST_MEMORY_NOT_REGISTERED);
}

#[test]
fn a_forked_child_never_reaches_the_driver() {
    let stub = stub!();
    let platform = stub.load().unwrap();
    let driver = stub.attached();
    let memory = driver.create(2 * MIB).unwrap();
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    // The stub's library handle must not be searched in the child, where another thread's loader lock may be held for ever.
    // SAFETY: the stub's prototype.
    let counts = unsafe { stub.library.get::<extern "C" fn() -> *const Counts>("stub_counts").unwrap()() };
    // SAFETY: the child only makes calls that take no lock and no memory, writes to a pipe, and ends without handlers.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: a static of the stub.
            let before = unsafe { (*counts).calls };
            let answers = [
                driver.mem_info().err(),
                driver.create(2 * MIB).err(),
                driver.export(memory).err(),
                driver.release(memory).err(),
                driver.attach_context().err(),
                driver.stream_id(Stream::LEGACY).err(),
                driver.event_query(Event(0xe1)).err(),
                platform.devices().err(),
            ];
            let refused = answers.iter().all(|error| error.as_ref().and_then(DriverError::result) == Some(CuResult::CONTEXT_IS_DESTROYED));
            // SAFETY: a static of the stub.
            let untouched = unsafe { (*counts).calls } == before;
            let _ = writer.write_all(&[u8::from(refused), u8::from(untouched)]);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(0) }
        }
        child => {
            drop(writer);
            let mut answer = Vec::new();
            reader.read_to_end(&mut answer).unwrap();
            // SAFETY: reaps the child made above.
            unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
            assert_eq!(answer, [1, 1], "refused, untouched");
        }
    }
    driver.mem_info().unwrap();
}
