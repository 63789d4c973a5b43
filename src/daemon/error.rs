//! Errors that prevent the start of the daemon, or end it.

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
};

use cotenant_config::LoadError;
use cotenant_journal::{BookError, JournalError};
use cotenant_policy::params::ParamsError;
use cotenant_probe::ProbeError;
use cotenant_rpc::{remote::RemoteError, server::BindError};

/// Reason why the daemon could not start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A required folder cannot be created.
    #[error("cannot create the folder `{path}`")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Other users could replace the daemon's files.
    #[error("cannot use the folder `{path}` of `{key}`: {why}")]
    Open {
        /// The folder.
        path: PathBuf,
        /// Its key in the configuration.
        key: &'static str,
        /// Reason.
        why: String,
        /// Remedy.
        remedy: String,
    },
    /// The system refuses the required threads.
    #[error("cannot start {wanted} threads")]
    Threads {
        /// Required number.
        wanted: usize,
        /// The cause.
        source: io::Error,
    },
    /// The state of the machine cannot be read.
    #[error("cannot read the machine")]
    Probe(#[from] ProbeError),
    /// A file of keys or certificates cannot be used.
    #[error(transparent)]
    Private(LoadError),
    /// gRPC cannot be served to other machines.
    #[error(transparent)]
    Remote {
        /// The cause.
        source: RemoteError,
    },
    /// The configuration does not fit this machine.
    #[error("cannot use the configuration on this machine: {0}")]
    Settings(String),
    /// The settings contradict each other.
    #[error("cannot use the settings")]
    Params(#[from] ParamsError),
    /// A critical task has ended.
    #[error("cannot continue: {what}")]
    Lost {
        /// Description: `sampling has ended`.
        what: String,
    },
    /// A listener cannot be opened.
    #[error("cannot open {listener}")]
    Listen {
        /// Key and address: `http.listen: 127.0.0.1:8410`.
        listener: String,
        /// The cause.
        source: io::Error,
    },
    /// A gRPC socket cannot be opened.
    #[error("cannot open gRPC")]
    Socket {
        /// The cause.
        source: BindError,
    },
    /// Another supervisor runs with the same folder.
    #[error("cannot start: the supervisor with pid {pid} runs in `{folder}`")]
    Running {
        /// Its process id.
        pid: u32,
        /// The folder of its sockets.
        folder: String,
    },
    /// The folder of the sockets cannot be locked.
    #[error("cannot lock `{path}`")]
    Place {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The state for the next run cannot be written.
    #[error("cannot write the ledger of this run")]
    Book {
        /// The cause.
        source: BookError,
    },
    /// The journal cannot be written.
    #[error("cannot write the journal")]
    Journal {
        /// The cause.
        source: JournalError,
    },
    /// Signals or threads cannot be set up.
    #[error("cannot set up {what}")]
    System {
        /// Description of the object.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

impl RunError {
    /// Returns a function for `map_err` that names the failed system object.
    pub(super) fn system(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::System { what, source }
    }

    /// Returns a function for `map_err` that names the unusable folder.
    pub(super) fn folder(path: &Path) -> impl Fn(io::Error) -> Self {
        |source| Self::Folder {
            path: path.to_owned(),
            source,
        }
    }

    /// Returns a function for `map_err` that names the failed listener.
    pub(super) fn listen(listener: String) -> impl FnOnce(io::Error) -> Self {
        |source| Self::Listen { listener, source }
    }

    /// Returns the remedy, if known.
    pub fn hint(&self) -> Option<String> {
        if let Some(hint) = full(self) {
            return Some(hint.to_owned());
        }
        match self {
            Self::Folder { path, source }
                if matches!(source.kind(), io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists) =>
            {
                Some(format!(
                    "a file exists at this path or at that of a parent folder: remove it, or set a folder other than {}",
                    path.display()
                ))
            }
            Self::Folder { path, .. } => Some(format!(
                "create it for this user, or set `runtime_dir` and `state_dir` to folders that it may write ({})",
                path.display()
            )),
            Self::Open { remedy, .. } => Some(remedy.clone()),
            Self::Threads { .. } => Some(
                "raise `LimitNPROC` and `TasksMax` of the unit (`ulimit -u` in a shell), or end other processes of this user"
                    .into(),
            ),
            Self::Listen { source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
                Some("the address is in use (`ss -ltnp` names the program): stop that program, or set another address".into())
            }
            Self::Listen { .. } => Some("write an address of this machine that this user may listen on".into()),
            Self::Socket { source } => Some(source.hint().to_owned()),
            Self::Running { pid, .. } => Some(match unit_of(*pid) {
                Some(unit) => format!(
                    "it is `{unit}` of systemd: `systemctl reload {unit}` reloads its configuration, `systemctl stop {unit}` \
                     stops it; to run another one, set `runtime_dir` to another folder"
                ),
                None => format!(
                    "`cotenant status` shows it; stop it (kill {pid}), or set `runtime_dir` to another folder"
                ),
            }),
            Self::Place { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some("remove it, or set `runtime_dir` to a folder that only this user may write to".into())
            }
            Self::Place { source, .. } if source.kind() == io::ErrorKind::WouldBlock => {
                Some("stop the other supervisor, or set `runtime_dir` to another folder".into())
            }
            Self::Place { path, .. } => Some(format!(
                "remove the file at {}, or set `runtime_dir` to another folder",
                path.display()
            )),
            Self::Book { .. } => Some("it is in `runtime_dir`; a damaged one may be removed".into()),
            Self::Lost { .. } => Some("see its log; a restart begins from a clean state".into()),
            Self::Private(error) => error.kind().hints().into_iter().next(),
            Self::Remote {
                source: RemoteError::Certificates(_),
            } => Some("`cert` and `key` must belong together, and all three files be PEM".into()),
            Self::Journal {
                source: JournalError::Open { .. },
            } => Some("set `journal.path` to a file that this user may write, or to `none`".into()),
            Self::Remote { .. } | Self::Settings(_) | Self::Probe(_) | Self::Params(_) | Self::Journal { .. } | Self::System { .. } => None,
        }
    }
}

/// Returns the remedy for a full file system.
fn full(error: &RunError) -> Option<&'static str> {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        match error.downcast_ref::<io::Error>().map(io::Error::kind) {
            Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                return Some(
                    "the file system is full (`df -h` and `df -i` show it): free some space, or set `runtime_dir` and \
                     `state_dir` to folders on another one",
                );
            }
            Some(io::ErrorKind::ReadOnlyFilesystem) => {
                return Some(
                    "the file system is read-only: set `runtime_dir` and `state_dir` to folders on another one, or mount it \
                     writable",
                );
            }
            _ => cause = error.source(),
        }
    }
    None
}

/// Returns the systemd service to which a process belongs.
fn unit_of(pid: u32) -> Option<String> {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    groups
        .lines()
        .find_map(|line| service_in(line.splitn(3, ':').nth(2)?))
}

/// Returns the innermost systemd unit of a group, if it is a service.
fn service_in(group: &str) -> Option<String> {
    let of_systemd = |name: &&str| {
        [".service", ".scope", ".slice"]
            .iter()
            .any(|kind| name.ends_with(kind))
    };
    let unit = group.split('/').rfind(of_systemd)?;
    unit.ends_with(".service").then(|| unit.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_file_system_is_named_whatever_cannot_be_written() {
        let full = || io::Error::from_raw_os_error(libc::ENOSPC);
        let path = PathBuf::from("/run/cotenant/supervisor.lock");
        for error in [
            RunError::Place {
                path: path.clone(),
                source: full(),
            },
            RunError::Folder {
                path,
                source: full(),
            },
            RunError::Socket {
                source: BindError::System {
                    address: "/run/x".to_owned(),
                    source: full(),
                },
            },
        ] {
            let hint = error.hint().unwrap();
            assert!(hint.contains("the file system is full"), "{error}: {hint}");
        }
    }

    #[test]
    fn another_supervisor_is_named_only_where_one_keeps_the_lock() {
        let place = |kind: io::ErrorKind| RunError::Place {
            path: PathBuf::from("/run/cotenant/supervisor.lock"),
            source: kind.into(),
        };
        let hint = |kind| place(kind).hint().unwrap();
        assert!(hint(io::ErrorKind::WouldBlock).contains("the other supervisor"));
        for kind in [
            io::ErrorKind::IsADirectory,
            io::ErrorKind::PermissionDenied,
            io::ErrorKind::StorageFull,
        ] {
            let said = format!("{} {}", place(kind), hint(kind));
            assert!(
                !said.contains("supervisor of") && !said.contains("other supervisor"),
                "{said}"
            );
        }
        let folder = RunError::Folder {
            path: PathBuf::from("/run/cotenant"),
            source: io::ErrorKind::AlreadyExists.into(),
        };
        assert!(
            folder
                .hint()
                .unwrap()
                .contains("a file exists at this path")
        );
    }

    #[test]
    fn the_unit_of_a_process_is_the_innermost_one() {
        for (group, unit) in [
            ("/system.slice/cotenant.service", Some("cotenant.service")),
            (
                "/system.slice/cotenant.service/.control",
                Some("cotenant.service"),
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope",
                None,
            ),
            ("/user.slice/user-1000.slice/session-3.scope", None),
            ("/", None),
        ] {
            assert_eq!(service_in(group).as_deref(), unit, "{group}");
        }
    }
}
