//! This thread's last error, and the guard around every entry.
#![allow(unsafe_code)] // extern "C"

use std::cell::RefCell;
use std::ffi::{c_char, CStr, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};

use millpond_ipc::client::Error;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// What an entry returns for an error.
pub const FAILED: i32 = -1;

/// What can go wrong at this boundary, beside a client's own errors.
#[derive(Debug)]
pub enum ApiError {
    /// The client's.
    Client(Error),
    /// There is no client.
    NotAttached,
    /// There is one already.
    AlreadyAttached(String),
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        Self::Client(error)
    }
}

impl ApiError {
    /// A mistake of the caller's.
    #[must_use]
    pub fn argument(text: impl Into<String>) -> Self {
        Self::Client(Error::InvalidArgument(text.into()))
    }

    /// The name of its code.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Client(error) => error.code(),
            Self::NotAttached => "NotAttached",
            Self::AlreadyAttached(_) => "AlreadyAttached",
        }
    }
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Client(error) => error.fmt(f),
            Self::NotAttached => {
                write!(f, "this process is not attached to an arena: make a millpond.Arena, or call millpond.attach() in a worker")
            }
            Self::AlreadyAttached(to) => write!(f, "this process is attached already, to the arena at {to}: one arena a process"),
        }
    }
}

/// Result of an entry's body.
pub type Result<T> = std::result::Result<T, ApiError>;

fn set(code: &str, message: &str) {
    let text = serde_json::json!({ "code": code, "message": message }).to_string();
    let text = CString::new(text).unwrap_or_default();
    // A thread that is being torn down has no last error any more.
    let _ = LAST.try_with(|last| last.replace(text));
}

/// Runs an entry's body; an error or a panic becomes the thread's last error and `failed`.
pub fn guard<T>(failed: T, body: impl FnOnce() -> Result<T>) -> T {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => {
            set(error.code(), &error.to_string());
            failed
        }
        Err(panic) => {
            set("Internal", &format!("a bug in millpond: {}", panic_text(panic.as_ref())));
            failed
        }
    }
}

/// What a panic said.
#[must_use]
pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panic".to_owned())
}

/// This thread's last error as JSON `{"code", "message"}`; empty if there was none. Valid until the thread's next call.
#[no_mangle]
pub extern "C" fn millpond_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Text that the caller owns, to be freed with [`millpond_string_free`].
#[must_use]
pub fn give(text: String) -> *mut c_char {
    CString::new(text).unwrap_or_default().into_raw()
}

/// Text from the caller.
///
/// # Errors
/// For a null pointer or text that is not UTF-8.
///
/// # Safety
/// `text` is null or ends with a zero byte and lives for the call.
pub unsafe fn take<'a>(text: *const c_char) -> Result<&'a str> {
    if text.is_null() {
        return Err(ApiError::argument("a text is missing (null)"));
    }
    // SAFETY: not null, and by this function's own contract it ends with a zero byte.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| ApiError::argument("a text is not UTF-8"))
}

/// Frees a text that millpond gave. Null is nothing.
///
/// # Safety
/// `text` came from millpond and was not freed before.
#[no_mangle]
pub unsafe extern "C" fn millpond_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: it was made by give(), by this function's contract.
        drop(unsafe { CString::from_raw(text) });
    }
}
