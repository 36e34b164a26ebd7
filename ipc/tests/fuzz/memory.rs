//! Arbitrary words in the control memory, while an owner and its clients work with it: nobody reads or writes outside what it was
//! given (that would end this process), nobody hangs, and the owner goes on to serve the next.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millpond_allocator::driver::{DeviceInfo, Stream};
use millpond_ipc::client::{Channel, Client, Options, Outgoing, Place, ReceiveOptions, Way};
use millpond_ipc::control::{Control, FORWARDED, HOLDS_PER_CLIENT, MAX_CLIENTS};
use rustix::io::pwrite;

use crate::material::Dice;
use crate::raw::*;

const HOLD: u64 = 64;
const TABLE: u64 = HOLD * HOLDS_PER_CLIENT as u64;

fn no_stream(_: &DeviceInfo) -> Option<Stream> {
    None
}

/// A place of a word: any but the first page, which says what the file is; those that are in use more often.
fn place(dice: &mut Dice, bytes: u64) -> u64 {
    let holds = bytes - TABLE * MAX_CLIENTS as u64;
    let at = match dice.below(10) {
        0 => 4096 + dice.next() % (bytes - 4096),
        1..=4 => 4096 + dice.next() % (holds - 4096),
        half => {
            let first = if half < 8 { 0 } else { FORWARDED as u64 * HOLD };
            holds + dice.below(4) as u64 * TABLE + first + dice.next() % (32 * HOLD)
        }
    };
    at & !7
}

fn word(dice: &mut Dice) -> u64 {
    const EDGES: [u64; 10] = [0, 1, 2, 127, 8192, 1 << 32, 1 << 62, (1 << 62) + 1, 1 << 63, u64::MAX];
    match dice.below(4) {
        0 => dice.next(),
        // A hold in some state, of some generation, between those that are here.
        1 => (dice.below(6) as u64) << 32 | (dice.below(4) as u64) << 16 | (dice.below(4) as u64) << 8 | dice.below(6) as u64,
        2 => dice.next() % (4 * UNIT),
        _ => *dice.of(&EDGES),
    }
}

fn scribble(control: &Control, mut dice: Dice, until: &AtomicBool) {
    let bytes = rustix::fs::fstat(control.fd()).unwrap().st_size as u64;
    while !until.load(Ordering::Relaxed) {
        for _ in 0..64 {
            let (at, word) = (place(&mut dice, bytes), word(&mut dice));
            pwrite(control.fd(), &word.to_ne_bytes(), at).unwrap();
        }
        std::thread::yield_now();
    }
}

/// Hands blocks over and looks at what comes, whatever the answers are.
fn hand_over(a: &Client, b: &Client, to_b: &Channel, to_a: &Channel, dice: &mut Dice) {
    let tree = || serde_json::value::RawValue::from_string("1".to_owned()).unwrap();
    let moment = Some(Duration::from_millis(20));
    let Ok(heap) = a.heap(Place::Host) else { return };
    for _ in 0..20 {
        let Ok(addr) = heap.allocate(UNIT, Stream::LEGACY) else { continue };
        let outgoing = Outgoing { addr, bytes: 4096, place: Place::Host, stream: None, import: None, read_only: false, way: Way::Found };
        let sent = a.send(to_b, tree(), &[outgoing, outgoing], moment);
        let _ = a.free(addr);
        let lazy = dice.percent(50);
        let options = ReceiveOptions { timeout: moment, lazy, wait: dice.percent(30), stream: &no_stream };
        if sent.is_err() {
            continue;
        }
        for tensor in b.receive(to_a, &options).map(|message| message.tensors).unwrap_or_default() {
            let opened = if lazy { b.open_import(tensor.import, None, false, moment) } else { Ok(tensor.addr) };
            if let Ok(addr) = opened.and_then(|addr| b.import_ready(tensor.import, moment).map(|()| addr)) {
                // SAFETY: mapped here as long as the import is held, whatever the memory's words say.
                std::hint::black_box(
                    unsafe { std::slice::from_raw_parts(addr as *const u8, 4096) }.iter().map(|b| u64::from(*b)).sum::<u64>(),
                );
            }
            let _ = b.release(tensor.import);
        }
        if dice.percent(20) {
            heap.trim(u64::MAX);
            let _ = a.leases();
        }
        drop((a.ledger(), b.ledger()));
    }
}

#[test]
fn an_owner_and_its_clients_survive_whatever_is_written_into_their_memory() {
    crate::campaign("memory", 6, |seed| {
        let served = Served::start(config());
        let attach = |name: &str| Client::attach(&Options::new(served.socket.clone(), served.key.clone(), name.to_owned())).unwrap();
        let (a, b, scribbler) = (attach("a"), attach("b"), served.attach("scribbler"));
        let (to_b, to_a) = std::thread::scope(|scope| {
            let to_b = scope.spawn(|| a.connect("b", PATIENCE).unwrap());
            let to_a = scope.spawn(|| b.connect("a", PATIENCE).unwrap());
            (to_b.join().unwrap(), to_a.join().unwrap())
        });
        let over = AtomicBool::new(false);
        let mut dice = Dice(seed);
        std::thread::scope(|scope| {
            scope.spawn(|| scribble(&scribbler.control, Dice(seed + 1_000_000), &over));
            hand_over(&a, &b, &to_b, &to_a, &mut dice);
            // One goes in the middle of it, and its part is settled on those words.
            drop((to_b, to_a));
            a.detach();
            drop(a);
            let _ = b.leases();
            over.store(true, Ordering::Relaxed);
        });
        b.detach();
        // The owner's books are its own: the next is served.
        let mut next = served.attach("next");
        let chunks = next.grow(UNIT);
        assert_eq!(next.release(&chunks).0, UNIT);
        next.detach();
    });
}
