//! Models on a hanging disk.

use std::{
    ptr::NonNull,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use super::*;
use crate::{
    disk::DiskTimeout,
    error::ReadError,
    reader::{Extent, ReadProgress, Source},
};

/// A model's disk that responds on command.
pub(super) struct Disk {
    file: Arc<dyn Source>,
    hangs: AtomicBool,
    hanging: AtomicUsize,
}

impl Disk {
    /// Returns a hanging disk.
    pub(super) fn hanging(file: Arc<dyn Source>) -> Arc<Self> {
        Arc::new(Self {
            file,
            hangs: AtomicBool::new(true),
            hanging: AtomicUsize::new(0),
        })
    }

    /// Replaces the model's disk, with `limit` as its time limit.
    fn put_into(model: &mut Model, limit: DiskTimeout) -> Arc<Self> {
        let disk = Arc::new(Self {
            file: Arc::clone(model.weights.source()),
            hangs: AtomicBool::new(false),
            hanging: AtomicUsize::new(0),
        });
        let source: Arc<dyn Source> = Arc::<Self>::clone(&disk);
        model.weights.read_from(source, limit);
        disk
    }

    pub(super) fn hang(&self, hangs: bool) {
        self.hangs.store(hangs, Ordering::Release);
    }

    fn wait(&self) {
        self.hanging.fetch_add(1, Ordering::AcqRel);
        while self.hangs.load(Ordering::Acquire) {
            thread::sleep(Duration::from_millis(1));
        }
        self.hanging.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Source for Disk {
    unsafe fn read(
        &self,
        extent: &Extent,
        target: NonNull<u8>,
        progress: &ReadProgress,
    ) -> Result<(), ReadError> {
        self.wait();
        // SAFETY: as promised by the caller.
        unsafe { self.file.read(extent, target, progress) }
    }

    fn read_small(&self, extent: &Extent, target: &mut [u8]) -> Result<(), ReadError> {
        self.wait();
        self.file.read_small(extent, target)
    }
}

const LONG: DiskTimeout = DiskTimeout::new(Duration::from_secs(600));
const SHORT: DiskTimeout = DiskTimeout::new(Duration::from_millis(1));

/// Returns a model in whole layers, and its logits after some tokens. Llama's embeddings are no head, and always read.
fn model(
    architecture: Architecture,
    resident: impl IntoIterator<Item = u32>,
) -> (Model, Vec<f32>, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    Synthetic::tiny(architecture, TypeMix::All(GgmlDType::Q8_0), 7)
        .write(&path)
        .unwrap();
    let mut model = open_in_parts(&path, usize::MAX, &plan(resident), 1);
    let expected = model
        .forward(&TOKENS, &mut || Flow::Continue)
        .unwrap()
        .to_vec();
    model.reset();
    (model, expected, folder)
}

fn says(model: &mut Model, expected: &[f32]) {
    let logits = model.forward(&TOKENS, &mut || Flow::Continue).unwrap();
    assert!(logits[..] == *expected);
    model.reset();
}

#[test]
fn orders_are_taken_while_an_embedding_does_not_come() {
    let (mut model, expected, _folder) = model(Architecture::Llama, 0..5);
    let disk = Disk::put_into(&mut model, LONG);
    disk.hang(true);
    let mut orders = Plans {
        plans: vec![plan(0..3)],
        stops: true,
        ..Plans::default()
    };
    let error = model.forward(&TOKENS, &mut orders).unwrap_err();
    assert!(
        matches!(
            error,
            ForwardError::Cancelled {
                position: 0,
                layer: 0
            }
        ),
        "{error}"
    );
    let report = orders.applied.pop().unwrap().unwrap();
    assert!(
        report.plan == plan(0..3) && report.freed > Bytes::ZERO,
        "{report:?}"
    );
    disk.hang(false);
    assert_eq!(model.recover(), 0);
    says(&mut model, &expected);
}

#[test]
fn orders_are_taken_while_experts_of_an_ended_pass_do_not_come() {
    let (mut model, expected, _folder) = model(Architecture::Qwen3Moe, 0..9);
    let experts = model.layout.experts.as_ref().unwrap();
    let of_layer = |layer: usize| {
        let parts = experts.layers[layer].parts.clone();
        parts.map(|part| u32::try_from(part).unwrap())
    };
    let (first, last): (Vec<u32>, Vec<u32>) = (of_layer(0).collect(), of_layer(3).collect());
    let without_first = (0..9).filter(|part| !first.contains(part));
    let without_both = without_first.clone().filter(|part| !last.contains(part));
    model.apply(&plan(without_first)).unwrap();
    let disk = Disk::put_into(&mut model, LONG);
    disk.hang(true);
    let mut stop = || match disk.hanging.load(Ordering::Acquire) {
        0 => Flow::Continue,
        _ => Flow::Stop,
    };
    let ended = model.forward(&TOKENS, &mut stop).unwrap_err();
    assert!(matches!(ended, ForwardError::Cancelled { .. }), "{ended}");
    model.recover();
    let mut orders = Plans {
        plans: vec![plan(without_both)],
        // Between layers.
        left: 1,
        stops: true,
        ..Plans::default()
    };
    let ended = model.forward(&TOKENS, &mut orders).unwrap_err();
    assert!(matches!(ended, ForwardError::Cancelled { .. }), "{ended}");
    let report = orders.applied.pop().unwrap().unwrap();
    assert!(report.freed > Bytes::ZERO, "{report:?}");
    disk.hang(false);
    assert_eq!(model.recover(), 0);
    says(&mut model, &expected);
}

#[test]
fn an_embedding_that_does_not_come_ends_its_request_and_the_next_one_at_once() {
    let (mut model, expected, _folder) = model(Architecture::Llama, 0..5);
    let disk = Disk::put_into(&mut model, SHORT);
    disk.hang(true);
    let held = model.breakdown().total;
    for _ in 0..3 {
        let error = model.forward(&TOKENS, &mut || Flow::Continue).unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("cannot read `token_embd.weight`: the disk did not respond for"),
            "{text}"
        );
        model.reset();
        assert!(
            disk.hanging.load(Ordering::Acquire) <= 1,
            "others wait behind it"
        );
        assert_eq!(model.breakdown().total, held);
    }
    disk.hang(false);
    model.weights.read_from(disk, LONG);
    says(&mut model, &expected);
}

#[test]
fn growing_on_a_disk_that_hangs_fails_in_time_and_keeps_no_more_however_often_it_is_tried() {
    let (mut model, expected, _folder) = model(Architecture::Qwen3, [0, 2]);
    let disk = Disk::put_into(&mut model, SHORT);
    disk.hang(true);
    let layer = model
        .layout
        .parts
        .iter()
        .map(|part| part.arena)
        .max()
        .unwrap();
    let most = layer.saturating_mul(GROWERS as u64) + model.shape().ring_bytes.saturating_mul(2);
    for turn in 0..6 {
        let error = model.apply(&plan(0..5)).unwrap_err().to_string();
        assert!(
            error.starts_with("cannot read `") && error.contains("the disk did not respond for"),
            "{error}"
        );
        let held = model.breakdown();
        assert!(
            Bytes::ZERO < model.left() && model.left() <= most,
            "turn {turn}: {held:?}"
        );
        assert!(
            model.left() <= held.ring && held.ring <= held.total,
            "it is on the book: {held:?}"
        );
        assert!(disk.hanging.load(Ordering::Acquire) <= GROWERS + 4);
    }
    assert_eq!(
        model.apply(&plan([])).unwrap().plan,
        plan([]),
        "what is there can be given up"
    );
    let error = model.forward(&TOKENS, &mut || Flow::Continue).unwrap_err();
    assert!(
        error.to_string().contains("the disk did not respond for"),
        "{error}"
    );
    disk.hang(false);
    while model.left() > Bytes::ZERO {
        thread::yield_now();
    }
    model.weights.read_from(disk, LONG);
    model.reset();
    says(&mut model, &expected);
    model.apply(&plan(0..5)).unwrap();
    says(&mut model, &expected);
}

#[test]
fn growing_gives_way_to_other_orders_while_the_disk_hangs() {
    let (mut model, expected, _folder) = model(Architecture::Qwen3, [0, 2]);
    let disk = Disk::put_into(&mut model, LONG);
    disk.hang(true);
    let mut asked = 0;
    let mut wanted = || {
        asked += 1;
        asked > 2
    };
    let error = model.apply_until(&plan(0..5), &mut wanted).unwrap_err();
    assert!(matches!(error, ApplyError::Stalled(_)), "{error}");
    disk.hang(false);
    says(&mut model, &expected);
}

/// A disk that is fast in some ranges of the file, and delivers the rest slowly until it is opened or cancelled.
struct Slow {
    file: Arc<dyn Source>,
    fast: Vec<Extent>,
    open: AtomicBool,
}

impl Slow {
    /// Replaces the model's disk; `part` is read fast.
    fn put_into(model: &mut Model, part: usize, limit: DiskTimeout) -> Arc<Self> {
        let runs = model.layout.parts[part].runs.iter();
        let disk = Arc::new(Self {
            file: Arc::clone(model.weights.source()),
            fast: runs.map(|(extent, _)| extent.clone()).collect(),
            open: AtomicBool::new(false),
        });
        let source: Arc<dyn Source> = Arc::<Self>::clone(&disk);
        model.weights.read_from(source, limit);
        disk
    }
}

impl Source for Slow {
    unsafe fn read(
        &self,
        extent: &Extent,
        target: NonNull<u8>,
        progress: &ReadProgress,
    ) -> Result<(), ReadError> {
        let within =
            |run: &Extent| (run.offset..run.offset + run.bytes as u64).contains(&extent.offset);
        while !self.fast.iter().any(within) && !self.open.load(Ordering::Acquire) {
            if progress.is_given_up() {
                return Err(extent.error(Path::new(""), "it is no longer needed"));
            }
            thread::sleep(Duration::from_millis(1));
            progress.note();
        }
        // SAFETY: as promised by the caller.
        unsafe { self.file.read(extent, target, progress) }
    }

    fn read_small(&self, extent: &Extent, target: &mut [u8]) -> Result<(), ReadError> {
        self.file.read_small(extent, target)
    }
}

#[test]
fn growing_on_a_slow_disk_takes_as_long_as_it_takes() {
    let (mut model, expected, _folder) = model(Architecture::Qwen3, [0, 2]);
    let stall = Duration::from_secs(1);
    let disk = Slow::put_into(&mut model, 1, DiskTimeout::new(stall));
    let began = Instant::now();
    let mut wanted = || {
        // No read has ended for longer than the time limit.
        let open = began.elapsed() > stall + stall / 4;
        disk.open.store(open, Ordering::Release);
        false
    };
    let report = model.apply_until(&plan(0..5), &mut wanted).unwrap();
    assert!(began.elapsed() > stall && report.plan == plan(0..5));
    says(&mut model, &expected);
}

#[test]
fn growing_on_a_slow_disk_ends_with_what_it_has_for_other_orders() {
    for (before, whole) in [([0, 2], [0, 1, 2]), ([1, 2], [0, 1, 2])] {
        let (mut model, expected, _folder) = model(Architecture::Qwen3, before);
        let first = if before[0] == 0 { 1 } else { 0 };
        let disk = Slow::put_into(&mut model, first, LONG);
        let report = model.apply_until(&plan(0..5), &mut || true).unwrap();
        assert_eq!(report.plan, plan(whole), "the one that was whole by then");
        assert!(model.plan() == &report.plan && report.held == model.breakdown().total);
        assert_eq!(model.left(), Bytes::ZERO);
        assert!(
            report.held
                <= model
                    .shape()
                    .plan_bytes(&plan(0..5))
                    .max(model.shape().plan_bytes(&plan(whole)))
        );
        disk.open.store(true, Ordering::Release);
        says(&mut model, &expected);
        assert_eq!(model.apply(&plan(0..5)).unwrap().plan, plan(0..5));
        says(&mut model, &expected);
    }
}
