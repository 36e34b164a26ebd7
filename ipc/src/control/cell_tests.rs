//! Cells with real threads; `tests/tests/model/rows.rs` has them under every order of steps.

use std::sync::atomic::{AtomicU64, Ordering};

use super::cell::{Cell, Words};

#[derive(Debug, PartialEq)]
struct Row(u64);

impl Words<8> for Row {
    fn to_words(&self) -> [u64; 8] {
        [self.0; 8]
    }
    fn from_words(words: [u64; 8]) -> Self {
        assert!(words.iter().all(|word| *word == words[0]), "torn: {words:?}");
        Self(words[0])
    }
}

fn cell() -> Cell<Row, 8> {
    Cell::zeroed(AtomicU64::default)
}

#[test]
fn readers_never_see_a_torn_row() {
    let cell = cell();
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            (1..=200_000).for_each(|n| cell.write(&Row(n)));
            done.store(1, Ordering::Release);
        });
        let mut last = 0;
        while done.load(Ordering::Acquire) == 0 {
            if let Some(Row(n)) = cell.read() {
                assert!(n >= last);
                last = n;
            }
        }
    });
    assert_eq!(cell.read(), Some(Row(200_000)));
}

#[test]
fn a_writer_that_dies_half_way_leaves_the_last_row() {
    let cell = cell();
    cell.write(&Row(1));
    cell.copies[0][3].store(99, Ordering::Relaxed); // the copy that the next write would fill
    assert_eq!(cell.read(), Some(Row(1)));
}
