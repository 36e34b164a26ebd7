//! What cases are made of: things that are taken down again whatever happens, and checks that say what they wanted.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags};

use super::Outcome;
use crate::driver::{Access, Addr, CuResult, Driver, DriverError, Event, Memory, Stream};

/// How long something may take before it counts as never.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
/// What a word is set to at the end: past every value that a case waits for.
const RELEASE: u64 = 1 << 62;

/// Fails with a message unless a condition holds.
pub(super) fn want(condition: bool, message: impl FnOnce() -> String) -> Outcome {
    condition.then_some(()).ok_or_else(message)
}

/// Turns a driver's error into a case's.
pub(super) fn ok<T>(result: Result<T, DriverError>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

/// Wants a call refused with this result.
pub(super) fn refused<T>(result: Result<T, DriverError>, wanted: CuResult, what: &str) -> Outcome {
    match result {
        Ok(_) => Err(format!("{what} was allowed, not refused with {wanted}")),
        Err(error) if error.result() == Some(wanted) => Ok(()),
        Err(error) => Err(format!("{what} was refused with {error}, not {wanted}")),
    }
}

/// Blocks until `condition` says so.
pub(super) fn until(what: &str, mut condition: impl FnMut() -> Result<bool, String>) -> Outcome {
    let start = Instant::now();
    while !condition()? {
        if start.elapsed() > PATIENCE {
            return Err(format!("{what}: not within {PATIENCE:?}"));
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

/// A driver with a context, and everything that a case made with it.
pub(super) struct Lab {
    pub(super) driver: Arc<dyn Driver>,
    streams: RefCell<Vec<Stream>>,
    events: RefCell<Vec<Event>>,
    memory: RefCell<Vec<Memory>>,
    spans: RefCell<Vec<(Addr, u64)>>,
    maps: RefCell<Vec<(Addr, u64)>>,
    pages: RefCell<Vec<Page>>,
}

impl Lab {
    pub(super) fn new(driver: &Arc<dyn Driver>) -> Self {
        Self {
            driver: Arc::clone(driver),
            streams: RefCell::default(),
            events: RefCell::default(),
            memory: RefCell::default(),
            spans: RefCell::default(),
            maps: RefCell::default(),
            pages: RefCell::default(),
        }
    }

    /// The unit of memory, in bytes.
    pub(super) fn unit(&self) -> u64 {
        self.driver.device().granularity
    }

    pub(super) fn create(&self, bytes: u64) -> Result<Memory, String> {
        let memory = ok(self.driver.create(bytes))?;
        self.memory.borrow_mut().push(memory);
        Ok(memory)
    }

    pub(super) fn import(&self, fd: impl AsFd, bytes: u64) -> Result<Memory, String> {
        let memory = ok(self.driver.import(fd.as_fd(), bytes))?;
        self.memory.borrow_mut().push(memory);
        Ok(memory)
    }

    pub(super) fn release(&self, memory: Memory) -> Outcome {
        self.memory.borrow_mut().retain(|other| *other != memory);
        ok(self.driver.release(memory))
    }

    pub(super) fn reserve(&self, bytes: u64) -> Result<Addr, String> {
        let addr = ok(self.driver.reserve(bytes, 0))?;
        self.spans.borrow_mut().push((addr, bytes));
        Ok(addr)
    }

    pub(super) fn unreserve(&self, addr: Addr, bytes: u64) -> Outcome {
        ok(self.driver.unreserve(addr, bytes))?;
        self.spans.borrow_mut().retain(|(other, _)| *other != addr);
        Ok(())
    }

    pub(super) fn map(&self, addr: Addr, bytes: u64, memory: Memory) -> Outcome {
        ok(self.driver.map(addr, bytes, memory))?;
        self.maps.borrow_mut().push((addr, bytes));
        Ok(())
    }

    pub(super) fn unmap(&self, addr: Addr, bytes: u64) -> Outcome {
        self.maps.borrow_mut().retain(|(other, _)| *other != addr);
        ok(self.driver.unmap(addr, bytes))
    }

    /// Reserves a span for one handle and maps it there.
    pub(super) fn place(&self, memory: Memory, bytes: u64, access: Access) -> Result<Addr, String> {
        let addr = self.reserve(bytes)?;
        self.map(addr, bytes, memory)?;
        ok(self.driver.set_access(addr, bytes, access))?;
        Ok(addr)
    }

    /// New memory, mapped for reading and writing.
    pub(super) fn chunk(&self, bytes: u64) -> Result<Addr, String> {
        self.place(self.create(bytes)?, bytes, Access::ReadWrite)
    }

    pub(super) fn stream(&self) -> Result<Stream, String> {
        let stream = ok(self.driver.stream_create())?;
        self.streams.borrow_mut().push(stream);
        Ok(stream)
    }

    pub(super) fn destroy_stream(&self, stream: Stream) -> Outcome {
        self.streams.borrow_mut().retain(|other| *other != stream);
        ok(self.driver.stream_destroy(stream))
    }

    pub(super) fn event(&self) -> Result<Event, String> {
        let event = ok(self.driver.event_create())?;
        self.events.borrow_mut().push(event);
        Ok(event)
    }

    /// A page of zeroed words in ordinary memory, registered.
    pub(super) fn words(&self) -> Result<Word, String> {
        self.adopt(Page::anonymous()?)
    }

    /// A page of words of a file, registered.
    pub(super) fn words_of(&self, fd: impl AsFd) -> Result<Word, String> {
        self.adopt(Page::of_file(fd)?)
    }

    fn adopt(&self, page: Page) -> Result<Word, String> {
        let cpu = page.ptr.cast();
        // SAFETY: the page is unmapped when it is dropped, which is after it was unregistered and all streams have drained.
        let addr = ok(unsafe { self.driver.host_register(page.ptr.as_ptr(), page.bytes) })?;
        self.pages.borrow_mut().push(page);
        Ok(Word { cpu, addr })
    }

    /// Blocks until everything queued on a stream has run: as `stream_synchronize`, but not for ever.
    pub(super) fn drain(&self, stream: Stream) -> Outcome {
        until("the stream's work did not finish", || ok(self.driver.stream_query(stream)))
    }

    /// Fills device memory, and waits.
    pub(super) fn fill(&self, addr: Addr, byte: u8, bytes: u64) -> Outcome {
        let stream = self.stream()?;
        ok(self.driver.fill(addr, byte, bytes, stream))?;
        self.drain(stream)
    }

    /// Copies device memory to the CPU, and waits.
    pub(super) fn read(&self, addr: Addr, bytes: u64) -> Result<Vec<u8>, String> {
        let mut buffer = vec![0; usize::try_from(bytes).map_err(|error| error.to_string())?];
        let stream = self.stream()?;
        ok(self.driver.copy(buffer.as_mut_ptr() as Addr, addr, bytes, stream))?;
        // Nothing else may stand in this stream, and it must be over before the buffer goes.
        ok(self.driver.stream_synchronize(stream))?;
        Ok(buffer)
    }

    /// Wants all of a range to be one byte.
    pub(super) fn holds(&self, addr: Addr, byte: u8, bytes: u64) -> Outcome {
        let found = self.read(addr, bytes)?;
        match found.iter().position(|other| *other != byte) {
            None => Ok(()),
            Some(at) => Err(format!("byte {at} of {bytes} is {:#x}, not {byte:#x}", found.get(at).copied().unwrap_or_default())),
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Nothing here can be reported: after a fatal case all of it fails.
        let driver = &self.driver;
        self.pages.borrow().iter().for_each(Page::release);
        let streams = self.streams.take();
        for stream in &streams {
            let _ = until("drain", || Ok(driver.stream_query(*stream).unwrap_or(true)));
        }
        self.events.take().into_iter().for_each(|event| drop(driver.event_destroy(event)));
        streams.into_iter().for_each(|stream| drop(driver.stream_destroy(stream)));
        self.maps.take().into_iter().for_each(|(addr, bytes)| drop(driver.unmap(addr, bytes)));
        self.spans.take().into_iter().for_each(|(addr, bytes)| drop(driver.unreserve(addr, bytes)));
        self.memory.take().into_iter().for_each(|memory| drop(driver.release(memory)));
        for page in self.pages.take() {
            if driver.host_unregister(page.ptr.as_ptr()).is_err() {
                // A dead context may still have it.
                std::mem::forget(page);
            }
        }
    }
}

/// A page of shared memory.
#[derive(Debug)]
struct Page {
    ptr: NonNull<u8>,
    bytes: usize,
}

impl Page {
    fn anonymous() -> Result<Self, String> {
        let (bytes, access) = (rustix::param::page_size(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let ptr = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::SHARED) };
        Self::made(ptr, bytes)
    }

    fn of_file(fd: impl AsFd) -> Result<Self, String> {
        let (bytes, access) = (rustix::param::page_size(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let ptr = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, fd, 0) };
        Self::made(ptr, bytes)
    }

    fn made(ptr: rustix::io::Result<*mut std::ffi::c_void>, bytes: usize) -> Result<Self, String> {
        let ptr = ptr.map_err(|error| format!("mmap: {error}"))?;
        NonNull::new(ptr.cast()).map(|ptr| Self { ptr, bytes }).ok_or_else(|| "mmap gave address 0".to_owned())
    }

    /// Lets everyone go who waits on a word here.
    fn release(&self) {
        for index in 0..Word::COUNT {
            Word { cpu: self.ptr.cast(), addr: 0 }.store(index, RELEASE);
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: `ptr` and `bytes` are a mapping made here, and no `Word` is used after its `Lab`.
        let _ = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.bytes) };
    }
}

/// The first of a page's words.
#[derive(Debug, Clone, Copy)]
pub(super) struct Word {
    cpu: NonNull<u64>,
    pub(super) addr: Addr,
}

impl Word {
    /// How many words of a page cases use.
    const COUNT: usize = 8;

    /// The device address of the n-th word.
    pub(super) const fn at(&self, n: usize) -> Addr {
        self.addr + 8 * n as Addr
    }

    fn atomic(&self, n: usize) -> &AtomicU64 {
        // SAFETY: the page is mapped while its `Lab` lives, holds this word, and everyone uses atomics.
        unsafe { AtomicU64::from_ptr(self.cpu.as_ptr().add(n % Self::COUNT)) }
    }

    pub(super) fn load(&self, n: usize) -> u64 {
        self.atomic(n).load(Ordering::Acquire)
    }

    pub(super) fn store(&self, n: usize, value: u64) {
        self.atomic(n).store(value, Ordering::Release);
    }

    /// Where the CPU has the page.
    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.cpu.as_ptr().cast()
    }

    /// Registers the page once more.
    pub(super) fn register_again(&self, driver: &dyn Driver) -> crate::driver::Result<Addr> {
        // SAFETY: the page is mapped and registered while its `Lab` lives; a second registration is refused, which is what is tried.
        unsafe { driver.host_register(self.cpu.as_ptr().cast(), rustix::param::page_size()) }
    }

    /// Blocks until the CPU sees a value.
    pub(super) fn await_cpu(&self, n: usize, value: u64) -> Outcome {
        until("the CPU did not see the word", || Ok(self.load(n) == value))
    }
}
