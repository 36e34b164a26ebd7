//! What every driver must do, as cases that run through [`Driver`] alone: on the host, and on a GPU.
//!
//! [`cases`] each leave the device as they found it. Each of [`FATAL_CASES`] kills its context, so it wants a process (on the
//! host: a platform) of its own. [`parent`] and [`child`] are the two sides of what takes two processes.

mod chunks;
mod events;
mod fatal;
mod lab;
mod maps;
mod processes;
mod streams;
mod words;

use std::sync::Arc;

use super::{DeviceId, Driver, Platform};

pub use processes::{child, parent};

/// What a case found: nothing wrong, or what was.
pub type Outcome = Result<(), String>;

/// One rule of the driver seam.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The rule.
    pub name: &'static str,
    /// Whether the context is dead afterwards.
    pub fatal: bool,
    /// Tries it, on a driver with a context attached.
    pub run: fn(&Arc<dyn Driver>) -> Outcome,
}

impl Case {
    const fn new(name: &'static str, run: fn(&Arc<dyn Driver>) -> Outcome) -> Self {
        Self { name, fatal: false, run }
    }

    const fn fatal(name: &'static str, run: fn(&Arc<dyn Driver>) -> Outcome) -> Self {
        Self { name, fatal: true, run }
    }
}

/// The cases that leave the device as they found it.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    [chunks::CASES, maps::CASES, streams::CASES, events::CASES, words::CASES].into_iter().flatten()
}

/// The cases that kill the context.
pub const FATAL_CASES: &[Case] = fatal::CASES;

/// Runs all of [`cases`] on a device and reports each.
pub fn run(platform: &dyn Platform, id: DeviceId, report: &mut dyn FnMut(&str, Outcome)) {
    for case in cases() {
        report(case.name, run_case(platform, id, case));
    }
}

/// Runs one case on a device, attaching a context first.
///
/// # Errors
/// What was wrong.
pub fn run_case(platform: &dyn Platform, id: DeviceId, case: &Case) -> Outcome {
    let driver = platform.open(id).map_err(|error| error.to_string())?;
    driver.attach_context().map_err(|error| error.to_string())?;
    (case.run)(&driver)
}
