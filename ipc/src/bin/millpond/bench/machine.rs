//! Where figures come from: the machine, the kernel, the driver, the version.

use std::fs::read_to_string;
use std::process::Command;

use serde_json::Value;

/// The commit that this program was built from, where whoever built it said so; else the source tree that it was built in is asked.
const COMMIT: Option<&str> = option_env!("MILLPOND_COMMIT");

pub(super) fn header(driver: &str) -> Vec<(String, Value)> {
    let mut header = Vec::new();
    let mut put = |key: &str, value: Option<Value>| {
        header.push((key.to_owned(), value.unwrap_or(Value::Null)));
    };
    put("millpond", Some(env!("CARGO_PKG_VERSION").into()));
    put(
        "commit",
        COMMIT
            .map(str::to_owned)
            .or_else(|| said("git", &["-C", env!("CARGO_MANIFEST_DIR"), "rev-parse", "--short", "HEAD"]))
            .map(Into::into),
    );
    put("build", Some(if cfg!(debug_assertions) { "debug: figures of a release build are lower" } else { "release" }.into()));
    put("cores", std::thread::available_parallelism().ok().map(|cores| cores.get().into()));
    put("cpu", field("/proc/cpuinfo", "model name").map(Into::into));
    put("memory", field("/proc/meminfo", "MemTotal").map(Into::into));
    put("kernel", read_to_string("/proc/sys/kernel/osrelease").ok().map(|text| text.trim().into()));
    put("load", read_to_string("/proc/loadavg").ok().and_then(|text| text.split(' ').next().map(Into::into)));
    put("driver", Some(driver.into()));
    if driver == "cuda" {
        put("gpu", said("nvidia-smi", &["--query-gpu=name,driver_version", "--format=csv,noheader"]).map(Into::into));
    }
    header
}

fn field(file: &str, name: &str) -> Option<String> {
    let text = read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// What a program printed, if it is there and succeeded.
fn said(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).lines().collect::<Vec<_>>().join("; ")).filter(|text| !text.is_empty())
}
