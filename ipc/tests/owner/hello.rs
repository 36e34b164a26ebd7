//! Who may become a client.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;

use millpond_allocator::driver::cuda::HandleKind;
use millpond_ipc::control::MAX_CLIENTS;
use millpond_ipc::owner::{Config, DriverChoice, Limit, Owner, OwnerError};
use millpond_ipc::wire::{Answer, FrameError, Reason, Request, Role};

use crate::puppet::Puppet;
use crate::raw::*;

fn refused(served: &Served, change: impl FnOnce(&mut millpond_ipc::wire::Hello)) -> millpond_ipc::wire::Refusal {
    let mut bad = hello(&served.key, "bad", Role::Worker);
    change(&mut bad);
    Raw::attach(&served.socket, &bad).err().unwrap()
}

#[test]
fn a_refusal_names_the_field_and_never_the_key() {
    let served = Served::start(config());
    for (field, refusal) in [
        ("protocol", refused(&served, |hello| hello.protocol = 99)),
        ("layout", refused(&served, |hello| hello.layout ^= 1)),
        ("key", refused(&served, |hello| hello.key = "0".repeat(64))),
        ("key", refused(&served, |hello| hello.key.clear())),
    ] {
        assert_eq!(refusal.field, field);
        let text = serde_json::to_string(&refusal).unwrap();
        assert!(!text.contains(&served.key) && !text.contains(&"0".repeat(64)), "{text}");
    }
}

#[test]
fn a_hello_of_another_shape_is_refused() {
    let served = Served::start(config());
    let bare = format!("{{\"protocol\":{}}}", millpond_ipc::wire::PROTOCOL);
    for body in ["{}", "[]", "\"x\"", "not json", &bare, "{\"protocol\":\"1\"}"] {
        let mut wire = Wire::connect(&served.socket);
        wire.send(body.as_bytes(), &[]).unwrap();
        let text = format!("{:?}", wire.read().unwrap());
        assert!(text.contains("field: \"hello\""), "{body}: {text}");
        assert!(wire.is_cut());
    }
}

#[test]
fn another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return; // only root can become another user
    }
    let served = Served::start(config());
    // The directory alone would keep it out.
    for (path, mode) in [(served.socket.parent().unwrap(), 0o755), (served.socket.as_path(), 0o777)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let mut puppet = Puppet::start(&served, "stranger", "user");
    assert_eq!(puppet.wait_code(), Some(Puppet::refused_code("user")));
}

#[test]
fn a_silent_connection_is_dropped() {
    let served = Served::start(Config { hello_timeout_ms: 50, ..config() });
    let mut wire = Wire::connect(&served.socket);
    assert!(wire.is_cut());
    // And so is one that stops half-way.
    let mut wire = Wire::connect(&served.socket);
    rustix::io::write(&wire.socket, &[0, 0, 0, 9, b'{']).unwrap();
    assert!(wire.is_cut());
    drop(served.attach("good"));
}

#[test]
fn the_65th_client_is_refused_with_the_figures() {
    let served = Served::start(config());
    let mut clients: Vec<Raw> = (0..MAX_CLIENTS).map(|n| served.attach(&format!("worker-{n}"))).collect();
    let mut slots: Vec<u32> = clients.iter().map(Raw::slot).collect();
    slots.sort_unstable();
    assert_eq!(slots, (0..MAX_CLIENTS as u32).collect::<Vec<_>>());
    let refusal = refused(&served, |_| {});
    assert_eq!(refusal.field, "clients");
    assert!(refusal.expected.contains("64") && refusal.found.contains("64 are attached"), "{refusal:?}");
    // An observer takes no slot.
    drop(served.attach_as("looker", Role::Observer));
    let (last, slot) = (clients.pop().unwrap(), clients.last().unwrap().slot());
    let gone = last.slot();
    last.detach();
    until("the slot is free", || clients[0].state_of(gone) == "gone");
    let next = served.attach("next");
    assert_eq!((next.slot(), next.welcome.serial), (gone, 65));
    assert_ne!(next.slot(), slot);
}

#[test]
fn there_is_one_parent_at_a_time() {
    let served = Served::start(config());
    let parent = served.attach_as("parent", Role::Parent);
    assert_eq!(refused(&served, |hello| hello.role = Role::Parent).field, "role");
    parent.detach();
    until("the next parent is welcome", || Raw::attach(&served.socket, &hello(&served.key, "p", Role::Parent)).is_ok());
}

#[test]
fn a_pidfd_must_be_one_and_of_the_client() {
    let served = Served::start(config());
    let own = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty()).unwrap();
    let good = millpond_ipc::wire::Hello { fds: 1, ..hello(&served.key, "pidfd", Role::Worker) };
    drop(Raw::attach_with(&served.socket, &good, &[own.as_fd()]).unwrap());
    let directory = std::fs::File::open("/").unwrap();
    let refusal = Raw::attach_with(&served.socket, &good, &[directory.as_fd()]).err().unwrap();
    assert_eq!((refusal.field.as_str(), refusal.found.as_str()), ("pidfd", "another kind of file"));
    let other = Sleeper::start();
    let pid = rustix::process::Pid::from_child(&other.0);
    let foreign = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    assert_eq!(Raw::attach_with(&served.socket, &good, &[foreign.as_fd()]).err().unwrap().field, "pidfd");
    // It says one, and sends none.
    assert_eq!(Raw::attach(&served.socket, &good).err().unwrap().field, "pidfd");
}

#[test]
fn an_observer_only_reads() {
    let served = Served::start(config());
    let mut worker = served.attach("worker");
    worker.grow(UNIT);
    let mut observer = served.attach_as("looker", Role::Observer);
    assert_eq!((observer.slot(), observer.welcome.serial, observer.window()), (u32::MAX, 0, u32::MAX));
    let (Answer::Ledger { ledger }, _) = observer.call(Request::Ledger) else { panic!() };
    assert_eq!(ledger["devices"][0]["reserved"], UNIT);
    let (Answer::Refused { reason, .. }, _) = observer.call(Request::Grow { device: 0, bytes: UNIT, press: true }) else { panic!() };
    assert_eq!(reason, Reason::Refused);
    assert_eq!(observer.ledger().clients.len(), 1);
}

#[test]
fn configurations_that_cannot_be_are_named() {
    let bind = |change: fn(&mut Config)| {
        let mut config = config();
        change(&mut config);
        Owner::bind(config).err().unwrap()
    };
    let above = bind(|config| config.limit = Limit::Bytes(257 * MIB));
    assert!(above.to_string().contains(&(257 * MIB).to_string()) && above.to_string().contains(&(256 * MIB).to_string()), "{above}");
    assert!(matches!(above, OwnerError::LimitAboveDevice { .. }));
    assert!(matches!(bind(|config| config.limit = Limit::Percent(101.0)), OwnerError::Percent(_)));
    assert!(matches!(bind(|config| config.limit = Limit::Percent(f64::NAN)), OwnerError::Percent(_)));
    assert!(matches!(bind(|config| config.limit = Limit::Bytes(1)), OwnerError::LimitTooSmall { .. }));
    assert!(matches!(bind(|config| config.chunk_bytes = Some(4 << 30)), OwnerError::ChunkTooLarge(_)));
    assert!(matches!(bind(|config| config.chunk_bytes = Some(MIB)), OwnerError::ChunkUnit { .. }));
    assert!(matches!(bind(|config| config.chunk_bytes = Some(UNIT + 1)), OwnerError::ChunkUnit { .. }));
    assert!(matches!(bind(|config| config.window_factor = 0), OwnerError::Window { .. }));
    assert!(matches!(bind(|config| config.key = Some("secret".to_owned())), OwnerError::Key));
    let windows = bind(|config| config.handle_kind = HandleKind::Win32);
    assert!(windows.code() == "Unsupported" && windows.to_string().contains("win32: millpond lacks"), "{windows}");
    assert!(windows.to_string().contains("DuplicateHandle"), "{windows}");
    assert!(bind(|config| config.handle_kind = HandleKind::Fabric).to_string().contains("IMEX channel"));
    let cuda = Owner::bind(Config { driver: DriverChoice::Cuda, ..config() });
    if let Err(error) = cuda {
        assert!(matches!(error, OwnerError::Driver(_)), "{error}");
    }
}

#[test]
fn the_owner_says_goodbye() {
    let served = Served::start(config());
    let mut client = served.attach("worker");
    let socket = served.socket.clone();
    assert_eq!(served.end(), millpond_ipc::owner::Ended::Stopped);
    assert_eq!(client.next_ask().1, millpond_ipc::wire::Ask::Goodbye);
    assert!(matches!(client.wire.read(), Err(FrameError::Closed(false))));
    assert!(!socket.parent().unwrap().exists());
}
