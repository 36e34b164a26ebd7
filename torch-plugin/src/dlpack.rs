//! DLPack: tensors for other libraries, whose deleter lets go of what is ours.
//!
//! The final address stands in `data` and `byte_offset` is 0, since torch ignored the offset before 2.10. The deleter takes
//! no GIL and never blocks: it may run on any thread, after the interpreter has ended too.
#![allow(unsafe_code)] // a C interface

use std::ffi::{c_char, c_int, c_void};
use std::mem::transmute;
use std::panic::catch_unwind;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::error::{guard, ApiError};
use crate::tensor::{deallocate, millpond_import_release};

/// `DLDevice`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DLDevice {
    device_type: i32,
    device_id: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DLDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Debug)]
pub struct DLTensor {
    data: *mut c_void,
    device: DLDevice,
    ndim: i32,
    dtype: DLDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    tensor: DLTensor,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// What [`millpond_dlpack_capsule`] makes a tensor of.
#[repr(C)]
#[derive(Debug)]
pub struct millpond_dlpack_spec {
    /// Its first element.
    pub address: u64,
    /// DLPack's device type: 1 CPU, 2 CUDA.
    pub device_type: i32,
    /// The device's ordinal.
    pub device_id: i32,
    /// Dimensions.
    pub ndim: i32,
    /// DLPack's type code.
    pub code: u8,
    /// Bits of an element.
    pub bits: u8,
    /// Lanes of an element; 1.
    pub lanes: u16,
    /// The import or the block's address that the tensor keeps.
    pub owner: u64,
    /// 0: an import, 1: a block.
    pub kind: u32,
}

#[repr(C)]
struct Context {
    tensor: DLManagedTensor,
    shape: Vec<i64>,
    strides: Vec<i64>,
    owner: u64,
    kind: u32,
}

/// A `DLManagedTensor` that keeps an import or a block until its deleter runs, in a Python capsule named "dltensor" (a new reference).
/// From one piece of memory: the spec, and right behind it `ndim` sizes and `ndim` strides of 8 bytes. Null and the last error where
/// it cannot be; null alone where Python has set an exception.
///
/// # Safety
/// All of that may be read (it need not be aligned), and the GIL is held.
#[no_mangle]
pub unsafe extern "C" fn millpond_dlpack_capsule(spec: *const millpond_dlpack_spec) -> *mut c_void {
    guard(null_mut(), || {
        let new = NEW.load(Ordering::Acquire);
        if new.is_null() || spec.is_null() {
            return Err(ApiError::argument("spec is null, or millpond_dlpack_init was not called"));
        }
        let behind = spec.wrapping_add(1).cast::<i64>();
        // SAFETY: by this function's contract; every pattern of bits is a spec.
        let spec = unsafe { spec.read_unaligned() };
        let ndim = usize::try_from(spec.ndim).map_err(|_| ApiError::argument(format!("{} dimensions", spec.ndim)))?;
        // SAFETY: by this function's contract, 2 * ndim numbers stand behind the spec.
        let list = |from: usize| (from..from + ndim).map(|n| unsafe { behind.add(n).read_unaligned() }).collect();
        let tensor = Box::into_raw(managed(&spec, list(0), list(ndim)));
        // SAFETY: the address was given as that of this function of CPython's stable ABI, and the GIL is held.
        let capsule = unsafe {
            let new = transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *const c_char, Destructor) -> *mut c_void>(new);
            new(tensor.cast(), NAME, millpond_dlpack_capsule_destructor)
        };
        if capsule.is_null() {
            // SAFETY: just made, and nobody else has it.
            unsafe { delete(tensor.cast()) };
        }
        Ok(capsule)
    })
}

/// A tensor and what keeps its memory. Its address is that of the tensor.
fn managed(spec: &millpond_dlpack_spec, shape: Vec<i64>, strides: Vec<i64>) -> Box<Context> {
    let mut context = Box::new(Context {
        tensor: DLManagedTensor {
            tensor: DLTensor {
                data: spec.address as *mut c_void,
                device: DLDevice { device_type: spec.device_type, device_id: spec.device_id },
                ndim: spec.ndim,
                dtype: DLDataType { code: spec.code, bits: spec.bits, lanes: spec.lanes },
                shape: null_mut(),
                strides: null_mut(),
                byte_offset: 0,
            },
            manager_ctx: null_mut(),
            deleter: Some(delete),
        },
        shape,
        strides,
        owner: spec.owner,
        kind: spec.kind,
    });
    context.tensor.tensor.shape = context.shape.as_mut_ptr();
    context.tensor.tensor.strides = if context.strides.is_empty() { null_mut() } else { context.strides.as_mut_ptr() };
    context
}

unsafe extern "C" fn delete(tensor: *mut DLManagedTensor) {
    if tensor.is_null() {
        return;
    }
    // SAFETY: a consumer calls the deleter once, with the tensor that it was given, which is the first field of its box.
    let context = unsafe { Box::from_raw(tensor.cast::<Context>()) };
    let _ = catch_unwind(|| match context.kind {
        0 => drop(millpond_import_release(context.owner)),
        _ if crate::state::is_forked() => {}
        _ => drop(deallocate(context.owner)),
    });
}

const NAME: *const c_char = c"dltensor".as_ptr();

/// `PyCapsule_Destructor`.
type Destructor = unsafe extern "C" fn(*mut c_void);

static NEW: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static IS_VALID: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static GET_POINTER: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// Takes the addresses of `PyCapsule_New`, `PyCapsule_IsValid` and `PyCapsule_GetPointer`, for [`millpond_dlpack_capsule`] and its
/// destructor.
#[no_mangle]
pub extern "C" fn millpond_dlpack_init(new: *mut c_void, is_valid: *mut c_void, get_pointer: *mut c_void) {
    IS_VALID.store(is_valid, Ordering::Release);
    GET_POINTER.store(get_pointer, Ordering::Release);
    // The last: who sees this can make a capsule, and the capsule's destructor needs the others.
    NEW.store(new, Ordering::Release);
}

/// A capsule's destructor: deletes the tensor if nobody took it (its name is still "dltensor").
///
/// # Safety
/// For CPython to call on a capsule of [`millpond_dlpack_capsule`].
#[no_mangle]
pub unsafe extern "C" fn millpond_dlpack_capsule_destructor(capsule: *mut c_void) {
    let (is_valid, get_pointer) = (IS_VALID.load(Ordering::Acquire), GET_POINTER.load(Ordering::Acquire));
    if is_valid.is_null() || get_pointer.is_null() || capsule.is_null() {
        return;
    }
    // SAFETY: the addresses were given as those of these two functions of CPython's stable ABI; CPython calls destructors
    // with the GIL held.
    unsafe {
        let is_valid = transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *const c_char) -> c_int>(is_valid);
        let get_pointer = transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void>(get_pointer);
        if is_valid(capsule, NAME) != 0 {
            delete(get_pointer(capsule, NAME).cast());
        }
    }
}

const _: () = assert!(size_of::<DLTensor>() == 48 && size_of::<DLManagedTensor>() == 64, "DLPack's layout");
