//! Reclaimable part of ZFS's cache (ARC).
//!
//! `MemAvailable` does not count it, although ZFS releases it under pressure like the page cache.

use super::{
    ProbeRoot,
    source::{Source, lines, number, words},
};
use cotenant_units::Bytes;

/// `/proc/spl/kstat/zfs/arcstats`, kept open; absent without ZFS.
#[derive(Debug)]
pub(super) struct ArcStats(Option<Source>);

impl ArcStats {
    pub(super) fn open(root: &ProbeRoot) -> Self {
        Self(Source::open_optional(root.proc("spl/kstat/zfs/arcstats")))
    }

    /// Returns memory that ZFS can release now; `None` without ZFS.
    pub(super) fn read(&mut self) -> Option<Bytes> {
        reclaimable(self.0.as_mut()?.read().ok()?)
    }
}

/// Returns the size of the cache beyond ZFS's minimum (`c_min`); lines are `name type value`. `None` if either is
/// missing.
fn reclaimable(text: &[u8]) -> Option<Bytes> {
    let value = |wanted: &[u8]| {
        lines(text).find_map(|(_, line)| {
            let mut words = words(line);
            let value = words
                .next()
                .filter(|name| *name == wanted)
                .and(words.nth(1));
            value.and_then(number).map(Bytes::new)
        })
    };
    Some(value(b"size")?.saturating_sub(value(b"c_min")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_beyond_its_least_size_can_be_reclaimed() {
        let text = b"13 1 0x01 147 39984 4126471410 1210412042\n\
            name                            type data\n\
            c_min                           4    262144000\n\
            c_max                           4    4194304000\n\
            size                            4    3221225472\n\
            compressed_size                 4    2900000000\n";
        assert_eq!(
            reclaimable(text),
            Some(Bytes::new(3_221_225_472 - 262_144_000))
        );
        assert_eq!(reclaimable(b"size 4 7\n"), None);
        assert_eq!(reclaimable(b"size 4 7\nc_min 4 9\n"), Some(Bytes::ZERO));
    }

    #[test]
    fn a_machine_without_zfs_has_none() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(ArcStats::open(&ProbeRoot::at(folder.path())).read(), None);
    }
}
