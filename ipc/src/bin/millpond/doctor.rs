//! `millpond doctor`: what works on this machine, and why not.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use millpond_ipc::doctor::examine;

const AFTER: &str = "\
Example: look at everything; then only at what is wrong.
  $ millpond doctor
  $ millpond doctor --json | jq '.checks[] | select(.ok == false)'

Exit code 1 where something is wrong (no: marked), 0 where everything that matters works.";

/// Look at this machine: driver, devices, kernel, limits, and the owner if one is named.
#[derive(Debug, ClapArgs)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// JSON: {"checks":[{"name","ok","detail","fix"}]}.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let socket = std::env::var_os("MILLPOND_SOCKET").map(PathBuf::from);
    let key = std::env::var("MILLPOND_KEY").unwrap_or_default();
    let checks = examine(socket.as_deref().map(|socket| (socket, key.as_str())));
    if args.json {
        println!("{}", serde_json::json!({ "checks": checks }));
    } else {
        let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
        for check in &checks {
            let mark = match check.ok {
                Some(true) => "ok ",
                Some(false) => "no ",
                None => " - ",
            };
            println!("{mark} {:<width$}  {}", check.name, check.detail);
            if let Some(fix) = &check.fix {
                println!("    {:<width$}  -> {fix}", "");
            }
        }
    }
    match checks.iter().any(|check| check.ok == Some(false)) {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    }
}
