//! Memory of the machine, from `/proc/meminfo`.
//!
//! Keys vary by kernel and release, so every key but `MemTotal` and `MemAvailable` may be missing. The unit that the
//! kernel prints as `kB` is 1024 bytes.

use super::{
    ParseError, ProbeError, ProbeRoot,
    source::{lines, number, read_bytes, words},
};
use cotenant_units::Bytes;

/// One reading of `/proc/meminfo`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meminfo {
    /// `MemTotal`: memory managed by the kernel; 15 656 MiB on an Orin NX 16 GB.
    pub total: Bytes,
    /// `MemAvailable`: the kernel's estimate of memory available without swapping. May be below `MemFree`.
    pub available: Bytes,
    /// `MemFree`.
    pub free: Option<Bytes>,
    /// `Buffers`.
    pub buffers: Option<Bytes>,
    /// `Cached`.
    pub cached: Option<Bytes>,
    /// `SwapCached`.
    pub swap_cached: Option<Bytes>,
    /// `AnonPages`.
    pub anon_pages: Option<Bytes>,
    /// `Mlocked`.
    pub mlocked: Option<Bytes>,
    /// `Slab`.
    pub slab: Option<Bytes>,
    /// `PageTables`.
    pub page_tables: Option<Bytes>,
    /// `KernelStack`.
    pub kernel_stack: Option<Bytes>,
    /// `VmallocUsed`.
    pub vmalloc_used: Option<Bytes>,
    /// `Percpu`.
    pub percpu: Option<Bytes>,
    /// `CmaTotal`: absent on kernels without CMA, zero if it is disabled.
    pub cma_total: Option<Bytes>,
    /// `CmaFree`: counted as available although the GPU can never use it. Zero on a healthy board.
    pub cma_free: Option<Bytes>,
    /// `NvMapMemUsed`: L4T R32 and R35 only.
    pub nvmap_used: Option<Bytes>,
    /// `NvMapMemFree`: the nvmap page pool; L4T R32 and R35 only.
    pub nvmap_free: Option<Bytes>,
}

impl Meminfo {
    /// Reads `/proc/meminfo`.
    ///
    /// # Errors
    /// If the file cannot be read, or has no usable `MemTotal` or `MemAvailable`.
    pub fn read(root: &ProbeRoot) -> Result<Self, ProbeError> {
        let path = root.proc("meminfo");
        let text = read_bytes(&path).map_err(|error| ProbeError::io("memory", &path, error))?;
        Self::parse(&text).map_err(|error| ProbeError::parse(&path, error))
    }

    /// Parses the text of `/proc/meminfo`.
    ///
    /// # Errors
    /// If `MemTotal` or `MemAvailable` is missing or not a number of kB. Other lines are not checked.
    pub fn parse(text: &[u8]) -> Result<Self, ParseError> {
        let mut info = Self::default();
        let (mut total, mut available) = (None, None);
        for (line_number, line) in lines(text) {
            let Some(colon) = line.iter().position(|b| *b == b':') else {
                continue;
            };
            let (key, value) = line.split_at(colon);
            let slot = match key {
                b"MemTotal" => {
                    total = Some(required(TOTAL, line_number, value)?);
                    continue;
                }
                b"MemAvailable" => {
                    available = Some(required(AVAILABLE, line_number, value)?);
                    continue;
                }
                b"MemFree" => &mut info.free,
                b"Buffers" => &mut info.buffers,
                b"Cached" => &mut info.cached,
                b"SwapCached" => &mut info.swap_cached,
                b"AnonPages" => &mut info.anon_pages,
                b"Mlocked" => &mut info.mlocked,
                b"Slab" => &mut info.slab,
                b"PageTables" => &mut info.page_tables,
                b"KernelStack" => &mut info.kernel_stack,
                b"VmallocUsed" => &mut info.vmalloc_used,
                b"Percpu" => &mut info.percpu,
                b"CmaTotal" => &mut info.cma_total,
                b"CmaFree" => &mut info.cma_free,
                b"NvMapMemUsed" => &mut info.nvmap_used,
                b"NvMapMemFree" => &mut info.nvmap_free,
                _ => continue,
            };
            *slot = kib(value);
        }
        info.total = total.ok_or_else(|| ParseError::missing(TOTAL))?;
        info.available = available.ok_or_else(|| ParseError::missing(AVAILABLE))?;
        Ok(info)
    }

    /// Returns memory certainly available to a tenant: `MemAvailable − CmaFree`.
    ///
    /// The kernel counts free CMA as available, but nvmap cannot use it; NVIDIA's own driver subtracts it too
    /// (`system_heap_free_mem()`, `nvmap_ioctl.c`).
    pub fn available_low(&self) -> Bytes {
        self.available
            .saturating_sub(self.cma_free.unwrap_or_default())
    }

    /// Returns memory that no line of the file shows: drivers, nvmap and its page pool, and the store of zram.
    ///
    /// Its growth since the start, minus that of the zram store, approximates GPU memory if nvmap cannot be read. A
    /// missing line counts as zero.
    pub fn residual(&self) -> Bytes {
        let accounted = [
            self.free,
            self.buffers,
            self.cached,
            self.swap_cached,
            self.anon_pages,
            self.slab,
            self.page_tables,
            self.kernel_stack,
            self.vmalloc_used,
            self.percpu,
        ]
        .into_iter()
        .flatten()
        .fold(Bytes::ZERO, Bytes::saturating_add);
        self.total.saturating_sub(accounted)
    }
}

fn required(what: &'static str, line: usize, value: &[u8]) -> Result<Bytes, ParseError> {
    kib(value).ok_or_else(|| {
        let value = value.strip_prefix(b":").unwrap_or(value);
        let value = value.strip_suffix(b"kB").unwrap_or(value).trim_ascii();
        ParseError::value(what, line, value, "a number of kB")
    })
}

/// `:   262144 kB`
fn kib(value: &[u8]) -> Option<Bytes> {
    let mut words = words(value.strip_prefix(b":")?);
    let kib = number(words.next()?)?;
    match (words.next(), words.next()) {
        (Some(b"kB"), None) => Some(Bytes::from_kib(kib)),
        _ => None,
    }
}

const TOTAL: &str = "`MemTotal`";
const AVAILABLE: &str = "`MemAvailable`";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn more_free_cma_than_memory_leaves_nothing() {
        let overdrawn =
            Meminfo::parse(b"MemTotal: 100 kB\nMemAvailable: 10 kB\nCmaFree: 20 kB\n").unwrap();
        assert_eq!(overdrawn.available_low(), Bytes::ZERO);
    }

    #[test]
    fn cma_has_three_shapes() {
        let parse = |line: &str| {
            Meminfo::parse(format!("MemTotal: 9 kB\nMemAvailable: 5 kB\n{line}").as_bytes())
        };
        assert_eq!(
            parse("CmaTotal: 4 kB").unwrap().cma_total,
            Some(Bytes::from_kib(4))
        );
        assert_eq!(
            parse("CmaTotal: 0 kB").unwrap().cma_total,
            Some(Bytes::ZERO)
        );
        assert_eq!(parse("").unwrap().cma_total, None);
        assert_eq!(parse("CmaTotal: x kB").unwrap().cma_total, None);
        assert_eq!(parse("CmaTotal: 4").unwrap().cma_total, None);
    }

    #[test]
    fn a_value_that_is_none_is_named_with_its_line() {
        let error = Meminfo::parse(b"MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:   12x45 kB\n")
            .unwrap_err();
        assert_eq!(error.to_string(), "line 3: `12x45` is not a number of kB");
        assert_eq!(error.what, "`MemAvailable`");
        let error = Meminfo::parse(b"MemTotal: 9 kB\n").unwrap_err();
        assert_eq!(error.to_string(), "there is no such line");
    }

    proptest! {
        #[test]
        fn parsing_returns_for_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(info) = Meminfo::parse(&bytes) {
                let _ = (info.residual(), info.available_low());
            }
        }

        #[test]
        fn parsing_returns_for_any_values(values in proptest::collection::vec(any::<u64>(), 14)) {
            let keys = [
                "MemTotal", "MemAvailable", "MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "Slab",
                "PageTables", "KernelStack", "VmallocUsed", "Percpu", "CmaFree", "CmaTotal",
            ];
            let text: String = keys.iter().zip(&values).map(|(key, value)| format!("{key}: {value} kB\n")).collect();
            let info = Meminfo::parse(text.as_bytes()).unwrap();
            let _ = (info.residual(), info.available_low());
        }
    }
}
