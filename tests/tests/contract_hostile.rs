//! Peers that do not keep to the wire: whatever they send is refused by name, touches nothing and leaves nothing held.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{block, channels, eventually, fd, is_all, outgoing, plainly, sniff, tree, Arena, BOUND, MIB};
use millpond_ipc::client::{Channel, Client, Error, Place};
use serde_json::{json, Value};
use std::sync::Arc;

#[test]
fn role() {
    common::role();
}

fn put(channel: &Channel, length: u32, body: &[u8]) {
    let mut frame = length.to_be_bytes().to_vec();
    frame.extend_from_slice(body);
    let mut rest = frame.as_slice();
    while !rest.is_empty() {
        let n = rustix::io::write(fd(channel), rest).unwrap();
        rest = &rest[n..];
    }
}

/// Sends a real message whose frame is changed on its way; what the receiver says.
fn tampered(a: &Arc<Client>, b: &Arc<Client>, addr: u64, change: impl FnOnce(&mut Value)) -> Result<u64, Error> {
    let (to_b, to_a) = channels(a, b);
    a.send(&to_b, tree(), &[outgoing(addr, MIB)], None).unwrap();
    let mut frame: Value = serde_json::from_slice(&sniff(&to_a)).unwrap();
    change(&mut frame);
    let body = serde_json::to_vec(&frame).unwrap();
    // From a thread: a large frame does not fit into the socket.
    let received = std::thread::scope(|scope| {
        scope.spawn(|| put(&to_b, body.len() as u32, &body));
        b.receive(&to_a, &plainly(false))
    });
    received.map(|message| {
        let addr = message.tensors[0].addr;
        message.tensors.iter().for_each(|tensor| b.release(tensor.import).unwrap());
        addr
    })
}

type Change = Box<dyn FnOnce(&mut Value)>;

fn set(field: &'static str, value: Value) -> (String, Change) {
    (
        format!("{field} = {}", value.to_string().chars().take(60).collect::<String>()),
        Box::new(move |frame| frame["tensors"][0][field] = value),
    )
}

#[test]
fn a_descriptor_that_is_not_what_was_lent_is_refused() {
    let arena = Arena::new();
    let (a, b) = (arena.client("a"), arena.client("b"));
    let addr = block(&a, MIB, 1);
    tampered(&a, &b, addr, |_| {}).unwrap();
    // What a real one looks like.
    let (to_b, to_a) = channels(&a, &b);
    a.send(&to_b, tree(), &[outgoing(addr, MIB)], None).unwrap();
    let real: Value = serde_json::from_slice(&sniff(&to_a)).unwrap();
    drop((to_a, to_b));
    let real = &real["tensors"][0];
    let (window, epoch) = (real["w"].as_u64().unwrap(), real["e"].as_u64().unwrap());
    let hold = |n: usize, value: u64| {
        let change: Change = Box::new(move |frame| frame["tensors"][0]["h"][n] = json!(value));
        (format!("h[{n}] = {value}"), change)
    };
    let own = b.welcome().devices[0].window;
    let mut changes = vec![
        set("w", json!(0)),
        set("w", json!(own)),
        set("w", json!(window + 1000)),
        set("w", json!(u32::MAX - 1)),
        set("w", json!(-1)),
        set("w", json!("1")),
        set("o", json!(512)),
        set("o", json!(u64::MAX)),
        set("o", json!(1_u64 << 63)),
        set("o", json!(1.5)),
        set("n", json!(0)),
        set("n", json!(MIB + 512)),
        set("n", json!(MIB - 512)),
        set("n", json!(u64::MAX)),
        set("n", Value::Null),
        set("e", json!([])),
        set("e", json!([epoch + 1])),
        set("e", json!([epoch, epoch])),
        set("e", json!([epoch + 1, epoch])),
        set("e", json!(vec![epoch; 100_000])),
        set("e", json!((0..100_000).collect::<Vec<u64>>())),
        set("e", json!({ "0": epoch })),
        set("e", json!([[epoch, 2]])),
        set("e", json!([[epoch, 0]])),
        set("e", json!([[epoch, u64::MAX]])),
        set("e", json!([[1, u64::MAX], [1, u64::MAX]])),
        set("e", json!([[u64::MAX, 2]])),
        set("e", json!([[0, 1_u64 << 40]])),
        set("e", json!([[epoch]])),
        set("e", json!([[epoch, 1, 1]])),
        set("e", json!([[epoch, 1], epoch])),
        set("e", json!([[[epoch, 1]]])),
        set("e", json!(epoch + 1)),
        set("e", json!(-1)),
        set("e", json!(0.5)),
        set("e", json!("1")),
        set("e", Value::Null),
        set("h", json!([0, 0])),
        set("h", json!([0, 0, 0, 0])),
        set("h", json!("0")),
        set("r", json!([0])),
        set("r", json!([u32::MAX])),
        set("ro", json!(2)),
    ];
    for producer in [u64::from(b.welcome().client), 62, 63, 64, 255, 256, u64::from(u32::MAX), 1 << 40] {
        changes.push(hold(0, producer));
    }
    for index in [1, 8191, 8192, 16383, 16384, u64::from(u32::MAX)] {
        changes.push(hold(1, index));
    }
    for generation in [0, 1 << 20, u64::from(u32::MAX)] {
        changes.push(hold(2, generation));
    }
    for (what, change) in changes {
        match tampered(&a, &b, addr, change) {
            Err(Error::Protocol(_) | Error::Stale(_)) => {}
            other => panic!("{what}: {other:?}"),
        }
        assert_eq!(b.imported_bytes(), 0, "{what}: nothing stays held");
        eventually(&what, || a.leases() == 0);
    }
    // And a good one still passes, also where its run is written out.
    tampered(&a, &b, addr, |_| {}).unwrap();
    tampered(&a, &b, addr, |frame| frame["tensors"][0]["e"] = json!([[epoch, 1]])).unwrap();
}

#[test]
fn a_large_values_chunks_are_one_short_run_and_any_other_is_refused() {
    const CHUNK: u64 = 2 * MIB;
    let arena = Arena::with(4 << 30, CHUNK);
    let (a, b) = (arena.client("a"), arena.client("b"));
    let (to_b, to_a) = channels(&a, &b);
    let bytes = 256 * CHUNK;
    let addr = block(&a, bytes, 3);
    let taken = |change: &dyn Fn(&mut Value)| {
        a.send(&to_b, tree(), &[outgoing(addr, bytes)], None).unwrap();
        let mut frame: Value = serde_json::from_slice(&sniff(&to_a)).unwrap();
        change(&mut frame["tensors"][0]["e"]);
        let body = serde_json::to_vec(&frame).unwrap();
        put(&to_b, body.len() as u32, &body);
        let received = b.receive(&to_a, &plainly(false));
        received.map(|message| {
            assert!(is_all(message.tensors[0].addr, bytes, 3));
            b.release(message.tensors[0].import).unwrap();
            body.len()
        })
    };
    let length = taken(&|epochs| assert_eq!((epochs.as_array().unwrap().len(), epochs[0][1].as_u64()), (1, Some(256)))).unwrap();
    assert!(length < 200, "{length} bytes for 256 chunks");
    // The same, cut otherwise.
    let first = |epochs: &Value| epochs[0][0].as_u64().unwrap();
    taken(&|epochs| *epochs = json!([[first(epochs), 100], first(epochs) + 100, [first(epochs) + 101, 155]])).unwrap();
    let wrong: [&dyn Fn(u64) -> Value; 7] = [
        &|first| json!([[first, 255]]),
        &|first| json!([[first, 257]]),
        &|first| json!([[first + 1, 255], first]),
        &|first| json!([[first, 128], [first, 128]]),
        &|first| json!([[first, 128], [first + 127, 128]]),
        &|first| json!([[first, 1_u64 << 62]]),
        &|first| json!((0..256).map(|n| json!([first + n, u64::from(u32::MAX)])).collect::<Vec<_>>()),
    ];
    for (n, wrong) in wrong.iter().enumerate() {
        match taken(&|epochs| *epochs = wrong(first(epochs))) {
            Err(Error::Protocol(_) | Error::Stale(_)) => {}
            other => panic!("{n}: {other:?}"),
        }
        assert_eq!(b.imported_bytes(), 0, "{n}: nothing stays held");
    }
    taken(&|_| {}).unwrap();
}

#[test]
fn a_message_that_is_none_is_refused() {
    let arena = Arena::new();
    let (a, b) = (arena.client("a"), arena.client("b"));
    let addr = block(&a, MIB, 1);
    let changes: Vec<(&str, Change)> = vec![
        ("another kind", Box::new(|frame| frame["kind"] = json!("massage"))),
        ("no kind", Box::new(|frame| drop(frame.as_object_mut().unwrap().remove("kind")))),
        ("no tree", Box::new(|frame| drop(frame.as_object_mut().unwrap().remove("tree")))),
        ("tensors are no list", Box::new(|frame| frame["tensors"] = json!({}))),
        ("signals are no pairs", Box::new(|frame| frame["ready"] = json!([[1, 2, 3]]))),
        (
            "a signal of no timeline",
            Box::new(|frame| {
                frame["ready"] = json!([[u32::MAX, 1]]);
                frame["tensors"][0]["r"] = json!([0]);
            }),
        ),
        ("the only signal, of no timeline", Box::new(|frame| frame["ready"] = json!([[u32::MAX, 1]]))),
        ("it is not said which of two signals", Box::new(|frame| frame["ready"] = json!([[0, 0], [0, 0]]))),
        (
            "one hold a hundred thousand times",
            Box::new(|frame| {
                let one = frame["tensors"][0].clone();
                frame["tensors"] = Value::Array(vec![one; 100_000]);
            }),
        ),
    ];
    for (what, change) in changes {
        match tampered(&a, &b, addr, change) {
            Err(Error::Protocol(_) | Error::Stale(_)) => {}
            other => panic!("{what}: {other:?}"),
        }
        assert_eq!(b.imported_bytes(), 0, "{what}");
        eventually(what, || a.leases() == 0);
    }
    // Unknown fields are ignored.
    tampered(&a, &b, addr, |frame| {
        frame["colour"] = json!("blue");
        frame["tensors"][0]["colour"] = json!([1, 2]);
    })
    .unwrap();
}

#[test]
fn bytes_that_are_no_frame_close_the_channel() {
    let arena = Arena::new();
    let (a, b) = (arena.client("a"), arena.client("b"));
    let deep = "[".repeat(100_000);
    let deep_tree = format!("{{\"kind\":\"message\",\"tree\":{deep}{}}}", "]".repeat(100_000));
    let frames: Vec<(u32, Vec<u8>)> = vec![
        (0, Vec::new()),
        (u32::MAX, b"x".to_vec()),
        ((64 << 20) + 1, Vec::new()),
        (3, b"\xff\xfe\xfd".to_vec()),
        (35, b"{\"kind\":\"message\",\"tree\":0,\"x\":\"\xff\"}".to_vec()),
        (2, b"{}".to_vec()),
        (4, b"null".to_vec()),
        (deep.len() as u32, deep.clone().into_bytes()),
    ];
    for (length, body) in frames {
        let (to_b, to_a) = channels(&a, &b);
        std::thread::scope(|scope| {
            scope.spawn(|| put(&to_b, length, &body));
            assert!(matches!(b.receive(&to_a, &plainly(false)), Err(Error::Protocol(_))), "{length}");
        });
        assert!(matches!(b.receive(&to_a, &plainly(false)), Err(Error::Closed(_))));
    }
    // Cut off in the middle of a frame: as if it had never been begun.
    let (to_b, to_a) = channels(&a, &b);
    put(&to_b, 100, b"{\"kind\":");
    to_b.close();
    assert!(matches!(b.receive(&to_a, &plainly(false)), Err(Error::Closed(_))));
    // However deep a tree is, here it is only text.
    let (to_b, to_a) = channels(&a, &b);
    std::thread::scope(|scope| {
        scope.spawn(|| put(&to_b, deep_tree.len() as u32, deep_tree.as_bytes()));
        match b.receive(&to_a, &plainly(false)) {
            Ok(message) => assert_eq!(message.tree.get().len(), 200_000),
            Err(Error::Protocol(_)) => {}
            Err(other) => panic!("{other}"),
        }
    });
}

#[test]
fn a_frame_that_comes_twice_is_taken_once() {
    let arena = Arena::new();
    let (a, b) = (arena.client("a"), arena.client("b"));
    let addr = block(&a, MIB, 1);
    let (to_b, to_a) = channels(&a, &b);
    a.send(&to_b, tree(), &[outgoing(addr, MIB)], None).unwrap();
    let frame = sniff(&to_a);
    put(&to_b, frame.len() as u32, &frame);
    let message = b.receive(&to_a, &plainly(false)).unwrap();
    put(&to_b, frame.len() as u32, &frame);
    assert!(matches!(b.receive(&to_a, &plainly(false)), Err(Error::Stale(_))));
    // The refusal has not ended the hold of the one that is in use.
    assert_eq!((a.leases(), b.imported_bytes()), (1, MIB));
    assert!(is_all(message.tensors[0].addr, MIB, 1));
    b.release(message.tensors[0].import).unwrap();
    put(&to_b, frame.len() as u32, &frame);
    assert!(matches!(b.receive(&to_a, &plainly(false)), Err(Error::Stale(_))));
    eventually("the lease ends", || a.leases() == 0);
}

#[test]
fn a_frame_for_another_is_refused() {
    let arena = Arena::new();
    let (a, b, c) = (arena.client("a"), arena.client("b"), arena.client("c"));
    let addr = block(&a, MIB, 1);
    let (to_b, to_a) = channels(&a, &b);
    a.send(&to_b, tree(), &[outgoing(addr, MIB)], None).unwrap();
    let frame = sniff(&to_a);
    // b hands c what is b's, instead of passing it on.
    let (b_to_c, c_to_b) = std::thread::scope(|scope| {
        let x = scope.spawn(|| b.connect("c", BOUND).unwrap());
        let y = scope.spawn(|| c.connect("b", BOUND).unwrap());
        (x.join().unwrap(), y.join().unwrap())
    });
    put(&b_to_c, frame.len() as u32, &frame);
    assert!(matches!(c.receive(&c_to_b, &plainly(false)), Err(Error::Stale(_))));
    assert_eq!(a.leases(), 1, "it is still b's");
    put(&to_b, frame.len() as u32, &frame);
    let message = b.receive(&to_a, &plainly(false)).unwrap();
    b.release(message.tensors[0].import).unwrap();
    eventually("the lease ends", || a.leases() == 0);
}

#[test]
fn an_old_reference_is_stale_by_name_and_never_old_bytes() {
    let arena = Arena::new();
    let (a, b) = (arena.client("a"), arena.client("b"));
    let addr = block(&a, 32 * MIB, 1);
    let mut old = Value::Null;
    tampered(&a, &b, addr, |frame| old = frame["tensors"][0]["e"].clone()).unwrap();
    eventually("the lease ends", || a.leases() == 0);
    // Given back, and had again: the same address, another epoch.
    a.free(addr).unwrap();
    let heap = a.heap(Place::Host).unwrap();
    heap.trim(u64::MAX);
    arena.settles_at(0);
    let again = block(&a, 32 * MIB, 2);
    assert_eq!(again, addr);
    let error = tampered(&a, &b, again, |frame| frame["tensors"][0]["e"] = old.clone()).unwrap_err();
    assert!(matches!(error, Error::Stale(_)), "{error}");
    tampered(&a, &b, again, |_| {}).unwrap();
}
