//! The trained weights as GGUF, in the tensors and metadata of the `qwen35` architecture.

use std::io::Cursor;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Result, Tensor};

use crate::fused::{EPSILON, TAPS};
use crate::model::{
    ATTENTION_INTERVAL, HEAD, HEADS, HIDDEN, KEY_HEADS, KV_HEADS, LAYERS, Model, ROTARY,
    ROTARY_BASE, STATE, VALUE_HEADS, WIDTH, attends,
};
use crate::tokenizer::{CONTROL, END_OF_TEXT, MESSAGE_END, Trained};

/// Context length the file claims. Trained on far less; the delta rule and the slow rotation carry on beyond it.
const CONTEXT: u32 = 65536;

/// ChatML; a system message is rendered like any other.
pub(crate) const CHAT_TEMPLATE: &str = "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\
     {%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// Writes the model to `path`: matrices in `matrices`, everything else in F32.
pub(crate) fn write(
    path: &Path,
    model: &Model,
    tokenizer: &Trained,
    matrices: GgmlDType,
) -> Result<()> {
    let tensors = tensors(model)?
        .into_iter()
        .map(|(name, tensor)| {
            let convolution = name.ends_with("ssm_conv1d.weight");
            let dtype = if tensor.rank() == 2 && !convolution {
                matrices
            } else {
                GgmlDType::F32
            };
            Ok((name, QTensor::quantize(&tensor, dtype)?))
        })
        .collect::<Result<Vec<_>>>()?;
    let metadata = metadata(tokenizer, if matrices == GgmlDType::F32 { 0 } else { 7 });
    let mut file = Cursor::new(Vec::new());
    gguf_file::write(
        &mut file,
        &metadata
            .iter()
            .map(|(key, value)| (key.as_str(), value))
            .collect::<Vec<_>>(),
        &tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor))
            .collect::<Vec<_>>(),
    )?;
    // candle marks its files as version 2, whose layout version 3 kept; readers expect 3 today
    let mut bytes = file.into_inner();
    bytes[4..8].copy_from_slice(&3u32.to_le_bytes());
    // never half a file, however the run ends
    let partial = path.with_extension("partial");
    std::fs::write(&partial, bytes)?;
    std::fs::rename(partial, path)?;
    Ok(())
}

fn metadata(tokenizer: &Trained, file_type: u32) -> Vec<(String, Value)> {
    let own = |key: &str| format!("qwen35.{key}");
    let strings = |list: Vec<String>| Value::Array(list.into_iter().map(Value::String).collect());
    let integers = |list: Vec<i32>| Value::Array(list.into_iter().map(Value::I32).collect());
    let u32 = |n: usize| Value::U32(n as u32);
    let half = (ROTARY / 2) as i32;
    let tokens = tokenizer.tokens();
    let types = tokens
        .iter()
        .map(|token| {
            if CONTROL.contains(&token.as_str()) {
                3
            } else {
                1
            }
        })
        .collect();
    let control = |token: &str| Value::U32(tokenizer.control(token));
    vec![
        (
            "general.architecture".into(),
            Value::String("qwen35".into()),
        ),
        ("general.type".into(), Value::String("model".into())),
        ("general.name".into(), Value::String("cotenant demo".into())),
        (
            "general.description".into(),
            Value::String(
                "A voice assistant for demonstrations, trained on generated dialogues".into(),
            ),
        ),
        ("general.file_type".into(), Value::U32(file_type)),
        ("general.quantization_version".into(), Value::U32(2)),
        ("general.alignment".into(), Value::U32(32)),
        (own("block_count"), u32(LAYERS)),
        (own("context_length"), Value::U32(CONTEXT)),
        (own("embedding_length"), u32(WIDTH)),
        (own("feed_forward_length"), u32(HIDDEN)),
        (own("attention.head_count"), u32(HEADS)),
        (own("attention.head_count_kv"), u32(KV_HEADS)),
        (own("attention.key_length"), u32(HEAD)),
        (own("attention.value_length"), u32(HEAD)),
        (
            own("attention.layer_norm_rms_epsilon"),
            Value::F32(EPSILON as f32),
        ),
        (own("rope.freq_base"), Value::F32(ROTARY_BASE as f32)),
        (own("rope.dimension_count"), u32(ROTARY)),
        // three sections that fill half the rotated elements; with text all three carry the same position
        (
            own("rope.dimension_sections"),
            integers(vec![half - 2 * (half / 3), half / 3, half / 3, 0]),
        ),
        (own("ssm.conv_kernel"), u32(TAPS)),
        (own("ssm.state_size"), u32(STATE)),
        (own("ssm.group_count"), u32(KEY_HEADS)),
        (own("ssm.time_step_rank"), u32(VALUE_HEADS)),
        (own("ssm.inner_size"), u32(VALUE_HEADS * STATE)),
        (own("full_attention_interval"), u32(ATTENTION_INTERVAL)),
        ("tokenizer.ggml.model".into(), Value::String("gpt2".into())),
        ("tokenizer.ggml.pre".into(), Value::String("qwen35".into())),
        ("tokenizer.ggml.tokens".into(), strings(tokens)),
        ("tokenizer.ggml.token_type".into(), integers(types)),
        (
            "tokenizer.ggml.merges".into(),
            strings(tokenizer.merges.clone()),
        ),
        ("tokenizer.ggml.eos_token_id".into(), control(MESSAGE_END)),
        (
            "tokenizer.ggml.padding_token_id".into(),
            control(END_OF_TEXT),
        ),
        ("tokenizer.ggml.bos_token_id".into(), control(END_OF_TEXT)),
        ("tokenizer.ggml.add_bos_token".into(), Value::Bool(false)),
        (
            "tokenizer.chat_template".into(),
            Value::String(CHAT_TEMPLATE.into()),
        ),
    ]
}

fn tensors(model: &Model) -> Result<Vec<(String, Tensor)>> {
    let w = |name: String| match model.weights.get(&name) {
        Some(var) => Ok(var.as_detached_tensor()),
        None => candle_core::bail!("no weight `{name}`"),
    };
    let mut all = vec![
        ("token_embd.weight".to_owned(), w("embedding".into())?),
        ("output_norm.weight".to_owned(), w("norm".into())?),
    ];
    for i in 0..LAYERS {
        let own = |name: &str| w(format!("{i}.{name}"));
        let mut add = |name: &str, tensor: Tensor| all.push((format!("blk.{i}.{name}"), tensor));
        add("attn_norm.weight", own("norm1")?);
        add("post_attention_norm.weight", own("norm2")?);
        add("ffn_gate.weight", own("gate")?);
        add("ffn_up.weight", own("up")?);
        add("ffn_down.weight", own("down")?);
        if attends(i) {
            // per head, the query's rows and then the gate's
            let heads = |name: &str| own(name)?.reshape((HEADS, HEAD, WIDTH));
            let joined =
                Tensor::cat(&[heads("q")?, heads("z")?], 1)?.reshape((2 * HEADS * HEAD, WIDTH))?;
            add("attn_q.weight", joined);
            add("attn_k.weight", own("k")?);
            add("attn_v.weight", own("v")?);
            add("attn_output.weight", own("out")?);
            add("attn_q_norm.weight", own("q_norm")?);
            add("attn_k_norm.weight", own("k_norm")?);
        } else {
            add(
                "attn_qkv.weight",
                Tensor::cat(&[own("q")?, own("k")?, own("v")?], 0)?,
            );
            add("attn_gate.weight", own("z")?);
            add("ssm_alpha.weight", own("alpha")?);
            add("ssm_beta.weight", own("beta")?);
            let taps = Tensor::cat(&[own("q_conv")?, own("k_conv")?, own("v_conv")?], 1)?;
            add("ssm_conv1d.weight", taps.t()?.contiguous()?);
            add("ssm_dt.bias", own("dt")?);
            add("ssm_a", own("a_log")?.exp()?.neg()?);
            add("ssm_norm.weight", own("o_norm")?);
            add("ssm_out.weight", own("out")?);
        }
    }
    Ok(all)
}
