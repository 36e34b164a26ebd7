//! The client's own threads: one reads from the owner, one tends: beats, looks what is done, answers the owner.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use millpond_allocator::driver::CuResult;

use super::device::{Device, Opened};
use super::error::Error;
use super::link::Notice;
use super::record;
use super::{Client, OnOwnerDeath};
use crate::control::Cause;
use crate::wire::{Ask, Peer, Request};

/// Between beats when nothing is going on.
const IDLE: Duration = Duration::from_millis(200);
/// While others hold blocks of ours.
const LENT: Duration = Duration::from_millis(20);
/// While something waits to be let go: what two looks see gets an event of its own.
const PARTING: Duration = Duration::from_millis(1);
/// How often that doubles while messages come and go, and each lets go of what the one before has brought.
const FLOWING: u32 = 2;

/// What a look came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// Something waits to be let go, and may have to wait for us.
    Staying,
    /// Something does that did not at the last look, and messages have let go of what others brought since.
    Passing,
    /// Others hold something of ours, or something else is to be looked after.
    Lent,
    Nothing,
}

/// How soon the next look follows.
#[derive(Debug, Default)]
struct Pace {
    /// Looks, one after the other, that found [`Found::Passing`].
    passing: u32,
}

impl Pace {
    fn after(&mut self, found: Found) -> Duration {
        let passing = self.passing;
        self.passing = if found == Found::Passing { (passing + 1).min(FLOWING) } else { 0 };
        match found {
            Found::Staying => PARTING,
            Found::Passing => PARTING * (1 << passing),
            Found::Lent => LENT,
            Found::Nothing => IDLE,
        }
    }
}

pub(super) fn start(client: &Arc<Client>, on_owner_death: OnOwnerDeath) -> Result<(), Error> {
    let (sender, notices) = channel();
    let link = client.shared.link.clone();
    link.notify(sender);
    let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
        thread::Builder::new()
            .name(name.to_owned())
            .stack_size(512 << 10)
            .spawn(body)
            .map_err(|error| Error::Internal(format!("no thread: {error}")))
    };
    let weak = Arc::downgrade(client);
    let threads = [
        spawn("millpond-read", Box::new(move || link.read()))?,
        spawn("millpond-tend", Box::new(move || tend(&weak, &notices, on_owner_death)))?,
    ];
    client.threads.lock().extend(threads);
    Ok(())
}

fn tend(client: &Weak<Client>, notices: &Receiver<Notice>, on_owner_death: OnOwnerDeath) {
    let (mut pause, mut pace) = (IDLE, Pace::default());
    let mut ticked = Instant::now();
    loop {
        let notice = notices.recv_timeout(pause.saturating_sub(ticked.elapsed()));
        let Some(client) = client.upgrade() else { return };
        match notice {
            Ok(Notice::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            Ok(Notice::Ask(id, ask)) => client.answer(id, &ask),
            Ok(Notice::OwnerDied) if on_owner_death == OnOwnerDeath::Exit => {
                tracing::warn!("the owner has ended: so does this process, as it was told to");
                let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM);
            }
            Ok(Notice::OwnerDied) => client.owner_died(),
            Ok(Notice::PeerEnded) => drop(client.attend_wake()),
            Ok(Notice::Soon) => pause = PARTING,
            Err(RecvTimeoutError::Timeout) => {}
        }
        // However many notices come, ticks are not put off.
        if ticked.elapsed() >= pause {
            pause = pace.after(client.tick());
            ticked = Instant::now();
        }
    }
}

impl Client {
    /// Something was let go of: the tender looks soon. Never blocks, and costs nothing while the tender looks often anyway: to wake
    /// a thread takes longer than all else of a release.
    pub(super) fn nudge(&self) {
        if self.nudged.is_news() {
            self.shared.link.notice(Notice::Soon);
        }
    }

    /// Looks after everything.
    fn tick(&self) -> Found {
        if let Some(beat) = self.shared.control.beat(self.shared.me) {
            beat.store(crate::control::now_ms(), Ordering::Relaxed);
        }
        self.shared.leases.reap();
        let flows = self.imports.has_flowed();
        let stays = self.tick_devices() || !flows;
        let alone = self.attend_wake();
        self.nudged.look();
        match (self.imports.any_parting(), self.shared.leases.len()) {
            (true, _) => {
                self.nudged.looks_soon();
                if stays {
                    Found::Staying
                } else {
                    Found::Passing
                }
            }
            (false, 0) if !alone && !self.owes() => Found::Nothing,
            (false, _) => Found::Lent,
        }
    }

    /// Whether something is to go back to the owner when work is over.
    pub(super) fn owes(&self) -> bool {
        self.devices.iter().filter_map(Device::if_open).any(|opened| opened.heap.owed() > 0)
    }

    /// Whether something that was let go of was found at the last look too.
    pub(super) fn tick_devices(&self) -> bool {
        let mut stays = false;
        for opened in self.devices.iter().filter_map(Device::if_open) {
            self.probe(opened);
            stays |= self.imports.tick(opened);
            opened.tick(|window, chunk| self.imports.uses(window, chunk, None), |window| self.imports.holds_in(window));
            opened.heap.tick();
            opened.heap.set_leased_in(self.imports.bytes_on(opened.index));
        }
        stays
    }

    /// Says once that a context is dead: nothing that this process was to signal on it ever will be.
    fn probe(&self, opened: &Opened) {
        let Err(error) = opened.probe() else { return };
        if !error.result().is_some_and(CuResult::is_sticky) || opened.faulted.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::error!(%error, "this process's context is dead");
        let timelines = opened.timelines.written();
        if self.shared.link.tell(Request::Faulted { device: opened.index, timelines: timelines.clone() }).is_err() {
            let _ = self.shared.control.poison_some(self.shared.me, &timelines);
        }
    }

    fn answer(&self, id: u64, ask: &Ask) {
        let bytes = match ask {
            Ask::Trim { device, bytes } => {
                self.shared.leases.reap();
                let bytes = self.device_at(*device).ok().and_then(Device::if_open).map_or(0, |opened| opened.heap.give_way(*bytes));
                if bytes > 0 {
                    // Some of it may be on its way.
                    self.nudge();
                }
                bytes
            }
            Ask::Revoke { window, epochs } => {
                let uses = |chunk: &_| self.imports.uses(*window, chunk, None);
                self.devices.iter().filter_map(Device::if_open).map(|opened| opened.revoke(*window, epochs, uses)).sum()
            }
            Ask::Died { peer, cause } => return self.peer_died(peer, *cause),
            Ask::Pressure { device, by, asked, limit, reserved, refused } => {
                let kind = if *refused { "refusal" } else { "pressure" };
                if let Ok(device) = self.device_at(*device) {
                    self.shared.events.push(kind, &device.grant.device, by.clone(), (*asked, *limit, *reserved));
                }
                return;
            }
            Ask::Goodbye => return,
        };
        let _ = self.shared.link.answer(id, bytes);
    }

    fn peer_died(&self, peer: &Peer, cause: Option<Cause>) {
        record::died(peer);
        self.imports.died(peer, cause);
        self.office.died(peer);
        // The count before the look: see `window`.
        self.deaths.fetch_add(1, Ordering::AcqRel);
        self.office.forget(peer.serial);
        self.forget_windows(peer.serial);
        self.shared.events.push_death(peer.clone(), cause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_follow_less_often_while_messages_flow_and_at_once_when_one_stays() {
        let mut pace = Pace::default();
        let pauses = |pace: &mut Pace, found: &[Found]| found.iter().map(|found| pace.after(*found)).collect::<Vec<_>>();
        let flow = pauses(&mut pace, &[Found::Passing; 5]);
        assert_eq!(flow, [1, 2, 4, 4, 4].map(|times| PARTING * times));
        assert_eq!(pauses(&mut pace, &[Found::Staying, Found::Passing, Found::Passing]), [PARTING, PARTING, PARTING * 2]);
        assert_eq!(pauses(&mut pace, &[Found::Lent, Found::Nothing, Found::Passing]), [LENT, IDLE, PARTING]);
    }
}
