//! Staging of what the host writes for kernels: page-locked slots, and tables on the device that are filled through them.

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

/// Page-locked memory in slots that are filled one behind the other. Copies in the stream read it later, so that a slot is written
/// again only when the event behind them has passed.
///
/// From memory that is not page-locked the driver may wait for the whole stream before it copies ("API synchronization behavior").
pub(super) struct Staging {
    commands: Commands,
    memory: SharedMapping,
    slots: [Slot; SLOTS],
    /// The slot that is being filled, and how much of it is.
    current: usize,
    filled: usize,
}

/// A slot's last record.
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

    /// Queues that memory of the device has these values, ahead of what is held back; they may be given up when this returns.
    ///
    /// # Safety
    ///
    /// There is room on the device until it has been executed, and nothing that is held back uses it; the thread is bound.
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
            // SAFETY: a part of our own mapping which no copy in flight reads.
            unsafe {
                place
                    .as_ptr()
                    .copy_from_nonoverlapping(values.as_ptr().cast(), bytes);
            };
            // SAFETY: the caller's; nothing is written there before an event behind the copy has passed.
            unsafe {
                self.commands
                    .send(to, place.as_ptr().cast::<c_void>(), bytes)
            }?;
            self.filled = (self.filled + bytes).next_multiple_of(SEND_ALIGN);
            to += bytes as u64;
        }
        Ok(())
    }

    /// Goes on to the next slot, once no copy reads it any more.
    fn next(&mut self) -> Result<(), CudaError> {
        if let Some(slot) = self.slots.get_mut(self.current) {
            // SAFETY: an event of this context; the thread is bound, as it is for what is sent.
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

    /// Room for so many floats that are read once everything that was queued has been executed; nothing where there are more than fit.
    ///
    /// A copy to memory that is not page-locked goes through the driver's own, piece by piece.
    pub(super) fn room(&mut self, floats: usize) -> Option<&mut [f32]> {
        let place = self.memory.range(0, floats * size_of::<f32>())?;
        // SAFETY: whole pages of our own mapping. What is received there is queued behind the copies that read it.
        Some(unsafe { slice::from_raw_parts_mut(place.as_ptr().cast(), floats) })
    }

    /// Notes that everything that was queued has been executed.
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

/// A table on the device that the host writes, with room for all that it will ever hold.
pub(super) struct Table<T> {
    memory: Allocation,
    /// What may read it while it is written; nothing where that is looked for before.
    kind: Option<Tables>,
    places: usize,
    /// What it will hold.
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

    /// Where it lies once it holds `values`, for what is queued from now on: operations before it have had what they need by then,
    /// since the copy is queued as well.
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
            // SAFETY: there is room in it; the thread is bound.
            unsafe { staging.send(self.memory.address(), &self.last) }?;
        }
        Ok(self.memory.address())
    }
}

/// What it takes of memory that is page-locked: 128 rows of 2560 floats, a chunk of a prompt whose embedding the host has, and as
/// much again, so that the next chunk is written while that one is copied.
pub(super) const STAGING_BYTES: usize = SLOTS * SLOT_BYTES;
const SLOTS: usize = 4;
const SLOT_BYTES: usize = 512 << 10;
const SEND_ALIGN: usize = 16;
