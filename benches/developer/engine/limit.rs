//! Engine and llama.cpp's `mmap` under the same memory limit.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use serde_json::{Value, json};

use super::{EngineArgs, Workbench};
use cotenant::{
    cli::bench::engine::{TOKENS, in_one_line},
    engine::{Flow, Model},
    policy::{params::EngineParams, residency::PlanLimits},
    units::{Bytes, Tokens},
};

/// Memory control group, removed on drop.
struct Group {
    folder: PathBuf,
}

impl Group {
    /// Creates a group limited to `limit`; `None` if control groups of version 1 are missing or not writable.
    fn new(limit: Bytes) -> Option<Self> {
        let folder =
            Path::new(MEMORY_GROUPS).join(format!("cotenant-bench-{}", std::process::id()));
        fs::create_dir(&folder).ok()?;
        let group = Self { folder };
        fs::write(
            group.folder.join("memory.limit_in_bytes"),
            limit.get().to_string(),
        )
        .ok()?;
        Some(group)
    }

    /// Runs a program in the group; returns its output, or its failure.
    fn run(&self, program: &Path, args: &[String]) -> Result<Vec<u8>, String> {
        let output = Command::new("/bin/sh")
            .args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""])
            .arg(&self.folder)
            .arg(program)
            .args(args)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("cannot start `{}`: {error}", program.display()))?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said
            .lines()
            .find(|line| line.starts_with("error"))
            .unwrap_or_default();
        Err(format!("{} {said}", output.status))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Empty, since its program has ended; remaining charges move to the parent group.
        fs::remove_dir(&self.folder).ok();
    }
}

impl Workbench<'_> {
    /// Measures decoding under memory limits in percent of the weights: ours with the plan that fits, the peer by
    /// `mmap`.
    pub(crate) fn limits(&mut self) -> Result<(), String> {
        let weights: Bytes = self.layout.parts.iter().map(|part| part.arena).sum();
        let program = std::env::current_exe().map_err(|error| in_one_line(&error))?;
        for &share in &self.args.limit {
            let limit = Bytes::new(weights.get() / 100 * u64::from(share));
            let Some(group) = Group::new(limit) else {
                self.notes.push(format!(
                    "no memory limits: there is no writable control group of version 1 at {MEMORY_GROUPS}"
                ));
                return Ok(());
            };
            forget(&self.path);
            let hold = limit.saturating_sub(PROCESS).whole_mib();
            let args = [
                "engine",
                "-o",
                "json",
                "--threads",
                &self.settings.threads.to_string(),
                "--model",
            ]
            .map(str::to_owned)
            .into_iter()
            .chain([
                self.path.display().to_string(),
                "--hold-mib".to_owned(),
                hold.to_string(),
            ]);
            let printed = group.run(&program, &args.collect::<Vec<_>>());
            let ours = printed
                .and_then(|text| rate(&text, "tokens_per_s").ok_or_else(|| NO_FIGURE.to_owned()));
            let what = format!("decode under a limit of {share} % of the weights");
            match ours {
                Ok(rate) => self.values.add(&what, TOKENS, rate),
                Err(ref end) => self.notes.push(format!("{what}: ours ended with {end}")),
            }
            let Some(peer) = &self.settings.peer else {
                continue;
            };
            forget(&self.path);
            let args = [
                "-t",
                &self.settings.threads.to_string(),
                "-p",
                "0",
                "-n",
                "6",
                "-r",
                "1",
                "-o",
                "json",
                "--repack",
                "0",
                "-m",
            ]
            .map(str::to_owned)
            .into_iter()
            .chain([self.path.display().to_string()]);
            let printed = group.run(peer, &args.collect::<Vec<_>>());
            let theirs = printed.and_then(|text| {
                let runs: Option<Vec<Value>> = serde_json::from_slice(&text).ok();
                runs.and_then(|runs| runs.first()?.get("avg_ts")?.as_f64())
                    .ok_or_else(|| NO_FIGURE.to_owned())
            });
            match theirs {
                Ok(theirs) => {
                    self.values.add(format!("{what}: peer"), TOKENS, theirs);
                    if let Ok(ours) = ours {
                        self.values
                            .add(format!("{what}: over the peer"), "ratio", ours / theirs);
                    }
                }
                Err(end) => self
                    .notes
                    .push(format!("{what}: the peer ended with {end}")),
            }
        }
        Ok(())
    }
}

/// Decodes with at most `args.hold_mib` held, and prints the rate.
pub(crate) fn held(args: &EngineArgs, path: &Path, hold: Bytes) -> Result<Value, String> {
    let (shape, header) = Model::inspect(path, usize::from(args.settings.threads))
        .map_err(|error| in_one_line(&error))?;
    drop(header);
    let limits = PlanLimits {
        kv_wanted: HELD_CONTEXT,
        kv_floor: HELD_CONTEXT,
        prefill_chunk: Tokens::new(16),
        ..PlanLimits::new(&EngineParams::default(), Tokens::ZERO)
    };
    let plan = shape
        .plan(hold, &limits)
        .map_err(|error| in_one_line(&error))?;
    let mut model = args.settings.opened(path, &plan, None, Model::open)?;
    let mut token = |number: u32| {
        model
            .forward(&[number], &mut || Flow::Continue)
            .map(|_| ())
            .map_err(|error| in_one_line(&error))
    };
    token(1)?;
    token(2)?;
    let started = Instant::now();
    let mut tokens = 0u32;
    while tokens < HELD_TOKENS && (tokens < 4 || started.elapsed() < HELD_TIME) {
        token(tokens)?;
        tokens += 1;
    }
    Ok(json!({
        "tokens_per_s": f64::from(tokens) / started.elapsed().as_secs_f64(),
        "resident_parts": plan.resident.len(),
        "parts": shape.layers.len(),
        "held_bytes": model.breakdown().total.get(),
    }))
}

fn rate(text: &[u8], field: &str) -> Option<f64> {
    serde_json::from_slice::<Value>(text)
        .ok()?
        .get(field)?
        .as_f64()
}

/// Drops the file from the page cache: pages left from another group would not be charged to this one.
fn forget(path: &Path) {
    if let Ok(file) = fs::File::open(path) {
        file.sync_all().ok();
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).ok();
    }
}

const NO_FIGURE: &str = "no figure";
const MEMORY_GROUPS: &str = "/sys/fs/cgroup/memory";
/// Memory of the process outside the ledger: its program, stacks, and heap; somewhat above 12 MiB was observed.
const PROCESS: Bytes = Bytes::from_mib(24);
const HELD_CONTEXT: Tokens = Tokens::new(256);
const HELD_TOKENS: u32 = 100;
const HELD_TIME: Duration = Duration::from_secs(6);
