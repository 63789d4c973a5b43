//! Weights from the file: direct reads that leave the page cache clean, and a ring that is filled ahead of the kernels.
//!
//! The page cache is an LRU under what is a cyclic scan, so it helps nothing here and takes memory that the book does not
//! know about. Reads are `O_DIRECT` over 4 KiB-aligned supersets; where a file system refuses that (tmpfs, some network
//! mounts) they are buffered and followed by `POSIX_FADV_DONTNEED`.

mod counted;
mod file;
mod progress;
mod rows;
mod staged;
mod stream;

pub use counted::LoadProgress;
pub use file::{Extent, Source, WeightFile};
pub use progress::ReadProgress;
pub use rows::{RowReader, WantedRows};
pub(super) use staged::read_staged;
pub(super) use stream::PATIENCE_STEP;
pub use stream::{Missing, READERS, Stream};
