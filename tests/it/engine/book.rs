//! The engine's ledger compared with kernel figures; releases and the page cache.

use std::{
    fs::OpenOptions,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::Path,
};

use crate::weights::Weights as _;
use cotenant::{
    engine::{
        ForwardError, Model,
        gguf::GgmlDType,
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
    },
    policy::{kv_type::KvType, residency::ModelShape},
    units::{Bytes, Tokens},
};

use super::{PROMPT, go, greedy, open, open_long, options, plan, reference, tiny, write};

#[test]
fn a_shed_is_confirmed_by_the_kernel_and_the_breakdown_is_what_it_has() {
    let model = Synthetic {
        layers: 8,
        width: 512,
        feed_forward: 2048,
        ..Synthetic::tiny(Architecture::Qwen35, TypeMix::All(GgmlDType::F32), 3)
    };
    let file = write(&model);
    for threads in [1, 3] {
        shed_and_grow(&file.path, threads);
    }
}

fn shed_and_grow(path: &Path, threads: usize) {
    let (shape, _) = Model::inspect(path, threads).unwrap();
    let all = 0..u32::try_from(shape.layers.len()).unwrap();
    let mut model = open_long(path, &plan(all.clone(), 1024, 16), threads);
    model.forward(&PROMPT, &mut go()).unwrap();
    check_book(&model, &shape);

    for round in 0..3 {
        let report = model.apply(&plan([0, 1], 64, 16)).unwrap();
        let given: Bytes = shape.layers[2..]
            .iter()
            .map(|layer| layer.resident_bytes)
            .sum();
        let kv = shape.kv.capacity_bytes(Tokens::new(1024), KvType::F16)
            - shape.kv.capacity_bytes(Tokens::new(64), KvType::F16);
        assert_eq!(report.asked, given + kv, "round {round}");
        assert_eq!(
            report.freed, given,
            "round {round}: all that had been in memory"
        );
        assert_eq!(
            report.untouched, kv,
            "round {round}: eleven tokens need one block"
        );
        assert_eq!(report.grown, shape.ring_bytes, "round {round}");
        check_book(&model, &shape);

        let report = model.apply(&plan(all.clone(), 1024, 16)).unwrap();
        assert_eq!(report.grown, given + kv, "round {round}");
        assert_eq!(
            report.freed, shape.ring_bytes,
            "round {round}: the ring is not needed any more"
        );
        check_book(&model, &shape);
    }
}

/// Checks that the ledger, our own count and the kernel's figure agree.
fn check_book(model: &Model, shape: &ModelShape) {
    let held = model.breakdown();
    let planned = shape.plan_bytes(model.plan());
    // Documented rounding: activation buffers are whole pages, and the header is counted exactly.
    let rounding = Bytes::from_kib(15 * 4);
    assert!(
        held.total <= planned && planned <= held.total + rounding,
        "{planned} planned, {held:?}"
    );
    assert_eq!(held.kv_untouched, model.untouched());
    let resident = model.kernel_resident();
    // The pages of a partly filled block are not all touched.
    let last = shape.kv.block_bytes(KvType::F16).round_up(shape.kv.granule);
    let used = held.used() - held.header;
    assert!(
        resident <= used && used <= resident + last,
        "{used} used, {resident} by the kernel"
    );
}

#[test]
fn a_model_computes_the_same_while_memory_is_found_for_its_ring_and_is_on_the_book_when_it_has_settled()
 {
    let file = tiny(Architecture::Qwen35, GgmlDType::Q8_0);
    let nothing = plan([], 64, 4);
    let expected = open(&file.path, &plan(0..5, 64, 4), 2)
        .forward(&PROMPT, &mut go())
        .unwrap()
        .to_vec();
    for settles_first in [false, true] {
        let mut model = Model::begin(&file.path, &nothing, &options(2)).unwrap();
        if settles_first {
            model.settle();
            check_book(&model, &model.shape().clone());
        }
        assert_eq!(model.forward(&PROMPT, &mut go()).unwrap()[..], expected[..]);
        model.settle();
        check_book(&model, &model.shape().clone());
        // Units that are released independently are released completely.
        let mut model = Model::begin(&file.path, &nothing, &options(2)).unwrap();
        let all = plan(0..5, 64, 4);
        model.apply(&all).unwrap();
        // The state and the workspace are unchanged.
        model.settle();
        check_book(&model, &model.shape().clone());
        assert_eq!(model.forward(&PROMPT, &mut go()).unwrap()[..], expected[..]);
    }
}

#[test]
fn kv_capacity_is_leased_at_once_touched_by_tokens_and_given_back_in_whole_pages() {
    // 2 heads of 256 in 4 layers: blocks of 512 KiB, in huge pages.
    let model = Synthetic {
        heads: 4,
        kv_heads: 2,
        head_dim: 256,
        ..Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 5)
    };
    let file = write(&model);
    let mut model = open_long(&file.path, &plan(0..4, 64, 256), 2);
    let kv = model.shape().kv;
    assert_eq!(
        (kv.block_bytes(KvType::F16), kv.granule),
        (Bytes::from_kib(512), Bytes::from_mib(2))
    );
    let before = model.kernel_resident();
    let report = model.apply(&plan(0..4, 4096, 256)).unwrap();
    assert_eq!(
        report.grown,
        Bytes::from_mib(30),
        "64 blocks, of which one page was there"
    );
    assert_eq!(model.kernel_resident(), before, "nothing was touched");
    assert_eq!(report.held_untouched, Bytes::from_mib(32));

    let mut tokens = vec![3; 300];
    let held = model.breakdown().total;
    model.forward(&tokens, &mut go()).unwrap();
    assert_eq!(
        model.breakdown().total,
        held,
        "the lease does not change as tokens come"
    );
    let used = kv.capacity_bytes(Tokens::new(300), KvType::F16);
    assert_eq!(used, Bytes::from_mib(4), "five blocks in two huge pages");
    assert_eq!(model.untouched(), Bytes::from_mib(32) - used);
    let resident = model.kernel_resident() - before;
    assert!(
        resident <= used && resident + Bytes::from_mib(2) > used,
        "{resident}"
    );

    let report = model.apply(&plan(0..4, 0, 256)).unwrap();
    assert_eq!(
        (report.asked, report.untouched),
        (Bytes::from_mib(28), Bytes::from_mib(28))
    );
    model.reset();
    let report = model.apply(&plan(0..4, 64, 256)).unwrap();
    assert_eq!(
        (report.asked, report.untouched),
        (Bytes::from_mib(2), Bytes::ZERO)
    );
    assert!(report.freed <= report.asked && report.freed > Bytes::ZERO);

    // Regrown memory is empty, and counts from the start.
    tokens.truncate(64);
    model.apply(&plan(0..4, 4096, 256)).unwrap();
    model.forward(&tokens, &mut go()).unwrap();
    assert_eq!(model.untouched(), Bytes::from_mib(30));
}

#[test]
fn capacity_is_not_shrunk_below_what_the_sequence_uses() {
    let file = tiny(Architecture::Qwen3, GgmlDType::Q8_0);
    let expected = reference(&file.path, 1);
    let mut model = open(&file.path, &plan(0..5, 256, 8), 1);
    let next = greedy(&model.forward(&PROMPT, &mut go()).unwrap());
    let report = model.apply(&plan(0..5, 0, 8)).unwrap();
    assert_eq!(
        report.plan.kv_capacity,
        Tokens::new(64),
        "one block holds the eleven tokens"
    );
    assert_eq!(
        (report.freed, report.untouched),
        (Bytes::ZERO, report.asked)
    );
    assert!(model.forward(&[next], &mut go()).unwrap()[..] == expected[1]);

    let error = model.forward(&[1; 60], &mut go()).unwrap_err();
    assert!(
        matches!(error, ForwardError::KvFull { capacity, needed: 72 } if capacity == Tokens::new(64)),
        "{error}"
    );
    // Nothing was computed, so the sequence is unchanged.
    assert_eq!(model.position(), 12);
    model.forward(&[1; 52], &mut go()).unwrap();
}

#[test]
fn the_workspace_does_not_depend_on_the_prompt() {
    let file = tiny(Architecture::Qwen35, GgmlDType::Q8_0);
    let mut model = open(&file.path, &plan(0..5, 2048, 16), 2);
    let before = model.breakdown();
    model.forward(&vec![9; 200], &mut go()).unwrap();
    let after = model.breakdown();
    assert_eq!(
        (before.workspace, before.total),
        (after.workspace, after.total)
    );
}

fn cached_pages(path: &Path) -> usize {
    let file = std::fs::File::open(path).unwrap();
    let bytes = usize::try_from(file.metadata().unwrap().len()).unwrap();
    let mut flags = vec![0u8; bytes.div_ceil(4096)];
    // SAFETY: a new mapping of an open file, whose pages are not touched; `mincore` writes one byte per page of it; it
    // is unmapped with its own length.
    unsafe {
        let map = libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        );
        assert_ne!(map, libc::MAP_FAILED);
        assert_eq!(libc::mincore(map, bytes, flags.as_mut_ptr()), 0);
        assert_eq!(libc::munmap(map, bytes), 0);
    }
    flags.iter().filter(|flag| *flag & 1 == 1).count()
}

#[test]
fn nothing_of_the_models_file_stays_in_the_page_cache() {
    let file = tiny(Architecture::Qwen35, GgmlDType::F32);
    std::fs::File::open(&file.path).unwrap().sync_all().unwrap();
    assert!(
        cached_pages(&file.path) > 0,
        "what was just written is there: the check can fail"
    );
    let direct = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(&file.path);
    if direct.is_err() {
        eprintln!(
            "left out: no direct reads on the file system of {}",
            file.path.display()
        );
        return;
    }
    let mut model = open(&file.path, &plan([1], 64, 4), 2);
    assert_eq!(cached_pages(&file.path), 0, "after it was loaded");
    for _ in 0..3 {
        model.forward(&PROMPT, &mut go()).unwrap();
        model.reset();
    }
    assert_eq!(cached_pages(&file.path), 0, "after it was streamed");
    model.apply(&plan(0..5, 64, 4)).unwrap();
    model.forward(&PROMPT, &mut go()).unwrap();
    model.apply(&plan([], 64, 4)).unwrap();
    assert_eq!(cached_pages(&file.path), 0, "after it has grown and shed");
    drop(model);
    assert_eq!(cached_pages(&file.path), 0);
}
