//! The ledger (placeholder until the owner's branch lands).
use crate::control::Control;
/// The ledger.
#[derive(Debug, serde::Serialize)]
pub struct Ledger {}
impl Ledger {
    /// Reads it.
    #[must_use]
    pub fn read(_: &Control) -> Self {
        Self {}
    }
}
