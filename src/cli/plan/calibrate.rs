//! `cotenant calibrate`: measured speeds of this machine, for `plan`.
//!
//! The engine measures itself as after a load. Rounds are repeated, and their spread is the stated error.

use std::{
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{disk::DiskRates, refused::refused};
use crate::{
    Global, Output,
    exit::{self, CliError},
    output,
    progress::Progress,
};
use cotenant_engine::{Engine, Model, ModelOptions, PartTime, protocol::Inspected};
use cotenant_policy::{
    params::EngineParams,
    residency::{ModelShape, PlanLimits},
    speed::Calibration,
};
use cotenant_probe::{ProbeRoot, cores::usable_cores, host::Host};
use cotenant_units::Tokens;

/// Arguments of `calibrate`.
#[derive(Clone, Debug, clap::Args)]
pub struct CalibrateArgs {
    /// GGUF file that fits into memory, on the disk that stores the models.
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// File for the coefficients, read by `plan`.
    #[arg(long, value_name = "FILE", default_value = DEFAULT_FILE)]
    out: PathBuf,
    /// Number of compute threads. Default: one per physical core, as for the LLM.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
}

/// Coefficients of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Coefficients {
    /// Median of the rounds.
    pub calibration: Calibration,
    /// Disk of the model.
    pub disk: DiskRates,
    /// Spread of the computing rounds, in percent, at least 10.
    pub error_percent: u64,
    /// Conditions of the measurement.
    pub setting: Setting,
    /// Cost of each part of the model; absent in older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<LayerCosts>,
}

/// Cost of the parts of one model per token of an answer. Valid only for that model; for others the mean applies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct LayerCosts {
    /// Largest spread of a layer's rounds, in percent.
    pub error_percent: u64,
    /// Bytes of each part, and ns per MiB.
    pub parts: Vec<(u64, u64)>,
}

impl LayerCosts {
    /// Returns the median of rounds, part by part; `None` without a round.
    pub(crate) fn of(rounds: &[Vec<PartTime>]) -> Option<Self> {
        let first = rounds.first()?;
        let mut error_percent = 0;
        let parts = first.iter().enumerate().map(|(place, part)| {
            let mut times: Vec<u64> = rounds
                .iter()
                .filter_map(|round| Some(round.get(place)?.ns_per_mib))
                .collect();
            times.sort_unstable();
            let (least, most) = (
                times.first().copied().unwrap_or(1).max(1),
                times.last().copied().unwrap_or(1),
            );
            error_percent =
                error_percent.max(most.saturating_sub(least).saturating_mul(100) / least);
            (
                part.bytes.get(),
                times.get(times.len() / 2).copied().unwrap_or(0),
            )
        });
        let parts = parts.collect();
        Some(Self {
            error_percent,
            parts,
        })
    }

    /// Returns whether the costs belong to this model, and are more exact than their mean.
    pub(crate) fn are_of(&self, shape: &ModelShape) -> bool {
        self.error_percent <= LAYERS_ERROR_MAX
            && self.parts.len() == shape.layers.len()
            && self
                .parts
                .iter()
                .zip(&shape.layers)
                .all(|((bytes, _), part)| *bytes == part.token_bytes().get())
    }

    /// Returns the cost of a part per MiB, in thousandths of the mean.
    pub(crate) fn cost(&self, part: u32) -> u64 {
        let (mut bytes, mut time) = (0u128, 0u128);
        for (size, ns) in &self.parts {
            bytes += u128::from(*size);
            time += u128::from(*size) * u128::from(*ns);
        }
        let ns = usize::try_from(part)
            .ok()
            .and_then(|part| self.parts.get(part))
            .map_or(0, |(_, ns)| *ns);
        u64::try_from(u128::from(ns) * 1000 * bytes / time.max(1)).unwrap_or(u64::MAX)
    }

    /// Returns the rates of the slowest and the fastest part, MiB per second.
    fn range(&self) -> (u64, u64) {
        let rates = || self.parts.iter().map(|(_, ns)| 1_000_000_000 / ns.max(&1));
        (rates().min().unwrap_or(0), rates().max().unwrap_or(0))
    }
}

/// Conditions of a computing measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Setting {
    /// Processor, with the number of cores.
    pub processor: String,
    /// Number of compute threads.
    pub threads: usize,
    /// Types of most of the weights: `Q4_K, Q6_K`.
    pub weights: String,
}

impl Setting {
    /// Returns the conditions on this machine for a model.
    pub(crate) fn here(inspected: &Inspected, threads: usize) -> Self {
        let most = inspected.tensors.iter().max_by_key(|group| group.bytes);
        Self {
            processor: Host::read().processor,
            threads,
            weights: most.map_or_else(String::new, |group| group.types.join(", ")),
        }
    }
}

impl Coefficients {
    /// Reads the coefficients in `path`; `None` without a file.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>, CliError> {
        let cannot = |error: std::io::Error| {
            let hint = (error.kind() == ErrorKind::PermissionDenied)
                .then(|| "run as root, or name another file with --calibration".to_owned());
            CliError::failed(format!("cannot read `{}`", path.display()), error).with_hint(hint)
        };
        let mut text = String::new();
        match File::open(path) {
            Ok(file) => file
                .take(FILE_MAX)
                .read_to_string(&mut text)
                .map_err(cannot)?,
            Err(error)
                if error.kind() == ErrorKind::NotFound && path == Path::new(DEFAULT_FILE) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(cannot(error)),
        };
        let parsed = serde_json::from_str(&text);
        parsed.map(Some).map_err(|error| {
            CliError::failed(
                format!("cannot use the coefficients in `{}`", path.display()),
                error,
            )
            .with_hint("measure again with `cotenant calibrate MODEL`".to_owned())
            .with_code(exit::CONFIG)
        })
    }

    /// Returns a warning if the rounds differed by more than the error assumed without a measurement.
    pub(crate) fn doubt(&self) -> Option<String> {
        (self.error_percent > UNMEASURED_PERCENT).then(|| {
            format!(
                "compute rounds differ by {} %, more than the {UNMEASURED_PERCENT} % assumed without a measurement",
                self.error_percent
            )
        })
    }

    /// Computes coefficients from rounds of the engine and a reading of the disk; `None` without a round.
    pub(crate) fn of(
        mut rounds: Vec<Calibration>,
        disk: DiskRates,
        setting: Setting,
    ) -> Option<Self> {
        rounds.sort_by_key(|round| round.compute_ns_per_mib);
        let middle = rounds.get(rounds.len() / 2).copied()?;
        // Disk rates during a long answer.
        let reading = middle
            .read_ns_per_mib
            .max(1_000_000_000 / disk.sustained_mib_per_s.max(1));
        Some(Self {
            calibration: middle.with_reading(reading),
            disk,
            error_percent: spread(&rounds).max(ERROR_MIN),
            setting,
            layers: None,
        })
    }
}

/// Destination of coefficients: opened before the measurement, and replaced atomically.
struct Kept<'a> {
    path: &'a Path,
    written: PathBuf,
    file: File,
}

impl<'a> Kept<'a> {
    fn open(path: &'a Path) -> Result<Self, CliError> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        let written = path.with_file_name(name);
        // When root writes to a folder of another user, that user must not redirect the write by a link.
        let no_links = OFlag::O_NOFOLLOW.bits();
        let opened = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o644)
            .custom_flags(no_links)
            .open(&written);
        let file = opened.map_err(|error| {
            CliError::failed(format!("cannot write `{}`", path.display()), error).with_hint(
                "nothing was measured; run as root, or name another file with --out".to_owned(),
            )
        })?;
        Ok(Self {
            path,
            written,
            file,
        })
    }

    fn keep(mut self, text: &str) -> Result<(), CliError> {
        let kept = self
            .file
            .write_all(text.as_bytes())
            .and_then(|()| self.file.sync_all())
            .and_then(|()| fs::rename(&self.written, self.path));
        kept.map_err(|error| {
            CliError::failed(format!("cannot write `{}`", self.path.display()), error)
        })
    }
}

impl Drop for Kept<'_> {
    /// Removes an unfinished file; a finished one has been renamed.
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.written);
    }
}

pub(crate) fn run(global: &Global, args: &CalibrateArgs) -> Result<(), CliError> {
    let cannot = |act: &str| format!("cannot {act} `{}`", args.model.display());
    let threads = args.threads.map_or_else(threads_here, usize::from);
    let failed = |error| CliError::failed(cannot("load"), error);
    let inspected =
        Engine::inspect_with(&args.model, None, threads).map_err(|error| refused(&error))?;
    let kept = Kept::open(&args.out)?;
    let mut progress = Progress::new();
    let whole = u64::from(ROUNDS) + READING_TIME.as_secs();
    let mut show = |done: u64, what: &str| progress.show(done, whole, what);
    let disk = DiskRates::measure(&args.model, READING_TIME, &mut |at| {
        show(at.as_secs(), "reading the disk");
    })
    .map_err(|error| CliError::failed(cannot("measure the disk of"), error))?;
    show(READING_TIME.as_secs(), "loading the model");
    let engine = EngineParams {
        kv_wanted: Tokens::new(512),
        kv_floor: Tokens::new(512),
        ..EngineParams::default()
    };
    let plan = inspected
        .shape
        .full_plan(&PlanLimits::new(&engine, Tokens::ZERO));
    let mut model =
        Model::open(&args.model, &plan, &ModelOptions::for_threads(threads)).map_err(failed)?;
    let (mut rounds, mut layers) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        show(READING_TIME.as_secs() + u64::from(round), "computing");
        let measured = model.calibrate(&mut || true);
        let measured = measured.map_err(|error| CliError::failed(cannot("measure with"), error))?;
        rounds.extend(measured);
        layers.extend(model.part_times(&mut || true));
    }
    drop(progress);
    let taken = rounds.len();
    let Some(mut coefficients) = Coefficients::of(rounds, disk, Setting::here(&inspected, threads))
    else {
        return Err(CliError::plain(cannot("measure with"), exit::FAILED));
    };
    coefficients.layers = LayerCosts::of(&layers);
    if let Some(doubt) = coefficients.doubt() {
        eprintln!("warning: {doubt}; measure again while nothing else computes");
    }
    let text = serde_json::to_string_pretty(&coefficients)
        .map_err(|error| CliError::failed("cannot write the coefficients", error))?;
    kept.keep(&(text + "\n"))?;
    let per_s = |ns_per_mib: u64| 1_000_000_000 / ns_per_mib.max(1);
    match global.output {
        Output::Table => output::write(&format!(
            "computing: {} MiB/s of {} on {threads} threads of {}, ± {} % over {taken} rounds\n\
             {}\
             reading: {} MiB/s at first, {} MiB/s sustained; 95 % of the time {} to {} MiB/s\n\
             written to {}\n",
            per_s(coefficients.calibration.compute_ns_per_mib),
            coefficients.setting.weights,
            coefficients.setting.processor,
            coefficients.error_percent,
            coefficients
                .layers
                .as_ref()
                .map_or_else(String::new, |layers| {
                    let (slow, fast) = layers.range();
                    let parts = layers.parts.len();
                    format!(
                        "layers: {parts} parts of {slow} to {fast} MiB/s, ± {} %\n",
                        layers.error_percent
                    )
                }),
            disk.burst_mib_per_s,
            disk.sustained_mib_per_s,
            disk.slow_mib_per_s,
            disk.fast_mib_per_s,
            args.out.display(),
        )),
        format => output::write_json(format, &json!(coefficients)),
    }
}

/// Returns the engine's default: one thread per physical core.
pub(crate) fn threads_here() -> usize {
    usable_cores(&ProbeRoot::default())
}

/// Returns the spread of computing rounds, in percent of the fastest.
fn spread(rounds: &[Calibration]) -> u64 {
    let of = |rounds: &[Calibration], least: bool| {
        let times = rounds.iter().map(|round| round.compute_ns_per_mib);
        if least { times.min() } else { times.max() }
            .unwrap_or(1)
            .max(1)
    };
    let (least, most) = (of(rounds, true), of(rounds, false));
    (most - least).saturating_mul(100) / least
}

/// Default file of coefficients, also for `plan`.
pub(super) const DEFAULT_FILE: &str = "/var/lib/cotenant/calibration.json";
/// Error assumed without a measurement: half to one and a half of the stated value.
pub(super) const UNMEASURED_PERCENT: u64 = 50;
/// Number of rounds, of about a second each.
const ROUNDS: u32 = 5;
/// Spread above which layers are planned by their mean, as on a busy machine or with a tiny model (our choice).
const LAYERS_ERROR_MAX: u64 = 50;
/// Lower bound of the error: a board warms up.
const ERROR_MIN: u64 = 10;
const READING_TIME: Duration = Duration::from_secs(8);
const FILE_MAX: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_that_differ_by_more_than_is_assumed_without_them_are_doubted() {
        let of = |slowest: u64| {
            let round = |ns| Calibration {
                compute_ns_per_mib: ns,
                read_ns_per_mib: 1,
                read_busy_ns_per_mib: 1,
                slowed_ns_per_mib: 0,
                prefill_ns_per_mib: 0,
            };
            let disk = DiskRates {
                burst_mib_per_s: 1,
                sustained_mib_per_s: 1,
                slow_mib_per_s: 1,
                fast_mib_per_s: 1,
            };
            let setting = Setting {
                processor: String::new(),
                threads: 1,
                weights: String::new(),
            };
            Coefficients::of(vec![round(100), round(slowest)], disk, setting)
                .unwrap()
                .doubt()
        };
        assert_eq!(of(140), None);
        assert!(of(250).is_some_and(|doubt| doubt.contains("differ by 150 %")));
    }

    #[test]
    fn coefficients_of_another_form_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "{}").unwrap();
        let error = Coefficients::read(file.path()).unwrap_err();
        assert_eq!(error.code(), exit::CONFIG);
        assert_eq!(
            error.hint().unwrap_or_default(),
            "measure again with `cotenant calibrate MODEL`"
        );
        // Only a missing file counts as absent; a folder in its place is a fault.
        let error = Coefficients::read(Path::new("/")).unwrap_err();
        assert_eq!(error.code(), exit::FAILED);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_refused_before_the_measurement_and_left_as_it_was_after_a_failure()
     {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("calibration.json");
        fs::write(&out, "before").unwrap();
        drop(Kept::open(&out).unwrap());
        assert_eq!(fs::read_to_string(&out).unwrap(), "before");
        assert_eq!(
            folder.path().read_dir().unwrap().count(),
            1,
            "nothing is left beside it"
        );
        Kept::open(&out).unwrap().keep("after").unwrap();
        assert_eq!(fs::read_to_string(&out).unwrap(), "after");
        let error = Kept::open(&folder.path().join("absent/calibration.json"))
            .err()
            .unwrap();
        assert!(
            error
                .hint()
                .unwrap_or_default()
                .starts_with("nothing was measured"),
            "{error}"
        );
    }
}
