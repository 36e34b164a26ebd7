//! A forked child writes nothing into its parent's recording, whose file it has mapped too. One test: a process has one recording.
#![allow(unsafe_code, clippy::unwrap_used)]

use millpond_allocator::record::{self, Event, Kind, Recording};

#[test]
fn a_forked_child_leaves_its_parents_recording_alone() {
    let folder = std::env::temp_dir().join(format!("millpond-record-fork-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (path, own) = (folder.join("parent"), folder.join("child"));
    let event = |bytes| Event { bytes, ..Event::new(Kind::Allocate, -1) };
    record::start(64, Some(&path)).unwrap();
    record::record(event(1));
    // SAFETY: no other thread of this process records, so the child finds every lock free; it ends without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        record::record(event(2));
        record::note("the child's");
        let started = record::settings().is_none() && record::start(64, Some(&own)).is_ok();
        record::record(event(3));
        record::stop();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!started)) };
    }
    let mut status = -1;
    // SAFETY: a child of this process, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    record::record(event(4));
    let bytes = |path| Recording::read(path).unwrap().events.iter().map(|event| event.bytes).collect::<Vec<_>>();
    let seen = Recording::read(&path).unwrap();
    assert_eq!((bytes(&path), seen.text.as_str(), seen.ended), (vec![1, 4], "", None));
    assert_eq!(bytes(&own), [3]);
    record::stop();
    assert!(Recording::read(&path).unwrap().ended.is_some());
    std::fs::remove_dir_all(&folder).unwrap();
}
