//! The driver conformance suite on the host's memory.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use millpond_allocator::driver::conformance::{self, Case};
use millpond_allocator::driver::host::{HostConfig, HostPlatform};
use millpond_allocator::driver::DeviceId;

/// Set in a process that [`two_processes_share_a_chunk`] starts.
const CHILD: &str = "MILLPOND_CONFORMANCE_CHILD";

fn platform() -> HostPlatform {
    HostPlatform::new(HostConfig { devices: 2, total_bytes: Some(1 << 30), connections: Some(8), ..HostConfig::default() })
}

#[test]
fn all_cases_hold() {
    let platform = platform();
    for id in [DeviceId::host(0), DeviceId::host(1)] {
        let mut wrong = Vec::new();
        conformance::run(&platform, id, &mut |name, outcome| wrong.extend(outcome.err().map(|text| format!("{name}: {text}"))));
        assert!(wrong.is_empty(), "{id}:\n{}", wrong.join("\n"));
    }
    assert_eq!(platform.misuse(), 0);
}

#[test]
fn each_case_holds_on_a_platform_of_its_own() {
    let fresh = |case: &Case| {
        let platform = platform();
        conformance::run_case(&platform, DeviceId::host(0), case).unwrap_or_else(|text| panic!("{}: {text}", case.name));
        assert_eq!(platform.misuse(), 0, "{}", case.name);
    };
    conformance::cases().for_each(fresh);
    conformance::FATAL_CASES.iter().for_each(fresh);
}

#[test]
fn names_are_distinct() {
    let mut names: Vec<&str> = conformance::cases().chain(conformance::FATAL_CASES).map(|case| case.name).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}

#[test]
fn two_processes_share_a_chunk() {
    let program = std::env::current_exe().unwrap();
    let mut spawn = |socket: UnixStream| {
        Command::new(&program)
            .args(["--exact", "the_other_process", "--nocapture"])
            .env(CHILD, "1")
            .stdin(OwnedFd::from(socket))
            .stdout(Stdio::null())
            .spawn()
    };
    conformance::parent(&platform(), DeviceId::host(1), &mut spawn).unwrap();
}

/// The child of [`two_processes_share_a_chunk`]; by itself, nothing.
#[test]
fn the_other_process() {
    if std::env::var_os(CHILD).is_some() {
        let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        conformance::child(&platform(), DeviceId::host(0), UnixStream::from(socket)).unwrap();
    }
}
