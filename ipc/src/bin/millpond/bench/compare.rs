//! `millpond bench compare`: the Python package's comparison, by the Python that it is installed in.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use super::Args;

pub(super) fn run(args: &Args) -> ExitCode {
    let python = crate::demo::python();
    let mut command = Command::new(&python);
    command.args(["-m", "millpond.compare", "--driver", args.driver.map_or("auto", super::Driver::name)]);
    command.args(args.quick.then_some("--quick"));
    if let Some(folder) = &args.out {
        command.arg("--out").arg(folder);
    }
    command.args(args.json.then_some("--json=-")).args(&args.more);
    // Last: it takes all that follow.
    if !args.trace.is_empty() {
        command.arg("--traces").args(&args.trace);
    }
    if let (None, Ok(this)) = (std::env::var_os("MILLPOND_PROGRAM"), std::env::current_exe()) {
        command.env("MILLPOND_PROGRAM", this);
    }
    let error = command.exec();
    eprintln!("millpond: {}: {error}; the comparison needs Python 3.9 or newer with the millpond package", python.to_string_lossy());
    ExitCode::FAILURE
}
