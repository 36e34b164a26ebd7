//! The ledger as a table for people.

use std::fmt;

use super::{ClientLedger, DeviceLedger, Ledger};

/// A size as a person reads it.
#[must_use]
pub fn size(bytes: u64) -> String {
    match bytes {
        0 => "0".to_owned(),
        1..=0xf_ffff => format!("{:.1} KiB", bytes as f64 / 1024.0),
        0x10_0000..=0x3fff_ffff => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

const COLUMNS: usize = 13;
const HEADINGS: [&str; COLUMNS] = [
    "client",
    "pid",
    "state",
    "reserved",
    "peak",
    "limit",
    "chunks",
    "allocated",
    "blocks",
    "largest free",
    "leased out",
    "leased in",
    "beat",
];

/// A table for people.
impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, device) in self.devices.iter().enumerate() {
            if n > 0 {
                writeln!(f)?;
            }
            write!(f, "{device}")?;
        }
        for lend in &self.lends {
            let to = lend.to.map_or_else(|| "whoever takes it".to_owned(), |to| self.name_of(to));
            let (from, bytes, holds) = (self.name_of(lend.from), size(lend.bytes), lend.holds);
            writeln!(f, "  {from} lends {bytes} to {to} ({holds} {})", if holds == 1 { "hold" } else { "holds" })?;
        }
        Ok(())
    }
}

impl fmt::Display for DeviceLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}  {}", self.id, self.name)?;
        write!(f, "  {} of {} reserved (peak {}, device {})", size(self.reserved), size(self.limit), size(self.peak), size(self.total))?;
        writeln!(f, ", {} retired, {} orphaned", size(self.retired), size(self.orphaned))?;
        let killed = if self.kills() > 0 { format!(" ({} killed by policy)", self.kills()) } else { String::new() };
        writeln!(f, "  {} growths, {} refusals, {} deaths{killed}", self.growths, self.refusals, self.deaths)?;
        if let Some(usage) = &self.outside {
            write!(f, "  outside the arena: {} used, {} free", size(usage.outside), size(usage.free))?;
            let used = |p: &crate::nvml::ProcessUsage| format!("pid {}: {}", p.pid, p.used.map_or_else(|| "?".to_owned(), size));
            let by: Vec<String> = usage.processes.iter().map(used).collect();
            writeln!(f, "{}{}", if by.is_empty() { "" } else { "; the driver counts by process " }, by.join(", "))?;
        } else if let Some(why) = self.outside_unknown.as_ref().filter(|_| !self.is_host()) {
            writeln!(f, "  outside the arena: not known: {why}")?;
        }
        if self.clients.is_empty() {
            return writeln!(f, "  nobody is attached");
        }
        let rows: Vec<_> = self.clients.iter().map(|client| client.cells().to_vec()).collect();
        table(f, &HEADINGS, &rows)?;
        for client in self.clients.iter().filter(|client| client.adopted > 0) {
            writeln!(f, "  {} adopted {} of its {} from clients that are dead", client.name, size(client.adopted), size(client.reserved))?;
        }
        Ok(())
    }
}

/// Aligned columns: the first to the left, the rest to the right.
pub(crate) fn table(f: &mut fmt::Formatter<'_>, headings: &[&str], rows: &[Vec<String>]) -> fmt::Result {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(headings.get(column).map(|heading| heading.len())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let heading: Vec<String> = headings.iter().map(|heading| (*heading).to_owned()).collect();
    for row in std::iter::once(&heading).chain(rows) {
        write!(f, " ")?;
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            if column == 0 {
                write!(f, " {cell:<width$}")?;
            } else {
                write!(f, "  {cell:>width$}")?;
            }
        }
        writeln!(f)?;
    }
    Ok(())
}

impl ClientLedger {
    fn cells(&self) -> [String; COLUMNS] {
        [
            self.name.clone(),
            self.pid.to_string(),
            self.state.to_owned(),
            size(self.reserved),
            size(self.peak_reserved),
            if self.limit == 0 { "-".to_owned() } else { size(self.limit) },
            self.chunks.to_string(),
            size(self.allocated),
            self.blocks.to_string(),
            size(self.largest_free),
            size(self.leased_out),
            size(self.leased_in),
            age(self.beat_age_ms),
        ]
    }
}

fn age(ms: u64) -> String {
    match ms {
        0..=9_999 => format!("{:.1} s", ms as f64 / 1e3),
        10_000..=599_999 => format!("{} s", ms / 1000),
        _ => format!("{} min", ms / 60_000),
    }
}
