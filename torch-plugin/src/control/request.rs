//! What may be asked of the control plane, as JSON names it.

use std::path::PathBuf;

use millpond_ipc::wire::Role;
use serde::Deserialize;
use serde_json::Value;

use crate::foreign::Kind;
use crate::{copies, recording};

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum OwnerDeath {
    #[default]
    Continue,
    Exit,
}

#[derive(Debug, Deserialize)]
pub(super) struct Attach {
    pub(super) socket: String,
    pub(super) key: String,
    #[serde(default)]
    pub(super) name: Option<String>,
    #[serde(default)]
    pub(super) role: Option<Role>,
    #[serde(default)]
    pub(super) limit: Option<u64>,
    #[serde(default)]
    pub(super) on_owner_death: OwnerDeath,
    #[serde(default)]
    pub(super) wait: Option<String>,
    #[serde(default)]
    pub(super) python: Option<String>,
    #[serde(default)]
    pub(super) torch: Option<String>,
    #[serde(default)]
    pub(super) timeout_ms: Option<u64>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Serve {
    #[serde(default)]
    pub(super) driver: Option<String>,
    /// Bytes, or a share like "80%".
    #[serde(default)]
    pub(super) limit: Option<Value>,
    #[serde(default)]
    pub(super) chunk_bytes: Option<u64>,
    #[serde(default)]
    pub(super) handle_kind: Option<String>,
}

fn host() -> i32 {
    -1
}

#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(super) enum Op {
    Attach(Box<Attach>),
    Detach,
    Status,
    Accept {
        #[serde(default)]
        timeout_ms: Option<u64>,
    },
    Connect {
        #[serde(default)]
        peer: Option<Value>,
        #[serde(default)]
        timeout_ms: Option<u64>,
    },
    Close {
        channel: u64,
    },
    Policy {
        channel: u64,
        #[serde(default)]
        kill_stopped_after_ms: Option<u64>,
    },
    Kill {
        channel: u64,
        waited_ms: u64,
    },
    ChannelFd {
        channel: u64,
    },
    Ledger,
    ReadLedger {
        socket: String,
        #[serde(default)]
        key: Option<String>,
    },
    ServeInline(Serve),
    StopInline,
    Stats {
        device: i32,
    },
    ResetPeakStats {
        device: i32,
    },
    ResetAccumulatedStats {
        device: i32,
    },
    Snapshot {
        device: i32,
    },
    BeginScope {
        device: i32,
    },
    EndScope {
        device: i32,
        scope: u64,
    },
    Trim {
        #[serde(default = "host")]
        device: i32,
    },
    AtHand {
        device: i32,
    },
    SetFraction {
        device: i32,
        fraction: f64,
    },
    GetFraction {
        device: i32,
    },
    ContextEvents {
        #[serde(default)]
        device: Option<i32>,
        allowed: bool,
    },
    Counters,
    Listen,
    NextEvent {
        #[serde(default)]
        timeout_ms: Option<u64>,
    },
    Locate {
        address: u64,
    },
    Lent {
        ranges: Vec<(u64, u64)>,
    },
    CopyByHost {
        device: i32,
        to: u64,
        from: u64,
        bytes: u64,
        stream: u64,
    },
    CopyOut(copies::Out),
    CopiedOut {
        number: u64,
    },
    CopyIn(Box<copies::In>),
    ImportParted {
        import: u64,
    },
    PoolSwap {
        device: u32,
    },
    PoolFd {
        device: u32,
    },
    PoolUse {
        device: u32,
    },
    PoolImport {
        device: u32,
        peer: u64,
        theirs: u32,
        fd: i32,
    },
    ForeignExport {
        device: u32,
        address: u64,
    },
    ForeignOpen {
        device: u32,
        peer: u64,
        kind: Kind,
        token: String,
        #[serde(default)]
        theirs: u32,
    },
    ForeignClose {
        device: u32,
        peer: u64,
        kind: Kind,
        token: String,
    },
    DmaBuf {
        device: u32,
        address: u64,
        bytes: u64,
    },
    Record(recording::Settings),
    RecordStop {
        #[serde(default)]
        file: bool,
    },
    Recording {
        device: i16,
        #[serde(default)]
        last: Option<u64>,
    },
    MergeTraces {
        folder: PathBuf,
        out: PathBuf,
        #[serde(default)]
        blocks: bool,
    },
    Doctor,
}
