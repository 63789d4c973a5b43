//! Tests of conversations that take turns: each answer equals that of a conversation alone.

use super::*;
use crate::{disk::DiskTimeout, model::saved::Hindrance};

pub(super) fn tiny(path: &Path, architecture: Architecture, dtype: GgmlDType) {
    // The fourth layer of these hybrids is the first one with attention; two of Gemma 4 use the keys of others.
    let (layers, width) = match architecture {
        Architecture::GraniteHybrid | Architecture::NemotronH | Architecture::Qwen35 => (4, 64),
        Architecture::Gemma4 => (4, 32),
        _ => (2, 32),
    };
    Synthetic {
        layers,
        width,
        feed_forward: width,
        heads: 2,
        kv_heads: 1,
        head_dim: 32,
        rotary: 32,
        windows: (70, 2),
        recurrent: (1, 2, 32),
        ..Synthetic::tiny(architecture, TypeMix::All(dtype), 7)
    }
    .write(path)
    .unwrap();
}

pub(super) fn plan_of(kv: u32, chunk: u32, kv_type: KvType) -> EnginePlan {
    EnginePlan {
        kv_capacity: Tokens::new(kv),
        prefill_chunk: Tokens::new(chunk),
        kv_type,
        ..plan(0..3)
    }
}

/// All conversations, and such slow computing that reading is always faster.
pub(super) const DUE: SaveDue = SaveDue {
    idle: Duration::MAX,
    after: Duration::ZERO,
    token: Duration::from_secs(1),
};

/// Time to wait for the disk at once.
pub(super) const STEP: Duration = Duration::from_millis(1);

/// A model and the tokens of its sequence.
pub(super) struct Talk {
    pub(super) model: Model,
    pub(super) held: Vec<u32>,
}

impl Talk {
    pub(super) fn new(path: &Path, kv: u32) -> Self {
        Self {
            model: open_on(
                cpu(1),
                None,
                path,
                usize::MAX,
                &plan_of(kv, 64, KvType::F16),
            ),
            held: Vec::new(),
        }
    }

    /// Reads a prompt, and returns the number of reused tokens.
    pub(super) fn read(&mut self, client: Option<&str>, prompt: &[u32]) -> u32 {
        let client = client.map(Arc::from);
        let asked = Asked {
            client: client.as_ref(),
            prompt,
            request: 0,
        };
        let Selected { kept, fork } = self.model.select(&self.held, asked);
        if let Some(fork) = fork {
            self.model.fork_at(fork);
        }
        let end = u32::try_from(prompt.len()).unwrap().saturating_sub(8);
        self.model.mark_at(end);
        assert_eq!(kept, self.model.position());
        self.held = prompt.to_vec();
        self.model
            .forward(&prompt[kept as usize..], &mut || Flow::Continue)
            .unwrap();
        self.check();
        kept
    }

    /// Opens a folder of saved conversations on a disk that has much time, and reads `ahead` what fits.
    pub(super) fn open(&mut self, folder: &Path, ahead: bool) {
        self.model.open_saved(folder).unwrap();
        self.finish();
        self.hinder(
            DiskTimeout::new(Duration::from_secs(600)),
            Arc::new(|| Ok(())),
        );
        while ahead && self.model.begin_read_ahead(&self.held) == Some(true) {
            while self.model.reload(STEP) {}
        }
    }

    /// Waits for all transfers.
    pub(super) fn finish(&mut self) {
        // Without a time to compute, none is worth saving.
        let nothing = SaveDue {
            token: Duration::ZERO,
            ..DUE
        };
        while let SaveStep::Busy | SaveStep::Failed =
            self.model.save_conversation(&[], nothing, &mut || true)
        {
            std::thread::yield_now();
        }
    }

    pub(super) fn hinder(&mut self, limit: DiskTimeout, hindrance: Hindrance) {
        self.model.saved.as_mut().unwrap().hinder(limit, hindrance);
    }

    /// Saves all conversations; returns how many were written.
    pub(super) fn save(&mut self) -> usize {
        self.try_to_save().expect("the disk has failed")
    }

    /// Saves conversations; returns how many were written, or `None` where the disk has failed.
    pub(super) fn try_to_save(&mut self) -> Option<usize> {
        let mut saved = 0;
        loop {
            match self.model.save_conversation(&self.held, DUE, &mut || true) {
                SaveStep::Saved => saved += 1,
                SaveStep::Busy => std::thread::yield_now(),
                SaveStep::Waits(_) => return Some(saved),
                SaveStep::Failed => return None,
            }
        }
    }

    /// Reads back what a prompt can reuse of the saved conversations.
    pub(super) fn reload(&mut self, asked: Asked<'_>) {
        if self.model.begin_reload(&self.held, asked, DUE.token) == Some(true) {
            self.held.clear();
            while self.model.reload(STEP) {}
        }
    }

    pub(super) fn check(&self) {
        let (model, held) = (&self.model, self.model.breakdown());
        assert!(held.kv_marks + model.untouched() <= held.kv, "{held:?}");
        assert!(held.kv_parked + model.untouched() <= held.kv, "{held:?}");
        let kept = model.kept_conversations();
        let alone: u64 = kept.iter().map(|one| u64::from(one.alone.get())).sum();
        let shape = model.shape().kv;
        let bytes = |tokens| shape.capacity_bytes(tokens, model.plan().kv_type).get();
        // Outside windows; this many blocks are whole pages.
        let blocks = bytes(Tokens::new(1024 * 64)) - bytes(Tokens::new(512 * 64));
        let alone = Bytes::new(alone / 64 * blocks / 512);
        assert!(alone <= held.kv_parked + held.kv_marks, "{alone}: {held:?}");
        assert!(model.kernel_resident() <= held.used(), "{held:?}");
        assert!(held.total <= model.shape().plan_bytes(model.plan()));
    }

    /// Blocks of parked conversations.
    pub(super) fn parked(&self) -> u64 {
        let shape = self.model.shape().kv;
        let block = shape.block_bytes(self.model.plan().kv_type);
        self.model.breakdown().kv_parked.get() / block.get()
    }
}

#[test]
fn eight_conversations_go_on_where_they_were_and_share_what_they_begin_with() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    tiny(&path, Architecture::Qwen3, GgmlDType::Q8_0);
    let mut talk = Talk::new(&path, 2048);
    // The first five and a half blocks are shared.
    let mut all: Vec<Vec<u32>> = (1..=8)
        .map(|own| [text(0, 352), text(own, 40)].concat())
        .collect();
    for (number, prompt) in all.iter().enumerate() {
        let kept = talk.read(None, prompt);
        assert_eq!(kept, if number == 0 { 0 } else { 352 });
    }
    // Seven blocks each, five of them shared.
    assert_eq!(talk.parked(), 7 * 2);
    let kept = talk.model.kept_conversations();
    assert_eq!(kept.len(), 7);
    for one in kept {
        let [tokens, shared, alone] = [one.tokens, one.shared, one.alone].map(Tokens::get);
        assert_eq!((tokens, shared, alone), (392, 5 * 64, 2 * 64));
    }
    for turn in 0..3u32 {
        for prompt in &mut all {
            let before = u32::try_from(prompt.len()).unwrap();
            prompt.extend(text(turn + 20, 10));
            assert_eq!(talk.read(None, prompt), before, "turn {turn}");
        }
    }
    // The cached tokens of a client reveal nothing about other clients.
    assert_eq!(talk.read(Some("kitchen"), &all[0]), 0);
    assert_eq!(talk.read(Some("hall"), &all[0]), 0);
    let asked = all[0].len();
    assert_eq!(
        talk.read(Some("kitchen"), &[&all[0][..], &[7, 8, 9]].concat()) as usize,
        asked
    );
}

/// Models that cannot be cut back anywhere: with recurrent state, and with windows that have advanced.
#[test]
fn conversations_of_models_with_state_or_windows_go_on_where_they_were() {
    for architecture in [Architecture::Qwen35, Architecture::Gemma3] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        tiny(&path, architecture, GgmlDType::Q8_0);
        let mut talk = Talk::new(&path, 4096);
        let mut alone = Talk::new(&path, 4096).model;
        let mut all: Vec<Vec<u32>> = (1..=5)
            .map(|own| [text(0, 352), text(own, 40)].concat())
            .collect();
        for (number, prompt) in all.iter().enumerate() {
            // The fork is known when the second prompt arrives; the window of the first has not advanced yet.
            let expected = match (architecture, number) {
                (_, 0) | (Architecture::Qwen35, 1) => 0,
                _ => 352,
            };
            assert_eq!(talk.read(None, prompt), expected, "{architecture:?}");
        }
        for turn in 0..3u32 {
            for prompt in &mut all {
                let before = u32::try_from(prompt.len()).unwrap();
                prompt.extend(text(turn + 20, 10));
                assert_eq!(talk.read(None, prompt), before, "{architecture:?}, {turn}");
            }
        }
        // A client that omits the end of its last turn continues from shortly before it; while layers are streamed, no
        // chunk ends there.
        let prompt = [&all[3][..418], &text(40, 30)].concat();
        let expected = if architecture == Architecture::Qwen35 {
            412
        } else {
            414
        };
        assert_eq!(talk.read(None, &prompt), expected, "{architecture:?}");
        // A shed evicts the oldest; the others have the same bits as computed from the start.
        let resident = talk.model.kernel_resident();
        let report = talk.model.apply(&plan_of(2048, 64, KvType::F16)).unwrap();
        assert_eq!(report.freed, resident - talk.model.kernel_resident());
        talk.check();
        for prompt in &mut all {
            prompt.push(5);
        }
        let kept: Vec<u32> = all
            .iter()
            .rev()
            .map(|prompt| talk.read(None, prompt))
            .collect();
        assert!(
            kept.contains(&422) && kept.contains(&352),
            "{architecture:?}: {kept:?}"
        );
        let logits = talk
            .model
            .forward(&[7], &mut || Flow::Continue)
            .unwrap()
            .to_vec();
        alone.forward(&all[0], &mut || Flow::Continue).unwrap();
        assert!(alone.forward(&[7], &mut || Flow::Continue).unwrap()[..] == logits[..]);
        // Another client shares nothing, and a smaller type evicts all.
        assert_eq!(talk.read(Some("kitchen"), &all[4]), 0);
        talk.model.apply(&plan_of(2048, 64, KvType::Q8)).unwrap();
        assert_eq!(talk.read(None, &all[4]), 0, "{architecture:?}");
    }
}

/// With memory for one state of each conversation, beside that of the common prefix.
#[test]
fn where_next_prompts_omit_the_answer_the_states_before_it_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    tiny(&path, Architecture::Qwen35, GgmlDType::Q8_0);
    let state = Talk::new(&path, 4096).model.aside_takes().get();
    let mut talk = Talk::new(&path, 4096);
    let mut plan = talk.model.plan().clone();
    plan.resident.extend([3, 4]);
    plan.kv_capacity = Tokens::new(6 * 64 + 5 * 192 + 7 * state);
    talk.model.apply(&plan).unwrap();
    let mut all: Vec<Vec<u32>> = (1..=5)
        .map(|own| [text(0, 352), text(own, 40)].concat())
        .collect();
    let mut kept = Vec::new();
    for turn in 0..4u32 {
        for prompt in &mut all {
            kept.push((prompt.len() - 8, talk.read(None, prompt)));
            // The next prompt begins as this one, and goes on otherwise than its answer.
            let answer = text(turn + 50, 30);
            talk.model.forward(&answer, &mut || Flow::Continue).unwrap();
            talk.held.extend(answer);
            prompt.extend(text(turn + 20, 20));
        }
    }
    // The first turn reads all, and the second one shows where the next ones diverge.
    for (number, (before, kept)) in kept.into_iter().enumerate().skip(10) {
        assert_eq!(kept as usize, before - 20, "{number}");
    }
}

#[test]
fn conversations_give_way_to_the_running_one_and_to_sheds_the_oldest_first() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    tiny(&path, Architecture::Llama, GgmlDType::Q8_0);
    let mut talk = Talk::new(&path, 640);
    let [one, two, three] = [1, 2, 3].map(|own| text(own, 192));
    for prompt in [&one, &two, &three] {
        assert_eq!(talk.read(None, prompt), 0);
    }
    // Nine of ten blocks are held; a prompt of four blocks evicts the oldest conversation.
    assert_eq!(talk.parked(), 6);
    assert_eq!(talk.read(None, &text(4, 250)), 0);
    assert_eq!(talk.parked(), 6);
    assert_eq!(talk.read(None, &[&three[..], &[5]].concat()), 192);
    // A shed evicts the others, and the reported bytes are returned to the kernel.
    let (resident, untouched) = (talk.model.kernel_resident(), talk.model.untouched());
    let report = talk.model.apply(&plan_of(256, 64, KvType::F16)).unwrap();
    assert_eq!(report.asked, report.freed + report.untouched);
    assert_eq!(report.freed, resident - talk.model.kernel_resident());
    assert_eq!(report.untouched, untouched - talk.model.untouched());
    assert_eq!((talk.parked(), talk.model.position()), (0, 193));
    talk.check();
    assert_eq!(talk.read(None, &[&three[..], &[5, 6]].concat()), 193);
    assert_eq!(talk.read(None, &two), 0);
}

#[test]
fn what_a_conversation_has_gone_on_from_otherwise_is_given_up_first() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    tiny(&path, Architecture::Qwen3, GgmlDType::F32);
    let mut talk = Talk::new(&path, 640);
    let first = text(1, 128);
    talk.read(None, &first);
    // The second conversation reasons after its prompt of 100 tokens, and omits the reasoning from the next prompt.
    let prompt = text(2, 100);
    talk.read(None, &prompt);
    talk.model
        .forward(&text(9, 92), &mut || Flow::Continue)
        .unwrap();
    talk.held.extend(text(9, 92));
    assert_eq!(talk.read(None, &[&prompt[..], &text(3, 92)].concat()), 100);
    assert_eq!(talk.parked(), 2 + 2, "the first block of both is the same");
    // The blocks of the reasoning are needed; it is evicted before the older conversation.
    assert_eq!(talk.read(None, &text(4, 200)), 0);
    assert_eq!(talk.parked(), 2 + 3);
    assert_eq!(talk.read(None, &[&first[..], &[1]].concat()), 128);
}
