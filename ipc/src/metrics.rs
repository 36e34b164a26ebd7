//! A ledger as OpenMetrics text, for Prometheus and whoever reads its format.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{text, DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::ledger::{ClientLedger, DeviceLedger, Ledger};

/// The media type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The text. A client is named by device, name, pid and slot: one process may attach twice under one name.
#[must_use]
pub fn text(ledger: &Ledger) -> String {
    let mut registry = Registry::with_prefix("millpond");
    registry.register_collector(Box::new(Page(ledger.clone())));
    let mut page = String::new();
    // Writing to a string does not fail.
    let _ = text::encode(&mut page, &registry);
    page
}

#[derive(Debug)]
struct Page(Ledger);

type Labels = Vec<(&'static str, String)>;
/// Name, help, in bytes or not, and the figure.
type Row<T> = (&'static str, &'static str, bool, fn(&T) -> u64);

const DEVICE_GAUGES: &[Row<DeviceLedger>] = &[
    ("device_total", "Memory of the device", true, |d| d.total),
    ("device_limit", "What the arena may take of the device", true, |d| d.limit),
    ("device_reserved", "What the arena has taken of the device", true, |d| d.reserved),
    ("device_reserved_peak", "The most that the arena ever took", true, |d| d.peak),
    ("device_retired", "Given back by its client, still mapped by another", true, |d| d.retired),
    ("device_orphaned", "Left by dead clients, still read by others", true, |d| d.orphaned),
    ("device_clients", "Clients attached, or dead with something left", false, |d| d.clients.len() as u64),
];

const DEVICE_COUNTERS: &[Row<DeviceLedger>] = &[
    ("growths", "Growths granted", false, |d| d.growths),
    ("refusals", "Growths refused", false, |d| d.refusals),
    ("deaths", "Clients buried", false, |d| d.deaths),
];

const CLIENT_GAUGES: &[Row<ClientLedger>] = &[
    ("client_reserved", "Chunks of the client", true, |c| c.reserved),
    ("client_reserved_peak", "The most that its chunks ever were", true, |c| c.peak_reserved),
    ("client_allocated", "Live blocks of the client, as it says", true, |c| c.allocated),
    ("client_allocated_peak", "The most that its live blocks ever were", true, |c| c.peak_allocated),
    ("client_requested", "What its live blocks were asked for, without rounding", true, |c| c.requested),
    ("client_largest_free", "Its largest free block", true, |c| c.largest_free),
    ("client_leased_out", "Bytes of its blocks that others hold", true, |c| c.leased_out),
    ("client_leased_in", "Bytes of others' blocks that it holds", true, |c| c.leased_in),
    ("client_retired", "Given back, still mapped by others", true, |c| c.retired),
    ("client_adopted", "Of its chunks: what it adopted of clients that are dead", true, |c| c.adopted),
    ("client_limit", "Its own limit; 0: only the arena's", true, |c| c.limit),
    ("client_chunks", "How many chunks it has", false, |c| c.chunks),
    ("client_blocks", "How many live blocks it has", false, |c| c.blocks),
    ("client_alive", "1: attached and beating; 0: stopped, dying, faulted or orphaned", false, |c| u64::from(c.state == "alive")),
];

const CLIENT_COUNTERS: &[Row<ClientLedger>] = &[
    ("client_out_of_memory", "Out-of-memory errors of the client", false, |c| c.out_of_memory),
    ("client_growths", "Growths granted to the client", false, |c| c.counts.growths),
    ("client_refusals", "Growths refused to the client", false, |c| c.counts.refusals),
    ("client_trims", "How often the client gave chunks back", false, |c| c.counts.trims),
    ("client_trimmed", "Bytes of the chunks that the client gave back", true, |c| c.counts.trimmed_bytes),
    ("client_copies", "Copies that the client's sending made", false, |c| c.counts.copies),
    ("client_copied", "Bytes of the copies that the client's sending made", true, |c| c.counts.copied_bytes),
];

/// The rows of one client under a name of their own each.
type Named = fn(&ClientLedger) -> Vec<(&'static str, u64)>;

/// Name, help, the label that tells the rows apart, and the figures.
const NAMED_COUNTERS: &[(&str, &str, &str, Named)] = &[
    ("client_sent", "Values that the client sent, by tier", "tier", |c| c.counts.sent.named().collect()),
    ("client_received", "Values that the client received, by tier", "tier", |c| c.counts.received.named().collect()),
    ("client_falls", "Values of the client that went by a lower tier than their best, by reason", "reason", |c| {
        c.counts.falls.named().collect()
    }),
];

fn of_device(device: &DeviceLedger) -> Labels {
    vec![("device", device.id.clone())]
}

/// A label's value as the format wants it: the crate writes it as it is.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn of_client(device: &DeviceLedger, client: &ClientLedger) -> Labels {
    let (pid, slot) = (client.pid.to_string(), client.client.to_string());
    vec![("device", device.id.clone()), ("client", escape(&client.name)), ("pid", pid), ("slot", slot)]
}

/// One family of figures with its rows.
fn family(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, unit, kind): (&str, &str, Option<&Unit>, MetricType),
    rows: impl Iterator<Item = (Labels, f64)>,
) -> fmt::Result {
    let mut rows = rows.peekable();
    if rows.peek().is_none() {
        return Ok(());
    }
    let mut descriptor = encoder.encode_descriptor(name, help, unit, kind)?;
    for (labels, value) in rows {
        let row = descriptor.encode_family(&labels)?;
        put(row, kind, value)?;
    }
    Ok(())
}

/// Whole numbers are written without a point.
fn put(row: MetricEncoder<'_>, kind: MetricType, value: f64) -> fmt::Result {
    let whole = value.fract() == 0.0 && (0.0..9e15).contains(&value);
    match (kind, whole) {
        (MetricType::Counter, _) => ConstCounter::new(value as u64).encode(row),
        (_, true) => ConstGauge::new(value as i64).encode(row),
        (_, false) => ConstGauge::new(value).encode(row),
    }
}

impl Page {
    fn devices(&self, encoder: &mut DescriptorEncoder<'_>, table: &[Row<DeviceLedger>], kind: MetricType) -> fmt::Result {
        table.iter().try_for_each(|(name, help, bytes, figure)| {
            let rows = self.0.devices.iter().map(|device| (of_device(device), figure(device) as f64));
            family(encoder, (name, help, bytes.then_some(&Unit::Bytes), kind), rows)
        })
    }

    fn kills(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let rows = self.0.devices.iter().flat_map(|device| {
            let of = |(cause, n): (&str, u64)| ([of_device(device), vec![("cause", cause.to_owned())]].concat(), n as f64);
            [("stopped", device.kills_stopped), ("call", device.kills_call)].map(of)
        });
        family(encoder, ("kills", "Clients buried that were killed by policy, by what for", None, MetricType::Counter), rows)
    }

    fn clients(&self, encoder: &mut DescriptorEncoder<'_>, table: &[Row<ClientLedger>], kind: MetricType) -> fmt::Result {
        table.iter().try_for_each(|(name, help, bytes, figure)| {
            let rows = self.each_client().map(|(labels, client)| (labels, figure(client) as f64));
            family(encoder, (name, help, bytes.then_some(&Unit::Bytes), kind), rows)
        })
    }

    fn named(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        NAMED_COUNTERS.iter().try_for_each(|(name, help, label, figures)| {
            let rows = self.each_client().flat_map(|(labels, client)| {
                let of = move |(name, n): (&str, u64)| ([labels.clone(), vec![(*label, name.to_owned())]].concat(), n as f64);
                figures(client).into_iter().map(of)
            });
            family(encoder, (name, help, None, MetricType::Counter), rows)
        })
    }

    fn each_client(&self) -> impl Iterator<Item = (Labels, &ClientLedger)> {
        self.0.devices.iter().flat_map(|device| device.clients.iter().map(|client| (of_client(device, client), client)))
    }

    fn outside(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let known = || self.0.devices.iter().filter_map(|device| Some((device, device.outside.as_ref()?)));
        let gauge = |name, help| (name, help, Some(&Unit::Bytes), MetricType::Gauge);
        family(encoder, gauge("device_free", "What nobody uses of the device, as the driver says"), {
            known().map(|(device, usage)| (of_device(device), usage.free as f64))
        })?;
        family(encoder, gauge("device_outside", "What is used of the device but not by the arena"), {
            known().map(|(device, usage)| (of_device(device), usage.outside as f64))
        })?;
        let processes = known().flat_map(|(device, usage)| {
            let used = usage.processes.iter().filter_map(|process| Some((process.pid, process.used?)));
            used.map(|(pid, used)| ([of_device(device), vec![("pid", pid.to_string())]].concat(), used as f64))
        });
        family(encoder, gauge("process_used", "What a process uses of the device, as the driver says"), processes)
    }

    fn lends(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let rows = self.0.lends.iter().map(|lend| {
            let to = lend.to.map_or_else(|| "anybody".to_owned(), |to| to.to_string());
            let labels = vec![("from_slot", lend.from.to_string()), ("to_slot", to), ("window", lend.window.to_string())];
            (labels, lend.bytes as f64)
        });
        family(encoder, ("lease", "What one client lends to another", Some(&Unit::Bytes), MetricType::Gauge), rows)
    }
}

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        let info = Info::new(vec![("token", self.0.token.clone()), ("version", env!("CARGO_PKG_VERSION").to_owned())]);
        info.encode(encoder.encode_descriptor("arena", "The arena", None, MetricType::Info)?)?;
        self.devices(encoder, DEVICE_GAUGES, MetricType::Gauge)?;
        self.devices(encoder, DEVICE_COUNTERS, MetricType::Counter)?;
        self.kills(encoder)?;
        self.clients(encoder, CLIENT_GAUGES, MetricType::Gauge)?;
        let beats = self.each_client().map(|(labels, client)| (labels, client.beat_age_ms as f64 / 1e3));
        family(encoder, ("client_beat_age", "How old its last beat is", Some(&Unit::Seconds), MetricType::Gauge), beats)?;
        self.clients(encoder, CLIENT_COUNTERS, MetricType::Counter)?;
        self.named(encoder)?;
        self.outside(encoder)?;
        self.lends(encoder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{ClientRow, ClientState, Control, Count, DeviceRow, Fall, GrantRow, Tier};
    use crate::lends::Lend;

    fn page() -> String {
        let control = Control::create([1, 2], 3).unwrap();
        control.device(0).unwrap().write(&DeviceRow {
            id_low: 9,
            total: 8 << 30,
            reserved: 5,
            growths: 4,
            kills_stopped: 2,
            ..DeviceRow::default()
        });
        let mut row = ClientRow { serial: 1, state: ClientState::Alive as u64, pid: 77, ..ClientRow::default() };
        row.name[..4].copy_from_slice(b"a\"\\b");
        control.client(3).unwrap().write(&row);
        control.grant(3, 0).unwrap().write(&GrantRow { reserved: 1 << 30, ..GrantRow::default() });
        let tally = control.tally(3, 0).unwrap();
        tally.add(Count::Sent(Tier::CudaIpc), 6);
        tally.add(Count::Fell(Fall::NoGpu), 2);
        tally.add(Count::CopiedBytes, 4096);
        let mut ledger = Ledger::read(&control, 250);
        ledger.lends.push(Lend { from: 3, to: None, window: 2, bytes: 512, holds: 1 });
        text(&ledger)
    }

    #[test]
    fn names_follow_the_conventions() {
        let page = page();
        for line in [
            "# TYPE millpond_client_reserved_bytes gauge",
            "# UNIT millpond_client_reserved_bytes bytes",
            "# TYPE millpond_growths counter",
            "# TYPE millpond_client_sent counter",
            "# TYPE millpond_client_copied_bytes counter",
            "millpond_lease_bytes{from_slot=\"3\",to_slot=\"anybody\",window=\"2\"} 512",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} in {page}");
        }
        assert!(page.contains("millpond_growths_total{device=\"GPU-"), "{page}");
        assert!(page.contains("client=\"a\\\"\\\\b\",pid=\"77\",slot=\"3\"} 1073741824\n"), "{page}");
        for end in
            ["pid=\"77\",slot=\"3\",tier=\"cuda_ipc\"} 6", "pid=\"77\",slot=\"3\",reason=\"no_gpu\"} 2", "pid=\"77\",slot=\"3\"} 4096"]
        {
            assert!(page.lines().any(|line| line.starts_with("millpond_client_") && line.ends_with(end)), "{end} in {page}");
        }
        assert!(page.contains("\nmillpond_client_copied_bytes_total{") && page.contains("\nmillpond_client_falls_total{"), "{page}");
        assert!(
            page.lines().any(|line| line.starts_with("millpond_kills_total{device=") && line.ends_with("cause=\"stopped\"} 2")),
            "{page}"
        );
        assert!(page.contains("slot=\"3\"} 0.25\n") && page.ends_with("# EOF\n"), "{page}");
    }

    #[test]
    fn the_dashboard_asks_for_what_there_is() {
        let dashboard: serde_json::Value = serde_json::from_str(include_str!("../../docs/grafana.json")).unwrap();
        let page = page();
        // What a machine without NVML does not say.
        let outside = ["millpond_device_outside_bytes", "millpond_device_free_bytes"];
        let targets = dashboard["panels"].as_array().unwrap().iter().flat_map(|panel| panel["targets"].as_array().unwrap());
        let mut asked = 0;
        for target in targets {
            for name in target["expr"].as_str().unwrap().split(|c: char| !c.is_alphanumeric() && c != '_') {
                if name.starts_with("millpond_") && !outside.contains(&name) {
                    assert!(page.contains(&format!("\n{name}{{")), "{name}");
                    asked += 1;
                }
            }
        }
        assert!(asked > 10);
    }

    #[test]
    fn each_family_is_there_once() {
        let page = page();
        let mut types: Vec<&str> = page.lines().filter(|line| line.starts_with("# TYPE")).collect();
        let count = types.len();
        types.sort_unstable();
        types.dedup();
        assert_eq!(types.len(), count);
        // Each sample comes after its own family's head.
        let mut current = "";
        for line in page.lines() {
            match line.strip_prefix("# ") {
                Some(head) => current = head.split(' ').nth(1).unwrap_or_default(),
                None => assert!(line.starts_with(current), "{line} under {current}"),
            }
        }
    }
}
