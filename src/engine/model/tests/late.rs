//! Tests of models on a backend that defers execution, as a device does.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use super::*;
use crate::LoadErrorKind;
use crate::backend::{Backend, Buffer, DeviceError, Fence, Limits, Operation, Region, cpu::Cpu};

/// The CPU with deferred execution.
#[derive(Clone, Debug)]
struct Late {
    moment: Moment,
    fault: Fault,
    /// Memory that is refused on demand; never refused if `None`.
    memory: Option<Refusing>,
    /// Receives the maximum number of operations in flight.
    most: Option<&'static AtomicUsize>,
    /// Number of operations held back for a joint submission.
    segment: u64,
}

/// Time of execution of operations that are not waited for.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Never,
    /// At once.
    Now,
    /// At some calls, by a seed.
    Random(u32),
}

/// Injected fault.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// Everything is reported as executed.
    DoneTooEarly,
    /// A wait returns at once.
    ForgottenWait,
    /// This operation fails, and all later ones.
    Breaks(u64),
}

impl Late {
    const fn honest(moment: Moment) -> Self {
        Self {
            moment,
            fault: Fault::None,
            memory: None,
            most: None,
            segment: 0,
        }
    }
}

const HONEST: [Late; 3] = honest_by(0);

/// One that executes only at waits, and two that execute at random times, one of them in segments.
const fn honest_by(seed: u32) -> [Late; 3] {
    let [first, second] = [2 * seed + 1, 2 * seed + 2];
    let moment = Moment::Random(second);
    let by_segments = Late {
        moment,
        fault: Fault::None,
        memory: None,
        most: None,
        segment: 12,
    };
    [
        Late::honest(Moment::Never),
        Late::honest(Moment::Random(first)),
        by_segments,
    ]
}

/// Returns the CPU with execution at random times, for tests of other properties.
pub(super) fn late_by(seed: u32) -> Arc<dyn Device> {
    Arc::new(Late::honest(Moment::Random(seed)))
}

/// Returns the CPU with memory refused by `memory`, executing at once, or at random times by the seed in
/// `COTENANT_TEST_LATE`.
pub(super) fn refusing(memory: Refusing) -> Arc<dyn Device> {
    let moment = match env::var("COTENANT_TEST_LATE") {
        Ok(seed) => Moment::Random(seed.parse().unwrap()),
        Err(_) => Moment::Now,
    };
    Arc::new(Late {
        memory: Some(memory),
        ..Late::honest(moment)
    })
}

impl Device for Late {
    fn copies_bytes(&self, types: &[GgmlDType], columns: usize) -> Bytes {
        CpuDevice(2).copies_bytes(types, columns)
    }

    fn scratch_bytes(&self, spec: &crate::spec::AttentionSpec) -> Bytes {
        CpuDevice(2).scratch_bytes(spec)
    }

    fn tries_states(&self) -> bool {
        true
    }

    fn start(&self, _: &Limits) -> Result<Box<dyn Backend>, LoadErrorKind> {
        Ok(Box::new(LateBackend {
            inner: Cpu::new(2).map_err(LoadErrorKind::Threads)?,
            late: self.clone(),
            kept: VecDeque::new(),
            handed_on: 0,
            executed: 0,
        }))
    }
}

struct LateBackend {
    inner: Cpu,
    late: Late,
    kept: VecDeque<Operation<'static>>,
    /// Number of operations not held back.
    handed_on: u64,
    executed: u64,
}

impl LateBackend {
    fn execute(&mut self, count: usize) -> Result<(), DeviceError> {
        for operation in self.kept.drain(..count) {
            if matches!(self.late.fault, Fault::Breaks(at) if self.executed >= at) {
                return Err(DeviceError::new("it was unplugged"));
            }
            self.inner.queue(operation)?;
            self.executed += 1;
        }
        self.handed_on = self.handed_on.max(self.executed);
        Ok(())
    }

    fn queued(&self) -> u64 {
        self.executed + self.kept.len() as u64
    }

    /// Executes some of the deferred operations.
    fn moment(&mut self) -> Result<(), DeviceError> {
        let most = match &mut self.late.moment {
            Moment::Never => 0,
            Moment::Now => usize::MAX,
            Moment::Random(seed) => {
                *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((*seed >> 8) as usize % 40).saturating_sub(30)
            }
        };
        let handed_on = usize::try_from(self.handed_on - self.executed).unwrap();
        self.execute(most.min(handed_on))
    }
}

// SAFETY: without an injected fault, no deferred operation is reported as executed; with one, readers write while the
// CPU reads, which the tests detect.
unsafe impl Backend for LateBackend {
    fn name(&self) -> String {
        format!("late {}", self.inner.name())
    }

    fn allocate(&self, bytes: Bytes, backing: Backing) -> io::Result<Buffer> {
        if self.late.memory.as_ref().is_some_and(Refusing::refuses) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.inner.allocate(bytes, backing)
    }

    fn ring(&self, bytes: Bytes, backing: Backing) -> io::Result<Buffer> {
        self.inner.ring(bytes, backing)
    }

    fn reserve(&self, bytes: Bytes, granule: Bytes) -> io::Result<Region> {
        self.inner.reserve(bytes, granule)
    }

    fn trim(&self) {
        self.inner.trim();
    }

    fn queue(&mut self, operation: Operation<'_>) -> Result<(), DeviceError> {
        self.kept.push_back(operation.into_owned());
        if let Some(most) = self.late.most {
            most.fetch_max(self.kept.len(), Ordering::Relaxed);
        }
        if self.late.segment == 0 {
            self.handed_on = self.queued();
        }
        self.moment()
    }

    fn mark(&mut self) -> Fence {
        if self.queued() - self.handed_on >= self.late.segment {
            self.handed_on = self.queued();
        }
        Fence(self.queued())
    }

    fn holds(&self, fence: Fence) -> bool {
        fence.0 > self.handed_on
    }

    fn done(&mut self, fence: Fence) -> Result<bool, DeviceError> {
        self.moment()?;
        Ok(self.late.fault == Fault::DoneTooEarly || self.executed >= fence.0)
    }

    fn wait(&mut self, fence: Fence) -> Result<(), DeviceError> {
        if self.late.fault == Fault::ForgottenWait {
            return Ok(());
        }
        let count = usize::try_from(fence.0.saturating_sub(self.executed)).unwrap();
        self.execute(count.min(self.kept.len()))
    }

    fn read<'a>(
        &'a mut self,
        from: &'a Buffer,
        floats: Range<usize>,
    ) -> Result<&'a [f32], DeviceError> {
        self.execute(self.kept.len())?;
        self.inner.read(from, floats)
    }
}

fn roomy(resident: impl IntoIterator<Item = u32>) -> EnginePlan {
    EnginePlan {
        kv_capacity: Tokens::new(256),
        prefill_chunk: Tokens::new(8),
        ..plan(resident)
    }
}

fn written(architecture: Architecture, dtype: GgmlDType) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    Synthetic::tiny(architecture, TypeMix::All(dtype), 7)
        .write(&path)
        .unwrap();
    (folder, path)
}

fn prompt() -> Vec<u32> {
    (0..17).map(|index| index * 37 % 320).collect()
}

#[test]
fn random_sheds_leave_no_trace_in_the_logits_of_a_device_that_executes_late() {
    let types = [
        GgmlDType::Q8_0,
        GgmlDType::Q4K,
        GgmlDType::F32,
        GgmlDType::MXFP4,
        GgmlDType::IQ4XS,
    ];
    let models: Vec<_> = Architecture::ALL.into_iter().enumerate().collect();
    // 510 schedules of plans and of execution.
    std::thread::scope(|scope| {
        for half in models.chunks(models.len().div_ceil(2)) {
            scope.spawn(move || {
                for &(number, architecture) in half {
                    let dtype = types[number % types.len()];
                    random_sheds_leave_no_trace(architecture, dtype, SCHEDULES);
                }
            });
        }
    });
}

/// Runs `schedules` schedules for each time of execution.
fn random_sheds_leave_no_trace(architecture: Architecture, dtype: GgmlDType, schedules: u32) {
    let (_folder, path) = written(architecture, dtype);
    let mut plain = open_in_parts(&path, usize::MAX, &roomy(0..5), 1);
    let prompt = &prompt()[..9];
    let expected = [prompt, &[7]].map(|tokens| {
        let logits = plain.forward(tokens, &mut || Flow::Continue).unwrap();
        logits.to_vec()
    });
    let mut done = [0; 3];
    for seed in 0..schedules {
        for (turn, late) in honest_by(seed).into_iter().enumerate() {
            let mut model = open_on(Arc::new(late.clone()), None, &path, 16 << 10, &roomy(0..1));
            let mut orders = Orders {
                parts: u32::try_from(model.shape().layers.len()).unwrap(),
                left: 3,
                seed: 3 * seed + u32::try_from(turn).unwrap(),
                looks: 0,
                done: Vec::new(),
            };
            if turn > 0 {
                model.estimators = SliceEstimators::finest();
            }
            for (tokens, expected) in [prompt, &[7]].into_iter().zip(&expected) {
                let logits = model.forward(tokens, &mut orders).unwrap();
                assert!(
                    logits[..] == expected[..],
                    "{architecture:?} {late:?}, {} orders",
                    orders.done.len()
                );
            }
            done[turn] += orders.done.len();
        }
    }
    assert!(
        done[1..].iter().all(|done| *done > 3 * schedules as usize),
        "{done:?} orders"
    );
}

/// Schedules per family and time of execution.
const SCHEDULES: u32 = 17;

#[test]
fn sequences_are_cut_back_and_copied_on_a_device_that_executes_late() {
    let (_folder, path) = written(Architecture::Qwen35, GgmlDType::Q8_0);
    let mut plain = open_in_parts(&path, usize::MAX, &roomy(0..5), 1);
    for late in HONEST {
        let mut model = open_on(
            Arc::new(late.clone()),
            None,
            &path,
            16 << 10,
            &roomy([0, 3]),
        );
        let mut expected = Vec::new();
        for model in [&mut plain, &mut model] {
            model.reset();
            let mut all = Vec::new();
            model.mark_at(11);
            model.forward(&prompt(), &mut || Flow::Continue).unwrap();
            all.push(model.keep(12));
            let logits = model.forward(&[3, 4], &mut || Flow::Continue).unwrap();
            all.extend(logits.iter().map(|logit| logit.to_bits()));
            let fewer = EnginePlan {
                kv_type: KvType::Q8,
                ..model.plan().clone()
            };
            model.apply(&fewer).unwrap();
            let logits = model.forward(&[5], &mut || Flow::Continue).unwrap();
            all.extend(logits.iter().map(|logit| logit.to_bits()));
            model.apply(&roomy([1])).unwrap();
            expected.push(all);
        }
        assert!(expected[0] == expected[1], "{late:?}");
    }
}

/// Returns the logits of a pass with an injected fault, of a resident or a streamed model, and the expected ones.
fn with(fault: Fault, resident: bool, checkpoint: &mut dyn Checkpoint) -> (Vec<f32>, Vec<f32>) {
    let (_folder, path) = written(Architecture::Qwen3, GgmlDType::F32);
    let mut plain = open_in_parts(&path, usize::MAX, &roomy(0..5), 1);
    let expected = plain
        .forward(&[5], &mut || Flow::Continue)
        .unwrap()
        .to_vec();
    let late = Late {
        fault,
        ..Late::honest(Moment::Never)
    };
    let mut model = open_on(Arc::new(late), None, &path, 16 << 10, &roomy([]));
    let parts = u32::try_from(model.shape().layers.len()).unwrap();
    model
        .apply(&roomy((0..parts).filter(|_| resident)))
        .unwrap();
    let logits = model.forward(&[5], checkpoint).unwrap().to_vec();
    (logits, expected)
}

#[test]
fn a_slot_of_the_ring_that_is_released_too_early_is_found() {
    let (logits, expected) = with(Fault::None, false, &mut || Flow::Continue);
    assert!(logits == expected);
    let (logits, expected) = with(Fault::DoneTooEarly, false, &mut || Flow::Continue);
    assert!(
        logits != expected,
        "what readers have written over is multiplied with"
    );
}

#[test]
fn a_wait_that_is_forgotten_before_memory_is_given_up_is_found() {
    for fault in [Fault::None, Fault::ForgottenWait] {
        // At the third layer, so that parts of earlier layers are in flight.
        let mut order = Plans {
            plans: vec![roomy([])],
            left: 2,
            ..Plans::default()
        };
        let (logits, expected) = with(fault, true, &mut order);
        let report = order.applied.pop().unwrap().unwrap();
        assert!(report.asked > Bytes::ZERO);
        assert_eq!(
            report.freed == report.asked,
            fault == Fault::None,
            "{report:?}"
        );
        // Operations in flight keep their memory: the shed fails, not the answer.
        assert!(fault != Fault::None || logits == expected);
    }
}

#[test]
fn no_more_is_in_flight_than_a_slice_and_the_one_ahead() {
    static MOST: AtomicUsize = AtomicUsize::new(0);
    let (_folder, path) = written(Architecture::Qwen35, GgmlDType::Q8_0);
    let late = Late {
        most: Some(&MOST),
        ..Late::honest(Moment::Never)
    };
    let mut model = open_on(Arc::new(late), None, &path, usize::MAX, &roomy(0..5));
    let mut in_flight = |estimators, tokens: &[u32]| {
        model.reset();
        model.estimators = estimators;
        model.backend.read(&model.logits, 0..1).unwrap();
        MOST.store(0, Ordering::Relaxed);
        model.forward(tokens, &mut || Flow::Continue).unwrap();
        MOST.load(Ordering::Relaxed)
    };
    // Before the estimators have learned, a tiny chunk is one slice; each of the four layers has at least six
    // operations.
    for (tokens, most) in [(&prompt()[..8], 12), (&[5], 24)] {
        assert!(in_flight(SliceEstimators::new(), tokens) > 24);
        let paced = in_flight(SliceEstimators::finest(), tokens);
        assert!(
            paced <= most,
            "{paced} operations in flight for {} tokens",
            tokens.len()
        );
    }
}

#[test]
fn a_slice_ends_with_a_segment_of_a_device_that_holds_operations_back() {
    static MOST: AtomicUsize = AtomicUsize::new(0);
    let (_folder, path) = written(Architecture::Qwen3, GgmlDType::Q8_0);
    Synthetic {
        layers: 16,
        ..Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 7)
    }
    .write(&path)
    .unwrap();
    let late = Late {
        most: Some(&MOST),
        segment: 12,
        ..Late::honest(Moment::Never)
    };
    let mut model = open_on(Arc::new(late), None, &path, usize::MAX, &roomy(0..17));
    model.estimators = SliceEstimators::finest();
    model.forward(&[5], &mut || Flow::Continue).unwrap();
    MOST.store(0, Ordering::Relaxed);
    model.forward(&[6], &mut || Flow::Continue).unwrap();
    // A layer has seven operations and two layers make a segment: one segment is executed, one is ahead, one is held
    // back.
    let most = MOST.load(Ordering::Relaxed);
    assert!((24..=48).contains(&most), "{most} operations in flight");
}

#[test]
fn a_device_that_fails_ends_the_pass_and_every_later_one() {
    let (_folder, path) = written(Architecture::Qwen35, GgmlDType::Q8_0);
    // At any time: during opening, in a pass, and in a streamed pass.
    for resident in [vec![], vec![0, 1, 2, 3, 4]] {
        for at in [60, 80, 100, 130] {
            let late = Late {
                fault: Fault::Breaks(at),
                ..Late::honest(Moment::Never)
            };
            let mut model = open_on(
                Arc::new(late),
                None,
                &path,
                usize::MAX,
                &roomy(resident.iter().copied()),
            );
            let failed = (0..20).find_map(|_| model.forward(&[5, 6], &mut || Flow::Continue).err());
            assert!(
                matches!(&failed, Some(error) if error.cure().is_some()),
                "{failed:?}"
            );
            model.reset();
            let error = model.forward(&[5], &mut || Flow::Continue).unwrap_err();
            assert_eq!(error.to_string(), "the device has failed: it was unplugged");
        }
    }
}
