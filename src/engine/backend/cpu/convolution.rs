//! Short convolution: a gated input, its taps over the last tokens, and a gated output.

use super::{
    depthwise::{CHANNELS_PER_ITEM, TAPS_MAX, add_products, taps_of},
    isa::{Isa, kernel},
    pool::Pool,
    share::Share,
};
use crate::backend::{Convolve, DeviceError, memory::Access};

/// Returns the results of the rows.
pub(crate) fn convolve<'op>(
    pool: &mut Pool,
    isa: Isa,
    job: &'op Convolve,
    access: &mut Access<'op>,
) -> Result<&'op [f32], DeviceError> {
    let (channels, taps, rows) = (job.spec.channels, job.spec.taps, job.rows.len());
    let history = Share::new(access.write(&job.history)?);
    let all = access.write(&job.mixed)?;
    let start = job.rows.start;
    let mixed = Share::new(&mut *all);
    let convolution = access.read(&job.convolution)?;
    pool.run(channels.div_ceil(CHANNELS_PER_ITEM), &|item| {
        let from = item * CHANNELS_PER_ITEM;
        let count = CHANNELS_PER_ITEM.min(channels - from);
        let weights = taps_of(convolution, taps, from, count);
        // The gated inputs of the last tokens, the newest at the end.
        let mut last = [[0f32; CHANNELS_PER_ITEM]; TAPS_MAX];
        for (tap, last) in last[..taps - 1].iter_mut().enumerate() {
            // SAFETY: each channel belongs to one item.
            last[..count].copy_from_slice(unsafe { history.view(tap * channels + from, count) });
        }
        for row in start..start + rows {
            let mut out = [0f32; CHANNELS_PER_ITEM];
            {
                // SAFETY: as above. A result takes the place of inputs of its own channels, of rows before or of this
                // one, which is written once they have been read.
                let part =
                    |part: usize| unsafe { mixed.view((3 * row + part) * channels + from, count) };
                let newest = &mut last[taps - 1][..count];
                newest.copy_from_slice(part(0));
                scale(isa, newest, part(2));
                let out = &mut out[..count];
                for (last, weights) in last[..taps].iter().zip(&weights) {
                    add_products(isa, out, &last[..count], &weights[..count]);
                }
                scale(isa, out, part(1));
            }
            // SAFETY: as above.
            unsafe { mixed.slice(row * channels + from, count) }.copy_from_slice(&out[..count]);
            last[..taps].rotate_left(1);
        }
        let stays = if job.is_trial { 0 } else { taps - 1 };
        for (tap, last) in last[..stays].iter().enumerate() {
            // SAFETY: as above.
            unsafe { history.slice(tap * channels + from, count) }.copy_from_slice(&last[..count]);
        }
    });
    Ok(&all[start * channels..][..rows * channels])
}

kernel! {
    /// `x = x · by`, element by element.
    pub(crate) fn scale(x: &mut [f32], by: &[f32]) {
        for (x, by) in x.iter_mut().zip(by) {
            *x *= by;
        }
    }
}
