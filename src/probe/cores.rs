//! Physical cores available to this process.

use std::{collections::BTreeSet, fs, num::NonZeroUsize, thread::available_parallelism};

use nix::{
    sched::{CpuSet, sched_getaffinity},
    unistd::Pid,
};

use super::ProbeRoot;

/// Returns the number of physical cores among the processors that this process may use (`taskset`, `cpuset`), limited
/// by the CPU quota of its control group.
pub fn usable_cores(root: &ProbeRoot) -> usize {
    let quota = available_parallelism().map_or(1, NonZeroUsize::get);
    let own = sched_getaffinity(Pid::from_raw(0));
    let own = own.map(|own| {
        (0..CpuSet::count())
            .filter(|processor| own.is_set(*processor) == Ok(true))
            .collect()
    });
    physical_cores(
        root,
        &own.unwrap_or_else(|_| (0..quota).collect::<Vec<_>>()),
    )
    .clamp(1, quota)
}

/// Returns the number of cores of these logical processors: processors of one core list the same siblings.
fn physical_cores(root: &ProbeRoot, processors: &[usize]) -> usize {
    let core_of = |processor: &usize| {
        let path = root.sys(format!(
            "devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        ));
        // Without a list, as on most boards with ARM cores, each processor is a core.
        fs::read_to_string(path).map_or_else(
            |_| processor.to_string(),
            |siblings| siblings.trim().to_owned(),
        )
    };
    processors
        .iter()
        .map(core_of)
        .collect::<BTreeSet<_>>()
        .len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_that_share_a_core_count_once() {
        let folder = tempfile::tempdir().unwrap();
        let root = ProbeRoot::at(folder.path());
        // Four cores of two processors each, numbered as on Intel CPUs; a fifth core without a sibling; and one whose
        // siblings the kernel does not report.
        for (processor, siblings) in [
            (0, "0,4"),
            (1, "1,5"),
            (2, "2,6"),
            (3, "3,7"),
            (4, "0,4"),
            (5, "1,5"),
            (6, "2,6"),
            (7, "3,7"),
            (8, "8"),
        ] {
            let topology = root.sys(format!("devices/system/cpu/cpu{processor}/topology"));
            fs::create_dir_all(&topology).unwrap();
            fs::write(
                topology.join("thread_siblings_list"),
                format!("{siblings}\n"),
            )
            .unwrap();
        }
        for (processors, cores) in [
            (vec![0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 6),
            (vec![0, 1, 2, 3, 4, 5, 6, 7], 4),
            // Processors allowed in a container.
            (vec![0, 4], 1),
            (vec![0, 1], 2),
            (vec![9, 10], 2),
        ] {
            assert_eq!(physical_cores(&root, &processors), cores, "{processors:?}");
        }
    }

    #[test]
    fn no_more_cores_are_used_than_this_process_may() {
        let cores = usable_cores(&ProbeRoot::default());
        assert!((1..=available_parallelism().unwrap().get()).contains(&cores));
    }
}
