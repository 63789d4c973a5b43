//! Confinement of a worker: control group, limits, user, files, system calls.
//!
//! The supervisor prepares everything, and the new process applies it between fork and exec, before the first
//! instruction of the worker. Features missing on this machine are reported as a [`Measure`]; with
//! [`Confinement::required`] the worker is then not started.

use std::io::{self, Read as _};

use super::descent::adopt_descendants;

mod group;
mod identity;
mod sandbox;
mod settings;

pub use group::Groups;
pub(super) use group::WorkerGroup;
pub(super) use settings::Surroundings;
pub use settings::{ConfineError, Measure};

pub use cotenant_config::{Confinement, FileAccess, Resource, SyscallFilter};

/// Confinement to be applied by the new process.
#[derive(Debug)]
pub(super) struct Prepared {
    group: Option<WorkerGroup>,
    limits: Vec<(Resource, libc::rlim_t)>,
    ids: Option<identity::Ids>,
    ruleset: Option<std::os::fd::OwnedFd>,
    filter: Option<seccompiler::BpfProgram>,
    steps: io::PipeReader,
    step: io::PipeWriter,
    /// Measures, applied or not.
    pub(super) measures: Vec<Measure>,
}

/// Returns the measures that would apply to a worker, without starting anything; for `cotenant check`.
///
/// # Errors
/// If the start would fail.
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
        let (steps, step) = io::pipe().map_err(|source| ConfineError::System {
            what: "a pipe",
            source,
        })?;
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

    /// Applies the parts that need the supervisor's rights: group, limits, user. Runs between fork and exec.
    ///
    /// Makes only system calls and allocates nothing, since another thread may have held a lock at the fork.
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
        // Without support, older kernels leave such processes to init.
        let _ = adopt_descendants();
        Ok(())
    }

    /// Applies the sandbox; later steps have only the rights of the worker. Runs between fork and exec, like
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

    pub(super) const fn group(&self) -> Option<&WorkerGroup> {
        self.group.as_ref()
    }

    /// Returns the group and the failed step of the new process; call it after the start succeeded or failed.
    pub(super) fn finish(self) -> (Option<WorkerGroup>, Option<&'static str>) {
        let Self {
            mut steps,
            step,
            group,
            ..
        } = self;
        drop(step);
        let mut done = Vec::new();
        // Both ends were close-on-exec, and ours is closed, so this does not block.
        let _ = steps.read_to_end(&mut done);
        (group, done.last().copied().and_then(Step::words))
    }

    fn at(&self, step: Step) {
        let byte = step as u8;
        // If it fails, an error message lacks the step.
        let _ = nix::unistd::write(&self.step, &[byte]);
    }
}

/// Steps of the new process before it executes the program.
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
    let missing = measures
        .iter()
        .find(|measure| measure.asked && measure.state.is_err());
    match missing {
        Some(measure) if confinement.required => Err(ConfineError::Required {
            measure: measure.to_string(),
        }),
        _ => Ok(()),
    }
}
