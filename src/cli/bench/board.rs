//! `cotenant bench board`: the figures of README's table on this device, in one document and one picture.
//!
//! Each part is the command that repeats its figures, run as a child with a time limit, so that a part that fails
//! leaves the others and a cause. The files are written after each part.

use std::{
    fs, io,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use ring::digest::{Context, SHA256};
use serde::Serialize;
use serde_json::Value;

use super::report::{Limit, shown};
use crate::{
    chart::{self, TableRow},
    session::end_with_parent,
};
use cotenant_engine::Header;
use cotenant_probe::{ProbeRoot, board::Board, meminfo::Meminfo};
use cotenant_units::{Bytes, TimeSpan, causes::in_one_line};

/// Settings of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub struct BoardArgs {
    /// GGUF model that is used on this device.
    #[arg(long, value_name = "GGUF")]
    pub model: PathBuf,
    /// `llama-bench` of llama.cpp, for the ratio of the speeds.
    #[arg(long, value_name = "PROGRAM")]
    pub peer: Option<PathBuf>,
    /// Rounds of the engine's figures; grants and utterances have 10 and 6 times as many.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Path of the document and the picture, without `.json` and `.svg`.
    #[arg(long, value_name = "PATH", default_value = "cotenant-board")]
    pub out: PathBuf,
}

/// The document.
#[derive(Serialize)]
struct Document {
    version: &'static str,
    device: Device,
    model: ModelFile,
    figures: Vec<Figure>,
}

#[derive(Serialize)]
struct Device {
    /// Name in the device tree, or of the processor.
    board: Option<String>,
    architecture: &'static str,
    kernel: String,
    memory: Bytes,
    /// Backend and instruction set of the engine, once it has run.
    backend: Option<String>,
}

#[derive(Serialize)]
struct ModelFile {
    file: String,
    bytes: Bytes,
    sha256: String,
}

#[derive(Serialize)]
struct Figure {
    what: &'static str,
    unit: &'static str,
    #[serde(flatten)]
    outcome: Outcome,
    #[serde(skip_serializing_if = "Option::is_none")]
    aim: Option<Limit>,
    command: String,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Value(f64),
    /// The figure was not measured, because of this.
    NotMeasured(String),
}

impl Figure {
    fn met(&self) -> Option<bool> {
        match (&self.outcome, self.aim) {
            (Outcome::Value(value), Some(aim)) => Some(aim.is_met(*value)),
            _ => None,
        }
    }
}

/// A command with its time limit, and the figures to take from its JSON.
struct Part {
    command: Vec<String>,
    limit: Duration,
    figures: &'static [Wanted],
}

/// Description, unit and aim of a figure; its name in the report of a part, if that has a list, and the JSON pointer to
/// its value.
type Wanted = (
    &'static str,
    &'static str,
    Option<Limit>,
    &'static str,
    &'static str,
);

const SPEED: &[Wanted] = &[
    (
        "decoding, all weights in memory",
        "tokens/s",
        None,
        "decode, 100 % resident",
        "/median",
    ),
    (
        "prompt of 128 tokens",
        "tokens/s",
        None,
        "prefill 128",
        "/median",
    ),
    (
        "decoding over llama.cpp",
        "x",
        Some(Limit::AtLeast(1.0)),
        "decode, 100 % resident",
        "/peer/ratio",
    ),
];

const STREAMING: &[Wanted] = &[
    (
        "decoding with memory for 50 % of the weights",
        "tokens/s",
        None,
        "decode, 50 % resident",
        "/median",
    ),
    (
        "the same over the slower of reading and computing",
        "x",
        Some(Limit::AtLeast(0.92)),
        "streaming efficiency at 50 %",
        "/median",
    ),
];

const GRANT: &[Wanted] = &[
    (
        "memory granted during an answer, p99",
        "ms",
        Some(Limit::AtMost(300.0)),
        "asked in an answer to granted, verified shed included: 99th percentile",
        "/value",
    ),
    (
        "memory granted during a prompt, p99",
        "ms",
        Some(Limit::AtMost(300.0)),
        "asked in a prompt to granted, verified shed included: 99th percentile",
        "/value",
    ),
    (
        "answers changed by that",
        "",
        Some(Limit::AtMost(0.0)),
        "answers different",
        "/value",
    ),
];

/// With the demo model.
const VOICE: &[Wanted] = &[
    (
        "spoken answers changed beside a program that takes 160 MiB",
        "",
        Some(Limit::AtMost(0.0)),
        "",
        "/answersDifferent",
    ),
    (
        "first sound after an utterance, p50",
        "ms",
        None,
        "",
        "/alone/firstAudioMs/p50",
    ),
    (
        "the same beside that program, p99",
        "ms",
        None,
        "",
        "/besideNeighbour/firstAudioMs/p99",
    ),
];

fn value_of(report: &Value, name: &str, pointer: &str) -> Option<f64> {
    let named = |figures: &Value| -> Option<f64> {
        let mut figures = figures.as_array()?.iter();
        figures
            .find(|one| one["what"] == name)?
            .pointer(pointer)?
            .as_f64()
    };
    match report.get("figures") {
        Some(figures) => named(figures),
        None => report.pointer(pointer)?.as_f64(),
    }
}

/// Runs the parts, and writes document and picture.
///
/// # Errors
/// If the model cannot be used, or a file not be written. A part that fails is no error.
pub(super) async fn run(args: &BoardArgs) -> Result<(), String> {
    let device = device()?;
    let model = model_file(&args.model, device.memory)?;
    let mut document = Document {
        version: env!("CARGO_PKG_VERSION"),
        device,
        model,
        figures: Vec::new(),
    };
    write(args, &document)?;
    let parts = parts(args, document.model.bytes);
    for (number, part) in (1..).zip(&parts) {
        let (command, limit) = (in_shell(&part.command), TimeSpan(part.limit));
        eprintln!("{number} of {}, at most {limit}: {command}", parts.len());
        let began = Instant::now();
        let measured = output_of(part).await;
        match &measured {
            Ok(report) => {
                eprintln!("  measured in {}", TimeSpan(began.elapsed()));
                let backend = report["backend"].as_str().map(str::to_owned);
                document.device.backend = document.device.backend.or(backend);
            }
            Err(cause) => eprintln!("  not measured: {cause}"),
        }
        for (what, unit, aim, name, pointer) in part.figures {
            let value = measured.as_ref().map_err(String::clone).and_then(|report| {
                value_of(report, name, pointer).ok_or_else(|| NO_PEER.to_owned())
            });
            document.figures.push(Figure {
                what,
                unit,
                outcome: value.map_or_else(Outcome::NotMeasured, Outcome::Value),
                aim: *aim,
                command: command.clone(),
            });
        }
        write(args, &document)?;
    }
    let elsewhere = ELSEWHERE.map(|(what, cause, command)| Figure {
        what,
        unit: "",
        outcome: Outcome::NotMeasured(cause.to_owned()),
        aim: None,
        command: command.to_owned(),
    });
    document.figures.extend(elsewhere);
    write(args, &document)?;
    for figure in &document.figures {
        let row = row(figure);
        eprintln!("{}: {} {}", row.name, row.value, row.note);
    }
    let [json, svg] = files(args);
    eprintln!("written: {} and {}", json.display(), svg.display());
    Ok(())
}

fn parts(args: &BoardArgs, model: Bytes) -> Vec<Part> {
    let peer = args.peer.as_ref().map(|peer| peer.display().to_string());
    let path = args.model.display().to_string();
    let speed = match peer {
        Some(_) => "speed,peer --peer PEER",
        None => "speed",
    };
    let (mib, rounds) = (if model < LARGE { 64 } else { 1024 }, args.rounds);
    let (grants, utterances) = (rounds * 10, rounds * 6);
    let engine = format!("bench engine --model MODEL --rounds {rounds} --only");
    [
        (format!("{engine} {speed}"), 150, SPEED),
        (format!("{engine} streaming"), 180, STREAMING),
        (
            format!("bench grant --while both --mib {mib} --rounds {grants} --model MODEL"),
            150,
            GRANT,
        ),
        (format!("bench voice --rounds {utterances}"), 120, VOICE),
    ]
    .map(|(command, seconds, figures)| {
        let words = command.split(' ').map(|word| match word {
            "MODEL" => path.clone(),
            "PEER" => peer.clone().unwrap_or_default(),
            word => word.to_owned(),
        });
        Part {
            command: words.collect(),
            limit: Duration::from_secs(seconds),
            figures,
        }
    })
    .into()
}

/// Runs a part, and returns its JSON.
///
/// # Errors
/// The cause, if it fails or exceeds its limit.
async fn output_of(part: &Part) -> Result<Value, String> {
    let cannot = |error: io::Error| format!("cannot run it: {error}");
    let mut command = Command::new(std::env::current_exe().map_err(cannot)?);
    command.args(&part.command).args(["-o", "json"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command.stderr(Stdio::piped());
    end_with_parent(&mut command);
    let mut command = tokio::process::Command::from(command);
    let child = command.kill_on_drop(true).spawn().map_err(cannot)?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    let output = child.wait_with_output();
    tokio::pin!(output);
    let Ok(output) = tokio::time::timeout(part.limit, &mut output).await else {
        // Then it ends its own children.
        if let Some(pid) = pid {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        let _ = tokio::time::timeout(GRACE, output).await;
        return Err(format!("it did not end within {}", TimeSpan(part.limit)));
    };
    let output = output.map_err(cannot)?;
    if output.status.success() {
        return serde_json::from_slice(&output.stdout)
            .map_err(|error| format!("its output is no JSON: {error}"));
    }
    let messages = String::from_utf8_lossy(&output.stderr);
    let mut lines = messages.lines().rev();
    let error = lines.find_map(|line| serde_json::from_str::<Value>(line).ok());
    let message = error
        .as_ref()
        .and_then(|it| it.pointer("/error/message")?.as_str());
    Err(message.map_or_else(|| format!("it ended with {}", output.status), str::to_owned))
}

fn device() -> Result<Device, String> {
    let root = ProbeRoot::default();
    let memory = Meminfo::read(&root).map_err(|error| error.to_string())?;
    let read = |path: &str| fs::read_to_string(root.proc(path)).unwrap_or_default();
    let processors = read("cpuinfo");
    let processor = processors
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    Ok(Device {
        board: Board::read(&root)
            .model
            .or_else(|| processor.map(|(_, name)| name.to_owned())),
        architecture: std::env::consts::ARCH,
        kernel: read("sys/kernel/osrelease").trim().to_owned(),
        memory: memory.total,
        backend: None,
    })
}

/// Reads the header of a model, and its hash.
///
/// # Errors
/// If it cannot be read, or needs more than this memory.
fn model_file(path: &Path, memory: Bytes) -> Result<ModelFile, String> {
    let cannot = |problem: String| format!("cannot measure `{}`: {problem}", path.display());
    let header = Header::read(path).map_err(|error| cannot(in_one_line(&error)))?;
    let bytes = header.file_bytes();
    if bytes.saturating_add(BESIDE) > memory {
        return Err(cannot(format!(
            "its {bytes} and {BESIDE} for the system exceed the memory of {memory} (hint: use a smaller model)"
        )));
    }
    Ok(ModelFile {
        file: path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
        bytes,
        sha256: sha256_of(path).map_err(|error| cannot(error.to_string()))?,
    })
}

fn sha256_of(path: &Path) -> io::Result<String> {
    let (mut file, mut digest) = (fs::File::open(path)?, Context::new(&SHA256));
    let mut block = vec![0; 1 << 20];
    loop {
        match file.read(&mut block)? {
            0 => break,
            length => digest.update(block.get(..length).unwrap_or_default()),
        }
    }
    let digest = digest.finish();
    Ok(digest
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

fn files(args: &BoardArgs) -> [PathBuf; 2] {
    ["json", "svg"].map(|kind| {
        let mut path = args.out.clone().into_os_string();
        path.push(format!(".{kind}"));
        path.into()
    })
}

fn write(args: &BoardArgs, document: &Document) -> Result<(), String> {
    let text = serde_json::to_string_pretty(document).map_err(|error| error.to_string())?;
    let picture = picture(document).map_err(|error| error.to_string())?;
    for (path, text) in files(args).iter().zip([text + "\n", picture]) {
        fs::write(path, text).map_err(|error| {
            format!(
                "cannot write `{}`: {error} (hint: set --out)",
                path.display()
            )
        })?;
    }
    Ok(())
}

fn picture(document: &Document) -> Result<String, chart::ChartError> {
    let (device, model) = (&document.device, &document.model);
    let title = device.board.as_deref().unwrap_or("unknown board");
    let subtitle = format!(
        "cotenant {}, {} ({}), Linux {}, {}, {}",
        document.version,
        device.backend.as_deref().unwrap_or("no backend"),
        device.architecture,
        device.kernel,
        device.memory,
        model.file
    );
    let rows: Vec<TableRow> = document.figures.iter().map(row).collect();
    chart::table_svg(title, &subtitle, &rows)
}

fn row(figure: &Figure) -> TableRow {
    let (value, note) = match &figure.outcome {
        Outcome::Value(value) => {
            let aim = figure.aim.map(|aim| format!("aim: {aim}"));
            (
                format!("{} {}", shown(*value), figure.unit),
                aim.unwrap_or_default(),
            )
        }
        Outcome::NotMeasured(cause) => ("not measured".to_owned(), cause.clone()),
    };
    TableRow {
        name: figure.what.to_owned(),
        value: value.trim_end().to_owned(),
        note,
        is_met: figure.met(),
    }
}

fn in_shell(arguments: &[String]) -> String {
    let words = arguments
        .iter()
        .map(|word| match word.contains(char::is_whitespace) {
            true => format!("'{word}'"),
            false => word.clone(),
        });
    format!("cotenant {}", words.collect::<Vec<_>>().join(" "))
}

/// Figures of README's table that need programs or rights that this command cannot expect.
const ELSEWHERE: [(&str, &str, &str); 2] = [
    (
        "failed spoken turns beside servers that are only restarted",
        "it needs llama.cpp, Whisper and Piper",
        "benches/unsupervised",
    ),
    (
        "decoding with memory for 50 % of the weights over llama.cpp with `mmap`",
        "it needs llama.cpp and a control group of root",
        "cargo bench --bench developer -- engine --model FILE --only limits --limit 50",
    ),
];

/// The only figure that a report may lack.
const NO_PEER: &str = "it needs `llama-bench` of llama.cpp (--peer)";

/// Memory of the system and the daemon beside the weights, as in `bench grant`.
const BESIDE: Bytes = Bytes::from_gib(1);

/// Model files of this size make room for 1 GiB, smaller ones for 64 MiB. Our choice: the KV capacity of `bench grant`
/// and half of the weights.
const LARGE: Bytes = Bytes::from_gib(2);

/// Time for a part to end its daemon after its time limit.
const GRACE: Duration = Duration::from_secs(15);
