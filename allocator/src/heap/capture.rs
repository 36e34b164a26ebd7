//! CUDA graphs: what a capture allocates stays private to its pool until torch releases that.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::thread::{self, ThreadId};

use super::{Heap, Inner, Place};

/// torch's name for a private pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct PoolId {
    /// The first number: a graph's.
    pub graph: u64,
    /// The second: a user's pool.
    pub user: u64,
}

#[derive(Debug, Default)]
pub(super) struct Pools {
    /// How many captures hold each pool.
    uses: HashMap<PoolId, u32>,
    /// Captures under way, and the threads that began them.
    active: Vec<(ThreadId, PoolId)>,
    places: HashMap<(PoolId, usize), usize>,
}

impl Pools {
    /// The pool that an allocation on a capturing stream goes to: that of the capture that this thread began, else the last.
    pub(super) fn current(&self) -> Option<PoolId> {
        let here = thread::current().id();
        self.active.iter().rev().find(|(thread, _)| *thread == here).or(self.active.last()).map(|(_, pool)| *pool)
    }
}

impl Heap {
    /// A capture begins: what capturing streams allocate from here on belongs to the pool.
    pub fn begin_pool(&self, pool: PoolId) {
        let mut inner = self.inner.lock();
        if inner.pools.active.is_empty() {
            // The last chance to see what the streams have finished with: nothing can be recorded while a capture is on.
            let _ = inner.streams.record_context();
            inner.streams.poll();
        }
        *inner.pools.uses.entry(pool).or_default() += 1;
        inner.pools.active.push((thread::current().id(), pool));
        self.captures.fetch_add(1, Ordering::Relaxed);
    }

    /// The capture has ended, well or not. The pool stays private.
    pub fn end_pool(&self, pool: PoolId) {
        let mut inner = self.inner.lock();
        if let Some(at) = inner.pools.active.iter().rposition(|(_, active)| *active == pool) {
            inner.pools.active.remove(at);
            self.captures.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// One graph of the pool is gone. With the last, the pool's bytes are everybody's, once what runs now is over.
    pub fn release_pool(&self, pool: PoolId) {
        let mut inner = self.inner.lock();
        match inner.pools.uses.get_mut(&pool) {
            Some(uses) if *uses > 1 => *uses -= 1,
            Some(_) => inner.dissolve(pool),
            None => {}
        }
    }
}

impl Inner {
    pub(super) fn pool_place(&mut self, pool: PoolId, stream: usize) -> usize {
        if let Some(place) = self.pools.places.get(&(pool, stream)) {
            return *place;
        }
        let domain = self.tlsf.add_domain();
        self.places.push(Place { stream, domain, pool: Some(pool) });
        let place = self.places.len() - 1;
        self.pools.places.insert((pool, stream), place);
        place
    }

    fn dissolve(&mut self, pool: PoolId) {
        self.pools.uses.remove(&pool);
        let mark = self.streams.mark();
        let gone: Vec<((PoolId, usize), usize)> =
            self.pools.places.iter().filter(|((p, _), _)| *p == pool).map(|(k, v)| (*k, *v)).collect();
        for (key, place) in gone {
            self.pools.places.remove(&key);
            let home = self.of_stream.get(key.1).and_then(|home| self.domain_of(*home));
            if let (Some(home), Some(domain)) = (home, self.domain_of(place)) {
                // A replay on any stream may still use these bytes, so not even the capturing stream gets them at once: they
                // go where only a context-wide event makes them ready.
                let limbo = self.limbo();
                let _ = self.tlsf.remove_domain(domain, limbo, mark);
                if let Some(place) = self.places.get_mut(place) {
                    // Blocks that are still live go home like any other when they are freed.
                    (place.domain, place.pool) = (home, None);
                }
            }
        }
    }

    /// The domain of bytes that no stream may use before a context-wide event.
    fn limbo(&mut self) -> crate::tlsf::Domain {
        let number = self.limbo_stream();
        self.streams.want(number);
        self.of_stream.get(number).and_then(|place| self.domain_of(*place)).unwrap_or_else(|| self.tlsf.add_domain())
    }

    /// A stream of our own making that never runs: only context-wide events move it.
    fn limbo_stream(&mut self) -> usize {
        let place = self.place(crate::driver::StreamId(u64::MAX), false);
        self.stream_of(place)
    }
}
