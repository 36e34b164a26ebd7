//! `millpond metrics`: the ledger as OpenMetrics text, printed once or served over HTTP.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use millpond_ipc::metrics::{text, CONTENT_TYPE};
use millpond_ipc::nvml::Nvml;
use millpond_ipc::observer::Observer;

use crate::observe::Target;

const AFTER: &str = "\
Example: what a scrape would see; the same for Prometheus to fetch, beside an owner that already runs.
  $ millpond metrics | grep reserved_bytes
  $ millpond metrics --listen 127.0.0.1:9400 &
  $ curl -s http://127.0.0.1:9400/metrics

An owner serves its own with `millpond serve --metrics 127.0.0.1:9400`. docs/grafana.json is a dashboard for it.
Nobody is asked who they are: keep the address a loopback one, or behind something that asks.";

/// How long one request may take to arrive, and its answer to leave.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest request that is read.
const REQUEST_BYTES: usize = 8 << 10;

/// Print the ledger as OpenMetrics text, or serve it over HTTP.
#[derive(Debug, ClapArgs)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Serve it at this address until the owner ends, instead of printing it.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    #[command(flatten)]
    target: Target,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let listener = match args.listen.map(listen).transpose() {
        Ok(listener) => listener,
        Err(message) => {
            eprintln!("millpond: {message}");
            return ExitCode::FAILURE;
        }
    };
    let observer = match args.target.connect() {
        Ok(observer) => observer,
        Err(code) => return code,
    };
    match listener {
        Some(listener) => {
            eprintln!("millpond: metrics at http://{}/metrics", listener.local_addr().map_or_else(|e| e.to_string(), |at| at.to_string()));
            serve(&listener, &observer);
            ExitCode::SUCCESS
        }
        None => {
            // Nobody who reads is no failure of ours.
            let _ = io::stdout().lock().write_all(page(&observer, &Nvml::open()).as_bytes());
            ExitCode::SUCCESS
        }
    }
}

/// Takes an address, or says why it cannot be had.
pub(crate) fn listen(address: SocketAddr) -> Result<TcpListener, String> {
    TcpListener::bind(address).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => format!("metrics: {address} is in use: stop what listens there, or choose another port (0: any)"),
        io::ErrorKind::PermissionDenied => format!("metrics: {address}: not allowed: choose a port above 1023"),
        io::ErrorKind::AddrNotAvailable => format!("metrics: {address} is no address of this machine: 127.0.0.1:{} is", address.port()),
        _ => format!("metrics: {address}: {error}"),
    })
}

fn page(observer: &Observer, nvml: &Result<Nvml, String>) -> String {
    let mut ledger = observer.ledger();
    ledger.look_outside(nvml);
    text(&ledger)
}

/// Answers one request after the other until the owner ends.
pub(crate) fn serve(listener: &TcpListener, observer: &Observer) {
    let nvml = Nvml::open();
    for stream in listener.incoming() {
        if !observer.is_alive() {
            return;
        }
        match stream {
            // What a scraper did wrong is its own affair.
            Ok(stream) => drop(answer(stream, || page(observer, &nvml))),
            // Out of descriptors, most likely: not at once again.
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn answer(mut stream: TcpStream, page: impl FnOnce() -> String) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let request = request(&mut stream)?;
    let mut words = request.split(' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (status, kind, body) = match (method, path.split('?').next().unwrap_or_default()) {
        ("GET" | "HEAD", "/metrics") => ("200 OK", CONTENT_TYPE, page()),
        ("GET" | "HEAD", "/") => ("200 OK", "text/plain", "millpond: the figures are at /metrics\n".to_owned()),
        ("GET" | "HEAD", _) => ("404 Not Found", "text/plain", "nothing here but /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "text/plain", "only GET\n".to_owned()),
    };
    let head = format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    stream.write_all(head.as_bytes())?;
    if method != "HEAD" {
        stream.write_all(body.as_bytes())?;
    }
    stream.flush()
}

/// The first line of a request whose head has arrived whole.
fn request(stream: &mut TcpStream) -> io::Result<String> {
    let end = Instant::now() + PATIENCE;
    let mut head = Vec::new();
    let mut part = [0; 1024];
    while !head.windows(4).any(|four| four == b"\r\n\r\n") {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || head.len() > REQUEST_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => head.extend_from_slice(part.get(..n).unwrap_or_default()),
        }
    }
    Ok(String::from_utf8_lossy(&head).lines().next().unwrap_or_default().to_owned())
}
