//! The driver platform by its name.

use millpond_allocator::driver::cuda::CudaPlatform;
use millpond_allocator::driver::host::{HostConfig, HostPlatform};
use millpond_allocator::driver::Platform;

/// `cuda` or `host`.
///
/// # Errors
/// For another name, and where there is no such driver.
pub fn platform(name: &str) -> Result<Box<dyn Platform>, String> {
    match name {
        "cuda" => Ok(Box::new(CudaPlatform::load().map_err(|error| error.to_string())?)),
        "host" => Ok(Box::new(HostPlatform::new(HostConfig::from_env().map_err(|error| error.to_string())?))),
        other => Err(format!("{other:?} is no driver: cuda or host")),
    }
}
