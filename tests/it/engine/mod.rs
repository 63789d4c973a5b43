//! The engine's model side on synthetic models: exactness, release, bad files.

mod book;
mod encoders;
mod families;
mod files;
mod history;
mod logits;

use std::path::{Path, PathBuf};

use crate::weights::Weights as _;
use cotenant::{
    engine::{
        Flow, Model, ModelOptions,
        arena::Backing,
        backend,
        gguf::GgmlDType,
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
    },
    policy::{kv_type::KvType, residency::EnginePlan},
    units::Tokens,
};

struct File {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

fn write(model: &Synthetic) -> File {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    model.write(&path).unwrap();
    File {
        _folder: folder,
        path,
    }
}

fn tiny(architecture: Architecture, dtype: GgmlDType) -> File {
    write(&Synthetic::tiny(architecture, TypeMix::All(dtype), 7))
}

fn plan(resident: impl IntoIterator<Item = u32>, kv: u32, chunk: u32) -> EnginePlan {
    EnginePlan {
        resident: resident.into_iter().collect(),
        kv_capacity: Tokens::new(kv),
        prefill_chunk: Tokens::new(chunk),
        kv_type: KvType::F16,
    }
}

/// Uses the kernels in `COTENANT_TEST_INSTRUCTIONS`, if set: guarantees for the best instruction set of a machine apply
/// to its other sets too.
fn use_instructions_of_environment() {
    if let Ok(name) = std::env::var("COTENANT_TEST_INSTRUCTIONS") {
        backend::cpu::use_instructions(&name).unwrap_or_else(|known| {
            panic!(
                "COTENANT_TEST_INSTRUCTIONS: `{name}` is none of {}",
                known.join(", ")
            )
        });
    }
}

fn options(threads: usize) -> ModelOptions {
    use_instructions_of_environment();
    ModelOptions {
        compute: threads.into(),
        name: None,
        context: Some(Tokens::new(512)),
        conversations: 0,
        drafts: true,
        keeps_conversations: false,
        kv_backing: Backing::OnTouch,
        vocabulary: None,
        helper: None,
    }
}

fn open(path: &Path, plan: &EnginePlan, threads: usize) -> Model {
    Model::open(path, plan, &options(threads)).unwrap()
}

/// Opens a model whose capacity may grow to 4096 tokens.
fn open_long(path: &Path, plan: &EnginePlan, threads: usize) -> Model {
    let options = ModelOptions {
        context: Some(Tokens::new(4096)),
        ..options(threads)
    };
    Model::open(path, plan, &options).unwrap()
}

fn go() -> impl FnMut() -> Flow {
    || Flow::Continue
}

const PROMPT: [u32; 11] = [5, 80, 3, 200, 319, 42, 42, 7, 150, 256, 1];

fn greedy(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (index, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = index;
        }
    }
    u32::try_from(best).unwrap()
}

/// Returns the logits after the prompt and after each of `steps` greedy tokens, with all four layers and the head
/// resident, one thread, one chunk.
fn reference(path: &Path, steps: usize) -> Vec<Vec<f32>> {
    expected(path, 4, steps)
}

/// As [`reference`], for a model of `layers` layers.
fn expected(path: &Path, layers: u32, steps: usize) -> Vec<Vec<f32>> {
    let mut model = open(path, &plan(0..=layers, 256, 32), 1);
    let mut all = vec![model.forward(&PROMPT, &mut go()).unwrap().to_vec()];
    for _ in 0..steps {
        let next = greedy(all.last().unwrap());
        all.push(model.forward(&[next], &mut go()).unwrap().to_vec());
    }
    all
}

/// Returns the number of random schedules; a long run requests more by `COTENANT_TEST_SCHEDULES`.
fn schedules(few: u32) -> u32 {
    std::env::var("COTENANT_TEST_SCHEDULES").map_or(few, |text| text.parse().unwrap())
}
