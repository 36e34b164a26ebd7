//! The hold's word, its claim, the producer's two looks at a table and its marks, and the count of changes.
//!
//! | word | who writes it | what is relied on |
//! | --- | --- | --- |
//! | `Hold::word` | sender, receiver, producer, owner: one exchange a step | one life after another; a step of an earlier life changes nothing |
//! | `Hold::lease` to `bytes` | the maker, between *making* and *in flight* | who has seen *in flight* sees them; who looks by the way (`glance`) sees those of the word, or nothing |
//! | `Hold::done_*` | the receiver, before *done* | who has seen *done* sees them |
//! | `Marks` | whoever makes a hold, before it can be seen | a look that has seen a hold's end reaches every hold that was made before |
//! | `Changes` | whoever ends something, after it | who sees the number sees the end |

mod atomic {
    pub(super) use loom::sync::atomic::{fence, AtomicU64, Ordering};
}

#[path = "../../../ipc/src/control/changes.rs"]
mod changes;
#[path = "../../../ipc/src/control/hold.rs"]
mod hold;
#[path = "../../../ipc/src/control/marks.rs"]
mod marks;
#[path = "../../../ipc/src/control/sweep.rs"]
mod sweep;

/// A table of one place of the producer's own and two of forwarders.
mod layout {
    pub(super) const FORWARDED: usize = 1;
    pub(super) const HOLDS_PER_CLIENT: usize = 3;
}

use atomic::{AtomicU64, Ordering};
use changes::Changes;
use hold::{Claim, Hold, HoldState, HoldWord};
use layout::HOLDS_PER_CLIENT;
use loom::sync::Arc;
use loom::thread;
use marks::Marks;
use sweep::{Look, Seen};

use crate::check;

const PRODUCER: u8 = 0;
const FIRST: u8 = 1;
const SECOND: u8 = 2;
const LEASE: u64 = 7;
const CLAIM: Claim = Claim { lease: LEASE, window: 1, offset: 0, bytes: 512 };

fn new_hold() -> Hold {
    Hold::zeroed(|| AtomicU64::new(0))
}

/// As many as it takes to miss a hold, and one more.
const PREEMPTIONS: usize = 3;

struct Table {
    holds: [Hold; HOLDS_PER_CLIENT],
    marks: Marks,
    /// Set when the producer has ended the lease: the bytes are anybody's.
    ended: AtomicU64,
}

impl Table {
    fn new() -> Arc<Self> {
        Arc::new(Self { holds: [new_hold(), new_hold(), new_hold()], marks: Marks::default(), ended: AtomicU64::new(0) })
    }

    fn look(&self) -> Look {
        Look::at(self.marks.places().map(|place| (place, &self.holds[place as usize])))
    }

    /// Makes a hold as a client does.
    fn make(&self, place: usize, sender: u8, receiver: u8, claim: Claim) -> Option<u32> {
        self.marks.reach(place as u32);
        self.holds[place].make(sender, receiver, claim)
    }

    /// What a reaper that trusts its first look would take for the second.
    fn look_again(&self, first: &Look) -> Look {
        first.clone()
    }

    /// The producer's reaping, as the client does it.
    fn reap(&self) {
        let before = self.look();
        self.reap_after(&before, self.look());
    }

    fn reap_after(&self, before: &Look, after: Look) {
        let over = after.steady(before, LEASE).is_some_and(|holds| holds.iter().all(|hold| hold.word.state() == HoldState::Done));
        if over {
            self.ended.store(1, Ordering::Release);
        }
        for Seen { index, word, .. } in after.all().iter().copied().filter(|hold| hold.word.state() == HoldState::Done) {
            self.holds[index as usize].recycle(word);
        }
    }

    fn is_mine(&self) {
        assert_eq!(self.ended.load(Ordering::Acquire), 0, "the block was given away while it was held");
    }
}

/// A holder passes the bytes on and lets go, while the producer looks. `from`, `to`: the places of the two holds, both orders.
fn forward_against_reap(from: usize, to: usize, reap: impl Fn(&Table) + Clone + Send + Sync + 'static) {
    check(PREEMPTIONS, move || {
        let table = Table::new();
        let generation = table.make(from, PRODUCER, FIRST, CLAIM).unwrap();
        assert!(table.holds[from].take(generation, FIRST));
        let holder = {
            let table = table.clone();
            thread::spawn(move || {
                let own = &table.holds[from];
                let new = &table.holds[to];
                let made = table.make(to, FIRST, SECOND, Claim { ..own.claim().unwrap() }).unwrap();
                assert!(own.confirm(generation, FIRST));
                assert!(own.finish(generation, FIRST, None));
                // The receiver, wherever the frame has taken it.
                assert!(new.take(made, SECOND));
                table.is_mine();
                assert_eq!(new.claim().unwrap(), CLAIM);
                assert!(new.finish(made, SECOND, None));
            })
        };
        let reaper = {
            let (table, reap) = (table.clone(), reap.clone());
            thread::spawn(move || reap(&table))
        };
        reaper.join().unwrap();
        holder.join().unwrap();
        table.reap();
        table.reap();
        assert_eq!(table.ended.load(Ordering::Acquire), 1, "nothing is left held");
        assert!(table.holds.iter().all(|hold| hold.word().state() == HoldState::Free));
    });
}

#[test]
fn passing_on_is_never_missed() {
    forward_against_reap(0, 1, Table::reap);
}

#[test]
fn passing_on_again_upwards_is_never_missed() {
    forward_against_reap(1, 2, Table::reap);
}

#[test]
fn passing_on_again_downwards_is_never_missed() {
    forward_against_reap(2, 1, Table::reap);
}

/// The checker is checked: with one look in place of two it finds the order in which a block is given away.
#[test]
#[should_panic(expected = "given away while it was held")]
fn one_look_would_not_do() {
    forward_against_reap(2, 1, |table| {
        let look = table.look();
        table.reap_after(&look, table.look_again(&look));
    });
}

/// One thread passes on what another lets go of: either the new hold stands, or it is refused.
#[test]
fn passing_on_what_is_being_let_go_of_is_refused_or_safe() {
    // Three threads: one more preemption finds the same and takes ten seconds.
    check(2, || {
        let table = Table::new();
        let generation = table.make(2, PRODUCER, FIRST, CLAIM).unwrap();
        assert!(table.holds[2].take(generation, FIRST));
        let releasing = {
            let table = table.clone();
            thread::spawn(move || assert!(table.holds[2].finish(generation, FIRST, None)))
        };
        let forwarding = {
            let table = table.clone();
            thread::spawn(move || {
                let Some(made) = table.make(1, FIRST, SECOND, CLAIM) else { return };
                if table.holds[2].confirm(generation, FIRST) {
                    assert!(table.holds[1].take(made, SECOND));
                    table.is_mine();
                    table.holds[1].finish(made, SECOND, None);
                } else {
                    table.holds[1].bury(table.holds[1].word());
                }
            })
        };
        let reaping = {
            let table = table.clone();
            thread::spawn(move || table.reap())
        };
        reaping.join().unwrap();
        releasing.join().unwrap();
        forwarding.join().unwrap();
    });
}

/// Old acks of an earlier life end nothing of a later one.
#[test]
fn an_ack_of_an_earlier_life_ends_nothing() {
    check(PREEMPTIONS, || {
        let hold = Arc::new(new_hold());
        let first = hold.make(PRODUCER, FIRST, CLAIM).unwrap();
        assert!(hold.take(first, FIRST));
        let receiver = {
            let hold = hold.clone();
            thread::spawn(move || {
                assert!(hold.finish(first, FIRST, Some((3, 9))));
                // Again, as a replayed frame or a confused deleter would.
                assert!(!hold.finish(first, FIRST, None));
                assert!(!hold.take(first, FIRST) && !hold.decline(first, FIRST));
            })
        };
        let producer = {
            let hold = hold.clone();
            thread::spawn(move || hold.recycle(hold.word()).then(|| hold.make(PRODUCER, SECOND, CLAIM).unwrap()))
        };
        receiver.join().unwrap();
        if let Some(second) = producer.join().unwrap() {
            assert_ne!(second, first);
            let word = hold.word();
            assert_eq!((word.generation(), word.state(), word.receiver()), (second, HoldState::InFlight, SECOND));
            assert_eq!(hold.done(), None);
        } else {
            assert_eq!(hold.done(), Some((3, 9)));
        }
    });
}

/// The owner ends the hold of a dead receiver while its ack may still be on its way.
#[test]
fn burying_and_finishing_meet_once() {
    check(PREEMPTIONS, || {
        let hold = Arc::new(new_hold());
        let generation = hold.make(PRODUCER, FIRST, CLAIM).unwrap();
        let receiver = {
            let hold = hold.clone();
            thread::spawn(move || (hold.take(generation, FIRST), hold.finish(generation, FIRST, None)))
        };
        let owner = {
            let hold = hold.clone();
            // Until nothing is left to bury, as the owner does.
            thread::spawn(move || loop {
                let word = hold.word();
                if !matches!(word.state(), HoldState::InFlight | HoldState::Held) {
                    break false;
                }
                if hold.bury(word) {
                    break true;
                }
                thread::yield_now();
            })
        };
        let buried = owner.join().unwrap();
        let (_, finished) = receiver.join().unwrap();
        assert!(buried || finished);
        assert_eq!(hold.word().state(), HoldState::Done);
        assert!(hold.recycle(hold.word()));
    });
}

/// Two that forward into one table never get one place.
#[test]
fn two_makers_get_two_places() {
    check(PREEMPTIONS, || {
        let table = Table::new();
        let make = |who: u8| {
            let table = table.clone();
            move || {
                (1..3).find_map(|index| {
                    let claim = Claim { offset: u64::from(who), ..CLAIM };
                    table.make(index, who, who + 10, claim).map(|generation| (index, generation))
                })
            }
        };
        let (one, two) = (thread::spawn(make(SECOND)), thread::spawn(make(FIRST)));
        let ((a, generation_a), (b, generation_b)) = (one.join().unwrap().unwrap(), two.join().unwrap().unwrap());
        assert_ne!(a, b);
        for (index, generation, who) in [(a, generation_a, SECOND), (b, generation_b, FIRST)] {
            assert!(table.holds[index].take(generation, who + 10));
            assert_eq!(table.holds[index].claim().unwrap().offset, u64::from(who));
        }
    });
}

/// Two that forward into one table at once raise one mark.
#[test]
fn a_look_reaches_the_higher_of_two() {
    check(PREEMPTIONS, || {
        let table = Table::new();
        let threads = [1, 2].map(|place| {
            let table = table.clone();
            thread::spawn(move || assert!(table.make(place, FIRST, SECOND, CLAIM).is_some()))
        });
        table.marks.reach(0);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(table.marks.places().collect::<Vec<_>>(), [0, 1, 2]);
    });
}

/// One who has no part in a hold, as the ledger's reader, sees a claim of the life that it names.
#[test]
fn a_glance_is_of_one_life() {
    check(PREEMPTIONS, || {
        let hold = Arc::new(new_hold());
        let claim = |life: u32| Claim { offset: u64::from(life), bytes: u64::from(life) * 512, ..CLAIM };
        let first = hold.make(PRODUCER, FIRST, claim(1)).unwrap();
        let others = {
            let hold = hold.clone();
            thread::spawn(move || {
                assert!(hold.finish(first, FIRST, None));
                assert!(hold.recycle(hold.word()));
                hold.make(PRODUCER, FIRST, claim(2)).unwrap();
            })
        };
        let reader = {
            let hold = hold.clone();
            thread::spawn(move || {
                let seen = hold.glance().filter(|(word, _)| word.state() == HoldState::InFlight);
                if let Some((word, seen)) = seen {
                    assert_eq!(seen, claim(word.generation()), "of another life");
                }
            })
        };
        others.join().unwrap();
        reader.join().unwrap();
    });
}

/// Who sees that something has changed sees what.
#[test]
fn a_change_that_is_seen_is_there() {
    check(PREEMPTIONS, || {
        let (hold, changes) = (Arc::new(new_hold()), Arc::new(Changes::default()));
        let generation = hold.make(PRODUCER, FIRST, CLAIM).unwrap();
        assert!(hold.take(generation, FIRST));
        let receiver = {
            let (hold, changes) = (hold.clone(), changes.clone());
            thread::spawn(move || {
                assert!(hold.finish(generation, FIRST, Some((3, 9))));
                changes.note();
            })
        };
        // Another one's change, which the number counts too.
        let other = {
            let changes = changes.clone();
            thread::spawn(move || changes.note())
        };
        let owner = thread::spawn(move || {
            if changes.seen() == 2 {
                assert_eq!((hold.word().state(), hold.done()), (HoldState::Done, Some((3, 9))), "a change without its cause");
            }
        });
        [receiver, other, owner].into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_word_is_put_together_and_taken_apart() {
    let word = HoldWord::new(5, HoldState::Held, 3, 9);
    assert_eq!((word.generation(), word.state(), word.sender(), word.receiver()), (5, HoldState::Held, 3, 9));
}
