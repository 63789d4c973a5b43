//! Readings of whole machines: folders that represent a board, and the test host itself.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

mod audit;
mod captures;

use cotenant::{
    policy::{params::MachineMemory, pressure::GpuUse},
    probe::{
        ProbeRoot, Sampler, Ticker, Wake,
        capabilities::{Capabilities, Presence},
        cgroup::Cgroup,
        meminfo::Meminfo,
        nvmap::{self, Nvmap},
        processes::{self, ProcessMemory, ProcessStat, ProcessTable},
        psi::{PsiRung, PsiTrigger, PsiWatch},
    },
    units::{Bytes, Timestamp},
};

/// Folder that represents a machine; files are added by path, or from captures of boards.
struct Machine {
    folder: tempfile::TempDir,
    root: ProbeRoot,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = ProbeRoot::at(folder.path());
        Self { folder, root }
    }

    fn with(self, path: &str, content: impl AsRef<[u8]>) -> Self {
        let path = self.folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }

    fn with_capture(self, path: &str, capture: &str) -> Self {
        let captures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/jetson");
        let content = fs::read(captures.join(capture)).unwrap();
        self.with(path, content)
    }

    /// Creates an Orin NX 16 GB with L4T 36.4.7, this `/proc/meminfo`, and no PSI, read by root.
    fn orin_nx(meminfo: &str, pool_pages: u64) -> Self {
        Self::new()
            .with_capture("proc/meminfo", &format!("meminfo/{meminfo}.txt"))
            .with_capture(
                "proc/vmstat",
                "vmstat/vmstat_selected_5.15_thrash.RECONSTRUCTED.txt",
            )
            .with_capture(
                "proc/swaps",
                "zram/proc_swaps_orin-nx-16g.RECONSTRUCTED.txt",
            )
            .with_capture(
                "proc/device-tree/model",
                "device-tree/orin-nx-16g-super.model.RECONSTRUCTED.bin",
            )
            .with_capture(
                "proc/device-tree/compatible",
                "device-tree/orin-nx-16g-super.compatible.RECONSTRUCTED.bin",
            )
            .with_capture("etc/nv_tegra_release", "nv_tegra_release/r36.4.7.txt")
            .with(
                "sys/block/zram0/mm_stat",
                "6600000000 3900000000 4187593113 0 0 0 0 0 0\n",
            )
            .with_capture(
                "sys/kernel/debug/nvmap/stats/total_memory",
                "nvmap/stats_total_memory.RECONSTRUCTED.txt",
            )
            .with_capture(
                "sys/kernel/debug/nvmap/iovmm/clients",
                "nvmap/iovmm_clients_voice-stack_orin-nx.RECONSTRUCTED.txt",
            )
            .with(
                "sys/kernel/debug/nvmap/pagepool/page_pool_available_pages",
                format!("{pool_pages}\n"),
            )
            .with(
                "sys/kernel/debug/nvmap/pagepool/page_pool_pages_to_zero",
                "0\n",
            )
    }
}

/// Child that ends with the test.
struct Neighbour(Child);

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn show(found: &Capabilities) -> String {
    let mut text = String::new();
    for item in &found.items {
        text += &format!(
            "{:<14} {:<8} {}\n    {}\n",
            item.name, item.presence, item.detail, item.consequence
        );
    }
    for warning in &found.warnings {
        text += &format!("warning: {warning}\n");
    }
    text
}

#[test]
fn a_full_board_is_read_in_the_words_of_policy() {
    let machine = Machine::orin_nx("orin-nx-16g_r36.4_voice-stack-tight.RECONSTRUCTED", 1024);
    let mut sampler = Sampler::open(&machine.root, None).unwrap();
    let sample = sampler.read().unwrap().sample(Timestamp::from_millis(7));
    assert_eq!(sample.taken_at, Timestamp::from_millis(7));
    assert_eq!(sample.memory.mem_total, Bytes::from_kib(16_031_988));
    assert!(sample.memory.mem_available < sample.memory.mem_free);
    assert_eq!(sample.gpu.nvmap_pool, Some(Bytes::from_mib(4)));
    assert_eq!(sample.counters.refaults_file, Some(64_000_000_000));
    assert_eq!(sample.counters.allocstalls, Some(522_449));
    assert_eq!(sample.counters.oom_kills, Some(3));
    assert_eq!(
        (sample.stalls.psi_some_avg10, sample.scope_used),
        (None, None)
    );
}

#[test]
fn memory_that_the_gpu_gave_back_shows_in_the_pool_alone() {
    let before = Machine::orin_nx(
        "orin-nx-16g_r36.4_after-gpu-free-pool-full.RECONSTRUCTED",
        0,
    );
    let after = Machine::orin_nx(
        "orin-nx-16g_r36.4_after-gpu-free-pool-full.RECONSTRUCTED",
        500_999,
    );
    let read = |machine: &Machine| Sampler::open(&machine.root, None).unwrap().read().unwrap();
    let (before, after) = (read(&before), read(&after));
    assert_eq!(before.meminfo, after.meminfo);
    let rise = after.pool.unwrap().bytes() - before.pool.unwrap().bytes();
    assert_eq!(rise.whole_mib(), 1957);
}

/// GPU memory, failed contiguous allocations, zram's store and the largest free block.
#[test]
fn gpu_memory_is_counted_where_it_can_be_and_inferred_elsewhere() {
    let tight = "orin-nx-16g_r36.4_voice-stack-tight.RECONSTRUCTED";
    let read = |sampler: &mut Sampler| sampler.read().unwrap().sample(Timestamp::START);
    let root = Machine::orin_nx(tight, 1024)
        .with_capture(
            "proc/buddyinfo",
            "vmstat/buddyinfo_orin-nx-16g_lfb-53x1MB.RECONSTRUCTED.txt",
        )
        .with("proc/vmstat", "cma_alloc_success 7\ncma_alloc_fail 2\n");
    let counted = read(&mut Sampler::open(&root.root, None).unwrap());
    assert_eq!(
        counted.gpu.gpu_used,
        Some(GpuUse::Counted(Bytes::new(3_874_488_320)))
    );
    assert_eq!(counted.zram_store, Some(Bytes::new(4_187_593_113)));
    assert_eq!(
        (counted.largest_free, counted.counters.cma_failures),
        (Some(Bytes::from_mib(1)), Some(2))
    );
    assert_eq!(
        counted.gpu.gpu_orphaned,
        Some(Bytes::ZERO),
        "its rows are all there is"
    );
    let orphaned = root
        .with_capture(
            "sys/kernel/debug/nvmap/iovmm/clients",
            "nvmap/iovmm_clients_vllm_r36.txt",
        )
        .with("sys/kernel/debug/nvmap/stats/total_memory", "15687254016\n");
    let orphaned = read(&mut Sampler::open(&orphaned.root, None).unwrap())
        .gpu
        .gpu_orphaned;
    assert_eq!(orphaned, Some(Bytes::from_kib(15_319_584 - 14_617_792)));
    // Without root, on a board of which only meminfo is readable: idle, and then with the voice stack. 5241728 −
    // 1125520 KiB more belong to no process, of which zram's store accounts for 1000 KiB.
    let board = Machine::new()
        .with_capture("etc/nv_tegra_release", "nv_tegra_release/r36.4.7.txt")
        .with_capture(
            "proc/meminfo",
            "meminfo/orin-nx-16g_r36.4_idle.RECONSTRUCTED.txt",
        )
        .with("sys/block/zram0/mm_stat", "0 0 2048000 0\n");
    let mut sampler = Sampler::open(&board.root, None).unwrap();
    assert_eq!(
        read(&mut sampler).gpu.gpu_used,
        Some(GpuUse::Inferred(Bytes::ZERO))
    );
    let board = board
        .with_capture("proc/meminfo", &format!("meminfo/{tight}.txt"))
        .with("sys/block/zram0/mm_stat", "0 0 3072000 0\n");
    let expected = Bytes::from_kib(5_241_728 - 1_125_520 - 1000);
    assert_eq!(
        read(&mut sampler).gpu.gpu_used,
        Some(GpuUse::Inferred(expected))
    );
    drop(board);
    // Older kernels print it. Elsewhere the GPU has dedicated memory.
    let old = Machine::new().with_capture("proc/meminfo", "meminfo/tx2-8g_r32.7_4.9.253.txt");
    let printed = read(&mut Sampler::open(&old.root, None).unwrap())
        .gpu
        .gpu_used;
    assert_eq!(printed, Some(GpuUse::Counted(Bytes::from_kib(805_068))));
    let server =
        Machine::new().with_capture("proc/meminfo", "meminfo/orin-nano-8g_r36.4.x_5.15.148.txt");
    assert_eq!(
        read(&mut Sampler::open(&server.root, None).unwrap())
            .gpu
            .gpu_used,
        None
    );
}

#[test]
fn debugfs_that_is_half_readable_is_reported_as_such_and_the_pool_is_emptied_where_that_is_allowed()
{
    let machine = Machine::orin_nx("orin-nx-16g_r36.4_idle.RECONSTRUCTED", 1024);
    let reported = |machine: &Machine| {
        let found = Capabilities::probe(&machine.root);
        let nvmap = found.get("nvmap").unwrap();
        (nvmap.presence, nvmap.detail.clone())
    };
    assert_eq!(reported(&machine).0, Presence::Present);
    assert!(nvmap::empty_pool(&machine.root, Bytes::from_mib(4)).is_err());
    let machine = machine.with("sys/module/nvmap/parameters/shrink_page_pools", "0");
    assert!(
        reported(&machine)
            .1
            .ends_with("which is emptied where the processor runs short")
    );
    nvmap::empty_pool(&machine.root, Bytes::from_mib(4)).unwrap();
    let written = machine
        .root
        .sys("module/nvmap/parameters/shrink_page_pools");
    assert_eq!(fs::read_to_string(written).unwrap(), "1024");
    for (file, half) in [
        ("stats/total_memory", "38744x"),
        ("pagepool/page_pool_available_pages", ""),
        ("iovmm/clients", "CLIENT PROCESS PID SIZE\nuser llama"),
    ] {
        let path = format!("sys/kernel/debug/nvmap/{file}");
        let whole = fs::read(machine.folder.path().join(&path)).unwrap();
        fs::write(machine.folder.path().join(&path), half).unwrap();
        assert_eq!(reported(&machine).0, Presence::Limited, "{file}");
        let reading = Sampler::open(&machine.root, None).unwrap().read().unwrap();
        assert_eq!(reading.gpu.is_none(), file.starts_with("stats"), "{file}");
        assert_eq!(
            reading.pool.is_none(),
            file.starts_with("pagepool"),
            "{file}"
        );
        fs::write(machine.folder.path().join(&path), whole).unwrap();
    }
}

#[test]
fn what_a_board_has_and_lacks_is_reported_with_its_consequence() {
    let machine = Machine::orin_nx("orin-nx-16g_r36.4_voice-stack-tight.RECONSTRUCTED", 1024);
    insta::assert_snapshot!(
        "capabilities_of_an_orin_nx",
        show(&Capabilities::probe(&machine.root))
    );
    let nvmap = Nvmap::find(&machine.root).unwrap();
    assert_eq!(
        nvmap.clients().unwrap().of(902_394),
        Some(Bytes::from_kib(2_978_816))
    );
    assert_eq!(nvmap.total(), Some(Bytes::new(3_874_488_320)));
}

#[test]
fn a_machine_that_has_nothing_is_reported_apart_from_an_error() {
    let machine = Machine::new().with("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 900 kB\n");
    let reading = Sampler::open(&machine.root, None).unwrap().read().unwrap();
    assert_eq!(
        (reading.vmstat, reading.pressure, reading.pool),
        (None, None, None)
    );
    let found = Capabilities::probe(&machine.root);
    for name in ["cma", "psi", "vmstat", "cgroup", "nvmap", "swap", "board"] {
        assert_eq!(
            found.get(name).unwrap().presence,
            Presence::Absent,
            "{name}"
        );
    }
    insta::assert_snapshot!("capabilities_of_a_bare_machine", show(&found));
}

#[test]
fn without_memory_readings_there_is_an_error_with_its_cause() {
    let reported = |machine: &Machine| {
        let error = match Sampler::open(&machine.root, None) {
            Ok(mut sampler) => sampler.read().unwrap_err(),
            Err(error) => error,
        };
        let cause = std::error::Error::source(&error).unwrap();
        format!("{error} (caused by: {cause})")
            .replace(&machine.folder.path().display().to_string(), "")
    };
    assert_eq!(
        reported(&Machine::new()),
        "cannot read memory from `/proc/meminfo` (caused by: No such file or directory (os error 2))"
    );
    assert_eq!(
        reported(
            &Machine::new().with("proc/meminfo", "MemTotal: 9 kB\n\nMemAvailable: 12x45 kB\n")
        ),
        "cannot read `MemAvailable` from `/proc/meminfo` (caused by: line 3: `12x45` is not a number of kB)"
    );
}

#[test]
fn a_limit_of_the_group_around_us_bounds_the_machine() {
    let machine = Machine::new()
        .with(
            "proc/meminfo",
            "MemTotal: 4194304 kB\nMemAvailable: 900 kB\n",
        )
        .with("proc/self/cgroup", "0::/box\n")
        .with("sys/fs/cgroup/box/memory.stat", "")
        .with("sys/fs/cgroup/box/memory.max", "1073741824\n");
    let total = |machine: &Machine| {
        let mut sampler = Sampler::open(&machine.root, None).unwrap();
        let reading = sampler.read().unwrap();
        sampler.machine(&reading)
    };
    let limited = MachineMemory {
        total: Bytes::from_gib(1),
        limited_by: Some("/box".to_owned()),
    };
    assert_eq!(total(&machine), limited);
    let free = Machine::new().with(
        "proc/meminfo",
        "MemTotal: 4194304 kB\nMemAvailable: 900 kB\n",
    );
    assert_eq!(total(&free), MachineMemory::of(Bytes::from_gib(4)));
    // A limit above the memory of the machine has no effect.
    let wide = machine.with("sys/fs/cgroup/box/memory.max", "8589934592\n");
    assert_eq!(total(&wide), MachineMemory::of(Bytes::from_gib(4)));
}

#[test]
fn this_host_is_read_again_and_again() {
    let root = ProbeRoot::default();
    let mut sampler = Sampler::open(&root, None).unwrap();
    let first = sampler.read().unwrap();
    let second = sampler.read().unwrap();
    assert_eq!(first.meminfo.total, second.meminfo.total);
    assert!(second.meminfo.available_low() <= second.meminfo.available);
    let info = Meminfo::read(&root).unwrap();
    assert!(info.residual() < info.total);
    if let (Some(first), Some(second)) = (first.vmstat, second.vmstat) {
        assert!(first.swap_ins <= second.swap_ins);
    }
    assert!(sampler.machine(&second).total > Bytes::ZERO);
}

#[test]
fn memory_that_this_process_touches_shows_in_its_pss_and_in_its_session() {
    let root = ProbeRoot::default();
    let own = std::process::id();
    let session = processes::own_session();
    let before = ProcessMemory::read(&root.proc, own).unwrap().unwrap().pss;
    let mut taken = vec![0u8; 32 << 20];
    for page in taken.chunks_mut(4096) {
        page[0] = 1;
    }
    let after = ProcessMemory::read(&root.proc, own).unwrap().unwrap().pss;
    assert!(after - before >= Bytes::from_mib(31), "{before} to {after}");
    let mut sampler = Sampler::open(&root, Some(session)).unwrap();
    let scope = sampler.read().unwrap().scope.unwrap();
    assert!(scope.used >= Bytes::from_mib(31), "{scope:?}");
    assert!(scope.processes >= 1);
    assert!(processes::resident(&root.proc, own).unwrap() >= Bytes::from_mib(31));
    assert_eq!(taken.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 8192);
}

#[test]
fn a_child_belongs_to_our_tree_until_it_is_reaped() {
    let root = ProbeRoot::default();
    // Waits for the end of its input, when the test closes the pipe.
    let child = Command::new("cat")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut child = Neighbour(child);
    let pid = child.0.id();
    let stat = ProcessStat::read(&root.proc, pid).unwrap();
    assert_eq!(
        (stat.parent, stat.session),
        (std::process::id(), processes::own_session())
    );
    let table = ProcessTable::read(&root.proc).unwrap();
    assert!(table.tree(std::process::id()).contains(&pid));
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    assert_eq!(
        ProcessStat::read(&root.proc, pid).filter(|now| now.start_ticks == stat.start_ticks),
        None
    );
    assert_eq!(processes::sum(&root.proc, [0x7fff_ffff]).processes, 0);
}

/// Returns whether this process may choose any window.
fn has_cap_sys_resource() -> bool {
    let found = Capabilities::probe(&ProbeRoot::default());
    found.get("oom_score_adj").unwrap().presence == Presence::Present
}

#[test]
fn the_rung_on_this_host_is_the_one_that_its_rights_allow() {
    let path = Path::new("/proc/pressure/memory");
    let watch = PsiWatch::arm(&ProbeRoot::default());
    if fs::read(path).is_err() {
        assert_eq!(watch.rung, PsiRung::Absent);
        return;
    }
    let arm = |seconds| {
        PsiTrigger::arm(
            path,
            Duration::from_millis(150),
            Duration::from_secs(seconds),
        )
    };
    let highest = match (arm(1).is_ok(), arm(2).is_ok()) {
        (true, _) => PsiRung::TriggerOneSecond,
        (false, true) => PsiRung::TriggerTwoSeconds,
        (false, false) => PsiRung::ReadOnly,
    };
    assert_eq!(watch.rung, highest, "{watch:?}");
    assert_eq!(highest == PsiRung::TriggerOneSecond, has_cap_sys_resource());
    assert!(watch.trigger.is_some() || watch.reason.is_some());
}

#[tokio::test]
async fn a_quiet_machine_is_woken_by_the_interval() {
    let watch = PsiWatch::arm(&ProbeRoot::default());
    let rung = watch.rung;
    let mut ticker = Ticker::new(watch);
    assert_eq!(ticker.rung(), rung);
    for _ in 0..3 {
        // A neighbour on this host may stall meanwhile, which causes a wake-up too.
        let wake = ticker.next(Duration::from_millis(1)).await;
        assert!(matches!(wake, Wake::Interval | Wake::Stall));
    }
    let blind = Machine::new();
    let mut ticker = Ticker::new(PsiWatch::arm(&blind.root));
    assert_eq!(
        (ticker.rung(), ticker.next(Duration::ZERO).await),
        (PsiRung::Absent, Wake::Interval)
    );
}

/// A limited group of cgroup version 1, removed on drop.
struct LimitedGroup(std::path::PathBuf);

impl LimitedGroup {
    fn new(limit: Bytes) -> Self {
        let own = Cgroup::own(&ProbeRoot::default()).expect("a memory controller");
        let folder = own
            .folder()
            .join(format!("cotenant-test-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let group = Self(folder);
        fs::write(
            group.0.join("memory.limit_in_bytes"),
            limit.get().to_string(),
        )
        .unwrap();
        group
    }
}

impl Drop for LimitedGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[tokio::test]
#[ignore = "needs root and a memory controller of cgroup version 1"]
async fn a_real_stall_wakes_the_ticker() {
    let group = LimitedGroup::new(Bytes::from_mib(24));
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join("file");
    fs::write(&file, vec![7u8; 96 << 20]).unwrap();
    let root = ProbeRoot::default();
    let mut watch = PsiWatch::arm(&root);
    assert!(watch.rung >= PsiRung::TriggerTwoSeconds, "{watch:?}");
    // A lower threshold than the daemon's, so that a fast disk suffices.
    let pressure = Path::new("/proc/pressure/memory");
    watch.trigger =
        Some(PsiTrigger::arm(pressure, Duration::from_millis(20), Duration::from_secs(2)).unwrap());
    let mut ticker = Ticker::new(watch);
    let before = Sampler::open(&root, None).unwrap().read().unwrap();
    // Reads the same file repeatedly in a group that can cache a quarter of it.
    let thrash = format!(
        "echo $$ > {}/cgroup.procs; sync {1}; dd of={1} oflag=nocache conv=notrunc,fdatasync count=0 2>/dev/null; \
         while :; do cat {1} > /dev/null; done",
        group.0.display(),
        file.display()
    );
    let neighbour = Neighbour(Command::new("sh").args(["-c", &thrash]).spawn().unwrap());
    let wake = ticker.next(Duration::from_secs(30)).await;
    let after = Sampler::open(&root, None).unwrap().read().unwrap();
    drop(neighbour);
    let total = |reading: &cotenant::probe::Reading| reading.pressure.unwrap().some.total_us;
    assert_eq!(
        wake,
        Wake::Stall,
        "stalled {} µs",
        total(&after) - total(&before)
    );
}

#[tokio::test]
#[ignore = "needs root and a hierarchy of cgroup version 2"]
async fn a_trigger_whose_group_is_removed_ends_and_sampling_goes_on() {
    let hierarchy = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(Path::new);
    let hierarchy = hierarchy
        .into_iter()
        .find(|path| path.join("cgroup.procs").exists());
    let group = LimitedGroup(
        hierarchy
            .unwrap()
            .join(format!("cotenant-test-{}", std::process::id())),
    );
    fs::create_dir(&group.0).unwrap();
    let watch = PsiWatch::arm_at(&group.0.join("memory.pressure"));
    assert!(watch.rung >= PsiRung::TriggerTwoSeconds, "{watch:?}");
    let mut ticker = Ticker::new(watch);
    drop(group);
    ticker.next(Duration::from_secs(10)).await;
    assert_eq!(ticker.rung(), PsiRung::ReadOnly);
    assert_eq!(ticker.next(Duration::from_millis(1)).await, Wake::Interval);
}

#[test]
#[ignore = "a measurement: run it alone, in a release build"]
fn a_sample_of_the_machine_costs_tens_of_microseconds() {
    let mut sampler = Sampler::open(&ProbeRoot::default(), None).unwrap();
    let mut times: Vec<Duration> = (0..2000)
        .map(|_| {
            let start = std::time::Instant::now();
            sampler.read().unwrap();
            start.elapsed()
        })
        .collect();
    times.sort();
    let median = times[times.len() / 2];
    eprintln!("median {median:?}, p99 {:?}", times[times.len() * 99 / 100]);
    assert!(median < Duration::from_micros(100), "{median:?}");
}

#[test]
fn a_sample_file_with_garbage_is_an_error_with_its_line_and_what_is_optional_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let root = ProbeRoot::at(folder.path());
    fs::create_dir_all(folder.path().join("proc/pressure")).unwrap();
    let write =
        |name: &str, text: &[u8]| fs::write(folder.path().join("proc").join(name), text).unwrap();
    let good = b"MemTotal: 1000 kB\nMemFree: 300 kB\nMemAvailable: 400 kB\n";
    write("meminfo", good);
    write("vmstat", b"\xff\xfe\0 not a number\nallocstall_normal -1\n");
    write("pressure/memory", b"some avg10=banana\n");
    let mut sampler = Sampler::open(&root, None).unwrap();
    let reading = sampler.read().unwrap();
    assert_eq!(reading.meminfo.available, Bytes::from_kib(400));
    assert_eq!(reading.pressure, None);
    assert!(
        reading.vmstat.is_none_or(|stat| stat.allocstalls.is_none()),
        "{reading:?}"
    );
    for garbage in [
        &b"MemTotal: 1000 kB\nMemAvailable: 12x45 kB\n"[..],
        b"MemTotal: 1000 kB\nMemAvailable: 99999999999999999999999 kB\n",
        b"MemTotal: 1000 kB\nMemAvailable: -4 kB\n",
        b"\0\0\0",
        b"",
    ] {
        write("meminfo", garbage);
        let error = sampler.read().unwrap_err();
        assert!(error.to_string().contains("meminfo"), "{error}");
    }
    // No trace of it remains.
    write("meminfo", good);
    assert_eq!(sampler.read().unwrap().meminfo, reading.meminfo);
}
