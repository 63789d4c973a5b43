//! Release of memory that only the start needed.

use std::{ffi::c_void, ptr::NonNull};

use nix::sys::mman::{MmapAdvise, madvise};
use procfs::process::{MMPermissions, MMapPath, Process};

/// Takes text and constants of the program and its libraries out of this process's memory; what is still used is mapped again.
///
/// Reading the configuration, binding the listeners and starting the threads touches most of them once, which a daemon
/// that waits does not need. Only for a daemon without an LLM: where there is one to shed, the text of the shed path
/// has to stay, since it is locked as far as it is there, and reading it back from disk in need of memory takes long. Only
/// mappings of which no page has been changed are dropped, so that relocated constants stay.
pub(super) fn drop_program() {
    let Ok(maps) = Process::myself().and_then(|process| process.smaps()) else {
        return;
    };
    for map in maps {
        let of_file = matches!(map.pathname, MMapPath::Path(_));
        let readable = map.perms.contains(MMPermissions::READ | MMPermissions::PRIVATE)
            && !map.perms.contains(MMPermissions::WRITE);
        let unchanged = map.extension.map.get("Anonymous") == Some(&0);
        if !(of_file && readable && unchanged) {
            continue;
        }
        let (begin, end) = map.address;
        let length = usize::try_from(end.saturating_sub(begin)).unwrap_or(0);
        let Some(address) = usize::try_from(begin).ok().and_then(|begin| NonNull::new(begin as *mut c_void)) else {
            continue;
        };
        // SAFETY: the range is a private, read-only mapping of a file, and none of its pages has been changed since it was
        // mapped, so that dropping them changes no content: the next access reads them from the file again.
        if let Err(error) = unsafe { madvise(address, length, MmapAdvise::MADV_DONTNEED) } {
            tracing::debug!(%error, "the program stays in memory");
        }
    }
}
