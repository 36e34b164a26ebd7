//! `millpond map`: a picture of each window in characters.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use clap::Args as ClapArgs;
use millpond_ipc::ledger::{size, Ledger};
use millpond_ipc::wire::{Fate, WindowMap};
use serde_json::json;

use crate::observe::{devices, Target};

const AFTER: &str = "\
Example: every window, a character for 2 MiB or as many bytes as make a line fit.
  $ millpond map
  $ millpond map --client vae --page 64M
  $ millpond map --json | jq '.windows[].chunks | length'

  a b c ..  a chunk of its client; the letter changes from chunk to chunk
  r         retired: given back, still mapped by others
  o         orphaned: left by a dead client, still read
  .         free addresses between chunks

What is free inside of a chunk only its client knows: the share that is allocated, the largest free block and how scattered the
rest is (1 - largest free / free) are its own words, as of its last write.";

/// The page that one character stands for, where all fits.
const PAGE: u64 = 2 << 20;
/// Lines of one window before characters stand for more.
const LINES: usize = 4;

/// Show what lies in each window: a character a page.
#[derive(Debug, ClapArgs)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Only windows of this client (its name or pid).
    #[arg(long, value_name = "NAME")]
    client: Option<String>,
    /// Only this device (GPU-…, or host). Default: all GPUs, or the host where there are none.
    #[arg(long, value_name = "ID")]
    device: Option<String>,
    /// Bytes that a character stands for. Default: 2 MiB, or as many as make a window four lines.
    #[arg(long, value_name = "SIZE", value_parser = millpond_ipc::owner::parse_bytes)]
    page: Option<u64>,
    /// Characters a line. Default: the terminal's width, or 100.
    #[arg(long, value_name = "N")]
    width: Option<usize>,
    /// JSON: {"windows":[{"window","device","client","bytes","chunks":[{"epoch","offset","bytes","fate","mapped_by","adopted_by"?}]}]}.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: Target,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let mut observer = match args.target.connect() {
        Ok(observer) => observer,
        Err(code) => return code,
    };
    let ledger = observer.ledger();
    let windows = match observer.windows() {
        Ok(windows) => windows,
        Err(error) => {
            eprintln!("millpond: {error}");
            return crate::exit::of(&error);
        }
    };
    if args.json {
        println!("{}", json!({ "windows": windows }));
        return ExitCode::SUCCESS;
    }
    let shown = match devices(&ledger, args.device.as_deref()) {
        Ok(shown) => shown.iter().map(|device| device.id.clone()).collect::<Vec<_>>(),
        Err(code) => return code,
    };
    let width = args.width.unwrap_or_else(terminal_width).clamp(8, 4096);
    let mut text = String::new();
    for map in &windows {
        let Some(device) = ledger.devices.get(map.device as usize).filter(|device| shown.contains(&device.id)) else { continue };
        let client = device.clients.iter().find(|client| client.client == map.client);
        let wanted = |name: &String| client.is_some_and(|client| client.name == *name || client.pid.to_string() == *name);
        if args.client.as_ref().is_some_and(|name| !wanted(name)) || map.chunks.is_empty() {
            continue;
        }
        text.push_str(&picture(&ledger, map, width, args.page));
    }
    if text.is_empty() {
        text.push_str("no chunks in any of these windows\n");
    }
    // Whoever reads may have gone.
    let _ = io::stdout().lock().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

/// Columns of the terminal, if stdout is one.
fn terminal_width() -> usize {
    let columns = rustix::termios::tcgetwinsize(io::stdout()).ok().filter(|_| io::stdout().is_terminal()).map(|size| size.ws_col);
    columns.filter(|columns| *columns > 0).map_or(100, usize::from)
}

/// The bytes that a character stands for: a power of two times [`PAGE`].
fn page_for(extent: u64, width: usize) -> u64 {
    let mut page = PAGE;
    while extent.div_ceil(page) > (width * LINES) as u64 {
        page *= 2;
    }
    page
}

fn picture(ledger: &Ledger, map: &WindowMap, width: usize, page: Option<u64>) -> String {
    let extent = map.chunks.iter().map(|c| c.chunk.offset.saturating_add(c.chunk.bytes)).max().unwrap_or(0);
    let page = page.unwrap_or_else(|| page_for(extent, width)).max(1);
    let device = ledger.devices.get(map.device as usize);
    let mut text = format!("{}  {}\n", ledger.name_of(map.client), device.map_or("", |device| device.id.as_str()));
    let sum = |fate: Fate| map.chunks.iter().filter(|c| c.fate == fate).map(|c| c.chunk.bytes).sum::<u64>();
    let held = map.chunks.iter().filter(|c| c.fate == Fate::Held).count();
    text.push_str(&format!("  {held} chunks, {} reserved", size(sum(Fate::Held))));
    for (fate, name) in [(Fate::Retired, "retired"), (Fate::Orphaned, "orphaned"), (Fate::Adopted, "adopted by others")] {
        if sum(fate) > 0 {
            text.push_str(&format!(", {} {name}", size(sum(fate))));
        }
    }
    if let Some(client) = device.and_then(|device| device.clients.iter().find(|client| client.client == map.client)) {
        let (used, free) = (size(client.allocated), size(client.largest_free));
        text.push_str(&format!("; {used} allocated, largest free {free}, {:.0} % scattered", client.fragmentation() * 100.0));
    }
    text.push_str(&format!("\n  {} a character, {} of {} of addresses\n", size(page), size(extent), size(map.bytes)));
    let characters: Vec<char> = (0..extent.div_ceil(page)).map(|n| character(map, n * page, page)).collect();
    for line in characters.chunks(width.saturating_sub(2).max(1)) {
        text.push_str("  ");
        text.extend(line);
        text.push('\n');
    }
    text
}

/// What most deserves to be seen of a page: what is there before what is free.
fn character(map: &WindowMap, from: u64, bytes: u64) -> char {
    const LETTERS: [char; 12] = ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j', 'k', 'l'];
    let touches = |offset: u64, length: u64| offset < from.saturating_add(bytes) && offset.saturating_add(length) > from;
    let found = map.chunks.iter().enumerate().find(|(_, c)| touches(c.chunk.offset, c.chunk.bytes));
    match found {
        None => '.',
        Some((_, c)) if c.fate == Fate::Retired => 'r',
        Some((_, c)) if c.fate == Fate::Orphaned => 'o',
        Some((_, c)) if c.fate == Fate::Adopted => 'A',
        Some((n, _)) => LETTERS.get(n % LETTERS.len()).copied().unwrap_or('a'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millpond_ipc::wire::{Chunk, ChunkMap};

    const MIB: u64 = 1 << 20;

    fn map() -> WindowMap {
        let chunk =
            |epoch, offset, bytes, fate| ChunkMap { chunk: Chunk { epoch, offset, bytes }, fate, mapped_by: Vec::new(), adopted_by: None };
        let chunks =
            vec![chunk(1, 0, 4 * MIB, Fate::Held), chunk(2, 8 * MIB, 6 * MIB, Fate::Held), chunk(3, 14 * MIB, 2 * MIB, Fate::Retired)];
        WindowMap { window: 1, device: 0, client: 0, bytes: 1 << 30, chunks }
    }

    fn ledger() -> Ledger {
        Ledger { token: String::new(), devices: Vec::new(), lends: Vec::new() }
    }

    #[test]
    fn a_character_is_a_page() {
        let text = picture(&ledger(), &map(), 100, None);
        assert!(text.lines().last() == Some("  aa..bbbr"), "{text}");
        assert!(text.contains("2 chunks, 10.0 MiB reserved, 2.0 MiB retired") && text.contains("2.0 MiB a character"), "{text}");
    }

    #[test]
    fn lines_fit_and_pages_grow() {
        let text = picture(&ledger(), &map(), 8, None);
        assert_eq!(text.lines().skip(3).collect::<Vec<_>>(), ["  aa..bb", "  br"]);
        assert_eq!(page_for(1 << 40, 80), (1 << 40) / 256);
        let text = picture(&ledger(), &map(), 100, Some(8 * MIB));
        assert!(text.ends_with("  ab\n"), "{text}");
    }
}
