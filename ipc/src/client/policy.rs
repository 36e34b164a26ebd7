//! What a parent says is done with a client that stops, or whose call does not obey its cancel; and why one was killed.

use std::time::Duration;

use super::device::CALL_TIMEOUT;
use super::error::Error;
use super::import::Import;
use super::{millis, Client};
use crate::control::{Cause, Control};
use crate::wire::{Peer, Request};

impl Client {
    /// What the owner does with a client that stops (SIGSTOP, a debugger): kills it when it has been stopped for so long, or
    /// with `None` only reports it, as it does where nothing is said. For a parent, and its workers.
    ///
    /// # Errors
    /// [`Error::Refused`] for any other than a parent, [`Error::InvalidArgument`] for less than 100 ms, [`Error::PeerDied`] for
    /// a client that is gone.
    pub fn set_policy(&self, peer: &Peer, kill_stopped_after: Option<Duration>) -> Result<(), Error> {
        self.check_alive()?;
        let kill_stopped_after_ms = kill_stopped_after.map(millis);
        self.shared.link.call(Request::Policy { client: peer.client, serial: peer.serial, kill_stopped_after_ms }, CALL_TIMEOUT)?;
        Ok(())
    }

    /// Has the owner kill a client, whose call went on for so long after its cancel. For a parent, and its workers.
    ///
    /// # Errors
    /// [`Error::Refused`] for any other than a parent, [`Error::PeerDied`] for a client that is gone, [`Error::OwnerDied`].
    pub fn kill(&self, peer: &Peer, waited: Duration) -> Result<(), Error> {
        self.check_alive()?;
        self.shared.link.call(Request::Kill { client: peer.client, serial: peer.serial, waited_ms: millis(waited) }, CALL_TIMEOUT)?;
        Ok(())
    }

    /// Why a value will never be ready.
    pub(super) fn died(&self, import: &Import) -> Error {
        let cause = import.cause.or_else(|| import.ready.iter().find_map(|due| due.cause(&self.shared.control)));
        let why = cause.map(|cause| format!(" ({cause})")).unwrap_or_default();
        Error::PeerDied(format!(
            "the process that made this value died{why} before it was ready ({} bytes, received from {}): its bytes are not what was to be \
             sent",
            import.bytes, import.sender.name
        ))
    }
}

/// Why a client was killed, if it was, and is not yet forgotten.
pub(super) fn cause_of(control: &Control, peer: &Peer) -> Option<Cause> {
    control.cause_of(peer.client).filter(|(serial, _)| *serial == peer.serial).map(|(_, cause)| cause)
}
