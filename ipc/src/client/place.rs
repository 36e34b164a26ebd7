//! Devices by the names that a caller has for them, and what an address belongs to.

use std::sync::Arc;

use millpond_allocator::driver::{Addr, DeviceId, DeviceInfo, Driver, Platform, Stream};
use millpond_allocator::heap::Heap;

use super::device::Device;
use super::error::Error;
use super::Client;
use crate::control::GrantRow;
use crate::wire::DeviceGrant;

/// Where bytes are, as the caller names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// The host device: CPU memory.
    Host,
    /// A GPU by its index among those that this process sees, as torch counts.
    Ordinal(u32),
    /// A device by its identity.
    Device(DeviceId),
}

/// What an address belongs to.
#[derive(Debug, Clone)]
pub enum Located {
    /// A window of the arena.
    Window {
        /// The window.
        window: u32,
        /// This process's own.
        own: bool,
        /// Where in it.
        offset: u64,
        /// Its device.
        device: DeviceInfo,
    },
    /// None of the arena's.
    Foreign,
}

impl Client {
    /// The grants of the owner's devices.
    pub fn grants(&self) -> impl Iterator<Item = &DeviceGrant> {
        self.devices.iter().map(|device| &device.grant)
    }

    pub(super) fn device_at(&self, index: u32) -> Result<&Device, Error> {
        self.devices
            .iter()
            .find(|device| device.grant.index == index)
            .ok_or_else(|| Error::Protocol(format!("the owner has no device {index} for this process")))
    }

    /// A device by the name that the caller has for it.
    pub(super) fn device(&self, place: Place) -> Result<&Device, Error> {
        let found = match place {
            Place::Host => self.devices.iter().find(|device| device.is_host()),
            Place::Device(id) => self.devices.iter().find(|device| device.id == id),
            Place::Ordinal(ordinal) => {
                let by_ordinal = match self.by_ordinal.get() {
                    Some(known) => known,
                    None => {
                        let seen = self.shared.platforms.cuda()?.devices()?;
                        let places = seen.iter().map(|info| self.devices.iter().position(|device| device.id == info.id)).collect();
                        self.by_ordinal.get_or_init(|| places)
                    }
                };
                by_ordinal.get(ordinal as usize).copied().flatten().and_then(|at| self.devices.get(at))
            }
        };
        found.ok_or_else(|| {
            let served: Vec<&str> = self.devices.iter().map(|device| device.grant.device.as_str()).collect();
            Error::Unsupported(format!("the arena does not serve {place:?}: its owner serves {}", served.join(", ")))
        })
    }

    /// The name of a device: the host is the first host device, another one goes by its identity.
    pub(super) fn place_of(&self, device: &Device) -> Place {
        match self.devices.iter().find(|device| device.is_host()) {
            Some(host) if host.id == device.id => Place::Host,
            _ => Place::Device(device.id),
        }
    }

    /// The heap of a device; opens the device at first use.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device that the owner does not serve, and what the driver says.
    pub fn heap(&self, place: Place) -> Result<Arc<Heap>, Error> {
        self.check_alive()?;
        Ok(self.device(place)?.open()?.heap.clone())
    }

    /// The heap of a device if it is in use.
    #[must_use]
    pub fn heap_if_open(&self, place: Place) -> Option<Arc<Heap>> {
        self.device(place).ok()?.if_open().map(|opened| opened.heap.clone())
    }

    /// Whether the heap of a device, or of every device, may record events of the whole context: [`Heap::set_context_events`]. Opens none:
    /// a device that is not in use yet keeps to it when it is.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device that the owner does not serve.
    pub fn set_context_events(&self, place: Option<Place>, allowed: bool) -> Result<(), Error> {
        match place {
            Some(place) => self.device(place)?.set_context_events(allowed),
            None => self.devices.iter().for_each(|device| device.set_context_events(allowed)),
        }
        Ok(())
    }

    /// Bytes of a device that are this process's for the asking and that the driver does not call free: given back a moment ago, or on
    /// their way to the owner. 0 where the device is not in use.
    #[must_use]
    pub fn at_hand(&self, place: Place) -> u64 {
        let Some(device) = self.device(place).ok().filter(|device| device.if_open().is_some()) else { return 0 };
        let row = self.share_of(device).unwrap_or_default();
        row.spare.saturating_add(on_the_way(device, &row))
    }

    /// What its limits leave this process to reserve of a device now, whatever the driver has free: the least of what is left of the
    /// arena's (all clients draw on it), of this client's own and of the heap's ([`Heap::set_limit`]). `None` for a device that the
    /// owner does not serve. A look at the control memory, no message.
    #[must_use]
    pub fn room(&self, place: Place) -> Option<u64> {
        let device = self.device(place).ok()?;
        // The owner writes the client's row first: read last, a trim between the two is not counted twice.
        let arena = self.shared.control.device(device.grant.index).and_then(|cell| cell.read());
        let share = self.share_of(device).unwrap_or_default();
        let coming = on_the_way(device, &share);
        let left = |limit: u64, reserved: u64| limit.saturating_add(coming).saturating_sub(reserved);
        let by_arena = arena.map_or(u64::MAX, |row| left(row.limit, row.reserved));
        let by_client = if share.limit > 0 { left(share.limit, share.reserved.saturating_add(share.retired)) } else { u64::MAX };
        let by_heap = device.if_open().map_or(u64::MAX, |opened| opened.heap.limit().saturating_sub(opened.heap.reserved_bytes()));
        Some(by_arena.min(by_client).min(by_heap))
    }

    fn share_of(&self, device: &Device) -> Option<GrantRow> {
        self.shared.control.grant(self.shared.me, device.grant.index)?.read()
    }

    /// The driver of a device; opens the device at first use.
    ///
    /// # Errors
    /// As [`Client::heap`].
    pub fn driver(&self, place: Place) -> Result<Arc<dyn Driver>, Error> {
        self.check_alive()?;
        Ok(self.device(place)?.open()?.driver.clone())
    }

    /// The ordinal of a device in this process: `None` for the host, and for a GPU before its driver is in use.
    #[must_use]
    pub fn ordinal(&self, place: Place) -> Option<u32> {
        let device = self.device(place).ok()?;
        device.if_open().filter(|opened| !opened.driver.is_host()).map(|opened| opened.driver.device().ordinal)
    }

    /// Which live heap block, import or neither an address belongs to.
    #[must_use]
    pub fn locate(&self, addr: Addr) -> Located {
        for opened in self.devices.iter().filter_map(Device::if_open) {
            if let Some((window, offset)) = opened.locate(addr) {
                return Located::Window { window, own: window == opened.window, offset, device: opened.driver.device().clone() };
            }
        }
        Located::Foreign
    }
}

/// What a heap has given up and the owner has not heard of yet.
fn on_the_way(device: &Device, share: &GrantRow) -> u64 {
    device.if_open().map_or(0, |opened| share.reserved.saturating_sub(share.adopted).saturating_sub(opened.heap.reserved_bytes()))
}

/// For tests and tools: the default stream where a device is a GPU, none on the host.
#[must_use]
pub fn default_stream(info: &DeviceInfo) -> Option<Stream> {
    info.id.host_number().is_none().then_some(Stream::LEGACY)
}
