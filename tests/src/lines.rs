//! A process of ours that says what it does in lines, and that is ended when it goes silent.

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// A child process and the lines that it prints.
#[derive(Debug)]
pub struct Lines {
    child: Child,
    lines: Receiver<String>,
    /// The last lines of its stderr.
    errors: Receiver<String>,
}

/// What came next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// A line.
    Line(String),
    /// Nothing in time; the process has been killed.
    Silent,
    /// The process ended: how, and the end of its stderr.
    Ended(String),
}

impl Lines {
    /// Runs this program again with other arguments.
    ///
    /// # Errors
    /// What the system says.
    pub fn of_self(arguments: &[&str]) -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        Self::of(Command::new(program).args(arguments))
    }

    /// Runs a program.
    ///
    /// # Errors
    /// What the system says.
    pub fn of(command: &mut Command) -> Result<Self, String> {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(|error| format!("{command:?}: {error}"))?;
        let lines = child.stdout.take().map(|out| feed(out.into())).ok_or("no stdout")?;
        let errors = child.stderr.take().map(|out| feed(out.into())).ok_or("no stderr")?;
        Ok(Self { child, lines, errors })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What comes next, within this time.
    pub fn next(&mut self, patience: Duration) -> Next {
        match self.lines.recv_timeout(patience) {
            Ok(line) => Next::Line(line),
            Err(RecvTimeoutError::Timeout) => {
                self.kill();
                Next::Silent
            }
            Err(RecvTimeoutError::Disconnected) => Next::Ended(self.end()),
        }
    }

    /// Kills it (SIGKILL) and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn end(&mut self) -> String {
        let how = match self.child.wait() {
            Ok(status) => match (status.code(), status.signal()) {
                (Some(0), _) => "ended".to_owned(),
                (Some(code), _) => format!("ended with code {code}"),
                (_, Some(signal)) => format!("was ended by signal {signal}"),
                _ => "ended".to_owned(),
            },
            Err(error) => error.to_string(),
        };
        let mut said: Vec<String> = self.errors.iter().collect();
        let last = said.split_off(said.len().saturating_sub(12));
        if last.is_empty() {
            how
        } else {
            format!("{how}; its stderr ends: {}", last.join(" | "))
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.kill();
    }
}

fn feed(out: OwnedFd) -> Receiver<String> {
    let (sender, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(std::fs::File::from(out)).lines() {
            let Ok(line) = line else { break };
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    lines
}
