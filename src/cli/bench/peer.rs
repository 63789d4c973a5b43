//! Peer of a measurement: `llama-bench` on the same file.
//!
//! No setting is best for every figure, so the better one counts for each.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use serde_json::Value;

/// Tokens per second of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PeerFigure {
    /// Tokens of the prompt; zero for decoding.
    pub(super) prompt: u32,
    /// Tokens in the cache beforehand.
    pub(super) depth: u32,
    pub(super) tokens_per_s: f64,
}

/// Measurements of one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerJob<'job> {
    pub(super) program: &'job Path,
    pub(super) model: &'job Path,
    pub(super) threads: usize,
    /// Whether all its layers are on the GPU.
    pub(super) cuda: bool,
    pub(super) prompts: &'job [u32],
    pub(super) generate: u32,
    pub(super) depth: u32,
}

impl PeerJob<'_> {
    /// Runs the peer once in one of its settings.
    ///
    /// # Errors
    /// If it cannot be started, fails, or prints unexpected output.
    pub(super) fn run(&self, repack: bool) -> Result<Vec<PeerFigure>, String> {
        let prompts: Vec<String> = self.prompts.iter().map(u32::to_string).collect();
        let output = Command::new(self.program)
            .arg("-m")
            .arg(self.model)
            .args(["-t", &self.threads.to_string()])
            .args(["-p", &prompts.join(",")])
            .args(["-n", &self.generate.to_string()])
            .args(["-d", &self.depth.to_string()])
            .args(["-r", "1", "-o", "json"])
            .args(["--repack", if repack { "1" } else { "0" }])
            .args(["-ngl", "99"].iter().filter(|_| self.cuda))
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .map_err(|error| format!("cannot start `{}`: {error}", self.program.display()))?;
        if !output.status.success() {
            return Err(format!(
                "`{}` failed: {}",
                self.program.display(),
                output.status
            ));
        }
        parse(&output.stdout)
            .ok_or_else(|| format!("`{}` printed no figures", self.program.display()))
    }
}

fn parse(stdout: &[u8]) -> Option<Vec<PeerFigure>> {
    let runs: Vec<Value> = serde_json::from_slice(stdout).ok()?;
    let number = |run: &Value, key: &str| u32::try_from(run.get(key)?.as_u64()?).ok();
    runs.iter()
        .map(|run| {
            Some(PeerFigure {
                prompt: number(run, "n_prompt")?,
                depth: number(run, "n_depth").unwrap_or(0),
                tokens_per_s: run.get("avg_ts")?.as_f64()?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_of_a_run_are_read() {
        let text =
            br#"[{"n_prompt": 128, "n_gen": 0, "n_depth": 0, "avg_ts": 246.5, "stddev_ts": 0.0},
                        {"n_prompt": 0, "n_gen": 64, "n_depth": 1024, "avg_ts": 62}]"#;
        let figure = |prompt, depth, tokens_per_s| PeerFigure {
            prompt,
            depth,
            tokens_per_s,
        };
        assert_eq!(
            parse(text),
            Some(vec![figure(128, 0, 246.5), figure(0, 1024, 62.0)])
        );
        assert_eq!(parse(b"error"), None);
    }
}
