//! A whole conversation, as it is on the wire. `MILLPOND_BLESS=1` writes the file anew.

use std::fmt::Write as _;
use std::path::PathBuf;

use millpond_ipc::control::LAYOUT;
use millpond_ipc::wire::{FromClient, Request, Role};

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

#[test]
fn a_whole_conversation() {
    let served = Served::start(config());
    let pid = format!("pid\":{}", std::process::id());
    let mut t =
        Transcript { text: String::new(), replace: vec![(served.key.clone(), "KEY"), (pid, "pid\":PID"), (LAYOUT.to_string(), "LAYOUT")] };
    let mut parent = t.hello(&served, "main", Role::Parent);
    let mut worker = t.hello(&served, "denoiser", Role::Worker);

    t.call(&worker, 1, Request::Connect { peer: "parent".to_owned(), timeout_ms: 30_000 });
    t.call(&parent, 1, Request::Accept { timeout_ms: 30_000 });
    t.hear(&mut parent);
    t.hear(&mut worker);

    t.call(&worker, 2, Request::Grow { device: 0, bytes: 4 * MIB, press: false });
    t.hear(&mut worker);
    t.call(&parent, 2, Request::Window { window: 2 });
    t.hear(&mut parent);
    t.call(&parent, 3, Request::Import { window: 2, epochs: vec![1] });
    t.hear(&mut parent);

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
