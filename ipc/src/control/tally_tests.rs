//! The counters; `tests/tests/model/tally.rs` has them under every order of steps.

use super::tally::{Count, Fall, Tally, Tier, COUNTS};

fn all() -> Vec<Count> {
    let tiers = || Tier::ALL.into_iter();
    let falls = Fall::ALL.into_iter().map(Count::Fell);
    tiers().map(Count::Sent).chain(tiers().map(Count::Received)).chain(falls).chain([Count::Copies, Count::CopiedBytes]).collect()
}

#[test]
fn each_counter_has_a_word_of_its_own() {
    let tally = Tally(Default::default());
    for (n, count) in all().into_iter().enumerate() {
        assert_eq!(tally.get(count), 0, "{count:?}");
        tally.add(count, n as u64 + 1);
        assert_eq!(tally.get(count), n as u64 + 1);
    }
    assert_eq!(all().len(), COUNTS);
    tally.reset();
    assert!(all().into_iter().all(|count| tally.get(count) == 0));
}

#[test]
fn counters_are_found_by_name() {
    for (tier, name) in Tier::ALL.into_iter().zip(Tier::NAMES) {
        assert_eq!(Count::named(&format!("sent.{name}")), Some(Count::Sent(tier)));
        assert_eq!(Count::named(&format!("received.{name}")), Some(Count::Received(tier)));
        assert_eq!(Tier::from_number(tier as u8), tier);
    }
    for (fall, name) in Fall::ALL.into_iter().zip(Fall::NAMES) {
        assert_eq!(Count::named(&format!("fell.{name}")), Some(Count::Fell(fall)));
    }
    assert_eq!(Count::named("copied_bytes"), Some(Count::CopiedBytes));
    assert!(["", "sent", "sent.", "sent.tape", "fell.arena", "copies.arena"].iter().all(|name| Count::named(name).is_none()));
    assert_eq!(Tier::from_number(200), Tier::Arena);
}
