//! Release of memory that only the start needed.

use std::{env, ffi::c_void, ptr::NonNull};

use nix::sys::mman::{MmapAdvise, madvise};
use procfs::process::{MMPermissions, MMapPath, Process};

use crate::engine::arena::trim_heap;

/// Gives back what the allocator keeps free, and takes the program's own text and constants out of this process's memory;
/// what is still used comes back by itself, from the page cache, page by page.
///
/// Reading the configuration, making the doors and starting the threads touches most of the program's text once, which a
/// daemon that waits does not need. Nothing is lost: only mappings of the program's file are dropped of which no page
/// has been changed, so that relocated constants stay.
pub(super) fn let_go_of_start() {
    trim_heap();
    let Ok(program) = env::current_exe() else { return };
    let Ok(maps) = Process::myself().and_then(|process| process.smaps()) else {
        return;
    };
    for map in maps {
        let own = matches!(&map.pathname, MMapPath::Path(path) if *path == program);
        let text = map
            .perms
            .contains(MMPermissions::READ | MMPermissions::EXECUTE | MMPermissions::PRIVATE)
            && !map.perms.contains(MMPermissions::WRITE);
        if !(own && text) {
            continue;
        }
        let (begin, end) = map.address;
        let length = usize::try_from(end.saturating_sub(begin)).unwrap_or(0);
        let Some(address) = usize::try_from(begin)
            .ok()
            .and_then(|begin| NonNull::new(begin as *mut c_void))
        else {
            continue;
        };
        // SAFETY: the range is a private, read-only mapping of a file, and none of its pages has been changed since it was
        // mapped, so that dropping them changes no content: the next access reads them from the file again.
        if let Err(error) = unsafe { madvise(address, length, MmapAdvise::MADV_DONTNEED) } {
            tracing::debug!(%error, "the program's text stays in memory");
        }
    }
}
