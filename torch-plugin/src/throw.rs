//! Throwing torch's own C++ exception with no torch headers: every symbol is found at run time.
//!
//! torch makes a tensor at address 0 of a null pointer, so malloc must throw. What is thrown is `c10::OutOfMemoryError`,
//! which Python sees as `torch.OutOfMemoryError`: its vtable and typeinfo and `c10::Error`'s constructor are looked up in
//! the libraries that torch has loaded. Both ABIs of `std::string` are known (wheels up to torch 2.6 use the old one).
//! Where a symbol is missing: `std::runtime_error`, which Python sees as RuntimeError. Measured on torch 2.11
//! (`facts/torch.md`, section 7).
#![allow(unsafe_code)] // the C++ ABI

use std::ffi::{c_char, c_void, CStr, CString};
use std::mem::transmute;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

/// Which exception.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `torch.OutOfMemoryError`.
    OutOfMemory,
    /// `RuntimeError`.
    Runtime,
}

/// `c10::SourceLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// `std::string` in the ABI since GCC 5: pointer, length, and either the capacity or the short text itself.
#[repr(C)]
struct NewString {
    data: *mut c_char,
    length: usize,
    capacity: usize,
    spare: usize,
}

/// What stands before the text of a `std::string` in the old ABI.
#[repr(C)]
struct OldRep {
    length: usize,
    capacity: usize,
    references: i32,
}

type Construct = unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut c_void);
type Destroy = unsafe extern "C-unwind" fn(*mut c_void);

#[derive(Clone, Copy)]
struct Torch {
    construct: Construct,
    old_strings: bool,
    vtable: *const *const c_void,
    typeinfo: *const c_void,
}

#[derive(Clone, Copy)]
struct Std {
    allocate: unsafe extern "C-unwind" fn(usize) -> *mut c_void,
    throw: unsafe extern "C-unwind" fn(*mut c_void, *const c_void, Option<Destroy>) -> !,
    new: unsafe extern "C-unwind" fn(usize) -> *mut c_void,
    construct: unsafe extern "C-unwind" fn(*mut c_void, *const c_char),
    destroy: Destroy,
    typeinfo: *const c_void,
}

// SAFETY: addresses of code and of constant data in libraries that are never unloaded.
unsafe impl Send for Std {}
// SAFETY: as above.
unsafe impl Sync for Std {}

/// A library that is loaded already (`only_loaded`), or is loaded now.
fn library(name: &CStr, only_loaded: bool) -> *mut c_void {
    let flags = libc::RTLD_LAZY | if only_loaded { libc::RTLD_NOLOAD } else { 0 };
    // SAFETY: dlopen with a terminated name.
    unsafe { libc::dlopen(name.as_ptr(), flags) }
}

fn symbol(libraries: &[*mut c_void], name: &CStr) -> *mut c_void {
    // SAFETY: dlsym on handles from dlopen.
    libraries
        .iter()
        .filter(|l| !l.is_null())
        .map(|l| unsafe { libc::dlsym(*l, name.as_ptr()) })
        .find(|s| !s.is_null())
        .unwrap_or(null_mut())
}

fn standard() -> Option<&'static Std> {
    static FOUND: OnceLock<Option<Std>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            let libraries = [library(c"libstdc++.so.6", true), library(c"libstdc++.so.6", false)];
            let find = |name| Some(symbol(&libraries, name)).filter(|s| !s.is_null());
            // SAFETY: the types are those of the Itanium C++ ABI and of libstdc++ for these mangled names.
            unsafe {
                Some(Std {
                    allocate: transmute::<*mut c_void, unsafe extern "C-unwind" fn(usize) -> *mut c_void>(find(
                        c"__cxa_allocate_exception",
                    )?),
                    throw: transmute::<*mut c_void, unsafe extern "C-unwind" fn(*mut c_void, *const c_void, Option<Destroy>) -> !>(find(
                        c"__cxa_throw",
                    )?),
                    new: transmute::<*mut c_void, unsafe extern "C-unwind" fn(usize) -> *mut c_void>(find(c"_Znwm")?),
                    construct: transmute::<*mut c_void, unsafe extern "C-unwind" fn(*mut c_void, *const c_char)>(find(
                        c"_ZNSt13runtime_errorC1EPKc",
                    )?),
                    destroy: transmute::<*mut c_void, Destroy>(find(c"_ZNSt13runtime_errorD1Ev")?),
                    typeinfo: find(c"_ZTISt13runtime_error")?,
                })
            }
        })
        .as_ref()
}

/// torch may be imported after us, so a search that failed is repeated.
fn torch() -> Option<Torch> {
    let libraries = [c"libc10_cuda.so", c"libc10.so", c"libtorch_cuda.so", c"libtorch_python.so"].map(|name| library(name, true));
    let find = |name| Some(symbol(&libraries, name)).filter(|s| !s.is_null());
    let new = find(c"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE");
    let (constructor, old_strings) = match new {
        Some(constructor) => (constructor, false),
        None => (find(c"_ZN3c105ErrorC1ENS_14SourceLocationESs")?, true),
    };
    let vtable = find(c"_ZTVN3c1016OutOfMemoryErrorE")?;
    let typeinfo = find(c"_ZTIN3c1016OutOfMemoryErrorE")?;
    // SAFETY: c10::Error::Error(SourceLocation, std::string); the string goes by reference to a temporary in either ABI.
    let construct = unsafe { transmute::<*mut c_void, Construct>(constructor) };
    Some(Torch { construct, old_strings, vtable: vtable.cast(), typeinfo })
}

/// Whether torch's out-of-memory exception can be thrown in this process: its symbols are there.
#[no_mangle]
pub extern "C" fn millpond_torch_can_throw() -> i32 {
    i32::from(std::panic::catch_unwind(|| torch().is_some() && standard().is_some()).unwrap_or(false))
}

/// Throws. Returns null only where the process has no C++ library at all: then no torch is there to take it amiss.
pub(crate) fn throw(kind: Kind, message: String) -> *mut c_void {
    let Some(std) = standard() else { return null_mut() };
    let text = CString::new(message).unwrap_or_default();
    match torch().filter(|_| kind == Kind::OutOfMemory) {
        // SAFETY: every address was found under the name whose type it is given here.
        Some(torch) => unsafe { throw_torch(std, torch, text) },
        // SAFETY: as above.
        None => unsafe { throw_standard(std, text) },
    }
}

unsafe fn throw_standard(std: &Std, text: CString) -> ! {
    // SAFETY: a std::runtime_error is two words (vtable, text); 64 bytes are more than enough. The constructor copies the text.
    unsafe {
        let exception = (std.allocate)(64);
        (std.construct)(exception, text.as_ptr());
        drop(text);
        (std.throw)(exception, std.typeinfo, Some(std.destroy))
    }
}

unsafe fn throw_torch(std: &Std, torch: Torch, text: CString) -> ! {
    let bytes = text.as_bytes_with_nul();
    let place = SourceLocation { function: c"malloc".as_ptr(), file: c"millpond".as_ptr(), line: 0 };
    // SAFETY: a c10::OutOfMemoryError adds nothing to c10::Error, whose size is below 512 bytes in torch 2.1 to 2.15; 2048
    // zeroed bytes leave room. The strings are laid out as libstdc++ lays them out, in memory from its own operator new,
    // since their destructor gives it back there. In the old ABI a temporary that was copied from, not moved, would leave
    // one reference behind: a few bytes an out-of-memory error.
    unsafe {
        let exception = (std.allocate)(2048);
        exception.cast::<u8>().write_bytes(0, 2048);
        if torch.old_strings {
            let rep = (std.new)(size_of::<OldRep>() + bytes.len()).cast::<OldRep>();
            rep.write(OldRep { length: bytes.len() - 1, capacity: bytes.len() - 1, references: 0 });
            let data = rep.add(1).cast::<u8>();
            data.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            let mut string: *mut u8 = data;
            (torch.construct)(exception, place, (&raw mut string).cast());
        } else {
            let data = (std.new)(bytes.len()).cast::<u8>();
            data.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            let mut string = NewString { data: data.cast(), length: bytes.len() - 1, capacity: bytes.len() - 1, spare: 0 };
            (torch.construct)(exception, place, (&raw mut string).cast());
        }
        drop(text);
        // An object's first word points behind the two words at the head of its class's vtable; slot 0 there is the destructor.
        let slots = torch.vtable.add(2);
        exception.cast::<*const *const c_void>().write(slots);
        let destroy = transmute::<*const c_void, Option<Destroy>>(if slots.is_null() { null() } else { *slots });
        (std.throw)(exception, torch.typeinfo, destroy)
    }
}
