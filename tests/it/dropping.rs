//! Dropping the oldest context: equality with a sequence without it, and the limits.

use std::path::{Path, PathBuf};

use crate::weights::Weights as _;
use cotenant::{
    engine::{
        Flow, Model, ModelOptions,
        arena::Backing,
        gguf::GgmlDType,
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
    },
    policy::{kv_type::KvType, residency::EnginePlan},
    units::{Bytes, Tokens},
};

fn plan(resident: impl IntoIterator<Item = u32>, kv: u32, kv_type: KvType) -> EnginePlan {
    EnginePlan {
        resident: resident.into_iter().collect(),
        kv_capacity: Tokens::new(kv),
        prefill_chunk: Tokens::new(48),
        kv_type,
    }
}

fn open(path: &Path, plan: &EnginePlan, threads: usize) -> Model {
    let options = ModelOptions {
        compute: threads.into(),
        name: None,
        context: Some(Tokens::new(512)),
        conversations: 0,
        drafts: true,
        keeps_conversations: false,
        kv_backing: Backing::OnTouch,
        vocabulary: None,
        helper: None,
    };
    Model::open(path, plan, &options).unwrap()
}

fn go() -> impl FnMut() -> Flow {
    || Flow::Continue
}

fn written(synthetic: &Synthetic) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    synthetic.write(&path).unwrap();
    (folder, path)
}

fn text(len: u32) -> Vec<u32> {
    (0..len).map(|at| (at * 37 + at * at % 11) % 300).collect()
}

/// Returns the largest difference of two rows of logits, relative to their spread.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    let spread = a.iter().fold(0f32, |most, x| most.max(x.abs()));
    let most = a
        .iter()
        .zip(b)
        .fold(0f32, |most, (x, y)| most.max((x - y).abs()));
    most / spread
}

/// In a single layer, keys and values do not depend on earlier tokens: a sequence that has dropped its oldest tokens
/// equals a recomputed one without them.
#[test]
fn what_goes_on_without_its_oldest_tokens_is_as_if_it_had_never_had_them() {
    for architecture in Architecture::ALL {
        if matches!(
            architecture,
            Architecture::GraniteHybrid
                | Architecture::Lfm2
                | Architecture::Lfm2Moe
                | Architecture::NemotronH
                | Architecture::NemotronHMoe
                | Architecture::Qwen35
                | Architecture::Qwen35Moe
        ) {
            continue; // recurrent layers keep earlier tokens in their state
        }
        let bounds = [(KvType::F16, 2e-3), (KvType::Q8, 2e-2), (KvType::Q4, 0.25)];
        let types = if architecture == Architecture::Qwen3 {
            3
        } else {
            1
        };
        for (kv_type, bound) in bounds.into_iter().take(types) {
            let (_folder, path) = written(&Synthetic {
                layers: 1,
                ..Synthetic::tiny(architecture, TypeMix::All(GgmlDType::F32), 3)
            });
            let all = text(400);
            let mut long = open(&path, &plan(0..2, 256, kv_type), 2);
            long.allow_dropping(Some(Tokens::new(4)));
            long.forward(&all[..256], &mut go()).unwrap();
            // Three of its blocks are filled in succession, then the place of the first one is reused.
            assert_eq!(
                long.droppable(),
                Tokens::new(128),
                "the last block that is full stays"
            );
            for _ in 0..2 {
                assert_eq!(long.make_room(), Tokens::new(64));
            }
            assert_eq!((long.position(), long.make_room()), (128, Tokens::ZERO));
            assert_eq!(long.dropped(), (Tokens::new(128), Tokens::new(64)));
            let continued = long.forward(&all[256..300], &mut go()).unwrap().to_vec();

            let mut fresh = open(&path, &plan(0..2, 256, kv_type), 2);
            let rest: Vec<u32> = all[..64].iter().chain(&all[192..300]).copied().collect();
            let expected = fresh.forward(&rest, &mut go()).unwrap().to_vec();
            let off = distance(&expected, &continued);
            assert!(off < bound, "{architecture:?} {kv_type}: {off}");
            // The result differs from one without any drop.
            if architecture != Architecture::Qwen3 {
                continue;
            }
            let mut whole = open(&path, &plan(0..2, 512, kv_type), 2);
            let kept = whole.forward(&all[..300], &mut go()).unwrap().to_vec();
            assert!(
                distance(&expected, &kept) > 4.0 * off,
                "{architecture:?} {kv_type}"
            );
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// The capacity is exhausted: the next tokens replace the oldest.
    Full,
    /// The capacity shrinks between two tokens: data at the end moves to the place of the oldest.
    Shrunk,
    /// The capacity shrinks in the middle of a token.
    ShrunkInside,
}

/// Returns the logits of each token after 128 of 256 were dropped for a reason, with the KV type in force afterwards.
fn history(path: &Path, way: Way, threads: usize, resident: &[u32], then: KvType) -> Vec<Vec<f32>> {
    let all = text(400);
    let plan = |kv, kv_type| plan(resident.iter().copied(), kv, kv_type);
    let mut model = open(path, &plan(256, KvType::F16), threads);
    model.allow_dropping(Some(Tokens::new(64)));
    model.forward(&all[..256], &mut go()).unwrap();
    let mut rows = Vec::new();
    match way {
        Way::Full => {
            for _ in 0..2 {
                assert_eq!(model.make_room(), Tokens::new(64));
            }
        }
        Way::Shrunk => {
            let before = model.kernel_resident();
            let report = model.apply(&plan(128, KvType::F16)).unwrap();
            assert_eq!(
                (report.dropped, report.plan.kv_capacity),
                (Tokens::new(128), Tokens::new(128))
            );
            let block = model.shape().kv.block_bytes(KvType::F16);
            assert_eq!(report.asked, block.saturating_mul(2));
            assert_eq!(
                (report.freed, before - model.kernel_resident()),
                (report.asked, report.asked)
            );
        }
        Way::ShrunkInside => {
            // A token that fits the smaller capacity once the oldest are dropped, which is requested before its first
            // layer.
            model.make_room();
            let mut asked = false;
            let mut checkpoint = || {
                if std::mem::replace(&mut asked, true) {
                    Flow::Continue
                } else {
                    Flow::Apply(plan(192, KvType::F16))
                }
            };
            // With 192 tokens present, one more drops another 64.
            rows.push(
                model
                    .forward(&all[256..257], &mut checkpoint)
                    .unwrap()
                    .to_vec(),
            );
            assert_eq!(
                (model.position(), model.plan().kv_capacity),
                (129, Tokens::new(192))
            );
        }
    }
    assert_eq!(model.dropped(), (Tokens::new(128), Tokens::new(64)));
    if rows.is_empty() {
        model.apply(&plan(192, KvType::F16)).unwrap();
        rows.push(model.forward(&all[256..257], &mut go()).unwrap().to_vec());
    }
    model.apply(&plan(256, then)).unwrap();
    for token in &all[257..260] {
        rows.push(model.forward(&[*token], &mut go()).unwrap().to_vec());
    }
    rows.push(model.forward(&all[260..330], &mut go()).unwrap().to_vec());
    let held = model.breakdown();
    assert!(
        held.total <= model.shape().plan_bytes(model.plan()),
        "{held:?}"
    );
    assert!(model.kernel_resident() <= held.used() - held.header);
    // The next tokens to drop have moved.
    assert_eq!(model.make_room(), Tokens::new(64));
    rows.push(model.forward(&all[330..363], &mut go()).unwrap().to_vec());
    // Another sequence is unaffected.
    model.reset();
    if way != Way::Shrunk {
        return rows;
    }
    assert_eq!(model.dropped().0, Tokens::ZERO);
    let mut fresh = open(path, &plan(256, then), 2);
    assert!(
        model.forward(&all[..70], &mut go()).unwrap()[..]
            == fresh.forward(&all[..70], &mut go()).unwrap()[..],
        "{way:?}"
    );
    rows
}

#[test]
fn however_tokens_are_dropped_the_answer_has_the_same_bits() {
    for (architecture, then) in [
        (Architecture::Qwen35, KvType::Q8),
        (Architecture::Gemma3, KvType::Q4),
        (Architecture::Gemma4, KvType::Q8),
        (Architecture::GptOss, KvType::Q4),
    ] {
        // Blocks of whole pages, so that freed memory can be counted exactly.
        let (_folder, path) = written(&Synthetic::tiny(
            architecture,
            TypeMix::All(GgmlDType::Q8_0),
            11,
        ));
        let expected = history(&path, Way::Full, 1, &[0, 1, 2, 3, 4], then);
        for (way, threads, resident) in [
            (Way::Shrunk, 2, &[1][..]),
            (Way::ShrunkInside, 3, &[0, 2, 4]),
        ] {
            let rows = history(&path, way, threads, resident, then);
            assert_eq!(rows.len(), expected.len());
            assert!(rows == expected, "{architecture:?} {way:?} {then}");
        }
    }
}

#[test]
fn nothing_is_dropped_that_may_not_be() {
    let (_folder, path) = written(&Synthetic::tiny(
        Architecture::Qwen3,
        TypeMix::All(GgmlDType::Q8_0),
        11,
    ));
    let all = text(256);
    let mut model = open(&path, &plan(0..5, 256, KvType::F16), 2);
    model.forward(&all[..250], &mut go()).unwrap();
    // Dropping was not permitted.
    assert_eq!(
        (model.make_room(), model.droppable()),
        (Tokens::ZERO, Tokens::ZERO)
    );
    let report = model.apply(&plan(0..5, 64, KvType::F16)).unwrap();
    assert_eq!(
        (report.dropped, report.plan.kv_capacity),
        (Tokens::ZERO, Tokens::new(256))
    );
    // Kept tokens are rounded up to blocks, and the last full block is not droppable.
    for (sinks, droppable) in [
        (0, 128),
        (1, 64),
        (64, 64),
        (65, 0),
        (250, 0),
        (u32::MAX, 0),
    ] {
        model.allow_dropping(Some(Tokens::new(sinks)));
        assert_eq!(model.droppable(), Tokens::new(droppable), "{sinks}");
    }
    assert_eq!(model.make_room(), Tokens::ZERO);
    // A plan that requires more dropping than permitted achieves the possible part.
    model.allow_dropping(Some(Tokens::new(4)));
    let report = model.apply(&plan(0..5, 64, KvType::F16)).unwrap();
    assert_eq!(
        (report.dropped, report.plan.kv_capacity),
        (Tokens::new(64), Tokens::new(192))
    );
    assert_eq!(model.position(), 186);
    // No longer permitted: dropped tokens stay dropped, and nothing can be appended.
    model.allow_dropping(None);
    assert_eq!(
        (model.droppable(), model.dropped().0),
        (Tokens::ZERO, Tokens::new(64))
    );
    assert_eq!(
        model.apply(&plan(0..5, 64, KvType::F16)).unwrap().asked,
        Bytes::ZERO
    );
    // No prompt continues from it: tokens after the gap depend on the dropped ones.
    let mut fresh = open(&path, &plan(0..5, 192, KvType::F16), 2);
    model.reset();
    let expected = fresh.forward(&all[..80], &mut go()).unwrap().to_vec();
    assert!(model.forward(&all[..80], &mut go()).unwrap()[..] == expected[..]);
}

/// With all layers: llama.cpp moves the kept cells and rotates their keys by the length of the gap.
#[test]
fn what_goes_on_is_what_goes_on_in_llama_cpp() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference-synthetic");
    for architecture in Architecture::ALL {
        if matches!(
            architecture,
            Architecture::Qwen35
                | Architecture::Qwen35Moe
                | Architecture::GraniteHybrid
                | Architecture::Lfm2
                | Architecture::Lfm2Moe
                | Architecture::NemotronH
                | Architecture::NemotronHMoe
                | Architecture::GptOss
                | Architecture::Olmo2
                | Architecture::Phi3
                | Architecture::Qwen2
                | Architecture::Qwen3Vl
                | Architecture::Qwen3VlMoe
                | Architecture::SmolLm3
        ) {
            continue; // see the fixtures' README
        }
        let name = architecture.name();
        let reference = |attention: &str| -> Vec<f32> {
            let bytes =
                std::fs::read(folder.join(format!("{name}-f32-shifted-fa-{attention}.f32")))
                    .unwrap();
            let numbers = bytes.chunks_exact(4);
            numbers
                .map(|x| f32::from_le_bytes(x.try_into().unwrap()))
                .collect()
        };
        let (on, off) = (reference("on"), reference("off"));
        // As in the fixtures' README.
        let seed = match architecture {
            Architecture::Qwen3Moe => 9,
            Architecture::Gemma4 => 11,
            _ => 7,
        };
        let types = TypeMix::All(GgmlDType::F32);
        let (_folder, path) = written(&Synthetic::tiny(architecture, types, seed));
        let all = text(300);
        let mut model = open(&path, &plan([0, 2], 256, KvType::F16), 2);
        model.allow_dropping(Some(Tokens::new(1)));
        model.forward(&all[..256], &mut go()).unwrap();
        model.apply(&plan([0, 2], 128, KvType::F16)).unwrap();
        model.apply(&plan([0, 2], 256, KvType::F16)).unwrap();
        assert_eq!(model.dropped(), (Tokens::new(128), Tokens::new(64)));
        let ours = model.forward(&all[256..], &mut go()).unwrap().to_vec();
        let (off_by, spread) = (
            distance(&on, &ours).max(distance(&off, &ours)),
            distance(&on, &off),
        );
        println!("{name}: {off_by:.5}, llama.cpp with itself {spread:.5}");
        assert!(off_by <= 3.0 * spread, "{name}: {off_by} against {spread}");
    }
}
