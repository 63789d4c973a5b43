//! Staging of host data for kernels: page-locked slots, and the device tables they fill.

use std::{ffi::c_void, io, ptr, slice, sync::Arc};

use super::{
    driver::{Address, CudaError, Event},
    gpu::{Commands, Gpu},
    memory::{Allocation, registered},
    segments::Tables,
};
use crate::{
    arena::{Backing, DeviceMemory as _, Mapping, SharedMapping},
    backend::DeviceError,
};
use cotenant_units::Bytes;

/// Page-locked memory in slots that are filled in turn. Copies in the stream read them later, so that a slot is
/// rewritten only after its event has passed.
///
/// With pageable memory the driver may wait for the whole stream before it copies ("API synchronization behavior").
pub(super) struct Staging {
    commands: Commands,
    memory: SharedMapping,
    slots: [Slot; SLOTS],
    /// The current slot, and its fill level.
    current: usize,
    filled: usize,
}

/// The last record of a slot.
struct Slot {
    event: Event,
    /// Recorded, and not known to have passed.
    in_flight: bool,
}

impl Staging {
    pub(super) fn new(gpu: &Arc<Gpu>) -> io::Result<Self> {
        let memory = registered(
            gpu,
            Mapping::new(Bytes::of_len(STAGING_BYTES), Backing::Now)?,
        )?;
        let slots = [const {
            Slot {
                event: ptr::null_mut(),
                in_flight: false,
            }
        }; SLOTS];
        let mut staging = Self {
            commands: Commands::on(gpu),
            memory,
            slots,
            current: 0,
            filled: 0,
        };
        for slot in &mut staging.slots {
            slot.event = gpu.event()?;
        }
        Ok(staging)
    }

    /// Queues a copy of these values to device memory, before the held commands; the values may be dropped on return.
    ///
    /// # Safety
    ///
    /// The target exists until it has been executed, and no held command uses it; the thread is bound.
    pub(super) unsafe fn send<T: Copy>(
        &mut self,
        mut to: Address,
        values: &[T],
    ) -> Result<(), CudaError> {
        for values in values.chunks((SLOT_BYTES / size_of::<T>().max(1)).max(1)) {
            let bytes = size_of_val(values);
            if self.filled + bytes > SLOT_BYTES {
                self.next()?;
            }
            let Some(place) = self
                .memory
                .range(self.current * SLOT_BYTES + self.filled, bytes)
            else {
                continue;
            };
            // SAFETY: a part of our own mapping that no copy in flight reads.
            unsafe {
                place
                    .as_ptr()
                    .copy_from_nonoverlapping(values.as_ptr().cast(), bytes);
            };
            // SAFETY: the caller's promise; the slot is not rewritten before an event after the copy has passed.
            unsafe {
                self.commands
                    .send(to, place.as_ptr().cast::<c_void>(), bytes)
            }?;
            self.filled = (self.filled + bytes).next_multiple_of(SEND_ALIGN);
            to += bytes as u64;
        }
        Ok(())
    }

    /// Advances to the next slot, once no copy reads it any more.
    fn next(&mut self) -> Result<(), CudaError> {
        if let Some(slot) = self.slots.get_mut(self.current) {
            // SAFETY: an event of this context; the thread is bound, as for sending.
            unsafe { self.commands.record(slot.event) }?;
            slot.in_flight = true;
        }
        let next = (self.current + 1) % SLOTS;
        if let Some(slot) = self.slots.get_mut(next).filter(|slot| slot.in_flight) {
            // SAFETY: as above.
            unsafe { self.commands.wait(slot.event) }?;
            slot.in_flight = false;
        }
        (self.current, self.filled) = (next, 0);
        Ok(())
    }

    /// Room for floats that are read after all queued work has been executed; `None` if they do not fit.
    ///
    /// The driver stages a copy to pageable memory through its own buffer, in pieces.
    pub(super) fn room(&mut self, floats: usize) -> Option<&mut [f32]> {
        let place = self.memory.range(0, floats * size_of::<f32>())?;
        // SAFETY: whole pages of our own mapping. Received data is queued after the copies that read it.
        Some(unsafe { slice::from_raw_parts_mut(place.as_ptr().cast(), floats) })
    }

    /// Records that all queued work has been executed.
    pub(super) fn passed(&mut self) {
        self.filled = 0;
        for slot in &mut self.slots {
            slot.in_flight = false;
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        for slot in self.slots.iter().filter(|slot| !slot.event.is_null()) {
            // SAFETY: nothing waits for it any more.
            unsafe { self.commands.forget(slot.event) };
        }
    }
}

/// A device table written by the host, with a fixed capacity.
pub(super) struct Table<T> {
    memory: Allocation,
    /// Its readers among the held commands; `None` if the caller checks them.
    kind: Option<Tables>,
    places: usize,
    /// Its contents after the queued copies.
    last: Vec<T>,
}

impl<T: Copy + PartialEq> Table<T> {
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        kind: Option<Tables>,
        places: usize,
    ) -> Result<Self, CudaError> {
        let memory = Allocation::new(gpu, places * size_of::<T>())?;
        Ok(Self {
            memory,
            kind,
            places,
            last: Vec::with_capacity(places),
        })
    }

    pub(super) fn address(&self) -> Address {
        self.memory.address()
    }

    /// Its address, once it holds `values` for work queued from now on: the copy is queued too, so that earlier
    /// operations still see the old values.
    pub(super) fn put(
        &mut self,
        staging: &mut Staging,
        values: impl IntoIterator<Item = Result<T, DeviceError>>,
    ) -> Result<Address, DeviceError> {
        let (mut count, mut is_same) = (0, true);
        for value in values {
            let value = value?;
            match self.last.get_mut(count) {
                Some(last) if *last == value => {}
                Some(last) => (*last, is_same) = (value, false),
                None if count < self.places => {
                    self.last.push(value);
                    is_same = false;
                }
                None => {
                    return Err(DeviceError::new(format!(
                        "a table has room for {} values only",
                        self.places
                    )));
                }
            }
            count += 1;
        }
        if self.last.len() > count {
            self.last.truncate(count);
        }
        if !is_same {
            if let Some(kind) = self.kind {
                staging.commands.before_writing(kind)?;
            }
            // SAFETY: it has room; the thread is bound.
            unsafe { staging.send(self.memory.address(), &self.last) }?;
        }
        Ok(self.memory.address())
    }
}

/// Its page-locked memory: 128 rows of 2560 floats, a prefill chunk whose embedding is on the host, and as much again,
/// so that the next chunk is written while that one is copied.
pub(super) const STAGING_BYTES: usize = SLOTS * SLOT_BYTES;
const SLOTS: usize = 4;
const SLOT_BYTES: usize = 512 << 10;
const SEND_ALIGN: usize = 16;
