//! Control groups of pods, by the names that kubelet gives to them.

use std::{
    collections::VecDeque,
    fs,
    path::{Path, PathBuf},
};

use cotenant_probe::{ProbeRoot, cgroup::Hierarchy};

/// The hierarchy with the groups of pods.
#[derive(Clone, Debug)]
pub struct Groups {
    root: PathBuf,
}

impl Groups {
    /// Uses a folder, or the hierarchy with the memory controller that this process sees; `None` without one.
    #[must_use]
    pub fn open(root: Option<&Path>) -> Option<Self> {
        let root = match root {
            Some(root) => root.to_owned(),
            None => Hierarchy::open(&ProbeRoot::default())?
                .mount_point()
                .to_owned(),
        };
        Some(Self { root })
    }

    /// Returns the path of the group of a pod below the root: `/kubepods.slice/kubepods-pod4e.slice`. `None` if it does
    /// not exist.
    #[must_use]
    pub fn of_pod(&self, uid: &str) -> Option<String> {
        // The uid becomes part of a path.
        if uid.is_empty() || !uid.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
            return None;
        }
        let usual = usual(uid).into_iter();
        let mut usual = usual.filter(|path| self.root.join(path).is_dir());
        let found = usual.next().or_else(|| self.search(uid))?;
        Some(format!("/{found}"))
    }

    /// Searches below a folder of kubelet's that has another name or place, as by `--cgroup-root`.
    fn search(&self, uid: &str) -> Option<String> {
        let (plain, escaped) = (
            format!("pod{uid}"),
            format!("-pod{}.slice", uid.replace('-', "_")),
        );
        let mut waiting = VecDeque::from([(self.root.clone(), 0)]);
        let mut seen = 0;
        while let Some((folder, depth)) = waiting.pop_front() {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                let name = entry.file_name();
                let name = name.to_str().unwrap_or_default();
                if name == plain || name.ends_with(&escaped) {
                    let path = entry.path();
                    let below = path.strip_prefix(&self.root).ok()?;
                    return Some(below.to_str()?.to_owned());
                }
                seen += 1;
                let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
                if is_folder && depth < DEPTH_MAX && seen < SEARCHED_MAX {
                    waiting.push_back((entry.path(), depth + 1));
                }
            }
        }
        None
    }
}

/// Returns the paths of a pod's group with the drivers `cgroupfs` and `systemd`, for each quality of service.
fn usual(uid: &str) -> Vec<String> {
    let escaped = uid.replace('-', "_");
    let mut paths = Vec::new();
    for quality in ["", "burstable", "besteffort"] {
        let (folder, slices) = if quality.is_empty() {
            (String::new(), ("kubepods".to_owned(), String::new()))
        } else {
            let slice = format!("kubepods-{quality}");
            (
                format!("/{quality}"),
                (slice.clone(), format!("/{slice}.slice")),
            )
        };
        let (prefix, inner) = slices;
        paths.push(format!("kubepods{folder}/pod{uid}"));
        paths.push(format!("kubepods.slice{inner}/{prefix}-pod{escaped}.slice"));
    }
    paths
}

/// Depth and number of searched folders. Our choice: kubelet's root, quality of service, pod, with room for two more.
const DEPTH_MAX: usize = 4;
const SEARCHED_MAX: usize = 20_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_found_by_every_driver_of_control_groups() {
        for path in [
            "/kubepods/pod4e-1",
            "/kubepods/burstable/pod4e-1",
            "/kubepods.slice/kubepods-pod4e_1.slice",
            "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod4e_1.slice",
            "/other.slice/other-kubepods.slice/other-kubepods-burstable.slice/other-kubepods-burstable-pod4e_1.slice",
            "/k3s/kubepods/pod4e-1",
        ] {
            let folder = tempfile::tempdir().unwrap();
            fs::create_dir_all(folder.path().join(&path[1..])).unwrap();
            let groups = Groups::open(Some(folder.path())).unwrap();
            assert_eq!(groups.of_pod("4e-1").as_deref(), Some(path));
            for other in ["4e-2", "4e", "", "../x"] {
                assert_eq!(groups.of_pod(other), None, "{other}");
            }
        }
    }
}
