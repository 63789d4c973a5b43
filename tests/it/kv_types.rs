//! KV in smaller types: changed and unchanged results.

use std::path::Path;

use crate::weights::Weights as _;
use cotenant::{
    engine::{
        ApplyReport, Flow, Model, ModelOptions,
        gguf::GgmlDType,
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
    },
    policy::{kv_type::KvType, residency::EnginePlan},
    units::Tokens,
};

fn plan(
    resident: impl IntoIterator<Item = u32>,
    kv: u32,
    chunk: u32,
    kv_type: KvType,
) -> EnginePlan {
    EnginePlan {
        resident: resident.into_iter().collect(),
        kv_capacity: Tokens::new(kv),
        prefill_chunk: Tokens::new(chunk),
        kv_type,
    }
}

fn open(path: &Path, plan: &EnginePlan, threads: usize) -> Model {
    let options = ModelOptions::for_threads(threads);
    Model::open(path, plan, &options).unwrap()
}

fn go() -> impl FnMut() -> Flow {
    || Flow::Continue
}

fn model(architecture: Architecture) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    Synthetic::tiny(architecture, TypeMix::All(GgmlDType::Q8_0), 11)
        .write(&path)
        .unwrap();
    (folder, path)
}

fn text(len: u32) -> Vec<u32> {
    (0..len).map(|at| (at * 37 + at * at % 11) % 300).collect()
}

/// Returns the logits after each part of a text, with a KV type applied before each part, or within it.
fn history(
    path: &Path,
    threads: usize,
    resident: &[u32],
    chunk: u32,
    parts: &[(u32, KvType, bool)],
) -> Vec<Vec<f32>> {
    let mut model = open(
        path,
        &plan(resident.iter().copied(), 256, chunk, KvType::F16),
        threads,
    );
    let all = text(256);
    let mut rows = Vec::new();
    for (len, kv_type, inside) in parts {
        let wanted = plan(resident.iter().copied(), 256, chunk, *kv_type);
        let from = model.position() as usize;
        let tokens = &all[from..from + *len as usize];
        if *inside {
            // Before the second layer of the only chunk of this part.
            let mut asked = 0;
            let mut checkpoint = || {
                asked += 1;
                if asked == 2 {
                    Flow::Apply(wanted.clone())
                } else {
                    Flow::Continue
                }
            };
            rows.push(model.forward(tokens, &mut checkpoint).unwrap().to_vec());
        } else {
            let report = model.apply(&wanted).unwrap();
            assert_eq!(report.plan.kv_type, *kv_type);
            rows.push(model.forward(tokens, &mut go()).unwrap().to_vec());
        }
        let held = model.breakdown();
        assert_eq!(model.plan().kv_type, *kv_type);
        assert!(
            held.total <= model.shape().plan_bytes(model.plan()),
            "{held:?}"
        );
        let resident = model.kernel_resident();
        assert!(
            resident <= held.used() - held.header,
            "{resident} of {}",
            held.used()
        );
    }
    rows
}

#[test]
fn the_same_history_of_types_gives_the_same_bits_whatever_else_happens() {
    use KvType::{F16, Q4, Q8};
    let parts = [
        (70, F16, false),
        (1, Q8, false),
        (9, Q8, false),
        (1, Q4, false),
        (12, Q4, false),
        (1, F16, false),
        (5, Q8, true),
        (1, Q8, false),
    ];
    for architecture in [
        Architecture::Gemma3,
        Architecture::Gemma4,
        Architecture::GptOss,
        Architecture::GraniteHybrid,
        Architecture::NemotronH,
        Architecture::Qwen35,
    ] {
        let (_folder, path) = model(architecture);
        let expected = history(&path, 1, &[0, 1, 2, 3, 4], 128, &parts);
        assert!(
            history(&path, 3, &[0, 1, 2, 3, 4], 128, &parts) == expected,
            "{architecture:?}: threads"
        );
        assert!(
            history(&path, 2, &[1], 128, &parts) == expected,
            "{architecture:?}: streamed"
        );
        let other = [(70, F16, false), (1, F16, false), (9, Q8, false)];
        let other = history(&path, 1, &[0, 1, 2, 3, 4], 128, &other);
        assert!(
            other[1] != expected[1],
            "{architecture:?}: the type is of no effect"
        );
        // If nothing changes in the middle of a chunk, the chunk size has no effect either.
        let expected = history(&path, 1, &[0, 1, 2, 3, 4], 128, &parts[..6]);
        assert!(
            history(&path, 2, &[0, 2, 4], 7, &parts[..6]) == expected,
            "{architecture:?}: chunks"
        );
    }
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

#[test]
fn what_q8_changes_is_small_and_what_q4_changes_is_larger() {
    for architecture in [Architecture::Qwen3, Architecture::Qwen35] {
        let (_folder, path) = model(architecture);
        let scores = |kind| {
            let mut model = open(&path, &plan(0..5, 256, 64, kind), 2);
            model.forward(&text(80), &mut go()).unwrap().to_vec()
        };
        let exact = scores(KvType::F16);
        let (q8, q4) = (
            distance(&exact, &scores(KvType::Q8)),
            distance(&exact, &scores(KvType::Q4)),
        );
        assert!(q8 > 0.0 && q8 < 0.08, "{architecture:?} q8: {q8}");
        assert!(q4 > q8 && q4 < 0.5, "{architecture:?} q4: {q4}, q8: {q8}");
        // Converted or stored directly, the results are close.
        let mut model = open(&path, &plan(0..5, 256, 64, KvType::F16), 2);
        let (all, last) = (text(80), 79);
        model.forward(&all[..last], &mut go()).unwrap();
        model.apply(&plan(0..5, 256, 64, KvType::Q8)).unwrap();
        let converted = distance(&exact, &model.forward(&all[last..], &mut go()).unwrap());
        assert!(
            converted > 0.0 && converted < 0.08,
            "{architecture:?}: {converted}"
        );
    }
}

#[test]
fn a_conversion_gives_memory_back_and_what_is_lost_is_read_again_when_there_is_room() {
    // Blocks of 128 KiB.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    Synthetic {
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        ..Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 5)
    }
    .write(&path)
    .unwrap();
    let tokens = text(140);
    let mut fresh = open(&path, &plan(0..5, 256, 128, KvType::F16), 2);
    let expected = fresh.forward(&tokens, &mut go()).unwrap().to_vec();

    let mut model = open(&path, &plan(0..5, 640, 128, KvType::F16), 2);
    model.forward(&tokens[..139], &mut go()).unwrap();
    let (before, kv) = (model.kernel_resident(), model.shape().kv);
    let asked = |kind| kv.capacity_bytes(Tokens::new(640), kind);
    let reported = |report: &ApplyReport, from, to| {
        assert_eq!(report.asked, asked(from) - asked(to));
        // Every byte was resident or untouched, except for places of the last block without a token.
        assert!(
            report.freed + report.untouched + kv.block_bytes(from) >= report.asked,
            "{report:?}"
        );
        assert_eq!(report.plan.kv_type, to);
    };
    let report = model.apply(&plan(0..5, 640, 128, KvType::Q8)).unwrap();
    reported(&report, KvType::F16, KvType::Q8);
    assert_eq!(
        report.freed,
        before - model.kernel_resident(),
        "as the kernel counts"
    );
    let used = kv.bytes_per_token(KvType::F16).saturating_mul(139);
    assert!(
        report.freed > used.per_mille(250),
        "{} of {used}",
        report.freed
    );
    reported(
        &model.apply(&plan(0..5, 640, 128, KvType::Q4)).unwrap(),
        KvType::Q8,
        KvType::Q4,
    );
    assert_eq!(model.kv_precision(), KvType::Q4);
    assert_eq!(
        model.keep(130),
        130,
        "what is kept as it is can be gone on from"
    );

    // Back to the larger type: the running sequence keeps its data, the next one is recomputed.
    let report = model.apply(&plan(0..5, 640, 128, KvType::F16)).unwrap();
    assert_eq!(report.grown, asked(KvType::F16) - asked(KvType::Q4));
    let continued = model.forward(&tokens[130..], &mut go()).unwrap().to_vec();
    assert!(continued != expected && distance(&expected, &continued) < 0.5);
    assert_eq!(
        (model.plan().kv_type, model.kv_precision()),
        (KvType::F16, KvType::Q4)
    );
    assert_eq!(model.keep(130), 0);
    assert_eq!(model.kv_precision(), KvType::F16);
    assert!(model.forward(&tokens, &mut go()).unwrap()[..] == expected[..]);
}
