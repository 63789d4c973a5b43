//! Boards made of files, and the findings of the audit's rules.

use std::{collections::BTreeSet, fmt::Write as _};

use cotenant::{
    probe::{
        ProbeRoot,
        audit::{self, Cost, Finding, Severity},
        capabilities::Capabilities,
        sandbox::Sandbox,
    },
    units::Bytes,
};

use super::Machine;

/// Machine with the audit's findings.
trait Audited {
    fn process(self, pid: u32, name: &str, pages: u64) -> Self;
    fn audit(&self) -> Vec<Finding>;
    fn rules(&self) -> BTreeSet<&'static str> {
        self.audit().iter().map(|finding| finding.rule).collect()
    }
    fn found(&self, rule: &str) -> Finding {
        let found = self
            .audit()
            .into_iter()
            .find(|finding| finding.rule == rule);
        found.unwrap_or_else(|| panic!("no {rule} in {:?}", self.rules()))
    }
}

impl Audited for Machine {
    fn process(self, pid: u32, name: &str, pages: u64) -> Self {
        self.with(&format!("proc/{pid}/comm"), format!("{name}\n"))
            .with(
                &format!("proc/{pid}/statm"),
                format!("9999999 {pages} 1 1 0 1 0\n"),
            )
    }

    fn audit(&self) -> Vec<Finding> {
        audit::audit(&self.root)
    }
}

fn orin_nx() -> Machine {
    Machine::new()
        .with_capture(
            "proc/meminfo",
            "meminfo/orin-nx-16g_r36.4_idle.RECONSTRUCTED.txt",
        )
        .with_capture(
            "proc/device-tree/model",
            "device-tree/orin-nx-16g.model.RECONSTRUCTED.bin",
        )
        .with_capture(
            "proc/device-tree/compatible",
            "device-tree/orin-nx-16g.compatible.RECONSTRUCTED.bin",
        )
        .with_capture("etc/nv_tegra_release", "nv_tegra_release/r36.4.7.txt")
        .with_capture(
            "proc/swaps",
            "zram/proc_swaps_orin-nx-16g.RECONSTRUCTED.txt",
        )
        .with("proc/sys/kernel/osrelease", "5.15.148-tegra\n")
}

#[test]
fn a_stock_orin_nx_has_what_memory_audits_name_with_figures() {
    let board = orin_nx()
        .with("sys/block/zram0/mm_stat", "0 0 1048576000 0 0 0 0 0 0\n")
        .process(10, "gnome-shell", 51_200)
        .process(11, "Xorg", 25_600)
        .process(12, "ollama", 2560)
        .process(13, "dockerd", 2560)
        .process(14, "systemd-oomd", 256)
        .with(
            "etc/nvpmodel.conf",
            "< POWER_MODEL ID=0 NAME=MAXN >\nCPU 1\n< POWER_MODEL ID=2 NAME=15W >\n",
        )
        .with("var/lib/nvpmodel/status", "pmode:0002\nfmode:fanNull\n")
        .with("sys/devices/system/cpu/online", "0-3\n")
        .with("sys/devices/system/cpu/present", "0-7\n")
        .with(
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq",
            "1420800\n",
        )
        .with(
            "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq",
            "1984000\n",
        )
        .with("sys/class/devfreq/17000000.gpu/max_freq", "612000000\n")
        .with(
            "sys/class/devfreq/17000000.gpu/available_frequencies",
            "306000000 612000000 918000000\n",
        )
        .with("sys/kernel/debug/bpmp/debug/clk/emc/rate", "2133000000\n")
        .with(
            "sys/kernel/debug/bpmp/debug/clk/emc/max_rate",
            "3199000000\n",
        )
        .with("sys/class/thermal/thermal_zone0/temp", "97000\n")
        .with("sys/class/thermal/thermal_zone0/type", "tj-thermal\n")
        .with(
            "sys/class/thermal/thermal_zone0/trip_point_0_temp",
            "99000\n",
        )
        .with("sys/class/thermal/thermal_zone1/temp", "")
        .with("sys/block/mmcblk0/queue/rotational", "0\n")
        .with(
            "sys/kernel/mm/transparent_hugepage/enabled",
            "always madvise [never]\n",
        )
        .with("proc/sys/vm/overcommit_memory", "2\n")
        .with("proc/sys/vm/nr_hugepages", "100\n")
        .with("proc/sys/vm/min_free_kbytes", "999999\n")
        .with("proc/sys/vm/swappiness", "150\n")
        .with("proc/vmstat", "oom_kill 0\n")
        .with("sys/fs/cgroup/cgroup.procs", "1\n")
        .with("sys/kernel/debug/README", "not nvmap\n");
    assert_eq!(board.found("l4t_known_fault").severity, Severity::Warning);
    assert_eq!(
        board.found("desktop").cost,
        Cost::Memory(Bytes::from_mib(300))
    );
    assert_eq!(
        board.found("zram_store").cost,
        Cost::Memory(Bytes::new(1_048_576_000))
    );
    assert_eq!(board.found("cores_offline").cost, Cost::Speed(50));
    assert_eq!(board.found("gpu_clock").cost, Cost::Speed(33));
    assert_eq!(board.found("memory_clock").cost, Cost::Speed(33));
    assert_eq!(
        board.found("power_mode").text,
        "power mode is 15W, not MAXN"
    );
    assert!(
        board
            .found("thermal")
            .text
            .starts_with("tj-thermal has 97 °C, 2 °C")
    );
    assert_eq!(
        board.found("huge_pages_reserved").cost,
        Cost::Memory(Bytes::from_mib(200))
    );
    let rules = board.rules();
    for rule in [
        "zram_size",
        "psi",
        "cgroup_memory",
        "nvmap_access",
        "other_engines",
        "container_runtime",
        "other_oom_policy",
        "cpu_clock",
        "super_mode",
        "disk_kind",
        "transparent_huge_pages",
        "overcommit",
        "min_free",
        "swappiness",
    ] {
        assert!(rules.contains(rule), "{rule} in {rules:?}");
    }
    assert!(rules.len() >= 20, "{rules:?}");
    for rule in [
        "carve_outs",
        "cma_size",
        "kernel_release",
        "l4t_package",
        "cuda_release",
    ] {
        assert!(!rules.contains(rule), "{rule}");
    }
}

#[test]
fn versions_that_do_not_belong_together_are_named_and_those_that_do_are_not() {
    let status = |core: &str, cuda: &str, trt: &str, cudnn: &str, jetpack: &str| {
        format!(
            "Package: nvidia-l4t-core\nStatus: install ok installed\nVersion: {core}\n\nPackage: cuda-cudart-12-6\nVersion: {cuda}\n\n\
             Package: libnvinfer10\nVersion: {trt}\n\nPackage: libcudnn9-cuda-12\nVersion: {cudnn}\n\n\
             Package: nvidia-jetpack\nVersion: {jetpack}\n"
        )
    };
    let versions = [
        "l4t_package",
        "cuda_release",
        "tensorrt_release",
        "cudnn_release",
        "jetpack_package",
        "kernel_release",
    ];
    let fine = orin_nx().with(
        "var/lib/dpkg/status",
        status(
            "36.4.7-20250918154033",
            "12.6.68-1",
            "10.3.0.30-1+cuda12.5",
            "9.3.0.75-1+cuda12.6",
            "6.2.1+b38",
        ),
    );
    assert!(
        versions.iter().all(|rule| !fine.rules().contains(rule)),
        "{:?}",
        fine.rules()
    );
    let mixed = orin_nx()
        .with(
            "var/lib/dpkg/status",
            status("36.5.0-20260101", "11.4.1", "8.5.2", "8.6.0", "5.1.2"),
        )
        .with("proc/sys/kernel/osrelease", "5.10.104-tegra");
    assert!(
        versions.iter().all(|rule| mixed.rules().contains(rule)),
        "{:?}",
        mixed.rules()
    );
}

#[test]
fn a_machine_without_anything_has_no_findings() {
    assert_eq!(Machine::new().audit(), []);
}

#[test]
fn half_written_values_are_no_findings() {
    let garbage = orin_nx()
        .with("sys/devices/system/cpu/online", "0-\n")
        .with("sys/devices/system/cpu/present", "7-0\n")
        .with("sys/kernel/debug/bpmp/debug/clk/emc/rate", "x")
        .with("sys/kernel/debug/bpmp/debug/clk/emc/max_rate", "")
        .with("var/lib/nvpmodel/status", "pmode:")
        .with("var/lib/dpkg/status", [0xff, 0xfe, b'\n'])
        .with("sys/class/thermal/thermal_zone0/temp", "hot");
    for rule in ["cores_offline", "memory_clock", "power_mode", "thermal"] {
        assert!(!garbage.rules().contains(rule), "{rule}");
    }
}

#[test]
fn settings_of_the_unit_that_take_something_from_the_daemon_are_named() {
    let unit = include_str!("../../../deploy/cotenant.service");
    let ours = orin_nx().with("etc/systemd/system/cotenant.service", unit);
    assert!(!ours.rules().contains("unit_sandbox"));
    let edited = ours.with(
        "etc/systemd/system/cotenant.service.d/override.conf",
        "[Service]\nPrivateDevices=yes\nMemoryMax=4G\nProtectProc=default\n",
    );
    assert_eq!(
        edited.found("unit_sandbox").text,
        "the unit of cotenant has PrivateDevices=yes hides /dev/nvmap and sound; MemoryMax=4G has the kernel kill the LLM at that size"
    );
    let undone = edited.with(
        "etc/systemd/system/cotenant.service.d/z.conf",
        "[Service]\nPrivateDevices=no\nMemoryMax=infinity\n",
    );
    assert!(
        !undone.rules().contains("unit_sandbox"),
        "the last setting counts"
    );
}

#[test]
fn the_unit_of_a_package_is_read_where_etc_has_none() {
    let unit = include_str!("../../../deploy/cotenant.service");
    let packaged = orin_nx().with("usr/lib/systemd/system/cotenant.service", unit);
    // The folder did not exist when the root was constructed.
    let packaged = Machine {
        root: ProbeRoot::at(packaged.folder.path()),
        ..packaged
    };
    assert!(!packaged.rules().contains("unit_sandbox"));
    let edited = packaged.with(
        "usr/lib/systemd/system/cotenant.service.d/a.conf",
        "[Service]\nPrivateDevices=yes\n",
    );
    assert!(edited.rules().contains("unit_sandbox"));
    // A drop-in of the same name in /etc replaces it, and so does a unit.
    let replaced = edited.with(
        "etc/systemd/system/cotenant.service.d/a.conf",
        "[Service]\nPrivateDevices=no\n",
    );
    assert!(!replaced.rules().contains("unit_sandbox"));
    let own = replaced.with(
        "etc/systemd/system/cotenant.service",
        "[Service]\nMemoryMax=1G\n",
    );
    assert!(own.found("unit_sandbox").text.contains("MemoryMax=1G"));
}

#[test]
fn versions_are_shown_beside_those_that_belong_to_the_l4t() {
    let packages = "Package: cuda-cudart-12-6\nVersion: 12.6.68-1\n\nPackage: libcudnn8\nVersion: 8.4.1\n\n\
                    Package: nvidia-jetpack\nVersion: 6.1+b123\n";
    let board = orin_nx().with("var/lib/dpkg/status", packages);
    let shown: Vec<String> = audit::versions(&board.root)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        shown,
        [
            "L4T: 36.4.7, compatible (JetPack 6)",
            "kernel: 5.15.148-tegra, compatible (5.15)",
            "JetPack: 6.1+b123, compatible (6)",
            "CUDA: 12.6.68-1, compatible (12)",
            "TensorRT: not installed; expected is 8.6 or 10",
            "cuDNN: 8.4.1, not compatible (8.9 or 9)",
        ]
    );
    assert_eq!(audit::versions(&Machine::new().root), []);
    // Without the list of packages, their versions are unknown.
    let shown: Vec<String> = audit::versions(&orin_nx().root)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        shown,
        [
            "L4T: 36.4.7, compatible (JetPack 6)",
            "kernel: 5.15.148-tegra, compatible (5.15)"
        ]
    );
    let next = Machine::new().with(
        "etc/nv_tegra_release",
        "# R40 (release), REVISION: 1.0, GCID: 1\n",
    );
    assert_eq!(
        audit::versions(&next.root)[0].to_string(),
        "L4T: 40.1.0 (not known here)"
    );
}

#[test]
fn what_confines_a_supervisor_that_runs_is_read_from_its_status() {
    let status = |bounding: &str| {
        format!(
            "Name:\tcotenant\nUid:\t0\t998\t998\t998\nCapEff:\t0000000401000000\nCapBnd:\t{bounding}\n\
             NoNewPrivs:\t1\nSeccomp:\t2\n"
        )
    };
    let process = |machine: Machine, pid: u32, words: &str, bounding: &str| {
        machine
            .with(&format!("proc/{pid}/comm"), "cotenant\n")
            .with(&format!("proc/{pid}/cmdline"), words.replace(' ', "\0"))
            .with(&format!("proc/{pid}/status"), status(bounding))
    };
    let machine = process(
        Machine::new(),
        7,
        "/usr/bin/cotenant serve --config x",
        "0000000401000000",
    );
    let machine = process(machine, 9, "cotenant hold serve-er", "0");
    let machine = process(machine, 12, "cotenant serve", "000001ffffffffff")
        .with("proc/13/comm", "cotenant\n");
    let shown: Vec<String> = Sandbox::of_daemons(&machine.root)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        shown,
        [
            "pid 7, uid 998: no new privileges, system calls filtered, has CAP_SYS_RESOURCE CAP_SYSLOG, \
             at most CAP_SYS_RESOURCE CAP_SYSLOG",
            "pid 12, uid 998: no new privileges, system calls filtered, has CAP_SYS_RESOURCE CAP_SYSLOG, \
             at most all capabilities",
        ]
    );
}

#[test]
fn controllers_that_are_missing_are_named_and_rights_of_a_copy_are_not() {
    let board = |capabilities: &str, controllers: &str| {
        orin_nx()
            .with(
                "proc/self/status",
                format!("Name:\tcotenant\nCapEff:\t{capabilities}\n"),
            )
            .with(
                "sys/fs/cgroup/cgroup.controllers",
                format!("{controllers}\n"),
            )
    };
    // Bits 24 and 34.
    let all = board("0000000401000000", "cpuset cpu io memory hugetlb pids");
    assert!(!all.rules().contains("cgroup_controllers"));
    let some = board("0000000001000000", "cpuset cpu io");
    assert!(
        !some.rules().contains("rights"),
        "the rights of the process that made the copy are not the daemon's"
    );
    assert_eq!(
        some.found("cgroup_controllers").text,
        "control groups lack memory, pids"
    );
}

/// One board per generation, as far as captures exist, with the audit's findings and their costs.
#[test]
fn each_board_has_its_findings() {
    let release = |l4t: &str| {
        let (major, revision) = l4t.split_once('.').unwrap();
        format!("# R{major} (release), REVISION: {revision}, GCID: 1, BOARD: generic\n")
    };
    let module = |part: &str| format!("nvidia,{part}\0nvidia,tegra234\0");
    let packages = |all: &[(&str, &str)]| -> String {
        let stanzas = all
            .iter()
            .map(|(name, version)| format!("Package: {name}\nVersion: {version}\n\n"));
        stanzas.collect()
    };
    // `MemTotal` of boards without a captured meminfo, from their tegrastats line.
    let memory = |mib: u64| {
        format!(
            "MemTotal: {} kB\nMemAvailable: {} kB\nCmaTotal: 262144 kB\nCmaFree: 200000 kB\n",
            mib << 10,
            mib << 9
        )
    };
    let zram = |devices: u64, mib: u64| {
        let lines =
            (0..devices).map(|device| format!("/dev/zram{device} partition {} 0 5\n", mib << 10));
        format!(
            "Filename Type Size Used Priority\n{}",
            lines.collect::<String>()
        )
    };
    let jetpack_7 = packages(&[
        ("libnvinfer10", "10.13.3"),
        ("libcudnn9", "9.12.0"),
        ("cuda-cudart-13-0", "13.0.96"),
        ("nvidia-jetpack", "7.2-b1"),
    ]);
    let boards = [
        (
            "Nano 4 GB, L4T 32.7, under pressure",
            Machine::new()
                .with_capture(
                    "proc/meminfo",
                    "meminfo/nano-4g_r32.7_4.9.253_pressured.txt",
                )
                .with("etc/nv_tegra_release", release("32.7.1"))
                .with("proc/sys/kernel/osrelease", "4.9.253-tegra")
                .with("sys/block/mmcblk0/queue/rotational", "0"),
        ),
        (
            "TX2 8 GB, L4T 32.7",
            Machine::new()
                .with_capture("proc/meminfo", "meminfo/tx2-8g_r32.7_4.9.253.txt")
                .with("etc/nv_tegra_release", release("32.7.1"))
                .with("proc/sys/kernel/osrelease", "4.9.253-tegra"),
        ),
        (
            "AGX Orin 32 GB, L4T 35.4.1, JetPack 5",
            Machine::new()
                .with("proc/meminfo", memory(30_536))
                .with("proc/device-tree/compatible", module("p3701-0000"))
                .with("etc/nv_tegra_release", release("35.4.1"))
                .with("proc/sys/kernel/osrelease", "5.10.120-tegra")
                .with(
                    "var/lib/dpkg/status",
                    packages(&[
                        ("libnvinfer8", "8.5.2-1+cuda11.4"),
                        ("libcudnn8", "8.6.0.166-1+cuda11.4"),
                        ("cuda-cudart-11-4", "11.4.298-1"),
                        ("nvidia-jetpack", "5.1.2-b104"),
                    ]),
                ),
        ),
        (
            "Orin Nano 8 GB, L4T 36.4.4, stock",
            Machine::new()
                .with_capture("proc/meminfo", "meminfo/orin-nano-8g_r36.4.x_5.15.148.txt")
                .with("proc/device-tree/compatible", module("p3767-0005"))
                .with_capture(
                    "etc/nv_tegra_release",
                    "nv_tegra_release/r36.4.4_fields.RECONSTRUCTED.txt",
                )
                .with("proc/sys/kernel/osrelease", "5.15.148-tegra")
                .with("proc/swaps", zram(6, 635)),
        ),
        (
            "Orin NX 16 GB, L4T 36.4.7, full voice stack",
            Machine::orin_nx("orin-nx-16g_r36.4_voice-stack-tight.RECONSTRUCTED", 500_999)
                .with("proc/sys/kernel/osrelease", "5.15.148-tegra")
                .with_capture(
                    "proc/buddyinfo",
                    "vmstat/buddyinfo_orin-nx-16g_lfb-1x2MB.RECONSTRUCTED.txt",
                ),
        ),
        (
            "AGX Orin 64 GB, L4T 36.4.7",
            Machine::new()
                .with("proc/meminfo", memory(62_841))
                .with("proc/device-tree/compatible", module("p3701-0005"))
                .with_capture("etc/nv_tegra_release", "nv_tegra_release/r36.4.7.txt")
                .with("proc/swaps", zram(12, 2618)),
        ),
        (
            "AGX Orin 64 GB, L4T 39.2, JetPack 7.2",
            Machine::new()
                .with("proc/meminfo", memory(62_817))
                .with("proc/device-tree/compatible", module("p3701-0005"))
                .with("etc/nv_tegra_release", release("39.2.0"))
                .with("proc/sys/kernel/osrelease", "6.8.12-1021-tegra")
                .with("var/lib/dpkg/status", &jetpack_7),
        ),
        (
            "AGX Thor 128 GB, L4T 38.4, kernel of another release",
            Machine::new()
                .with("proc/meminfo", memory(125_772))
                .with(
                    "proc/device-tree/compatible",
                    "nvidia,p3834-0008\0nvidia,tegra264\0",
                )
                .with_capture("etc/nv_tegra_release", "nv_tegra_release/r38.4.0_thor.txt")
                .with("proc/sys/kernel/osrelease", "6.14.0-37-generic")
                .with("var/lib/dpkg/status", &jetpack_7),
        ),
    ];
    let mut shown = String::new();
    for (name, board) in &boards {
        let _ = writeln!(shown, "{name}");
        for finding in board.audit() {
            let _ = writeln!(
                shown,
                "  {:<24}{}; {}",
                finding.rule, finding.cost, finding.text
            );
            assert!(!finding.remedy.is_empty());
        }
    }
    insta::assert_snapshot!("audit_of_each_board", shown);
}

#[test]
fn what_was_not_copied_is_no_finding_and_neither_is_the_process_that_copied() {
    let bare = orin_nx().with("proc/self/status", "Name:\tcp\nCapEff:\t0000000000000000\n");
    let rules = bare.rules();
    for rule in [
        "psi",
        "cgroup_memory",
        "nvmap_access",
        "thermal_unreadable",
        "rights",
    ] {
        assert!(!rules.contains(rule), "{rule} in {rules:?}");
    }
    let said = Capabilities::of_copy(&bare.root).lines().join("\n");
    for word in [
        "CAP_SYS_RESOURCE",
        "smaps_rollup",
        "control group",
        "no trigger",
    ] {
        assert!(!said.contains(word), "{word}: {said}");
    }
    assert!(
        said.contains("therefore unknown: psi, vmstat, nvmap"),
        "{said}"
    );
    // A copied file stays unchanged: no trigger is written to it.
    let counted = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
    let copied = orin_nx().with("proc/pressure/memory", counted);
    assert!(
        Capabilities::of_copy(&copied.root)
            .lines()
            .iter()
            .any(|line| line.starts_with("psi: counted"))
    );
    assert_eq!(
        std::fs::read_to_string(copied.root.proc("pressure/memory")).unwrap(),
        counted
    );
}

#[test]
fn an_orin_nano_is_judged_by_its_own_figures_and_a_virtual_disk_does_not_rotate() {
    let nano = |mode: u32| {
        Machine::new()
            .with_capture("proc/meminfo", "meminfo/orin-nano-8g_r36.4.x_5.15.148.txt")
            .with(
                "proc/device-tree/compatible",
                "nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234\0",
            )
            .with(
                "etc/nv_tegra_release",
                "# R36 (release), REVISION: 4.4, GCID: 1\n",
            )
            .with(
                "etc/nvpmodel.conf",
                "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=7W >\n",
            )
            .with(
                "var/lib/nvpmodel/status",
                format!("pmode:{mode:04}\n").as_str(),
            )
    };
    assert!(
        !nano(0).rules().contains("power_mode"),
        "15W is the most that it has"
    );
    let low = nano(1);
    assert_eq!(low.found("power_mode").text, "power mode is 7W, not 15W");
    assert_eq!(low.found("power_mode").cost, Cost::Risk);
    assert_eq!(low.found("super_mode").cost, Cost::Speed(33));
    for (name, model, rotates) in [
        ("vda", "", false),
        ("sda", "QEMU HARDDISK", false),
        ("sda", "ST2000DM008", true),
    ] {
        let machine = Machine::new()
            .with_capture("proc/meminfo", "meminfo/orin-nano-8g_r36.4.x_5.15.148.txt")
            .with(&format!("sys/block/{name}/queue/rotational"), "1\n")
            .with(&format!("sys/block/{name}/device/model"), model);
        assert_eq!(
            machine.rules().contains("disk_kind"),
            rotates,
            "{name} {model}"
        );
    }
}
