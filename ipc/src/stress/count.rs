//! What is counted from outside: the ledger beside the owner's own files, descriptors, and how fast the dead are gone.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond_allocator::timeline::POISON;
use rustix::event::{poll, PollFd, PollFlags};

use super::supervisor::{Heard, Supervisor, BOUND};
use crate::control::ClientState;
use crate::observer::Observer;

/// What the driver's own share of a card may change by.
const CARD_NOISE: u64 = 64 << 20;

impl Supervisor<'_> {
    /// What the ledger says when nobody uses anything, beside what can be seen from outside.
    pub(super) fn look_at_the_books(&mut self) -> Result<(), String> {
        let until = Instant::now() + Duration::from_secs(5);
        loop {
            let ledger = self.observer.ledger();
            let mut wrong = Vec::new();
            let mut bytes = 0;
            for device in &ledger.devices {
                let mut sum = device.retired + device.orphaned;
                for client in &device.clients {
                    sum += client.reserved;
                    let said = client.allocated + client.leased_in + client.leased_out;
                    if said > 0 && client.state == "alive" {
                        bytes += said;
                        wrong.push(format!(
                            "the ledger says that {} uses {} bytes, lends {} and holds {}: it uses nothing",
                            client.name, client.allocated, client.leased_out, client.leased_in
                        ));
                    }
                }
                if sum != device.reserved {
                    bytes += sum.abs_diff(device.reserved);
                    wrong.push(format!("the ledger's parts of {} are {sum} bytes, the whole {}", device.id, device.reserved));
                }
            }
            let reserved: u64 = ledger.devices.iter().map(|device| device.reserved).sum();
            if let Some(outside) = self.memory_of_owner().filter(|outside| *outside != reserved) {
                bytes += outside.abs_diff(reserved);
                wrong.push(format!("the ledger says {reserved} bytes, the owner's files have {outside}"));
            }
            if wrong.is_empty() {
                return Ok(());
            }
            if Instant::now() > until {
                self.report.leaked_bytes += bytes;
                wrong.into_iter().for_each(|what| self.report.finding(what));
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(super) fn finish(&mut self, heard: &Receiver<Heard>, fds: usize) -> Result<(), String> {
        self.lives.iter_mut().for_each(|life| drop(life.stdin.take()));
        let until = Instant::now() + BOUND;
        while self.lives.iter().any(|life| !life.over) || self.release.len() < self.killed.len() {
            self.hear(heard, Duration::from_millis(20))?;
            if Instant::now() > until {
                let left = self.lives.iter().filter(|life| !life.over).count();
                if left > 0 {
                    self.report.hung += left as u64;
                    self.report.finding(format!("{left} workers do not end"));
                }
                break;
            }
        }
        let until = Instant::now() + Duration::from_secs(5);
        loop {
            let reserved: u64 = self.observer.ledger().devices.iter().map(|device| device.reserved).sum();
            let more = self.fds_of_owner().saturating_sub(fds);
            let card = self.left_on_the_card();
            if (reserved, more, card) == (0, 0, 0) {
                return Ok(());
            }
            if Instant::now() > until {
                self.report.leaked_bytes += reserved.max(card);
                self.report.leaked_fds += more as u64;
                self.report.finding(format!(
                    "nobody is left, {reserved} bytes are reserved, the owner has {more} descriptors more than before, and the driver counts \
                     {card} bytes more on the card"
                ));
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(super) fn fds_of_owner(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.owner.id())).map_or(0, Iterator::count)
    }

    /// What the driver counts as used on the GPUs, and whether any process is on them. `None` where NVML does not say.
    pub(super) fn card(&self) -> Option<(u64, bool)> {
        let nvml = self.nvml.as_ref()?;
        let ledger = self.observer.ledger();
        let gpus = ledger.devices.iter().filter(|device| !device.is_host());
        let usages: Vec<_> = gpus.map(|device| nvml.usage(&device.id, device.reserved)).collect::<Result<_, _>>().ok()?;
        Some((usages.iter().map(|usage| usage.used).sum(), usages.iter().any(|usage| !usage.processes.is_empty())))
    }

    /// Bytes that the driver counts beyond what was used before, where nobody is on the card who could have them.
    fn left_on_the_card(&self) -> u64 {
        match (self.card_before, self.card()) {
            (Some(before), Some((used, false))) => Some(used.saturating_sub(before)).filter(|more| *more > CARD_NOISE).unwrap_or(0),
            _ => 0,
        }
    }

    /// Bytes of the chunks' files that the owner has open. On a GPU they are not files.
    fn memory_of_owner(&self) -> Option<u64> {
        if self.options.cuda {
            return None;
        }
        let fds = std::fs::read_dir(format!("/proc/{}/fd", self.owner.id())).ok()?;
        let size = |entry: std::fs::DirEntry| {
            let target = std::fs::read_link(entry.path()).ok()?;
            let target = target.to_string_lossy();
            let chunk = target.contains("memfd:") && !target.contains("millpond-control");
            chunk.then(|| entry.path().metadata().map(|data| data.len()).ok()).flatten()
        };
        Some(fds.filter_map(Result::ok).filter_map(size).sum())
    }
}

/// Waits for a process to end, and measures what follows in the control memory.
pub(super) fn mourn(observer: Arc<Observer>, sender: Sender<Heard>, id: u64, pidfd: OwnedFd, slot: u32, serial: u64) {
    std::thread::spawn(move || {
        while poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], None).is_err() {}
        let gone = Instant::now();
        let control = observer.control();
        let until = |condition: &dyn Fn() -> bool, pause: Duration| {
            while !condition() {
                if gone.elapsed() > BOUND {
                    return None;
                }
                std::thread::sleep(pause);
            }
            Some(gone.elapsed().as_secs_f64())
        };
        let row = || control.client(slot).and_then(|cell| cell.read());
        let another = || row().is_some_and(|row| row.serial != serial);
        let poisoned = || control.timelines(slot).and_then(|words| words.last()).is_some_and(|word| word.value() >= POISON);
        let released = until(&|| poisoned() || another(), Duration::from_micros(20));
        let vacated = || row().is_some_and(|row| row.serial != serial || ClientState::from_word(row.state) == ClientState::Gone);
        let reclaimed = until(&vacated, Duration::from_micros(200));
        let _ = sender.send(Heard::Buried(id, released.map(|s| s * 1e6), reclaimed.map(|s| s * 1e3)));
    });
}
