//! Sending and receiving: EXPORT, READY, IMPORT, DONE. No bytes on the socket, no driver call a tensor.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond_allocator::driver::{Addr, DeviceInfo, Stream, StreamId};
use millpond_allocator::timeline::{Reached, Signal, TimelineError};
use serde_json::value::RawValue;

use super::channel::{Channel, Descriptor, Frame, Kind, NOWHERE};
use super::device::{Device, Opened, Range};
use super::error::Error;
use super::fault::{self, Fault};
use super::import::{Claimed, Import};
use super::lease::{cancel, forward, HoldRef};
use super::link::LONGEST;
use super::{Client, Place};
use crate::control::TIMELINES_PER_CLIENT;
use crate::wire::Peer;

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
}

/// A tensor that was received.
#[derive(Debug, Clone, Copy)]
pub struct Incoming {
    /// Where it is mapped here; 0 if it is not (yet), or has no bytes.
    pub addr: Addr,
    /// Its length in bytes.
    pub bytes: u64,
    /// The import, to be released once; 0 for one without bytes.
    pub import: u64,
    /// The device of the arena that holds it.
    pub place: Place,
    /// The receiver may not write.
    pub read_only: bool,
}

/// A message that was received.
#[derive(Debug)]
pub struct Message {
    /// The sender's tree.
    pub tree: Box<RawValue>,
    /// Its tensors.
    pub tensors: Vec<Incoming>,
}

/// How to receive.
pub struct ReceiveOptions<'a> {
    /// How long to wait for a message.
    pub timeout: Option<Duration>,
    /// Map nothing and wait for nothing: the imports are opened later, or only forwarded.
    pub lazy: bool,
    /// Block until READY is reached, or its producer has died.
    pub wait: bool,
    /// The stream of a device that later work will use. `None`: the CPU reads, so READY is waited for here.
    pub stream: &'a dyn Fn(&DeviceInfo) -> Option<Stream>,
}

/// What a send has done so far, to be undone if it fails.
pub(super) struct Draft<'a> {
    client: &'a Client,
    holds: Vec<HoldRef>,
    signals: Vec<Signal>,
    of_stream: HashMap<(u32, u64), u32>,
    tensors: Vec<Descriptor>,
    copied: Vec<(Arc<Opened>, Addr)>,
    copied_bytes: u64,
}

impl<'a> Draft<'a> {
    fn new(client: &'a Client, tensors: usize) -> Self {
        Self {
            client,
            holds: Vec::with_capacity(tensors),
            signals: Vec::new(),
            of_stream: HashMap::new(),
            tensors: Vec::with_capacity(tensors),
            copied: Vec::new(),
            copied_bytes: 0,
        }
    }

    /// The message as it goes out.
    pub(super) fn frame(&mut self, tree: Box<RawValue>) -> Frame {
        Frame {
            kind: Kind::Message,
            tree,
            ready: self.signals.iter().map(|signal| (signal.timeline, signal.value)).collect(),
            tensors: std::mem::take(&mut self.tensors),
        }
    }

    /// It has left: the copies belong to their leases alone.
    pub(super) fn sent(self, tensors: usize) {
        self.free_copies();
        let counters = &self.client.counters;
        counters.sent_messages.fetch_add(1, Ordering::Relaxed);
        counters.sent_tensors.fetch_add(tensors as u64, Ordering::Relaxed);
        counters.copied_tensors.fetch_add(self.copied.len() as u64, Ordering::Relaxed);
        counters.copied_bytes.fetch_add(self.copied_bytes, Ordering::Relaxed);
    }

    pub(super) fn abandon(self) {
        self.holds.iter().for_each(|hold| cancel(&self.client.shared.control, *hold));
        self.free_copies();
        self.client.shared.leases.reap();
    }

    /// Copies belong to their leases alone.
    fn free_copies(&self) {
        for (opened, addr) in &self.copied {
            if let Err(error) = opened.heap.free(*addr) {
                tracing::error!(%error, "a copy could not be freed");
            }
        }
    }

    /// The number of a signal in the message.
    fn signal(&mut self, signal: Signal) -> u32 {
        let at = self.signals.iter().position(|s| *s == signal).unwrap_or_else(|| {
            self.signals.push(signal);
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
        let (mut draft, copied) = self.drafted(channel.peer().client, tensors)?;
        let frame = draft.frame(tree);
        let sent =
            serde_json::to_vec(&frame).map_err(|error| Error::Internal(error.to_string())).and_then(|body| channel.send(&body, timeout));
        if let Err(error) = sent {
            draft.abandon();
            return Err(error);
        }
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

    fn draft(&self, draft: &mut Draft<'_>, receiver: u32, tensors: &[Outgoing]) -> Result<Vec<bool>, Error> {
        let receiver = receiver as u8;
        let mut copied = vec![false; tensors.len()];
        let mut on: Vec<Option<(Arc<Opened>, Stream)>> = Vec::with_capacity(tensors.len());
        for (tensor, copied) in tensors.iter().zip(&mut copied) {
            if tensor.bytes == 0 && tensor.import.is_none() {
                draft.tensors.push(Descriptor {
                    window: NOWHERE,
                    offset: 0,
                    bytes: 0,
                    epochs: Vec::new(),
                    hold: (0, 0, 0),
                    ready: Vec::new(),
                    read_only: false,
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
            let signal = match draft.of_stream.get(&key) {
                Some(signal) => *signal,
                None => {
                    let id = opened.driver.stream_id(stream)?;
                    let signal = self.signal(&opened, stream, self.imports.claim(opened.index, id))?;
                    let at = draft.signal(signal);
                    draft.of_stream.insert(key, at);
                    at
                }
            };
            if let Some(descriptor) = draft.tensors.get_mut(number) {
                descriptor.ready.push(signal);
            }
        }
        Ok(copied)
    }

    /// Adds one tensor to a draft; returns the stream that must signal for it.
    fn export(
        &self,
        draft: &mut Draft<'_>,
        tensor: &Outgoing,
        receiver: u8,
        copied: &mut bool,
    ) -> Result<Option<(Arc<Opened>, Stream)>, Error> {
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
                self.lend(draft, &opened, block, (offset, tensor.bytes), tensor, receiver)?;
            }
            None => {
                *copied = true;
                let stream = tensor.stream.unwrap_or(Stream::LEGACY);
                let copy = opened.heap.allocate(tensor.bytes, stream)?;
                draft.copied.push((opened.clone(), copy));
                draft.copied_bytes += tensor.bytes;
                self.copy_in(&opened, copy, tensor, stream)?;
                let offset = copy - opened.heap.window().base();
                self.lend(draft, &opened, copy, (offset, tensor.bytes), tensor, receiver)?;
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
        receiver: u8,
    ) -> Result<(), Error> {
        let hold = self.shared.leases.lend(&opened.heap, opened.window, block, range, receiver)?;
        draft.holds.push(hold);
        draft.tensors.push(Descriptor {
            window: opened.window,
            offset: range.0,
            bytes: range.1,
            epochs: opened.own_epochs(range.0, range.1),
            hold: (hold.producer, hold.index, hold.generation),
            ready: Vec::new(),
            read_only: tensor.read_only,
        });
        Ok(())
    }

    /// Another's bytes go on to a third: its hold is made in the producer's table, while ours still stands.
    fn pass_on(
        &self,
        draft: &mut Draft<'_>,
        import: &Import,
        tensor: &Outgoing,
        receiver: u8,
    ) -> Result<Option<(Arc<Opened>, Stream)>, Error> {
        if import.lost {
            return Err(died(import));
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
        let unreached = |s: &&Signal| self.shared.control.timeline(s.timeline).is_some_and(|word| word.reached(s.value) != Reached::Yes);
        let ready =
            import.ready.iter().filter(unreached).copied().collect::<Vec<_>>().into_iter().map(|signal| draft.signal(signal)).collect();
        // The range may touch fewer chunks than the import.
        let epochs = match (import.epochs.len(), import.addr) {
            (0 | 1, _) | (_, None) => import.epochs.clone(),
            _ => self.device_at(import.device)?.open()?.epochs_in(import.window, offset, bytes, import.read_only),
        };
        draft.tensors.push(Descriptor {
            window: import.window,
            offset,
            bytes,
            epochs,
            hold: (hold.producer, hold.index, hold.generation),
            ready,
            read_only: tensor.read_only || import.read_only,
        });
        // If our streams may have written it, they too must be done first.
        let Some(stream) = tensor.stream.filter(|_| import.addr.is_some()) else { return Ok(None) };
        let opened = self.device_at(import.device)?.open()?;
        Ok(Some((opened, stream)))
    }

    fn copy_in(&self, opened: &Opened, to: Addr, tensor: &Outgoing, stream: Stream) -> Result<(), Error> {
        if opened.driver.is_host() {
            // The CPU reads the source, so the CPU copies it; by the time this returns, the caller may change it.
            let id = StreamWait { opened, stream };
            return id.copy_host(to, tensor.addr, tensor.bytes);
        }
        Ok(opened.driver.copy(to, tensor.addr, tensor.bytes, stream)?)
    }

    /// Receives a message.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Closed`], [`Error::Stale`] for a value that is not what it was; with `wait`,
    /// [`Error::PeerDied`] for one that never got ready. Nothing of a failed message stays held.
    pub fn receive(&self, channel: &Channel, options: &ReceiveOptions<'_>) -> Result<Message, Error> {
        self.check_alive()?;
        let frame = channel.receive(options.timeout)?;
        let result = self.taken_up(frame, options, channel.peer());
        if matches!(result, Err(Error::Protocol(_) | Error::Stale(_))) {
            channel.distrust();
        }
        result
    }

    /// The message that a frame is; where one of its values is refused, all are let go.
    pub(super) fn taken_up(&self, frame: Frame, options: &ReceiveOptions<'_>, sender: &Peer) -> Result<Message, Error> {
        let mut tensors = Vec::with_capacity(frame.tensors.len());
        if let Err(error) = self.take_up(&frame, options, sender, &mut tensors) {
            tensors.iter().for_each(|tensor| drop(self.release(tensor.import)));
            // Those that were taken up are left alone by this.
            frame.tensors.iter().for_each(|descriptor| self.imports.decline(descriptor.hold()));
            return Err(error);
        }
        self.counters.received_messages.fetch_add(1, Ordering::Relaxed);
        self.counters.received_tensors.fetch_add(tensors.len() as u64, Ordering::Relaxed);
        Ok(Message { tree: frame.tree, tensors })
    }

    fn take_up(&self, frame: &Frame, options: &ReceiveOptions<'_>, sender: &Peer, tensors: &mut Vec<Incoming>) -> Result<(), Error> {
        for descriptor in &frame.tensors {
            if descriptor.window == NOWHERE {
                tensors.push(Incoming { addr: 0, bytes: 0, import: 0, place: Place::Host, read_only: false });
                continue;
            }
            let (device, producer) = self.window(descriptor.window)?;
            let device = self.device_at(device)?;
            if descriptor.hold.0 != producer.client {
                return Err(Error::Protocol(format!("{} sent a value whose hold is in another client's table", sender.name)));
            }
            if descriptor.offset.checked_add(descriptor.bytes).is_none_or(|end| end > device.grant.window_bytes) {
                return Err(Error::Protocol(format!(
                    "{} sent bytes {} to {}+{} of a window of {} bytes",
                    sender.name, descriptor.offset, descriptor.offset, descriptor.bytes, device.grant.window_bytes
                )));
            }
            let (ready, lost) = self.not_ready(frame, descriptor, sender)?;
            let import = Import {
                hold: descriptor.hold(),
                window: descriptor.window,
                device: device.grant.index,
                offset: descriptor.offset,
                bytes: descriptor.bytes,
                epochs: descriptor.epochs.clone(),
                ready,
                read_only: descriptor.read_only,
                addr: None,
                streams: Vec::new(),
                lost,
                sender: sender.name.clone(),
            };
            let handle = self.imports.add(import)?;
            let place = if device.is_host() { Place::Host } else { Place::Device(device.id) };
            tensors.push(Incoming { addr: 0, bytes: descriptor.bytes, import: handle, place, read_only: descriptor.read_only });
            if options.lazy {
                continue;
            }
            let stream = (options.stream)(device.open()?.driver.device());
            let addr = self.open_import(handle, stream, options.wait, options.timeout)?;
            if let Some(last) = tensors.last_mut() {
                last.addr = addr;
            }
        }
        Ok(())
    }

    /// The signals of a value that are not reached yet, and whether one never will be.
    fn not_ready(&self, frame: &Frame, descriptor: &Descriptor, sender: &Peer) -> Result<(Vec<Signal>, bool), Error> {
        let (mut left, mut lost) = (Vec::new(), false);
        for number in &descriptor.ready {
            let (timeline, value) = frame.ready.get(*number as usize).copied().ok_or_else(|| {
                Error::Protocol(format!("{} sent a value that names signal {number} of {}", sender.name, frame.ready.len()))
            })?;
            let word =
                self.shared.control.timeline(timeline).ok_or_else(|| {
                    Error::Protocol(format!("{} sent a signal of timeline {timeline}, which does not exist", sender.name))
                })?;
            // A sender that died long ago: what its timelines say now may be another client's.
            let slot = timeline / TIMELINES_PER_CLIENT as u32;
            let row = self.shared.control.client(slot).and_then(|cell| cell.read());
            let another = slot == sender.client && row.is_some_and(|row| row.serial != sender.serial);
            match word.reached(value) {
                _ if another => lost = true,
                Reached::Yes => {}
                Reached::Never => lost = true,
                Reached::No => left.push(Signal { timeline, value }),
            }
        }
        Ok((left, lost))
    }

    /// Maps an import, if it is not, and makes a stream wait for READY; without a stream, or with `wait`, this thread waits.
    ///
    /// # Errors
    /// [`Error::PeerDied`] if READY never comes, [`Error::Stale`], [`Error::Timeout`].
    pub fn open_import(&self, handle: u64, stream: Option<Stream>, wait: bool, timeout: Option<Duration>) -> Result<Addr, Error> {
        self.check_alive()?;
        let import = self.imports.with(handle, |import| import.clone())?;
        if import.lost {
            return Err(died(&import));
        }
        let opened = self.device_at(import.device)?.open()?;
        let addr = match import.addr {
            Some(addr) => addr,
            None => {
                let Import { window, offset, bytes, read_only, .. } = import;
                let range = Range { window, offset, bytes, epochs: &import.epochs, read_only };
                opened.resolve(range, |chunk| self.imports.uses(window, chunk, Some(handle)))?
            }
        };
        // On every import: the same block may have been sent again with new contents.
        let on_cpu = wait || stream.is_none() || self.host_waits;
        let until = deadline(timeout);
        for signal in import.ready.iter().filter(|_| !fault::is(Fault::SkipReadyWait)) {
            match stream {
                Some(stream) if !on_cpu => match opened.timelines.wait(stream, *signal) {
                    Err(TimelineError::Dead(_)) => return Err(died(&import)),
                    result => result?,
                },
                _ => self
                    .await_until(*signal, until)
                    .map_err(|error| if matches!(error, Error::PeerDied(_)) { died(&import) } else { error })?,
            }
        }
        let id = stream.map(|stream| opened.identify(stream)).transpose()?;
        self.imports.with(handle, |import| {
            import.addr = Some(addr);
            if on_cpu {
                import.ready.clear();
            }
            if let Some(id) = id.filter(|id| !import.streams.contains(id)) {
                import.streams.push(id);
            }
        })?;
        if let (Some(stream), Some(id)) = (stream, id) {
            self.part(&opened, stream, id);
        }
        Ok(addr)
    }

    /// Queues the DONE of what was let go of on this stream, now that somebody hands it to us.
    fn part(&self, opened: &Opened, stream: Stream, id: StreamId) {
        let claimed = self.imports.claim(opened.index, id);
        if !claimed.is_empty() {
            // Under capture, say, it cannot be now: another time.
            let _ = self.signal(opened, stream, claimed);
        }
    }

    /// Queues a signal, which is the DONE of what was claimed before it.
    fn signal(&self, opened: &Opened, stream: Stream, claimed: Claimed) -> Result<Signal, TimelineError> {
        let signal = opened.timelines.signal(stream);
        self.imports.part(claimed, signal.as_ref().ok().copied());
        signal
    }

    /// Blocks until a value is what was sent.
    ///
    /// # Errors
    /// [`Error::PeerDied`], [`Error::Timeout`].
    pub fn import_ready(&self, handle: u64, timeout: Option<Duration>) -> Result<(), Error> {
        let import = self.imports.with(handle, |import| import.clone())?;
        if import.lost {
            return Err(died(&import));
        }
        let deadline = deadline(timeout);
        import.ready.iter().try_for_each(|signal| {
            self.await_until(*signal, deadline).map_err(|error| if matches!(error, Error::PeerDied(_)) { died(&import) } else { error })
        })
    }

    /// Lets go of an import. Never blocks, never calls the driver; DONE follows on the GPU's time.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for one that was released before.
    pub fn release(&self, handle: u64) -> Result<(), Error> {
        // In a forked child it is the parent's, which still uses it.
        if handle == 0 || self.is_forked() {
            return Ok(());
        }
        if self.imports.release(handle)? {
            self.nudge();
        }
        Ok(())
    }

    /// Notes that a stream uses an import, so that its DONE follows that stream too. False for an address of no import.
    ///
    /// # Errors
    /// What the driver says of the stream.
    pub fn record_import_stream(&self, addr: Addr, place: Place, stream: Stream) -> Result<bool, Error> {
        self.check_alive()?;
        let opened = self.device(place)?.open()?;
        Ok(self.imports.record_stream(addr, opened.identify(stream)?))
    }

    /// Waits until every receiver of the block at an address is done with it: the stream on the GPU, and without one, or where
    /// a receiver still holds it, this thread.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub fn wait_done(&self, addr: Addr, place: Place, stream: Option<Stream>, timeout: Option<Duration>) -> Result<(), Error> {
        self.check_alive()?;
        let opened = self.device(place)?.open()?;
        let Some((block, _)) = opened.heap.block_at(addr) else { return Ok(()) };
        let offset = block - opened.heap.window().base();
        let deadline = deadline(timeout);
        let mut pause = Pause::default();
        loop {
            let pending = self.shared.leases.pending(opened.window, offset);
            if let Some(done) = pending.into_iter().collect::<Option<Vec<_>>>() {
                return done.into_iter().try_for_each(|(timeline, value)| {
                    let signal = Signal { timeline, value };
                    let waited = match stream.filter(|_| !self.host_waits) {
                        Some(stream) => opened.timelines.wait(stream, signal).map_err(Error::from),
                        None => self.await_until(signal, deadline),
                    };
                    // Of a receiver that died nothing runs any more.
                    waited.or_else(|error| if matches!(error, Error::PeerDied(_)) { Ok(()) } else { Err(error) })
                });
            }
            if !pause.wait(deadline) {
                return Err(Error::Timeout("a receiver still holds the block".to_owned()));
            }
        }
    }

    /// [`Client::open_import`] for a caller that has a GPU's stream at hand and does not know whether the value is on one.
    ///
    /// # Errors
    /// As [`Client::open_import`].
    pub fn open_on(&self, handle: u64, stream: Stream, wait: bool) -> Result<Incoming, Error> {
        self.check_alive()?;
        let (device, bytes, read_only) = self.imports.with(handle, |import| (import.device, import.bytes, import.read_only))?;
        let device = self.device_at(device)?;
        let (place, stream) = if device.is_host() { (Place::Host, None) } else { (Place::Device(device.id), Some(stream)) };
        let addr = self.open_import(handle, stream, wait, None)?;
        Ok(Incoming { addr, bytes, import: handle, place, read_only })
    }

    /// Notes that a stream uses whatever of ours is at an address: a block, an import, or nothing.
    ///
    /// # Errors
    /// What the driver says of the stream.
    pub fn record_anywhere(&self, addr: Addr, stream: Stream) -> Result<(), Error> {
        self.check_alive()?;
        for opened in self.devices.iter().filter_map(Device::if_open) {
            match opened.locate(addr) {
                Some((window, _)) if window == opened.window && !self.imports.holds_own(addr) => {
                    opened.heap.record_stream(addr, stream).map(|_| ())?
                }
                Some(_) => {
                    self.imports.record_stream(addr, opened.identify(stream)?);
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Frees a block of any device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an address that is no live block.
    pub fn free(&self, addr: Addr) -> Result<(), Error> {
        // In a forked child it is the parent's.
        if self.is_forked() {
            return Ok(());
        }
        let heap = self
            .devices
            .iter()
            .filter_map(Device::if_open)
            .map(|opened| opened.heap.clone())
            .find(|h| h.window().offset_of(addr).is_some());
        heap.ok_or_else(|| Error::InvalidArgument(format!("{addr:#x} lies in no window of this process")))?.free(addr).map_err(Error::from)
    }

    /// [`Client::wait_done`] for a caller that does not know the device.
    ///
    /// # Errors
    /// As [`Client::wait_done`].
    pub fn wait_done_at(&self, addr: Addr, stream: Stream, wait: bool, timeout: Option<Duration>) -> Result<(), Error> {
        let found = self.devices.iter().find(|device| device.if_open().is_some_and(|o| o.heap.window().offset_of(addr).is_some()));
        let Some(device) = found else { return Ok(()) };
        let stream = (!device.is_host() && !wait).then_some(stream);
        self.wait_done(addr, Place::Device(device.id), stream, timeout)
    }

    /// Waits on the CPU. If nobody is left who could signal, the owner's poison ends this, or where there is no owner, the
    /// tender's.
    fn await_until(&self, signal: Signal, deadline: Option<Instant>) -> Result<(), Error> {
        let word =
            self.shared.control.timeline(signal.timeline).ok_or_else(|| Error::Protocol(format!("no timeline {}", signal.timeline)))?;
        let mut pause = Pause::default();
        loop {
            match word.reached(signal.value) {
                Reached::Yes => return Ok(()),
                Reached::Never => return Err(Error::PeerDied("its producer died before the value was ready".to_owned())),
                Reached::No => {}
            }
            if !pause.wait(deadline) {
                return Err(Error::Timeout("the value was not ready in time".to_owned()));
            }
        }
    }
}

/// When a time-out is over; `None`: never.
fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.map(|timeout| Instant::now() + timeout.min(LONGEST))
}

fn died(import: &Import) -> Error {
    Error::PeerDied(format!(
        "the process that made this value died before it was ready ({} bytes, received from {}): its bytes are not what was to be sent",
        import.bytes, import.sender
    ))
}

/// Waits a little, and a little longer each time: a word in shared memory that a GPU or another process will change.
#[derive(Debug, Default)]
struct Pause(u32);

impl Pause {
    /// False when the deadline has passed.
    fn wait(&mut self, deadline: Option<Instant>) -> bool {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            0..=500 => std::hint::spin_loop(),
            501..=600 => std::thread::yield_now(),
            n => std::thread::sleep(Duration::from_micros(u64::from(n - 600).min(500))),
        }
        deadline.is_none_or(|at| Instant::now() < at)
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
