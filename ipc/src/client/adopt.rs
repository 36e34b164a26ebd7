//! Adoption: what was received shall outlive its maker, under this process's account.

use std::time::Duration;

use millpond_allocator::driver::Addr;

use super::device::CALL_TIMEOUT;
use super::error::Error;
use super::{Client, Located};
use crate::wire::{Answer, Reason, Request};

impl Client {
    /// Makes a received value this process's own: when its maker dies, exactly the chunks that it lies in are this process's,
    /// under its account and its limit, until it is let go of. Waits until the value is ready; a second time it does nothing.
    /// While the maker lives, the bytes are in its account: it may use the rest of their chunks.
    ///
    /// # Errors
    /// [`Error::PeerDied`] for a value that never got ready, [`Error::Timeout`]; [`Error::InvalidArgument`] for one that was
    /// lent read-only or is this process's own; [`Error::OutOfMemory`] where its chunks exceed this process's own limit;
    /// [`Error::OwnerDied`].
    pub fn adopt(&self, handle: u64, timeout: Option<Duration>) -> Result<(), Error> {
        self.check_alive()?;
        let (hold, read_only, bytes, adopted) = self.imports.with(handle, |i| (i.hold, i.read_only, i.bytes, i.adopted))?;
        if adopted {
            return Ok(());
        }
        if hold.producer == self.shared.me {
            return Err(own());
        }
        if read_only {
            return Err(Error::InvalidArgument(format!(
                "a value of {bytes} bytes that was lent read-only cannot be adopted: its sender must lend it writable, or copy it"
            )));
        }
        self.import_ready(handle, timeout)?;
        let call = Request::Adopt { producer: hold.producer, index: hold.index, generation: hold.generation };
        let (mut answer, _) = self.shared.link.ask(call.clone(), CALL_TIMEOUT)?;
        if matches!(answer, Answer::Refused { reason: Reason::OutOfMemory, .. }) {
            // What is free of its own may make room.
            let device = self.imports.with(handle, |import| import.device)?;
            let trimmed = self.device_at(device)?.if_open().map_or(0, |opened| opened.heap.empty_cache());
            if trimmed > 0 {
                (answer, _) = self.shared.link.ask(call, CALL_TIMEOUT)?;
            }
        }
        match answer {
            Answer::Done => self.imports.with(handle, |import| import.adopted = true),
            Answer::Refused { reason, message, .. } => Err(Error::from_refusal(reason, message)),
            answer => Err(Error::unexpected(&answer)),
        }
    }

    /// [`Client::adopt`] for the value that is mapped at an address.
    ///
    /// # Errors
    /// As [`Client::adopt`], and [`Error::InvalidArgument`] for memory that is not the arena's.
    pub fn adopt_at(&self, addr: Addr, timeout: Option<Duration>) -> Result<(), Error> {
        self.check_alive()?;
        let handles = self.imports.handles_at(addr);
        if !handles.is_empty() {
            return handles.into_iter().try_for_each(|handle| self.adopt(handle, timeout));
        }
        Err(match self.locate(addr) {
            Located::Window { own: true, .. } => own(),
            Located::Window { .. } => {
                Error::Stale(format!("{addr:#x} lies in another process's window, but nothing there is held here any more"))
            }
            Located::Foreign => {
                Error::InvalidArgument(format!("{addr:#x} is not memory of the arena: only a value that was received in it can be adopted"))
            }
        })
    }
}

fn own() -> Error {
    Error::InvalidArgument("the value is in this process's own memory: there is nothing to adopt".to_owned())
}
