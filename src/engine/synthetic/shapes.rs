//! Shapes of public models.

use super::{Gemma4, Synthetic, TypeMix};
use crate::spec::Architecture;

impl Synthetic {
    /// The shape of Qwen3.5-0.8B.
    pub const fn qwen35_0_8b(types: TypeMix, seed: u64) -> Self {
        Self {
            architecture: Architecture::Qwen35,
            layers: 24,
            width: 1024,
            feed_forward: 3584,
            heads: 8,
            kv_heads: 2,
            head_dim: 256,
            rotary: 64,
            rotary_base: 1e7,
            windows: (0, 0),
            recurrent: (16, 16, 128),
            experts: (0, 0),
            gemma4: Gemma4::NONE,
            vocabulary: 248_320,
            context_max: 262_144,
            tied: true,
            nextn: 0,
            types,
            seed,
        }
    }

    /// The shape of Qwen3.5-4B.
    pub const fn qwen35_4b(types: TypeMix, seed: u64) -> Self {
        Self {
            layers: 32,
            width: 2560,
            feed_forward: 9216,
            heads: 16,
            kv_heads: 4,
            recurrent: (16, 32, 128),
            ..Self::qwen35_0_8b(types, seed)
        }
    }

    /// The shape of Qwen3.6-35B-A3B.
    pub const fn qwen35_35b_a3b(types: TypeMix, seed: u64) -> Self {
        Self {
            architecture: Architecture::Qwen35Moe,
            layers: 40,
            width: 2048,
            feed_forward: 512,
            heads: 16,
            kv_heads: 2,
            recurrent: (16, 32, 128),
            experts: (256, 8),
            tied: false,
            ..Self::qwen35_0_8b(types, seed)
        }
    }

    /// The shape of Qwen3-0.6B.
    pub const fn qwen3_0_6b(types: TypeMix, seed: u64) -> Self {
        Self {
            architecture: Architecture::Qwen3,
            layers: 28,
            width: 1024,
            feed_forward: 3072,
            heads: 16,
            kv_heads: 8,
            head_dim: 128,
            rotary: 128,
            rotary_base: 1e6,
            windows: (0, 0),
            recurrent: (0, 0, 0),
            experts: (0, 0),
            gemma4: Gemma4::NONE,
            vocabulary: 151_936,
            context_max: 40_960,
            tied: true,
            nextn: 0,
            types,
            seed,
        }
    }

    /// The shape of Qwen3-30B-A3B.
    pub const fn qwen3_30b_a3b(types: TypeMix, seed: u64) -> Self {
        Self {
            architecture: Architecture::Qwen3Moe,
            layers: 48,
            width: 2048,
            feed_forward: 768,
            heads: 32,
            kv_heads: 4,
            experts: (128, 8),
            tied: false,
            ..Self::qwen3_0_6b(types, seed)
        }
    }

    /// The shape of gpt-oss-20b.
    pub const fn gpt_oss_20b(types: TypeMix, seed: u64) -> Self {
        Self {
            architecture: Architecture::GptOss,
            layers: 24,
            width: 2880,
            feed_forward: 2880,
            heads: 64,
            kv_heads: 8,
            head_dim: 64,
            rotary: 64,
            rotary_base: 150_000.0,
            windows: (128, 2),
            experts: (32, 4),
            vocabulary: 201_088,
            context_max: 131_072,
            tied: false,
            ..Self::qwen3_0_6b(types, seed)
        }
    }

    /// The shape of Llama-3.2-1B.
    pub const fn llama_3_2_1b(types: TypeMix, seed: u64) -> Self {
        Self {
            architecture: Architecture::Llama,
            layers: 16,
            width: 2048,
            feed_forward: 8192,
            heads: 32,
            kv_heads: 8,
            head_dim: 64,
            rotary: 64,
            rotary_base: 500_000.0,
            windows: (0, 0),
            recurrent: (0, 0, 0),
            experts: (0, 0),
            gemma4: Gemma4::NONE,
            vocabulary: 128_256,
            context_max: 131_072,
            tied: true,
            nextn: 0,
            types,
            seed,
        }
    }
}
