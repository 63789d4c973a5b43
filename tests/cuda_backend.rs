//! Models on the CUDA backend over an imitated driver, compared with the CPU.
//!
//! The driver (`tests/cuda/driver`) is a library opened once per process, with settings in the environment. Each case
//! is therefore a separate process: this program called as `child`.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "test helpers may fail loudly, and figures are shown with a failure"
)]

use cotenant_dev::weights;

use std::{
    collections::BTreeMap,
    env, fs, mem,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Output},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use crate::weights::Weights as _;
use cotenant::{
    engine::{
        Asked, Flow, Model, ModelOptions,
        backend::cuda,
        gguf::{GgmlDType, SUPPORTED},
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
    },
    policy::{
        compute::{Compute, CudaKernels, CudaMemory, DeviceChoice, DeviceSettings},
        kv_type::KvType,
        pressure::GpuUse,
        residency::EnginePlan,
    },
    probe::{ProbeRoot, Sampler},
    units::{Bytes, Timestamp, Tokens},
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
    match arguments.next().as_deref() {
        Some("child") => return child(&arguments.collect::<Vec<_>>()),
        Some("models") => return write_models(Path::new(&arguments.next().unwrap())),
        _ => {}
    }
    let tests: [(&str, fn()); 24] = [
        named!(a_call_that_fails_once_or_permanently_is_an_error_and_leaves_nothing),
        named!(a_call_that_fails_in_each_kind_of_memory_leaves_nothing),
        named!(a_leak_and_a_panic_are_found),
        named!(an_allocation_that_fails_is_an_error_and_leaves_nothing),
        named!(a_rehearsal_on_the_imitated_driver_finds_equal_bits_and_a_planted_one_that_is_not),
        named!(launches_are_within_memory_and_free_of_races),
        named!(tokens_are_launched_in_segments_that_answer_the_same_and_outlive_a_shed),
        named!(what_cannot_be_captured_is_launched_as_it_is),
        named!(memory_counts_as_freed_only_when_the_driver_confirms_it),
        named!(tensor_cores_that_compute_something_else_are_not_used),
        named!(
            too_little_memory_is_fewer_layers_or_a_refusal_when_opening_and_an_error_when_growing
        ),
        named!(true_shapes_differ_from_the_cpu_by_less_than_half_of_what_it_does_from_llama_cpp),
        named!(types_of_all_weights_answer_as_on_the_cpu),
        named!(weights_are_mapped_where_an_integrated_device_reads_them_as_fast),
        named!(a_device_is_measured_once_and_again_when_something_has_changed),
        named!(a_long_context_takes_no_more_addresses_than_it_is_limited_to),
        named!(a_token_takes_few_launches_one_wait_and_no_allocation),
        named!(the_book_has_what_the_driver_has),
        named!(tiles_of_a_head_are_one_launch_with_the_words_of_the_cpu),
        named!(what_a_shed_gives_back_is_seen_in_the_page_pool_of_the_board_and_beside_it),
        named!(weights_lie_where_an_integrated_device_reads_them_faster),
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

/// Builds the imitated driver if needed.
fn driver() -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda");
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/build");
    let built = Command::new(build)
        .arg(&out)
        .arg("driver")
        .output()
        .unwrap();
    assert!(
        built.status.success(),
        "g++ is needed:\n{}{}",
        String::from_utf8_lossy(&built.stdout),
        String::from_utf8_lossy(&built.stderr)
    );
    out.join("driver")
}

/// Returns the folder of another driver built next to it.
fn other_driver(driver: &Path, name: &str) -> PathBuf {
    driver.with_file_name(name)
}

/// Returns the output of a child with a driver and its settings.
fn run(driver: &Path, settings: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut child = Command::new(env::current_exe().unwrap());
    child
        .arg("child")
        .args(arguments)
        .env("LD_LIBRARY_PATH", driver);
    child.envs(settings.iter().copied());
    child.output().unwrap()
}

fn reported(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Opens a model according to the arguments, and writes its answers; without an output file, prints the compute device.
fn child(arguments: &[String]) -> ExitCode {
    let word = |at: usize| arguments.get(at).map_or("", String::as_str);
    let device = DeviceSettings {
        choice: match word(1) {
            "cuda" => DeviceChoice::Cuda,
            "cpu" => DeviceChoice::Cpu,
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
    if let Some(folder) = env::var_os("PROBES") {
        cuda::keep_probe_in(Path::new(&folder));
    }
    let mut answer = history(Path::new(word(0)), compute);
    if answer.is_err() && env::var_os("AGAIN").is_some() {
        answer = history(Path::new(word(0)), compute);
    }
    match answer {
        Ok((name, rows)) => {
            println!("{name}");
            if !word(4).is_empty() {
                let bytes: Vec<u8> = rows
                    .iter()
                    .flatten()
                    .flat_map(|logit| logit.to_le_bytes())
                    .collect();
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

fn reported_error(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Returns the most likely token after `token`: as found by the device, or, with `LOGITS` in the environment, from all
/// logits.
fn next(model: &mut Model, token: u32) -> Result<u32, String> {
    let first = |logits: &[f32]| {
        let places = 0..u32::try_from(logits.len()).unwrap();
        places
            .rev()
            .max_by(|a, b| logits[*a as usize].total_cmp(&logits[*b as usize]))
            .unwrap()
    };
    if env::var_os("LOGITS").is_some() {
        let logits = model.forward(&[token], &mut || Flow::Continue);
        return logits
            .map(|logits| first(&logits))
            .map_err(|error| reported_error(&error));
    }
    let found = model.forward_greedy(&[token], &mut || Flow::Continue);
    found.map_err(|error| reported_error(&error))
}

/// Returns logits after several changes of a model's memory, and the compute device.
fn history(path: &Path, compute: Compute) -> Result<(String, Vec<Vec<f32>>), String> {
    let (shape, _) = Model::inspect(path, compute).map_err(|error| reported_error(&error))?;
    let parts = u32::try_from(shape.layers.len()).unwrap();
    let plan = |resident: u32, kv: u32, kv_type| EnginePlan {
        resident: (0..resident).collect(),
        kv_capacity: Tokens::new(kv),
        prefill_chunk: Tokens::new(16),
        kv_type,
    };
    let number = |name: &str| env::var(name).ok().map(|text| text.parse::<u32>().unwrap());
    let options = ModelOptions {
        compute,
        context: number("CONTEXT").map(Tokens::new),
        ..ModelOptions::for_threads(1)
    };
    let mut model = Model::open(path, &plan(parts, 128, KvType::F16), &options)
        .map_err(|error| reported_error(&error))?;
    if let Some(refused) = model.refused() {
        println!("fewer layers: {refused}");
    }
    let vocabulary = model.vocabulary();
    let text = |len: u32, seed: u32| {
        (0..len)
            .map(|at| (at * 37 + seed) % vocabulary)
            .collect::<Vec<u32>>()
    };
    let mut rows = Vec::new();
    let mut step = |model: &mut Model, tokens: &[u32]| {
        let logits = model.forward(tokens, &mut || Flow::Continue);
        rows.push(logits.map_err(|error| reported_error(&error))?.to_vec());
        Ok::<(), String>(())
    };
    let change = |model: &mut Model, plan: &EnginePlan| {
        let report = model.apply(plan).map_err(|error| reported_error(&error))?;
        // Host pages are touched, though possibly not all of them.
        if report.freed + report.untouched < report.asked
            && model.backend_name().starts_with("cuda")
        {
            return Err(format!("{} asked, {} freed", report.asked, report.freed));
        }
        Ok::<(), String>(())
    };
    if let Some(tokens) = number("TOKENS") {
        let mut said = vec![3];
        for _ in 0..=tokens {
            let last = *said.last().unwrap();
            said.push(next(&mut model, last)?);
        }
        println!("said {said:?}");
        return Ok((model.backend_name(), rows));
    }
    if let Some(regrown) = number("SEGMENTS") {
        // Tokens with all layers, with half, with none, with all again, and with another cache; or with all layers
        // released and reread between two tokens.
        let plans = [
            (parts, KvType::F16),
            (parts / 2, KvType::F16),
            (0, KvType::F16),
            (parts, KvType::F16),
            (parts, KvType::Q8),
        ];
        step(&mut model, &text(21, 3))?;
        for (number, (resident, kind)) in
            (0..)
                .zip(plans)
                .take(if regrown > 0 { 1 } else { plans.len() })
        {
            change(&mut model, &plan(resident, 128, kind))?;
            for token in 0..5 {
                step(&mut model, &text(1, 10 * number + token))?;
            }
        }
        if regrown > 0 {
            for resident in [0, parts].repeat(regrown as usize - 1) {
                change(&mut model, &plan(resident, 128, KvType::F16))?;
            }
            step(&mut model, &text(1, 50))?;
        }
        return Ok((model.backend_name(), rows));
    }
    if let Ok(resident) = env::var("BOOK") {
        // Its final memory is kept, so that the driver counts it.
        step(&mut model, &text(5, 3))?;
        let resident = parts * resident.parse::<u32>().unwrap() / 4;
        change(&mut model, &plan(resident, 700, KvType::Q8))?;
        step(&mut model, &text(1, 7))?;
        if env::var_os("CONVERTED").is_some() {
            for kind in [KvType::F16, KvType::Q4] {
                change(&mut model, &plan(resident, 700, kind))?;
                step(&mut model, &text(1, 7))?;
            }
        }
        let book = model.breakdown();
        println!("book {}", (book.total - book.header).get());
        mem::forget(model);
        return Ok((String::new(), rows));
    }
    if let Some(board) = env::var_os("FAKE_CUDA_BOARD") {
        let mut sampler = Sampler::open(&ProbeRoot::at(Path::new(&board)), None)
            .map_err(|error| error.to_string())?;
        for resident in [parts, 0, parts] {
            change(&mut model, &plan(resident, 128, KvType::F16))?;
            step(&mut model, &text(2, 3))?;
            let sample = sampler
                .read()
                .map_err(|error| error.to_string())?
                .sample(Timestamp::START);
            let pool = sample.gpu.nvmap_pool.unwrap_or_default();
            let gpu = sample.gpu.gpu_used.map_or(Bytes::ZERO, GpuUse::bytes);
            let figures = [sample.available(), pool, gpu, model.breakdown().total].map(Bytes::get);
            println!("board {}", figures.map(|bytes| bytes.to_string()).join(" "));
        }
        return Ok((model.backend_name(), rows));
    }
    if let Some(capacity) = number("GROW") {
        step(&mut model, &text(9, 3))?;
        if let Err(error) = model.apply(&plan(parts, capacity, KvType::F16)) {
            println!("not grown: {}", reported_error(&error));
        }
        step(&mut model, &text(1, 7))?;
        change(&mut model, &plan(parts, 128, KvType::F16))?;
        step(&mut model, &text(3, 5))?;
        return Ok((model.backend_name(), rows));
    }
    if env::var_os("SHORT").is_some() {
        step(&mut model, &text(9, 3))?;
        change(&mut model, &plan(0, 64, KvType::Q8))?;
        step(&mut model, &text(1, 7))?;
        let name = model.backend_name();
        match env::var("PLANTED").as_deref() {
            Ok("leak") => mem::forget(model),
            Ok(planted) => assert_ne!(planted, "panic"),
            Err(_) => {}
        }
        return Ok((name, rows));
    }
    step(&mut model, &text(21, 3))?;
    step(&mut model, &text(1, 7))?;
    step(&mut model, &text(3, 9))?;
    // Streamed, partly and fully.
    change(&mut model, &plan(parts / 2, 128, KvType::F16))?;
    step(&mut model, &text(1, 5))?;
    change(&mut model, &plan(0, 64, KvType::Q8))?;
    step(&mut model, &text(11, 5))?;
    step(&mut model, &text(1, 8))?;
    change(&mut model, &plan(parts, 512, KvType::Q4))?;
    // Into a second block of the cache.
    step(&mut model, &text(28, 2))?;
    change(&mut model, &plan(parts, 512, KvType::F16))?;
    step(&mut model, &text(1, 6))?;
    model.reset();
    step(&mut model, &text(14, 1))?;
    model.keep(12);
    let left = model.position();
    step(&mut model, &text(16 - left, 2))?;
    // Two alternating conversations: each continues at its own position.
    change(&mut model, &plan(parts, 4096, KvType::F16))?;
    model.reset();
    let (mut talks, mut held) = ([text(40, 4), text(40, 5)], Vec::new());
    for turn in 0..3u32 {
        for talk in &mut talks {
            let asked = Asked {
                client: None,
                prompt: talk,
                request: 0,
            };
            let kept = model.select(&held, asked).kept as usize;
            let expected = if turn == 0 { 0 } else { talk.len() - 3 };
            if kept != expected {
                return Err(format!("{kept} of {expected} tokens were kept"));
            }
            step(&mut model, &talk[kept..])?;
            held.clone_from(talk);
            talk.extend(text(3, turn + 11));
        }
    }
    let name = model.backend_name();
    Ok((name, rows))
}

/// Types of the matrices of each family's model.
const TYPES: [GgmlDType; 4] = [
    GgmlDType::Q8_0,
    GgmlDType::Q4K,
    GgmlDType::F32,
    GgmlDType::Q6K,
];

fn written(folder: &Path, number: usize, architecture: Architecture) -> PathBuf {
    let path = folder.join(format!("{number}.gguf"));
    Synthetic::tiny(architecture, TypeMix::All(TYPES[number % TYPES.len()]), 7)
        .write(&path)
        .unwrap();
    path
}

/// Families not supported on a GPU, with the reason.
const WITHOUT_KERNELS: [(Architecture, &str); 14] = [
    (
        Architecture::Exaone4,
        "its layers have no preceding norm, which no kernel supports",
    ),
    (
        Architecture::Gemma2,
        "its attention scores are capped, which no kernel supports",
    ),
    (
        Architecture::Gemma4,
        "its values are normalised, which no kernel supports",
    ),
    (
        Architecture::GptOss,
        "it is a mixture of experts, which no kernel supports",
    ),
    (
        Architecture::GraniteHybrid,
        "it has selective scans (Mamba-2), which no kernel supports",
    ),
    (
        Architecture::Lfm2,
        "it has short convolutions, which no kernel supports",
    ),
    (
        Architecture::Lfm2Moe,
        "it is a mixture of experts, which no kernel supports",
    ),
    (
        Architecture::NemotronH,
        "it has selective scans (Mamba-2), which no kernel supports",
    ),
    (
        Architecture::NemotronHMoe,
        "it is a mixture of experts, which no kernel supports",
    ),
    (
        Architecture::Olmo2,
        "its layers have no preceding norm, which no kernel supports",
    ),
    (
        Architecture::Qwen3Moe,
        "it is a mixture of experts, which no kernel supports",
    ),
    (
        Architecture::Qwen35Moe,
        "it is a mixture of experts, which no kernel supports",
    ),
    (
        Architecture::Qwen3VlMoe,
        "it is a mixture of experts, which no kernel supports",
    ),
    (
        Architecture::StableLm,
        "its norms subtract the mean, which no kernel supports",
    ),
];

/// Returns the other families, numbered.
fn families() -> impl Iterator<Item = (usize, Architecture)> {
    let all = Architecture::ALL.into_iter();
    all.filter(|family| WITHOUT_KERNELS.iter().all(|(other, _)| other != family))
        .enumerate()
}

/// Writes a model of each family, and one of each type of weights, for `tests/cuda/gpu`.
fn write_models(folder: &Path) -> ExitCode {
    let families = families();
    let families =
        families.map(|(number, architecture)| (architecture, TYPES[number % TYPES.len()]));
    let types = SUPPORTED
        .into_iter()
        .map(|dtype| (Architecture::Qwen3, dtype));
    for (architecture, dtype) in families
        .chain(types)
        .chain([(Architecture::Qwen35, GgmlDType::Q8_0)])
    {
        let path = folder.join(format!("{architecture:?}-{dtype:?}.gguf"));
        Synthetic::tiny(architecture, TypeMix::All(dtype), 7)
            .write(&path)
            .unwrap();
    }
    ExitCode::SUCCESS
}

/// Returns the output of a child, and its logits.
fn answered(
    driver: &Path,
    what: &str,
    path: &Path,
    settings: &[(&str, &str)],
    words: [&str; 3],
) -> (String, Vec<f32>) {
    let out = path.with_extension(words[0]);
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
    assert!(
        output.status.success(),
        "{what} {words:?} {settings:?}: {}",
        reported(&output)
    );
    let bytes = fs::read(&out).unwrap();
    let logits = bytes
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
    (reported(&output), logits.collect())
}

/// Compares a child's answers with those on the CPU.
fn compare(driver: &Path, what: &str, path: &Path, settings: &[(&str, &str)], words: [&str; 3]) {
    let ((name, got), (_, expected)) = thread::scope(|scope| {
        let on_cpu =
            scope.spawn(|| answered(driver, what, path, settings, ["cpu", "auto", "auto"]));
        (
            answered(driver, what, path, settings, words),
            on_cpu.join().unwrap(),
        )
    });
    assert!(name.contains("cuda ("), "{what}: {name}");
    assert!(
        got.len() == expected.len()
            && expected.len() >= 2 * VOCABULARY
            && expected.len().is_multiple_of(VOCABULARY)
    );
    let mut worst_of_all: f32 = 0.0;
    for (step, (row, other)) in expected
        .chunks(VOCABULARY)
        .zip(got.chunks(VOCABULARY))
        .enumerate()
    {
        let (low, high) = row.iter().fold((f32::MAX, f32::MIN), |(low, high), logit| {
            (low.min(*logit), high.max(*logit))
        });
        let worst = row
            .iter()
            .zip(other)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        let part = worst / (high - low);
        assert!(
            row.iter().chain(other).all(|logit| logit.is_finite()) && high > low,
            "{what} {settings:?}, step {step}"
        );
        worst_of_all = worst_of_all.max(part);
        assert!(
            part <= SPREAD_MAX,
            "{what} {settings:?}, step {step}: {part} of the spread"
        );
        // The token must be the CPU's, or an equally likely one.
        let best = |row: &[f32]| {
            (0..row.len())
                .max_by(|a, b| row[*a].total_cmp(&row[*b]))
                .unwrap()
        };
        let said = best(other);
        assert!(
            high - row[said] <= 2.0 * SPREAD_MAX * (high - low),
            "{what} {settings:?}, step {step}"
        );
    }
    println!("{what} {words:?} {settings:?}: at most {worst_of_all:.2e} of the spread");
}

/// Tokens of the models' vocabulary: `Synthetic::tiny`.
const VOCABULARY: usize = 320;

/// Largest difference of logits, relative to the spread of a token's logits. Measured, identical on every machine:
/// 0.0166 (`Qwen3Vl`), where an activation halfway between two integers is rounded to the other one.
const SPREAD_MAX: f32 = 0.02;

fn models_answer_as_on_the_cpu_whenever_the_driver_executes() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    for (number, architecture) in families() {
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

fn types_of_all_weights_answer_as_on_the_cpu() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    for (number, dtype) in SUPPORTED.into_iter().enumerate() {
        let path = folder.path().join(format!("{dtype:?}.gguf"));
        Synthetic::tiny(Architecture::Qwen3, TypeMix::All(dtype), 7)
            .write(&path)
            .unwrap();
        let settings = [
            ("FAKE_CUDA_DEVICE", ["hopper", "orin"][number % 2]),
            ("SHORT", "1"),
        ];
        compare(
            &driver,
            &format!("{dtype:?}"),
            &path,
            &settings,
            ["cuda", ["device", "mapped"][number % 2], "auto"],
        );
    }
}

/// Several layers of real shapes with a smaller vocabulary: the largest difference of a logit, in standard deviations
/// of all logits, compared with the largest between the CPU and llama.cpp for the whole model ("Logits compared" in
/// `src/dev/notebook.md`).
fn true_shapes_differ_from_the_cpu_by_less_than_half_of_what_it_does_from_llama_cpp() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let vocabulary = 2048;
    for (name, model, of_llama_cpp) in [
        (
            "Qwen3-0.6B",
            Synthetic {
                layers: 2,
                vocabulary,
                ..Synthetic::qwen3_0_6b(TypeMix::Q4KM, 1)
            },
            0.163,
        ),
        (
            "Qwen3.5-0.8B",
            Synthetic {
                layers: 4,
                vocabulary,
                ..Synthetic::qwen35_0_8b(TypeMix::Q4KM, 1)
            },
            0.812,
        ),
    ] {
        let path = folder.path().join("model.gguf");
        model.write(&path).unwrap();
        let on = |device| {
            answered(
                &driver,
                name,
                &path,
                &[("SHORT", "1")],
                [device, "mapped", "auto"],
            )
            .1
        };
        let (on_gpu, on_cpu) = thread::scope(|scope| {
            let on_cpu = scope.spawn(|| on("cpu"));
            (on("cuda"), on_cpu.join().unwrap())
        });
        assert_eq!(
            (on_cpu.len(), on_gpu.len()),
            (2 * vocabulary as usize, 2 * vocabulary as usize)
        );
        for (step, row) in on_cpu.chunks(vocabulary as usize).enumerate() {
            let other = &on_gpu[step * vocabulary as usize..][..row.len()];
            let count = f64::from(vocabulary);
            let mean = row.iter().copied().map(f64::from).sum::<f64>() / count;
            let deviation = (row
                .iter()
                .map(|logit| (f64::from(*logit) - mean).powi(2))
                .sum::<f64>()
                / count)
                .sqrt();
            let worst = row
                .iter()
                .zip(other)
                .map(|(a, b)| f64::from((a - b).abs()))
                .fold(0.0, f64::max)
                / deviation;
            println!(
                "{name} step {step}: at most {worst:.1e} standard deviations, of llama.cpp {of_llama_cpp}"
            );
            assert!(worst <= of_llama_cpp / 2.0, "{name} step {step}: {worst}");
        }
    }
}

/// Returns the launches of a child in segments: launches of graphs, and the number captured.
fn segments_of(
    driver: &Path,
    path: &Path,
    settings: &[(&str, &str)],
    memory: &str,
) -> (u64, u64, String) {
    let log = path.with_extension("log");
    fs::remove_file(&log).ok();
    let settings = [settings, &[("FAKE_CUDA_LOG", log.to_str().unwrap())]].concat();
    let (name, _) = answered(
        driver,
        "segments",
        path,
        &settings,
        ["cuda", memory, "auto"],
    );
    let notes = noted(&log);
    assert!(is_clean(&notes), "{settings:?}: {notes:?}");
    let count = |name: &str| calls(&notes).get(name).and_then(Value::as_u64).unwrap_or(0);
    (
        count("cuGraphLaunch"),
        count("cuGraphInstantiateWithFlags"),
        name,
    )
}

/// Tokens of models with both kinds of layers, whose segments are captured, while layers are shed, streamed and reread.
fn tokens_are_launched_in_segments_that_answer_the_same_and_outlive_a_shed() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let families = [
        (Architecture::Qwen35, "late"),
        (Architecture::Gemma3, "eager"),
        (Architecture::Qwen3, "5"),
    ];
    for (number, (architecture, order)) in families.into_iter().enumerate() {
        let path = written(folder.path(), number, architecture);
        let (device, memory) = [("hopper", "device"), ("orin", "mapped")][number % 2];
        let settings = |regrown| {
            [
                ("FAKE_CUDA_ORDER", order),
                ("FAKE_CUDA_DEVICE", device),
                ("SEGMENTS", regrown),
            ]
        };
        compare(
            &driver,
            &format!("{architecture:?} in segments"),
            &path,
            &settings("0"),
            ["cuda", memory, "auto"],
        );
        let segments = |regrown| segments_of(&driver, &path, &settings(regrown), memory);
        let ((few, captured, _), (more, as_many, _)) = (segments("1"), segments("3"));
        println!("{architecture:?}: {few} graphs launched, of {captured} captured");
        assert!(few >= 4, "{architecture:?}: {few} graphs launched");
        assert_eq!(
            (few, captured),
            (more, as_many),
            "{architecture:?}: a part that was read again is found by the table"
        );
    }
}

/// Each call needed by a graph fails once, in the trial and when a token is captured; memory for graphs is short; a
/// graph computes something else.
fn what_cannot_be_captured_is_launched_as_it_is() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let path = written(folder.path(), 0, Architecture::Qwen3);
    let settings = [
        ("FAKE_CUDA_DEVICE", "hopper"),
        ("SEGMENTS", "2"),
        ("AGAIN", "1"),
        ("FAKE_CUDA_FAULTS", ""),
        ("FAKE_CUDA_GRAPHS", ""),
    ];
    let with = |name: &str, value: &str| {
        let settings = settings.map(|(key, sound)| (key, if key == name { value } else { sound }));
        let out = answered(&driver, value, &path, &settings, ["cuda", "device", "auto"]).1;
        (out, segments_of(&driver, &path, &settings, "device"))
    };
    let (sound, (launched, captured, name)) = with("", "");
    assert!(launched > 0 && !name.contains("without graphs"), "{name}");
    for call in [
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cuGraphUpload",
    ] {
        for (at, in_trial) in [(2, true), (captured, false)] {
            let (logits, (_, _, name)) = with("FAKE_CUDA_FAULTS", &format!("{call}@{at}=2"));
            assert!(logits == sound, "{call}@{at}");
            assert_eq!(
                name.contains("without graphs"),
                in_trial,
                "{call}@{at}: {name}"
            );
        }
    }
    // A failed launch may have started: the model is lost, and the next one uses no graphs.
    for at in [1, launched] {
        let (logits, (_, _, name)) = with("FAKE_CUDA_FAULTS", &format!("cuGraphLaunch@{at}=2"));
        assert!(
            logits == sound && name.contains("without graphs"),
            "{at}: {name}"
        );
    }
    let (logits, (_, _, name)) = with("FAKE_CUDA_GRAPHS", "cut");
    assert!(logits == sound && name.contains("without graphs"), "{name}");
}

/// Grids, sizes of shared memory and parameters from the backend, with every access of the kernels checked.
fn launches_are_within_memory_and_free_of_races() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let log = folder.path().join("log");
    for (number, architecture) in [Architecture::Qwen35, Architecture::Gemma3]
        .into_iter()
        .enumerate()
    {
        let path = written(folder.path(), number, architecture);
        fs::remove_file(&log).ok();
        let settings = [("FAKE_CUDA_LOG", log.to_str().unwrap()), ("SHORT", "1")];
        let watched = other_driver(&driver, "driver-watched");
        let output = run(
            &watched,
            &settings,
            &[path.to_str().unwrap(), "cuda", "device"],
        );
        assert!(
            output.status.success(),
            "{architecture:?}: {}",
            reported(&output)
        );
        let notes = noted(&log);
        assert!(is_clean(&notes), "{architecture:?}: {notes:?}");
        let launches = calls(&notes)["cuLaunchKernel"].as_u64().unwrap();
        assert!(launches > 60, "{launches} launches");
    }
}

/// One bit of the first tile of a prompt's first product is wrong: byte 88 of `Products` in `parameters.rs` has its
/// address.
fn tensor_cores_that_compute_something_else_are_not_used() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let path = written(folder.path(), 0, Architecture::Qwen3);
    for (kernels, has) in [
        ("product_tiles@88", true),
        ("product_8@88", true),
        ("embed@24", false),
    ] {
        let settings = [("FAKE_CUDA_WRONG", kernels), ("TOKENS", "1")];
        let output = run(
            &driver,
            &settings,
            &[path.to_str().unwrap(), "cuda", "mapped"],
        );
        assert!(output.status.success(), "{}", reported(&output));
        assert_eq!(
            reported(&output).contains(", without tensor cores)"),
            has,
            "{kernels}: {}",
            reported(&output)
        );
    }
    let settings = [("FAKE_CUDA_WRONG", "product_tiles@88")];
    compare(
        &driver,
        "faulty tensor cores",
        &path,
        &settings,
        ["cuda", "mapped", "auto"],
    );
}

fn too_little_memory_is_fewer_layers_or_a_refusal_when_opening_and_an_error_when_growing() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let (path, log) = (
        written(folder.path(), 0, Architecture::Qwen3),
        folder.path().join("log"),
    );
    let with = |limit: &[(&str, &str)], name: &str| {
        fs::remove_file(&log).ok();
        let mut settings = vec![
            ("FAKE_CUDA_DEVICE", "hopper"),
            ("FAKE_CUDA_LOG", log.to_str().unwrap()),
        ];
        settings.extend([("GROW", "3000")]);
        settings.extend(limit);
        let out = folder.path().join(name);
        let output = run(
            &driver,
            &settings,
            &[
                path.to_str().unwrap(),
                "cuda",
                "device",
                "auto",
                out.to_str().unwrap(),
            ],
        );
        (output, fs::read(&out).unwrap_or_default(), noted(&log))
    };
    let (output, expected, notes) = with(&[], "all");
    assert!(
        output.status.success() && !reported(&output).contains("not grown"),
        "{}",
        reported(&output)
    );
    let peak = notes.iter().find(|note| note["event"] == "exit").unwrap()["peak_bytes"]
        .as_u64()
        .unwrap();
    // The last granule of the cache does not fit, or not even one granule.
    let (less, least) = ((peak - 1).to_string(), (2 << 20).to_string());
    let (output, logits, notes) = with(&[("FAKE_CUDA_MEMORY", &less)], "less");
    assert!(
        output.status.success() && is_clean(&notes),
        "{}",
        reported(&output)
    );
    assert!(
        reported(&output).contains("not grown: cannot map"),
        "{}",
        reported(&output)
    );
    assert!(
        reported(&output).contains("CUDA_ERROR_OUT_OF_MEMORY"),
        "{}",
        reported(&output)
    );
    assert!(
        !logits.is_empty() && logits == expected,
        "the engine computes on as before"
    );
    // The last part does not fit: the model is opened with fewer resident parts, and answers the same.
    let said = |output: &Output| {
        reported(output)
            .lines()
            .find(|line| line.starts_with("said "))
            .map(str::to_owned)
    };
    let (output, _, notes) = with(&[("TOKENS", "8")], "none");
    let peak = notes.iter().find(|note| note["event"] == "exit").unwrap()["peak_bytes"].to_string();
    let (fewer, _, notes) = with(
        &[("TOKENS", "8"), ("FAKE_CUDA_MEMORY", &less_than(&peak, 1))],
        "none",
    );
    assert!(
        fewer.status.success() && is_clean(&notes),
        "{}",
        reported(&fewer)
    );
    assert!(
        reported(&fewer).contains("fewer layers: cannot map"),
        "{}",
        reported(&fewer)
    );
    assert!(
        said(&fewer).is_some() && said(&fewer) == said(&output),
        "{}",
        reported(&fewer)
    );
    // A model that does not fit beside the context's memory, and a context that does not fit.
    for (name, limit, reason) in [
        (
            "FAKE_CUDA_MEMORY",
            less_than(&least, 1),
            "the GPU failed its trial: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY",
        ),
        (
            "FAKE_CUDA_LARGEST",
            "4096".to_owned(),
            "the GPU failed its trial: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY",
        ),
        (
            "FAKE_CUDA_MEMORY",
            ((2 << 20) + (600 << 10)).to_string(),
            "cannot map",
        ),
    ] {
        let (output, _, notes) = with(&[(name, &limit)], "none");
        assert_eq!(
            output.status.code(),
            Some(3),
            "{name}={limit}: {}",
            reported(&output)
        );
        assert!(
            reported(&output).contains(reason),
            "{name}={limit}: {}",
            reported(&output)
        );
        assert!(is_clean(&notes), "{name}={limit}: {notes:?}");
    }
}

fn less_than(number: &str, by: u64) -> String {
    (number.parse::<u64>().unwrap() - by).to_string()
}

/// Each releasing call fails once: the plan then reports less freed memory than requested.
fn memory_counts_as_freed_only_when_the_driver_confirms_it() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let (path, log) = (
        written(folder.path(), 0, Architecture::Qwen3),
        folder.path().join("log"),
    );
    for (memory, device, history, name) in [
        ("device", "hopper", ("SHORT", "1"), "cuMemFree_v2"),
        ("device", "hopper", ("GROW", "3000"), "cuMemUnmap"),
        ("device", "hopper", ("GROW", "3000"), "cuMemRelease"),
        ("mapped", "orin", ("SHORT", "1"), "cuMemHostUnregister"),
    ] {
        let with = |fault: &str| {
            fs::remove_file(&log).ok();
            let log = ("FAKE_CUDA_LOG", log.to_str().unwrap());
            let settings = [
                ("FAKE_CUDA_FAULTS", fault),
                ("FAKE_CUDA_DEVICE", device),
                history,
                log,
            ];
            reported(&run(
                &driver,
                &settings,
                &[path.to_str().unwrap(), "cuda", memory],
            ))
        };
        let sound = with("");
        assert!(sound.contains("cuda ("), "{sound}");
        let count = calls(&noted(&log))[name].as_u64().unwrap();
        // Several parts are released in succession: every second call suffices.
        let short = (1..=count)
            .step_by(if count > 40 { 2 } else { 1 })
            .filter(|at| {
                let text = with(&format!("{name}@{at}=1"));
                let refused = text
                    .lines()
                    .find_map(|line| line.strip_prefix("refused: ")?.strip_suffix(" freed"));
                refused.is_some_and(|refused| refused.contains(" asked, "))
            });
        let short = short.count();
        println!("{name}: of {count} calls {short} are a plan's");
        // Four layers and the head; granules of the cache.
        assert!(
            short > 1,
            "{name} has failed {count} times, {short} of them with a plan's notice"
        );
    }
}

/// The script for machines with a GPU, on the imitated driver.
fn a_rehearsal_on_the_imitated_driver_finds_equal_bits_and_a_planted_one_that_is_not() {
    let driver = driver();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/gpu");
    let rehearsed = |wrong: &str| {
        let mut script = Command::new(&script);
        script
            .arg("--few")
            .arg("--program")
            .arg(env::current_exe().unwrap());
        script
            .arg("--library")
            .arg(&driver)
            .arg("--out")
            .arg(driver.parent().unwrap());
        let output = script
            .env("FAKE_CUDA_DEVICE", "hopper")
            .env("FAKE_CUDA_WRONG", wrong)
            .output()
            .unwrap();
        let report: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("{}", reported(&output)));
        (output.status.success(), report)
    };
    let (passed, report) = rehearsed("");
    assert!(passed && report["ok"] == true, "{report:#}");
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 4, "{report:#}");
    assert!(
        cases.iter().all(|case| case["bits_of_shim"] == true),
        "{report:#}"
    );
    // Address of a product's first result.
    let (passed, report) = rehearsed("product_narrow@88");
    assert!(!passed && report["ok"] == false, "{report:#}");
    assert!(
        report["cases"]
            .as_array()
            .unwrap()
            .iter()
            .all(|case| case["bits_of_shim"] == false),
        "{report:#}"
    );
}

/// Folder of the driver, its settings, and the expected reason.
type Case<'a> = (&'a Path, &'a [(&'a str, &'a str)], &'a str);

fn a_gpu_that_does_not_compute_is_refused_with_its_reason_or_left_for_the_cpu() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let path = written(folder.path(), 0, Architecture::Qwen3);
    let nowhere = folder.path().join("nowhere");
    let lacking = other_driver(&driver, "driver-lacking");
    let cases: [Case<'_>; 7] = [
        (&nowhere, &[], "libcuda is not installed"),
        (&lacking, &[], "the driver has no function `cuMemUnmap`"),
        (
            &driver,
            &[("FAKE_CUDA_DRIVER", "12010")],
            "the driver is for CUDA 12.1, at least 12.2 is needed",
        ),
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
        assert_eq!(
            refused.status.code(),
            Some(3),
            "{reason}: {}",
            reported(&refused)
        );
        assert!(
            reported(&refused).contains(reason),
            "{reason}: {}",
            reported(&refused)
        );
        let settings = [settings, &[("SHORT", "1")]].concat();
        let otherwise = run(driver, &settings, &[path.to_str().unwrap(), "auto"]);
        assert!(
            otherwise.status.success(),
            "{reason}: {}",
            reported(&otherwise)
        );
        assert!(
            reported(&otherwise).starts_with("cpu ("),
            "{reason}: {}",
            reported(&otherwise)
        );
    }
    for (number, (family, reason)) in WITHOUT_KERNELS.into_iter().enumerate() {
        let path = written(folder.path(), 1 + number, family);
        let refused = run(&driver, &[], &[path.to_str().unwrap(), "cuda"]);
        assert_eq!(refused.status.code(), Some(3), "{}", reported(&refused));
        assert!(
            reported(&refused).contains(reason),
            "{}",
            reported(&refused)
        );
        let otherwise = run(
            &driver,
            &[("SHORT", "1")],
            &[path.to_str().unwrap(), "auto"],
        );
        assert!(
            otherwise.status.success() && reported(&otherwise).starts_with("cpu ("),
            "{family:?}: {}",
            reported(&otherwise)
        );
    }
}

/// Returns the driver's log of a child, by lines.
fn noted(log: &Path) -> Vec<Value> {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Returns whether nothing was left when contexts ended, and the driver has no findings.
fn is_clean(notes: &[Value]) -> bool {
    let of = |event: &str| {
        notes
            .iter()
            .filter(|note| note["event"] == event)
            .collect::<Vec<_>>()
    };
    let nothing = |left: &Value| {
        left.as_object()
            .is_some_and(|left| left.values().all(|count| count == 0))
    };
    of("context").iter().all(|note| nothing(&note["left"]))
        && of("finding").is_empty()
        && of("exit").len() == 1
        && of("exit").iter().all(|note| note["contexts_left"] == 0)
}

/// Child with a short history, and a fault of its own besides the driver faults.
struct Sweep {
    driver: PathBuf,
    folder: tempfile::TempDir,
    path: PathBuf,
    cases: AtomicUsize,
}

impl Sweep {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self {
            driver: driver(),
            path: written(folder.path(), 0, Architecture::Qwen3),
            folder,
            cases: AtomicUsize::new(0),
        }
    }

    /// Returns the driver's log of a child with a driver fault and a fault of its own, and the violation found.
    ///
    /// Measured times have no influence, so that every case makes the same calls.
    fn case(&self, fault: &str, planted: &str) -> (Vec<Value>, Option<String>) {
        self.case_on(fault, planted, ("orin", "mapped"))
    }

    /// As [`case`](Self::case), on a device with the given kind of memory.
    fn case_on(
        &self,
        fault: &str,
        planted: &str,
        (device, memory): (&str, &str),
    ) -> (Vec<Value>, Option<String>) {
        let number = self.cases.fetch_add(1, Ordering::Relaxed);
        let log = self.folder.path().join(number.to_string());
        let settings = [
            ("FAKE_CUDA_FAULTS", fault),
            ("FAKE_CUDA_LOG", log.to_str().unwrap()),
            ("FAKE_CUDA_DEVICE", device),
            ("SHORT", "1"),
            ("PLANTED", planted),
        ];
        let output = run(
            &self.driver,
            &settings,
            &[self.path.to_str().unwrap(), "cuda", memory],
        );
        let (notes, text) = (noted(&log), reported(&output));
        // Failures while memory is released are not reported as errors.
        let ended = matches!(output.status.code(), Some(0 | 3)) && !text.contains("panicked");
        let may_leave = fault.ends_with('!') || fault.split('@').next().is_some_and(gives_back);
        let is_wrong = !ended || !(may_leave || is_clean(&notes));
        let wrong =
            is_wrong.then(|| format!("{fault} {planted}: {:?} {text} {notes:?}", output.status));
        (notes, wrong)
    }
}

impl Sweep {
    /// Asserts that none of these faults causes a violation.
    fn all(&self, faults: &[String], on: (&str, &str)) {
        let wrong_of = &|faults: &[String]| -> Vec<String> {
            let cases = faults.iter().map(|fault| self.case_on(fault, "", on).1);
            cases.flatten().collect()
        };
        let wrong: Vec<String> = thread::scope(|scope| {
            let halves = faults.chunks(faults.len().div_ceil(2));
            let halves: Vec<_> = halves
                .map(|half| scope.spawn(move || wrong_of(half)))
                .collect();
            halves
                .into_iter()
                .flat_map(|half| half.join().unwrap())
                .collect()
        });
        let (cases, wrong_cases) = (faults.len(), wrong.len());
        println!("{on:?}: {cases} faults");
        assert!(
            wrong.is_empty(),
            "{wrong_cases} of {cases}:\n{}",
            wrong.join("\n")
        );
    }
}

/// Violations that the sweep looks for, injected into the child.
fn a_leak_and_a_panic_are_found() {
    let sweep = Sweep::new();
    for planted in ["leak", "panic"] {
        assert!(sweep.case("", planted).1.is_some(), "{planted}");
    }
}

/// Each function fails at its first, second, middle and last call, once or from then on.
fn a_call_that_fails_once_or_permanently_is_an_error_and_leaves_nothing() {
    let sweep = Sweep::new();
    let (notes, wrong) = sweep.case("", "");
    assert_eq!(wrong, None);
    let calls = calls(&notes);
    assert!(calls.len() > 30, "{calls:?}");
    let mut faults = Vec::new();
    for (name, count) in &calls {
        let count = count.as_u64().unwrap();
        let mut at = vec![1, 2, count / 2, count];
        at.retain(|at| (1..=count).contains(at));
        at.dedup();
        for (at, code) in at.iter().flat_map(|at| [(at, "2"), (at, "719!")]) {
            faults.push(format!("{name}@{at}={code}"));
        }
    }
    sweep.all(&faults, ("orin", "mapped"));
}

/// The first and the last call of each function, with weights in memory of a discrete device, and on an integrated
/// device that is measured first: the number of calls then depends on time, so that a fault may occur elsewhere, or not
/// at all.
fn a_call_that_fails_in_each_kind_of_memory_leaves_nothing() {
    let sweep = Sweep::new();
    for on in [("hopper", "device"), ("orin", "auto")] {
        let (notes, wrong) = sweep.case_on("", "", on);
        assert_eq!(wrong, None);
        let faults = calls(&notes)
            .into_iter()
            .flat_map(|(name, count)| [format!("{name}@1=719!"), format!("{name}@{count}=2")]);
        sweep.all(&faults.collect::<Vec<_>>(), on);
    }
}

/// Each allocation of device memory fails once.
fn an_allocation_that_fails_is_an_error_and_leaves_nothing() {
    let sweep = Sweep::new();
    let on = ("hopper", "device");
    let (notes, wrong) = sweep.case_on("", "", on);
    assert_eq!(wrong, None);
    let count = calls(&notes)["memory"].as_u64().unwrap();
    assert!(count > 20, "{count} allocations");
    let faults: Vec<String> = (1..=count).map(|at| format!("memory@{at}=2")).collect();
    sweep.all(&faults, on);
}

/// Returns the number of calls of each function until the process ended.
fn calls(notes: &[Value]) -> BTreeMap<String, Value> {
    let exit = notes.iter().find(|note| note["event"] == "exit").unwrap();
    let calls = exit["calls"].as_object().unwrap().iter();
    calls
        .map(|(name, count)| (name.clone(), count.clone()))
        .collect()
}

/// Compares the calls for some tokens with those for more: the difference is the cost of a token.
fn a_token_takes_few_launches_one_wait_and_no_allocation() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let (path, log) = (folder.path().join("model.gguf"), folder.path().join("log"));
    let types = TypeMix::All(GgmlDType::Q8_0);
    let four = Synthetic {
        layers: 32,
        head_dim: 256,
        rotary: 64,
        recurrent: (1, 2, 128),
        ..Synthetic::tiny(Architecture::Qwen35, types, 7)
    };
    let six = Synthetic {
        layers: 28,
        head_dim: 128,
        rotary: 128,
        ..Synthetic::tiny(Architecture::Qwen3, types, 7)
    };
    for (name, model, most) in [("Qwen3.5-4B", four, 245), ("Qwen3-0.6B", six, 257)] {
        model.write(&path).unwrap();
        let counted = |tokens: &str, logits: Option<&str>| {
            fs::remove_file(&log).ok();
            let mut settings = vec![("FAKE_CUDA_LOG", log.to_str().unwrap()), ("TOKENS", tokens)];
            settings.extend(logits.map(|logits| ("LOGITS", logits)));
            // Time measurements would make calls of their own.
            let output = run(
                &driver,
                &settings,
                &[path.to_str().unwrap(), "cuda", "mapped"],
            );
            assert!(output.status.success(), "{}", reported(&output));
            let said = reported(&output)
                .lines()
                .find(|line| line.starts_with("said"))
                .map(str::to_owned);
            let notes = noted(&log);
            let mut counts = calls(&notes);
            let exit = notes.iter().find(|note| note["event"] == "exit").unwrap();
            for name in ["bytes_to_host", "waits", "event_waits", "executed"] {
                counts.insert(name.to_owned(), exit[name].clone());
            }
            (counts, said.unwrap())
        };
        let ((few, _), (more, said), (all_logits, by_logits)) = (
            counted("2", None),
            counted("6", None),
            counted("6", Some("1")),
        );
        assert_eq!(said, by_logits, "{name}");
        let of_token = |names: &[&str]| {
            let count = |calls: &BTreeMap<String, Value>| -> u64 {
                names
                    .iter()
                    .filter_map(|name| calls.get(*name)?.as_u64())
                    .sum()
            };
            let (all, each) = (count(&more) - count(&few), 4);
            assert_eq!(all % each, 0, "{names:?}");
            all / each
        };
        // Two flags, the index of the greatest logit, and its value.
        let read = of_token(&["bytes_to_host"]);
        assert_eq!(read, 16, "{name}");
        assert!(
            all_logits["bytes_to_host"].as_u64().unwrap()
                > more["bytes_to_host"].as_u64().unwrap() + 1024
        );
        let (kernels, graphs) = (of_token(&["executed"]), of_token(&["cuGraphLaunch"]));
        let alone = of_token(&["cuLaunchKernel"]);
        let others = of_token(&[
            "cuMemcpyHtoDAsync_v2",
            "cuMemcpyDtoDAsync_v2",
            "cuMemsetD32Async",
        ]);
        println!(
            "{name}: {kernels} kernels in {graphs} graphs and {alone} launches, {others} copies and fills for a token"
        );
        assert!(kernels <= most, "{name}: {kernels} kernels");
        assert!(
            (1..=8).contains(&graphs) && alone <= 4,
            "{name}: {graphs} graphs, {alone} launches"
        );
        // Waits for pending work. Waits for events are ends of segments, as many as were pending.
        let waits_of = |calls: &BTreeMap<String, Value>| {
            calls["waits"].as_u64().unwrap() - calls["event_waits"].as_u64().unwrap()
        };
        let waits = (waits_of(&more) - waits_of(&few)) / 4;
        assert_eq!((waits_of(&more) - waits_of(&few)) % 4, 0, "{name}");
        let allocations = of_token(&[
            "memory",
            "cuMemHostRegister_v2",
            "cuMemAddressReserve",
            "cuEventCreate",
        ]);
        assert_eq!((waits, allocations), (1, 0), "{name}");
    }
}

/// A head with more tiles than a launch has matrices.
fn tiles_of_a_head_are_one_launch_with_the_words_of_the_cpu() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let (path, log) = (folder.path().join("model.gguf"), folder.path().join("log"));
    let counted = |vocabulary: u32| {
        let tiny = Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::F32), 7);
        Synthetic { vocabulary, ..tiny }.write(&path).unwrap();
        let ran = |device: &str, tokens: &str| {
            fs::remove_file(&log).ok();
            let settings = [
                ("FAKE_CUDA_LOG", log.to_str().unwrap()),
                ("TOKENS", tokens),
                ("LOGITS", "1"),
            ];
            let output = run(
                &driver,
                &settings,
                &[path.to_str().unwrap(), device, "device"],
            );
            assert!(output.status.success(), "{}", reported(&output));
            reported(&output)
                .lines()
                .find(|line| line.starts_with("said"))
                .unwrap()
                .to_owned()
        };
        let executed = |tokens: &str| {
            let said = ran("cuda", tokens);
            let exit = noted(&log)
                .into_iter()
                .find(|note| note["event"] == "exit")
                .unwrap();
            (exit["executed"].as_u64().unwrap(), said)
        };
        let ((few, _), (more, said)) = (executed("1"), executed("3"));
        assert_eq!(said, ran("cpu", "3"), "{vocabulary} rows");
        (more - few) / 2
    };
    // Ten tiles of at least 8 MiB, and one.
    assert_eq!(counted(90_000), counted(320));
}

/// Compares the ledger, for a model fully, half and not resident, with the driver's allocations for the context.
fn the_book_has_what_the_driver_has() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let (path, log) = (folder.path().join("model.gguf"), folder.path().join("log"));
    let model = Synthetic {
        layers: 8,
        feed_forward: 1024,
        vocabulary: 2048,
        ..Synthetic::tiny(Architecture::Qwen35, TypeMix::All(GgmlDType::Q8_0), 7)
    };
    model.write(&path).unwrap();
    let mut all_resident = Vec::new();
    for (resident, device, memory, converted, graph_node) in [
        ("4", "hopper", "device", false, "0"),
        ("4", "hopper", "device", false, "8192"),
        ("2", "hopper", "device", true, "0"),
        ("0", "hopper", "device", false, "0"),
        ("4", "orin", "mapped", true, "0"),
        ("2", "orin", "mapped", false, "0"),
        ("0", "orin", "device", true, "0"),
    ] {
        fs::remove_file(&log).ok();
        let mut settings = vec![
            ("FAKE_CUDA_LOG", log.to_str().unwrap()),
            ("FAKE_CUDA_DEVICE", device),
            ("FAKE_CUDA_CONTEXT", "8388608"),
            ("FAKE_CUDA_GRAPH_NODE", graph_node),
            ("BOOK", resident),
        ];
        settings.extend(converted.then_some(("CONVERTED", "1")));
        let output = run(
            &driver,
            &settings,
            &[path.to_str().unwrap(), "cuda", memory],
        );
        assert!(output.status.success(), "{}", reported(&output));
        let text = reported(&output);
        let book = text
            .lines()
            .find_map(|line| line.strip_prefix("book "))
            .unwrap();
        let book: f64 = book.parse().unwrap();
        let notes = noted(&log);
        let left = notes
            .iter()
            .find(|note| note["event"] == "context_left")
            .unwrap();
        // Host memory read by the device belongs to the system, but is in the ledger too.
        let of = |name: &str| left["left"][name].as_f64().unwrap();
        let driver = of("bytes") + of("registered_bytes") + 8_388_608.0;
        println!(
            "{resident}/4 resident on {device}, {memory}: {book} on the book, {driver} of the driver"
        );
        if graph_node == "0" {
            assert!(
                (book - driver).abs() <= driver / 100.0,
                "{book} on the book, {driver} of the driver"
            );
        } else {
            // The ledger assumes the maximum number of graphs.
            assert!(driver <= book, "{book} on the book, {driver} of the driver");
        }
        if resident == "4" && device == "hopper" {
            all_resident.push(book);
        }
    }
    assert!(
        all_resident.last().unwrap() - all_resident.first().unwrap() >= 8_300_000.0,
        "{all_resident:?}"
    );
}

/// On a board with 24 MiB, whose pool keeps 3 MiB: memory credited to a shed is available in the next sample, in the
/// pool and outside it.
fn what_a_shed_gives_back_is_seen_in_the_page_pool_of_the_board_and_beside_it() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let path = folder.path().join("model.gguf");
    let model = Synthetic {
        layers: 8,
        feed_forward: 1024,
        ..Synthetic::tiny(Architecture::Qwen35, TypeMix::Q4KM, 7)
    };
    model.write(&path).unwrap();
    for memory in ["device", "mapped"] {
        let board = folder.path().join(memory);
        for below in [
            "proc",
            "sys/kernel/debug/nvmap/stats",
            "sys/kernel/debug/nvmap/pagepool",
        ] {
            fs::create_dir_all(board.join(below)).unwrap();
        }
        let settings = [
            ("FAKE_CUDA_BOARD", board.to_str().unwrap()),
            ("FAKE_CUDA_MEMORY", "25165824"),
        ];
        let output = run(
            &driver,
            &settings,
            &[path.to_str().unwrap(), "cuda", memory],
        );
        assert!(output.status.success(), "{}", reported(&output));
        let text = reported(&output);
        let figures = text.lines().filter_map(|line| line.strip_prefix("board "));
        let figures = figures.map(|line| {
            line.split(' ')
                .map(|word| word.parse().unwrap())
                .collect::<Vec<i64>>()
        });
        let [full, shed, grown] = figures.collect::<Vec<_>>().try_into().unwrap();
        println!(
            "{memory}: available, pool, GPU, book: {full:?}, without layers {shed:?}, with them again {grown:?}"
        );
        let gains = |at: usize| shed[at] - full[at];
        let (available, pool, gpu, book) = (gains(0), gains(1), gains(2), gains(3));
        assert!(
            book < -(1 << 20) && available == -book,
            "{memory}: {available} more available, {} credited",
            -book
        );
        if memory == "device" {
            assert_eq!(
                (shed[1], available > pool),
                (3 << 20, true),
                "the pool is full, and the system has the rest"
            );
            assert!(
                gpu < book,
                "what is streamed lies in a ring that is no memory of nvmap"
            );
        } else {
            assert_eq!((pool, gpu), (0, 0), "memory of the system");
        }
        assert_eq!(
            (grown[0], grown[2], grown[3]),
            (full[0], full[2], full[3]),
            "{memory}"
        );
    }
}

/// The kernel is timed in both kinds of memory.
fn weights_lie_where_an_integrated_device_reads_them_faster() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let path = written(folder.path(), 0, Architecture::Qwen3);
    for (device, slower, memory) in [("orin", "30", "device"), ("hopper", "0", "device")] {
        let settings = [
            ("FAKE_CUDA_DEVICE", device),
            ("FAKE_CUDA_MAPPED_MS", slower),
            ("TOKENS", "1"),
        ];
        let output = run(
            &driver,
            &settings,
            &[path.to_str().unwrap(), "cuda", "auto"],
        );
        let name = format!(", {memory} memory");
        assert!(
            reported(&output).contains(&name),
            "{device}: {}",
            reported(&output)
        );
    }
}

/// An integrated device is measured at the first start with a device, a driver and a release.
fn a_device_is_measured_once_and_again_when_something_has_changed() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let (path, log) = (
        written(folder.path(), 0, Architecture::Qwen3),
        folder.path().join("log"),
    );
    let file = folder.path().join("gpu.json");
    let launches = |settings: &[(&str, &str)]| {
        fs::remove_file(&log).ok();
        let mut all = vec![
            ("FAKE_CUDA_DEVICE", "orin"),
            ("FAKE_CUDA_LOG", log.to_str().unwrap()),
            ("TOKENS", "1"),
        ];
        all.push(("PROBES", folder.path().to_str().unwrap()));
        all.extend(settings);
        let output = run(&driver, &all, &[path.to_str().unwrap(), "cuda", "auto"]);
        assert!(
            output.status.success() && is_clean(&noted(&log)),
            "{}",
            reported(&output)
        );
        let probe: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        (
            calls(&noted(&log))["cuLaunchKernel"].as_u64().unwrap(),
            probe,
        )
    };
    let largest = (300 << 20).to_string();
    let (first, probe) = launches(&[("FAKE_CUDA_LARGEST", &largest)]);
    println!("{first} launches, {probe}");
    let room = |name: &str| probe["room"][name].as_u64().unwrap();
    assert!(
        (284 << 20..=300 << 20).contains(&room("largestBytes")),
        "{probe}"
    );
    assert!(room("sumBytes") >= room("largestBytes"), "{probe}");
    assert!(probe["speed"]["device"].as_u64().unwrap() > 0, "{probe}");
    let (second, same) = launches(&[]);
    assert_eq!(probe, same);
    assert!(second + 50 < first, "{second} launches, {first} before");
    let (other_driver, other) = launches(&[("FAKE_CUDA_DRIVER", "12080")]);
    assert!(
        other_driver + 20 > first && other["of"]["driver"] == 12_080,
        "{other}"
    );
    fs::write(&file, "{\"of\": 7").unwrap();
    let (damaged, whole) = launches(&[]);
    assert!(
        damaged + 20 > first && whole["of"]["driver"] == 12_060,
        "{whole}"
    );
}

fn weights_are_mapped_where_an_integrated_device_reads_them_as_fast() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let path = written(folder.path(), 0, Architecture::Qwen3);
    let settings = [
        ("FAKE_CUDA_DEVICE", "orin"),
        ("FAKE_CUDA_DEVICE_MS", "30"),
        ("TOKENS", "1"),
    ];
    let output = run(
        &driver,
        &settings,
        &[path.to_str().unwrap(), "cuda", "auto"],
    );
    assert!(
        reported(&output).contains(", mapped memory)"),
        "{}",
        reported(&output)
    );
}

/// An integrated device reserves 8 GiB of addresses at once: with a limited context, no cache of 16 GiB is requested.
fn a_long_context_takes_no_more_addresses_than_it_is_limited_to() {
    let (driver, folder) = (driver(), tempfile::tempdir().unwrap());
    let path = folder.path().join("model.gguf");
    let model = Synthetic {
        context_max: 1 << 23,
        ..Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 7)
    };
    model.write(&path).unwrap();
    let with =
        |settings: &[(&str, &str)]| run(&driver, settings, &[path.to_str().unwrap(), "cuda"]);
    let refused = with(&[("TOKENS", "1")]);
    assert_eq!(refused.status.code(), Some(3), "{}", reported(&refused));
    assert!(
        reported(&refused).contains("the KV cache (address space alone)"),
        "{}",
        reported(&refused)
    );
    let limited = with(&[("TOKENS", "1"), ("CONTEXT", "4096")]);
    assert!(limited.status.success(), "{}", reported(&limited));
}

/// Returns whether a function releases memory; a failed call has then released nothing.
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
