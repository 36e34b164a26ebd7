//! What a host platform is told when it is made.

use super::fail::{FailPlan, ParseFailPlanError};

/// How many hardware queues a device has where `CUDA_DEVICE_MAX_CONNECTIONS` does not say.
const CONNECTIONS: u32 = 8;

/// How a [`super::HostPlatform`] looks: its devices, and their limits.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// How many devices there are.
    pub devices: u32,
    /// Which of them this process sees, and in what order, as by `CUDA_VISIBLE_DEVICES`; all of them where `None`.
    pub visible: Option<Vec<u32>>,
    /// Bytes of memory of each device; the machine's physical memory where `None`. Nothing is touched before it is used.
    pub total_bytes: Option<u64>,
    /// Bytes of address space that this process may reserve.
    pub address_space: u64,
    /// The unit of physical memory and of mappings: a power of two, no smaller than a page.
    pub granularity: u64,
    /// Hardware queues of each device; `CUDA_DEVICE_MAX_CONNECTIONS` (1 to 32) or 8 where `None`.
    pub connections: Option<u32>,
    /// Calls that fail on purpose.
    pub fail: Option<FailPlan>,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self { devices: 1, visible: None, total_bytes: None, address_space: 64 << 40, granularity: 2 << 20, connections: None, fail: None }
    }
}

/// An environment variable that says nothing usable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// No number of devices.
    #[error("MILLPOND_HOST_DEVICES is {0:?}: expected a number from 1 to 1024")]
    Devices(String),
    /// No devices.
    #[error("MILLPOND_HOST_VISIBLE is {0:?}: expected numbers of devices, each once, with commas between them")]
    Visible(String),
    /// No number of bytes.
    #[error("MILLPOND_HOST_MEMORY is {0:?}: expected bytes, with or without K, M, G or T")]
    Memory(String),
    /// No plan.
    #[error("MILLPOND_HOST_FAIL: {0}")]
    Fail(#[from] ParseFailPlanError),
}

impl HostConfig {
    /// Reads `MILLPOND_HOST_DEVICES`, `MILLPOND_HOST_VISIBLE` (such as `1,0`), `MILLPOND_HOST_MEMORY` (bytes of each device, with a suffix K, M, G or T if wanted) and
    /// `MILLPOND_HOST_FAIL` (see [`FailPlan`]); what is not set is as in the default.
    ///
    /// # Errors
    /// Where a variable is set to something else.
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::from_vars(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        if let Some(text) = var("MILLPOND_HOST_DEVICES") {
            let devices = text.trim().parse().ok().filter(|n| (1..=1024).contains(n));
            config.devices = devices.ok_or(ConfigError::Devices(text))?;
        }
        if let Some(text) = var("MILLPOND_HOST_VISIBLE") {
            let seen = |text: &str| text.split(',').map(|n| n.trim().parse().ok().filter(|n| *n < config.devices)).collect();
            let seen: Option<Vec<u32>> = seen(&text);
            let once = |all: &Vec<u32>| all.iter().enumerate().all(|(at, n)| !all.iter().take(at).any(|other| other == n));
            config.visible = Some(seen.filter(once).ok_or(ConfigError::Visible(text))?);
        }
        if let Some(text) = var("MILLPOND_HOST_MEMORY") {
            config.total_bytes = Some(bytes(&text).ok_or(ConfigError::Memory(text))?);
        }
        if let Some(text) = var("MILLPOND_HOST_FAIL") {
            config.fail = Some(text.parse()?);
        }
        Ok(config)
    }

    pub(super) fn total(&self) -> u64 {
        self.total_bytes.unwrap_or_else(physical_memory)
    }

    pub(super) fn unit(&self) -> u64 {
        let page = rustix::param::page_size() as u64;
        self.granularity.max(page).checked_next_power_of_two().unwrap_or(page)
    }

    pub(super) fn lanes(&self) -> usize {
        let stated = || std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok()?.trim().parse().ok();
        let count = self.connections.or_else(stated).filter(|n| (1..=32).contains(n)).unwrap_or(CONNECTIONS);
        count as usize
    }
}

fn physical_memory() -> u64 {
    let info = rustix::system::sysinfo();
    // The fields' width differs between architectures.
    #[allow(clippy::useless_conversion, clippy::unnecessary_cast)]
    let total = info.totalram as u64 * u64::from(info.mem_unit);
    total
}

fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, shift) = match text.char_indices().last()? {
        (at, 'k' | 'K') => (text.get(..at)?, 10),
        (at, 'm' | 'M') => (text.get(..at)?, 20),
        (at, 'g' | 'G') => (text.get(..at)?, 30),
        (at, 't' | 'T') => (text.get(..at)?, 40),
        _ => (text, 0),
    };
    digits.trim().parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<HostConfig, ConfigError> {
        HostConfig::from_vars(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn the_environment_is_read() {
        let config = read(&[("MILLPOND_HOST_DEVICES", "2"), ("MILLPOND_HOST_MEMORY", "3G"), ("MILLPOND_HOST_FAIL", "create:3:2")]).unwrap();
        assert_eq!((config.devices, config.total(), config.unit()), (2, 3 << 30, 2 << 20));
        assert!(config.fail.is_some());
        assert!(read(&[]).unwrap().total() > 0);
    }

    #[test]
    fn bytes_have_suffixes() {
        assert_eq!(bytes("4096"), Some(4096));
        assert_eq!(bytes(" 64m "), Some(64 << 20));
        assert_eq!(bytes("2T"), Some(2 << 40));
        for text in ["", "M", "-1", "8GB", "99999999999T", "1.5G", "€"] {
            assert_eq!(bytes(text), None, "{text}");
        }
    }

    #[test]
    fn other_values_are_named() {
        assert_eq!(read(&[("MILLPOND_HOST_DEVICES", "0")]).unwrap_err(), ConfigError::Devices("0".to_owned()));
        for text in ["2", "0,0", "", "0,x"] {
            let vars = [("MILLPOND_HOST_DEVICES", "2"), ("MILLPOND_HOST_VISIBLE", text)];
            assert_eq!(read(&vars).unwrap_err(), ConfigError::Visible(text.to_owned()));
        }
        assert_eq!(read(&[("MILLPOND_HOST_DEVICES", "2"), ("MILLPOND_HOST_VISIBLE", "1, 0")]).unwrap().visible, Some(vec![1, 0]));
        assert_eq!(read(&[("MILLPOND_HOST_MEMORY", "lots")]).unwrap_err(), ConfigError::Memory("lots".to_owned()));
        assert!(matches!(read(&[("MILLPOND_HOST_FAIL", "create")]), Err(ConfigError::Fail(_))));
    }
}
