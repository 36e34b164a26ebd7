//! Pictures of a ledger: an SVG file, or a page of HTML that carries everything with it. Hovering shows sizes.

mod chart;
mod sheet;
mod style;

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::ledger::{size, Ledger};
use crate::wire::WindowMap;

/// What is drawn.
#[derive(Debug, Clone)]
pub struct Picture {
    /// Who holds how much.
    pub ledger: Ledger,
    /// What lies in each window; empty: no maps are drawn.
    pub windows: Vec<WindowMap>,
    /// Earlier ledgers, each with its age in seconds, oldest first; fewer than two: no chart is drawn.
    pub history: Vec<(f64, Ledger)>,
}

/// Text that is safe between tags and in attributes: names come from other processes.
fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c if c.is_control() => {}
            c => safe.push(c),
        }
    }
    safe
}

impl Picture {
    /// A picture as an SVG file.
    #[must_use]
    pub fn svg(&self) -> String {
        let (body, height) = sheet::draw(self);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w} {height}\" width=\"{w}\" height=\"{height}\" role=\"img\" \
             aria-label=\"millpond ledger\">\n<style>{}</style>\n<rect class=\"bg\" width=\"{w}\" height=\"{height}\"/>\n{body}</svg>\n",
            style::SVG,
            w = sheet::WIDTH,
        )
    }

    /// A page. `refresh_s`: the browser loads it again after so many seconds.
    #[must_use]
    pub fn html(&self, refresh_s: Option<u32>) -> String {
        let refresh = refresh_s.map(|s| format!("<meta http-equiv=\"refresh\" content=\"{s}\">\n")).unwrap_or_default();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
             {refresh}<title>millpond: {}</title>\n<style>{}</style>\n</head>\n<body>\n<h1>Who holds the memory</h1>\n\
             <p class=\"note\">Arena {}, {}. Hover a bar or a chunk for its size.</p>\n<div class=\"sheet\">{}</div>\n{}{}</body>\n</html>\n",
            escape(&self.headline()),
            style::PAGE,
            escape(self.ledger.token.get(..8).unwrap_or_default()),
            utc(now),
            self.svg(),
            self.clients_table(),
            self.lends_table(),
        )
    }

    fn headline(&self) -> String {
        let devices = self.ledger.devices.iter().filter(|device| device.reserved > 0 || !device.clients.is_empty());
        let parts: Vec<String> = devices.map(|d| format!("{} of {} reserved on {}", size(d.reserved), size(d.limit), d.name)).collect();
        parts.join(", ")
    }

    fn clients_table(&self) -> String {
        let mut text = String::new();
        for device in self.ledger.devices.iter().filter(|device| !device.clients.is_empty()) {
            let _ = write!(
                text,
                "<h2>{} <span class=\"note\">{}</span></h2>\n<div class=\"wide\"><table>\n<tr><th>client<th>pid<th>state<th>reserved<th>peak<th>chunks\
                 <th>allocated<th>blocks<th>largest free<th>scattered<th>leased out<th>leased in</tr>\n",
                escape(&device.name),
                escape(&device.id)
            );
            for client in &device.clients {
                let _ = write!(text, "<tr><td>{}<td>{}<td>{}", escape(&client.name), client.pid, client.state);
                let _ = write!(text, "<td>{}<td>{}<td>{}", size(client.reserved), size(client.peak_reserved), client.chunks);
                let _ = write!(text, "<td>{}<td>{}<td>{}", size(client.allocated), client.blocks, size(client.largest_free));
                let (out, own) = (size(client.leased_out), size(client.leased_in));
                let _ = writeln!(text, "<td>{:.0} %<td>{out}<td>{own}</tr>", client.fragmentation() * 100.0);
            }
            text.push_str("</table></div>\n");
        }
        text
    }

    fn lends_table(&self) -> String {
        if self.ledger.lends.is_empty() {
            return String::new();
        }
        let mut text = "<h2>Leases</h2>\n<div class=\"wide\"><table>\n<tr><th>from<th class=\"t\">to<th>bytes<th>holds</tr>\n".to_owned();
        for lend in &self.ledger.lends {
            let to = lend.to.map_or_else(|| "whoever takes it".to_owned(), |to| self.ledger.name_of(to));
            let from = escape(&self.ledger.name_of(lend.from));
            let _ = writeln!(text, "<tr><td>{from}<td class=\"t\">{}<td>{}<td>{}</tr>", escape(&to), size(lend.bytes), lend.holds);
        }
        text.push_str("</table></div>\n");
        text
    }
}

/// Seconds since 1970 as a date and a time.
fn utc(seconds: u64) -> String {
    // Days to a date, after Howard Hinnant's civil_from_days; years from 1970 on.
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, year) = if month < 10 { (month + 3, year + era * 400) } else { (month - 9, year + era * 400 + 1) };
    format!("{year}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
#[path = "picture/tests.rs"]
mod tests;
