//! Streaming resampler.

use rubato::{
    Async, FixedAsync, Indexing, Resampler as _, SincInterpolationParameters,
    SincInterpolationType, WindowFunction, audioadapter_buffers::direct::InterleavedSlice,
};

/// Resamples mono audio, piece by piece.
///
/// The delay of the filter is removed, so that `n` samples become `⌈n × to / from⌉` and keep their positions in time.
pub struct Resampler {
    inner: Async<f32>,
    from_hz: u32,
    to_hz: u32,
    /// Samples of an incomplete block.
    pending: Vec<f32>,
    /// One block of output.
    block: Vec<f32>,
    /// Output still to be discarded for the filter's delay.
    delay: usize,
    taken: u64,
    given: u64,
}

impl std::fmt::Debug for Resampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resampler")
            .field("from_hz", &self.from_hz)
            .field("to_hz", &self.to_hz)
            .finish_non_exhaustive()
    }
}

impl Resampler {
    /// A resampler between two rates.
    ///
    /// # Errors
    /// If a rate is zero.
    pub fn new(from_hz: u32, to_hz: u32) -> Result<Self, ResampleError> {
        let failed = |source| ResampleError::New {
            from_hz,
            to_hz,
            source,
        };
        // For all rates: an FFT would be faster, but it adds 0.85 MB to the program, and 20 MiB for coprime rates.
        let parameters = SincInterpolationParameters {
            sinc_len: 128,
            f_cutoff: None,
            oversampling_factor: 128,
            interpolation: SincInterpolationType::Cubic,
            window: WindowFunction::BlackmanHarris2,
        };
        let ratio = f64::from(to_hz) / f64::from(from_hz);
        let inner = Async::new_sinc(ratio, 1.0, &parameters, BLOCK, 1, FixedAsync::Input)
            .map_err(failed)?;
        Ok(Self {
            block: vec![0.0; inner.output_frames_max()],
            delay: inner.output_delay(),
            inner,
            from_hz,
            to_hz,
            pending: Vec::new(),
            taken: 0,
            given: 0,
        })
    }

    /// Resamples a piece; returns the available samples.
    ///
    /// # Errors
    /// If the resampler fails, which its sizes exclude.
    pub fn push(&mut self, samples: &[i16]) -> Result<Vec<i16>, ResampleError> {
        self.taken += u64::try_from(samples.len()).unwrap_or(u64::MAX);
        self.pending.extend(
            samples
                .iter()
                .map(|&sample| f32::from(sample) / f32::from(i16::MAX)),
        );
        let mut output = Vec::new();
        let mut used = 0;
        while self.pending.len() - used >= self.inner.input_frames_next() {
            used += self.step(used, None, &mut output)?;
        }
        self.pending.drain(..used);
        Ok(output)
    }

    /// Samples received, at the new rate.
    fn wanted(&self) -> u64 {
        let wanted =
            (u128::from(self.taken) * u128::from(self.to_hz)).div_ceil(u128::from(self.from_hz));
        u64::try_from(wanted).unwrap_or(u64::MAX)
    }

    /// Output samples still to come for the input so far.
    pub fn behind(&self) -> u64 {
        self.wanted().saturating_sub(self.given)
    }

    /// Returns the remaining samples; errors as for [`push`](Self::push).
    pub fn finish(mut self) -> Result<Vec<i16>, ResampleError> {
        let wanted = self.wanted();
        let mut output = Vec::new();
        let mut rest = self.pending.len();
        while self.given < wanted {
            self.step(0, Some(rest), &mut output)?;
            rest = 0;
        }
        let excess = usize::try_from(self.given - wanted).unwrap_or(usize::MAX);
        output.truncate(output.len().saturating_sub(excess));
        Ok(output)
    }

    /// Processes one block from `pending[offset..]`, of which `partial` samples are valid; returns the number consumed.
    fn step(
        &mut self,
        offset: usize,
        partial: Option<usize>,
        output: &mut Vec<i16>,
    ) -> Result<usize, ResampleError> {
        let input = InterleavedSlice::new(&self.pending, 1, self.pending.len())
            .map_err(|_| ResampleError::Sizes)?;
        let room = self.block.len();
        let mut block = InterleavedSlice::new_mut(&mut self.block, 1, room)
            .map_err(|_| ResampleError::Sizes)?;
        let indexing = Indexing {
            input_offset: offset,
            partial_len: partial,
            ..Indexing::default()
        };
        let (taken, given) = self
            .inner
            .process_into_buffer(&input, &mut block, Some(&indexing))
            .map_err(ResampleError::Run)?;
        let skipped = self.delay.min(given);
        self.delay -= skipped;
        let ready = self.block.get(skipped..given).unwrap_or_default();
        self.given += u64::try_from(ready.len()).unwrap_or(u64::MAX);
        output.extend(ready.iter().map(|&sample| from_float(sample)));
        Ok(taken)
    }
}

/// Failure to convert a rate.
#[derive(Debug, thiserror::Error)]
pub enum ResampleError {
    /// The rates cannot be converted.
    #[error("cannot change the sample rate from {from_hz} to {to_hz} Hz")]
    New {
        /// Input samples per second.
        from_hz: u32,
        /// Output samples per second.
        to_hz: u32,
        /// Cause.
        source: rubato::ResamplerConstructionError,
    },
    /// A block failed.
    #[error("cannot change the sample rate of a block")]
    Run(#[source] rubato::ResampleError),
    /// A buffer is shorter than declared.
    #[error("cannot change the sample rate: a buffer is shorter than it should be")]
    Sizes,
}

/// Converts a sample between −1 and 1 to 16 bits; clips values outside, and maps NaN to silence.
#[expect(clippy::cast_possible_truncation, reason = "a float cast saturates")]
pub(super) fn from_float(sample: f32) -> i16 {
    (sample * f32::from(i16::MAX)).round() as i16
}

/// Input samples per block: 64 ms at 16 kHz.
const BLOCK: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    /// Half of the 16-bit amplitude.
    fn tone(rate_hz: u32, hz: f32, millis: u32) -> Vec<i16> {
        (0..rate_hz * millis / 1000)
            .map(|n| {
                // Whole periods are subtracted before the sine, because a float has too few digits for them.
                let turns = (f64::from(n) * f64::from(hz) / f64::from(rate_hz)).fract();
                from_float(0.5 * half(turns * std::f64::consts::TAU).sin())
            })
            .collect()
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "an angle needs no more digits"
    )]
    fn half(angle: f64) -> f32 {
        angle as f32
    }

    fn converted(from: u32, to: u32, samples: &[i16], piece: usize) -> Vec<i16> {
        let mut resampler = Resampler::new(from, to).unwrap();
        let mut output = Vec::new();
        for piece in samples.chunks(piece) {
            output.extend(resampler.push(piece).unwrap());
        }
        output.extend(resampler.finish().unwrap());
        output
    }

    #[test]
    fn a_tone_keeps_its_pitch_place_and_loudness() {
        for (from, to) in [
            (16_000, 24_000),
            (22_050, 24_000),
            (44_100, 16_000),
            (48_000, 16_000),
            (8_000, 16_000),
            (11_025, 16_000),
            (44_101, 16_000),
        ] {
            let output = converted(from, to, &tone(from, 440.0, 500), 777);
            let expected = tone(to, 440.0, 500);
            assert!(
                output.len().abs_diff(expected.len()) <= 1,
                "{from} to {to}: {} of {}",
                output.len(),
                expected.len()
            );
            let edge = to as usize / 20;
            let worst = output[edge..output.len() - edge]
                .iter()
                .zip(&expected[edge..])
                .map(|(a, b)| (i32::from(*a) - i32::from(*b)).abs())
                .max()
                .unwrap();
            // The filter's delay is removed in whole samples, so a shift of up to one sample remains.
            assert!(worst < 3_000, "{from} to {to}: off by {worst} of 16000");
        }
    }

    #[test]
    fn pieces_do_not_change_the_result() {
        let samples = tone(22_050, 300.0, 200);
        assert_eq!(
            converted(22_050, 24_000, &samples, 1),
            converted(22_050, 24_000, &samples, usize::MAX)
        );
    }

    #[test]
    fn what_lies_above_the_new_range_is_gone() {
        let output = converted(44_100, 16_000, &tone(44_100, 12_000.0, 500), 4096);
        let loudest = output[800..output.len() - 800]
            .iter()
            .map(|s| s.unsigned_abs())
            .max()
            .unwrap();
        assert!(loudest < 200, "an alias of {loudest} of 16000");
    }

    #[test]
    fn nothing_becomes_nothing() {
        assert!(converted(44_100, 16_000, &[], 1).is_empty());
        assert_eq!(converted(8_000, 16_000, &[5], 1).len(), 2);
    }

    #[test]
    fn a_rate_of_zero_is_an_error() {
        for (from, to) in [(0, 16_000), (16_000, 0)] {
            assert_eq!(
                Resampler::new(from, to).unwrap_err().to_string(),
                format!("cannot change the sample rate from {from} to {to} Hz")
            );
        }
    }
}
