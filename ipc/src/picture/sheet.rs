//! The drawing: for each device a bar of who has what, a row for each client, and a map of each window.

use std::fmt::Write as _;

use super::{chart, escape, style, Picture};
use crate::ledger::{size, ClientLedger, DeviceLedger};
use crate::wire::{Fate, WindowMap};

/// Pixels of the whole.
pub(super) const WIDTH: f64 = 960.0;
/// Where bars begin and how long they are.
const LEFT: f64 = 16.0;
const LONG: f64 = WIDTH - 2.0 * LEFT;
/// The same for rows that have a name before them.
const NAMED: f64 = 190.0;
const NAMED_LONG: f64 = 440.0;
/// The least width of something that is there, in pixels.
const THIN: f64 = 1.5;
/// How many characters of a name have room before its row.
const NAME_CHARS: usize = 20;

/// A drawing under way: its elements, and how far down it is.
#[derive(Debug, Default)]
pub(super) struct Sheet {
    pub(super) text: String,
    pub(super) y: f64,
}

impl Sheet {
    pub(super) fn write(&mut self, class: &str, x: f64, y: f64, text: &str) {
        let _ = writeln!(self.text, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escape(text));
    }

    /// A rectangle with a title that shows when hovered. `paint`: attributes that colour it.
    fn bar(&mut self, (x, y, width, height): (f64, f64, f64, f64), paint: &str, title: &str) {
        let title = escape(title);
        let _ = writeln!(
            self.text,
            "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{height:.1}\" {paint}><title>{title}</title></rect>"
        );
    }
}

pub(super) fn draw(picture: &Picture) -> (String, f64) {
    let mut sheet = Sheet { y: 12.0, ..Sheet::default() };
    for (index, device) in picture.ledger.devices.iter().enumerate() {
        let idle = device.reserved == 0 && device.clients.iter().all(|client| client.peak_reserved == 0);
        if idle && picture.ledger.devices.iter().any(|other| other.reserved > 0) {
            continue;
        }
        head(&mut sheet, device);
        for client in device.clients.iter().filter(|client| client.reserved > 0 || client.allocated > 0 || client.leased_in > 0) {
            client_row(&mut sheet, device, client);
        }
        chart::draw(&mut sheet, picture, index);
        maps(&mut sheet, picture, device, index as u32);
        sheet.y += 22.0;
    }
    if picture.ledger.devices.is_empty() {
        sheet.write("name", LEFT, sheet.y + 18.0, "no device is served");
        sheet.y += 34.0;
    }
    (sheet.text, sheet.y)
}

/// The device's name, its bar and what its colours mean.
fn head(sheet: &mut Sheet, device: &DeviceLedger) {
    let y = sheet.y + 18.0;
    sheet.write("name", LEFT, y, &device.name);
    sheet.write("small end", WIDTH - LEFT, y, &device.id);
    let reserved = format!("{} of {} reserved", size(device.reserved), size(device.limit));
    let more = format!("{reserved} · peak {} · device {}", size(device.peak), size(device.total));
    sheet.write("small", LEFT, y + 19.0, &more);
    let counts = format!("{} growths · {} refusals · {} deaths", device.growths, device.refusals, device.deaths);
    sheet.write("small end", WIDTH - LEFT, y + 19.0, &counts);
    let (top, high) = (y + 30.0, 36.0);
    let scale = LONG / device.total.max(device.limit).max(1) as f64;
    sheet.bar(
        (LEFT, top, LONG, high),
        "class=\"beyond\"",
        &format!("beyond the limit: {}", size(device.total.saturating_sub(device.limit))),
    );
    sheet.bar(
        (LEFT, top, device.limit as f64 * scale, high),
        "class=\"free\"",
        &format!("free under the limit: {}", size(device.free_under_limit())),
    );
    let mut x = LEFT;
    let mut part = |sheet: &mut Sheet, bytes: u64, paint: &str, title: &str| {
        if bytes > 0 {
            let width = (bytes as f64 * scale).max(THIN).min(LEFT + LONG - x);
            sheet.bar((x, top, width, high), paint, title);
            x += width;
        }
    };
    for client in &device.clients {
        let paint = format!("fill=\"{}\" class=\"edge\"", style::of_client(client.client));
        let title =
            format!("{} (pid {}): {} reserved, {} allocated", client.name, client.pid, size(client.reserved), size(client.allocated));
        part(sheet, client.reserved, &paint, &title);
    }
    part(sheet, device.retired, "class=\"retired edge\"", &format!("retired, still mapped: {}", size(device.retired)));
    part(sheet, device.orphaned, "class=\"orphaned edge\"", &format!("orphaned, still read: {}", size(device.orphaned)));
    if let Some(usage) = &device.outside {
        part(sheet, usage.outside, "class=\"outside edge\"", &format!("outside the arena: {}", size(usage.outside)));
    }
    if device.limit < device.total {
        let at = LEFT + device.limit as f64 * scale;
        let (over, under) = (top - 4.0, top + high + 4.0);
        let _ = writeln!(sheet.text, "<line class=\"limit\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{over:.1}\" y2=\"{under:.1}\"/>");
    }
    sheet.y = top + high + 8.0;
    legend(sheet, device);
}

/// What has no row of its own.
fn legend(sheet: &mut Sheet, device: &DeviceLedger) {
    let outside = device.outside.as_ref().map_or(0, |usage| usage.outside);
    let kinds = [("retired", "retired, still mapped", device.retired), ("orphaned", "orphaned, still read", device.orphaned)];
    let mut x = LEFT;
    let kinds = kinds.into_iter().chain([("outside", "outside the arena", outside)]).filter(|(.., bytes)| *bytes > 0);
    for (class, name, bytes) in kinds.chain([("free", "free under the limit", device.free_under_limit())]) {
        let text = format!("{name}: {}", size(bytes));
        sheet.bar((x, sheet.y + 4.0, 10.0, 10.0), &format!("class=\"{class}\""), &text);
        sheet.write("small", x + 15.0, sheet.y + 13.0, &text);
        x += 36.0 + text.len() as f64 * 6.4;
    }
    sheet.y += 24.0;
}

/// A name, cut where it has no room.
fn short(name: &str) -> String {
    if name.chars().count() <= NAME_CHARS {
        return name.to_owned();
    }
    name.chars().take(NAME_CHARS - 1).chain(['…']).collect()
}

fn client_row(sheet: &mut Sheet, device: &DeviceLedger, client: &ClientLedger) {
    let most = device.clients.iter().map(|client| client.peak_reserved.max(client.reserved)).max().unwrap_or(0).max(1);
    let scale = NAMED_LONG / most as f64;
    let (top, high) = (sheet.y + 3.0, 16.0);
    let colour = style::of_client(client.client);
    sheet.bar((LEFT, top + 2.0, 11.0, 11.0), &format!("fill=\"{colour}\""), &client.name);
    sheet.write("", LEFT + 18.0, top + 12.5, &short(&client.name));
    let width = (client.reserved as f64 * scale).max(THIN);
    let used = (client.allocated.min(client.reserved)) as f64 * scale;
    let slack = format!("{}: {} reserved, {} of it not allocated", client.name, size(client.reserved), size(client.slack()));
    sheet.bar((NAMED, top, width, high), &format!("fill=\"{colour}\" class=\"slack\""), &slack);
    let blocks = format!("{}: {} allocated in {} blocks", client.name, size(client.allocated), client.blocks);
    sheet.bar((NAMED, top, used, high), &format!("fill=\"{colour}\""), &blocks);
    let state = if client.state == "alive" { String::new() } else { format!(" · {}", client.state) };
    let figures = format!("{} allocated of {} reserved{state}", size(client.allocated), size(client.reserved));
    sheet.write("small", NAMED + NAMED_LONG + 14.0, top + 12.5, &figures);
    sheet.y += 24.0;
}

/// A strip of addresses for each window that has chunks; all strips of a device have one scale.
fn maps(sheet: &mut Sheet, picture: &Picture, device: &DeviceLedger, index: u32) {
    let mut windows = picture.windows.iter().filter(|map| map.device == index && !map.chunks.is_empty()).peekable();
    if windows.peek().is_none() {
        return;
    }
    let end = |map: &WindowMap| map.chunks.iter().map(|c| c.chunk.offset + c.chunk.bytes).max().unwrap_or(0);
    let extent = picture.windows.iter().filter(|map| map.device == index).map(end).max().unwrap_or(0).max(1);
    sheet.y += 10.0;
    sheet.write("small", LEFT, sheet.y + 12.0, &format!("chunks by address, the first {} of each window", size(extent)));
    sheet.y += 20.0;
    let scale = (LONG - (NAMED - LEFT)) / extent as f64;
    for map in windows {
        let (top, high) = (sheet.y + 3.0, 16.0);
        let client = device.clients.iter().find(|client| client.client == map.client);
        let name = client.map_or_else(|| format!("client {}", map.client), |client| client.name.clone());
        sheet.write("", LEFT + 18.0, top + 12.5, &short(&name));
        let addresses = format!("window {}: {} of addresses, free here", map.window, size(map.bytes));
        sheet.bar((NAMED, top, extent as f64 * scale, high), "class=\"free\"", &addresses);
        for chunk in &map.chunks {
            let paint = match chunk.fate {
                Fate::Held | Fate::Adopted => {
                    format!("fill=\"{}\" class=\"edge\"", style::of_client(chunk.adopted_by.unwrap_or(map.client)))
                }
                Fate::Retired => "class=\"retired edge\"".to_owned(),
                Fate::Orphaned => "class=\"orphaned edge\"".to_owned(),
            };
            let by: Vec<String> = chunk.mapped_by.iter().map(|slot| picture.ledger.name_of(*slot)).collect();
            let by = if by.is_empty() { String::new() } else { format!(", mapped by {}", by.join(", ")) };
            let fate = match chunk.fate {
                Fate::Held => "chunk",
                Fate::Retired => "retired chunk",
                Fate::Orphaned => "orphaned chunk",
                Fate::Adopted => "adopted chunk",
            };
            let (bytes, offset) = (size(chunk.chunk.bytes), size(chunk.chunk.offset));
            let title = format!("{name}: {fate} of {bytes} at {offset}, epoch {}{by}", chunk.chunk.epoch);
            let width = (chunk.chunk.bytes as f64 * scale).max(THIN);
            sheet.bar((NAMED + chunk.chunk.offset as f64 * scale, top, width, high), &paint, &title);
        }
        sheet.y += 22.0;
    }
}
