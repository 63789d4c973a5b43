//! Swap devices, and the memory that zram uses.

use std::fs;

use super::{
    ProbeRoot,
    source::{Source, lines, number, read_optional, words},
};
use cotenant_units::Bytes;

/// Line of `/proc/swaps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwapDevice {
    /// File or device; the kernel writes blanks as `\040`.
    pub name: String,
    /// Its capacity.
    pub size: Bytes,
    /// Its used part.
    pub used: Bytes,
}

impl SwapDevice {
    /// Returns whether it is compressed memory rather than storage.
    pub fn is_zram(&self) -> bool {
        self.name.starts_with("/dev/zram")
    }
}

/// Returns the active swap devices; empty without swap.
pub fn devices(root: &ProbeRoot) -> Vec<SwapDevice> {
    read_optional(&root.proc("swaps")).map_or_else(Vec::new, |text| parse(&text))
}

/// Parses the text of `/proc/swaps`; other lines are skipped.
pub fn parse(text: &[u8]) -> Vec<SwapDevice> {
    lines(text)
        .skip(1)
        .filter_map(|(_, line)| {
            let mut words = words(line);
            let name = words.next()?;
            let (_kind, size, used) = (words.next()?, words.next()?, words.next()?);
            Some(SwapDevice {
                name: String::from_utf8_lossy(name).into_owned(),
                size: Bytes::from_kib(number(size)?),
                used: Bytes::from_kib(number(used)?),
            })
        })
        .collect()
}

/// Returns the memory used by all zram devices: the third field of `mm_stat`. `None` without zram.
///
/// On a full board it is the second largest consumer: 3.9 GB for 6.6 GB of stored pages were observed.
pub fn zram_store(root: &ProbeRoot) -> Option<Bytes> {
    ZramStore::open(root).read()
}

/// Files that [`zram_store`] sums up, kept open.
#[derive(Debug)]
pub(super) struct ZramStore(Vec<Source>);

impl ZramStore {
    pub(super) fn open(root: &ProbeRoot) -> Self {
        let entries = fs::read_dir(root.sys("block"))
            .into_iter()
            .flatten()
            .flatten();
        let is_zram =
            |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b"zram");
        let files = entries
            .filter(is_zram)
            .map(|entry| entry.path().join("mm_stat"));
        Self(files.filter_map(Source::open_optional).collect())
    }

    pub(super) fn read(&mut self) -> Option<Bytes> {
        let used = self.0.iter_mut().filter_map(|file| {
            let text = file.read().ok()?;
            words(text.trim_ascii())
                .nth(2)
                .and_then(number)
                .map(Bytes::new)
        });
        used.reduce(Bytes::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn stock_zram_and_a_swap_file_are_reported_apart() {
        let devices = parse(include_bytes!(
            "../../tests/fixtures/jetson/zram/proc_swaps_orin-nx-16g.RECONSTRUCTED.txt"
        ));
        assert_eq!(devices.len(), 9);
        let zram: Bytes = devices
            .iter()
            .filter(|device| device.is_zram())
            .map(|device| device.size)
            .sum();
        assert_eq!(zram, Bytes::from_kib(8 * 1_001_996));
        assert_eq!(devices[8].used, Bytes::from_kib(4_508_876));
    }

    #[test]
    fn the_store_is_summed_over_devices() {
        let folder = tempfile::tempdir().unwrap();
        let root = ProbeRoot::at(folder.path());
        assert_eq!(zram_store(&root), None);
        for (device, stat) in [
            ("zram0", "   4096   80  1000000   0   1000000  0  0  0  0\n"),
            ("zram1", "4096 80 24 0\n"),
            ("zram2", "nothing\n"),
            ("nvme0n1", "1 2 3 4\n"),
        ] {
            let path = root.sys("block").join(device);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("mm_stat"), stat).unwrap();
        }
        assert_eq!(zram_store(&root), Some(Bytes::new(1_000_024)));
    }

    proptest! {
        #[test]
        fn parsing_returns_for_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }
    }
}
