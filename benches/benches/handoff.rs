//! A value handed from one client to another in one thread: what a hand-off costs on the CPU, by the chunks that it touches.
#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion};
use millpond_ipc::client::{Channel, Client, Options, Outgoing, Place, ReceiveOptions, Way};
use millpond_ipc::owner::{Config, DriverChoice, Inline, Limit};
use millpond_ipc::wire::Role;
use serde_json::value::RawValue;

const PATIENCE: Duration = Duration::from_secs(10);
const CHUNK: u64 = 2 << 20;

struct Pair {
    sender: Arc<Client>,
    receiver: Arc<Client>,
    out: Channel,
    back: Channel,
    _owner: Inline,
}

/// An owner of small chunks, and two clients with a channel between them, all in this process.
fn pair() -> Pair {
    let config = Config {
        driver: DriverChoice::Host,
        chunk_bytes: Some(CHUNK),
        host_bytes: Some(16 << 30),
        limit: Limit::Percent(100.0),
        ..Config::default()
    };
    let owner = Inline::start(config).unwrap();
    let attach = |name: &str, role| {
        let options = Options::new(owner.socket().to_owned(), owner.key().to_owned(), name.to_owned());
        Client::attach(&Options { role, ..options }).unwrap()
    };
    let (receiver, sender) = (attach("receiver", Role::Parent), attach("sender", Role::Worker));
    let connecting = sender.clone();
    let connected = std::thread::spawn(move || connecting.connect("parent", PATIENCE).unwrap());
    let back = receiver.accept(PATIENCE).unwrap();
    Pair { sender, receiver, out: connected.join().unwrap(), back, _owner: owner }
}

impl Pair {
    fn hand_over(&self, tensor: Outgoing) {
        let tree = RawValue::from_string("0".to_owned()).unwrap();
        self.sender.send(&self.out, tree, &[tensor], Some(PATIENCE)).unwrap();
        let options = ReceiveOptions { timeout: Some(PATIENCE), lazy: true, wait: false, stream: &|_| None };
        let message = self.receiver.receive(&self.back, &options).unwrap();
        let import = message.tensors[0].import;
        self.receiver.open_import(import, None, false, Some(PATIENCE)).unwrap();
        self.receiver.release(import).unwrap();
    }
}

fn hand_overs(c: &mut Criterion) {
    let pair = pair();
    let heap = pair.sender.heap(Place::Host).unwrap();
    let mut group = c.benchmark_group("a hand-off: send, receive, map, let go");
    for chunks in [1, 8, 32, 512_u64] {
        let bytes = chunks * CHUNK;
        let addr = heap.allocate(bytes, millpond_allocator::driver::Stream::LEGACY).unwrap();
        let place = Place::Host;
        let tensor = Outgoing { addr, bytes, place, stream: None, import: None, read_only: false, way: Way::Found };
        group.bench_function(BenchmarkId::from_parameter(format!("{chunks} chunks")), |b| b.iter(|| pair.hand_over(tensor)));
        heap.free(addr).unwrap();
    }
    group.finish();
}

criterion_group!(benches, hand_overs);
criterion_main!(benches);
