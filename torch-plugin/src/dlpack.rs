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

/// What [`millpond_dlpack`] makes a tensor of.
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
    /// Elements of each dimension.
    pub shape: *const i64,
    /// Elements from one to the next, of each dimension; null: contiguous.
    pub strides: *const i64,
    /// The import or the block's address that the tensor keeps.
    pub owner: u64,
    /// 0: an import, 1: a block.
    pub kind: u32,
}

struct Context {
    tensor: DLManagedTensor,
    shape: Vec<i64>,
    strides: Vec<i64>,
    owner: u64,
    kind: u32,
}

/// A `DLManagedTensor` that keeps an import or a block until its deleter runs. Null and the last error where it cannot be.
///
/// # Safety
/// `spec` may be read, its `shape` and `strides` (where not null) have `ndim` entries.
#[no_mangle]
pub unsafe extern "C" fn millpond_dlpack(spec: *const millpond_dlpack_spec) -> *mut c_void {
    guard(null_mut(), || {
        // SAFETY: by this function's contract.
        let spec = unsafe { spec.as_ref() }.ok_or_else(|| ApiError::argument("spec is null"))?;
        let ndim = usize::try_from(spec.ndim).map_err(|_| ApiError::argument(format!("{} dimensions", spec.ndim)))?;
        if ndim > 0 && spec.shape.is_null() {
            return Err(ApiError::argument("shape is null"));
        }
        let list = |at: *const i64| {
            if at.is_null() || ndim == 0 {
                return Vec::new();
            }
            // SAFETY: by this function's contract.
            unsafe { std::slice::from_raw_parts(at, ndim) }.to_vec()
        };
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
            shape: list(spec.shape),
            strides: list(spec.strides),
            owner: spec.owner,
            kind: spec.kind,
        });
        context.tensor.tensor.shape = context.shape.as_mut_ptr();
        if !spec.strides.is_null() {
            context.tensor.tensor.strides = context.strides.as_mut_ptr();
        }
        let context = Box::into_raw(context);
        // SAFETY: just made; the tensor is part of the box that its manager_ctx names.
        unsafe {
            (*context).tensor.manager_ctx = context.cast();
            Ok((&raw mut (*context).tensor).cast())
        }
    })
}

unsafe extern "C" fn delete(tensor: *mut DLManagedTensor) {
    if tensor.is_null() {
        return;
    }
    // SAFETY: a consumer calls the deleter once, with the tensor that it was given; manager_ctx names the box that holds it.
    let context = unsafe { Box::from_raw((*tensor).manager_ctx.cast::<Context>()) };
    let _ = catch_unwind(|| match context.kind {
        0 => drop(millpond_import_release(context.owner)),
        _ if crate::state::is_forked() => {}
        _ => drop(deallocate(context.owner)),
    });
}

static IS_VALID: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static GET_POINTER: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// Takes the addresses of `PyCapsule_IsValid` and `PyCapsule_GetPointer`, for [`millpond_dlpack_capsule_destructor`].
#[no_mangle]
pub extern "C" fn millpond_dlpack_init(is_valid: *mut c_void, get_pointer: *mut c_void) {
    IS_VALID.store(is_valid, Ordering::Release);
    GET_POINTER.store(get_pointer, Ordering::Release);
}

/// A capsule's destructor: deletes the tensor if nobody took it (its name is still "dltensor").
///
/// # Safety
/// For CPython to call on a capsule that holds a tensor of [`millpond_dlpack`].
#[no_mangle]
pub unsafe extern "C" fn millpond_dlpack_capsule_destructor(capsule: *mut c_void) {
    const NAME: *const c_char = c"dltensor".as_ptr();
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
