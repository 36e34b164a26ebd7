//! What the arena cannot see of a GPU, from NVML where the machine has it: how much is used, and by which process.
//!
//! The library is opened at run time by name. None of its calls makes a context.
#![allow(unsafe_code)] // a C library

use std::ffi::{c_char, c_int, c_uint, c_void, CString};

use libloading::{Library, Symbol};
use serde::Serialize;

/// Its names, most particular first.
const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];
/// `NVML_ERROR_INSUFFICIENT_SIZE`: the array was too short.
const TOO_SHORT: c_int = 7;
/// `NVML_VALUE_NOT_AVAILABLE` of a 64-bit figure.
const UNKNOWN: u64 = u64::MAX;

/// A device's memory as the driver counts it, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// All of it.
    pub total: u64,
    /// What nobody uses.
    pub free: u64,
    /// What is used, by whomever; the driver's own share is in it.
    pub used: u64,
    /// What the arena has not taken: `used` less what the arena has reserved.
    pub outside: u64,
    /// By process, as far as NVML says.
    pub processes: Vec<ProcessUsage>,
}

/// One process's use of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProcessUsage {
    /// Its id, as the driver sees it: in a container it may be another than ours.
    pub pid: u32,
    /// Bytes. The memory of an arena counts for each process that maps it. `None`: the driver does not say.
    pub used: Option<u64>,
}

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_v2_t`, which versions 2 and 3 of the query fill.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: c_uint,
    used: u64,
    instance: c_uint,
    compute_instance: c_uint,
}

type Init = unsafe extern "C" fn() -> c_int;
type ByUuid = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
type MemoryInfo = unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int;
type Processes = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut Process) -> c_int;

/// The library, ready to be asked.
#[derive(Debug)]
pub struct Nvml(Library);

impl Nvml {
    /// Opens it.
    ///
    /// # Errors
    /// Why there is none, for people.
    pub fn open() -> Result<Self, String> {
        // SAFETY: the driver's own library; its constructors do nothing that this process must not do.
        let library =
            NAMES.into_iter().find_map(|name| unsafe { Library::new(name) }.ok()).ok_or("NVML is not here (libnvidia-ml.so.1)")?;
        let nvml = Self(library);
        // SAFETY: nvmlInit_v2 takes nothing and returns a code.
        match unsafe { nvml.function::<Init>(b"nvmlInit_v2\0")?() } {
            0 => Ok(nvml),
            code => Err(format!("NVML does not start: error {code}")),
        }
    }

    fn function<T>(&self, name: &[u8]) -> Result<Symbol<'_, T>, String> {
        // SAFETY: the caller's T is the signature that nvml.h gives for this name.
        unsafe { self.0.get(name) }.map_err(|error| format!("NVML: {error}"))
    }

    /// A GPU's use, by its UUID as text (`GPU-…`), where the arena has reserved so many bytes of it.
    ///
    /// # Errors
    /// What NVML said, for people.
    pub fn usage(&self, id: &str, reserved: u64) -> Result<Usage, String> {
        let said = |what: &str, code: c_int| if code == 0 { Ok(()) } else { Err(format!("NVML: {what} of {id}: error {code}")) };
        let text = CString::new(id).map_err(|_| format!("{id:?} is no UUID"))?;
        let mut device = std::ptr::null_mut();
        // SAFETY: a string that ends with zero, and a place for the handle.
        said("no handle", unsafe { self.function::<ByUuid>(b"nvmlDeviceGetHandleByUUID\0")?(text.as_ptr(), &raw mut device) })?;
        let mut memory = Memory::default();
        // SAFETY: a handle that NVML gave, and a nvmlMemory_t.
        said("no memory", unsafe { self.function::<MemoryInfo>(b"nvmlDeviceGetMemoryInfo\0")?(device, &raw mut memory) })?;
        let Memory { total, free, used } = memory;
        let processes = self.processes(device).unwrap_or_default();
        Ok(Usage { total, free, used, outside: used.saturating_sub(reserved), processes })
    }

    fn processes(&self, device: *mut c_void) -> Result<Vec<ProcessUsage>, String> {
        let query = match self.function::<Processes>(b"nvmlDeviceGetComputeRunningProcesses_v3\0") {
            Ok(query) => query,
            Err(_) => self.function::<Processes>(b"nvmlDeviceGetComputeRunningProcesses_v2\0")?,
        };
        let mut rows = vec![Process::default(); 64];
        // It may take another look: processes come and go.
        for _ in 0..4 {
            let mut count = c_uint::try_from(rows.len()).unwrap_or(c_uint::MAX);
            // SAFETY: a handle that NVML gave, and an array of `count` records.
            match unsafe { query(device, &raw mut count, rows.as_mut_ptr()) } {
                0 => {
                    let used = |row: &Process| ProcessUsage { pid: row.pid, used: (row.used != UNKNOWN).then_some(row.used) };
                    return Ok(rows.iter().take(count as usize).map(used).collect());
                }
                TOO_SHORT => rows = vec![Process::default(); count as usize + 16],
                code => return Err(format!("NVML: no processes: error {code}")),
            }
        }
        Err("NVML: its list of processes keeps growing".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_it_is_told_so() {
        match Nvml::open() {
            Ok(nvml) => assert!(nvml.usage("GPU-no-such-device", 0).unwrap_err().contains("GPU-no-such-device")),
            Err(error) => assert!(error.contains("NVML"), "{error}"),
        }
    }
}
