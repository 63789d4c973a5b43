//! Workers in `cotenant check`: command line and confinement of each.

use std::{fmt::Write as _, path::Path};

use serde_json::{Value, json};

use cotenant_config::{Config, WorkerConfig, WorkerProtocol};
use cotenant_daemon::spec_of;
use cotenant_probe::ProbeRoot;
use cotenant_units::TimeSpan;
use cotenant_worker::{
    confine::{Groups, survey},
    launch::{Foreseen, foresee},
    spec::Readiness,
};

/// Facts about a worker before its start.
pub(super) struct WorkerCheck {
    name: String,
    argv: Vec<String>,
    protocol: &'static str,
    endpoint: Option<String>,
    ready: String,
    confinement: Vec<String>,
    /// Conditions that may change before it is started: a port in use by another process.
    pub(super) warnings: Vec<String>,
    /// Reasons that would prevent its start.
    pub(super) problems: Vec<String>,
}

/// Checks all workers of a configuration without starting any.
pub(super) fn check(config: &Config) -> Vec<WorkerCheck> {
    let groups = Groups::look(&ProbeRoot::default());
    config
        .workers
        .iter()
        .map(|worker| check_one(worker, &config.runtime_dir, &groups))
        .collect()
}

fn check_one(config: &WorkerConfig, runtime_dir: &Path, groups: &Groups) -> WorkerCheck {
    let spec = spec_of(config, runtime_dir);
    let mut check = WorkerCheck {
        name: config.name.clone(),
        argv: Vec::new(),
        protocol: match config.protocol {
            WorkerProtocol::None => "none",
            WorkerProtocol::OpenaiHttp => "openai-http",
            WorkerProtocol::PiperHttp => "piper-http",
            WorkerProtocol::WhisperServer => "whisper-server",
            WorkerProtocol::Wyoming => "wyoming",
        },
        endpoint: None,
        ready: format!(
            "{} within {}",
            readiness(&spec.readiness),
            TimeSpan(config.ready.timeout)
        ),
        confinement: Vec::new(),
        warnings: Vec::new(),
        problems: Vec::new(),
    };
    match foresee(&spec) {
        Ok(Foreseen {
            argv,
            endpoint,
            taken_by,
        }) => {
            check.argv = argv;
            check.endpoint = endpoint;
            check.warnings.extend(taken_by);
        }
        Err(error) => check.problems.push(error.to_string()),
    }
    let program = check.argv.first().map(String::as_str).unwrap_or_default();
    match survey(
        &spec.confinement,
        groups,
        program,
        spec.working_dir.as_deref(),
    ) {
        Ok(measures) => check.confinement = measures.iter().map(ToString::to_string).collect(),
        Err(error) => check.problems.push(error.to_string()),
    }
    check
}

fn readiness(readiness: &Readiness) -> String {
    match readiness {
        Readiness::Connect => "it accepts a connection".to_owned(),
        Readiness::Describe => "it answers `describe`".to_owned(),
        Readiness::Http { path, status } => format!("`GET {path}` is answered with {status}"),
        Readiness::LogLine(text) => format!("a line contains `{text}`"),
        Readiness::LogPattern(pattern) => format!("a line matches `{pattern}`"),
        Readiness::Notify => "it sends `READY=1`".to_owned(),
        Readiness::Started => "it runs".to_owned(),
    }
}

impl WorkerCheck {
    pub(super) fn lines(&self) -> Vec<String> {
        let place = self.endpoint.as_deref().unwrap_or("nowhere");
        let mut lines = vec![format!(
            "{}: {} at {place}; ready when {}",
            self.name, self.protocol, self.ready
        )];
        let mut argv = String::new();
        for word in &self.argv {
            let plain = !word.is_empty()
                && !word.contains(|c: char| c.is_whitespace() || "\"'\\$".contains(c));
            let _ = if plain {
                write!(argv, " {word}")
            } else {
                write!(argv, " {word:?}")
            };
        }
        lines.push(format!("  argv:{argv}"));
        lines.extend(self.confinement.iter().map(|line| format!("  {line}")));
        lines.extend(
            self.warnings
                .iter()
                .map(|line| format!("  warning: {line}")),
        );
        lines.extend(
            self.problems
                .iter()
                .map(|line| format!("  cannot start: {line}")),
        );
        lines
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "name": self.name,
            "argv": self.argv,
            "protocol": self.protocol,
            "endpoint": self.endpoint,
            "ready": self.ready,
            "confinement": self.confinement,
            "warnings": self.warnings,
            "problems": self.problems,
        })
    }
}
