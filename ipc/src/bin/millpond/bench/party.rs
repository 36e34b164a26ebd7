//! What parts work with: an owner, clients of it in this process, and a worker process.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use millpond_allocator::driver::{Driver as DriverTrait, Stream};
use millpond_allocator::heap::Heap;
use millpond_ipc::client::{Channel, Client, Incoming, Message, Options, Outgoing, Place, ReceiveOptions, Way};
use millpond_ipc::wire::Role;
use serde_json::value::RawValue;
use serde_json::Value;

use super::{Driver, Plan};

pub(super) const KIB: u64 = 1 << 10;
pub(super) const MIB: u64 = 1 << 20;
pub(super) const GIB: u64 = 1 << 30;
/// How long a peer may take to answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// An error as text.
pub(super) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Ends with this process, or when dropped.
#[derive(Debug)]
struct Ours(Child);

impl Drop for Ours {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running owner.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) socket: PathBuf,
    pub(super) key: String,
    driver: Driver,
    process: Ours,
}

impl Owner {
    pub(super) fn start(plan: &Plan<'_>, args: &[&str]) -> Result<Self, String> {
        let parent = std::process::id().to_string();
        let mut command = Command::new(std::env::current_exe().map_err(text)?);
        command.args(["serve", "--driver", plan.driver.name(), "--parent-pid", &parent, "--json"]).args(args);
        if !plan.gpu() && !args.contains(&"--host-bytes") {
            // Memory of the host device is not touched before it is used.
            command.args(["--host-bytes", "128G"]);
        }
        let mut child = Ours(command.env_remove("MILLPOND_KEY").stdout(Stdio::piped()).spawn().map_err(text)?);
        let mut line = String::new();
        let stdout = child.0.stdout.take().ok_or("the owner has no stdout")?;
        BufReader::new(stdout).read_line(&mut line).map_err(text)?;
        let ready: Value = serde_json::from_str(&line).map_err(|error| format!("the owner said {line:?}: {error}"))?;
        let field = |name: &str| ready.get(name).and_then(Value::as_str).map(str::to_owned);
        let (Some(socket), Some(key)) = (field("socket"), field("key")) else {
            let why = ready.pointer("/error/message").and_then(Value::as_str).unwrap_or(&line);
            return Err(format!("no owner: {why}"));
        };
        Ok(Self { socket: socket.into(), key, driver: plan.driver, process: child })
    }

    pub(super) fn attach(&self, name: &str, role: Role) -> Result<Party, String> {
        Party::attach(self.socket.clone(), self.key.clone(), name, role, self.driver)
    }

    /// Starts a worker process and accepts its channel.
    pub(super) fn worker(&self, parent: &Party) -> Result<Worker, String> {
        let mut command = Command::new(std::env::current_exe().map_err(text)?);
        command.args(["bench", "--worker", "worker", "--driver", self.driver.name()]);
        command.env("MILLPOND_SOCKET", &self.socket).env("MILLPOND_KEY", &self.key);
        // As Arena.worker_env() does.
        if std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
            command.env("CUDA_DEVICE_MAX_CONNECTIONS", "8");
        }
        let process = Ours(command.spawn().map_err(text)?);
        let channel = parent.client.accept(PATIENCE).map_err(|error| format!("the worker did not come: {error}"))?;
        Ok(Worker { channel, _process: process })
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Asked first, so that it removes its directory.
        if let Ok(pid) = i32::try_from(self.process.0.id()) {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
                let _ = self.process.0.wait();
            }
        }
    }
}

/// A worker process and the channel to it.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) channel: Channel,
    _process: Ours,
}

/// This process, attached: one device of it, and a stream there.
#[derive(Debug)]
pub(super) struct Party {
    pub(super) client: Arc<Client>,
    pub(super) driver: Arc<dyn DriverTrait>,
    pub(super) heap: Arc<Heap>,
    place: Place,
    pub(super) stream: Stream,
    gpu: bool,
}

impl Party {
    fn attach(socket: PathBuf, key: String, name: &str, role: Role, driver: Driver) -> Result<Self, String> {
        let client = Client::attach(&Options { role, ..Options::new(socket, key, name.to_owned()) }).map_err(text)?;
        let gpu = driver == Driver::Cuda;
        let place = if gpu { Place::Ordinal(0) } else { Place::Host };
        let (heap, driver) = (client.heap(place).map_err(text)?, client.driver(place).map_err(text)?);
        let stream = driver.stream_create().map_err(text)?;
        Ok(Self { client, driver, heap, place, stream, gpu })
    }

    pub(super) fn outgoing(&self, addr: u64, bytes: u64) -> Outgoing {
        Outgoing {
            addr,
            bytes,
            place: self.place,
            stream: self.gpu.then_some(self.stream),
            import: None,
            read_only: false,
            way: Way::Found,
        }
    }

    pub(super) fn send(&self, channel: &Channel, tensors: &[Outgoing]) -> Result<(), String> {
        let tree = RawValue::from_string("0".to_owned()).map_err(text)?;
        self.client.send(channel, tree, tensors, Some(PATIENCE)).map(drop).map_err(text)
    }

    /// The next message; nothing is mapped yet.
    pub(super) fn receive(&self, channel: &Channel, timeout: Duration) -> Result<Message, String> {
        let options = ReceiveOptions { timeout: Some(timeout), lazy: true, wait: false, stream: &|_| None };
        self.client.receive(channel, &options).map_err(text)
    }

    /// Maps what came, ordered on our stream (on the host: when it is ready).
    pub(super) fn open(&self, incoming: &Incoming) -> Result<u64, String> {
        self.client.open_import(incoming.import, self.gpu.then_some(self.stream), false, Some(PATIENCE)).map_err(text)
    }
}

/// The other process: imports what comes, lets go of it, answers; until the channel ends.
pub(super) fn work(name: &str, driver: Driver) -> Result<(), String> {
    let variable = |name: &str| std::env::var(name).map_err(|_| format!("{name} is not set"));
    let party = Party::attach(variable("MILLPOND_SOCKET")?.into(), variable("MILLPOND_KEY")?, name, Role::Worker, driver)?;
    let channel = party.client.connect("parent", PATIENCE).map_err(text)?;
    while let Ok(message) = party.receive(&channel, Duration::from_secs(600)) {
        for tensor in &message.tensors {
            party.open(tensor)?;
            party.client.release(tensor.import).map_err(text)?;
        }
        party.send(&channel, &[])?;
    }
    Ok(())
}
