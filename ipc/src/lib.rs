//! The wire, the owner, the client, leases, deaths and the ledger; and the millpond program.
