//! Division of a context among attention blocks, and its scratch memory.

use super::parameters::Kernel;

/// Rows that attend in one launch.
pub(super) struct Slice {
    pub(super) rows: usize,
    /// Tiles of the rows of a key head.
    pub(super) tiles: usize,
    /// Number of blocks for a row's context, and parts computed by each; 0: all.
    pub(super) groups: usize,
    pub(super) run: u32,
    /// Whether tiles have few rows.
    pub(super) is_few: bool,
}

impl Slice {
    /// For `left` rows after `position` others, with the given heads, key heads and elements per head: enough blocks to
    /// occupy all multiprocessors, within the memory for results.
    pub(super) fn of(
        (heads, kv_heads, dim): (usize, usize, usize),
        left: usize,
        position: usize,
        processors: usize,
    ) -> Self {
        let rows = left.min(SCRATCH_ROWS);
        let of_key_head = rows * (heads / kv_heads.max(1));
        let is_few = of_key_head <= FEW_ROWS;
        let tiles = of_key_head.div_ceil(if is_few { 4 } else { 16 });
        let context = position + rows;
        let places = (scratch_floats(1, dim) - rows * dim) / (dim + 2) / rows.max(1);
        let (parts, spans) = (
            context.div_ceil(PART_TOKENS),
            context.div_ceil(PART_TOKENS * SPAN_PARTS),
        );
        let (groups, run) = if kv_heads * tiles >= 2 * processors {
            (1, 0)
        } else if parts <= places {
            // Padded with idle blocks, so that the launches of the next tokens are identical.
            (parts.next_multiple_of(PARTS_STEP).min(places), 1)
        } else if spans <= places {
            (spans, SPAN)
        } else {
            (1, 0)
        };
        Self {
            rows,
            tiles,
            groups,
            run,
            is_few,
        }
    }
}

/// The kernel for tiles of few or many rows, with heads of `dim` elements, and its shared memory in bytes: see
/// `attention.cu`.
pub(super) const fn attend_kernel(is_few: bool, dim: usize) -> (Kernel, u32) {
    match (is_few, dim > 128) {
        (true, true) => (Kernel::AttendFew256, 64 << 10),
        (true, false) => (Kernel::AttendFew128, 48 << 10),
        (false, true) => (Kernel::Attend256, 80 << 10),
        (false, false) => (Kernel::Attend128, 40 << 10),
    }
}

/// Scratch floats of attention: partial results, followed by queries rotated back by a gap.
pub(super) const fn scratch_floats(heads: usize, dim: usize) -> usize {
    SCRATCH_ROWS * heads * (dim + 2 + dim)
}

/// Most rows that attend in one launch. The same memory holds the parts of one row and 16000 other tokens, or the spans
/// of eight times as many.
pub(super) const SCRATCH_ROWS: usize = 128;
/// Rows of a key head below which tiles have four rows.
const FEW_ROWS: usize = 8;
/// Tokens per part, and parts per span: `PART` and `SPAN` of `attention.cu`.
const PART_TOKENS: usize = 64;
const SPAN: u32 = 8;
const SPAN_PARTS: usize = SPAN as usize;
const PARTS_STEP: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_attention_writes_fits_its_memory_and_is_of_the_whole_context() {
        for (heads, kv_heads, dim) in [
            (16, 4, 256),
            (16, 8, 128),
            (32, 8, 64),
            (20, 1, 24),
            (7, 1, 128),
        ] {
            for left in [1, 2, 3, 8, 63, 64, 65, 127, 128, 512] {
                for position in [0, 63, 255, 1023, 15_999, 16_600, 40_000, 131_000, 1_000_000] {
                    for processors in [8, 132] {
                        let Slice {
                            rows, groups, run, ..
                        } = Slice::of((heads, kv_heads, dim), left, position, processors);
                        let used = rows * heads * (groups * (dim + 2) + dim);
                        assert!(
                            used <= scratch_floats(heads, dim),
                            "{left} rows behind {position}: {used}"
                        );
                        let parts = (position + rows).div_ceil(PART_TOKENS);
                        assert!(
                            rows > 0 && groups > 0 && (run == 0 || groups * run as usize >= parts)
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn one_token_attends_in_parts_then_in_spans_then_in_one_go() {
        let one = |position| {
            let slice = Slice::of((16, 4, 256), 1, position, 132);
            (slice.groups, slice.run)
        };
        assert_eq!(
            [3, 255, 256, 1023].map(one),
            [(4, 1), (4, 1), (8, 1), (16, 1)]
        );
        assert_eq!(
            [20_000, 1_000_000].map(one),
            [(20_001_usize.div_ceil(512), SPAN), (1, 0)]
        );
    }
}
