//! Imports: what this client holds of others, and how it lets go: never blocking, on the GPU's time.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;

use millpond_allocator::driver::{Addr, Event, StreamId};
use millpond_allocator::heap::Neighbour;
use millpond_allocator::record::Kind;
use millpond_allocator::timeline::{Reached, Signal};
use millpond_allocator::window::{Chunk, Epochs};
use millpond_allocator::Few;
use parking_lot::Mutex;

use super::device::Opened;
use super::due::Due;
use super::error::Error;
use super::fault::{self, Fault};
use super::lease::HoldRef;
use super::record;
use crate::control::{Cause, Claim, Control};
use crate::wire::Peer;

/// One value that was received.
#[derive(Debug)]
pub(super) struct Import {
    pub(super) hold: HoldRef,
    pub(super) window: u32,
    /// Its device's index.
    pub(super) device: u32,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) epochs: Few<Epochs>,
    /// READY: what must be reached before the bytes are what was sent.
    pub(super) ready: Few<Due>,
    /// Mapped without write access, and forwarded so.
    pub(super) read_only: bool,
    /// Where it is mapped here, once it is.
    pub(super) addr: Option<Addr>,
    /// The streams that may use it, as far as we were told.
    pub(super) streams: Few<StreamId>,
    /// Other GPUs whose streams may.
    pub(super) abroad: Vec<Arc<Neighbour>>,
    /// The owner keeps it for this client if its producer dies.
    pub(super) adopted: bool,
    /// Whoever was to make it ready died before: its bytes are not what was to be sent.
    pub(super) lost: bool,
    /// Why that one was killed, if it was.
    pub(super) cause: Option<Cause>,
    pub(super) sender: Arc<Peer>,
}

impl Clone for Import {
    fn clone(&self) -> Self {
        let Self { epochs, ready, streams, abroad, sender, .. } = self;
        // Numbers only: copied as they lie.
        let (epochs, ready, streams) = (Few::from_slice(epochs), Few::from_slice(ready), Few::from_slice(streams));
        Self { epochs, ready, streams, abroad: abroad.clone(), sender: sender.clone(), ..*self }
    }
}

impl Import {
    fn touches(&self, window: u32, chunk: &Chunk) -> bool {
        touches(self.window, self.offset, self.bytes, window, chunk)
    }

    fn used_by(&mut self, stream: StreamId) {
        if !self.streams.contains(&stream) {
            self.streams.push(stream);
        }
    }

    /// Whether any byte at or behind an address here is the import's; its own first address always is.
    fn holds(&self, addr: Addr) -> bool {
        self.addr.is_some_and(|start| addr.checked_sub(start).is_some_and(|at| at < self.bytes.max(1)))
    }
}

fn touches(w: u32, offset: u64, bytes: u64, window: u32, chunk: &Chunk) -> bool {
    w == window && offset < chunk.end() && chunk.offset < offset.saturating_add(bytes.max(1))
}

#[derive(Debug, Default)]
struct Table {
    entries: Vec<(u32, Option<Import>)>,
    free: Vec<u32>,
    bytes: u64,
    parting: Vec<Parting>,
}

impl Table {
    fn held(&self) -> impl Iterator<Item = &Import> {
        self.entries.iter().filter_map(|(_, import)| import.as_ref())
    }

    fn held_mut(&mut self) -> impl Iterator<Item = &mut Import> {
        self.entries.iter_mut().filter_map(|(_, import)| import.as_mut())
    }

    /// [`Imports::claim`].
    fn claim(&mut self, device: u32, stream: StreamId) -> Claimed {
        let mine = self.parting.iter_mut().filter(|p| p.device == device && !p.claimed && p.streams.contains(&stream));
        let handles = mine.map(|p| {
            p.claimed = true;
            p.handle
        });
        Claimed(handles.collect(), Some(stream))
    }
}

/// An import that nobody uses any more on the host; streams may.
#[derive(Debug)]
struct Parting {
    /// What its import was known by: no two have the same.
    handle: u64,
    hold: HoldRef,
    device: u32,
    /// Streams that may use it and have not signalled since.
    streams: Few<StreamId>,
    /// Signals of those that have.
    signals: Few<Signal>,
    /// What other GPUs must have come past, and that is not known yet.
    abroad: Vec<(Arc<Neighbour>, u64)>,
    /// Somebody is about to signal for it.
    claimed: bool,
    /// A context-wide event covers it. That may stand behind streams that have nothing to do with it: a signal may be sooner.
    batched: bool,
    /// It was there at the last look already.
    seen: bool,
    bytes: u64,
    window: u32,
    offset: u64,
}

impl Parting {
    /// Whether no other GPU's stream can reach it any more.
    fn is_past_abroad(&mut self) -> bool {
        self.abroad.retain(|(neighbour, mark)| !neighbour.is_past(*mark));
        self.abroad.is_empty()
    }
}

/// Partings that one context-wide event covers.
#[derive(Debug)]
struct Batch {
    device: u32,
    event: Event,
    partings: Vec<u64>,
}

/// Partings of one stream, for which a signal is about to be queued on it. A parting that comes later is not covered by it.
#[derive(Debug, Default)]
pub(super) struct Claimed(Few<u64>, Option<StreamId>);

impl Claimed {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// This client's imports.
#[derive(Debug)]
pub(super) struct Imports {
    control: Arc<Control>,
    me: u32,
    /// Held for a moment only, never over a call of the driver: letting go must not wait for a stream.
    table: Mutex<Table>,
    batches: Mutex<Vec<Batch>>,
    /// A message has let go of something since the last look.
    flows: AtomicBool,
    /// How many are parting, written with the table locked: without that it is a hint. For the tender [`Nudge`](super::nudge) puts it in
    /// order.
    waiting: AtomicUsize,
}

impl Imports {
    pub(super) fn new(control: Arc<Control>, me: u32) -> Self {
        Self {
            control,
            me,
            table: Mutex::default(),
            batches: Mutex::default(),
            flows: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Takes up a hold that came with a frame.
    ///
    /// # Errors
    /// [`Error::Stale`] for one that is not this process's to take, [`Error::Protocol`] for one that is on other bytes.
    pub(super) fn add(&self, import: Import) -> Result<u64, Error> {
        let hold = import.hold;
        let stale = || Error::Stale("the hold that came with the value is not for this process, or was taken up before".to_owned());
        let record = self.control.hold(hold.producer, hold.index).ok_or_else(stale)?;
        if !record.take(hold.generation, self.me as u8) {
            return Err(stale());
        }
        let right = |claim: &Claim| (claim.window, claim.offset, claim.bytes) == (import.window, import.offset, import.bytes);
        if !record.claim().is_some_and(|claim| right(&claim)) {
            record.finish(hold.generation, self.me as u8, None);
            return Err(Error::Protocol(format!("{} sent a value whose hold is on other bytes", import.sender.name)));
        }
        record::held(Kind::Receive, hold, (import.window, import.offset, import.bytes));
        let mut table = self.table.lock();
        table.bytes += import.bytes;
        let index = match table.free.pop() {
            Some(index) => index,
            None => {
                table.entries.push((0, None));
                table.entries.len() as u32 - 1
            }
        };
        let entry = table.entries.get_mut(index as usize).ok_or_else(|| Error::Internal("import table".to_owned()))?;
        entry.0 = entry.0.wrapping_add(1);
        entry.1 = Some(import);
        Ok(handle_of(entry.0, index))
    }

    /// Ends the hold of a value that came and will not be used, unless it was taken up.
    pub(super) fn decline(&self, hold: HoldRef) {
        if let Some(record) = self.control.hold(hold.producer, hold.index) {
            record.decline(hold.generation, self.me as u8);
            self.control.changes().note();
        }
    }

    /// Looks at, or changes, an import.
    pub(super) fn with<T>(&self, handle: u64, f: impl FnOnce(&mut Import) -> T) -> Result<T, Error> {
        let mut table = self.table.lock();
        entry(&mut table, handle).and_then(|entry| entry.as_mut()).map(f).ok_or_else(released)
    }

    /// Lets go. Never blocks, never calls the driver. True where streams may still use it.
    pub(super) fn release(&self, handle: u64) -> Result<bool, Error> {
        let mut table = self.table.lock();
        let import = entry(&mut table, handle).and_then(Option::take).ok_or_else(released)?;
        // A place whose numbers are used up is no other's: a parting may still be known by any of them.
        if generation_of(handle) != u32::MAX {
            table.free.push(handle as u32 - 1);
        }
        record::held(Kind::Release, import.hold, (import.window, import.offset, import.bytes));
        table.bytes = table.bytes.saturating_sub(import.bytes);
        let unused = import.streams.is_empty() && import.abroad.is_empty();
        if import.addr.is_none() || unused || fault::is(Fault::ReleaseBeforeDone) {
            drop(table);
            self.finish(import.hold, None);
            return Ok(false);
        }
        table.parting.push(Parting {
            handle,
            hold: import.hold,
            device: import.device,
            streams: import.streams,
            signals: Few::new(),
            abroad: import.abroad.into_iter().map(|neighbour| (neighbour.clone(), neighbour.ask())).collect(),
            claimed: false,
            batched: false,
            seen: false,
            bytes: import.bytes,
            window: import.window,
            offset: import.offset,
        });
        self.waiting.store(table.parting.len(), Ordering::Relaxed);
        Ok(true)
    }

    fn finish(&self, hold: HoldRef, done: Option<Signal>) {
        if fault::is(Fault::DropAck) && (hold.index ^ hold.generation).is_multiple_of(16) {
            return;
        }
        if let Some(record) = self.control.hold(hold.producer, hold.index) {
            record.finish(hold.generation, self.me as u8, done.map(|signal| (signal.timeline, signal.value)));
            self.control.changes().note();
        }
    }

    /// Whether an import was let go of and no stream can reach it any more.
    pub(super) fn is_parted(&self, handle: u64) -> bool {
        let mut table = self.table.lock();
        let held = entry(&mut table, handle).is_some_and(|entry| entry.is_some());
        !held && !table.parting.iter().any(|parting| parting.handle == handle)
    }

    /// Whether anything waits to be let go.
    pub(super) fn any_parting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// What was let go of and still needs a signal of this stream. Ended by [`Imports::part`].
    pub(super) fn claim(&self, device: u32, stream: StreamId) -> Claimed {
        if !self.any_parting() {
            return Claimed::default();
        }
        self.table.lock().claim(device, stream)
    }

    /// An import is open: where it is mapped, that it is ready if it is, and the stream that uses it, of which it is told what
    /// [`Imports::claim`] would say.
    pub(super) fn opened(&self, handle: u64, addr: Addr, is_ready: bool, stream: Option<StreamId>) -> Result<Claimed, Error> {
        let mut table = self.table.lock();
        let import = entry(&mut table, handle).and_then(Option::as_mut).ok_or_else(released)?;
        import.addr = Some(addr);
        if is_ready {
            import.ready.clear();
        }
        let device = import.device;
        let Some(stream) = stream else { return Ok(Claimed::default()) };
        import.used_by(stream);
        Ok(table.claim(device, stream))
    }

    /// Lets go by a signal that was queued after [`Imports::claim`]; `None`: it could not be queued.
    pub(super) fn part(&self, Claimed(handles, stream): Claimed, signal: Option<Signal>) {
        if handles.is_empty() {
            return;
        }
        let mut table = self.table.lock();
        table.parting.retain_mut(|p| {
            if !handles.contains(&p.handle) {
                return true;
            }
            p.claimed = false;
            let Some(signal) = signal else { return true };
            p.streams.retain(|s| Some(*s) != stream);
            p.signals.push(signal);
            // A hold names one DONE. Of several streams all but the last must be seen to be over.
            let (last, before) = p.signals.split_last().map_or((signal, &[][..]), |(last, before)| (*last, before));
            let over = p.streams.is_empty() && before.iter().all(|signal| self.is_over(signal)) && p.is_past_abroad();
            if over {
                self.flows.store(true, Ordering::Relaxed);
                self.finish(p.hold, Some(last));
            }
            !over
        });
        self.waiting.store(table.parting.len(), Ordering::Relaxed);
    }

    fn is_over(&self, signal: &Signal) -> bool {
        self.control.timeline(signal.timeline).is_none_or(|word| word.reached(signal.value) != Reached::No)
    }

    /// Whether a message has let go of something since this was last asked: the next one may of what waits now.
    pub(super) fn has_flowed(&self) -> bool {
        self.flows.swap(false, Ordering::Relaxed)
    }

    /// For streams that never come back to us: one event over the whole context, and when that is over, so are they. Whether
    /// something is left that was there at the last look already.
    pub(super) fn tick(&self, opened: &Opened) -> bool {
        if !self.any_parting() {
            return false;
        }
        let mut over: Vec<u64> = Vec::new();
        self.batches.lock().retain_mut(|batch| {
            let done = batch.device == opened.index && opened.driver.event_query(batch.event).unwrap_or(false);
            if done {
                over.append(&mut batch.partings);
                let _ = opened.driver.event_destroy(batch.event);
            }
            !done
        });
        let (mut left, mut stays) = (Vec::new(), false);
        let mut table = self.table.lock();
        table.parting.retain_mut(|p| {
            if over.contains(&p.handle) {
                // All of this device's streams are past it, whatever they have signalled.
                (p.streams, p.signals, p.batched) = (Few::new(), Few::new(), false);
            }
            let signalled = p.streams.is_empty() && p.signals.iter().all(|signal| self.is_over(signal));
            let done = p.device == opened.index && !p.claimed && signalled && p.is_past_abroad();
            if done {
                self.finish(p.hold, None);
            } else if p.device == opened.index {
                let seen = std::mem::replace(&mut p.seen, true);
                stays |= seen;
                // Where messages come and go, the next one's signal covers it before the second look, and no event is needed.
                if seen && !p.batched && !p.streams.is_empty() {
                    p.batched = true;
                    left.push(p.handle);
                }
            }
            !done
        });
        self.waiting.store(table.parting.len(), Ordering::Relaxed);
        drop(table);
        if left.is_empty() {
            return stays;
        }
        // Recording the context would end a capture that is on. Without it each stream signals when it is next seen.
        let recorded = opened.heap.unless_capturing(|| {
            let event = opened.driver.event_create()?;
            opened.driver.event_record_context(event).map(|()| event).inspect_err(|_| drop(opened.driver.event_destroy(event)))
        });
        match recorded {
            Some(Ok(event)) => self.batches.lock().push(Batch { device: opened.index, event, partings: left }),
            _ => self.table.lock().parting.iter_mut().filter(|p| left.contains(&p.handle)).for_each(|p| p.batched = false),
        }
        stays
    }

    /// Whether anything of a chunk is still held or parting here, other than by one import.
    pub(super) fn uses(&self, window: u32, chunk: &Chunk, but: Option<u64>) -> bool {
        let table = self.table.lock();
        let held = table.entries.iter().enumerate().any(|(index, (generation, import))| {
            Some(handle_of(*generation, index as u32)) != but && import.as_ref().is_some_and(|i| i.touches(window, chunk))
        });
        held || table.parting.iter().any(|p| touches(p.window, p.offset, p.bytes, window, chunk))
    }

    /// Whether anything of a window is still held or parting here.
    pub(super) fn holds_in(&self, window: u32) -> bool {
        let table = self.table.lock();
        table.held().any(|import| import.window == window) || table.parting.iter().any(|parting| parting.window == window)
    }

    /// Whether an address is held as an import although it lies in our own window: it came back to us.
    pub(super) fn holds_own(&self, addr: Addr) -> bool {
        self.find(addr).is_some()
    }

    /// A live import whose mapped bytes hold an address.
    pub(super) fn find(&self, addr: Addr) -> Option<Import> {
        self.table.lock().held().find(|import| import.holds(addr)).cloned()
    }

    /// The handles of the live imports whose mapped bytes hold an address: a block may have been received more than once.
    pub(super) fn handles_at(&self, addr: Addr) -> Vec<u64> {
        let table = self.table.lock();
        let held = table.entries.iter().enumerate().filter(|(_, (_, import))| import.as_ref().is_some_and(|import| import.holds(addr)));
        held.map(|(index, (generation, _))| handle_of(*generation, index as u32)).collect()
    }

    /// A client died. What it was to make ready and has not never will be; that is told now, while its timelines' last true
    /// values stand. Where its slot is another's by now, what that one is to make ready has nothing to do with it.
    pub(super) fn died(&self, dead: &Peer, cause: Option<Cause>) {
        let mut table = self.table.lock();
        for import in table.held_mut() {
            let (theirs, others): (Few<Due>, Few<Due>) = import.ready.iter().copied().partition(|due| due.is_of(dead));
            if !theirs.iter().all(|due| due.look(&self.control) == Reached::Yes) {
                (import.lost, import.cause) = (true, import.cause.or(cause));
            }
            import.ready = others;
        }
    }

    /// Bytes held of others.
    pub(super) fn bytes(&self) -> u64 {
        self.table.lock().bytes
    }

    /// Bytes held of others on one device.
    pub(super) fn bytes_on(&self, device: u32) -> u64 {
        self.table.lock().held().filter(|import| import.device == device).map(|import| import.bytes).sum()
    }

    /// Notes another stream that uses what is at an address, and the other GPUs whose it may be.
    pub(super) fn record_stream(&self, addr: Addr, (stream, abroad): (Option<StreamId>, Vec<Arc<Neighbour>>)) -> bool {
        let mut table = self.table.lock();
        let mut any = false;
        for import in table.held_mut().filter(|import| import.holds(addr)) {
            any = true;
            if let Some(stream) = stream {
                import.used_by(stream);
            }
            Neighbour::note(&mut import.abroad, &abroad);
        }
        any
    }
}

/// What a caller knows an import by: never zero.
fn handle_of(generation: u32, index: u32) -> u64 {
    (u64::from(generation) << 32) | (u64::from(index) + 1)
}

fn generation_of(handle: u64) -> u32 {
    (handle >> 32) as u32
}

fn released() -> Error {
    Error::InvalidArgument("no such import: it was released before".to_owned())
}

fn entry(table: &mut Table, handle: u64) -> Option<&mut Option<Import>> {
    let (index, generation) = (handle as u32, generation_of(handle));
    let entry = table.entries.get_mut(index.checked_sub(1)? as usize)?;
    (entry.0 == generation).then_some(&mut entry.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Claim;
    use millpond_allocator::driver::host::{HostConfig, HostPlatform};
    use millpond_allocator::driver::{Access, Driver};
    use millpond_allocator::heap::{Heap, HeapConfig, LocalSource, Neighbours};
    use millpond_allocator::window::Window;

    /// One that came with a frame, its hold at a place of client 0's table.
    fn an_import(control: &Control, index: u32, device: u32) -> Import {
        let claim = Claim { lease: 1, window: 1, offset: 0, bytes: 512 };
        Import {
            hold: HoldRef { producer: 0, index, generation: control.hold(0, index).unwrap().make(0, 1, claim).unwrap() },
            window: 1,
            device,
            offset: 0,
            bytes: 512,
            epochs: Few::new(),
            ready: Few::new(),
            read_only: false,
            addr: None,
            streams: Few::new(),
            abroad: Vec::new(),
            adopted: false,
            lost: false,
            cause: None,
            sender: Arc::new(Peer { client: 0, serial: 1, name: "a".to_owned(), pid: 1 }),
        }
    }

    #[test]
    fn no_two_imports_are_known_by_the_same_number() {
        let control = Arc::new(Control::create([1, 2], 3).unwrap());
        let imports = Imports::new(control.clone(), 1);
        let stream = StreamId(0);
        let import = |index: u32, device: u32| {
            let handle = imports.add(an_import(&control, index, device)).unwrap();
            imports.part(imports.opened(handle, 4096, true, Some(stream)).unwrap(), None);
            handle
        };
        // A day of imports, and one that is parting all the while.
        let first = import(0, 1);
        assert!(imports.release(first).unwrap());
        imports.table.lock().entries[0].0 = u32::MAX - 1;
        let last = import(1, 0);
        assert_eq!((generation_of(last), last as u32), (u32::MAX, 1));
        assert!(imports.release(last).unwrap() && imports.release(last).is_err());
        let next = import(2, 0);
        assert_eq!((generation_of(next), next as u32), (1, 2), "a place of its own");
        assert!(imports.release(next).unwrap());
        // What one device's stream lets go of says nothing of the other's.
        let claimed = imports.claim(0, stream);
        imports.part(claimed, Some(Signal { timeline: 0, value: 1 }));
        assert_eq!((imports.is_parted(first), imports.is_parted(last), imports.is_parted(next)), (false, true, true));
        assert!(imports.any_parting());
    }

    /// The DONE of an import that another GPU's stream reads waits for that GPU too.
    #[test]
    fn what_another_gpu_reads_is_not_done_before_it_has_come_past() {
        let platform = HostPlatform::new(HostConfig { devices: 2, ..HostConfig::default() });
        let drivers = [0, 1].map(|number| platform.driver(number).unwrap());
        let neighbours = Arc::new(Neighbours::default());
        let heaps = drivers.each_ref().map(|driver| {
            driver.attach_context().unwrap();
            let window = Window::reserve(driver.clone(), 1 << 30, Access::ReadWrite).unwrap();
            let source = Arc::new(LocalSource::new(driver.clone(), 1 << 30, 8 << 20));
            Heap::new(driver.clone(), window, source, None, None, HeapConfig::default()).beside(&neighbours)
        });
        let stream = drivers[1].stream_create().unwrap();
        let stall = drivers[1].stall(stream);
        let abroad = neighbours.of(&*drivers[0], stream);
        assert_eq!(abroad.len(), 1);

        let control = Arc::new(Control::create([1, 2], 3).unwrap());
        let imports = Imports::new(control.clone(), 1);
        let own = StreamId(7);
        let handle = imports.add(an_import(&control, 0, 0)).unwrap();
        imports.part(imports.opened(handle, 4096, true, Some(own)).unwrap(), None);
        assert!(imports.record_stream(4096, (None, abroad.clone())));
        assert!(imports.release(handle).unwrap());
        let signal = Signal { timeline: 0, value: 1 };
        imports.part(imports.claim(0, own), Some(signal));
        assert!(!imports.is_parted(handle), "its own stream is past it, the other GPU's is not");
        drop(stall);
        let asked = imports.table.lock().parting[0].abroad[0].1;
        while !abroad[0].is_past(asked) {
            heaps[1].tick();
            std::thread::yield_now();
        }
        assert!(imports.table.lock().parting[0].is_past_abroad());
    }
}
