//! What takes two processes. Each side has its own context; they share a socket, a chunk and a page of words.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::Arc;

use rustix::fs::MemfdFlags;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::lab::{ok, refused, until, want, Lab, PATIENCE};
use super::Outcome;
use crate::driver::{Access, CuResult, DeviceId, Driver, Platform};

/// What the other side is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Step {
    /// Here is a chunk of so many bytes, and a page of words.
    Shared = 1,
    /// My stream waits for word 2.
    Waiting,
    /// I gave the chunk up.
    Released,
    /// All was well.
    Fine,
    /// It was not: so many bytes of text follow.
    Wrong,
}

/// The parent's side: starts a process with `spawn`, which hands the socket on (as standard input, say) to [`child`], and plays through
/// exchange with it. The child process must end with success when [`child`] does.
///
/// # Errors
/// What was wrong, on either side.
pub fn parent(platform: &dyn Platform, id: DeviceId, spawn: &mut dyn FnMut(UnixStream) -> io::Result<Child>) -> Outcome {
    let (ours, theirs) = UnixStream::pair().map_err(|error| error.to_string())?;
    let mut process = spawn(theirs).map_err(|error| format!("the child did not start: {error}"))?;
    let outcome = open(platform, id).and_then(|driver| lead(&driver, &ours));
    drop(ours);
    if outcome.is_err() {
        let _ = process.kill();
    }
    let mut success = false;
    let ended = until("the child did not end", || {
        let status = process.try_wait().map_err(|error| error.to_string())?;
        success = status.is_some_and(|status| status.success());
        Ok(status.is_some())
    });
    outcome.and(ended)?;
    want(success, || "the child said that all was well and failed".to_owned())
}

/// The child's side of [`parent`].
///
/// # Errors
/// What was wrong here; the parent is told too.
pub fn child(platform: &dyn Platform, id: DeviceId, socket: UnixStream) -> Outcome {
    let outcome = open(platform, id).and_then(|driver| follow(&driver, &socket));
    match &outcome {
        Ok(()) => send(&socket, Step::Fine, 0, &[])?,
        Err(text) => {
            send(&socket, Step::Wrong, text.len() as u64, &[])?;
            io::Write::write_all(&mut &socket, text.as_bytes()).map_err(|error| error.to_string())?;
        }
    }
    outcome
}

fn open(platform: &dyn Platform, id: DeviceId) -> Result<Arc<dyn Driver>, String> {
    let driver = ok(platform.open(id))?;
    ok(driver.attach_context())?;
    Ok(driver)
}

fn lead(driver: &Arc<dyn Driver>, socket: &UnixStream) -> Outcome {
    let lab = Lab::new(driver);
    let bytes = 4 * lab.unit();
    let memory = lab.create(bytes)?;
    let addr = lab.place(memory, bytes, Access::ReadWrite)?;
    let file = rustix::fs::memfd_create("words", MemfdFlags::CLOEXEC).map_err(|error| error.to_string())?;
    rustix::fs::ftruncate(&file, rustix::param::page_size() as u64).map_err(|error| error.to_string())?;
    let words = lab.words_of(&file)?;
    let exported = ok(driver.export(memory))?;
    send(socket, Step::Shared, bytes, &[exported.as_fd(), file.as_fd()])?;
    drop(exported);

    // The child's fill is seen by work of ours that waits for its word.
    let (copy, stream) = (lab.chunk(bytes)?, lab.stream()?);
    ok(driver.wait_value(stream, words.at(0), 1))?;
    ok(driver.copy(copy, addr, bytes, stream))?;
    ok(driver.fill(addr, 0x33, bytes, stream))?;
    ok(driver.write_value(stream, words.at(1), 1))?;
    lab.drain(stream)?;
    lab.holds(copy, 0x5a, bytes)?;

    // A plain store of ours releases the child's stream.
    receive(socket, Step::Waiting)?;
    want(words.load(3) == 0, || "the child's stream did not wait".to_owned())?;
    words.store(2, 5);
    words.await_cpu(3, 1)?;

    lab.unmap(addr, bytes)?;
    lab.release(memory)?;
    send(socket, Step::Released, 0, &[])?;
    receive(socket, Step::Fine).map(drop)
}

fn follow(driver: &Arc<dyn Driver>, socket: &UnixStream) -> Outcome {
    let lab = Lab::new(driver);
    let (bytes, fds) = receive(socket, Step::Shared)?;
    let [chunk, file] = <[OwnedFd; 2]>::try_from(fds).map_err(|fds| format!("{} descriptors came, not 2", fds.len()))?;
    let memory = lab.import(&chunk, bytes)?;
    drop(chunk);
    let words = lab.words_of(&file)?;
    let (writable, readable) = (lab.place(memory, bytes, Access::ReadWrite)?, lab.place(memory, bytes, Access::ReadOnly)?);
    let (copy, stream) = (lab.chunk(bytes)?, lab.stream()?);

    ok(driver.fill(writable, 0x5a, bytes, stream))?;
    ok(driver.write_value(stream, words.at(0), 1))?;
    ok(driver.wait_value(stream, words.at(1), 1))?;
    ok(driver.copy(copy, readable, bytes, stream))?;
    lab.drain(stream)?;
    lab.holds(copy, 0x33, bytes)?;
    refused(driver.copy(readable, copy, bytes, stream), CuResult::INVALID_VALUE, "a copy into a read-only import")?;

    ok(driver.wait_value(stream, words.at(2), 5))?;
    ok(driver.write_value(stream, words.at(3), 1))?;
    send(socket, Step::Waiting, 0, &[])?;
    lab.drain(stream)?;

    receive(socket, Step::Released)?;
    lab.holds(readable, 0x33, bytes)?;
    lab.fill(writable, 0x77, bytes)?;
    lab.holds(readable, 0x77, bytes)
}

fn send(socket: &UnixStream, step: Step, number: u64, fds: &[BorrowedFd<'_>]) -> Outcome {
    let mut message = [step as u8; 9];
    message[1..].copy_from_slice(&number.to_le_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        want(ancillary.push(SendAncillaryMessage::ScmRights(fds)), || format!("{} descriptors are too many", fds.len()))?;
    }
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL);
    let sent = sent.map_err(|error| format!("{step:?} was not sent: {error}"))?;
    want(sent == message.len(), || format!("{sent} bytes were sent of {}", message.len()))
}

fn receive(socket: &UnixStream, wanted: Step) -> Result<(u64, Vec<OwnedFd>), String> {
    socket.set_read_timeout(Some(2 * PATIENCE)).map_err(|error| error.to_string())?;
    let mut message = [0; 9];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut message)], &mut ancillary, flags);
    let got = got.map_err(|error| format!("{wanted:?} did not come: {error}"))?;
    want(got.bytes == message.len(), || format!("the other side ended before {wanted:?}"))?;
    let mut fds = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    let [step, number @ ..] = message;
    let number = u64::from_le_bytes(number);
    if step == Step::Wrong as u8 {
        let mut text = Vec::new();
        let _ = io::Read::read_to_end(&mut io::Read::take(socket, number), &mut text);
        return Err(format!("in the child: {}", String::from_utf8_lossy(&text)));
    }
    want(step == wanted as u8, || format!("step {step} came, not {wanted:?}"))?;
    Ok((number, fds))
}
