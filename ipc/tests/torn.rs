//! Rows are read whole, whatever becomes of their writers: real processes on one file, killed in the middle of it.
//!
//! A writer is this program again: `MILLPOND_TORN_FD` names the file that it writes to until it is killed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, not only tests

use std::os::fd::{AsRawFd, BorrowedFd};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use millpond_ipc::control::{Control, LiveRow};
use rustix::io::{fcntl_setfd, FdFlags};

const FD: &str = "MILLPOND_TORN_FD";
/// Writers at a time, each with a row of its own.
const WRITERS: u32 = 3;
/// How long a writer lives, in reads.
const LIFE: u64 = 20_000;

/// A row of which every word says the same.
fn row(n: u64) -> LiveRow {
    LiveRow { allocated: n, peak: n, blocks: n, requested: n, largest_free: n, leased_out: n, leased_in: n, out_of_memory: n }
}

fn start(control: &Control, slot: u32) -> Child {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    command.args(["--exact", "a_writer", "--nocapture", "--test-threads", "1"]);
    command.env(FD, format!("{}:{slot}", control.fd().as_raw_fd())).stdout(std::process::Stdio::null());
    command.spawn().unwrap()
}

/// Not a test: the writer, where it is asked for.
#[test]
fn a_writer() {
    let Ok(asked) = std::env::var(FD) else { return };
    let (fd, slot) = asked.split_once(':').unwrap();
    // SAFETY: the parent gave us this descriptor by number, and it stays open for all of this process's life.
    let fd = unsafe { BorrowedFd::borrow_raw(fd.parse().unwrap()) };
    let control = Control::open(fd.try_clone_to_owned().unwrap()).unwrap();
    let cell = control.live(slot.parse().unwrap(), 0).unwrap();
    // On from where the one before us was killed, which may be in the middle of a row.
    let mut n = cell.read().unwrap().allocated;
    loop {
        n += 1;
        cell.write(&row(n));
    }
}

fn torn(reads: u64) {
    let control = Control::create([1, 2], 3).unwrap();
    fcntl_setfd(control.fd(), FdFlags::empty()).unwrap();
    let mut writers: Vec<Child> = (0..WRITERS).map(|slot| start(&control, slot)).collect();
    let mut last = vec![0; WRITERS as usize];
    let (mut kills, mut missed, mut moved) = (0, 0, 0_u64);
    let begin = Instant::now();
    while last.contains(&0) {
        assert!(begin.elapsed() < Duration::from_secs(20), "the writers do not write");
        std::thread::yield_now();
        last = (0..WRITERS).map(|slot| control.live(slot, 0).unwrap().read().map_or(0, |row| row.allocated)).collect();
    }
    for read in 0..reads {
        let slot = (read % u64::from(WRITERS)) as usize;
        match control.live(slot as u32, 0).unwrap().read() {
            Some(found) => {
                assert_eq!(found, row(found.allocated), "torn");
                assert!(found.allocated >= last[slot], "{} after {}", found.allocated, last[slot]);
                moved += u64::from(found.allocated > last[slot]);
                last[slot] = found.allocated;
            }
            // It never spins: after so many looks it says that it has none.
            None => missed += 1,
        }
        if read % LIFE == LIFE - 1 {
            let place = (read / LIFE % u64::from(WRITERS)) as usize;
            writers[place].kill().unwrap();
            writers[place].wait().unwrap();
            kills += 1;
            let whole = control.live(place as u32, 0).unwrap().read().unwrap();
            assert_eq!(whole, row(whole.allocated), "torn by a kill");
            writers[place] = start(&control, place as u32);
        }
    }
    for mut writer in writers {
        writer.kill().unwrap();
        writer.wait().unwrap();
    }
    let took = begin.elapsed();
    println!("{reads} reads in {took:?}: none torn, {moved} saw a newer row, {missed} had none, {kills} writers killed");
    assert!(moved > 0 && missed < reads / 100);
}

#[test]
fn no_row_is_torn() {
    torn(1_000_000);
}

/// `cargo test --release -p millpond-ipc --test torn -- --ignored --nocapture`
#[test]
#[ignore = "ten million reads; prints what was seen"]
fn no_row_is_torn_in_ten_million() {
    torn(10_000_000);
}
