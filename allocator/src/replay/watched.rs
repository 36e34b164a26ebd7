//! A driver that tells a model what is asked of it.

use std::ops::DerefMut;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;

use super::order::{Order, Rule};
use crate::driver::{Access, Addr, Capture, DeviceInfo, Driver, Event, MemInfo, Memory, PointerInfo, Result, Stream, StreamId};

/// The calls of a driver that only go on to another one.
macro_rules! pass_on {
    ($inner:ident) => {
        fn device(&self) -> &DeviceInfo {
            self.$inner.device()
        }
        fn is_host(&self) -> bool {
            self.$inner.is_host()
        }
        fn attach_context(&self) -> Result<()> {
            self.$inner.attach_context()
        }
        fn mem_info(&self) -> Result<MemInfo> {
            self.$inner.mem_info()
        }
        fn create(&self, bytes: u64) -> Result<Memory> {
            self.$inner.create(bytes)
        }
        fn export(&self, memory: Memory) -> Result<OwnedFd> {
            self.$inner.export(memory)
        }
        fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> Result<Memory> {
            self.$inner.import(fd, bytes)
        }
        fn release(&self, memory: Memory) -> Result<()> {
            self.$inner.release(memory)
        }
        fn reserve(&self, bytes: u64, hint: Addr) -> Result<Addr> {
            self.$inner.reserve(bytes, hint)
        }
        fn unreserve(&self, addr: Addr, bytes: u64) -> Result<()> {
            self.$inner.unreserve(addr, bytes)
        }
        fn map(&self, addr: Addr, bytes: u64, memory: Memory) -> Result<()> {
            self.$inner.map(addr, bytes, memory)
        }
        fn set_access(&self, addr: Addr, bytes: u64, access: Access) -> Result<()> {
            self.$inner.set_access(addr, bytes, access)
        }
        fn pointer_info(&self, addr: Addr) -> Result<Option<PointerInfo>> {
            self.$inner.pointer_info(addr)
        }
        fn stream_destroy(&self, stream: Stream) -> Result<()> {
            self.$inner.stream_destroy(stream)
        }
        fn stream_synchronize(&self, stream: Stream) -> Result<()> {
            self.$inner.stream_synchronize(stream)
        }
        fn stream_query(&self, stream: Stream) -> Result<bool> {
            self.$inner.stream_query(stream)
        }
        fn stream_capture(&self, stream: Stream) -> Result<Capture> {
            self.$inner.stream_capture(stream)
        }
        fn copy(&self, dst: Addr, src: Addr, bytes: u64, stream: Stream) -> Result<()> {
            self.$inner.copy(dst, src, bytes, stream)
        }
        fn fill(&self, dst: Addr, byte: u8, bytes: u64, stream: Stream) -> Result<()> {
            self.$inner.fill(dst, byte, bytes, stream)
        }
        fn event_create(&self) -> Result<Event> {
            self.$inner.event_create()
        }
        fn event_destroy(&self, event: Event) -> Result<()> {
            self.$inner.event_destroy(event)
        }
        #[allow(unsafe_code)]
        unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<Addr> {
            // SAFETY: the caller keeps to the same contract.
            unsafe { self.$inner.host_register(ptr, bytes) }
        }
        fn host_address(&self, ptr: *mut u8) -> Result<Addr> {
            self.$inner.host_address(ptr)
        }
        fn host_unregister(&self, ptr: *mut u8) -> Result<()> {
            self.$inner.host_unregister(ptr)
        }
        fn write_value(&self, stream: Stream, word: Addr, value: u64) -> Result<()> {
            self.$inner.write_value(stream, word, value)
        }
        fn wait_value(&self, stream: Stream, word: Addr, value: u64) -> Result<()> {
            self.$inner.wait_value(stream, word, value)
        }
    };
}
#[cfg(test)]
pub(super) use pass_on;

/// A driver whose streams, events and mappings an [`Order`] hears of.
#[derive(Debug)]
pub struct Watched {
    driver: Arc<dyn Driver>,
    looks: Option<u32>,
    order: Mutex<Order>,
}

impl Watched {
    /// Watches a driver. Where its streams have nothing to do, they can still stay behind: an event is over after so many `looks` at
    /// it that said no. `None`: it is over when the driver says so.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, looks: Option<u32>) -> Self {
        Self { driver, looks, order: Mutex::default() }
    }

    /// The model. No call of the driver's that it hears of may be made while this is held.
    pub fn order(&self) -> impl DerefMut<Target = Order> + '_ {
        self.order.lock()
    }

    /// The model, for a call that a stream under capture must not be named in.
    fn outside_captures(&self, call: &str, stream: Stream) -> impl DerefMut<Target = Order> + '_ {
        let captured = self.driver.stream_capture(stream).is_ok_and(|capture| capture != Capture::None);
        let mut order = self.order.lock();
        if captured {
            order.fault(Rule::Capture, format!("{call} on the stream {:#x}, which is being captured", stream.0));
        }
        order
    }
}

impl Driver for Watched {
    pass_on!(driver);

    fn stream_create(&self) -> Result<Stream> {
        let mut order = self.order.lock();
        let stream = self.driver.stream_create()?;
        order.made(stream);
        Ok(stream)
    }

    fn owns(&self, stream: Stream) -> Result<bool> {
        self.driver.owns(stream)
    }

    fn stream_id(&self, stream: Stream) -> Result<StreamId> {
        drop(self.outside_captures("stream_id", stream));
        self.driver.stream_id(stream)
    }

    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        let mut order = self.outside_captures("event_record", stream);
        self.driver.event_record(event, stream)?;
        order.record(event, stream);
        Ok(())
    }

    fn event_record_context(&self, event: Event) -> Result<()> {
        let mut order = self.order.lock();
        self.driver.event_record_context(event)?;
        order.record_all(event);
        Ok(())
    }

    fn event_query(&self, event: Event) -> Result<bool> {
        let mut order = self.order.lock();
        let over = self.driver.event_query(event)?;
        Ok(match self.looks {
            Some(looks) => order.look(event, looks),
            None => over && order.look(event, 0),
        })
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        let mut order = self.outside_captures("stream_wait_event", stream);
        self.driver.stream_wait_event(stream, event)?;
        order.wait(stream, event);
        Ok(())
    }

    fn unmap(&self, addr: Addr, bytes: u64) -> Result<()> {
        let mut order = self.order.lock();
        self.driver.unmap(addr, bytes)?;
        order.unmap(addr, bytes);
        Ok(())
    }
}
