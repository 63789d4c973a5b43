//! Rules about memory: carve-outs, CMA, zram, swap, pools, kernel settings.

use super::facts::{Cost, Facts, Found, Rule, note, warning};
use crate::{buddyinfo::FreeBlocks, nvmap::Nvmap, swap};
use cotenant_units::Bytes;

pub(super) const RULES: &[Rule] = &[
    ("carve_outs", carve_outs),
    ("cma_size", cma_size),
    ("cma_exhausted", cma_exhausted),
    ("zram_size", zram_size),
    ("zram_store", zram_store),
    ("swap_missing", swap_missing),
    ("swap_on_flash", swap_on_flash),
    ("nvmap_pool", nvmap_pool),
    ("huge_pages_reserved", huge_pages_reserved),
    ("transparent_huge_pages", transparent_huge_pages),
    ("min_free", min_free),
    ("overcommit", overcommit),
    ("swappiness", swappiness),
    ("memory_unevictable", memory_unevictable),
    ("free_blocks", free_blocks),
];

/// Memory of each module, and the part left by a stock image (`MemTotal` as captured; Orin NX 8 GB as Orin Nano), in
/// MiB.
const MODULES: [(&str, u64, u64); 7] = [
    ("nvidia,p3767-0000", 16_384, 15_656),
    ("nvidia,p3767-0001", 8192, 7619),
    ("nvidia,p3767-0003", 8192, 7619),
    ("nvidia,p3767-0005", 8192, 7619),
    ("nvidia,p3701-0005", 65_536, 62_817),
    ("nvidia,p3701-0000", 32_768, 30_536),
    ("nvidia,p3834-0008", 131_072, 125_772),
];

/// Tolerated difference between images without a finding. Our choice.
const CARVE_OUT_TOLERANCE: Bytes = Bytes::from_mib(64);
/// CMA area of a stock Orin image.
const CMA_STOCK: Bytes = Bytes::from_mib(256);
/// Our choice: a quarter is worth a warning; `nvzramconfig` takes half.
const ZRAM_LARGE_PER_MILLE: u32 = 250;

fn carve_outs(facts: &Facts<'_>) -> Option<Found> {
    let module = MODULES.iter().find(|(name, ..)| {
        facts
            .board
            .compatible
            .iter()
            .any(|known| known.contains(name.trim_start_matches("nvidia,")))
    });
    let (name, module, stock) = module?;
    let missing = Bytes::from_mib(*stock).saturating_sub(facts.total());
    (missing > CARVE_OUT_TOLERANCE && facts.total() > Bytes::ZERO).then_some(())?;
    warning(
        format!(
            "{} of {name}'s {} are left to Linux; a stock image leaves {missing} more",
            facts.total(),
            Bytes::from_mib(*module)
        ),
        Cost::Memory(missing),
        "look for carve-outs in the device tree (`/proc/device-tree/reserved-memory`) and for `mem=` on the command line",
    )
}

fn cma_size(facts: &Facts<'_>) -> Option<Found> {
    let total = facts.meminfo?.cma_total?;
    (total > CMA_STOCK).then_some(())?;
    warning(
        format!("the area for contiguous allocations (CMA) has {total}, which the GPU cannot use"),
        Cost::Memory(total.saturating_sub(CMA_STOCK)),
        "start with `cma=256M`, unless cameras or encoders need more",
    )
}

fn cma_exhausted(facts: &Facts<'_>) -> Option<Found> {
    let info = facts.meminfo?;
    let (total, free) = (info.cma_total?, info.cma_free?);
    (total > Bytes::ZERO && free < total.per_mille(20)).then_some(())?;
    note(
        format!("{free} of {total} of CMA are free: user pages have borrowed it, which is normal"),
        Cost::Memory(Bytes::ZERO),
        "act only when dmesg has `cma_alloc: alloc failed`: cameras and displays need the area, CUDA does not",
    )
}

fn zram_size(facts: &Facts<'_>) -> Option<Found> {
    let (size, total) = (zram(facts), facts.total());
    (size > Bytes::ZERO && size >= total.per_mille(ZRAM_LARGE_PER_MILLE)).then_some(())?;
    let percent = size.get().saturating_mul(100).checked_div(total.get())?;
    warning(
        format!(
            "zram of {size} is {percent} % of the memory; full, at the 1.7:1 that was measured, it keeps this much"
        ),
        Cost::Memory(Bytes::new(size.get() / 17 * 10)),
        "disable `nvzramconfig` and use a swap file on NVMe",
    )
}

fn zram_store(facts: &Facts<'_>) -> Option<Found> {
    let store = swap::zram_store(facts.root)?;
    (store >= Bytes::from_mib(64)).then_some(())?;
    let stored: Bytes = swap::devices(facts.root)
        .iter()
        .filter(|device| device.is_zram())
        .map(|device| device.used)
        .fold(Bytes::ZERO, Bytes::saturating_add);
    warning(
        format!("zram keeps {stored} of pushed-out memory in {store}"),
        Cost::Memory(store),
        "`swapoff` the zram devices when memory allows; workers with `limits.memory` are never swapped",
    )
}

fn zram(facts: &Facts<'_>) -> Bytes {
    let devices = swap::devices(facts.root);
    let sizes = devices
        .iter()
        .filter(|device| device.is_zram())
        .map(|device| device.size);
    sizes.fold(Bytes::ZERO, Bytes::saturating_add)
}

fn swap_missing(facts: &Facts<'_>) -> Option<Found> {
    let info = facts.meminfo?;
    swap::devices(facts.root).is_empty().then_some(())?;
    let idle = info.anon_pages.unwrap_or_default().per_mille(100);
    note(
        "no swap: idle pages of other programs stay in memory; of a tenth of them is reckoned here"
            .to_owned(),
        Cost::Memory(idle),
        "a swap file of some GiB on NVMe takes idle pages; avoid it on SD cards",
    )
}

fn swap_on_flash(facts: &Facts<'_>) -> Option<Found> {
    let devices = swap::devices(facts.root);
    let card = devices
        .iter()
        .find(|device| device.name.contains("mmcblk"))?;
    warning(
        format!(
            "swap is on {}, a card or eMMC: 17 tokens/s fell below 2 when one was used",
            card.name
        ),
        Cost::Speed(88),
        "move swap to NVMe, or do without",
    )
}

fn nvmap_pool(facts: &Facts<'_>) -> Option<Found> {
    let pool = Nvmap::find(facts.root)?.pool()?.bytes();
    (pool >= Bytes::from_mib(256)).then_some(())?;
    note(
        format!(
            "nvmap keeps {pool} of freed GPU memory for the next GPU allocation, out of reach of CPU programs"
        ),
        Cost::Memory(pool),
        "before a CPU worker starts, release it: `echo 1 > /sys/module/nvmap/parameters/shrink_page_pools`",
    )
}

fn huge_pages_reserved(facts: &Facts<'_>) -> Option<Found> {
    let count = facts
        .proc("sys/vm/nr_hugepages")?
        .parse::<u64>()
        .ok()
        .filter(|count| *count > 0)?;
    let text = facts.proc("meminfo")?;
    let kib = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim_start_matches(':')
            .split_whitespace()
            .next()?
            .parse::<u64>()
            .ok()
    };
    let bytes = Bytes::from_kib(kib("Hugepagesize").unwrap_or(2048)).saturating_mul(count);
    warning(
        format!(
            "{count} huge pages are reserved; libraries on CUDA take them for all the free memory"
        ),
        Cost::Memory(bytes),
        "release them: `sysctl vm.nr_hugepages=0`",
    )
}

fn transparent_huge_pages(facts: &Facts<'_>) -> Option<Found> {
    let mode = facts.sys("kernel/mm/transparent_hugepage/enabled")?;
    mode.contains("[never]").then_some(())?;
    // Larger ones, of kernels with base pages of 16 or 64 KiB, are not used.
    let size = facts.sys("kernel/mm/transparent_hugepage/hpage_pmd_size");
    size.is_none_or(|size| size.trim() == "2097152")
        .then_some(())?;
    warning(
        "transparent huge pages are off: weights and KV take 512 times the page table entries"
            .to_owned(),
        Cost::Speed(5),
        "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",
    )
}

fn min_free(facts: &Facts<'_>) -> Option<Found> {
    let bytes = Bytes::from_kib(facts.proc("sys/vm/min_free_kbytes")?.parse().ok()?);
    (facts.total() > Bytes::ZERO && bytes > facts.total().per_mille(20)).then_some(())?;
    warning(
        format!("the kernel keeps {bytes} free (`vm.min_free_kbytes`)"),
        Cost::Memory(bytes.saturating_sub(facts.total().per_mille(5))),
        "lower `vm.min_free_kbytes` to some 0.5 % of the memory",
    )
}

fn overcommit(facts: &Facts<'_>) -> Option<Found> {
    (facts.proc("sys/vm/overcommit_memory")? == "2").then_some(())?;
    warning(
        "`vm.overcommit_memory` is 2: address space counts as memory, and the KV cache reserves some".to_owned(),
        Cost::Risk,
        "set `vm.overcommit_memory=0`, or allocations fail with memory free",
    )
}

fn swappiness(facts: &Facts<'_>) -> Option<Found> {
    let value: u64 = facts.proc("sys/vm/swappiness")?.parse().ok()?;
    (value > 100 && !swap::devices(facts.root).is_empty()).then_some(())?;
    note(
        format!("`vm.swappiness` is {value}: workers are swapped before the page cache is dropped"),
        Cost::Risk,
        "set `vm.swappiness=10`; speech workers answer late after swap-in",
    )
}

fn memory_unevictable(facts: &Facts<'_>) -> Option<Found> {
    let locked = facts.meminfo?.mlocked?;
    (locked > facts.total().per_mille(100)).then_some(())?;
    note(
        format!("{locked} are locked in memory by other programs"),
        Cost::Memory(locked),
        "look for `--mlock` in the arguments of other engines",
    )
}

fn free_blocks(facts: &Facts<'_>) -> Option<Found> {
    let largest = FreeBlocks::read(facts.root)?;
    (largest.size < BIG_PAGE).then_some(())?;
    note(
        format!(
            "the largest free blocks are {} of {}: the GPU gets single pages, and its page tables grow",
            largest.count, largest.size
        ),
        Cost::Risk,
        "`echo 1 > /proc/sys/vm/compact_memory` joins free pages; allocations do not fail for this",
    )
}

/// Size that nvmap tries first (`nvmap_alloc.c`).
const BIG_PAGE: Bytes = Bytes::from_kib(64);
