//! Growth: admission is atomic, since one thread decides; what does not fit at once waits, with a bound, while others are
//! asked to give back what they do not use. A growth that does not press is answered at once.

use millpond_allocator::heap::human;
use std::time::{Duration, Instant};

use super::calls::KEPT_CALLS;
use super::client::Asked;
use super::estate::{members, Denial};
use super::Owner;
use crate::ledger::holders;
use crate::wire::{Answer, Ask, Holder, Reason, MAX_FDS};

/// A growth that waits.
#[derive(Debug)]
pub(super) struct Pending {
    slot: u32,
    call_id: u64,
    bytes: u64,
    /// Whether others are asked; else it is due at once.
    press: bool,
    deadline: Instant,
    /// When everybody else is asked too: somebody who was asked may be stuck.
    widen: Option<Instant>,
    /// Clients that were asked to trim, and those of them that have not answered.
    asked: u64,
    awaited: u64,
    /// Somebody said that bytes are on their way.
    promised: bool,
    /// Whoever listens was told.
    told: bool,
}

impl Owner {
    pub(super) fn grow(&mut self, slot: u32, call_id: u64, device: u32, bytes: u64, press: bool) {
        let Some(client) = self.client(slot) else { return };
        let Some(books) = self.estate.device(device) else {
            let message = format!("no device {device}: there are {}", self.estate.devices.len());
            return self.refuse(slot, call_id, Reason::InvalidArgument, message);
        };
        let unit = books.served.info.granularity;
        if bytes == 0 || !bytes.is_multiple_of(unit) {
            let message = format!("{bytes} bytes: expected a multiple of the device's granularity, {unit} bytes");
            return self.refuse(slot, call_id, Reason::InvalidArgument, message);
        }
        if client.faulted {
            return self.refuse(slot, call_id, Reason::Refused, "this client said that its context is dead");
        }
        if client.calls_kept >= KEPT_CALLS {
            return self.refuse(slot, call_id, Reason::Refused, format!("{KEPT_CALLS} requests of this client are waiting"));
        }
        let bound = if press { Duration::from_millis(self.config.trim_timeout_ms) } else { Duration::ZERO };
        let now = Instant::now();
        let pending = Pending {
            slot,
            call_id,
            bytes,
            press,
            deadline: now + bound,
            widen: Some(now + bound / 2),
            asked: 0,
            awaited: 0,
            promised: false,
            told: false,
        };
        if let Some(client) = self.client_mut(slot) {
            client.calls_kept += 1;
        }
        if let Some(queue) = self.grows.get_mut(device as usize) {
            queue.push_back(pending);
        }
        self.serve_grows(device, now);
    }

    /// When the next waiting growth must be looked at.
    pub(super) fn grows_due(&self) -> Option<Instant> {
        self.grows.iter().flatten().map(|pending| pending.widen.unwrap_or(pending.deadline)).min()
    }

    pub(super) fn look_at_grows(&mut self, now: Instant) {
        if self.grows_due().is_some_and(|due| due <= now) {
            self.serve_all_grows(now);
        }
    }

    /// Serves what can be served now, on every device.
    pub(super) fn serve_all_grows(&mut self, now: Instant) {
        for device in 0..self.grows.len() as u32 {
            self.serve_grows(device, now);
        }
    }

    /// Serves a device's growths in order. One that the device has no room for holds up those behind it; one that only its
    /// own client's limit holds up does not.
    pub(super) fn serve_grows(&mut self, device: u32, now: Instant) {
        let Some(queue) = self.grows.get_mut(device as usize) else { return };
        let mut waiting = std::mem::take(queue);
        let mut kept = std::collections::VecDeque::new();
        let mut blocked = false;
        while let Some(mut pending) = waiting.pop_front() {
            let due = pending.deadline <= now;
            if blocked && !pending.press {
                // Those who wait were first.
                self.deny(&pending, device, &Denial::Arena(pending.bytes));
                continue;
            }
            if blocked && !due {
                // It asks when its turn comes; until then only its deadline counts.
                pending.widen = pending.widen.filter(|at| *at > now);
                kept.push_back(pending);
                continue;
            }
            let slot = pending.slot;
            let present = self.client(slot).filter(|client| client.is_present());
            let Some(window) = present.and_then(|client| client.windows.get(device as usize)).copied() else { continue };
            let _span = tracing::debug_span!("growth", client = slot, device, bytes = pending.bytes).entered();
            match self.estate.grow(slot, window, device, pending.bytes) {
                Ok(epochs) => self.granted(&pending, epochs),
                Err(denial) => {
                    if !due {
                        self.press(&mut pending, device, &denial, now);
                    }
                    if due || !self.is_hopeful(&pending, device, &denial, now) {
                        self.deny(&pending, device, &denial);
                    } else {
                        blocked |= matches!(denial, Denial::Arena(_) | Denial::Driver(_));
                        kept.push_back(pending);
                    }
                }
            }
        }
        if let Some(queue) = self.grows.get_mut(device as usize) {
            // Nothing is added in between, but nothing would be lost either.
            kept.append(queue);
            *queue = kept;
        }
    }

    fn granted(&mut self, pending: &Pending, epochs: Vec<u64>) {
        let (slot, call_id) = (pending.slot, pending.call_id);
        self.call_over(slot);
        if !self.send_chunks(slot, call_id, &epochs) {
            // Its client never learned of them.
            self.give_back(&epochs.into_iter().collect());
        }
    }

    /// Answers with chunks, and notes who has their descriptors; as many as one frame may carry go along. False: there were
    /// none left to send.
    pub(super) fn send_chunks(&mut self, slot: u32, call_id: u64, epochs: &[u64]) -> bool {
        let holdings: Vec<_> = epochs.iter().filter_map(|epoch| self.estate.holding(*epoch)).collect();
        let chunks = holdings.iter().map(|holding| holding.chunk).collect();
        match Self::duplicates(holdings.iter().take(MAX_FDS).map(|holding| &holding.fd)) {
            Ok(fds) => {
                for epoch in epochs {
                    self.estate.note_importer(*epoch, slot);
                }
                self.answer(slot, call_id, Answer::Granted { chunks }, fds);
                true
            }
            Err(error) => {
                tracing::warn!(client = slot, %error, "no descriptors left");
                self.refuse(slot, call_id, Reason::Internal, format!("the owner has no descriptors left: {error}"));
                false
            }
        }
    }

    /// Asks further clients to trim: as many as could cover what is short, or all when half of the time is over.
    fn press(&mut self, pending: &mut Pending, device: u32, denial: &Denial, now: Instant) {
        let short = match denial {
            Denial::Arena(short) => *short,
            Denial::Driver(_) => pending.bytes,
            Denial::Client(_) | Denial::Window => {
                pending.widen = None;
                return;
            }
        };
        if self.estate.device(device).is_none_or(|books| matches!(denial, Denial::Arena(_)) && pending.bytes > books.row.limit) {
            return;
        }
        if !pending.told {
            pending.told = true;
            let row = self.estate.device(device).map_or((0, 0), |books| (books.row.limit, books.row.reserved));
            self.tell_listener(pending.slot, device, pending.bytes, row, false);
        }
        let all = pending.widen.is_none_or(|at| at <= now);
        if all {
            pending.widen = None;
        }
        if pending.awaited != 0 && !all {
            return;
        }
        let stuck = self.stuck(now);
        let mut slack = self.slack(device, pending);
        slack.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let mut covered = 0_u64;
        for (slot, bytes) in slack {
            if covered >= short && !all {
                break;
            }
            if stuck & 1 << slot != 0 {
                continue;
            }
            covered = covered.saturating_add(bytes);
            pending.awaited |= 1 << slot;
            let is_trim = |(asked, _): &(Asked, Instant)| matches!(asked, Asked::Trim(of) if *of == device);
            // Who has not answered the last one is not asked again: a stopped client must not drown in questions.
            if !self.client(slot).is_some_and(|client| client.asked.values().any(is_trim)) {
                pending.asked |= 1 << slot;
                self.ask(slot, Ask::Trim { device, bytes: bytes.min(short) }, Asked::Trim(device));
            }
        }
    }

    /// Clients that say that they do not use all that they have, with how much that is.
    fn slack(&self, device: u32, pending: &Pending) -> Vec<(u32, u64)> {
        let unit = self.estate.device(device).map_or(1, |books| books.served.info.granularity);
        let present = self.clients.iter().flatten().filter(|client| client.is_present() && !client.faulted);
        let others = present.map(|client| client.slot).filter(|slot| *slot != pending.slot && pending.asked & 1 << slot == 0);
        let slack = others.map(|slot| {
            let live = self.control.live(slot, device).and_then(|cell| cell.read()).unwrap_or_default();
            (slot, {
                let share = self.estate.share(slot, device);
                share.reserved.saturating_sub(share.adopted.saturating_add(live.allocated))
            })
        });
        slack.filter(|(_, bytes)| *bytes >= unit).collect()
    }

    /// Clients that let a whole bound pass without an answer: until it has come, nobody waits for them again.
    fn stuck(&self, now: Instant) -> u64 {
        let bound = Duration::from_millis(self.config.trim_timeout_ms);
        let stuck = self.clients.iter().flatten().filter(|client| client.is_present() && client.is_stuck(bound, now));
        stuck.fold(0, |all, client| all | 1 << client.slot)
    }

    /// Whether waiting may help.
    fn is_hopeful(&self, pending: &Pending, device: u32, denial: &Denial, now: Instant) -> bool {
        let Some(books) = self.estate.device(device) else { return false };
        let row = &books.row;
        let share = self.estate.share(pending.slot, device);
        let retired = || row.retired > 0 && self.estate.any_retired(device, self.stuck(now));
        match denial {
            Denial::Client(short) => share.retired >= *short && retired(),
            Denial::Window => share.retired > 0 && retired(),
            Denial::Driver(error) if !error.is_out_of_memory() => false,
            Denial::Arena(_) if pending.bytes > row.limit => false,
            Denial::Arena(_) | Denial::Driver(_) => {
                // Whoever has not answered, and is gone or cut off by now, is waited for no more.
                let dying = |slot: u32| {
                    self.client(slot).is_some_and(|client| !client.is_present()) && self.estate.share(slot, device).reserved > 0
                };
                let awaited = members(pending.awaited).any(|slot| self.client(slot).is_some_and(super::Client::is_present));
                awaited || pending.promised || retired() || row.orphaned > 0 || super::rows::slots().any(dying)
            }
        }
    }

    /// A client has answered that it gave so many bytes back.
    pub(super) fn trimmed(&mut self, slot: u32, device: u32, bytes: u64) {
        for pending in self.grows.get_mut(device as usize).into_iter().flatten() {
            pending.awaited &= !(1 << slot);
            pending.promised |= bytes > 0;
        }
        self.serve_grows(device, Instant::now());
    }

    /// Drops a client's waiting growths.
    pub(super) fn forget_grows(&mut self, slot: u32) {
        for queue in &mut self.grows {
            queue.retain(|pending| pending.slot != slot);
            queue.iter_mut().for_each(|pending| pending.awaited &= !(1 << slot));
        }
    }

    pub(super) fn call_over(&mut self, slot: u32) {
        if let Some(client) = self.client_mut(slot) {
            client.calls_kept = client.calls_kept.saturating_sub(1);
        }
    }

    fn deny(&mut self, pending: &Pending, device: u32, denial: &Denial) {
        let (slot, asked) = (pending.slot, pending.bytes);
        self.call_over(slot);
        if pending.press {
            self.estate.count_refusal(slot, device);
        }
        let Some(books) = self.estate.device(device) else { return };
        let (name, row, share) = (books.served.info.id, books.row, self.estate.share(slot, device));
        let arena = (row.limit, row.reserved);
        let (reason, message, (limit, reserved)) = match denial {
            Denial::Arena(short) => {
                let message = format!(
                    "The arena on {name} has {} reserved of its limit of {}; {} were asked, {} too many.",
                    human(row.reserved),
                    human(row.limit),
                    human(asked),
                    human(*short)
                );
                (Reason::OutOfMemory, message, arena)
            }
            Denial::Client(short) => {
                let reserved = share.reserved + share.retired;
                let message = format!(
                    "This client's own limit on {name} is {}, of which it has {} reserved; {} were asked, {} too many.",
                    human(share.limit),
                    human(reserved),
                    human(asked),
                    human(*short)
                );
                (Reason::OutOfMemory, message, (share.limit, reserved))
            }
            Denial::Window => {
                let size = books.served.window_bytes;
                let message = format!(
                    "This client's window on {name} is exhausted: no free range of {} in {}, of which {} are taken.",
                    human(asked),
                    human(size),
                    human(share.reserved + share.retired)
                );
                (Reason::OutOfMemory, message, (size, share.reserved + share.retired))
            }
            Denial::Driver(error) => {
                let (has, reason) = match error.is_out_of_memory() {
                    true => (format!("{name} is full, though the arena has"), Reason::OutOfMemory),
                    false => (format!("On {name} the owner has"), Reason::Internal),
                };
                let message = format!(
                    "{has} {} reserved of its limit of {}; {} were asked, and the driver says {error}.",
                    human(row.reserved),
                    human(row.limit),
                    human(asked)
                );
                (reason, message, arena)
            }
        };
        let holders = self.holders(device);
        let message = format!("{message} {}", holders::sentence(&holders));
        if pending.press && reason == Reason::OutOfMemory {
            self.tell_listener(slot, device, asked, (limit, reserved), true);
        }
        self.answer(slot, pending.call_id, Answer::Refused { reason, message, asked, limit, reserved, holders }, Vec::new());
    }

    /// Who has most of a device.
    fn holders(&self, device: u32) -> Vec<Holder> {
        let holder = |client: &super::Client| {
            let share = self.estate.share(client.slot, device);
            Holder { name: client.name.clone(), pid: client.pid, reserved: share.reserved + share.retired }
        };
        holders::largest(self.clients.iter().flatten().map(holder))
    }
}
