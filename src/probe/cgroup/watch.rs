//! Limits of the control groups around this process, read with each sample.

use std::path::Path;

use super::{Cgroup, CgroupVersion, Mount, V1_UNLIMITED, value_of};
use crate::{
    ProbeRoot,
    source::{Source, number},
};
use cotenant_policy::pressure::GroupRoom;
use cotenant_units::Bytes;

/// Limits of the control groups around this process. Their files are kept open, since each sample reads them. A limit
/// may be set or changed at any time, and this process may be moved to another group.
#[derive(Debug)]
pub(crate) struct GroupWatch {
    root: ProbeRoot,
    membership: Option<Source>,
    /// Membership for which the groups were opened.
    member_of: Vec<u8>,
    groups: Vec<WatchedGroup>,
    /// Index of the group with the tightest limit at the last reading.
    tightest: Option<usize>,
}

#[derive(Debug)]
struct WatchedGroup {
    name: String,
    limits: Vec<Source>,
    used: Option<Source>,
    stat: Option<Source>,
    version: CgroupVersion,
    /// Whether its statistics include limits of invisible ancestors.
    is_top: bool,
}

impl GroupWatch {
    /// Opens the groups around this process; none if no memory controller is mounted.
    pub(crate) fn open(root: &ProbeRoot) -> Self {
        let membership = Source::open_optional(root.proc("self/cgroup"));
        let mut watch = Self {
            root: root.clone(),
            membership,
            member_of: Vec::new(),
            groups: Vec::new(),
            tightest: None,
        };
        watch.follow();
        watch
    }

    /// Returns the tightest limit, and the least memory left in a group; `None` if none has a limit.
    pub(crate) fn read(&mut self) -> Option<GroupRoom> {
        self.follow();
        self.tightest = None;
        let mut room: Option<GroupRoom> = None;
        for (index, group) in self.groups.iter_mut().enumerate() {
            let Some(own) = group.read() else { continue };
            if room.is_none_or(|room| own.limit < room.limit) {
                self.tightest = Some(index);
            }
            room = Some(room.map_or(own, |room| GroupRoom {
                limit: room.limit.min(own.limit),
                left: room.left.min(own.left),
            }));
        }
        room
    }

    /// Returns the path of the group with the tightest limit at the last reading.
    pub(crate) fn tightest(&self) -> Option<&str> {
        self.groups
            .get(self.tightest?)
            .map(|group| group.name.as_str())
    }

    /// Opens the groups again if the membership of this process has changed.
    fn follow(&mut self) {
        let Some(Ok(now)) = self.membership.as_mut().map(Source::read) else {
            return;
        };
        if now == self.member_of {
            return;
        }
        self.member_of = now.to_owned();
        let group = Cgroup::own(&self.root);
        self.groups = group.as_ref().map_or_else(Vec::new, |group| {
            let around = group.around();
            let top = around.last().copied();
            around
                .iter()
                .map(|folder| WatchedGroup::open(&group.mount, folder, top == Some(folder)))
                .collect()
        });
    }
}

impl WatchedGroup {
    fn open(mount: &Mount, folder: &Path, is_top: bool) -> Self {
        let (limits, used): (&[&str], _) = match mount.version {
            CgroupVersion::V1 => (&["memory.limit_in_bytes"], "memory.usage_in_bytes"),
            // Above `memory.high`, every allocation waits for reclaim, so memory beyond it is unusable too.
            CgroupVersion::V2 => (&["memory.max", "memory.high"], "memory.current"),
        };
        Self {
            name: mount.name_of(folder),
            limits: limits
                .iter()
                .filter_map(|file| Source::open_optional(folder.join(file)))
                .collect(),
            used: Source::open_optional(folder.join(used)),
            stat: Source::open_optional(folder.join("memory.stat")),
            version: mount.version,
            is_top,
        }
    }

    fn read(&mut self) -> Option<GroupRoom> {
        let bytes = |source: &mut Source| number(source.read().ok()?.trim_ascii()).map(Bytes::new);
        // `max` does not parse as a number.
        let own = self.limits.iter_mut().filter_map(bytes).min();
        let shows_more = self.is_top && self.version == CgroupVersion::V1;
        if own.is_none() && !shows_more {
            return None;
        }
        let stat = self
            .stat
            .as_mut()
            .and_then(|stat| stat.read().ok())
            .unwrap_or_default();
        let around = value_of(stat, b"hierarchical_memory_limit")
            .map(Bytes::new)
            .filter(|_| shows_more);
        let limit = own
            .into_iter()
            .chain(around)
            .filter(|limit| *limit < V1_UNLIMITED)
            .min()?;
        // Reclaimed before the group kills, as in the machine's `MemAvailable`; includes descendants.
        let cache: [&[u8]; 2] = match self.version {
            CgroupVersion::V1 => [b"total_inactive_file", b"total_active_file"],
            CgroupVersion::V2 => [b"inactive_file", b"active_file"],
        };
        let cache: Bytes = cache
            .iter()
            .filter_map(|key| value_of(stat, key))
            .map(Bytes::new)
            .sum();
        let used = self.used.as_mut().and_then(bytes).unwrap_or_default();
        Some(GroupRoom {
            limit,
            left: limit.saturating_sub(used.saturating_sub(cache)),
        })
    }
}
