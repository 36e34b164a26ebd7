//! Whose queued work may still reach which bytes: a model that knows only what was asked of the driver.
//!
//! Work is what a program queues, and nothing of it is over by itself. A stream's work comes behind another's only where the
//! stream was made to wait for an event that was recorded behind that, and behind everybody's that an event was seen to have
//! come past. What the heap notes for itself (its marks) is not looked at.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::driver::{Addr, Event, Stream};

/// What an event of a replay must keep to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rule {
    /// No block lies over a live one.
    Overlap,
    /// Who is handed bytes comes behind the work of everybody who had them; none of it is to come when they are unmapped.
    Order,
    /// A stream that is being captured is left alone.
    Capture,
    /// There is memory.
    Allocation,
    /// What is freed is live.
    Free,
    /// What is live is not allocated once more.
    Twice,
    /// The heap counts as live what is.
    Count,
}

impl Rule {
    /// Its name, in a word or two.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Overlap => "overlap",
            Self::Order => "order",
            Self::Capture => "capture",
            Self::Allocation => "failed allocation",
            Self::Free => "unknown free",
            Self::Twice => "allocated twice",
            Self::Count => "wrong count",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A rule that was broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Which one.
    pub rule: Rule,
    /// How.
    pub reason: String,
}

/// How much was checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Checks {
    /// Blocks that were handed out.
    pub allocations: u64,
    /// Those of them that lay where another stream had work: the ones whose order matters.
    pub crossed: u64,
    /// Waits of one stream for others that were queued.
    pub waits: u64,
}

/// A stream, under a number that no other ever has, whatever handle it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Who(u64);

/// A stream's first so many pieces of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// The stream.
    pub who: Who,
    position: u64,
}

/// For each stream, how much of its work something comes behind.
type Clock = HashMap<Who, u64>;

fn join(into: &mut Clock, other: &Clock) {
    for (who, position) in other {
        let known = into.entry(*who).or_default();
        *known = (*known).max(*position);
    }
}

/// Bytes that were in use, by whom up to where.
#[derive(Debug, Clone)]
struct Past {
    end: Addr,
    users: Vec<Moment>,
}

/// The model.
#[derive(Debug, Default)]
pub struct Order {
    made: u64,
    streams: HashMap<Stream, Who>,
    names: HashMap<Who, String>,
    /// What the next work of each stream comes behind; its own is in it.
    behind: HashMap<Who, Clock>,
    /// What each event stands for, and how often it was looked at.
    events: HashMap<Event, (Clock, u32)>,
    /// What was seen to be over.
    over: Clock,
    /// Ends of live blocks, by their starts.
    live: BTreeMap<Addr, Addr>,
    /// By their starts; none lies over another.
    past: BTreeMap<Addr, Past>,
    checks: Checks,
    faults: Vec<Fault>,
}

impl Order {
    fn another(&mut self) -> Who {
        self.made += 1;
        Who(self.made)
    }

    /// The stream that a handle stands for now. 0 and 1 are the same one.
    pub fn who(&mut self, stream: Stream) -> Who {
        let stream = if stream.0 == 1 { Stream::LEGACY } else { stream };
        if let Some(who) = self.streams.get(&stream) {
            return *who;
        }
        let who = self.another();
        self.streams.insert(stream, who);
        who
    }

    /// A stream was made: what had its handle before is another.
    pub fn made(&mut self, stream: Stream) {
        self.streams.remove(&stream);
    }

    /// What to call a stream where it has to do with a fault.
    pub fn name(&mut self, stream: Stream, name: String) {
        let who = self.who(stream);
        self.names.insert(who, name);
    }

    fn name_of(&self, who: Who) -> String {
        self.names.get(&who).map_or_else(|| format!("stream {}", who.0), Clone::clone)
    }

    /// One that is on no stream and has no end until [`Order::is_over`]: the replays of a graph that may be replayed at any time.
    pub fn graph(&mut self) -> Moment {
        Moment { who: self.another(), position: 1 }
    }

    /// Everything of this stream is over, by other knowledge than an event's.
    pub fn is_over(&mut self, who: Who) {
        self.over.insert(who, u64::MAX);
    }

    /// Queues a piece of work.
    pub fn work(&mut self, stream: Stream) -> Moment {
        let who = self.who(stream);
        let position = self.behind.entry(who).or_default().entry(who).or_default();
        *position += 1;
        Moment { who, position: *position }
    }

    /// The event stands for what this stream has queued.
    pub fn record(&mut self, event: Event, stream: Stream) {
        let who = self.who(stream);
        let clock = self.behind.get(&who).cloned().unwrap_or_default();
        self.events.insert(event, (clock, 0));
    }

    /// The event stands for what every stream has queued.
    pub fn record_all(&mut self, event: Event) {
        let own = self.behind.iter().filter_map(|(who, clock)| Some((*who, *clock.get(who)?)));
        self.events.insert(event, (own.collect(), 0));
    }

    /// The stream's later work comes behind what the event stands for.
    pub fn wait(&mut self, stream: Stream, event: Event) {
        let who = self.who(stream);
        if let Some((clock, _)) = self.events.get(&event) {
            join(self.behind.entry(who).or_default(), clock);
        }
        self.checks.waits += 1;
    }

    /// Somebody looks whether what an event stands for has run, as it has: the answer, which is no for so many looks unless it follows
    /// from what was seen before.
    pub fn look(&mut self, event: Event, looks: u32) -> bool {
        let Some((clock, looked)) = self.events.get_mut(&event) else { return true };
        *looked += 1;
        let known = clock.iter().all(|(who, position)| self.over.get(who) >= Some(position));
        if !known && *looked <= looks {
            return false;
        }
        join(&mut self.over, clock);
        true
    }

    /// A block is handed to somebody (`None`: to nobody in particular, so that all work on it must be over) and is live from here on.
    ///
    /// # Errors
    /// A [`Fault`]; the block is live all the same.
    pub fn take(&mut self, addr: Addr, bytes: u64, by: Option<Who>) -> Result<(), Fault> {
        let end = addr.saturating_add(bytes);
        let (found, crossed) = (self.fault_at(addr, end, by), self.past_in(addr, end).any(|(_, _, user)| Some(user.who) != by));
        self.checks.allocations += 1;
        self.checks.crossed += u64::from(crossed);
        self.cut(addr, end);
        self.live.insert(addr, end);
        let whom = by.map_or_else(|| "nobody".to_owned(), |by| self.name_of(by));
        found.map_or(Ok(()), |(rule, why)| Err(Fault { rule, reason: format!("{addr:#x}+{bytes} was handed to {whom}, but {why}") }))
    }

    /// A live block is freed, which these streams use up to now.
    pub fn give(&mut self, addr: Addr, users: &[Stream]) {
        let Some(end) = self.live.remove(&addr) else { return };
        let users: Vec<Moment> = users.iter().map(|user| self.work(*user)).collect();
        self.used(addr, end - addr, &users);
    }

    /// Bytes were in use up to these moments.
    pub fn used(&mut self, addr: Addr, bytes: u64, users: &[Moment]) {
        let end = addr.saturating_add(bytes);
        self.split(addr);
        self.split(end);
        let (mut at, mut gaps) = (addr, Vec::new());
        for (start, past) in self.past.range_mut(addr..end) {
            past.users.extend(users);
            gaps.push((at, *start));
            at = past.end;
        }
        gaps.push((at, end));
        for (start, end) in gaps.into_iter().filter(|(start, end)| start < end) {
            self.past.insert(start, Past { end, users: users.to_vec() });
        }
    }

    /// Bytes are unmapped.
    pub fn unmap(&mut self, addr: Addr, bytes: u64) {
        let end = addr.saturating_add(bytes);
        if let Some((_, why)) = self.fault_at(addr, end, None) {
            self.fault(Rule::Order, format!("{addr:#x}+{bytes} was unmapped, but {why}"));
        }
        self.cut(addr, end);
    }

    /// Notes that a rule was broken.
    pub fn fault(&mut self, rule: Rule, reason: String) {
        self.faults.push(Fault { rule, reason });
    }

    /// What was found since this was last asked, but for what was answered at once.
    pub fn take_faults(&mut self) -> Vec<Fault> {
        std::mem::take(&mut self.faults)
    }

    /// How much was checked so far.
    #[must_use]
    pub fn checks(&self) -> Checks {
        self.checks
    }

    fn fault_at(&self, addr: Addr, end: Addr, by: Option<Who>) -> Option<(Rule, String)> {
        if let Some((at, to)) = self.live.range(..end).next_back().filter(|(_, to)| **to > addr) {
            return Some((Rule::Overlap, format!("the block {at:#x}+{} is live", to - at)));
        }
        let clock = by.and_then(|by| self.behind.get(&by));
        let comes_behind = |user: &Moment| {
            let knows = |clock: &Clock| clock.get(&user.who) >= Some(&user.position);
            Some(user.who) == by || knows(&self.over) || clock.is_some_and(knows)
        };
        let (start, to, user) = self.past_in(addr, end).find(|(_, _, user)| !comes_behind(user))?;
        let (bytes, whose) = (to - start, self.name_of(user.who));
        let why = format!("{whose} had {start:#x}+{bytes}, and that was neither seen to be over nor is it waited for");
        Some((Rule::Order, why))
    }

    /// The users of what was in use there: (start, end, user).
    fn past_in(&self, addr: Addr, end: Addr) -> impl Iterator<Item = (Addr, Addr, &Moment)> {
        let pieces = self.past.range(..end).rev().take_while(move |(_, past)| past.end > addr);
        pieces.flat_map(|(start, past)| past.users.iter().map(|user| (*start, past.end, user)))
    }

    /// What was in use there is not remembered any more: whoever has it now comes behind it.
    fn cut(&mut self, addr: Addr, end: Addr) {
        self.split(addr);
        self.split(end);
        while let Some(start) = self.past.range(addr..end).next().map(|(start, _)| *start) {
            self.past.remove(&start);
        }
    }

    fn split(&mut self, at: Addr) {
        if let Some((_, past)) = self.past.range_mut(..at).next_back().filter(|(_, past)| past.end > at) {
            let behind = Past { end: past.end, users: past.users.clone() };
            past.end = at;
            self.past.insert(at, behind);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: Addr = 0x1000;
    const EVENT: Event = Event(7);

    /// A block of stream 16 was freed; stream 32 asks for it.
    fn freed() -> (Order, Stream, Who) {
        let (mut order, one, two) = (Order::default(), Stream(16), Stream(32));
        let (who, other) = (order.who(one), order.who(two));
        order.take(BLOCK, 1024, Some(who)).unwrap();
        order.work(one);
        order.work(two);
        order.give(BLOCK, &[one]);
        (order, one, other)
    }

    fn rule(result: Result<(), Fault>) -> Rule {
        result.unwrap_err().rule
    }

    #[test]
    fn a_block_over_a_live_one_is_a_fault_whoever_asks() {
        let mut order = Order::default();
        let who = order.who(Stream(16));
        order.take(BLOCK, 1024, Some(who)).unwrap();
        order.take(BLOCK + 1024, 512, Some(who)).unwrap();
        assert_eq!(rule(order.take(BLOCK + 512, 512, Some(who))), Rule::Overlap);
        assert_eq!(rule(order.take(BLOCK - 512, 1024, None)), Rule::Overlap);
    }

    #[test]
    fn its_own_stream_may_have_it_at_once_and_another_may_not() {
        let (mut order, one, other) = freed();
        let again = order.who(one);
        order.take(BLOCK, 512, Some(again)).unwrap();
        assert_eq!(rule(order.take(BLOCK + 512, 512, Some(other))), Rule::Order);
        assert_eq!(order.checks(), Checks { allocations: 3, crossed: 1, waits: 0 });
    }

    #[test]
    fn an_event_that_was_seen_to_be_over_is_for_everybody_and_a_wait_for_its_stream() {
        let (mut order, one, other) = freed();
        order.record(EVENT, one);
        assert!(!order.look(EVENT, 1), "not at the first look");
        assert!(order.look(EVENT, 1));
        order.take(BLOCK, 1024, Some(other)).unwrap();

        let (mut order, one, other) = freed();
        order.record(EVENT, one);
        order.wait(Stream(32), EVENT);
        let third = order.who(Stream(48));
        order.take(BLOCK, 512, Some(other)).unwrap();
        assert_eq!(rule(order.take(BLOCK + 512, 512, Some(third))), Rule::Order, "it did not wait");
    }

    #[test]
    fn an_event_covers_nothing_that_was_queued_behind_it() {
        let (mut order, one, _) = freed();
        order.record(EVENT, one);
        let who = order.who(one);
        order.take(BLOCK, 1024, Some(who)).unwrap();
        order.give(BLOCK, &[one]);
        order.wait(Stream(32), EVENT);
        assert!(order.look(EVENT, 0));
        let other = order.who(Stream(32));
        assert_eq!(rule(order.take(BLOCK, 1024, Some(other))), Rule::Order);
    }

    #[test]
    fn a_wait_passes_on_what_its_event_comes_behind() {
        let (mut order, one, _) = freed();
        order.record(EVENT, one);
        order.wait(Stream(32), EVENT);
        order.record(Event(8), Stream(32));
        order.wait(Stream(48), Event(8));
        let third = order.who(Stream(48));
        order.take(BLOCK, 1024, Some(third)).unwrap();
    }

    #[test]
    fn an_event_of_all_streams_covers_each() {
        let (mut order, _, other) = freed();
        order.record_all(EVENT);
        assert!(order.look(EVENT, 0));
        order.take(BLOCK, 1024, Some(other)).unwrap();
    }

    #[test]
    fn a_stream_that_has_the_handle_of_another_is_not_that_one() {
        let (mut order, one, _) = freed();
        order.made(one);
        let new = order.who(one);
        assert_eq!(rule(order.take(BLOCK, 1024, Some(new))), Rule::Order);
    }

    #[test]
    fn what_is_unmapped_nobody_may_reach() {
        let (mut order, one, _) = freed();
        order.unmap(BLOCK & !0xfff, 4096);
        assert_eq!(order.take_faults().iter().map(|fault| fault.rule).collect::<Vec<_>>(), [Rule::Order]);
        let (mut order, ..) = freed();
        order.record(EVENT, one);
        assert!(order.look(EVENT, 0));
        order.unmap(BLOCK & !0xfff, 4096);
        assert_eq!(order.take_faults(), []);
    }

    #[test]
    fn a_graph_has_its_bytes_until_it_is_gone() {
        let (mut order, _, other) = freed();
        order.record_all(EVENT);
        assert!(order.look(EVENT, 0));
        let graph = order.graph();
        order.take(BLOCK, 1024, Some(graph.who)).unwrap();
        order.give(BLOCK, &[]);
        order.used(BLOCK, 512, &[graph]);
        order.record_all(EVENT);
        assert!(order.look(EVENT, 0), "no event covers it");
        order.take(BLOCK, 512, Some(graph.who)).unwrap();
        order.give(BLOCK, &[]);
        order.used(BLOCK, 512, &[graph]);
        assert_eq!(rule(order.take(BLOCK, 1024, Some(other))), Rule::Order);
        order.give(BLOCK, &[]);
        order.used(BLOCK, 512, &[graph]);
        order.is_over(graph.who);
        order.take(BLOCK, 1024, Some(other)).unwrap();
    }
}
