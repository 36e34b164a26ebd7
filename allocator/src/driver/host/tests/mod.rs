//! What only the host driver has, and what only it can show.
#![allow(unsafe_code)]

mod capture;
mod memory;
mod streams;

use std::sync::atomic::AtomicU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{HostConfig, HostDriver, HostPlatform};
use crate::driver::{Access, Addr, CuResult, Driver, Result};

const MIB: u64 = 1 << 20;

fn config() -> HostConfig {
    HostConfig { total_bytes: Some(256 * MIB), connections: Some(4), ..HostConfig::default() }
}

fn device(config: HostConfig) -> Arc<HostDriver> {
    let driver = HostPlatform::new(config).driver(0).unwrap();
    driver.attach_context().unwrap();
    driver
}

/// New memory, mapped for reading and writing.
fn chunk(driver: &HostDriver, bytes: u64) -> Addr {
    let memory = driver.create(bytes).unwrap();
    let addr = driver.reserve(bytes, 0).unwrap();
    driver.map(addr, bytes, memory).unwrap();
    driver.set_access(addr, bytes, Access::ReadWrite).unwrap();
    driver.release(memory).unwrap();
    addr
}

fn byte(addr: Addr) -> u8 {
    // SAFETY: tests pass addresses that they mapped.
    unsafe { (addr as *const u8).read_volatile() }
}

/// A registered page of zeroed words that is never freed.
fn words(driver: &HostDriver) -> &'static [AtomicU64; 512] {
    #[repr(align(4096))]
    struct Page([AtomicU64; 512]);
    assert_eq!(rustix::param::page_size(), size_of::<Page>(), "this test knows one page size");
    let page: &'static Page = Box::leak(Box::new(Page(std::array::from_fn(|_| AtomicU64::new(0)))));
    // SAFETY: the page is never freed.
    unsafe { driver.host_register(std::ptr::from_ref(page).cast_mut().cast(), size_of::<Page>()) }.unwrap();
    &page.0
}

fn at(word: &AtomicU64) -> Addr {
    word.as_ptr() as Addr
}

fn until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "never");
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, wanted: CuResult) {
    assert_eq!(result.unwrap_err().result(), Some(wanted));
}
