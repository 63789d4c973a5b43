//! File reads into device memory, staged through host memory.

use std::{path::Path, ptr::NonNull, slice, sync::Arc};

use super::{
    file::{Extent, Source},
    progress::ReadProgress,
};
use crate::{arena::DeviceMemory, error::ReadError};

/// Reads the aligned superset of `extent` to `target` in device memory, through `staging` of the given length, in as
/// many reads as that takes.
///
/// # Errors
///
/// As [`Source::read`], or when the device refuses.
///
/// # Safety
///
/// `staging` is page-aligned, its length a non-zero multiple of pages, and neither it nor the range on the device is
/// accessed concurrently.
pub(crate) unsafe fn read_staged(
    source: &dyn Source,
    extent: &Extent,
    (memory, target): (&dyn DeviceMemory, usize),
    (staging, len): (NonNull<u8>, usize),
    progress: &ReadProgress,
) -> Result<(), ReadError> {
    let (start, all) = (extent.aligned_offset(), extent.aligned_bytes());
    let end = extent.offset + extent.bytes as u64;
    for at in (0..all).step_by(len) {
        let from = extent.offset.max(start + at as u64);
        let to = end.min(start + (at + len) as u64);
        let bytes = usize::try_from(to.saturating_sub(from)).unwrap_or(0);
        let run = Extent {
            what: Arc::clone(&extent.what),
            offset: from,
            bytes,
        };
        let bytes = run.aligned_bytes().min(len);
        // SAFETY: the caller's promise; a run within `len` bytes from a page boundary has a superset within them.
        unsafe { source.read(&run, staging, progress) }?;
        // SAFETY: as above; host memory, initialised by reads.
        let read = unsafe { slice::from_raw_parts(staging.as_ptr(), bytes) };
        memory
            .bring(target + at, read)
            .map_err(|error| extent.error(Path::new(""), error.to_string()))?;
    }
    Ok(())
}
