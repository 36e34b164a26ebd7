//! Memory that is not the arena's: plain `cudaMalloc` allocations, allocations of a pool, descriptors for other drivers.
//!
//! What a device cannot do of this it refuses with [`CuResult::NOT_SUPPORTED`](super::CuResult::NOT_SUPPORTED); a host device has
//! none of it, and says so by [`Driver::sharing`](super::Driver::sharing).

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Addr, PointerInfo, Result};

/// What another process needs to open an allocation: 64 bytes that only the driver can read.
pub type Token = [u8; 64];

/// A memory pool, made here or imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pool(pub u64);

/// The pieces in which a pool's memory is mapped by an importer.
pub const POOL_PIECE: u64 = 32 << 20;
/// As many pieces as an allocation may touch and still be imported: the driver keeps one entry a piece in an array of 128 on its
/// stack, and does not check (`facts/driver.md`, "Pools").
pub const POOL_PIECES: u64 = 128;

/// A pool's own figures, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolUse {
    /// Taken from the device now.
    pub reserved: u64,
    /// The most that was.
    pub reserved_peak: u64,
    /// Handed out now.
    pub used: u64,
    /// The most that was.
    pub used_peak: u64,
}

/// The calls. All need a context, but for making and exporting a pool.
pub trait Sharing: Send + Sync + Debug {
    /// The token of the `cuMemAlloc` allocation that holds an address.
    ///
    /// # Errors
    /// [`CuResult::INVALID_VALUE`](super::CuResult::INVALID_VALUE) for memory of another kind.
    fn ipc_export(&self, addr: Addr) -> Result<Token>;

    /// Maps another process's allocation: its first address.
    ///
    /// # Errors
    /// What the driver says; in the process that made the token too.
    fn ipc_open(&self, token: &Token) -> Result<Addr>;

    /// Ends [`Sharing::ipc_open`]. Nothing queued may reach it any more.
    ///
    /// # Errors
    /// What the driver says.
    fn ipc_close(&self, addr: Addr) -> Result<()>;

    /// A new pool that can be shared, with the settings that torch gives the default pool: nothing is released below
    /// `release_threshold` bytes, blocks are reused by every rule, visible peers have access.
    ///
    /// # Errors
    /// [`CuResult::NOT_SUPPORTED`](super::CuResult::NOT_SUPPORTED) where pools cannot be shared by descriptor.
    fn pool_create(&self, release_threshold: u64) -> Result<Pool>;

    /// Makes a pool the one that this device's `cuMemAllocAsync` draws from.
    ///
    /// # Errors
    /// What the driver says.
    fn pool_make_current(&self, pool: Pool) -> Result<()>;

    /// A descriptor that another process can import. Before any [`Sharing::pool_export_pointer`].
    ///
    /// # Errors
    /// What the driver says.
    fn pool_export(&self, pool: Pool) -> Result<OwnedFd>;

    /// Takes a pool that another process exported: only for [`Sharing::pool_import_pointer`].
    ///
    /// # Errors
    /// What the driver says.
    fn pool_import(&self, fd: BorrowedFd<'_>) -> Result<Pool>;

    /// The pool that the allocation at an address is of.
    ///
    /// # Errors
    /// What the driver says, other than that it is of none.
    fn pool_of(&self, addr: Addr) -> Result<Option<Pool>>;

    /// The token of an allocation of an exported pool.
    ///
    /// # Errors
    /// What the driver says.
    fn pool_export_pointer(&self, addr: Addr) -> Result<Token>;

    /// Maps an allocation of an imported pool. The driver does not count: once a token and process. The caller keeps to
    /// [`POOL_PIECES`].
    ///
    /// # Errors
    /// What the driver says.
    fn pool_import_pointer(&self, pool: Pool, token: &Token) -> Result<Addr>;

    /// Ends [`Sharing::pool_import_pointer`]: before the exporter frees it, and when nothing queued can reach it.
    ///
    /// # Errors
    /// What the driver says.
    fn pool_close_pointer(&self, addr: Addr) -> Result<()>;

    /// The allocation that holds an address, of whatever making, where [`super::Driver::pointer_info`] does not know it.
    ///
    /// # Errors
    /// What the driver says, other than that it does not know the address.
    fn range_of(&self, addr: Addr) -> Result<Option<PointerInfo>>;

    /// A pool's figures.
    ///
    /// # Errors
    /// What the driver says.
    fn pool_use(&self, pool: Pool) -> Result<PoolUse>;

    /// A dma-buf of a mapped range, whole pages of the host (`cuMemGetHandleForAddressRange`): for RDMA and other drivers.
    ///
    /// # Errors
    /// [`CuResult::NOT_SUPPORTED`](super::CuResult::NOT_SUPPORTED) where the device or kernel has none.
    fn dma_buf(&self, addr: Addr, bytes: u64) -> Result<OwnedFd>;
}

/// How many pieces of a pool an allocation touches.
#[must_use]
pub const fn pieces(base: Addr, bytes: u64) -> u64 {
    (base % POOL_PIECE + bytes).div_ceil(POOL_PIECE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guard_counts_the_pieces_that_are_touched() {
        const MIB: u64 = 1 << 20;
        let cases = [
            (0, 4095, true),
            (0, 4096, true),
            (0, 4097, false),
            (16, 4080, true),
            (16, 4096, false),
            (31, 4065, true),
            (31, 4066, false),
            (0, 5248, false),
            (0, 5264, false),
        ];
        for (offset, bytes, fits) in cases {
            let touched = pieces((1 << 40) + offset * MIB, bytes * MIB);
            assert_eq!(touched <= POOL_PIECES, fits, "{bytes} MiB at {offset} MiB touch {touched} pieces");
        }
    }
}
