//! Tests of copies of recurrent state where prompts diverge.

use super::*;

/// Writes a model whose state takes as much memory as some hundred tokens.
fn hybrid(path: &Path) {
    Synthetic {
        width: 64,
        feed_forward: 64,
        heads: 2,
        kv_heads: 1,
        head_dim: 32,
        recurrent: (1, 2, 32),
        ..Synthetic::tiny(Architecture::Qwen35, TypeMix::All(GgmlDType::Q8_0), 7)
    }
    .write(path)
    .unwrap();
}

fn open(path: &Path, capacity: u32) -> Model {
    let plan = EnginePlan {
        kv_capacity: Tokens::new(capacity),
        prefill_chunk: Tokens::new(64),
        ..plan(0..5)
    };
    let opening = Opening::on(
        cpu(1),
        path,
        &ModelOptions::for_threads(1),
        Layout::of,
        &Disk::default(),
    )
    .unwrap();
    let mut model = opening.begin(&plan).unwrap();
    model.settle();
    model
}

/// Returns a prompt of one of two conversations, whose first 200 tokens are the same.
fn prompt(conversation: u32, length: u32) -> Vec<u32> {
    (0..length)
        .map(|index| {
            if index < 200 {
                index * 7 % 300
            } else {
                (index * 11 + conversation) % 300
            }
        })
        .collect()
}

/// Reads a prompt with `common` tokens in common with the last one; returns the number of reused tokens.
fn read(model: &mut Model, common: u32, (conversation, length): (u32, u32), parts: bool) -> u32 {
    let kept = model.keep(common);
    if parts {
        model.fork_at(common);
    }
    model.mark_at(length - 10);
    model
        .forward(&prompt(conversation, length)[kept as usize..], &mut || {
            Flow::Continue
        })
        .unwrap();
    let held = model.breakdown();
    assert!(held.kv_marks + model.untouched() <= held.kv, "{held:?}");
    assert!(model.kernel_resident() <= held.used(), "{held:?}");
    kept
}

#[test]
fn a_copy_where_conversations_part_outlives_those_at_their_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    hybrid(&path);
    let copy = open(&path, 64).aside_takes().get();
    // Capacity for this many copies beside 300 tokens.
    for copies in [1, 2, 4] {
        let mut model = open(&path, 300 + copies * copy + 128);
        // A long prompt leaves free capacity behind the short ones.
        assert_eq!(read(&mut model, 0, (1, 500), false), 0);
        assert_eq!(read(&mut model, 200, (2, 290), true), 0, "{copies}");
        assert_eq!(read(&mut model, 200, (1, 280), true), 200, "{copies}");
        assert_eq!(read(&mut model, 200, (2, 290), true), 200, "{copies}");
        // One conversation continues, diverging from itself shortly before its end: first from the fork if there is
        // capacity for one copy only, and then from its own last prompt.
        assert_eq!(
            read(&mut model, 285, (2, 295), false),
            if copies == 1 { 200 } else { 280 }
        );
        assert_eq!(read(&mut model, 290, (2, 298), false), 285, "{copies}");
        assert_eq!(read(&mut model, 293, (2, 299), false), 288, "{copies}");
        let before = read(&mut model, 200, (1, 280), true);
        assert_eq!(before, if copies == 1 { 0 } else { 200 });
        // The same bits as computed from the start.
        let next = model
            .forward(&[7], &mut || Flow::Continue)
            .unwrap()
            .to_vec();
        let mut fresh = open(&path, 704);
        fresh
            .forward(&prompt(1, 280), &mut || Flow::Continue)
            .unwrap();
        assert!(
            fresh.forward(&[7], &mut || Flow::Continue).unwrap()[..] == next[..],
            "{copies}"
        );
    }
}
