//! Captures of boards, each with a parser whose figures match those computed by hand.
//!
//! Sources that the product does not read itself (the output of `tegrastats`, `nvpmodel`, `zramctl`, `free`) are
//! compared with those that it reads instead.

use std::{
    fs,
    path::{Path, PathBuf},
};

use cotenant::{
    probe::{
        audit::{self, Cost},
        board::{Board, L4tRelease},
        buddyinfo::FreeBlocks,
        meminfo::Meminfo,
        nvmap::{Clients, Nvmap, PagePool},
        psi::Pressure,
        swap, vmstat,
    },
    units::Bytes,
};

use super::Machine;

/// Path prefix of files, the name of their parser, and its check.
type Parser = (&'static str, &'static str, fn(&Capture));

const PARSERS: [Parser; 27] = [
    ("README.md", "people", |_| {}),
    ("meminfo/", "meminfo::Meminfo", meminfo),
    ("nvmap/iovmm_clients_", "nvmap::Clients", clients),
    ("nvmap/iovmm_maps_", "nvmap::Clients", maps),
    ("nvmap/pagepool_", "nvmap::PagePool", page_pool),
    ("nvmap/stats_total_memory", "nvmap::Nvmap", total_memory),
    ("nvmap/nvmap_sysfs_parameters", "nvmap::Nvmap", nvmap_paths),
    (
        "nvmap/iovmm_free_size_",
        "not read: MemAvailable less CmaFree",
        free_size,
    ),
    (
        "nvmap/handles_by_pid_",
        "not read: a diagnosis by hand",
        handles,
    ),
    (
        "nvmap/orphan_handles_",
        "not read: a diagnosis by hand",
        handles,
    ),
    ("vmstat/vmstat_", "vmstat::parse", vmstat),
    ("vmstat/buddyinfo_", "buddyinfo::FreeBlocks", buddyinfo),
    ("pressure/", "psi::Pressure", pressure),
    ("zram/proc_swaps_", "swap::parse", swaps),
    ("zram/", "not read: /proc/swaps and mm_stat instead", zram),
    ("dpkg/", "audit", packages),
    ("device-tree/models.tsv", "board::Board", models),
    ("device-tree/module_part_numbers.tsv", "audit", modules),
    ("device-tree/", "board::Board", device_tree),
    ("nv_tegra_release/l4t_to_jetpack.tsv", "audit", jetpacks),
    ("nv_tegra_release/", "board::L4tRelease", release),
    ("nvpmodel/", "audit", power_modes),
    ("sysfs/", "audit", sysfs),
    (
        "tegrastats/",
        "not read: meminfo and buddyinfo instead",
        tegrastats,
    ),
    ("traces/", "tables of the tests", table),
    ("errors/", "worker::autopsy, by a walk of its own", |_| {}),
    ("dmesg/", "worker::autopsy, by a walk of its own", |_| {}),
];

struct Capture {
    /// Path below the folder of captures.
    path: String,
    bytes: Vec<u8>,
}

impl Capture {
    fn of(path: &str) -> Self {
        Self {
            path: path.to_owned(),
            bytes: fs::read(folder().join(path)).unwrap(),
        }
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.bytes).unwrap()
    }

    /// Returns the rows of a tab-separated table without its header; each has a cell per column.
    fn rows(&self) -> Vec<Vec<&str>> {
        let mut lines = self
            .text()
            .lines()
            .map(|line| line.split('\t').collect::<Vec<_>>());
        let head = lines.next().unwrap();
        let rows: Vec<_> = lines.collect();
        for row in &rows {
            assert!(
                row.len() <= head.len() && row.len() > 1,
                "{}: {row:?}",
                self.path
            );
        }
        assert!(!rows.is_empty(), "{}", self.path);
        rows
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/jetson")
}

fn collect(folder: &Path, top: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, top, found);
        } else {
            found.push(path.strip_prefix(top).unwrap().display().to_string());
        }
    }
}

/// Returns the first row that matches a file.
fn parser_of(path: &str) -> Option<&'static Parser> {
    PARSERS.iter().find(|(prefix, ..)| path.starts_with(prefix))
}

#[test]
fn every_capture_has_a_parser_that_reads_it() {
    let (top, mut paths) = (folder(), Vec::new());
    collect(&top, &top, &mut paths);
    paths.sort();
    assert!(paths.len() > 90, "{}", paths.len());
    for path in &paths {
        let Some((_, parser, check)) = parser_of(path) else {
            panic!("no parser for the capture {path}");
        };
        println!("{path}: {parser}");
        check(&Capture::of(path));
    }
    for (prefix, parser, _) in &PARSERS {
        let used = paths
            .iter()
            .any(|path| parser_of(path).is_some_and(|found| found.0 == *prefix));
        assert!(used, "no capture for {prefix}, which {parser} reads");
    }
    assert!(parser_of("tegra/new.txt").is_none());
}

fn kib(kib: u64) -> Bytes {
    Bytes::from_kib(kib)
}

fn meminfo_of(name: &str) -> Meminfo {
    Meminfo::parse(&Capture::of(&format!("meminfo/{name}.txt")).bytes).unwrap()
}

/// `MemAvailable` minus free CMA, and memory that no line lists.
#[test]
fn figures_of_meminfo_are_those_worked_out_by_hand() {
    for (board, low, residual) in [
        // Residual: MemTotal − (free + buffers + cached + swap cached + anonymous + slab + page tables + stacks +
        // vmalloc + percpu) 4059240 − (313692 + 57932 + 362944 + 6036 + 2678648 + 164160 + 20456 + 10672 + 0 + 0)
        (
            "nano-4g_r32.7_4.9.253_pressured",
            592_696 - 127_580,
            444_700,
        ),
        // 8038788 − (4851052 + 38972 + 879052 + 0 + 976304 + 155880 + 17796 + 11520 + 0 + 0)
        ("tx2-8g_r32.7_4.9.253", 5_642_288 - 719_864, 1_108_212),
        // 3016708 − (101480 + 12456 + 629556 + 9852 + 1100804 + 128664 + 55660 + 27200 + 0 + 0)
        ("shield-tx1-3g_android_partial", 645_176 - 44_080, 951_036),
        // 7802736 − (3668508 + 633812 + 2193460 + 1212 + 108724 + 239900 + 12016 + 7408 + 58724 + 4080)
        ("orin-nano-8g_r36.4.x_5.15.148", 6_245_596, 874_892),
        // 16031988 − (13100344 + 62480 + 1198044 + 0 + 208640 + 231800 + 24000 + 10240 + 65480 + 5440)
        (
            "orin-nx-16g_r36.4_idle.RECONSTRUCTED",
            14_250_120 - 245_760,
            1_125_520,
        ),
        // 16031988 − (2177024 + 410200 + 9612400 + 9120 + 1366000 + 640200 + 31200 + 10240 + 65480 + 5440)
        (
            "orin-nx-16g_r36.4_pagecache-full.RECONSTRUCTED",
            12_377_088 - 1024,
            1_704_684,
        ),
        // 16031988 − (612340 + 10240 + 2752800 + 88040 + 6750200 + 402600 + 78800 + 24320 + 65480 + 5440)
        (
            "orin-nx-16g_r36.4_voice-stack-tight.RECONSTRUCTED",
            440_320,
            5_241_728,
        ),
        // 16031988 − (3120400 + 120300 + 3012200 + 0 + 752300 + 342200 + 24000 + 10240 + 65480 + 5440)
        (
            "orin-nx-16g_r36.4_after-gpu-free-pool-full.RECONSTRUCTED",
            6_020_800 - 12_288,
            8_579_428,
        ),
    ] {
        let info = meminfo_of(board);
        assert_eq!(info.available_low(), kib(low), "{board}");
        assert_eq!(info.residual(), kib(residual), "{board}");
    }
    // If the kernel prints nvmap's memory, the residual is that plus 199 to 210 MB of drivers' memory.
    for (board, nvmap, drivers) in [
        ("nano-4g_r32.7_4.9.253_pressured", 244_748 + 1024, 198_928),
        ("tx2-8g_r32.7_4.9.253", 805_068 + 94_784, 208_360),
        ("shield-tx1-3g_android_partial", 740_388 + 1020, 209_628),
    ] {
        let info = meminfo_of(board);
        assert_eq!(
            info.nvmap_used.unwrap() + info.nvmap_free.unwrap(),
            kib(nvmap)
        );
        assert_eq!(info.residual() - kib(nvmap), kib(drivers), "{board}");
    }
    // Less is available than free: zone watermarks.
    let tight = meminfo_of("orin-nx-16g_r36.4_voice-stack-tight.RECONSTRUCTED");
    assert!(tight.available < tight.free.unwrap());
}

#[test]
fn figures_of_the_page_pool_are_those_worked_out_by_hand() {
    let machine = pool_machine(&Capture::of("nvmap/pagepool_agx-orin-64g.txt"));
    let pool = Nvmap::find(&machine.root).unwrap().pool().unwrap();
    // 2 012 087 pages of 4 KiB, which is an eighth of the board's 16 096 703.
    assert_eq!(pool.bytes(), Bytes::new(2_012_087 * 4096));
    // CUDA's free memory fell by 60 375 707 648 − 52 034 760 704 after equal allocations and frees: the pool, and 94
    // MiB.
    assert_eq!(8_340_946_944 - pool.bytes().get(), 99_438_592);
    let info = meminfo_of("orin-nx-16g_r36.4_after-gpu-free-pool-full.RECONSTRUCTED");
    let full = PagePool {
        available_pages: 500_000,
        to_zero_pages: 999,
    };
    // 6008512 + 500999 × 4
    assert_eq!(info.available_low() + full.bytes(), kib(8_012_508));
}

fn meminfo(capture: &Capture) {
    let info = Meminfo::parse(&capture.bytes).unwrap();
    assert!(
        info.residual() < info.total && info.available_low() <= info.available,
        "{}",
        capture.path
    );
    assert!(
        info.cma_free.is_some() && info.free.is_some(),
        "{}",
        capture.path
    );
}

fn clients(capture: &Capture) {
    let found = Clients::parse(&capture.bytes);
    let lines = capture
        .text()
        .lines()
        .filter(|line| line.starts_with("user") || line.starts_with("kernel"));
    assert_eq!(found.rows.len(), lines.count(), "{}", capture.path);
    let sum: Bytes = found.rows.iter().map(|row| row.size).sum();
    let total = found.total.unwrap();
    // One was truncated in the report.
    assert_eq!(
        sum == total,
        !capture.path.contains("vllm"),
        "{}: {sum} of {total}",
        capture.path
    );
}

/// The same rows followed by mappings, which are not clients.
fn maps(capture: &Capture) {
    let found = Clients::parse(&capture.bytes);
    assert_eq!(
        (found.rows.len(), found.of(902_394)),
        (1, Some(kib(2_978_816)))
    );
    assert_eq!(found.total, Some(kib(2_978_816)));
}

fn pool_machine(capture: &Capture) -> Machine {
    let pairs = capture
        .text()
        .lines()
        .filter_map(|line| line.split_once('\t'));
    pairs.filter(|(key, _)| key.starts_with("page_pool")).fold(
        Machine::new(),
        |machine, (key, value)| {
            machine.with(
                &format!("sys/kernel/debug/nvmap/pagepool/{key}"),
                format!("{value}\n"),
            )
        },
    )
}

fn page_pool(capture: &Capture) {
    let machine = pool_machine(capture);
    let pool = Nvmap::find(&machine.root).unwrap().pool().unwrap();
    assert_eq!((pool.available_pages, pool.to_zero_pages), (2_012_087, 0));
}

fn total_memory(capture: &Capture) {
    let machine = Machine::new().with("sys/kernel/debug/nvmap/stats/total_memory", &capture.bytes);
    // The clients of the same board: 3783680 KiB.
    assert_eq!(
        Nvmap::find(&machine.root).unwrap().total(),
        Some(kib(3_783_680))
    );
}

/// The paths in use match those of the driver.
fn nvmap_paths(capture: &Capture) {
    let known: Vec<&str> = capture.rows().iter().map(|row| row[0]).collect();
    for read in [
        "/sys/kernel/debug/nvmap/stats/total_memory",
        "/sys/kernel/debug/nvmap/iovmm/clients",
        "/sys/kernel/debug/nvmap/pagepool/page_pool_available_pages",
        "/sys/kernel/debug/nvmap/pagepool/page_pool_pages_to_zero",
        "/sys/module/nvmap/parameters/shrink_page_pools",
    ] {
        assert!(known.contains(&read), "{read}");
    }
}

fn free_size(capture: &Capture) {
    let rest = capture
        .text()
        .strip_prefix("Max allocatable IOVMM memory: ")
        .unwrap();
    let bytes: u64 = rest.trim().strip_suffix(" bytes").unwrap().parse().unwrap();
    assert!(Bytes::new(bytes) < meminfo_of("orin-nano-8g_r36.4.x_5.15.148").total);
}

fn handles(capture: &Capture) {
    assert!(
        capture.text().to_lowercase().contains("size"),
        "{}",
        capture.path
    );
}

fn vmstat(capture: &Capture) {
    let stat = vmstat::parse(&capture.bytes);
    // 0 + 0 + 120331 + 402118
    assert_eq!(stat.allocstalls, Some(522_449));
    assert_eq!((stat.swap_ins, stat.oom_kills), (Some(4_402_118), Some(3)));
}

fn buddyinfo(capture: &Capture) {
    let (count, size) = match capture.path.split_once("lfb-") {
        Some((_, name)) => lfb(name.split_once('.').unwrap().0),
        // 402 + 2110 of order 10
        None => (2512, Bytes::from_mib(4)),
    };
    assert_eq!(
        FreeBlocks::parse(&capture.bytes),
        Some(FreeBlocks { count, size }),
        "{}",
        capture.path
    );
}

/// Parses `53x1MB` or `1x512kB`.
fn lfb(text: &str) -> (u64, Bytes) {
    let (count, size) = text.split_once('x').unwrap();
    let bytes = match size.split_at(size.find(|c: char| c.is_alphabetic()).unwrap()) {
        (mib, "MB") => Bytes::from_mib(mib.parse().unwrap()),
        (of, "kB") => kib(of.parse().unwrap()),
        other => panic!("{other:?}"),
    };
    (count.parse().unwrap(), bytes)
}

fn pressure(capture: &Capture) {
    let parsed = Pressure::parse(&capture.bytes);
    match capture.path.as_str() {
        "pressure/absent_stderr.txt" => assert!(parsed.is_err()),
        "pressure/cpu_only-some_pre-5.13.txt" => assert_eq!(parsed.unwrap().full, None),
        path => assert!(parsed.unwrap().full.is_some(), "{path}"),
    }
}

fn swaps(capture: &Capture) {
    let devices = swap::parse(&capture.bytes);
    assert_eq!(devices.len(), capture.text().lines().count() - 1);
    // 844288 + 843776 + 844032 + 843520 + 844544 + 843264 + 844800 + 843008 + 4508876
    let used: Bytes = devices.iter().map(|device| device.used).sum();
    assert_eq!(used, kib(11_260_108));
}

/// Parses a size as printed by `lsblk`, `swapon`, `zramctl` and `free`: `635M`, `2.6G`, `7.4Gi`.
fn printed(text: &str) -> Option<f64> {
    let text = text.trim_end_matches('i');
    let factor = match text.chars().last()? {
        'M' => 1.0,
        'G' => 1024.0,
        _ => return None,
    };
    Some(text[..text.len() - 1].parse::<f64>().ok()? * factor)
}

fn zram(capture: &Capture) {
    let (memory_mib, cores) = match capture.path.as_str() {
        path if path.contains("orin-nano-8g") => (7620.0, 6.0),
        path if path.contains("agx-orin-64g") => (62_841.0, 12.0),
        _ => (15_656.0, 8.0),
    };
    let near = |value: f64, of: f64, tolerance: f64| (value - of).abs() <= of * tolerance;
    match capture.path.strip_prefix("zram/").unwrap() {
        "nvzramconfig_size_line.txt" => assert!(capture.text().contains("/ 2 / \"${NRDEVICES}\"")),
        "orin-nx-16g_measured.tsv" => {
            // 6.6 GB stored in 3.9 GB: the ratio by which the audit estimates a full stock zram.
            assert_eq!(capture.rows()[0][6], "1.7:1");
            assert!(near(6.6 / 3.9, 1.7, 0.01));
        }
        path if path.starts_with("free-h_") => {
            let line = capture
                .text()
                .lines()
                .find(|line| line.starts_with("Mem:"))
                .unwrap();
            let total = printed(line.split_whitespace().nth(1).unwrap()).unwrap();
            // Rounded down to two digits.
            assert!(near(total, memory_mib, 0.04), "{path}: {total}");
        }
        path => {
            // Half of the memory, in one device per core: the stock size named by the audit.
            let devices: Vec<&str> = capture
                .text()
                .lines()
                .filter(|line| line.contains("zram"))
                .collect();
            assert!(devices.len() >= 6, "{path}");
            for line in devices {
                let size = line.split_whitespace().find_map(printed).unwrap();
                assert!(near(size, memory_mib / 2.0 / cores, 0.02), "{path}: {line}");
            }
        }
    }
}

/// Returns an Orin NX 16 GB with this release and an empty list of packages.
fn board(l4t: &str) -> Machine {
    let (major, revision) = l4t.split_once('.').unwrap();
    Machine::new()
        .with_capture(
            "proc/meminfo",
            "meminfo/orin-nx-16g_r36.4_idle.RECONSTRUCTED.txt",
        )
        .with(
            "etc/nv_tegra_release",
            format!("# R{major} (release), REVISION: {revision}, GCID: 1, BOARD: generic\n"),
        )
}

fn rules(machine: &Machine) -> Vec<&'static str> {
    audit::audit(&machine.root)
        .iter()
        .map(|found| found.rule)
        .collect()
}

/// Returns the rules about releases and packages that have findings.
fn misfits(machine: &Machine) -> Vec<&'static str> {
    let about = [
        "l4t_package",
        "jetpack_package",
        "kernel_release",
        "cuda_release",
        "tensorrt_release",
        "cudnn_release",
    ];
    rules(machine)
        .into_iter()
        .filter(|rule| about.contains(rule))
        .collect()
}

fn with_packages(machine: Machine, packages: &[(&str, &str)]) -> Machine {
    let stanzas = packages.iter().map(|(name, version)| {
        format!("Package: {name}\nStatus: install ok installed\nVersion: {version}\n\n")
    });
    machine.with("var/lib/dpkg/status", stanzas.collect::<String>())
}

fn packages(capture: &Capture) {
    match capture.path.as_str() {
        "dpkg/versions_seen.tsv" => {
            for row in capture.rows() {
                let cell = |column: usize| row.get(column).copied().unwrap_or_default();
                let installed: Vec<_> = [
                    ("nvidia-l4t-core", cell(2)),
                    ("nvidia-jetpack", cell(3)),
                    ("libnvinfer10", cell(4)),
                ]
                .into_iter()
                .filter(|(_, version)| version.starts_with(|c: char| c.is_ascii_digit()))
                .collect();
                let kernel = if cell(6).is_empty() {
                    "5.15.148-tegra"
                } else {
                    cell(6)
                };
                let machine = with_packages(
                    board(cell(1)).with("proc/sys/kernel/osrelease", kernel),
                    &installed,
                );
                assert_eq!(misfits(&machine), Vec::<&str>::new(), "{row:?}");
            }
        }
        path => {
            let lines = capture
                .text()
                .lines()
                .map(|line| line.trim_start_matches("ii").split_whitespace());
            let installed: Vec<_> = lines
                .map(|mut words| (words.next().unwrap(), words.next().unwrap()))
                .collect();
            assert_eq!(
                misfits(&with_packages(board("36.4.7"), &installed)),
                Vec::<&str>::new(),
                "{path}"
            );
            // With JetPack 5 it is a mismatch.
            assert!(
                misfits(&with_packages(board("35.4.1"), &installed)).contains(&"tensorrt_release"),
                "{path}"
            );
        }
    }
}

fn models(capture: &Capture) {
    for row in capture.rows() {
        let machine = Machine::new()
            .with("proc/device-tree/model", format!("{}\0", row[1]))
            .with(
                "proc/device-tree/compatible",
                row[2].replace('|', "\0") + "\0",
            );
        let found = Board::read(&machine.root);
        assert_eq!(found.model.unwrap_or_default(), row[1]);
        assert_eq!(
            found.compatible.len(),
            row[2].split('|').filter(|name| !name.is_empty()).count(),
            "{row:?}"
        );
    }
}

/// The audit knows the memory of each module, and names a carve-out by it.
fn modules(capture: &Capture) {
    // Linux's share of the 4 GB module has not been published.
    for row in capture.rows().iter().filter(|row| row[0] != "p3767-0004") {
        let machine = board("36.4.7")
            .with(
                "proc/device-tree/compatible",
                format!("nvidia,{}\0nvidia,tegra234\0", row[0]),
            )
            .with(
                "proc/meminfo",
                "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n",
            );
        assert!(rules(&machine).contains(&"carve_outs"), "{row:?}");
    }
}

fn device_tree(capture: &Capture) {
    let machine = Machine::new()
        .with("proc/device-tree/model", &capture.bytes)
        .with("proc/device-tree/compatible", &capture.bytes);
    let found = Board::read(&machine.root);
    let is_super = capture.path.contains("super");
    if capture.path.contains("compatible") {
        assert_eq!(
            (found.is_jetson(), found.is_super()),
            (true, is_super),
            "{}",
            capture.path
        );
    } else {
        assert_eq!(
            found.model.unwrap().ends_with(" Super"),
            is_super,
            "{}",
            capture.path
        );
    }
}

fn jetpacks(capture: &Capture) {
    for row in capture.rows() {
        let version = |jetpack: &str| [("nvidia-jetpack", jetpack.to_owned())];
        let installed = |jetpack: &str| {
            let versions = version(jetpack);
            let names: Vec<_> = versions
                .iter()
                .map(|(name, version)| (*name, version.as_str()))
                .collect();
            misfits(&with_packages(board(row[0]), &names))
        };
        assert_eq!(installed(row[1]), Vec::<&str>::new(), "{row:?}");
        assert_eq!(installed("3.3"), ["jetpack_package"], "{row:?}");
    }
}

fn release(capture: &Capture) {
    let found = L4tRelease::parse(&capture.bytes).unwrap().to_string();
    assert!(
        capture.path.contains(&format!("/r{found}")),
        "{}: {found}",
        capture.path
    );
}

/// Returns whether the audit warns of the selected mode, among these.
fn warns_of(chosen: &str, modes: &[(String, String)]) -> bool {
    let conf: String = modes
        .iter()
        .map(|(id, name)| format!("< POWER_MODEL ID={id} NAME={name} >\nCPU_ONLINE CORE_0 1\n"))
        .collect();
    let status = format!("pmode:{chosen:0>4}\nfmode:fanNull\n");
    let machine = Machine::new()
        .with("etc/nvpmodel.conf", conf)
        .with("var/lib/nvpmodel/status", status);
    rules(&machine).contains(&"power_mode")
}

fn power_modes(capture: &Capture) {
    let text = capture.text();
    if capture.path.ends_with("mode_limits.tsv") {
        return mode_limits(capture);
    }
    let mut modes = Vec::new();
    if let Some((_, name)) = text.split_once("NV Power Mode: ") {
        let (name, id) = name.trim().split_once('\n').unwrap();
        modes.push((id.to_owned(), name.to_owned()));
    }
    for line in text.lines() {
        if let Some((id, name)) = line
            .split_once("ID=")
            .and_then(|(_, rest)| rest.split_once(" NAME="))
        {
            modes.push((id.to_owned(), name.trim_end_matches(" >").to_owned()));
        }
    }
    assert!(!modes.is_empty(), "{}", capture.path);
    for (id, name) in &modes {
        // If only one mode was captured, no higher one is known.
        assert_eq!(
            warns_of(id, &modes),
            modes.len() > 1 && !name.starts_with("MAXN"),
            "{}: {name}",
            capture.path
        );
    }
}

/// Costs of each mode of an Orin NX, by its limits.
fn mode_limits(capture: &Capture) {
    for (row, gpu_percent) in capture.rows().iter().zip([None, Some(33), Some(55), None]) {
        let mhz: u64 = row[3].parse().unwrap();
        let most = mhz.max(918) * 1_000_000;
        let machine = Machine::new()
            .with(
                "sys/class/devfreq/17000000.gpu/max_freq",
                format!("{}\n", mhz * 1_000_000),
            )
            .with(
                "sys/class/devfreq/17000000.gpu/available_frequencies",
                format!("306000000 {most}\n"),
            );
        let found = audit::audit(&machine.root);
        let cost = found
            .iter()
            .find(|found| found.rule == "gpu_clock")
            .map(|found| found.cost);
        // (918 − 612) / 918 and (918 − 408) / 918
        assert_eq!(cost, gpu_percent.map(Cost::Speed), "{row:?}");
    }
}

fn sysfs(capture: &Capture) {
    let zone = |celsius: u64, trip: &str| {
        let machine = Machine::new()
            .with("sys/class/thermal/thermal_zone3/type", "tj-thermal\n")
            .with(
                "sys/class/thermal/thermal_zone3/temp",
                format!("{celsius}000\n"),
            )
            .with(
                "sys/class/thermal/thermal_zone3/trip_point_0_temp",
                format!("{trip}000\n"),
            );
        rules(&machine).contains(&"thermal")
    };
    match capture.path.strip_prefix("sysfs/").unwrap() {
        "thermal_trip_points_orin-nx.txt" => {
            for trip in capture.text().lines() {
                let celsius: u64 = trip.parse().unwrap();
                assert!(
                    zone(celsius - 4, trip) && !zone(celsius - 5, trip),
                    "{trip}"
                );
            }
        }
        "thermal_types_agx-orin_r36.4.7.txt" => {
            for line in capture.text().lines() {
                let (name, celsius) = line.trim_end_matches(" C").split_once(' ').unwrap();
                assert!(
                    name.ends_with("-thermal") && !zone(celsius.trim().parse().unwrap(), "70"),
                    "{line}"
                );
            }
        }
        _ => {
            for row in capture.rows() {
                if row[0] == "devfreq" {
                    let folder = format!("sys/class/devfreq/{}", row[1]);
                    let machine = Machine::new()
                        .with(&format!("{folder}/max_freq"), "400000000\n")
                        .with(
                            &format!("{folder}/available_frequencies"),
                            "400000000 800000000\n",
                        );
                    assert!(rules(&machine).contains(&"gpu_clock"), "{row:?}");
                } else {
                    assert!(row[1].ends_with("-thermal"), "{row:?}");
                }
            }
        }
    }
}

/// Parses `RAM used/totalMB (lfb NxZMB) SWAP used/totalMB`; the last two may be missing.
fn tegrastats(capture: &Capture) {
    for line in capture.text().lines() {
        let after = |mark: &str| line.split_once(mark).map(|(_, rest)| rest);
        let pair = |text: &str| {
            let (used, rest) = text.split_once('/').unwrap();
            let total = rest.split_once("MB").unwrap().0;
            (used.parse::<u64>().unwrap(), total.parse::<u64>().unwrap())
        };
        let (used, total) = pair(after("RAM ").unwrap());
        assert!(used < total, "{line}");
        if let Some(block) = after("(lfb ") {
            let (count, size) = lfb(block.split_once(')').unwrap().0);
            assert!(
                count > 0 && size.get().is_power_of_two() && size <= Bytes::from_mib(4),
                "{line}"
            );
        }
        if let Some(swap) = after("SWAP ") {
            let (used, total) = pair(swap);
            assert!(used <= total, "{line}");
        }
        // The board whose meminfo was captured too: of 7802736 kB, MemTotal − MemFree − Buffers − Cached are used.
        if capture.path.contains("orin-nano-8g") {
            let info = meminfo_of("orin-nano-8g_r36.4.x_5.15.148");
            assert_eq!(info.total.get().div_ceil(1 << 20), total);
            let rest =
                info.total - info.free.unwrap() - info.buffers.unwrap() - info.cached.unwrap();
            assert_eq!((rest.whole_mib(), used), (1276, 1273), "some moments apart");
        }
    }
}

fn table(capture: &Capture) {
    match capture.path.strip_prefix("traces/").unwrap() {
        "jv_mem_worker_init_orin-nx.txt" => {
            // The first line is from the machine of the capture `pagecache-full`.
            let info = meminfo_of("orin-nx-16g_r36.4_pagecache-full.RECONSTRUCTED");
            let (available, free) = (info.available.whole_mib(), info.free.unwrap().whole_mib());
            let first = capture.text().lines().next().unwrap();
            assert!(
                first.contains(&format!("mem_available_mb={available} mem_free_mb={free} ")),
                "{first}"
            );
        }
        "r36.4.7_cudamalloc_limit_orin-nano-8g.tsv" => {
            let rows = capture.rows();
            let largest = rows
                .iter()
                .filter(|row| row[1] == "ok")
                .filter_map(|row| row[0].parse::<f64>().ok())
                .fold(0.0, f64::max);
            let free: f64 = rows[0][2].parse().unwrap();
            let found = audit::audit(&board("36.4.7").root);
            let fault = found
                .iter()
                .find(|found| found.rule == "l4t_known_fault")
                .unwrap();
            let Cost::Memory(cost) = fault.cost else {
                panic!("{fault:?}")
            };
            // (5.36 − 3) × 1024
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a figure of thousands"
            )]
            let expected = ((free - largest) * 1024.0) as u64;
            assert_eq!(cost, Bytes::from_mib(expected));
        }
        "zoe_orin-nx-16g_processes_2026-10-03.tsv" => {
            let clients = Clients::parse(
                &Capture::of("nvmap/iovmm_clients_voice-stack_orin-nx.RECONSTRUCTED.txt").bytes,
            );
            for (row, pid) in [(0, 902_394), (1, 376_832)] {
                let gap: u64 = capture.rows()[row][5].parse().unwrap();
                assert_eq!(clients.of(pid).unwrap().whole_mib(), gap);
            }
        }
        _ => drop(capture.rows()),
    }
}
