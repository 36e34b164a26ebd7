//! Which owner to look at, for every command that only looks.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use millpond_ipc::ledger::{DeviceLedger, Ledger};
use millpond_ipc::observer::Observer;

use crate::exit;

/// The owner to look at.
#[derive(Debug, ClapArgs)]
pub(crate) struct Target {
    /// The owner's socket. Default: MILLPOND_SOCKET. The key is always MILLPOND_KEY.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl Target {
    /// Connects, or says why not.
    pub(crate) fn connect(&self) -> Result<Observer, ExitCode> {
        let named = self.socket.clone().or_else(|| std::env::var_os("MILLPOND_SOCKET").map(PathBuf::from));
        let Some(socket) = named.filter(|path| !path.as_os_str().is_empty()) else {
            eprintln!("millpond: no owner named: set MILLPOND_SOCKET and MILLPOND_KEY, or give --socket");
            return Err(ExitCode::from(2));
        };
        let key = std::env::var("MILLPOND_KEY").unwrap_or_default();
        Observer::connect(&socket, &key, Duration::from_secs(5)).map_err(|error| {
            eprintln!("millpond: {error}");
            exit::of(&error)
        })
    }
}

/// The devices that a user means: the named one, or those of which anything is served.
pub(crate) fn devices<'a>(ledger: &'a Ledger, wanted: Option<&str>) -> Result<Vec<&'a DeviceLedger>, ExitCode> {
    let Some(wanted) = wanted else {
        // Where there are GPUs, the host is what one asks for by name.
        let gpus: Vec<_> = ledger.devices.iter().filter(|device| !device.is_host()).collect();
        return Ok(if gpus.is_empty() { ledger.devices.iter().collect() } else { gpus });
    };
    let found: Vec<_> = match wanted {
        "host" | "cpu" => ledger.devices.iter().filter(|device| device.is_host()).collect(),
        wanted => ledger.devices.iter().filter(|device| device.id.eq_ignore_ascii_case(wanted) || device.name == wanted).collect(),
    };
    if found.is_empty() {
        let served: Vec<_> = ledger.devices.iter().map(|device| device.id.as_str()).collect();
        eprintln!("millpond: no device {wanted}: the owner serves {}", served.join(", "));
        return Err(exit::usage());
    }
    Ok(found)
}
