//! Ways to break the contract on purpose, so that whoever checks it can be checked. Without the feature `faults` nothing of
//! this is there.

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code)] // named by the places that they break, which ask only in builds with the feature
pub(super) enum Fault {
    /// An import is done when the CPU lets go of it, whatever its streams do.
    ReleaseBeforeDone,
    /// READY is taken for reached.
    SkipReadyWait,
    /// Epochs are not compared, and what was revoked stays mapped.
    StaleMap,
    /// Every sixteenth acknowledgement is lost.
    DropAck,
    /// A hold that is not taken up yet does not count.
    LostHold,
    /// The ledger's row says more than there is.
    LedgerSkew,
}

/// Whether this is broken in this process (`MILLPOND_FAULT`).
#[cfg(feature = "faults")]
pub(super) fn is(fault: Fault) -> bool {
    static FAULT: std::sync::OnceLock<Option<Fault>> = std::sync::OnceLock::new();
    let broken = FAULT.get_or_init(|| {
        Some(match std::env::var("MILLPOND_FAULT").ok()?.as_str() {
            "release-before-done" => Fault::ReleaseBeforeDone,
            "skip-ready-wait" => Fault::SkipReadyWait,
            "stale-map" => Fault::StaleMap,
            "drop-ack" => Fault::DropAck,
            "lost-hold" => Fault::LostHold,
            "ledger-skew" => Fault::LedgerSkew,
            _ => return None,
        })
    });
    *broken == Some(fault)
}

#[cfg(not(feature = "faults"))]
#[inline(always)]
pub(super) const fn is(_: Fault) -> bool {
    false
}
