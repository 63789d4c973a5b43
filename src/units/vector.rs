//! Vectors of embeddings.

/// Scales a vector to length 1, unless it is zero.
pub fn normalise(vector: &mut [f32]) {
    let square: f64 = vector.iter().map(|number| f64::from(*number).powi(2)).sum();
    if square > 0.0 {
        #[expect(clippy::cast_possible_truncation, reason = "a quotient of floats")]
        let scale = |number: &mut f32| *number = (f64::from(*number) / square.sqrt()) as f32;
        vector.iter_mut().for_each(scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_is_scaled_to_length_1_unless_it_is_zero() {
        let mut vector = [3.0, -4.0];
        normalise(&mut vector);
        assert_eq!(vector, [0.6, -0.8]);
        let mut zero = [0.0, 0.0];
        normalise(&mut zero);
        assert_eq!(zero, [0.0, 0.0]);
    }
}
