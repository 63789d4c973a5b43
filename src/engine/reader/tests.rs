//! Tests of piece order, changing schedules, and failing or hanging disks.

use std::{
    io::Write,
    ptr::NonNull,
    sync::atomic::{AtomicBool, Ordering},
};

use super::*;
use crate::{
    arena::{Backing, DeviceMemory, Mapping},
    backend::{Backend as _, cpu::Cpu},
    gguf::Part,
    reader::WeightFile,
};
use cotenant_units::{lock::locked, page};

fn file(len: usize) -> (tempfile::NamedTempFile, Vec<u8>) {
    let bytes: Vec<u8> = (0..len)
        .map(|i| u8::try_from(i * 31 % 251).unwrap())
        .collect();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    (file, bytes)
}

fn open(path: &Path) -> WeightFile {
    let part = Part {
        path: path.to_owned(),
        base: 0,
        bytes: Bytes::ZERO,
    };
    WeightFile::open(&[part]).unwrap()
}

fn extents(parts: &[(u64, usize)]) -> Arc<[Extent]> {
    parts
        .iter()
        .map(|&(offset, bytes)| Extent {
            what: "piece".into(),
            offset,
            bytes,
        })
        .collect()
}

fn ring(bytes: Bytes) -> Buffer {
    Cpu::new(1).unwrap().ring(bytes, Backing::Now).unwrap()
}

fn bytes_of(piece: &View) -> Vec<u8> {
    let start = piece.range().unwrap();
    // SAFETY: it is acquired, so that no reader writes to it.
    unsafe { std::slice::from_raw_parts(start.as_ptr(), piece.len()) }.to_vec()
}

fn piece(stream: &Stream, schedule: &[Extent], index: usize) -> Vec<u8> {
    let pieces = stream.acquire(index, 1, &mut || true).unwrap();
    let bytes = bytes_of(&pieces[0]);
    assert_eq!(bytes.len(), schedule[index].bytes);
    // SAFETY: they were copied.
    unsafe { stream.release(1) };
    bytes
}

#[test]
fn pieces_come_in_order_for_ever_through_a_ring_smaller_than_all_of_them() {
    let (file, bytes) = file(100_000);
    let schedule = extents(&[
        (17, 5000),
        (32, 9000),
        (50_001, 12_000),
        (99_000, 1000),
        (4096, 4096),
    ]);
    let source = Arc::new(open(file.path()));
    let stream =
        Stream::start(source, ring(Bytes::from_kib(36)), Arc::clone(&schedule), 2).unwrap();
    for turn in 2..60 {
        let index = turn % schedule.len();
        let extent = &schedule[index];
        let start = usize::try_from(extent.offset).unwrap();
        assert_eq!(
            piece(&stream, &schedule, index),
            bytes[start..start + extent.bytes],
            "turn {turn}"
        );
    }
}

/// Device memory as seen by a host: copies go in, and only this test reads them back.
#[derive(Debug)]
struct Remote(Mutex<Vec<u8>>);

impl DeviceMemory for Remote {
    fn address(&self) -> u64 {
        0
    }

    fn bytes(&self) -> Bytes {
        Bytes::of_len(self.0.lock().unwrap().len())
    }

    fn bring(&self, offset: usize, from: &[u8]) -> io::Result<()> {
        let mut memory = self.0.lock().unwrap();
        let place = memory
            .get_mut(offset..offset + from.len())
            .ok_or(io::ErrorKind::InvalidInput)?;
        place.copy_from_slice(from);
        Ok(())
    }

    fn page_locked(&self, _: Bytes) -> io::Result<SharedMapping> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn release(&mut self) -> bool {
        true
    }
}

#[test]
fn a_piece_is_brought_to_a_device_in_as_many_reads_as_its_staging_takes() {
    let (file, bytes) = file(100_000);
    let (source, progress) = (open(file.path()), ReadProgress::new());
    for (offset, len, pages) in [
        (17, 5000, 1),
        (4096, 4096, 1),
        (4095, 2, 1),
        (50_001, 30_000, 2),
        (9, 99_991, 3),
    ] {
        let extent = Extent {
            what: "piece".into(),
            offset,
            bytes: len,
        };
        let staging = Mapping::new(page().saturating_mul(pages), Backing::Now).unwrap();
        let place = (staging.range(0, 1).unwrap(), staging.bytes().as_len());
        let device = Remote(Mutex::new(vec![0; 8192 + extent.aligned_bytes()]));
        // SAFETY: all of a mapping of our own.
        unsafe { read_staged(&source, &extent, (&device, 8192), place, &progress) }.unwrap();
        let (brought, from) = (
            device.0.into_inner().unwrap(),
            usize::try_from(offset).unwrap(),
        );
        let lead = 8192 + extent.lead();
        assert!(
            brought[lead..lead + len] == bytes[from..from + len],
            "{len} bytes at {offset}"
        );
        let small = Remote(Mutex::new(vec![0; extent.aligned_bytes() - 1]));
        // SAFETY: as before.
        let error =
            unsafe { read_staged(&source, &extent, (&small, 0), place, &progress) }.unwrap_err();
        assert_eq!((error.offset, error.bytes), (offset, Bytes::of_len(len)));
    }
}

#[test]
fn a_stream_that_begins_early_reads_while_memory_is_found_and_has_all_of_it_when_it_has_settled() {
    let (file, bytes) = file(60_000);
    let schedule = extents(&[(0, 9000), (20_000, 9000), (45_000, 9000)]);
    let ring = Bytes::from_mib(5);
    let untouched = Cpu::new(1).unwrap().ring(ring, Backing::OnTouch).unwrap();
    let stream = Stream::begin(
        Arc::new(open(file.path())),
        untouched,
        Arc::clone(&schedule),
        0,
    )
    .unwrap();
    assert!(stream.reads(&schedule) && !stream.reads(&schedule[1..]));
    assert_eq!(piece(&stream, &schedule, 0), bytes[..9000]);
    // Readers are running throughout.
    stream.settle();
    assert_eq!(stream.ring_resident(), ring);
    for turn in 1..2000 {
        let index = turn % schedule.len();
        let start = usize::try_from(schedule[index].offset).unwrap();
        assert_eq!(
            piece(&stream, &schedule, index),
            bytes[start..start + 9000],
            "{turn}"
        );
    }
    assert_eq!(stream.release_ring(), ring);
}

#[test]
fn pieces_that_are_lent_stay_while_others_come_and_go() {
    let (file, bytes) = file(60_000);
    let schedule = extents(&[(0, 9000), (9000, 9000), (20_000, 9000), (30_000, 9000)]);
    let source = Arc::new(open(file.path()));
    let stream =
        Stream::start(source, ring(Bytes::from_kib(48)), Arc::clone(&schedule), 0).unwrap();
    let first = stream.acquire(0, 1, &mut || true).unwrap();
    for turn in 0..50 {
        let index = (turn + 1) % schedule.len();
        let lent = stream.acquire(index, 1, &mut || true).unwrap();
        let start = usize::try_from(schedule[index].offset).unwrap();
        assert_eq!(bytes_of(&lent[0]), bytes[start..start + 9000], "{turn}");
        if turn == 0 {
            assert_eq!(bytes_of(&first[0]), bytes[..9000]);
        }
        // SAFETY: they were copied; the oldest is released first.
        unsafe { stream.release(1) };
    }
}

#[test]
#[should_panic(expected = "the pieces acquired before are still in use")]
fn a_ring_of_which_pieces_are_lent_is_not_begun_from_its_start() {
    let (file, _) = file(20_000);
    let schedule = extents(&[(0, 5000), (9000, 5000)]);
    let source = Arc::new(open(file.path()));
    let mut stream =
        Stream::start(source, ring(Bytes::from_kib(36)), Arc::clone(&schedule), 0).unwrap();
    let _lent = stream.acquire(0, 1, &mut || true).unwrap();
    stream.restart(schedule, 0, &mut another).unwrap();
}

#[test]
fn pieces_go_round_in_what_of_the_ring_is_in_memory() {
    let schedule = extents(&[(0, 9000), (20_000, 4000)]);
    let shared = Shared::new(schedule, 0, 64 << 10);
    let mut state = locked(&shared.state);
    let mut placed = |usable: usize| {
        state.usable = usable << 10;
        state.place().map(|(_, _, start)| start >> 10)
    };
    assert_eq!(placed(0), None);
    assert_eq!(placed(8), None);
    assert_eq!(placed(16), Some(0));
    assert_eq!(placed(20), Some(12));
    assert_eq!(placed(20), None);
    // The first is released, and does not fit after the other; the first part of the ring fits.
    state.slots.pop_front();
    let mut placed = |usable: usize| {
        state.usable = usable << 10;
        state.place().map(|(_, _, start)| start >> 10)
    };
    assert_eq!(placed(24), Some(0));
    // Wrapped around, with 4 KiB up to the other slot: memory populated after that is used later.
    assert_eq!(placed(64), None);
    state.slots.pop_front();
    state.usable = 64 << 10;
    assert_eq!(state.place().map(|(_, _, start)| start >> 10), Some(12));
}

#[test]
fn a_restart_continues_with_another_schedule() {
    let (file, bytes) = file(40_000);
    let source = Arc::new(open(file.path()));
    let first = extents(&[(0, 8000), (8000, 8000)]);
    let mut stream =
        Stream::start(source, ring(Bytes::from_kib(24)), Arc::clone(&first), 0).unwrap();
    piece(&stream, &first, 0);
    let second = extents(&[(20_000, 3000), (30_000, 10_000)]);
    stream
        .restart(Arc::clone(&second), 1, &mut another)
        .unwrap();
    assert_eq!(piece(&stream, &second, 1), bytes[30_000..40_000]);
    assert_eq!(piece(&stream, &second, 0), bytes[20_000..23_000]);
}

#[test]
fn pieces_that_are_passed_over_are_given_up_and_the_end_may_move() {
    let (file, bytes) = file(60_000);
    let schedule = extents(&[
        (0, 9000),
        (9000, 9000),
        (20_000, 9000),
        (30_000, 9000),
        (45_000, 9000),
    ]);
    let stream = Stream::start(
        Arc::new(open(file.path())),
        ring(Bytes::from_kib(32)),
        Arc::clone(&schedule),
        0,
    )
    .unwrap();
    let is_right = |index: usize| {
        let start = usize::try_from(schedule[index].offset).unwrap();
        assert_eq!(
            piece(&stream, &schedule, index),
            bytes[start..start + 9000],
            "{index}"
        );
    };
    for end in [3, 0, usize::MAX, 1, 5] {
        stream.set_end(end);
        (0..end.min(5)).chain([0, 1, 4, 2, 3, 4]).for_each(is_right);
    }
}

#[test]
fn a_file_that_ends_too_soon_is_an_error_of_that_piece_and_a_restart_heals() {
    let (file, bytes) = file(40_000);
    file.as_file().set_len(36_000).unwrap();
    let source = Arc::new(open(file.path()));
    let schedule = extents(&[(0, 4000), (35_000, 4000)]);
    let mut stream =
        Stream::start(source, ring(Bytes::from_kib(16)), Arc::clone(&schedule), 0).unwrap();
    assert_eq!(piece(&stream, &schedule, 0), bytes[..4000]);
    let failed = stream.acquire(1, 1, &mut || true).err();
    let Some(Missing::Failed(error)) = failed else {
        panic!("{failed:?}");
    };
    assert!(
        error.to_string().contains("the file ends at byte 36000"),
        "{error}"
    );
    let rest = extents(&[(35_000, 1000)]);
    stream.restart(Arc::clone(&rest), 0, &mut another).unwrap();
    assert_eq!(piece(&stream, &rest, 0), bytes[35_000..36_000]);
}

/// Responds on command.
struct Gate {
    open: AtomicBool,
}

impl Source for Gate {
    unsafe fn read(
        &self,
        extent: &Extent,
        target: NonNull<u8>,
        _: &ReadProgress,
    ) -> Result<(), ReadError> {
        while !self.open.load(Ordering::Acquire) {
            thread::yield_now();
        }
        // SAFETY: the caller's promise.
        unsafe { target.as_ptr().write_bytes(7, extent.aligned_bytes()) };
        Ok(())
    }

    fn read_small(&self, _: &Extent, target: &mut [u8]) -> Result<(), ReadError> {
        target.fill(7);
        Ok(())
    }
}

fn another(bytes: Bytes) -> io::Result<Buffer> {
    Cpu::new(1)?.ring(bytes, Backing::Now)
}

/// A stream with a short time limit whose disk does not respond.
fn gated() -> (Arc<Gate>, Arc<[Extent]>, Stream) {
    let gate = Arc::new(Gate {
        open: AtomicBool::new(false),
    });
    let schedule = extents(&[(0, 4096)]);
    let source: Arc<dyn Source> = Arc::<Gate>::clone(&gate);
    let mut stream =
        Stream::start(source, ring(Bytes::from_kib(16)), Arc::clone(&schedule), 0).unwrap();
    stream.set_limit(DiskTimeout::new(Duration::from_millis(1)));
    (gate, schedule, stream)
}

#[test]
fn a_disk_that_does_not_answer_is_an_error_and_the_ring_is_replaced() {
    let (gate, schedule, mut stream) = gated();
    assert!(matches!(
        stream.acquire(0, 1, &mut || true),
        Err(Missing::Stalled(_))
    ));
    stream
        .restart(Arc::clone(&schedule), 0, &mut another)
        .unwrap();
    assert!(matches!(
        stream.acquire(0, 1, &mut || false),
        Err(Missing::Stalled(_) | Missing::Stopped)
    ));
    gate.open.store(true, Ordering::Release);
    stream.set_limit(DiskTimeout::new(Duration::from_secs(60)));
    assert_eq!(piece(&stream, &schedule, 0), vec![7; 4096]);
}

#[test]
fn a_slow_disk_that_brings_something_does_not_hang() {
    let (gate, schedule, mut stream) = gated();
    let stall = Duration::from_millis(400);
    stream.set_limit(DiskTimeout::new(stall));
    let began = Instant::now();
    let mut patience = || {
        gate.open
            .store(began.elapsed() > stall * 2, Ordering::Release);
        stream.shared.progress.note();
        true
    };
    stream.pass(0, &mut patience).unwrap();
    assert!(began.elapsed() > stall * 2);
    assert_eq!(piece(&stream, &schedule, 0), vec![7; 4096]);
}

#[test]
fn a_large_read_is_made_in_several_and_ends_early_when_it_is_given_up() {
    let (file, bytes) = file(700_000);
    let source = open(file.path());
    let mut memory = Mapping::new(Bytes::of_len(bytes.len()), Backing::Now).unwrap();
    let extent = Extent {
        what: "piece".into(),
        offset: 0,
        bytes: bytes.len(),
    };
    let target = memory.range(0, extent.aligned_bytes()).unwrap();
    let progress = ReadProgress::new();
    progress.give_up();
    // SAFETY: all of a mapping of our own.
    let error = unsafe { source.read(&extent, target, &progress) }.unwrap_err();
    assert_eq!(error.problem, "it is no longer needed");
    let done = memory
        .bytes_mut()
        .iter()
        .zip(&bytes)
        .take_while(|(one, other)| one == other)
        .count();
    assert!(page().as_len() <= done && done < bytes.len(), "{done}");
    progress.take_up();
    // SAFETY: as before.
    unsafe { source.read(&extent, target, &progress) }.unwrap();
    assert!(memory.bytes_mut()[..bytes.len()] == bytes);
}

#[test]
fn a_restart_that_could_not_be_made_up_for_a_hanging_read_is_by_the_next_one() {
    let (gate, schedule, mut stream) = gated();
    while locked(&stream.shared.state).reading == 0 {
        thread::yield_now();
    }
    let capacity = std::mem::replace(&mut locked(&stream.shared.state).capacity, usize::MAX >> 8);
    stream
        .restart(Arc::clone(&schedule), 0, &mut another)
        .unwrap_err();
    locked(&stream.shared.state).capacity = capacity;
    // The hanging read returns, and its threads end.
    gate.open.store(true, Ordering::Release);
    stream.set_limit(DiskTimeout::new(Duration::from_secs(60)));
    stream
        .restart(Arc::clone(&schedule), 0, &mut another)
        .unwrap();
    assert_eq!(piece(&stream, &schedule, 0), vec![7; 4096]);
}
