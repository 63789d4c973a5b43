//! Settings of a worker's limits, sandbox, start and idle time.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use super::{
    Config, Confinement, Fault, FileAccess, IdleConfig, LeaseHolder, Resource, SyscallFilter,
    checker::{Checker, DAY, SECOND, SIZE_MAX},
    raw::{RawIdle, RawLimits, RawSandbox, RawWorker, Text},
};
use cotenant_units::Bytes;

pub(super) fn lease(checker: &mut Checker, raw: &RawWorker, at: &str) -> LeaseHolder {
    let words = [
        ("own", LeaseHolder::Own),
        ("supervisor", LeaseHolder::Supervisor),
    ];
    checker
        .one_of(&format!("{at}.lease"), &raw.lease, &words)
        .unwrap_or_default()
}

pub(super) fn idle(
    checker: &mut Checker,
    raw: &RawIdle,
    at: &str,
    has_variants: bool,
) -> IdleConfig {
    let key = format!("{at}.shrink_after");
    let idle = IdleConfig {
        shrink_after: checker.duration(&key, &raw.shrink_after, SECOND..=DAY),
        stop_after: checker.duration(&format!("{at}.stop_after"), &raw.stop_after, SECOND..=DAY),
    };
    if idle.shrink_after.is_some() && !has_variants {
        checker.fault(
            &key,
            "the worker has one size only",
            Some("write `memory.variants`"),
        );
    }
    if let (Some(shrink), Some(stop)) = (idle.shrink_after, idle.stop_after)
        && shrink >= stop
    {
        checker.fault(
            &key,
            "is not below `stop_after`",
            Some("lower it, or omit it"),
        );
    }
    idle
}

pub(super) fn confinement(checker: &mut Checker, raw: &RawWorker, at: &str) -> Confinement {
    let limits = format!("{at}.limits");
    let (user, group) = (
        checker.word(&format!("{at}.user"), &raw.user),
        checker.word(&format!("{at}.group"), &raw.group),
    );
    Confinement {
        user,
        group,
        resources: resources(checker, &raw.limits, &limits),
        memory: checker.size(
            &format!("{limits}.memory"),
            &raw.limits.memory,
            Bytes::from_mib(1)..=SIZE_MAX,
        ),
        ..sandbox(checker, &raw.sandbox, &format!("{at}.sandbox"))
    }
}

fn resources(checker: &mut Checker, raw: &RawLimits, at: &str) -> BTreeMap<Resource, Option<u64>> {
    let mut resources = BTreeMap::new();
    for (resource, text, least) in [
        (
            Resource::AddressSpace,
            &raw.address_space,
            Bytes::from_mib(1),
        ),
        (Resource::Core, &raw.core, Bytes::ZERO),
        (Resource::FileSize, &raw.file_size, Bytes::ZERO),
        (Resource::LockedMemory, &raw.memlock, Bytes::ZERO),
    ] {
        let key = format!("{at}.{}", resource.name());
        let limit = or_none(text, || {
            checker.size(&key, text, least..=SIZE_MAX).map(Bytes::get)
        });
        resources.extend(limit.map(|limit| (resource, limit)));
    }
    for (resource, text, least) in [
        (Resource::OpenFiles, &raw.open_files, 16),
        (Resource::Processes, &raw.processes, 1),
    ] {
        let key = format!("{at}.{}", resource.name());
        let limit = or_none(text, || checker.number(&key, text, least..=COUNT_MAX));
        resources.extend(limit.map(|limit| (resource, limit)));
    }
    resources
}

/// Reads `none` as no limit, and a faulty or missing value as absent.
fn or_none(text: &Text, read: impl FnOnce() -> Option<u64>) -> Option<Option<u64>> {
    if text.0.as_deref() == Some("none") {
        return Some(None);
    }
    read().map(Some)
}

fn sandbox(checker: &mut Checker, raw: &RawSandbox, at: &str) -> Confinement {
    let mut paths = |name: &str, list: &[String]| -> Vec<PathBuf> {
        list.iter()
            .enumerate()
            .filter_map(|(index, path)| {
                checker.directory(&format!("{at}.{name}[{index}]"), &Text(Some(path.clone())))
            })
            .collect()
    };
    let access = FileAccess {
        read: paths("read", &raw.read),
        write: paths("write", &raw.write),
    };
    let calls = [
        ("all", SyscallFilter::All),
        ("restricted", SyscallFilter::Restricted),
    ];
    Confinement {
        files: Some(access).filter(|access| *access != FileAccess::default()),
        syscalls: checker
            .one_of(&format!("{at}.syscalls"), &raw.syscalls, &calls)
            .unwrap_or_default(),
        required: checker
            .switch(&format!("{at}.required"), &raw.required)
            .unwrap_or(false),
        ..Confinement::default()
    }
}

/// Returns how long a request waits for a worker that is not running.
pub(super) fn wake_timeout(checker: &mut Checker, raw: &RawWorker, at: &str) -> Duration {
    checker
        .duration(
            &format!("{at}.wake_timeout"),
            &raw.wake_timeout,
            Duration::ZERO..=Duration::from_secs(600),
        )
        .unwrap_or(WAKE_TIMEOUT)
}

/// Returns the measured memory above which a worker is recycled, `None` without a bound, and whether it is recycled if
/// it leaks.
pub(super) fn recycle_above(
    checker: &mut Checker,
    text: &Text,
    at: &str,
    peak: Bytes,
) -> (Option<Bytes>, bool) {
    let key = format!("{at}.recycle_above");
    if text.0.as_deref() == Some("none") {
        return (None, false);
    }
    let Some(above) = checker.size(&key, text, Bytes::from_kib(4)..=SIZE_MAX) else {
        return (None, true);
    };
    if above < peak {
        checker.fault(
            &key,
            format!("{above} is below {peak}, the peak of the worker"),
            Some("raise it, or lower `memory.peak`"),
        );
    }
    (Some(above), true)
}

/// Reports unknown names and cycles in `after`.
pub(super) fn order_faults(config: &Config) -> Vec<Fault> {
    let mut faults = Vec::new();
    let known: Vec<&str> = config
        .workers
        .iter()
        .map(|worker| worker.name.as_str())
        .collect();
    let mut check = |path: String, own: &str, after: &[String]| {
        for (index, name) in after.iter().enumerate() {
            let problem = if name == own {
                "is the worker itself"
            } else if name == LLM && own == LLM || !(known.contains(&name.as_str()) || name == LLM)
            {
                "is not a worker of this file"
            } else {
                continue;
            };
            let hint = format!("known are {}", super::raw::list(&known));
            let message = format!("`{}` {problem}", name.escape_debug());
            faults.push(Fault::new(format!("{path}[{index}]"), message, Some(hint)));
        }
    };
    if let Some(llm) = &config.llm {
        check("llm.after".to_owned(), LLM, &llm.after);
    }
    for (index, worker) in config.workers.iter().enumerate() {
        check(
            format!("workers[{index}].after"),
            &worker.name,
            &worker.after,
        );
    }
    if faults.is_empty() {
        for (index, worker) in config.workers.iter().enumerate() {
            if let Some(round) = circle(config, &worker.name) {
                faults.push(Fault::new(
                    format!("workers[{index}].after"),
                    format!(
                        "cyclic order, each waits for the next: {}",
                        round.join(", ")
                    ),
                    Some("remove one of them from `after`".to_owned()),
                ));
                break;
            }
        }
    }
    faults
}

/// Returns workers that start before the LLM: those in `llm.after` and, transitively, those that they come after.
pub(super) fn before_llm(config: &Config) -> Vec<String> {
    let Some(llm) = &config.llm else {
        return Vec::new();
    };
    all_before(config, &llm.after)
}

fn all_before(config: &Config, names: &[String]) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut open: Vec<String> = names.to_vec();
    while let Some(name) = open.pop() {
        if !found.contains(&name) {
            open.extend_from_slice(after_of(config, &name));
            found.push(name);
        }
    }
    found
}

fn after_of<'config>(config: &'config Config, name: &str) -> &'config [String] {
    if name == LLM {
        return config.llm.as_ref().map_or(&[], |llm| &llm.after);
    }
    let worker = config.workers.iter().find(|worker| worker.name == name);
    worker.map_or(&[], |worker| &worker.after)
}

/// Returns a cycle from a worker back to itself, if there is one.
fn circle(config: &Config, name: &str) -> Option<Vec<String>> {
    all_before(config, after_of(config, name))
        .contains(&name.to_owned())
        .then(|| {
            let mut round: Vec<String> = all_before(config, after_of(config, name));
            round.retain(|other| {
                all_before(config, after_of(config, other))
                    .iter()
                    .any(|found| found == name)
            });
            round.sort();
            round.into_iter().map(|name| format!("`{name}`")).collect()
        })
}

/// Name of the LLM in `after`.
pub(super) const LLM: &str = "llm";

/// LiveKit stops waiting after 10 s between two bytes, then retries and adds load.
const WAKE_TIMEOUT: Duration = Duration::from_secs(8);

/// Far beyond the kernel's own limits on open files and processes.
const COUNT_MAX: u64 = 1 << 22;
