//! Rows of the ledger: two copies and a count of writes.
//!
//! | word | who writes it | what is relied on |
//! | --- | --- | --- |
//! | `Cell::writes` | the one writer, after a whole copy | who sees a count sees the copy that it turned readers to, whole |
//! | `Cell::copies` | the one writer, the one that readers do not look at | who has read a word of the next but one write sees, when it looks again, that the count has moved |
//!
//! So a row is never torn, never older than one that its reader has seen or been told of, and a writer that dies half-way leaves the last
//! one. One writer at a time is the caller's part: the owner for its rows; for a client's, whoever holds its heap's lock.

mod atomic {
    pub(super) use loom::sync::atomic::{fence, AtomicU64, Ordering};
}

#[path = "../../../ipc/src/control/cell.rs"]
pub(crate) mod cell;

use atomic::{fence, AtomicU64, Ordering};
use cell::{Cell, Words};
use loom::sync::Arc;
use loom::thread;

use crate::check;

/// The same number in each of its words.
#[derive(Debug, PartialEq)]
struct Row(u64);

impl Words<2> for Row {
    fn to_words(&self) -> [u64; 2] {
        [self.0; 2]
    }

    fn from_words([one, two]: [u64; 2]) -> Self {
        assert_eq!(one, two, "torn");
        Self(one)
    }
}

fn cell() -> Arc<Cell<Row, 2>> {
    Arc::new(Cell::zeroed(|| AtomicU64::new(0)))
}

/// Three writes: the third goes where a reader of the first may still look.
#[test]
fn a_row_is_never_torn_and_never_older_than_one_seen() {
    check(2, || {
        let cell = cell();
        let writer = {
            let cell = cell.clone();
            thread::spawn(move || (1..=3).for_each(|n| cell.write(&Row(n))))
        };
        let reader = thread::spawn(move || {
            let Row(first) = cell.read().unwrap();
            let Row(second) = cell.read().unwrap();
            assert!(second >= first, "{second} after {first}");
        });
        writer.join().unwrap();
        reader.join().unwrap();
    });
}

/// A row that its writer has told of, by whatever else, is there.
#[test]
fn a_row_that_was_told_of_is_there() {
    check(3, || {
        let (cell, told) = (cell(), Arc::new(AtomicU64::new(0)));
        let writer = {
            let (cell, told) = (cell.clone(), told.clone());
            thread::spawn(move || {
                (1..=2).for_each(|n| cell.write(&Row(n)));
                told.store(2, Ordering::Release);
            })
        };
        let reader = thread::spawn(move || {
            let told = told.load(Ordering::Acquire);
            assert!(cell.read().unwrap().0 >= told);
        });
        writer.join().unwrap();
        reader.join().unwrap();
    });
}

#[test]
fn a_writer_that_dies_half_way_leaves_the_last_row() {
    check(3, || {
        let cell = cell();
        let writer = {
            let cell = cell.clone();
            thread::spawn(move || {
                cell.write(&Row(1));
                // As far as the second write comes.
                fence(Ordering::Release);
                cell.copies[0][0].store(2, Ordering::Relaxed);
            })
        };
        let reader = {
            let cell = cell.clone();
            thread::spawn(move || assert!(cell.read().unwrap().0 <= 1))
        };
        reader.join().unwrap();
        writer.join().unwrap();
        assert_eq!(cell.read(), Some(Row(1)));
    });
}
