//! Folders and sockets of the daemon: creation, refusal with a remedy, inspection.

use std::{
    fs::{self, DirBuilder, Metadata},
    io,
    os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _},
    path::Path,
};

use nix::unistd::{AccessFlags, access};

use super::{
    certificates::certificates_of,
    error::RunError,
    handoff::{living_owner, successor_of},
};
use cotenant_config::{Config, WyomingListen};
use cotenant_rpc::server::BindError;
use cotenant_units::causes::in_one_line;
use cotenant_worker::ports;

/// Creates a folder that only its owner may write to, regardless of the umask; keeps an existing one.
pub(super) fn make(path: &Path) -> Result<(), RunError> {
    let made = DirBuilder::new()
        .recursive(true)
        .mode(FOLDER_MODE)
        .create(path);
    made.map_err(RunError::folder(path))
}

/// Creates the folder of a socket, closed to other users.
pub(super) fn make_parent(path: &Path) -> Result<(), RunError> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(folder)
            .map_err(RunError::folder(folder)),
        _ => Ok(()),
    }
}

/// Refuses a folder in which other users could replace our files, locks and sockets.
pub(super) fn is_ours(key: &'static str, path: &Path, config: &Config) -> Result<(), RunError> {
    let found = fs::metadata(path).map_err(RunError::folder(path))?;
    is_closed(key, path, &found)?;
    let us = nix::unistd::geteuid().as_raw();
    let owner = found.uid();
    // State may be on a volume of another owner; sockets and locks are trusted by their location.
    if key == "runtime_dir" && ![us, 0].contains(&owner) {
        // Usually it belongs to a running supervisor.
        let successor = successor_of(config);
        if let Some(pid) = living_owner(&successor.lock) {
            return Err(RunError::Running {
                pid,
                folder: successor.place,
            });
        }
        return Err(RunError::Open {
            path: path.to_owned(),
            key,
            why: format!("it belongs to uid {owner}, and the supervisor runs as uid {us}"),
            remedy: format!(
                "start it as uid {owner}, for example by its systemd unit, or set `{key}` to another folder"
            ),
        });
    }
    Ok(())
}

fn is_closed(key: &'static str, path: &Path, found: &Metadata) -> Result<(), RunError> {
    if found.mode() & 0o002 == 0 {
        return Ok(());
    }
    Err(RunError::Open {
        path: path.to_owned(),
        key,
        why: format!(
            "every user may write to it (mode {:04o})",
            found.mode() & 0o7777
        ),
        remedy: format!(
            "chmod o-w {}, or set `{key}` to a folder below it",
            path.display()
        ),
    })
}

/// Condition that prevents the start of the daemon.
pub struct Obstacle {
    /// Description, with its cause.
    pub text: String,
    /// Remedy.
    pub remedy: String,
    /// Whether it is certain: an object invisible to this user may be correct.
    pub is_sure: bool,
}

impl From<RunError> for Obstacle {
    fn from(error: RunError) -> Self {
        let remedy = error.hint().unwrap_or_default();
        Self {
            text: in_one_line(&error),
            remedy,
            is_sure: true,
        }
    }
}

/// Returns visible obstacles to the start of the daemon, without starting anything.
pub fn obstacles(config: &Config) -> Vec<Obstacle> {
    let mut found: Vec<Obstacle> = Vec::new();
    for (key, folder) in [
        ("runtime_dir", &config.runtime_dir),
        ("state_dir", &config.state_dir),
    ] {
        found.extend(could_be_folder(folder).err().map(Obstacle::from));
        if let Ok(metadata) = fs::metadata(folder)
            && metadata.is_dir()
        {
            found.extend(is_closed(key, folder, &metadata).err().map(Obstacle::from));
        }
    }
    let wyoming = config
        .wyoming
        .listen
        .iter()
        .filter_map(|listen| match listen {
            WyomingListen::Unix(path) => Some(path),
            WyomingListen::Tcp(_) => None,
        });
    for path in config.grpc.socket.iter().chain(wyoming) {
        let is_other = fs::symlink_metadata(path).is_ok_and(|found| !found.file_type().is_socket());
        if is_other {
            let address = path.display().to_string();
            found.push(
                RunError::Socket {
                    source: BindError::NotASocket { address },
                }
                .into(),
            );
        } else if let Some(parent) = path.parent() {
            found.extend(could_be_folder(parent).err().map(Obstacle::from));
        }
    }
    let journal = config.journal.as_ref().map(|journal| &journal.path);
    if let Some(parent) = journal.and_then(|path| path.parent()) {
        found.extend(could_be_folder(parent).err().map(Obstacle::from));
    }
    let own = ["book", "supervisor.lock"].map(|name| config.runtime_dir.join(name));
    found.extend(own.iter().chain(journal).filter_map(|path| no_file(path)));
    found.dedup_by(|one, other| one.text == other.text);
    if let Some(tcp) = &config.grpc.tcp
        && let Err(error) = certificates_of(tcp)
    {
        let is_sure = !is_denied(&error);
        found.push(Obstacle {
            is_sure,
            ..Obstacle::from(error)
        });
    }
    found.extend(
        config
            .listeners()
            .into_iter()
            .filter_map(|(key, address)| taken(key, address)),
    );
    found
}

/// Returns what prevents using or creating a file of the daemon.
fn no_file(path: &Path) -> Option<Obstacle> {
    let shown = path.display();
    let (text, is_sure) = match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() => return None,
        Ok(_) => (format!("`{shown}` is no plain file"), true),
        Err(_) => {
            let around = path.ancestors().skip(1).find(|around| around.exists())?;
            // The daemon may be started by another user.
            access(around, AccessFlags::W_OK).err()?;
            let (user, folder) = (nix::unistd::geteuid(), around.display());
            (format!("uid {user} may not write to `{folder}`"), false)
        }
    };
    Some(Obstacle {
        text,
        remedy: "set `runtime_dir`, `state_dir` and `journal.path` to places that the supervisor's user may write".to_owned(),
        is_sure,
    })
}

/// Reports an address in use, unless by a supervisor or systemd, and an address that this user may not bind.
fn taken(key: &str, address: std::net::SocketAddr) -> Option<Obstacle> {
    let refused = std::net::TcpListener::bind(address).err()?.kind();
    if refused == io::ErrorKind::PermissionDenied {
        let user = nix::unistd::geteuid();
        return Some(Obstacle {
            text: format!("uid {user} may not listen on `{key}: {address}`"),
            remedy: "write a port of 1024 or more, or give the unit CAP_NET_BIND_SERVICE"
                .to_owned(),
            is_sure: false,
        });
    }
    if address.port() == 0 || refused != io::ErrorKind::AddrInUse {
        return None;
    }
    let owner = ports::owner_of(address.port());
    if owner
        .as_ref()
        .is_some_and(|owner| owner.pid == 1 || owner.name == "cotenant")
    {
        return None;
    }
    let by = owner.as_ref().map_or_else(
        || "a program that cannot be seen from here".to_owned(),
        ToString::to_string,
    );
    Some(Obstacle {
        text: format!("`{key}: {address}` is taken by {by}"),
        remedy: "end that program, unless it is a supervisor, or write another port".to_owned(),
        is_sure: owner.is_some(),
    })
}

/// Checks that a path is a folder, or could be created as one.
fn could_be_folder(path: &Path) -> Result<(), RunError> {
    let failed = RunError::folder(path);
    for around in path
        .ancestors()
        .filter(|around| !around.as_os_str().is_empty())
    {
        match fs::metadata(around) {
            Ok(found) if found.is_dir() => return Ok(()),
            Ok(_) => return Err(failed(io::ErrorKind::NotADirectory.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(())
}

/// Returns whether the object of the error is not visible to this user.
fn is_denied(error: &RunError) -> bool {
    in_one_line(error).contains("Permission denied")
}

/// Other users may access the readable files in it: sockets of workers, the calibration.
const FOLDER_MODE: u32 = 0o755;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn config(text: &str) -> Config {
        Config::parse(text).unwrap()
    }

    /// Returns the obstacles of a daemon with these settings.
    fn said(text: &str) -> Vec<String> {
        obstacles(&config(text))
            .into_iter()
            .map(|found| found.text)
            .collect()
    }

    #[test]
    fn what_keeps_a_start_from_succeeding_is_found_without_one() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let (file, sub) = (at("file"), at("sub"));
        fs::write(&file, "x").unwrap();
        fs::create_dir(&sub).unwrap();
        let base = format!(
            "http: {{listen: none}}\ngrpc: {{abstract_name: none}}\nstate_dir: {sub}\nruntime_dir: {sub}\n"
        );
        assert_eq!(said(&base), [""; 0]);
        let missing = base.replace(
            &format!("state_dir: {sub}"),
            &format!("state_dir: {}/a/b", at("new")),
        );
        assert_eq!(said(&missing), [""; 0], "it would be made");
        for (with, named) in [
            (
                base.replace(&format!("state_dir: {sub}"), &format!("state_dir: {file}")),
                "cannot create the folder",
            ),
            (
                base.replace(
                    &format!("runtime_dir: {sub}"),
                    &format!("runtime_dir: {file}/x"),
                ),
                "cannot create the folder",
            ),
            (
                base.replace(
                    "abstract_name: none",
                    &format!("abstract_name: none, socket: {sub}"),
                ),
                "no socket is there",
            ),
            (
                base.replace(
                    "abstract_name: none",
                    &format!("abstract_name: none, socket: {file}"),
                ),
                "no socket is there",
            ),
            (
                format!("{base}wyoming: {{listen: ['unix://{sub}']}}\n"),
                "no socket is there",
            ),
            (
                format!("{base}journal: {{path: {sub}}}\n"),
                "is no plain file",
            ),
            (
                format!("{base}journal: {{path: /dev/null}}\n"),
                "`/dev/null` is no plain file",
            ),
        ] {
            let said = said(&with);
            assert!(
                said.iter().any(|text| text.contains(named)),
                "{with}{said:?}"
            );
        }
        for name in ["book", "supervisor.lock"] {
            let path = folder.path().join("sub").join(name);
            fs::create_dir(&path).unwrap();
            assert_eq!(
                said(&base),
                [format!("`{}` is no plain file", path.display())]
            );
            fs::remove_dir(&path).unwrap();
        }
        fs::set_permissions(&sub, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(
            said(&base)
                .iter()
                .any(|text| text.contains("every user may write to it (mode 0777)"))
        );
    }

    #[test]
    fn a_port_that_another_program_has_is_found_with_the_program() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let found = taken("http.listen", address).unwrap();
        assert!(
            found
                .text
                .starts_with(&format!("`http.listen: {address}` is taken by ")),
            "{}",
            found.text
        );
        assert!(
            found.is_sure
                && found
                    .text
                    .contains(&format!("(pid {})", std::process::id())),
            "{}",
            found.text
        );
        drop(listener);
    }

    #[test]
    fn folders_of_ours_are_closed_to_other_users_without_a_umask() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        // The mode is set explicitly, independent of a umask of 0.
        make(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().mode() & 0o777;
        assert_eq!(mode & !FOLDER_MODE, 0, "{mode:o}");
        is_ours(
            "state_dir",
            &path,
            &config(&format!("runtime_dir: {}\n", path.display())),
        )
        .unwrap();
    }
}
