//! The commands that look at an arena, as processes: what they say, and how they end.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, not only tests

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use millpond_allocator::driver::Stream;
use millpond_ipc::client::{Client, Options, Place};
use millpond_ipc::wire::{send_frame, FrameReader, FromOwner, Refusal, Welcome};
use rustix::fs::{memfd_create, MemfdFlags};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

fn program() -> String {
    std::env::var("MILLPOND_PROGRAM").unwrap_or_else(|_| env!("CARGO_BIN_EXE_millpond").to_owned())
}

struct Owner {
    child: Child,
    socket: PathBuf,
    key: String,
}

impl Owner {
    fn start(args: &[&str]) -> Self {
        let mut command = Command::new(program());
        command.args(["serve", "--driver", "host", "--host-bytes", "512M", "--limit", "256M", "--chunk-bytes", "32M", "--json"]).args(args);
        let mut child = command.env_remove("MILLPOND_KEY").stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap();
        let text = |field: &str| ready[field].as_str().unwrap().to_owned();
        Self { child, socket: text("socket").into(), key: text("key") }
    }

    fn client(&self, name: &str, bytes: &[u64]) -> Arc<Client> {
        let client = Client::attach(&Options::new(self.socket.clone(), self.key.clone(), name.to_owned())).unwrap();
        let heap = client.heap(Place::Host).unwrap();
        for bytes in bytes {
            heap.allocate(*bytes, Stream::LEGACY).unwrap();
        }
        heap.tick();
        client
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(program());
        command.args(args).env("MILLPOND_SOCKET", &self.socket).env("MILLPOND_KEY", &self.key).stdin(Stdio::null()).output().unwrap()
    }

    fn json(&self, args: &[&str]) -> Value {
        let output = self.run(args);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = self.socket.parent().map(std::fs::remove_dir_all);
    }
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn text(output: &Output) -> String {
    assert_eq!(code(output), 0, "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The first line that a command complained with, and its code.
fn complaint(output: &Output) -> (i32, String) {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    (code(output), text.trim().to_owned())
}

#[test]
fn the_ledger_adds_up_in_every_shape() {
    let owner = Owner::start(&[]);
    let _clients = [owner.client("vae", &[40 * MIB]), owner.client("<de&noiser>", &[8 * MIB, 8 * MIB])];
    let ledger = owner.json(&["ledger", "--json"]);
    let device = &ledger["devices"][0];
    let clients = device["clients"].as_array().unwrap();
    let sum: u64 = clients.iter().map(|client| client["reserved"].as_u64().unwrap()).sum();
    assert_eq!(Some(sum), device["reserved"].as_u64());
    assert_eq!(clients[0]["allocated"], 40 * MIB);
    assert!(device["outside_unknown"].is_string());
    let table = text(&owner.run(&["ledger"]));
    assert!(table.contains("vae") && table.contains("40.0 MiB") && !table.contains('\x1b'), "{table}");
    let folder = tempfile::tempdir().unwrap();
    let (svg, html) = (folder.path().join("m.svg"), folder.path().join("m.html"));
    let output = owner.run(&["ledger", "--svg", svg.to_str().unwrap(), "--html", html.to_str().unwrap(), "--seconds", "1"]);
    assert_eq!(text(&output), "");
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.contains("&lt;de&amp;noiser&gt;") && svg.contains("chunk of 32.0 MiB at 0"), "{svg}");
    assert!(svg.contains("reserved by client over the last"), "{svg}");
    let html = std::fs::read_to_string(html).unwrap();
    assert!(html.contains("<svg") && !html.contains("<script") && !html.contains("src="), "{html}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    let output = owner.run(&["ledger", "--svg", "/no/such/folder/m.svg"]);
    assert!(complaint(&output).1.contains("/no/such/folder/m.svg: No such file"));
}

#[test]
fn explain_says_yes_maybe_and_no() {
    let owner = Owner::start(&[]);
    let _vae = owner.client("vae", &[100 * MIB]);
    let spare = owner.client("spare", &[64 * MIB]);
    let heap = spare.heap(Place::Host).unwrap();
    let output = owner.run(&["explain", "64MiB"]);
    assert!(text(&output).contains("fits"));
    let output = owner.run(&["explain", "1GiB"]);
    assert_eq!(code(&output), 1);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("does not fit") && said.contains("of 256.0 MiB") && said.contains("vae (pid"), "{said}");
    let block = heap.chunks().first().map(|chunk| chunk.bytes).unwrap();
    assert!(block > 0);
    let answer = owner.json(&["explain", "1GiB", "--json", "--client", "spare"]);
    assert_eq!((answer["fits"].as_bool(), answer["devices"][0]["verdict"].as_str()), (Some(false), Some("does_not_fit")));
    let (code, line) = complaint(&owner.run(&["explain", "1G", "--client", "nobody"]));
    assert!(code == 64 && line.contains("no client nobody: there are vae, spare"), "{line}");
    let (code, line) = complaint(&owner.run(&["explain", "1G", "--device", "GPU-7"]));
    assert!(code == 64 && line.contains("the owner serves HOST-0"), "{line}");
    assert_eq!(owner.run(&["explain", "much"]).status.code(), Some(64));
}

#[test]
fn the_map_shows_chunks() {
    let owner = Owner::start(&[]);
    assert_eq!(text(&owner.run(&["map"])), "no chunks in any of these windows\n");
    let _vae = owner.client("vae", &[40 * MIB]);
    let map = text(&owner.run(&["map", "--width", "40"]));
    let drawn = map.lines().last().unwrap().trim();
    assert!(drawn.starts_with("aaaaaaaaaaaaaaaab"), "{map}");
    assert!(map.contains("2.0 MiB a character") && map.lines().all(|line| line.len() <= 80), "{map}");
    let json = owner.json(&["map", "--json"]);
    let chunks = json["windows"][0]["chunks"].as_array().unwrap();
    assert_eq!((chunks[0]["fate"].as_str(), chunks[0]["bytes"].as_u64()), (Some("held"), Some(32 * MIB)));
}

fn get(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn metrics_are_printed_and_served() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    let owner = Owner::start(&["--metrics", &address]);
    let _vae = owner.client("vae", &[MIB]);
    let page = text(&owner.run(&["metrics"]));
    assert!(page.contains("millpond_client_allocated_bytes{device=\"HOST-0\",client=\"vae\"") && page.ends_with("# EOF\n"), "{page}");
    let answer = get(&address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
    assert!(body.contains("millpond_growths_total{device=\"HOST-0\"} 1"), "{body}");
    assert!(get(&address, "GET /x HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
    assert!(get(&address, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    // Who says too much is hung up on; the next one is served.
    let mut rude = TcpStream::connect(&address).unwrap();
    let _ = rude.write_all(&[b'x'; 20_000]);
    assert!(get(&address, "HEAD /metrics HTTP/1.1\r\n\r\n").ends_with("\r\n\r\n"));
    // The port is taken.
    let output = Command::new(program()).args(["serve", "--driver", "host", "--metrics", &address]).output().unwrap();
    let (code, line) = complaint(&output);
    assert!(code == 1 && line.contains(&format!("{address} is in use")), "{line}");
    let (code, line) = complaint(&owner.run(&["metrics", "--listen", &address]));
    assert!(code == 1 && line.contains("choose another port"), "{line}");
}

/// Something at a socket that answers a hello with one frame, and with a file where one is given.
fn impostor(answer: FromOwner, file_bytes: Option<u64>) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("owner.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let _ = FrameReader::default().read_frame(stream.as_fd(), Some(PATIENCE), false);
            let file = file_bytes.map(|bytes| {
                let file = memfd_create("short", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
                rustix::fs::ftruncate(&file, bytes).unwrap();
                file
            });
            let fds: Vec<_> = file.iter().map(AsFd::as_fd).collect();
            let _ = send_frame(stream.as_fd(), &serde_json::to_vec(&answer).unwrap(), &fds, Some(PATIENCE));
        }
    });
    (folder, socket)
}

#[test]
fn what_is_wrong_is_said_in_one_line() {
    let at = |socket: &str, args: &[&str]| {
        Command::new(program()).args(args).env("MILLPOND_SOCKET", socket).env("MILLPOND_KEY", "00").stdin(Stdio::null()).output().unwrap()
    };
    let refused = |field: &str| FromOwner::Refused { refused: Refusal { field: field.into(), expected: "2".into(), found: "1".into() } };
    let (_a, other_version) = impostor(refused("protocol"), None);
    let (_b, other_user) = impostor(refused("user"), None);
    let welcome = Welcome { client: 0, serial: 0, token: String::new(), owner_pid: 1, pid_namespace: None, devices: Vec::new(), fds: 1 };
    let (_c, truncated) = impostor(FromOwner::Welcome { welcome }, Some(4096));
    for command in [["ledger"].as_slice(), &["explain", "1G"], &["map"], &["metrics"], &["ledger", "--svg", "/dev/null"]] {
        let (code, line) = complaint(&at("/no/such/socket", command));
        assert!(code == 2 && line.contains("no owner at /no/such/socket"), "{command:?}: {line}");
        let (code, line) = complaint(&at("", command));
        assert!(code == 2 && line.contains("set MILLPOND_SOCKET"), "{command:?}: {line}");
        let (code, line) = complaint(&at(other_version.to_str().unwrap(), command));
        assert!(code == 3 && line.contains("protocol is 1, expected 2"), "{command:?}: {line}");
        assert_eq!(complaint(&at(other_user.to_str().unwrap(), command)).0, 5);
        let (code, line) = complaint(&at(truncated.to_str().unwrap(), command));
        assert!(code == 3 && line.contains("truncated"), "{command:?}: {line}");
    }
    let owner = Owner::start(&[]);
    let (code, line) = complaint(&owner.run(&["top"]));
    assert!(code == 1 && line.contains("top needs a terminal") && line.contains("ledger --watch"), "{line}");
}

#[test]
fn a_bench_says_where_it_ran_and_what_it_saw() {
    let output = Command::new(program()).args(["bench", "ledger", "handoff", "lease", "reclaim", "--quick", "--json"]).output().unwrap();
    let value: Value = serde_json::from_str(&text(&output)).unwrap();
    assert!(value["machine"]["kernel"].is_string() && value["machine"]["cores"].as_u64() > Some(0), "{value}");
    let figure = &value["figures"]["ledger"]["snapshot of 64 clients"];
    let at = |key: &str| figure[key].as_u64().unwrap();
    assert!(at("p50") > 100 && at("p50") <= at("p99") && at("p99") <= at("max") && at("n") == 2000, "{figure}");
    assert!(value["figures"]["lease"]["a whole life, less the message"]["ns"].as_u64().unwrap() > 100, "{value}");
    assert!(value["figures"]["handoff"]["1.00 GiB there and back"]["p50"].as_u64().unwrap() > 100, "{value}");
    assert_eq!(value["failed"], serde_json::json!({}));
}

#[test]
fn what_cannot_run_is_named() {
    if std::path::Path::new("/dev/nvidiactl").exists() {
        // With a GPU it runs, and tests/gpu measures it.
        return;
    }
    let output = Command::new(program()).args(["bench", "growth", "--driver", "cuda", "--quick", "--json"]).output().unwrap();
    assert_eq!(code(&output), 1);
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(value["failed"]["growth"].as_str().unwrap().starts_with("no owner: "), "{value}");
}

#[test]
fn the_traces_that_are_shipped_replay() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../benches/traces");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|end| end == "gz"));
    assert_eq!(files.len(), 7);
    let output = Command::new(program()).arg("replay").arg("--json").args(&files).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    for trace in found["traces"].as_array().unwrap() {
        assert!(trace["events"].as_u64() > Some(900) && trace["failed"].as_array().is_some_and(Vec::is_empty), "{trace}");
        // What training reserves is at most a tenth more than what it uses.
        let training = trace["file"].as_str().is_some_and(|file| file.ends_with("/training.csv.gz"));
        assert!(!training || trace["ratio"].as_f64() < Some(1.10), "{trace}");
    }
}

#[test]
fn a_replay_names_the_event_that_failed() {
    let folder = tempfile::tempdir().unwrap();
    let (good, bad) = (folder.path().join("good.csv"), folder.path().join("bad.csv"));
    let head = "Thread,Time,Action,Pointer,Size,Stream\n1,0,allocate,0x1000,1048576,0\n";
    std::fs::write(&good, format!("{head}1,0,free,0x1000,1048576,0\n")).unwrap();
    std::fs::write(&bad, format!("{head}1,0,free,0x2000,512,0\n")).unwrap();
    let run = |args: &[&str]| Command::new(program()).arg("replay").args(args).output().unwrap();
    let (good, bad) = (good.to_str().unwrap(), bad.to_str().unwrap());
    assert!(text(&run(&[good])).contains("2 events, 1 thread, 1 stream; 1.0 MiB live at most"));
    let (code, line) = complaint(&run(&[good, bad]));
    assert!(code == 1 && line.contains("bad.csv: line 3: unknown free: ") && line.contains("0x2000"), "{line}");
    let output = run(&[bad, "--json"]);
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    let failed = &value["traces"][0]["failed"][0];
    assert_eq!((output.status.code(), failed["line"].as_u64(), failed["rule"].as_str()), (Some(1), Some(3), Some("unknown free")));
    let (code, line) = complaint(&run(&["/no/such/trace.csv"]));
    assert!(code == 1 && line.starts_with("millpond: /no/such/trace.csv: No such file"), "{line}");
}

/// WSL2 has no memory that is shared as a file descriptor (rmm#1029): an arena is refused by name, before anything is made.
#[test]
fn a_driver_without_memory_to_share_is_refused_by_name() {
    let folder = std::env::temp_dir().join(format!("millpond-no-fds-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let stub = concat!(env!("CARGO_MANIFEST_DIR"), "/../allocator/src/driver/cuda/stub.c");
    let mut compile = Command::new("cc");
    compile.args(["-shared", "-fPIC", "-w", "-DPOSIX_FD=0", stub, "-o"]).arg(folder.join("libcuda.so.1"));
    if !compile.status().is_ok_and(|status| status.success()) {
        eprintln!("skipped, not run: no C compiler for the stub driver");
        return;
    }
    let mut serve = Command::new(program());
    serve.args(["serve", "--driver", "cuda", "--json", "--socket-dir"]).arg(&folder).env("LD_LIBRARY_PATH", &folder);
    let output = serve.env("CUDA_MPS_PIPE_DIRECTORY", &folder).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("\"key\""), "{output:?}");
    assert!(said.contains("Stub A (GPU-b0b0") && said.contains("memory that can be shared as a file descriptor"), "{said}");
    // Where it is not asked for, the host is served alone, and it is said why no GPU is.
    let mut doctor = Command::new(program());
    let output =
        doctor.args(["doctor", "--json"]).env("LD_LIBRARY_PATH", &folder).env("CUDA_MPS_PIPE_DIRECTORY", &folder).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("memory that can be shared as a file descriptor"), "{said}");
    std::fs::remove_dir_all(&folder).unwrap();
}
