//! The control memory: a row written and read, a snapshot of a full ledger, holds.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;

use criterion::{criterion_group, criterion_main, Criterion};
use millpond_allocator::driver::DeviceId;
use millpond_ipc::control::{Claim, ClientRow, ClientState, Control, DeviceRow, GrantRow, LiveRow, MAX_CLIENTS};
use millpond_ipc::ledger::Ledger;
use millpond_ipc::lends;

fn full() -> Control {
    let control = Control::create([1, 2], 3).unwrap();
    let id = u128::from_be_bytes(DeviceId::host(0).bytes());
    let row = DeviceRow { id_high: (id >> 64) as u64, id_low: id as u64, total: 1 << 37, limit: 1 << 37, ..DeviceRow::default() };
    control.device(0).unwrap().write(&row);
    for slot in 0..MAX_CLIENTS as u32 {
        let mut row = ClientRow { serial: 1, state: ClientState::Alive as u64, pid: 7, ..ClientRow::default() };
        row.name[..6].copy_from_slice(b"worker");
        control.client(slot).unwrap().write(&row);
        control.grant(slot, 0).unwrap().write(&GrantRow { reserved: 1 << 30, chunks: 1, ..GrantRow::default() });
        control.live(slot, 0).unwrap().write(&LiveRow { allocated: 1 << 29, blocks: 9, ..LiveRow::default() });
    }
    control
}

fn cells(c: &mut Criterion) {
    let control = full();
    let cell = control.live(0, 0).unwrap();
    let mut row = LiveRow::default();
    c.bench_function("a live row written", |b| {
        b.iter(|| {
            row.allocated += 512;
            cell.write(black_box(&row));
        });
    });
    c.bench_function("a live row read", |b| b.iter(|| cell.read().unwrap()));
}

fn ledgers(c: &mut Criterion) {
    let control = full();
    c.bench_function("a ledger of 64 clients", |b| b.iter(|| Ledger::read(&control, 0)));
    c.bench_function("a ledger of 64 clients with lends", |b| b.iter(|| Ledger::read_with_lends(&control, 0)));
    let claim = Claim { lease: 1, window: 2, offset: 0, bytes: 512 };
    for place in 0..1000 {
        control.hold(0, place).unwrap().make(0, 1, claim).unwrap();
    }
    control.marks(0).unwrap().reach(999);
    c.bench_function("lends of 1000 holds", |b| b.iter(|| lends::read(&control)));
    let hold = control.hold(1, 0).unwrap();
    c.bench_function("a hold made, taken, done and free again", |b| {
        b.iter(|| {
            let generation = hold.make(1, 2, claim).unwrap();
            hold.take(generation, 2);
            hold.finish(generation, 2, None);
            hold.recycle(hold.word())
        });
    });
}

criterion_group!(benches, cells, ledgers);
criterion_main!(benches);
