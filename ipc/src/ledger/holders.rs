//! Who holds most of a device, in words: what every out-of-memory error ends with.

use millpond_allocator::heap::human;

use super::DeviceLedger;
use crate::control::{now_ms, Control};
use crate::wire::Holder;

/// The most holders that an error names.
const NAMED: usize = 8;

/// Those who hold anything, the largest first, as many as an error names.
pub(crate) fn largest(holders: impl Iterator<Item = Holder>) -> Vec<Holder> {
    let mut holders: Vec<Holder> = holders.filter(|holder| holder.reserved > 0).collect();
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.reserved));
    holders.truncate(NAMED);
    holders
}

/// One sentence: names, process ids and sizes.
pub(crate) fn sentence(holders: &[Holder]) -> String {
    if holders.is_empty() {
        return "Held by nobody here.".to_owned();
    }
    let text: Vec<String> = holders.iter().map(|h| format!("{} (pid {}): {}", h.name, h.pid, human(h.reserved))).collect();
    format!("Held by {}.", text.join(", "))
}

/// The same from the control memory, for what a client refuses by itself. Empty where the device is not there.
pub(crate) fn read(control: &Control, device: u32) -> String {
    let Some(ledger) = DeviceLedger::read(control, device, now_ms()) else { return String::new() };
    let holder = |client: super::ClientLedger| Holder {
        name: client.name,
        pid: u32::try_from(client.pid).unwrap_or_default(),
        reserved: client.reserved.saturating_add(client.retired),
    };
    sentence(&largest(ledger.clients.into_iter().map(holder)))
}
