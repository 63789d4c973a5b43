//! Control groups, versions 1 and 2; they do not count the GPU memory of a Jetson.
//!
//! A group is located through the mounts visible to this process: a container may mount its own group, or any folder of
//! the hierarchy, anywhere. A limit applies to all groups below, so the tightest one counts. Above the topmost visible
//! group, version 1 still shows the lowest limit (`hierarchical_memory_limit`); version 2 shows nothing.

pub(super) mod watch;

use std::{
    collections::{BTreeSet, VecDeque},
    fs,
    path::{Path, PathBuf},
    process,
};

use super::{
    ProbeRoot,
    source::{lines, number, read_number, read_optional, words},
};
use cotenant_units::Bytes;

/// Version of a group's interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CgroupVersion {
    /// Files such as `memory.usage_in_bytes`.
    V1,
    /// Files such as `memory.current`.
    V2,
}

/// A group with a memory controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    mount: Mount,
    folder: PathBuf,
}

/// Usage and limit of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CgroupMemory {
    /// All memory charged to it, page cache included; `None` for the root group of version 2.
    pub used: Option<Bytes>,
    /// Its limit; `None` without one.
    pub limit: Option<Bytes>,
    /// Processes in it killed by the kernel because memory was exhausted.
    pub oom_kills: Option<u64>,
    /// Number of times it reached its limit.
    pub limit_hits: Option<u64>,
}

impl Cgroup {
    /// Returns the group charged for the memory of this process: its own, or the closest ancestor with the memory
    /// controller. `None` if no memory controller is mounted, as in many containers.
    pub fn own(root: &ProbeRoot) -> Option<Self> {
        let Place { mount, folder } = Place::of(root, &root.proc("self/cgroup"), process::id())?;
        let folder = mount
            .around(&folder)
            .find(|folder| has_controller(mount.version, folder))?
            .to_owned();
        Some(Self { mount, folder })
    }

    /// Returns the group of a process, if it has the memory controller itself.
    pub fn of(root: &ProbeRoot, pid: u32) -> Option<Self> {
        let Place { mount, folder } = Place::of(root, &root.process(pid).join("cgroup"), pid)?;
        has_controller(mount.version, &folder).then_some(Self { mount, folder })
    }

    /// Returns the version of its interface.
    pub fn version(&self) -> CgroupVersion {
        self.mount.version
    }

    /// Returns its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Reads its current usage and limit.
    pub fn memory(&self) -> CgroupMemory {
        read_memory(self.mount.version, &self.folder)
    }

    /// Returns the group and the ancestors whose limits apply to it, innermost first.
    fn around(&self) -> Vec<&Path> {
        let mut around = Vec::new();
        for folder in self.mount.around(&self.folder) {
            // Before Linux 5.11, version 1 could be configured without hierarchical accounting.
            let counts_alone = self.mount.version == CgroupVersion::V1
                && !around.is_empty()
                && read_number(&folder.join("memory.use_hierarchy")) == Some(0);
            if counts_alone {
                break;
            }
            around.push(folder);
        }
        around
    }
}

/// The hierarchy with the memory controller. Its groups are named by their path below its mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy(Mount);

impl Hierarchy {
    /// Returns the visible hierarchy; `None` without a memory controller.
    pub fn open(root: &ProbeRoot) -> Option<Self> {
        let mut mounts = Mount::all(root).into_iter();
        let found = mounts.find(|mount| has_controller(mount.version, &mount.point))?;
        Some(Self(found))
    }

    /// Returns its mount point.
    pub fn mount_point(&self) -> &Path {
        &self.0.point
    }

    /// Returns whether there is a group of this path, such as `/system.slice/camera.service`.
    pub fn has(&self, group: &str) -> bool {
        self.folder(group).is_some_and(|folder| folder.is_dir())
    }

    /// Returns the path of the group of a process, if it is visible.
    pub fn group_of(&self, root: &ProbeRoot, pid: u32) -> Option<String> {
        let place = Place::of(root, &root.process(pid).join("cgroup"), pid)?;
        self.path_of(&place.folder)
    }

    /// Returns the processes of a group and of all groups below it; `None` if one is in another PID namespace, so that
    /// its id is unknown. A group that does not exist has none.
    pub fn members(&self, group: &str) -> Option<BTreeSet<u32>> {
        let mut members = BTreeSet::new();
        for folder in folders(self.folder(group)?) {
            // A threaded group of version 2 refuses to list its processes; the group above it lists them.
            let listed = read_optional(&folder.join("cgroup.procs")).unwrap_or_default();
            for (_, line) in lines(&listed).filter(|(_, line)| !line.is_empty()) {
                let pid = number(line).and_then(|pid| u32::try_from(pid).ok())?;
                members.insert((pid != 0).then_some(pid)?);
            }
        }
        Some(members)
    }

    /// Returns the paths of the groups for which `is_it` holds, in order.
    pub fn find(&self, is_it: impl Fn(&Path) -> bool) -> BTreeSet<String> {
        let paths = folders(self.0.point.clone()).filter_map(|folder| self.path_of(&folder));
        paths.filter(|path| is_it(Path::new(path))).collect()
    }

    fn folder(&self, group: &str) -> Option<PathBuf> {
        let below = group.strip_prefix('/').filter(|below| !climbs(below))?;
        Some(self.0.point.join(below))
    }

    fn path_of(&self, folder: &Path) -> Option<String> {
        let below = folder.strip_prefix(&self.0.point).ok()?;
        Some(format!("/{}", below.to_str()?))
    }
}

/// Returns a folder and the folders below it, the outer ones first, up to [`SEARCHED_MAX`].
fn folders(top: PathBuf) -> impl Iterator<Item = PathBuf> {
    let mut waiting = VecDeque::from([top]);
    let next = move || {
        let folder = waiting.pop_front()?;
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                waiting.push_back(entry.path());
            }
        }
        Some(folder)
    };
    std::iter::from_fn(next).take(SEARCHED_MAX)
}

/// Mounted hierarchy of groups.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    version: CgroupVersion,
    point: PathBuf,
    /// Group visible at the mount point.
    shows: String,
}

impl Mount {
    /// Returns the mounts that may have the memory controller: those visible to this process, or the conventional ones.
    fn all(root: &ProbeRoot) -> Vec<Self> {
        let listed = read_optional(&root.proc("self/mountinfo")).unwrap_or_default();
        let base = root.sys.parent().unwrap_or(Path::new("/"));
        let mut mounts: Vec<Self> = lines(&listed)
            .filter_map(|(_, line)| Self::parse(line, base))
            .collect();
        if mounts.is_empty() {
            let custom = [
                (CgroupVersion::V2, "fs/cgroup"),
                (CgroupVersion::V2, "fs/cgroup/unified"),
                (CgroupVersion::V1, "fs/cgroup/memory"),
            ];
            let at = |(version, path)| Self {
                version,
                point: root.sys(path),
                shows: "/".to_owned(),
            };
            mounts.extend(custom.map(at));
        }
        mounts
    }

    /// Parses a line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)) about a hierarchy that may have the memory
    /// controller.
    fn parse(line: &[u8], base: &Path) -> Option<Self> {
        let line = std::str::from_utf8(line).ok()?;
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (shows, point) = (place.next()?, place.next()?);
        let mut kind = kind.split(' ');
        let version = match kind.next()? {
            "cgroup2" => CgroupVersion::V2,
            "cgroup" if kind.nth(1)?.split(',').any(|option| option == "memory") => {
                CgroupVersion::V1
            }
            _ => return None,
        };
        Some(Self {
            version,
            point: base.join(point.trim_start_matches('/')),
            shows: shows.to_owned(),
        })
    }

    /// Returns a folder and its ancestors up to the mount point, innermost first.
    fn around<'a>(&self, folder: &'a Path) -> impl Iterator<Item = &'a Path> {
        folder
            .ancestors()
            .take_while(|around| around.starts_with(&self.point))
    }

    /// Returns the folder of a group, if its path is inside the visible hierarchy.
    fn folder(&self, group: &str) -> Option<PathBuf> {
        if climbs(&self.shows) || climbs(group) {
            return None;
        }
        let below = Path::new(group).strip_prefix(&self.shows).ok()?;
        Some(self.point.join(below)).filter(|folder| folder.is_dir())
    }

    /// Searches the folder whose group contains this process, for paths that are relative to another root.
    fn folder_with(&self, pid: u32) -> Option<PathBuf> {
        folders(self.point.clone()).find(|folder| {
            let members = read_optional(&folder.join("cgroup.procs")).unwrap_or_default();
            lines(&members).any(|(_, line)| number(line) == Some(u64::from(pid)))
        })
    }

    /// Returns the name of a folder's group as in `/proc/<pid>/cgroup`.
    fn name_of(&self, folder: &Path) -> String {
        let below = folder.strip_prefix(&self.point).unwrap_or(Path::new(""));
        Path::new(&self.shows)
            .components()
            .chain(below.components())
            .collect::<PathBuf>()
            .display()
            .to_string()
    }
}

/// Returns whether a path leads outside its visible root.
fn climbs(path: &str) -> bool {
    path.split('/').any(|part| part == "..")
}

/// Group that may be charged for the memory of a process.
struct Place {
    mount: Mount,
    folder: PathBuf,
}

impl Place {
    fn of(root: &ProbeRoot, membership: &Path, pid: u32) -> Option<Self> {
        let membership = Membership::read(membership)?;
        Mount::all(root).into_iter().find_map(|mount| {
            let path = match mount.version {
                CgroupVersion::V2 => membership.v2.as_deref(),
                CgroupVersion::V1 => membership.v1_memory.as_deref(),
            }?;
            // The unified hierarchy may be mounted without the controller.
            let has = |folder: &Path| {
                mount
                    .around(folder)
                    .any(|folder| has_controller(mount.version, folder))
            };
            let folder = match mount.folder(path) {
                Some(folder) => has(&folder).then_some(folder),
                None if !has(&mount.point) => None,
                // As a last resort, the top: in a container it is the container's group, unless this process was moved
                // out of it.
                None => mount
                    .folder_with(pid)
                    .or_else(|| (!climbs(path)).then(|| mount.point.clone())),
            };
            let folder = folder?;
            Some(Self { mount, folder })
        })
    }
}

/// Returns the path of the group charged for the memory of a process (`self` or its id), even if its folder is not
/// visible: a container may show the host's paths.
pub fn path_of(root: &ProbeRoot, process: &str) -> Option<String> {
    let membership = Membership::read(&root.proc(process).join("cgroup"))?;
    membership.v1_memory.or(membership.v2)
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
            let (Some(_), Some(controllers), Some(path)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let path = || Some(String::from_utf8_lossy(path).into_owned());
            if controllers.is_empty() {
                membership.v2 = path();
            } else if controllers
                .split(|b| *b == b',')
                .any(|name| name == b"memory")
            {
                membership.v1_memory = path();
            }
        }
        membership
    }
}

/// Returns whether a folder has the memory controller. The root group of version 2 has only `memory.stat`.
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
        // Without a limit, version 2 shows `max`, which does not parse as a number.
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

/// Returns the number of a key.
fn value_of(text: &[u8], key: &[u8]) -> Option<u64> {
    lines(text).find_map(|(_, line)| {
        let mut words = words(line);
        (words.next()? == key)
            .then(|| words.next().and_then(number))
            .flatten()
    })
}

/// Version 1 writes "no limit" as 2^63 rounded down to a page; no machine has 2^60 bytes.
const V1_UNLIMITED: Bytes = Bytes::new(1 << 60);

/// Groups searched for a process: more than a machine with several hundred containers has (our choice).
const SEARCHED_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::{watch::GroupWatch, *};
    use cotenant_policy::pressure::GroupRoom;

    /// Creates a root with these files below `sys/fs/cgroup`, and this process in `membership`.
    fn tree(membership: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, ProbeRoot) {
        let folder = tempfile::tempdir().unwrap();
        let root = ProbeRoot::at(folder.path());
        let files = files
            .iter()
            .map(|(path, text)| (root.sys("fs/cgroup").join(path), *text));
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
                (
                    "system.slice/cotenant.service/memory.events",
                    "low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\n",
                ),
            ],
        );
        let group = Cgroup::own(&root).unwrap();
        assert_eq!(group.version(), CgroupVersion::V2);
        let memory = group.memory();
        assert_eq!(
            (memory.used, memory.limit),
            (Some(Bytes::from_mib(1)), None)
        );
        assert_eq!((memory.oom_kills, memory.limit_hits), (Some(2), Some(7)));
        assert_eq!(
            limit(&root),
            Some((Bytes::new(4_194_304_000), "/system.slice".to_owned()))
        );
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
                (
                    "memory/a/b/memory.oom_control",
                    "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
                ),
                ("memory/a/b/memory.failcnt", "9\n"),
            ],
        );
        let group = Cgroup::own(&root).unwrap();
        assert_eq!(group.version(), CgroupVersion::V1);
        let memory = group.memory();
        assert_eq!((memory.used, memory.limit), (Some(Bytes::new(1024)), None));
        assert_eq!((memory.oom_kills, memory.limit_hits), (Some(5), Some(9)));
        assert_eq!(limit(&root), Some((Bytes::from_mib(256), "/a".to_owned())));
    }

    fn limit(root: &ProbeRoot) -> Option<(Bytes, String)> {
        let mut watch = GroupWatch::open(root);
        let room = watch.read()?;
        Some((room.limit, watch.tightest().unwrap().to_owned()))
    }

    #[test]
    fn in_a_container_the_mount_itself_is_the_group() {
        let (_folder, root) = tree(
            "0::/docker/0123\n",
            &[("memory.stat", ""), ("memory.max", "1073741824\n")],
        );
        assert_eq!(limit(&root), Some((Bytes::from_gib(1), "/".to_owned())));
    }

    /// Formats a line of `/proc/self/mountinfo`.
    fn mounted(shows: &str, point: &str, kind: &str, options: &str) -> String {
        format!(
            "31 23 0:27 {shows} {point} rw,nosuid,nodev,noexec,relatime shared:9 - {kind} cgroup {options}\n"
        )
    }

    #[test]
    fn a_container_that_is_shown_the_paths_of_the_host_finds_its_groups_by_its_mounts() {
        // Docker with version 1: each hierarchy shows the container's group, and `/proc` the host's paths.
        let (_folder, root) = tree(
            "4:memory:/docker/0123/init\n0::/docker/0123\n",
            &[
                ("memory/memory.usage_in_bytes", "1048576\n"),
                ("memory/memory.limit_in_bytes", "1073741824\n"),
                (
                    "memory/memory.stat",
                    "hierarchical_memory_limit 943718400\n",
                ),
                ("memory/init/memory.usage_in_bytes", "1048576\n"),
                ("memory/init/memory.limit_in_bytes", "9223372036854771712\n"),
                (
                    "memory/init/memory.stat",
                    "hierarchical_memory_limit 943718400\n",
                ),
            ],
        );
        let mounts = mounted(
            "/docker/0123",
            "/sys/fs/cgroup/memory",
            "cgroup",
            "rw,memory",
        ) + &mounted(
            "/docker/0123",
            "/sys/fs/cgroup/cpu,cpuacct",
            "cgroup",
            "rw,cpu,cpuacct",
        );
        fs::write(root.proc("self/mountinfo"), mounts).unwrap();
        // An invisible group around the container has a lower limit than the container.
        assert_eq!(
            limit(&root),
            Some((Bytes::from_mib(900), "/docker/0123".to_owned()))
        );
        let write = |file: &str, text: &str| {
            fs::write(root.sys("fs/cgroup/memory").join(file), text).unwrap();
        };
        write("init/memory.limit_in_bytes", "536870912\n");
        assert_eq!(
            limit(&root),
            Some((Bytes::from_mib(512), "/docker/0123/init".to_owned()))
        );
    }

    #[test]
    fn a_hierarchy_is_found_at_any_mount_point() {
        let (folder, root) = tree("2:cpuset,memory:/box\n", &[]);
        let place = folder.path().join("dev/memcg/box");
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("memory.usage_in_bytes"), "4096\n").unwrap();
        fs::write(place.join("memory.limit_in_bytes"), "268435456\n").unwrap();
        fs::write(
            root.proc("self/mountinfo"),
            mounted("/", "/dev/memcg", "cgroup", "rw,cpuset,memory"),
        )
        .unwrap();
        assert_eq!(
            limit(&root),
            Some((Bytes::from_mib(256), "/box".to_owned()))
        );
    }

    #[test]
    fn in_a_namespace_of_its_own_with_the_hosts_mounts_the_group_is_the_one_that_has_this_process()
    {
        let own = format!("7\n{}\n", process::id());
        let (_folder, root) = tree(
            "0::/\n",
            &[
                ("memory.stat", "anon 1\n"),
                ("cgroup.procs", "1\n"),
                ("a.slice/memory.stat", "anon 1\n"),
                ("a.slice/memory.max", "536870912\n"),
                ("a.slice/b/cgroup.procs", &own),
                ("other/cgroup.procs", "9\n"),
                ("other/memory.max", "1048576\n"),
                ("other/memory.stat", "anon 1\n"),
            ],
        );
        fs::write(
            root.proc("self/mountinfo"),
            mounted("/../..", "/sys/fs/cgroup", "cgroup2", "rw"),
        )
        .unwrap();
        assert_eq!(
            limit(&root).map(|(limit, _)| limit),
            Some(Bytes::from_mib(512))
        );
    }

    #[test]
    fn a_group_without_the_controller_is_bound_by_those_around_it_and_high_is_a_limit_too() {
        let (_folder, root) = tree(
            "0::/user.slice/app.slice/run\n",
            &[
                ("memory.stat", "anon 1\n"),
                ("user.slice/memory.stat", "anon 1\n"),
                ("user.slice/memory.max", "1073741824\n"),
                ("user.slice/memory.high", "943718400\n"),
                ("user.slice/memory.current", "104857600\n"),
                ("user.slice/app.slice/run/cgroup.procs", ""),
            ],
        );
        assert_eq!(
            limit(&root),
            Some((Bytes::from_mib(900), "/user.slice".to_owned()))
        );
        assert_eq!(
            GroupWatch::open(&root).read().map(|room| room.left),
            Some(Bytes::from_mib(800))
        );
        assert_eq!(
            Cgroup::of(&root, 1),
            None,
            "what others use there is not its own use"
        );
    }

    #[test]
    fn the_tightest_limit_and_the_least_room_may_be_those_of_two_groups_and_a_move_is_followed() {
        let (_folder, root) = tree(
            "0::/a/b\n",
            &[
                ("memory.stat", ""),
                ("a/memory.stat", ""),
                ("a/memory.max", "2147483648\n"),
                ("a/memory.current", "2042626048\n"),
                ("a/b/memory.stat", ""),
                ("a/b/memory.max", "943718400\n"),
                ("a/b/memory.current", "104857600\n"),
                ("c/memory.stat", ""),
                ("c/memory.max", "314572800\n"),
                ("c/memory.current", "0\n"),
            ],
        );
        let mut watch = GroupWatch::open(&root);
        let room = |limit, left| {
            Some(GroupRoom {
                limit: Bytes::from_mib(limit),
                left: Bytes::from_mib(left),
            })
        };
        assert_eq!(watch.read(), room(900, 100));
        assert_eq!(watch.tightest(), Some("/a/b"));
        fs::write(root.proc("self/cgroup"), "0::/c\n").unwrap();
        assert_eq!(watch.read(), room(300, 300));
        assert_eq!(watch.tightest(), Some("/c"));
    }

    #[test]
    fn before_hierarchies_were_the_rule_a_group_of_version_1_was_not_bound_by_its_parent() {
        let (_folder, root) = tree(
            "4:memory:/a/b\n",
            &[
                ("memory/a/memory.limit_in_bytes", "1048576\n"),
                ("memory/a/memory.usage_in_bytes", "0\n"),
                ("memory/a/memory.use_hierarchy", "0\n"),
                ("memory/a/b/memory.limit_in_bytes", "268435456\n"),
                ("memory/a/b/memory.usage_in_bytes", "0\n"),
                ("memory/a/b/memory.use_hierarchy", "0\n"),
            ],
        );
        assert_eq!(
            limit(&root),
            Some((Bytes::from_mib(256), "/a/b".to_owned()))
        );
    }

    #[test]
    fn the_group_with_the_least_left_is_read_again_and_its_page_cache_can_be_dropped() {
        let (_folder, root) = tree(
            "0::/board.slice/cotenant.service/supervisor\n",
            &[
                ("memory.stat", "anon 1\n"),
                ("board.slice/memory.max", "440401920\n"),
                ("board.slice/memory.current", "209715200\n"),
                (
                    "board.slice/memory.stat",
                    "anon 1\nfile 9\ninactive_file 41943040\nactive_file 10485760\n",
                ),
                ("board.slice/cotenant.service/memory.max", "max\n"),
                ("board.slice/cotenant.service/memory.current", "1048576\n"),
                ("board.slice/cotenant.service/memory.stat", "anon 1\n"),
                (
                    "board.slice/cotenant.service/supervisor/memory.max",
                    "max\n",
                ),
                (
                    "board.slice/cotenant.service/supervisor/memory.current",
                    "1048576\n",
                ),
                (
                    "board.slice/cotenant.service/supervisor/memory.stat",
                    "anon 1\n",
                ),
            ],
        );
        let mut watch = GroupWatch::open(&root);
        let room = |limit, left| {
            Some(GroupRoom {
                limit: Bytes::from_mib(limit),
                left: Bytes::from_mib(left),
            })
        };
        assert_eq!(watch.read(), room(420, 270));
        let write = |file: &str, text: &str| {
            fs::write(root.sys("fs/cgroup/board.slice").join(file), text).unwrap();
        };
        write("memory.current", "460000000\n");
        write("memory.stat", "anon 1\n");
        assert_eq!(
            watch.read(),
            room(420, 0),
            "more than its limit, which was lowered"
        );
        write("cotenant.service/memory.max", "1048576\n");
        write("memory.max", "max\n");
        assert_eq!(
            watch.read(),
            room(1, 0),
            "a limit that was set later counts"
        );
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
                (
                    "memory/a/memory.stat",
                    "inactive_file 1\ntotal_inactive_file 1048576\ntotal_active_file 1048576\n",
                ),
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

    #[test]
    fn a_group_has_the_processes_of_those_below_it_in_either_version() {
        for (version, membership, top, file) in [
            (2, "0::/a.slice/x.service\n", "", "memory.stat"),
            (
                1,
                "4:memory:/a.slice/x.service\n",
                "memory/",
                "memory.usage_in_bytes",
            ),
        ] {
            let (_folder, root) = tree(
                membership,
                &[
                    (&format!("{top}{file}"), "9\n"),
                    (&format!("{top}a.slice/cgroup.procs"), ""),
                    (&format!("{top}a.slice/x.service/{file}"), "9\n"),
                    (&format!("{top}a.slice/x.service/cgroup.procs"), "11\n12\n"),
                    (
                        &format!("{top}a.slice/x.service/inner/cgroup.procs"),
                        "13\n",
                    ),
                    (&format!("{top}a.slice/y.service/cgroup.procs"), "14\n"),
                    (&format!("{top}hidden/cgroup.procs"), "0\n15\n"),
                ],
            );
            let found = Hierarchy::open(&root).unwrap();
            let members = |group| found.members(group).map(Vec::from_iter);
            assert_eq!(
                members("/a.slice"),
                Some(vec![11, 12, 13, 14]),
                "version {version}"
            );
            assert_eq!(members("/a.slice/x.service"), Some(vec![11, 12, 13]));
            assert_eq!(members("/hidden"), None, "of another PID namespace");
            assert!(found.has("/a.slice/y.service") && !found.has("/a.slice/z.service"));
            assert!(
                !found.has("/a.slice/x.service/cgroup.procs") && !found.has("/a.slice/../hidden")
            );
            fs::create_dir(root.process(11)).unwrap();
            fs::write(root.process(11).join("cgroup"), membership).unwrap();
            assert_eq!(
                found.group_of(&root, 11).as_deref(),
                Some("/a.slice/x.service")
            );
            let services =
                found.find(|path| path.extension().is_some_and(|kind| kind == "service"));
            assert_eq!(
                Vec::from_iter(services),
                ["/a.slice/x.service", "/a.slice/y.service"]
            );
        }
    }

    proptest! {
        #[test]
        fn parsing_returns_for_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = (Membership::parse(&bytes), value_of(&bytes, b"oom_kill"), Mount::parse(&bytes, Path::new("/")));
        }
    }
}
