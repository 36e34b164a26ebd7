//! An owner as a thread of its client's process, on request. A process with a CUDA context exports a chunk in 1.1 ms, not in
//! 31 µs (facts/driver.md), and the owner ends with it: the reasons why a process of its own is the default.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use super::{Config, Owner, OwnerError, Stopper};

/// A running owner thread. Ends when dropped.
#[derive(Debug)]
pub struct Inline {
    socket: PathBuf,
    key: String,
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
}

impl Inline {
    /// Binds, and serves from a thread.
    ///
    /// # Errors
    /// [`OwnerError`].
    pub fn start(config: Config) -> Result<Self, OwnerError> {
        let mut owner = Owner::bind(config)?;
        let (socket, key, stopper) = (owner.socket().to_owned(), owner.key().to_owned(), owner.stopper());
        let run = move || {
            if let Err(error) = owner.run() {
                tracing::error!(%error, "the owner's thread has ended");
            }
        };
        let thread = std::thread::Builder::new()
            .name("millpond-owner".to_owned())
            .spawn(run)
            .map_err(|error| OwnerError::system("thread")(rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::AGAIN)))?;
        Ok(Self { socket, key, stopper, thread: Some(thread) })
    }

    /// Where clients connect.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// What clients must know.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }
}

impl Drop for Inline {
    fn drop(&mut self) {
        self.stopper.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
