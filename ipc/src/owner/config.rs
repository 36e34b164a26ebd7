//! What an owner is told when it starts, and why it may refuse to.

use std::path::PathBuf;

use millpond_allocator::driver::cuda::HandleKind;
use millpond_allocator::driver::host::ConfigError;
use millpond_allocator::driver::{DeviceId, DriverError};
use rustix::io::Errno;

use crate::control::{ControlError, MAX_DEVICES};

/// Chunks are never this large: facts/driver.md, "First use of a peer's memory", and readers with 32-bit lengths.
pub const CHUNK_CEILING: u64 = 4 << 30;
/// The largest chunk where nothing else is said.
pub const CHUNK_BYTES: u64 = 2 << 30;
/// The most bytes of a socket's path (108 with the zero at its end).
pub const PATH_BYTES: usize = 107;

/// Which devices an owner serves besides the host, which it always serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DriverChoice {
    /// GPUs where there are any.
    #[default]
    Auto,
    /// The host alone.
    Host,
    /// GPUs; an error where there are none.
    Cuda,
}

/// How much of a device the arena may take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Limit {
    /// So many bytes of each GPU, or of the host where no GPU is served.
    Bytes(u64),
    /// This share of each device, above 0 and at most 100.
    Percent(f64),
}

/// A number of bytes as people write it. K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB are powers of 1000.
/// As `millpond.arena.parse_bytes` reads it, in Python.
///
/// # Errors
/// A sentence for the one who wrote it.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let error = || format!("{text:?} is no size: expected bytes, 6G or 6GiB (of 1024), or 6GB (of 1000)");
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match lower.get(digits.len()..).unwrap_or_default() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(error()),
    };
    let digits = digits.trim();
    if let Some((whole, part)) = digits.split_once('.') {
        let plain = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = if plain(whole) && plain(part) { digits.parse::<f64>().ok() } else { None };
        let bytes = number.map(|number| number * unit as f64).filter(|bytes| *bytes < u64::MAX as f64);
        return bytes.map(|bytes| bytes as u64).ok_or_else(error);
    }
    digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit)).ok_or_else(error)
}

impl std::str::FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim().strip_suffix('%') {
            None => parse_bytes(text).map(Self::Bytes),
            Some(share) => share.trim().parse().map(Self::Percent).map_err(|_| format!("{text:?} is no share: expected 80%, say")),
        }
    }
}

/// What an owner is told.
#[derive(Debug, Clone)]
pub struct Config {
    /// Which driver.
    pub driver: DriverChoice,
    /// Which GPUs; all that are visible where `None`.
    pub devices: Option<Vec<DeviceId>>,
    /// In what form memory is shared. [`HandleKind::PosixFd`] works; the others are refused with what they lack.
    pub handle_kind: HandleKind,
    /// How much of each device.
    pub limit: Limit,
    /// The largest chunk in bytes; [`CHUNK_BYTES`] where `None`.
    pub chunk_bytes: Option<u64>,
    /// How many times the device's memory a window is.
    pub window_factor: u32,
    /// Bytes of the host device; the machine's memory where `None`.
    pub host_bytes: Option<u64>,
    /// Where the socket's own directory is made; `$XDG_RUNTIME_DIR` or `/tmp` where `None`.
    pub socket_dir: Option<PathBuf>,
    /// The key, in hexadecimal; a new one where `None`.
    pub key: Option<String>,
    /// The process that the owner does not outlive.
    pub parent_pid: Option<u32>,
    /// How often clients' beats are looked at, in milliseconds.
    pub heartbeat_ms: u64,
    /// How old a beat may be before its client counts as stopped, in milliseconds.
    pub stopped_after_ms: u64,
    /// How long a growth may wait for others to give memory back, in milliseconds.
    pub trim_timeout_ms: u64,
    /// How long memory that a client gave back stays at hand for it, in milliseconds: free in the ledger, not yet the driver's, an
    /// eighth of the limit at most. 0: not at all.
    pub spare_ms: u64,
    /// How long a connection may take over its hello, in milliseconds.
    pub hello_timeout_ms: u64,
    /// How many bytes may wait for a client that does not read, before it is cut off.
    pub outbox_bytes: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            driver: DriverChoice::Auto,
            devices: None,
            handle_kind: HandleKind::default(),
            limit: Limit::Percent(100.0),
            chunk_bytes: None,
            window_factor: 2,
            host_bytes: None,
            socket_dir: None,
            key: None,
            parent_pid: None,
            heartbeat_ms: 500,
            stopped_after_ms: 2_000,
            trim_timeout_ms: 500,
            spare_ms: 100,
            hello_timeout_ms: 5_000,
            outbox_bytes: 8 << 20,
        }
    }
}

/// Why an owner did not start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum OwnerError {
    /// The driver's answer.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A host variable of the environment that says nothing usable.
    #[error(transparent)]
    Host(#[from] ConfigError),
    /// A form of handle that millpond cannot share memory in.
    #[error("memory cannot be shared as {kind}: millpond lacks {lacks}; posix_fd works")]
    HandleKind {
        /// The form.
        kind: HandleKind,
        /// What it would take.
        lacks: &'static str,
    },
    /// A limit above the device.
    #[error("limit of {asked} bytes is above {device}, which has {total} bytes")]
    LimitAboveDevice {
        /// The device.
        device: String,
        /// The limit.
        asked: u64,
        /// The device's memory.
        total: u64,
    },
    /// A limit that leaves no room for one unit of memory.
    #[error("limit of {asked} bytes is below one unit of {device}, {granularity} bytes")]
    LimitTooSmall {
        /// The device.
        device: String,
        /// The limit.
        asked: u64,
        /// The device's granularity.
        granularity: u64,
    },
    /// A share that is none.
    #[error("limit of {0} %: expected more than 0 and at most 100")]
    Percent(f64),
    /// A chunk size of 4 GiB or more.
    #[error("chunks of {0} bytes: expected less than {CHUNK_CEILING} (4 GiB)")]
    ChunkTooLarge(u64),
    /// A chunk size that the device cannot have.
    #[error("chunks of {asked} bytes: expected a multiple of {device}'s granularity, {granularity} bytes")]
    ChunkUnit {
        /// The device.
        device: String,
        /// The chunk size.
        asked: u64,
        /// The device's granularity.
        granularity: u64,
    },
    /// A window of no size, or over the address space.
    #[error("windows of {factor} times the memory of {device} ({total} bytes): expected 1 to 64 times, and less than 128 TiB")]
    Window {
        /// The device.
        device: String,
        /// The factor.
        factor: u32,
        /// The device's memory.
        total: u64,
    },
    /// More devices than the control memory has rows for.
    #[error("{0} devices: an owner serves at most {MAX_DEVICES}, the host among them; name those that it shall serve")]
    TooManyDevices(usize),
    /// A key that is none.
    #[error("the key must be 32 to 128 hexadecimal digits")]
    Key,
    /// A path that no socket can have.
    #[error("{}: a socket's path is at most {PATH_BYTES} bytes, this one has {bytes}; choose a shorter directory", path.display())]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// The socket's directory could not be made.
    #[error("no directory for the socket in {}: {error}", path.display())]
    Directory {
        /// Where it was to be.
        path: PathBuf,
        /// The system's answer.
        error: Errno,
    },
    /// The process that the owner is bound to is not there.
    #[error("parent process {pid}: {error}")]
    Parent {
        /// Its id.
        pid: u32,
        /// The system's answer.
        error: Errno,
    },
    /// The control memory could not be made.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The system refused a call.
    #[error("{call}: {error}")]
    System {
        /// What was called.
        call: &'static str,
        /// The system's answer.
        error: Errno,
    },
}

impl OwnerError {
    /// The error's name for programs: a [`crate::wire::Reason`]'s, or `DriverUnavailable`.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Driver(DriverError::Call { .. }) | Self::Control(_) | Self::System { .. } => "Internal",
            Self::Driver(_) => "DriverUnavailable",
            Self::HandleKind { .. } => "Unsupported",
            _ => "InvalidArgument",
        }
    }

    pub(super) fn system(call: &'static str) -> impl FnOnce(Errno) -> Self {
        move |error| Self::System { call, error }
    }
}
