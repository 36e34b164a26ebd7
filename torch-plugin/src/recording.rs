//! Recordings as the control plane has them: begun, ended, and read as JSON.

use std::path::{Path, PathBuf};

use millpond_allocator::driver::StreamId;
use millpond_allocator::record::{self, Event, Kind};
use millpond_ipc::client::recording_file;
use millpond_ipc::trace::{read, write_chrome, Chrome, Process};
use serde::Deserialize;
use serde_json::{json, Value};

use crate::error::{ApiError, Result};
use crate::{frames, state};

/// How a recording is to be.
#[derive(Debug, Deserialize)]
pub(crate) struct Settings {
    /// How many events it keeps, the newest.
    #[serde(default)]
    events: Option<u64>,
    /// Frames of Python that each allocation is recorded with, at most; 0: none.
    #[serde(default)]
    frames: u32,
    /// Frees too.
    #[serde(default)]
    free_frames: bool,
    /// Into a file of this folder, which is there whatever becomes of the process.
    #[serde(default)]
    folder: Option<PathBuf>,
    /// In place of one that is on; a recording in memory does not end one in a file.
    #[serde(default)]
    fresh: bool,
}

fn failed(error: &std::io::Error, what: &str) -> ApiError {
    ApiError::argument(format!("{what}: {error}"))
}

/// Begins a recording. One that is on goes on where it keeps as many events; its frames are as asked from here on.
pub(crate) fn start(settings: &Settings) -> Result<Value> {
    let events = settings.events.unwrap_or(record::EVENTS).min(record::MOST_EVENTS);
    let goes_on = |(capacity, path): &(u64, Option<PathBuf>)| match (&settings.folder, path) {
        // Nobody's file is ended for a recording in memory.
        (None, Some(_)) => true,
        (None, None) => !settings.fresh && *capacity >= events,
        (Some(folder), path) => !settings.fresh && path.as_ref().is_some_and(|path| path.parent() == Some(folder)),
    };
    if !record::settings().as_ref().is_some_and(goes_on) {
        let client = state::if_attached();
        let name = client.as_ref().map_or("process", |client| client.name());
        let path = settings.folder.as_deref().map(|folder| recording_file(folder, name)).transpose();
        let path = path.map_err(|error| failed(&error, "no file for a recording"))?;
        record::start(events, path.as_deref()).map_err(|error| failed(&error, "no room for a recording"))?;
        if let Some(client) = client {
            client.introduce();
        }
    }
    frames::stop();
    let has_frames = settings.frames > 0 && frames::start(settings.frames, settings.free_frames);
    let (capacity, path) = record::settings().unwrap_or_default();
    Ok(json!({ "events": capacity, "path": path, "frames": has_frames }))
}

/// Ends frames, and the recording: one in a file only where that is meant.
pub(crate) fn stop(file: bool) -> Value {
    frames::stop();
    let (_, path) = record::settings().unwrap_or_default();
    if path.is_none() || file {
        record::stop();
    }
    json!({ "path": path })
}

/// What has been recorded of a device: its events as rows, and stacks and frames by their numbers.
pub(crate) fn so_far(device: i16, last: Option<u64>) -> Value {
    let Some(recording) = record::so_far() else { return json!({ "on": false, "events": [], "stacks": {}, "frames": {} }) };
    let process = Process::of(PathBuf::new(), recording);
    let rows: Vec<Value> =
        process.recording.events.iter().filter(|event| event.device == device).filter_map(|event| row(&process, event)).collect();
    let skip = last.and_then(|last| rows.len().checked_sub(usize::try_from(last).ok()?)).unwrap_or_default();
    let frames: serde_json::Map<_, _> =
        process.text.frames.iter().map(|(number, frame)| (number.to_string(), json!([frame.file, frame.line, frame.name]))).collect();
    let stacks: serde_json::Map<_, _> = process.text.stacks.iter().map(|(number, stack)| (number.to_string(), json!(stack))).collect();
    json!({
        "on": true, "events": rows.get(skip..).unwrap_or_default(), "stacks": stacks, "frames": frames,
        "dropped": process.recording.dropped, "text_lost": process.recording.text_lost,
    })
}

/// [action, address, bytes, stream, microseconds since 1970, stack, whether something still used it].
fn row(process: &Process, event: &Event) -> Option<Value> {
    let action = match event.kind {
        Kind::Allocate => "alloc",
        Kind::Free => "free",
        Kind::Reusable => "reusable",
        Kind::Grow => "grow",
        Kind::Trim => "trim",
        Kind::OutOfMemory => "oom",
        _ => return None,
    };
    let pending = event.flags & Event::PENDING != 0;
    Some(json!([action, event.addr, event.bytes, StreamId(event.stream).shown(), process.wall(event.time) / 1000, event.stack, pending]))
}

/// Merges the recordings of a folder into one file for Perfetto.
pub(crate) fn merge(folder: &Path, out: &Path, blocks: bool) -> Result<Value> {
    let (processes, bad) = read(&[folder.to_path_buf()]);
    let mut file = std::fs::File::create(out).map(std::io::BufWriter::new).map_err(|error| failed(&error, &out.display().to_string()))?;
    let written =
        write_chrome(&processes, Chrome { blocks }, &mut file).and_then(|written| std::io::Write::flush(&mut file).map(|()| written));
    let written = written.map_err(|error| failed(&error, &out.display().to_string()))?;
    let bad: Vec<Value> = bad.iter().map(|(path, error)| json!({ "file": path, "error": error.to_string() })).collect();
    Ok(json!({ "processes": processes.len(), "events": written.events, "arrows": written.arrows, "deaths": written.deaths, "failed": bad }))
}
