//! Tests of whole models.

use std::{
    env, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use self::refusing::Refusing;
use super::{opening::Disk, *};
use crate::{
    arena::Backing,
    backend::{Device, cpu::CpuDevice},
    error::{ApplyError, ApplyReport, ForwardError},
    gguf::GgmlDType,
    preemption::{Checkpoint, Flow, SliceEstimators},
    sayable::Sayable,
    shape::Layout,
    spec::{Architecture, Spec},
    synthetic::{Synthetic, TypeMix},
    weights::Weights as _,
};
use cotenant_policy::{
    kv_type::KvType,
    residency::{EnginePlan, LayerKind},
};
use cotenant_units::{Bytes, Tokens, causes::in_one_line};

mod draft;
mod hanging;
mod late;
mod opening;
mod parked;
mod parting;
mod refusing;
mod saved;
mod together;
mod trial;
mod turns;
mod windows;

const TOKENS: [u32; 5] = [5, 80, 3, 200, 319];

fn plan(resident: impl IntoIterator<Item = u32>) -> EnginePlan {
    EnginePlan {
        resident: resident.into_iter().collect(),
        kv_capacity: Tokens::new(64),
        prefill_chunk: Tokens::new(3),
        kv_type: KvType::F16,
    }
}

/// Opens a model in parts of at least `least` bytes.
fn open_in_parts(path: &Path, least: usize, plan: &EnginePlan, threads: usize) -> Model {
    open_on(cpu(threads), None, path, least, plan)
}

/// Returns the CPU; with deferred execution by the seed in `COTENANT_TEST_LATE`, if set.
fn cpu(threads: usize) -> Arc<dyn Device> {
    match env::var("COTENANT_TEST_LATE") {
        Ok(seed) => late::late_by(seed.parse().unwrap()),
        Err(_) => Arc::new(CpuDevice(threads)),
    }
}

/// As [`open_in_parts`], on a given device and with a reduced vocabulary.
fn open_on(
    device: Arc<dyn Device>,
    said: Option<&Sayable>,
    path: &Path,
    least: usize,
    plan: &EnginePlan,
) -> Model {
    let options = ModelOptions {
        vocabulary: said.cloned(),
        keeps_conversations: true,
        ..ModelOptions::for_threads(1)
    };
    let layout = move |spec: &Spec| Layout::in_parts(spec, least);
    let opening = Opening::on(device, path, &options, layout, &Disk::default()).unwrap();
    let mut model = opening.begin(plan).unwrap();
    model.settle();
    model
}

/// Returns tokens that differ for each seed.
fn text(seed: u32, count: u32) -> Vec<u32> {
    (0..count)
        .map(|at| (at * 37 + at * at % 11 + seed * 7) % 300)
        .collect()
}

/// Returns `flow` once, at one checkpoint poll of a pass.
struct Once {
    left: u32,
    flow: Option<Flow>,
}

impl Checkpoint for Once {
    fn poll(&mut self) -> Flow {
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                Flow::Continue
            }
            None => self.flow.take().unwrap_or(Flow::Continue),
        }
    }

    fn applied(&mut self, result: Result<ApplyReport, ApplyError>) {
        assert!(matches!(
            result,
            Ok(_) | Err(ApplyError::ChunkUnderWay { .. })
        ));
    }
}

#[test]
fn groups_of_a_layer_and_tiles_of_the_head_come_and_go_without_a_trace_in_the_logits() {
    let types = [
        GgmlDType::F32,
        GgmlDType::Q8_0,
        GgmlDType::Q4K,
        GgmlDType::IQ4XS,
        GgmlDType::MXFP4,
    ];
    let architectures = Architecture::ALL.into_iter().enumerate();
    for (number, architecture) in architectures {
        let dtype = types[number % types.len()];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let file = Synthetic::tiny(architecture, TypeMix::All(dtype), 7);
        file.write(&path).unwrap();
        let experts = file.experts.0 as usize;
        // Four layers, each with its experts, if it has any, and the head.
        let (all, before_head) = match architecture {
            // Its feed-forward part has two groups, the others are one each.
            Architecture::NemotronH => (5, 5),
            // One layer has experts.
            Architecture::NemotronHMoe => (6, 5 + experts),
            _ if experts == 0 => (5, 12),
            // The first layer has none.
            Architecture::Lfm2Moe => (8, 3 + 3 * (1 + experts)),
            // The one that computes every token has two groups.
            Architecture::Qwen35Moe => (9, 4 * (3 + experts)),
            _ => (9, 4 * (1 + experts)),
        };
        let mut whole = open_in_parts(&path, usize::MAX, &plan(0..all), 1);
        assert_eq!(whole.shape().layers.len(), all as usize);
        // Tiles of some rows, and all layers in their three groups, or with a part for each expert.
        let mut parts = open_in_parts(&path, 16 << 10, &plan([]), 2);
        let count = u32::try_from(parts.shape().layers.len()).unwrap();
        assert!(
            parts.layout.head.len() > 1 && parts.layout.head.start == before_head,
            "{count}"
        );
        for round in 0u32..3 {
            let chosen = (0..count)
                .filter(|part| (part * 7 + round).wrapping_mul(0x9e37_79b9) >> 30 > round % 4);
            let report = parts.apply(&plan(chosen)).unwrap();
            assert_eq!(report.freed, report.asked, "{architecture:?} round {round}");
            let held = parts.breakdown();
            // The last block is not full: some of its pages were never touched.
            let (resident, used) = (parts.kernel_resident(), held.used() - held.header);
            assert!(
                resident <= used && used <= resident + held.kv,
                "{used}, {resident}"
            );
            for tokens in [&TOKENS[..], &[7], &[round]] {
                let expected = whole
                    .forward(tokens, &mut || Flow::Continue)
                    .unwrap()
                    .to_vec();
                let logits = parts.forward(tokens, &mut || Flow::Continue).unwrap();
                assert!(logits[..] == expected[..], "{architecture:?} round {round}");
            }
            whole.reset();
            parts.reset();
        }
        assert_eq!(whole.expert_counts().is_some(), experts > 0);
        if let (Some(all), Some(some)) = (whole.expert_counts(), parts.expert_counts()) {
            assert!(
                all.resident == all.total && all.found > 0 && all.read == 0,
                "{all:?}"
            );
            assert!(
                some.total == all.total && some.resident < some.total,
                "{some:?}"
            );
            assert!(
                some.read > 0 && some.found + some.read == all.found,
                "{some:?}, {all:?}"
            );
        }
    }
}

/// Changes the plan at some checkpoint polls of a pass.
struct Orders {
    parts: u32,
    /// Polls until the next change.
    left: u32,
    seed: u32,
    looks: u32,
    done: Vec<ApplyReport>,
}

impl Orders {
    fn random(&mut self, below: u32) -> u32 {
        self.seed = self
            .seed
            .wrapping_mul(1_664_525)
            .wrapping_add(1_013_904_223);
        (self.seed >> 8) % below
    }
}

impl Checkpoint for Orders {
    fn poll(&mut self) -> Flow {
        self.looks += 1;
        if self.left > 0 {
            self.left -= 1;
            return Flow::Continue;
        }
        self.left = self.random(40);
        let share = self.random(5);
        let resident: Vec<u32> = (0..self.parts).filter(|_| self.random(4) < share).collect();
        Flow::Apply(EnginePlan {
            kv_capacity: Tokens::new(self.random(200)),
            prefill_chunk: Tokens::new(if self.random(4) == 0 { 3 } else { 8 }),
            ..plan(resident)
        })
    }

    fn poll_in_layer(&mut self) -> Flow {
        self.poll()
    }

    fn applied(&mut self, result: Result<ApplyReport, ApplyError>) {
        // Growth into the workspace of the chunk in progress is refused and changes nothing.
        if matches!(result, Err(ApplyError::ChunkUnderWay { .. })) {
            return;
        }
        let report = result.unwrap();
        assert_eq!(
            report.freed.saturating_add(report.untouched),
            report.asked,
            "{report:?}"
        );
        self.done.push(report);
    }
}

#[test]
fn orders_in_the_middle_of_a_layer_of_a_prompt_leave_no_trace_in_the_logits() {
    let types = [
        GgmlDType::Q4K,
        GgmlDType::F32,
        GgmlDType::Q8_0,
        GgmlDType::MXFP4,
        GgmlDType::IQ4NL,
    ];
    for (number, architecture) in Architecture::ALL.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        Synthetic::tiny(architecture, TypeMix::All(types[number % types.len()]), 7)
            .write(&path)
            .unwrap();
        let roomy = |resident| EnginePlan {
            kv_capacity: Tokens::new(256),
            prefill_chunk: Tokens::new(8),
            ..plan(resident)
        };
        let prompt: Vec<u32> = (0..17).map(|index| index * 37 % 320).collect();
        let mut plain = open_in_parts(&path, usize::MAX, &roomy(0..5), 1);
        let expected = plain
            .forward(&prompt, &mut || Flow::Continue)
            .unwrap()
            .to_vec();
        let mut orders = Orders {
            parts: 0,
            left: 3,
            seed: u32::try_from(number).unwrap(),
            looks: 0,
            done: Vec::new(),
        };
        // With whole layers, a plan arrives within a part whose other products are pending.
        for (least, threads) in [(16 << 10, 2), (usize::MAX, 1)] {
            let mut model = open_in_parts(&path, least, &roomy(0..1), threads);
            model.estimators = SliceEstimators::finest();
            orders.parts = u32::try_from(model.shape().layers.len()).unwrap();
            for round in 0..2 {
                let before = orders.looks;
                model.apply(&roomy(0..orders.parts)).unwrap();
                let logits = model.forward(&prompt, &mut orders).unwrap();
                assert!(logits[..] == expected[..], "{architecture:?} round {round}");
                let looks = orders.looks - before;
                assert!(looks > 100, "{looks} looks in three chunks of four layers");
                let held = model.breakdown();
                assert!(
                    held.total <= model.shape().plan_bytes(model.plan()),
                    "{held:?}"
                );
                model.reset();
            }
        }
        assert!(orders.done.len() > 12, "{} orders", orders.done.len());
    }
}

#[test]
fn a_calibration_leaves_everything_as_it_was_also_when_it_is_broken_off() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    Synthetic::tiny(Architecture::Qwen35, TypeMix::All(GgmlDType::Q8_0), 7)
        .write(&path)
        .unwrap();
    for resident in [0..5, 1..3] {
        let mut model = open_in_parts(&path, usize::MAX, &plan(resident.clone()), 2);
        let held = model.breakdown();
        let before = model
            .forward(&TOKENS, &mut || Flow::Continue)
            .unwrap()
            .to_vec();
        assert!(
            model.calibrate(&mut || true).unwrap().is_none(),
            "a sequence is under way"
        );
        model.reset();
        let by = model.calibrate(&mut || true).unwrap().unwrap();
        assert!(
            by.compute_ns_per_mib > 0 && by.read_ns_per_mib > 0,
            "{by:?}"
        );
        assert!(by.token_ns(model.shape(), &resident.clone().collect()) > 0);
        let times = model.part_times(&mut || true);
        assert_eq!(
            times.is_some(),
            resident.len() == model.shape().layers.len(),
            "only where no disk is waited for"
        );
        let sizes = |times: Vec<PartTime>| times.iter().map(|part| part.bytes).collect::<Vec<_>>();
        let parts: Vec<Bytes> = model
            .shape()
            .layers
            .iter()
            .map(|part| part.resident_bytes)
            .collect();
        assert_eq!(times.map_or_else(|| parts.clone(), sizes), parts);
        assert!(model.part_times(&mut || false).is_none(), "broken off");
        for asked in [0, 1, 7, 60] {
            let mut left = asked;
            let mut go_on = || {
                left -= 1;
                left > 0
            };
            if asked > 0 {
                assert!(model.calibrate(&mut go_on).unwrap().is_none(), "{asked}");
            }
            assert_eq!(model.plan(), &plan(resident.clone()));
            assert_eq!((model.position(), model.breakdown().total), (0, held.total));
            // The last block is not full: some of its pages were never touched.
            let (resident, used) = (
                model.kernel_resident(),
                model.breakdown().used() - held.header,
            );
            assert!(
                resident <= used && used <= resident + held.kv,
                "{used}, {resident}"
            );
            let logits = model.forward(&TOKENS, &mut || Flow::Continue).unwrap();
            assert!(logits[..] == before[..], "{asked}");
            model.reset();
        }
        let small = EnginePlan {
            kv_capacity: Tokens::ZERO,
            ..plan(resident)
        };
        model.apply(&small).unwrap();
        assert!(
            model.calibrate(&mut || true).unwrap().is_none(),
            "no room for a token"
        );
    }
}

#[test]
fn a_head_of_some_rows_that_becomes_resident_half_made_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let model = Synthetic {
        vocabulary: 1500,
        ..Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::F32), 7)
    };
    model.write(&path).unwrap();
    // The first 300 tokens are 320 in groups of 64; the last group has the control tokens.
    let said = Sayable::First(300);
    let mut model = open_on(cpu(1), Some(&said), &path, usize::MAX, &plan(0..5));
    let head = model.layout.parts.last().unwrap();
    assert!(head.slabs.len() > 1 && head.pieces.len() > head.slabs.len());
    let expected = model
        .forward(&[5], &mut || Flow::Continue)
        .unwrap()
        .to_vec();
    model.estimators = SliceEstimators::finest();
    let mut looks = 0;
    let mut order_at = 0;
    // At each poll of a pass in turn.
    while order_at <= looks {
        model.reset();
        model.apply(&plan([])).unwrap();
        let mut order = Plans {
            plans: vec![plan(0..5)],
            left: order_at,
            in_layers: true,
            ..Plans::default()
        };
        let logits = model.forward(&[5], &mut order).unwrap();
        assert!(logits[..] == expected[..], "an order at look {order_at}");
        assert!(
            order.applied.iter().all(Result::is_ok),
            "{:?}",
            order.applied
        );
        looks = order.looks;
        order_at += 1;
    }
}

/// Returns a model in whole layers whose backend refuses memory on demand.
fn refusing(resident: impl IntoIterator<Item = u32>) -> (Model, Refusing, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    Synthetic::tiny(Architecture::Qwen35, TypeMix::All(GgmlDType::Q8_0), 7)
        .write(&path)
        .unwrap();
    let refusing = Refusing::default();
    let model = open_on(
        late::refusing(refusing.clone()),
        None,
        &path,
        usize::MAX,
        &plan(resident),
    );
    (model, refusing, folder)
}

#[test]
fn a_model_that_memory_is_refused_for_is_opened_with_fewer_of_its_layers_and_answers_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 7)
        .write(&path)
        .unwrap();
    let whole = plan(0..5);
    let expected = open_in_parts(&path, usize::MAX, &whole, 1)
        .forward(&TOKENS, &mut || Flow::Continue)
        .unwrap()
        .to_vec();
    let mut resident = Vec::new();
    for found in 0.. {
        let layout = |spec: &Spec| Layout::in_parts(spec, usize::MAX);
        let options = ModelOptions::for_threads(1);
        let memory = Refusing::default();
        memory.refuse_after(found);
        let opening = Opening::on(
            late::refusing(memory),
            &path,
            &options,
            layout,
            &Disk::default(),
        )
        .unwrap();
        let mut model = match opening.begin(&whole) {
            Ok(model) => model,
            Err(error) => {
                assert!(in_one_line(&error).contains("cannot map"), "{error}");
                assert!(resident.is_empty(), "with less memory it was opened");
                continue;
            }
        };
        model.settle();
        let had = model.plan().resident.len();
        assert!(model.forward(&TOKENS, &mut || Flow::Continue).unwrap()[..] == expected[..]);
        assert_eq!(model.plan(), &plan(0..u32::try_from(had).unwrap()));
        resident.push(had);
        if had == 5 {
            assert_eq!(model.refused(), None);
            break;
        }
        assert!(
            model.refused().unwrap().contains("cannot map "),
            "{:?}",
            model.refused()
        );
    }
    // One part less than were allocated, and one more for the ring if all but the head were; if none was, none can be
    // released.
    assert_eq!(resident, [0, 1, 2, 2, 5]);
}

#[test]
fn a_plan_that_fails_after_parts_were_given_up_leaves_the_readers_in_step() {
    let (mut model, refusing, _folder) = refusing([0, 2]);
    let expected = model
        .forward(&TOKENS, &mut || Flow::Continue)
        .unwrap()
        .to_vec();
    model.reset();
    refusing.refuse(true);
    let larger = EnginePlan {
        prefill_chunk: Tokens::new(9),
        ..plan([2])
    };
    let error = model.apply(&larger).unwrap_err();
    assert!(
        error.to_string().contains("a prefill chunk of 9 tokens"),
        "{error}"
    );
    refusing.refuse(false);
    assert_eq!(
        model.plan(),
        &plan([2]),
        "what was done until then stays done"
    );
    let logits = model.forward(&TOKENS, &mut || Flow::Continue).unwrap();
    assert!(logits[..] == expected[..]);
    assert_eq!(
        model.plan(),
        &plan([2]),
        "a chunk that was refused is not wanted later"
    );
}

#[test]
fn a_plan_that_fails_anywhere_changes_no_chunk_later() {
    let mut had = Vec::new();
    for (found, chunk) in (0..).flat_map(|found| [(found, 9), (found, 2)]) {
        let (mut model, refusing, _folder) = refusing([0, 2]);
        let other = EnginePlan {
            prefill_chunk: Tokens::new(chunk),
            ..plan([0, 1, 2])
        };
        refusing.refuse_after(found);
        let failed = model.apply(&other).is_err();
        refusing.refuse(false);
        let held = |model: &Model| (model.plan().prefill_chunk, model.breakdown().workspace);
        let before = held(&model);
        model.forward(&TOKENS, &mut || Flow::Continue).unwrap();
        assert_eq!(
            held(&model),
            before,
            "{found} mappings for a chunk of {chunk}"
        );
        if !failed {
            break;
        }
        had.push(before.0.get());
    }
    assert!([2, 3, 9].iter().all(|chunk| had.contains(chunk)), "{had:?}");
}

#[test]
fn a_calibration_that_cannot_have_everything_back_says_so() {
    let (mut model, refusing, _folder) = refusing(0..5);
    let mut go_on = || {
        refusing.refuse(true);
        true
    };
    let error = model.calibrate(&mut go_on).unwrap_err();
    assert!(error.to_string().starts_with("cannot map"), "{error}");
    assert!(model.plan().resident.len() < 5);
    refusing.refuse(false);
    model.apply(&plan(0..5)).unwrap();
    assert!(model.calibrate(&mut || true).unwrap().is_some());
}

#[test]
fn a_chunk_ordered_in_a_pass_becomes_smaller_in_it_and_larger_only_by_a_plan_that_says_so() {
    let (mut model, _refusing, _folder) = refusing(0..5);
    for (ordered, then) in [(9, 3), (2, 2)] {
        let chunk = EnginePlan {
            prefill_chunk: Tokens::new(ordered),
            ..plan(0..5)
        };
        let mut order = Plans {
            plans: vec![chunk],
            ..Plans::default()
        };
        model.forward(&TOKENS, &mut order).unwrap();
        assert_eq!(
            order.applied.pop().unwrap().unwrap().plan.prefill_chunk,
            Tokens::new(3)
        );
        assert_eq!(
            model.plan().prefill_chunk,
            Tokens::new(then),
            "{ordered} was ordered"
        );
        model.reset();
    }
    let larger = EnginePlan {
        prefill_chunk: Tokens::new(9),
        ..plan(0..5)
    };
    assert_eq!(model.apply(&larger).unwrap().plan, larger);
}

#[test]
fn a_plan_does_not_grow_into_the_place_of_a_chunk_under_way() {
    let (mut model, _refusing, _folder) = refusing([0, 2]);
    let large = EnginePlan {
        prefill_chunk: Tokens::new(4096),
        ..plan([0, 2])
    };
    model.apply(&large).unwrap();
    let grown = plan([0, 1, 2]);
    let beside = EnginePlan {
        resident: grown.resident.clone(),
        ..large.clone()
    };
    let bytes = |plan: &EnginePlan| model.shape().plan_bytes(plan);
    assert!(bytes(&grown) < bytes(&large) && bytes(&large) < bytes(&beside));
    let mut order = Plans {
        plans: vec![grown.clone()],
        ..Plans::default()
    };
    model.forward(&TOKENS, &mut order).unwrap();
    let error = order.applied.pop().unwrap().unwrap_err().to_string();
    assert!(
        error.contains("while a prefill chunk of 4096 tokens is under way"),
        "{error}"
    );
    assert_eq!(model.plan(), &large, "nothing was done of it");
    // A plan that only releases is accepted, and the chunk size shrinks after the chunk.
    let mut order = Plans {
        plans: vec![plan([0])],
        ..Plans::default()
    };
    model.forward(&TOKENS, &mut order).unwrap();
    let report = order.applied.pop().unwrap().unwrap();
    assert_eq!(
        (report.plan.resident.len(), report.plan.prefill_chunk.get()),
        (1, 4096)
    );
    assert_eq!(model.plan(), &plan([0]));
    model.reset();
    assert_eq!(model.apply(&grown).unwrap().plan, grown);
}

/// Applies plans at consecutive polls, the last one first, and then optionally stops.
#[derive(Default)]
struct Plans {
    plans: Vec<EnginePlan>,
    /// Polls before the first plan.
    left: u32,
    looks: u32,
    /// Whether polls within layers count.
    in_layers: bool,
    stops: bool,
    applied: Vec<Result<ApplyReport, ApplyError>>,
    rechunked: Vec<ApplyReport>,
}

impl Checkpoint for Plans {
    fn poll(&mut self) -> Flow {
        self.looks += 1;
        if self.looks <= self.left {
            return Flow::Continue;
        }
        match self.plans.pop() {
            Some(plan) => Flow::Apply(plan),
            None if self.stops => Flow::Stop,
            None => Flow::Continue,
        }
    }

    fn poll_in_layer(&mut self) -> Flow {
        if self.in_layers {
            self.poll()
        } else {
            Flow::Continue
        }
    }

    fn applied(&mut self, result: Result<ApplyReport, ApplyError>) {
        self.applied.push(result);
    }

    fn rechunked(&mut self, report: ApplyReport) {
        self.rechunked.push(report);
    }
}

#[test]
fn a_smaller_chunk_is_reported_once_when_it_is_in_force_however_the_pass_ends() {
    for stops in [false, true] {
        let (mut model, _refusing, _folder) = refusing([0, 2]);
        let large = EnginePlan {
            prefill_chunk: Tokens::new(4096),
            ..plan([0, 2])
        };
        model.apply(&large).unwrap();
        // A caller that knows the larger chunk continues from it.
        let fewer = EnginePlan {
            resident: plan([0]).resident,
            ..large.clone()
        };
        let mut orders = Plans {
            plans: vec![fewer.clone(), plan([0, 2])],
            stops,
            ..Plans::default()
        };
        let result = model.forward(&TOKENS, &mut orders).map(|_| ());
        assert_eq!(result.is_err(), stops);
        let in_force: Vec<&EnginePlan> = orders
            .applied
            .iter()
            .map(|report| &report.as_ref().unwrap().plan)
            .collect();
        assert_eq!(in_force, [&large, &fewer]);
        let [reported] = &orders.rechunked[..] else {
            panic!("{:?}", orders.rechunked);
        };
        assert_eq!((&reported.plan, model.plan()), (&plan([0]), &plan([0])));
        assert_eq!(reported.held, model.breakdown().total);
        assert!(reported.freed > reported.grown, "{reported:?}");
        model.reset();
        let mut orders = Plans::default();
        model.forward(&TOKENS, &mut orders).unwrap();
        assert!(orders.rechunked.is_empty());
    }
}

/// Uses the peak resident size of the process, which runs only this test.
#[test]
fn a_workspace_is_replaced_without_both_in_memory() {
    let (mut model, _refusing, _folder) = refusing(0..5);
    let with = |chunk: u32| EnginePlan {
        prefill_chunk: Tokens::new(chunk),
        ..plan(0..5)
    };
    let (smaller, larger) = (
        model.shape().plan_bytes(&with(2048)),
        model.shape().plan_bytes(&with(4096)),
    );
    model.apply(&with(2048)).unwrap();
    let most = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))
            .unwrap();
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
        Bytes::from_kib(kib)
    };
    // Resets the peak.
    if std::fs::write("/proc/self/clear_refs", "5").is_err() {
        eprintln!("left out: the kernel does not let its high-water mark be reset");
        return;
    }
    let before = most();
    model.apply(&with(4096)).unwrap();
    let (rose, both) = (most().saturating_sub(before), larger - smaller);
    assert!(both > Bytes::from_mib(4), "{both} would not show");
    // With both in memory, it would be twice that.
    assert!(
        rose < both + Bytes::new(both.get() / 2),
        "{rose} more, {both} are new"
    );
}

#[test]
fn growing_to_all_parts_gives_the_ring_back_before_and_takes_it_again_when_it_fails() {
    let (mut model, refusing, _folder) = refusing([0, 2]);
    let expected = model
        .forward(&TOKENS, &mut || Flow::Continue)
        .unwrap()
        .to_vec();
    model.reset();
    refusing.watch(&model);
    refusing.refuse_after(2);
    model.apply(&plan(0..5)).unwrap_err();
    // The weights and the thread that reads embeddings; a stream would add three owners.
    assert_eq!(
        refusing.owners_of_the_file(),
        2,
        "there is no stream while parts are read"
    );
    assert!(model.breakdown().ring > Bytes::ZERO);
    let logits = model.forward(&TOKENS, &mut || Flow::Continue).unwrap();
    assert!(logits[..] == expected[..]);
    model.reset();
    refusing.refuse(false);
    let report = model.apply(&plan(0..5)).unwrap();
    assert_eq!(
        (report.plan.resident.len(), model.breakdown().ring),
        (5, Bytes::ZERO)
    );
    let logits = model.forward(&TOKENS, &mut || Flow::Continue).unwrap();
    assert!(logits[..] == expected[..]);
}

#[test]
fn a_growth_that_fails_anywhere_leaves_no_more_than_the_larger_of_both_plans() {
    for resident in [vec![], vec![0, 2], vec![0, 1, 2, 4], vec![0, 1, 2, 3]] {
        for found in 0..resident.len().abs_diff(5) {
            let (mut model, refusing, _folder) = refusing(resident.iter().copied());
            let expected = model
                .forward(&TOKENS, &mut || Flow::Continue)
                .unwrap()
                .to_vec();
            model.reset();
            let larger = |model: &Model| {
                let shape = model.shape();
                shape
                    .plan_bytes(&plan(0..5))
                    .max(shape.plan_bytes(model.plan()))
            };
            let bound = larger(&model);
            refusing.refuse_after(found);
            model.apply(&plan(0..5)).unwrap_err();
            let held = model.breakdown();
            assert!(
                held.total <= bound,
                "{resident:?} and {found} more: {held:?}, {bound}"
            );
            assert!(held.ring > Bytes::ZERO);
            let logits = model.forward(&TOKENS, &mut || Flow::Continue).unwrap();
            assert!(logits[..] == expected[..], "{resident:?} and {found} more");
        }
    }
}

#[test]
fn every_row_can_be_had_while_the_head_is_streamed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 7)
        .write(&path)
        .unwrap();
    let rows = |least, resident: &[u32]| {
        let mut rows = Vec::new();
        let mut model = open_in_parts(&path, least, &plan(resident.iter().copied()), 2);
        model
            .forward_all(&TOKENS, &mut || Flow::Continue, &mut |_, row| {
                rows.push(row.to_vec());
            })
            .unwrap();
        rows
    };
    let expected = rows(usize::MAX, &[0, 1, 2, 3, 4]);
    assert!(rows(usize::MAX, &[0, 2]) == expected);
    assert!(rows(16 << 10, &[0, 2, 5, 13]) == expected);
}

#[test]
fn a_model_can_move_to_the_thread_that_owns_it() {
    const fn moves<T: Send>() {}
    moves::<Model>();
}
