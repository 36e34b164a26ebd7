//! The whole contract under random calls of three clients, on streams that stall: every value has a byte of its own, and what is read
//! of it, on whatever stream and however late, is that byte. Afterwards nothing is held, lent, mapped or lost.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use common::{channels, eventually, is_all, tree, Arena, BOUND, MIB};
use millpond_allocator::driver::host::Stall;
use millpond_allocator::driver::{Addr, DeviceInfo, Stream};
use millpond_ipc::client::{Channel, Client, Error, Incoming, Outgoing, Place, ReceiveOptions, Way};
use proptest::prelude::*;

const CLIENTS: usize = 3;
const STREAMS: usize = 2;
const CHUNK: u64 = 4 * MIB;
/// More of a channel's messages would fill its socket.
const QUEUED: usize = 8;

#[test]
fn role() {
    common::role();
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Make {
        client: usize,
        stream: usize,
        bytes: u64,
    },
    Free {
        block: usize,
    },
    /// Some things that the client has, in one message; parts of its blocks, what it received as it is.
    Send {
        from: usize,
        to: usize,
        things: [usize; 2],
    },
    Receive {
        at: usize,
        from: usize,
        stream: usize,
        lazy: bool,
    },
    Release {
        import: usize,
    },
    Read {
        thing: usize,
        stream: usize,
    },
    Stall {
        client: usize,
        stream: usize,
    },
    Resume {
        stall: usize,
    },
    Adopt {
        import: usize,
    },
    Ticket {
        thing: usize,
        many: bool,
    },
    Redeem {
        ticket: usize,
        client: usize,
    },
    Cancel {
        ticket: usize,
    },
    /// A channel is closed with what is on its way, and made anew.
    Close {
        a: usize,
        b: usize,
    },
    /// A client leaves, another comes.
    Leave {
        client: usize,
    },
    Trim {
        client: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let (client, stream, pick) = (0..CLIENTS, 0..STREAMS, 0usize..64);
    let bytes = prop_oneof![1u64..4096, MIB / 4..MIB, CHUNK / 2..2 * CHUNK];
    prop_oneof![
        6 => (client.clone(), stream.clone(), bytes).prop_map(|(client, stream, bytes)| Step::Make { client, stream, bytes }),
        5 => pick.clone().prop_map(|block| Step::Free { block }),
        7 => (client.clone(), 1..CLIENTS, [pick.clone(), pick.clone()])
            .prop_map(|(from, on, things)| Step::Send { from, to: (from + on) % CLIENTS, things }),
        8 => (client.clone(), 1..CLIENTS, stream.clone(), any::<bool>())
            .prop_map(|(at, on, stream, lazy)| Step::Receive { at, from: (at + on) % CLIENTS, stream, lazy }),
        5 => pick.clone().prop_map(|import| Step::Release { import }),
        6 => (pick.clone(), stream.clone()).prop_map(|(thing, stream)| Step::Read { thing, stream }),
        2 => (client.clone(), stream).prop_map(|(client, stream)| Step::Stall { client, stream }),
        3 => pick.clone().prop_map(|stall| Step::Resume { stall }),
        1 => pick.clone().prop_map(|import| Step::Adopt { import }),
        1 => (pick.clone(), any::<bool>()).prop_map(|(thing, many)| Step::Ticket { thing, many }),
        1 => (pick.clone(), client.clone()).prop_map(|(ticket, client)| Step::Redeem { ticket, client }),
        1 => pick.prop_map(|ticket| Step::Cancel { ticket }),
        1 => (client.clone(), 1..CLIENTS).prop_map(|(a, on)| Step::Close { a, b: (a + on) % CLIENTS }),
        1 => client.clone().prop_map(|client| Step::Leave { client }),
        1 => client.prop_map(|client| Step::Trim { client }),
    ]
}

/// What a client can read: a block of its own, or an import.
#[derive(Debug, Clone)]
struct Thing {
    client: usize,
    addr: Addr,
    bytes: u64,
    byte: u8,
    /// 0: a block of its own.
    import: u64,
    /// Where its bytes are in order without being waited for.
    stream: Option<Stream>,
}

/// A copy that was queued: when it has run, it must be all of this byte.
struct Copied {
    client: usize,
    addr: Addr,
    bytes: u64,
    byte: u8,
}

struct Ticket {
    client: usize,
    text: String,
    bytes: u64,
    byte: u8,
}

/// A message: each tensor's byte, and how many there are.
type Sent = Vec<(u8, u64)>;

struct Lab<'a> {
    arena: &'a Arena,
    clients: Vec<Arc<Client>>,
    streams: Vec<[Stream; STREAMS]>,
    channels: HashMap<(usize, usize), Channel>,
    on_the_way: HashMap<(usize, usize), VecDeque<Sent>>,
    things: Vec<Thing>,
    copies: Vec<Copied>,
    tickets: Vec<Ticket>,
    stalls: Vec<Stall>,
    made: u64,
    named: u64,
}

impl<'a> Lab<'a> {
    fn new(arena: &'a Arena) -> Self {
        let mut lab = Self {
            arena,
            clients: Vec::new(),
            streams: Vec::new(),
            channels: HashMap::new(),
            on_the_way: HashMap::new(),
            things: Vec::new(),
            copies: Vec::new(),
            tickets: Vec::new(),
            stalls: Vec::new(),
            made: 0,
            named: 0,
        };
        for number in 0..CLIENTS {
            lab.come(number);
            (0..number).for_each(|other| lab.connect(number, other));
        }
        lab
    }

    /// A new client, in a place or behind the last.
    fn come(&mut self, number: usize) {
        self.named += 1;
        let client = self.arena.client(&format!("c{}", self.named));
        let driver = client.driver(Place::Host).unwrap();
        let streams = std::array::from_fn(|_| driver.stream_create().unwrap());
        if number == self.clients.len() {
            self.clients.push(client);
            self.streams.push(streams);
        } else {
            self.clients[number] = client;
            self.streams[number] = streams;
        }
    }

    fn connect(&mut self, a: usize, b: usize) {
        let (to_b, to_a) = channels(&self.clients[a], &self.clients[b]);
        self.channels.insert((a, b), to_b);
        self.channels.insert((b, a), to_a);
    }

    fn close(&mut self, a: usize, b: usize) {
        for way in [(a, b), (b, a)] {
            self.channels.remove(&way).unwrap().close();
            self.on_the_way.remove(&way);
        }
    }

    fn pick(&self, number: usize, of: impl Fn(&Thing) -> bool) -> Option<usize> {
        let fit: Vec<usize> = (0..self.things.len()).filter(|at| of(&self.things[*at])).collect();
        fit.get(number % fit.len().max(1)).copied()
    }

    fn make(&mut self, client: usize, stream: usize, bytes: u64) {
        let stream = self.streams[client][stream];
        let addr = self.clients[client].heap(Place::Host).unwrap().allocate(bytes, stream).unwrap();
        self.made += 1;
        let byte = (self.made % 251 + 1) as u8;
        self.clients[client].driver(Place::Host).unwrap().fill(addr, byte, bytes, stream).unwrap();
        self.things.push(Thing { client, addr, bytes, byte, import: 0, stream: Some(stream) });
    }

    /// As it is sent, from this stream: what the CPU may read already needs no signal.
    fn outgoing(&self, thing: &Thing) -> Outgoing {
        // Part of a block. What was received goes on as it is.
        let skip = if thing.import == 0 { thing.bytes / 3 } else { 0 };
        Outgoing {
            addr: thing.addr + skip,
            bytes: thing.bytes - skip,
            place: Place::Host,
            stream: thing.stream,
            import: Some(thing.import).filter(|import| *import != 0),
            read_only: false,
            way: Way::Found,
        }
    }

    fn send(&mut self, from: usize, to: usize, picks: [usize; 2]) {
        let way = (from, to);
        let queue = self.on_the_way.entry(way).or_default();
        if queue.len() >= QUEUED {
            return;
        }
        let things: Vec<Thing> =
            picks.iter().filter_map(|n| self.pick(*n, |t| t.client == from)).map(|at| self.things[at].clone()).collect();
        let outgoing: Vec<Outgoing> = things.iter().map(|thing| self.outgoing(thing)).collect();
        self.clients[from].send(&self.channels[&way], tree(), &outgoing, None).unwrap();
        let sent = things.iter().zip(&outgoing).map(|(thing, outgoing)| (thing.byte, outgoing.bytes)).collect();
        self.on_the_way.get_mut(&way).unwrap().push_back(sent);
    }

    fn receive(&mut self, at: usize, from: usize, stream: usize, lazy: bool) {
        let Some(sent) = self.on_the_way.get_mut(&(from, at)).and_then(VecDeque::pop_front) else { return };
        let stream = self.streams[at][stream];
        let on = |_: &DeviceInfo| Some(stream);
        let options = ReceiveOptions { timeout: Some(BOUND), lazy, wait: false, stream: &on };
        let message = self.clients[at].receive(&self.channels[&(at, from)], &options).unwrap();
        self.take_up(at, &message.tensors, &sent, (!lazy).then_some(stream));
    }

    fn take_up(&mut self, client: usize, tensors: &[Incoming], sent: &[(u8, u64)], stream: Option<Stream>) {
        assert_eq!(tensors.iter().map(|tensor| tensor.bytes).collect::<Vec<_>>(), sent.iter().map(|(_, bytes)| *bytes).collect::<Vec<_>>());
        for (tensor, (byte, bytes)) in tensors.iter().zip(sent) {
            self.things.push(Thing { client, addr: tensor.addr, bytes: *bytes, byte: *byte, import: tensor.import, stream });
        }
    }

    /// Lets go of a thing, whatever still reads it.
    fn part(&mut self, at: usize) {
        let thing = self.things.swap_remove(at);
        let client = &self.clients[thing.client];
        match thing.import {
            0 => client.free(thing.addr).unwrap(),
            import => client.release(import).unwrap(),
        }
    }

    /// Queues a copy of it into memory of the reader's own, which is checked when it has run.
    fn read(&mut self, at: usize, stream: usize) {
        let Thing { client: number, bytes, byte, import, stream: own, .. } = self.things[at];
        let (client, stream) = (self.clients[number].clone(), self.streams[number][stream]);
        let (heap, driver) = (client.heap(Place::Host).unwrap(), client.driver(Place::Host).unwrap());
        let from = match (import, own) {
            (0, _) => {
                // As a program does that reads on one stream what another makes.
                let event = driver.event_create().unwrap();
                driver.event_record(event, own.unwrap()).unwrap();
                driver.stream_wait_event(stream, event).unwrap();
                driver.event_destroy(event).unwrap();
                heap.record_stream(self.things[at].addr, stream).unwrap();
                self.things[at].addr
            }
            (import, _) => client.open_import(import, Some(stream), false, Some(BOUND)).unwrap(),
        };
        self.things[at].addr = from;
        self.things[at].stream.get_or_insert(stream);
        let to = heap.allocate(bytes, stream).unwrap();
        driver.copy(to, from, bytes, stream).unwrap();
        self.copies.push(Copied { client: number, addr: to, bytes, byte });
    }

    fn adopt(&mut self, at: usize) {
        let Thing { client, import, .. } = self.things[at];
        match self.clients[client].adopt(import, Some(std::time::Duration::ZERO)) {
            // Not there yet, or a value of its own that came back.
            Ok(()) | Err(Error::Timeout(_) | Error::InvalidArgument(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn ticket(&mut self, at: usize, many: bool) {
        let thing = self.things[at].clone();
        let outgoing = self.outgoing(&thing);
        let (text, copied) = self.clients[thing.client].ticket(tree(), &[outgoing], many).unwrap();
        assert_eq!(copied, [false]);
        self.tickets.push(Ticket { client: thing.client, text, bytes: outgoing.bytes, byte: thing.byte });
    }

    fn redeem(&mut self, ticket: usize, client: usize) {
        let Ticket { text, bytes, byte, .. } = &self.tickets[ticket];
        let (bytes, byte) = (*bytes, *byte);
        match self.clients[client].redeem(text) {
            Ok(message) => self.take_up(client, &message.tensors, &[(byte, bytes)], None),
            Err(Error::Stale(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn resume_all(&mut self) {
        self.stalls.drain(..).for_each(Stall::release);
        for (client, streams) in self.clients.iter().zip(&self.streams) {
            let driver = client.driver(Place::Host).unwrap();
            streams.iter().for_each(|stream| driver.stream_synchronize(*stream).unwrap());
        }
    }

    /// What was copied so far, by whom.
    fn check(&mut self, of: impl Fn(&Copied) -> bool) {
        let (over, left) = std::mem::take(&mut self.copies).into_iter().partition::<Vec<_>, _>(of);
        self.copies = left;
        for copied in over {
            assert!(is_all(copied.addr, copied.bytes, copied.byte), "{} bytes are not all {}", copied.bytes, copied.byte);
            self.clients[copied.client].free(copied.addr).unwrap();
        }
    }

    /// It lets go of everything, and goes if nothing of its own is lent any more: what is would be its process's until that ends.
    fn leave(&mut self, client: usize) {
        self.resume_all();
        self.check(|copied| copied.client == client);
        for other in (0..CLIENTS).filter(|other| *other != client) {
            self.close(client, other);
        }
        while let Some(at) = self.pick(0, |thing| thing.client == client) {
            self.part(at);
        }
        let (own, left) = std::mem::take(&mut self.tickets).into_iter().partition::<Vec<_>, _>(|ticket| ticket.client == client);
        self.tickets = left;
        own.into_iter().for_each(|ticket| self.clients[client].cancel_ticket(&ticket.text).unwrap());
        if self.clients[client].leases() == 0 {
            self.clients[client].detach();
            self.come(client);
        }
        (0..CLIENTS).filter(|other| *other != client).for_each(|other| self.connect(client, other));
    }

    fn act(&mut self, step: Step) {
        match step {
            Step::Make { client, stream, bytes } => self.make(client, stream, bytes),
            Step::Free { block } => _ = self.pick(block, |thing| thing.import == 0).map(|at| self.part(at)),
            Step::Send { from, to, things } => self.send(from, to, things),
            Step::Receive { at, from, stream, lazy } => self.receive(at, from, stream, lazy),
            Step::Release { import } => _ = self.pick(import, |thing| thing.import != 0).map(|at| self.part(at)),
            Step::Read { thing, stream } => _ = self.pick(thing, |_| true).map(|at| self.read(at, stream)),
            Step::Stall { client, stream } => {
                let driver = self.clients[client].driver(Place::Host).unwrap();
                self.stalls.push(driver.host().unwrap().stall(self.streams[client][stream]));
            }
            Step::Resume { stall } if !self.stalls.is_empty() => self.stalls.remove(stall % self.stalls.len()).release(),
            Step::Adopt { import } => _ = self.pick(import, |thing| thing.import != 0).map(|at| self.adopt(at)),
            Step::Ticket { thing, many } => _ = self.pick(thing, |_| true).map(|at| self.ticket(at, many)),
            Step::Redeem { ticket, client } if !self.tickets.is_empty() => self.redeem(ticket % self.tickets.len(), client),
            Step::Cancel { ticket } if !self.tickets.is_empty() => {
                let ticket = self.tickets.swap_remove(ticket % self.tickets.len());
                self.clients[ticket.client].cancel_ticket(&ticket.text).unwrap();
            }
            Step::Resume { .. } | Step::Redeem { .. } | Step::Cancel { .. } => {}
            Step::Close { a, b } => {
                self.close(a, b);
                self.connect(a, b);
            }
            Step::Leave { client } => self.leave(client),
            Step::Trim { client } => _ = self.clients[client].heap(Place::Host).unwrap().empty_cache(),
        }
    }

    fn end(mut self) {
        self.resume_all();
        self.check(|_| true);
        for (a, b) in [(0, 1), (0, 2), (1, 2)] {
            self.close(a, b);
        }
        (0..self.things.len()).rev().for_each(|at| self.part(at));
        self.tickets.drain(..).for_each(|ticket| self.clients[ticket.client].cancel_ticket(&ticket.text).unwrap());
        for client in &self.clients {
            eventually("nothing is lent or held", || (client.leases(), client.imported_bytes()) == (0, 0));
            eventually("everything is free", || {
                client.heap(Place::Host).unwrap().empty_cache();
                client.heap(Place::Host).unwrap().reserved_bytes() == 0
            });
        }
        self.arena.settles_at(0);
        self.clients.iter().for_each(|client| client.detach());
    }
}

/// A case takes 50 ms: few, unless more are asked for.
fn config() -> ProptestConfig {
    ProptestConfig::with_cases(std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(40))
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn whatever_clients_do_values_stay_what_they_are_and_nothing_is_left_behind(steps in prop::collection::vec(step(), 1..120)) {
        let arena = Arena::with(16 << 30, CHUNK);
        let mut lab = Lab::new(&arena);
        steps.into_iter().for_each(|step| lab.act(step));
        lab.end();
    }
}
