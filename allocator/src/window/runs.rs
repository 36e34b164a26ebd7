//! Chunks as runs: what lies side by side under consecutive epochs is one entry, so that a range of any size is looked up, named
//! and compared at the cost of the runs that it touches, not of its chunks.

use super::Chunk;
use crate::Few;

/// Consecutive epochs: one at least, and the last is a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Epochs {
    first: u64,
    count: u64,
}

impl Epochs {
    /// `count` epochs from `first` on. `None` for none, and for such as go beyond the last number.
    #[must_use]
    pub const fn new(first: u64, count: u64) -> Option<Self> {
        match count.checked_sub(1) {
            Some(more) if first.checked_add(more).is_some() => Some(Self { first, count }),
            _ => None,
        }
    }

    /// One epoch.
    #[must_use]
    pub const fn one(epoch: u64) -> Self {
        Self { first: epoch, count: 1 }
    }

    /// The first of them.
    #[must_use]
    pub const fn first(self) -> u64 {
        self.first
    }

    /// How many they are.
    #[must_use]
    pub const fn count(self) -> u64 {
        self.count
    }

    /// The last of them.
    #[must_use]
    pub const fn last(self) -> u64 {
        self.first + (self.count - 1)
    }

    /// Whether this is one of them.
    #[must_use]
    pub const fn contains(self, epoch: u64) -> bool {
        self.first <= epoch && epoch <= self.last()
    }

    /// Each of them.
    pub fn each(self) -> impl Iterator<Item = u64> {
        self.first..=self.last()
    }

    /// These and those, if those follow at once.
    fn and(self, next: Self) -> Option<Self> {
        if self.last().checked_add(1) != Some(next.first) {
            return None;
        }
        Self::new(self.first, self.count.checked_add(next.count)?)
    }

    /// What is left without the first `n`.
    fn without(self, n: u64) -> Option<Self> {
        Self::new(self.first.checked_add(n)?, self.count.checked_sub(n)?)
    }
}

/// Chunks of one size, side by side, under consecutive epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    offset: u64,
    chunk_bytes: u64,
    epochs: Epochs,
}

impl Run {
    const fn end(&self) -> u64 {
        self.offset + self.chunk_bytes * self.epochs.count
    }

    /// Chunks `from` to `to`, the last included; `None` where there are none.
    fn part(&self, from: u64, to: u64) -> Option<Self> {
        let epochs = Epochs::new(self.epochs.first.checked_add(from)?, (to + 1).checked_sub(from)?)?;
        Some(Self { offset: self.offset + from * self.chunk_bytes, epochs, ..*self })
    }
}

/// The runs of a window, by address: few, and looked up far more often than changed.
#[derive(Debug, Default)]
pub(super) struct Runs(Vec<Run>);

impl Runs {
    /// A chunk that lies on no other.
    pub(super) fn add(&mut self, chunk: &Chunk) {
        let mut run = Run { offset: chunk.offset, chunk_bytes: chunk.bytes, epochs: Epochs::one(chunk.epoch) };
        let follows = |a: &Run, b: &Run| {
            let epochs = a.epochs.and(b.epochs).filter(|_| a.end() == b.offset && a.chunk_bytes == b.chunk_bytes)?;
            Some(Run { epochs, ..*a })
        };
        let mut from = self.first_behind(run.offset);
        let mut to = from;
        if let Some(longer) = from.checked_sub(1).and_then(|before| follows(self.0.get(before)?, &run)) {
            (run, from) = (longer, from - 1);
        }
        if let Some(longer) = self.0.get(to).and_then(|behind| follows(&run, behind)) {
            (run, to) = (longer, to + 1);
        }
        self.0.splice(from..to, [run]);
    }

    /// A chunk that was added.
    pub(super) fn remove(&mut self, chunk: &Chunk) {
        let place = self.first_behind(chunk.offset);
        let Some(run) = self.0.get(place).filter(|run| run.offset <= chunk.offset).copied() else { return };
        let at = (chunk.offset - run.offset) / run.chunk_bytes;
        let left = at.checked_sub(1).and_then(|last| run.part(0, last));
        let right = run.part(at + 1, run.epochs.count - 1);
        self.0.splice(place..=place, left.into_iter().chain(right));
    }

    /// The place of the first run of which anything lies at or behind an offset.
    fn first_behind(&self, offset: u64) -> usize {
        self.0.partition_point(|run| run.end() <= offset)
    }

    /// Of each run the chunks that a range touches, by address.
    fn touched(&self, offset: u64, bytes: u64) -> impl Iterator<Item = Run> + '_ {
        let end = offset.saturating_add(bytes.max(1));
        let from = self.0.get(self.first_behind(offset)..).unwrap_or_default();
        from.iter().take_while(move |run| run.offset < end).filter_map(move |run| {
            if run.epochs.count == 1 {
                return Some(*run);
            }
            let place = |at: u64| (at - run.offset) / run.chunk_bytes;
            run.part(place(offset.max(run.offset)), place(end.min(run.end()) - 1))
        })
    }

    /// The epochs of the chunks that a range touches, by address.
    pub(super) fn epochs_in(&self, offset: u64, bytes: u64) -> Few<Epochs> {
        let mut found: Few<Epochs> = Few::new();
        for run in self.touched(offset, bytes) {
            match found.last_mut().and_then(|last| Some((last.and(run.epochs)?, last))) {
                Some((both, last)) => *last = both,
                None => found.push(run.epochs),
            }
        }
        found
    }

    /// Whether the chunks that a range touches are these, in this order, and leave no byte of it out.
    pub(super) fn are(&self, offset: u64, bytes: u64, epochs: &[Epochs]) -> bool {
        let Some(end) = offset.checked_add(bytes) else { return false };
        let mut reached = offset;
        let to_a_hole = self.touched(offset, bytes).map_while(|run| {
            (run.offset <= reached).then(|| {
                reached = run.end();
                run.epochs
            })
        });
        same(to_a_hole, epochs.iter().copied()) && reached >= end
    }
}

/// Whether two rows of epochs are the same, however each is cut into runs.
fn same(mut these: impl Iterator<Item = Epochs>, mut those: impl Iterator<Item = Epochs>) -> bool {
    let (mut this, mut that) = (None, None);
    loop {
        match (this.or_else(|| these.next()), that.or_else(|| those.next())) {
            (None, None) => return true,
            (Some(a), Some(b)) if a.first == b.first => {
                let n = a.count.min(b.count);
                (this, that) = (a.without(n), b.without(n));
            }
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(epoch: u64, offset: u64, bytes: u64) -> Chunk {
        Chunk { epoch, offset, bytes }
    }

    fn run(first: u64, count: u64) -> Epochs {
        Epochs::new(first, count).unwrap()
    }

    #[test]
    fn a_run_is_of_numbers_that_exist() {
        assert_eq!(Epochs::new(7, 0), None);
        assert_eq!(Epochs::new(u64::MAX, 2), None);
        assert_eq!(Epochs::new(1, u64::MAX).unwrap().last(), u64::MAX);
        assert!(Epochs::new(u64::MAX, 1).unwrap().contains(u64::MAX));
        assert_eq!(run(u64::MAX, 1).and(run(1, 1)), None);
    }

    #[test]
    fn what_follows_is_one_run_whatever_came_first() {
        let mut runs = Runs::default();
        for n in [2, 0, 3, 1] {
            runs.add(&chunk(10 + n, n * 8, 8));
        }
        assert_eq!(runs.0.len(), 1);
        assert_eq!(runs.epochs_in(0, 32)[..], [run(10, 4)]);
        assert_eq!(runs.epochs_in(9, 8)[..], [run(11, 2)]);
        assert!(runs.are(9, 8, &[run(11, 1), run(12, 1)]), "however it is cut");
        assert!(!runs.are(9, 8, &[run(11, 1)]) && !runs.are(9, 8, &[run(11, 3)]) && !runs.are(9, 8, &[run(10, 2)]));
        runs.remove(&chunk(12, 16, 8));
        assert_eq!(runs.epochs_in(0, 32)[..], [run(10, 2), run(13, 1)]);
        assert!(!runs.are(0, 32, &[run(10, 2), run(13, 1)]), "there is a hole");
        runs.add(&chunk(99, 16, 8));
        assert!(runs.are(0, 32, &[run(10, 2), run(99, 1), run(13, 1)]));
        assert!(!runs.are(0, 32, &[run(10, 4)]), "its epoch is another");
    }

    #[test]
    fn chunks_of_several_sizes_are_named_as_one() {
        let mut runs = Runs::default();
        runs.add(&chunk(1, 0, 8));
        runs.add(&chunk(2, 8, 8));
        runs.add(&chunk(3, 16, 4));
        assert_eq!(runs.0.len(), 2);
        assert_eq!(runs.epochs_in(0, 20)[..], [run(1, 3)]);
        assert!(runs.are(0, 20, &[run(1, 3)]));
        assert!(!runs.are(0, 21, &[run(1, 3)]), "a byte beyond");
        assert!(!runs.are(u64::MAX, 2, &[run(1, 3)]));
    }

    /// Against a plain list of chunks, with random steps.
    #[test]
    fn runs_are_what_the_chunks_are() {
        let mut state = 88_172_645_463_325_252_u64;
        let mut below = |bound: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % bound
        };
        let (mut runs, mut chunks) = (Runs::default(), std::collections::BTreeMap::new());
        let mut epoch = 0;
        for _ in 0..4000 {
            let offset = below(24) * 8;
            match chunks.remove(&offset) {
                Some(chunk) => runs.remove(&chunk),
                None => {
                    // Neighbours with and without the next number, and now and then a short one.
                    epoch += 1 + below(3) / 2;
                    let new = chunk(epoch, offset, if below(6) == 0 { 4 } else { 8 });
                    chunks.insert(offset, new);
                    runs.add(&new);
                }
            }
            let (offset, bytes) = (below(190), 1 + below(80));
            let there: Vec<Chunk> = chunks.values().filter(|c| c.offset < offset + bytes && offset < c.end()).copied().collect();
            let named = runs.epochs_in(offset, bytes);
            assert_eq!(named.iter().flat_map(|run| run.each()).collect::<Vec<_>>(), there.iter().map(|c| c.epoch).collect::<Vec<_>>());
            let mut at = offset;
            let whole = there.iter().all(|c| std::mem::replace(&mut at, c.end()) >= c.offset) && at >= offset + bytes;
            assert_eq!(runs.are(offset, bytes, &named), whole, "{offset}+{bytes} of {there:?}");
        }
    }
}
