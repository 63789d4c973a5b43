//! CUDA driver: a library opened at run time, with named errors for each call.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void},
    sync::OnceLock,
};

use cudarc::driver::{
    result::DriverError,
    sys::{self, CUdevice_attribute as Attribute},
};
pub(super) use sys::{
    CUcontext as Context, CUdeviceptr as Address, CUevent as Event, CUfunction as Function,
    CUgraph as Graph, CUgraphExec as GraphExec, CUmodule as Module, CUstream as Stream,
};

use crate::error::{DeviceError, Unavailable};

/// A failed driver call, with the driver's name for the error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {}", name_of(code))]
pub(super) struct CudaError {
    call: &'static str,
    code: sys::CUresult,
}

fn name_of(code: &sys::CUresult) -> String {
    let name = DriverError(*code);
    let name = name
        .error_name()
        .map(|name| name.to_string_lossy().into_owned());
    name.unwrap_or_else(|_| format!("{code:?}"))
}

impl CudaError {
    #[cfg(test)]
    pub(super) const fn out_of_memory() -> Self {
        Self {
            call: "",
            code: sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        }
    }

    pub(super) const fn is_not_ready(&self) -> bool {
        matches!(self.code, sys::CUresult::CUDA_ERROR_NOT_READY)
    }
}

impl From<CudaError> for DeviceError {
    fn from(error: CudaError) -> Self {
        Self::new(error.to_string())
    }
}

impl From<CudaError> for std::io::Error {
    fn from(error: CudaError) -> Self {
        let kind = match error.code {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => std::io::ErrorKind::OutOfMemory,
            _ => std::io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        /// The functions called, and those needed to name an error.
        const SYMBOLS: &[&str] = &["cuGetErrorName", $(stringify!($name)),*];

        #[expect(non_snake_case, clippy::too_many_arguments, reason = "the driver's own names and parameters")]
        impl Functions {
            $(
                /// # Safety
                ///
                /// The driver's contract: valid pointers and handles.
                pub(super) unsafe fn $name(self $(, $argument: $type)*) -> Result<(), CudaError> {
                    // SAFETY: the caller's promise; the symbol exists.
                    match unsafe { sys::$name($($argument),*) } {
                        sys::CUresult::CUDA_SUCCESS => Ok(()),
                        code => Err(CudaError { call: stringify!($name), code }),
                    }
                }
            )*
        }
    };
}

/// Proof that all functions exist: cudarc panics on a missing one.
#[derive(Clone, Copy)]
pub(super) struct Functions(());

functions! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut c_int, ordinal: c_int);
    cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
    cuDeviceGetAttribute(value: *mut c_int, attribute: sys::CUdevice_attribute, device: c_int);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    cuDevicePrimaryCtxRetain(context: *mut Context, device: c_int);
    cuDevicePrimaryCtxRelease_v2(device: c_int);
    cuCtxCreate_v2(context: *mut Context, flags: c_uint, device: c_int);
    cuCtxDestroy_v2(context: Context);
    cuCtxSetCurrent(context: Context);
    cuModuleLoadData(module: *mut Module, image: *const c_void);
    cuModuleUnload(module: Module);
    cuModuleGetFunction(function: *mut Function, module: Module, name: *const c_char);
    cuFuncSetAttribute(function: Function, attribute: sys::CUfunction_attribute, value: c_int);
    cuMemAlloc_v2(address: *mut Address, bytes: usize);
    cuMemFree_v2(address: Address);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemHostRegister_v2(start: *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostUnregister(start: *mut c_void);
    cuMemHostGetDevicePointer_v2(address: *mut Address, start: *mut c_void, flags: c_uint);
    cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const sys::CUmemAllocationProp, option: sys::CUmemAllocationGranularity_flags);
    cuMemAddressReserve(address: *mut Address, bytes: usize, alignment: usize, wanted: Address, flags: c_ulonglong);
    cuMemAddressFree(address: Address, bytes: usize);
    cuMemCreate(handle: *mut c_ulonglong, bytes: usize, properties: *const sys::CUmemAllocationProp, flags: c_ulonglong);
    cuMemRelease(handle: c_ulonglong);
    cuMemMap(address: Address, bytes: usize, offset: usize, handle: c_ulonglong, flags: c_ulonglong);
    cuMemUnmap(address: Address, bytes: usize);
    cuMemSetAccess(address: Address, bytes: usize, access: *const sys::CUmemAccessDesc, count: usize);
    cuMemcpyHtoDAsync_v2(to: Address, from: *const c_void, bytes: usize, stream: Stream);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: Address, bytes: usize, stream: Stream);
    cuMemcpyDtoDAsync_v2(to: Address, from: Address, bytes: usize, stream: Stream);
    cuMemsetD32Async(address: Address, value: c_uint, count: usize, stream: Stream);
    cuStreamCreate(stream: *mut Stream, flags: c_uint);
    cuStreamDestroy_v2(stream: Stream);
    cuStreamSynchronize(stream: Stream);
    cuStreamBeginCapture_v2(stream: Stream, mode: sys::CUstreamCaptureMode);
    cuStreamEndCapture(stream: Stream, graph: *mut Graph);
    cuGraphInstantiateWithFlags(graph_exec: *mut GraphExec, graph: Graph, flags: c_ulonglong);
    cuGraphUpload(graph: GraphExec, stream: Stream);
    cuGraphLaunch(graph: GraphExec, stream: Stream);
    cuGraphDestroy(graph: Graph);
    cuGraphExecDestroy(graph: GraphExec);
    cuEventCreate(event: *mut Event, flags: c_uint);
    cuEventDestroy_v2(event: Event);
    cuEventRecord(event: Event, stream: Stream);
    cuEventQuery(event: Event);
    cuEventSynchronize(event: Event);
    cuLaunchKernel(function: Function, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Stream, parameters: *mut *mut c_void, extra: *mut *mut c_void);
}

/// Properties of device memory.
pub(super) fn properties_on(device: c_int) -> sys::CUmemAllocationProp {
    // SAFETY: numbers and a pointer, for all of which zero is valid.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device,
    };
    properties
}

/// Read and write access by the device.
pub(super) const fn access_of(properties: &sys::CUmemAllocationProp) -> sys::CUmemAccessDesc {
    sys::CUmemAccessDesc {
        location: properties.location,
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    }
}

impl Functions {
    /// Looks all of them up; the error is the name of a missing one.
    fn find() -> Result<Self, &'static str> {
        for name in SYMBOLS {
            // SAFETY: only looks for the symbol; the library is loaded.
            if unsafe { sys::culib().get::<*const c_void>(name.as_bytes()) }.is_err() {
                return Err(name);
            }
        }
        Ok(Self(()))
    }

    /// The value of a device attribute; `None` if the driver does not support it.
    pub(super) fn attribute(self, device: c_int, attribute: sys::CUdevice_attribute) -> c_int {
        let mut value = 0;
        // SAFETY: a place for the number.
        unsafe { self.cuDeviceGetAttribute(&raw mut value, attribute, device) }
            .map_or(0, |()| value)
    }
}

/// The driver with its first device, with the properties available without a context.
pub(super) struct Driver {
    pub(super) functions: Functions,
    pub(super) device: c_int,
    pub(super) name: String,
    /// 12020 for CUDA 12.2.
    pub(super) version: c_int,
    pub(super) capability: (c_int, c_int),
    pub(super) integrated: bool,
    pub(super) processors: c_int,
    pub(super) memory: usize,
}

impl Driver {
    /// Opens it once per process; a failure is retried by the next call.
    pub(super) fn open() -> Result<&'static Self, Unavailable> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        match DRIVER.get() {
            Some(driver) => Ok(driver),
            None => Self::opened().map(|driver| DRIVER.get_or_init(|| driver)),
        }
    }

    fn opened() -> Result<Self, Unavailable> {
        // SAFETY: it is the driver by its name, whose initialisers may run in any process.
        if !unsafe { sys::is_culib_present() } {
            return Err(Unavailable::new(
                "libcuda is not installed",
                "install the driver of the GPU, or set `llm.device: cpu`",
            ));
        }
        let functions = Functions::find().map_err(|name| {
            Unavailable::new(
                format!("the driver has no function `{name}`"),
                "install a driver for CUDA 12.2 or later",
            )
        })?;
        let starts = |error: CudaError| {
            Unavailable::new(
                format!("cannot initialise the driver: {error}"),
                "check `dmesg` and the permissions of /dev/nv*",
            )
        };
        // SAFETY: the only defined flags.
        unsafe { functions.cuInit(0) }.map_err(starts)?;
        let (mut version, mut count, mut device) = (0, 0, 0);
        // SAFETY: a place for the number.
        unsafe { functions.cuDriverGetVersion(&raw mut version) }.map_err(starts)?;
        if version < VERSION_LEAST {
            let reason = format!(
                "the driver is for CUDA {}, at least {} is needed",
                version_text(version),
                version_text(VERSION_LEAST)
            );
            return Err(Unavailable::new(
                reason,
                "update the driver, or JetPack to 6.0 or later",
            ));
        }
        // SAFETY: a place for the number.
        unsafe { functions.cuDeviceGetCount(&raw mut count) }.map_err(starts)?;
        if count < 1 {
            return Err(Unavailable::new(
                "the driver has no device",
                "see `nvidia-smi`",
            ));
        }
        // SAFETY: a place for the number.
        unsafe { functions.cuDeviceGet(&raw mut device, 0) }.map_err(starts)?;
        let mut name: [c_char; 128] = [0; 128];
        // SAFETY: room for this many bytes, the last of which stays zero.
        let named = unsafe { functions.cuDeviceGetName(name.as_mut_ptr(), 127, device) };
        // SAFETY: zero-terminated.
        let text = unsafe { CStr::from_ptr(name.as_ptr()) };
        let mut memory = 0;
        // SAFETY: a place for the number.
        unsafe { functions.cuDeviceTotalMem_v2(&raw mut memory, device) }.map_err(starts)?;
        Ok(Self {
            device,
            name: named.map_or_else(
                |_| "a GPU".to_owned(),
                |()| text.to_string_lossy().into_owned(),
            ),
            version,
            capability: (
                functions.attribute(
                    device,
                    Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                ),
                functions.attribute(
                    device,
                    Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                ),
            ),
            integrated: functions.attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED) != 0,
            processors: functions
                .attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            memory,
            functions,
        })
    }
}

/// `12.2` for 12020.
fn version_text(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// CUDA 12.2, the version of the compiled images: JetPack 6.0.
const VERSION_LEAST: c_int = 12_020;
