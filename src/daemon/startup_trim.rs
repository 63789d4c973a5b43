//! Release of memory that only the start needed.

use std::{ffi::c_void, ptr::NonNull};

use nix::sys::mman::{MmapAdvise, madvise};
use procfs::process::{MMPermissions, MMapPath, Process, VmFlags};

/// Drops text and constants of the program and its libraries from this process's memory; pages still in use are mapped
/// again.
///
/// Reading the configuration, binding the listeners and starting the threads touches most of them once, and an idle
/// daemon does not need them. Only for a daemon without an LLM: otherwise the text of the shed path has to stay, since
/// it is locked as far as it is resident, and reading it from disk under memory pressure takes long. Only mappings
/// without changed pages are dropped, so relocated constants stay. A mapping with lock-on-fault keeps it.
pub(super) fn drop_program() {
    let Ok(maps) = Process::myself().and_then(|process| process.smaps()) else {
        return;
    };
    // First all ranges are read, then all are dropped, including the code that reads them.
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
        // SAFETY: the range is a private, read-only mapping of a file, and none of its pages has been changed since it
        // was mapped, so dropping them changes no content: the next access reads them from the file again. Locking
        // changes none either.
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
            tracing::debug!(%error, "the program stays in memory");
        }
    }
}
