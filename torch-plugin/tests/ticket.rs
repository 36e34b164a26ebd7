//! Tickets through the C API: what is refused, what is marked, who ends them. One test: a process has one client.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::{c_char, CStr, CString};
use std::ptr::{null, null_mut};

use millpond_torch::control::millpond_control;
use millpond_torch::error::{millpond_last_error, millpond_string_free, FAILED};
use millpond_torch::tensor::{
    millpond_allocate, millpond_deallocate, millpond_import_release, millpond_message_free, millpond_tensor, COPIED,
};
use millpond_torch::ticket::{millpond_redeem, millpond_ticket, millpond_ticket_cancel, MANY};

fn control(request: &str) -> serde_json::Value {
    let request = CString::new(request).unwrap();
    // SAFETY: a terminated text; the answer is ours to free.
    unsafe {
        let answer = millpond_control(request.as_ptr());
        assert!(!answer.is_null(), "{}", last_error());
        let value = serde_json::from_slice(CStr::from_ptr(answer).to_bytes()).unwrap();
        millpond_string_free(answer);
        value
    }
}

fn last_error() -> String {
    // SAFETY: a terminated text of this thread's.
    unsafe { CStr::from_ptr(millpond_last_error()) }.to_string_lossy().into_owned()
}

fn ticket(tree: &str, tensors: &mut [millpond_tensor], flags: u32) -> Option<String> {
    // SAFETY: as many bytes and entries as are said.
    unsafe {
        let text = millpond_ticket(tree.as_ptr().cast(), tree.len(), tensors.as_mut_ptr(), tensors.len(), flags);
        if text.is_null() {
            return None;
        }
        let owned = CStr::from_ptr(text).to_str().unwrap().to_owned();
        millpond_string_free(text);
        Some(owned)
    }
}

/// The tree and the imports of a ticket.
fn redeem(text: &str) -> Result<(String, Vec<millpond_tensor>), String> {
    let mut out = null_mut();
    // SAFETY: as many bytes as are said; what comes is read before it is freed.
    unsafe {
        if millpond_redeem(text.as_ptr().cast(), text.len(), &mut out) == FAILED {
            return Err(last_error());
        }
        let tree = std::slice::from_raw_parts((*out).tree.cast::<u8>(), (*out).tree_bytes);
        let tensors = if (*out).count == 0 { Vec::new() } else { std::slice::from_raw_parts((*out).tensors, (*out).count).to_vec() };
        let found = (String::from_utf8(tree.to_vec()).unwrap(), tensors);
        millpond_message_free(out);
        Ok(found)
    }
}

fn range(address: u64) -> millpond_tensor {
    millpond_tensor { address, bytes: 4096, stream: 0, import_: 0, device: -1, flags: 0 }
}

#[test]
fn tickets_in_c() {
    assert!(ticket("1", &mut [], 0).is_none() && last_error().contains("NotAttached"));
    assert!(redeem("{}").unwrap_err().contains("NotAttached"));

    let served = control(r#"{"op":"serve_inline","driver":"host","limit":"64MiB"}"#);
    control(&format!(r#"{{"op":"attach","socket":{},"key":{},"name":"t","role":"parent"}}"#, served["socket"], served["key"]));

    // What cannot be.
    // SAFETY: null pointers are what is tried; counts are 0 or refused before they are used.
    unsafe {
        assert!(millpond_ticket(null(), 0, null_mut(), 0, 0).is_null());
        assert!(last_error().contains("tree or tensors is null"));
        assert!(millpond_ticket(c"1".as_ptr(), 1, null_mut(), 1, 0).is_null());
        assert_eq!(millpond_redeem(null::<c_char>(), 0, null_mut()), FAILED);
        assert!(last_error().contains("out is null"));
        let mut out = null_mut();
        assert_eq!(millpond_redeem(null::<c_char>(), 0, &mut out), FAILED);
        assert!(last_error().contains("the ticket is null"));
        assert_eq!(millpond_redeem(b"\xff".as_ptr().cast(), 1, &mut out), FAILED);
        assert!(last_error().contains("not text") && out.is_null());
    }
    assert!(ticket("not JSON", &mut [], 0).is_none() && last_error().contains("the tree is not JSON"));
    assert!(redeem("{}").unwrap_err().contains("this is no ticket"));

    // Arena memory goes as it is; other memory is copied, and marked.
    let block = millpond_allocate(-1, 4096, 0);
    // SAFETY: a live block of so many bytes.
    unsafe { std::ptr::write_bytes(block as *mut u8, 5, 4096) };
    let outside = vec![6_u8; 4096];
    let mut tensors = [range(block), range(outside.as_ptr() as u64)];
    let once = ticket(r#"{"a":1}"#, &mut tensors, 0).unwrap();
    assert_eq!(tensors.map(|tensor| tensor.flags & COPIED), [0, COPIED]);
    let (tree, imports) = redeem(&once).unwrap();
    assert_eq!((tree.as_str(), imports.len()), (r#"{"a":1}"#, 2));
    assert!(imports.iter().all(|import| import.import_ != 0 && import.address == 0 && import.device == -1), "lazy");
    assert!(redeem(&once).unwrap_err().contains("Stale"));
    assert!(control(r#"{"op":"counters"}"#)["leases"].as_u64() >= Some(2));
    for import in &imports {
        let parted = format!(r#"{{"op":"import_parted","import":{}}}"#, import.import_);
        assert_eq!(control(&parted)["parted"], false);
        assert_eq!(millpond_import_release(import.import_), 0);
        assert_eq!(control(&parted)["parted"], true);
        assert_eq!(millpond_import_release(import.import_), FAILED, "once only");
    }

    // For many, until it is cancelled.
    let many = ticket("null", &mut [range(block)], MANY).unwrap();
    let taken = [redeem(&many).unwrap().1[0].import_, redeem(&many).unwrap().1[0].import_];
    assert_ne!(taken[0], taken[1]);
    // SAFETY: as many bytes as are said.
    unsafe { assert_eq!(millpond_ticket_cancel(many.as_ptr().cast(), many.len()), 0) };
    assert!(redeem(&many).unwrap_err().contains("Stale"));
    for import in taken {
        assert_eq!(millpond_import_release(import), 0);
    }
    assert_eq!(millpond_deallocate(block), 0);
    assert_eq!(control(r#"{"op":"counters"}"#)["leases"], 0);
    control(r#"{"op":"detach"}"#);
    assert!(redeem(&many).unwrap_err().contains("NotAttached"));
    control(r#"{"op":"stop_inline"}"#);
}
