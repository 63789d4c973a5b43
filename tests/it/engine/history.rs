//! Bit-identical answers under any history of sheds, growth, splits and cancellations.

use std::{cell::RefCell, collections::BTreeSet, path::Path};

use crate::weights::Weights as _;
use cotenant::{
    engine::{
        ApplyError, ApplyReport, Checkpoint, Flow, ForwardError,
        gguf::GgmlDType,
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
    },
    policy::residency::EnginePlan,
    units::{Bytes, Tokens},
};
use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    PROMPT, expected, go, greedy, open, open_long, plan, reference, schedules, tiny, write,
};

#[derive(Clone, Debug)]
struct Step {
    resident: BTreeSet<u32>,
    kv: u32,
    chunk: u32,
    in_the_pass: bool,
}

/// Returns changes for a model of this many layers; its output head is one more part.
fn step(layers: u32) -> impl Strategy<Value = Step> {
    (
        prop::collection::btree_set(0..=layers, 0..=layers as usize + 1),
        0u32..400,
        1u32..20,
        any::<bool>(),
    )
        .prop_map(|(resident, kv, chunk, in_the_pass)| Step {
            resident,
            kv,
            chunk,
            in_the_pass,
        })
}

/// Model with a history of changes.
#[derive(Clone, Debug)]
struct History {
    architecture: Architecture,
    /// Depth and width determine the length of the ring, and the size of its pieces.
    layers: u32,
    feed_forward: u32,
    seed: u64,
    threads: usize,
    steps: Vec<Step>,
}

impl History {
    /// Large models are slow without optimisation, so runs with few histories have few of them.
    fn any(few: bool) -> impl Strategy<Value = Self> {
        let small = if few { 8 } else { 4 };
        // Up to 8 layers, the ring of a small model has the minimum number of pieces; beyond that, it grows with them.
        let layers = prop_oneof![small => 1u32..9, 1 => 9u32..25];
        let feed_forward = prop_oneof![small / 2 => Just(256u32), 1 => Just(512), 1 => Just(1280)];
        let architecture = prop::sample::select(Architecture::ALL.to_vec());
        let drawn = (architecture, layers, feed_forward, any::<u64>(), 1usize..5);
        drawn.prop_flat_map(|(architecture, layers, feed_forward, seed, threads)| {
            prop::collection::vec(step(layers), 2..6).prop_map(move |steps| Self {
                architecture,
                layers,
                feed_forward,
                seed,
                threads,
                steps,
            })
        })
    }

    fn model(&self, dtype: GgmlDType) -> Synthetic {
        Synthetic {
            layers: self.layers,
            feed_forward: self.feed_forward,
            ..Synthetic::tiny(self.architecture, TypeMix::All(dtype), self.seed)
        }
    }
}

/// Applies a plan at some layer of the pass.
struct Apply {
    countdown: u32,
    plan: Option<EnginePlan>,
    reports: Vec<ApplyReport>,
}

impl Checkpoint for Apply {
    fn poll(&mut self) -> Flow {
        if self.countdown > 0 {
            self.countdown -= 1;
            return Flow::Continue;
        }
        self.plan.take().map_or(Flow::Continue, Flow::Apply)
    }

    fn poll_in_layer(&mut self) -> Flow {
        self.poll()
    }

    fn applied(&mut self, result: Result<ApplyReport, ApplyError>) {
        match result {
            Ok(report) => self.reports.push(report),
            // Growth into the memory of the current chunk must be requested again; nothing was changed.
            Err(ApplyError::ChunkUnderWay { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Runs the history; returns the length of the ring.
fn run(history: &History, dtype: GgmlDType) -> Bytes {
    let file = write(&history.model(dtype));
    let expected = expected(&file.path, history.layers, history.steps.len());
    let first = &history.steps[0];
    let mut model = open(
        &file.path,
        &plan(first.resident.clone(), 64, first.chunk),
        history.threads,
    );
    let mut next: Vec<u32> = PROMPT.to_vec();
    for (turn, step) in history.steps.iter().enumerate() {
        let wanted = plan(step.resident.clone(), step.kv, step.chunk);
        let mut checkpoint = Apply {
            countdown: step.kv % (history.layers + 1),
            plan: None,
            reports: Vec::new(),
        };
        if step.in_the_pass {
            checkpoint.plan = Some(wanted);
        } else {
            let report = model.apply(&wanted).unwrap();
            assert_eq!(report.plan, *model.plan());
            assert_eq!(report.plan.resident, step.resident);
        }
        let needed = model.position() + u32::try_from(next.len()).unwrap();
        if model.plan().kv_capacity.get() < needed {
            let grown = EnginePlan {
                kv_capacity: Tokens::new(needed),
                ..model.plan().clone()
            };
            model.apply(&grown).unwrap();
        }
        let logits = model.forward(&next, &mut checkpoint).unwrap();
        assert!(logits[..] == expected[turn], "turn {turn} differs");
        next = vec![greedy(&logits)];
        let held = model.breakdown();
        assert!(
            held.total <= model.shape().plan_bytes(model.plan()),
            "{held:?}"
        );
    }
    model.shape().ring_bytes
}

const FEW: u32 = 8;

/// Each of these types has its own histories; a long run requests more (`COTENANT_TEST_SCHEDULES`).
#[test]
fn logits_are_bit_identical_under_any_history_of_residency_and_capacity() {
    for dtype in [
        GgmlDType::F32,
        GgmlDType::Q4K,
        GgmlDType::Q8_0,
        GgmlDType::IQ4NL,
        GgmlDType::IQ4XS,
        GgmlDType::MXFP4,
    ] {
        let cases = schedules(FEW);
        let rings = RefCell::new(BTreeSet::new());
        let mut runner = TestRunner::new(ProptestConfig {
            cases,
            failure_persistence: None,
            ..ProptestConfig::default()
        });
        runner
            .run(&History::any(cases <= FEW), |history| {
                rings.borrow_mut().insert(run(&history, dtype));
                Ok(())
            })
            .unwrap_or_else(|failed| panic!("{dtype:?}: {failed}"));
        let rings = rings.into_inner();
        let (least, most) = (rings.first().unwrap(), rings.last().unwrap());
        println!(
            "{dtype:?}: {cases} histories over rings of {} lengths, {} to {} KiB",
            rings.len(),
            least.get() >> 10,
            most.get() >> 10
        );
    }
}

#[test]
fn the_chunk_does_not_change_the_answer_and_every_row_can_be_had() {
    for architecture in [
        Architecture::Gemma2,
        Architecture::GptOss,
        Architecture::GraniteHybrid,
        Architecture::Lfm2,
        Architecture::Lfm2Moe,
        Architecture::NemotronH,
        Architecture::NemotronHMoe,
        Architecture::Qwen35,
        Architecture::Qwen3Moe,
        Architecture::Qwen35Moe,
        Architecture::Llama,
        Architecture::StableLm,
    ] {
        let file = tiny(architecture, GgmlDType::Q8_0);
        let mut rows: Vec<Vec<Vec<f32>>> = Vec::new();
        for chunk in [1, 3, 32] {
            let mut model = open(&file.path, &plan(0..2, 64, chunk), 2);
            let mut all = Vec::new();
            model
                .forward_all(&PROMPT, &mut go(), &mut |index, logits| {
                    assert_eq!(index, all.len());
                    all.push(logits.to_vec());
                })
                .unwrap();
            rows.push(all);
        }
        assert!(rows[0] == rows[1] && rows[1] == rows[2], "{architecture:?}");
        assert_eq!(rows[0].len(), PROMPT.len());
    }
}

/// Turn of a conversation: a prompt that shares a beginning with the previous one, an answer, and changes of capacity
/// in between.
#[derive(Clone, Debug)]
struct Turn {
    shared: usize,
    fresh: Vec<u32>,
    answer: usize,
    plan: Step,
    mark: u32,
    fork: u32,
}

fn turn() -> impl Strategy<Value = Turn> {
    (
        0usize..200,
        prop::collection::vec(0u32..320, 1..90),
        0usize..4,
        step(4),
        0u32..80,
        0u32..80,
    )
        .prop_map(|(shared, fresh, answer, plan, mark, fork)| Turn {
            shared,
            fresh,
            answer,
            plan,
            mark,
            fork,
        })
}

fn converse(path: &Path, threads: usize, turns: &[Turn]) -> u32 {
    let mut model = open(path, &plan(0..4, 512, 16), threads);
    let mut fresh = open(path, &plan(0..4, 512, 32), 1);
    let mut sequence: Vec<u32> = Vec::new();
    let mut reused = 0;
    for turn in turns {
        let prompt: Vec<u32> = sequence
            .iter()
            .take(turn.shared)
            .chain(&turn.fresh)
            .copied()
            .collect();
        let common = sequence
            .iter()
            .zip(&prompt)
            .take_while(|(one, other)| one == other)
            .count();
        let common = u32::try_from(common.min(prompt.len() - 1)).unwrap();
        let kept = model.keep(common);
        assert!(kept <= common && kept == model.position());
        assert!(
            model.shape().state_bytes > Bytes::ZERO
                || kept == common.min(u32::try_from(sequence.len()).unwrap())
        );
        reused += kept;
        // For any sheds and growth, kept tokens are reused or recomputed, but never wrong.
        let needed = u32::try_from(prompt.len() + turn.answer).unwrap();
        model
            .apply(&plan(
                turn.plan.resident.clone(),
                turn.plan.kv,
                turn.plan.chunk,
            ))
            .unwrap();
        model
            .apply(&plan(
                turn.plan.resident.clone(),
                turn.plan.kv.max(needed),
                turn.plan.chunk,
            ))
            .unwrap();
        fresh.reset();
        let expected = fresh.forward(&prompt, &mut go()).unwrap().to_vec();
        let rest = &prompt[kept as usize..];
        model.mark_at(kept + turn.mark);
        model.fork_at(kept + turn.fork);
        let mut logits = model.forward(rest, &mut go()).unwrap().to_vec();
        assert!(logits == expected, "{kept} tokens were kept");
        sequence = prompt;
        for _ in 0..turn.answer {
            let next = greedy(&logits);
            sequence.push(next);
            logits = model.forward(&[next], &mut go()).unwrap().to_vec();
            assert!(fresh.forward(&[next], &mut go()).unwrap()[..] == logits);
        }
        let held = model.breakdown();
        assert!(held.kv_marks + model.untouched() <= held.kv);
        assert!(model.kernel_resident() <= held.used(), "{held:?}");
        assert!(
            held.total <= model.shape().plan_bytes(model.plan()),
            "{held:?}"
        );
    }
    reused
}

proptest! {
    #![proptest_config(ProptestConfig { cases: schedules(8), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_answer_that_goes_on_from_what_is_kept_is_the_one_that_reads_all_again(
        turns in prop::collection::vec(turn(), 2..5),
        threads in 1usize..4,
        architecture in prop::sample::select(vec![Architecture::GraniteHybrid, Architecture::NemotronH, Architecture::NemotronHMoe, Architecture::Lfm2, Architecture::Lfm2Moe, Architecture::Qwen35, Architecture::Qwen3, Architecture::Qwen3Moe, Architecture::Qwen35Moe, Architecture::Gemma2, Architecture::Gemma3, Architecture::Gemma4, Architecture::GptOss, Architecture::StableLm]),
        dtype in prop::sample::select(vec![GgmlDType::F32, GgmlDType::Q8_0, GgmlDType::Q4K, GgmlDType::IQ4XS, GgmlDType::MXFP4]),
    ) {
        let file = tiny(architecture, dtype);
        converse(&file.path, threads, &turns);
    }
}

#[test]
fn a_second_turn_reads_only_what_is_new_and_marks_go_before_anything_else() {
    for architecture in [Architecture::Qwen35, Architecture::Qwen3] {
        let file = tiny(architecture, GgmlDType::Q8_0);
        let mut model = open_long(&file.path, &plan(0..4, 4096, 64), 2);
        let prompt: Vec<u32> = (0..200).map(|index| index * 7 % 300).collect();
        model.mark_at(192);
        model.forward(&prompt, &mut go()).unwrap();
        let held = model.breakdown();
        assert_eq!(
            held.kv_marks > Bytes::ZERO,
            model.shape().state_bytes > Bytes::ZERO
        );
        assert_eq!(
            model.keep(197),
            if model.shape().state_bytes > Bytes::ZERO {
                192
            } else {
                197
            },
            "{architecture:?}"
        );

        // If the capacity has no space for the copy, the copy is dropped first, and that is reported.
        let report = model.apply(&plan(0..4, 256, 64)).unwrap();
        assert_eq!(report.asked, report.freed + report.untouched);
        // No other page had been touched; the last place of the copy is partly written.
        let (shape, kind) = (model.shape().kv, model.plan().kv_type);
        let least = held.kv_marks.saturating_sub(shape.block_bytes(kind));
        assert!(
            report.freed <= held.kv_marks && report.freed >= least,
            "{} of {}",
            report.freed,
            held.kv_marks
        );
        assert_eq!(
            (model.breakdown().kv_marks, model.position()),
            (
                Bytes::ZERO,
                if model.shape().state_bytes > Bytes::ZERO {
                    192
                } else {
                    197
                }
            )
        );
    }
}

#[test]
fn cancelling_between_layers_loses_the_sequence_and_nothing_else() {
    let file = tiny(Architecture::Qwen35, GgmlDType::Q8_0);
    let expected = reference(&file.path, 0);
    let mut model = open(&file.path, &plan([1], 64, 4), 1);
    let mut polls = 0;
    let mut stop = || {
        polls += 1;
        if polls == 7 {
            Flow::Stop
        } else {
            Flow::Continue
        }
    };
    let error = model.forward(&PROMPT, &mut stop).unwrap_err();
    // The layer at which it stops depends on the disk: a forward pass that waits for a streamed layer polls as well.
    assert!(matches!(error, ForwardError::Cancelled { .. }), "{error}");
    assert!(matches!(
        model.forward(&[1], &mut go()),
        Err(ForwardError::SequenceLost)
    ));
    model.reset();
    assert!(model.forward(&PROMPT, &mut go()).unwrap()[..] == expected[0]);
}

#[test]
fn prompts_that_cannot_be_computed_are_refused_before_anything_is() {
    let file = tiny(Architecture::Llama, GgmlDType::Q8_0);
    let mut model = open(&file.path, &plan(0..5, 64, 4), 1);
    let mut error = |tokens: &[u32]| model.forward(tokens, &mut go()).unwrap_err().to_string();
    assert_eq!(error(&[]), "cannot compute 0 tokens");
    assert_eq!(
        error(&[3, 320]),
        "token 320 is not in the vocabulary of 320"
    );
    assert_eq!(
        error(&[3; 65]),
        "cannot hold 65 tokens: the KV capacity is 64"
    );
    assert_eq!(
        error(&vec![3; 1_000_000]),
        "cannot hold 1000000 tokens: the model was made for 4096"
    );
    assert_eq!(model.position(), 0);
    model.forward(&PROMPT, &mut go()).unwrap();
}
