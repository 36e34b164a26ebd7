//! The `millpond` program: an owner by hand, its ledger, a look at the machine, and the demonstration.
#![deny(unsafe_code)]

mod bench;
mod demo;
mod doctor;
mod exit;
mod explain;
mod ledger;
mod log;
mod map;
mod metrics;
mod observe;
mod ready;
mod replay;
mod serve;
mod signals;
mod stress;
#[cfg(feature = "tui")]
mod top;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

const AFTER: &str = "\
Exit codes:
  0   done            1   failed (the line says why)
  2   no owner there  3   an owner of another version
  4   wrong key       5   the owner refused for another reason
  64  wrong usage

Environment:
  MILLPOND_SOCKET, MILLPOND_KEY   the owner to talk to; serve prints both
  MILLPOND_TRACE                  a folder: record what this process does (millpond trace --help)
  MILLPOND_LOG                    error, warn, info or debug: what is logged to stderr (default warn)";

/// One arena of GPU memory for many processes.
#[derive(Debug, Parser)]
#[command(name = "millpond", version, about, after_help = AFTER)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::Serve),
    Ledger(ledger::Args),
    #[cfg(feature = "tui")]
    Top(top::Args),
    Explain(explain::Args),
    Map(map::Args),
    Metrics(metrics::Args),
    Bench(bench::Args),
    Replay(replay::Args),
    Trace(trace::Args),
    Doctor(doctor::Args),
    Demo(demo::Args),
    Stress(stress::Args),
    /// One worker of a stress run.
    #[command(hide = true)]
    StressWorker,
}

fn main() -> ExitCode {
    log::start();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { exit::usage() } else { ExitCode::SUCCESS };
        }
    };
    match cli.command {
        Command::Serve(args) => serve::run(args),
        Command::Ledger(args) => ledger::run(&args),
        #[cfg(feature = "tui")]
        Command::Top(args) => top::run(&args),
        Command::Map(args) => map::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Metrics(args) => metrics::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Stress(args) => stress::run(&args),
        Command::StressWorker => millpond_ipc::stress::worker(),
    }
}
