//! Devices by identity.

use std::fmt;
use std::str::FromStr;

/// A device's identity: the GPU's UUID, or the number of a host device. Never an index: masks reorder those.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId([u8; 16]);

const HOST_PREFIX: &[u8; 12] = b"millpondhost";

impl DeviceId {
    /// The identity of a GPU, from the bytes of `cuDeviceGetUuid`.
    #[must_use]
    pub const fn from_uuid(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The n-th host device.
    #[must_use]
    pub fn host(n: u32) -> Self {
        let mut bytes = [0; 16];
        bytes[..12].copy_from_slice(HOST_PREFIX);
        bytes[12..].copy_from_slice(&n.to_be_bytes());
        Self(bytes)
    }

    /// The number of a host device; `None` for a GPU.
    #[must_use]
    pub fn host_number(self) -> Option<u32> {
        let (prefix, number) = self.0.split_at(12);
        (prefix == HOST_PREFIX).then(|| number.iter().fold(0, |n, byte| n << 8 | u32::from(*byte)))
    }

    /// The sixteen bytes.
    #[must_use]
    pub const fn bytes(self) -> [u8; 16] {
        self.0
    }
}

/// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, as `nvidia-smi -L` prints it, or `HOST-n`. The driver gives a MIG instance's identity as
/// it gives a GPU's, so `MIG-…` is read as the same bytes, and written with `GPU`.
impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(n) = self.host_number() {
            return write!(f, "HOST-{n}");
        }
        write!(f, "GPU")?;
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 0 | 4 | 6 | 8 | 10) {
                write!(f, "-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A string that names no device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no device: expected GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, MIG-… or HOST-n")]
pub struct ParseDeviceIdError(String);

impl FromStr for DeviceId {
    type Err = ParseDeviceIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseDeviceIdError(text.to_owned());
        if let Some(n) = text.strip_prefix("HOST-") {
            return n.parse().map(Self::host).map_err(|_| error());
        }
        let digits: Vec<u8> =
            text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-")).ok_or_else(error)?.bytes().filter(|b| *b != b'-').collect();
        if digits.len() != 32 {
            return Err(error());
        }
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| error())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| error())?;
        }
        Ok(Self(bytes))
    }
}

/// What a device is and can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its identity, the same in every process.
    pub id: DeviceId,
    /// Its index among the devices that this process sees. Never on the wire.
    pub ordinal: u32,
    /// Its name, for people.
    pub name: String,
    /// Its memory in bytes.
    pub total_bytes: u64,
    /// The unit of physical memory and of mappings, in bytes.
    pub granularity: u64,
    /// Whether [`super::Driver::event_record_context`] works.
    pub context_events: bool,
    /// Whether streams can write and wait on 64-bit words.
    pub stream_words: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_survive_text() {
        for id in [DeviceId::host(0), DeviceId::host(7), DeviceId::from_uuid(*b"0123456789abcdef")] {
            assert_eq!(id.to_string().parse(), Ok(id));
        }
        assert_eq!(DeviceId::host(3).to_string(), "HOST-3");
        assert_eq!(DeviceId::from_uuid([0xab; 16]).to_string(), "GPU-abababab-abab-abab-abab-abababababab");
    }

    #[test]
    fn other_text_is_refused() {
        assert_eq!("MIG-abababab-abab-abab-abab-abababababab".parse(), Ok(DeviceId::from_uuid([0xab; 16])));
        for text in ["", "0", "GPU-", "GPU-zz", "HOST-", "HOST--1", "cuda:0", "GPU-abababab-abab-abab-abab-ababababab€"] {
            assert!(text.parse::<DeviceId>().is_err(), "{text}");
        }
    }
}
