//! The host's memory as devices: memfds for physical memory, `mmap` for addresses, threads for streams.
//!
//! Where there is no GPU, CPU tensors cross between processes through this driver with no copy. It is also the test bed, so it
//! refuses what a GPU refuses (facts/driver.md), with the same result codes:
//!
//! * A chunk is mapped whole, at one or more addresses; an unmap takes one whole mapping, and does not wait: work that comes to
//!   it afterwards fails with [`CuResult::ILLEGAL_ADDRESS`], and the context is dead from then on. The process is not: no stream
//!   touches memory without looking whether it is still mapped.
//! * Nothing that touches addresses, streams or events works before [`Driver::attach_context`].
//! * A stream handle is used again after a destroy. A call on one that is not live is counted ([`HostDriver::misuse`]).
//! * A stream that waits on an unmet word holds up later work of the streams that share its hardware queue.
//! * A forked child has no threads: all its calls fail with [`CuResult::CONTEXT_IS_DESTROYED`].
//!
//! One thing it cannot see: memory that was released here but is still mapped by another process counts as free.
//!
//! [`Driver::attach_context`]: super::Driver::attach_context

mod capture;
mod chunk;
mod config;
mod driver;
mod engine;
mod event;
mod fail;
mod lane;
mod memory;
mod queue;
mod space;
mod staging;
mod streams;
mod words;

#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use capture::HostGraph;
pub use config::{ConfigError, HostConfig};
pub use driver::HostDriver;
pub use fail::{FailPlan, HostCall, ParseFailPlanError};
pub use staging::Stall;

use super::{CuResult, DeviceId, DeviceInfo, Driver, DriverError, Platform, Result};

/// The host's devices, as one process sees them. Two platforms in one process are like two processes: they share memory only by
/// export and import.
#[derive(Debug)]
pub struct HostPlatform {
    shared: Arc<Shared>,
    drivers: Vec<Arc<HostDriver>>,
}

/// What the devices of a platform have in common.
#[derive(Debug)]
struct Shared {
    // Streams' threads hold this too; they hold nothing else of the platform, so that dropping it ends them.
    memory: Arc<memory::Memory>,
    handles: chunk::Handles,
    streams: streams::Streams,
    events: event::Events,
    failures: fail::Failures,
}

impl Shared {
    /// What every call does first.
    fn enter(&self, call: HostCall) -> Result<()> {
        if self.memory.space.is_forked() {
            return Err(call.refuse(CuResult::CONTEXT_IS_DESTROYED));
        }
        self.failures.strike(call).map_or(Ok(()), |result| Err(call.refuse(result)))
    }
}

impl HostCall {
    const fn refuse(self, result: CuResult) -> DriverError {
        DriverError::Call { call: self.name(), result }
    }
}

impl HostPlatform {
    /// A platform of its own.
    #[must_use]
    pub fn new(config: HostConfig) -> Self {
        let granularity = config.unit();
        let shared = Arc::new(Shared {
            memory: Arc::new(memory::Memory {
                space: space::Space::new(granularity, config.address_space),
                words: words::Words::default(),
            }),
            handles: chunk::Handles::default(),
            streams: streams::Streams::default(),
            events: event::Events::default(),
            failures: fail::Failures::default(),
        });
        let device = |(ordinal, number)| DeviceInfo {
            id: DeviceId::host(number),
            ordinal,
            name: "host memory".to_owned(),
            total_bytes: config.total(),
            granularity,
            context_events: true,
            stream_words: true,
        };
        let lanes = config.lanes();
        let seen = config.visible.clone().unwrap_or_else(|| (0..config.devices).collect());
        let drivers = (0..).zip(seen).map(device).map(|info| Arc::new(HostDriver::new(info, Arc::clone(&shared), lanes)));
        let drivers = drivers.collect();
        shared.failures.add(config.fail.unwrap_or_default());
        Self { shared, drivers }
    }

    /// The driver of the n-th device, with what only a host device can do.
    ///
    /// # Errors
    /// [`DriverError::NoSuchDevice`] where there are not so many.
    pub fn driver(&self, n: u32) -> Result<Arc<HostDriver>> {
        let driver = self.drivers.get(n as usize).map(Arc::clone);
        driver.ok_or_else(|| self.no_such(DeviceId::host(n)))
    }

    /// See [`HostDriver::fail_nth`].
    pub fn fail_nth(&self, call: HostCall, n: u64, result: CuResult) {
        self.shared.failures.add(FailPlan::new().fail_nth(call, n, result));
    }

    /// See [`HostDriver::misuse`].
    #[must_use]
    pub fn misuse(&self) -> u64 {
        self.shared.streams.misuse()
    }

    fn no_such(&self, id: DeviceId) -> DriverError {
        let visible: Vec<String> = self.drivers.iter().map(|driver| driver.info.id.to_string()).collect();
        DriverError::NoSuchDevice { id, visible: visible.join(", ") }
    }
}

impl Platform for HostPlatform {
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        self.shared.enter(HostCall::Devices)?;
        Ok(self.drivers.iter().map(|driver| driver.info.clone()).collect())
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Driver>> {
        self.shared.enter(HostCall::Open)?;
        match self.drivers.iter().find(|driver| driver.info.id == id) {
            Some(driver) => Ok(driver.clone()),
            None => Err(self.no_such(id)),
        }
    }
}
