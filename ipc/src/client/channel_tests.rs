//! The end of a channel: what is unread then, and whose it was.

use rustix::net::{socketpair, AddressFamily, SocketFlags, SocketType};
use serde_json::json;

use super::*;
use crate::control::{Claim, ClientRow, ClientState};

const ME: u32 = 1;

fn office() -> (Arc<Control>, Office) {
    let control = Arc::new(Control::create([1, 2], 3).unwrap());
    (control.clone(), Office::new(control, ME))
}

fn peer(client: u32, serial: u64) -> Peer {
    Peer { client, serial, name: String::new(), pid: 0 }
}

/// A client has a slot, and a value of it is on its way here.
fn sends(control: &Control, sender: &Peer) {
    control.client(sender.client).unwrap().write(&ClientRow { serial: sender.serial, ..ClientRow::default() });
    control.marks(sender.client).unwrap().reach(0);
    let claim = Claim { lease: 1, window: 2, offset: 0, bytes: 8 };
    control.hold(sender.client, 0).unwrap().make(sender.client as u8, ME as u8, claim).unwrap();
}

fn state(control: &Control, sender: &Peer) -> HoldState {
    control.hold(sender.client, 0).unwrap().word().state()
}

/// Another thread has just received a frame when the channel is closed, and receives no more: what came behind it ends all the same.
#[test]
fn what_is_unread_ends_whoever_reads_when_the_channel_is_closed() {
    for _ in 0..100 {
        let (control, office) = office();
        let living = peer(4, 10);
        sends(&control, &living);
        office.opened(&living);
        let flags = SocketFlags::CLOEXEC;
        let (here, there) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let channel = Channel::new(here, living.clone(), Arc::new(office));
        let hold = control.hold(living.client, 0).unwrap();
        let last = json!({"kind": "message", "tree": 0, "tensors": [{"w": 2, "o": 0, "n": 8, "h": [4, 0, hold.word().generation()]}]});
        // Long to be read, so that the two meet.
        let first = json!({"kind": "message", "tree": vec![0; 20_000]});
        for frame in [first, last] {
            send_frame(there.as_fd(), frame.to_string().as_bytes(), &[], None).unwrap();
        }
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| channel.receive(None));
            while channel.reader.try_lock().is_some() && !receiver.is_finished() {
                std::hint::spin_loop();
            }
            channel.close();
        });
        assert_eq!(state(&control, &living), HoldState::Done);
    }
}

/// A channel, and its other end.
fn channel(office: &Arc<Office>, peer: &Peer) -> (Channel, OwnedFd) {
    let (here, there) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    office.opened(peer);
    (Channel::new(here, peer.clone(), office.clone()), there)
}

fn pair() -> (Channel, OwnedFd) {
    channel(&Arc::new(office().1), &peer(4, 10))
}

/// The peer does not read: what no byte of has left is not sent, and that is all.
#[test]
fn a_send_that_times_out_before_its_first_byte_leaves_the_channel_open() {
    const SOON: Option<Duration> = Some(Duration::from_millis(20));
    let (channel, there) = pair();
    let mut sent = 0_u32;
    let error = loop {
        match channel.send(sent.to_string().as_bytes(), SOON) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Timeout(_)), "{error}");
    assert!(matches!(channel.send(b"neither", SOON), Err(Error::Timeout(_))));
    // Every frame that was said to be sent is there, whole and in order, and then the next.
    let mut reader = FrameReader::default();
    for number in 0..sent {
        assert_eq!(reader.read_frame(there.as_fd(), SOON, false).unwrap(), number.to_string().into_bytes());
    }
    channel.send(b"again", SOON).unwrap();
    assert_eq!(reader.read_frame(there.as_fd(), SOON, false).unwrap(), b"again");
}

#[test]
fn a_send_that_times_out_in_the_middle_of_its_frame_ends_the_channel() {
    let (channel, _there) = pair();
    let error = channel.send(&vec![b' '; 8 << 20], Some(Duration::from_millis(20))).unwrap_err();
    assert!(matches!(error, Error::Timeout(_)), "{error}");
    assert!(matches!(channel.send(b"no more", None), Err(Error::Closed(_))));
}

#[test]
fn a_channel_that_there_was_no_descriptor_for_lets_go_of_what_was_sent_on_it() {
    let (control, office) = office();
    let living = peer(4, 10);
    sends(&control, &living);
    office.opened(&living);
    office.refused(&living);
    assert_eq!(state(&control, &living), HoldState::Done);
    // Not while there is another channel to it, which it may have been sent on.
    let (control, office) = self::office();
    sends(&control, &living);
    office.opened(&living);
    office.opened(&living);
    office.refused(&living);
    assert_eq!(state(&control, &living), HoldState::InFlight);
}

#[test]
fn what_a_dead_sender_had_not_sent_ends() {
    let (control, office) = office();
    let dead = peer(4, 10);
    sends(&control, &dead);
    office.died(&dead);
    assert_eq!(state(&control, &dead), HoldState::Done);
}

#[test]
fn what_came_over_a_channel_that_is_still_to_be_read_stays() {
    let (control, office) = office();
    let dead = peer(4, 10);
    sends(&control, &dead);
    // The owner's answer was read; whoever asked has not come to it yet.
    office.opened(&dead);
    office.died(&dead);
    assert_eq!(state(&control, &dead), HoldState::InFlight);
    office.ended(&dead, Vec::new(), true);
    assert_eq!(state(&control, &dead), HoldState::Done);
}

/// Without an owner its row says for ever that it lives.
#[test]
fn what_a_dead_sender_had_not_sent_ends_with_its_channel_whatever_its_row_says() {
    let (control, office) = office();
    let dead = peer(4, 10);
    sends(&control, &dead);
    let state_word = ClientState::Alive as u64;
    control.client(dead.client).unwrap().write(&ClientRow { serial: dead.serial, state: state_word, ..ClientRow::default() });
    office.opened(&dead);
    office.opened(&dead);
    office.died(&dead);
    office.ended(&dead, Vec::new(), false);
    assert_eq!(state(&control, &dead), HoldState::InFlight, "another channel is still to be read");
    office.ended(&dead, Vec::new(), false);
    assert_eq!(state(&control, &dead), HoldState::Done);
}

/// A socket that a forked child of the peer has too.
#[test]
fn a_channel_is_held_until_nobody_has_its_other_end() {
    let (_, office) = office();
    let (office, peer) = (Arc::new(office), peer(4, 10));
    assert!(!office.is_held(peer.serial));
    let mut others = Vec::new();
    let mut channels = Vec::new();
    for _ in 0..2 {
        let (here, there) = channel(&office, &peer);
        channels.push(here);
        others.push([there.try_clone().unwrap(), there]);
    }
    for [childs, its] in others {
        drop(its);
        assert!(office.is_held(peer.serial));
        drop(childs);
    }
    assert!(!office.is_held(peer.serial));
    drop(channels);
    assert!(office.open.lock().is_empty());
}

#[test]
fn what_the_next_in_a_dead_ones_slot_has_sent_stays() {
    let (control, office) = office();
    let (dead, next) = (peer(4, 10), peer(4, 11));
    sends(&control, &next);
    office.died(&dead);
    assert_eq!(state(&control, &next), HoldState::InFlight);
}
