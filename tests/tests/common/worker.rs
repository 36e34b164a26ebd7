//! The worker's side: commands from stdin, answers to stdout.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::os::fd::AsRawFd;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use millpond_allocator::driver::{Addr, DeviceId, Driver, Stream};
use millpond_allocator::timeline::Signal;
use millpond_ipc::client::{Channel, Client, Error, Incoming, OnOwnerDeath, Options, Outgoing, Place, ReceiveOptions, Way};
use millpond_ipc::wire::Role;
use rustix::process::{Resource, Rlimit};

use super::signals;

/// A page of words that streams wait on when they are told to stall.
struct Gates {
    words: *const AtomicU64,
    base: Addr,
    next: usize,
}

struct Worker {
    client: Arc<Client>,
    /// The arena's first device: the host's, or with `MILLPOND_TEST_DRIVER=cuda` a GPU's.
    place: Place,
    driver: Arc<dyn Driver>,
    /// What this process's CPU does to a GPU's memory goes on a stream of its own, which stands behind no other.
    by_cpu: Stream,
    channels: Vec<Option<Channel>>,
    streams: HashMap<u64, Stream>,
    blocks: Vec<(Addr, u64)>,
    imports: Vec<Incoming>,
    gates: Gates,
    stalls: HashMap<u64, usize>,
}

type Answer = Result<String, String>;

fn failed(error: Error) -> String {
    format!("{} {error}", error.code())
}

fn wrong(what: impl std::fmt::Display) -> String {
    format!("Test {what}")
}

pub(super) fn run() -> ! {
    let var = |name: &str| std::env::var(name).unwrap();
    let mut options = Options::new(var("MILLPOND_SOCKET").into(), var("MILLPOND_KEY"), var("MILLPOND_TEST_NAME"));
    if options.name == "parent" {
        options.role = Role::Parent;
    }
    if std::env::var("MILLPOND_TEST_EXIT").is_ok() {
        options.on_owner_death = OnOwnerDeath::Exit;
    }
    options.host_waits = std::env::var("MILLPOND_TEST_HOST_WAITS").is_ok();
    let client = Client::attach(&options).unwrap();
    let place = super::place(&client);
    let driver = client.driver(place).unwrap();
    let by_cpu = if driver.is_host() { Stream::LEGACY } else { driver.stream_create().unwrap() };
    // SAFETY: a new anonymous mapping, which stays as long as the process.
    let page = unsafe {
        libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    // SAFETY: as above.
    let base = unsafe { driver.host_register(page.cast(), 4096) }.unwrap();
    let gates = Gates { words: page.cast(), base, next: 0 };
    let mut worker = Worker {
        client,
        place,
        driver,
        by_cpu,
        channels: Vec::new(),
        streams: HashMap::new(),
        blocks: Vec::new(),
        imports: Vec::new(),
        gates,
        stalls: HashMap::new(),
    };
    signals::install();
    say("attached");
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match worker.command(&line) {
            Ok(answer) => say(&format!("ok {answer}")),
            Err(error) => say(&format!("err {}", error.replace('\n', " "))),
        }
    }
    std::process::exit(0);
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "@{line}").and_then(|()| out.flush());
}

/// The words of a command.
struct Words<'a>(std::str::SplitWhitespace<'a>);

impl<'a> Words<'a> {
    fn text(&mut self) -> Result<&'a str, String> {
        self.0.next().ok_or_else(|| wrong("a word is missing"))
    }

    fn value<T: FromStr>(&mut self) -> Result<T, String> {
        let text = self.text()?;
        text.parse().map_err(|_| wrong(format!("{text:?}")))
    }

    fn or<T: FromStr>(&mut self, other: T) -> Result<T, String> {
        self.0.next().map_or(Ok(other), |text| text.parse().map_err(|_| wrong(format!("{text:?}"))))
    }
}

impl Worker {
    fn stream(&mut self, number: u64) -> Result<Stream, String> {
        if let Some(stream) = self.streams.get(&number) {
            return Ok(*stream);
        }
        let stream = self.driver.stream_create().map_err(wrong)?;
        self.streams.insert(number, stream);
        Ok(stream)
    }

    /// A stream by number; `-`: none.
    fn maybe_stream(&mut self, words: &mut Words<'_>) -> Result<Option<Stream>, String> {
        match words.0.next() {
            None | Some("-") => Ok(None),
            Some(number) => Ok(Some(self.stream(number.parse().map_err(wrong)?)?)),
        }
    }

    fn channel(&self, number: usize) -> Result<&Channel, String> {
        self.channels.get(number).and_then(Option::as_ref).ok_or_else(|| wrong("no such channel"))
    }

    fn block(&self, number: usize) -> Result<(Addr, u64), String> {
        self.blocks.get(number).copied().ok_or_else(|| wrong("no such block"))
    }

    fn import(&self, number: usize) -> Result<Incoming, String> {
        self.imports.get(number).copied().ok_or_else(|| wrong("no such import"))
    }

    /// Whether memory of the arena's device holds one byte all over.
    fn is_all(&self, addr: Addr, bytes: u64, byte: u8) -> Result<bool, String> {
        if self.driver.is_host() {
            return Ok(super::is_all(addr, bytes, byte));
        }
        let mut found = vec![!byte; bytes as usize];
        self.driver.copy(found.as_mut_ptr() as Addr, addr, bytes, self.by_cpu).map_err(wrong)?;
        self.driver.stream_synchronize(self.by_cpu).map_err(wrong)?;
        Ok(found.iter().all(|one| *one == byte))
    }

    fn keep(&mut self, channel: Result<Channel, Error>) -> Answer {
        self.channels.push(Some(channel.map_err(failed)?));
        Ok((self.channels.len() - 1).to_string())
    }

    fn send(&self, channel: usize, outgoing: &[Outgoing], timeout: u64) -> Answer {
        let sent = self.client.send(self.channel(channel)?, super::tree(), outgoing, Some(Duration::from_millis(timeout)));
        sent.map(|copied| format!("{}", u8::from(copied.contains(&true)))).map_err(failed)
    }

    fn command(&mut self, line: &str) -> Answer {
        let mut words = Words(line.split_whitespace());
        let words = &mut words;
        let place = self.place;
        let done = Ok(String::new());
        match words.text()? {
            "connect" => {
                let (peer, ms) = (words.text()?.to_owned(), words.or(10_000)?);
                let channel = self.client.connect(&peer, Duration::from_millis(ms));
                self.keep(channel)
            }
            "accept" => {
                let channel = self.client.accept(Duration::from_millis(words.or(10_000)?));
                self.keep(channel)
            }
            "close" => {
                let number: usize = words.value()?;
                self.channels.get_mut(number).and_then(Option::take).map(drop).ok_or_else(|| wrong("no such channel"))?;
                done
            }
            "alloc" => {
                let bytes = words.value()?;
                let on = self.maybe_stream(words)?.unwrap_or(Stream::LEGACY);
                let addr = self.client.heap(place).map_err(failed)?.allocate(bytes, on).map_err(|error| failed(error.into()))?;
                self.blocks.push((addr, bytes));
                Ok((self.blocks.len() - 1).to_string())
            }
            // From here on on another of the arena's devices, by its identity.
            "on" => {
                let id: DeviceId = words.value()?;
                self.place = Place::Device(id);
                self.driver = self.client.driver(self.place).map_err(failed)?;
                done
            }
            // The device of an import: what it is, and which one that is to this process.
            "device" => {
                let place = self.import(words.value()?)?.place;
                let info = self.client.driver(place).map_err(failed)?.device().clone();
                Ok(format!("{} {}", info.id, info.ordinal))
            }
            // The n-th block is where in my window?
            "addr" => Ok(self.block(words.value()?)?.0.to_string()),
            "fill" => {
                let (addr, bytes) = self.block(words.value()?)?;
                let byte = words.value()?;
                match self.maybe_stream(words)? {
                    Some(stream) => self.driver.fill(addr, byte, bytes, stream).map_err(wrong)?,
                    // SAFETY: a live block of this process.
                    None if self.driver.is_host() => unsafe { std::ptr::write_bytes(addr as *mut u8, byte, bytes as usize) },
                    None => {
                        self.driver.fill(addr, byte, bytes, self.by_cpu).map_err(wrong)?;
                        self.driver.stream_synchronize(self.by_cpu).map_err(wrong)?;
                    }
                }
                done
            }
            "touch" => {
                let import = self.import(words.value()?)?;
                let byte = words.value()?;
                let stream = self.maybe_stream(words)?.ok_or_else(|| wrong("on which stream?"))?;
                self.client.record_import_stream(import.addr, place, stream).map_err(failed)?;
                self.driver.fill(import.addr, byte, import.bytes, stream).map_err(wrong)?;
                done
            }
            "stall" => {
                let number: u64 = words.value()?;
                let stream = self.stream(number)?;
                let at = self.gates.next % 512;
                self.gates.next += 1;
                // SAFETY: a word of the page.
                unsafe { (*self.gates.words.add(at)).store(0, Ordering::Release) };
                self.driver.wait_value(stream, self.gates.base + 8 * at as u64, 1).map_err(wrong)?;
                self.stalls.insert(number, at);
                done
            }
            "go" => {
                let at = self.stalls.remove(&words.value()?).ok_or_else(|| wrong("it does not stall"))?;
                // SAFETY: a word of the page.
                unsafe { (*self.gates.words.add(at)).store(1, Ordering::Release) };
                done
            }
            "sync" => {
                let stream = self.maybe_stream(words)?.unwrap_or(Stream::LEGACY);
                self.driver.stream_synchronize(stream).map_err(wrong)?;
                done
            }
            // Whether all work of a stream is over.
            "idle" => {
                let stream = self.maybe_stream(words)?.unwrap_or(Stream::LEGACY);
                Ok(u8::from(self.driver.stream_query(stream).map_err(wrong)?).to_string())
            }
            "send" => {
                let channel = words.value()?;
                let (addr, bytes) = self.block(words.value()?)?;
                let stream = self.maybe_stream(words)?;
                let read_only = words.or(String::new())? == "ro";
                self.send(channel, &[Outgoing { addr, bytes, place, stream, import: None, read_only, way: Way::Found }], 5_000)
            }
            // One block so often in one message.
            "sendmany" => {
                let channel = words.value()?;
                let (addr, bytes) = self.block(words.value()?)?;
                let count: usize = words.value()?;
                let stream = self.maybe_stream(words)?;
                self.send(
                    channel,
                    &vec![Outgoing { addr, bytes, place, stream, import: None, read_only: false, way: Way::Found }; count],
                    5_000,
                )
            }
            "sendpart" => {
                let channel = words.value()?;
                let (addr, _) = self.block(words.value()?)?;
                let (at, bytes): (u64, u64) = (words.value()?, words.value()?);
                self.send(
                    channel,
                    &[Outgoing { addr: addr + at, bytes, place, stream: None, import: None, read_only: false, way: Way::Found }],
                    5_000,
                )
            }
            // Until the socket is full; the last send stays in it.
            "flood" => {
                let channel = words.value()?;
                let (addr, bytes) = self.block(words.value()?)?;
                loop {
                    self.send(
                        channel,
                        &[Outgoing { addr, bytes, place, stream: None, import: None, read_only: false, way: Way::Found }],
                        600_000,
                    )?;
                }
            }
            // The same of what it received.
            "floodon" => {
                let channel = words.value()?;
                let import = self.import(words.value()?)?;
                let Incoming { addr, bytes, import, .. } = import;
                loop {
                    self.send(
                        channel,
                        &[Outgoing { addr, bytes, place, stream: None, import: Some(import), read_only: false, way: Way::Found }],
                        600_000,
                    )?;
                }
            }
            "copy" => {
                let (channel, byte, bytes): (usize, u8, usize) = (words.value()?, words.value()?, words.value()?);
                let source = vec![byte; bytes];
                let addr = source.as_ptr() as u64;
                self.send(
                    channel,
                    &[Outgoing { addr, bytes: bytes as u64, place, stream: None, import: None, read_only: false, way: Way::Found }],
                    5_000,
                )
            }
            "forward" => {
                let channel = words.value()?;
                let import = self.import(words.value()?)?;
                let stream = self.maybe_stream(words)?;
                let outgoing = Outgoing {
                    addr: import.addr,
                    bytes: import.bytes,
                    place,
                    stream,
                    import: Some(import.import),
                    read_only: false,
                    way: Way::Found,
                };
                self.send(channel, &[outgoing], 5_000)
            }
            "recv" => {
                let number = words.value()?;
                let how = words.or("plain".to_owned())?;
                let ms = words.or(10_000)?;
                let stream = how.parse().ok().map(|number| self.stream(number)).transpose()?;
                let options = ReceiveOptions {
                    timeout: Some(Duration::from_millis(ms)),
                    lazy: how == "lazy",
                    wait: how == "wait",
                    stream: &|_| stream,
                };
                let message = self.client.receive(self.channel(number)?, &options).map_err(failed)?;
                let first = self.imports.len();
                self.imports.extend(message.tensors);
                Ok((first..self.imports.len()).map(|n| n.to_string()).collect::<Vec<_>>().join(" "))
            }
            "open" => {
                let number: usize = words.value()?;
                let stream = self.maybe_stream(words)?;
                let ms = words.or(10_000)?;
                let import = self.import(number)?;
                let addr = self.client.open_import(import.import, stream, false, Some(Duration::from_millis(ms))).map_err(failed)?;
                if let Some(import) = self.imports.get_mut(number) {
                    import.addr = addr;
                }
                Ok(addr.to_string())
            }
            "ready" => {
                let import = self.import(words.value()?)?;
                self.client.import_ready(import.import, Some(Duration::from_millis(words.or(10_000)?))).map_err(failed)?;
                done
            }
            "adopt" => {
                let import = self.import(words.value()?)?;
                self.client.adopt(import.import, Some(Duration::from_millis(words.or(10_000)?))).map_err(failed)?;
                done
            }
            // By address: of an import, of a block, or any.
            "adoptat" => {
                let addr = match words.text()? {
                    "import" => self.import(words.value()?)?.addr,
                    "block" => self.block(words.value()?)?.0,
                    _ => self.gates.base,
                };
                self.client.adopt_at(addr, Some(Duration::ZERO)).map_err(failed)?;
                done
            }
            "check" => {
                let import = self.import(words.value()?)?;
                let byte: u8 = words.value()?;
                if import.addr == 0 || !self.is_all(import.addr, import.bytes, byte)? {
                    return Err(wrong(format!("{:#x} does not hold {byte}", import.addr)));
                }
                done
            }
            "checkblock" => {
                let (addr, bytes) = self.block(words.value()?)?;
                let byte: u8 = words.value()?;
                self.is_all(addr, bytes, byte)?.then(String::new).ok_or_else(|| wrong(format!("the block does not hold {byte}")))
            }
            // A copy of one block to another, as a value that leaves by host memory: its number and its pieces.
            "copyout" => {
                let ((to, _), (from, bytes)) = (self.block(words.value()?)?, self.block(words.value()?)?);
                let stream = self.maybe_stream(words)?.unwrap_or(Stream::LEGACY);
                let (number, pieces, _) = self.client.copy_out(place, to, from, bytes, stream).map_err(failed)?;
                let piece = |(end, signal): (u64, Signal)| format!(" {end}:{}:{}", signal.timeline, signal.value);
                Ok(format!("{number}{}", pieces.into_iter().map(piece).collect::<String>()))
            }
            "copiedout" => self.client.copied_out(words.value()?).map(|()| String::new()).map_err(failed),
            // Import, block, milliseconds, the bytes that are copied already, pieces: how far it came.
            "copyin" => {
                let (import, (to, _)) = (self.import(words.value()?)?, self.block(words.value()?)?);
                let (ms, copied) = (words.value()?, words.value()?);
                let piece = |text: &str| -> Option<(u64, Signal)> {
                    let mut parts = text.split(':').map(|part| part.parse().ok());
                    let (end, timeline, value) = (parts.next()??, parts.next()??, parts.next()??);
                    Some((end, Signal { timeline: timeline as u32, value }))
                };
                let pieces = words.0.by_ref().map(piece).collect::<Option<Vec<_>>>().ok_or_else(|| wrong("no pieces"))?;
                let range = (0, import.bytes, copied);
                let (timeout, stream) = (Some(Duration::from_millis(ms)), Stream::LEGACY);
                let came = self.client.copy_in(place, import.import, range, to, stream, &pieces, timeout);
                came.map(|(far, _)| far.to_string()).map_err(failed)
            }
            "readonly" => Ok(u8::from(self.import(words.value()?)?.read_only).to_string()),
            "release" => {
                self.client.release(self.import(words.value()?)?.import).map_err(failed)?;
                done
            }
            "free" => {
                self.client.free(self.block(words.value()?)?.0).map_err(failed)?;
                done
            }
            "waitdone" => {
                let (addr, _) = self.block(words.value()?)?;
                let stream = self.maybe_stream(words)?;
                let ms = words.or(10_000)?;
                self.client.wait_done(addr, place, stream, Some(Duration::from_millis(ms))).map_err(failed)?;
                done
            }
            "leases" => Ok(self.client.leases().to_string()),
            "imported" => Ok(self.client.imported_bytes().to_string()),
            "trim" => Ok(self.client.heap(place).map_err(failed)?.trim(u64::MAX).to_string()),
            "owner" => Ok(u8::from(self.client.owner_alive()).to_string()),
            "detach" => {
                self.client.detach();
                done
            }
            // Closes every memory file that it has open: their names.
            "closememory" => {
                let mut closed = Vec::new();
                for entry in std::fs::read_dir("/proc/self/fd").map_err(wrong)?.flatten() {
                    let (fd, target) = (entry.file_name(), std::fs::read_link(entry.path()).unwrap_or_default());
                    if let Some(name) = target.to_string_lossy().strip_prefix("/memfd:") {
                        // SAFETY: nothing of this process uses it from here on: it ends without closing anything.
                        unsafe { libc::close(fd.to_string_lossy().parse().map_err(wrong)?) };
                        closed.push(name.split(' ').next().unwrap_or_default().to_owned());
                    }
                }
                Ok(closed.join(" "))
            }
            // How many files it sees in a folder.
            "files" => Ok(std::fs::read_dir(words.text()?).map_err(wrong)?.count().to_string()),
            "fds" => Ok(std::fs::read_dir("/proc/self/fd").map_err(wrong)?.count().to_string()),
            // No more descriptors than are open, and so many to spare; without a number: as many as at first.
            "nofile" => {
                let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
                let set = |current| rustix::process::setrlimit(Resource::Nofile, Rlimit { current, maximum }).map_err(wrong);
                set(maximum)?;
                let current = match words.0.next() {
                    None => maximum,
                    Some(spare) => {
                        let spare: usize = spare.parse().map_err(wrong)?;
                        // Each takes the lowest number that is free.
                        let next = (0..=spare).map(|_| std::fs::File::open("/dev/null").map_err(wrong)).collect::<Result<Vec<_>, _>>()?;
                        next.last().map(|file| file.as_raw_fd() as u64)
                    }
                };
                set(current)?;
                done
            }
            "vm" => {
                let text = std::fs::read_to_string("/proc/self/status").map_err(wrong)?;
                let line = text.lines().find_map(|line| line.strip_prefix("VmSize:")).ok_or_else(|| wrong("no VmSize"))?;
                Ok(line.trim().trim_end_matches(" kB").to_owned())
            }
            "fork" => {
                // SAFETY: the child calls nothing but pause.
                match unsafe { libc::fork() } {
                    0 => loop {
                        // SAFETY: no arguments.
                        unsafe { libc::pause() };
                    },
                    child => Ok(child.to_string()),
                }
            }
            // A forked child lets go of everything as an interpreter does at its end; the answer is how it ended.
            "forkend" => {
                // SAFETY: the child calls the client's functions that are safe in a forked child, and _exit.
                match unsafe { libc::fork() } {
                    0 => {
                        let released = self.imports.iter().all(|import| self.client.release(import.import).is_ok());
                        let freed = self.blocks.iter().all(|(addr, _)| self.client.free(*addr).is_ok());
                        let refused = matches!(self.client.heap(place), Err(Error::Forked));
                        self.channels.clear();
                        // SAFETY: no arguments but a number.
                        unsafe { libc::_exit(i32::from(!(released && freed && refused))) }
                    }
                    child => {
                        let mut status = 0;
                        // SAFETY: a child of this process, and a place for its status.
                        unsafe { libc::waitpid(child, &mut status, 0) };
                        Ok(status.to_string())
                    }
                }
            }
            // The tender takes nothing up any more, until `hear`: whoever asks this process for something waits. Everything else goes on.
            "deaf" => signals::deafen("millpond-tend").map(|()| String::new()).map_err(wrong),
            "hear" => {
                signals::hear();
                done
            }
            "listen" => self.client.listen().map(|()| String::new()).map_err(failed),
            // Until the tender has told of this client's death; of many at once only the last are kept.
            "hearsof" => {
                let name = words.text()?;
                loop {
                    let event = self.client.next_event(super::BOUND).map_err(failed)?.ok_or_else(|| wrong("nothing is heard"))?;
                    if event.kind == "death" && (event.by.name == name || event.missed > 0) {
                        return done;
                    }
                }
            }
            other => Err(wrong(format!("no command {other:?}"))),
        }
    }
}
