//! Frames whose descriptors the system dropped, as the reader's process may have no more. A test of its own: the limit is the process's.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use millpond_ipc::wire::{send_frame, FrameError, FrameReader};
use rustix::net::{socketpair, AddressFamily, SocketFlags, SocketType};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};

const PATIENCE: Option<Duration> = Some(Duration::from_secs(10));

#[test]
fn each_frame_has_its_own_descriptors_or_says_that_they_are_lost() {
    let (far, near) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let file = File::open("/dev/null").unwrap();
    let send = |body: &str, fds: usize| {
        let fds: Vec<BorrowedFd<'_>> = (0..fds).map(|_| file.as_fd()).collect();
        send_frame(far.as_fd(), body.as_bytes(), &fds, PATIENCE).unwrap();
    };
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let set = |current| setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
    let read = |reader: &mut FrameReader| String::from_utf8(reader.read_frame(near.as_fd(), PATIENCE, false).unwrap()).unwrap();
    for mut reader in [FrameReader::default(), FrameReader::exact()] {
        [("plain", 0), ("three", 3), ("two", 2), ("behind", 0), ("one", 1)].into_iter().for_each(|(body, fds)| send(body, fds));
        let (spare, next) = (File::open("/dev/null").unwrap(), File::open("/dev/null").unwrap());
        set(Some(next.as_raw_fd() as u64));
        drop((spare, next));
        assert_eq!(read(&mut reader), "plain");
        assert_eq!(read(&mut reader), "three");
        let lost = reader.take_fds(3).unwrap_err();
        assert!(matches!(lost, FrameError::Lost { expected: 3, found: 1 }), "{lost}");
        assert!(lost.to_string().contains("RLIMIT_NOFILE is "), "{lost}");
        // The one that came is closed, and is one of the next two.
        assert_eq!(read(&mut reader), "two");
        set(current);
        assert!(matches!(reader.take_fds(2), Err(FrameError::Lost { expected: 2, found: 1 })));
        assert_eq!((read(&mut reader), read(&mut reader)), ("behind".to_owned(), "one".to_owned()));
        assert_eq!(reader.take_fds(1).unwrap().len(), 1);
        assert!(reader.next_frame().unwrap().is_none(), "no descriptor and no gap is left over");
        assert!(matches!(reader.take_fds(1), Err(FrameError::Descriptors { expected: 1, found: 0 })));
    }
}
