//! Predicted and measured speed for many sets of resident parts.

use std::collections::BTreeSet;

use cotenant::{
    cli::bench::engine::{TOKENS, count, in_one_line, mib, spread},
    policy::speed::Calibration,
    units::Bytes,
};

use super::Workbench;

impl Workbench<'_> {
    /// Calibrates, then predicts and measures the speed of many sets of resident parts.
    pub(crate) fn prediction(&mut self) -> Result<(), String> {
        self.model.reset();
        let started = std::time::Instant::now();
        let calibration = self
            .model
            .calibrate(&mut || true)
            .map_err(|error| in_one_line(&error))?
            .ok_or("the engine could not be calibrated")?;
        self.values
            .add("calibration", "ms", started.elapsed().as_secs_f64() * 1e3);
        self.values
            .add(DISK, MIB_PER_S, rate_of(calibration.read_ns_per_mib));
        let of_reading = |ns: u64| ratio(ns, calibration.read_ns_per_mib);
        self.values.add(
            "reading beside kernels, over reading alone",
            "times as long",
            of_reading(calibration.read_busy_ns_per_mib),
        );
        self.values.add(
            "computing lost to reading, over reading alone",
            "times as long",
            of_reading(calibration.slowed_ns_per_mib),
        );
        let first = self.tokens(0, 1);
        let parts = count(self.layout.parts.len());
        // State learned by the daemon after answers with the previous sets.
        let mut learned = calibration;
        for share in GRID {
            let resident = spread(parts, share);
            self.hold(resident.clone())?;
            self.model.reset();
            self.forward(&first)?;
            // The first tokens fill the ring.
            self.decode(2)?;
            let measured = 1.0 / self.long_decode()?;
            let (disk, processors) = self.as_of_now(calibration, share)?;
            let mut foretell = |by: Calibration, errors: &str| {
                let foretold = by.milli_tokens_per_s(self.model.shape(), &resident);
                let foretold = f64::from(u32::try_from(foretold).unwrap_or(u32::MAX)) / 1e3;
                let error = 100.0 * (foretold / measured - 1.0);
                self.values
                    .add(errors, "% off, all residencies", error.abs());
                (foretold, error)
            };
            let (foretold, error) = foretell(calibration, ERRORS);
            foretell(learned, "the same, learning from each answer before");
            foretell(disk, "the same, with the disk's speed of that minute");
            foretell(processors, "the same, with that of the processors as well");
            learned = learned.learn(self.model.shape(), &resident, in_ns(1.0 / measured));
            self.values
                .add(format!("measured at {share} %"), TOKENS, measured);
            self.values
                .add(format!("foretold at {share} %"), TOKENS, foretold);
            self.values.add(
                format!("foretold over measured at {share} %"),
                "% more",
                error,
            );
        }
        Ok(())
    }

    /// Returns the calibration with the current speed of the disk, and with that of the processors as well: this
    /// separates changes of the machine from errors of the model. Makes all parts resident.
    fn as_of_now(
        &mut self,
        calibration: Calibration,
        share: u32,
    ) -> Result<(Calibration, Calibration), String> {
        let all = self.bytes_of(|_| true);
        let streamed = {
            let resident = &self.model.plan().resident;
            self.bytes_of(|part| !resident.contains(&part))
        };
        let mut disk = calibration;
        if streamed > Bytes::ZERO {
            disk = calibration.with_reading(ns_per_mib(self.read_streamed()?, streamed));
            let rate = rate_of(disk.read_ns_per_mib);
            self.values
                .add("disk alone, beside each residency", MIB_PER_S, rate);
            self.values
                .add(format!("disk alone, beside {share} %"), MIB_PER_S, rate);
            self.values
                .add(format!("streamed at {share} %"), "MiB", mib(streamed));
        }
        self.apply(100)?;
        self.model.reset();
        let first = self.tokens(0, 1);
        self.forward(&first)?;
        let token = self.long_decode()?;
        Ok((disk, disk.with_computing(ns_per_mib(token, all))))
    }

    /// Measures the seconds per token, averaged over enough tokens that a brief disturbance does not matter.
    fn long_decode(&mut self) -> Result<f64, String> {
        let (mut seconds, mut turns) = (0.0, 0u32);
        while seconds * f64::from(GRID_TOKENS) < POINT_SECONDS && turns < POINT_TURNS {
            seconds += self.decode(GRID_TOKENS)?;
            turns += 1;
        }
        Ok(seconds / f64::from(turns.max(1)))
    }

    /// Returns the bytes of the parts selected by `wanted`.
    fn bytes_of(&self, wanted: impl Fn(u32) -> bool) -> Bytes {
        let parts = (0u32..).zip(&self.layout.parts);
        parts
            .filter(|(index, _)| wanted(*index))
            .map(|(_, part)| part.arena)
            .sum()
    }

    pub(crate) fn hold(
        &mut self,
        resident: BTreeSet<u32>,
    ) -> Result<cotenant::engine::ApplyReport, String> {
        let mut plan = self.model.plan().clone();
        plan.resident = resident;
        self.model.apply(&plan).map_err(|error| in_one_line(&error))
    }
}

/// Returns nanoseconds per MiB.
fn ns_per_mib(seconds: f64, bytes: Bytes) -> u64 {
    in_ns(seconds / mib(bytes).max(f64::EPSILON))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a time, below 2^63 ns"
)]
fn in_ns(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

/// Returns MiB per second.
fn rate_of(ns_per_mib: u64) -> f64 {
    1e9 / f64::from(u32::try_from(ns_per_mib.max(1)).unwrap_or(u32::MAX))
}

/// Returns the quotient of `ns` and `whole`.
fn ratio(ns: u64, whole: u64) -> f64 {
    f64::from(u32::try_from(ns).unwrap_or(u32::MAX))
        / f64::from(u32::try_from(whole.max(1)).unwrap_or(u32::MAX))
}

const MIB_PER_S: &str = "MiB/s";
/// The disk's speed at the calibration.
const DISK: &str = "disk alone, at the calibration";
/// Errors of all predictions.
pub(crate) const ERRORS: &str = "prediction error";
/// Resident shares for which speed is predicted.
const GRID: [u32; 11] = [100, 97, 94, 90, 85, 75, 60, 50, 40, 25, 0];
/// Tokens per measured share.
pub(crate) const GRID_TOKENS: u32 = 8;
/// Minimum duration of a measurement, unless it reaches the maximum of turns; all of them fit the context.
const POINT_SECONDS: f64 = 0.5;
const POINT_TURNS: u32 = 8;
