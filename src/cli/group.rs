//! Control group on the command line: by path, systemd unit or container.

use std::{collections::BTreeSet, path::Path};

use clap::Args;

use super::{
    exit::{self, CliError},
    output::listed,
};
use cotenant_probe::{ProbeRoot, cgroup::Hierarchy};

/// A control group, if any.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub(super) struct GroupArgs {
    /// Control group that holds the lease, as a path below the mount of its hierarchy: `/system.slice/camera.service`.
    #[arg(long, value_name = "PATH")]
    cgroup: Option<String>,
    /// systemd unit whose control group holds the lease: `camera.service`, or `camera` for short.
    #[arg(long)]
    unit: Option<String>,
    /// Container of Docker or containerd whose control group holds the lease: its id, or the beginning of it.
    #[arg(long, value_name = "ID")]
    container: Option<String>,
}

impl GroupArgs {
    /// Returns the path of the control group, if one is given.
    pub(super) fn path(&self) -> Result<Option<String>, CliError> {
        let hierarchy = || {
            Hierarchy::open(&ProbeRoot::default()).ok_or_else(|| {
                let act = "cannot find the control group: no hierarchy with the memory controller is mounted";
                CliError::plain(act, exit::FAILED)
            })
        };
        let found = if let Some(unit) = &self.unit {
            only(&format!("unit `{unit}`"), of_unit(&hierarchy()?, unit))?
        } else if let Some(id) = &self.container {
            only(
                &format!("container `{id}`"),
                of_container(&hierarchy()?, id),
            )?
        } else {
            return Ok(self.cgroup.clone());
        };
        Ok(Some(found))
    }
}

/// Returns the same request id for each request of a group, so that a repeated request is answered with the same lease.
pub(super) fn request_id(group: &str) -> String {
    // The name of a unit or container is at the end.
    let skipped = group.len().saturating_sub(REQUEST_ID_MAX);
    let kept = group.char_indices().filter(|(at, _)| *at >= skipped);
    kept.map(|(_, kept)| kept).collect()
}

fn of_unit(hierarchy: &Hierarchy, unit: &str) -> BTreeSet<String> {
    let name = if unit.contains('.') {
        unit.to_owned()
    } else {
        format!("{unit}.service")
    };
    hierarchy.find(|path| path.file_name().is_some_and(|found| found == name.as_str()))
}

fn of_container(hierarchy: &Hierarchy, id: &str) -> BTreeSet<String> {
    let scoped = |name: &str, runtime: &str| {
        let scope = name.strip_prefix(runtime);
        scope.is_some_and(|scope| scope.starts_with(id) && scope.ends_with(".scope"))
    };
    let is_its = |path: &Path| {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let below_docker = path.parent() == Some(Path::new("/docker"));
        scoped(name, "docker-")
            || scoped(name, "cri-containerd-")
            || (below_docker && name.starts_with(id))
    };
    hierarchy.find(|path| !id.is_empty() && is_its(path))
}

/// Returns the only path, or an error that names all of them.
fn only(what: &str, found: BTreeSet<String>) -> Result<String, CliError> {
    let paths = Vec::from_iter(found);
    match paths.as_slice() {
        [path] => Ok(path.clone()),
        [] => Err(CliError::plain(
            format!("cannot find the control group of {what}: no group has its name"),
            exit::FAILED,
        )
        .with_hint("start it first, or name its control group by --cgroup".to_owned())),
        _ => Err(CliError::plain(
            format!(
                "cannot choose the control group of {what}: it may be any of {}",
                listed(&paths)
            ),
            exit::FAILED,
        )
        .with_hint("name one of them by --cgroup".to_owned())),
    }
}

/// Longest request id that the supervisor accepts.
const REQUEST_ID_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const ID: &str = "4f66ad9a0b2e4f66ad9a0b2e4f66ad9a0b2e4f66ad9a0b2e4f66ad9a0b2e4f66";

    /// Creates a hierarchy of version 2 with these groups.
    fn hierarchy(groups: &[String]) -> (tempfile::TempDir, Hierarchy) {
        let folder = tempfile::tempdir().unwrap();
        let root = ProbeRoot::at(folder.path());
        let top = root.sys("fs/cgroup");
        for group in groups {
            fs::create_dir_all(top.join(group.trim_start_matches('/'))).unwrap();
        }
        fs::write(top.join("memory.stat"), "anon 1\n").unwrap();
        (folder, Hierarchy::open(&root).unwrap())
    }

    #[test]
    fn a_unit_and_a_container_are_found_by_their_names_at_any_depth() {
        let (unit, pod) = (
            "/system.slice/camera.service".to_owned(),
            format!("/kubepods.slice/pod1.slice/cri-containerd-{ID}.scope"),
        );
        let (_folder, found) = hierarchy(&[unit.clone(), format!("{unit}/inner"), pod.clone()]);
        for name in ["camera", "camera.service"] {
            assert_eq!(Vec::from_iter(of_unit(&found, name)), [&*unit]);
        }
        for name in ["inner", "camera.socket", "system"] {
            assert!(of_unit(&found, name).is_empty(), "{name}");
        }
        assert_eq!(Vec::from_iter(of_container(&found, &ID[..12])), [&*pod]);
        assert!(of_container(&found, "").is_empty());
        for path in [
            format!("/docker/{ID}"),
            format!("/system.slice/docker-{ID}.scope"),
        ] {
            let (_folder, found) = hierarchy(&[path.clone(), format!("/other/{ID}")]);
            assert_eq!(Vec::from_iter(of_container(&found, ID)), [path]);
        }
    }

    #[test]
    fn a_name_of_several_groups_or_of_none_is_refused_with_the_candidates() {
        let paths = ["/system.slice/camera.service", "/user.slice/camera.service"];
        let (_folder, found) = hierarchy(&paths.map(str::to_owned));
        let several = only("unit `camera`", of_unit(&found, "camera")).unwrap_err();
        for path in paths {
            assert!(several.to_string().contains(path), "{several}");
        }
        let none = only("unit `x`", of_unit(&found, "x")).unwrap_err();
        assert!(none.to_string().contains("unit `x`"), "{none}");
    }

    #[test]
    fn a_request_id_fits_and_ends_as_the_path_does() {
        let long = format!("/é/docker/{ID}");
        assert_eq!(request_id(&long), ID);
        assert_eq!(request_id("/a"), "/a");
        assert!(request_id(&"é".repeat(40)).len() <= REQUEST_ID_MAX);
    }
}
