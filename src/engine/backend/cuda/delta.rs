//! Launches of the gated delta rule.

use super::{
    launcher::{DELTA, Launcher, word},
    parameters::{DeltaJob, Job, Kernel},
};
use crate::backend::{Delta, DeviceError, Matrices};

impl Launcher {
    pub(super) fn delta(&mut self, job: &Delta) -> Result<(), DeviceError> {
        if job.is_trial {
            return Err(DeviceError::new("this device does not try states"));
        }
        let spec = &job.spec;
        let (rows, channels, values) = (job.rows.len(), spec.channels(), spec.values());
        let [of_one, of_inputs, of_chunk, of_results] = match spec.head_dim {
            32 => [
                Kernel::Delta32,
                Kernel::DeltaInputs32,
                Kernel::DeltaChunk32,
                Kernel::DeltaResults32,
            ],
            64 => [
                Kernel::Delta64,
                Kernel::DeltaInputs64,
                Kernel::DeltaChunk64,
                Kernel::DeltaResults64,
            ],
            128 => [
                Kernel::Delta128,
                Kernel::DeltaInputs128,
                Kernel::DeltaChunk128,
                Kernel::DeltaResults128,
            ],
            other => {
                return Err(DeviceError::new(format!(
                    "there is no kernel for a state of {other}"
                )));
            }
        };
        self.fits(&job.mixed, job.rows.end * channels * 4)?;
        self.fits(&job.gate, rows * values * 4)?;
        self.fits(&job.scratch, rows * channels * 4)?;
        let Matrices::Whole(state) = &job.state else {
            return Err(DeviceError::new("a state is in parts"));
        };
        self.fits(state, spec.state_len() * 4)?;
        self.fits(&job.history, spec.conv_len() * 4)?;
        let (keys, heads) = (word(spec.key_heads)?, word(spec.value_heads)?);
        let launched = DeltaJob {
            mixed: self.at(&job.mixed)? + (job.rows.start * channels * 4) as u64,
            gate: self.at(&job.gate)?,
            alpha: self.at(&job.alpha)?,
            beta: self.at(&job.beta)?,
            taps: self.at(&job.convolution)?,
            decay_bias: self.at(&job.decay_bias)?,
            decay: self.at(&job.decay)?,
            norm: self.at(&job.norm)?,
            state: self.at(state)?,
            history: self.at(&job.history)?,
            made: self.at(&job.scratch)?,
            to: self.prepare(&job.prepare, rows, values)?,
            counters: self.counter(DELTA),
            key_heads: keys,
            value_heads: heads,
            taps_count: word(spec.taps)?,
            tokens: word(rows)?,
            mixed_stride: word(channels)?,
            gate_stride: word(values)?,
            alpha_stride: heads,
            beta_stride: heads,
            epsilon: job.epsilon,
            unused: 0,
        };
        let blocks = (word(spec.head_dim / DELTA_ROWS)?, heads / keys.max(1), keys);
        if rows == 1 {
            return self.launch(of_one, blocks, 0, Job::Delta(launched));
        }
        // Until copies exist, their place holds the per-head values of the delta rule.
        if launched.to.stride / DELTA_SCALARS < heads {
            return Err(DeviceError::new(
                "a layer with a state makes no copies of its result",
            ));
        }
        let inputs = (keys + heads, word(rows.div_ceil(DELTA_TILE))?, 1);
        self.launch(of_inputs, inputs, 0, Job::Delta(launched))?;
        self.launch(of_chunk, blocks, 0, Job::Delta(launched))?;
        let results = (
            word(values.div_ceil(256))?,
            word(rows.div_ceil(DELTA_WARPS))?,
            1,
        );
        self.launch(of_results, results, 0, Job::Delta(launched))
    }
}

/// Rows of a state per block, tokens of a block of inputs and of one of results, and bytes of a head's scalars: see
/// `delta.cu`.
const DELTA_ROWS: usize = 32;
const DELTA_TILE: usize = 16;
const DELTA_WARPS: usize = 4;
const DELTA_SCALARS: u32 = 16;
