//! Host: processor, system, limits of this process, largest memory users.
//!
//! Read once, for `cotenant check`; too expensive for a sample.

use std::path::Path;

use procfs::process::{FDTarget, LimitValue};

use cotenant_units::{Bytes, page};

/// Summary of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// Processor and its online cores.
    pub processor: String,
    /// Distribution.
    pub system: String,
    /// Kernel.
    pub kernel: String,
    /// Limit on memory that this process may lock, in bytes; `None` if unlimited or unreadable.
    pub lock_limit: Option<Bytes>,
}

/// Process and its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Its id.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// Its resident set.
    pub resident: Bytes,
}

impl Host {
    /// Reads the summary.
    pub fn read() -> Self {
        let processor = sysinfo::System::new().map_or_else(
            |_| "unknown processor".to_owned(),
            |mut system| {
                system.refresh_cpu_list(sysinfo::CpuRefreshKind::nothing());
                let brand = system.cpus().first().map_or("", sysinfo::Cpu::brand).trim();
                let brand = if brand.is_empty() { "processor" } else { brand };
                format!("{} × {brand}", system.cpus().len())
            },
        );
        Self {
            processor,
            system: sysinfo::System::long_os_version()
                .unwrap_or_else(|_| "unknown system".to_owned()),
            kernel: sysinfo::System::kernel_version()
                .unwrap_or_else(|_| "unknown kernel".to_owned()),
            lock_limit: lock_limit(),
        }
    }
}

fn lock_limit() -> Option<Bytes> {
    let limits = procfs::process::Process::myself().ok()?.limits().ok()?;
    match limits.max_locked_memory.soft_limit {
        LimitValue::Unlimited => None,
        LimitValue::Value(bytes) => Some(Bytes::new(bytes)),
    }
}

/// Returns the `count` processes with the largest resident sets, largest first, except this one.
pub fn largest_processes(count: usize) -> Vec<Neighbour> {
    let Ok(mut system) = sysinfo::System::new() else {
        return Vec::new();
    };
    system.refresh_processes_specifics(
        sysinfo::ProcessesToUpdate::All,
        true,
        sysinfo::ProcessRefreshKind::nothing()
            .with_memory()
            .without_tasks(),
    );
    let own = std::process::id();
    let mut found: Vec<Neighbour> = system
        .processes()
        .values()
        .map(|process| Neighbour {
            pid: process.pid().as_u32(),
            name: process.name().to_string_lossy().into_owned(),
            resident: Bytes::new(process.memory()),
        })
        .filter(|neighbour| neighbour.pid != own && neighbour.resident > Bytes::ZERO)
        .collect();
    found.sort_by(|a, b| b.resident.cmp(&a.resident).then(a.pid.cmp(&b.pid)));
    found.truncate(count);
    found
}

/// Returns processes that have `device` open, such as `/dev/nvmap`: on a Jetson these hold GPU memory, which no other
/// process list shows. Processes whose files are not visible to this user are omitted.
pub fn holders_of(device: &Path) -> Vec<Neighbour> {
    let Ok(processes) = procfs::process::all_processes() else {
        return Vec::new();
    };
    processes
        .filter_map(Result::ok)
        .filter_map(|process| {
            let holds = process
                .fd()
                .ok()?
                .filter_map(Result::ok)
                .any(|fd| match fd.target {
                    FDTarget::Path(path) => path == device,
                    _ => false,
                });
            let stat = holds.then(|| process.stat().ok())??;
            Some(Neighbour {
                pid: u32::try_from(stat.pid).ok()?,
                resident: page().saturating_mul(stat.rss),
                name: stat.comm,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_this_process_has_open_names_it_as_holder() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let holders = holders_of(file.path());
        assert!(
            holders
                .iter()
                .any(|holder| holder.pid == std::process::id()),
            "{holders:?}"
        );
        assert!(holders_of(Path::new("/nowhere")).is_empty());
    }

    #[test]
    fn the_largest_process_comes_first_and_this_one_is_left_out() {
        let found = largest_processes(5);
        assert!(found.is_sorted_by(|a, b| a.resident >= b.resident));
        assert!(
            found
                .iter()
                .all(|neighbour| neighbour.pid != std::process::id())
        );
    }

    #[test]
    fn the_host_has_a_processor_and_a_kernel() {
        let host = Host::read();
        assert!(!host.processor.starts_with("0 ×"), "{host:?}");
        assert_ne!(host.kernel, "unknown kernel");
    }
}
