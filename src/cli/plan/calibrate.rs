//! `cotenant calibrate`: measures what this machine computes and reads, for `plan`.
//!
//! The engine measures itself as it does after a load. Rounds are repeated, and what they differ by is the stated error.

use std::{
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    cli::{
        Global, Output,
        exit::{self, CliError},
        output,
    },
    engine::{Model, ModelOptions},
    policy::{params::EngineParams, residency::PlanLimits, streaming::Calibration},
    units::{Bytes, Tokens},
};

/// Arguments of `calibrate`.
#[derive(Clone, Debug, clap::Args)]
pub struct CalibrateArgs {
    /// A GGUF file that fits into memory, on the disk that models are on.
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Where the coefficients are kept; `plan` reads them from there.
    #[arg(long, value_name = "FILE", default_value = DEFAULT_FILE)]
    out: PathBuf,
    /// Threads that compute. Default: half of the cores, as for the LLM.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
}

/// Coefficients of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Coefficients {
    /// The middle of the rounds.
    pub calibration: Calibration,
    /// Reading at first, MiB per second: as long as a disk's own cache lasts.
    pub disk_burst_mib_per_s: u64,
    /// Reading in the long run, MiB per second.
    pub disk_sustained_mib_per_s: u64,
    /// How far rounds were apart, in percent, at least 10.
    pub error_percent: u64,
}

impl Coefficients {
    /// Those that were kept in `path`; `None` when there are none.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>, CliError> {
        let mut text = String::new();
        match File::open(path) {
            Ok(file) => {
                let read = file.take(FILE_MAX).read_to_string(&mut text);
                read.map_err(|error| CliError::failed(format!("cannot read `{}`", path.display()), error))?;
            }
            Err(_) if path == Path::new(DEFAULT_FILE) => return Ok(None),
            Err(error) => return Err(CliError::failed(format!("cannot read `{}`", path.display()), error)),
        }
        let parsed = serde_json::from_str(&text);
        parsed.map(Some).map_err(|error| CliError::Failed {
            act: format!("cannot use the coefficients in `{}`", path.display()),
            source: Some(Box::new(error)),
            hint: Some("measure again with `cotenant calibrate MODEL`".to_owned()),
            code: exit::CONFIG,
        })
    }
}

/// Measures, keeps and prints the coefficients.
pub(crate) fn run(global: &Global, args: &CalibrateArgs) -> Result<(), CliError> {
    let cannot = |act: &str| format!("cannot {act} `{}`", args.model.display());
    let threads = args.threads.map_or_else(threads_here, usize::from);
    let (burst, sustained) =
        disk(&args.model).map_err(|error| CliError::failed(cannot("measure the disk of"), error))?;
    let failed = |error| CliError::failed(cannot("load"), error);
    let (shape, _) = Model::inspect(&args.model, threads).map_err(failed)?;
    let engine = EngineParams { kv_wanted: Tokens::new(512), kv_floor: Tokens::new(512), ..EngineParams::default() };
    let plan = shape.full_plan(&PlanLimits::new(&engine, Tokens::ZERO));
    let mut model = Model::open(&args.model, &plan, &ModelOptions::for_threads(threads)).map_err(failed)?;
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let measured = model.calibrate(&mut || true);
        let measured = measured.map_err(|error| CliError::failed(cannot("measure with"), error))?;
        rounds.extend(measured);
    }
    rounds.sort_by_key(|round| round.compute_ns_per_mib);
    let Some(middle) = rounds.get(rounds.len() / 2).copied() else {
        return Err(CliError::plain(cannot("measure with"), exit::FAILED));
    };
    // The disk that a long answer meets.
    let calibration = middle.with_reading(middle.read_ns_per_mib.max(1_000_000_000 / sustained.max(1)));
    let coefficients = Coefficients {
        calibration,
        disk_burst_mib_per_s: burst,
        disk_sustained_mib_per_s: sustained,
        error_percent: spread(&rounds).max(ERROR_MIN),
    };
    let text = serde_json::to_string_pretty(&coefficients)
        .map_err(|error| CliError::failed("cannot write the coefficients", error))?;
    std::fs::write(&args.out, text + "\n")
        .map_err(|error| CliError::failed(format!("cannot write `{}`", args.out.display()), error))?;
    let per_s = |ns_per_mib: u64| 1_000_000_000 / ns_per_mib.max(1);
    match global.output {
        Output::Table => output::write(&format!(
            "computing: {} MiB/s of weights on {threads} threads\nreading: {burst} MiB/s at first, {sustained} MiB/s sustained\n\
             error: {} % over {} rounds\nkept in {}\n",
            per_s(calibration.compute_ns_per_mib),
            coefficients.error_percent,
            rounds.len(),
            args.out.display(),
        )),
        format => output::write_json(format, &json!(coefficients)),
    }
}

/// As the engine chooses without a setting: half of the cores.
pub(super) fn threads_here() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).max(1))
}

/// How far rounds are apart in percent of the smallest, for computing or reading, whichever differs more.
fn spread(rounds: &[Calibration]) -> u64 {
    let of = |value: fn(&Calibration) -> u64| {
        let (least, most) = (rounds.iter().map(value).min(), rounds.iter().map(value).max());
        let (least, most) = (least.unwrap_or(1).max(1), most.unwrap_or(1));
        (most - least.min(most)).saturating_mul(100) / least
    };
    of(|round| round.compute_ns_per_mib).max(of(|round| round.read_ns_per_mib))
}

/// Reads the file past the page cache: MiB per second in the first second, and in the last half of some seconds.
fn disk(path: &Path) -> std::io::Result<(u64, u64)> {
    let mut file = File::open(path)?;
    let drop_cache = |file: &File| posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    drop_cache(&file).map_err(std::io::Error::from)?;
    let mut buffer = vec![0; PIECE];
    let began = Instant::now();
    let mut marks: Vec<(Duration, u64)> = vec![(Duration::ZERO, 0)];
    let mut bytes = 0u64;
    while began.elapsed() < READING_TIME {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        bytes += read as u64;
        marks.push((began.elapsed(), bytes));
    }
    // What was read here was not there before, and does not stay.
    drop_cache(&file).map_err(std::io::Error::from)?;
    Ok(rates(&marks))
}

/// Rates of the first second and of the last half.
fn rates(marks: &[(Duration, u64)]) -> (u64, u64) {
    let (first, last) = (marks.first().copied().unwrap_or_default(), marks.last().copied().unwrap_or_default());
    let rate = |from: (Duration, u64), to: (Duration, u64)| {
        let us = to.0.saturating_sub(from.0).as_micros().max(1);
        let per_s = u128::from(to.1.saturating_sub(from.1)) * 1_000_000 / us;
        Bytes::new(u64::try_from(per_s).unwrap_or(u64::MAX)).whole_mib().max(1)
    };
    let burst = marks.iter().copied().take_while(|mark| mark.0 <= BURST_TIME).last();
    let half = marks.iter().copied().find(|mark| mark.0 >= last.0 / 2);
    (
        rate(first, burst.filter(|mark| mark.1 > 0).unwrap_or(last)),
        rate(half.filter(|half| half.1 < last.1).unwrap_or(first), last),
    )
}

/// Where `plan` looks.
pub(super) const DEFAULT_FILE: &str = "/var/lib/cotenant/calibration.json";
/// Rounds of about a second.
const ROUNDS: u32 = 5;
/// Smaller errors are not believed: a board gets warm.
const ERROR_MIN: u64 = 10;
const READING_TIME: Duration = Duration::from_secs(8);
const BURST_TIME: Duration = Duration::from_secs(1);
const PIECE: usize = 4 << 20;
const FILE_MAX: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_is_fast_at_first_has_two_rates() {
        let mut marks = vec![(Duration::ZERO, 0)];
        for tenth in 1..=80u64 {
            // 2000 MiB/s for a second, then 400.
            let mib = if tenth <= 10 { tenth * 200 } else { 2000 + (tenth - 10) * 40 };
            marks.push((Duration::from_millis(tenth * 100), mib << 20));
        }
        assert_eq!(rates(&marks), (2000, 400));
        assert_eq!(rates(&[(Duration::ZERO, 0), (Duration::from_millis(10), 10 << 20)]), (1000, 1000));
        assert_eq!(rates(&[(Duration::ZERO, 0)]), (1, 1));
    }

    #[test]
    fn coefficients_of_another_form_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{}").unwrap();
        let error = Coefficients::read(file.path()).unwrap_err();
        assert_eq!(error.code(), exit::CONFIG);
        assert_eq!(Coefficients::read(Path::new(DEFAULT_FILE)).ok(), Some(None));
    }
}
