//! What the benches share: a heap on the host device, and numbers that are the same in each run.

use std::sync::Arc;

use millpond_allocator::driver::host::{HostConfig, HostPlatform};
use millpond_allocator::driver::{Access, DeviceId, Driver, DriverError, Platform};
use millpond_allocator::heap::{Heap, HeapConfig, LocalSource};
use millpond_allocator::window::Window;

/// Bytes of the window that a bench's heap lives in.
const WINDOW: u64 = 64 << 30;

/// A heap over addresses of the host device: its memory is not touched, and not limited.
///
/// # Errors
/// What the host driver says.
pub fn heap() -> Result<(Heap, Arc<dyn Driver>), DriverError> {
    let platform = HostPlatform::new(HostConfig { total_bytes: Some(u64::MAX), ..HostConfig::default() });
    let driver = platform.open(DeviceId::host(0))?;
    driver.attach_context()?;
    let config = HeapConfig::default();
    let source = Arc::new(LocalSource::new(driver.clone(), WINDOW, config.chunk_bytes));
    let window = Window::reserve(driver.clone(), WINDOW, Access::ReadWrite)?;
    Ok((Heap::new(driver.clone(), window, source, None, None, config), driver))
}

/// Numbers that look random and are the same in each run (xorshift).
#[derive(Debug)]
pub struct Numbers(u64);

impl Default for Numbers {
    fn default() -> Self {
        Self(88_172_645_463_325_252)
    }
}

impl Numbers {
    /// The next one, below a bound.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound.max(1)
    }
}
