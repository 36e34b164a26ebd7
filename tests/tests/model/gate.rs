//! The end of a recording's frames, which returns when no thread is in Python for one any more.
//!
//! | word | who writes it | what is relied on |
//! | --- | --- | --- |
//! | `Gate::number` | who opens and shuts | who enters behind the shutting finds it shut |
//! | `Gate::inside` | who enters and leaves | who shuts counts all that found it open, and sees what those who left have done |

mod atomic {
    pub(super) use loom::sync::atomic::{fence, AtomicU32, Ordering};
}

#[path = "../../../torch-plugin/src/frames/gate.rs"]
mod real;

use atomic::AtomicU32;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use real::Gate;

use crate::check;

#[test]
fn who_shuts_waits_for_all_inside() {
    check(3, || {
        let gate = Arc::new(Gate { number: AtomicU32::new(0), inside: AtomicU32::new(0) });
        // What is only there while the gate is open: Python.
        let python = Arc::new(UnsafeCell::new(true));
        gate.open(4);
        let user = {
            let (gate, python) = (gate.clone(), python.clone());
            thread::spawn(move || {
                for _ in 0..2 {
                    if let Some(inside) = gate.enter() {
                        assert_eq!(inside.number, 4);
                        // SAFETY: whoever ends it waits for this thread: what is checked here.
                        python.with(|python| assert!(unsafe { *python }, "it has ended"));
                    }
                }
            })
        };
        let end = thread::spawn(move || {
            gate.shut();
            while !gate.is_empty() {
                thread::yield_now();
            }
            // SAFETY: nobody is inside: what is checked here.
            python.with_mut(|python| unsafe { *python = false });
        });
        user.join().unwrap();
        end.join().unwrap();
    });
}
