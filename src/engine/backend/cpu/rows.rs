//! Weight rows and the tokens multiplied with them.

use super::share::Share;

/// Weight rows, and the tokens multiplied with them.
pub(super) struct Rows<'job> {
    /// Consecutive rows.
    pub(super) weights: &'job [u8],
    pub(super) row_bytes: usize,
    pub(super) columns: usize,
    pub(super) floats: &'job [f32],
    /// Copies of at least `tokens` tokens, `copy_step` bytes apart.
    pub(super) copies: &'job [u8],
    pub(super) copy_step: usize,
    pub(super) tokens: usize,
    pub(super) out: &'job Share<'job, f32>,
    pub(super) stride: usize,
    pub(super) first: usize,
}

impl Rows<'_> {
    /// Start of the copy of `token`.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(super) fn copy(&self, token: usize) -> *const u8 {
        self.copies[token * self.copy_step..].as_ptr()
    }

    /// Writes the product of weight row `row` with `token`.
    pub(super) fn put(&self, token: usize, row: usize, value: f32) {
        // SAFETY: each output element belongs to one weight row, and each row to one item of the pool.
        unsafe { self.out.set(token * self.stride + self.first + row, value) };
    }

    /// Starts of the rows from `first`; the last row substitutes for missing ones.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    #[inline(always)]
    pub(super) fn starts<const N: usize>(&self, first: usize) -> [*const u8; N] {
        let last = self.weights.len() - self.row_bytes;
        std::array::from_fn(|lane| {
            self.weights[((first + lane) * self.row_bytes).min(last)..].as_ptr()
        })
    }

    /// Writes the products of the rows from `first` with `token`, one per lane, for the first `count` rows.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    #[inline(always)]
    pub(super) fn put_lanes<const N: usize>(
        &self,
        token: usize,
        first: usize,
        count: usize,
        lanes: [f32; N],
    ) {
        let len = count.saturating_sub(first).min(N);
        if len == 0 {
            return;
        }
        // SAFETY: as in `put`.
        let out = unsafe {
            self.out
                .slice(token * self.stride + self.first + first, len)
        };
        // All at once if they exist, without a loop.
        if let Some(out) = out.first_chunk_mut() {
            *out = lanes;
        } else {
            for (out, lane) in out.iter_mut().zip(lanes) {
                *out = lane;
            }
        }
    }
}

/// Eight scales and eight minimums, a byte each, from the head of a Q4_K or Q5_K block.
///
/// # Safety
///
/// `block` is such a block.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
pub(super) unsafe fn six_bit_head(block: *const u8) -> (u64, u64) {
    // SAFETY: sixteen bytes are the head of the block.
    let [a, b, c] = unsafe { block.add(4).cast::<[u32; 3]>().read_unaligned() };
    let (a, b, c) = (u32::from_le(a), u32::from_le(b), u32::from_le(c));
    let join = |low: u32, high: u32| u64::from(low) | (u64::from(high) << 32);
    let scales = join(
        a & 0x3f3f_3f3f,
        (c & 0x0f0f_0f0f) | (((a >> 6) & 0x0303_0303) << 4),
    );
    let mins = join(
        b & 0x3f3f_3f3f,
        ((c >> 4) & 0x0f0f_0f0f) | (((b >> 6) & 0x0303_0303) << 4),
    );
    (scales, mins)
}
