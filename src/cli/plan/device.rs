//! Devices for a plan: boards by name, this machine, or a file.

use std::{fs::File, io::Read as _, path::Path};

use serde::{Deserialize, Serialize};

use crate::{
    exit::{self, CliError},
    plan::calibrate::{Coefficients, LayerCosts, Setting, UNMEASURED_PERCENT},
};
use cotenant_config::parse_size;
use cotenant_policy::speed::Calibration;
use cotenant_probe::{ProbeRoot, Sampler};
use cotenant_units::Bytes;

/// Properties of a device for a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Device {
    /// Its name.
    pub name: String,
    /// `MemTotal`.
    pub memory: Bytes,
    /// Part of it in the CMA, which serves cameras and displays first.
    pub cma: Bytes,
    /// Speeds of its memory and disk.
    pub rates: Rates,
    /// Measurements of the engine on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
    /// Cost of the parts of the measured model.
    #[serde(skip)]
    pub layers: Option<LayerCosts>,
    /// Conditions of the measurement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_with: Option<Setting>,
    /// Reasons why the error exceeds that of the measurement.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub doubts: Vec<String>,
}

/// Rates of a device, and their accuracy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Rates {
    /// Rate of computing on weights for a token of an answer, MiB per second.
    pub memory_mib_per_s: u64,
    /// Sustained rate of reading weights from the disk, MiB per second.
    pub disk_mib_per_s: u64,
    /// Bounds of the disk rate for 95 % of the time.
    pub disk_interval_mib_per_s: [u64; 2],
    /// Error of computing, in percent.
    pub error_percent: u64,
}

impl Rates {
    /// Returns rates with a known error only.
    fn within(memory_mib_per_s: u64, disk_mib_per_s: u64, error_percent: u64) -> Self {
        let part = |percent: u64| (disk_mib_per_s.saturating_mul(percent) / 100).max(1);
        Self {
            memory_mib_per_s,
            disk_mib_per_s,
            disk_interval_mib_per_s: [
                part(100u64.saturating_sub(error_percent)),
                part(100 + error_percent),
            ],
            error_percent,
        }
    }

    /// Converts the rates to policy's form.
    pub(crate) fn speed(self) -> Calibration {
        let ns_per_mib = |mib_per_s: u64| 1_000_000_000 / mib_per_s.max(1);
        let (compute, field) = (ns_per_mib(self.memory_mib_per_s), Calibration::FIELD);
        Calibration {
            compute_ns_per_mib: compute,
            // A prompt is bound by computing; the ratio is that of the field data.
            prefill_ns_per_mib: compute * field.prefill_ns_per_mib / field.compute_ns_per_mib,
            ..field.with_reading(ns_per_mib(self.disk_mib_per_s))
        }
    }
}

struct Board {
    name: &'static str,
    memory_mib: u64,
    cma_mib: u64,
    memory_mib_per_s: u64,
    disk_mib_per_s: u64,
}

/// `MemTotal` as captured from each board. Bandwidth: our assumption, 0.3 of the data sheet's for CPU kernels on a
/// Jetson; for the Pi the equivalent of measured answers of a 1 GiB model. Disk: our assumption for sustained large
/// reads of NVMe.
const BOARDS: [Board; 5] = [
    Board {
        name: "orin-nx-16g",
        memory_mib: 15_656,
        cma_mib: 256,
        memory_mib_per_s: 29_300,
        disk_mib_per_s: 1900,
    },
    Board {
        name: "orin-nano-8g",
        memory_mib: 7619,
        cma_mib: 256,
        memory_mib_per_s: 19_450,
        disk_mib_per_s: 1900,
    },
    Board {
        name: "agx-orin-64g",
        memory_mib: 62_841,
        cma_mib: 256,
        memory_mib_per_s: 58_600,
        disk_mib_per_s: 1900,
    },
    Board {
        name: "thor",
        memory_mib: 125_772,
        cma_mib: 256,
        memory_mib_per_s: 78_100,
        disk_mib_per_s: 1900,
    },
    Board {
        name: "rpi5-16g",
        memory_mib: 16_218,
        cma_mib: 64,
        memory_mib_per_s: 8000,
        disk_mib_per_s: 380,
    },
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceFile {
    name: Option<String>,
    memory: String,
    #[serde(default = "no_size")]
    cma: String,
    memory_bandwidth: String,
    disk_bandwidth: String,
    #[serde(default = "unmeasured")]
    error_percent: u64,
}

fn no_size() -> String {
    "0B".to_owned()
}

const fn unmeasured() -> u64 {
    UNMEASURED_PERCENT
}

impl Device {
    pub(crate) fn boards() -> impl Iterator<Item = Self> {
        BOARDS.iter().map(|board| Self {
            name: board.name.to_owned(),
            memory: Bytes::from_mib(board.memory_mib),
            cma: Bytes::from_mib(board.cma_mib),
            rates: Rates::within(
                board.memory_mib_per_s,
                board.disk_mib_per_s,
                UNMEASURED_PERCENT,
            ),
            calibration: None,
            layers: None,
            measured_with: None,
            doubts: Vec::new(),
        })
    }

    /// Returns the board with this name, or the device described by a file with this path.
    pub(crate) fn named(name: &str) -> Result<Self, CliError> {
        if let Some(board) = Self::boards().find(|board| board.name == name) {
            return Ok(board);
        }
        if !Path::new(name).exists() {
            let known: Vec<_> = BOARDS.iter().map(|board| board.name).collect();
            let error =
                format!("cannot plan for device `{name}`: neither a known board nor a file");
            return Err(CliError::plain(error, exit::USAGE)
                .with_hint(format!("known boards: {}", known.join(", "))));
        }
        Self::read(Path::new(name))
    }

    fn read(path: &Path) -> Result<Self, CliError> {
        let act = || format!("cannot read device file `{}`", path.display());
        let mut text = String::new();
        File::open(path)
            .and_then(|file| file.take(DEVICE_FILE_MAX).read_to_string(&mut text))
            .map_err(|error| CliError::failed(act(), error))?;
        let file: DeviceFile =
            serde_yaml::from_str(&text).map_err(|error| CliError::failed(act(), error))?;
        let size = |key: &str, text: &str| {
            parse_size(text)
                .map_err(|error| CliError::failed(format!("{}: {key}: `{text}`", act()), error))
        };
        let rate = |key: &str, text: &str| {
            let per_s = size(key, text)?;
            Ok::<_, CliError>(per_s.whole_mib().max(1))
        };
        let memory = size("memory", &file.memory)?;
        if memory < MEMORY_MIN {
            let act = format!("{}: memory: `{memory}` is below {MEMORY_MIN}", act());
            return Err(CliError::plain(act, exit::CONFIG));
        }
        Ok(Self {
            name: file.name.unwrap_or_else(|| path.display().to_string()),
            memory,
            cma: size("cma", &file.cma)?.min(memory),
            rates: Rates::within(
                rate("memory_bandwidth", &file.memory_bandwidth)?,
                rate("disk_bandwidth", &file.disk_bandwidth)?,
                file.error_percent.min(99),
            ),
            calibration: None,
            layers: None,
            measured_with: None,
            doubts: Vec::new(),
        })
    }

    /// Returns this machine, with the coefficients in this file.
    pub(crate) fn here(kept: &Path) -> Result<Self, CliError> {
        let kept = Coefficients::read(kept)?;
        let root = ProbeRoot::default();
        let cannot = |error| CliError::failed("cannot read the memory of this machine", error);
        let reading = Sampler::open(&root, None)
            .and_then(|mut sampler| sampler.read())
            .map_err(cannot)?;
        let (memory, cma) = (reading.total(), reading.meminfo.cma_total);
        let per_s = |ns_per_mib: u64| 1_000_000_000 / ns_per_mib.max(1);
        let field = Calibration::FIELD;
        let assumed = Rates::within(
            per_s(field.compute_ns_per_mib),
            per_s(field.read_ns_per_mib),
            UNMEASURED_PERCENT,
        );
        Ok(Self {
            name: "this machine".to_owned(),
            memory,
            cma: cma.unwrap_or(Bytes::ZERO).min(memory),
            rates: kept.as_ref().map_or(assumed, Coefficients::rates),
            calibration: kept.as_ref().map(|kept| kept.calibration),
            layers: kept.as_ref().and_then(|kept| kept.layers.clone()),
            doubts: kept.iter().filter_map(Coefficients::doubt).collect(),
            measured_with: kept.map(|kept| kept.setting),
        })
    }

    /// Widens the error for differences between the measured conditions and the planned ones.
    pub(crate) fn compare(&mut self, runs_with: impl FnOnce() -> Setting) {
        let Some(measured) = &self.measured_with else {
            return;
        };
        let runs = runs_with();
        let mut widen = |doubt: String, percent: u64| {
            self.doubts.push(format!("{doubt}: {percent} % more"));
            self.rates.error_percent = self
                .rates
                .error_percent
                .saturating_add(percent)
                .min(ERROR_MAX);
        };
        if measured.processor != runs.processor {
            widen(
                format!(
                    "measured on {}, and this is {}",
                    measured.processor, runs.processor
                ),
                UNMEASURED_PERCENT,
            );
        }
        if measured.threads != runs.threads {
            widen(
                format!(
                    "measured with {} threads, but {} will compute",
                    measured.threads, runs.threads
                ),
                OTHER_PERCENT,
            );
        }
        if measured.weights != runs.weights {
            widen(
                format!(
                    "measured with {}, but most weights are {}",
                    measured.weights, runs.weights
                ),
                OTHER_PERCENT,
            );
        }
    }
}

impl Coefficients {
    pub(crate) fn rates(&self) -> Rates {
        // A disk rate measured for some seconds is trusted to the minimum error at best.
        let part = |mib_per_s: u64, percent: u64| (mib_per_s.saturating_mul(percent) / 100).max(1);
        let slow = part(self.disk.slow_mib_per_s, 100 - ERROR_LEAST);
        let fast = part(self.disk.fast_mib_per_s, 100 + ERROR_LEAST);
        Rates {
            memory_mib_per_s: 1_000_000_000 / self.calibration.compute_ns_per_mib.max(1),
            disk_mib_per_s: self.disk.sustained_mib_per_s,
            disk_interval_mib_per_s: [slow, fast],
            error_percent: self.error_percent.min(ERROR_MAX),
        }
    }
}

/// Additional error for other weight types or thread counts, per MiB, on the processors that we have measured.
const OTHER_PERCENT: u64 = 25;
/// Minimum error of the disk rate, as for computing.
const ERROR_LEAST: u64 = 10;
/// Beyond it, an interval has no lower end.
const ERROR_MAX: u64 = 99;
const DEVICE_FILE_MAX: u64 = 64 << 10;
/// Below this, no budget remains.
const MEMORY_MIN: Bytes = Bytes::from_mib(192);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_otherwise_widens_the_error_and_is_named() {
        let setting = |processor: &str, threads, weights: &str| Setting {
            processor: processor.to_owned(),
            threads,
            weights: weights.to_owned(),
        };
        let measured = setting("8 × Cortex-A78AE", 4, "Q4_K, Q6_K");
        let compared = |runs: Setting| {
            let rates = Rates::within(10_000, 1000, 10);
            let board = Device::boards().next().unwrap();
            let mut device = Device {
                rates,
                measured_with: Some(measured.clone()),
                ..board
            };
            device.compare(|| runs);
            (device.rates.error_percent, device.doubts.join("; "))
        };
        assert_eq!(compared(measured.clone()), (10, String::new()));
        let (error, doubts) = compared(setting("8 × Cortex-A78AE", 6, "Q8_0"));
        assert_eq!(error, 60);
        assert_eq!(
            doubts,
            "measured with 4 threads, but 6 will compute: 25 % more; measured with Q4_K, Q6_K, but most weights are Q8_0: 25 % more"
        );
        assert_eq!(compared(setting("4 × Cortex-A76", 6, "Q8_0")).0, 99);
        let mut unmeasured = Device::boards().next().unwrap();
        unmeasured.compare(|| unreachable!("nothing was measured"));
        assert_eq!(unmeasured.rates.error_percent, UNMEASURED_PERCENT);
    }

    #[test]
    fn boards_are_known_by_name_and_others_by_file() {
        assert_eq!(
            Device::named("orin-nx-16g").unwrap().memory,
            Bytes::from_mib(15_656)
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("box.yaml");
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        write("{memory: 4GiB, memory_bandwidth: 20GiB, disk_bandwidth: 500MiB, error_percent: 10}");
        let device = Device::named(path.to_str().unwrap()).unwrap();
        assert_eq!(device.memory, Bytes::from_gib(4));
        assert_eq!(device.rates.disk_mib_per_s, 500);
        for (text, said) in [
            (
                "{memory: 4, memory_bandwidth: 1GiB, disk_bandwidth: 1GiB}",
                "memory: `4`",
            ),
            (
                "{memory: 1MiB, memory_bandwidth: 1GiB, disk_bandwidth: 1GiB}",
                "below 192 MiB",
            ),
            ("{memoryx: 1MiB}", "cannot read device file"),
        ] {
            write(text);
            let error = Device::named(path.to_str().unwrap())
                .unwrap_err()
                .to_string();
            assert!(error.contains(said), "{error}");
        }
        let error = Device::named("orin").unwrap_err();
        assert!(
            error.hint().unwrap_or_default().contains("orin-nano-8g"),
            "{error}"
        );
    }
}
