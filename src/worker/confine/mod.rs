//! Confinement of a worker: control group, limits, user, files, system calls.
//!
//! All is prepared by the supervisor and put into force by the new process itself between fork and exec, so that not
//! one instruction of the worker runs without it. What this machine cannot do is told as a [`Measure`] and never left
//! out in silence; with [`Confinement::required`] the worker is not started without it.

use std::{collections::BTreeMap, fmt, io, io::Read as _, os::fd::AsRawFd as _, path::PathBuf};

use super::descent::adopt_descendants;
use crate::units::Bytes;

mod group;
mod identity;
mod sandbox;

pub use group::Groups;
pub(super) use group::WorkerGroup;

/// What a worker may use and touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// Limit of its control group, page cache included; it may not swap. `None` sets no limit.
    pub memory: Option<Bytes>,
    /// Resource limits, soft and hard alike; `None` is no limit.
    pub resources: BTreeMap<Resource, Option<u64>>,
    /// Name or number of the user it runs as; the supervisor's when `None`.
    pub user: Option<String>,
    /// Name or number of its group; the user's own when `None`.
    pub group: Option<String>,
    /// The only files it may touch beside those that every program needs; all that its user may when `None`.
    pub files: Option<FileAccess>,
    /// Whether system calls that no speech worker needs are refused.
    pub syscalls: SyscallFilter,
    /// Whether it is not started where something of this cannot be put into force.
    pub required: bool,
}

/// Files and folders, each with all below it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileAccess {
    /// May be read and executed.
    pub read: Vec<PathBuf>,
    /// May be read, executed and changed.
    pub write: Vec<PathBuf>,
}

/// Which system calls a worker may make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyscallFilter {
    /// All that its user may.
    #[default]
    All,
    /// All but those that trace others, change mounts, the clock, modules, swap or the kernel itself. The memory of
    /// processes outside is out of reach, and root keeps no capability beyond files, signals and ports.
    Restricted,
}

/// A limit of setrlimit(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    /// Bytes of address space.
    AddressSpace,
    /// Bytes of a core file.
    Core,
    /// Bytes of the largest file it may write.
    FileSize,
    /// Bytes it may lock.
    LockedMemory,
    /// Open files.
    OpenFiles,
    /// Processes and threads of its user.
    Processes,
}

impl Resource {
    /// As in the configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AddressSpace => "address_space",
            Self::Core => "core",
            Self::FileSize => "file_size",
            Self::LockedMemory => "memlock",
            Self::OpenFiles => "open_files",
            Self::Processes => "processes",
        }
    }
}

/// One part of a confinement, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measure {
    /// `memory limit`, `files`, `system calls`, `control group`, …
    pub what: &'static str,
    /// What is in force, in words; or why it is not.
    pub state: Result<String, String>,
    /// Whether the configuration asks for it; what is not asked for and cannot be had is worth no warning.
    pub asked: bool,
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            Ok(text) => write!(f, "{}: {text}", self.what),
            Err(reason) => write!(f, "{}: not in force: {reason}", self.what),
        }
    }
}

/// What a start needs to know beside the confinement itself.
pub(super) struct Surroundings<'a> {
    pub(super) worker: &'a str,
    pub(super) program: &'a str,
    pub(super) working_dir: Option<&'a std::path::Path>,
    /// Folder in which it makes its socket.
    pub(super) socket_dir: Option<&'a std::path::Path>,
    /// What it watches for memory pressure.
    pub(super) watched: Option<&'a std::path::Path>,
}

/// A confinement that the new process puts into force.
#[derive(Debug)]
pub(super) struct Prepared {
    group: Option<WorkerGroup>,
    limits: Vec<(Resource, libc::rlim_t)>,
    ids: Option<identity::Ids>,
    ruleset: Option<std::os::fd::OwnedFd>,
    filter: Option<seccompiler::BpfProgram>,
    steps: io::PipeReader,
    step: io::PipeWriter,
    /// What is in force, and what is not.
    pub(super) measures: Vec<Measure>,
}

/// Why a worker cannot be confined as it must be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfineError {
    /// There is no such user or group.
    #[error("{kind} `{name}` does not exist")]
    Unknown {
        /// `user` or `group`.
        kind: &'static str,
        /// As configured.
        name: String,
    },
    /// The supervisor may not become another user.
    #[error("cannot run as user `{name}`: the supervisor runs as uid {own} and lacks `{capability}`")]
    Identity {
        /// As configured.
        name: String,
        /// The supervisor's own.
        own: u32,
        /// What it lacks.
        capability: &'static str,
    },
    /// A resource limit is above what the supervisor itself may have.
    #[error("cannot set `limits.{resource}` to {wanted}: the supervisor's own hard limit is {hard}")]
    Resource {
        /// Its name in the configuration.
        resource: &'static str,
        /// As configured.
        wanted: String,
        /// The supervisor's own.
        hard: u64,
    },
    /// Something that is required is not there.
    #[error("cannot confine it as required: {measure}")]
    Required {
        /// What, and why not.
        measure: String,
    },
    /// The system refused something that should work.
    #[error("cannot prepare {what}")]
    System {
        /// What.
        what: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// What would be in force for a worker, without starting anything: for `cotenant check`.
///
/// # Errors
/// What would keep it from starting.
pub fn survey(
    confinement: &Confinement,
    groups: &Groups,
    program: &str,
    working_dir: Option<&std::path::Path>,
) -> Result<Vec<Measure>, ConfineError> {
    let around = Surroundings {
        worker: "",
        program,
        working_dir,
        socket_dir: None,
        watched: None,
    };
    let mut measures = vec![group::foresee(groups, confinement.memory)];
    identity::limits(&confinement.resources)?;
    measures.extend(limits_measure(confinement));
    if let Some(ids) = identity::ids(confinement)? {
        measures.push(ids.measure());
    }
    let (_, files) = sandbox::files(confinement.files.as_ref(), &around);
    let (_, calls) = sandbox::calls(confinement.syscalls);
    measures.extend(files.into_iter().chain(calls));
    required(confinement, &measures)?;
    Ok(measures)
}

impl Prepared {
    /// Prepares all that a confinement asks for.
    pub(super) fn new(
        confinement: &Confinement,
        groups: &Groups,
        around: &Surroundings<'_>,
    ) -> Result<Self, ConfineError> {
        let limits = identity::limits(&confinement.resources)?;
        let ids = identity::ids(confinement)?;
        let (group, group_measure) = group::create(groups, around.worker, confinement.memory);
        let mut measures = vec![group_measure];
        measures.extend(limits_measure(confinement));
        measures.extend(ids.as_ref().map(identity::Ids::measure));
        let (ruleset, files) = sandbox::files(confinement.files.as_ref(), around);
        let (filter, calls) = sandbox::calls(confinement.syscalls);
        measures.extend(files.into_iter().chain(calls));
        required(confinement, &measures)?;
        let ruleset = match sandbox::process_wall() {
            _ if ruleset.is_some() || filter.is_none() => ruleset,
            Ok(wall) => Some(wall),
            Err(_) => {
                sandbox::be_undumpable();
                None
            }
        };
        let (steps, step) = io::pipe().map_err(|source| ConfineError::System { what: "a pipe", source })?;
        Ok(Self {
            group,
            limits,
            ids,
            ruleset,
            filter,
            steps,
            step,
            measures,
        })
    }

    /// Puts into force what needs the supervisor's rights: group, limits, user. To be called between fork and exec.
    ///
    /// Allocates nothing, and makes system calls only: another thread may have held any lock at the fork.
    pub(super) fn enter(&self) -> io::Result<()> {
        if let Some(group) = &self.group {
            self.at(Step::Group);
            group.enter()?;
        }
        self.at(Step::Limits);
        for (resource, limit) in &self.limits {
            identity::set_limit(*resource, *limit)?;
        }
        if let Some(ids) = &self.ids {
            self.at(Step::User);
            ids.become_them()?;
        }
        self.at(Step::Capabilities);
        identity::drop_ambient()?;
        // Older kernels leave such processes to init.
        let _ = adopt_descendants();
        Ok(())
    }

    /// Puts up the walls; nothing after it may need more than the worker does. To be called between fork and exec, as
    /// [`enter`](Self::enter).
    pub(super) fn wall_in(&self) -> io::Result<()> {
        if let Some(ruleset) = &self.ruleset {
            self.at(Step::Files);
            sandbox::restrict_files(ruleset)?;
        }
        if let Some(filter) = &self.filter {
            self.at(Step::Calls);
            sandbox::bound_capabilities();
            sandbox::restrict_calls(filter)?;
        }
        self.at(Step::Execute);
        Ok(())
    }

    /// The group that it enters, if it has one.
    pub(super) const fn group(&self) -> Option<&WorkerGroup> {
        self.group.as_ref()
    }

    /// What the new process was doing when it failed, and the group that is left. To be called once it is there or not.
    pub(super) fn finish(self) -> (Option<WorkerGroup>, Option<&'static str>) {
        let Self {
            mut steps, step, group, ..
        } = self;
        drop(step);
        let mut done = Vec::new();
        // Both ends were close-on-exec, and ours is closed: this ends at once.
        let _ = steps.read_to_end(&mut done);
        (group, done.last().copied().and_then(Step::words))
    }

    fn at(&self, step: Step) {
        let byte = step as u8;
        // SAFETY: one byte that lives on the stack is written to an open descriptor; `write` is async-signal-safe. That
        // it fails costs no more than a word in an error.
        let _ = unsafe { libc::write(self.step.as_raw_fd(), std::ptr::from_ref(&byte).cast(), 1) };
    }
}

/// What the new process does before it becomes the program.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Step {
    Group = 1,
    Limits,
    User,
    Files,
    Calls,
    Capabilities,
    Execute,
}

impl Step {
    fn words(byte: u8) -> Option<&'static str> {
        Some(match byte {
            1 => "entering its control group",
            2 => "setting its resource limits",
            3 => "becoming its user",
            4 => "restricting its files",
            5 => "restricting its system calls",
            6 => "dropping the supervisor's capabilities",
            _ => return None,
        })
    }
}

fn limits_measure(confinement: &Confinement) -> Option<Measure> {
    if confinement.resources.is_empty() {
        return None;
    }
    let words: Vec<String> = confinement
        .resources
        .iter()
        .map(|(resource, limit)| match limit {
            Some(limit) => format!("{} {limit}", resource.name()),
            None => format!("{} unlimited", resource.name()),
        })
        .collect();
    Some(Measure {
        what: "resource limits",
        state: Ok(words.join(", ")),
        asked: true,
    })
}

fn required(confinement: &Confinement, measures: &[Measure]) -> Result<(), ConfineError> {
    let missing = measures.iter().find(|measure| measure.asked && measure.state.is_err());
    match missing {
        Some(measure) if confinement.required => Err(ConfineError::Required {
            measure: measure.to_string(),
        }),
        _ => Ok(()),
    }
}
