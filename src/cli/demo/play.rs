//! Script of the demonstration: models, budget, workers and the other program.

use std::{net::SocketAddr, path::Path, path::PathBuf};

use crate::stage::places;
use cotenant_rpc::v1::GetStatusResponse;
use cotenant_units::Bytes;

/// Additional MiB of a process of an unoptimised build over a release build, measured.
const HEAVIER: u64 = if cfg!(debug_assertions) { 6 } else { 0 };

/// Scenario of the demonstration: models and sizes.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    /// Total memory of the demonstration's session.
    pub(super) total: Bytes,
    /// Its reserve, for the supervisor itself and this program.
    reserve: Bytes,
    /// Least memory taken by the neighbour without a lease.
    neighbour: Bytes,
    pub(super) model: &'static str,
    pub(super) question: &'static str,
    /// Request that keeps the LLM generating: prompt and token limit.
    pub(super) story: &'static str,
    pub(super) story_tokens: u32,
    /// The two variants of ASR.
    pub(super) asr_variants: Option<[&'static str; 2]>,
    pub(super) asr_growth: &'static str,
    /// `llm:` without `path` and `name`, and `workers:`.
    llm: &'static str,
    workers: String,
    /// Folder with published models; `None` for the demo model.
    published: Option<PathBuf>,
}

impl Scenario {
    /// Demo model with pocketsphinx and flite, all available in this repository and Debian.
    pub(super) fn built_in() -> Self {
        let workers = format!(
            "  - name: tts
    role: tts
    argv: [\"${{SELF}}\", worker, tts, --socket, \"${{SOCKET}}\"]
    memory: {{steady: {tts}MiB, peak: {tts_peak}MiB}}
  - name: asr
    role: asr
    argv: [\"${{SELF}}\", worker, asr, --socket, \"${{SOCKET}}\", --vocabulary, \"${{VARIANT}}\", --grammar, \"{{FOLDER}}/home.gram\"]
    memory:
      variants:
        - {{name: grammar, bytes: {grammar}MiB, peak: {grammar_peak}MiB}}
        - {{name: open, bytes: {open}MiB, peak: {open_peak}MiB}}
",
            tts = 10 + HEAVIER,
            tts_peak = 16 + HEAVIER,
            grammar = 40 + HEAVIER,
            grammar_peak = 48 + HEAVIER,
            open = 110 + HEAVIER,
            open_peak = 116 + HEAVIER,
        );
        Self {
            total: Bytes::from_mib(300 + 5 * HEAVIER),
            reserve: Bytes::from_mib(56 + 2 * HEAVIER),
            neighbour: Bytes::from_mib(186),
            model: "demo",
            question: "turn on the kitchen light",
            story: "tell me a story",
            story_tokens: 256,
            asr_variants: Some(["grammar", "open"]),
            asr_growth: "requests its open vocabulary, +68 MiB",
            llm: "context: 65536, kv_floor: 512",
            workers,
            published: None,
        }
    }

    /// SmolLM2, Whisper and Piper, which `deploy/real/fetch` has downloaded to `folder`.
    pub(super) fn published(folder: &Path) -> Self {
        // Measured together, as PSS: Whisper uses 160 MiB after short questions, and 232 MiB while loading. Piper
        // starts with 50 MiB, uses 180 MiB after its first sentence and 215 MiB after one of three seconds, and keeps
        // that.
        let workers = "  - name: tts
    role: tts
    argv: [\"{MODELS}/servers/bin/wyoming-piper\", --uri, \"unix://${SOCKET}\", --voice, en_US-joe-medium, --data-dir, \"{MODELS}\"]
    memory: {steady: 230MiB, peak: 260MiB}
  - name: asr
    role: asr
    argv: [\"{MODELS}/servers/bin/wyoming-faster-whisper\", --uri, \"unix://${SOCKET}\", --model, \"{MODELS}/whisper-tiny.en\",
           --language, en, --device, cpu, --compute-type, int8, --beam-size, \"1\", --data-dir, \"{FOLDER}\", --local-files-only]
    memory: {steady: 200MiB, peak: 250MiB}
"
        .replace("{MODELS}", &folder.display().to_string());
        Self {
            // At rest everything fits: the complete LLM and the workers' memory after a sentence, with the reserve and
            // the watermark's hysteresis. While Whisper loads, it does not.
            total: Bytes::from_mib(896 + 2 * HEAVIER),
            reserve: Bytes::from_mib(64 + 2 * HEAVIER),
            neighbour: Bytes::from_mib(250),
            model: "smollm2",
            question: "What is the capital of Germany?",
            story: "Tell me a story about a lighthouse keeper.",
            story_tokens: 128,
            asr_variants: None,
            asr_growth: "was stopped and starts, +250 MiB",
            llm: "context: 8192, kv_floor: 512",
            workers,
            published: Some(folder.to_owned()),
        }
    }

    /// Returns the memory that the neighbour takes: more than the KV cache can release, so that layers are shed too.
    /// Published servers use more or less by what they have heard and said, so it depends on the present headroom.
    pub(super) fn neighbour(&self, status: &GetStatusResponse) -> Bytes {
        let (Some(pressure), Some(engine), true) =
            (&status.pressure, &status.engine, self.published.is_some())
        else {
            return self.neighbour;
        };
        let headroom = Bytes::new(pressure.headroom_bytes.unwrap_or_default());
        let kv = engine
            .kv_capacity_bytes
            .saturating_sub(engine.kv_untouched_bytes);
        headroom
            .saturating_sub(Bytes::new(pressure.elevated_below_bytes))
            .saturating_add(Bytes::new(kv))
            .saturating_add(BEYOND_KV)
            .max(self.neighbour)
    }

    pub(super) fn configuration(&self, folder: &Path, http: SocketAddr) -> String {
        let model = match &self.published {
            Some(models) => models.join("SmolLM2-135M-Instruct.Q4_1.gguf"),
            None => folder.join("demo.gguf"),
        };
        let mut text = format!(
            "\
budget:
  total: {total}MiB
  reserve: {reserve}MiB{hysteresis}
  scope: session          # what counts is the memory of the demonstration's own processes
  dwell: 2s
  sample_max: 100ms
  fill_rate_max: 400MiB    # the neighbour takes 80 MiB a second
shedding: {{reclaim_min: 16MiB}}
# The kernel, too, sees what is held, given up and grown back: KV memory is taken at once.
llm: {{path: \"{model}\", name: {name}, threads: 1, {llm}, kv_memory: at-once, mode: balanced}}
workers:
{workers}",
            total = self.total.whole_mib(),
            reserve = self.reserve.whole_mib(),
            // A minimum shed ends a level.
            hysteresis = self
                .published
                .as_ref()
                .map_or("", |_| "\n  hysteresis: 16MiB"),
            model = model.display(),
            name = self.model,
            llm = self.llm,
            workers = self
                .workers
                .replace("{FOLDER}", &folder.display().to_string()),
        );
        text += &format!("http: {{listen: {http}}}\n{}", places(folder));
        text
    }
}

/// Memory that the neighbour takes beyond what the KV cache can release: some layers of SmolLM2. Our choice.
const BEYOND_KV: Bytes = Bytes::from_mib(8);
/// Memory that the neighbour takes in a second.
pub(super) const NEIGHBOUR_RATE: Bytes = Bytes::from_mib(80);
