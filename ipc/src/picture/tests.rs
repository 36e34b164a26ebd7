use super::*;
use crate::ledger::{ClientLedger, DeviceLedger};
use crate::lends::Lend;
use crate::wire::{Chunk, ChunkMap, Fate};

const GIB: u64 = 1 << 30;

fn client(slot: u32, name: &str, reserved: u64, allocated: u64) -> ClientLedger {
    ClientLedger {
        client: slot,
        serial: u64::from(slot) + 1,
        pid: 1000 + u64::from(slot),
        start_time: 7,
        name: name.to_owned(),
        state: "alive",
        role: "worker",
        killed: None,
        reserved,
        peak_reserved: reserved,
        chunks: 2,
        limit: 0,
        retired: 0,
        adopted: 0,
        allocated,
        peak_allocated: allocated,
        blocks: 3,
        requested: allocated,
        largest_free: (reserved - allocated) / 2,
        leased_out: 0,
        leased_in: 0,
        out_of_memory: 0,
        beat_age_ms: 10,
        counts: crate::counts::Counts::default(),
    }
}

fn ledger(clients: Vec<ClientLedger>) -> Ledger {
    let reserved = clients.iter().map(|client| client.reserved).sum::<u64>() + GIB;
    let device = DeviceLedger {
        id: "GPU-0".to_owned(),
        name: "a card".to_owned(),
        total: 16 * GIB,
        limit: 12 * GIB,
        reserved,
        peak: reserved,
        retired: GIB,
        orphaned: 0,
        growths: 4,
        refusals: 1,
        deaths: 0,
        kills_stopped: 0,
        kills_call: 0,
        outside: None,
        outside_unknown: None,
        clients,
    };
    let lends = vec![Lend { from: 0, to: Some(1), window: 1, bytes: GIB, holds: 2 }];
    Ledger { token: "0123456789abcdef".to_owned(), devices: vec![device], lends }
}

fn picture() -> Picture {
    let ledger = ledger(vec![client(0, "parent", 2 * GIB, GIB), client(1, "<b>&\"evil\"", 4 * GIB, 3 * GIB)]);
    let chunk = |epoch, fate| ChunkMap {
        chunk: Chunk { epoch, offset: (epoch - 1) * GIB, bytes: GIB },
        fate,
        mapped_by: vec![1],
        adopted_by: None,
    };
    let chunks = vec![chunk(1, Fate::Held), chunk(2, Fate::Retired)];
    let windows = vec![WindowMap { window: 1, device: 0, client: 0, bytes: 32 * GIB, chunks }];
    let history = vec![(-2.0, self::ledger(vec![client(0, "parent", GIB, 0)])), (0.0, ledger.clone())];
    Picture { ledger, windows, history }
}

/// Every tag closes: a picture is XML.
fn assert_well_formed(text: &str) {
    let mut open = Vec::new();
    for tag in text.split('<').skip(1).filter_map(|rest| rest.split('>').next()) {
        let name = tag.trim_start_matches('/').split([' ', '\n', '/']).next().unwrap();
        match tag {
            _ if tag.starts_with('/') => assert_eq!(open.pop(), Some(name), "{tag}"),
            _ if tag.ends_with('/') => {}
            _ => open.push(name),
        }
    }
    assert_eq!(open, Vec::<&str>::new());
}

#[test]
fn an_svg_is_whole_and_says_sizes() {
    let svg = picture().svg();
    assert_well_formed(&svg);
    for text in
        ["7.00 GiB of 12.00 GiB reserved", "1.00 GiB allocated of 2.00 GiB reserved", "retired chunk of 1.00 GiB", "over the last 2 s"]
    {
        assert!(svg.contains(text), "{text} in {svg}");
    }
}

#[test]
fn names_cannot_break_out() {
    let html = picture().html(None);
    assert!(!html.contains("<b>") && html.contains("&lt;b&gt;&amp;&quot;evil&quot;"), "{html}");
    assert!(!html.contains("http-equiv") && picture().html(Some(2)).contains("content=\"2\""));
    assert!(html.contains("<td>parent<td class=\"t\">&lt;b&gt;"), "{html}");
}

#[test]
fn an_empty_ledger_is_a_picture_too() {
    let empty =
        Picture { ledger: Ledger { token: String::new(), devices: Vec::new(), lends: Vec::new() }, windows: vec![], history: vec![] };
    assert_well_formed(&empty.svg());
    assert!(empty.svg().contains("no device"));
}

#[test]
fn dates_are_right() {
    assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
    assert_eq!(utc(951_782_400 + 3_661), "2000-02-29 01:01:01 UTC");
    assert_eq!(utc(1_798_761_599), "2026-12-31 23:59:59 UTC");
}
