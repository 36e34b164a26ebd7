//! A record of words with one writer and any number of readers that need nobody's help.

use std::marker::PhantomData;

use super::atomic::{fence, AtomicU64, Ordering};

/// A record as words.
pub trait Words<const N: usize>: Sized {
    /// The record's words.
    fn to_words(&self) -> [u64; N];
    /// The record from words that may be anything.
    fn from_words(words: [u64; N]) -> Self;
}

/// Two copies of a record and a count of writes: the writer fills the copy that readers do not look at and then turns them
/// to it. A writer that dies half-way leaves the last whole record in place.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Cell<T, const N: usize> {
    writes: AtomicU64,
    /// The other one than readers look at is being written, or was left half-written.
    pub(super) copies: [[AtomicU64; N]; 2],
    record: PhantomData<T>,
}

/// How often a reader looks again before it takes what it has. The writer must finish two whole writes in one read for
/// every one of them.
const LOOKS: usize = 64;

impl<T: Words<N>, const N: usize> Cell<T, N> {
    /// A cell that nobody ever wrote, of words that the caller makes: for tests, since the real ones lie in shared memory.
    #[doc(hidden)]
    #[must_use]
    pub fn zeroed(word: impl Fn() -> AtomicU64) -> Self {
        let copy = || std::array::from_fn(|_| word());
        Self { writes: word(), copies: [copy(), copy()], record: PhantomData }
    }

    /// Writes a record. Only its one writer may call this, one call at a time.
    #[inline]
    pub fn write(&self, record: &T) {
        let writes = self.writes.load(Ordering::Relaxed);
        let copy = &self.copies[(writes as usize).wrapping_add(1) & 1];
        // No word of this copy may be seen before the turn that ended its last reading.
        fence(Ordering::Release);
        for (word, value) in copy.iter().zip(record.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
        self.writes.store(writes.wrapping_add(1), Ordering::Release);
    }

    /// The last record written, whole; `None` if the writer outran 64 looks, which is not seen in practice.
    #[must_use]
    pub fn read(&self) -> Option<T> {
        (0..LOOKS).find_map(|_| {
            let before = self.writes.load(Ordering::Acquire);
            let copy = &self.copies[before as usize & 1];
            let words = std::array::from_fn(|i| copy.get(i).map_or(0, |word| word.load(Ordering::Relaxed)));
            fence(Ordering::Acquire);
            // The copy that was read is written next only after one more turn.
            (self.writes.load(Ordering::Relaxed) == before).then(|| T::from_words(words))
        })
    }

    /// How often it was written.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }
}
