//! A whole conversation, as it is on the wire. `MILLPOND_BLESS=1` writes the file anew.

use std::fmt::Write as _;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use millpond_allocator::driver::DeviceInfo;
use millpond_allocator::timeline::Reached;
use millpond_ipc::client::{Channel, Client, Options, Outgoing, Place, ReceiveOptions, Way};
use millpond_ipc::control::{Control, HoldState, LAYOUT};
use millpond_ipc::wire::{send_frame, FrameReader, FromClient, Request, Role};

use crate::raw::*;

/// Both sides of a conversation, line by line, with what differs from run to run replaced.
struct Transcript {
    text: String,
    replace: Vec<(String, &'static str)>,
}

struct Speaker {
    name: &'static str,
    wire: Wire,
}

impl Transcript {
    fn line(&mut self, name: &str, arrow: &str, body: &[u8]) {
        let mut body = String::from_utf8(body.to_vec()).unwrap();
        for (from, to) in &self.replace {
            body = body.replace(from.as_str(), to);
        }
        writeln!(self.text, "{name} {arrow} {body}").unwrap();
    }

    fn say(&mut self, speaker: &Speaker, body: &[u8]) {
        self.line(speaker.name, ">", body);
        speaker.wire.send(body, &[]).unwrap();
    }

    fn call(&mut self, speaker: &Speaker, call_id: u64, call: Request) {
        self.say(speaker, &serde_json::to_vec(&FromClient::Call { call_id, call }).unwrap());
    }

    fn hear(&mut self, speaker: &mut Speaker) -> serde_json::Value {
        use std::os::fd::AsFd;
        let frame = speaker.wire.reader.read_frame(speaker.wire.socket.as_fd(), Some(PATIENCE), false).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&frame).unwrap();
        let fds = value["fds"].as_u64().or(value["welcome"]["fds"].as_u64()).unwrap_or(0);
        speaker.wire.reader.take_fds(fds as usize).unwrap();
        if let Some(token) = value["welcome"]["token"].as_str() {
            self.replace.push((token.to_owned(), "TOKEN"));
        }
        self.line(speaker.name, "<", &frame);
        value
    }

    fn hello(&mut self, served: &Served, name: &'static str, role: Role) -> Speaker {
        let mut speaker = Speaker { name, wire: Wire::connect(&served.socket) };
        self.say(&speaker, &serde_json::to_vec(&hello(&served.key, name, role)).unwrap());
        self.hear(&mut speaker);
        speaker
    }
}

fn socket(channel: &Channel) -> BorrowedFd<'_> {
    // SAFETY: the channel outlives the borrow, and keeps its socket open.
    unsafe { BorrowedFd::borrow_raw(channel.raw_fd()) }
}

/// Words that streams wait on.
#[repr(align(4096))]
struct Gate([AtomicU64; 512]);

/// The hold of a producer's first place, as anybody sees it.
fn hold(control: &Control) -> String {
    let hold = control.hold(1, 0).unwrap();
    let word = hold.word();
    let state = match word.state() {
        HoldState::InFlight => format!("in flight, from {} for {}", word.sender(), word.receiver()),
        HoldState::Done => {
            let (timeline, value) = hold.done().unwrap();
            format!("done by {}, DONE is [{timeline},{value}]", word.receiver())
        }
        other => format!("{other:?}").to_lowercase(),
    };
    format!("hold [1,0,{}] is {state}", word.generation())
}

/// A value's life between two clients as they are: each frame byte for byte, and what stands in the control memory. Two texts: what
/// is so before the receiver has mapped anything, and what comes then.
fn a_values_life() -> (String, String) {
    let mut transcript = Transcript { text: String::new(), replace: Vec::new() };
    let t = &mut transcript;
    let served = Served::start(config());
    let attach = |name: &str, role: Role| {
        Client::attach(&Options { role, ..Options::new(served.socket.clone(), served.key.clone(), name.to_owned()) }).unwrap()
    };
    let (main, denoiser) = (attach("main", Role::Parent), attach("denoiser", Role::Worker));
    let control = served.attach("witness").control;
    let (to_denoiser, to_main) = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| main.accept(PATIENCE).unwrap());
        let connected = denoiser.connect("parent", PATIENCE).unwrap();
        (accepted.join().unwrap(), connected)
    });
    let (there, here) = (denoiser.driver(Place::Host).unwrap(), main.driver(Place::Host).unwrap());
    let (writes, reads) = (there.stream_create().unwrap(), here.stream_create().unwrap());
    // main's stream stands until it is told to go on, so that its DONE is seen before it is reached.
    let gate: &'static Gate = Box::leak(Box::new(Gate(std::array::from_fn(|_| AtomicU64::new(0)))));
    // SAFETY: a page of its own that stays for ever.
    let base = unsafe { here.host_register(std::ptr::from_ref(gate).cast_mut().cast(), 4096) }.unwrap();
    here.wait_value(reads, base, 1).unwrap();

    let addr = denoiser.heap(Place::Host).unwrap().allocate(4096, writes).unwrap();
    there.fill(addr, 7, 4096, writes).unwrap();
    let value = Outgoing { addr, bytes: 4096, place: Place::Host, stream: Some(writes), import: None, read_only: false, way: Way::Found };
    let stream = |_: &DeviceInfo| Some(reads);
    let options = ReceiveOptions { timeout: Some(PATIENCE), lazy: false, wait: false, stream: &stream };
    let hand_over = |t: &mut Transcript| {
        let tree = serde_json::value::RawValue::from_string(r#"{"t":0}"#.to_owned()).unwrap();
        denoiser.send(&to_main, tree, &[value], None).unwrap();
        // Read off the wire, written down, and put back.
        let frame = FrameReader::exact().read_frame(socket(&to_denoiser), Some(PATIENCE), true).unwrap();
        t.line("denoiser", "->", &frame);
        send_frame(socket(&to_main), &frame, &[], Some(PATIENCE)).unwrap();
    };
    let control_says = |t: &mut Transcript, what: &str| t.line("control", "=", what.as_bytes());
    hand_over(t);
    until("READY", || control.timeline(128).unwrap().reached(1) == Reached::Yes);
    control_says(t, &format!("{}; timeline 128 has reached 1", hold(&control)));
    let sent = std::mem::take(&mut t.text);
    let first = main.receive(&to_denoiser, &options).unwrap();
    control_says(t, &hold(&control));
    main.release(first.tensors[0].import).unwrap();
    // The next call that is handed the stream queues the DONE.
    hand_over(t);
    let second = main.receive(&to_denoiser, &options).unwrap();
    assert_eq!(control.timeline(0).unwrap().reached(1), Reached::No);
    control_says(t, &format!("{}, not reached", hold(&control)));
    gate.0[0].store(1, Ordering::Release);
    until("DONE is reached, and the place is free", || control.hold(1, 0).unwrap().word().state() == HoldState::Free);
    assert_eq!(control.timeline(0).unwrap().reached(1), Reached::Yes);
    control_says(t, &format!("timeline 0 has reached 1; {}", hold(&control)));
    main.release(second.tensors[0].import).unwrap();
    (sent, transcript.text)
}

#[test]
fn a_whole_conversation() {
    let served = Served::start(config());
    let pid = format!("pid\":{}", std::process::id());
    let namespace = std::fs::metadata("/proc/self/ns/pid").unwrap().ino().to_string();
    let replace = vec![(served.key.clone(), "KEY"), (pid, "pid\":PID"), (LAYOUT.to_string(), "LAYOUT"), (namespace, "NAMESPACE")];
    let mut t = Transcript { text: String::new(), replace };
    let mut parent = t.hello(&served, "main", Role::Parent);
    let mut worker = t.hello(&served, "denoiser", Role::Worker);

    t.call(&worker, 1, Request::Connect { peer: "parent".to_owned(), timeout_ms: 30_000 });
    t.call(&parent, 1, Request::Accept { timeout_ms: 30_000 });
    t.hear(&mut parent);
    t.hear(&mut worker);

    t.call(&worker, 2, Request::Grow { device: 0, bytes: 4 * MIB, press: false });
    t.hear(&mut worker);
    let (sent, received) = a_values_life();
    t.text.push_str(&sent);
    t.call(&parent, 2, Request::Window { window: 2 });
    t.hear(&mut parent);
    t.call(&parent, 3, Request::Import { window: 2, epochs: vec![1] });
    t.hear(&mut parent);
    t.text.push_str(&received);

    t.call(&worker, 3, Request::Release { epochs: vec![1] });
    t.hear(&mut worker);
    let ask = t.hear(&mut parent)["ask_id"].as_u64().unwrap();
    t.say(&parent, &serde_json::to_vec(&FromClient::Answered { ask_id: ask, bytes: 0 }).unwrap());
    t.call(&parent, 4, Request::Import { window: 2, epochs: vec![1] });
    t.hear(&mut parent);
    t.call(&worker, 4, Request::Grow { device: 0, bytes: 512 * MIB, press: true });
    t.hear(&mut worker);

    t.call(&worker, 5, Request::Detach);
    t.hear(&mut worker);
    drop(worker);
    t.hear(&mut parent);
    served.end();
    t.hear(&mut parent);

    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/conversation.txt");
    if std::env::var_os("MILLPOND_BLESS").is_some() {
        std::fs::write(&file, &t.text).unwrap();
    }
    let expected = std::fs::read_to_string(&file).unwrap();
    for (n, (found, expected)) in t.text.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "line {} of {}", n + 1, file.display());
    }
    assert_eq!(t.text.lines().count(), expected.lines().count());
}

/// The same conversation as docs/wire.md prints it: who says it, how, and what; `…` stands for anything.
fn printed() -> Vec<(String, String)> {
    let page = std::fs::read_to_string(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/wire.md")).unwrap();
    let mut lines: Vec<(String, String)> = Vec::new();
    for line in page.split("## A conversation").nth(1).unwrap().lines().filter_map(|line| line.strip_prefix("    ")) {
        let rest = line.trim_start();
        match (line.starts_with(' '), rest.starts_with('"')) {
            (true, true) => lines.last_mut().unwrap().1.push_str(rest),
            (true, false) => {}
            _ => {
                let (speaker, said) = line.split_once(' ').unwrap_or((line, ""));
                let (arrow, body) = said.trim_start().split_once(' ').unwrap_or((said, ""));
                lines.push((format!("{speaker} {arrow}"), body.trim().to_owned()));
            }
        }
    }
    lines
}

#[test]
fn the_documentation_prints_what_is_said() {
    let golden = include_str!("../golden/conversation.txt");
    let mut said = golden.lines();
    let printed = printed();
    assert!(printed.len() > 20, "{printed:?}");
    for (who, body) in printed {
        let mut body = body;
        for pid in ["700", "701", "702"] {
            body = body.replace(&format!("pid\":{pid}"), "pid\":PID");
        }
        let like = |line: &str| {
            let rest = line.strip_prefix(&who).map(str::trim_start);
            rest.is_some_and(|rest| {
                let mut at = 0;
                body.split('…').all(|piece| rest[at..].find(piece).map(|found| at += found + piece.len()).is_some())
            })
        };
        assert!(said.any(like), "not in the golden conversation, or not in this order: {who} {body}");
    }
}
