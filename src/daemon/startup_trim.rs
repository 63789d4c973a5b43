//! Release of memory needed only by the start.

use std::{ffi::c_void, ptr::NonNull};

use nix::sys::mman::{MmapAdvise, madvise};
use procfs::process::{MMPermissions, MMapPath, Process, VmFlags};

/// Drops text and constants of the program and its libraries from memory; pages still in use are mapped again.
///
/// The start touches most of them once, but an idle daemon does not need them. Only for a daemon without an LLM:
/// otherwise the code of the shed path must stay resident, since only resident pages are locked, and reading it from
/// disk under memory pressure is slow. Only mappings without modified pages are dropped, so relocated constants stay.
/// Lock-on-fault of a mapping remains in force.
pub(super) fn drop_program() {
    let Ok(maps) = Process::myself().and_then(|process| process.smaps()) else {
        return;
    };
    // First read all ranges, then drop them all, including the code that reads them.
    let ranges = maps.0.into_iter().filter_map(|map| {
        let of_file = matches!(map.pathname, MMapPath::Path(_));
        let readable = map
            .perms
            .contains(MMPermissions::READ | MMPermissions::PRIVATE)
            && !map.perms.contains(MMPermissions::WRITE);
        let unchanged = map.extension.map.get("Anonymous") == Some(&0);
        if !(of_file && readable && unchanged) {
            return None;
        }
        let (begin, end) = map.address;
        let length = usize::try_from(end.saturating_sub(begin)).ok()?;
        let address = NonNull::new(usize::try_from(begin).ok()? as *mut c_void)?;
        Some((
            address,
            length,
            map.extension.vm_flags.contains(VmFlags::LO),
        ))
    });
    let ranges: Vec<_> = ranges.collect();
    for (address, length, locked) in ranges {
        // SAFETY: the range is a private, read-only file mapping without modified pages, so dropping it changes no
        // content: the next access reads the file again. Nor does locking.
        let dropped = unsafe {
            if locked {
                let _ = libc::munlock(address.as_ptr(), length);
            }
            let dropped = madvise(address, length, MmapAdvise::MADV_DONTNEED);
            if locked {
                let _ = libc::mlock2(address.as_ptr(), length, libc::MLOCK_ONFAULT);
            }
            dropped
        };
        if let Err(error) = dropped {
            tracing::debug!(%error, "cannot release the program's start-up pages");
        }
    }
}
