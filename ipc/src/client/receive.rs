//! Receiving: IMPORT, and everything until the value is let go. No driver call a tensor but the wait.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond_allocator::driver::{Addr, DeviceInfo, Stream};
use millpond_allocator::timeline::{Reached, Signal, TimelineError, Word};
use millpond_allocator::Few;
use serde_json::value::RawValue;

use super::channel::{Channel, Descriptor, Frame, NOWHERE, UNCOUNTED};
use super::device::{Device, Opened, Range};
use super::due::{serial_of, slot_of, Due};
use super::error::Error;
use super::fault::{self, Fault};
use super::import::Import;
use super::pause::{deadline, Pause};
use super::record::{self, now_if_on};
use super::{Client, Place};
use crate::control::{Count, Tier};
use crate::wire::Peer;

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

/// The signals of a message: [`Frame::ready`], [`Frame::makers`].
struct Signals<'a> {
    values: &'a [(u32, u64)],
    makers: &'a [(u32, u64)],
}

impl Client {
    /// Receives a message.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Closed`], [`Error::Stale`] for a value that is not what it was; with `wait`,
    /// [`Error::PeerDied`] for one that never got ready. Nothing of a failed message stays held.
    pub fn receive(&self, channel: &Channel, options: &ReceiveOptions<'_>) -> Result<Message, Error> {
        self.check_alive()?;
        let frame = channel.receive(options.timeout)?;
        let result = self.taken_up(frame, options, channel.shared_peer());
        if matches!(result, Err(Error::Protocol(_) | Error::Stale(_))) {
            channel.distrust();
        }
        result
    }

    /// The message that a frame is; where one of its values is refused, all are let go.
    pub(super) fn taken_up(&self, mut frame: Frame, options: &ReceiveOptions<'_>, sender: &Arc<Peer>) -> Result<Message, Error> {
        let mut tensors = Vec::with_capacity(frame.tensors.len());
        if let Err(error) = self.take_up(&mut frame, options, sender, &mut tensors) {
            tensors.iter().for_each(|tensor| drop(self.release(tensor.import)));
            // Those that were taken up are left alone by this.
            frame.tensors.iter().for_each(|descriptor| self.imports.decline(descriptor.hold()));
            return Err(error);
        }
        self.counters.received_messages.fetch_add(1, Ordering::Relaxed);
        self.counters.received_tensors.fetch_add(tensors.len() as u64, Ordering::Relaxed);
        let counted = |(descriptor, tensor): &(&Descriptor, &Incoming)| tensor.import != 0 && descriptor.tier != UNCOUNTED;
        for (descriptor, tensor) in frame.tensors.iter().zip(&tensors).filter(counted) {
            if let Ok(device) = self.device(tensor.place) {
                self.count_on(device.grant.index, Count::Received(Tier::from_number(descriptor.tier)), 1);
            }
        }
        Ok(Message { tree: frame.tree, tensors })
    }

    fn take_up(
        &self,
        frame: &mut Frame,
        options: &ReceiveOptions<'_>,
        sender: &Arc<Peer>,
        tensors: &mut Vec<Incoming>,
    ) -> Result<(), Error> {
        let signals = Signals { values: &frame.ready, makers: &frame.makers };
        for descriptor in &mut frame.tensors {
            if descriptor.window == NOWHERE {
                tensors.push(Incoming { addr: 0, bytes: 0, import: 0, place: Place::Host, read_only: false });
                continue;
            }
            let (device, producer) = self.window(descriptor.window)?;
            let device = self.device_at(device)?;
            if descriptor.hold.0 != producer {
                return Err(Error::Protocol(format!("{} sent a value whose hold is in another client's table", sender.name)));
            }
            if descriptor.offset.checked_add(descriptor.bytes).is_none_or(|end| end > device.grant.window_bytes) {
                return Err(Error::Protocol(format!(
                    "{} sent bytes {} to {}+{} of a window of {} bytes",
                    sender.name, descriptor.offset, descriptor.offset, descriptor.bytes, device.grant.window_bytes
                )));
            }
            let (ready, lost) = self.not_ready(&signals, descriptor, sender)?;
            let import = Import {
                hold: descriptor.hold(),
                window: descriptor.window,
                device: device.grant.index,
                offset: descriptor.offset,
                bytes: descriptor.bytes,
                epochs: std::mem::take(&mut descriptor.epochs),
                ready,
                read_only: descriptor.read_only,
                addr: None,
                streams: Few::new(),
                abroad: Vec::new(),
                adopted: false,
                lost,
                cause: None,
                sender: sender.clone(),
            };
            let handle = self.imports.add(import)?;
            let place = self.place_of(device);
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
    fn not_ready(&self, signals: &Signals<'_>, descriptor: &Descriptor, sender: &Peer) -> Result<(Few<Due>, bool), Error> {
        let (mut left, mut lost) = (Few::new(), false);
        let named = match &descriptor.ready {
            Some(named) => named.as_slice(),
            None if signals.values.is_empty() => &[],
            None if signals.values.len() == 1 => &[0],
            None => {
                let several = signals.values.len();
                return Err(Error::Protocol(format!("{} sent a value that does not say which of {several} signals it needs", sender.name)));
            }
        };
        for number in named {
            let (timeline, value) = signals.values.get(*number as usize).copied().ok_or_else(|| {
                Error::Protocol(format!("{} sent a value that names signal {number} of {}", sender.name, signals.values.len()))
            })?;
            let control = &self.shared.control;
            if control.timeline(timeline).is_none() {
                return Err(Error::Protocol(format!("{} sent a signal of timeline {timeline}, which does not exist", sender.name)));
            }
            let signal = Signal { timeline, value };
            // A sender is who its channel says; of another's signal, that it passed on, it says itself who is to give it.
            let named = || signals.makers.iter().find(|(of, _)| of == number).map(|(_, serial)| *serial);
            let maker = if slot_of(signal) == sender.client { Some(sender.serial) } else { named() };
            let due = Due { signal, maker: maker.or_else(|| serial_of(control, slot_of(signal))).unwrap_or_default() };
            match due.look(control) {
                Reached::Yes => {}
                Reached::Never => lost = true,
                Reached::No => left.push(due),
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
            return Err(self.died(&import));
        }
        let opened = self.device_at(import.device)?.open()?;
        let addr = self.found(handle, &import, opened)?;
        // On every import: the same block may have been sent again with new contents.
        let on_cpu = wait || stream.is_none() || self.host_waits;
        let until = if on_cpu { deadline(timeout) } else { None };
        let identify = || stream.map(|stream| opened.identify(stream)).transpose();
        // Asked once, but not before a wait that may take long.
        let on = if on_cpu { None } else { stream.zip(identify()?) };
        for due in import.ready.iter().filter(|_| !fault::is(Fault::SkipReadyWait)) {
            match on {
                Some(_) if due.look(&self.shared.control) == Reached::Never => return Err(self.died(&import)),
                Some((stream, id)) => match opened.timelines.wait_as(stream, id, due.signal) {
                    Err(TimelineError::Dead(_)) => return Err(self.died(&import)),
                    Ok(true) => record::stream_waits(opened, stream, due.signal),
                    waits => drop(waits?),
                },
                None => self.await_due(&import, *due, until)?,
            }
        }
        let on = if on_cpu { stream.zip(identify()?) } else { on };
        let claimed = self.imports.opened(handle, addr, on_cpu, on.map(|(_, id)| id))?;
        if let Some(on) = on.filter(|_| !claimed.is_empty()) {
            // The DONE of what was let go of on this stream, now that somebody hands it to us; where it cannot be now, another time.
            let _ = self.signal(opened, on, claimed);
        }
        Ok(addr)
    }

    /// Where an import is mapped here, after what is missing of it has been mapped.
    pub(super) fn mapped(&self, handle: u64, import: &Import, opened: &Opened) -> Result<Addr, Error> {
        let addr = self.found(handle, import, opened)?;
        self.imports.with(handle, |import| import.addr = Some(addr))?;
        Ok(addr)
    }

    /// The same, but not noted yet.
    fn found(&self, handle: u64, import: &Import, opened: &Opened) -> Result<Addr, Error> {
        if let Some(addr) = import.addr {
            return Ok(addr);
        }
        let Import { window, offset, bytes, read_only, .. } = *import;
        let range = Range { window, offset, bytes, epochs: &import.epochs, read_only };
        opened.resolve(range, |chunk| self.imports.uses(window, chunk, Some(handle)))
    }

    /// The ordinal, in this process, of the GPU that an import is on; opens it. `None` for host memory.
    ///
    /// # Errors
    /// For an import that was released, and what the driver says.
    pub fn import_ordinal(&self, handle: u64) -> Result<Option<u32>, Error> {
        let device = self.device_at(self.imports.with(handle, |import| import.device)?)?;
        if device.is_host() {
            return Ok(None);
        }
        Ok(Some(device.open()?.driver.device().ordinal))
    }

    /// Blocks until a value is what was sent.
    ///
    /// # Errors
    /// [`Error::PeerDied`], [`Error::Timeout`].
    pub fn import_ready(&self, handle: u64, timeout: Option<Duration>) -> Result<(), Error> {
        let import = self.imports.with(handle, |import| import.clone())?;
        if import.lost {
            return Err(self.died(&import));
        }
        let deadline = deadline(timeout);
        import.ready.iter().try_for_each(|due| self.await_due(&import, *due, deadline))
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
        Ok(self.imports.record_stream(addr, opened.users(stream)?))
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
                let waited = done.into_iter().try_for_each(|(timeline, value)| {
                    let signal = Signal { timeline, value };
                    match stream.filter(|_| !self.host_waits) {
                        Some(stream) => opened.timelines.wait(stream, signal).map_err(Error::from).map(|waits| {
                            if waits {
                                record::stream_waits(opened, stream, signal);
                            }
                        }),
                        None => self.await_until(signal, deadline),
                    }
                });
                match waited {
                    // A receiver has died: whether anything of it runs on is the leases' to say.
                    Err(Error::PeerDied(_)) => continue,
                    waited => return waited,
                }
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
        let (place, stream) = (self.place_of(device), (!device.is_host()).then_some(stream));
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
                    self.imports.record_stream(addr, opened.users(stream)?);
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
    pub(super) fn await_until(&self, signal: Signal, deadline: Option<Instant>) -> Result<(), Error> {
        let word = self.word(signal)?;
        Self::await_word(word, signal, deadline, || word.reached(signal.value))
    }

    /// Waits on the CPU for a signal of an import's READY.
    pub(super) fn await_due(&self, import: &Import, due: Due, deadline: Option<Instant>) -> Result<(), Error> {
        let waited = Self::await_word(self.word(due.signal)?, due.signal, deadline, || due.look(&self.shared.control));
        waited.map_err(|error| if matches!(error, Error::PeerDied(_)) { self.died(import) } else { error })
    }

    fn word(&self, signal: Signal) -> Result<&Word, Error> {
        self.shared.control.timeline(signal.timeline).ok_or_else(|| Error::Protocol(format!("no timeline {}", signal.timeline)))
    }

    fn await_word(word: &Word, signal: Signal, deadline: Option<Instant>, look: impl Fn() -> Reached) -> Result<(), Error> {
        if look() == Reached::Yes {
            return Ok(());
        }
        let since = now_if_on();
        let result = Self::sleep_until(word, deadline, look);
        record::cpu_waited(since, signal);
        result
    }

    fn sleep_until(word: &Word, deadline: Option<Instant>, look: impl Fn() -> Reached) -> Result<(), Error> {
        let mut pause = Pause::default();
        loop {
            let seen = word.value();
            match look() {
                Reached::Yes => return Ok(()),
                Reached::Never => return Err(Error::PeerDied("its producer died before the value was ready".to_owned())),
                Reached::No => {}
            }
            // Woken by a death, and by what the host's streams write.
            if !pause.wait_by(deadline, |time| word.nap(seen, time)) {
                return Err(Error::Timeout("the value was not ready in time".to_owned()));
            }
        }
    }
}
