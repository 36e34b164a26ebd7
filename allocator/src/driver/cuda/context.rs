//! The device's primary context, and what a thread's state is put back to.
#![allow(unsafe_code)]

use std::ptr::{null_mut, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUctx_st, CUdevice, CUstreamCaptureMode};
use parking_lot::Mutex;

use super::api::Api;
use crate::driver::{CuResult, DriverError, Result};

/// A device's primary context: retained once, never released, since that would be a driver call at exit.
#[derive(Debug)]
pub(super) struct Context {
    api: Arc<Api>,
    device: CUdevice,
    /// Null until attached.
    handle: AtomicPtr<CUctx_st>,
    attaching: Mutex<()>,
}

impl Context {
    /// Not attached yet.
    pub(super) fn new(api: Arc<Api>, device: CUdevice) -> Self {
        Self { api, device, handle: AtomicPtr::new(null_mut()), attaching: Mutex::new(()) }
    }

    /// Retains the context, the first time.
    pub(super) fn attach(&self) -> Result<()> {
        // Before the lock: in a forked child nobody may be left to release it.
        self.api.alive("cuDevicePrimaryCtxRetain")?;
        let _attaching = self.attaching.lock();
        if !self.handle.load(Ordering::Acquire).is_null() {
            return Ok(());
        }
        let _mode = Relaxed::enter(&self.api);
        let mut context: CUcontext = null_mut();
        // SAFETY: the driver writes one handle; the device came from cuDeviceGet.
        unsafe { self.api.cuDevicePrimaryCtxRetain(&mut context, self.device) }?;
        self.handle.store(context, Ordering::Release);
        Ok(())
    }

    /// The handle, for the calls that take it as an argument.
    pub(super) fn handle(&self, call: &'static str) -> Result<CUcontext> {
        self.api.alive(call)?;
        NonNull::new(self.handle.load(Ordering::Acquire))
            .map(NonNull::as_ptr)
            .ok_or(DriverError::Call { call, result: CuResult::INVALID_CONTEXT })
    }

    /// Makes the context current on this thread until the guard goes. Pushes only where it is not current already.
    pub(super) fn enter(&self, call: &'static str) -> Result<Entered<'_>> {
        let ours = self.handle(call)?;
        let mut current: CUcontext = null_mut();
        // SAFETY: the driver writes one handle.
        unsafe { self.api.cuCtxGetCurrent(&mut current) }?;
        let pushed = current != ours;
        if pushed {
            // SAFETY: a primary context that is never released stays live.
            unsafe { self.api.cuCtxPushCurrent(ours) }?;
        }
        Ok(Entered { api: &self.api, pushed })
    }
}

/// While it lives, the context is current on this thread.
#[derive(Debug)]
#[must_use]
pub(super) struct Entered<'a> {
    api: &'a Api,
    pushed: bool,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: CUcontext = null_mut();
            // SAFETY: the driver writes one handle. It fails only where the driver is gone, and then there is nothing to put back.
            let _ = unsafe { self.api.cuCtxPopCurrent(&mut popped) };
        }
    }
}

/// While it lives, calls of this thread disturb no thread's capture into a graph.
///
/// A capture in global mode, torch's default, is broken by "unsafe" calls of any thread that has not exchanged its mode.
#[derive(Debug)]
#[must_use]
pub(super) struct Relaxed<'a> {
    api: &'a Api,
    /// The mode to put back, where it was another.
    previous: Option<u32>,
}

impl<'a> Relaxed<'a> {
    /// Exchanges the thread's mode. Where the driver refuses, nothing was changed and nothing is put back.
    pub(super) fn enter(api: &'a Api) -> Self {
        let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        let mut mode = relaxed;
        // SAFETY: the driver reads and writes one int.
        let exchanged = unsafe { api.cuThreadExchangeStreamCaptureMode(&mut mode) };
        Self { api, previous: (exchanged.is_ok() && mode != relaxed).then_some(mode) }
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.previous {
            // SAFETY: the driver reads and writes one int; the mode is one that it gave out.
            let _ = unsafe { self.api.cuThreadExchangeStreamCaptureMode(&mut mode) };
        }
    }
}
