//! Tests of files that hang or change during opening.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::Instant,
};

use super::{hanging::Disk as Large, *};
use crate::{
    disk::{DiskTimeout, DiskWatch},
    error::{LoadError, LoadErrorKind},
    model::opening::{Disk, inspect},
};
use cotenant_units::causes::in_one_line;

/// Long enough for reads that do not hang.
const STALL: Duration = Duration::from_secs(1);

/// An event at the n-th disk access to an object: a hang, or a function call.
struct Mishap {
    turns: AtomicUsize,
    hangs: AtomicBool,
}

impl Mishap {
    /// After `before` accesses to objects whose name contains `at`.
    fn new(
        at: &'static str,
        before: usize,
        happens: impl Fn() + Send + Sync + 'static,
    ) -> (Arc<Self>, Disk) {
        let mishap = Arc::new(Self {
            turns: AtomicUsize::new(before),
            hangs: AtomicBool::new(false),
        });
        let theirs = Arc::clone(&mishap);
        let hindrance = move |what: &str| {
            if !what.contains(at) {
                return;
            }
            if theirs.turns.fetch_sub(1, Ordering::AcqRel) == 0 {
                happens();
            }
            while theirs.hangs.load(Ordering::Acquire)
                && theirs.turns.load(Ordering::Acquire) > before
            {
                thread::yield_now();
            }
        };
        let disk = Disk {
            watch: DiskWatch::hindered(Arc::new(hindrance)),
            limit: DiskTimeout::new(STALL),
            wrap: None,
        };
        (mishap, disk)
    }

    /// Returns a disk that hangs there.
    fn hang(at: &'static str, before: usize) -> (Arc<Self>, Disk) {
        let (mishap, disk) = Self::new(at, before, || {});
        mishap.hangs.store(true, Ordering::Release);
        (mishap, disk)
    }

    fn answer(&self) {
        self.hangs.store(false, Ordering::Release);
    }
}

fn options() -> ModelOptions {
    ModelOptions::for_threads(1)
}

fn write(path: &Path, seed: u64) {
    Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), seed)
        .write(path)
        .unwrap();
}

/// Opens a model with some resident layers.
fn open(
    path: &Path,
    resident: impl IntoIterator<Item = u32>,
    disk: &Disk,
) -> Result<Model, LoadError> {
    let layout = |spec: &Spec| Layout::in_parts(spec, usize::MAX);
    let mut model = Opening::on(cpu(1), path, &options(), layout, disk)?.begin(&plan(resident))?;
    model.settle();
    Ok(model)
}

fn logits(path: &Path) -> Vec<f32> {
    let mut model = open(path, [0], &Disk::default()).unwrap();
    let logits = model.forward(&TOKENS, &mut || Flow::Continue).unwrap();
    logits.to_vec()
}

/// Checks that the error names the hanging read, which keeps at most `most` bytes.
fn is_reported(error: &LoadError, what: &str, most: Bytes) {
    let text = in_one_line(error);
    assert!(
        text.contains(what) && text.contains("the disk did not respond for "),
        "{text}"
    );
    assert!(text.ends_with("the limit is 1000 ms"), "{text}");
    assert!(error.hint().unwrap().contains("the disk"));
    let left = error.hung().unwrap();
    assert!(left.hangs() && left.hung() >= STALL);
    assert!(
        Bytes::ZERO < left.bytes() && left.bytes() <= most,
        "{}",
        left.bytes()
    );
}

fn has_returned(error: &LoadError) {
    let left = error.hung().unwrap();
    while left.hangs() {
        thread::yield_now();
    }
    assert_eq!(left.bytes(), Bytes::ZERO);
}

#[test]
fn a_header_that_does_not_come_is_an_error_in_time_and_is_read_when_the_disk_answers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write(&path, 7);
    let expected = logits(&path);
    // When it is opened, and when it is read.
    for before in [0, 3] {
        let (mishap, disk) = Mishap::hang("the header of", before);
        let began = Instant::now();
        let error = open(&path, [0], &disk).err().unwrap();
        assert!(began.elapsed() >= STALL);
        is_reported(
            &error,
            "cannot read `the header of model.gguf`",
            Bytes::from_mib(1),
        );
        mishap.answer();
        has_returned(&error);
    }
    let (mishap, disk) = Mishap::hang("the header of", 1);
    let error = inspect(Arc::new(CpuDevice(1)), &path, None, &disk)
        .err()
        .unwrap();
    is_reported(
        &error,
        "cannot read `the header of model.gguf`",
        Bytes::from_mib(1),
    );
    mishap.answer();
    has_returned(&error);
    assert!(inspect(Arc::new(CpuDevice(1)), &path, None, &disk).is_ok());
    assert!(logits(&path) == expected);
}

#[test]
fn vectors_that_do_not_come_are_an_error_in_time_and_the_ring_is_given_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write(&path, 7);
    let expected = logits(&path);
    // It is prefetched before it is read.
    let (mishap, disk) = Mishap::hang("blk.1.attn_norm.weight", 1);
    let error = open(&path, [0], &disk).err().unwrap();
    // By one of two threads.
    is_reported(
        &error,
        "cannot read `blk.1.attn_norm.weight`",
        Bytes::from_mib(1),
    );
    mishap.answer();
    has_returned(&error);
    assert!(logits(&path) == expected);
}

#[test]
fn what_large_reads_keep_that_hang_while_a_model_is_opened_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write(&path, 7);
    let expected = logits(&path);
    let large = Arc::new(std::sync::Mutex::new(None));
    let put = Arc::clone(&large);
    let wrap = move |file: Arc<crate::reader::WeightFile>| -> Arc<dyn crate::reader::Source> {
        let disk = Large::hanging(file);
        *put.lock().unwrap() = Some(Arc::clone(&disk));
        disk
    };
    let disk = Disk {
        limit: DiskTimeout::new(STALL),
        wrap: Some(Arc::new(wrap)),
        ..Disk::default()
    };
    let shape = open(&path, [], &Disk::default()).unwrap().shape().clone();
    let (ring, layer) = (shape.ring_bytes, shape.layers[0].resident_bytes);
    let error = open(&path, [0], &disk).err().unwrap();
    is_reported(&error, "cannot read `", ring + ring + layer);
    assert!(error.hung().unwrap().bytes() >= ring + layer);
    large.lock().unwrap().as_ref().unwrap().hang(false);
    has_returned(&error);
    assert!(logits(&path) == expected);
}

#[test]
fn a_file_that_is_replaced_while_it_is_opened_is_refused_and_the_new_one_can_be_had() {
    let folder = tempfile::tempdir().unwrap();
    let (path, new) = (
        folder.path().join("model.gguf"),
        folder.path().join("new.gguf"),
    );
    write(&path, 7);
    write(&new, 8);
    let expected = logits(&new);
    assert!(logits(&path) != expected);
    let (from, to) = (new.clone(), path.clone());
    let (_, disk) = Mishap::new("its weights", 0, move || fs::rename(&from, &to).unwrap());
    let error = open(&path, [0], &disk).err().unwrap();
    assert!(
        matches!(error.kind(), LoadErrorKind::Changed { .. }),
        "{}",
        in_one_line(&error)
    );
    assert!(error.hung().is_none() && error.hint().is_some());
    assert!(logits(&path) == expected);
}

#[test]
fn a_file_that_is_written_or_cut_while_it_is_opened_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for longer in [true, false] {
        write(&path, 7);
        let (file, length) = (path.clone(), fs::metadata(&path).unwrap().len());
        let change = move || {
            let file = fs::OpenOptions::new().write(true).open(&file).unwrap();
            file.set_len(if longer { length + 1 } else { length - 1 })
                .unwrap();
        };
        let (_, disk) = Mishap::new("its length", 0, change);
        let error = open(&path, [0], &disk).err().unwrap();
        let text = in_one_line(&error);
        assert!(
            text.contains("has changed since its header was read"),
            "{text}"
        );
    }
    // Before the truncated part is read.
    write(&path, 7);
    let (file, length) = (path.clone(), fs::metadata(&path).unwrap().len());
    let cut = move || {
        let file = fs::OpenOptions::new().write(true).open(&file).unwrap();
        file.set_len(length / 4).unwrap();
    };
    let (_, disk) = Mishap::new("its weights", 0, cut);
    let error = open(&path, 0..5, &disk).err().unwrap();
    let text = in_one_line(&error);
    assert!(
        text.contains("the file ends") || text.contains("has changed"),
        "{text}"
    );
}

#[test]
fn a_pipe_is_no_model_and_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let error = open(&path, [], &Disk::default()).err().unwrap();
    assert!(
        matches!(error.kind(), LoadErrorKind::NotAFile),
        "{}",
        in_one_line(&error)
    );
}
