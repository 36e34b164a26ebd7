//! What works on this machine, and why not: for people whose arena does not start.

use std::path::Path;
use std::time::Duration;

use millpond_allocator::driver::cuda::CudaPlatform;
use millpond_allocator::driver::host::{HostConfig, HostPlatform};
use millpond_allocator::driver::{DeviceInfo, Platform};
use serde::Serialize;

use crate::observer::{ObserveError, Observer};
use crate::owner;

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: String,
    /// Whether it is well; `None`: it cannot be said, or does not matter here.
    pub ok: Option<bool>,
    /// What was found.
    pub detail: String,
    /// What helps, where something does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

fn check(name: impl Into<String>, ok: impl Into<Option<bool>>, detail: impl Into<String>) -> Check {
    Check { name: name.into(), ok: ok.into(), detail: detail.into(), fix: None }
}

impl Check {
    fn fix(self, fix: &str) -> Self {
        Self { fix: (self.ok != Some(true)).then(|| fix.to_owned()), ..self }
    }
}

/// Looks at everything. `owner`: the socket and key to try, from `MILLPOND_SOCKET` and `MILLPOND_KEY`.
#[must_use]
pub fn examine(owner: Option<(&Path, &str)>) -> Vec<Check> {
    let mut checks = gpus();
    checks.push(host());
    checks.extend([memfd(), pidfd(), owner::peer_pidfd_check().into(), wsl(), mps(), yama(), shm(), descriptors(), socket_dir()]);
    checks.push(owner_check(owner));
    checks
}

fn gpus() -> Vec<Check> {
    let platform = match CudaPlatform::load() {
        Ok(platform) => platform,
        Err(error) => {
            let fix = "only needed for GPUs: install NVIDIA's driver, or start the container with it (docker run --gpus all)";
            return vec![check("libcuda", None, error.to_string()).fix(fix)];
        }
    };
    let mut checks = vec![check("libcuda", true, "loads, with every function that is needed")];
    match platform.devices() {
        Ok(devices) if devices.is_empty() => {
            checks.push(check("gpus", None, "the driver sees none").fix("look at nvidia-smi and CUDA_VISIBLE_DEVICES"));
        }
        Ok(devices) => devices.iter().for_each(|device| checks.extend(gpu(&platform, device))),
        Err(error) => checks.push(check("gpus", false, error.to_string()).fix("look at nvidia-smi; a reboot helps after a driver update")),
    }
    checks
}

fn gpu(platform: &CudaPlatform, info: &DeviceInfo) -> Vec<Check> {
    let name = |what: &str| format!("{} {what}", info.id);
    let device = format!("{}, {} MiB, units of {} KiB", info.name, info.total_bytes >> 20, info.granularity >> 10);
    let mut checks = vec![check(name("device"), true, device)];
    checks.push(match platform.open(info.id) {
        Ok(driver) => match driver.create(info.granularity).and_then(|memory| {
            let exported = driver.export(memory);
            driver.release(memory)?;
            exported
        }) {
            Ok(_) => check(name("memory"), true, "virtual memory management; memory can be made and exported without a context"),
            Err(error) => check(name("memory"), false, error.to_string()).fix("the card may be full, or in exclusive mode: see nvidia-smi"),
        },
        Err(error) => check(name("memory"), false, error.to_string()).fix("such a device can hold no arena; serve others with --device"),
    });
    checks.push(check(name("stream words"), info.stream_words, "64-bit writes and waits on a stream").fix("a newer driver has them"));
    let events =
        if info.context_events { "cuCtxRecordEvent" } else { "no cuCtxRecordEvent: memory of streams that never return is recovered late" };
    checks.push(
        check(name("context events"), if info.context_events { Some(true) } else { None }, events).fix("a driver of CUDA 12.5 or newer"),
    );
    checks
}

fn host() -> Check {
    let made = HostConfig::from_env().map(HostPlatform::new).map_err(|error| error.to_string());
    match made.and_then(|platform| platform.devices().map_err(|error| error.to_string())) {
        Ok(devices) => {
            let total: u64 = devices.iter().map(|device| device.total_bytes >> 20).sum();
            check("host device", true, format!("{} of {total} MiB", devices.len()))
        }
        Err(error) => check("host device", false, error).fix("correct the MILLPOND_HOST_… variables"),
    }
}

fn memfd() -> Check {
    use rustix::fs::{fcntl_add_seals, memfd_create, MemfdFlags, SealFlags};
    let made = memfd_create("millpond-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    match made.and_then(|fd| fcntl_add_seals(&fd, SealFlags::SHRINK)) {
        Ok(()) => check("memfd", true, "can be made and sealed"),
        Err(error) => check("memfd", false, error.to_string()).fix("a sandbox forbids memfd_create: allow it in its seccomp profile"),
    }
}

fn pidfd() -> Check {
    match owner::own_pidfd() {
        Ok(_) => check("pidfd", true, "deaths are seen at once"),
        Err(error) => check("pidfd", false, error.to_string()).fix("Linux 5.3 or newer, or a seccomp profile that allows pidfd_open"),
    }
}

impl From<bool> for Check {
    fn from(peer_pidfd: bool) -> Self {
        match peer_pidfd {
            true => check("SO_PEERPIDFD", true, "the kernel names a connection's process for certain"),
            false => check("SO_PEERPIDFD", None, "not before Linux 6.5: clients send a pidfd of themselves instead, which is as good"),
        }
    }
}

fn wsl() -> Check {
    let version = std::fs::read_to_string("/proc/version").unwrap_or_default();
    match version.to_ascii_lowercase().contains("microsoft") {
        false => check("WSL2", true, "not under WSL2"),
        true => check("WSL2", false, "under WSL2, whose driver exports no memory as descriptors")
            .fix("--driver host works; for GPUs, Linux itself"),
    }
}

fn mps() -> Check {
    let pipe = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").map_or_else(|| "/tmp/nvidia-mps".into(), std::path::PathBuf::from);
    match pipe.join("control").exists() {
        false => check("MPS", true, "no control daemon"),
        true => check("MPS", false, format!("a control daemon has its pipe in {}; MPS keeps a dead process's work alive", pipe.display()))
            .fix("end it (echo quit | nvidia-cuda-mps-control), or point CUDA_MPS_PIPE_DIRECTORY elsewhere"),
    }
}

fn yama() -> Check {
    match std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope") {
        Ok(scope) => check("yama", true, format!("ptrace_scope {}: not needed, descriptors travel by socket", scope.trim())),
        Err(_) => check("yama", true, "absent: not needed"),
    }
}

fn shm() -> Check {
    check("/dev/shm", true, "not used: a small one (docker's 64 MiB) does not matter")
}

fn descriptors() -> Check {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let text = |value: Option<u64>| value.map_or_else(|| "unlimited".to_owned(), |value| value.to_string());
    let enough = limit.maximum.is_none_or(|maximum| maximum >= 1024);
    let detail = format!("{} open at a time, can be raised to {}", text(limit.current), text(limit.maximum));
    check("descriptors", enough, detail).fix("raise the hard limit: ulimit -Hn 65536")
}

fn socket_dir() -> Check {
    match owner::try_place() {
        Ok(path) => check("socket directory", true, format!("{} can be made", path.display())),
        Err(error) => {
            check("socket directory", false, error.to_string()).fix("set XDG_RUNTIME_DIR, or --socket-dir, to a short path of yours")
        }
    }
}

fn owner_check(owner: Option<(&Path, &str)>) -> Check {
    let Some((path, key)) = owner else {
        return check("owner", None, "MILLPOND_SOCKET is not set: no owner was looked for");
    };
    match Observer::connect(path, key, Duration::from_secs(2)) {
        Ok(observer) => check("owner", true, format!("process {} at {}", observer.welcome.owner_pid, path.display())),
        Err(error @ ObserveError::NoOwner { .. }) => check("owner", false, error.to_string()).fix("its process has ended: start it again"),
        Err(error) => {
            check("owner", false, error.to_string()).fix("MILLPOND_SOCKET and MILLPOND_KEY must be of one owner, of this version")
        }
    }
}
