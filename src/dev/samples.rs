//! Values that tests of several crates begin with.

use std::time::Duration;

use cotenant_policy::{
    pressure::{MemoryReading, Sample},
    pressure_level::PressureLevel,
    refusal::Refusal,
    residency::{KvShape, LayerKind, LayerShape, ModelShape},
};
use cotenant_units::{Bytes, Timestamp, Tokens};

/// Of a machine of 8 GiB with room, on which what shares the budget uses `used`.
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

/// A model with equal attention layers, 8 KiB of KV for each token and nothing else; tests change what they are about.
#[must_use]
pub fn sample_shape(layers: usize, layer_bytes: Bytes) -> ModelShape {
    let layer = LayerShape {
        kind: LayerKind::Attention,
        part: 0,
        resident_bytes: layer_bytes,
    };
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

/// 8 layers of 10 MiB, 8 KiB of KV for each token: 80 MiB of layers, 32 MiB of KV at 4096 tokens, 20 MiB of the rest,
/// 4 MiB of ring while a layer is streamed. In full 132 MiB; the floor with 512 tokens is 28 MiB.
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

/// One of each situation; what renders them is tested with all of them.
#[must_use]
pub fn refusals() -> Vec<Refusal> {
    let act = || "start a chat completion".to_owned();
    let retry_after = Duration::from_millis(50);
    let (small, large) = (Bytes::from_mib(64), Bytes::from_mib(512));
    vec![
        Refusal::InsufficientMemory {
            act: act(),
            asked: small,
            free: Bytes::from_mib(12),
            reclaimable: Bytes::from_mib(20),
            budget: large,
            retry_after,
        },
        Refusal::PressureHigh {
            act: act(),
            level: PressureLevel::Critical,
            retry_after,
        },
        Refusal::ContextLengthExceeded {
            model: "m".to_owned(),
            prompt: Tokens::new(9000),
            limit: Tokens::new(4096),
        },
        Refusal::KvCapacityShed {
            model: "m".to_owned(),
            prompt: Tokens::new(2000),
            capacity: Tokens::new(1024),
            limit: Tokens::new(4096),
            retry_after,
        },
        Refusal::KvReclaimed {
            generated: Tokens::new(7),
            retry_after,
        },
        Refusal::QuotaExceeded {
            act: act(),
            what: "requests in flight".to_owned(),
            limit: 16,
            retry_after,
        },
        Refusal::Draining {
            act: act(),
            retry_after,
        },
        Refusal::Starting {
            act: act(),
            who: "the engine".to_owned(),
            state: "loading".to_owned(),
            retry_after,
        },
        Refusal::EngineLost {
            reason: "it panicked".to_owned(),
            retry_after,
        },
        Refusal::ModelFailed {
            failure: "its weights are damaged".to_owned(),
        },
        Refusal::WorkerLost {
            worker: "tts".to_owned(),
            reason: "killed by SIGKILL, sender unknown".to_owned(),
            retry_after,
        },
        Refusal::NoThread {
            act: act(),
            cause: "no thread is free for it: Resource temporarily unavailable (os error 11)"
                .to_owned(),
            retry_after,
        },
        Refusal::DeadlineUnreachable {
            act: act(),
            patience_ms: 1000,
            expected_ms: 4000,
            retry_after,
        },
        Refusal::Invalid {
            field: "top_p".to_owned(),
            value: "7".to_owned(),
            problem: "is above the limit of 1".to_owned(),
        },
        Refusal::UnknownModel {
            model: "x".to_owned(),
            known: "; there is `m`".to_owned(),
        },
        Refusal::NotConfigured {
            act: act(),
            what: "model".to_owned(),
        },
        Refusal::Stopped {
            act: act(),
            worker: "tts".to_owned(),
        },
    ]
}
