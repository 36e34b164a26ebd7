//! Where an owner is found: a directory that only its user can enter, and the socket in it.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{bind, listen, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::rand::{getrandom, GetRandomFlags};

use super::config::{OwnerError, PATH_BYTES};

/// A directory of its own and the path of a socket in it. Both go when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    directory: PathBuf,
    socket: PathBuf,
    maker: u32,
}

impl Place {
    /// Makes the directory, open to its user alone, and only then the socket.
    pub(super) fn make(parent: Option<&Path>) -> Result<(Self, OwnedFd), OwnerError> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
        let tmp = PathBuf::from("/tmp");
        let place = match (parent, runtime) {
            (Some(parent), _) => Self::directory(parent)?,
            (None, Some(runtime)) => Self::directory(&runtime).or_else(|_| Self::directory(&tmp))?,
            (None, None) => Self::directory(&tmp)?,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(OwnerError::system("socket"))?;
        let address = SocketAddrUnix::new(&place.socket).map_err(OwnerError::system("socket address"))?;
        bind(&listener, &address).map_err(OwnerError::system("bind"))?;
        listen(&listener, 128).map_err(OwnerError::system("listen"))?;
        Ok((place, listener))
    }

    fn directory(parent: &Path) -> Result<Self, OwnerError> {
        let error = |error| OwnerError::Directory { path: parent.to_owned(), error };
        let parent = std::path::absolute(parent).map_err(|e| error(Errno::from_io_error(&e).unwrap_or(Errno::INVAL)))?;
        let maker = std::process::id();
        sweep(&parent, ABANDONED);
        for _ in 0..16 {
            let directory = parent.join(format!("millpond-{maker}-{}", random_hex::<4>()?));
            let socket = directory.join("socket");
            let bytes = socket.as_os_str().len();
            if bytes > PATH_BYTES {
                return Err(OwnerError::PathTooLong { path: socket, bytes });
            }
            match rustix::fs::mkdir(&directory, Mode::RWXU) {
                Ok(()) => return Ok(Self { directory, socket, maker }),
                Err(Errno::EXIST) => {}
                Err(e) => return Err(error(e)),
            }
        }
        Err(error(Errno::EXIST))
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A forked child of the process that an inline owner lives in must leave it in place.
        if std::process::id() == self.maker {
            let _ = std::fs::remove_file(&self.socket);
            let _ = std::fs::remove_dir(&self.directory);
        }
    }
}

/// How old a directory must be before it may count as left behind: its owner may be between bind and listen.
const ABANDONED: Duration = Duration::from_secs(60);

/// Removes what owners left that were killed: directories of this user with a socket at which nobody listens.
fn sweep(parent: &Path, age: Duration) {
    let own = rustix::process::geteuid().as_raw();
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.flatten().filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"millpond-")) {
        let directory = entry.path();
        let socket = directory.join("socket");
        let Ok(meta) = entry.metadata() else { continue };
        let old = meta.modified().ok().and_then(|time| time.elapsed().ok()).is_some_and(|elapsed| elapsed >= age);
        if meta.is_dir() && meta.uid() == own && old && is_abandoned(&socket) {
            let _ = std::fs::remove_file(&socket);
            let _ = std::fs::remove_dir(&directory);
        }
    }
}

fn is_abandoned(socket: &Path) -> bool {
    let Ok(address) = SocketAddrUnix::new(socket) else { return false };
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None);
    probe.is_ok_and(|probe| rustix::net::connect(&probe, &address) == Err(Errno::CONNREFUSED))
}

/// So many random bytes in hexadecimal.
pub(super) fn random_hex<const N: usize>() -> Result<String, OwnerError> {
    let mut bytes = [0_u8; N];
    random(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Fills with random bytes.
pub(super) fn random(bytes: &mut [u8]) -> Result<(), OwnerError> {
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match getrandom(rest, GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(Errno::INTR) => {}
            Err(error) => return Err(OwnerError::System { call: "getrandom", error }),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_directory_is_the_users_alone_and_goes_with_its_owner() {
        let parent = tempfile::tempdir().unwrap();
        let (place, _listener) = Place::make(Some(parent.path())).unwrap();
        let directory = place.socket().parent().unwrap().to_owned();
        assert_eq!(directory.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        assert!(place.socket().exists());
        drop(place);
        assert!(!directory.exists());
    }

    #[test]
    fn what_a_killed_owner_left_is_swept_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let (dead, listener) = Place::make(Some(parent.path())).unwrap();
        let dead_directory = dead.socket().parent().unwrap().to_owned();
        std::mem::forget(dead);
        drop(listener);
        let (alive, _listener) = Place::make(Some(parent.path())).unwrap();
        let mine = parent.path().join("millpond-notes");
        std::fs::create_dir(&mine).unwrap();
        sweep(parent.path(), Duration::from_secs(60));
        assert!(dead_directory.exists(), "too young");
        sweep(parent.path(), Duration::ZERO);
        assert!(!dead_directory.exists() && alive.socket().exists() && mine.exists());
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_named() {
        let parent = PathBuf::from("/tmp").join("x".repeat(90));
        let error = Place::make(Some(&parent)).unwrap_err();
        assert!(matches!(error, OwnerError::PathTooLong { bytes, .. } if bytes > PATH_BYTES), "{error}");
    }

    #[test]
    fn a_missing_parent_is_named() {
        let error = Place::make(Some(Path::new("/nowhere"))).unwrap_err();
        assert!(error.to_string().contains("/nowhere"), "{error}");
    }
}
