//! Tickets: a message for a receiver that is not known yet, as text that goes any way (a queue, a pipe, another system).
//!
//! Its holds are made for anybody. Whoever redeems it first becomes their receiver; a ticket for many keeps its own holds, and
//! each redeemer gets further ones beside them. A ticket ends when it is redeemed (for one), when it is cancelled, or when the
//! process that made it ends.

use std::sync::Arc;

use millpond_allocator::driver::DeviceInfo;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::channel::{Descriptor, Frame, NOWHERE};
use super::error::Error;
use super::lease::{cancel, place_forwarded, HoldRef};
use super::receive::{Message, ReceiveOptions};
use super::record::{self, now_if_on};
use super::send::Outgoing;
use super::Client;
use crate::control::{HoldState, HoldWord};
use crate::wire::Peer;

#[derive(Debug, Serialize, Deserialize)]
struct Ticket {
    /// The arena's boot token.
    token: String,
    from: Peer,
    many: bool,
    frame: Frame,
}

impl Client {
    /// A message for anybody. Returns its text, and which tensors had to be copied into the arena. `many`: it may be redeemed
    /// any number of times, until it is cancelled.
    ///
    /// # Errors
    /// As [`Client::send`].
    pub fn ticket(&self, tree: Box<RawValue>, tensors: &[Outgoing], many: bool) -> Result<(String, Vec<bool>), Error> {
        let at = now_if_on();
        let (mut draft, copied) = self.drafted(u32::from(HoldWord::ANYBODY), tensors)?;
        let from = Peer { client: self.shared.me, serial: self.welcome.serial, name: format!("process {}", self.pid), pid: self.pid };
        let ticket = Ticket { token: self.welcome.token.clone(), from, many, frame: draft.frame(tree) };
        match serde_json::to_string(&ticket) {
            Ok(text) => {
                record::sent(at, &ticket.frame.tensors, u32::from(HoldWord::ANYBODY));
                draft.sent(tensors.len());
                Ok((text, copied))
            }
            Err(error) => {
                draft.abandon();
                Err(Error::Internal(error.to_string()))
            }
        }
    }

    /// Takes a ticket's message up, without mapping anything.
    ///
    /// # Errors
    /// [`Error::Stale`] for one of another arena, one that was redeemed or cancelled, or whose maker has ended.
    pub fn redeem(&self, ticket: &str) -> Result<Message, Error> {
        self.check_alive()?;
        let mut ticket = self.read_ticket(ticket)?;
        let mut taken: Vec<HoldRef> = Vec::new();
        for descriptor in ticket.frame.tensors.iter_mut().filter(|descriptor| descriptor.window != NOWHERE) {
            match self.redeem_hold(descriptor, ticket.many) {
                Ok(hold) => {
                    descriptor.hold = (hold.producer, hold.index, hold.generation);
                    taken.push(hold);
                }
                Err(error) => {
                    taken.into_iter().for_each(|hold| self.imports.decline(hold));
                    return Err(error);
                }
            }
        }
        let stream = |_: &DeviceInfo| None;
        let options = ReceiveOptions { timeout: None, lazy: true, wait: false, stream: &stream };
        self.taken_up(ticket.frame, &options, &Arc::new(ticket.from))
    }

    /// Ends what is left of a ticket that this process made: nobody can redeem it any more. What was redeemed stays.
    ///
    /// # Errors
    /// [`Error::Stale`] for one of another arena.
    pub fn cancel_ticket(&self, ticket: &str) -> Result<(), Error> {
        self.check_alive()?;
        let ticket = self.read_ticket(ticket)?;
        for descriptor in ticket.frame.tensors.iter().filter(|descriptor| descriptor.window != NOWHERE) {
            let hold = descriptor.hold();
            let open = self.shared.control.hold(hold.producer, hold.index).map(|record| record.word());
            if open.is_some_and(|word| word.generation() == hold.generation && word.is_ticket_of(self.shared.me)) {
                cancel(&self.shared.control, hold);
            }
        }
        self.shared.leases.reap();
        Ok(())
    }

    fn read_ticket(&self, text: &str) -> Result<Ticket, Error> {
        let ticket: Ticket = serde_json::from_str(text).map_err(|error| Error::Protocol(format!("this is no ticket: {error}")))?;
        if ticket.token != self.welcome.token {
            return Err(Error::Stale(format!("the ticket is of another arena ({}, this one is {})", ticket.token, self.welcome.token)));
        }
        Ok(ticket)
    }

    fn redeem_hold(&self, descriptor: &Descriptor, many: bool) -> Result<HoldRef, Error> {
        let gone = || {
            Error::Stale(format!(
                "the ticket is not good any more: it was {} or cancelled, or the process that made it has ended",
                if many { "withdrawn" } else { "redeemed" }
            ))
        };
        let hold = descriptor.hold();
        let me = self.shared.me;
        let record = self.shared.control.hold(hold.producer, hold.index).ok_or_else(gone)?;
        if !many {
            return record.assign(hold.generation, me as u8).then_some(hold).ok_or_else(gone);
        }
        let word = record.word();
        if word.generation() != hold.generation || word.state() != HoldState::InFlight || word.receiver() != HoldWord::ANYBODY {
            return Err(gone());
        }
        let claim = record.claim().ok_or_else(gone)?;
        let made = place_forwarded(&self.shared.control, me, hold.producer, claim, me as u8)?;
        // Its maker may have cancelled it meanwhile, and given the bytes away.
        if !record.confirm_open(hold.generation) {
            cancel(&self.shared.control, made);
            return Err(gone());
        }
        Ok(made)
    }
}
