//! Weight reads: direct I/O past the page cache, and a read-ahead ring for kernels.
//!
//! The page cache is an LRU and weight reads are a cyclic scan, so it would never hit, and its memory is outside the
//! ledger. Reads are `O_DIRECT` over 4 KiB-aligned supersets; on file systems that refuse it (tmpfs, some network
//! mounts) they are buffered and followed by `POSIX_FADV_DONTNEED`.

mod counted;
mod fetch;
mod file;
mod progress;
mod rows;
mod staged;
mod stream;

pub use counted::LoadProgress;
pub use fetch::{Fetcher, Wanted};
pub use file::{Extent, FileIdentity, Source, WeightFile};
pub use progress::ReadProgress;
pub use rows::{RowReader, WantedRows};
pub(super) use staged::read_staged;
pub(super) use stream::PATIENCE_STEP;
pub use stream::{Missing, READERS, Stream};
