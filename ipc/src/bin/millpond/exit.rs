//! Exit codes, as `millpond --help` lists them.

use std::process::ExitCode;

use millpond_ipc::observer::ObserveError;

/// Wrong usage.
pub(crate) fn usage() -> ExitCode {
    ExitCode::from(64)
}

/// The code of an error of observing.
pub(crate) fn of(error: &ObserveError) -> ExitCode {
    ExitCode::from(match error {
        ObserveError::NoOwner { .. } => 2,
        ObserveError::Refused(refused) => match refused.field.as_str() {
            "protocol" | "layout" | "hello" => 3,
            "key" => 4,
            _ => 5,
        },
        ObserveError::Control(_) => 3,
        ObserveError::Frame(_) | ObserveError::Unexpected(_) => 1,
    })
}
