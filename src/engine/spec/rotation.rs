//! Angles of rotary position embedding.

/// Mapping from positions to angles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotation {
    /// Base of the angles: pair i turns by `base^(−2i / rotated elements)` for each position.
    pub base: f32,
    /// Factor of positions: the inverse of the context's stretch factor.
    pub scale: f32,
    /// Fast-turning pairs keep their angle (YaRN): pair i's share of the unscaled angle falls from one to zero between
    /// these two pairs.
    pub blend: Option<(f32, f32)>,
    /// Factor of cosines and sines.
    pub magnitude: f32,
}

impl Rotation {
    /// Unscaled angles with `base`.
    pub const fn plain(base: f32) -> Self {
        Self {
            base,
            scale: 1.0,
            blend: None,
            magnitude: 1.0,
        }
    }

    /// No rotation.
    pub const STILL: Self = Self {
        scale: 0.0,
        ..Self::plain(BASE)
    };

    /// Writes the cosine and sine of each pair at `position`; `factors` divides each pair's angle.
    ///
    /// Uses ggml's recurrence, so that the angles agree to the last bits.
    #[expect(
        clippy::cast_precision_loss,
        reason = "positions and head sizes are far below 2^24"
    )]
    pub fn fill(&self, position: usize, factors: Option<&[f32]>, out: &mut [f32]) {
        let step = self.base.powf(-2.0 / out.len() as f32);
        let mut angle = position as f32;
        for (pair, entry) in out.chunks_exact_mut(2).enumerate() {
            let factor = factors
                .and_then(|factors| factors.get(pair))
                .copied()
                .unwrap_or(1.0);
            let whole = angle / factor;
            let mut turned = self.scale * whole;
            if let Some((low, high)) = self.blend {
                let fall = (pair as f32 - low) / (high - low).max(0.001);
                let kept = 1.0 - fall.clamp(0.0, 1.0);
                turned = turned * (1.0 - kept) + whole * kept;
            }
            let (sin, cos) = turned.sin_cos();
            entry.copy_from_slice(&[cos * self.magnitude, sin * self.magnitude]);
            angle *= step;
        }
    }
}

/// llama.cpp's default for `rope.freq_base`.
pub(super) const BASE: f32 = 10_000.0;
