//! Clients over time: what each has reserved, one on top of the other.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::sheet::{Sheet, WIDTH};
use super::{escape, style, Picture};
use crate::ledger::{size, Ledger};

const LEFT: f64 = 84.0;
const LONG: f64 = WIDTH - LEFT - 16.0;
const HIGH: f64 = 150.0;
/// Lines across.
const LINES: u64 = 4;

/// What was reserved by (slot, serial) at one moment: the serial tells a client from a later one in its slot.
fn parts(ledger: &Ledger, device: usize) -> BTreeMap<(u32, u64), (u64, String)> {
    let clients = ledger.devices.get(device).into_iter().flat_map(|device| &device.clients);
    clients.map(|client| ((client.client, client.serial), (client.reserved, client.name.clone()))).collect()
}

pub(super) fn draw(sheet: &mut Sheet, picture: &Picture, device: usize) {
    let moments: Vec<(f64, BTreeMap<_, _>)> = picture.history.iter().map(|(at, ledger)| (*at, parts(ledger, device))).collect();
    let [(first, _), .., (last, _)] = moments.as_slice() else { return };
    let (first, span) = (*first, (last - first).max(0.001));
    let total = |parts: &BTreeMap<_, (u64, String)>| parts.values().map(|(bytes, _)| bytes).sum::<u64>();
    let most = nice(moments.iter().map(|(_, parts)| total(parts)).max().unwrap_or(0));
    sheet.y += 10.0;
    let text = format!("reserved by client over the last {}", seconds(span));
    sheet.write("small", 16.0, sheet.y + 12.0, &text);
    let (top, bottom) = (sheet.y + 24.0, sheet.y + 24.0 + HIGH);
    let x = |at: f64| LEFT + (at - first) / span * LONG;
    let y = |bytes: u64| bottom - bytes as f64 / most as f64 * HIGH;
    for line in 0..=LINES {
        let bytes = most / LINES * line;
        let (at, end) = (y(bytes), LEFT + LONG);
        let _ = writeln!(sheet.text, "<path class=\"line\" d=\"M{LEFT:.1} {at:.1}H{end:.1}\"/>");
        sheet.write("small end", LEFT - 8.0, at + 4.0, &size(bytes));
    }
    let mut keys: Vec<(u32, u64)> = moments.iter().flat_map(|(_, parts)| parts.keys().copied()).collect();
    keys.sort_unstable();
    keys.dedup();
    let mut below = vec![0_u64; moments.len()];
    for key in keys {
        let mut upper = Vec::new();
        for ((at, parts), below) in moments.iter().zip(&below) {
            upper.push((x(*at), below + parts.get(&key).map_or(0, |(bytes, _)| *bytes)));
        }
        let peak = upper.iter().zip(&below).map(|((_, sum), below)| sum - below).max().unwrap_or(0);
        if peak == 0 {
            continue;
        }
        let mut path = String::new();
        for (n, (x, sum)) in upper.iter().enumerate() {
            // Steps: what was read holds until the next reading.
            let _ = match n {
                0 => write!(path, "M{x:.1} {:.1}", y(*sum)),
                _ => write!(path, "H{x:.1}V{:.1}", y(*sum)),
            };
        }
        for ((at, _), below) in moments.iter().zip(&below).rev().skip(1) {
            let _ = write!(path, "V{:.1}H{:.1}", y(*below), x(*at));
        }
        path.push('Z');
        let name = moments.iter().rev().find_map(|(_, parts)| parts.get(&key)).map_or("", |(_, name)| name.as_str());
        let (name, peak, colour) = (escape(name), size(peak), style::of_client(key.0));
        let _ = writeln!(sheet.text, "<path fill=\"{colour}\" d=\"{path}\"><title>{name}: at most {peak} reserved</title></path>");
        below = upper.into_iter().map(|(_, sum)| sum).collect();
    }
    sheet.write("small", LEFT, bottom + 16.0, &format!("{} ago", seconds(span)));
    sheet.write("small end", LEFT + LONG, bottom + 16.0, "now");
    sheet.y = bottom.max(top) + 24.0;
}

/// A round number of bytes that is no less, and that four divides into round parts.
fn nice(bytes: u64) -> u64 {
    let unit = bytes.max(4 << 20).div_ceil(4).next_power_of_two();
    if unit * 3 >= bytes {
        unit * 3
    } else {
        unit * 4
    }
}

fn seconds(span: f64) -> String {
    match span {
        s if s < 120.0 => format!("{s:.0} s"),
        s => format!("{:.0} min", s / 60.0),
    }
}
