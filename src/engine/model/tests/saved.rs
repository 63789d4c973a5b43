//! Tests of conversations on disk.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
};

use super::{
    parked::{DUE, STEP, Talk, plan_of, tiny},
    *,
};

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
        talk.model.mark_at(192);
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

const ALL_KINDS: [Architecture; 8] = [
    Architecture::Qwen3,
    Architecture::Qwen35,
    Architecture::Gemma2,
    Architecture::Gemma3,
    Architecture::Gemma4,
    Architecture::GptOss,
    Architecture::GraniteHybrid,
    Architecture::NemotronH,
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
    let rests = talk.model.breakdown().total;
    assert_eq!(talk.model.begin_reload(&[], asked, DUE.token), Some(true));
    for _ in 0..4 {
        assert!(talk.model.reload(Duration::from_secs(1)));
    }
    let beside = talk.model.breakdown().total.saturating_sub(rests);
    assert_eq!(beside, Bytes::from_mib(2), "buffers of the transfers");
    talk.check();
    let report = talk.model.apply(&plan_of(640, 64, KvType::F16)).unwrap();
    assert_eq!(report.plan.kv_capacity, Tokens::new(640));
    assert!(!talk.model.reload(STEP), "it has ended");
    talk.model.apply(&plan_of(4096, 64, KvType::F16)).unwrap();
    talk.finish();
    assert_eq!(talk.model.breakdown().total, rests);
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
