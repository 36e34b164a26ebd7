//! Threads that take turns, so that what they do is in one order.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::thread::Builder;

use parking_lot::{Condvar, Mutex};

use super::ReplayError;

/// What one thread does before another has its turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Turn {
    /// Its thread, from 0, in the order of their first turns.
    pub(super) thread: usize,
    /// Places of its events.
    pub(super) events: Range<usize>,
}

/// The turns of events whose threads are these, and how many threads those are.
pub(super) fn turns(threads: impl Iterator<Item = u64>) -> (Vec<Turn>, usize) {
    let (mut turns, mut numbers, mut last) = (Vec::<Turn>::new(), HashMap::new(), None);
    for (place, thread) in threads.enumerate() {
        match turns.last_mut().filter(|_| last == Some(thread)) {
            Some(turn) => turn.events.end = place + 1,
            None => {
                let next = numbers.len();
                turns.push(Turn { thread: *numbers.entry(thread).or_insert(next), events: place..place + 1 });
                last = Some(thread);
            }
        }
    }
    (turns, numbers.len())
}

#[derive(Debug)]
struct Baton<T> {
    /// Whose turn it is; more than there are: nobody's any more.
    turn: usize,
    state: T,
    result: Result<(), ReplayError>,
}

/// Does the turns, each on its own thread (one alone: on the caller's), one at a time in their order.
pub(super) fn take_turns<T: Send>(
    turns: &[Turn],
    threads: usize,
    mut state: T,
    act: impl Fn(&mut T, Range<usize>) -> Result<(), ReplayError> + Sync,
) -> Result<T, ReplayError> {
    if threads <= 1 {
        turns.iter().try_for_each(|turn| act(&mut state, turn.events.clone()))?;
        return Ok(state);
    }
    let mut own: Vec<Vec<usize>> = vec![Vec::new(); threads];
    for (number, turn) in turns.iter().enumerate() {
        own.get_mut(turn.thread).into_iter().for_each(|own| own.push(number));
    }
    let baton = Mutex::new(Baton { turn: 0, state, result: Ok(()) });
    let wakes: Vec<Condvar> = (0..threads).map(|_| Condvar::new()).collect();
    let stop = |baton: &mut Baton<T>| {
        baton.turn = usize::MAX;
        wakes.iter().for_each(|wake| _ = wake.notify_all());
    };
    let work = |wake: &Condvar, own: &[usize]| {
        for (number, turn) in own.iter().filter_map(|number| Some((*number, turns.get(*number)?))) {
            let mut baton = baton.lock();
            while baton.turn < number {
                wake.wait(&mut baton);
            }
            if baton.turn > number {
                return;
            }
            match catch_unwind(AssertUnwindSafe(|| act(&mut baton.state, turn.events.clone()))) {
                Ok(Ok(())) => baton.turn = number + 1,
                Ok(error) => {
                    baton.result = error;
                    return stop(&mut baton);
                }
                Err(panic) => {
                    stop(&mut baton);
                    drop(baton);
                    resume_unwind(panic);
                }
            }
            let next = turns.get(number + 1).and_then(|turn| wakes.get(turn.thread));
            next.into_iter().for_each(|wake| _ = wake.notify_one());
        }
    };
    std::thread::scope(|scope| {
        for (number, (wake, own)) in wakes.iter().zip(&own).enumerate() {
            let work = &work;
            if let Err(error) = Builder::new().name(format!("replay-{number}")).spawn_scoped(scope, move || work(wake, own)) {
                let mut baton = baton.lock();
                baton.result = Err(ReplayError::Thread { threads, error });
                return stop(&mut baton);
            }
        }
    });
    let Baton { state, result, .. } = baton.into_inner();
    result.map(|()| state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_turn_is_on_its_own_thread_and_in_order() {
        let (turns, threads) = turns([7, 7, 9, 7, 8, 8].into_iter());
        let expected = [(0, 0..2), (1, 2..3), (0, 3..4), (2, 4..6)].map(|(thread, events)| Turn { thread, events });
        assert_eq!((turns.as_slice(), threads), (expected.as_slice(), 3));
        let seen = take_turns(&turns, threads, Vec::new(), |seen, events| {
            seen.extend(events.map(|event| (event, std::thread::current().id())));
            Ok(())
        })
        .unwrap();
        assert_eq!(seen.iter().map(|(event, _)| *event).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        let thread = |place: usize| seen[place].1;
        assert!(thread(0) == thread(3) && thread(0) != thread(2) && thread(4) == thread(5) && thread(2) != thread(4));
        assert_ne!(thread(0), std::thread::current().id());
    }

    #[test]
    fn one_thread_is_the_callers() {
        let (turns, threads) = turns([5, 5].into_iter());
        let on = take_turns(&turns, threads, None, |on, _| {
            *on = Some(std::thread::current().id());
            Ok(())
        });
        assert_eq!(on.unwrap(), Some(std::thread::current().id()));
    }

    #[test]
    fn an_error_and_a_panic_end_it_for_all() {
        let (turns, threads) = turns([1, 2, 3, 1, 2, 3].into_iter());
        let fail = |_: &mut (), events: Range<usize>| match events.start {
            4 => Err(ReplayError::Parse { line: 4, reason: String::new() }),
            place => (place < 4).then_some(()).ok_or(ReplayError::Parse { line: 5, reason: String::new() }),
        };
        assert!(matches!(take_turns(&turns, threads, (), fail), Err(ReplayError::Parse { line: 4, .. })));
        let panics = |_: &mut (), events: Range<usize>| if events.start == 4 { panic!("on purpose") } else { Ok(()) };
        assert!(catch_unwind(|| take_turns(&turns, threads, (), panics)).is_err());
    }
}
