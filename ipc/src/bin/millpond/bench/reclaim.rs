//! Memory that another client has reserved but does not use: from asking for it to having it.

use std::time::Instant;

use millpond_ipc::wire::Role;

use super::party::{text, Owner, GIB};
use super::sample::Sample;
use super::{Figures, Plan};

/// Two clients take turns with all the memory that there is.
pub(super) fn measure(plan: &Plan<'_>) -> Figures {
    let owner = Owner::start(plan, &["--limit", "4G", "--chunk-bytes", "1G", "--trim-timeout-ms", "5000"])?;
    let parties = [owner.attach("parent", Role::Parent)?, owner.attach("other", Role::Worker)?];
    let mut sample = Sample::new()?;
    for (turn, party) in parties.iter().cycle().take(plan.pick(10, 100)).enumerate() {
        let start = Instant::now();
        let block = party.heap.allocate(4 * GIB, party.stream).map_err(text)?;
        // The first two find the device empty, or their own driver cold.
        if turn >= 2 {
            sample.add(start.elapsed());
        }
        party.heap.free(block).map_err(text)?;
        party.driver.stream_synchronize(party.stream).map_err(text)?;
    }
    Ok(Vec::from([("4 GiB that another client has but does not use".to_owned(), sample.json())]))
}
