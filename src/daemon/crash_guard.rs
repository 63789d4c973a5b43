//! Counter of runs without an orderly end, which disables the LLM after several in a short time.
//!
//! The LLM runs in this process, so a fault of it may end the daemon at each load; the speech workers are useful
//! without it. Runs of another program or configuration do not count: an upgrade ends the daemon with SIGKILL, so that
//! its workers survive, and a new program has not crashed yet.

use std::{
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde::{Deserialize, Serialize};

use cotenant_config::SafeProfileConfig;
use cotenant_policy::health::SAFE_PROFILE;
use cotenant_units::TimeSpan;

const FILE: &str = "runs.json";

/// Start times of runs without an orderly end, including the current one, in seconds since 1970.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct Runs {
    /// Hash of the program and configuration of these runs.
    subject: String,
    open: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct CrashGuard {
    file: PathBuf,
    subject: String,
    started: u64,
}

impl CrashGuard {
    /// Records this run, with the configuration in `config`, as a possible crash. Returns the reason to keep the LLM
    /// off, if enough earlier runs have crashed.
    pub(super) fn begin(
        state_dir: &Path,
        config: &Path,
        limits: SafeProfileConfig,
    ) -> (Self, Option<String>) {
        let started = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |time| time.as_secs());
        Self::begin_at(
            state_dir,
            limits,
            started,
            subject(Path::new(PROGRAM), config),
        )
    }

    fn begin_at(
        state_dir: &Path,
        limits: SafeProfileConfig,
        started: u64,
        subject: String,
    ) -> (Self, Option<String>) {
        let guard = Self {
            file: state_dir.join(FILE),
            subject,
            started,
        };
        let mut runs = guard.read();
        if runs.subject != guard.subject {
            runs = Runs {
                subject: guard.subject.clone(),
                open: Vec::new(),
            };
        }
        // If the clock was set back, a start may be later than now, with unknown age.
        runs.open.retain(|start| {
            started.saturating_sub(*start) <= limits.within.as_secs() && *start <= started
        });
        let crashes = runs.open.len();
        runs.open.push(started);
        guard.write(&runs);
        let enough = usize::try_from(limits.crashes).unwrap_or(usize::MAX);
        let safe = enough > 0 && crashes >= enough;
        let reason = safe.then(|| {
            format!(
                "{SAFE_PROFILE}: the daemon crashed {crashes} times within {}; `cotenant load` or `cotenant reload` loads the LLM",
                TimeSpan(limits.within)
            )
        });
        (guard, reason)
    }

    /// Records an orderly end of the run.
    pub(super) fn ended(self) {
        let mut runs = self.read();
        if runs.subject != self.subject {
            return;
        }
        if let Some(own) = runs.open.iter().rposition(|start| *start == self.started) {
            runs.open.remove(own);
        }
        self.write(&runs);
    }

    /// Returns the recorded runs; none if the file cannot be read: a low count only delays the safe profile.
    fn read(&self) -> Runs {
        let read = fs::read(&self.file).and_then(|text| Ok(serde_json::from_slice(&text)?));
        read.unwrap_or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(file = %self.file.display(), %error, "cannot read how earlier runs ended");
            }
            Runs::default()
        })
    }

    fn write(&self, runs: &Runs) {
        let new = self.file.with_extension("json.new");
        let written = serde_json::to_vec(runs).map_err(io::Error::from);
        let written = written
            .and_then(|text| fs::write(&new, text))
            .and_then(|()| fs::rename(&new, &self.file));
        if let Err(error) = written {
            tracing::warn!(file = %self.file.display(), %error, "cannot store the crash count");
        }
    }
}

/// The running program, even if its file was replaced.
const PROGRAM: &str = "/proc/self/exe";

/// Returns a hash of a program file's identity and a configuration's contents; it changes whenever the file is
/// replaced, even by an equal one, or the contents change.
fn subject(program: &Path, config: &Path) -> String {
    let program = fs::metadata(program).map_or((0, 0, 0), |file| {
        (file.ctime(), file.ctime_nsec(), file.len())
    });
    let mut hasher = DefaultHasher::new();
    fs::read(config).unwrap_or_default().hash(&mut hasher);
    format!(
        "{}.{:09}-{}-{:016x}",
        program.0,
        program.1,
        program.2,
        hasher.finish()
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn runs_of_another_program_or_configuration_do_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let (program, config) = (folder.path().join("program"), folder.path().join("config"));
        let write = |path: &Path, text: &str| {
            let _ = fs::remove_file(path);
            fs::write(path, text).unwrap();
        };
        write(&program, "old");
        write(&config, "llm: {}");
        let limits = SafeProfileConfig {
            crashes: 2,
            within: Duration::from_secs(600),
        };
        let begin =
            |at| CrashGuard::begin_at(folder.path(), limits, at, subject(&program, &config)).1;
        assert_eq!([begin(100), begin(101)], [None, None]);
        assert!(begin(102).is_some());
        write(&program, "newer");
        assert_eq!([begin(103), begin(104)], [None, None], "an upgrade");
        write(&config, "llm: {context: 64}");
        assert_eq!(
            [begin(105), begin(106)],
            [None, None],
            "another configuration"
        );
        assert!(begin(107).is_some());
    }

    #[test]
    fn crashes_within_the_time_count_and_runs_that_ended_in_order_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let limits = SafeProfileConfig {
            crashes: 2,
            within: Duration::from_secs(600),
        };
        let begin = |at| CrashGuard::begin_at(folder.path(), limits, at, String::new());
        let (first, reason) = begin(1000);
        assert_eq!(reason, None);
        first.ended();
        for (at, safe) in [
            (1100, false),
            (1200, false),
            (1300, true),
            (1301, true),
            (1801, true),
            (2500, false),
        ] {
            let (_crashes, reason) = begin(at);
            assert_eq!(reason.is_some(), safe, "{at}: {reason:?}");
        }
        // Two runs started in one second; a clock that was set back; an invalid file.
        begin(2500).0.ended();
        assert!(begin(100).1.is_none());
        fs::write(folder.path().join(FILE), "nonsense").unwrap();
        assert!(begin(200).1.is_none());
        let never = SafeProfileConfig {
            crashes: 0,
            ..limits
        };
        assert!(
            CrashGuard::begin_at(folder.path(), never, 201, String::new())
                .1
                .is_none()
        );
    }
}
