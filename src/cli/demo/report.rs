//! Results of the demonstration, compared with the promises.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::watch::{Line, Look, Watch};
use crate::{
    chart::{Chart, ChartMark, ChartPoint, MarkKind},
    stage::Stage,
};
use cotenant_probe::{ProbeRoot, capabilities::Capabilities};
use cotenant_rpc::v1::GetStatusResponse;
use cotenant_speech::audio::{MonoAudio, parse_wav};
use cotenant_units::{Bytes, Timestamp, causes::in_one_line};

#[derive(Clone, Debug)]
pub(super) struct Check {
    promise: &'static str,
    kept: bool,
    figures: String,
}

impl Check {
    /// Creates a check: whether `promise` was kept, and the figures that show it.
    pub(super) const fn new(promise: &'static str, kept: bool, figures: String) -> Self {
        Self {
            promise,
            kept,
            figures,
        }
    }
}

#[derive(Debug)]
pub(super) struct Report {
    total: Bytes,
    checks: Vec<Check>,
    marks: Vec<ChartMark>,
}

impl Report {
    /// Creates an empty report for a session with this much memory.
    pub(super) fn new(total: Bytes) -> Self {
        Self {
            total,
            checks: Vec::new(),
            marks: Vec::new(),
        }
    }

    pub(super) fn check(&mut self, check: Check) {
        self.checks.push(check);
    }

    /// Adds a mark to the chart at the present time.
    pub(super) fn mark(&mut self, began: Instant, kind: MarkKind, label: &str) {
        self.marks.push(ChartMark {
            at: Timestamp::START + began.elapsed(),
            label: label.to_owned(),
            kind,
        });
    }

    pub(super) fn passed(&self) -> bool {
        self.checks.iter().all(|check| check.kept)
    }

    /// Returns the checks, a line each, and the verdict.
    pub(super) fn verdict(&self) -> String {
        let mut text = String::new();
        for check in &self.checks {
            let mark = if check.kept { "ok  " } else { "FAIL" };
            let _ = writeln!(text, "  {mark}  {} ({})", check.promise, check.figures);
        }
        let kept = self.checks.iter().filter(|check| check.kept).count();
        let verdict = if self.passed() { "PASS" } else { "FAIL" };
        let _ = write!(
            text,
            " {verdict}  {kept} of {} promises kept",
            self.checks.len()
        );
        text
    }

    /// Returns checks and verdict for programs.
    pub(super) fn json(&self, written: &[PathBuf]) -> Value {
        let checks: Vec<Value> = self
            .checks
            .iter()
            .map(|check| json!({ "promise": check.promise, "kept": check.kept, "figures": check.figures }))
            .collect();
        json!({ "ok": self.passed(), "checks": checks, "written": written })
    }

    /// Returns the chart of memory by owner over time.
    pub(super) fn chart(&self, looks: &[Look]) -> Chart {
        let end = looks.last().map(|look| look.at).unwrap_or_default();
        Chart {
            title: "cotenant demo: memory by owner".to_owned(),
            subtitle: format!(
                "{:.0} s on {}: PSS of each process as the kernel counts it; the LLM by its own mappings",
                end.since_start().as_secs_f64(),
                self.total
            ),
            points: looks
                .iter()
                .map(|look| ChartPoint {
                    at: look.at,
                    owners: look.owners.clone(),
                })
                .collect(),
            budget: self.total,
            budget_name: "session",
            epoch: None,
            marks: self.marks.clone(),
            order: ["supervisor", "tts", "asr", "llm", "neighbour"]
                .map(str::to_owned)
                .to_vec(),
        }
    }

    /// Writes chart, events and log to `folder`; returns the written files.
    pub(super) fn write(
        &self,
        folder: &Path,
        watch: &Watch,
        stage: &Stage,
    ) -> io::Result<Vec<PathBuf>> {
        let [chart, events, log] = FILES.map(|name| folder.join(name));
        let svg = self
            .chart(&watch.looks())
            .to_svg()
            .map_err(io::Error::other)?;
        fs::write(&chart, svg)?;
        fs::copy(stage.journal(), &events)?;
        fs::copy(stage.log(), &log)?;
        Ok(vec![chart, events, log])
    }
}

/// Writes the conversation as one WAV file with half a second between question and answer.
pub(super) fn write_conversation(folder: &Path, parts: &[&[u8]]) -> Result<PathBuf, String> {
    let path = folder.join("demo-conversation.wav");
    let wrong = |error: &dyn std::error::Error| {
        format!("cannot write `{}`: {}", path.display(), in_one_line(error))
    };
    let mut conversation: Option<MonoAudio> = None;
    for part in parts {
        let mut audio = parse_wav(part, Duration::from_secs(300)).map_err(|error| wrong(&error))?;
        audio.pad(Duration::ZERO, Duration::from_millis(500));
        match &mut conversation {
            Some(before) => before.samples.extend(audio.samples),
            none => *none = Some(audio),
        }
    }
    let file = conversation
        .unwrap_or_default()
        .to_wav()
        .map_err(|error| wrong(&error))?;
    fs::write(&path, file).map_err(|error| wrong(&error))?;
    Ok(path)
}

/// Memory by owner, as predicted by `cotenant plan` and as counted by the kernel.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    owners: BTreeMap<String, [Bytes; 2]>,
    /// KV memory of the LLM not yet touched.
    untouched: Bytes,
}

impl Sizes {
    /// Takes the prediction of `plan`, and the last look at each owner in it.
    pub(super) fn of(looks: &[Look], planned: BTreeMap<String, Bytes>) -> Self {
        let last = looks.last();
        let measured = |owner: &str| {
            last.and_then(|look| look.owners.get(owner).copied())
                .unwrap_or_default()
        };
        let owners = planned.into_iter().map(|(owner, bytes)| {
            let measured = measured(&owner);
            (owner, [bytes, measured])
        });
        Self {
            owners: owners.collect(),
            untouched: last.map_or(Bytes::ZERO, |look| look.untouched),
        }
    }

    /// Checks that no holder uses more than planned, and that the LLM uses what was planned for it.
    pub(super) fn check(&self) -> Check {
        let within = |[planned, measured]: [Bytes; 2]| {
            measured <= planned.saturating_add(planned.per_mille(50))
        };
        let [planned, measured] = self.owners.get("llm").copied().unwrap_or_default();
        // Some pages of the file and of the workspace may not have been touched yet.
        let near = measured.saturating_add(self.untouched) >= planned.per_mille(800);
        Check::new(
            "memory is as `plan` said",
            near && self.owners.values().all(|sizes| within(*sizes)),
            self.to_string(),
        )
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self
            .owners
            .iter()
            .map(|(owner, [planned, measured])| format!("{owner} {measured} of {planned}"))
            .collect();
        write!(
            out,
            "measured of planned: {}; {} of the LLM's KV cache is not touched yet",
            parts.join(", "),
            self.untouched
        )
    }
}

/// Written files: the chart, the journal, the daemon's log.
const FILES: [&str; 3] = ["demo-report.svg", "demo-events.ndjson", "demo-daemon.log"];

/// Creates the folder of the report, and checks that it is writable.
pub(super) fn make_folder(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    nix::unistd::access(folder, nix::unistd::AccessFlags::W_OK).map_err(io::Error::from)
}

/// Lists real and missing features of this host in the demonstration.
pub(super) fn what_is_real() -> Vec<String> {
    let capabilities = Capabilities::probe(&ProbeRoot::default());
    let mut lines = vec![
        "real here: the daemon, the model, both speech workers, every page of memory, the kernel's figures".to_owned(),
    ];
    lines.extend(
        capabilities
            .lines()
            .into_iter()
            .map(|line| format!("this host: {line}")),
    );
    lines
}

/// Checks that shed memory was returned to the system: by the kernel's figures in the engine's report of each plan, and
/// in those of the daemon's process.
pub(super) fn verified(lines: &[Line], before: Option<Bytes>, after: Option<Bytes>) -> Check {
    let freed: u64 = lines
        .iter()
        .filter(|line| line.name == "engine_applied")
        .filter_map(|line| line.body.get("freed")?.as_u64())
        .max()
        .unwrap_or(0);
    let (freed, fell) = (
        Bytes::new(freed),
        before
            .unwrap_or_default()
            .saturating_sub(after.unwrap_or_default()),
    );
    // Growth of other parts of the daemon may hide a tenth of the largest release, or 1 MiB.
    let hidden = freed.per_mille(100).max(Bytes::from_mib(1));
    let kept = freed > Bytes::ZERO && fell.saturating_add(hidden) >= freed;
    Check::new(
        "verified = claimed",
        kept,
        format!("the largest shed freed {freed}; the daemon's process shrank by {fell} in all"),
    )
}

pub(super) fn within_budget(looks: &[Look]) -> Check {
    let most = looks.iter().map(|look| look.held).max().unwrap_or_default();
    let budget = looks.last().map(|look| look.budget).unwrap_or_default();
    let over = looks.iter().filter(|look| look.held > look.budget).count();
    Check::new(
        "leases ≤ budget in every sample",
        over == 0 && !looks.is_empty(),
        format!("at most {most} of {budget} in {} samples", looks.len()),
    )
}

/// Checks that neither the supervisor, except at this program's request, nor the kernel killed or stopped anything.
/// Restarts of an idle server that had grown are counted separately.
pub(super) fn no_kills(
    lines: &[Line],
    status: &GetStatusResponse,
    neighbour_alive: bool,
    asked: usize,
) -> Check {
    let stops = lines.iter().filter(|line| line.name == "stop_worker");
    let (renewed, stopped): (Vec<&Line>, Vec<&Line>) = stops.partition(|line| {
        line.body
            .get("reason")
            .is_some_and(|reason| reason == "outgrown")
    });
    let stopped = stopped.len().saturating_sub(asked);
    let mut oom: Vec<u64> = lines
        .iter()
        .filter(|line| line.name == "sampled")
        .filter_map(|line| line.body.get("oom_kills")?.as_u64())
        .collect();
    oom.extend(
        status
            .pressure
            .as_ref()
            .and_then(|pressure| pressure.oom_kills),
    );
    let kernel = oom.iter().max().unwrap_or(&0) - oom.iter().min().unwrap_or(&0);
    Check::new(
        "0 kills by the supervisor, 0 by the kernel",
        stopped == 0 && kernel == 0 && neighbour_alive,
        format!(
            "{stopped} workers stopped, {} restarted without work, {kernel} OOM kills",
            renewed.len()
        ),
    )
}

pub(super) fn daemon_lives(lives: bool) -> Check {
    Check::new(
        "the daemon survived",
        lives,
        String::from(if lives { "yes" } else { "it ended" }),
    )
}
