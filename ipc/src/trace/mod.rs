//! Recordings of several processes together: what was written by each (`MILLPOND_TRACE`), read from a folder and laid on one
//! clock.
//!
//! Everything in a file was written by another process, perhaps one that was killed in the middle: nothing in it is believed.

mod chrome;
#[cfg(test)]
mod tests;
mod text;

pub use chrome::{write_chrome, Chrome, Written};
pub use text::{Frame, Identity, Text};

use std::io::Result;
use std::path::{Path, PathBuf};

use millpond_allocator::record::Recording;

/// How the files of recordings end.
pub const EXTENSION: &str = "millpond";

/// One process's recording.
#[derive(Debug, Clone, Default)]
pub struct Process {
    /// Where it was read.
    pub path: PathBuf,
    /// Its events.
    pub recording: Recording,
    /// What it says beside them.
    pub text: Text,
}

impl Process {
    /// Reads one file.
    ///
    /// # Errors
    /// The system's, and for a file that is no recording.
    pub fn read(path: &Path) -> Result<Self> {
        Ok(Self::of(path.to_path_buf(), Recording::read(path)?))
    }

    /// From a recording that is at hand.
    #[must_use]
    pub fn of(path: PathBuf, recording: Recording) -> Self {
        let text = Text::parse(&recording.text);
        Self { path, recording, text }
    }

    /// Its name for people, with its process id.
    #[must_use]
    pub fn label(&self) -> String {
        match &self.text.identity {
            Some(identity) => format!("{} ({})", identity.name, self.recording.pid),
            None => format!("process {}", self.recording.pid),
        }
    }

    /// A moment of its recording in nanoseconds since 1970.
    #[must_use]
    pub fn wall(&self, time: u64) -> u64 {
        self.recording.began_wall.wrapping_add(time.wrapping_sub(self.recording.began))
    }
}

/// The recordings in files and folders, the oldest first, and what could not be read, and why.
#[must_use]
pub fn read(places: &[PathBuf]) -> (Vec<Process>, Vec<(PathBuf, std::io::Error)>) {
    let (mut found, mut failed) = (Vec::new(), Vec::new());
    for place in places {
        match files(place) {
            Ok(files) => {
                for file in files {
                    match Process::read(&file) {
                        Ok(process) => found.push(process),
                        Err(error) => failed.push((file, error)),
                    }
                }
            }
            Err(error) => failed.push((place.clone(), error)),
        }
    }
    found.sort_by_key(|process| process.recording.began);
    (found, failed)
}

/// A file itself; of a folder the recordings in it.
fn files(place: &Path) -> Result<Vec<PathBuf>> {
    if !place.is_dir() {
        return Ok(vec![place.to_path_buf()]);
    }
    let mut files = std::fs::read_dir(place)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.retain(|file| file.extension().is_some_and(|end| end == EXTENSION) && file.is_file());
    files.sort();
    Ok(files)
}
