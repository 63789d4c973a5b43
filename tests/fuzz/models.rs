//! Contents of model files and chat templates: accepted or refused within their bounds.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use candle_core::quantized::gguf_file::{self, Value};
use cotenant::{
    causes::in_one_line,
    engine::{
        ChatMessage, Client, Engine, Flow, GenerateRequest, Header, Model, ModelOptions, Prompt,
        RequestId, Role,
        gguf::GgmlDType,
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
        text::TextSide,
        tokenizer::byte_symbol,
    },
    policy::{kv_type::KvType, residency::EnginePlan},
    units::{Bytes, Tokens},
};

use crate::{
    runner::{Target, fuzz},
    schemas::watch_jobs,
    weights::Weights as _,
};

const MIB: usize = 1 << 20;

/// Memory limit for the plan of a model of a few hundred kilobytes; a daemon stops earlier for a larger one.
const BUDGET: Bytes = Bytes::from_mib(64);

/// A whole file with weights: inspected, opened with a plan, and one token computed.
#[test]
fn gguf_bodies() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    // With one layer, so that the file is shorter than the longest input.
    let tiny = |types, seed| {
        Synthetic {
            layers: 1,
            ..Synthetic::tiny(Architecture::Qwen3, types, seed)
        }
        .write(&path)
        .unwrap();
        fs::read(&path).unwrap()
    };
    let examples = vec![
        tiny(TypeMix::All(GgmlDType::Q4_0), 1),
        tiny(TypeMix::All(GgmlDType::Q8_0), 2),
    ];
    assert!(
        examples.iter().all(|example| example.len() < MIB),
        "an example would be cut"
    );
    let target = Target {
        name: "gguf bodies",
        examples,
        words: &[
            "GGUF",
            "qwen3",
            "blk.0.attn_q.weight",
            "blk.0.attn_norm.weight",
            "output_norm.weight",
            "token_embd.weight",
            "\0\0\u{80}\u{7f}",
            "\x0c\0\0\0",
            "\x02\0\0\0",
        ],
        memory_max: |length| 96 * MIB + 64 * length,
        hang: Duration::from_secs(2),
    };
    fuzz(&target, |bytes| {
        // A new file, as the reader of the previous one may still have it mapped.
        let _ = fs::remove_file(&path);
        fs::write(&path, bytes).unwrap();
        opened(&path)
    });
}

fn opened(path: &Path) -> String {
    let shape = match Engine::inspect(path, 1) {
        Ok(shape) => shape,
        Err(error) => return in_one_line(&error),
    };
    let plan = EnginePlan {
        resident: (0..u32::try_from(shape.layers.len()).unwrap()).collect(),
        kv_capacity: Tokens::new(64),
        prefill_chunk: Tokens::new(8),
        kv_type: KvType::F16,
    };
    if shape.plan_bytes(&plan) > BUDGET {
        return "beyond the budget".to_owned();
    }
    match Model::open(path, &plan, &ModelOptions::for_threads(1)) {
        Err(error) => in_one_line(&error),
        Ok(mut model) => match model.forward(&[1], &mut || Flow::Continue) {
            Err(error) => in_one_line(&error),
            Ok(logits) => {
                assert!(
                    logits.iter().all(|logit| logit.is_finite()),
                    "scores that are no numbers"
                );
                "good".to_owned()
            }
        },
    }
}

/// Memory of a rendering in kB, beyond memory shared with the helper: 2 MiB for a vocabulary of this size, as much
/// again for its text and its stack, and modified pages of the program.
const RENDER_MAX_KB: u64 = (6 << 10) + 512;

/// Templates assembled from fragments, rendered by the helper.
#[test]
fn chat_templates() {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_cotenant"));
    let (most, stop) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let watcher = watch_jobs(Arc::clone(&most), Arc::clone(&stop));
    let target = Target {
        name: "chat templates",
        examples: (0..32u8)
            .map(|seed| {
                (0..48u8)
                    .map(|at| seed.wrapping_mul(at).wrapping_add(at.wrapping_mul(11)))
                    .collect()
            })
            .collect(),
        words: &["\u{0}", "\u{1}", "\u{7f}", "abc", "\n\n\n\n"],
        memory_max: |_length| 64 * MIB,
        // Twice the CPU time of a rendering, and the start of a helper.
        hang: Duration::from_secs(20),
    };
    fuzz(&target, |bytes| {
        let template = template_of(&mut bytes.iter().copied(), 0);
        let side = match TextSide::with_helper(
            &header(&template),
            Tokens::new(4096),
            Some(program.clone()),
        ) {
            Ok(side) => side,
            Err(error) => return in_one_line(&error),
        };
        let said = vec![
            ChatMessage::new(Role::System, "be kind"),
            ChatMessage::new(Role::User, "hi"),
        ];
        let request = GenerateRequest::new(RequestId::new(1), Prompt::Chat(said.into()));
        match side.prepare(&request, Client::PATIENT) {
            Err(error) => in_one_line(&error),
            Ok(prepared) => format!(
                "good: {}",
                if prepared.tokens.len() > 100 {
                    "long"
                } else {
                    "short"
                }
            ),
        }
    });
    stop.store(true, Ordering::SeqCst);
    watcher.join().unwrap();
    let most = most.load(Ordering::SeqCst);
    println!("chat templates: a job had at most {most} kB");
    assert!(most <= RENDER_MAX_KB, "a job had {most} kB");
}

/// A header whose tokenizer has a token per byte.
fn header(template: &str) -> Header {
    let string = |text: &str| Value::String(text.to_owned());
    let mut tokens: Vec<Value> = (0..=u8::MAX)
        .map(|byte| string(&byte_symbol(byte).to_string()))
        .collect();
    tokens.extend(["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(string));
    let types = (0..tokens.len())
        .map(|at| Value::I32(if at >= 256 { 3 } else { 1 }))
        .collect();
    let entries = [
        ("tokenizer.ggml.model", string("gpt2")),
        ("tokenizer.ggml.pre", string("qwen35")),
        ("tokenizer.ggml.tokens", Value::Array(tokens)),
        ("tokenizer.ggml.token_type", Value::Array(types)),
        ("tokenizer.ggml.merges", Value::Array(vec![string("a b")])),
        ("tokenizer.ggml.eos_token_id", Value::U32(258)),
        ("tokenizer.chat_template", string(template)),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("header.gguf");
    let entries: Vec<_> = entries.iter().map(|(key, value)| (*key, value)).collect();
    gguf_file::write(&mut fs::File::create(&path).unwrap(), &entries, &[]).unwrap();
    Header::read(&path).unwrap()
}

const EXPRESSIONS: [&str; 32] = [
    "messages",
    "messages[0].content",
    "messages[::-1]",
    "x",
    "x ~ x",
    "'abc' * 99999999",
    "range(99999)",
    "range(-1)",
    "namespace(a=messages)",
    "add_generation_prompt",
    "tools",
    "bos_token",
    "1 / 0",
    "7 % 0",
    "10 ** 10 ** 10",
    "9223372036854775807 + 1",
    "-9223372036854775808 // -1",
    "messages | tojson",
    "messages | tojson(indent=100000)",
    "x | length",
    "x | join(x)",
    "x | replace('', 'xx')",
    "x | batch(0)",
    "'%s' | format(x)",
    "{'a': [[[[{}]]]]}",
    "raise_exception('no')",
    "strftime_now('%Y %999999d')",
    "'a'.split('')",
    "x.a.b.c",
    "messages[99999999999999999999]",
    "f(1)",
    "not x in messages and 'a' < 1",
];

/// Fragments of a template selected by the bytes; empty below some depth.
fn template_of(bytes: &mut impl Iterator<Item = u8>, depth: u32) -> String {
    let mut text = String::new();
    for _ in 0..4 {
        let Some(kind) = bytes.next() else { break };
        let mut expression =
            || EXPRESSIONS[usize::from(bytes.next().unwrap_or(0)) % EXPRESSIONS.len()];
        let (one, other) = (expression(), expression());
        let piece = match kind % if depth > 5 { 4 } else { 14 } {
            0 => "<|im_start|>text\n".to_owned(),
            1 | 2 => format!("{{{{ {one} }}}}"),
            3 => format!("{{%- set x = {one} -%}}"),
            4 | 5 => format!(
                "{{% for x in {one} %}}{}{{% endfor %}}",
                template_of(bytes, depth + 1)
            ),
            6 => format!(
                "{{% if {one} %}}{}{{% else %}}{{{{ {other} }}}}{{% endif %}}",
                template_of(bytes, depth + 1)
            ),
            7 => format!(
                "{{% macro f(x) %}}{}{{% endmacro %}}{{{{ f({one}) }}}}",
                template_of(bytes, depth + 1)
            ),
            8 => format!(
                "{{% set n = namespace(x='xxxx') %}}{{% for i in {one} %}}{{% set n.x = n.x ~ n.x %}}{}{{% endfor %}}",
                template_of(bytes, depth + 1)
            ),
            9 => format!("{{{{ ({one}) if ({other}) else '' }}}}"),
            10 => format!(
                "{{% filter upper %}}{}{{% endfilter %}}",
                template_of(bytes, depth + 1)
            ),
            11 => [
                "{% for",
                "{{",
                "%}",
                "{% endif %}",
                "{# ",
                "{% generation %}",
                "{% raw %}",
            ][usize::from(kind) / 14 % 7]
                .to_owned(),
            12 => "(".repeat(usize::from(kind) * 40) + one,
            _ => format!(
                "{{{{ {}{one}{} }}}}",
                "(".repeat(usize::from(kind)),
                ")".repeat(usize::from(kind))
            ),
        };
        text.push_str(&piece);
    }
    text
}
