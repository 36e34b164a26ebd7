//! What a heap has from its owner: chunks, the words of the timelines, a row of the ledger.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use millpond_allocator::heap::{ChunkSource, GrowError, Live, LiveSink};
use millpond_allocator::timeline::{TimelineMemory, Word};
use millpond_allocator::window::Chunk;

use super::{Shared, CALL_TIMEOUT};
use crate::client::error::Error;
use crate::client::fault::{self, Fault};
use crate::client::link::Link;
use crate::control::{Control, LiveRow};
use crate::ledger::holders;
use crate::wire::{self, Answer, Reason, Request, Role, MAX_FDS};

/// How long growth may wait for the owner, which itself waits for others to trim, with a shorter bound.
const GROW_TIMEOUT: Duration = Duration::from_secs(10);

/// The words of the control memory, for [`Timelines`].
#[derive(Debug)]
pub(super) struct Words(pub(super) Arc<Control>);

impl TimelineMemory for Words {
    fn word(&self, timeline: u32) -> Option<&Word> {
        self.0.timeline(timeline)
    }
    fn range(&self) -> (*mut u8, usize) {
        self.0.timeline_range()
    }
    fn keep_mapped(&self) {
        self.0.keep_mapped();
    }
}

/// The heap's figures go to the client's row.
#[derive(Debug)]
pub(super) struct Sink {
    pub(super) control: Arc<Control>,
    pub(super) me: u32,
    pub(super) device: u32,
    pub(super) left: Arc<AtomicBool>,
}

impl LiveSink for Sink {
    #[inline]
    fn publish(&self, live: &Live) {
        // Under the heap's lock, which whoever leaves takes once it has set this.
        if let Some(row) = self.control.live(self.me, self.device).filter(|_| !self.left.load(Ordering::Relaxed)) {
            row.write(&LiveRow {
                allocated: live.allocated + if fault::is(Fault::LedgerSkew) { 512 } else { 0 },
                peak: live.peak,
                blocks: live.blocks,
                requested: live.requested,
                largest_free: live.largest_free,
                leased_out: live.leased_out,
                leased_in: live.leased_in,
                out_of_memory: live.out_of_memory,
            });
        }
    }
}

/// Chunks come from the owner.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) shared: Shared,
    pub(super) device: u32,
    /// Its identity, for people.
    pub(super) id: String,
    pub(super) window: u32,
}

impl ChunkSource for Source {
    fn grow(&self, bytes: u64, press: bool) -> Result<Vec<(Chunk, OwnedFd)>, GrowError> {
        let call = Request::Grow { device: self.device, bytes, press };
        let unreachable = |error: Error| match (self.shared.left.load(Ordering::Acquire), error) {
            (true, _) => GrowError::Left,
            (false, Error::Descriptors(why)) => GrowError::Failed(format!("What the owner granted went back: {why}.")),
            (false, error) => GrowError::Unreachable(error.to_string()),
        };
        let (answer, mut fds) = self.shared.link.ask(call, GROW_TIMEOUT).map_err(unreachable)?;
        let chunks = match answer {
            Answer::Granted { chunks } => chunks,
            Answer::Refused { reason: Reason::OutOfMemory, message, limit, reserved, .. } => {
                // A parent that listens is told by the owner, of everybody's.
                if press && self.shared.role != Role::Parent {
                    self.shared.events.push("refusal", &self.id, self.shared.own.clone(), (bytes, limit, reserved));
                }
                return Err(GrowError::OutOfMemory { limit, reserved, detail: message });
            }
            Answer::Refused { message, .. } => return Err(GrowError::Failed(message)),
            answer => return Err(unreachable(Error::unexpected(&answer))),
        };
        while fds.len() < chunks.len() {
            let epochs = chunks.iter().skip(fds.len()).take(MAX_FDS).map(|chunk| chunk.epoch).collect();
            match import(&self.shared.link, self.window, epochs) {
                Ok(more) => fds.extend(more.into_iter().map(|(_, fd)| fd)),
                Err(error) => {
                    let chunks: Vec<Chunk> = chunks.into_iter().map(from_wire).collect();
                    self.give_back(&chunks);
                    return Err(unreachable(error));
                }
            }
        }
        Ok(chunks.into_iter().map(from_wire).zip(fds).collect())
    }

    fn give_back(&self, chunks: &[Chunk]) {
        let _ = self.shared.link.tell(Request::Release { epochs: chunks.iter().map(|chunk| chunk.epoch).collect() });
    }

    fn holders(&self) -> String {
        holders::read(&self.shared.control, self.device)
    }

    fn reap(&self) {
        self.shared.leases.reap();
    }
}

fn from_wire(chunk: wire::Chunk) -> Chunk {
    Chunk { epoch: chunk.epoch, offset: chunk.offset, bytes: chunk.bytes }
}

/// Descriptors of chunks of any window.
pub(super) fn import(link: &Link, window: u32, epochs: Vec<u64>) -> Result<Vec<(Chunk, OwnedFd)>, Error> {
    let asked = epochs.len();
    let (answer, fds) = link.call(Request::Import { window, epochs }, CALL_TIMEOUT)?;
    match answer {
        Answer::Granted { chunks } if chunks.len() == fds.len() && chunks.len() == asked => {
            Ok(chunks.into_iter().map(from_wire).zip(fds).collect())
        }
        answer => Err(Error::unexpected(&answer)),
    }
}
