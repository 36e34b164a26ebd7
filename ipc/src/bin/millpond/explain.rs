//! `millpond explain`: would so much memory fit, and what stands in its way.

use std::fmt;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use millpond_ipc::ledger::{size, ClientLedger, DeviceLedger};
use millpond_ipc::nvml::Nvml;
use millpond_ipc::owner::parse_bytes;
use serde::Serialize;

use crate::observe::{devices, Target};

const AFTER: &str = "\
Example: could anybody get 6 GiB; could the client named vae, which has a limit of its own.
  $ millpond explain 6GiB
  $ millpond explain 6GiB --client vae --json | jq -r .devices[0].verdict

Exit code 0: it fits on some device, at once or after others trim; 1: it does not.
What others could trim is what they have reserved and do not use: at most that much, since only whole chunks go back.";

/// Say whether so much memory would fit, who could give how much back, and what stands in the way.
#[derive(Debug, ClapArgs)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// How much: 6GiB or 6G (of 1024), 6GB (of 1000), or bytes.
    #[arg(value_name = "SIZE", value_parser = parse_bytes)]
    bytes: u64,
    /// For this client (its name or pid), with its own limit and what it has free already.
    #[arg(long, value_name = "NAME")]
    client: Option<String>,
    /// Only this device (GPU-…, or host). Default: all GPUs, or the host where there are none.
    #[arg(long, value_name = "ID")]
    device: Option<String>,
    /// JSON: {"asked","fits","devices":[{"device","verdict",…}]}.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: Target,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    /// The client has it free already.
    FitsInPlace,
    Fits,
    FitsAfterTrims,
    DoesNotFit,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Trim {
    client: String,
    pid: u64,
    at_most: u64,
}

/// What became of the question on one device.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Explanation {
    device: String,
    name: String,
    verdict: Verdict,
    /// Bytes that can be had at once.
    free: u64,
    /// Bytes missing even if everybody trims all that they can.
    short: u64,
    trims: Vec<Trim>,
    obstacles: Vec<String>,
}

fn explain(device: &DeviceLedger, asked: u64, me: Option<&ClientLedger>) -> Explanation {
    let mut free = device.free_under_limit();
    let mut obstacles = Vec::new();
    let mine = |client: &&ClientLedger| me.is_some_and(|me| me.client == client.client);
    let mut trims: Vec<Trim> = device
        .clients
        .iter()
        .filter(|client| !mine(client) && client.state == "alive" && client.slack() > 0)
        .map(|client| Trim { client: client.name.clone(), pid: client.pid, at_most: client.slack() })
        .collect();
    trims.sort_by_key(|trim| std::cmp::Reverse(trim.at_most));
    let trimmable: u64 = trims.iter().map(|trim| trim.at_most).sum();
    // What the driver has left besides what trims give back to it.
    let outside = device.outside.as_ref().filter(|usage| usage.free < free);
    if let Some(usage) = outside {
        free = usage.free;
    }
    let (mut at_once, mut at_most) = (free, free.saturating_add(trimmable));
    // Its own limit: none of the above helps against it.
    if let Some(me) = me.filter(|me| me.limit > 0) {
        let own = me.limit.saturating_sub(me.reserved + me.retired);
        (at_once, at_most) = (at_once.min(own), at_most.min(own));
        if own < asked {
            obstacles.push(format!("{}'s own limit: {} of {} taken", me.name, size(me.reserved + me.retired), size(me.limit)));
        }
    }
    let verdict = match () {
        () if me.is_some_and(|me| me.largest_free >= asked) => Verdict::FitsInPlace,
        () if asked <= at_once => Verdict::Fits,
        () if asked <= at_most => Verdict::FitsAfterTrims,
        () => Verdict::DoesNotFit,
    };
    if asked > device.free_under_limit() {
        let (reserved, limit, total) = (size(device.reserved), size(device.limit), size(device.total));
        let of = if device.limit < device.total { format!(" (of {total} on the device)") } else { String::new() };
        obstacles.push(format!("the arena's limit: {reserved} of {limit}{of} is reserved"));
    }
    if let Some(usage) = outside {
        obstacles.push(format!("outside the arena: {} used, {} free on the device", size(usage.outside), size(usage.free)));
    }
    if device.retired > 0 {
        obstacles.push(format!(
            "retired: {} was given back but is still mapped by others; it comes free when they let go",
            size(device.retired)
        ));
    }
    if device.orphaned > 0 {
        obstacles.push(format!(
            "orphaned: {} was left by dead clients and is still read; it comes free when its readers let go",
            size(device.orphaned)
        ));
    }
    for client in device.clients.iter().filter(|client| client.state != "alive" && client.reserved > 0) {
        obstacles.push(format!(
            "{} (pid {}) is {}: its {} cannot be trimmed now",
            client.name,
            client.pid,
            client.state,
            size(client.reserved)
        ));
    }
    let mut holders: Vec<&ClientLedger> = device.clients.iter().filter(|client| client.allocated > 0).collect();
    holders.sort_by_key(|client| std::cmp::Reverse(client.allocated));
    for client in holders.iter().take(5) {
        obstacles.push(format!("{} (pid {}) uses {}", client.name, client.pid, size(client.allocated)));
    }
    if matches!(verdict, Verdict::Fits | Verdict::FitsInPlace) {
        obstacles.clear();
    }
    let (id, name) = (device.id.clone(), device.name.clone());
    Explanation { device: id, name, verdict, free: at_once, short: asked.saturating_sub(at_most), trims, obstacles }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            Verdict::FitsInPlace => "fits without asking anybody: the client has a free block of that size".to_owned(),
            Verdict::Fits => format!("fits: {} can be had at once", size(self.free)),
            Verdict::FitsAfterTrims => format!("may fit: {} can be had at once, the rest if others trim", size(self.free)),
            Verdict::DoesNotFit => {
                format!("does not fit: {} can be had at once, {} short even if all trim", size(self.free), size(self.short))
            }
        };
        writeln!(f, "{}  {}\n  {verdict}", self.device, self.name)?;
        if !self.trims.is_empty() && self.verdict != Verdict::FitsInPlace {
            writeln!(f, "  could be trimmed:")?;
            for trim in &self.trims {
                writeln!(f, "    {:>12} at most by {} (pid {})", size(trim.at_most), trim.client, trim.pid)?;
            }
        }
        if !self.obstacles.is_empty() {
            writeln!(f, "  in the way:")?;
        }
        self.obstacles.iter().try_for_each(|obstacle| writeln!(f, "    {obstacle}"))
    }
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let observer = match args.target.connect() {
        Ok(observer) => observer,
        Err(code) => return code,
    };
    let mut ledger = observer.ledger();
    ledger.look_outside(&Nvml::open());
    let asked_of = match devices(&ledger, args.device.as_deref()) {
        Ok(devices) => devices,
        Err(code) => return code,
    };
    let mut found = Vec::new();
    for device in asked_of {
        let me = args.client.as_ref().map(|wanted| device.clients.iter().find(|c| c.name == *wanted || c.pid.to_string() == *wanted));
        if let Some(None) = me {
            let names: Vec<&str> = device.clients.iter().map(|client| client.name.as_str()).collect();
            eprintln!("millpond: no client {}: there are {}", args.client.as_deref().unwrap_or_default(), names.join(", "));
            return crate::exit::usage();
        }
        found.push(explain(device, args.bytes, me.flatten()));
    }
    let fits = found.iter().any(|explanation| explanation.verdict != Verdict::DoesNotFit);
    if args.json {
        println!("{}", serde_json::json!({ "asked": args.bytes, "fits": fits, "devices": found }));
    } else {
        println!("{} asked", size(args.bytes));
        found.iter().for_each(|explanation| print!("{explanation}"));
    }
    if fits {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millpond_ipc::nvml::Usage;

    const GIB: u64 = 1 << 30;

    fn client(slot: u32, reserved: u64, allocated: u64) -> ClientLedger {
        ClientLedger {
            client: slot,
            serial: 1,
            pid: 100 + u64::from(slot),
            start_time: 1,
            name: format!("w{slot}"),
            state: "alive",
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
            blocks: 1,
            requested: allocated,
            largest_free: reserved - allocated,
            leased_out: 0,
            leased_in: 0,
            out_of_memory: 0,
            beat_age_ms: 0,
            counts: millpond_ipc::counts::Counts::default(),
        }
    }

    fn device(clients: Vec<ClientLedger>) -> DeviceLedger {
        let reserved = clients.iter().map(|client| client.reserved).sum();
        DeviceLedger {
            id: "GPU-0".to_owned(),
            name: "card".to_owned(),
            total: 16 * GIB,
            limit: 10 * GIB,
            reserved,
            peak: reserved,
            retired: 0,
            orphaned: 0,
            growths: 0,
            refusals: 0,
            deaths: 0,
            kills_stopped: 0,
            kills_call: 0,
            outside: None,
            outside_unknown: None,
            clients,
        }
    }

    #[test]
    fn what_is_free_fits() {
        let found = explain(&device(vec![client(0, 4 * GIB, 4 * GIB)]), 6 * GIB, None);
        assert_eq!((found.verdict, found.free, found.obstacles.len()), (Verdict::Fits, 6 * GIB, 0));
    }

    #[test]
    fn what_others_could_give_back_may_fit() {
        let device = device(vec![client(0, 5 * GIB, GIB), client(1, 3 * GIB, 2 * GIB)]);
        let found = explain(&device, 6 * GIB, None);
        assert_eq!(found.verdict, Verdict::FitsAfterTrims);
        assert_eq!(found.trims.iter().map(|trim| (trim.client.as_str(), trim.at_most)).collect::<Vec<_>>(), [("w0", 4 * GIB), ("w1", GIB)]);
        // The one who asks is not asked to trim.
        assert_eq!(explain(&device, 6 * GIB, device.clients.first()).verdict, Verdict::DoesNotFit);
    }

    #[test]
    fn what_stands_in_the_way_is_named() {
        let mut device = device(vec![client(0, 5 * GIB, 5 * GIB), client(1, 3 * GIB, GIB)]);
        device.clients[1].state = "stopped";
        device.orphaned = GIB;
        device.reserved += GIB;
        let found = explain(&device, 6 * GIB, None);
        assert_eq!((found.verdict, found.short), (Verdict::DoesNotFit, 5 * GIB));
        let text = found.to_string();
        for part in [
            "9.00 GiB of 10.00 GiB (of 16.00 GiB on the device)",
            "w1 (pid 101) is stopped",
            "orphaned: 1.00 GiB",
            "w0 (pid 100) uses 5.00 GiB",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn the_card_may_be_fuller_than_the_arena() {
        let mut device = device(vec![client(0, 2 * GIB, GIB)]);
        device.outside = Some(Usage { total: 16 * GIB, free: GIB, used: 15 * GIB, outside: 13 * GIB, processes: Vec::new() });
        let found = explain(&device, 3 * GIB, None);
        assert_eq!((found.verdict, found.free, found.short), (Verdict::DoesNotFit, GIB, GIB));
        assert!(found.to_string().contains("outside the arena: 13.00 GiB used"), "{found}");
    }

    #[test]
    fn a_clients_own_limit_counts() {
        let mut me = client(0, 2 * GIB, GIB);
        me.limit = 3 * GIB;
        let device = device(vec![me.clone()]);
        let found = explain(&device, 2 * GIB, Some(&me));
        assert_eq!(found.verdict, Verdict::DoesNotFit);
        assert!(found.to_string().contains("w0's own limit: 2.00 GiB of 3.00 GiB taken"), "{found}");
        assert_eq!(explain(&device, GIB, Some(&me)).verdict, Verdict::FitsInPlace);
    }
}
