//! Frames: a message made into one, sent over a socket, read and understood again.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::os::fd::AsFd;
use std::time::Duration;

use criterion::{criterion_group, criterion_main, Criterion};
use millpond_ipc::wire::{send_frame, Answer, Chunk, FrameReader, FromClient, FromOwner, Request};
use rustix::net::{socketpair, AddressFamily, SocketFlags, SocketType};

fn wire(c: &mut Criterion) {
    let call = FromClient::Call { call_id: 7, call: Request::Grow { device: 0, bytes: 2 << 30, press: true } };
    let bytes = serde_json::to_vec(&call).unwrap();
    c.bench_function("a growth encoded", |b| b.iter(|| serde_json::to_vec(black_box(&call)).unwrap()));
    c.bench_function("a growth parsed", |b| b.iter(|| serde_json::from_slice::<FromClient>(black_box(&bytes)).unwrap()));
    let chunks = (0..8).map(|n| Chunk { epoch: n + 1, offset: n << 31, bytes: 2 << 30 }).collect();
    let answer = FromOwner::Answer { call_id: 7, answer: Answer::Granted { chunks }, fds: 8 };
    let answer = serde_json::to_vec(&answer).unwrap();
    c.bench_function("an answer of 8 chunks parsed", |b| b.iter(|| serde_json::from_slice::<FromOwner>(black_box(&answer)).unwrap()));
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let mut reader = FrameReader::default();
    let patience = Some(Duration::from_secs(5));
    c.bench_function("a frame through a socket, one thread", |b| {
        b.iter(|| {
            send_frame(near.as_fd(), &bytes, &[], patience).unwrap();
            reader.read_frame(far.as_fd(), patience, false).unwrap()
        });
    });
}

criterion_group!(benches, wire);
criterion_main!(benches);
