//! Tests of drafts by a model's own block.

use super::{parked::plan_of, *};

/// `what is the time now`, and the tokens of an answer.
const QUESTION: [u32; 18] = [
    119, 104, 97, 116, 32, 105, 115, 256, 104, 101, 256, 105, 109, 101, 32, 110, 111, 119,
];
const ANSWER: [u32; 10] = [105, 116, 32, 105, 115, 32, 110, 111, 119, 32];
/// Three drafted tokens after each token of the answer, by llama.cpp.
const DRAFTS: &str =
    include_str!("../../../../tests/fixtures/reference-synthetic/qwen35-f32-drafts.txt");

fn with_block(dtype: GgmlDType) -> Synthetic {
    Synthetic {
        nextn: 1,
        ..Synthetic::tiny(Architecture::Qwen35, TypeMix::All(dtype), 7)
    }
}

/// A model with a draft block in memory, and the plan with all parts of it.
fn open_with_block(path: &Path, dtype: GgmlDType) -> (Model, EnginePlan) {
    with_block(dtype).write(path).unwrap();
    let (shape, _) = Model::inspect(path, 2).unwrap();
    assert_eq!(
        shape.layers.last().map(|part| part.kind),
        Some(LayerKind::Draft)
    );
    let plan = EnginePlan {
        resident: (0u32..).zip(&shape.layers).map(|(part, _)| part).collect(),
        ..plan_of(1024, 64, KvType::F16)
    };
    (open_on(cpu(2), None, path, usize::MAX, &plan), plan)
}

#[test]
fn the_block_drafts_the_same_as_llama_cpp() {
    let folder = tempfile::tempdir().unwrap();
    let (mut model, _) = open_with_block(&folder.path().join("model.gguf"), GgmlDType::F32);
    let (mut held, go) = (QUESTION.to_vec(), &mut || Flow::Continue);
    model.forward(&held, go).unwrap();
    for (next, expected) in ANSWER.into_iter().zip(DRAFTS.lines()) {
        held.push(next);
        let expected = expected.split(' ').take(3).map(str::parse);
        let expected: Vec<u32> = expected.collect::<Result<_, _>>().unwrap();
        assert_eq!(model.draft(&held, 3, &mut || true).unwrap(), expected);
        model.forward(&[next], go).unwrap();
    }
    assert_eq!(DRAFTS.lines().count(), ANSWER.len());
}

#[test]
fn the_block_drafts_the_same_after_verified_drafts_as_token_by_token() {
    let folder = tempfile::tempdir().unwrap();
    let (mut model, _) = open_with_block(&folder.path().join("model.gguf"), GgmlDType::F32);
    let (mut held, go) = (QUESTION.to_vec(), &mut || Flow::Continue);
    model.forward(&held, go).unwrap();
    held.push(ANSWER[0]);
    model.draft(&held, 2, &mut || true).unwrap();
    // Three tokens of the answer in one pass, and two that are not accepted.
    let rows = [&ANSWER[..3], &[1, 2]].concat();
    let span = Span {
        lane: None,
        tokens: &rows,
        scored: 5,
    };
    model.forward_together(&[span], go).unwrap();
    model.take_back(None, 2);
    held.extend(&ANSWER[1..4]);
    let expected = DRAFTS.lines().nth(3).unwrap();
    let drafted = model.draft(&held, 3, &mut || true).unwrap().into_iter();
    let drafted: Vec<String> = drafted.map(|token| token.to_string()).collect();
    assert!(expected.starts_with(&drafted.join(" ")), "{drafted:?}");
    // The states are used once.
    assert!(model.draft(&held, 3, &mut || true).unwrap().is_empty());
}

#[test]
fn a_plan_without_the_block_drafts_nothing_and_holds_less() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let (mut model, whole) = open_with_block(&path, GgmlDType::Q8_0);
    let block = *whole.resident.last().unwrap();
    let mut less = whole.clone();
    less.resident.remove(&block);
    let (mut held, go) = (QUESTION.to_vec(), &mut || Flow::Continue);
    let mut tokens = held.clone();
    for (number, token) in ANSWER.into_iter().enumerate() {
        let logits = model.forward(&tokens, go).unwrap().to_vec();
        assert!(logits.iter().all(|logit| logit.is_finite()));
        held.push(token);
        let plan = if number % 2 == 0 { &less } else { &whole };
        let report = model.apply(plan).unwrap();
        assert_eq!(report.plan, *plan);
        let has_block = plan.resident.contains(&block);
        assert_eq!(model.drafts(), has_block);
        assert_eq!(
            !model.draft(&held, 2, &mut || true).unwrap().is_empty(),
            has_block
        );
        let breakdown = model.breakdown();
        assert!(
            breakdown.total <= model.shape().plan_bytes(plan),
            "{plan:?}"
        );
        assert!(model.kernel_resident() <= breakdown.used(), "{breakdown:?}");
        // No layer is streamed for want of the block.
        assert_eq!(breakdown.ring, Bytes::ZERO);
        assert!(!model.streams());
        tokens = vec![token];
    }
}

#[test]
fn a_full_cache_and_a_shorter_sequence_empty_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let (mut model, _) = open_with_block(&folder.path().join("model.gguf"), GgmlDType::Q8_0);
    let (mut held, go) = (vec![1], &mut || Flow::Continue);
    model.forward(&held, go).unwrap();
    for number in 0..700 {
        held.push(number % 250);
        assert_eq!(model.draft(&held, 3, &mut || true).unwrap().len(), 3);
        model.forward(&[number % 250], go).unwrap();
    }
    model.reset();
    held.truncate(40);
    model.forward(&held[..39], go).unwrap();
    assert_eq!(model.draft(&held, 7, &mut || true).unwrap().len(), 7);
}

#[test]
fn without_drafts_there_is_no_memory_for_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let (model, plan) = open_with_block(&path, GgmlDType::Q8_0);
    let options = ModelOptions {
        drafts: false,
        ..ModelOptions::for_threads(2)
    };
    let mut less = plan.clone();
    less.resident.pop_last();
    let mut other = Model::open(&path, &less, &options).unwrap();
    let (whole, less) = (model.shape(), other.shape());
    assert_eq!(whole.layers.len(), less.layers.len() + 1);
    assert!(whole.workspace_fixed_bytes > less.workspace_fixed_bytes);
    let held = other.breakdown();
    assert!(held.total <= less.plan_bytes(other.plan()));
    let go = &mut || Flow::Continue;
    other.forward(&QUESTION, go).unwrap();
    assert!(!other.drafts() && !other.takes_back());
    assert!(other.draft(&QUESTION, 3, &mut || true).unwrap().is_empty());
}
