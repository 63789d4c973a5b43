//! GPU memory: allocations, mappings read in place, and address space backed by granules.

use std::{
    ffi::{c_ulonglong, c_void},
    io, mem, ptr,
    sync::Arc,
};

use super::{
    driver::{Address, CudaError, access_of, properties_on},
    gpu::Gpu,
};
use crate::{
    arena::{Backing, DeviceMemory, Mapping, SharedMapping},
    backend::memory::DeviceSpace,
    reader::READERS,
};
use cotenant_units::Bytes;

/// Device memory. Dropping it waits for all queued work, and frees it.
#[derive(Debug)]
pub(super) struct Allocation {
    gpu: Arc<Gpu>,
    address: Address,
    bytes: usize,
}

impl Allocation {
    /// Memory that will be zero before any work queued from now on.
    pub(super) fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        let memory = Self::unwritten(gpu, bytes)?;
        // SAFETY: whole words of the memory allocated above; dropping it waits.
        unsafe { gpu.set(memory.address, 0, memory.bytes / 4) }?;
        Ok(memory)
    }

    /// As [`Self::new`], uninitialised.
    pub(super) fn unwritten(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        let bytes = allocated_bytes(bytes);
        let calls = gpu.calls()?;
        let mut address = 0;
        // SAFETY: a place for the address.
        unsafe { calls.cuMemAlloc_v2(&raw mut address, bytes) }?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            address,
            bytes,
        })
    }
}

impl DeviceMemory for Allocation {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> Bytes {
        Bytes::of_len(self.bytes)
    }

    fn bring(&self, offset: usize, from: &[u8]) -> io::Result<()> {
        if offset.saturating_add(from.len()) > self.bytes {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: inside, and nothing in flight uses a part that is still being read.
        Ok(unsafe { self.gpu.bring(self.address + offset as u64, from) }?)
    }

    fn page_locked(&self, bytes: Bytes) -> io::Result<SharedMapping> {
        registered(&self.gpu, Mapping::new(bytes, Backing::Now)?)
    }

    fn release(&mut self) -> bool {
        let address = mem::take(&mut self.address);
        if address == 0 {
            return false;
        }
        self.gpu.drain();
        // SAFETY: allocated by `new`; queued work has been executed, or never will be.
        self.gpu
            .calls()
            .and_then(|calls| unsafe { calls.cuMemFree_v2(address) })
            .is_ok()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.release();
    }
}

/// Device memory that readers fill repeatedly, with page-locked host memory as its staging.
#[derive(Debug)]
struct Staged {
    memory: Allocation,
    staging: Option<SharedMapping>,
}

/// A ring across a bus, for which kernels would otherwise cross the bus at every use of a weight.
pub(super) fn staged(gpu: &Arc<Gpu>, bytes: usize) -> io::Result<SharedMapping> {
    let memory = Allocation::unwritten(gpu, bytes)?;
    let staging = staged_bytes(memory.bytes()).saturating_sub(memory.bytes());
    let staging = registered(gpu, Mapping::new(staging, Backing::Now)?)?;
    Ok(SharedMapping::of_device(
        Box::new(Staged {
            memory,
            staging: Some(staging),
        }),
        None,
    ))
}

impl DeviceMemory for Staged {
    fn address(&self) -> u64 {
        self.memory.address()
    }

    fn bytes(&self) -> Bytes {
        self.memory.bytes()
    }

    fn bring(&self, offset: usize, from: &[u8]) -> io::Result<()> {
        self.memory.bring(offset, from)
    }

    fn staging(&self) -> Option<&SharedMapping> {
        self.staging.as_ref()
    }

    fn page_locked(&self, bytes: Bytes) -> io::Result<SharedMapping> {
        self.memory.page_locked(bytes)
    }

    fn release(&mut self) -> bool {
        let freed = self.memory.release();
        let unlocked = self
            .staging
            .take()
            .is_some_and(|staging| staging.release() > Bytes::ZERO);
        freed && unlocked
    }
}

/// A host mapping that the device reads in place. Dropping it waits for all queued work.
#[derive(Debug)]
struct Registered {
    gpu: Arc<Gpu>,
    start: *mut c_void,
    address: Address,
    bytes: usize,
}

// SAFETY: an address that is passed to the driver and never dereferenced.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

/// Registers a whole mapping, which populates it.
pub(super) fn registered(gpu: &Arc<Gpu>, mapping: Mapping) -> io::Result<SharedMapping> {
    let bytes = mapping.bytes().as_len();
    let start = mapping.range(0, bytes).ok_or(io::ErrorKind::InvalidInput)?;
    let start = start.as_ptr().cast::<c_void>();
    let calls = gpu.calls()?;
    // SAFETY: whole pages of our own mapping, which stays mapped beyond its registration.
    unsafe { calls.cuMemHostRegister_v2(start, bytes, DEVICE_MAP) }?;
    let mut memory = Registered {
        gpu: Arc::clone(gpu),
        start,
        address: 0,
        bytes,
    };
    // SAFETY: a place for the address of the mapping registered above.
    unsafe { calls.cuMemHostGetDevicePointer_v2(&raw mut memory.address, start, 0) }?;
    Ok(SharedMapping::of_device(Box::new(memory), Some(mapping)))
}

impl DeviceMemory for Registered {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> Bytes {
        Bytes::of_len(self.bytes)
    }

    fn bring(&self, _: usize, _: &[u8]) -> io::Result<()> {
        // It is filled in place.
        Err(io::ErrorKind::Unsupported.into())
    }

    fn page_locked(&self, _: Bytes) -> io::Result<SharedMapping> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn release(&mut self) -> bool {
        let start = mem::replace(&mut self.start, ptr::null_mut());
        if start.is_null() {
            return false;
        }
        self.gpu.drain();
        // SAFETY: registered once; queued work has been executed, or never will be.
        self.gpu
            .calls()
            .and_then(|calls| unsafe { calls.cuMemHostUnregister(start) })
            .is_ok()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.release();
    }
}

/// Address space of which the first granules are memory.
#[derive(Debug)]
pub(super) struct Space {
    gpu: Arc<Gpu>,
    start: Address,
    bytes: usize,
    granules: Vec<c_ulonglong>,
    /// Granules that were closed without the driver's confirmation.
    lost: usize,
}

impl Space {
    pub(super) fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        let bytes = bytes.next_multiple_of(gpu.granule).max(gpu.granule);
        let mut start = 0;
        // SAFETY: a place for the address.
        unsafe {
            gpu.calls()?
                .cuMemAddressReserve(&raw mut start, bytes, 0, 0, 0)
        }?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            start,
            bytes,
            granules: Vec::new(),
            lost: 0,
        })
    }

    fn place(&self, granule: usize) -> Address {
        self.start + (granule * self.gpu.granule) as u64
    }

    /// Adds one granule.
    fn grow(&mut self) -> Result<(), CudaError> {
        let calls = self.gpu.calls()?;
        let properties = properties_on(self.gpu.driver.device);
        let access = access_of(&properties);
        let (granule, place) = (self.gpu.granule, self.place(self.granules.len()));
        let mut handle = 0;
        // SAFETY: a place for the handle, and properties of the driver's layout.
        unsafe { calls.cuMemCreate(&raw mut handle, granule, &raw const properties, 0) }?;
        // SAFETY: an unmapped part of our own address space.
        let mapped = unsafe { calls.cuMemMap(place, granule, 0, handle, 0) };
        if let Err(error) = mapped {
            // SAFETY: created above.
            unsafe { calls.cuMemRelease(handle) }.ok();
            return Err(error);
        }
        self.granules.push(handle);
        // SAFETY: mapped above; access of the driver's layout.
        let opened = unsafe { calls.cuMemSetAccess(place, granule, &raw const access, 1) };
        // SAFETY: whole words of it; releasing it waits.
        let opened = opened.and_then(|()| unsafe { self.gpu.set(place, 0, granule / 4) });
        if opened.is_err() {
            self.shrink();
        }
        opened
    }

    /// Releases the last granule.
    fn shrink(&mut self) {
        let Some(handle) = self.granules.pop() else {
            return;
        };
        self.gpu.drain();
        let place = self.place(self.granules.len());
        let returned = self.gpu.calls().and_then(|calls| {
            // SAFETY: mapped by `grow`; queued work has been executed, or never will be.
            let unmapped = unsafe { calls.cuMemUnmap(place, self.gpu.granule) };
            // Also after a failure, so that the memory does not outlive its mapping.
            // SAFETY: as above.
            unmapped.and(unsafe { calls.cuMemRelease(handle) })
        });
        self.lost += usize::from(returned.is_err());
    }
}

impl DeviceSpace for Space {
    fn set_open(&mut self, bytes: Bytes) -> io::Result<Bytes> {
        let (before, resident) = (self.granules.len(), self.resident());
        let wanted = bytes.as_len().div_ceil(self.gpu.granule);
        if wanted.saturating_mul(self.gpu.granule) > self.bytes {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        while self.granules.len() < wanted {
            if let Err(error) = self.grow() {
                while self.granules.len() > before {
                    self.shrink();
                }
                return Err(error.into());
            }
        }
        while self.granules.len() > wanted {
            self.shrink();
        }
        Ok(resident.saturating_sub(self.resident()))
    }

    fn open(&self) -> Bytes {
        Bytes::of_len(self.granules.len() * self.gpu.granule)
    }

    fn resident(&self) -> Bytes {
        Bytes::of_len((self.granules.len() + self.lost) * self.gpu.granule)
    }

    fn address(&self) -> u64 {
        self.start
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        while !self.granules.is_empty() {
            self.shrink();
        }
        if let Ok(calls) = self.gpu.calls() {
            // SAFETY: reserved by `new`, and nothing is mapped in it.
            unsafe { calls.cuMemAddressFree(self.start, self.bytes) }.ok();
        }
    }
}

/// Memory of a ring of this length with the staging of each reader: at most the size of one read, and for a small ring
/// a quarter of it.
pub(super) fn staged_bytes(ring: Bytes) -> Bytes {
    let staging = Bytes::new(ring.get() / 4)
        .min(STAGING_MAX)
        .round_up(Bytes::of_len(PAGE));
    ring.saturating_add(staging.saturating_mul(READERS as u64))
}

/// Bytes allocated for this many bytes.
pub(super) const fn allocated_bytes(bytes: usize) -> usize {
    if bytes > PAGE {
        bytes.next_multiple_of(PAGE)
    } else {
        PAGE
    }
}

/// `CU_MEMHOSTREGISTER_DEVICEMAP` of `cuda.h`.
const DEVICE_MAP: u32 = 2;
const PAGE: usize = 4096;
/// Larger reads and copies are no faster.
const STAGING_MAX: Bytes = Bytes::from_mib(4);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_staged_in_whole_pages_of_at_most_one_read() {
        let staging = |ring: u64| (staged_bytes(Bytes::from_kib(ring)).get() >> 10) - ring;
        assert_eq!(
            (staging(16), staging(100), staging(64 << 10)),
            (2 * 4, 2 * 28, 2 * 4096)
        );
    }
}
