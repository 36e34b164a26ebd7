//! `millpond demo`: the Python package's demonstration, by the Python that it is installed in.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use clap::Args as ClapArgs;

const AFTER: &str = "\
Example: real weights, two workers, no copy; then the same by machine.
  $ millpond demo
  $ millpond demo --input model.safetensors --workers 2 --json | tail -1

All arguments go to `python3 -m millpond demo`; `millpond demo -- --help` lists them.";

/// Hand real tensors between processes as offsets, and check every one.
#[derive(Debug, ClapArgs)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Arguments of the demonstration.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let python = python();
    let error = Command::new(&python).args(["-m", "millpond", "demo"]).args(&args.args).exec();
    eprintln!("millpond: {}: {error}; the demonstration needs Python 3.9 or newer with the millpond package", python.to_string_lossy());
    ExitCode::FAILURE
}

/// The Python beside this program, where it was installed into one; else the PATH's.
pub(crate) fn python() -> OsString {
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("python3"))).filter(|path| path.exists());
    beside.map_or_else(|| OsString::from("python3"), Into::into)
}
