//! Progress of a load in bytes read.

use std::{
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    file::{Extent, FileIdentity, Source},
    progress::ReadProgress,
};
use crate::error::ReadError;
use cotenant_units::Bytes;

/// Bytes of a model read so far; clones share the figures.
#[derive(Clone, Debug, Default)]
pub struct LoadProgress(Arc<Figures>);

#[derive(Debug, Default)]
struct Figures {
    read: AtomicU64,
    whole: AtomicU64,
}

impl LoadProgress {
    /// Starts counting a load of `whole` bytes.
    pub(crate) fn begin(&self, whole: Bytes) {
        self.0.read.store(0, Ordering::Relaxed);
        self.0.whole.store(whole.get(), Ordering::Relaxed);
    }

    /// Ends counting.
    pub(crate) fn end(&self) {
        self.begin(Bytes::ZERO);
    }

    /// Bytes read, and their total; `None` outside a load.
    pub fn figures(&self) -> Option<(Bytes, Bytes)> {
        let whole = self.0.whole.load(Ordering::Relaxed);
        // Read-ahead for the first token counts too, and belongs to the same file.
        let read = self.0.read.load(Ordering::Relaxed).min(whole);
        (whole > 0).then_some((Bytes::new(read), Bytes::new(whole)))
    }

    /// The same source, with its reads counted.
    pub(crate) fn counting(&self, source: Arc<dyn Source>) -> Arc<dyn Source> {
        Arc::new(Counted {
            source,
            progress: self.clone(),
        })
    }
}

struct Counted {
    source: Arc<dyn Source>,
    progress: LoadProgress,
}

impl Source for Counted {
    unsafe fn read(
        &self,
        extent: &Extent,
        target: NonNull<u8>,
        progress: &ReadProgress,
    ) -> Result<(), ReadError> {
        // SAFETY: the contract of the caller is that of the source.
        unsafe { self.source.read(extent, target, progress) }?;
        self.progress
            .0
            .read
            .fetch_add(extent.bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    fn read_small(&self, extent: &Extent, target: &mut [u8]) -> Result<(), ReadError> {
        self.source.read_small(extent, target)
    }

    fn identity(&self) -> Option<Vec<FileIdentity>> {
        self.source.identity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Zeros;

    impl Source for Zeros {
        unsafe fn read(
            &self,
            _: &Extent,
            _: NonNull<u8>,
            _: &ReadProgress,
        ) -> Result<(), ReadError> {
            Ok(())
        }

        fn read_small(&self, _: &Extent, _: &mut [u8]) -> Result<(), ReadError> {
            Ok(())
        }
    }

    #[test]
    fn a_load_counts_what_it_reads_up_to_its_whole_and_nothing_afterwards() {
        let progress = LoadProgress::default();
        let source = progress.counting(Arc::new(Zeros));
        let extent = Extent {
            what: "layer".into(),
            offset: 0,
            bytes: 60,
        };
        // SAFETY: nothing is written.
        let read =
            || unsafe { source.read(&extent, NonNull::dangling(), &ReadProgress::new()) }.unwrap();
        read();
        assert_eq!(progress.figures(), None);
        progress.begin(Bytes::new(100));
        for expected in [60, 100, 100] {
            read();
            assert_eq!(
                progress.figures(),
                Some((Bytes::new(expected), Bytes::new(100)))
            );
        }
        progress.end();
        read();
        assert_eq!(progress.figures(), None);
    }
}
