//! Predictions of `cotenant plan` compared with the kernel's figures for the daemon.

use std::{path::Path, time::Instant};

use crate::{support::PATIENCE, weights::Weights as _};
use cotenant::engine::{
    Model,
    gguf::GgmlDType,
    spec::Architecture,
    synthetic::{Synthetic, TypeMix},
    text::TextSide,
};
use serde_json::json;

use super::installation::{Installation, anonymous, model, whole};

/// Models of some hundred MiB.
fn shapes() -> Vec<(&'static str, Synthetic)> {
    let of = |architecture, types| Synthetic {
        layers: 16,
        width: 1536,
        feed_forward: 6144,
        heads: 8,
        kv_heads: 4,
        head_dim: 128,
        rotary: match architecture {
            Architecture::Qwen35 => 32,
            Architecture::Phi3 => 96,
            _ => 128,
        },
        recurrent: (8, 16, 128),
        vocabulary: 8192,
        context_max: 32_768,
        ..Synthetic::tiny(architecture, types, 1)
    };
    vec![
        (
            "qwen35",
            of(Architecture::Qwen35, TypeMix::All(GgmlDType::Q8_0)),
        ),
        ("qwen3", of(Architecture::Qwen3, TypeMix::Q4KM)),
        (
            "qwen2",
            of(Architecture::Qwen2, TypeMix::All(GgmlDType::Q5K)),
        ),
        (
            "llama",
            of(Architecture::Llama, TypeMix::All(GgmlDType::Q6K)),
        ),
        (
            "gemma3",
            of(Architecture::Gemma3, TypeMix::All(GgmlDType::Q8_0)),
        ),
        (
            "phi3",
            of(Architecture::Phi3, TypeMix::All(GgmlDType::Q5_0)),
        ),
    ]
}

const BUDGET: &str = "budget: {total: 3GiB, reserve: 64MiB, scope: session, hysteresis: 4MiB, dwell: 300ms, sample_max: 100ms}\n\
                      shedding: {reclaim_min: 8MiB}\n";

fn configuration(path: &Path, context: u32) -> String {
    let llm = model(path, context).replace("kv_floor", "kv_memory: at-once, kv_floor");
    format!("{BUDGET}{llm}")
}

#[tokio::test]
async fn the_predicted_memory_of_a_model_is_within_3_percent_of_what_the_kernel_counts() {
    let folder = tempfile::tempdir().unwrap();
    let bare = Installation::new(BUDGET);
    let daemon = bare.start().await;
    let own = anonymous(daemon.pid());
    daemon.end().await;
    for (name, shape) in shapes() {
        let path = folder.path().join(format!("{name}.gguf"));
        shape.write(&path).unwrap();
        let helper = TextSide::helper_bytes_max(&Model::inspect(&path, 1).unwrap().1).get();
        for context in [1024, 4096, 16_384] {
            let installation = Installation::new(&configuration(&path, context));
            let config = installation.config().display().to_string();
            let planned = installation.json(&["plan", "--config", &config]);
            let forecast = &planned["forecast"];
            assert_eq!(
                planned["verdict"].as_str().unwrap().split(':').next(),
                Some("fits"),
                "{planned}"
            );
            let predicted = forecast["llm"]["total"].as_u64().unwrap();
            assert_eq!(forecast["rehearsal"]["peak"], json!(predicted));

            let daemon = installation.start().await;
            // KV is resident at once, and loading populates the rest.
            let status = daemon.until("the whole model", whole).await;
            let held: u64 = status.leases.iter().map(|lease| lease.held_bytes).sum();
            assert_eq!(
                held, predicted,
                "{name}, {context} tokens: planned and held"
            );
            // Reserved for a process that starts with the first form of an answer.
            let predicted = predicted - helper;
            let measure = || anonymous(daemon.pid()).saturating_sub(own);
            let off = |measured: u64| measured.abs_diff(predicted) * 1000 / predicted;
            // On a machine that stalls, the engine sheds without the loop, and regrows.
            let deadline = Instant::now() + PATIENCE;
            let mut measured = measure();
            while off(measured) > 30 && Instant::now() < deadline {
                daemon.whole().await;
                measured = measure();
            }
            let off = off(measured);
            println!(
                "{name}, {context} tokens: predicted {predicted}, measured {measured}, {off} per mille apart"
            );
            assert!(
                off <= 30,
                "{name}, {context} tokens: predicted {predicted}, measured {measured}\n{}",
                installation.events()
            );
            daemon.end().await;
        }
    }
}
