//! Models on the CUDA backend, over an imitated driver (`tests/cuda/driver`), against the CPU.
//!
//! The driver is a library that a process opens once, with settings in its environment: each case is a process of its own, this
//! program called as `child`.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "test helpers may fail loudly, and figures are shown with a failure"
)]

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Output},
};

use candle_core::quantized::GgmlDType;
use cotenant::{
    engine::{
        Flow, Model, ModelOptions,
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
    },
    policy::{
        compute::{Compute, CudaKernels, CudaMemory, DeviceChoice, DeviceSettings},
        kv_type::KvType,
        residency::EnginePlan,
    },
    units::Tokens,
};
use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::Value;

macro_rules! named {
    ($name:ident) => {
        (stringify!($name), $name)
    };
}

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() == Some("child") {
        return child(&arguments.collect::<Vec<_>>());
    }
    let tests: [(&str, fn()); 4] = [
        named!(a_call_that_fails_once_or_for_good_is_an_error_and_leaves_nothing),
        named!(models_answer_as_on_the_cpu_whenever_the_driver_executes),
        named!(weights_on_the_device_and_plain_kernels_answer_the_same),
        named!(a_gpu_that_does_not_compute_is_refused_with_its_reason_or_left_for_the_cpu),
    ];
    let tests = tests.map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok::<(), Failed>(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), tests.into()).exit_code()
}

/// Builds the imitated driver where that was not done before.
fn driver() -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda");
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/build");
    let built = Command::new(build).arg(&out).arg("driver").output().unwrap();
    assert!(
        built.status.success(),
        "g++ is needed:\n{}{}",
        String::from_utf8_lossy(&built.stdout),
        String::from_utf8_lossy(&built.stderr)
    );
    out.join("driver")
}

/// What a child writes and says with a driver, and settings of it.
fn run(driver: &Path, settings: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut child = Command::new(env::current_exe().unwrap());
    child.arg("child").args(arguments).env("LD_LIBRARY_PATH", driver);
    child.envs(settings.iter().copied());
    child.output().unwrap()
}

fn told(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Opens a model as the arguments say, and writes what it answers; without a file to write to, says what computes.
fn child(arguments: &[String]) -> ExitCode {
    let word = |at: usize| arguments.get(at).map_or("", String::as_str);
    let device = DeviceSettings {
        choice: match word(1) {
            "cuda" => DeviceChoice::Cuda,
            _ => DeviceChoice::Auto,
        },
        memory: match word(2) {
            "mapped" => CudaMemory::Mapped,
            "device" => CudaMemory::Device,
            _ => CudaMemory::Auto,
        },
        kernels: match word(3) {
            "plain" => CudaKernels::Plain,
            _ => CudaKernels::Auto,
        },
    };
    let compute = Compute { threads: 1, device };
    match history(Path::new(word(0)), compute) {
        Ok((name, rows)) => {
            println!("{name}");
            if !word(4).is_empty() {
                let bytes: Vec<u8> = rows.iter().flatten().flat_map(|logit| logit.to_le_bytes()).collect();
                fs::write(word(4), bytes).unwrap();
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("refused: {error}");
            ExitCode::from(3)
        }
    }
}

fn told_error(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Logits behind several changes of what a model holds, and what computed them.
fn history(path: &Path, compute: Compute) -> Result<(String, Vec<Vec<f32>>), String> {
    let (shape, _) = Model::inspect(path, compute).map_err(|error| told_error(&error))?;
    let parts = u32::try_from(shape.layers.len()).unwrap();
    let plan = |resident: u32, kv: u32, kv_type| EnginePlan {
        resident: (0..resident).collect(),
        kv_capacity: Tokens::new(kv),
        prefill_chunk: Tokens::new(16),
        kv_type,
    };
    let options = ModelOptions {
        compute,
        ..ModelOptions::for_threads(1)
    };
    let mut model = Model::open(path, &plan(parts, 128, KvType::F16), &options).map_err(|error| told_error(&error))?;
    let vocabulary = model.vocabulary();
    let text = |len: u32, seed: u32| (0..len).map(|at| (at * 37 + seed) % vocabulary).collect::<Vec<u32>>();
    let mut rows = Vec::new();
    let mut step = |model: &mut Model, tokens: &[u32]| {
        let logits = model.forward(tokens, &mut || Flow::Continue);
        rows.push(logits.map_err(|error| told_error(&error))?.to_vec());
        Ok::<(), String>(())
    };
    let change = |model: &mut Model, plan: &EnginePlan| {
        let report = model.apply(plan).map_err(|error| told_error(&error))?;
        if report.freed + report.untouched < report.asked {
            return Err(format!("{} asked, {} freed", report.asked, report.freed));
        }
        Ok::<(), String>(())
    };
    step(&mut model, &text(37, 3))?;
    if env::var_os("SHORT").is_some() {
        change(&mut model, &plan(0, 64, KvType::Q8))?;
        step(&mut model, &text(1, 7))?;
        return Ok((model.backend_name(), rows));
    }
    step(&mut model, &text(1, 7))?;
    step(&mut model, &text(3, 9))?;
    // Streamed, in part and all of it.
    change(&mut model, &plan(parts / 2, 128, KvType::F16))?;
    step(&mut model, &text(1, 5))?;
    change(&mut model, &plan(0, 64, KvType::Q8))?;
    step(&mut model, &text(11, 5))?;
    step(&mut model, &text(1, 8))?;
    change(&mut model, &plan(parts, 512, KvType::Q4))?;
    step(&mut model, &text(40, 2))?;
    change(&mut model, &plan(parts, 512, KvType::F16))?;
    step(&mut model, &text(1, 6))?;
    model.reset();
    step(&mut model, &text(20, 1))?;
    model.keep(12);
    let left = model.position();
    step(&mut model, &text(22 - left, 2))?;
    let name = model.backend_name();
    Ok((name, rows))
}

/// The types of the matrices of each family's model.
const TYPES: [GgmlDType; 4] = [GgmlDType::Q8_0, GgmlDType::Q4K, GgmlDType::F32, GgmlDType::Q6K];

fn written(folder: &Path, number: usize, architecture: Architecture) -> PathBuf {
    let path = folder.join(format!("{number}.gguf"));
    Synthetic::tiny(architecture, TypeMix::All(TYPES[number % TYPES.len()]), 7)
        .write(&path)
        .unwrap();
    path
}

/// Compares what a child answers with what the CPU does here.
fn compare(driver: &Path, what: &str, path: &Path, settings: &[(&str, &str)], words: [&str; 3]) {
    let out = path.with_extension("logits");
    let output = run(
        driver,
        settings,
        &[
            path.to_str().unwrap(),
            words[0],
            words[1],
            words[2],
            out.to_str().unwrap(),
        ],
    );
    assert!(output.status.success(), "{what} {settings:?}: {}", told(&output));
    assert!(told(&output).contains("cuda ("), "{what}: {}", told(&output));
    let (_, expected) = history(path, 1.into()).unwrap();
    let bytes = fs::read(&out).unwrap();
    let got: Vec<f32> = bytes
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
        .collect();
    let mut first = 0;
    for (step, row) in expected.iter().enumerate() {
        let other = &got[first..first + row.len()];
        first += row.len();
        let (low, high) = row.iter().fold((f32::MAX, f32::MIN), |(low, high), logit| {
            (low.min(*logit), high.max(*logit))
        });
        let worst = row.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let part = worst / (high - low);
        println!("{what} {settings:?} step {step}: {part:.2e} of the spread");
        assert!(
            part <= SPREAD_MAX,
            "{what} {settings:?}, step {step}: {part} of the spread"
        );
        // The token that the CPU says is said, or one that is as likely.
        let best = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
        let said = best(other);
        assert!(
            high - row[said] <= 2.0 * SPREAD_MAX * (high - low),
            "{what} {settings:?}, step {step}"
        );
    }
    assert_eq!(first, got.len());
}

/// The most that logits differ, of the spread of a token's.
const SPREAD_MAX: f32 = 0.03;

fn models_answer_as_on_the_cpu_whenever_the_driver_executes() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    for (number, architecture) in Architecture::ALL.into_iter().enumerate() {
        let path = written(folder.path(), number, architecture);
        let order = ["eager", "late", "5"][number % 3];
        let settings = [
            ("FAKE_CUDA_ORDER", order),
            ("FAKE_CUDA_DEVICE", ["orin", "hopper"][number % 2]),
        ];
        compare(
            &driver,
            &format!("{architecture:?}"),
            &path,
            &settings,
            ["cuda", "auto", "auto"],
        );
    }
}

fn weights_on_the_device_and_plain_kernels_answer_the_same() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let path = written(folder.path(), 0, Architecture::Qwen35);
    for (device, memory, kernels) in [
        ("orin", "device", "plain"),
        ("hopper", "mapped", "auto"),
        ("blackwell", "auto", "plain"),
    ] {
        let settings = [("FAKE_CUDA_DEVICE", device), ("FAKE_CUDA_ORDER", "late")];
        compare(&driver, memory, &path, &settings, ["cuda", memory, kernels]);
    }
}

/// Folder of the driver, its settings, and the reason that is given.
type Case<'a> = (&'a Path, &'a [(&'a str, &'a str)], &'a str);

fn a_gpu_that_does_not_compute_is_refused_with_its_reason_or_left_for_the_cpu() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let path = written(folder.path(), 0, Architecture::Qwen3);
    let nowhere = folder.path().join("nowhere");
    let cases: [Case<'_>; 5] = [
        (&nowhere, &[], "libcuda is not installed"),
        (
            &driver,
            &[("FAKE_CUDA_DRIVER", "11040")],
            "the driver is for CUDA 11.4, at least 12.2 is needed",
        ),
        (
            &driver,
            &[("FAKE_CUDA_DEVICE", "turing")],
            "compute capability 7.5, at least 8.0 is needed",
        ),
        (
            &driver,
            &[("FAKE_CUDA_FAULTS", "cuMemHostRegister_v2@1=801!!")],
            "cuMemHostRegister_v2: CUDA_ERROR_NOT_SUPPORTED",
        ),
        (
            &driver,
            &[("FAKE_CUDA_FAULTS", "cuMemAddressReserve@1=801!!")],
            "cuMemAddressReserve: CUDA_ERROR_NOT_SUPPORTED",
        ),
    ];
    for (driver, settings, reason) in cases {
        let refused = run(driver, settings, &[path.to_str().unwrap(), "cuda"]);
        assert_eq!(refused.status.code(), Some(3), "{reason}: {}", told(&refused));
        assert!(told(&refused).contains(reason), "{reason}: {}", told(&refused));
        let otherwise = run(driver, settings, &[path.to_str().unwrap(), "auto"]);
        assert!(otherwise.status.success(), "{reason}: {}", told(&otherwise));
        assert!(told(&otherwise).starts_with("cpu ("), "{reason}: {}", told(&otherwise));
    }
}

/// What the driver has noted of a child, line by line.
fn noted(log: &Path) -> Vec<Value> {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Whether nothing was left when contexts went, and the driver has nothing to complain about.
fn is_clean(notes: &[Value]) -> bool {
    let of = |event: &str| notes.iter().filter(|note| note["event"] == event).collect::<Vec<_>>();
    let nothing = |left: &Value| {
        left.as_object()
            .is_some_and(|left| left.values().all(|count| count == 0))
    };
    of("context").iter().all(|note| nothing(&note["left"]))
        && of("finding").is_empty()
        && of("exit").len() == 1
        && of("exit").iter().all(|note| note["contexts_left"] == 0)
}

/// Each function fails at its first, second, middle and last call, once or from then on.
fn a_call_that_fails_once_or_for_good_is_an_error_and_leaves_nothing() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let path = written(folder.path(), 0, Architecture::Qwen3);
    let log = folder.path().join("log");
    let case = |fault: &str| {
        fs::remove_file(&log).ok();
        let settings = [
            ("FAKE_CUDA_FAULTS", fault),
            ("FAKE_CUDA_LOG", log.to_str().unwrap()),
            ("SHORT", "1"),
        ];
        (run(&driver, &settings, &[path.to_str().unwrap(), "cuda"]), noted(&log))
    };
    let (sound, notes) = case("");
    assert!(sound.status.success() && is_clean(&notes), "{} {notes:?}", told(&sound));
    let exit = notes.iter().find(|note| note["event"] == "exit").unwrap();
    let calls = exit["calls"].as_object().unwrap();
    assert!(calls.len() > 30, "{calls:?}");
    let (mut cases, mut wrong) = (0, Vec::new());
    for (name, count) in calls {
        let count = count.as_u64().unwrap();
        let mut at = vec![1, 2, count / 2, count];
        at.retain(|at| (1..=count).contains(at));
        at.dedup();
        for (at, code) in at.iter().flat_map(|at| [(at, "2"), (at, "719!")]) {
            let fault = format!("{name}@{at}={code}");
            let (output, notes) = case(&fault);
            let text = told(&output);
            cases += 1;
            // What fails while memory is given back is nobody's error.
            let ended = matches!(output.status.code(), Some(0 | 3)) && !text.contains("panicked");
            let clean = code == "719!" || gives_back(name) || is_clean(&notes);
            if !ended || !clean {
                wrong.push(format!("{fault}: {:?} {text} {notes:?}", output.status));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {cases}:\n{}", wrong.len(), wrong.join("\n"));
}

/// A call that fails then has given nothing back.
fn gives_back(name: &str) -> bool {
    [
        "Free",
        "Destroy",
        "Release",
        "Unregister",
        "Unmap",
        "Unload",
        "SetCurrent",
    ]
    .iter()
    .any(|word| name.contains(word))
}
