//! A snapshot of the ledger of 64 clients.

use std::time::{Duration, Instant};

use millpond_ipc::client::{Client, Options};
use millpond_ipc::control::MAX_CLIENTS;
use millpond_ipc::observer::Observer;

use super::party::{text, Owner};
use super::sample::Sample;
use super::{Figures, Plan};

pub(super) fn measure(plan: &Plan<'_>) -> Figures {
    let owner = Owner::start(plan, &[])?;
    let mut clients = Vec::new();
    for n in 0..MAX_CLIENTS {
        let options = Options::new(owner.socket.clone(), owner.key.clone(), format!("client {n}"));
        clients.push(Client::attach(&options).map_err(|error| format!("client {n}: {error}"))?);
    }
    let observer = Observer::connect(&owner.socket, &owner.key, Duration::from_secs(5)).map_err(text)?;
    let (mut rows, mut text_of) = (Sample::new()?, Sample::new()?);
    let count = plan.pick(2_000, 20_000);
    for turn in 0..count + count / 10 {
        let start = Instant::now();
        let ledger = observer.ledger();
        let took = start.elapsed();
        let seen = ledger.devices.first().map_or(0, |device| device.clients.len());
        if seen != clients.len() {
            return Err(format!("{seen} of {} clients are in the ledger", clients.len()));
        }
        let start = Instant::now();
        let json = serde_json::to_string(&ledger).map_err(text)?;
        if turn >= count / 10 && !json.is_empty() {
            rows.add(took);
            text_of.add(start.elapsed());
        }
    }
    let named = [("snapshot of 64 clients", rows), ("the same as JSON, besides", text_of)];
    Ok(named.into_iter().map(|(name, sample)| (name.to_owned(), sample.json())).collect())
}
