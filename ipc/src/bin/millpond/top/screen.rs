//! What `millpond top` draws.

use millpond_ipc::ledger::{size, ClientLedger, DeviceLedger};
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Sparkline};
use ratatui::Frame;

use super::View;

/// The least that anything can be shown in.
const LEAST: (u16, u16) = (20, 5);
/// Columns from which on a client has a bar, and all its figures.
const WITH_BAR: u16 = 44;
const WITH_ALL: u16 = 84;
/// Lines from which on the past is shown.
const WITH_PAST: u16 = 14;
const PAST: u16 = 3;

const COLOURS: [Color; 8] =
    [Color::Blue, Color::Yellow, Color::Green, Color::Magenta, Color::Cyan, Color::LightRed, Color::LightBlue, Color::LightGreen];

fn colour(slot: u32) -> Color {
    COLOURS.get(slot as usize % COLOURS.len()).copied().unwrap_or(Color::White)
}

pub(super) fn draw(frame: &mut Frame<'_>, view: &View) {
    let area = frame.area();
    if area.width < LEAST.0 || area.height < LEAST.1 {
        let text = format!("{}x{} is too small: {}x{} at least", area.width, area.height, LEAST.0, LEAST.1);
        return frame.render_widget(Paragraph::new(text).wrap(ratatui::widgets::Wrap { trim: true }), area);
    }
    let Some(device) = view.shown() else {
        return frame.render_widget(Paragraph::new("no device is served; q quits"), area);
    };
    let line = |y: u16| Rect { y, height: 1, ..area };
    frame.render_widget(Paragraph::new(title(view, device, area.width)), line(0));
    frame.render_widget(Paragraph::new(device_bar(device, area.width as usize)), line(1));
    let mut y = 2;
    if area.width >= WITH_BAR {
        frame.render_widget(Paragraph::new(rest(device)).style(Style::new().add_modifier(Modifier::DIM)), line(y));
        y += 1;
    }
    if area.height >= WITH_PAST {
        past(frame, view, device, Rect { y, height: PAST, ..area });
        y += PAST;
    }
    let rows = Rect { y, height: area.height - y - 1, ..area };
    frame.render_widget(Paragraph::new(clients(view, device, rows)), rows);
    frame.render_widget(Paragraph::new(help(view, area.width)).style(Style::new().add_modifier(Modifier::DIM)), line(area.height - 1));
}

fn title(view: &View, device: &DeviceLedger, width: u16) -> Line<'static> {
    let figures = format!("{} of {}", size(device.reserved), size(device.limit));
    if width < WITH_BAR {
        return Line::from(figures);
    }
    let which = if view.ledger.devices.len() > 1 { format!(" ({}/{})", view.device + 1, view.ledger.devices.len()) } else { String::new() };
    Line::from(vec![
        Span::styled(format!("{}{which}  ", device.name), Style::new().add_modifier(Modifier::BOLD)),
        Span::raw(format!("{figures} reserved, peak {}", size(device.peak))),
    ])
}

/// What has no row of its own.
fn rest(device: &DeviceLedger) -> String {
    let mut parts = vec![format!("free {}", size(device.free_under_limit()))];
    let known = [("retired", device.retired), ("orphaned", device.orphaned), ("outside", device.outside.as_ref().map_or(0, |o| o.outside))];
    parts.extend(known.into_iter().filter(|(_, bytes)| *bytes > 0).map(|(name, bytes)| format!("{name} {}", size(bytes))));
    let counts = [("growths", device.growths), ("refusals", device.refusals), ("deaths", device.deaths)];
    parts.extend(counts.into_iter().map(|(name, count)| format!("{name} {count}")));
    parts.join("  ")
}

/// Parts as runs of cells: each ends where the sum of the parts so far ends, and who is there has one cell at least.
fn cells(parts: &[u64], total: u64, width: usize) -> Vec<usize> {
    let (mut sum, mut at) = (0_u64, 0);
    let ends = parts.iter().map(|bytes| {
        sum = sum.saturating_add(*bytes);
        let end = (sum as f64 / total.max(1) as f64 * width as f64).round() as usize;
        let end = end.max(if *bytes > 0 { at + 1 } else { at }).min(width);
        let run = end - at;
        at = end;
        run
    });
    ends.collect()
}

/// One line for the whole device: clients by slot, retired, orphaned, outside, free, and what is beyond the limit.
fn device_bar(device: &DeviceLedger, width: usize) -> Line<'static> {
    let mut parts: Vec<(u64, char, Color)> = device.clients.iter().map(|c| (c.reserved, '█', colour(c.client))).collect();
    let outside = device.outside.as_ref().map_or(0, |usage| usage.outside);
    parts.extend([(device.retired, '▒', Color::Yellow), (device.orphaned, '▒', Color::Red), (outside, '▓', Color::DarkGray)]);
    let used: u64 = parts.iter().map(|(bytes, ..)| bytes).sum();
    let free = device.free_under_limit().min(device.total.saturating_sub(used));
    parts.extend([(free, '░', Color::DarkGray), (device.total.saturating_sub(used + free), '·', Color::DarkGray)]);
    let bytes: Vec<u64> = parts.iter().map(|(bytes, ..)| *bytes).collect();
    let runs = cells(&bytes, device.total.max(used), width);
    let spans = parts.iter().zip(runs).filter(|(_, run)| *run > 0);
    Line::from(spans.map(|((_, c, colour), run)| Span::styled(c.to_string().repeat(run), *colour)).collect::<Vec<_>>())
}

fn past(frame: &mut Frame<'_>, view: &View, device: &DeviceLedger, area: Rect) {
    let Some(past) = view.history.get(view.device) else { return };
    let shown = past.len().saturating_sub(area.width as usize);
    let data: Vec<u64> = past.iter().skip(shown).copied().collect();
    let most = device.limit.min(device.peak.max(1).saturating_mul(5) / 4).max(1);
    frame.render_widget(Sparkline::default().data(&data).max(most).style(Style::new().fg(Color::Blue)), area);
}

fn clients(view: &View, device: &DeviceLedger, area: Rect) -> Vec<Line<'static>> {
    let width = area.width as usize;
    let all = area.width >= WITH_ALL;
    // Names take what the figures leave, up to a bound; the bar takes the rest.
    let figures = if all { 8 + 10 + 11 + 11 + 8 + 11 } else { 11 };
    let longest = device.clients.iter().map(|client| client.name.chars().count()).max().unwrap_or(0).max(6);
    let name = longest.min(if area.width >= WITH_BAR { 20 } else { width - figures - 2 });
    let bar = if area.width >= WITH_BAR { width.saturating_sub(name + figures + 4) } else { 0 };
    let mut lines = Vec::new();
    let heading = match all {
        true => format!(
            "  {:<name$}{:>8}{:>10}{:>11}{:>11}{:>8}{:>11}",
            "client", "pid", "state", "reserved", "allocated", "blocks", "leased out"
        ),
        false => format!("  {:<name$}{:>11}", "client", "reserved"),
    };
    lines.push(Line::styled(heading, Modifier::UNDERLINED));
    let sorted = view.clients();
    if sorted.is_empty() {
        lines.push(Line::raw("  nobody is attached"));
    }
    let most = sorted.iter().map(|client| client.reserved).max().unwrap_or(0).max(1);
    let room = (area.height as usize).saturating_sub(1);
    let skip = view.scroll.min(sorted.len().saturating_sub(room));
    let hidden = sorted.len().saturating_sub(skip + room);
    for client in sorted.iter().skip(skip).take(room) {
        lines.push(row(client, (name, all, bar), most));
    }
    if hidden > 0 && room > 1 {
        lines.pop();
        lines.push(Line::raw(format!("  and {} more: arrows scroll", hidden + 1)));
    }
    lines
}

fn row(client: &ClientLedger, (name, all, bar): (usize, bool, usize), most: u64) -> Line<'static> {
    let (colour, clean) = (colour(client.client), client.name.chars().filter(|c| !c.is_control()));
    let mut text: String = clean.take(name).collect();
    if client.name.chars().count() > name {
        text.pop();
        text.push('…');
    }
    let mut spans = vec![Span::styled("■ ", colour)];
    let style = if client.state == "alive" { Style::new() } else { Style::new().fg(Color::Red) };
    let (reserved, allocated) = (size(client.reserved), size(client.allocated));
    let figures = match all {
        true => {
            let out = size(client.leased_out);
            format!("{text:<name$}{:>8}{:>10}{reserved:>11}{allocated:>11}{:>8}{out:>11}", client.pid, client.state, client.blocks)
        }
        false => format!("{text:<name$}{reserved:>11}"),
    };
    spans.push(Span::styled(figures, style));
    if bar > 0 {
        let slack = client.reserved.saturating_sub(client.allocated);
        let runs = cells(&[client.allocated.min(client.reserved), slack], most, bar);
        spans.push(Span::raw("  "));
        spans.extend(runs.into_iter().zip(["█", "░"]).map(|(run, c)| Span::styled(c.repeat(run), colour)));
    }
    Line::from(spans)
}

fn help(view: &View, width: u16) -> String {
    let order = if view.reverse { ", reversed" } else { "" };
    match width {
        0..=43 => format!("q quit  s {}", view.sort.name()),
        _ => format!("q quit  s sort: {}{order}  r reverse  d device", view.sort.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::cells;

    #[test]
    fn cells_add_up_and_everybody_is_seen() {
        assert_eq!(cells(&[50, 25, 25], 100, 20), [10, 5, 5]);
        assert_eq!(cells(&[1, 1, 998], 1000, 10), [1, 1, 8]);
        assert_eq!(cells(&[0, 0], 0, 10), [0, 0]);
        assert_eq!(cells(&[1; 30], 30, 10).iter().sum::<usize>(), 10);
    }
}
