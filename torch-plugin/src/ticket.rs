//! Tickets in C: messages for receivers that are not known yet.
#![allow(unsafe_code)] // extern "C"

use std::ffi::c_char;
use std::ptr::null_mut;

use crate::error::{give, guard, ApiError, Result, FAILED};
use crate::state;
use crate::tensor::{mark, millpond_message, millpond_tensor, of_message, outgoing, pack};

/// Asked of a ticket: it may be redeemed any number of times, until it is cancelled.
pub const MANY: u32 = 1;

/// A message for whoever redeems it, as text: null and the last error where it cannot be. Sets `MILLPOND_COPIED` and
/// `MILLPOND_IN_SEGMENT` in place.
///
/// # Safety
/// `tree` has `tree_bytes` bytes, `tensors` has `count` entries.
#[no_mangle]
pub unsafe extern "C" fn millpond_ticket(
    tree: *const c_char,
    tree_bytes: usize,
    tensors: *mut millpond_tensor,
    count: usize,
    flags: u32,
) -> *mut c_char {
    guard(null_mut(), || {
        if tree.is_null() || (tensors.is_null() && count > 0) {
            return Err(ApiError::argument("tree or tensors is null"));
        }
        // SAFETY: by this function's contract.
        let tree = unsafe { std::slice::from_raw_parts(tree.cast::<u8>(), tree_bytes) };
        let tree = serde_json::from_slice(tree).map_err(|error| ApiError::argument(format!("the tree is not JSON: {error}")))?;
        // SAFETY: by this function's contract; a null pointer was refused above unless count is 0.
        let tensors = if count == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(tensors, count) } };
        let (text, copied) = state::client()?.ticket(tree, &outgoing(tensors), flags & MANY != 0)?;
        mark(tensors, &copied);
        Ok(give(text))
    })
}

/// Takes a ticket up, lazily: a message like those of `millpond_receive`.
///
/// # Safety
/// `ticket` has `bytes` bytes, `out` may be written.
#[no_mangle]
pub unsafe extern "C" fn millpond_redeem(ticket: *const c_char, bytes: usize, out: *mut *mut millpond_message) -> i32 {
    guard(FAILED, || {
        if out.is_null() {
            return Err(ApiError::argument("out is null"));
        }
        let client = state::client()?;
        // SAFETY: by this function's contract.
        let message = client.redeem(unsafe { text(ticket, bytes) }?)?;
        let tensors = of_message(&message, &client);
        // SAFETY: by this function's contract.
        unsafe { *out = pack(message.tree, tensors, u64::from(u32::MAX)) };
        Ok(0)
    })
}

/// Ends what is left of a ticket of this process.
///
/// # Safety
/// `ticket` has `bytes` bytes.
#[no_mangle]
pub unsafe extern "C" fn millpond_ticket_cancel(ticket: *const c_char, bytes: usize) -> i32 {
    guard(FAILED, || {
        // SAFETY: by this function's contract.
        state::client()?.cancel_ticket(unsafe { text(ticket, bytes) }?)?;
        Ok(0)
    })
}

/// # Safety
/// `start` is null or has `bytes` bytes that live as long as the caller's use of them.
unsafe fn text<'a>(start: *const c_char, bytes: usize) -> Result<&'a str> {
    if start.is_null() {
        return Err(ApiError::argument("the ticket is null"));
    }
    // SAFETY: by this function's contract.
    let slice = unsafe { std::slice::from_raw_parts(start.cast::<u8>(), bytes) };
    std::str::from_utf8(slice).map_err(|error| ApiError::argument(format!("the ticket is not text: {error}")))
}
