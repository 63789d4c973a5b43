//! Random histories of conversations that alternate, are parked, and are saved on a disk that may fail.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    parked::{STEP, Talk, plan_of, tiny},
    *,
};
use crate::disk::DiskTimeout;

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

/// A turn of one conversation that nothing disturbs: it continues from the end of the turn before.
fn quiet_turn(seed: u32) -> Turn {
    Turn {
        who: (0, 0),
        replaces: 0,
        fresh: 80,
        seed,
        answer: 2,
        idle: (800, KvType::F16),
        spare: 300,
        chunk: 40,
        resident: BTreeSet::new(),
        saves: false,
        look: 1000,
        stops: false,
        disk: (Vec::new(), true),
    }
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
        talk.model.mark_at(end);
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
        (Architecture::GraniteHybrid, GgmlDType::Q8_0),
        (Architecture::NemotronH, GgmlDType::F32),
        (Architecture::Gemma2, GgmlDType::Q8_0),
        (Architecture::Gemma3, GgmlDType::Q8_0),
        (Architecture::Gemma4, GgmlDType::Q8_0),
        (Architecture::GptOss, GgmlDType::MXFP4),
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
        let reused = take_turns(&path, &[1, 2, 3].map(quiet_turn), false);
        assert!(reused >= 200, "{architecture:?}: {reused}");
        runner
            .run(&prop::collection::vec(turn(), 4..14), |turns| {
                for is_faulty in [false, true] {
                    take_turns(&path, &turns, is_faulty);
                }
                Ok(())
            })
            .unwrap_or_else(|failed| panic!("{architecture:?}: {failed}"));
    }
}
