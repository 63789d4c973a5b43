use std::{
    ptr::NonNull,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use super::*;
use crate::{
    backend::cpu::Cpu,
    error::ReadError,
    gguf::{GgmlDType, Header},
    reader::ReadProgress,
    spec::Architecture,
    synthetic::{Synthetic, TypeMix},
    weights::Weights as _,
};
use cotenant_units::page;

/// A disk that responds on command.
struct Gate {
    open: AtomicBool,
    asked: AtomicUsize,
}

impl Gate {
    fn wait(&self) {
        self.asked.fetch_add(1, Ordering::AcqRel);
        while !self.open.load(Ordering::Acquire) {
            thread::yield_now();
        }
    }
}

impl Source for Gate {
    unsafe fn read(&self, _: &Extent, _: NonNull<u8>, _: &ReadProgress) -> Result<(), ReadError> {
        self.wait();
        Ok(())
    }

    fn read_small(&self, _: &Extent, _: &mut [u8]) -> Result<(), ReadError> {
        self.wait();
        Ok(())
    }
}

/// Weights on a hanging disk, none of them resident, with both readers of their stream waiting.
struct Hanging {
    backend: Cpu,
    weights: Weights,
    layout: Layout,
    gate: Arc<Gate>,
}

impl Hanging {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 1)
            .write(&path)
            .unwrap();
        let header = Header::read(&path).unwrap();
        let layout = Layout::of(&Spec::read(&header).unwrap());
        let gate = Arc::new(Gate {
            open: AtomicBool::new(false),
            asked: AtomicUsize::new(0),
        });
        let file: Arc<dyn Source> = Arc::<Gate>::clone(&gate);
        let backend = Cpu::new(1).unwrap();
        let fixed = (backend.allocate(page(), Backing::Now).unwrap(), None);
        let weights = Weights::new(
            file,
            fixed,
            layout.parts.len(),
            None,
            (None, DiskTimeout::new(Duration::from_millis(1))),
        );
        let mut hanging = Self {
            backend,
            weights,
            layout,
            gate,
        };
        hanging.stream(0);
        hanging.wait_for_readers(2);
        hanging
    }

    /// Starts or restarts the stream from `part` on.
    fn stream(&mut self, part: usize) {
        let place = Place { part, piece: 0 };
        self.weights
            .stream(&self.backend, &self.layout, place)
            .unwrap();
    }

    /// Waits until `readers` reads have begun: two readers per ring.
    fn wait_for_readers(&self, readers: usize) {
        while self.gate.asked.load(Ordering::Acquire) < readers {
            thread::yield_now();
        }
    }

    fn rings(&self) -> u64 {
        self.weights.ring_bytes().get() / self.layout.ring.get()
    }

    /// Lets the disk respond, and waits until no read keeps memory.
    fn answer(&self) {
        self.gate.open.store(true, Ordering::Release);
        while self.weights.left_bytes() > Bytes::ZERO {
            thread::yield_now();
        }
    }
}

#[test]
fn a_ring_that_a_hanging_read_keeps_is_on_the_book_until_it_returns() {
    let mut hanging = Hanging::new();
    hanging.stream(1);
    hanging.wait_for_readers(4);
    assert_eq!(hanging.rings(), 2);
    // The first ring, and now the second one: nothing is streamed any more, and both are kept.
    let (asked, freed) = hanging.weights.stop_stream();
    assert_eq!((asked, freed), (hanging.layout.ring, Bytes::ZERO));
    assert_eq!(
        (hanging.rings(), hanging.weights.rings_left.pieces()),
        (2, 2)
    );
    assert_eq!(
        hanging.weights.resident(),
        hanging.weights.ring_bytes() + page()
    );
    hanging.answer();
    assert_eq!(
        (hanging.weights.ring_bytes(), hanging.weights.resident()),
        (Bytes::ZERO, page())
    );
}

#[test]
fn a_disk_that_hangs_keeps_two_rings_and_four_threads_however_often_it_is_asked() {
    let mut hanging = Hanging::new();
    hanging.stream(1);
    hanging.wait_for_readers(4);
    for part in [2, 0, 3, 1] {
        hanging.stream(part);
        assert_eq!(hanging.rings(), 2);
        assert!(
            hanging.weights.streamed(part).is_none()
                && hanging.weights.hung(&"it".into()).is_some()
        );
        assert!(
            hanging.weights.needs_stream(&hanging.layout),
            "the next one is to try it again"
        );
    }
    assert_eq!(
        hanging.gate.asked.load(Ordering::Acquire),
        4,
        "no other thread has read"
    );
    hanging.answer();
    hanging.stream(1);
    assert!(hanging.weights.streamed(1).is_some() && hanging.weights.hung(&"it".into()).is_none());
    assert_eq!(hanging.rings(), 1);
}
