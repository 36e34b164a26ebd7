//! Epochs in a frame: a number for one, `[first, count]` for consecutive ones, so that a large tensor's descriptor is as short as
//! a small one's; of several such a list, and of one epoch alone just the number.

use std::fmt;

use millpond_allocator::window::Epochs;
use millpond_allocator::Few;
use serde::de::{Error, SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// One run as it stands in a frame.
struct Run(Epochs);

impl Serialize for Run {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match (self.0.first(), self.0.count()) {
            (epoch, 1) => serializer.serialize_u64(epoch),
            run => run.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Run {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RunVisitor)
    }
}

struct RunVisitor;

impl<'de> Visitor<'de> for RunVisitor {
    type Value = Run;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an epoch, or [first, count] of one or more that are all numbers of 64 bits")
    }

    fn visit_u64<E: Error>(self, epoch: u64) -> Result<Run, E> {
        Ok(Run(Epochs::one(epoch)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Run, A::Error> {
        let first = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
        let count = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(1, &self))?;
        if seq.next_element::<serde::de::IgnoredAny>()?.is_some() {
            return Err(A::Error::invalid_length(3, &self));
        }
        Epochs::new(first, count)
            .map(Run)
            .ok_or_else(|| A::Error::custom(format_args!("{count} epochs from {first} on: there are none such")))
    }
}

struct RunsVisitor;

impl<'de> Visitor<'de> for RunsVisitor {
    type Value = Few<Epochs>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an epoch, or a list of such and of [first, count]")
    }

    fn visit_u64<E: Error>(self, epoch: u64) -> Result<Self::Value, E> {
        Ok(Few::from_slice(&[Epochs::one(epoch)]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut runs = Few::new();
        while let Some(Run(run)) = seq.next_element()? {
            runs.push(run);
        }
        Ok(runs)
    }
}

/// Writes runs. For `#[serde(with = "epochs")]`.
pub(crate) fn serialize<S: Serializer>(runs: &[Epochs], serializer: S) -> Result<S::Ok, S::Error> {
    if let [run] = runs {
        if run.count() == 1 {
            return Run(*run).serialize(serializer);
        }
    }
    let mut seq = serializer.serialize_seq(Some(runs.len()))?;
    runs.iter().try_for_each(|run| seq.serialize_element(&Run(*run)))?;
    seq.end()
}

/// Reads runs.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Few<Epochs>, D::Error> {
    deserializer.deserialize_any(RunsVisitor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Serialize, Deserialize)]
    struct Bearer(#[serde(with = "super")] Few<Epochs>);

    #[test]
    fn one_is_a_number_and_more_are_a_run() {
        let bearer = Bearer(Few::from_slice(&[Epochs::one(7), Epochs::new(9, 32).unwrap()]));
        let text = serde_json::to_string(&bearer).unwrap();
        assert_eq!(text, "[7,[9,32]]");
        assert_eq!(serde_json::from_str::<Bearer>(&text).unwrap().0, bearer.0);
        assert_eq!(serde_json::from_str::<Bearer>("[[7,1]]").unwrap().0[..], [Epochs::one(7)]);
        let bearer = Bearer(Few::from_slice(&[Epochs::one(7)]));
        assert_eq!(serde_json::to_string(&bearer).unwrap(), "7");
        assert!(["7", "[7]"].iter().all(|text| serde_json::from_str::<Bearer>(text).unwrap().0 == bearer.0));
        let bearer = Bearer(Few::from_slice(&[Epochs::new(7, 2).unwrap()]));
        assert_eq!(serde_json::to_string(&bearer).unwrap(), "[[7,2]]");
    }

    #[test]
    fn what_cannot_be_a_run_is_refused_before_anything_is_made_of_it() {
        for wrong in [
            "[[7,0]]",
            "[[18446744073709551615,2]]",
            "[[7]]",
            "[[]]",
            "[[1,2,3]]",
            "[-1]",
            "[[1,-1]]",
            "[1.5]",
            "[\"1\"]",
            "[null]",
            "null",
            "-1",
            "1.5",
            "\"1\"",
            "18446744073709551616",
            "{}",
            "[[1,18446744073709551616]]",
        ] {
            assert!(serde_json::from_str::<Bearer>(wrong).is_err(), "{wrong}");
        }
        // A number that can be: who compares it finds that it is too many.
        assert_eq!(serde_json::from_str::<Bearer>("[[1,18446744073709551615]]").unwrap().0[0].count(), u64::MAX);
    }
}
