//! What parts work with: an owner, clients of it, and worker processes.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use millpond_allocator::driver::{Driver, Stream};
use millpond_allocator::heap::Heap;
use millpond_ipc::client::{Channel, Client, Incoming, Message, Options, Outgoing, Place, ReceiveOptions, Way};
use millpond_ipc::wire::Role;
use millpond_tests::flags::Flags;
use millpond_tests::lines::{Lines, Next};
use serde_json::value::RawValue;
use serde_json::Value;

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;
/// How long a peer may take to answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// How this run is.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) driver: String,
    pub(crate) quick: bool,
    program: String,
}

impl Bench {
    pub(crate) fn new(flags: &Flags) -> Result<Self, String> {
        Ok(Self { driver: flags.value("driver").unwrap_or("host").to_owned(), quick: flags.has("quick"), program: flags.read("owner")? })
    }

    pub(crate) fn gpu(&self) -> bool {
        self.driver == "cuda"
    }

    /// One of two, the first in a quick run.
    pub(crate) fn pick<T>(&self, quick: T, full: T) -> T {
        if self.quick {
            quick
        } else {
            full
        }
    }

    /// Starts an owner.
    pub(crate) fn owner(&self, arguments: &[&str]) -> Result<Owner, String> {
        let parent = std::process::id().to_string();
        let mut command = Command::new(&self.program);
        command.args(["serve", "--driver", &self.driver, "--parent-pid", &parent, "--json"]).args(arguments);
        if !self.gpu() {
            // The host device's memory is not touched before it is used.
            command.args(["--host-bytes", "128G"]);
        }
        let mut process = Lines::of(&mut command)?;
        match process.next(PATIENCE) {
            Next::Line(line) => {
                let said: Value = serde_json::from_str(&line).map_err(|error| format!("the owner said {line:?}: {error}"))?;
                let text = |key: &str| said[key].as_str().map(str::to_owned).ok_or_else(|| format!("the owner said {line}"));
                Ok(Owner { socket: text("socket")?.into(), key: text("key")?, gpu: self.gpu(), driver: self.driver.clone(), process })
            }
            Next::Silent => Err(format!("the owner said nothing for {PATIENCE:?}")),
            Next::Ended(how) => Err(format!("the owner {how}")),
        }
    }
}

/// A running owner. Ends when dropped.
#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) socket: PathBuf,
    pub(crate) key: String,
    gpu: bool,
    driver: String,
    process: Lines,
}

impl Owner {
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Attaches this process.
    pub(crate) fn attach(&self, name: &str, role: Role) -> Result<Party, String> {
        Party::attach(self.socket.clone(), self.key.clone(), name, role, self.gpu)
    }

    /// Starts a worker process and accepts its channel.
    pub(crate) fn worker(&self, parent: &Party, name: &str) -> Result<Worker, String> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(program);
        command.args(["--worker", name, "--driver", &self.driver, "--socket"]).arg(&self.socket).env("MILLPOND_KEY", &self.key);
        // As Arena.worker_env() does.
        if std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
            command.env("CUDA_DEVICE_MAX_CONNECTIONS", "8");
        }
        let process = Lines::of(&mut command)?;
        let channel = parent.client.accept(PATIENCE).map_err(|error| format!("the worker {name} did not come: {error}"))?;
        Ok(Worker { process, channel })
    }
}

/// A worker process and the channel to it.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) process: Lines,
    pub(crate) channel: Channel,
}

/// This process, attached: one device of it, and a stream there.
#[derive(Debug)]
pub(crate) struct Party {
    pub(crate) client: Arc<Client>,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) heap: Arc<Heap>,
    pub(crate) place: Place,
    pub(crate) stream: Stream,
    pub(crate) gpu: bool,
}

impl Party {
    pub(crate) fn attach(socket: PathBuf, key: String, name: &str, role: Role, gpu: bool) -> Result<Self, String> {
        let options = Options { role, ..Options::new(socket, key, name.to_owned()) };
        let client = Client::attach(&options).map_err(|error| format!("attach: {error}"))?;
        let place = if gpu { Place::Ordinal(0) } else { Place::Host };
        let heap = client.heap(place).map_err(text)?;
        let driver = client.driver(place).map_err(text)?;
        let stream = driver.stream_create().map_err(text)?;
        Ok(Self { client, driver, heap, place, stream, gpu })
    }

    pub(crate) fn outgoing(&self, addr: u64, bytes: u64) -> Outgoing {
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

    pub(crate) fn send(&self, channel: &Channel, tree: &str, tensors: &[Outgoing]) -> Result<(), String> {
        let tree = RawValue::from_string(tree.to_owned()).map_err(text)?;
        self.client.send(channel, tree, tensors, Some(PATIENCE)).map(drop).map_err(text)
    }

    /// The next message; nothing is mapped yet.
    pub(crate) fn receive(&self, channel: &Channel, timeout: Duration) -> Result<Message, String> {
        let options = ReceiveOptions { timeout: Some(timeout), lazy: true, wait: false, stream: &|_| None };
        self.client.receive(channel, &options).map_err(text)
    }

    /// Maps what came, ordered on our stream (on the host: when it is ready). Its address.
    pub(crate) fn open(&self, incoming: &Incoming) -> Result<u64, String> {
        self.client.open_import(incoming.import, self.gpu.then_some(self.stream), false, Some(PATIENCE)).map_err(text)
    }

    /// Asks a worker and waits for its answer.
    pub(crate) fn ask(&self, channel: &Channel, tree: &str, tensors: &[Outgoing]) -> Result<Value, String> {
        self.send(channel, tree, tensors)?;
        let answer = self.receive(channel, PATIENCE)?;
        let value: Value = serde_json::from_str(answer.tree.get()).map_err(text)?;
        match value.get("error").and_then(Value::as_str) {
            Some(error) => Err(format!("in the worker: {error}")),
            None => Ok(value),
        }
    }

    pub(crate) fn synchronize(&self) -> Result<(), String> {
        self.driver.stream_synchronize(self.stream).map_err(text)
    }
}

/// An error as text.
pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Says where a part is, for when it hangs.
pub(crate) fn at(step: impl std::fmt::Display) {
    println!("at {step}");
}

/// Bytes for people.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        b if b >= GIB => format!("{}GiB", b / GIB),
        b if b >= MIB => format!("{}MiB", b / MIB),
        b => format!("{}KiB", b / KIB),
    }
}
