//! The devices that an owner serves: opened without a context, each with its limit.

use std::sync::Arc;

use millpond_allocator::driver::cuda::CudaPlatform;
use millpond_allocator::driver::host::{HostConfig, HostPlatform};
use millpond_allocator::driver::{DeviceId, DeviceInfo, Driver, DriverError, Platform};

use super::config::{Config, DriverChoice, Limit, OwnerError, CHUNK_BYTES, CHUNK_CEILING};
use crate::control::MAX_DEVICES;

/// One device that is served.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) info: DeviceInfo,
    /// What the arena may take of it, in bytes.
    pub(super) limit: u64,
    /// The largest chunk, in bytes.
    pub(super) chunk_bytes: u64,
    /// Every window of this device, in bytes.
    pub(super) window_bytes: u64,
}

/// Opens what the configuration asks for: GPUs first, the host last.
pub(super) fn open(config: &Config) -> Result<Vec<Served>, OwnerError> {
    if let Some(lacks) = config.handle_kind.lacks() {
        return Err(OwnerError::HandleKind { kind: config.handle_kind, lacks });
    }
    let mut drivers = gpus(config)?;
    let no_gpu = drivers.is_empty();
    let mut host = HostConfig::from_env()?;
    host.total_bytes = config.host_bytes.or(host.total_bytes);
    let host = HostPlatform::new(host);
    for info in host.devices()? {
        drivers.push(host.open(info.id)?);
    }
    if drivers.len() > MAX_DEVICES {
        return Err(OwnerError::TooManyDevices(drivers.len()));
    }
    drivers.into_iter().map(|driver| serve(driver, config, no_gpu)).collect()
}

fn gpus(config: &Config) -> Result<Vec<Arc<dyn Driver>>, OwnerError> {
    let must = match config.driver {
        DriverChoice::Host => return Ok(Vec::new()),
        DriverChoice::Auto => false,
        DriverChoice::Cuda => true,
    };
    let named: Option<Vec<DeviceId>> =
        config.devices.as_ref().map(|ids| ids.iter().copied().filter(|id| id.host_number().is_none()).collect());
    if !must && named.as_ref().is_some_and(Vec::is_empty) {
        return Ok(Vec::new());
    }
    let load = || CudaPlatform::load().map(|platform| platform.with_handles(config.handle_kind));
    let found = load().and_then(|platform| platform.devices().map(|devices| (platform, devices)));
    let (platform, devices) = match found {
        Ok(found) => found,
        Err(error) if must || named.is_some() => return Err(error.into()),
        Err(error) => {
            tracing::info!(%error, "serving the host alone");
            return Ok(Vec::new());
        }
    };
    if let Some(ids) = named {
        return Ok(ids.into_iter().map(|id| platform.open(id)).collect::<Result<_, _>>()?);
    }
    if must && devices.is_empty() {
        return Err(DriverError::Unavailable { tried: "the driver library loads, but sees no device".to_owned() }.into());
    }
    let mut drivers = Vec::new();
    for device in devices {
        match platform.open(device.id) {
            Ok(driver) => drivers.push(driver),
            Err(error) if must => return Err(error.into()),
            Err(error) => tracing::warn!(%error, "device left out"),
        }
    }
    Ok(drivers)
}

fn serve(driver: Arc<dyn Driver>, config: &Config, no_gpu: bool) -> Result<Served, OwnerError> {
    let info = driver.device().clone();
    let (total, granularity, device) = (info.total_bytes, info.granularity.max(1), info.id.to_string());
    let asked = match config.limit {
        Limit::Percent(share) if !(share > 0.0 && share <= 100.0) => return Err(OwnerError::Percent(share)),
        Limit::Percent(share) => (total as f64 * share / 100.0) as u64,
        // A figure for GPUs is none for the host that is served beside them.
        Limit::Bytes(_) if driver.is_host() && !no_gpu => total,
        Limit::Bytes(bytes) => bytes,
    };
    if asked > total {
        return Err(OwnerError::LimitAboveDevice { device, asked, total });
    }
    let limit = asked - asked % granularity;
    if limit == 0 {
        return Err(OwnerError::LimitTooSmall { device, asked, granularity });
    }
    let chunk_bytes = config.chunk_bytes.unwrap_or(CHUNK_BYTES);
    if chunk_bytes >= CHUNK_CEILING {
        return Err(OwnerError::ChunkTooLarge(chunk_bytes));
    }
    if chunk_bytes < granularity || !chunk_bytes.is_multiple_of(granularity) {
        return Err(OwnerError::ChunkUnit { device, asked: chunk_bytes, granularity });
    }
    let factor = config.window_factor;
    let window = total.checked_mul(u64::from(factor)).and_then(|bytes| bytes.checked_next_multiple_of(granularity));
    match window.filter(|bytes| (1..=64).contains(&factor) && *bytes < 128 << 40) {
        Some(window_bytes) => Ok(Served { driver, info, limit, chunk_bytes, window_bytes }),
        None => Err(OwnerError::Window { device, factor, total }),
    }
}
