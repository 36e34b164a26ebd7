//! One replay under way.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::order::{Fault, Rule};
use super::watched::Watched;
use super::{Action, Event, Failure, ReplayError, Report};
use crate::driver::host::{HostConfig, HostPlatform};
use crate::driver::{Access, Addr, DeviceId, Driver, Platform, Stream};
use crate::heap::{Heap, HeapConfig, HeapError, LocalSource};
use crate::window::Window;

/// Addresses of the window that a replay runs in, in bytes: as far as blocks can lie.
const WINDOW: u64 = (2 << 40) - (4 << 20);

/// The handle that means another stream on each thread.
const PER_THREAD: u64 = 2;

/// Looks after which an event is over where streams stay behind: more than a malloc takes before it tries another way.
pub(super) const LOOKS: u32 = 100;

/// The heap is ticked after so many events where it is, as by a client's own thread.
const TICK: u64 = 64;

/// How events are replayed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pass {
    /// Each call is timed, nothing is checked. Streams have nothing to do.
    Timed,
    /// Checked. What a stream was given to do is over when the heap asks.
    Ample,
    /// Checked. Not a byte more may be reserved until nothing else is left to do, so that streams take each other's.
    Short {
        /// Looks of the heap's at an event that are answered with no: 0, so that it sees what is over, or [`LOOKS`], so that streams
        /// have to wait for each other.
        looks: u32,
    },
}

impl Pass {
    fn is_short(self) -> bool {
        matches!(self, Self::Short { .. })
    }
}

/// A live block of the trace.
#[derive(Debug)]
struct Block {
    addr: Addr,
    bytes: u64,
    stream: Stream,
}

#[derive(Debug)]
pub(super) struct Run {
    pass: Pass,
    driver: Arc<dyn Driver>,
    watched: Option<Arc<Watched>>,
    source: Arc<LocalSource>,
    heap: Heap,
    /// By handle, and by thread where the handle means one of each.
    streams: HashMap<(u64, u64), Stream>,
    /// By their addresses in the trace.
    live: HashMap<u64, Block>,
    live_bytes: u64,
    /// Calls that needed no growth: the line and nanoseconds.
    pub(super) times: Vec<(u64, u64)>,
    pub(super) report: Report,
}

impl Run {
    /// A heap of its own over a host device. `between` may put something between the heap and its driver.
    pub(super) fn new(config: HeapConfig, pass: Pass, between: impl Fn(Arc<dyn Driver>) -> Arc<dyn Driver>) -> Result<Self, ReplayError> {
        let platform = HostPlatform::new(HostConfig { total_bytes: Some(u64::MAX), ..HostConfig::default() });
        let driver = platform.open(DeviceId::host(0))?;
        driver.attach_context()?;
        let looks = match pass {
            Pass::Timed => None,
            Pass::Ample => Some(0),
            Pass::Short { looks } => Some(looks),
        };
        let watched = looks.map(|looks| Arc::new(Watched::new(driver.clone(), Some(looks))));
        let driver = between(watched.clone().map_or(driver, |watched| watched));
        let source = Arc::new(LocalSource::new(driver.clone(), WINDOW, config.chunk_bytes));
        let window = Window::reserve(driver.clone(), WINDOW, Access::ReadWrite)?;
        // How far work has come is counted in looks there, not in time.
        let drain = if pass.is_short() { Duration::ZERO } else { config.drain };
        let heap = Heap::new(driver.clone(), window, source.clone(), None, None, HeapConfig { drain, ..config });
        if pass.is_short() {
            source.set_limit(0);
        }
        Ok(Self {
            pass,
            driver,
            watched,
            source,
            heap,
            streams: HashMap::new(),
            live: HashMap::new(),
            live_bytes: 0,
            times: Vec::new(),
            report: Report::default(),
        })
    }

    pub(super) fn step(&mut self, event: &Event) -> Result<(), ReplayError> {
        self.report.events += 1;
        let done = match event.action {
            Action::Allocate => self.allocate(event)?,
            Action::Free => self.free(event)?,
            Action::AllocateFailure => {
                self.report.recorded_failures += 1;
                Ok(())
            }
        };
        if self.pass.is_short() && self.report.events.is_multiple_of(TICK) {
            self.heap.tick();
        }
        let found = self.watched.as_ref().map(|watched| watched.order().take_faults()).unwrap_or_default();
        let faults = found.into_iter().chain(done.err());
        self.report.failed.extend(faults.map(|Fault { rule, reason }| Failure { line: event.line, rule, reason }));
        Ok(())
    }

    fn stream(&mut self, event: &Event) -> Result<Stream, ReplayError> {
        let key = match event.stream {
            0 | 1 => (0, 0),
            PER_THREAD => (PER_THREAD, event.thread),
            handle => (handle, 0),
        };
        if let Some(stream) = self.streams.get(&key) {
            return Ok(*stream);
        }
        let stream = if key.0 == 0 { Stream::LEGACY } else { self.driver.stream_create()? };
        self.streams.insert(key, stream);
        if let Some(watched) = &self.watched {
            watched.order().name(stream, format!("stream {:#x}", key.0));
        }
        Ok(stream)
    }

    fn allocate(&mut self, event: &Event) -> Result<Result<(), Fault>, ReplayError> {
        let stream = self.stream(event)?;
        if event.bytes > 0 && self.live.contains_key(&event.pointer) {
            return Ok(Err(fault(Rule::Twice, format!("the trace allocates {:#x}, which is live", event.pointer))));
        }
        let growths = self.heap.stats().growths;
        let start = Instant::now();
        let mut result = self.heap.allocate(event.bytes, stream);
        let took = start.elapsed().as_nanos() as u64;
        if self.heap.stats().growths > growths {
            self.report.growth_ns = self.report.growth_ns.max(took);
        } else {
            self.times.push((event.line, took));
        }
        if self.pass.is_short() && matches!(result, Err(HeapError::OutOfMemory(_))) {
            let unit = self.driver.device().granularity;
            let bytes = event.bytes.div_ceil(unit).saturating_mul(unit);
            self.source.set_limit(self.source.counts().reserved.saturating_add(bytes));
            result = self.heap.allocate(event.bytes, stream);
        }
        let addr = match result {
            Ok(addr) => addr,
            Err(error) => return Ok(Err(fault(Rule::Allocation, error.to_string()))),
        };
        if event.bytes == 0 {
            return Ok(Ok(()));
        }
        let bytes = event.bytes.div_ceil(512) * 512;
        self.live.insert(event.pointer, Block { addr, bytes, stream });
        self.live_bytes += bytes;
        self.report.peak_live = self.report.peak_live.max(self.live_bytes);
        Ok(self.watched.as_ref().map_or(Ok(()), |watched| {
            let mut order = watched.order();
            let who = order.who(stream);
            let taken = order.take(addr, bytes, Some(who));
            order.work(stream);
            taken
        }))
    }

    /// A block that is freed on another stream than it was allocated on is in use there as well.
    fn free(&mut self, event: &Event) -> Result<Result<(), Fault>, ReplayError> {
        if event.pointer == 0 || event.bytes == 0 {
            return Ok(Ok(()));
        }
        let Some(Block { addr, bytes, stream }) = self.live.remove(&event.pointer) else {
            return Ok(Err(fault(Rule::Free, format!("the trace frees {:#x}, which is not live", event.pointer))));
        };
        let also = Some(self.stream(event)?).filter(|other| *other != stream);
        self.live_bytes -= bytes;
        if let Some(watched) = &self.watched {
            let users: Vec<Stream> = [stream].into_iter().chain(also).collect();
            watched.order().give(addr, &users);
        }
        let start = Instant::now();
        let noted = also.map_or(Ok(true), |also| self.heap.record_stream(addr, also));
        let freed = self.heap.free(addr);
        self.times.push((event.line, start.elapsed().as_nanos() as u64));
        Ok(noted.map(|_| ()).and(freed).map_err(|error| fault(Rule::Free, error.to_string())))
    }

    /// The heap forgets that its blocks are live.
    #[cfg(test)]
    pub(super) fn forget_blocks(&self) {
        self.live.values().for_each(|block| _ = self.heap.free(block.addr));
    }

    /// What there is to say when all events were replayed, but for the times.
    pub(super) fn end(&mut self) {
        let (counts, stats, report) = (self.source.counts(), self.heap.stats(), &mut self.report);
        if stats.all.allocated_bytes.current != self.live_bytes {
            let reason = format!("{} bytes count as live, not {}", stats.all.allocated_bytes.current, self.live_bytes);
            report.failed.push(Failure { line: 0, rule: Rule::Count, reason });
        }
        report.streams = self.streams.len() as u64;
        report.peak_reserved = counts.peak;
        report.ratio = if report.peak_live == 0 { 0.0 } else { counts.peak as f64 / report.peak_live as f64 };
        report.growths = stats.growths;
        report.chunks = counts.chunks;
        report.checks = self.watched.as_ref().map(|watched| watched.order().checks()).unwrap_or_default();
    }
}

fn fault(rule: Rule, reason: String) -> Fault {
    Fault { rule, reason }
}
