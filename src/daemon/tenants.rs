//! Memory of tenants: the processes that count for each holder of a lease.
//!
//! ```text
//!   lease of a process        ──► the process and its descendants
//!   lease of a control group  ──► the processes of the group and of the groups below it
//! ```
//!
//! A process counts for one holder only. One that holds a lease counts for that lease, with its descendants: not for its
//! parent's, and not for that of the control group they are all in. Every other process of a control group with a lease
//! counts for the group, even if the lease of a process outside of it covers its ancestors.

use std::collections::{BTreeMap, BTreeSet};

use nix::{errno::Errno, sys::signal::kill, unistd::Pid};

use cotenant_policy::lease::{LeaseKind, LeaseView};
use cotenant_probe::{
    ProbeRoot,
    cgroup::Hierarchy,
    nvmap::Nvmap,
    processes::{self, ProcessTable},
};
use cotenant_units::Bytes;

/// Processes of the machine, and those of control groups with leases.
#[derive(Debug, Default)]
pub(super) struct Processes {
    table: ProcessTable,
    groups: BTreeMap<String, Group>,
}

#[derive(Debug)]
enum Group {
    Gone,
    /// Its processes cannot be listed.
    Hidden,
    Listed(BTreeSet<u32>),
}

impl Processes {
    /// Lists all processes, and those of these groups; `None` if they cannot be listed.
    pub(super) fn read(root: &ProbeRoot, groups: BTreeSet<String>) -> Option<Self> {
        let hierarchy = (!groups.is_empty())
            .then(|| Hierarchy::open(root))
            .flatten();
        let read = |group: String| {
            let found = match &hierarchy {
                Some(hierarchy) if !hierarchy.has(&group) => Group::Gone,
                Some(hierarchy) => hierarchy
                    .members(&group)
                    .map_or(Group::Hidden, Group::Listed),
                None => Group::Hidden,
            };
            (group, found)
        };
        Some(Self {
            groups: groups.into_iter().map(read).collect(),
            // Listed last, so that it has the parents of all members.
            table: ProcessTable::read(&root.proc).ok()?,
        })
    }

    /// Returns whether the control group that holds a lease is gone.
    pub(super) fn has_lost(&self, lease: &LeaseView) -> bool {
        let group = lease
            .owner
            .cgroup
            .as_ref()
            .and_then(|group| self.groups.get(group));
        matches!(group, Some(Group::Gone))
    }

    /// Returns the processes of a control group, if they are listed.
    fn of_group(&self, group: &str) -> Option<&BTreeSet<u32>> {
        match self.groups.get(group)? {
            Group::Listed(members) => Some(members),
            Group::Gone | Group::Hidden => None,
        }
    }
}

/// Processes and control groups that hold tenants' leases, each with its holder, including ended leases whose memory is
/// still in use.
///
/// A process that only waits for a lease is excluded: it is not the holder with the same name, and if it is a holder's
/// child, its memory counts for that holder.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Claims<'a> {
    processes: BTreeMap<u32, &'a str>,
    groups: BTreeMap<&'a str, &'a str>,
}

impl<'a> Claims<'a> {
    pub(super) fn of(leases: &'a [LeaseView]) -> Self {
        let mut claims = Self::default();
        let held = |lease: &&LeaseView| lease.kind == LeaseKind::Tenant && !lease.waits();
        for lease in leases.iter().filter(held) {
            if let Some(group) = &lease.owner.cgroup {
                claims.groups.insert(group, lease.holder());
            } else if let Some(pid) = lease.owner.owner_pid {
                claims.processes.insert(pid, lease.holder());
            }
        }
        claims
    }

    pub(super) fn groups(&self) -> BTreeSet<String> {
        self.groups.keys().map(|&group| group.to_owned()).collect()
    }

    /// Returns the processes that count for a holder among `found`.
    fn among(&self, found: BTreeSet<u32>, processes: &Processes, holder: &str) -> BTreeSet<u32> {
        let mut in_group = BTreeMap::new();
        // A group precedes those inside it, which thus count for themselves.
        for (group, holder) in &self.groups {
            for pid in processes.of_group(group).into_iter().flatten() {
                in_group.insert(*pid, *holder);
            }
        }
        let is_its = |pid: &u32| {
            let group = in_group.get(pid);
            let of_process = processes.table.lineage(*pid).find_map(|ancestor| {
                let holder = self.processes.get(&ancestor);
                holder.filter(|_| group.is_none() || in_group.get(&ancestor) == group)
            });
            of_process.or(group) == Some(&holder)
        };
        found.into_iter().filter(is_its).collect()
    }
}

/// Returns the memory of a tenant: zero if its processes have ended, `None` if none is known or one cannot be read.
pub(super) fn tenant_memory(
    root: &ProbeRoot,
    processes: &Processes,
    claims: &Claims<'_>,
    holder: &str,
) -> Option<Bytes> {
    let table = &processes.table;
    let group = claims.groups.iter().find(|(_, of)| **of == holder);
    let found = match group {
        Some((group, _)) => processes.of_group(group)?.clone(),
        None => {
            let pids = claims.processes.iter().filter(|(_, of)| **of == holder);
            let pids: Vec<u32> = pids.map(|(pid, _)| *pid).collect();
            let found: BTreeSet<u32> = pids.iter().flat_map(|pid| table.tree(*pid)).collect();
            if found.is_empty() {
                let gone = !pids.is_empty() && pids.iter().all(|pid| is_gone(*pid));
                return gone.then_some(Bytes::ZERO);
            }
            found
        }
    };
    let mut counted = claims.among(found, processes, holder);
    // A tenant that started the supervisor is not charged for it, nor for its workers.
    for ours in table.tree(std::process::id()) {
        counted.remove(&ours);
    }
    if counted.is_empty() && group.is_none() {
        return None;
    }
    let gpu = Nvmap::find(root).and_then(|nvmap| nvmap.clients()?.of_all(counted.iter().copied()));
    Some(
        processes::sum(&root.proc, counted)
            .used
            .saturating_add(gpu.unwrap_or_default()),
    )
}

/// Returns whether the process does not exist. A process missing in `/proc` may only be hidden from us (`hidepid`).
fn is_gone(pid: u32) -> bool {
    i32::try_from(pid)
        .is_ok_and(|pid| pid > 0 && kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        process::{Command, Stdio},
    };

    use super::*;
    use cotenant_policy::lease::{Class, LeaseId, LeaseMemory, LeaseOwner, LeaseState};
    use cotenant_units::Timestamp;

    fn lease(holder: &str, kind: LeaseKind, state: LeaseState, pid: Option<u32>) -> LeaseView {
        LeaseView {
            id: LeaseId(1),
            tenant: holder.to_owned(),
            holder: holder.to_owned(),
            kind,
            class: Class::Batch,
            state,
            generation: 1,
            memory: LeaseMemory {
                held: Bytes::ZERO,
                min: Bytes::ZERO,
                max: Bytes::ZERO,
                used: None,
                used_at: None,
            },
            target: None,
            granted_at: Timestamp::START,
            expires_at: None,
            owner: LeaseOwner {
                owner_uid: 1000,
                owner_pid: pid,
                cgroup: None,
            },
        }
    }

    fn of_process(holder: &str, pid: u32) -> LeaseView {
        lease(holder, LeaseKind::Tenant, LeaseState::Granted, Some(pid))
    }

    fn of_group(holder: &str, group: &str) -> LeaseView {
        let mut lease = lease(holder, LeaseKind::Tenant, LeaseState::Granted, None);
        lease.owner.cgroup = Some(group.to_owned());
        lease
    }

    /// Machine with these processes, each with its parent and KiB of memory.
    fn machine(processes: &[(u32, u32, u32)]) -> (tempfile::TempDir, ProbeRoot) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("proc")).unwrap();
        for (pid, parent, kib) in processes {
            let own = folder.path().join(format!("proc/{pid}"));
            fs::create_dir_all(&own).unwrap();
            let stat = format!(
                "{pid} (tenant) S {parent} {pid} 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {pid} 0 0"
            );
            fs::write(own.join("stat"), stat).unwrap();
            let rollup =
                format!("00400000-7fff rollup\nRss: {kib} kB\nPss: {kib} kB\nSwapPss: 0 kB\n");
            fs::write(own.join("smaps_rollup"), rollup).unwrap();
        }
        let root = ProbeRoot::at(folder.path());
        (folder, root)
    }

    fn measured(root: &ProbeRoot, leases: &[LeaseView], holder: &str) -> Option<u64> {
        let claims = Claims::of(leases);
        let processes = Processes::read(root, claims.groups()).unwrap();
        tenant_memory(root, &processes, &claims, holder).map(|used| used.get() >> 10)
    }

    /// Otherwise a holder would be charged for any process that requests a lease by its name, and a holder's child with
    /// a pending lease of its own would be charged to none.
    #[test]
    fn who_waits_for_a_lease_is_not_measured_for_it() {
        let tenant = |holder, state, pid| lease(holder, LeaseKind::Tenant, state, Some(pid));
        let leases = [
            lease("asr", LeaseKind::Worker, LeaseState::Granted, None),
            tenant("vision", LeaseState::Granted, 10),
            tenant("vision", LeaseState::Revoking, 10),
            lease("hidden", LeaseKind::Tenant, LeaseState::Granted, None),
            tenant("gone", LeaseState::Gone, 12),
            tenant("vision", LeaseState::Requested, 11),
            tenant("x", LeaseState::Requested, 13),
        ];
        let expected = BTreeMap::from([(10, "vision"), (12, "gone")]);
        assert_eq!(Claims::of(&leases).processes, expected);
    }

    #[test]
    fn a_process_that_has_ended_uses_nothing() {
        let root = ProbeRoot::default();
        let mut child = Command::new("sleep")
            .arg("1000")
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id();
        let measure = |pid| measured(&root, &[of_process("a", pid)], "a");
        // Our own children count for us.
        assert_eq!(measure(pid), None);
        assert_eq!(measured(&root, &[], "a"), None);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(measure(pid), Some(0));
        // An existing process of another user.
        assert!(measure(1).is_some_and(|used| used > 0), "the first process");
        // An existing process missing in this list is hidden, not gone.
        let leases = [of_process("a", 1)];
        let claims = Claims::of(&leases);
        assert_eq!(
            tenant_memory(&root, &Processes::default(), &claims, "a"),
            None
        );
    }

    #[test]
    fn a_child_that_holds_a_lease_answers_for_itself_and_not_its_parent() {
        // A tenant (100) with a child (101), and with another child that is a tenant (102) with its own child (103).
        let (_folder, root) =
            machine(&[(100, 1, 10), (101, 100, 20), (102, 100, 40), (103, 102, 80)]);
        let two = [of_process("a", 100), of_process("b", 102)];
        assert_eq!(measured(&root, &two, "a"), Some(30));
        assert_eq!(measured(&root, &two, "b"), Some(120));
        let one = [of_process("a", 100), of_process("a", 102)];
        assert_eq!(
            measured(&root, &one, "a"),
            Some(150),
            "one tenant with two leases"
        );
        // GPU memory of a Jetson for each, and for others.
        let clients = root.sys("kernel/debug/nvmap/iovmm/clients");
        fs::create_dir_all(clients.parent().unwrap()).unwrap();
        fs::write(
            clients,
            "CLIENT PROCESS PID SIZE\nuser t 101 5K\nuser t 103 300K\nuser x 7 9000K\ntotal 9305K\n",
        )
        .unwrap();
        assert_eq!(measured(&root, &two, "a"), Some(35));
        assert_eq!(measured(&root, &two, "b"), Some(420));
    }

    #[test]
    fn a_process_of_a_group_counts_for_the_group_unless_a_process_of_the_group_holds_a_lease() {
        // A manager (100) outside of the group started its first process (101). That has a child (102) with a lease,
        // which has a child (103). Another process (104) of the group has left its parent (101) behind in an inner group.
        let (_folder, root) = machine(&[
            (100, 1, 1),
            (101, 100, 2),
            (102, 101, 4),
            (103, 102, 8),
            (104, 1, 16),
            (105, 1, 32),
        ]);
        let group = |path: &str, members: &str| {
            let folder = root.sys("fs/cgroup").join(path);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("cgroup.procs"), members).unwrap();
        };
        group("", "100\n105\n");
        fs::write(root.sys("fs/cgroup/memory.stat"), "anon 1\n").unwrap();
        group("camera.service", "101\n102\n");
        group("camera.service/inner", "103\n104\n");
        let leases = [
            of_process("manager", 100),
            of_group("camera", "/camera.service"),
            of_process("detector", 102),
        ];
        for (holder, kib) in [("manager", 1), ("camera", 18), ("detector", 12)] {
            assert_eq!(measured(&root, &leases, holder), Some(kib), "{holder}");
        }
        // Memory of the inner group that is still in use after its lease counts once.
        let inner = [
            of_group("camera", "/camera.service"),
            of_group("inner", "/camera.service/inner"),
        ];
        for (holder, kib) in [("camera", 6), ("inner", 24)] {
            assert_eq!(measured(&root, &inner, holder), Some(kib), "{holder}");
        }
        // GPU memory of its processes counts too.
        let clients = root.sys("kernel/debug/nvmap/iovmm/clients");
        fs::create_dir_all(clients.parent().unwrap()).unwrap();
        let text = "CLIENT PROCESS PID SIZE\nuser t 104 64K\nuser x 105 9K\ntotal 73K\n";
        fs::write(clients, text).unwrap();
        assert_eq!(measured(&root, &leases, "camera"), Some(82));
    }

    #[test]
    fn an_empty_group_uses_nothing_a_hidden_one_is_unknown_and_one_without_a_folder_is_gone() {
        let (_folder, root) = machine(&[]);
        let group = root.sys("fs/cgroup/memory/box");
        fs::create_dir_all(&group).unwrap();
        let leases = [of_group("box", "/box")];
        let lost = || {
            let processes = Processes::read(&root, BTreeSet::from(["/box".to_owned()])).unwrap();
            processes.has_lost(&leases[0])
        };
        assert_eq!(
            measured(&root, &leases, "box"),
            None,
            "no memory controller"
        );
        assert!(!lost());
        fs::write(root.sys("fs/cgroup/memory/memory.usage_in_bytes"), "9\n").unwrap();
        assert_eq!(measured(&root, &leases, "box"), Some(0));
        // A process of another PID namespace.
        fs::write(group.join("cgroup.procs"), "0\n").unwrap();
        assert_eq!(measured(&root, &leases, "box"), None);
        assert!(!lost());
        fs::remove_dir_all(&group).unwrap();
        assert_eq!(measured(&root, &leases, "box"), None);
        assert!(lost());
    }
}
