//! Largest free blocks of memory, from `/proc/buddyinfo`.
//!
//! tegrastats prints them as `lfb 53x1MB`. They are a weak indicator: the GPU's pages need not be contiguous, and only
//! blocks of 64 KiB save entries in its page tables.

use super::{
    ProbeRoot,
    source::{lines, number, read_optional, words},
};
use cotenant_units::{Bytes, page};

/// Largest free blocks over all zones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeBlocks {
    /// Number of blocks.
    pub count: u64,
    /// Size of each block.
    pub size: Bytes,
}

impl FreeBlocks {
    /// Reads them; `None` if there are none, or the file is missing.
    pub fn read(root: &ProbeRoot) -> Option<Self> {
        Self::parse(&read_optional(&root.proc("buddyinfo"))?)
    }

    /// Parses the text of `/proc/buddyinfo`: `Node 0, zone Normal 12 7 …`, a count for each power of two pages. A
    /// malformed count is zero.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let mut by_order = [0u64; ORDERS];
        for (_, line) in lines(text) {
            let mut words = words(line).skip_while(|word| *word != b"zone");
            let (Some(_), Some(_name)) = (words.next(), words.next()) else {
                continue;
            };
            for (count, word) in by_order.iter_mut().zip(words) {
                *count = count.saturating_add(number(word).unwrap_or(0));
            }
        }
        Self::largest(&by_order, page())
    }

    /// Returns the largest blocks, given a count for each power of two pages.
    fn largest(by_order: &[u64], page: Bytes) -> Option<Self> {
        let order = by_order.iter().rposition(|count| *count > 0)?;
        Some(Self {
            count: by_order.get(order).copied()?,
            size: page.saturating_mul(1 << order),
        })
    }
}

/// More than any kernel's maximum order; JetPack has 11.
const ORDERS: usize = 32;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn counts_that_are_no_numbers_and_lines_of_another_form_are_passed_over() {
        for text in [
            "",
            "Node 0, zone\n",
            "Node 0, zone DMA\n",
            "Node 0, zone DMA x 0 0\nfree 7 7\n",
        ] {
            assert_eq!(FreeBlocks::parse(text.as_bytes()), None, "{text}");
        }
        let half = FreeBlocks::parse(b"Node 0, zone DMA 3 x 2\nNode 1, zone DMA 3 1").unwrap();
        assert_eq!((half.count, half.size), (2, Bytes::from_kib(16)));
    }

    proptest! {
        #[test]
        fn parsing_returns_for_any_bytes(bytes in "(Node 0, zone [A-Z]{0,3}( [0-9x]{1,21}){0,40}\n?){0,3}") {
            let _ = FreeBlocks::parse(bytes.as_bytes());
        }
    }

    #[test]
    fn blocks_are_as_large_as_the_pages_of_the_kernel_make_them() {
        for kib in [4, 16, 64] {
            let found = FreeBlocks::largest(&[9, 0, 0, 2, 0], Bytes::from_kib(kib)).unwrap();
            assert_eq!((found.count, found.size), (2, Bytes::from_kib(8 * kib)));
        }
    }
}
