//! Control groups, version 1 and 2; GPU memory of a Jetson does not count in them.
//!
//! GPU memory of a Jetson is not in it.

use std::path::{Path, PathBuf};

use super::{
    ProbeRoot,
    source::{Source, lines, number, read_number, read_optional, words},
};
use crate::{policy::pressure::GroupRoom, units::Bytes};

/// Which interface a group has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CgroupVersion {
    /// `memory.usage_in_bytes` and its kin.
    V1,
    /// `memory.current` and its kin.
    V2,
}

/// A group with a memory controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    version: CgroupVersion,
    mount: PathBuf,
    folder: PathBuf,
}

/// What a group uses and may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CgroupMemory {
    /// All that is charged to it, page cache too; the root group of version 2 has none.
    pub used: Option<Bytes>,
    /// What it may use; `None` without a limit.
    pub limit: Option<Bytes>,
    /// Processes of it that the kernel killed for want of memory.
    pub oom_kills: Option<u64>,
    /// How often it ran against its limit.
    pub limit_hits: Option<u64>,
}

impl Cgroup {
    /// The group of this process; `None` when no memory controller is mounted, as in many containers.
    #[must_use]
    pub fn own(root: &ProbeRoot) -> Option<Self> {
        Self::at(root, &root.proc("self/cgroup"))
    }

    /// The group of a process.
    #[must_use]
    pub fn of(root: &ProbeRoot, pid: u32) -> Option<Self> {
        Self::at(root, &root.process(pid).join("cgroup"))
    }

    /// Its interface.
    #[must_use]
    pub fn version(&self) -> CgroupVersion {
        self.version
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What it uses and may use now.
    #[must_use]
    pub fn memory(&self) -> CgroupMemory {
        read_memory(self.version, &self.folder)
    }

    /// The lowest limit of the group and of those around it; `None` without any.
    #[must_use]
    pub fn tightest_limit(&self) -> Option<Bytes> {
        self.around().filter_map(|folder| read_memory(self.version, folder).limit).min()
    }

    /// The group itself and those around it, inside out.
    fn around(&self) -> impl Iterator<Item = &Path> {
        self.folder.ancestors().take_while(|folder| folder.starts_with(&self.mount))
    }

    fn at(root: &ProbeRoot, membership: &Path) -> Option<Self> {
        let membership = Membership::read(membership)?;
        let mounts = [
            (CgroupVersion::V2, "fs/cgroup", membership.v2.as_deref()),
            (CgroupVersion::V2, "fs/cgroup/unified", membership.v2.as_deref()),
            (CgroupVersion::V1, "fs/cgroup/memory", membership.v1_memory.as_deref()),
        ];
        mounts.into_iter().find_map(|(version, mount, path)| {
            let mount = root.sys(mount);
            let folder = mount.join(path?.trim_start_matches('/'));
            // In a container the path may be the host's while the mount shows the container's group at its top.
            [folder, mount.clone()].into_iter().find(|folder| has_controller(version, folder)).map(|folder| Self {
                version,
                mount,
                folder,
            })
        })
    }
}

/// Path of the group that charges the memory of a process (`self` or its id), also where its folder cannot be seen: a
/// container may show the paths of the host.
#[must_use]
pub fn path_of(root: &ProbeRoot, process: &str) -> Option<String> {
    let membership = Membership::read(&root.proc(process).join("cgroup"))?;
    membership.v1_memory.or(membership.v2)
}

/// The room in the control groups around this process, with their files kept open: a sample reads them, and a limit may
/// be set or raised at any time.
#[derive(Debug)]
pub(super) struct GroupWatch {
    groups: Vec<WatchedGroup>,
}

#[derive(Debug)]
struct WatchedGroup {
    limit: Source,
    used: Source,
    stat: Source,
    /// Keys of page cache in `stat`, with what is below the group.
    cache: [&'static [u8]; 2],
}

impl GroupWatch {
    /// Opens the groups around this process; none where no memory controller is mounted.
    pub(super) fn open(root: &ProbeRoot) -> Self {
        let Some(group) = Cgroup::own(root) else { return Self { groups: Vec::new() } };
        let (limit, used, cache): (_, _, [&[u8]; 2]) = match group.version {
            CgroupVersion::V1 => {
                ("memory.limit_in_bytes", "memory.usage_in_bytes", [b"total_inactive_file", b"total_active_file"])
            }
            CgroupVersion::V2 => ("memory.max", "memory.current", [b"inactive_file", b"active_file"]),
        };
        let open = |folder: &Path| {
            Some(WatchedGroup {
                limit: Source::open_optional(folder.join(limit))?,
                used: Source::open_optional(folder.join(used))?,
                stat: Source::open_optional(folder.join("memory.stat"))?,
                cache,
            })
        };
        Self { groups: group.around().filter_map(open).collect() }
    }

    /// The group that has the least left now; `None` where none has a limit.
    pub(super) fn read(&mut self) -> Option<GroupRoom> {
        self.groups.iter_mut().filter_map(WatchedGroup::read).min_by_key(|room| room.left)
    }
}

impl WatchedGroup {
    fn read(&mut self) -> Option<GroupRoom> {
        let bytes = |source: &mut Source| number(source.read().ok()?.trim_ascii()).map(Bytes::new);
        // `max` is no number.
        let limit = bytes(&mut self.limit).filter(|limit| *limit < V1_UNLIMITED)?;
        let used = bytes(&mut self.used)?;
        // Reclaimed before the group kills, as `MemAvailable` counts it for the machine.
        let stat = self.stat.read().ok()?;
        let cache: Bytes = self.cache.iter().filter_map(|key| value_of(stat, key)).map(Bytes::new).sum();
        Some(GroupRoom { limit, left: limit.saturating_sub(used.saturating_sub(cache)) })
    }
}

/// `/proc/<pid>/cgroup`: the group in each hierarchy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Membership {
    v1_memory: Option<String>,
    v2: Option<String>,
}

impl Membership {
    fn read(path: &Path) -> Option<Self> {
        read_optional(path).map(|text| Self::parse(&text))
    }

    fn parse(text: &[u8]) -> Self {
        let mut membership = Self::default();
        for (_, line) in lines(text) {
            let mut fields = line.splitn(3, |b| *b == b':');
            let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
                continue;
            };
            let path = || {
                let path = String::from_utf8_lossy(path).into_owned();
                (!path.split('/').any(|part| part == "..")).then_some(path)
            };
            if controllers.is_empty() {
                membership.v2 = path();
            } else if controllers.split(|b| *b == b',').any(|name| name == b"memory") {
                membership.v1_memory = path();
            }
        }
        membership
    }
}

/// Whether the memory controller shows itself in a folder. The root group of version 2 has `memory.stat` alone.
fn has_controller(version: CgroupVersion, folder: &Path) -> bool {
    let file = match version {
        CgroupVersion::V1 => "memory.usage_in_bytes",
        CgroupVersion::V2 => "memory.stat",
    };
    folder.join(file).is_file()
}

fn read_memory(version: CgroupVersion, folder: &Path) -> CgroupMemory {
    let bytes = |file: &str| read_number(&folder.join(file)).map(Bytes::new);
    let keyed = |file: &str, key: &[u8]| value_of(&read_optional(&folder.join(file))?, key);
    match version {
        // Without a limit, version 2 says `max`, which is no number.
        CgroupVersion::V2 => CgroupMemory {
            used: bytes("memory.current"),
            limit: bytes("memory.max"),
            oom_kills: keyed("memory.events", b"oom_kill"),
            limit_hits: keyed("memory.events", b"max"),
        },
        CgroupVersion::V1 => CgroupMemory {
            used: bytes("memory.usage_in_bytes"),
            limit: bytes("memory.limit_in_bytes").filter(|limit| *limit < V1_UNLIMITED),
            oom_kills: keyed("memory.oom_control", b"oom_kill"),
            limit_hits: read_number(&folder.join("memory.failcnt")),
        },
    }
}

/// The number behind a key.
fn value_of(text: &[u8], key: &[u8]) -> Option<u64> {
    lines(text).find_map(|(_, line)| {
        let mut words = words(line);
        (words.next()? == key).then(|| words.next().and_then(number)).flatten()
    })
}

/// Version 1 writes "no limit" as 2^63 rounded down to a page; no machine has 2^60 bytes.
const V1_UNLIMITED: Bytes = Bytes::new(1 << 60);

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    /// A root with these files below `sys/fs/cgroup`, and this process in `membership`.
    fn tree(membership: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, ProbeRoot) {
        let folder = tempfile::tempdir().unwrap();
        let root = ProbeRoot::at(folder.path());
        let files = files.iter().map(|(path, text)| (root.sys("fs/cgroup").join(path), *text));
        for (path, text) in files.chain([(root.proc("self/cgroup"), membership)]) {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        (folder, root)
    }

    #[test]
    fn a_group_of_version_2_is_bounded_by_those_around_it() {
        let (_folder, root) = tree(
            "0::/system.slice/cotenant.service\n",
            &[
                ("system.slice/memory.max", "4194304000\n"),
                ("system.slice/cotenant.service/memory.stat", "anon 1\n"),
                ("system.slice/cotenant.service/memory.current", "1048576\n"),
                ("system.slice/cotenant.service/memory.max", "max\n"),
                ("system.slice/cotenant.service/memory.events", "low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\n"),
            ],
        );
        let group = Cgroup::own(&root).unwrap();
        assert_eq!(group.version(), CgroupVersion::V2);
        let memory = group.memory();
        assert_eq!((memory.used, memory.limit), (Some(Bytes::from_mib(1)), None));
        assert_eq!((memory.oom_kills, memory.limit_hits), (Some(2), Some(7)));
        assert_eq!(group.tightest_limit(), Some(Bytes::new(4_194_304_000)));
    }

    #[test]
    fn a_group_of_version_1_is_found_beside_a_unified_one_without_memory() {
        let (_folder, root) = tree(
            "4:cpu,memory:/a/b\n0::/a\n",
            &[
                ("unified/a/cgroup.procs", ""),
                ("memory/a/memory.limit_in_bytes", "268435456\n"),
                ("memory/a/memory.usage_in_bytes", "2\n"),
                ("memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
                ("memory/a/b/memory.usage_in_bytes", "1024\n"),
                ("memory/a/b/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"),
                ("memory/a/b/memory.failcnt", "9\n"),
            ],
        );
        let group = Cgroup::own(&root).unwrap();
        assert_eq!(group.version(), CgroupVersion::V1);
        let memory = group.memory();
        assert_eq!((memory.used, memory.limit), (Some(Bytes::new(1024)), None));
        assert_eq!((memory.oom_kills, memory.limit_hits), (Some(5), Some(9)));
        assert_eq!(group.tightest_limit(), Some(Bytes::from_mib(256)));
    }

    #[test]
    fn in_a_container_the_mount_itself_is_the_group() {
        let (_folder, root) = tree("0::/docker/0123\n", &[("memory.stat", ""), ("memory.max", "1073741824\n")]);
        assert_eq!(Cgroup::own(&root).unwrap().tightest_limit(), Some(Bytes::from_gib(1)));
    }

    #[test]
    fn the_group_with_the_least_left_is_read_again_and_its_page_cache_can_be_dropped() {
        let (_folder, root) = tree(
            "0::/board.slice/cotenant.service/supervisor\n",
            &[
                ("memory.stat", "anon 1\n"),
                ("board.slice/memory.max", "440401920\n"),
                ("board.slice/memory.current", "209715200\n"),
                ("board.slice/memory.stat", "anon 1\nfile 9\ninactive_file 41943040\nactive_file 10485760\n"),
                ("board.slice/cotenant.service/memory.max", "max\n"),
                ("board.slice/cotenant.service/memory.current", "1048576\n"),
                ("board.slice/cotenant.service/memory.stat", "anon 1\n"),
                ("board.slice/cotenant.service/supervisor/memory.max", "max\n"),
                ("board.slice/cotenant.service/supervisor/memory.current", "1048576\n"),
                ("board.slice/cotenant.service/supervisor/memory.stat", "anon 1\n"),
            ],
        );
        let mut watch = GroupWatch::open(&root);
        let room = |limit, left| Some(GroupRoom { limit: Bytes::from_mib(limit), left: Bytes::from_mib(left) });
        assert_eq!(watch.read(), room(420, 270));
        let write = |file: &str, text: &str| fs::write(root.sys("fs/cgroup/board.slice").join(file), text).unwrap();
        write("memory.current", "460000000\n");
        write("memory.stat", "anon 1\n");
        assert_eq!(watch.read(), room(420, 0), "more than its limit, which was lowered");
        write("cotenant.service/memory.max", "1048576\n");
        write("memory.max", "max\n");
        assert_eq!(watch.read(), room(1, 0), "a limit that was set later counts");
        write("cotenant.service/memory.max", "max\n");
        assert_eq!(watch.read(), None);
    }

    #[test]
    fn a_group_of_version_1_has_room_and_one_without_a_limit_has_none() {
        let (_folder, root) = tree(
            "4:memory:/a\n",
            &[
                ("memory/a/memory.limit_in_bytes", "268435456\n"),
                ("memory/a/memory.usage_in_bytes", "104857600\n"),
                ("memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 1048576\ntotal_active_file 1048576\n"),
                ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
                ("memory/memory.usage_in_bytes", "104857600\n"),
                ("memory/memory.stat", ""),
            ],
        );
        let left = GroupWatch::open(&root).read().map(|room| room.left);
        assert_eq!(left, Some(Bytes::from_mib(158)));
        let (_folder, root) = tree("0::/a\n", &[("a/cgroup.procs", "")]);
        assert_eq!(GroupWatch::open(&root).read(), None);
    }

    #[test]
    fn without_a_controller_or_with_a_path_that_climbs_there_is_no_group() {
        let (_folder, root) = tree("0::/a\n", &[("a/cgroup.procs", "")]);
        assert_eq!(Cgroup::own(&root), None);
        let (_folder, root) = tree("0::/../../etc\n", &[("memory.stat", "")]);
        assert_eq!(Cgroup::own(&root), None);
    }

    proptest! {
        #[test]
        fn parsing_returns_for_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = (Membership::parse(&bytes), value_of(&bytes, b"oom_kill"));
        }
    }
}
