//! `millpond ledger`: who holds how much.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use millpond_ipc::observer::Observer;

use crate::exit;

const AFTER: &str = "\
Example: who holds what of the arena that MILLPOND_SOCKET and MILLPOND_KEY name, now, and then once a second.
  $ millpond ledger
  $ millpond ledger --watch --json | jq '.devices[0].reserved'";

/// Show who holds how much of an arena. The owner is not disturbed: the figures are read from shared memory.
#[derive(Debug, ClapArgs)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// JSON instead of a table; one line each time.
    #[arg(long)]
    json: bool,
    /// Again every second, until the owner ends.
    #[arg(long)]
    watch: bool,
    /// The owner's socket. Default: MILLPOND_SOCKET. The key is always MILLPOND_KEY.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let Some(socket) = args.socket.clone().or_else(|| std::env::var_os("MILLPOND_SOCKET").map(PathBuf::from)) else {
        eprintln!("millpond: no owner named: set MILLPOND_SOCKET and MILLPOND_KEY, or give --socket");
        return ExitCode::from(2);
    };
    let key = std::env::var("MILLPOND_KEY").unwrap_or_default();
    let observer = match Observer::connect(&socket, &key, Duration::from_secs(5)) {
        Ok(observer) => observer,
        Err(error) => {
            eprintln!("millpond: {error}");
            return exit::of(&error);
        }
    };
    loop {
        let ledger = observer.ledger();
        let text = if args.json { serde_json::to_string(&ledger).unwrap_or_default() + "\n" } else { ledger.to_string() };
        let clear = if args.watch && !args.json { "\x1b[H\x1b[2J" } else { "" };
        let mut out = std::io::stdout().lock();
        if write!(out, "{clear}{text}").and_then(|()| out.flush()).is_err() {
            // Whoever read has gone.
            return ExitCode::SUCCESS;
        }
        if !args.watch || !observer.is_alive() {
            return ExitCode::SUCCESS;
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}
