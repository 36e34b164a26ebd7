//! How the tender learns that something was put down for it, without being woken each time.

use super::atomic::{AtomicBool, Ordering};

/// Set while the tender is to look, or has been told to.
#[derive(Debug)]
pub(super) struct Nudge(pub(super) AtomicBool);

impl Nudge {
    /// Something was put down. True: the tender must be told; false: it has been, or looks soon by itself, and sees it then.
    pub(super) fn is_news(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// Before the tender looks: whoever puts something down from here on has news. What was put down by somebody who found this set, it
    /// sees: an exchange, so that it does.
    pub(super) fn look(&self) {
        self.0.swap(false, Ordering::AcqRel);
    }

    /// The tender looks soon without being told.
    pub(super) fn looks_soon(&self) {
        self.0.store(true, Ordering::Release);
    }
}
