//! Reproducible numbers for tests.

/// `len` numbers from -1 to 1, determined by `seed`.
pub(super) fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            // The generator of Numerical Recipes; its upper bits are of better quality.
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        })
        .collect()
}
