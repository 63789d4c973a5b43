//! Rules about releases, packages, kernel features and rights.

use super::facts::{Cost, Facts, Found, Rule, Version, note, text_of, warning};
use crate::{
    board::L4tRelease,
    capabilities::{CAP_SYS_RESOURCE, effective_capabilities},
    cgroup::{Cgroup, CgroupVersion},
    nvmap::Nvmap,
};
use cotenant_units::Bytes;

pub(super) const RULES: &[Rule] = &[
    ("l4t_known_fault", l4t_known_fault),
    ("l4t_large_buffers", l4t_large_buffers),
    ("l4t_package", l4t_package),
    ("jetpack_package", |facts| {
        misfit(facts, "JetPack", OTHER_JETPACK)
    }),
    ("kernel_release", |facts| {
        misfit(facts, "kernel", OTHER_KERNEL)
    }),
    ("cuda_release", |facts| misfit(facts, "CUDA", OTHER_LIBRARY)),
    ("tensorrt_release", |facts| {
        misfit(facts, "TensorRT", OTHER_LIBRARY)
    }),
    ("cudnn_release", |facts| {
        misfit(facts, "cuDNN", OTHER_LIBRARY)
    }),
    ("psi", psi),
    ("cgroup_memory", cgroup_memory),
    ("cgroup_controllers", cgroup_controllers),
    ("rights", rights),
    ("unit_sandbox", unit_sandbox),
    ("nvmap_access", nvmap_access),
    ("gpu_uncounted", gpu_uncounted),
    ("desktop", desktop),
    ("other_engines", other_engines),
    ("container_runtime", container_runtime),
    ("other_oom_policy", other_oom_policy),
];

/// Versions of one generation of L4T.
struct Release {
    major: u32,
    jetpack: &'static str,
    kernel: &'static str,
    cuda: &'static [&'static str],
    tensorrt: &'static [&'static str],
    cudnn: &'static [&'static str],
}

impl Release {
    fn of(l4t: L4tRelease) -> Option<&'static Self> {
        RELEASES.iter().find(|release| release.major == l4t.major)
    }
}

/// JetPack 4 to 7, from their release notes.
const RELEASES: [Release; 5] = [
    Release {
        major: 32,
        jetpack: "4",
        kernel: "4.9",
        cuda: &["10.2"],
        tensorrt: &["8.2", "8.0", "7.1"],
        cudnn: &["8."],
    },
    Release {
        major: 35,
        jetpack: "5",
        kernel: "5.10",
        cuda: &["11.4"],
        tensorrt: &["8.4", "8.5"],
        cudnn: &["8."],
    },
    Release {
        major: 36,
        jetpack: "6",
        kernel: "5.15",
        cuda: &["12."],
        tensorrt: &["8.6", "10."],
        cudnn: &["8.9", "9."],
    },
    Release {
        major: 38,
        jetpack: "7",
        kernel: "6.8",
        cuda: &["13."],
        tensorrt: &["10."],
        cudnn: &["9."],
    },
    Release {
        major: 39,
        jetpack: "7",
        kernel: "6.8",
        cuda: &["13."],
        tensorrt: &["10."],
        cudnn: &["9."],
    },
];

fn l4t_known_fault(facts: &Facts<'_>) -> Option<Found> {
    let l4t = facts.board.l4t?;
    l4t.warning()?;
    warning(
        format!(
            "L4T {l4t} refuses single GPU allocations of a few GiB with gigabytes free (NVIDIA bug 5602402)"
        ),
        // 4 GiB failed with 5.36 GiB free, 3 GiB succeeded: 2.36 GiB cannot be allocated in one piece.
        Cost::Memory(Bytes::from_mib(2416)),
        "upgrade to L4T 36.5 or newer; programs that allocate by tensor are not affected",
    )
}

fn l4t_large_buffers(facts: &Facts<'_>) -> Option<Found> {
    let l4t = facts.board.l4t?;
    (l4t.to_string() == "36.4.3").then_some(())?;
    note(
        "L4T 36.4.3: on one board buffers of 5 to 7 GiB were refused with 12 GiB free; the cause is not known"
            .to_owned(),
        Cost::Risk,
        "upgrade to L4T 36.5 or newer if a program that allocates its weights at once fails",
    )
}

fn l4t_package(facts: &Facts<'_>) -> Option<Found> {
    let l4t = facts.board.l4t?;
    let package = facts.packages.get("nvidia-l4t-core")?;
    let version = package.split('-').next().unwrap_or_default();
    (version != l4t.to_string()).then_some(())?;
    warning(
        format!("`/etc/nv_tegra_release` has L4T {l4t}, the package nvidia-l4t-core has {version}"),
        Cost::Risk,
        "finish the upgrade with `apt full-upgrade` and restart: drivers and libraries must be of one release",
    )
}

/// Returns the software of a Jetson, each component with the expected version for its L4T; empty elsewhere.
pub(super) fn versions(facts: &Facts<'_>) -> Vec<Version> {
    let Some(l4t) = facts.board.l4t else {
        return Vec::new();
    };
    let release = Release::of(l4t);
    let mut versions = vec![Version {
        name: "L4T",
        found: Some(l4t.to_string()),
        expected: release.map(|release| format!("JetPack {}", release.jetpack)),
        // A known fault of the release is a separate finding.
        belongs: release.is_some().then_some(true),
    }];
    let Some(release) = release else {
        return versions;
    };
    let kernel = facts.proc("sys/kernel/osrelease");
    versions.push(Version::judged(
        "kernel",
        kernel,
        &[release.kernel],
        |kernel, expected| {
            kernel
                .strip_prefix(expected)
                .is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
        },
    ));
    let jetpack = facts.packages.get("nvidia-jetpack").cloned();
    let starts = |version: &str, expected: &str| version.starts_with(expected);
    versions.push(Version::judged(
        "JetPack",
        jetpack,
        &[release.jetpack],
        starts,
    ));
    for (name, package, expected) in [
        ("CUDA", "cuda-cudart-", release.cuda),
        ("TensorRT", "libnvinfer", release.tensorrt),
        ("cuDNN", "libcudnn", release.cudnn),
    ] {
        let installed = facts
            .packages
            .iter()
            .filter(|(installed, _)| installed.starts_with(package));
        // Of several packages, the first that does not match, if any.
        let belongs = |version: &&String| expected.iter().any(|expected| starts(version, expected));
        let found = installed.map(|(_, version)| version).min_by_key(belongs);
        versions.push(Version::judged(name, found.cloned(), expected, starts));
    }
    // Without the list of packages, absence is not proven.
    let lists_packages = facts.root.var("lib/dpkg/status").is_file();
    versions
        .retain(|version| version.found.is_some() || (lists_packages && version.name != "kernel"));
    versions
}

impl Version {
    fn judged(
        name: &'static str,
        found: Option<String>,
        expected: &[&str],
        belongs: impl Fn(&str, &str) -> bool,
    ) -> Self {
        let belongs = found
            .as_ref()
            .map(|found| expected.iter().any(|expected| belongs(found, expected)));
        let expected = expected
            .iter()
            .map(|version| version.trim_end_matches('.'))
            .collect::<Vec<_>>()
            .join(" or ");
        Self {
            name,
            found,
            expected: Some(expected),
            belongs,
        }
    }
}

/// Reports the component of this name if its version does not match the board's L4T.
fn misfit(facts: &Facts<'_>, name: &str, remedy: &'static str) -> Option<Found> {
    let version = versions(facts)
        .into_iter()
        .find(|version| version.name == name && version.belongs == Some(false))?;
    warning(version.to_string(), Cost::Risk, remedy)
}

const OTHER_JETPACK: &str = "install the JetPack of this L4T, or flash the L4T of this JetPack";
const OTHER_KERNEL: &str = "start the kernel of the release; nvmap and nvgpu are built for it";
const OTHER_LIBRARY: &str = "install the version of this JetPack; another one may fail to open the driver or fall back to the CPU";

fn psi(facts: &Facts<'_>) -> Option<Found> {
    let readable = facts.proc("pressure/memory").is_some();
    (!readable && facts.meminfo.is_some()).then_some(())?;
    note(
        "the kernel reports no memory stalls (PSI)".to_owned(),
        Cost::Risk,
        "start the kernel with `psi=1` where it has CONFIG_PSI; until then refaults and watermarks are used",
    )
}

fn cgroup_memory(facts: &Facts<'_>) -> Option<Found> {
    if let Some(group) = Cgroup::own(facts.root)
        && group.version() == CgroupVersion::V2
    {
        return None;
    }
    facts.meminfo?;
    warning(
        "control groups of version 2 with the memory controller are not mounted".to_owned(),
        Cost::Risk,
        "start with `systemd.unified_cgroup_hierarchy=1`; without it the kernel limits no worker",
    )
}

/// Reports missing controllers: boards may boot with `cgroup_disable=memory`, and slices may not delegate a controller.
fn cgroup_controllers(facts: &Facts<'_>) -> Option<Found> {
    let listed = facts.sys("fs/cgroup/cgroup.controllers")?;
    let listed: Vec<&str> = listed.split_whitespace().collect();
    let missing: Vec<&str> = ["memory", "pids", "cpu"]
        .into_iter()
        .filter(|name| !listed.contains(name))
        .collect();
    (!missing.is_empty()).then_some(())?;
    warning(
        format!("control groups lack {}", missing.join(", ")),
        Cost::Risk,
        "remove `cgroup_disable=` from the kernel's command line; limits of workers need all three",
    )
}

fn rights(facts: &Facts<'_>) -> Option<Found> {
    let held = effective_capabilities(facts.root)?;
    let wanted = [
        (
            CAP_SYS_RESOURCE,
            "CAP_SYS_RESOURCE (stalls within 1 s, OOM scores)",
        ),
        (CAP_SYSLOG, "CAP_SYSLOG (why a worker was killed)"),
    ];
    let missing: Vec<&str> = wanted
        .iter()
        .filter(|(bit, _)| held & (1 << bit) == 0)
        .map(|(_, name)| *name)
        .collect();
    (!missing.is_empty()).then_some(())?;
    note(
        format!("as run here, without {}", missing.join(" and ")),
        Cost::Risk,
        "cotenant's unit grants both; they matter to the service, not to a check",
    )
}

const CAP_SYSLOG: u32 = 34;

/// Reports settings of the unit and its drop-ins that deprive the daemon of rights.
fn unit_sandbox(facts: &Facts<'_>) -> Option<Found> {
    let files = facts.unit_files();
    let mut set = std::collections::BTreeMap::new();
    for text in files.iter().filter_map(|file| text_of(file)) {
        for (key, value) in text.lines().filter_map(|line| line.trim().split_once('=')) {
            set.insert(key.trim().to_owned(), value.trim().to_owned());
        }
    }
    let harmful: Vec<String> = SANDBOX
        .iter()
        .filter_map(|(key, harmless, effect)| {
            let value = set.get(*key)?;
            (!harmless.contains(&value.as_str())).then(|| format!("{key}={value} {effect}"))
        })
        .collect();
    (!harmful.is_empty()).then_some(())?;
    warning(
        format!("the unit of cotenant has {}", harmful.join("; ")),
        Cost::Risk,
        "remove these lines (`systemctl edit cotenant`), then `systemctl restart cotenant`",
    )
}

/// Values that switch a setting off.
const OFF: &[&str] = &["no", "false", ""];

/// Setting, its harmless values, and the effect of others.
const SANDBOX: [(&str, &[&str], &str); 7] = [
    ("PrivateDevices", OFF, "hides /dev/nvmap and sound"),
    ("PrivateUsers", OFF, "hides the identity of clients"),
    (
        "ProtectKernelTunables",
        OFF,
        "keeps the GPU's page pool from being emptied",
    ),
    ("ProtectControlGroups", OFF, "leaves workers without limits"),
    (
        "ProtectProc",
        &["default", ""],
        "hides the processes that are measured",
    ),
    (
        "MemoryMax",
        &["infinity", ""],
        "has the kernel kill the LLM at that size",
    ),
    (
        "MemoryHigh",
        &["infinity", ""],
        "slows the LLM down at that size",
    ),
];

fn gpu_uncounted(facts: &Facts<'_>) -> Option<Found> {
    let l4t = facts.board.l4t.filter(|l4t| !l4t.uses_nvmap())?;
    note(
        format!(
            "GPU memory of L4T {l4t} is not in nvmap and not in /proc: that of workers counts as unaccounted"
        ),
        Cost::Risk,
        "give each GPU worker its whole size as `memory.peak`; `nvidia-smi --query-compute-apps` shows it",
    )
}

fn nvmap_access(facts: &Facts<'_>) -> Option<Found> {
    let l4t = facts.board.l4t.filter(|l4t| l4t.uses_nvmap())?;
    Nvmap::find(facts.root).is_none().then_some(())?;
    note(
        format!(
            "GPU memory of L4T {l4t} is in nvmap, whose counters this user cannot read; it is estimated"
        ),
        Cost::Risk,
        "run as root, or mount debugfs for the supervisor (`mount -t debugfs none /sys/kernel/debug`)",
    )
}

fn desktop(facts: &Facts<'_>) -> Option<Found> {
    let (names, bytes) = facts.running(&[
        "Xorg",
        "Xwayland",
        "gdm3",
        "gdm-x-session",
        "gnome-shell",
        "lightdm",
        "sddm",
        "plasmashell",
        "weston",
    ])?;
    warning(
        format!("a desktop is running: {names}"),
        Cost::Memory(bytes),
        "boot without it: `systemctl set-default multi-user.target` (530 to 800 MiB with what it draws)",
    )
}

fn other_engines(facts: &Facts<'_>) -> Option<Found> {
    let (names, bytes) = facts.running(&[
        "ollama",
        "llama-server",
        "llama-cli",
        "tritonserver",
        "vllm",
        "mlc_llm",
        "text-generation",
    ])?;
    warning(
        format!("another engine is running: {names}; its GPU memory is not in this figure"),
        Cost::Memory(bytes),
        "stop it, or start it under `cotenant hold` so that its memory is counted",
    )
}

fn container_runtime(facts: &Facts<'_>) -> Option<Found> {
    let (names, bytes) = facts.running(&["dockerd", "containerd", "k3s", "kubelet"])?;
    note(
        format!("a container runtime is running: {names}"),
        Cost::Memory(bytes),
        "disable it if nothing here runs in containers: `systemctl disable --now docker containerd`",
    )
}

fn other_oom_policy(facts: &Facts<'_>) -> Option<Found> {
    let (names, bytes) = facts.running(&["earlyoom", "systemd-oomd", "nohang", "oomd", "lmkd"])?;
    warning(
        format!(
            "{names} also kills processes under pressure, by its own floor, which may be above cotenant's"
        ),
        Cost::Memory(bytes),
        "exempt cotenant's unit (`ManagedOOMPreference=omit`, `earlyoom --avoid`), set its floor below \
         `pressure.critical_below`, or disable it",
    )
}
