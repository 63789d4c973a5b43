//! Boards made of files, and what the rules find there.

use std::{collections::BTreeSet, fs, path::Path};

use super::*;
use crate::units::Bytes;

struct Machine(tempfile::TempDir);

impl Machine {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn with(self, path: &str, content: impl AsRef<[u8]>) -> Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }

    fn with_capture(self, path: &str, capture: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/jetson");
        self.with(path, fs::read(folder.join(capture)).unwrap())
    }

    fn process(self, pid: u32, name: &str, pages: u64) -> Self {
        self.with(&format!("proc/{pid}/comm"), format!("{name}\n"))
            .with(&format!("proc/{pid}/statm"), format!("9999999 {pages} 1 1 0 1 0\n"))
    }

    fn audit(&self) -> Vec<Finding> {
        audit(&ProbeRoot::at(self.0.path()))
    }

    fn rules(&self) -> BTreeSet<&'static str> {
        self.audit().iter().map(|finding| finding.rule).collect()
    }

    fn found(&self, rule: &str) -> Finding {
        let found = self.audit().into_iter().find(|finding| finding.rule == rule);
        found.unwrap_or_else(|| panic!("no {rule} in {:?}", self.rules()))
    }
}

fn orin_nx() -> Machine {
    Machine::new()
        .with_capture("proc/meminfo", "meminfo/orin-nx-16g_r36.4_idle.RECONSTRUCTED.txt")
        .with_capture(
            "proc/device-tree/model",
            "device-tree/orin-nx-16g.model.RECONSTRUCTED.bin",
        )
        .with_capture(
            "proc/device-tree/compatible",
            "device-tree/orin-nx-16g.compatible.RECONSTRUCTED.bin",
        )
        .with_capture("etc/nv_tegra_release", "nv_tegra_release/r36.4.7.txt")
        .with_capture("proc/swaps", "zram/proc_swaps_orin-nx-16g.RECONSTRUCTED.txt")
        .with("proc/sys/kernel/osrelease", "5.15.148-tegra\n")
}

#[test]
fn at_least_twenty_rules_have_names_of_their_own() {
    let names: BTreeSet<_> = rules().map(|(name, _)| *name).collect();
    assert_eq!(names.len(), rule_count());
    assert!(rule_count() >= 35, "{}", rule_count());
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
        .with("sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq", "1420800\n")
        .with("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "1984000\n")
        .with("sys/class/devfreq/17000000.gpu/max_freq", "612000000\n")
        .with(
            "sys/class/devfreq/17000000.gpu/available_frequencies",
            "306000000 612000000 918000000\n",
        )
        .with("sys/kernel/debug/bpmp/debug/clk/emc/rate", "2133000000\n")
        .with("sys/kernel/debug/bpmp/debug/clk/emc/max_rate", "3199000000\n")
        .with("sys/class/thermal/thermal_zone0/temp", "97000\n")
        .with("sys/class/thermal/thermal_zone0/type", "tj-thermal\n")
        .with("sys/class/thermal/thermal_zone0/trip_point_0_temp", "99000\n")
        .with("sys/class/thermal/thermal_zone1/temp", "")
        .with("sys/block/mmcblk0/queue/rotational", "0\n")
        .with("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
        .with("proc/sys/vm/overcommit_memory", "2\n")
        .with("proc/sys/vm/nr_hugepages", "100\n")
        .with("proc/sys/vm/min_free_kbytes", "999999\n")
        .with("proc/sys/vm/swappiness", "150\n");
    assert_eq!(board.found("l4t_known_fault").severity, Severity::Warning);
    assert_eq!(board.found("desktop").cost, Cost::Memory(Bytes::from_mib(300)));
    assert_eq!(board.found("zram_store").cost, Cost::Memory(Bytes::new(1_048_576_000)));
    assert_eq!(board.found("cores_offline").cost, Cost::Speed(50));
    assert_eq!(board.found("gpu_clock").cost, Cost::Speed(33));
    assert_eq!(board.found("memory_clock").cost, Cost::Speed(33));
    assert_eq!(board.found("power_mode").text, "power mode is 15W, not MAXN");
    assert!(board.found("thermal").text.starts_with("tj-thermal has 97 °C, 2 °C"));
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
    let thor = Machine::new()
        .with("etc/nv_tegra_release", "# R39 (release), REVISION: 2.0, GCID: 1\n")
        .with("proc/sys/kernel/osrelease", "6.8.12-tegra\n");
    assert!(!thor.rules().contains("kernel_release") && !thor.rules().contains("nvmap_access"));
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
