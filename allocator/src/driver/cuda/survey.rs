//! What a device is, and what it lacks.
#![allow(unsafe_code)]

use std::ffi::{c_int, CStr};
use std::path::{Path, PathBuf};

use cudarc::driver::sys::{
    CUcomputemode, CUdevice, CUdevice_attribute as Attribute, CUmemAllocationGranularity_flags, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1 as AllocFlags, CUmemAllocationType, CUmemLocation, CUmemLocationType, CUuuid,
};

use super::api::Api;
use super::kind::HandleKind;
use crate::driver::{DeviceId, DeviceInfo, Result};

/// The least granularity that millpond works with: that of every GPU so far.
const LEAST_GRANULARITY: u64 = 2 << 20;

/// The CUDA version that brought `cuCtxRecordEvent`.
const CONTEXT_EVENTS_SINCE: i32 = 12_050;

/// Which of the driver's 64-bit stream memory operations the device can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Words {
    /// Those that every device has by itself (11.7).
    Second,
    /// Those that a setting of the kernel module switches on.
    First,
}

/// One device.
#[derive(Debug, Clone)]
pub(super) struct Survey {
    pub(super) info: DeviceInfo,
    pub(super) device: CUdevice,
    pub(super) words: Option<Words>,
    /// In what form its memory is shared.
    pub(super) kind: HandleKind,
    /// Whether memory can be created so that network cards reach it.
    pub(super) rdma: bool,
    /// Why there can be no arena on it.
    pub(super) lacks: Option<&'static str>,
}

impl Survey {
    /// Asks the driver for everything about one device. Needs no context.
    pub(super) fn of(api: &Api, ordinal: u32, version: i32, kind: HandleKind) -> Result<Self> {
        let mut device: CUdevice = 0;
        // SAFETY: the driver writes one int, and checks the ordinal.
        unsafe { api.cuDeviceGet(&mut device, ordinal as c_int) }?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: the driver writes one CUuuid; the device is its own.
        unsafe { api.cuDeviceGetUuid(&mut uuid, device) }?;
        let mut total_bytes = 0;
        // SAFETY: the driver writes one size_t; the device is its own.
        unsafe { api.cuDeviceTotalMem(&mut total_bytes, device) }?;

        let has = |attribute| attribute_of(api, attribute, device) == 1;
        let words = if api.cuStreamWaitValue64_v2.is_some()
            && api.cuStreamWriteValue64_v2.is_some()
            && has(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)
        {
            Some(Words::Second)
        } else if api.cuStreamWaitValue64.is_some()
            && api.cuStreamWriteValue64.is_some()
            && has(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1)
        {
            Some(Words::First)
        } else {
            None
        };
        let rdma = has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        let mut lacks = if is_exclusive(attribute_of(api, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device)) {
            Some("the default compute mode: it is prohibited, or exclusive to one process (nvidia-smi -c DEFAULT)")
        } else if has(Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED) {
            Some(NO_MPS)
        } else if !has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED) {
            Some("virtual memory management")
        } else if let Some(missing) = kind.lacks() {
            Some(missing)
        } else if !has(kind.attribute()) {
            Some("memory that can be shared as a file descriptor")
        } else if words.is_none() {
            Some("64-bit stream memory operations")
        } else {
            None
        };
        let mut granularity = LEAST_GRANULARITY;
        if lacks.is_none() {
            match minimum_granularity(api, ordinal, rdma, kind) {
                Ok(minimum) => granularity = minimum.max(LEAST_GRANULARITY),
                Err(error) => {
                    tracing::warn!(ordinal, %error, "the driver names no allocation granularity");
                    lacks = Some("an allocation granularity");
                }
            }
        }

        let info = DeviceInfo {
            id: DeviceId::from_uuid(uuid.bytes.map(|byte| byte as u8)),
            ordinal,
            name: name_of(api, device)?,
            total_bytes: total_bytes as u64,
            granularity,
            context_events: api.cuCtxRecordEvent.is_some() && version >= CONTEXT_EVENTS_SINCE,
            stream_words: words.is_some(),
        };
        Ok(Self { info, device, words, kind, rdma, lacks })
    }
}

/// What every arena's memory is created as: on the device, shareable in one form.
pub(super) fn allocation(ordinal: u32, rdma: bool, kind: HandleKind) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: kind.code(),
        location: location(ordinal),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: AllocFlags { compressionType: 0, gpuDirectRDMACapable: rdma.into(), usage: 0, reserved: [0; 4] },
    }
}

/// A device, as the calls about memory name it.
pub(super) fn location(ordinal: u32) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal as c_int }
}

/// An attribute's value; 0 where the driver does not know the attribute.
pub(super) fn attribute_of(api: &Api, attribute: Attribute, device: CUdevice) -> i32 {
    let mut value = 0;
    // SAFETY: the driver writes one int, and refuses an attribute that it does not know.
    match unsafe { api.cuDeviceGetAttribute(&mut value, attribute as u32, device) } {
        Ok(()) => value,
        Err(_) => 0,
    }
}

const NO_MPS: &str = "processes of its own: MPS runs their work in one, which outlives them (stop its daemon, or set CUDA_MPS_PIPE_DIRECTORY to an empty folder)";

/// What this machine lacks for an arena on any of its devices.
pub(super) fn machine_lacks() -> Option<&'static str> {
    if is_wsl(Path::new("/proc/version")) {
        return Some("shareable memory handles under WSL2");
    }
    let pipes = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").filter(|directory| !directory.is_empty());
    has_mps(&pipes.map_or_else(|| PathBuf::from("/tmp/nvidia-mps"), PathBuf::from)).then_some(NO_MPS)
}

/// Whether the kernel is WSL's.
pub(super) fn is_wsl(version: &Path) -> bool {
    std::fs::read_to_string(version).is_ok_and(|text| text.to_ascii_lowercase().contains("microsoft"))
}

/// Whether an MPS daemon left its control pipe in this folder.
pub(super) fn has_mps(directory: &Path) -> bool {
    directory.join("control").exists()
}

fn is_exclusive(mode: i32) -> bool {
    mode != CUcomputemode::CU_COMPUTEMODE_DEFAULT as i32
}

fn minimum_granularity(api: &Api, ordinal: u32, rdma: bool, kind: HandleKind) -> Result<u64> {
    let prop = allocation(ordinal, rdma, kind);
    let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM as u32;
    let mut granularity = 0;
    // SAFETY: the driver reads one CUmemAllocationProp and writes one size_t.
    unsafe { api.cuMemGetAllocationGranularity(&mut granularity, &prop, minimum) }?;
    Ok(granularity as u64)
}

fn name_of(api: &Api, device: CUdevice) -> Result<String> {
    let mut name = [0_u8; 256];
    // The last byte stays zero, whatever the driver writes.
    let room = name.len() as c_int - 1;
    // SAFETY: the driver writes at most `room` bytes; the device is its own.
    unsafe { api.cuDeviceGetName(name.as_mut_ptr().cast(), room, device) }?;
    Ok(CStr::from_bytes_until_nul(&name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default())
}
