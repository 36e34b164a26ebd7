//! The ledger: who holds how much, per device and per client. Read from the control memory, with no help of the owner.

pub(crate) mod holders;
mod table;

pub use table::size;
pub(crate) use table::table;

use std::sync::atomic::Ordering;

use millpond_allocator::driver::DeviceId;
use serde::Serialize;

use crate::control::{Cause, ClientState, Control, DeviceRow, GrantRow, LiveRow, MAX_CLIENTS, MAX_DEVICES};
use crate::counts::Counts;
use crate::lends::Lend;
use crate::nvml::{Nvml, Usage};

/// Everything that is held under one owner, at one moment. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ledger {
    /// The arena's boot token, in hexadecimal.
    pub token: String,
    /// Its devices.
    pub devices: Vec<DeviceLedger>,
    /// Who lends what to whom.
    pub lends: Vec<Lend>,
}

/// One device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceLedger {
    /// Its identity.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its memory.
    pub total: u64,
    /// What the arena may take of it.
    pub limit: u64,
    /// What it has taken: the clients' reserved, the retired and the orphaned together.
    pub reserved: u64,
    /// The most that it ever took.
    pub peak: u64,
    /// Given back by its client, still mapped by another.
    pub retired: u64,
    /// Left by dead clients, still read by others.
    pub orphaned: u64,
    /// Growths granted so far.
    pub growths: u64,
    /// Growths refused so far.
    pub refusals: u64,
    /// Clients buried so far.
    pub deaths: u64,
    /// Of them: killed by policy, since they were stopped.
    pub kills_stopped: u64,
    /// Of them: killed by policy, since a call of theirs did not end.
    pub kills_call: u64,
    /// What the arena cannot see, where somebody looked: [`Ledger::look_outside`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outside: Option<Usage>,
    /// Why it is not known, where somebody looked in vain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outside_unknown: Option<String>,
    /// Those who are attached, or dead with something left.
    pub clients: Vec<ClientLedger>,
}

/// One client's use of one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClientLedger {
    /// Its slot.
    pub client: u32,
    /// Which client of that slot it is.
    pub serial: u64,
    /// Its process id, as the owner sees it.
    pub pid: u64,
    /// When that process began, in clock ticks since boot.
    pub start_time: u64,
    /// Its name.
    pub name: String,
    /// How it is: see [`ClientState::name`].
    pub state: &'static str,
    /// `parent` or `worker`.
    pub role: &'static str,
    /// Why the owner killed it, if it did.
    pub killed: Option<String>,
    /// Bytes of its chunks.
    pub reserved: u64,
    /// The most that they ever were.
    pub peak_reserved: u64,
    /// How many chunks.
    pub chunks: u64,
    /// Its own limit; zero: only the arena's.
    pub limit: u64,
    /// Given back, still mapped by others.
    pub retired: u64,
    /// Of `reserved`: what it adopted of clients that are dead.
    pub adopted: u64,
    /// Bytes of live blocks.
    pub allocated: u64,
    /// The most that they ever were.
    pub peak_allocated: u64,
    /// How many blocks.
    pub blocks: u64,
    /// Bytes asked for, without rounding.
    pub requested: u64,
    /// The largest free block.
    pub largest_free: u64,
    /// Bytes of its blocks that others hold.
    pub leased_out: u64,
    /// Bytes of others' blocks that it holds.
    pub leased_in: u64,
    /// Out-of-memory errors so far.
    pub out_of_memory: u64,
    /// How old its last beat is, in milliseconds.
    pub beat_age_ms: u64,
    /// What it has done so far.
    #[serde(flatten)]
    pub counts: Counts,
}

impl Ledger {
    /// Reads the rows; [`lends`](Self::lends) stays empty. `now_ms` is `CLOCK_MONOTONIC` in milliseconds. Rows are whole; the
    /// ledger as one is not frozen.
    #[must_use]
    pub fn read(control: &Control, now_ms: u64) -> Self {
        let [high, low] = control.token();
        let devices = (0..MAX_DEVICES as u32).filter_map(|device| DeviceLedger::read(control, device, now_ms)).collect();
        Self { token: format!("{high:016x}{low:016x}"), devices, lends: Vec::new() }
    }

    /// Reads the rows and the holds.
    #[must_use]
    pub fn read_with_lends(control: &Control, now_ms: u64) -> Self {
        Self { lends: crate::lends::read(control), ..Self::read(control, now_ms) }
    }

    /// Adds what the driver says of each device, or why it says nothing.
    pub fn look_outside(&mut self, nvml: &Result<Nvml, String>) {
        for device in &mut self.devices {
            let found = match nvml {
                _ if device.is_host() => Err("memory of the host is not counted by process here".to_owned()),
                Ok(nvml) => nvml.usage(&device.id, device.reserved),
                Err(why) => Err(why.clone()),
            };
            (device.outside, device.outside_unknown) = match found {
                Ok(usage) => (Some(usage), None),
                Err(why) => (None, Some(why)),
            };
        }
    }

    /// The name of the client in a slot.
    #[must_use]
    pub fn name_of(&self, slot: u32) -> String {
        let mut clients = self.devices.iter().flat_map(|device| &device.clients);
        clients.find(|client| client.client == slot).map_or_else(|| format!("client {slot}"), |client| client.name.clone())
    }
}

impl DeviceLedger {
    /// Whether it is the host: CPU memory.
    #[must_use]
    pub fn is_host(&self) -> bool {
        self.id.starts_with("HOST-")
    }

    /// Clients killed by policy so far.
    #[must_use]
    pub const fn kills(&self) -> u64 {
        self.kills_stopped.saturating_add(self.kills_call)
    }

    /// What the arena may still take of it.
    #[must_use]
    pub fn free_under_limit(&self) -> u64 {
        self.limit.saturating_sub(self.reserved)
    }

    fn read(control: &Control, device: u32, now_ms: u64) -> Option<Self> {
        let row: DeviceRow = control.device(device)?.read()?;
        if (row.id_high, row.id_low) == (0, 0) {
            return None;
        }
        let id = u128::from(row.id_high) << 64 | u128::from(row.id_low);
        let clients = (0..MAX_CLIENTS as u32).filter_map(|client| ClientLedger::read(control, client, device, now_ms));
        Some(Self {
            id: DeviceId::from_uuid(id.to_be_bytes()).to_string(),
            name: row.name(),
            total: row.total,
            limit: row.limit,
            reserved: row.reserved,
            peak: row.peak,
            retired: row.retired,
            orphaned: row.orphaned,
            growths: row.growths,
            refusals: row.refusals,
            deaths: row.deaths,
            kills_stopped: row.kills_stopped,
            kills_call: row.kills_call,
            outside: None,
            outside_unknown: None,
            clients: clients.collect(),
        })
    }
}

impl ClientLedger {
    /// What it has but does not use: at most this much a trim could give back, in whole chunks.
    #[must_use]
    pub fn slack(&self) -> u64 {
        self.reserved.saturating_sub(self.adopted.saturating_add(self.allocated))
    }

    /// How scattered its free memory is: 0 where it is one block, near 1 where it is many small ones.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        match self.slack() {
            0 => 0.0,
            slack => 1.0 - self.largest_free.min(slack) as f64 / slack as f64,
        }
    }

    fn read(control: &Control, client: u32, device: u32, now_ms: u64) -> Option<Self> {
        let row = control.client(client)?.read()?;
        let state = ClientState::from_word(row.state);
        if state == ClientState::Gone {
            return None;
        }
        let grant: GrantRow = control.grant(client, device)?.read().unwrap_or_default();
        let live: LiveRow = control.live(client, device)?.read().unwrap_or_default();
        let beat = control.beat(client)?.load(Ordering::Relaxed);
        Some(Self {
            client,
            serial: row.serial,
            pid: row.pid,
            start_time: row.start_time,
            name: row.name(),
            state: state.name(),
            role: if row.role == 0 { "parent" } else { "worker" },
            killed: Cause::from_word(row.cause).map(|cause| cause.to_string()),
            reserved: grant.reserved,
            peak_reserved: grant.peak,
            chunks: grant.chunks,
            limit: grant.limit,
            retired: grant.retired,
            adopted: grant.adopted,
            allocated: live.allocated,
            peak_allocated: live.peak,
            blocks: live.blocks,
            requested: live.requested,
            largest_free: live.largest_free,
            leased_out: live.leased_out,
            leased_in: live.leased_in,
            out_of_memory: live.out_of_memory,
            beat_age_ms: now_ms.saturating_sub(beat),
            counts: Counts::read(&grant, control.tally(client, device)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{ClientRow, Count, Tier};

    fn control() -> Control {
        let control = Control::create([0xab, 7], 1).unwrap();
        let id = u128::from_be_bytes(DeviceId::host(0).bytes());
        let mut device =
            DeviceRow { id_high: (id >> 64) as u64, id_low: id as u64, total: 8 << 30, limit: 4 << 30, ..DeviceRow::default() };
        device.reserved = 3 << 30;
        device.retired = 1 << 30;
        device.name[..4].copy_from_slice(b"host");
        control.device(0).unwrap().write(&device);
        for (slot, name, reserved) in [(0, b"parent", 1_u64 << 30), (5, b"worker", 1 << 30)] {
            let mut row = ClientRow { serial: 1, state: ClientState::Alive as u64, pid: 10, role: u64::from(slot), ..ClientRow::default() };
            row.name[..6].copy_from_slice(name);
            control.client(slot).unwrap().write(&row);
            control.grant(slot, 0).unwrap().write(&GrantRow { reserved, chunks: 1, ..GrantRow::default() });
            control.beat(slot).unwrap().store(900, Ordering::Relaxed);
        }
        control
    }

    #[test]
    fn it_says_who_holds_what() {
        let ledger = Ledger::read(&control(), 1_000);
        assert_eq!(ledger.token, "00000000000000ab0000000000000007");
        let [device] = ledger.devices.as_slice() else { panic!("{ledger:?}") };
        assert_eq!((device.id.as_str(), device.name.as_str()), ("HOST-0", "host"));
        let names: Vec<_> = device.clients.iter().map(|c| (c.client, c.name.as_str(), c.role, c.state, c.beat_age_ms)).collect();
        assert_eq!(names, [(0, "parent", "parent", "alive", 100), (5, "worker", "worker", "alive", 100)]);
        let sum: u64 = device.clients.iter().map(|c| c.reserved).sum();
        assert_eq!(sum + device.retired + device.orphaned, device.reserved);
    }

    #[test]
    fn it_says_what_each_has_done() {
        let control = control();
        control.grant(5, 0).unwrap().write(&GrantRow {
            reserved: 1 << 30,
            refusals: 2,
            trims: 1,
            trimmed_bytes: 1 << 21,
            ..GrantRow::default()
        });
        control.tally(5, 0).unwrap().add(Count::Received(Tier::Arena), 12);
        let ledger = Ledger::read(&control, 1_000);
        let [parent, worker] = ledger.devices[0].clients.as_slice() else { panic!("{ledger:?}") };
        assert_eq!(parent.counts, Counts::default());
        let json = serde_json::to_value(worker).unwrap();
        assert_eq!((&json["refusals"], &json["trimmed_bytes"], &json["received"]["arena"]), (&2.into(), &(2 << 20).into(), &12.into()));
        let text = crate::counts::CountTable(&ledger).to_string();
        assert!(text.lines().any(|row| row.contains("worker") && row.contains("arena 12") && row.contains("2.0 MiB")), "{text}");
    }

    #[test]
    fn those_who_are_gone_are_not_in_it() {
        let control = control();
        control.client(5).unwrap().write(&ClientRow { serial: 1, ..ClientRow::default() });
        assert_eq!(Ledger::read(&control, 0).devices[0].clients.len(), 1);
    }

    #[test]
    fn the_table_is_aligned() {
        let text = Ledger::read(&control(), 1_000).to_string();
        let rows: Vec<&str> = text.lines().skip(3).collect();
        assert_eq!(rows.len(), 3, "{text}");
        assert!(rows.iter().all(|row| row.len() == rows[0].len()), "{text}");
        assert!(text.contains("3.00 GiB of 4.00 GiB reserved") && rows[1].contains("1.00 GiB"), "{text}");
    }
}
