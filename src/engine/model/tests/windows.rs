//! Tests of layers with sliding windows: the memory they release, and equal results.

use super::*;
use crate::{
    backend::Backend,
    kv::{KV_BLOCK_TOKENS, KvCache},
};
use cotenant_policy::residency::{KvShape, WindowedKv};

const CONTEXT: u32 = 4096;

/// Writes a model whose first of two layers sees 70 tokens, more than a block.
fn gemma(path: &Path) {
    Synthetic {
        layers: 2,
        width: 32,
        feed_forward: 32,
        heads: 1,
        kv_heads: 1,
        head_dim: 32,
        rotary: 32,
        windows: (70, 2),
        ..Synthetic::tiny(Architecture::Gemma3, TypeMix::All(GgmlDType::Q8_0), 7)
    }
    .write(path)
    .unwrap();
}

fn plan_of(kv: u32, chunk: u32, kv_type: KvType) -> EnginePlan {
    EnginePlan {
        kv_capacity: Tokens::new(kv),
        prefill_chunk: Tokens::new(chunk),
        kv_type,
        ..plan(0..3)
    }
}

fn open(path: &Path, plan: &EnginePlan) -> Model {
    let options = ModelOptions {
        context: Some(Tokens::new(CONTEXT)),
        ..ModelOptions::for_threads(1)
    };
    let opening = Opening::on(cpu(1), path, &options, Layout::of, &Disk::default()).unwrap();
    let mut model = opening.begin(plan).unwrap();
    model.settle();
    model
}

/// Opens the model with a cache whose windowed layers keep all tokens.
fn open_whole(path: &Path, plan: &EnginePlan) -> Model {
    let mut model = open(path, plan);
    let all = CONTEXT / KV_BLOCK_TOKENS.get();
    let windowed = model.shape.kv.windowed.map(|windowed| WindowedKv {
        blocks: all,
        ..windowed
    });
    model.shape.kv = KvShape {
        windowed,
        ..model.shape.kv
    };
    let backend: &mut dyn Backend = model.backend.as_mut();
    let mut cache = KvCache::new(backend, model.shape.kv, CONTEXT, Backing::OnTouch).unwrap();
    cache.resize(backend, plan.kv_capacity, 0).unwrap();
    model.sequence.cache = cache;
    model
}

/// Both models, which must give equal logits.
struct Two {
    windows: Model,
    whole: Model,
}

impl Two {
    fn new(path: &Path, plan: &EnginePlan) -> Self {
        Self {
            windows: open(path, plan),
            whole: open_whole(path, plan),
        }
    }

    fn forward(&mut self, tokens: &[u32], what: &str) {
        let expected = self
            .whole
            .forward(tokens, &mut || Flow::Continue)
            .unwrap()
            .to_vec();
        let logits = self
            .windows
            .forward(tokens, &mut || Flow::Continue)
            .unwrap()
            .to_vec();
        assert!(logits == expected, "{what}, at {}", self.windows.position());
        self.check();
    }

    fn apply(&mut self, plan: &EnginePlan) {
        self.whole.apply(plan).unwrap();
        let report = self.windows.apply(plan).unwrap();
        assert_eq!(self.windows.plan(), self.whole.plan());
        assert_eq!(report.held, self.windows.breakdown().total);
        self.check();
    }

    fn check(&self) {
        let (model, held) = (&self.windows, self.windows.breakdown());
        assert_eq!(
            held.kv,
            model
                .shape()
                .kv
                .capacity_bytes(model.plan().kv_capacity, model.plan().kv_type)
        );
        assert!(
            held.total <= model.shape().plan_bytes(model.plan()),
            "{held:?}"
        );
        assert!(model.kernel_resident() <= held.used(), "{held:?}");
    }

    /// Cuts both back; returns the length kept by the model with windows.
    fn keep(&mut self, tokens: u32) -> u32 {
        let kept = self.windows.keep(tokens);
        assert_eq!(self.whole.keep(kept), kept);
        kept
    }
}

#[test]
fn layers_with_windows_keep_their_last_blocks_and_give_the_bits_of_a_whole_cache() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    gemma(&path);
    let mut two = Two::new(&path, &plan_of(2048, 512, KvType::F16));
    let kv = two.windows.shape().kv;
    // 69 tokens before the first of 512 rows, beginning and ending within a block.
    assert_eq!(
        kv.windowed,
        Some(WindowedKv {
            layers: 1,
            blocks: 11,
            heads: None
        })
    );
    let constant = kv.capacity_bytes(Tokens::new(2048), KvType::F16);
    assert_eq!(
        kv.capacity_bytes(Tokens::new(2048 + 640), KvType::F16) - constant,
        kv.bytes_per_token(KvType::F16).saturating_mul(640)
    );
    let all = text(1, 1100);
    two.forward(&all[..1000], "in chunks of 512");
    assert!(two.windows.kernel_resident() < two.whole.kernel_resident());
    for token in &all[1000..1003] {
        two.forward(&[*token], "one token");
    }
    // A regenerated answer continues from the cache, and so do later prompts.
    assert_eq!(two.keep(1000), 1000);
    two.forward(&text(2, 90), "another answer");
    assert_eq!(two.keep(1090), 1090);
    // Tokens far before the window are lost and recomputed.
    assert_eq!(two.keep(400), 0);
    two.forward(&all[..500], "again from the start");
    assert_eq!(two.keep(100), 100, "no window has passed on");
    // In chunks larger than the rows that attend together, streamed, with another capacity.
    two.apply(&EnginePlan {
        resident: [1].into(),
        ..plan_of(1024, 900, KvType::F16)
    });
    two.forward(&all[100..900], "in a chunk of 800");
    two.apply(&plan_of(2048, 16, KvType::F16));
    two.forward(&all[900..950], "in chunks of 16");
    // In other types, whose rows are converted in place.
    for kind in [KvType::Q8, KvType::Q4] {
        two.apply(&plan_of(1600, 64, kind));
        let at = two.windows.position() as usize;
        two.forward(&all[at..at + 40], "converted");
    }
    // Fewer blocks than the windows keep.
    two.windows.reset();
    two.whole.reset();
    two.apply(&plan_of(256, 64, KvType::F16));
    two.forward(&all[..250], "a small capacity");
    two.apply(&plan_of(2048, 64, KvType::F16));
    two.forward(&all[250..850], "which has grown");
}

#[test]
fn conversations_that_alternate_go_on_from_a_copy_of_the_window_where_they_part() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    gemma(&path);
    let mut two = Two::new(&path, &plan_of(3000, 128, KvType::F16));
    let one = text(1, 1000);
    let other: Vec<u32> = one[..300].iter().copied().chain(text(9, 650)).collect();
    two.forward(&one, "the first");
    for (turn, tokens) in [&other, &one, &other].into_iter().enumerate() {
        // Fewer layers and another capacity meanwhile; a larger type would require recomputation.
        let (resident, capacity) = if turn % 2 == 0 {
            ([1, 2].into(), 2000)
        } else {
            ((0..3).collect(), 3000)
        };
        two.apply(&EnginePlan {
            resident,
            ..plan_of(capacity, 128, KvType::F16)
        });
        let kept = two.keep(300);
        assert_eq!(kept, if turn == 0 { 0 } else { 300 });
        two.windows.fork_at(300);
        two.forward(&tokens[kept as usize..], "a turn");
        assert_eq!(two.windows.breakdown().kv_marks, Bytes::from_kib(2 * 8));
    }
    // Tokens evict the copy.
    assert_eq!(two.keep(300), 300);
    two.apply(&plan_of(320, 128, KvType::F16));
    two.forward(&one[300..319], "without room for a copy");
    assert_eq!(two.windows.breakdown().kv_marks, Bytes::ZERO);
}

#[test]
fn a_pass_that_was_broken_off_goes_on_from_where_its_windows_are() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    gemma(&path);
    let all = text(3, 1500);
    for (chunk, kept) in [(256, 800), (700, 0)] {
        let mut two = Two::new(&path, &plan_of(2048, chunk, KvType::F16));
        two.forward(&all[..800], "before");
        let mut polls = 0;
        let mut stop = || {
            polls += 1;
            if polls > 1 {
                Flow::Stop
            } else {
                Flow::Continue
            }
        };
        two.windows.forward(&all[800..], &mut stop).unwrap_err();
        // A chunk of 700 tokens has overwritten the window of the tokens before it.
        assert_eq!(two.windows.recover(), kept);
        two.whole.keep(kept);
        two.forward(&all[kept as usize..kept as usize + 100], "gone on with");
    }
}

/// Windows are measured in the positions at which tokens were read, so that a token that has left the window never
/// returns.
#[test]
fn what_is_dropped_leaves_the_same_bits_wherever_windows_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    gemma(&path);
    let all = text(4, 1400);
    for capacity in [192, 832] {
        let mut two = Two::new(&path, &plan_of(960, 128, KvType::F16));
        for model in [&mut two.windows, &mut two.whole] {
            model.allow_dropping(Some(Tokens::new(4)));
        }
        two.forward(&all[..900], "before");
        // Blocks behind the smaller capacity move to the places of dropped ones.
        two.apply(&plan_of(capacity, 128, KvType::F16));
        let mut at = 900;
        for count in [1usize, 1, 40, 1, 60, 1, 1] {
            if two.windows.position() == capacity {
                assert_eq!(two.windows.make_room(), Tokens::new(64));
                two.whole.make_room();
            }
            let count = count.min((capacity - two.windows.position()) as usize);
            two.forward(&all[at..at + count], "behind the gap");
            at += count;
        }
        assert_eq!(two.windows.dropped(), two.whole.dropped());
        assert!(two.windows.dropped().0 > Tokens::ZERO);
        two.apply(&plan_of(1280, 128, KvType::Q8));
        two.forward(&all[at..at + 250], "with room again");
    }
}

#[test]
fn any_history_leaves_the_bits_of_a_whole_cache() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    gemma(&path);
    let mut orders = Orders {
        parts: 3,
        left: 0,
        seed: 1,
        looks: 0,
        done: Vec::new(),
    };
    let mut two = Two::new(&path, &plan_of(1024, 128, KvType::F16));
    for turn in 0..8 {
        let back = orders.random(if turn % 3 == 0 { 900 } else { 150 });
        let wanted = two.windows.position().saturating_sub(back);
        let kept = two.keep(wanted);
        assert!(kept == 0 || kept == wanted);
        let count = 1 + orders.random(400);
        let resident = (0..3).filter(|_| orders.random(3) > 0).collect();
        let (capacity, chunk) = (
            (kept + count).max(orders.random(2400)),
            1 + orders.random(700),
        );
        two.apply(&EnginePlan {
            resident,
            ..plan_of(capacity, chunk, KvType::F16)
        });
        two.forward(&text(turn, count), "a turn");
    }
}
