use super::*;
use ratatui::backend::TestBackend;
use ratatui::Terminal;

const GIB: u64 = 1 << 30;

fn client(slot: u32, name: &str, reserved: u64, allocated: u64) -> ClientLedger {
    ClientLedger {
        client: slot,
        serial: 1,
        pid: 4000 - u64::from(slot),
        start_time: 1,
        name: name.to_owned(),
        state: if slot == 2 { "stopped" } else { "alive" },
        role: "worker",
        killed: None,
        reserved,
        peak_reserved: reserved,
        chunks: 1,
        limit: 0,
        retired: 0,
        adopted: 0,
        allocated,
        peak_allocated: allocated,
        blocks: 9,
        requested: allocated,
        largest_free: 0,
        leased_out: 0,
        leased_in: 0,
        out_of_memory: 0,
        beat_age_ms: 0,
        counts: millpond_ipc::counts::Counts::default(),
    }
}

fn device(id: &str, clients: Vec<ClientLedger>) -> DeviceLedger {
    let reserved = clients.iter().map(|client| client.reserved).sum();
    DeviceLedger {
        id: id.to_owned(),
        name: format!("card {id}"),
        total: 16 * GIB,
        limit: 12 * GIB,
        reserved,
        peak: reserved,
        retired: 0,
        orphaned: 0,
        growths: 3,
        refusals: 0,
        deaths: 0,
        kills_stopped: 0,
        kills_call: 0,
        outside: None,
        outside_unknown: None,
        clients,
    }
}

fn view() -> View {
    let clients =
        vec![client(0, "parent", GIB, GIB), client(1, "denoiser", 4 * GIB, 2 * GIB), client(2, "a worker with a long name", 2 * GIB, GIB)];
    View::new(Ledger { token: String::new(), devices: vec![device("A", clients), device("B", Vec::new())], lends: Vec::new() })
}

fn screen(view: &View, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| screen::draw(frame, view)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..height).map(line).collect()
}

#[test]
fn a_wide_screen_shows_everything() {
    let lines = screen(&view(), 110, 20);
    assert!(lines[0].contains("card A (1/2)  7.00 GiB of 12.00 GiB reserved"), "{lines:#?}");
    let bar = &lines[1];
    assert_eq!((bar.matches('█').count(), bar.matches('·').count()), (48, 27), "{bar}");
    let rows: Vec<&String> = lines.iter().filter(|line| line.contains('■')).collect();
    assert!(rows[0].contains("denoiser") && rows[0].contains("4.00 GiB") && rows[0].contains("██░░"), "{rows:#?}");
    assert!(rows[1].contains("a worker with a lon…") && rows[1].contains("stopped"), "{rows:#?}");
    assert!(lines[19].contains("q quit") && lines[19].contains("sort: reserved"), "{lines:#?}");
}

#[test]
fn keys_sort_turn_and_leave() {
    let mut view = view();
    let mut press = |key| view.key(KeyCode::Char(key), KeyModifiers::NONE);
    assert!(press('s') && press('s'));
    assert_eq!(view.clients().iter().map(|c| c.client).collect::<Vec<_>>(), [2, 1, 0]);
    assert!(view.key(KeyCode::Char('s'), KeyModifiers::NONE) && view.key(KeyCode::Char('r'), KeyModifiers::NONE));
    assert_eq!(view.clients().iter().map(|c| c.client).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(view.key(KeyCode::Tab, KeyModifiers::NONE));
    assert!(screen(&view, 80, 10).iter().any(|line| line.contains("nobody is attached")));
    assert!(!view.key(KeyCode::Char('c'), KeyModifiers::CONTROL) && !view.key(KeyCode::Char('q'), KeyModifiers::NONE));
}

#[test]
fn narrow_screens_show_what_fits() {
    let lines = screen(&view(), 20, 8);
    assert!(lines.iter().any(|line| line.contains("denois") && line.contains("4.00 GiB")), "{lines:#?}");
    let lines = screen(&view(), 50, 8);
    assert!(lines.iter().any(|line| line.contains("denoiser") && line.contains('░')), "{lines:#?}");
    let text = screen(&view(), 19, 8).join(" ");
    assert!(text.contains("too small") && text.contains("20x5"), "{text}");
    for (width, height) in [(1, 1), (20, 5), (300, 5), (20, 100), (84, 14)] {
        screen(&view(), width, height);
    }
}

#[test]
fn many_clients_scroll() {
    let clients = (0..40).map(|slot| client(slot, &format!("w{slot}"), GIB / 8, 0)).collect();
    let mut view = View::new(Ledger { token: String::new(), devices: vec![device("A", clients)], lends: Vec::new() });
    assert!(screen(&view, 80, 12).iter().any(|line| line.contains("more: arrows scroll")));
    (0..100).for_each(|_| assert!(view.key(KeyCode::Down, KeyModifiers::NONE)));
    assert!(screen(&view, 80, 12).iter().any(|line| line.contains("w39")));
}

#[test]
fn the_past_is_bounded() {
    let mut view = view();
    (0..2 * MOMENTS).for_each(|_| view.update(view.ledger.clone()));
    assert_eq!(view.history[0].len(), MOMENTS);
}
