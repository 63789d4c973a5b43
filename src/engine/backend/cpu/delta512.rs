//! Delta rule and selective scan for AVX-512, with two rows of state in registers.
//!
//! Sums have the order of [`dot`](super::float::dot), so that any number of tokens and any instruction set yield the
//! same bits.

use std::arch::x86_64::*;

use super::delta_steps::{DIM, Steps, TOKENS_TOGETHER};
use crate::backend::ROWS_TOGETHER;

/// Registers of a row.
const PARTS: usize = DIM / 16;

/// Applies the rule for all tokens of `steps` to rows of a state, of [`DIM`] elements, from row `first_row` on.
///
/// # Safety
///
/// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512); keys and queries have [`DIM`]
/// elements.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn apply(
    state: &mut [f32],
    first_row: usize,
    steps: &Steps<'_>,
    out: &mut [[f32; DIM]; TOKENS_TOGETHER],
) {
    assert_in_tests!(
        state.len().is_multiple_of(ROWS_TOGETHER * DIM)
            && state.len() + first_row * DIM <= DIM * DIM
            && steps
                .queries
                .iter()
                .chain(steps.keys)
                .all(|part| part.len() == DIM)
    );
    for (pair, rows) in state.chunks_exact_mut(ROWS_TOGETHER * DIM).enumerate() {
        let rows = rows.as_mut_ptr();
        let mut first = [_mm512_setzero_ps(); PARTS];
        let mut second = [_mm512_setzero_ps(); PARTS];
        for part in 0..PARTS {
            // SAFETY: two rows.
            unsafe {
                first[part] = _mm512_loadu_ps(rows.add(16 * part));
                second[part] = _mm512_loadu_ps(rows.add(DIM + 16 * part));
            }
        }
        for (token, out) in out.iter_mut().enumerate().take(steps.keys.len()) {
            let (key, query) = (steps.keys[token].as_ptr(), steps.queries[token].as_ptr());
            let (decay, strength) = (steps.decays[token], steps.strengths[token]);
            let value = &steps.values[token][first_row + 2 * pair..];
            let known = if steps.corrects {
                // SAFETY: a key.
                let known = unsafe { dots(key, &first, &second) };
                (known.0 * decay, known.1 * decay)
            } else {
                (0.0, 0.0)
            };
            let change = |value: f32, known: f32| _mm512_set1_ps(strength * (value - known));
            let (one, two) = (change(value[0], known.0), change(value[1], known.1));
            let factor = _mm512_set1_ps(decay);
            for part in 0..PARTS {
                // SAFETY: a part of the key.
                let k = unsafe { _mm512_loadu_ps(key.add(16 * part)) };
                first[part] = _mm512_fmadd_ps(k, one, _mm512_mul_ps(first[part], factor));
                second[part] = _mm512_fmadd_ps(k, two, _mm512_mul_ps(second[part], factor));
            }
            // SAFETY: a query.
            (out[2 * pair], out[2 * pair + 1]) = unsafe { dots(query, &first, &second) };
        }
        for part in 0..PARTS {
            // SAFETY: the same two rows.
            unsafe {
                _mm512_storeu_ps(rows.add(16 * part), first[part]);
                _mm512_storeu_ps(rows.add(DIM + 16 * part), second[part]);
            }
        }
    }
}

/// Products of two rows with one vector.
///
/// # Safety
///
/// `vector` has [`DIM`] elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn dots(
    vector: *const f32,
    first: &[__m512; PARTS],
    second: &[__m512; PARTS],
) -> (f32, f32) {
    let zero = _mm512_setzero_ps();
    let (mut a, mut b) = ([zero; 2], [zero; 2]);
    for part in 0..PARTS {
        // SAFETY: a part of the vector.
        let x = unsafe { _mm512_loadu_ps(vector.add(16 * part)) };
        a[part % 2] = _mm512_fmadd_ps(first[part], x, a[part % 2]);
        b[part % 2] = _mm512_fmadd_ps(second[part], x, b[part % 2]);
    }
    // Halving: 32 lanes, 16, 8; then both rows in one register.
    let eight = |lanes: [__m512; 2]| {
        let all = _mm512_add_ps(lanes[0], lanes[1]);
        _mm256_add_ps(
            _mm512_castps512_ps256(all),
            _mm512_extractf32x8_ps::<1>(all),
        )
    };
    let (a, b) = (eight(a), eight(b));
    let four = _mm256_add_ps(
        _mm256_permute2f128_ps::<0x20>(a, b),
        _mm256_permute2f128_ps::<0x31>(a, b),
    );
    let two = _mm256_add_ps(four, _mm256_permute_ps::<0b11_10>(four));
    let one = _mm256_add_ps(two, _mm256_movehdup_ps(two));
    (
        _mm256_cvtss_f32(one),
        _mm_cvtss_f32(_mm256_extractf128_ps::<1>(one)),
    )
}
