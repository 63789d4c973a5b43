//! Initial values for tests of several crates.

use cotenant_policy::{
    pressure::{MemoryReading, Sample},
    residency::{KvShape, LayerKind, LayerShape, ModelShape},
};
use cotenant_units::{Bytes, Timestamp, Tokens};

/// Returns a sample of an 8 GiB machine with ample memory, of which processes that share the budget use `used`.
#[must_use]
pub fn sample_with(used: Bytes, taken_at: Timestamp) -> Sample {
    let (mem_total, mem_available) = (Bytes::from_gib(8), Bytes::from_gib(7));
    let memory = MemoryReading {
        mem_total,
        mem_available,
        mem_free: mem_available,
        group: None,
    };
    Sample {
        taken_at,
        memory,
        scope_used: Some(used),
        ..Sample::default()
    }
}

/// Returns a model of equal attention layers with 8 KiB of KV per token and nothing else; tests change the relevant
/// fields.
#[must_use]
pub fn sample_shape(layers: usize, layer_bytes: Bytes) -> ModelShape {
    let layer = LayerShape::new(LayerKind::Attention, 0, layer_bytes);
    ModelShape {
        name: "tiny".to_owned(),
        architecture: "qwen35".to_owned(),
        layers: vec![layer; layers],
        fixed_bytes: Bytes::ZERO,
        state_bytes: Bytes::ZERO,
        kv: KvShape {
            attention_layers: 8,
            kv_heads: 2,
            head_dim: 128,
            element_bytes: 2,
            granule: Bytes::ZERO,
            block_tokens: Tokens::new(64),
            windowed: None,
        },
        context_max: Tokens::new(8192),
        workspace_fixed_bytes: Bytes::ZERO,
        workspace_bytes_per_token: Bytes::ZERO,
        ring_bytes: Bytes::ZERO,
    }
}

/// Returns a model of 8 layers of 10 MiB with 8 KiB of KV per token: 80 MiB of layers, 32 MiB of KV at 4096 tokens, 20
/// MiB of other memory, 4 MiB of ring while a layer is streamed. In full 132 MiB; the floor with 512 tokens is 28 MiB.
#[must_use]
pub fn small_model() -> ModelShape {
    ModelShape {
        fixed_bytes: Bytes::from_mib(16),
        state_bytes: Bytes::from_mib(1),
        workspace_fixed_bytes: Bytes::from_mib(3),
        ring_bytes: Bytes::from_mib(4),
        ..sample_shape(8, Bytes::from_mib(10))
    }
}
