//! Memory that is not the arena's, by tokens of the driver's: CUDA IPC of plain allocations, pointers of a shared pool, dma-buf.
//!
//! Tokens that were opened are interned by (peer, kind, token) and counted: the driver counts some kinds and not others, and
//! closes a mapping under whoever still uses it. All calls about pools are made under one lock, since an export beside a free
//! has crashed the driver. Who may close, and when, is Python's to know (`_foreign.py`): a mapping goes when its last import has.
#![allow(unsafe_code)] // a descriptor by number

use std::collections::HashMap;
use std::hash::Hash;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use millpond_allocator::driver::cuda::CudaPlatform;
use millpond_allocator::driver::{pieces, Addr, CuResult, Driver, DriverError, Platform, PointerInfo, Pool, Sharing, Token, POOL_PIECES};
use millpond_ipc::client::Error;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{json, Value};

use crate::error::{ApiError, Result};
use crate::state;

/// How memory of others is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A `cuMemAlloc` allocation, by `cuIpcGetMemHandle`.
    Ipc,
    /// An allocation of a shared pool, by `cuMemPoolExportPointer`.
    Pool,
}

/// What is opened here: whose, on which GPU of ours, how, and which.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    peer: u64,
    device: u32,
    kind: Kind,
    token: Token,
}

/// Things that are opened once however often they are asked for, and closed with the last user.
#[derive(Debug)]
struct Interned<K> {
    open: HashMap<K, (Addr, u64)>,
}

impl<K: Hash + Eq> Interned<K> {
    fn new() -> Self {
        Self { open: HashMap::new() }
    }

    fn enter<E>(&mut self, key: K, open: impl FnOnce() -> std::result::Result<Addr, E>) -> std::result::Result<Addr, E> {
        if let Some((addr, users)) = self.open.get_mut(&key) {
            *users += 1;
            return Ok(*addr);
        }
        let addr = open()?;
        self.open.insert(key, (addr, 1));
        Ok(addr)
    }

    /// True where that was the last user. `None`: it is not open.
    fn leave<E>(&mut self, key: &K, close: impl FnOnce(Addr) -> std::result::Result<(), E>) -> Option<std::result::Result<bool, E>> {
        let (addr, users) = self.open.get_mut(key)?;
        *users -= 1;
        if *users > 0 {
            return Some(Ok(false));
        }
        let addr = *addr;
        self.open.remove(key);
        Some(close(addr).map(|()| true))
    }
}

/// A pool of ours, and the descriptor that was made of it before anything else was.
#[derive(Debug)]
struct Own {
    pool: Pool,
    handle: OwnedFd,
}

#[derive(Debug)]
struct Table {
    platform: Option<Arc<CudaPlatform>>,
    drivers: HashMap<u32, Arc<dyn Driver>>,
    /// Pools that were made here, by GPU.
    own: HashMap<u32, Own>,
    /// Pools of others, by (peer, GPU here, the peer's number for its GPU).
    theirs: HashMap<(u64, u32, u32), Pool>,
    opened: Option<Interned<Key>>,
}

static TABLE: Mutex<Option<Table>> = Mutex::new(None);

fn with<T>(f: impl FnOnce(&mut Table) -> Result<T>) -> Result<T> {
    // Before the lock: in a forked child nobody may be left to release it.
    if state::is_forked() {
        return Err(Error::Forked.into());
    }
    let mut table = TABLE.lock();
    f(table.get_or_insert_with(|| Table {
        platform: None,
        drivers: HashMap::new(),
        own: HashMap::new(),
        theirs: HashMap::new(),
        opened: None,
    }))
}

fn said(error: DriverError) -> ApiError {
    match error.result() {
        Some(CuResult::NOT_SUPPORTED) => unsupported(error.to_string()),
        _ => ApiError::Client(Error::from(error)),
    }
}

fn unsupported(text: impl Into<String>) -> ApiError {
    ApiError::Client(Error::Unsupported(text.into()))
}

impl Table {
    /// The driver of a GPU, with a context or without.
    fn driver(&mut self, ordinal: u32, context: bool) -> Result<Arc<dyn Driver>> {
        let driver = match self.drivers.get(&ordinal) {
            Some(driver) => driver.clone(),
            None => {
                let platform = match &self.platform {
                    Some(platform) => platform.clone(),
                    None => self.platform.insert(Arc::new(CudaPlatform::load().map_err(said)?)).clone(),
                };
                let info = platform.devices().map_err(said)?.into_iter().find(|info| info.ordinal == ordinal);
                let info = info.ok_or_else(|| unsupported(format!("this process sees no GPU {ordinal}")))?;
                let driver = platform.open(info.id).map_err(said)?;
                self.drivers.insert(ordinal, driver.clone());
                driver
            }
        };
        if context {
            driver.attach_context().map_err(said)?;
        }
        Ok(driver)
    }
}

fn sharing(driver: &Arc<dyn Driver>) -> Result<&dyn Sharing> {
    driver.sharing().ok_or_else(|| unsupported(format!("{} has no memory that can be shared like that", driver.device().id)))
}

/// Makes a pool that can be shared, exports its handle, and only then makes it the current one.
pub fn swap(device: u32) -> Result<Value> {
    with(|table| {
        if table.own.contains_key(&device) {
            return Err(unsupported(format!("the pool of GPU {device} was swapped before")));
        }
        let driver = table.driver(device, false)?;
        let sharing = sharing(&driver)?;
        let pool = sharing.pool_create(u64::MAX).map_err(said)?;
        let handle = sharing.pool_export(pool).map_err(said)?;
        sharing.pool_make_current(pool).map_err(said)?;
        table.own.insert(device, Own { pool, handle });
        Ok(json!({ "device": device, "id": driver.device().id.to_string() }))
    })
}

/// A descriptor of a pool of ours, for the caller to send and close.
pub fn pool_fd(device: u32) -> Result<Value> {
    with(|table| {
        let own = table.own.get(&device).ok_or_else(|| unsupported(format!("the pool of GPU {device} is not ours")))?;
        let fd = own.handle.try_clone().map_err(|error| ApiError::Client(Error::Internal(error.to_string())))?;
        Ok(json!({ "fd": fd.into_raw_fd() }))
    })
}

/// Takes a peer's pool up. The descriptor stays the caller's.
pub fn pool_import(device: u32, peer: u64, theirs: u32, fd: i32) -> Result<Value> {
    with(|table| {
        if table.theirs.contains_key(&(peer, device, theirs)) {
            return Ok(json!({}));
        }
        if fd < 0 {
            return Err(ApiError::argument(format!("no descriptor: {fd}")));
        }
        let driver = table.driver(device, true)?;
        // SAFETY: the caller's descriptor, open during this call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let pool = sharing(&driver)?.pool_import(fd.as_fd()).map_err(said)?;
        table.theirs.insert((peer, device, theirs), pool);
        Ok(json!({}))
    })
}

/// A pool's own figures.
pub fn pool_use(device: u32) -> Result<Value> {
    with(|table| {
        let pool = table.own.get(&device).ok_or_else(|| unsupported(format!("the pool of GPU {device} is not ours")))?.pool;
        let driver = table.driver(device, false)?;
        let usage = sharing(&driver)?.pool_use(pool).map_err(said)?;
        Ok(json!({"reserved": usage.reserved, "reserved_peak": usage.reserved_peak, "used": usage.used, "used_peak": usage.used_peak}))
    })
}

/// How another process can have the allocation at an address: kind, token, where in it the address lies, its length.
pub fn export(device: u32, address: u64) -> Result<Value> {
    with(|table| {
        let driver = table.driver(device, true)?;
        let sharing = sharing(&driver)?;
        let info = range(&*driver, sharing, address)?;
        let info = info.ok_or_else(|| unsupported(format!("the driver knows no allocation at {address:#x}")))?;
        let (kind, token) = match sharing.pool_of(address).map_err(said)? {
            None => ("ipc", sharing.ipc_export(info.base).map_err(|error| not_plain(error, address))?),
            Some(pool) if table.own.get(&device).is_some_and(|own| own.pool == pool) => {
                let touched = pieces(info.base, info.bytes);
                if touched > POOL_PIECES {
                    return Err(unsupported(format!(
                        "the pool's allocation of {} bytes touches {touched} pieces of 32 MiB, and no driver is known to import more than {POOL_PIECES} safely",
                        info.bytes
                    )));
                }
                ("pool", sharing.pool_export_pointer(info.base).map_err(said)?)
            }
            Some(_) => {
                return Err(unsupported("it is of a pool that cannot be shared: call millpond.pool.swap() before torch is imported"))
            }
        };
        Ok(json!({"kind": kind, "token": hex(&token), "offset": address - info.base, "bytes": info.bytes}))
    })
}

/// The allocation that holds an address.
fn range(driver: &dyn Driver, sharing: &dyn Sharing, address: u64) -> Result<Option<PointerInfo>> {
    match driver.pointer_info(address) {
        Ok(Some(info)) => Ok(Some(info)),
        Ok(None) => sharing.range_of(address).map_err(said),
        Err(error) => Err(said(error)),
    }
}

fn not_plain(error: DriverError, address: u64) -> ApiError {
    match error.result() {
        Some(CuResult::INVALID_VALUE) => {
            unsupported(format!("the memory at {address:#x} is no plain cudaMalloc allocation: CUDA IPC cannot share it"))
        }
        _ => said(error),
    }
}

/// Opens a token of a peer's: where its allocation is mapped here. Ended by [`close`], once for each call.
pub fn open(device: u32, peer: u64, kind: Kind, token: &str, theirs: u32) -> Result<Value> {
    let token = unhex(token)?;
    with(|table| {
        let driver = table.driver(device, true)?;
        let sharing = sharing(&driver)?;
        let pool = table.theirs.get(&(peer, device, theirs)).copied();
        let make = || match (kind, pool) {
            (Kind::Ipc, _) => sharing.ipc_open(&token).map_err(said),
            (Kind::Pool, Some(pool)) => sharing.pool_import_pointer(pool, &token).map_err(said),
            (Kind::Pool, None) => Err(unsupported("the peer's pool was not imported")),
        };
        let address = table.opened.get_or_insert_with(Interned::new).enter(Key { peer, device, kind, token }, make)?;
        // The peer's word is not taken for the length.
        let bytes = range(&*driver, sharing, address)?.map_or(0, |info| info.bytes.saturating_sub(address - info.base));
        Ok(json!({"address": address, "bytes": bytes}))
    })
}

/// Ends one [`open`]; the mapping goes with the last. Nothing queued may reach it any more.
pub fn close(device: u32, peer: u64, kind: Kind, token: &str) -> Result<Value> {
    let token = unhex(token)?;
    with(|table| {
        let driver = table.driver(device, true)?;
        let sharing = sharing(&driver)?;
        let end = |addr| match kind {
            Kind::Ipc => sharing.ipc_close(addr),
            Kind::Pool => sharing.pool_close_pointer(addr),
        };
        let left = table.opened.as_mut().and_then(|opened| opened.leave(&Key { peer, device, kind, token }, end));
        match left {
            Some(last) => Ok(json!({ "closed": last.map_err(said)? })),
            None => Err(ApiError::argument("no such token is open")),
        }
    })
}

/// A dma-buf of the whole pages of a range: its descriptor, for the caller to use and close.
pub fn dma_buf(device: u32, address: u64, bytes: u64) -> Result<Value> {
    with(|table| {
        let driver = table.driver(device, true)?;
        let page = 4096;
        let first = address / page * page;
        let end = address.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(page));
        let end = end.ok_or_else(|| ApiError::argument(format!("{bytes} bytes at {address:#x}")))?;
        let fd = sharing(&driver)?.dma_buf(first, end - first).map_err(said)?;
        Ok(json!({"fd": fd.into_raw_fd(), "offset": address - first, "bytes": end - first}))
    })
}

fn hex(token: &Token) -> String {
    token.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Result<Token> {
    let wrong = || ApiError::argument(format!("a token is 128 hexadecimal digits, not {} bytes", text.len()));
    let mut token: Token = [0; 64];
    if text.len() != 128 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(wrong());
    }
    for (byte, at) in token.iter_mut().zip((0..128).step_by(2)) {
        *byte = text.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok()).ok_or_else(wrong)?;
    }
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_opened_twice_is_opened_once_and_closed_with_the_last_user() {
        let mut interned = Interned::<&str>::new();
        let mut calls = 0;
        let mut open = |at: Addr| {
            calls += 1;
            Ok::<_, ()>(at)
        };
        assert_eq!(interned.enter("a", || open(16)), Ok(16));
        assert_eq!(interned.enter("a", || open(99)), Ok(16));
        assert_eq!(interned.enter("b", || open(32)), Ok(32));
        assert_eq!(calls, 2);
        let mut closed = Vec::new();
        let mut close = |at| {
            closed.push(at);
            Ok::<_, ()>(())
        };
        assert_eq!(interned.leave(&"a", &mut close), Some(Ok(false)));
        assert_eq!(interned.leave(&"a", &mut close), Some(Ok(true)));
        assert_eq!(interned.leave(&"a", &mut close), None, "closed before");
        assert_eq!(interned.leave(&"b", &mut close), Some(Ok(true)));
        assert_eq!(closed, [16, 32]);
    }

    #[test]
    fn what_could_not_be_opened_is_not_open() {
        let mut interned = Interned::<u8>::new();
        assert_eq!(interned.enter(1, || Err("no")), Err("no"));
        assert_eq!(interned.leave(&1, |_| Ok::<_, ()>(())), None);
        assert_eq!(interned.enter(1, || Ok::<_, ()>(8)), Ok(8));
        assert_eq!(interned.leave(&1, |_| Err("stuck")), Some(Err("stuck")));
        assert_eq!(interned.leave(&1, |_| Ok::<_, ()>(())), None, "what cannot be closed is not tried again");
    }

    #[test]
    fn tokens_are_text_on_the_wire_and_checked() {
        let token: Token = std::array::from_fn(|at| (at * 7) as u8);
        assert_eq!(unhex(&hex(&token)).ok(), Some(token));
        let long = "0".repeat(130);
        let wide = "é".repeat(64);
        for wrong in ["", "00", "zz", long.as_str(), wide.as_str()] {
            assert!(unhex(wrong).is_err(), "{wrong}");
        }
        assert!(unhex(&"+0".repeat(64)).is_err(), "a sign is no digit");
    }

    #[test]
    fn without_a_driver_everything_says_so() {
        if CudaPlatform::load().is_ok() {
            return;
        }
        for answer in [swap(0), export(0, 4096), open(0, 1, Kind::Ipc, &"0".repeat(128), 0), dma_buf(0, 4096, 1)] {
            assert_eq!(answer.unwrap_err().code(), "DriverUnavailable");
        }
        assert_eq!(pool_fd(0).unwrap_err().code(), "Unsupported");
    }
}
