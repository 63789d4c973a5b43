//! Tests of conversations that take turns: each answer equals that of a conversation alone.

use std::{
    collections::{BTreeSet, VecDeque},
    fs, io,
    os::unix::fs::{PermissionsExt as _, symlink},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use proptest::{prelude::*, test_runner::TestRunner};

use super::*;
use crate::{disk::DiskTimeout, model::saved::Hindrance};

fn tiny(path: &Path, architecture: Architecture, dtype: GgmlDType) {
    // The fourth layer of Qwen3.5 is the first one with attention; two of Gemma 4 use the keys of others.
    let (layers, width) = match architecture {
        Architecture::Qwen35 => (4, 64),
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

fn plan_of(kv: u32, chunk: u32, kv_type: KvType) -> EnginePlan {
    EnginePlan {
        kv_capacity: Tokens::new(kv),
        prefill_chunk: Tokens::new(chunk),
        kv_type,
        ..plan(0..3)
    }
}

/// All conversations, and such slow computing that reading is always faster.
const DUE: SaveDue = SaveDue {
    idle: Duration::MAX,
    after: Duration::ZERO,
    token: Duration::from_secs(1),
};

/// Time to wait for the disk at once.
const STEP: Duration = Duration::from_millis(1);

/// A model and the tokens of its sequence.
struct Talk {
    model: Model,
    held: Vec<u32>,
}

impl Talk {
    fn new(path: &Path, kv: u32) -> Self {
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
    fn read(&mut self, client: Option<&str>, prompt: &[u32]) -> u32 {
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
        self.model.mark_at(end, end);
        assert_eq!(kept, self.model.position());
        self.held = prompt.to_vec();
        self.model
            .forward(&prompt[kept as usize..], &mut || Flow::Continue)
            .unwrap();
        self.check();
        kept
    }

    /// Opens a folder of saved conversations on a disk that has much time, and reads `ahead` what fits.
    fn open(&mut self, folder: &Path, ahead: bool) {
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
    fn finish(&mut self) {
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

    fn hinder(&mut self, limit: DiskTimeout, hindrance: Hindrance) {
        self.model.saved.as_mut().unwrap().hinder(limit, hindrance);
    }

    /// Saves all conversations; returns how many were written.
    fn save(&mut self) -> usize {
        self.try_to_save().expect("the disk has failed")
    }

    /// Saves conversations; returns how many were written, or `None` where the disk has failed.
    fn try_to_save(&mut self) -> Option<usize> {
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
    fn reload(&mut self, asked: Asked<'_>) {
        if self.model.begin_reload(&self.held, asked, DUE.token) == Some(true) {
            self.held.clear();
            while self.model.reload(STEP) {}
        }
    }

    fn check(&self) {
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
    fn parked(&self) -> u64 {
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

/// One turn of a client's conversation, and events before and during it.
#[derive(Clone, Debug)]
struct Turn {
    who: (usize, usize),
    /// Number of last tokens that are replaced.
    replaces: u32,
    fresh: u32,
    seed: u32,
    answer: usize,
    /// Capacity and type between the turns, and capacity beyond the need of the turn.
    idle: (u32, KvType),
    spare: u32,
    chunk: u32,
    resident: BTreeSet<u32>,
    /// Whether conversations are saved before it, and its own one is read back.
    saves: bool,
    /// Poll of the pass at which the capacity changes, or the answer is cancelled.
    look: u32,
    stops: bool,
    /// What happens to the next transfers, and whether those that hang go on before this turn.
    disk: (Vec<Transfer>, bool),
}

#[derive(Clone, Copy, Debug)]
enum Transfer {
    Succeeds,
    Fails,
    Hangs,
}

/// A disk whose transfers succeed unless planned otherwise.
#[derive(Default)]
struct FaultyDisk {
    planned: Mutex<VecDeque<Transfer>>,
    hangs: AtomicBool,
}

impl FaultyDisk {
    fn plan(&self, (transfers, goes_on): &(Vec<Transfer>, bool)) {
        self.planned.lock().unwrap().extend(transfers);
        self.hangs.store(!goes_on, Ordering::Release);
    }

    fn carry_out(&self) -> io::Result<()> {
        let planned = self.planned.lock().unwrap().pop_front();
        match planned.unwrap_or(Transfer::Succeeds) {
            Transfer::Succeeds => {}
            Transfer::Fails => return Err(io::Error::other("as planned")),
            Transfer::Hangs => {
                while self.hangs.load(Ordering::Acquire) {
                    std::thread::sleep(STEP);
                }
            }
        }
        Ok(())
    }
}

fn turn() -> impl Strategy<Value = Turn> {
    let kind = prop_oneof![3 => Just(KvType::F16), 1 => Just(KvType::Q8), 1 => Just(KvType::Q4)];
    (
        (
            (0usize..3, 0usize..3),
            prop_oneof![2 => Just(0u32), 1 => 0u32..150],
        ),
        (1u32..90, any::<u8>(), 0usize..4),
        (
            (0u32..900, kind),
            prop_oneof![1 => 0u32..100, 2 => 300u32..900],
            1u32..80,
        ),
        (
            (prop::collection::btree_set(0u32..3, 0..4), any::<bool>()),
            0u32..12,
            prop::bool::weighted(0.15),
        ),
        (
            prop::collection::vec(
                prop_oneof![
                    8 => Just(Transfer::Succeeds),
                    1 => Just(Transfer::Fails),
                    1 => Just(Transfer::Hangs),
                ],
                0..30,
            ),
            any::<bool>(),
        ),
    )
        .prop_map(
            |(
                (who, replaces),
                (fresh, seed, answer),
                (idle, spare, chunk),
                ((resident, saves), look, stops),
                disk,
            )| Turn {
                who,
                replaces,
                fresh,
                seed: u32::from(seed % 5),
                answer,
                idle,
                spare,
                chunk,
                resident,
                saves,
                look,
                stops,
                disk,
            },
        )
}

fn greedy(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    u32::try_from(best.unwrap().0).unwrap()
}

/// Takes turns, and continues all conversations after a restart; returns the number of reused tokens.
fn take_turns(path: &Path, turns: &[Turn], is_faulty: bool) -> u64 {
    let mut talk = Talk::new(path, 512);
    let folder = memory_folder();
    talk.open(folder.path(), true);
    let disk = Arc::new(FaultyDisk::default());
    if is_faulty {
        let theirs = Arc::clone(&disk);
        let limit = DiskTimeout::new(Duration::from_millis(1));
        talk.hinder(limit, Arc::new(move || theirs.carry_out()));
    }
    let mut alone = Talk::new(path, 4096).model;
    let system = text(0, 100);
    let mut conversations = vec![vec![system; 3]; 3];
    // All sequences computed for each client.
    let mut computed: Vec<Vec<Vec<u32>>> = vec![Vec::new(); 3];
    let mut reused = 0;
    for turn in turns {
        let (who, which) = turn.who;
        let prompt = &mut conversations[who][which];
        prompt.truncate(prompt.len().saturating_sub(turn.replaces as usize).max(50));
        prompt.extend(text(turn.seed, turn.fresh));
        disk.plan(&turn.disk);
        if turn.saves {
            let saved = talk.try_to_save();
            assert!(is_faulty || saved.is_some());
        }
        let (kv, kind) = turn.idle;
        let plan = |kv, kind| EnginePlan {
            resident: turn.resident.clone(),
            ..plan_of(kv, turn.chunk, kind)
        };
        talk.model.apply(&plan(kv, kind)).unwrap();
        let needed = u32::try_from(prompt.len() + turn.answer).unwrap();
        talk.model
            .apply(&plan(needed + turn.spare, KvType::F16))
            .unwrap();
        let client: Arc<str> = Arc::from(["", "a", "b"][who]);
        let asked = Asked {
            client: Some(&client).filter(|client| !client.is_empty()),
            prompt,
            request: 0,
        };
        if turn.saves {
            talk.reload(asked);
        }
        let Selected { kept, fork } = talk.model.select(&talk.held, asked);
        talk.held = prompt[..kept as usize].to_vec();
        assert_eq!(kept, talk.model.position());
        let own = computed[who]
            .iter()
            .map(|other| common_prefix(other, prompt));
        assert!(kept <= own.max().unwrap_or(0), "of another client");
        reused += u64::from(kept);
        if let Some(fork) = fork {
            talk.model.fork_at(fork);
        }
        let end = needed.saturating_sub(20);
        talk.model.mark_at(end, end);
        let flow = if turn.stops {
            Flow::Stop
        } else {
            Flow::Apply(plan(needed, KvType::F16))
        };
        let mut looks = Once {
            left: turn.look,
            flow: Some(flow),
        };
        let read = talk.model.forward(&prompt[kept as usize..], &mut looks);
        let mut logits = match read {
            Ok(logits) => logits.to_vec(),
            Err(ForwardError::Cancelled { .. }) => {
                let kept = talk.model.recover() as usize;
                talk.held = prompt[..kept].to_vec();
                computed[who].push(talk.held.clone());
                talk.check();
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        talk.held.clone_from(prompt);
        alone.reset();
        let expected = alone.forward(prompt, &mut || Flow::Continue).unwrap();
        assert!(logits == expected[..], "{kept} tokens were there: {turn:?}");
        for _ in 0..turn.answer {
            let next = greedy(&logits);
            prompt.push(next);
            talk.held.push(next);
            logits = talk
                .model
                .forward(&[next], &mut || Flow::Continue)
                .unwrap()
                .to_vec();
            let expected = alone.forward(&[next], &mut || Flow::Continue).unwrap();
            assert!(logits == expected[..], "{turn:?}");
        }
        computed[who].push(talk.held.clone());
        talk.check();
    }
    disk.plan(&(Vec::new(), true));
    talk.finish();
    drop(talk);
    let mut later = Talk::new(path, 4096);
    later.open(folder.path(), true);
    for (who, conversations) in conversations.iter().enumerate() {
        let client: Arc<str> = Arc::from(["", "a", "b"][who]);
        for conversation in conversations {
            let prompt = &[&conversation[..], &[1]].concat();
            let asked = Asked {
                client: Some(&client).filter(|client| !client.is_empty()),
                prompt,
                request: 0,
            };
            later.reload(asked);
            let kept = later.model.select(&later.held, asked).kept;
            let read = later
                .model
                .forward(&prompt[kept as usize..], &mut || Flow::Continue);
            let logits = read.unwrap().to_vec();
            alone.reset();
            let expected = alone.forward(prompt, &mut || Flow::Continue).unwrap();
            assert!(logits == expected[..], "{kept} tokens after a restart");
            later.held.clone_from(prompt);
        }
    }
    reused
}

/// A folder in memory where there is one: its transfers take no time.
fn memory_folder() -> tempfile::TempDir {
    let in_memory = tempfile::tempdir_in("/dev/shm");
    in_memory.or_else(|_| tempfile::tempdir()).unwrap()
}

#[test]
fn no_conversation_shows_in_the_answer_of_another_whatever_comes_between() {
    let cases = env::var("COTENANT_TEST_SCHEDULES").map_or(12, |text| text.parse().unwrap());
    for (architecture, dtype) in [
        (Architecture::Qwen3, GgmlDType::F32),
        (Architecture::Llama, GgmlDType::Q8_0),
        (Architecture::Qwen35, GgmlDType::Q8_0),
        (Architecture::Gemma2, GgmlDType::Q8_0),
        (Architecture::Gemma3, GgmlDType::Q8_0),
        (Architecture::Gemma4, GgmlDType::Q8_0),
        (Architecture::StableLm, GgmlDType::Q8_0),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        tiny(&path, architecture, dtype);
        let mut runner = TestRunner::new(ProptestConfig {
            cases,
            failure_persistence: None,
            ..ProptestConfig::default()
        });
        let reused = std::cell::Cell::new(0);
        runner
            .run(&prop::collection::vec(turn(), 4..14), |turns| {
                for is_faulty in [false, true] {
                    reused.set(reused.get() + take_turns(&path, &turns, is_faulty));
                }
                Ok(())
            })
            .unwrap_or_else(|failed| panic!("{architecture:?}: {failed}"));
        assert!(reused.get() > 0, "{architecture:?}");
    }
}

/// Returns prompts of several clients with a common prefix.
fn prompts() -> Vec<(Option<Arc<str>>, Vec<u32>)> {
    (0..4)
        .map(|number: u32| {
            let client = (number > 0).then(|| Arc::from(format!("client {number}")));
            (client, [text(0, 150), text(number + 1, 60)].concat())
        })
        .collect()
}

/// Returns a model that has answered these prompts.
fn talked(path: &Path) -> Talk {
    let mut talk = Talk::new(path, 4096);
    for (client, prompt) in prompts() {
        let asked = Asked {
            client: client.as_ref(),
            prompt: &prompt,
            request: 0,
        };
        let kept = talk.model.select(&talk.held, asked).kept as usize;
        talk.model.mark_at(192, 192);
        talk.model
            .forward(&prompt[kept..], &mut || Flow::Continue)
            .unwrap();
        talk.held = prompt;
    }
    talk
}

/// Reads the next prompts of [`prompts`]; returns the number of reused tokens of each, after comparing its results with
/// those of a model that has read it from the start.
fn go_on(talk: &mut Talk, path: &Path) -> Vec<u32> {
    let mut alone = Talk::new(path, 4096);
    let mut reused = Vec::new();
    for (client, prompt) in prompts() {
        let next = [&prompt[..], &text(90, 30)].concat();
        let asked = Asked {
            client: client.as_ref(),
            prompt: &next,
            request: 0,
        };
        talk.reload(asked);
        let kept = talk.model.select(&talk.held, asked).kept;
        let logits = talk
            .model
            .forward(&next[kept as usize..], &mut || Flow::Continue)
            .unwrap()
            .to_vec();
        alone.model.reset();
        let expected = alone.model.forward(&next, &mut || Flow::Continue).unwrap();
        assert!(logits == expected[..], "{kept} tokens were reused");
        talk.held = next;
        talk.check();
        reused.push(kept);
    }
    reused
}

const ALL_KINDS: [Architecture; 5] = [
    Architecture::Qwen3,
    Architecture::Qwen35,
    Architecture::Gemma2,
    Architecture::Gemma3,
    Architecture::Gemma4,
];

#[test]
fn conversations_are_read_back_after_a_restart_with_the_same_bits() {
    for architecture in ALL_KINDS {
        for ahead in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("model.gguf");
            let saved = folder.path().join("saved");
            tiny(&path, architecture, GgmlDType::F32);
            let mut talk = talked(&path);
            talk.open(&saved, ahead);
            assert_eq!(talk.save(), prompts().len(), "{architecture:?}");
            assert_eq!(talk.save(), 0, "all of them are on disk");
            for file in fs::read_dir(&saved).unwrap() {
                let mode = file.unwrap().metadata().unwrap().permissions().mode();
                assert_eq!(mode & 0o777, 0o600);
            }
            let view = talk.model.saved_view(&talk.held);
            assert_eq!(view.conversations.len(), prompts().len());
            let kept = talk.model.kept_conversations();
            assert!(kept.iter().all(|one| one.saved.is_some()), "{kept:?}");
            drop(talk);
            let mut later = Talk::new(&path, 4096);
            later.open(&saved, ahead);
            let of = |count: u64| if ahead { count } else { 0 };
            let counts = later.model.saved_view(&[]).counts;
            assert_eq!(counts.reloaded, of(4), "{architecture:?}");
            let reused = go_on(&mut later, &path);
            assert!(reused.iter().all(|kept| *kept >= 192), "{reused:?}");
            let counts = later.model.saved_view(&[]).counts;
            assert_eq!((counts.reloaded, counts.failed), (4, 0), "{architecture:?}");
            // Longer versions replace the earlier ones, and share their blocks.
            let before = later.model.saved_view(&[]);
            assert_eq!(later.save(), prompts().len());
            let after = later.model.saved_view(&[]);
            assert_eq!(after.conversations.len(), prompts().len());
            let newest = before.conversations.iter().map(|one| one.number).max();
            let numbers = after.conversations.iter().map(|one| Some(one.number));
            assert!(numbers.min() > Some(newest), "{after:?}");
        }
    }
}

#[test]
fn answers_to_one_prompt_are_saved_once_each() {
    for architecture in ALL_KINDS {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        tiny(&path, architecture, GgmlDType::F32);
        let mut talk = Talk::new(&path, 4096);
        talk.open(&folder.path().join("saved"), true);
        // They diverge behind the end of both prompts, so that either could be the next version of the other.
        let lanes = [1, 2].map(|own| {
            talk.read(None, &[text(0, 165), text(own, 5)].concat());
            let lane = talk.model.set_aside(&talk.held).unwrap();
            talk.held.clear();
            lane
        });
        for lane in lanes {
            talk.model.leave(lane);
        }
        let mut steps =
            std::iter::from_fn(|| Some(talk.model.save_conversation(&[], DUE, &mut || true)));
        let steps: Vec<SaveStep> = steps
            .by_ref()
            .filter(|step| *step != SaveStep::Busy)
            .take(3)
            .collect();
        let expected = [SaveStep::Saved, SaveStep::Saved, SaveStep::Waits(None)];
        assert_eq!(steps, expected, "{architecture:?}");
        assert_eq!(talk.model.saved_view(&[]).conversations.len(), 2);
    }
}

#[test]
fn a_shed_ends_saved_conversations_and_their_next_prompts_read_them_back() {
    for architecture in ALL_KINDS {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        tiny(&path, architecture, GgmlDType::F32);
        let mut talk = talked(&path);
        talk.open(&folder.path().join("saved"), true);
        talk.save();
        let kept = talk.model.kept_conversations();
        assert!(
            kept.iter().all(|one| one.lost < Tokens::new(10)),
            "{kept:?}"
        );
        talk.model.keep(0);
        talk.held.clear();
        let small = plan_of(64, 64, KvType::F16);
        talk.model.apply(&small).unwrap();
        assert_eq!(talk.model.kept_conversations(), []);
        talk.model.apply(&plan_of(4096, 64, KvType::F16)).unwrap();
        // Another client has none of them.
        let other_client: Arc<str> = Arc::from("another");
        let (_, prompt) = &prompts()[1];
        let asked = Asked {
            client: Some(&other_client),
            prompt,
            request: 0,
        };
        assert_eq!(
            talk.model.begin_reload(&talk.held, asked, DUE.token),
            Some(false)
        );
        let reused = go_on(&mut talk, &path);
        assert!(
            reused.iter().all(|kept| *kept >= 192),
            "{architecture:?}: {reused:?}"
        );
        // Computing that is faster than reading is preferred.
        talk.save();
        talk.model.apply(&small).unwrap();
        talk.model.apply(&plan_of(4096, 64, KvType::F16)).unwrap();
        let (client, prompt) = &prompts()[2];
        let asked = Asked {
            client: client.as_ref(),
            prompt,
            request: 0,
        };
        let fast = Duration::from_nanos(1);
        assert_eq!(
            talk.model.begin_reload(&talk.held, asked, fast),
            Some(false)
        );
    }
}

#[test]
fn a_reload_gives_way_to_a_shed_and_keeps_what_it_has_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    tiny(&path, Architecture::Qwen3, GgmlDType::F32);
    let mut talk = Talk::new(&path, 4096);
    talk.open(&folder.path().join("saved"), true);
    let prompt = text(1, 1500);
    talk.read(None, &prompt);
    talk.save();
    talk.model.keep(0);
    talk.held.clear();
    let next = [&prompt[..], &[5]].concat();
    let asked = Asked {
        client: None,
        prompt: &next,
        request: 0,
    };
    assert_eq!(talk.model.begin_reload(&[], asked, DUE.token), Some(true));
    for _ in 0..4 {
        assert!(talk.model.reload(Duration::from_secs(1)));
    }
    let report = talk.model.apply(&plan_of(640, 64, KvType::F16)).unwrap();
    assert_eq!(report.plan.kv_capacity, Tokens::new(640));
    assert!(!talk.model.reload(STEP), "it has ended");
    talk.model.apply(&plan_of(4096, 64, KvType::F16)).unwrap();
    talk.reload(asked);
    assert_eq!(talk.read(None, &next), 1500);
    // Ended by a request, without a shed.
    talk.model.keep(0);
    talk.held.clear();
    assert_eq!(talk.model.begin_reload(&[], asked, DUE.token), Some(true));
    for _ in 0..4 {
        assert!(talk.model.reload(Duration::from_secs(1)));
    }
    talk.model.end_reload();
    let kept = talk.read(None, &next);
    assert!(
        (64..1500).contains(&kept) && kept.is_multiple_of(64),
        "{kept}"
    );
}

#[test]
fn damaged_and_foreign_saved_conversations_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let saved = folder.path().join("saved");
    tiny(&path, Architecture::Qwen3, GgmlDType::F32);
    let save = || {
        let mut talk = talked(&path);
        fs::remove_dir_all(&saved).ok();
        talk.open(&saved, true);
        talk.save()
    };
    // Returns how many are usable, and how many of them have failed.
    let open = |kind: KvType| {
        let mut later = Talk::new(&path, 4096);
        later.model.apply(&plan_of(4096, 64, kind)).unwrap();
        later.open(&saved, false);
        let found = later.model.saved_view(&[]).conversations.len();
        if kind == KvType::F16 {
            go_on(&mut later, &path);
        }
        (found, later.model.saved_view(&[]).counts)
    };
    assert_eq!(save(), 4);
    let (found, counts) = open(KvType::F16);
    assert_eq!((found, counts.reloaded, counts.failed), (4, 4, 0));
    // Blocks of another type are left until that type is in force again.
    let (found, counts) = open(KvType::Q8);
    assert_eq!((found, counts.reloaded, counts.failed), (4, 0, 0));
    let header = saved.join("2");
    let text = fs::read(&header).unwrap();
    for at in [3, 30, text.len() / 2, text.len() - 1] {
        let mut other = text.clone();
        other[at] ^= 1;
        fs::write(&header, other).unwrap();
        assert_eq!(open(KvType::F16).0, 3, "{at}");
        assert!(!header.exists());
    }
    for length in [0, 10, text.len() - 1] {
        fs::write(&header, &text[..length]).unwrap();
        assert_eq!(open(KvType::F16).0, 3, "{length}");
    }
    // Blocks of a removed conversation are released, so that its header is of no use later.
    fs::write(&header, &text).unwrap();
    let (found, counts) = open(KvType::F16);
    assert_eq!((found, counts.reloaded, counts.failed), (4, 3, 1));
    // A header that cannot be read: nothing is removed, since the others may be whole.
    save();
    let unreadable = saved.join("9");
    symlink(&saved, &unreadable).unwrap();
    assert_eq!(open(KvType::F16).0, 0);
    fs::remove_file(&unreadable).unwrap();
    assert_eq!(open(KvType::F16).0, 4);
    // A flipped bit of a block, and missing blocks.
    let blocks = saved.join("blocks");
    let bytes = fs::read(&blocks).unwrap();
    let mut other = bytes.clone();
    other[5] ^= 1;
    fs::write(&blocks, &other).unwrap();
    let (found, counts) = open(KvType::F16);
    assert_eq!((found, counts.reloaded, counts.failed), (4, 3, 1));
    assert_eq!(open(KvType::F16).0, 3);
    save();
    fs::write(&blocks, &bytes[..100]).unwrap();
    let (found, counts) = open(KvType::F16);
    assert_eq!((found, counts.reloaded, counts.failed), (4, 0, 4));
    // The model file was rewritten, also by one of the same length and time.
    save();
    let bytes = fs::read(&path).unwrap();
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    let rewrite = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(time).unwrap();
    };
    rewrite(&bytes);
    assert_eq!(open(KvType::F16).0, 4);
    save();
    let mut other = bytes.clone();
    let name = b"general.name";
    let at = other.windows(name.len()).position(|window| window == name);
    other[at.unwrap() + name.len() + 12] ^= 1;
    rewrite(&other);
    assert_eq!(open(KvType::F16).0, 0);
    rewrite(&bytes);
    save();
    tiny(&path, Architecture::Qwen3, GgmlDType::F16);
    assert_eq!(open(KvType::F16).0, 0);
}

#[test]
fn what_an_interrupted_run_has_left_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let saved = folder.path().join("saved");
    tiny(&path, Architecture::Qwen3, GgmlDType::F32);
    // The file of an earlier version.
    fs::write(&saved, "cotenant-conversations 2").unwrap();
    let mut talk = talked(&path);
    talk.open(&saved, true);
    // An interrupted conversation is saved later.
    let mut left = 3;
    let interrupted = talk.model.save_conversation(&talk.held, DUE, &mut || {
        left -= 1;
        left > 0
    });
    assert_eq!(interrupted, SaveStep::Busy);
    assert_eq!(talk.model.saved_view(&[]).conversations, []);
    assert_eq!(talk.save(), 4);
    let bytes = talk.model.saved_view(&[]).bytes;
    assert_eq!(
        fs::metadata(saved.join("blocks")).unwrap().len(),
        bytes.get()
    );
    drop(talk);
    // Killed after the blocks of another one, and within its header.
    let blocks = fs::File::options().append(true).open(saved.join("blocks"));
    io::Write::write_all(&mut blocks.unwrap(), &[7; 300_000]).unwrap();
    fs::write(saved.join("9.new"), "cotenant-conv").unwrap();
    fs::create_dir(saved.join("lost+found")).unwrap();
    let mut later = Talk::new(&path, 4096);
    later.open(&saved, true);
    later.save();
    assert_eq!(go_on(&mut later, &path), [210, 210, 210, 210]);
    assert!(!saved.join("9.new").exists());
    assert_eq!(
        fs::metadata(saved.join("blocks")).unwrap().len(),
        bytes.get()
    );
}

#[test]
fn no_saved_conversation_is_removed_for_one_that_does_not_fit_either() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    tiny(&path, Architecture::Qwen3, GgmlDType::F32);
    let mut talk = Talk::new(&path, 4096);
    talk.open(&folder.path().join("saved"), true);
    // On disk only, in two slots.
    talk.read(Some("hall"), &text(1, 100));
    assert_eq!(talk.save(), 1);
    talk.model.keep(0);
    talk.held.clear();
    // Four slots, and as many for the next one, of which three could be had.
    talk.model.saved.as_mut().unwrap().limit_slots(7);
    talk.read(Some("study"), &text(2, 210));
    assert_eq!(talk.save(), 1);
    talk.read(Some("kitchen"), &text(3, 210));
    assert_eq!(talk.save(), 0);
    let saved = |talk: &Talk| {
        let view = talk.model.saved_view(&[]);
        let tokens = view.conversations.iter().map(|one| one.tokens.get());
        tokens.collect::<Vec<u32>>()
    };
    assert_eq!(saved(&talk), [100, 210]);
    talk.model.saved.as_mut().unwrap().limit_slots(8);
    assert_eq!(talk.save(), 1);
    assert_eq!(saved(&talk), [210, 210]);
}

#[test]
fn a_full_disk_costs_no_conversation_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let saved = folder.path().join("saved");
    tiny(&path, Architecture::Qwen3, GgmlDType::F32);
    fs::create_dir(&saved).unwrap();
    symlink("/dev/full", saved.join("blocks")).unwrap();
    let mut talk = talked(&path);
    talk.open(&saved, true);
    let step = loop {
        match talk.model.save_conversation(&talk.held, DUE, &mut || true) {
            SaveStep::Busy => std::thread::yield_now(),
            step => break step,
        }
    };
    assert_eq!(step, SaveStep::Failed);
    let view = talk.model.saved_view(&[]);
    assert_eq!((view.conversations.len(), view.counts.failed), (0, 1));
    assert_eq!(go_on(&mut talk, &path), [210, 210, 210, 210]);
    // A folder that cannot be created.
    let mut talk = talked(&path);
    talk.open(&folder.path().join("none/saved"), true);
    assert_eq!(talk.save(), 0);
    assert_eq!(talk.model.saved_view(&[]).counts.failed, 1);
}
