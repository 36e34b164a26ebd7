//! What a driver call can answer.

use std::fmt;

use super::DeviceId;

/// A driver's result code: an integer that the driver chooses, so never an enum.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct CuResult(pub i32);

macro_rules! results {
    ($($name:ident = $code:literal;)*) => {
        #[allow(missing_docs)]
        impl CuResult {
            $(pub const $name: Self = Self($code);)*

            /// The driver's name for the code, where it is one of those that millpond knows.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($code => Some(concat!("CUDA_ERROR_", stringify!($name))),)*
                    _ => None,
                }
            }
        }
    };
}

results! {
    INVALID_VALUE = 1;
    OUT_OF_MEMORY = 2;
    NOT_INITIALIZED = 3;
    DEINITIALIZED = 4;
    STUB_LIBRARY = 34;
    NO_DEVICE = 100;
    INVALID_DEVICE = 101;
    INVALID_CONTEXT = 201;
    ALREADY_MAPPED = 208;
    NOT_MAPPED = 211;
    PEER_ACCESS_UNSUPPORTED = 217;
    OPERATING_SYSTEM = 304;
    INVALID_HANDLE = 400;
    ILLEGAL_STATE = 401;
    NOT_FOUND = 500;
    NOT_READY = 600;
    ILLEGAL_ADDRESS = 700;
    CONTEXT_IS_DESTROYED = 709;
    HOST_MEMORY_ALREADY_REGISTERED = 712;
    HOST_MEMORY_NOT_REGISTERED = 713;
    LAUNCH_FAILED = 719;
    NOT_PERMITTED = 800;
    NOT_SUPPORTED = 801;
    SYSTEM_NOT_READY = 802;
    SYSTEM_DRIVER_MISMATCH = 803;
    STREAM_CAPTURE_UNSUPPORTED = 900;
    STREAM_CAPTURE_INVALIDATED = 901;
    STREAM_CAPTURE_IMPLICIT = 906;
    UNKNOWN = 999;
}

impl CuResult {
    /// `CUDA_SUCCESS`.
    pub const SUCCESS: Self = Self(0);

    /// Whether the code leaves the context dead: every later call on it fails the same way.
    #[must_use]
    pub const fn is_sticky(self) -> bool {
        matches!(self.0, 700 | 702 | 709 | 710 | 714..=719)
    }
}

impl fmt::Display for CuResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "CUDA error {}", self.0),
        }
    }
}

impl fmt::Debug for CuResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a driver did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// There is no driver library on this machine, or none that loads.
    #[error("no CUDA driver library: tried {tried}; is an NVIDIA driver installed and visible in this container?")]
    Unavailable {
        /// Every name that was tried, with the loader's answer.
        tried: String,
    },
    /// The driver is older than a call that cannot be done without.
    #[error("the CUDA driver{} has no {symbol}: a driver of CUDA 11.7 or newer is needed", version.map(|v| format!(" (CUDA {}.{})", v / 1000, v % 1000 / 10)).unwrap_or_default())]
    TooOld {
        /// The missing call.
        symbol: &'static str,
        /// The driver's CUDA version (1000 × major + 10 × minor), where it could be asked.
        version: Option<i32>,
    },
    /// The device lacks something that an arena needs.
    #[error("{device} cannot hold an arena: it lacks {missing}")]
    Unsupported {
        /// The device's name.
        device: String,
        /// What it lacks.
        missing: &'static str,
    },
    /// This process does not see the device.
    #[error("device {id} is not visible to this process (it sees {visible}); is CUDA_VISIBLE_DEVICES hiding it?")]
    NoSuchDevice {
        /// The device that was asked for.
        id: DeviceId,
        /// Those that there are.
        visible: String,
    },
    /// The driver refused a call.
    #[error("{call}: {result}")]
    Call {
        /// The call.
        call: &'static str,
        /// The driver's answer.
        result: CuResult,
    },
}

impl DriverError {
    /// The driver's result code, where a call was made.
    #[must_use]
    pub const fn result(&self) -> Option<CuResult> {
        match self {
            Self::Call { result, .. } => Some(*result),
            _ => None,
        }
    }

    /// Whether this is lack of device memory.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Call { result: CuResult::OUT_OF_MEMORY, .. })
    }
}
