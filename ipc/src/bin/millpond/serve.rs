//! `millpond serve`: an owner in a process of its own.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use millpond_allocator::driver::cuda::HandleKind;
use millpond_allocator::driver::DeviceId;
use millpond_ipc::observer::Observer;
use millpond_ipc::owner::{parse_bytes as bytes, Config, DriverChoice, Ended, Limit, Owner};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};

use crate::metrics;
use crate::ready::Ready;
use crate::signals;

const AFTER: &str = "\
Example: one shell serves, another looks.
  $ millpond serve --limit 80% --driver auto     # prints MILLPOND_SOCKET and MILLPOND_KEY, serves until Ctrl-C
  $ eval \"$(cat where-it-printed)\"; millpond ledger

The key is never an argument: it is taken from MILLPOND_KEY where that is set, and made anew where not.";

/// Which driver.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Driver {
    /// GPUs where there are any, and the host.
    Auto,
    /// The host alone.
    Host,
    /// GPUs, and the host; an error where there are no GPUs.
    Cuda,
}

/// Serve an arena: make its memory, hand it out, keep the ledger, bury the dead.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct Serve {
    /// Which devices to serve besides the host.
    #[arg(long, value_enum, default_value_t = Driver::Auto)]
    driver: Driver,
    /// Serve this GPU (GPU-xxxxxxxx-… or MIG-xxxxxxxx-…, as nvidia-smi -L prints it); may be given again. Default: all that are visible.
    #[arg(long = "device", value_name = "ID")]
    devices: Vec<DeviceId>,
    /// What the arena may take of each device: 80%, 20G or 20GiB (of 1024), 20GB (of 1000), or bytes.
    #[arg(long, default_value = "100%", value_parser = limit)]
    limit: Limit,
    /// The largest chunk: 2G, 512M, or bytes; below 4G.
    #[arg(long, value_parser = bytes)]
    chunk_bytes: Option<u64>,
    /// How many times the device's memory a client's window is.
    #[arg(long, default_value_t = 2)]
    window_factor: u32,
    /// Memory of the host device. Default: the machine's.
    #[arg(long, value_parser = bytes)]
    host_bytes: Option<u64>,
    /// Where the socket's directory is made. Default: $XDG_RUNTIME_DIR, or /tmp.
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
    /// End when this process ends, however it does. SIGINT and SIGHUP are left to it then.
    #[arg(long, value_name = "PID")]
    parent_pid: Option<u32>,
    /// Write one line of JSON to this descriptor when ready (or failed), and close it.
    #[arg(long, value_name = "N")]
    ready_fd: Option<i32>,
    /// The same line on stdout.
    #[arg(long)]
    json: bool,
    /// Serve the ledger as OpenMetrics text over HTTP at this address: http://ADDRESS:PORT/metrics.
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
    /// In what form memory is shared: posix_fd (Linux). win32 and fabric are refused with what millpond lacks for them.
    #[arg(long, value_name = "KIND", default_value_t = HandleKind::default())]
    handle_kind: HandleKind,
    /// How often beats are looked at, in milliseconds.
    #[arg(long, default_value_t = 500)]
    heartbeat_ms: u64,
    /// How old a beat may be before its client counts as stopped, in milliseconds.
    #[arg(long, default_value_t = 2_000)]
    stopped_after_ms: u64,
    /// How long a growth may wait for others to give memory back, in milliseconds.
    #[arg(long, default_value_t = 500)]
    trim_timeout_ms: u64,
    /// How long memory that a client gave back stays at hand for it, in milliseconds (free in the ledger, not yet the driver's).
    #[arg(long, default_value_t = 100)]
    spare_ms: u64,
}

fn limit(text: &str) -> Result<Limit, String> {
    text.parse()
}

impl Serve {
    fn config(&self) -> Config {
        Config {
            driver: match self.driver {
                Driver::Auto => DriverChoice::Auto,
                Driver::Host => DriverChoice::Host,
                Driver::Cuda => DriverChoice::Cuda,
            },
            devices: (!self.devices.is_empty()).then(|| self.devices.clone()),
            handle_kind: self.handle_kind,
            limit: self.limit,
            chunk_bytes: self.chunk_bytes,
            window_factor: self.window_factor,
            host_bytes: self.host_bytes,
            socket_dir: self.socket_dir.clone(),
            key: std::env::var("MILLPOND_KEY").ok().filter(|key| !key.is_empty()),
            parent_pid: self.parent_pid,
            heartbeat_ms: self.heartbeat_ms,
            stopped_after_ms: self.stopped_after_ms,
            trim_timeout_ms: self.trim_timeout_ms,
            spare_ms: self.spare_ms,
            ..Config::default()
        }
    }
}

/// One descriptor for each chunk and two for each client: as many as the system lets us have.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// A thread that looks at this owner as anybody would, and tells scrapers. It ends with the process.
fn serve_metrics(listener: TcpListener, socket: PathBuf, key: String) {
    let thread = std::thread::Builder::new().name("millpond-metrics".to_owned());
    let started = thread.spawn(move || match Observer::connect(&socket, &key, Duration::from_secs(10)) {
        Ok(observer) => metrics::serve(&listener, &observer),
        Err(error) => tracing::error!(%error, "no metrics"),
    });
    if let Err(error) = started {
        tracing::error!(%error, "no metrics");
    }
}

pub(crate) fn run(args: Serve) -> ExitCode {
    let ready = match Ready::new(args.ready_fd, args.json) {
        Ok(ready) => ready,
        Err(message) => {
            eprintln!("millpond: {message}");
            return crate::exit::usage();
        }
    };
    raise_descriptor_limit();
    // Blocked before there is a directory, so that none of them can leave one behind. Ctrl-C at a terminal reaches parent and
    // owner alike; what an owner's parent makes of it is the parent's to say.
    let bound = args.parent_pid.is_some();
    let _ = if bound { signals::block(&[libc::SIGINT, libc::SIGHUP]).map(|_| ()) } else { Ok(()) };
    let stop = if bound { vec![libc::SIGTERM] } else { vec![libc::SIGTERM, libc::SIGINT, libc::SIGHUP] };
    let stop = match signals::as_descriptor(&stop) {
        Ok(stop) => stop,
        Err(error) => {
            ready.failed("Internal", &format!("signalfd: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let listener = match args.metrics.map(metrics::listen).transpose() {
        Ok(listener) => listener,
        Err(message) => {
            ready.failed("Internal", &message);
            return ExitCode::FAILURE;
        }
    };
    let mut owner = match Owner::bind(args.config()) {
        Ok(owner) => owner,
        Err(error) => {
            ready.failed(error.code(), &error.to_string());
            return ExitCode::FAILURE;
        }
    };
    owner.stop_when_readable(stop);
    if let Some(listener) = listener {
        serve_metrics(listener, owner.socket().to_owned(), owner.key().to_owned());
    }
    if let Err(error) = ready.here(&owner.socket().to_string_lossy(), owner.key()) {
        eprintln!("millpond: nobody to say where I am: {error}");
        return ExitCode::FAILURE;
    }
    match owner.run() {
        Ok(Ended::Stopped | Ended::ParentEnded) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("millpond: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_shares_are_read() {
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("2GiB"), Ok(2 << 30));
        assert_eq!(bytes("64m"), Ok(64 << 20));
        assert_eq!(limit("80%"), Ok(Limit::Percent(80.0)));
        assert_eq!(limit("1G"), Ok(Limit::Bytes(1 << 30)));
        assert_eq!((bytes("6GB"), bytes("6G"), bytes("6 GiB")), (Ok(6_000_000_000), Ok(6 << 30), Ok(6 << 30)));
        assert_eq!((bytes("1.5G"), bytes("1.5KB")), (Ok(3 << 29), Ok(1500)));
        for text in ["", "G", "-1", "1.G", ".5G", "1e3", "1.5.1", "99999999999T", "99999999999.5T", "x%"] {
            assert!(limit(text).is_err(), "{text}");
        }
    }
}
