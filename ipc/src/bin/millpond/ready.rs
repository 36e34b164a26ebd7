//! The one line that says that an owner is there, or why not.
#![allow(unsafe_code)] // a descriptor that the parent process gave us by number

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::FromRawFd;

use serde::Serialize;

/// Where the line goes.
#[derive(Debug)]
pub(crate) enum Ready {
    /// A descriptor that the parent reads.
    Descriptor(File),
    /// JSON on stdout.
    Json,
    /// Lines for a shell on stdout.
    Shell,
}

#[derive(Serialize)]
struct Here<'a> {
    socket: &'a str,
    key: &'a str,
    pid: u32,
}

#[derive(Serialize)]
struct Failed<'a> {
    code: &'a str,
    message: &'a str,
}

#[derive(Serialize)]
struct Failure<'a> {
    error: Failed<'a>,
}

impl Ready {
    pub(crate) fn new(fd: Option<i32>, json: bool) -> Result<Self, String> {
        match fd {
            None if json => Ok(Self::Json),
            None => Ok(Self::Shell),
            // SAFETY: F_GETFD reads a flag of any number, open or not.
            Some(fd) if fd < 0 || unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 => Err(format!("--ready-fd {fd}: not an open descriptor")),
            // SAFETY: it is open, the parent gave it to us for this line, and nothing else in this process uses it.
            Some(fd) => Ok(Self::Descriptor(unsafe { File::from_raw_fd(fd) })),
        }
    }

    /// Says where the owner is. The descriptor, if it is one, is closed by that.
    pub(crate) fn here(self, socket: &str, key: &str) -> io::Result<()> {
        let pid = std::process::id();
        match self {
            Self::Shell => {
                let mut out = io::stdout().lock();
                writeln!(out, "export MILLPOND_SOCKET={socket}\nexport MILLPOND_KEY={key}")?;
                out.flush()
            }
            other => other.line(&Here { socket, key, pid }),
        }
    }

    /// Says why there is none.
    pub(crate) fn failed(self, code: &str, message: &str) {
        eprintln!("millpond: {message}");
        if !matches!(self, Self::Shell) {
            let _ = self.line(&Failure { error: Failed { code, message } });
        }
    }

    fn line(self, value: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_string(value)?;
        line.push('\n');
        match self {
            Self::Descriptor(mut file) => file.write_all(line.as_bytes()),
            Self::Json | Self::Shell => {
                let mut out = io::stdout().lock();
                out.write_all(line.as_bytes())?;
                out.flush()
            }
        }
    }
}
