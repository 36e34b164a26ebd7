//! How who lets go of something tells the tender (`Nudge.0`): it is told, or it sees it by itself, however the two fall together.
//!
//! What is put down is counted under a lock, in a word that the tender reads without it (`Imports::waiting`): `Nudge`'s exchanges are what
//! orders that.

mod atomic {
    pub(super) use loom::sync::atomic::{AtomicBool, Ordering};
}

#[path = "../../../ipc/src/client/nudge.rs"]
mod real;

use atomic::{AtomicBool, Ordering};
use loom::sync::atomic::AtomicU64;
use loom::sync::{Arc, Mutex};
use loom::thread;
use real::Nudge;

use crate::check;

/// `soon`: the tender is between two of its soon looks.
fn nothing_is_overlooked(soon: bool) {
    check(3, move || {
        let nudge = Arc::new(Nudge(AtomicBool::new(false)));
        let (list, waiting) = (Arc::new(Mutex::new(0)), Arc::new(AtomicU64::new(0)));
        let told = Arc::new(AtomicBool::new(false));
        if soon {
            nudge.looks_soon();
        }
        let releasers = [(); 2].map(|()| {
            let (nudge, list, waiting, told) = (nudge.clone(), list.clone(), waiting.clone(), told.clone());
            thread::spawn(move || {
                let mut list = list.lock().unwrap();
                *list += 1;
                waiting.store(*list, Ordering::Relaxed);
                drop(list);
                if nudge.is_news() {
                    told.store(true, Ordering::Release);
                }
            })
        });
        let tender = thread::spawn(move || {
            nudge.look();
            let seen = waiting.load(Ordering::Relaxed);
            if seen > 0 {
                nudge.looks_soon();
            }
            seen
        });
        releasers.into_iter().for_each(|thread| thread.join().unwrap());
        let seen = tender.join().unwrap();
        // It looks soon again, or is told to.
        assert!(seen > 0 || told.load(Ordering::Acquire), "what was let go of waits for the next beat");
    });
}

#[test]
fn what_is_put_down_is_seen_or_told_of() {
    nothing_is_overlooked(false);
}

#[test]
fn what_is_put_down_between_two_soon_looks_is_seen_or_told_of() {
    nothing_is_overlooked(true);
}
