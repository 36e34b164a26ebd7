//! What is counted from outside: the ledger beside the owner's own files, descriptors, and how fast the dead are gone.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond_allocator::timeline::POISON;
use rustix::event::{poll, PollFd, PollFlags};

use super::supervisor::{Heard, Supervisor, BOUND};
use crate::control::ClientState;
use crate::nvml::Usage;
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
            let outside = self.left_outside();
            // What was not known before the run will not be known after it.
            let settled = outside == Ok(0) || self.options.cuda && self.card_before.is_err();
            if ((reserved, more) != (0, 0) || !settled) && Instant::now() <= until {
                std::thread::sleep(Duration::from_millis(10));
                continue;
            }
            let left = outside.as_ref().copied().unwrap_or(0);
            if (reserved, more, left) != (0, 0, 0) {
                self.report.leaked_bytes += reserved.max(left);
                self.report.leaked_fds += more as u64;
                self.report.finding(format!(
                    "nobody is left, {reserved} bytes are reserved, the owner has {more} descriptors more than before, and {left} bytes are left \
                     by a count from outside"
                ));
            }
            if let Err(reason) = &outside {
                eprintln!("stress: memory was not checked from outside: {reason}");
            }
            (self.report.outside_bytes, self.report.outside_not_checked) = (outside.as_ref().ok().copied(), outside.err());
            return Ok(());
        }
    }

    pub(super) fn fds_of_owner(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.owner.id())).map_or(0, Iterator::count)
    }

    /// What the driver counts as used on the GPUs, where no process is on them whose memory it might be; else why nobody can say.
    pub(super) fn card(&self) -> Result<u64, String> {
        let nvml = self.nvml.as_ref().map_err(Clone::clone)?;
        let ledger = self.observer.ledger();
        let gpus = ledger.devices.iter().filter(|device| !device.is_host());
        let usages: Vec<_> = gpus.map(|device| nvml.usage(&device.id, device.reserved)).collect::<Result<_, _>>()?;
        used_by_nobody(&usages)
    }

    /// Bytes that are there beyond what was before, counted from outside; else why nobody can say.
    fn left_outside(&self) -> Result<u64, String> {
        if !self.options.cuda {
            return self.memory_of_owner().ok_or_else(|| "the owner's descriptors in /proc cannot be read".to_owned());
        }
        let before = self.card_before.clone()?;
        Ok(Some(self.card()?.saturating_sub(before)).filter(|more| *more > CARD_NOISE).unwrap_or(0))
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

fn used_by_nobody(usages: &[Usage]) -> Result<u64, String> {
    let processes: usize = usages.iter().map(|usage| usage.processes.len()).sum();
    match processes {
        0 => Ok(usages.iter().map(|usage| usage.used).sum()),
        n => Err(format!("processes are on the card ({n}): what they use cannot be told from what was left")),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvml::ProcessUsage;

    #[test]
    fn a_card_that_others_use_says_nothing() {
        let usage = |processes| Usage { total: 9, free: 2, used: 7, outside: 0, processes };
        assert_eq!(used_by_nobody(&[usage(Vec::new()), usage(Vec::new())]), Ok(14));
        let shared = used_by_nobody(&[usage(Vec::new()), usage(vec![ProcessUsage { pid: 3, used: None }])]);
        assert!(shared.unwrap_err().contains("processes are on the card (1)"));
    }
}
