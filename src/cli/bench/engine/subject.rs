//! Model under measurement, with its figures so far.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::Instant,
};

use super::{
    report::{Figure, Peer, Report, TOKENS, Values, mib},
    settings::{EngineSettings, OpenModel},
};
use crate::bench::{
    load::Reading,
    peer::{PeerFigure, PeerJob},
    report::{at, median},
};
use cotenant_engine::{
    ApplyReport, Checkpoint, Flow, Header, Logits, Model, arena, shape::Layout, spec::Spec,
};
use cotenant_memory::heap;
use cotenant_policy::{kv_type::KvType, residency::EnginePlan};
use cotenant_units::{Bytes, Tokens, causes::in_one_line};

/// A model under measurement.
pub struct Bench<'settings> {
    /// Settings.
    pub settings: &'settings EngineSettings,
    /// The model, opened.
    pub model: Model,
    /// Path of its file.
    pub path: PathBuf,
    /// Its layout.
    pub layout: Layout,
    /// Figures so far.
    pub values: Values,
    /// Remarks in the report.
    pub notes: Vec<String>,
    rss_before: Bytes,
    /// File pages in the process before it was loaded.
    files_before: Bytes,
    peer: Vec<PeerRun>,
}

/// Figures of the peer for one round and setting.
struct PeerRun {
    repack: bool,
    figures: Vec<PeerFigure>,
}

impl<'settings> Bench<'settings> {
    /// Opens the model with all layers resident.
    ///
    /// # Errors
    /// If it cannot be loaded.
    pub fn prepare(settings: &'settings EngineSettings, path: &Path) -> Result<Self, String> {
        let header = Header::read(path).map_err(|error| in_one_line(&error))?;
        let spec = Spec::read(&header).map_err(|error| in_one_line(&error))?;
        drop(header);
        let layout = Layout::of(&spec);
        heap::trim();
        let (rss_before, files_before) =
            (arena::process_resident(), arena::process_file_resident());
        let layers = count(layout.parts.len());
        let plan = EnginePlan {
            resident: (0..layers).collect(),
            kv_capacity: Tokens::new(capacity(settings, spec.context_max)),
            prefill_chunk: Tokens::new(settings.chunk),
            kv_type: KvType::F16,
        };
        let model = settings.opened(path, &plan, None, Model::open)?;
        Ok(Self {
            settings,
            model,
            path: path.to_owned(),
            layout,
            values: Values::default(),
            notes: Vec::new(),
            rss_before,
            files_before,
            peer: Vec::new(),
        })
    }

    /// Checks that the model is exact, and compares its memory with the ledger.
    ///
    /// # Errors
    /// If it is not exact.
    pub fn begin(&mut self) -> Result<(), String> {
        self.gate()?;
        self.memory();
        if self.settings.peer.is_none() {
            self.notes
                .push("no ratios: they need a peer (--peer)".to_owned());
        }
        Ok(())
    }

    /// Adds a remark if others used the processors during a round that began with `reading`.
    pub fn end_round(&mut self, round: u32, reading: &Reading) {
        match reading.foreign_percent() {
            Some(percent) if percent > FOREIGN_MAX_PERCENT => {
                self.notes.push(format!(
                    "round {round}: other processes used {percent:.0} % of the processors"
                ));
            }
            Some(_) => {}
            None => self
                .notes
                .push(format!("round {round}: use by other processes is unknown")),
        }
    }

    /// Checks that logits of a streamed pass are bit-identical to those of a resident one.
    fn gate(&mut self) -> Result<(), String> {
        let resident = self.sample()?;
        self.apply(0)?;
        let streamed = self.sample()?;
        self.apply(100)?;
        let same = |a: &[f32], b: &[f32]| {
            a.iter()
                .map(|x| x.to_bits())
                .eq(b.iter().map(|x| x.to_bits()))
        };
        if resident.iter().any(|logit| !logit.is_finite()) {
            return Err("the model's logits are not finite".to_owned());
        }
        if same(&resident, &streamed) {
            Ok(())
        } else {
            Err(
                "logits differ between resident and streamed layers; nothing was measured"
                    .to_owned(),
            )
        }
    }

    /// Returns logits after a prompt and a few more tokens.
    fn sample(&mut self) -> Result<Vec<f32>, String> {
        self.model.reset();
        let prompt = self.tokens(0, GATE_PROMPT);
        self.forward(&prompt)?;
        let mut last = Vec::new();
        for token in self.tokens(GATE_PROMPT, 3) {
            last = self.forward(&[token])?.to_vec();
        }
        Ok(last)
    }

    /// Compares the resident set with the ledger, with everything resident.
    fn memory(&mut self) {
        // The logits compared by the gate belong to the benchmark.
        heap::trim();
        let held = self.model.breakdown();
        // Untouched memory is leased, but not in the resident set.
        let book = held.used();
        let rss = arena::process_resident().saturating_sub(self.rss_before);
        let pages = self.model.kernel_resident();
        self.values.memory("book, all resident", held.total);
        self.values.memory(
            "of this context that no token has needed",
            held.kv_untouched,
        );
        self.values.memory(
            "of this the header with its vocabulary, on the heap",
            held.header,
        );
        self.values
            .memory("mappings in memory, as the kernel has it", pages);
        self.values.memory("resident set since opening", rss);
        let files = arena::process_file_resident().saturating_sub(self.files_before);
        self.values
            .memory("of this text and constants of the program", files);
        self.values
            .part("book without the untouched, over resident set", book, rss);
        let shape = self.model.shape();
        let tensors: Bytes = shape.layers.iter().map(|part| part.resident_bytes).sum();
        let kv = shape
            .kv
            .capacity_bytes(self.model.plan().kv_capacity, self.model.plan().kv_type);
        let bound =
            Bytes::new(tensors.get() / 100 * 103) + shape.state_bytes + kv + Bytes::from_mib(64);
        self.values.part(
            "resident set over 1.03 x weights + state + KV + 64 MiB",
            rss,
            bound,
        );
    }

    pub(super) fn speed(&mut self) -> Result<(), String> {
        for prompt in PROMPTS {
            if prompt > self.model.plan().kv_capacity.get() {
                continue;
            }
            self.model.reset();
            let tokens = self.tokens(0, prompt);
            let started = Instant::now();
            self.forward(&tokens)?;
            self.values.add(
                format!("prefill {prompt}"),
                TOKENS,
                f64::from(prompt) / started.elapsed().as_secs_f64(),
            );
        }
        let depth = self.depth();
        if depth > 0 {
            self.model.reset();
            let tokens = self.tokens(0, depth);
            self.forward(&tokens)?;
            let seconds = self.decode(self.settings.generate)?;
            self.values
                .speed(format!("decode at depth {depth}"), seconds);
        }
        self.model.reset();
        let first = self.tokens(0, 1);
        self.forward(&first)?;
        let compute = self.decode(self.settings.generate)?;
        self.values.speed("decode, 100 % resident", compute);
        for together in [2, 4, 8] {
            let seconds = self.decode_together(together)?;
            self.values.add(
                format!("time of {together} tokens over one"),
                "x",
                seconds / compute,
            );
        }
        Ok(())
    }

    /// Measures the seconds for `together` tokens at once, over as many tokens as one decoding figure.
    fn decode_together(&mut self, together: u32) -> Result<f64, String> {
        self.model.reset();
        let first = self.tokens(0, 1);
        self.forward(&first)?;
        let chunks = (self.settings.generate / together).max(1);
        let started = Instant::now();
        for chunk in 0..chunks {
            let list = self.tokens(1 + chunk * together, together);
            self.forward(&list)?;
        }
        Ok(started.elapsed().as_secs_f64() / f64::from(chunks))
    }

    /// Measures the seconds per token over `tokens` tokens.
    pub fn decode(&mut self, tokens: u32) -> Result<f64, String> {
        let list = self.tokens(1, tokens);
        let started = Instant::now();
        for token in list {
            self.forward(&[token])?;
        }
        Ok(started.elapsed().as_secs_f64() / f64::from(tokens))
    }

    /// Measures shedding half of the layers and reloading them, and the same for KV capacity.
    pub(super) fn elasticity(&mut self) -> Result<(), String> {
        let report = self.apply(50)?;
        self.values.time("shed of half the layers", report.took);
        self.values
            .memory("shed: freed, as the kernel has it", report.freed);
        self.values
            .part("shed: freed over asked", report.freed, report.asked);
        let report = self.apply(100)?;
        self.values.time("regrow of half the layers", report.took);
        let kv = self.model.shape().kv;
        let small = self.model.plan().kv_capacity;
        let more = Bytes::from_mib(self.settings.kv_mib)
            .get()
            .div_ceil(kv.block_bytes(KvType::F16).get().max(1));
        let more = u32::try_from(more.saturating_mul(u64::from(kv.block_tokens.get())))
            .unwrap_or(u32::MAX);
        let large = Tokens::new(small.get().saturating_add(more));
        for (name, capacity) in [("grow", large), ("shrink", small)] {
            let mut plan = self.model.plan().clone();
            plan.kv_capacity = capacity;
            let report = self.change(&plan)?;
            let moved = report.grown.max(report.freed);
            self.values.time(
                format!("KV {name} of {} MiB", moved.whole_mib()),
                report.took,
            );
        }
        Ok(())
    }

    /// Measures the most memory that prompts of several lengths hold in addition to weights, state and KV.
    pub fn workspace(&mut self) -> Result<(), String> {
        let lengths = std::iter::successors(Some(128u32), |length| length.checked_mul(4));
        for length in
            lengths.take_while(|&length| length <= self.settings.prompt_max.min(PROMPT_MAX))
        {
            if length > self.model.plan().kv_capacity.get() {
                break;
            }
            self.model.reset();
            let tokens = self.tokens(0, length);
            let mut peak = Bytes::ZERO;
            let mut watch = || {
                peak = peak.max(arena::process_resident());
                Flow::Continue
            };
            self.pass(&tokens, &mut watch)?;
            let held = self.model.breakdown();
            // Includes the context touched by the prompt, and no more.
            let other = held
                .used()
                .saturating_sub(held.workspace)
                .saturating_add(self.rss_before);
            self.values.add(
                format!("prefill workspace, prompt of {length}"),
                "MiB on the book",
                mib(held.workspace),
            );
            self.values.memory(
                format!("resident beside weights, state and KV, prompt of {length}"),
                peak.saturating_sub(other),
            );
        }
        Ok(())
    }

    pub(super) fn ask_peer(&mut self) -> Result<(), String> {
        let Some(program) = &self.settings.peer else {
            return Ok(());
        };
        for repack in [false, true] {
            let mut figures = Vec::new();
            let depths: &[(u32, &[u32])] = &[(0, &PROMPTS), (self.depth(), &[])];
            for (depth, prompts) in depths {
                if *depth == 0 && prompts.is_empty() {
                    continue;
                }
                let job = PeerJob {
                    program,
                    model: &self.path,
                    threads: usize::from(self.settings.threads),
                    cuda: self.settings.cuda,
                    prompts,
                    generate: self.settings.generate,
                    depth: *depth,
                };
                figures.extend(job.run(repack)?);
            }
            self.peer.push(PeerRun { repack, figures });
        }
        Ok(())
    }

    /// Measures tokens per second of the peer in its better setting; `None` without a peer.
    pub fn ask_decode(&self) -> Result<Option<f64>, String> {
        let Some(program) = &self.settings.peer else {
            return Ok(None);
        };
        let mut best: Option<f64> = None;
        for repack in [false, true] {
            let job = PeerJob {
                program,
                model: &self.path,
                threads: usize::from(self.settings.threads),
                cuda: self.settings.cuda,
                prompts: &[0],
                generate: self.settings.generate,
                depth: 0,
            };
            let rates = job
                .run(repack)?
                .into_iter()
                .map(|figure| figure.tokens_per_s);
            best = rates.chain(best).max_by(f64::total_cmp);
        }
        Ok(best)
    }

    /// Returns the peer's figure for one of ours, which has one value per round.
    fn peer_figure(&self, what: &str, ours: &[f64]) -> Option<Peer> {
        let (prompt, depth) = match what.strip_prefix("prefill ") {
            Some(prompt) => (prompt.parse().ok()?, 0),
            None if what == "decode, 100 % resident" => (0, 0),
            None => (0, what.strip_prefix("decode at depth ")?.parse().ok()?),
        };
        let of = |repack: bool| {
            let values: Vec<f64> = self
                .peer
                .iter()
                .filter(|run| run.repack == repack)
                .filter_map(|run| {
                    run.figures
                        .iter()
                        .find(|figure| figure.prompt == prompt && figure.depth == depth)
                })
                .map(|figure| figure.tokens_per_s)
                .collect();
            Some((repack, median(&values)?, values))
        };
        let (repack, middle, values) = [of(false), of(true)]
            .into_iter()
            .flatten()
            .max_by(|one, other| one.1.total_cmp(&other.1))?;
        let ratios: Vec<f64> = ours
            .iter()
            .zip(&values)
            .map(|(ours, peer)| ours / peer)
            .collect();
        Some(Peer {
            repack,
            median: middle,
            ratio: median(&ratios)?,
            ratio_least: ratios.iter().copied().min_by(f64::total_cmp)?,
            ratio_most: ratios.iter().copied().max_by(f64::total_cmp)?,
        })
    }

    /// Returns all figures.
    pub fn report(self) -> Report {
        let figures = self
            .values
            .order
            .iter()
            .filter_map(|(what, unit)| {
                let values = self.values.values.get(what)?;
                let mut sorted = values.clone();
                sorted.sort_by(f64::total_cmp);
                Some(Figure {
                    what: what.clone(),
                    unit,
                    median: median(values)?,
                    least: *sorted.first()?,
                    most: *sorted.last()?,
                    ninetieth: *at(&sorted, 900)?,
                    ninety_ninth: *at(&sorted, 990)?,
                    peer: self.peer_figure(what, values),
                })
            })
            .collect();
        Report {
            version: env!("CARGO_PKG_VERSION"),
            model: self.model.shape().name.clone(),
            file_bytes: file_bytes(&self.path),
            backend: self.model.backend_name(),
            chunk: self.settings.chunk,
            rounds: self.settings.rounds,
            exact: true,
            figures,
            notes: self.notes,
        }
    }

    /// Computes one pass over `tokens`.
    ///
    /// # Errors
    /// If the pass fails.
    pub fn forward(&mut self, tokens: &[u32]) -> Result<Logits<'_>, String> {
        self.pass(tokens, &mut || Flow::Continue)
    }

    /// Computes a pass over the tokens, with these checkpoints.
    pub(super) fn pass(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut impl Checkpoint,
    ) -> Result<Logits<'_>, String> {
        let logits = self.model.forward(tokens, checkpoint);
        logits.map_err(|error| in_one_line(&error))
    }

    /// Opens the same file a second time, under another plan.
    ///
    /// # Errors
    /// If it cannot be loaded.
    pub fn another(&self, plan: &EnginePlan, open: OpenModel) -> Result<Model, String> {
        self.settings.opened(&self.path, plan, None, open)
    }

    /// Makes `share` percent of the layers resident, spread evenly over the depth.
    pub fn apply(&mut self, share: u32) -> Result<ApplyReport, String> {
        let mut plan = self.model.plan().clone();
        plan.resident = spread(count(self.layout.parts.len()), share);
        self.change(&plan)
    }

    /// Applies a plan.
    pub fn change(&mut self, plan: &EnginePlan) -> Result<ApplyReport, String> {
        self.model.apply(plan).map_err(|error| in_one_line(&error))
    }

    /// Returns `count` tokens of a meaningless text, from position `from`.
    pub fn tokens(&self, from: u32, count: u32) -> Vec<u32> {
        let vocabulary = self.model.vocabulary().max(1);
        (from..from.saturating_add(count))
            .map(|place| place.wrapping_mul(7919) % vocabulary)
            .collect()
    }

    fn depth(&self) -> u32 {
        let room = self
            .model
            .plan()
            .kv_capacity
            .get()
            .saturating_sub(self.settings.generate);
        if self.settings.depth <= room {
            self.settings.depth
        } else {
            0
        }
    }
}

/// Returns a KV capacity that suffices for all figures.
fn capacity(settings: &EngineSettings, context_max: u32) -> u32 {
    let [_, longest] = PROMPTS;
    settings
        .depth
        .saturating_add(settings.generate)
        .max(settings.prompt_max.min(PROMPT_MAX))
        .max(longest)
        .min(context_max)
}

/// Selects `share` percent of `layers` layers, spread evenly.
pub fn spread(layers: u32, share: u32) -> BTreeSet<u32> {
    (0..layers)
        .filter(|layer| (layer + 1) * share / 100 > layer * share / 100)
        .collect()
}

/// Returns the size of a file; zero if it cannot be read.
pub fn file_bytes(path: &Path) -> Bytes {
    Bytes::new(std::fs::metadata(path).map_or(0, |file| file.len()))
}

/// Converts a number of layers.
pub fn count(layers: usize) -> u32 {
    u32::try_from(layers).unwrap_or(u32::MAX)
}

/// Prompt lengths for measuring prefill.
const PROMPTS: [u32; 2] = [128, 512];
/// Longest prompt for measuring the workspace, also with a larger `--prompt-max`: few models have a longer context.
const PROMPT_MAX: u32 = 32_768;
/// Prompt length for checking exactness: by default, several chunks of odd sizes.
const GATE_PROMPT: u32 = 150;
/// Use by others above which a round is marked: the limit of the peer survey (8 %).
const FOREIGN_MAX_PERCENT: f64 = 8.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_layers_is_spread_through_the_depth() {
        assert_eq!(spread(8, 100).len(), 8);
        assert!(spread(8, 0).is_empty());
        assert_eq!(spread(8, 50), BTreeSet::from([1, 3, 5, 7]));
        assert_eq!(spread(8, 25), BTreeSet::from([3, 7]));
        assert_eq!(spread(24, 75).len(), 18);
    }
}
