//! CUDA graphs: what a capture allocates stays private to its pool until torch releases that.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::thread::{self, ThreadId};

use crate::driver::StreamId;

use super::streams::LIMBO;
use super::{Heap, Inner};

/// torch's name for a private pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct PoolId {
    /// The first number: a graph's.
    pub graph: u64,
    /// The second: a user's pool.
    pub user: u64,
}

/// A capture under way.
#[derive(Debug)]
struct Active {
    /// The thread that began it. Others, autograd's, may allocate in it too.
    thread: ThreadId,
    pool: PoolId,
    /// The streams that were seen capturing in it.
    streams: Vec<StreamId>,
}

#[derive(Debug, Default)]
pub(super) struct Pools {
    /// How many graphs hold each pool.
    uses: HashMap<PoolId, u32>,
    active: Vec<Active>,
    places: HashMap<(PoolId, u32), u32>,
}

impl Pools {
    /// The pool that an allocation on a capturing stream goes to: that of the capture that the stream is known to be in, else
    /// of the one that this thread began, else of the newest.
    pub(super) fn of(&mut self, id: StreamId) -> Option<PoolId> {
        let here = thread::current().id();
        let known = self.active.iter().rposition(|active| active.streams.contains(&id));
        let at = known.or_else(|| self.active.iter().rposition(|active| active.thread == here)).or(self.active.len().checked_sub(1))?;
        let active = self.active.get_mut(at)?;
        if known.is_none() {
            active.streams.push(id);
        }
        Some(active.pool)
    }

    /// A stream was seen not capturing: a capture that it was in is over. torch does not say so when a capture has failed.
    pub(super) fn seen_running(&mut self, id: StreamId) {
        self.active.retain(|active| !active.streams.contains(&id));
    }

    pub(super) fn captures(&self) -> usize {
        self.active.len()
    }
}

impl Heap {
    /// A capture begins: what capturing streams allocate from here on belongs to the pool. Call it before the capture begins,
    /// in the thread that begins it.
    pub fn begin_pool(&self, pool: PoolId) {
        let mut inner = self.whole();
        let here = thread::current().id();
        // One thread captures once at a time, so an earlier capture of this one has failed.
        inner.pools.active.retain(|active| active.thread != here);
        self.count_captures(&mut inner);
        // The last chance to see what the streams have finished with: nothing can be recorded while a capture is on. An event in
        // flight says nothing of what was freed since.
        inner.streams.record_context();
        inner.streams.poll();
        *inner.pools.uses.entry(pool).or_default() += 1;
        inner.pools.active.push(Active { thread: here, pool, streams: Vec::new() });
        self.count_captures(&mut inner);
    }

    /// The capture has ended, well or not. The pool stays private.
    pub fn end_pool(&self, pool: PoolId) {
        let mut inner = self.whole();
        let here = thread::current().id();
        let active = &inner.pools.active;
        let own = active.iter().rposition(|active| active.pool == pool && active.thread == here);
        if let Some(at) = own.or_else(|| active.iter().rposition(|active| active.pool == pool)) {
            inner.pools.active.remove(at);
        }
        self.count_captures(&mut inner);
    }

    /// The capture that this thread began, if it is still on, has failed: there will be no graph. For torch, which then says
    /// neither [`Heap::end_pool`] nor [`Heap::release_pool`].
    pub fn fail_capture(&self) {
        let mut inner = self.whole();
        let here = thread::current().id();
        let active = &mut inner.pools.active;
        let Some(at) = active.iter().rposition(|active| active.thread == here) else { return };
        let pool = active.remove(at).pool;
        self.count_captures(&mut inner);
        inner.let_go_of(pool);
    }

    /// One graph of the pool is gone. With the last, the pool's bytes are everybody's, once what runs now is over.
    pub fn release_pool(&self, pool: PoolId) {
        self.whole().let_go_of(pool);
    }

    pub(super) fn count_captures(&self, inner: &mut Inner) {
        inner.streams.set_captures(inner.pools.captures());
        self.captures.store(inner.pools.captures(), Ordering::Relaxed);
    }
}

impl Inner {
    pub(super) fn pool_place(&mut self, pool: PoolId, stream: u32) -> u32 {
        if let Some(place) = self.pools.places.get(&(pool, stream)) {
            return *place;
        }
        let place = self.add_place(stream, Some(pool));
        self.pools.places.insert((pool, stream), place);
        place
    }

    fn let_go_of(&mut self, pool: PoolId) {
        match self.pools.uses.get_mut(&pool) {
            Some(uses) if *uses > 1 => *uses -= 1,
            Some(_) => self.dissolve(pool),
            None => {}
        }
    }

    /// A replay on any stream may still use the pool's bytes, so not even the stream that captured gets them at once: its
    /// places become ones of the stream that never runs. Blocks that are still live come back there too.
    fn dissolve(&mut self, pool: PoolId) {
        self.pools.uses.remove(&pool);
        let gone: Vec<u32> = self.pools.places.iter().filter(|((of, _), _)| *of == pool).map(|(_, place)| *place).collect();
        self.pools.places.retain(|(of, _), _| *of != pool);
        let mark = self.streams.mark();
        for number in gone {
            let (old, fresh) = (self.domain_of(number), self.tlsf.add_domain());
            // The mark of each free block becomes that of this moment.
            let _ = self.tlsf.remove_domain(old, fresh, mark);
            if let Some(place) = self.places.get_mut(number as usize) {
                (place.domain, place.pool, place.stream) = (fresh, None, LIMBO);
            }
        }
        self.streams.want(LIMBO);
    }
}
