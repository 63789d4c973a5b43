//! GPU memory of a Jetson: debugfs files of nvmap, readable by root only.
//!
//! CUDA memory on Orin is nvmap memory: charged to no control group, absent from `smaps`. Freed allocations go to a
//! page pool of up to an eighth of the memory; `/proc/meminfo` shows neither. The files are commonly absent: not a
//! Jetson, no root, or debugfs not mounted.

use std::{
    fs::OpenOptions,
    io::{self, Write as _},
    path::PathBuf,
};

use super::{
    ProbeRoot,
    source::{lines, number, read_number, read_optional, words},
};
use cotenant_units::{Bytes, page};

/// Pages kept by nvmap for the next GPU allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagePool {
    /// `page_pool_available_pages`: ready for use.
    pub available_pages: u64,
    /// `page_pool_pages_to_zero`: freed but not yet zeroed.
    pub to_zero_pages: u64,
}

impl PagePool {
    /// Returns the size of both kinds of pages.
    pub fn bytes(&self) -> Bytes {
        page().saturating_mul(self.available_pages.saturating_add(self.to_zero_pages))
    }
}

/// One row of `iovmm/clients`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// Process id.
    pub pid: u32,
    /// Its memory.
    pub size: Bytes,
}

/// Table of clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clients {
    /// Its rows; they need not sum up to `total`.
    pub rows: Vec<Client>,
    /// The row `total`; `None` if the table was truncated.
    pub total: Option<Bytes>,
}

impl Clients {
    /// Returns the memory of a process; `None` without a row.
    pub fn of(&self, pid: u32) -> Option<Bytes> {
        let mut held = self
            .rows
            .iter()
            .filter(|row| row.pid == pid)
            .map(|row| row.size);
        let first = held.next()?;
        Some(held.fold(first, Bytes::saturating_add))
    }

    /// Returns the sum of all rows; `None` if the table was truncated.
    pub fn held_by_all(&self) -> Option<Bytes> {
        let held = self.rows.iter().map(|row| row.size);
        self.total
            .map(|_complete| held.fold(Bytes::ZERO, Bytes::saturating_add))
    }

    /// Returns the memory of several processes together; `None` if none has a row.
    pub fn of_all(&self, pids: impl IntoIterator<Item = u32>) -> Option<Bytes> {
        let held = pids.into_iter().filter_map(|pid| self.of(pid));
        held.reduce(Bytes::saturating_add)
    }

    /// Parses the text of `iovmm/clients`, from the right: `CLIENT PROCESS PID SIZE`, R32 with `PSS` before `SIZE`.
    /// Other lines are skipped.
    pub fn parse(text: &[u8]) -> Self {
        let mut clients = Self::default();
        let mut sizes_per_row = 1;
        for (_, line) in lines(text) {
            let words: Vec<&[u8]> = words(line).collect();
            match words.as_slice() {
                [b"CLIENT", .., b"PSS", b"SIZE"] => sizes_per_row = 2,
                [b"CLIENT", ..] => sizes_per_row = 1,
                [b"total", .., size] => clients.total = kib(size),
                [b"user" | b"kernel", rest @ ..] => clients.rows.extend(row(rest, sizes_per_row)),
                _ => {}
            }
        }
        clients
    }
}

/// nvmap's folder, if readable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvmap {
    folder: PathBuf,
}

impl Nvmap {
    /// Returns the folder if it exists and is readable.
    pub fn find(root: &ProbeRoot) -> Option<Self> {
        let folder = root.sys("kernel/debug/nvmap");
        std::fs::read_dir(&folder).ok()?;
        Some(Self { folder })
    }

    /// Returns bytes allocated through nvmap by all processes.
    pub fn total(&self) -> Option<Bytes> {
        read_number(&self.folder.join("stats/total_memory")).map(Bytes::new)
    }

    /// Reads the page pool.
    pub fn pool(&self) -> Option<PagePool> {
        let pages = |name: &str| read_number(&self.folder.join("pagepool").join(name));
        Some(PagePool {
            available_pages: pages("page_pool_available_pages")?,
            to_zero_pages: pages("page_pool_pages_to_zero").unwrap_or(0),
        })
    }

    /// Reads the memory of each process.
    pub fn clients(&self) -> Option<Clients> {
        read_optional(&self.folder.join("iovmm/clients")).map(|text| Clients::parse(&text))
    }
}

/// Returns whether [`empty_pool`] is permitted: it requires root, or write access to the parameter.
pub fn may_empty_pool(root: &ProbeRoot) -> bool {
    OpenOptions::new()
        .write(true)
        .open(root.sys(SHRINK))
        .is_ok()
}

/// Makes nvmap free `bytes` of its page pool. Takes as long as the kernel needs to free the pages.
///
/// # Errors
/// If the parameter does not exist or cannot be written.
pub fn empty_pool(root: &ProbeRoot, bytes: Bytes) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).open(root.sys(SHRINK))?;
    // The parameter is an `int`.
    let pages = (bytes.get() / page().get()).min(i32::MAX as u64);
    file.write_all(pages.to_string().as_bytes())
}

/// Writing a number runs the page pool's shrinker over that many pages (`nvmap_pp.c`).
const SHRINK: &str = "module/nvmap/parameters/shrink_page_pools";

/// Parses `name with blanks 1234 5678K`, or with another size before the last. The name is ignored: it is truncated to
/// 15 characters and may show `_` for `-`.
fn row(words: &[&[u8]], sizes: usize) -> Option<Client> {
    let size = kib(words.last()?)?;
    let pid = words.get(words.len().checked_sub(sizes + 1)?)?;
    Some(Client {
        pid: u32::try_from(number(pid)?).ok()?,
        size,
    })
}

/// Parses `5678K`; old releases print `5678KB`.
fn kib(word: &[u8]) -> Option<Bytes> {
    let digits = word
        .strip_suffix(b"K")
        .or_else(|| word.strip_suffix(b"KB"))?;
    number(digits).map(Bytes::from_kib)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    macro_rules! fixture {
        ($name:literal) => {
            Clients::parse(include_bytes!(concat!(
                "../../tests/fixtures/jetson/nvmap/iovmm_clients_",
                $name,
                ".txt"
            )))
        };
    }

    #[test]
    fn a_cut_table_is_read_as_far_as_it_goes() {
        let vllm = fixture!("vllm_r36");
        assert_eq!(vllm.of(1_792_595), Some(Bytes::from_kib(14_617_792)));
        assert_eq!(vllm.of(1), None);
        assert_eq!(
            Clients::parse(b"CLIENT  PROCESS  PID  SIZE\nuser  llama-ser").rows,
            []
        );
    }

    #[test]
    fn the_old_layout_has_pss_before_the_size() {
        let old = fixture!("with_pss_r32");
        assert_eq!(old.of(4678), Some(Bytes::from_kib(76)));
        assert_eq!(old.total, Some(Bytes::from_kib(76)));
    }

    #[test]
    fn names_may_hold_blanks() {
        let text = b"CLIENT PROCESS PID SIZE\nuser  Isolated Web Co   77  12K\nkernel  x 0 4K\nuser a 77 3K\n";
        let clients = Clients::parse(text);
        assert_eq!(clients.of(77), Some(Bytes::from_kib(15)));
        assert_eq!(
            clients.of(0),
            Some(Bytes::from_kib(4)),
            "memory of the kernel"
        );
    }

    proptest! {
        #[test]
        fn parsing_returns_for_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Clients::parse(&bytes);
        }

        #[test]
        fn parsing_returns_for_any_table(rows in "(CLIENT|user|kernel|total)( [a-z0-9K:]{0,12}){0,6}\n(user|total)( [0-9]{0,22}K){0,4}") {
            let clients = Clients::parse(rows.as_bytes());
            let _ = clients.of(1);
        }

        #[test]
        fn a_pool_of_any_size_has_a_size(available_pages in any::<u64>(), to_zero_pages in any::<u64>()) {
            let _ = PagePool { available_pages, to_zero_pages }.bytes();
        }
    }
}
