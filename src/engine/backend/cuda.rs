//! CUDA device as the driver describes it; there are no CUDA kernels yet.
//!
//! The kernels that would compute on it are not part of this version: the seam that they fill is
//! [`Backend`](super::Backend).

/// The first CUDA device and its memory, or why there is none, for people.
///
/// The driver is opened at run time, so that one program starts on hosts with and without it.
#[cfg(feature = "cuda")]
#[must_use]
pub fn describe() -> String {
    use cudarc::driver::{result, sys};

    // SAFETY: only opens the library and looks for one symbol; nothing of it is called when it is not there.
    if !unsafe { sys::is_culib_present() } {
        return "libcuda is not installed: the LLM computes on the CPU".to_owned();
    }
    if let Err(error) = result::init() {
        return format!("the driver does not start ({error}): the LLM computes on the CPU");
    }
    let device = match result::device::get(0) {
        Ok(device) => device,
        Err(error) => return format!("the driver shows no device ({error}): the LLM computes on the CPU"),
    };
    let name = result::device::get_name(device).unwrap_or_else(|error| format!("a device without a name ({error})"));
    // SAFETY: `device` came from the driver just now, and no context is needed to ask for its memory.
    let memory = unsafe { result::device::total_mem(device) }.map_or_else(
        |error| format!("memory unknown ({error})"),
        |bytes| crate::units::Bytes::of_len(bytes).to_string(),
    );
    format!("{name}, {memory}; this version computes on the CPU")
}

/// That CUDA was left out when this program was built.
#[cfg(not(feature = "cuda"))]
#[must_use]
pub fn describe() -> String {
    "left out of this build: the LLM computes on the CPU".to_owned()
}
