//! What a client has done so far on one device, as the ledger shows it.

use std::fmt;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::control::{Count, Fall, GrantRow, Tally, Tier};
use crate::ledger::{size, table};

/// Counters that only grow, from zero at attaching. Growths, refusals and trims are the owner's word; the rest is the client's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Growths granted.
    pub growths: u64,
    /// Growths refused.
    pub refusals: u64,
    /// How often it gave chunks back.
    pub trims: u64,
    /// The bytes of all of them.
    pub trimmed_bytes: u64,
    /// Copies that sending made.
    pub copies: u64,
    /// Their bytes.
    pub copied_bytes: u64,
    /// Values sent, by tier.
    pub sent: Tiers,
    /// Values received, by tier.
    pub received: Tiers,
    /// Values that went by a lower tier than their best, by reason.
    pub falls: Falls,
}

/// A number for each [`Tier`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tiers(pub [u64; Tier::ALL.len()]);

/// A number for each [`Fall`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Falls(pub [u64; Fall::ALL.len()]);

impl Tiers {
    /// Each with its name.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Tier::NAMES.into_iter().zip(self.0)
    }
}

impl Falls {
    /// Each with its name.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Fall::NAMES.into_iter().zip(self.0)
    }
}

impl Serialize for Tiers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        as_map(serializer, self.named())
    }
}

impl Serialize for Falls {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        as_map(serializer, self.named())
    }
}

fn as_map<S: Serializer>(serializer: S, named: impl Iterator<Item = (&'static str, u64)>) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(None)?;
    for (name, n) in named {
        map.serialize_entry(name, &n)?;
    }
    map.end()
}

impl Counts {
    pub(crate) fn read(grant: &GrantRow, tally: &Tally) -> Self {
        Self {
            growths: grant.growths,
            refusals: grant.refusals,
            trims: grant.trims,
            trimmed_bytes: grant.trimmed_bytes,
            copies: tally.get(Count::Copies),
            copied_bytes: tally.get(Count::CopiedBytes),
            sent: Tiers(Tier::ALL.map(|tier| tally.get(Count::Sent(tier)))),
            received: Tiers(Tier::ALL.map(|tier| tally.get(Count::Received(tier)))),
            falls: Falls(Fall::ALL.map(|fall| tally.get(Count::Fell(fall)))),
        }
    }

    fn cells(&self, name: &str, out_of_memory: u64) -> Vec<String> {
        vec![
            name.to_owned(),
            self.growths.to_string(),
            self.refusals.to_string(),
            out_of_memory.to_string(),
            self.trims.to_string(),
            size(self.trimmed_bytes),
            listed(self.sent.named()),
            listed(self.received.named()),
            self.copies.to_string(),
            size(self.copied_bytes),
            listed(self.falls.named()),
        ]
    }
}

/// Those that are not zero: `arena 12, copy 3`.
fn listed(named: impl Iterator<Item = (&'static str, u64)>) -> String {
    let some: Vec<String> = named.filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name} {n}")).collect();
    if some.is_empty() {
        "-".to_owned()
    } else {
        some.join(", ")
    }
}

const HEADINGS: [&str; 11] =
    ["client", "growths", "refusals", "out of memory", "trims", "trimmed", "sent", "received", "copies", "copied", "falls"];

/// The counters of every client of a ledger, as a table for people: one for each device.
#[derive(Debug)]
pub struct CountTable<'a>(pub &'a crate::ledger::Ledger);

impl fmt::Display for CountTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for device in self.0.devices.iter().filter(|device| !device.clients.is_empty()) {
            writeln!(f, "\n{}  so far", device.id)?;
            let rows: Vec<_> = device.clients.iter().map(|client| client.counts.cells(&client.name, client.out_of_memory)).collect();
            table(f, &HEADINGS, &rows)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_zero_is_in_the_json_and_not_in_the_table() {
        let mut counts = Counts { growths: 3, ..Counts::default() };
        counts.sent.0[Tier::Copy as usize] = 2;
        counts.falls.0[Fall::NoGpu as usize] = 5;
        let json = serde_json::to_value(&counts).unwrap();
        assert_eq!(json["sent"]["copy"], 2);
        assert_eq!(json["received"]["cuda_ipc"], 0);
        assert_eq!(json["falls"]["no_gpu"], 5);
        let cells = counts.cells("vae", 1);
        assert_eq!(cells.len(), HEADINGS.len());
        assert_eq!((cells[1].as_str(), cells[6].as_str(), cells[7].as_str(), cells[10].as_str()), ("3", "copy 2", "-", "no_gpu 5"));
    }
}
