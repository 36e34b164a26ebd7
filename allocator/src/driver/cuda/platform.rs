//! The driver library as a [`Platform`].
#![allow(unsafe_code)]

use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use libloading::os::unix::Library;

use super::api::Api;
use super::kind::HandleKind;
use super::survey::{self, Survey};
use super::{library, CudaDriver};
use crate::driver::{CuResult, DeviceId, DeviceInfo, Driver, DriverError, Platform, Result};

/// NVIDIA's driver library.
///
/// A forked child of the process that loaded it gets [`CuResult::CONTEXT_IS_DESTROYED`] from every call, of the platform and
/// of its drivers, and the driver is not touched.
#[derive(Debug)]
pub struct CudaPlatform {
    api: Arc<Api>,
    /// Whether `cuInit` has succeeded.
    initialised: AtomicBool,
    /// What new drivers start with; see [`CudaDriver::set_peer_access`].
    grant_peers: AtomicBool,
    /// In what form memory is shared.
    kind: HandleKind,
    /// What the machine lacks for an arena on any device; asked at each opening.
    machine_lacks: fn() -> Option<&'static str>,
}

impl CudaPlatform {
    /// Finds the driver library, the copy that this process holds already if it does, and looks its functions up. Calls none.
    ///
    /// # Errors
    /// [`DriverError::Unavailable`] where no library loads, [`DriverError::TooOld`] where one lacks a function.
    pub fn load() -> Result<Self> {
        Self::over(library::find()?, survey::machine_lacks)
    }

    /// The same with the first of these files that loads, and without a look at the machine around it: for stubs.
    ///
    /// # Errors
    /// As for [`CudaPlatform::load`].
    #[doc(hidden)]
    pub fn load_from<P: AsRef<OsStr>>(paths: &[P]) -> Result<Self> {
        Self::over(library::first(paths)?, || None)
    }

    fn over(library: Library, machine_lacks: fn() -> Option<&'static str>) -> Result<Self> {
        let api = Arc::new(Api::resolve(library)?);
        tracing::debug!(file = api.file(), "CUDA driver library loaded");
        Ok(Self {
            api,
            initialised: AtomicBool::new(false),
            grant_peers: AtomicBool::new(false),
            kind: HandleKind::default(),
            machine_lacks,
        })
    }

    /// The same platform with memory that is shared in another form. Devices for which millpond cannot do that are refused by name.
    #[must_use]
    pub fn with_handles(mut self, kind: HandleKind) -> Self {
        self.kind = kind;
        self
    }

    /// Whether drivers opened from here on let visible peer devices reach what they map (default: no).
    pub fn grant_peers(&self, grant: bool) {
        self.grant_peers.store(grant, Ordering::Relaxed);
    }

    /// [`Platform::open`], with CUDA's own settings.
    ///
    /// # Errors
    /// [`DriverError::NoSuchDevice`] for a device that is not visible, [`DriverError::Unsupported`] for one that can hold no arena.
    pub fn open_cuda(&self, id: DeviceId) -> Result<Arc<CudaDriver>> {
        let surveys = self.surveys()?;
        let Some(found) = surveys.iter().find(|survey| survey.info.id == id) else {
            let visible: Vec<String> = surveys.iter().map(|survey| survey.info.id.to_string()).collect();
            let visible = if visible.is_empty() { "none".to_owned() } else { visible.join(", ") };
            return Err(DriverError::NoSuchDevice { id, visible });
        };
        if let Some(missing) = (self.machine_lacks)().or(found.lacks) {
            return Err(DriverError::Unsupported { device: format!("{} ({id})", found.info.name), missing });
        }
        let driver = CudaDriver::new(Arc::clone(&self.api), found.clone());
        driver.set_peer_access(self.grant_peers.load(Ordering::Relaxed));
        Ok(Arc::new(driver))
    }

    /// Every visible device; none where the driver says that there is none.
    fn surveys(&self) -> Result<Vec<Survey>> {
        match self.initialise() {
            Ok(()) => {}
            Err(DriverError::Call { result: CuResult::NO_DEVICE, .. }) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        }
        let mut version = 0;
        // SAFETY: the driver writes one int.
        unsafe { self.api.cuDriverGetVersion(&mut version) }?;
        let mut count = 0;
        // SAFETY: the driver writes one int.
        unsafe { self.api.cuDeviceGetCount(&mut count) }?;
        (0..u32::try_from(count).unwrap_or(0)).map(|ordinal| Survey::of(&self.api, ordinal, version, self.kind)).collect()
    }

    /// Initialises the driver, the first time. This is where it reads `CUDA_VISIBLE_DEVICES`.
    fn initialise(&self) -> Result<()> {
        self.api.alive("cuInit")?;
        if self.initialised.load(Ordering::Acquire) {
            return Ok(());
        }
        // SAFETY: cuInit may be called any number of times, from any thread.
        unsafe { self.api.cuInit(0) }.map_err(|error| match error.result() {
            Some(result @ CuResult::STUB_LIBRARY) => DriverError::Unavailable {
                tried: format!("{}, which is a stub to link against and no driver (cuInit: {result})", self.api.file()),
            },
            _ => error,
        })?;
        self.initialised.store(true, Ordering::Release);
        Ok(())
    }
}

impl Platform for CudaPlatform {
    /// All visible devices, those too on which [`Platform::open`] would refuse an arena. Empty where the driver sees none.
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(self.surveys()?.into_iter().map(|survey| survey.info).collect())
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Driver>> {
        Ok(self.open_cuda(id)?)
    }
}
