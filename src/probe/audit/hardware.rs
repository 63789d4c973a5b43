//! Rules about clocks, power, temperature and disks.

use super::facts::{Cost, Facts, Found, Rule, note, text_of, warning};

pub(super) const RULES: &[Rule] = &[
    ("power_mode", power_mode),
    ("cores_offline", cores_offline),
    ("cpu_clock", cpu_clock),
    ("cpu_governor", cpu_governor),
    ("gpu_clock", gpu_clock),
    ("memory_clock", memory_clock),
    ("thermal", thermal),
    ("thermal_unreadable", thermal_unreadable),
    ("super_mode", super_mode),
    ("disk_kind", disk_kind),
    ("disk_link", disk_link),
    ("disk_scheduler", disk_scheduler),
];

/// Returns by how many percent `now` is below `most`; `None` if by less than 2 percent.
fn below(now: u64, most: u64) -> Option<u64> {
    let percent = most.checked_sub(now)?.checked_mul(100)?.checked_div(most)?;
    (percent >= 2).then_some(percent)
}

fn power_mode(facts: &Facts<'_>) -> Option<Found> {
    let status = text_of(&facts.root.var("lib/nvpmodel/status"))?;
    let mode: u64 = status
        .strip_prefix("pmode:")?
        .split_whitespace()
        .next()?
        .parse()
        .ok()?;
    let modes = text_of(&facts.root.etc("nvpmodel.conf"))?;
    let names: Vec<(u64, &str)> = modes
        .lines()
        .filter_map(|line| {
            let line = line
                .trim()
                .strip_prefix("< POWER_MODEL ID=")?
                .strip_suffix('>')?;
            let (id, name) = line.split_once("NAME=")?;
            Some((id.trim().parse().ok()?, name.trim()))
        })
        .collect();
    let (_, name) = names.iter().find(|(id, _)| *id == mode)?;
    // An Orin Nano without super mode has no MAXN: its largest mode is 15W.
    let watts = |name: &str| name.split('W').next()?.parse::<u64>().ok();
    let rank = |name: &str| {
        if name.starts_with("MAXN") {
            u64::MAX
        } else {
            watts(name).unwrap_or(0)
        }
    };
    let (_, most) = names.iter().max_by_key(|(_, name)| rank(name))?;
    (rank(name) < rank(most)).then_some(())?;
    // 15W on an Orin NX: 4 of 8 cores, GPU at 612 of 918 MHz. For other modes and modules, the clocks show the cost.
    let is_measured = Module::of(facts) == Some(Module::OrinNx) && *name == "15W";
    warning(
        format!(
            "power mode is {name}, not {}",
            if most.starts_with("MAXN") {
                "MAXN"
            } else {
                *most
            }
        ),
        if is_measured {
            Cost::Speed(33)
        } else {
            Cost::Risk
        },
        "`nvpmodel -q --verbose` lists the modes, `nvpmodel -m ID` sets one; where power and cooling allow",
    )
}

/// Module with known figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Module {
    OrinNx,
    OrinNano,
}

impl Module {
    fn of(facts: &Facts<'_>) -> Option<Self> {
        let is = |names: &[&str]| {
            let known = &facts.board.compatible;
            known
                .iter()
                .any(|known| names.iter().any(|name| known.contains(name)))
        };
        if is(&["p3767-0000", "p3767-0001", "p3767-0002"]) {
            Some(Self::OrinNx)
        } else if is(&["p3767-0003", "p3767-0004", "p3767-0005"]) {
            Some(Self::OrinNano)
        } else {
            None
        }
    }
}

fn cores_offline(facts: &Facts<'_>) -> Option<Found> {
    let count = |path: &str| facts.sys(path).and_then(|list| count_of(&list));
    let (online, present) = (
        count("devices/system/cpu/online")?,
        count("devices/system/cpu/present")?,
    );
    let percent = below(online, present)?;
    warning(
        format!("{online} of {present} cores are online"),
        Cost::Speed(percent),
        "choose a power mode with all cores: `nvpmodel -q --verbose` lists them",
    )
}

/// Counts the numbers in a kernel list: 6 in `0-3,6,8`.
fn count_of(list: &str) -> Option<u64> {
    list.split(',').try_fold(0u64, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        sum.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

fn cpu_clock(facts: &Facts<'_>) -> Option<Found> {
    let of = |name: &str| facts.sys_number(&format!("devices/system/cpu/cpu0/cpufreq/{name}"));
    let (limit, most) = (of("scaling_max_freq")?, of("cpuinfo_max_freq")?);
    let percent = below(limit, most)?;
    warning(
        format!("the CPU may run at {} of {} MHz", limit / 1000, most / 1000),
        Cost::Speed(percent),
        "choose the power mode with the highest limit (`nvpmodel -q --verbose`), then `jetson_clocks`",
    )
}

fn cpu_governor(facts: &Facts<'_>) -> Option<Found> {
    let governor = facts.sys("devices/system/cpu/cpu0/cpufreq/scaling_governor")?;
    (governor == "powersave" || governor == "conservative").then_some(())?;
    // `powersave` of intel_pstate scales with load.
    let driver = facts
        .sys("devices/system/cpu/cpu0/cpufreq/scaling_driver")
        .unwrap_or_default();
    (!driver.contains("pstate")).then_some(())?;
    warning(
        format!("the CPU governor is `{governor}`"),
        Cost::Speed(50),
        "`echo schedutil > /sys/devices/system/cpu/cpufreq/policy0/scaling_governor`",
    )
}

fn gpu_clock(facts: &Facts<'_>) -> Option<Found> {
    let names = facts.sys_names("class/devfreq");
    let gpu = names
        .iter()
        .find(|name| name.ends_with(".gpu") || name.ends_with(".ga10b"))?;
    let limit = facts.sys_number(&format!("class/devfreq/{gpu}/max_freq"))?;
    let steps = facts.sys(&format!("class/devfreq/{gpu}/available_frequencies"))?;
    let most = steps
        .split_whitespace()
        .filter_map(|step| step.parse::<u64>().ok())
        .max()?;
    let percent = below(limit, most)?;
    warning(
        format!(
            "the GPU may run at {} of {} MHz",
            limit / 1_000_000,
            most / 1_000_000
        ),
        Cost::Speed(percent),
        "choose the power mode with the highest limit (`nvpmodel -q --verbose`), then `jetson_clocks`",
    )
}

fn memory_clock(facts: &Facts<'_>) -> Option<Found> {
    let of = |name: &str| facts.sys_number(&format!("kernel/debug/bpmp/debug/clk/emc/{name}"));
    let (rate, most) = (of("rate")?, of("max_rate")?);
    let percent = below(rate, most)?;
    // A token reads all weights once, so the memory clock bounds it.
    warning(
        format!(
            "memory runs at {} of {} MHz",
            rate / 1_000_000,
            most / 1_000_000
        ),
        Cost::Speed(percent),
        "`jetson_clocks` fixes the clock of memory (EMC) at its maximum",
    )
}

fn thermal(facts: &Facts<'_>) -> Option<Found> {
    let mut hottest: Option<(i64, String, i64)> = None;
    for zone in facts
        .sys_names("class/thermal")
        .iter()
        .filter(|name| name.starts_with("thermal_zone"))
    {
        let of = |name: &str| facts.sys(&format!("class/thermal/{zone}/{name}"));
        // A disabled zone reads as empty.
        let Some(now) = of("temp").and_then(|text| text.parse::<i64>().ok()) else {
            continue;
        };
        let trips = (0..TRIPS_MAX)
            .filter_map(|trip| of(&format!("trip_point_{trip}_temp"))?.parse::<i64>().ok());
        let Some(trip) = trips.filter(|trip| *trip > SENSIBLE_TRIP).min() else {
            continue;
        };
        let left = trip.saturating_sub(now);
        if hottest.as_ref().is_none_or(|(least, ..)| left < *least) {
            hottest = Some((left, of("type").unwrap_or_else(|| zone.clone()), now));
        }
    }
    let (left, name, now) = hottest?;
    (left < MARGIN).then_some(())?;
    warning(
        format!(
            "{name} has {} °C, {} °C below its first trip point",
            now / 1000,
            left / 1000
        ),
        Cost::Speed(if left <= 0 { 30 } else { 0 }),
        "improve cooling, or choose a lower power mode: clocks fall at the trip point",
    )
}

fn thermal_unreadable(facts: &Facts<'_>) -> Option<Found> {
    facts.board.is_jetson().then_some(())?;
    let zones = facts.sys_names("class/thermal");
    let zones: Vec<_> = zones
        .iter()
        .filter(|name| name.starts_with("thermal_zone"))
        .collect();
    let readable = |zone: &&&String| {
        let text = facts.sys(&format!("class/thermal/{zone}/temp"));
        text.is_some_and(|text| text.parse::<i64>().is_ok())
    };
    (!zones.is_empty() && !zones.iter().any(|zone| readable(&zone))).then_some(())?;
    note(
        format!(
            "none of {} thermal zones can be read: throttling shows as slow answers only",
            zones.len()
        ),
        Cost::Risk,
        "a zone reads empty while it is disabled: look at `/sys/class/thermal/thermal_zone*/mode`",
    )
}

const TRIPS_MAX: u32 = 12;
/// Lower bound for throttling trip points, in thousandths of a degree: those of fans begin at 35 °C.
const SENSIBLE_TRIP: i64 = 69_000;
/// Margin below a trip point, in thousandths of a degree. Our choice.
const MARGIN: i64 = 5000;

fn super_mode(facts: &Facts<'_>) -> Option<Found> {
    let board = &facts.board;
    let l4t = board.l4t.filter(|l4t| l4t.major == 36 && l4t.minor >= 4)?;
    (!board.is_super()).then_some(())?;
    // From NVIDIA's data sheets: the GPU of an Orin NX; the memory of an Orin Nano, which bounds an answer.
    let (cost, remedy) = match Module::of(facts)? {
        Module::OrinNx => (
            21,
            "flash with the `-super` configuration: GPU 1173 instead of 918 MHz",
        ),
        Module::OrinNano => (
            33,
            "flash with the `-super` configuration: memory 102 instead of 68 GB/s, GPU 1020 instead of 625 MHz",
        ),
    };
    note(
        format!("L4T {l4t} has a super mode for this module, and the device tree is not of it"),
        Cost::Speed(cost),
        remedy,
    )
}

fn disks(facts: &Facts<'_>) -> Vec<String> {
    let is_disk = |name: &String| {
        ["nvme", "sd", "mmcblk", "vd"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
    };
    let is_part = |name: &String| name.contains("boot") || name.contains("rpmb");
    let names = facts.sys_names("block").into_iter();
    names
        .filter(|name| is_disk(name) && !is_part(name))
        .collect()
}

fn disk_kind(facts: &Facts<'_>) -> Option<Found> {
    let disks = disks(facts);
    (!disks.is_empty() && !disks.iter().any(|name| name.starts_with("nvme"))).then_some(())?;
    // A virtual machine's disk usually identifies itself, regardless of the device behind it.
    let is_virtual = |name: &str| {
        let model = facts
            .sys(&format!("block/{name}/device/model"))
            .unwrap_or_default()
            .to_lowercase();
        name.starts_with("vd")
            || ["qemu", "virtual", "vbox"]
                .iter()
                .any(|maker| model.contains(maker))
    };
    let rotates = |name: &&String| {
        facts
            .sys(&format!("block/{name}/queue/rotational"))
            .as_deref()
            == Some("1")
            && !is_virtual(name)
    };
    if let Some(card) = disks.iter().find(|name| name.starts_with("mmcblk")) {
        return warning(
            format!(
                "{card} is a card or eMMC, and there is no NVMe: some 0.1 to 0.3 GiB/s instead of 2"
            ),
            Cost::Streaming(85),
            "put the model on NVMe; streamed layers are read for each token",
        );
    }
    let disk = disks.iter().find(rotates)?;
    warning(
        format!("{disk} rotates, and there is no NVMe"),
        Cost::Streaming(90),
        "put the model on NVMe; streamed layers are read for each token",
    )
}

fn disk_link(facts: &Facts<'_>) -> Option<Found> {
    let disks = disks(facts);
    let disk = disks.iter().find(|name| name.starts_with("nvme"))?;
    let of = |name: &str| facts.sys(&format!("block/{disk}/device/device/{name}"));
    let rate = |name: &str| {
        let tenths = of(name)?.split_whitespace().next()?.replace('.', "");
        tenths.parse::<u64>().ok()
    };
    let width = |name: &str| of(name)?.parse::<u64>().ok();
    let now = rate("current_link_speed")?.checked_mul(width("current_link_width")?)?;
    let most = rate("max_link_speed")?.checked_mul(width("max_link_width")?)?;
    let percent = below(now, most)?;
    warning(
        format!(
            "{disk} has a link of {} × {}, of {} × {}",
            of("current_link_speed")?,
            of("current_link_width")?,
            of("max_link_speed")?,
            of("max_link_width")?
        ),
        Cost::Streaming(percent),
        "use a slot or HAT with more lanes, or reseat the disk",
    )
}

fn disk_scheduler(facts: &Facts<'_>) -> Option<Found> {
    let disks = disks(facts);
    let disk = disks.iter().find(|name| name.starts_with("nvme"))?;
    let scheduler = facts.sys(&format!("block/{disk}/queue/scheduler"))?;
    scheduler.contains("[bfq]").then_some(())?;
    note(
        format!("{disk} uses the scheduler bfq, which costs large reads on NVMe"),
        Cost::Streaming(10),
        "`echo none > /sys/block/nvme0n1/queue/scheduler`",
    )
}
