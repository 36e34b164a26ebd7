//! Places: where blocks come from and go back to. One for each stream, one for each stream under each graph's private pool.

use crate::driver::StreamId;
use crate::tlsf::Domain;

use super::streams::LIMBO;
use super::{Inner, PoolId};

/// Places that are kept without asking whether they are still of use.
const PLENTY: usize = 64;

/// One place.
#[derive(Debug)]
pub(super) struct Place {
    /// The stream that may use its free bytes at once.
    pub(super) stream: u32,
    pub(super) domain: Domain,
    pub(super) pool: Option<PoolId>,
    /// Blocks that will come back here.
    pub(super) live: u32,
}

impl Place {
    /// Whether others may have what is free here once the stream has come past it.
    pub(super) fn is_shared(&self) -> bool {
        self.pool.is_none() && self.domain != Domain::NONE
    }
}

impl Inner {
    /// The place that a stream allocates from: its own, or that of the private pool under whose capture it is.
    #[inline]
    pub(super) fn place(&mut self, id: StreamId, capturing: bool) -> u32 {
        let stream = match self.streams.find(id) {
            Some(stream) => stream,
            None => self.add_stream(id),
        };
        if capturing {
            if let Some(pool) = self.pools.of(id) {
                return self.pool_place(pool, stream);
            }
        }
        self.streams.home(stream)
    }

    #[inline]
    pub(super) fn stream_of(&self, place: u32) -> u32 {
        self.places.get(place as usize).map_or(LIMBO, |place| place.stream)
    }

    #[inline]
    pub(super) fn domain_of(&self, place: u32) -> Domain {
        self.places.get(place as usize).map_or(Domain::NONE, |place| place.domain)
    }

    #[cold]
    pub(super) fn add_stream(&mut self, id: StreamId) -> u32 {
        self.retire();
        let place = self.add_place(LIMBO, None);
        let stream = self.streams.add(id, place);
        if let Some(place) = self.places.get_mut(place as usize) {
            place.stream = stream;
        }
        stream
    }

    pub(super) fn add_place(&mut self, stream: u32, pool: Option<PoolId>) -> u32 {
        let place = Place { stream, domain: self.tlsf.add_domain(), pool, live: 0 };
        let vacant = self.vacant.pop();
        match vacant.and_then(|index| Some((index, self.places.get_mut(index as usize)?))) {
            Some((index, slot)) => {
                *slot = place;
                index
            }
            None => {
                self.places.push(place);
                (self.places.len() - 1) as u32
            }
        }
    }

    /// The place that a domain belongs to, if others may have what is free there in time.
    pub(super) fn shared_place(&self, domain: Domain) -> Option<&Place> {
        self.places.iter().find(|place| place.domain == domain).filter(|place| place.is_shared())
    }

    /// Whether others may have what is free in a domain under a mark now: no queued work can reach it. Not a private pool's bytes, which
    /// a graph may use whatever their mark.
    pub(super) fn is_over(&self, domain: Domain, mark: u64) -> bool {
        self.shared_place(domain).is_some_and(|place| self.streams.done(place.stream) >= mark)
    }

    /// Stream and domain of a place whose free bytes others may have in time, if it is one, and not `but`.
    pub(super) fn other(&self, place: u32, but: u32) -> Option<(u32, Domain)> {
        self.places.get(place as usize).filter(|found| place != but && found.is_shared()).map(|found| (found.stream, found.domain))
    }

    /// Every such place: (place, stream, domain).
    pub(super) fn others(&self, but: u32) -> Vec<(u32, u32, Domain)> {
        (0..self.places.len() as u32).filter_map(|i| self.other(i, but).map(|(stream, domain)| (i, stream, domain))).collect()
    }

    /// Forgets places that no block comes back to: of streams that were not seen for long, of graphs that are gone. What is
    /// free there is everybody's after a context-wide event.
    pub(super) fn retire(&mut self) {
        for place in 1..self.places.len() as u32 {
            let gone = self.places.get(place as usize).is_some_and(|p| p.is_shared() && p.stream == LIMBO && p.live == 0);
            if gone {
                self.vacate(place);
            }
        }
        if self.places.len() - self.vacant.len() <= PLENTY {
            return;
        }
        for stream in self.streams.numbers() {
            if !self.streams.is_idle(stream) {
                continue;
            }
            let home = self.streams.home(stream);
            let mut own = (0..).zip(&self.places).filter(|(_, place)| place.stream == stream && place.domain != Domain::NONE);
            if own.any(|(i, place)| i != home || place.live > 0) {
                continue;
            }
            let (domain, limbo) = (self.domain_of(home), self.domain_of(0));
            let done = self.streams.done(stream);
            self.tlsf.move_ready(domain, limbo, done);
            if self.streams.has_context_events() || self.tlsf.is_empty(domain) {
                self.vacate(home);
                self.streams.forget(stream);
            }
        }
    }

    fn vacate(&mut self, place: u32) {
        let (domain, limbo) = (self.domain_of(place), self.domain_of(0));
        if self.tlsf.remove_domain(domain, limbo, 0).is_ok() {
            self.streams.want(LIMBO);
            if let Some(place) = self.places.get_mut(place as usize) {
                *place = Place { stream: LIMBO, domain: Domain::NONE, pool: None, live: 0 };
            }
            self.vacant.push(place);
        }
    }
}
