//! Sending: EXPORT and READY. Every hold is made before the frame leaves; no bytes on the socket, no driver call a tensor.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use millpond_allocator::driver::{Addr, Stream, StreamId};
use millpond_allocator::timeline::{Reached, Signal, TimelineError};
use millpond_allocator::Few;
use serde_json::value::RawValue;

use super::channel::{Channel, Descriptor, Frame, Kind, NOWHERE, UNCOUNTED};
use super::device::Opened;
use super::due::Due;
use super::error::Error;
use super::import::{Claimed, Import};
use super::lease::{cancel, forward, HoldRef};
use super::record::{self, now_if_on};
use super::{Client, Place};
use crate::control::{Count, Fall, Tier};

/// About what a frame takes without its tree and tensors, with a signal or two.
const FRAME_BYTES: usize = 128;
/// About what a tensor's descriptor takes.
const DESCRIPTOR_BYTES: usize = 96;

/// A tensor to be sent.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing {
    /// Its first byte in this process.
    pub addr: Addr,
    /// Its length in bytes.
    pub bytes: u64,
    /// Where that is.
    pub place: Place,
    /// The stream that wrote it; `None` where the CPU did, and it is there already.
    pub stream: Option<Stream>,
    /// Forward this import; `addr` 0 stands for all of it.
    pub import: Option<u64>,
    /// The receiver is to map it read-only.
    pub read_only: bool,
    /// What it is counted as.
    pub way: Way,
}

/// What a tensor of a message is counted as.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Way {
    /// What it is: arena memory, or a copy.
    #[default]
    Found,
    /// The value of another tier that it stands for.
    As(Tier),
    /// Nothing: it only goes with one that is counted.
    Uncounted,
}

impl Way {
    /// What it comes to, for what was found to be of a tier.
    const fn or(self, found: Tier) -> Option<Tier> {
        match self {
            Self::Found => Some(found),
            Self::As(tier) => Some(tier),
            Self::Uncounted => None,
        }
    }
}

/// What a send has done so far, to be undone if it fails.
pub(super) struct Draft<'a> {
    client: &'a Client,
    holds: Few<HoldRef>,
    signals: Few<Due>,
    /// The number of the signal of each (device, stream) that has one: few, so they are looked through.
    of_stream: Few<((u32, u64), u32)>,
    tensors: Vec<Descriptor>,
    copied: Vec<(&'a Arc<Opened>, Addr, u64)>,
    copied_bytes: u64,
    /// Device and tier of each tensor that has bytes.
    crossed: Few<(u32, Tier)>,
}

impl<'a> Draft<'a> {
    fn new(client: &'a Client, tensors: usize) -> Self {
        Self {
            client,
            holds: Few::with_capacity(tensors),
            signals: Few::new(),
            of_stream: Few::new(),
            tensors: Vec::with_capacity(tensors),
            copied: Vec::new(),
            copied_bytes: 0,
            crossed: Few::with_capacity(tensors),
        }
    }

    /// The message as it goes out.
    pub(super) fn frame(&mut self, tree: Box<RawValue>) -> Frame {
        let tensors = self.descriptors();
        let others = (0..).zip(&self.signals).filter(|(_, due)| due.slot() != self.client.shared.me);
        Frame {
            kind: Kind::Message,
            tree,
            ready: self.signals.iter().map(|due| (due.signal.timeline, due.signal.value)).collect(),
            makers: others.map(|(number, due)| (number, due.maker)).collect(),
            tensors,
        }
    }

    /// What each tensor needs is said only where there is more than one signal, or where it needs none.
    fn descriptors(&mut self) -> Vec<Descriptor> {
        let mut tensors = std::mem::take(&mut self.tensors);
        for tensor in &mut tensors {
            tensor.ready = match (self.signals.len(), tensor.ready.take()) {
                _ if tensor.window == NOWHERE => None,
                (0, _) => None,
                (1, Some(named)) if named[..] == [0] => None,
                (_, named) => Some(named.unwrap_or_default()),
            };
        }
        tensors
    }

    /// It has left: the copies belong to their leases alone.
    pub(super) fn sent(self, tensors: usize) {
        self.free_copies();
        let counters = &self.client.counters;
        counters.sent_messages.fetch_add(1, Ordering::Relaxed);
        counters.sent_tensors.fetch_add(tensors as u64, Ordering::Relaxed);
        counters.copied_tensors.fetch_add(self.copied.len() as u64, Ordering::Relaxed);
        counters.copied_bytes.fetch_add(self.copied_bytes, Ordering::Relaxed);
        for (device, tier) in &self.crossed {
            self.client.count_on(*device, Count::Sent(*tier), 1);
        }
        for (opened, _, bytes) in &self.copied {
            let why = if opened.driver.is_host() { Fall::ForeignHost } else { Fall::ForeignGpu };
            for (count, n) in [(Count::Copies, 1), (Count::CopiedBytes, *bytes), (Count::Fell(why), 1)] {
                self.client.count_on(opened.index, count, n);
            }
        }
    }

    pub(super) fn abandon(self) {
        self.holds.iter().for_each(|hold| cancel(&self.client.shared.control, *hold));
        self.free_copies();
        self.client.shared.leases.reap();
    }

    /// Copies belong to their leases alone.
    fn free_copies(&self) {
        for (opened, addr, _) in &self.copied {
            if let Err(error) = opened.heap.free(*addr) {
                tracing::error!(%error, "a copy could not be freed");
            }
        }
    }

    /// The number of a signal of this client's in the message.
    fn signal(&mut self, signal: Signal) -> u32 {
        self.due(Due { signal, maker: self.client.welcome.serial })
    }

    /// The number of anybody's signal in the message.
    fn due(&mut self, due: Due) -> u32 {
        let at = self.signals.iter().position(|other| *other == due).unwrap_or_else(|| {
            self.signals.push(due);
            self.signals.len() - 1
        });
        at as u32
    }
}

impl Client {
    /// Sends a message. Every hold is made before the frame leaves, so the caller may free everything at once. Returns which
    /// tensors had to be copied into the arena.
    ///
    /// # Errors
    /// [`Error`]; then nothing was sent and nothing is held.
    pub fn send(
        &self,
        channel: &Channel,
        tree: Box<RawValue>,
        tensors: &[Outgoing],
        timeout: Option<Duration>,
    ) -> Result<Vec<bool>, Error> {
        let at = now_if_on();
        let (mut draft, copied) = self.drafted(channel.peer().client, tensors)?;
        let frame = draft.frame(tree);
        let mut body = Vec::with_capacity(FRAME_BYTES + frame.tree.get().len() + DESCRIPTOR_BYTES * tensors.len());
        let written = serde_json::to_writer(&mut body, &frame).map_err(|error| Error::Internal(error.to_string()));
        let sent = written.and_then(|()| channel.send(&body, timeout));
        if let Err(error) = sent {
            draft.abandon();
            return Err(error);
        }
        record::sent(at, &frame.tensors, channel.peer().client);
        draft.sent(tensors.len());
        Ok(copied)
    }

    /// Everything of a message but its way: holds for the receiver, signals, copies.
    pub(super) fn drafted(&self, receiver: u32, tensors: &[Outgoing]) -> Result<(Draft<'_>, Vec<bool>), Error> {
        self.check_alive()?;
        let mut draft = Draft::new(self, tensors.len());
        match self.draft(&mut draft, receiver, tensors) {
            Ok(copied) => Ok((draft, copied)),
            Err(error) => {
                draft.abandon();
                Err(error)
            }
        }
    }

    fn draft<'a>(&'a self, draft: &mut Draft<'a>, receiver: u32, tensors: &[Outgoing]) -> Result<Vec<bool>, Error> {
        let receiver = receiver as u8;
        let mut copied = vec![false; tensors.len()];
        let mut on: Few<Option<(&Arc<Opened>, Stream)>> = Few::with_capacity(tensors.len());
        for (tensor, copied) in tensors.iter().zip(&mut copied) {
            if tensor.bytes == 0 && tensor.import.is_none() {
                draft.tensors.push(Descriptor {
                    window: NOWHERE,
                    offset: 0,
                    bytes: 0,
                    epochs: Few::new(),
                    hold: (0, 0, 0),
                    ready: None,
                    read_only: false,
                    tier: 0,
                });
                on.push(None);
                continue;
            }
            on.push(self.export(draft, tensor, receiver, copied)?);
        }
        // One signal a stream and message, after everything that the message needs has been queued.
        for (number, on) in on.into_iter().enumerate() {
            let Some((opened, stream)) = on else { continue };
            let key = (opened.index, stream.0);
            let signal = match draft.of_stream.iter().find(|(of, _)| *of == key) {
                Some((_, signal)) => *signal,
                None => {
                    let id = opened.identify(stream)?;
                    let signal = self.signal(opened, (stream, id), self.imports.claim(opened.index, id))?;
                    let at = draft.signal(signal);
                    draft.of_stream.push((key, at));
                    at
                }
            };
            if let Some(descriptor) = draft.tensors.get_mut(number) {
                descriptor.ready.get_or_insert_default().push(signal);
            }
        }
        Ok(copied)
    }

    /// Adds one tensor to a draft; returns the stream that must signal for it.
    fn export<'a>(
        &'a self,
        draft: &mut Draft<'a>,
        tensor: &Outgoing,
        receiver: u8,
        copied: &mut bool,
    ) -> Result<Option<(&'a Arc<Opened>, Stream)>, Error> {
        if let Some(handle) = tensor.import {
            let import = self.imports.with(handle, |import| import.clone())?;
            return self.pass_on(draft, &import, tensor, receiver);
        }
        let device = self.device(tensor.place)?;
        let opened = device.open()?;
        match opened.locate(tensor.addr) {
            Some((window, _)) if window != opened.window => {
                let import = self.imports.find(tensor.addr).ok_or_else(|| {
                    Error::Stale(format!("{:#x} lies in another process's window, but nothing there is held here any more", tensor.addr))
                })?;
                return self.pass_on(draft, &import, tensor, receiver);
            }
            Some((_, offset)) => {
                let (block, block_bytes) = opened
                    .heap
                    .block_at(tensor.addr)
                    .ok_or_else(|| Error::InvalidArgument(format!("{:#x} is in no live block of the arena", tensor.addr)))?;
                if (tensor.addr - block).checked_add(tensor.bytes).is_none_or(|end| end > block_bytes) {
                    return Err(Error::InvalidArgument(format!(
                        "{} bytes at {:#x} reach beyond their block of {block_bytes} at {block:#x}",
                        tensor.bytes, tensor.addr
                    )));
                }
                self.lend(draft, opened, block, (offset, tensor.bytes), tensor, (receiver, tensor.way.or(Tier::Arena)))?;
                if opened.driver.is_host() {
                    let copying = self.departures.ready(tensor.addr, tensor.bytes);
                    let signals: Vec<u32> = copying.into_iter().map(|signal| draft.signal(signal)).collect();
                    if let Some(descriptor) = draft.tensors.last_mut() {
                        descriptor.ready.get_or_insert_default().extend_from_slice(&signals);
                    }
                }
            }
            None => {
                *copied = true;
                let stream = tensor.stream.unwrap_or(Stream::LEGACY);
                let copy = opened.heap.allocate(tensor.bytes, stream)?;
                draft.copied.push((opened, copy, tensor.bytes));
                draft.copied_bytes += tensor.bytes;
                self.copy_into_arena(opened, copy, tensor, stream)?;
                let offset = copy - opened.heap.window().base();
                self.lend(draft, opened, copy, (offset, tensor.bytes), tensor, (receiver, tensor.way.or(Tier::Copy)))?;
                // The copy is queued, whoever wrote its source.
                return Ok((!opened.driver.is_host() || tensor.stream.is_some()).then_some((opened, stream)));
            }
        }
        Ok(tensor.stream.map(|stream| (opened, stream)))
    }

    fn lend(
        &self,
        draft: &mut Draft<'_>,
        opened: &Arc<Opened>,
        block: Addr,
        range: (u64, u64),
        tensor: &Outgoing,
        (receiver, tier): (u8, Option<Tier>),
    ) -> Result<(), Error> {
        let hold = self.shared.leases.lend(&opened.heap, opened.window, block, range, receiver)?;
        draft.holds.push(hold);
        draft.tensors.push(Descriptor {
            window: opened.window,
            offset: range.0,
            bytes: range.1,
            epochs: opened.heap.window().epochs_in(range.0, range.1),
            hold: (hold.producer, hold.index, hold.generation),
            ready: None,
            read_only: tensor.read_only,
            tier: tier.map_or(UNCOUNTED, |tier| tier as u8),
        });
        draft.crossed.extend(tier.map(|tier| (opened.index, tier)));
        Ok(())
    }

    /// Another's bytes go on to a third: its hold is made in the producer's table, while ours still stands.
    fn pass_on(
        &self,
        draft: &mut Draft<'_>,
        import: &Import,
        tensor: &Outgoing,
        receiver: u8,
    ) -> Result<Option<(&Arc<Opened>, Stream)>, Error> {
        if import.lost {
            return Err(self.died(import));
        }
        let inside = |addr: Addr| {
            let at = addr.checked_sub(import.addr?)?;
            at.checked_add(tensor.bytes).filter(|end| *end <= import.bytes).map(|_| at)
        };
        let (offset, bytes) = match (tensor.addr, inside(tensor.addr)) {
            (0, _) => (import.offset, import.bytes),
            (_, Some(at)) => (import.offset + at, tensor.bytes),
            (addr, None) => {
                return Err(Error::InvalidArgument(format!(
                    "{} bytes at {addr:#x} are not part of the value that is forwarded",
                    tensor.bytes
                )))
            }
        };
        let hold = forward(&self.shared.control, self.shared.me, import.hold, (offset, bytes), receiver)?;
        draft.holds.push(hold);
        let mut ready = Few::new();
        for due in &import.ready {
            match due.look(&self.shared.control) {
                Reached::Yes => {}
                Reached::No => ready.push(draft.due(*due)),
                Reached::Never => return Err(self.died(import)),
            }
        }
        // The range may touch fewer chunks than the import.
        let epochs = match import.addr {
            None => import.epochs.clone(),
            Some(_) if (offset, bytes) == (import.offset, import.bytes) => import.epochs.clone(),
            Some(_) => self.device_at(import.device)?.open()?.epochs_in(import.window, offset, bytes, import.read_only),
        };
        draft.tensors.push(Descriptor {
            window: import.window,
            offset,
            bytes,
            epochs,
            hold: (hold.producer, hold.index, hold.generation),
            ready: Some(ready),
            read_only: tensor.read_only || import.read_only,
            tier: Tier::Arena as u8,
        });
        draft.crossed.push((import.device, Tier::Arena));
        // If our streams may have written it, they too must be done first.
        let Some(stream) = tensor.stream.filter(|_| import.addr.is_some()) else { return Ok(None) };
        let opened = self.device_at(import.device)?.open()?;
        Ok(Some((opened, stream)))
    }

    fn copy_into_arena(&self, opened: &Opened, to: Addr, tensor: &Outgoing, stream: Stream) -> Result<(), Error> {
        if opened.driver.is_host() {
            // The CPU reads the source, so the CPU copies it; by the time this returns, the caller may change it.
            let id = StreamWait { opened, stream };
            return id.copy_host(to, tensor.addr, tensor.bytes);
        }
        Ok(opened.driver.copy(to, tensor.addr, tensor.bytes, stream)?)
    }

    /// Queues a signal, which is the DONE of what was claimed before it.
    pub(super) fn signal(&self, opened: &Opened, (stream, id): (Stream, StreamId), claimed: Claimed) -> Result<Signal, TimelineError> {
        let signal = opened.timelines.signal_as(stream, id);
        self.imports.part(claimed, signal.as_ref().ok().copied());
        signal
    }
}

/// Copies on the host device, ordered behind a stream.
struct StreamWait<'a> {
    opened: &'a Opened,
    stream: Stream,
}

impl StreamWait<'_> {
    fn copy_host(&self, to: Addr, from: Addr, bytes: u64) -> Result<(), Error> {
        self.opened.driver.copy(to, from, bytes, self.stream)?;
        Ok(self.opened.driver.stream_synchronize(self.stream)?)
    }
}
