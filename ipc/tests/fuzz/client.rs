//! A client: an owner that says anything at the handshake and after it, and a peer that says anything on a channel.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use millpond_allocator::driver::{DeviceInfo, Stream};
use millpond_ipc::client::{Channel, Client, Options, Outgoing, Place, ReceiveOptions, Way};
use millpond_ipc::control::Control;
use millpond_ipc::wire::{send_frame, Answer, Ask, Chunk, DeviceGrant, FrameReader, FromOwner, Peer, Reason, Refusal, Welcome};
use serde_json::Value;

use crate::material::Dice;
use crate::raw::*;

fn json(message: &FromOwner) -> Value {
    serde_json::to_value(message).unwrap()
}

fn welcome() -> Welcome {
    let grant = DeviceGrant {
        device: "HOST-0".to_owned(),
        index: 0,
        name: "host memory".to_owned(),
        total: 1 << 30,
        limit: 1 << 30,
        granularity: UNIT,
        chunk_bytes: 4 * UNIT,
        window: 1,
        window_bytes: 1 << 30,
        handle_kind: "posix_fd".to_owned(),
    };
    let owner_pid = std::process::id();
    Welcome { client: 0, serial: 1, token: "0".repeat(32), owner_pid, pid_namespace: None, devices: vec![grant], fds: 1 }
}

fn corpus() -> Vec<Value> {
    let peer = || Peer { client: 1, serial: 2, name: "b".to_owned(), pid: 1 };
    let answers = [
        Answer::Granted { chunks: vec![Chunk { epoch: 1, offset: 0, bytes: UNIT }] },
        Answer::Released { bytes: UNIT, retired: 0 },
        Answer::Window { window: 1, device: 0, bytes: 1 << 30, peer: peer() },
        Answer::Channel { peer: peer() },
        Answer::Done,
        Answer::Refused { reason: Reason::OutOfMemory, message: "none".to_owned(), asked: 1, limit: 1, reserved: 1, holders: Vec::new() },
    ];
    // A client numbers its calls from one.
    let mut corpus: Vec<Value> = (1..)
        .zip(answers)
        .flat_map(|(n, answer)| {
            [n, 1, 2].map(|call_id| json(&FromOwner::Answer { call_id, answer: answer.clone(), fds: usize::from(call_id == 1) }))
        })
        .collect();
    let asks = [
        Ask::Trim { device: 0, bytes: 1 },
        Ask::Revoke { window: 1, epochs: vec![1] },
        Ask::Died { peer: peer(), cause: None },
        Ask::Goodbye,
    ];
    corpus.extend(asks.into_iter().map(|ask| json(&FromOwner::Ask { ask_id: 1, ask, fds: 0 })));
    corpus.push(json(&FromOwner::Welcome { welcome: welcome() }));
    let refused = Refusal { field: "key".to_owned(), expected: "a".to_owned(), found: "b".to_owned() };
    corpus.push(json(&FromOwner::Refused { refused }));
    corpus
}

/// One conversation of an owner that is none: a welcome, mostly a good one, and then anything.
fn false_owner(listener: &UnixListener, control: &Control, dice: &mut Dice, corpus: &[Value]) {
    let (stream, hello, mut reader) = loop {
        let (stream, mut reader) = (listener.accept().unwrap().0, FrameReader::default());
        // Earlier clients look whether there is an owner.
        if let Ok(hello) = reader.read_frame(stream.as_fd(), Some(PATIENCE), false) {
            break (stream, hello, reader);
        }
    };
    let hello: Value = serde_json::from_slice(&hello).unwrap();
    assert_eq!(hello["fds"], 1, "a client sends a pidfd of itself");
    let fds = reader.take_fds(1).unwrap();
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fds[0].as_raw_fd())).unwrap();
    assert!(info.contains(&format!("Pid:\t{}", std::process::id())), "{info}");
    if dice.percent(75) {
        let body = serde_json::to_vec(&FromOwner::Welcome { welcome: welcome() }).unwrap();
        let _ = send_frame(stream.as_fd(), &body, &[control.fd()], Some(Duration::from_secs(1)));
    }
    for _ in 0..1 + dice.below(8) {
        let frame = dice.frame(corpus);
        if !dice.write(stream.as_fd(), &frame) {
            break;
        }
    }
    // The client's calls come to an end: nobody is there.
    std::thread::sleep(Duration::from_millis(2));
}

#[test]
fn a_client_survives_an_owner_that_says_anything() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let control = Arc::new(Control::create([1, 2], std::process::id()).unwrap());
    let corpus = corpus();
    crate::campaign("client", 200, |seed| {
        let (mut dice, corpus, control) = (Dice(seed), corpus.clone(), control.clone());
        let listener = listener.try_clone().unwrap();
        let owner = std::thread::spawn(move || false_owner(&listener, &control, &mut dice, &corpus));
        let options = Options { timeout: Duration::from_millis(500), ..Options::new(path.clone(), "00".repeat(16), "c".to_owned()) };
        if let Ok(client) = Client::attach(&options) {
            // Each ends, with an answer or an error; the memory that it granted is not touched.
            let moment = Duration::from_millis(5);
            let _ = client.heap(Place::Host).map(|heap| heap.allocate(UNIT, Stream::LEGACY));
            let _ = client.connect("b", moment).map(|channel| channel.close());
            let _ = client.accept(moment);
            drop(client.ledger());
            drop(client);
        }
        owner.join().unwrap();
    });
}

#[test]
fn a_client_refuses_memory_that_is_shared_in_another_form() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let control = Control::create([1, 2], std::process::id()).unwrap();
    let mut plain = serde_json::to_value(welcome()).unwrap();
    assert!(plain["devices"][0].get("handle_kind").is_none(), "what is left out is posix_fd");
    for (kind, said) in [("fabric", "IMEX"), ("win32", "DuplicateHandle"), ("carrier pigeon", "no kind of handle")] {
        plain["devices"][0]["handle_kind"] = kind.into();
        let welcome: Welcome = serde_json::from_value(plain.clone()).unwrap();
        let error = std::thread::scope(|scope| {
            let (listener, control) = (&listener, &control);
            scope.spawn(move || {
                let (stream, mut reader) = (listener.accept().unwrap().0, FrameReader::default());
                reader.read_frame(stream.as_fd(), Some(PATIENCE), false).unwrap();
                let body = serde_json::to_vec(&FromOwner::Welcome { welcome }).unwrap();
                send_frame(stream.as_fd(), &body, &[control.fd()], Some(PATIENCE)).unwrap();
            });
            Client::attach(&Options::new(path.clone(), "00".repeat(16), "c".to_owned())).unwrap_err()
        });
        assert!(error.to_string().contains("HOST-0") && error.to_string().contains(said), "{error}");
    }
}

fn fd(channel: &Channel) -> BorrowedFd<'_> {
    // SAFETY: the channel outlives the borrow, and keeps its socket open.
    unsafe { BorrowedFd::borrow_raw(channel.raw_fd()) }
}

fn channels(a: &Client, b: &Client) -> (Channel, Channel) {
    std::thread::scope(|scope| {
        let to_b = scope.spawn(|| a.connect("b", PATIENCE).unwrap());
        let to_a = scope.spawn(|| b.connect("a", PATIENCE).unwrap());
        (to_b.join().unwrap(), to_a.join().unwrap())
    })
}

fn no_stream(_: &DeviceInfo) -> Option<Stream> {
    None
}

#[test]
fn a_client_survives_a_peer_that_says_anything_on_a_channel() {
    let served = Served::start(config());
    let attach = |name: &str| Client::attach(&Options::new(served.socket.clone(), served.key.clone(), name.to_owned())).unwrap();
    let (a, b, witness) = (attach("a"), attach("b"), served.attach("witness"));
    let heap = a.heap(Place::Host).unwrap();
    let addr = heap.allocate(UNIT, Stream::LEGACY).unwrap();
    let tree = || serde_json::value::RawValue::from_string("[1]".to_owned()).unwrap();
    let outgoing = Outgoing { addr, bytes: UNIT, place: Place::Host, stream: None, import: None, read_only: false, way: Way::Found };
    crate::campaign("channel", 150, |seed| {
        let mut dice = Dice(seed);
        let (to_b, to_a) = channels(&a, &b);
        // A real frame, whose hold is open, taken off the wire to be changed.
        a.send(&to_b, tree(), &[outgoing, outgoing], None).unwrap();
        let mut reader = FrameReader::default();
        let frame = reader.read_frame(fd(&to_a), Some(PATIENCE), false).unwrap();
        let corpus = [serde_json::from_slice(&frame).unwrap()];
        let bytes: Vec<u8> = (0..1 + dice.below(4)).flat_map(|_| dice.frame(&corpus)).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                dice.write(fd(&to_b), &bytes);
                to_b.close();
            });
            loop {
                let options =
                    ReceiveOptions { timeout: Some(Duration::from_secs(5)), lazy: seed % 2 == 0, wait: false, stream: &no_stream };
                match b.receive(&to_a, &options) {
                    Ok(message) => message.tensors.iter().for_each(|tensor| b.release(tensor.import).unwrap()),
                    Err(millpond_ipc::client::Error::Closed(_)) => break,
                    Err(millpond_ipc::client::Error::Timeout(text)) => panic!("the end of the channel was not seen: {text}"),
                    Err(_) => {}
                }
            }
        });
        drop((to_a, to_b));
        // The receiver holds nothing. What the sender says that it sent, and did not, is its own loss: it is taken back for it.
        assert_eq!(b.imported_bytes(), 0);
        for place in 0..64 {
            let hold = witness.control.hold(a.welcome().client, place).unwrap();
            hold.decline(hold.word().generation(), b.welcome().client as u8);
        }
        until("nothing is held", || a.leases() == 0);
        // Between the two all is well.
        let (to_b, to_a) = channels(&a, &b);
        a.send(&to_b, tree(), &[outgoing], None).unwrap();
        let options = ReceiveOptions { timeout: Some(PATIENCE), lazy: false, wait: true, stream: &no_stream };
        let good = b.receive(&to_a, &options).unwrap();
        b.release(good.tensors[0].import).unwrap();
    });
    heap.free(addr).unwrap();
    a.detach();
    b.detach();
}
