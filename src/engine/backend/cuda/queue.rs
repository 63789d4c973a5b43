//! GPU backend: one stream of launches, with events as fences.

use std::{collections::VecDeque, io, ops::Range, sync::Arc};

use super::{
    driver::{CudaError, Event},
    gpu::Gpu,
    launcher::Launcher,
    memory::{Allocation, Space, registered, staged},
};
use crate::{
    arena::{Backing, Mapping, SharedMapping},
    backend::{Backend, Buffer, DeviceError, Fence, Limits, Operation, Region, memory::Owner},
};
use cotenant_memory::heap;
use cotenant_units::Bytes;

/// A GPU as a backend.
pub(super) struct Cuda {
    name: String,
    gpu: Arc<Gpu>,
    launcher: Launcher,
    /// Whether weights lie in mappings that it reads in place.
    mapped: bool,
    /// Number of operations queued, of those known to be launched, and of those known to be executed.
    queued: u64,
    launched: u64,
    executed: u64,
    /// Events after operations that are not known to be executed, in order.
    marks: VecDeque<(u64, Event)>,
    /// Events for reuse.
    spare: Vec<Event>,
    /// The last data read, if it exceeded the page-locked room.
    shown: Vec<f32>,
    /// The permanent error.
    failed: Option<DeviceError>,
}

// SAFETY: handles of the driver belong to a context, not to a thread.
unsafe impl Send for Cuda {}

impl Cuda {
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        name: String,
        mapped: bool,
        plain: bool,
        limits: &Limits,
    ) -> io::Result<Self> {
        Ok(Self {
            name,
            gpu: Arc::clone(gpu),
            launcher: Launcher::new(gpu, Owner::new(), plain, limits)?,
            mapped,
            queued: 0,
            launched: 0,
            executed: 0,
            marks: VecDeque::new(),
            spare: Vec::new(),
            shown: Vec::new(),
            failed: None,
        })
    }

    const fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Host memory that the device reads in place.
    pub(super) fn mapping(&self, bytes: Bytes) -> io::Result<Buffer> {
        let memory = registered(self.gpu(), Mapping::new(bytes, Backing::OnTouch)?)?;
        Ok(self.launcher.owner.buffer(memory))
    }

    /// Keeps an error, which all later calls return.
    fn keep<T>(&mut self, result: Result<T, DeviceError>) -> Result<T, DeviceError> {
        if let Err(error) = &result {
            self.failed.get_or_insert_with(|| error.clone());
        }
        result
    }

    const fn sound(&self) -> Result<(), &DeviceError> {
        match &self.failed {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Launches the held commands if they form a whole segment, and records the end of the launched work.
    fn end_segment(&mut self) -> Result<(), CudaError> {
        if self.gpu.submit_whole()? {
            self.launched = self.queued;
            self.try_mark()?;
        }
        Ok(())
    }

    fn try_mark(&mut self) -> Result<(), CudaError> {
        if self.marks.back().map_or(self.executed, |(at, _)| *at) >= self.launched {
            return Ok(());
        }
        let event = match self.spare.pop() {
            Some(event) => event,
            None => self.gpu().event()?,
        };
        self.marks.push_back((self.launched, event));
        // SAFETY: of this context.
        unsafe { self.gpu().record(event) }
    }

    /// Checks whether the first mark has been passed, or waits for it.
    fn pass(&mut self, wait: bool) -> Result<bool, CudaError> {
        let Some(&(at, event)) = self.marks.front() else {
            return Ok(false);
        };
        let calls = self.gpu().calls()?;
        // SAFETY: an event of this context.
        let result = unsafe {
            if wait {
                calls.cuEventSynchronize(event)
            } else {
                calls.cuEventQuery(event)
            }
        };
        match result {
            Ok(()) => {
                self.executed = at;
                self.marks.pop_front();
                self.spare.push(event);
                Ok(true)
            }
            Err(error) if error.is_not_ready() => Ok(false),
            Err(error) => Err(error),
        }
    }
}

// SAFETY: everything before a passed event has been executed, and everything at all after waiting for the stream.
unsafe impl Backend for Cuda {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn allocate(&self, bytes: Bytes, _: Backing) -> io::Result<Buffer> {
        let memory = Allocation::new(self.gpu(), bytes.as_len())?;
        let memory = SharedMapping::of_device(Box::new(memory), None);
        Ok(self.launcher.owner.buffer(memory))
    }

    fn part(&self, bytes: Bytes) -> io::Result<Buffer> {
        if self.mapped {
            return self.mapping(bytes);
        }
        let part = self.allocate(bytes, Backing::Now)?;
        // Readers fill it concurrently with the queue, so it must have been zeroed before.
        self.gpu().synchronize()?;
        Ok(part)
    }

    fn ring(&self, bytes: Bytes, _: Backing) -> io::Result<Buffer> {
        if self.mapped || self.gpu.driver.integrated {
            return self.mapping(bytes);
        }
        Ok(self
            .launcher
            .owner
            .buffer(staged(self.gpu(), bytes.as_len())?))
    }

    fn reserve(&self, bytes: Bytes, _: Bytes) -> io::Result<Region> {
        let space = Space::new(self.gpu(), bytes.as_len())?;
        Ok(self.launcher.owner.device_region(Box::new(space)))
    }

    fn trim(&self) {
        heap::trim();
    }

    fn queue(&mut self, operation: Operation<'_>) -> Result<(), DeviceError> {
        self.sound().map_err(Clone::clone)?;
        let queued = self.gpu().calls().map_err(DeviceError::from);
        let queued = queued.and_then(|_| self.launcher.queue(&operation));
        self.queued += 1;
        self.keep(queued)
    }

    fn mark(&mut self) -> Fence {
        if self.failed.is_none() {
            let ended = self.end_segment().map_err(Into::into);
            self.keep(ended).ok();
        }
        Fence(self.queued)
    }

    fn holds(&self, fence: Fence) -> bool {
        fence.0 > self.launched
    }

    fn done(&mut self, fence: Fence) -> Result<bool, DeviceError> {
        self.sound().map_err(Clone::clone)?;
        while self.executed < fence.0 {
            let passed = self.pass(false).map_err(Into::into);
            if !self.keep(passed)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn wait(&mut self, fence: Fence) -> Result<(), DeviceError> {
        self.sound().map_err(Clone::clone)?;
        if self.holds(fence) {
            let submitted = self.gpu.submit_cut().map_err(Into::into);
            self.keep(submitted)?;
            self.launched = self.queued;
        }
        while self.executed < fence.0 {
            if self.marks.is_empty() {
                let marked = self.try_mark().map_err(Into::into);
                self.keep(marked)?;
            }
            let passed = self.pass(true).map_err(Into::into);
            self.keep(passed)?;
        }
        Ok(())
    }

    fn read<'a>(
        &'a mut self,
        from: &'a Buffer,
        floats: Range<usize>,
    ) -> Result<&'a [f32], DeviceError> {
        self.sound().map_err(Clone::clone)?;
        let count = floats.len();
        let address = self.launcher.owner.device_address(&from.view(floats))?;
        let room = self.launcher.staging.room(count).unwrap_or_else(|| {
            self.shown.resize(count, 0.0);
            &mut self.shown
        });
        // SAFETY: inside a borrowed buffer.
        let received = unsafe { self.gpu.receive(address, room) };
        self.keep(received.map_err(Into::into))?;
        while let Some((_, event)) = self.marks.pop_front() {
            self.spare.push(event);
        }
        (self.launched, self.executed) = (self.queued, self.queued);
        self.launcher.staging.passed();
        Ok(self.launcher.staging.room(count).unwrap_or(&mut self.shown))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.gpu().synchronize().ok();
        if let Ok(calls) = self.gpu().calls() {
            for event in self
                .marks
                .drain(..)
                .map(|(_, event)| event)
                .chain(self.spare.drain(..))
            {
                // SAFETY: nothing waits for it any more.
                unsafe { calls.cuEventDestroy_v2(event) }.ok();
            }
        }
    }
}
