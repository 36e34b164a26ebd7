//! Events of the library as lines on stderr. A page of our own, so that the program starts fast and stays small.

use std::fmt::{Debug, Write as _};
use std::io::Write as _;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

struct Lines(Level);

/// Logs from `MILLPOND_LOG` on; warnings where it is not set.
pub(crate) fn start() {
    let level = std::env::var("MILLPOND_LOG").ok().and_then(|text| text.parse().ok()).unwrap_or(Level::WARN);
    let _ = tracing::subscriber::set_global_default(Lines(level));
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.0
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = format!("millpond[{}] {}:", std::process::id(), event.metadata().level().as_str().to_ascii_lowercase());
        event.record(&mut Fields(&mut line));
        line.push('\n');
        let _ = std::io::stderr().lock().write_all(line.as_bytes());
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = match field.name() {
            "message" => write!(self.0, " {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}
