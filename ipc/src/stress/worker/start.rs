//! A worker's life from start to end: it is told who it is, attaches, connects to the others, works until it is to drain.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond_allocator::driver::cuda::CudaPlatform;
use millpond_allocator::driver::{Driver, DriverError, Platform};
use parking_lot::Mutex;

use super::{say, Peers, Worker, BETWEEN};
use crate::client::{Client, Error, Options, Place};
use crate::stress::rig::Rig;
use crate::stress::Dice;

/// Works as the environment says: the body of the hidden subcommand.
#[must_use]
pub fn run() -> ExitCode {
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("odd {error}"));
            ExitCode::FAILURE
        }
    }
}

fn number(name: &str) -> Result<u64, String> {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).ok_or_else(|| format!("{name} is not set: this is for millpond stress"))
}

/// Makes the context that this process will work in: that takes longer than all the rest.
fn warm_up() -> Result<Option<Arc<dyn Driver>>, DriverError> {
    let platform = CudaPlatform::load()?;
    let Some(first) = platform.devices()?.into_iter().next() else { return Ok(None) };
    let driver = platform.open(first.id)?;
    driver.attach_context()?;
    Ok(Some(driver))
}

/// Waits to be told its place, its life's number and how often its like die. `None`: it is not needed.
fn told() -> Option<[u64; 3]> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).ok()?;
    let mut numbers = line.strip_prefix("be ")?.split_whitespace().map(|text| text.parse().ok());
    Some([numbers.next()??, numbers.next()??, numbers.next()??])
}

fn start() -> Result<(), String> {
    let (workers, seed) = (number("MILLPOND_STRESS_WORKERS")?, number("MILLPOND_STRESS_SEED")?);
    // Kept as long as the process: the context lives with it.
    let _warm = (number("MILLPOND_STRESS_CUDA")? == 1).then(warm_up).transpose().map_err(|error| error.to_string())?;
    let Some([me, life, kill_every]) = told() else { return Ok(()) };
    let var = |name: &str| std::env::var(name).map_err(|_| format!("{name} is not set"));
    let options = Options::new(var("MILLPOND_SOCKET")?.into(), var("MILLPOND_KEY")?, format!("w{me}"));
    let text = |error: Error| format!("{} {error}", error.code());
    let client = Client::attach(&options).map_err(text)?;
    let gpu = client
        .grants()
        .find_map(|grant| grant.device.parse().ok().filter(|id: &millpond_allocator::driver::DeviceId| id.host_number().is_none()));
    let place = gpu.map_or(Place::Host, Place::Device);
    let rig = Rig::new(client.driver(place).map_err(text)?).map_err(|error| error.to_string())?;
    let welcome = client.welcome();
    say(&format!("at {} {}", welcome.client, welcome.serial));
    let mut dice = Dice::new(seed ^ me.wrapping_mul(0x9e37_79b9) ^ life.wrapping_mul(0x85eb_ca6b_0000));
    let die_at = if kill_every == 0 { u64::MAX } else { 1 + dice.below(2 * kill_every) };
    let peers: Peers = Arc::new((0..workers).map(|_| Mutex::new(None)).collect());
    let draining = Arc::new(AtomicBool::new(false));
    connect_to_others(&client, &peers, me as usize, &draining);
    let stdin = watch_stdin(&draining);
    let _ = rustix::thread::set_name(BETWEEN);
    let mut worker = Worker {
        client,
        rig,
        peers,
        me: me as usize,
        dice,
        ops: 0,
        transfers: 0,
        die_at,
        due: None,
        said: Instant::now(),
        place,
        draining: false,
        quiet: Instant::now(),
        idle: false,
    };
    while !draining.load(Ordering::Acquire) {
        worker.turn().map_err(text)?;
    }
    (worker.die_at, worker.due) = (u64::MAX, None);
    worker.draining = true;
    while !stdin.is_finished() {
        worker.drain().map_err(text)?;
    }
    worker.client.detach();
    Ok(())
}

/// `drain` ends the work; the end of the file ends the worker.
fn watch_stdin(draining: &Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
    let draining = draining.clone();
    std::thread::spawn(move || {
        let lines = std::io::stdin().lines();
        lines.map_while(Result::ok).for_each(|_| draining.store(true, Ordering::Release));
        draining.store(true, Ordering::Release);
    })
}

/// One thread for each of the others keeps a channel to whoever has its name.
fn connect_to_others(client: &Arc<Client>, peers: &Peers, me: usize, draining: &Arc<AtomicBool>) {
    for other in (0..peers.len()).filter(|other| *other != me) {
        let (client, peers, draining) = (client.clone(), peers.clone(), draining.clone());
        std::thread::spawn(move || {
            while !draining.load(Ordering::Acquire) && client.owner_alive() {
                let Some(place) = peers.get(other) else { return };
                if place.lock().is_some() {
                    std::thread::sleep(Duration::from_millis(5));
                } else if let Ok(channel) = client.connect(&format!("w{other}"), Duration::from_millis(500)) {
                    *place.lock() = Some(Arc::new(channel));
                }
            }
        });
    }
}
