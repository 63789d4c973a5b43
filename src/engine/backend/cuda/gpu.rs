//! Context on the first GPU: streams, kernels, and calls that bind the thread first.

use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::{Arc, Mutex, MutexGuard},
};

use cudarc::driver::sys;

use super::{
    driver::{
        Address, Context, CudaError, Driver, Event, Function, Functions, GraphExec, Module, Stream,
        properties_on,
    },
    images,
    parameters::{Kernel, tiles_bytes},
    segments::{self, Command, Launches, Segments, Tables},
};
use crate::{error::Unavailable, gguf::SUPPORTED};
use cotenant_units::lock::locked;

/// A context, alive as long as any of its resources.
pub(super) struct Gpu {
    pub(super) driver: &'static Driver,
    context: Context,
    module: Module,
    kernels: [Function; Kernel::NAMES.len()],
    /// The compute stream.
    stream: Stream,
    /// Commands held back from it.
    segments: Mutex<Segments>,
    /// Stream for captures of graphs: other threads release memory and wait at any time, which a capture would not
    /// allow.
    captures: Stream,
    /// Stream for copies of weights, used by any thread.
    copies: Stream,
    /// Target of its compiled kernels.
    pub(super) image: &'static str,
    /// Size in bytes of the units in which address space is backed by memory.
    pub(super) granule: usize,
}

// SAFETY: handles of the driver belong to a context, not to a thread; each call binds the calling thread.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver supports concurrent calls.
unsafe impl Sync for Gpu {}

/// A separate context for observing the free memory while another one is created.
pub(super) struct Observer {
    driver: &'static Driver,
    context: Context,
}

impl Observer {
    pub(super) fn new() -> Result<Self, Unavailable> {
        let driver = Driver::open()?;
        let mut context = ptr::null_mut();
        // SAFETY: a place for the handle.
        unsafe {
            driver
                .functions
                .cuCtxCreate_v2(&raw mut context, 0, driver.device)
        }
        .map_err(lost)?;
        Ok(Self { driver, context })
    }

    /// Bytes free for allocation on the device.
    pub(super) fn free(&self) -> Result<usize, CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: an existing context.
        unsafe { self.driver.functions.cuCtxSetCurrent(self.context) }?;
        // SAFETY: places for the numbers.
        unsafe {
            self.driver
                .functions
                .cuMemGetInfo_v2(&raw mut free, &raw mut total)
        }?;
        Ok(free)
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and nothing is in it.
        unsafe { self.driver.functions.cuCtxDestroy_v2(self.context) }.ok();
    }
}

impl Gpu {
    /// Opens a context with all resources for computing.
    pub(super) fn open() -> Result<Arc<Self>, Unavailable> {
        let driver = Driver::open()?;
        let (image, name) = images::for_capability(driver.capability)?;
        let calls = driver.functions;
        let mut context = ptr::null_mut();
        // SAFETY: a place for the handle.
        unsafe { calls.cuDevicePrimaryCtxRetain(&raw mut context, driver.device) }.map_err(lost)?;
        // From here on, dropping it releases whatever was created.
        let mut gpu = Self {
            driver,
            context,
            module: ptr::null_mut(),
            kernels: [ptr::null_mut(); Kernel::NAMES.len()],
            stream: ptr::null_mut(),
            segments: Mutex::default(),
            captures: ptr::null_mut(),
            copies: ptr::null_mut(),
            image: name,
            granule: 0,
        };
        gpu.fill(&image).map_err(lost)?;
        Ok(Arc::new(gpu))
    }

    fn fill(&mut self, image: &[u8]) -> Result<(), CudaError> {
        let calls = self.calls()?;
        for stream in [&mut self.stream, &mut self.copies, &mut self.captures] {
            // SAFETY: a place for the handle.
            unsafe { calls.cuStreamCreate(stream, NON_BLOCKING) }?;
        }
        // SAFETY: an image of a format supported by the driver, followed by a zero.
        unsafe { calls.cuModuleLoadData(&raw mut self.module, image.as_ptr().cast()) }?;
        for (name, place) in Kernel::NAMES.iter().zip(&mut self.kernels) {
            // SAFETY: a place for the handle, and a zero-terminated text.
            unsafe { calls.cuModuleGetFunction(place, self.module, name.as_ptr()) }?;
        }
        let tiles = SUPPORTED
            .into_iter()
            .map(tiles_bytes)
            .max()
            .unwrap_or_default();
        let tiles = c_int::try_from(tiles).unwrap_or(c_int::MAX);
        for (kernel, most) in [
            (Kernel::Attend128, ATTEND_SHARED_MAX),
            (Kernel::Attend256, ATTEND_SHARED_MAX),
            (Kernel::AttendFew128, ATTEND_SHARED_MAX),
            (Kernel::AttendFew256, ATTEND_SHARED_MAX),
            (Kernel::ProductTiles, tiles),
        ] {
            // SAFETY: a function of the module.
            unsafe { calls.cuFuncSetAttribute(self.function(kernel), SHARED_MAX, most) }?;
        }
        let properties = properties_on(self.driver.device);
        // SAFETY: a place for the number, and properties of the driver's layout.
        unsafe {
            calls.cuMemGetAllocationGranularity(
                &raw mut self.granule,
                &raw const properties,
                GRANULE_LEAST,
            )
        }
    }

    fn function(&self, kernel: Kernel) -> Function {
        self.kernels
            .get(kernel as usize)
            .copied()
            .unwrap_or(ptr::null_mut())
    }

    /// Bytes free for allocation on the device.
    pub(super) fn free(&self) -> Result<usize, CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: places for the numbers.
        unsafe { self.calls()?.cuMemGetInfo_v2(&raw mut free, &raw mut total) }?;
        Ok(free)
    }

    /// The driver's calls, with this context bound to this thread.
    pub(super) fn calls(&self) -> Result<Functions, CudaError> {
        let calls = self.driver.functions;
        // SAFETY: retained for the lifetime of `self`.
        unsafe { calls.cuCtxSetCurrent(self.context) }?;
        Ok(calls)
    }

    /// Queues the setting of words.
    ///
    /// # Safety
    ///
    /// The words exist until it has been executed; the thread is bound.
    pub(super) unsafe fn set(&self, to: Address, word: u32, count: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { (self.driver.functions).cuMemsetD32Async(to, word, count, self.stream) }
    }

    fn segments(&self) -> MutexGuard<'_, Segments> {
        locked(&self.segments)
    }

    /// Launches the held commands in the middle of a segment.
    pub(super) fn submit_cut(&self) -> Result<(), CudaError> {
        self.calls()?;
        self.segments().submit_cut(self)
    }

    /// Launches the held commands if they form a whole segment; returns whether none are left.
    pub(super) fn submit_whole(&self) -> Result<bool, CudaError> {
        self.calls()?;
        let mut segments = self.segments();
        if segments.is_empty() || segments.is_whole(self.driver.integrated) {
            segments.submit(self)?;
        }
        Ok(segments.is_empty())
    }

    /// Enables or disables capturing segments as graphs.
    pub(super) fn set_graphs(&self, graphs: bool) -> Result<(), CudaError> {
        self.calls()?;
        self.segments().set_graphs(self, graphs);
        Ok(())
    }

    /// Captures the maximum number of graphs; returns whether that succeeded.
    pub(super) fn fill_up(&self) -> Result<bool, CudaError> {
        self.calls()?;
        Ok(self.segments().fill_up(self))
    }

    /// Queues a command on a stream of this context.
    ///
    /// # Safety
    ///
    /// As of [`Launches::issue`]; the thread is bound.
    unsafe fn issue_on(&self, stream: Stream, command: &Command) -> Result<(), CudaError> {
        let calls = self.driver.functions;
        match command {
            Command::Launch {
                kernel,
                grid: (x, y, z),
                shared,
                job,
            } => {
                let (mut places, none) = (job.places(), ptr::null_mut());
                let (function, threads) = (self.function(*kernel), kernel.threads());
                let places = places.as_mut_ptr();
                // SAFETY: the caller's promise.
                unsafe {
                    calls.cuLaunchKernel(
                        function, *x, *y, *z, threads, 1, 1, *shared, stream, places, none,
                    )
                }
            }
            // SAFETY: the caller's promise.
            Command::Set { to, word, count } => unsafe {
                calls.cuMemsetD32Async(*to, *word, *count, stream)
            },
            // SAFETY: the caller's promise.
            Command::Copy { from, to, bytes } => unsafe {
                calls.cuMemcpyDtoDAsync_v2(*to, *from, *bytes, stream)
            },
        }
    }

    /// Copies floats to the host after all queued work has been executed.
    ///
    /// # Safety
    ///
    /// The floats exist.
    pub(super) unsafe fn receive(&self, from: Address, to: &mut [f32]) -> Result<(), CudaError> {
        let calls = self.calls()?;
        self.segments().submit(self)?;
        let bytes = size_of_val(to);
        // SAFETY: the caller's promise, and `to` is borrowed until the stream is synchronised.
        let queued =
            unsafe { calls.cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, bytes, self.stream) };
        // Also after a failure: the copy may be in flight.
        queued.and(self.synchronize())
    }

    /// Copies bytes to the device from any thread, and returns on completion.
    ///
    /// # Safety
    ///
    /// The target is allocated on the device, and nothing in flight uses it.
    pub(super) unsafe fn bring(&self, to: Address, from: &[u8]) -> Result<(), CudaError> {
        let calls = self.calls()?;
        // SAFETY: the caller's promise; the source is borrowed until the stream is synchronised.
        let queued = unsafe {
            calls.cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), self.copies)
        };
        // SAFETY: a stream of this context.
        queued.and(unsafe { calls.cuStreamSynchronize(self.copies) })
    }

    /// Waits for all queued work.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        let submitted = self.submit_cut();
        // SAFETY: a stream of this context.
        submitted.and(unsafe { self.calls()?.cuStreamSynchronize(self.stream) })
    }

    /// Waits for all queued work before memory is released; retries on failure, which means that it has not waited.
    pub(super) fn drain(&self) {
        if self.synchronize().is_err()
            && let Err(error) = self.synchronize()
        {
            self.segments().fail(error);
        }
    }

    /// A new event.
    pub(super) fn event(&self) -> Result<Event, CudaError> {
        let mut event = ptr::null_mut();
        // SAFETY: a place for the handle.
        unsafe { self.calls()?.cuEventCreate(&raw mut event, WITHOUT_TIME) }?;
        Ok(event)
    }

    /// Records an event after all queued work.
    ///
    /// # Safety
    ///
    /// It belongs to this context.
    pub(super) unsafe fn record(&self, event: Event) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.calls()?.cuEventRecord(event, self.stream) }
    }
}

impl Launches for Gpu {
    unsafe fn issue(&self, command: &Command) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.issue_on(self.stream, command) }
    }

    fn capture(&self, commands: &[Command]) -> Result<GraphExec, CudaError> {
        let calls = self.driver.functions;
        let (mut graph, mut made) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a stream of this context, which is otherwise empty.
        unsafe { calls.cuStreamBeginCapture_v2(self.captures, OF_THIS_THREAD) }?;
        // SAFETY: nothing is executed.
        let issued = commands
            .iter()
            .try_for_each(|command| unsafe { self.issue_on(self.captures, command) });
        // SAFETY: a place for the handle.
        let mut end = || unsafe { calls.cuStreamEndCapture(self.captures, &raw mut graph) };
        // Retried on failure, so that the next capture can begin.
        let ended = end().inspect_err(|_| drop(end()));
        // SAFETY: a place for the handle, and the graph captured above.
        let captured = issued
            .and(ended)
            .and_then(|()| unsafe { calls.cuGraphInstantiateWithFlags(&raw mut made, graph, 0) });
        if !graph.is_null() {
            // SAFETY: as above; the instantiated graph does not need it.
            unsafe { calls.cuGraphDestroy(graph) }.ok();
        }
        // SAFETY: instantiated above.
        let uploaded = captured.and_then(|()| unsafe { calls.cuGraphUpload(made, self.stream) });
        if uploaded.is_err() && !made.is_null() {
            self.forget(made);
        }
        uploaded.map(|()| made)
    }

    unsafe fn launch(&self, graph: GraphExec) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let launched = unsafe { self.driver.functions.cuGraphLaunch(graph, self.stream) };
        if launched.is_err() {
            segments::allow_no_graphs();
        }
        launched
    }

    fn forget(&self, graph: GraphExec) {
        // SAFETY: made by `capture`, and not launched any more.
        unsafe { self.driver.functions.cuGraphExecDestroy(graph) }.ok();
    }
}

/// Queue access to a context's stream. It offers no allocation, so that operations need none.
#[derive(Clone, Debug)]
pub(super) struct Commands(Arc<Gpu>);

impl Commands {
    pub(super) fn on(gpu: &Arc<Gpu>) -> Self {
        Self(Arc::clone(gpu))
    }

    /// Multiprocessors of the device.
    pub(super) fn processors(&self) -> usize {
        usize::try_from(self.0.driver.processors).unwrap_or(1)
    }

    /// Launches the held commands.
    pub(super) fn submit(&self) -> Result<(), CudaError> {
        self.0.segments().submit(&*self.0)
    }

    /// Launches the held commands if any of them reads this table, which may then be written.
    pub(super) fn before_writing(&self, tables: Tables) -> Result<(), CudaError> {
        let mut segments = self.0.segments();
        if segments.reads(tables) {
            segments.submit(&*self.0)
        } else {
            Ok(())
        }
    }

    /// Queues a command after the held ones: as part of a segment, with its bytes of weights, or for immediate launch.
    ///
    /// # Safety
    ///
    /// As [`Gpu::issue`].
    pub(super) unsafe fn queue(
        &self,
        command: &Command,
        weights: Option<usize>,
    ) -> Result<(), CudaError> {
        let mut segments = self.0.segments();
        match weights {
            // SAFETY: the caller's promise.
            Some(weights) => unsafe { segments.hold(&*self.0, *command, weights) },
            None => {
                segments.submit(&*self.0)?;
                // SAFETY: the caller's promise.
                unsafe { self.0.issue(command) }
            }
        }
    }

    /// Queues a copy from page-locked host memory, before the held commands.
    ///
    /// # Safety
    ///
    /// Both ranges exist, and the source is not written, until it has been executed; the thread is bound.
    pub(super) unsafe fn send(
        &self,
        to: Address,
        from: *const c_void,
        bytes: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { (self.0.driver.functions).cuMemcpyHtoDAsync_v2(to, from, bytes, self.0.stream) }
    }

    /// As [`Gpu::set`], before the held commands.
    ///
    /// # Safety
    ///
    /// As of [`Gpu::set`].
    pub(super) unsafe fn set(&self, to: Address, word: u32, count: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.set(to, word, count) }
    }

    /// As [`Gpu::record`].
    ///
    /// # Safety
    ///
    /// As of [`Gpu::record`].
    pub(super) unsafe fn record(&self, event: Event) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.record(event) }
    }

    /// Waits until everything before the record of an event has been executed.
    ///
    /// # Safety
    ///
    /// It belongs to this context; the thread is bound.
    pub(super) unsafe fn wait(&self, event: Event) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.driver.functions.cuEventSynchronize(event) }
    }

    /// Returns an event.
    ///
    /// # Safety
    ///
    /// It belongs to this context, and is not used any more.
    pub(super) unsafe fn forget(&self, event: Event) {
        if let Ok(calls) = self.0.calls() {
            // SAFETY: the caller's promise.
            unsafe { calls.cuEventDestroy_v2(event) }.ok();
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // A failure here follows an earlier one: there is no caller to report to.
        if let Ok(calls) = self.calls() {
            self.segments().set_graphs(self, false);
            // SAFETY: no other owner is left, and nothing runs in them: memory used by kernels holds a reference to
            // this.
            unsafe {
                for stream in [self.stream, self.copies, self.captures] {
                    if !stream.is_null() {
                        calls.cuStreamDestroy_v2(stream).ok();
                    }
                }
                if !self.module.is_null() {
                    calls.cuModuleUnload(self.module).ok();
                }
            }
        }
        // SAFETY: retained once, by `open`.
        unsafe {
            self.driver
                .functions
                .cuDevicePrimaryCtxRelease_v2(self.driver.device)
        }
        .ok();
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.driver.name)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "what `map_err` hands on")]
fn lost(error: CudaError) -> Unavailable {
    Unavailable::new(
        format!("the GPU cannot be used: {error}"),
        "check `dmesg` and the holders of its memory, or set `llm.device: cpu`",
    )
}

// From `cuda.h`.
const NON_BLOCKING: u32 = 1;
const WITHOUT_TIME: u32 = 2;
/// Readers copy weights from other threads concurrently.
const OF_THIS_THREAD: sys::CUstreamCaptureMode =
    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const SHARED_MAX: sys::CUfunction_attribute =
    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
const GRANULE_LEAST: sys::CUmemAllocationGranularity_flags =
    sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
/// Shared memory of attention over heads of 256 elements in `f16`: 16 rows of queries as floats, and a block's keys and
/// values in their cache format.
const ATTEND_SHARED_MAX: c_int = 16 * 256 * 4 + 2 * 64 * 512;
