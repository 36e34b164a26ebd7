//! `millpond stress`: does the contract hold?

use std::process::ExitCode;

use clap::ValueEnum;
use millpond_ipc::stress::{self, Options};

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Driver {
    /// CPU memory.
    Host,
    /// The first GPU.
    Cuda,
}

/// Workers hand each other patterns, get killed, are replaced: the last line says what went wrong.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Who dies, ends itself at an operation that the seed draws (SIGKILL, SIGSTOP and then SIGKILL, _exit, SIGSEGV). A third are killed by a
timer instead (`timed_kills`): at a moment that the seed draws, within 30 us of the start of one of the next calls; `killed_inside`
says in which call they were.
`outside_bytes` is what is left by a count that is not millpond's own (the owner's files, or NVML); null: not checked, and why.

Exit codes: 0 nothing wrong, 1 something (the last line says what), 2 it could not start.
Example:
  $ millpond stress --driver host --workers 8 --seconds 30 --kill-every-ops 2000 --json
  $ millpond stress --driver cuda --workers 4 --kills 100 --json      a hundred deaths, spread over 100 s")]
pub(crate) struct Args {
    /// Which device.
    #[arg(long, value_enum, default_value_t = Driver::Host)]
    driver: Driver,
    /// Workers at a time, 2 to 32.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=32))]
    workers: u32,
    /// How long they work [default: 10; with --kills: 100, at most].
    #[arg(long)]
    seconds: Option<u64>,
    /// A worker dies after so many of its operations on average; 0: none does [default: 2000; with --kills: as many as spread the
    /// deaths over most of the time, by how fast the workers turn out to be].
    #[arg(long)]
    kill_every_ops: Option<u64>,
    /// A worker dies in so many milliseconds on average, by how fast the workers turn out to be; still at an operation that the seed
    /// draws.
    #[arg(long, conflicts_with = "kill_every_ops", value_parser = clap::value_parser!(u64).range(1..))]
    kill_every_ms: Option<u64>,
    /// End after so many deaths; fewer in the time is a failure.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    kills: Option<u64>,
    /// Processes kept ready to replace the dead [default: half of the workers; on a GPU as many].
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..=32))]
    spares: Option<u32>,
    /// Where all numbers are drawn from: what is done, and at which operation who dies.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The last line alone on stdout, as JSON.
    #[arg(long)]
    json: bool,
    /// Break this on purpose: the run must fail.
    #[cfg(feature = "faults")]
    #[arg(long, value_parser = ["release-before-done", "skip-ready-wait", "stale-map", "drop-ack", "lost-hold", "ledger-skew"])]
    fault: Option<String>,
}

impl Args {
    #[cfg(feature = "faults")]
    fn fault(&self) -> Option<String> {
        self.fault.clone()
    }

    #[cfg(not(feature = "faults"))]
    fn fault(&self) -> Option<String> {
        None
    }
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let options = Options {
        cuda: matches!(args.driver, Driver::Cuda),
        workers: args.workers,
        seconds: args.seconds.unwrap_or(if args.kills.is_some() { 100 } else { 10 }),
        kill_every_ops: args.kill_every_ops,
        kill_every_ms: args.kill_every_ms,
        kills: args.kills,
        spares: args.spares.unwrap_or(if matches!(args.driver, Driver::Cuda) { args.workers } else { args.workers / 2 }),
        seed: args.seed,
        fault: args.fault(),
    };
    let program = std::env::current_exe().map_err(|error| error.to_string());
    match program.and_then(|program| stress::run(&options, &program)) {
        Ok(report) => {
            let text = if args.json { serde_json::to_string(&report) } else { serde_json::to_string_pretty(&report) };
            println!("{}", text.unwrap_or_default());
            if report.is_clean() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            eprintln!("millpond: {error}");
            ExitCode::from(2)
        }
    }
}
