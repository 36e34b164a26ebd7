//! The windows of others, as far as a device has mapped them: what is missing is fetched at first need, and what its client gave
//! back goes when nothing here uses it any more.

use std::collections::HashSet;
use std::sync::Arc;

use millpond_allocator::driver::{Access, Addr};
use millpond_allocator::scatter::ScatterMap;
use millpond_allocator::window::{Chunk, Epochs, Window};
use millpond_allocator::Few;

use super::source::import;
use super::Opened;
use crate::client::error::Error;
use crate::client::fault::{self, Fault};
use crate::wire::{Request, MAX_FDS};

/// A range of a window, as a message names it.
#[derive(Debug, Clone, Copy)]
pub(in crate::client) struct Range<'a> {
    pub(in crate::client) window: u32,
    pub(in crate::client) offset: u64,
    pub(in crate::client) bytes: u64,
    /// Of the chunks that it touches, by address.
    pub(in crate::client) epochs: &'a [Epochs],
    pub(in crate::client) read_only: bool,
}

/// Windows of others, by number and by whether they are mapped for reading only.
pub(super) type Peers = ScatterMap<(u32, bool), Arc<Window>>;

impl Opened {
    /// Where a range of a window is mapped here, after what is missing of it has been mapped. `in_use`: whether anything else
    /// that is held here lies in a chunk.
    pub(in crate::client) fn resolve(&self, range: Range<'_>, in_use: impl Fn(&Chunk) -> bool) -> Result<Addr, Error> {
        let Range { window, offset, bytes, epochs, read_only } = range;
        if offset.checked_add(bytes).is_none_or(|end| end > self.window_bytes) {
            return Err(Error::Protocol(format!("bytes {offset} to {offset}+{bytes} do not lie in a window of {}", self.window_bytes)));
        }
        if window == self.window {
            check(self.heap.window(), offset, bytes, epochs)?;
            return Ok(self.heap.window().base() + offset);
        }
        let named = epochs.iter().try_fold(0_u64, |sum, run| sum.checked_add(run.count())).unwrap_or(u64::MAX);
        if named > bytes / self.granularity + 2 {
            return Err(Error::Protocol(format!("{named} epochs for {bytes} bytes")));
        }
        let mut peers = self.peers.lock();
        let peer = match peers.get(&(window, read_only)) {
            // Nearly always: at one price, however large the range.
            Some(peer) if peer.holds(offset, bytes, epochs) => return Ok(peer.base() + offset),
            Some(peer) => peer.clone(),
            None => {
                let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
                let peer = Window::reserve(self.driver.clone(), self.window_bytes, access)?;
                let peer = Arc::new(peer.telling(self.shared.unmapping(&self.driver)));
                peers.insert((window, read_only), peer.clone());
                peer
            }
        };
        if bytes == 0 {
            return Ok(peer.base() + offset);
        }
        let there = peer.chunks_in(offset, bytes);
        if fault::is(Fault::StaleMap) && !there.is_empty() {
            return Ok(peer.base() + offset);
        }
        // No more than the range has room for, as was seen above.
        let wanted: Vec<u64> = epochs.iter().flat_map(|run| run.each()).collect();
        let once: HashSet<u64> = wanted.iter().copied().collect();
        if once.len() != wanted.len() {
            return Err(Error::Protocol("a chunk is named twice".to_owned()));
        }
        // What is mapped under another epoch is gone at its producer, and nothing of it is held here: it would not be gone. If
        // something is, then the message is wrong.
        let stale: Vec<Chunk> = there.iter().filter(|chunk| !once.contains(&chunk.epoch)).copied().collect();
        if stale.iter().any(in_use) {
            return Err(gone(offset, bytes, epochs));
        }
        self.unmap(&peers, window, &stale);
        let _span = tracing::debug_span!("import", window, bytes).entered();
        let mapped: HashSet<u64> = there.iter().map(|chunk| chunk.epoch).collect();
        let missing: Vec<u64> = wanted.into_iter().filter(|epoch| !mapped.contains(epoch)).collect();
        for part in missing.chunks(MAX_FDS) {
            let imported = import(&self.shared.link, window, part.to_vec());
            // The owner counts them as mapped here since it sent them.
            let sent = matches!(imported, Ok(_) | Err(Error::Descriptors(_)));
            if let Err(error) = imported.and_then(|chunks| Ok(peer.map(&chunks)?)) {
                if sent {
                    self.say_unmapped(&peers, window, part.iter().copied());
                }
                return Err(error);
            }
        }
        check(&peer, offset, bytes, epochs)?;
        Ok(peer.base() + offset)
    }

    /// Drops mappings of a peer's chunks, and tells the owner, which waits for that.
    fn unmap(&self, peers: &Peers, window: u32, chunks: &[Chunk]) {
        for peer in both(peers, window) {
            for chunk in chunks {
                if let Err(error) = peer.unmap(chunk.epoch) {
                    tracing::error!(epoch = chunk.epoch, %error, "a peer's chunk could not be unmapped");
                }
            }
        }
        self.say_unmapped(peers, window, chunks.iter().map(|chunk| chunk.epoch));
    }

    /// Tells the owner of those chunks that are mapped nowhere here.
    fn say_unmapped(&self, peers: &Peers, window: u32, epochs: impl Iterator<Item = u64>) {
        let mapped: Vec<u64> = both(peers, window).flat_map(|peer| peer.chunks()).map(|chunk| chunk.epoch).collect();
        let epochs: Vec<u64> = epochs.filter(|epoch| !mapped.contains(epoch)).collect();
        if !epochs.is_empty() {
            // Without an owner nobody waits for it.
            let _ = self.shared.link.tell(Request::Unmapped { epochs });
        }
    }

    /// The owner's revoke: drops what is mapped of these chunks. Returns the bytes that are still mapped, since something of
    /// them is in use; those go at a later [`Opened::tick`].
    pub(in crate::client) fn revoke(&self, window: u32, epochs: &[u64], in_use: impl Fn(&Chunk) -> bool) -> u64 {
        let _span = tracing::debug_span!("revoke", window, chunks = epochs.len()).entered();
        if fault::is(Fault::StaleMap) {
            return 0;
        }
        let peers = self.peers.lock();
        let mut left = 0;
        let mut later = self.revoked.lock();
        for peer in both(&peers, window) {
            for chunk in peer.chunks().into_iter().filter(|chunk| epochs.contains(&chunk.epoch)) {
                if in_use(&chunk) {
                    left += chunk.bytes;
                    if !later.contains(&(window, chunk)) {
                        later.push((window, chunk));
                    }
                } else if let Err(error) = peer.unmap(chunk.epoch) {
                    tracing::error!(epoch = chunk.epoch, %error, "a peer's chunk could not be unmapped");
                    left += chunk.bytes;
                }
            }
        }
        left
    }

    /// Unmaps what was revoked and is no longer in use, and gives back the addresses of windows in which nothing is mapped or held any
    /// more: a peer that is gone leaves such a one behind, sooner or later.
    pub(in crate::client) fn tick(&self, in_use: impl Fn(u32, &Chunk) -> bool, is_held: impl Fn(u32) -> bool) {
        if !self.revoked.lock().is_empty() {
            let peers = self.peers.lock();
            let mut later = self.revoked.lock();
            let (kept, free): (Vec<_>, Vec<_>) = later.drain(..).partition(|(window, chunk)| in_use(*window, chunk));
            *later = kept;
            for (window, chunk) in free {
                self.unmap(&peers, window, &[chunk]);
            }
        }
        self.peers.lock().retain(|(window, _), peer| {
            let stays = !peer.is_empty() || is_held(*window);
            if !stays {
                if let Err(error) = self.driver.unreserve(peer.base(), peer.bytes()) {
                    tracing::debug!(%error, "a peer's window was not given back");
                }
            }
            stays
        });
    }

    /// Unmaps whatever of others is not in use: before leaving.
    pub(in crate::client) fn drop_unused(&self, in_use: impl Fn(u32, &Chunk) -> bool) {
        let peers = self.peers.lock();
        let windows: Vec<u32> = peers.keys().map(|(window, _)| *window).collect();
        for window in windows {
            let chunks: Vec<Chunk> = both(&peers, window).flat_map(|peer| peer.chunks()).filter(|chunk| !in_use(window, chunk)).collect();
            self.unmap(&peers, window, &chunks);
        }
    }

    /// The epochs of the chunks that a mapped range of any window touches.
    pub(in crate::client) fn epochs_in(&self, window: u32, offset: u64, bytes: u64, read_only: bool) -> Few<Epochs> {
        if window == self.window {
            return self.heap.window().epochs_in(offset, bytes);
        }
        let peer = self.peers.lock().get(&(window, read_only)).cloned();
        peer.map(|peer| peer.epochs_in(offset, bytes)).unwrap_or_default()
    }

    /// The peer's window that an address lies in.
    pub(in crate::client) fn peer_window_at(&self, addr: Addr) -> Option<Arc<Window>> {
        self.peers.lock().values().find(|peer| peer.offset_of(addr).is_some()).cloned()
    }
}

/// A peer's window, as it is mapped for writing and for reading only.
fn both(peers: &Peers, window: u32) -> impl Iterator<Item = &Arc<Window>> {
    [false, true].into_iter().filter_map(move |read_only| peers.get(&(window, read_only)))
}

/// Whether what is mapped of a range are the chunks of these epochs, without a hole.
fn check(window: &Window, offset: u64, bytes: u64, epochs: &[Epochs]) -> Result<(), Error> {
    if bytes == 0 || window.holds(offset, bytes, epochs) {
        return Ok(());
    }
    Err(gone(offset, bytes, epochs))
}

fn gone(offset: u64, bytes: u64, epochs: &[Epochs]) -> Error {
    let first = epochs.iter().take(8).map(|run| format!("{} to {}", run.first(), run.last())).collect::<Vec<_>>().join(", ");
    Error::Stale(format!(
        "bytes {offset} to {offset}+{bytes} are no longer what they were when they were sent (epochs {first}): the sender gave that memory back"
    ))
}
