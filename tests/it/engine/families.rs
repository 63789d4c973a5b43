//! Files of other writers: Ollama's names, per-layer lists, vision parts, unit axes.

use std::{borrow::Cow, collections::BTreeMap, fs, io::BufWriter, path::Path};

use crate::weights::Weights as _;
use candle_core::{
    Device,
    quantized::{
        self, QStorage, QTensor,
        gguf_file::{self, Content, Value},
    },
};
use cotenant::{
    engine::{
        Engine, Model,
        gguf::GgmlDType,
        spec::{Architecture, Spec},
        synthetic::{Synthetic, TypeMix},
    },
    policy::residency::LayerKind::{Attention, FeedForward, Recurrent},
};

use super::{File, PROMPT, go, open, plan, reference, tiny, write};

/// File as entries and tensors, for rewriting.
struct Parts {
    entries: BTreeMap<String, Value>,
    tensors: BTreeMap<String, QTensor>,
}

impl Parts {
    fn of(file: &File) -> Self {
        let mut reader = fs::File::open(&file.path).unwrap();
        let content = Content::read(&mut reader).unwrap();
        let tensors = content.tensor_infos.keys().map(|name| {
            let tensor = content.tensor(&mut reader, name, &Device::Cpu).unwrap();
            (name.clone(), tensor)
        });
        Self {
            tensors: tensors.collect(),
            entries: content.metadata.into_iter().collect(),
        }
    }

    fn rename_key(&mut self, from: &str, to: &str) {
        let value = self.entries.remove(from).unwrap();
        self.entries.insert(to.to_owned(), value);
    }

    fn list(&mut self, key: &str, numbers: &[u32]) {
        let numbers = numbers.iter().map(|&number| Value::U32(number)).collect();
        self.entries.insert(key.to_owned(), Value::Array(numbers));
    }

    fn add(&mut self, name: &str, dims: &[usize]) {
        let bytes = dims.iter().product::<usize>() * 4;
        self.tensors.insert(
            name.to_owned(),
            tensor(vec![0; bytes], quantized::GgmlDType::F32, dims),
        );
    }

    fn write(self) -> File {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let mut out = BufWriter::new(fs::File::create(&path).unwrap());
        let entries: Vec<_> = self
            .entries
            .iter()
            .map(|(key, value)| (key.as_str(), value))
            .collect();
        let tensors: Vec<_> = self
            .tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor))
            .collect();
        gguf_file::write(&mut out, &entries, &tensors).unwrap();
        drop(out);
        File {
            _folder: folder,
            path,
        }
    }
}

fn tensor(bytes: Vec<u8>, dtype: quantized::GgmlDType, dims: &[usize]) -> QTensor {
    let storage = QStorage::from_data(Cow::Owned(bytes), &Device::Cpu, dtype).unwrap();
    QTensor::new(storage, dims).unwrap()
}

fn unused(path: &Path) -> Vec<String> {
    Engine::inspect_with(path, None, 1).unwrap().unused
}

fn refused(file: &File) -> String {
    Model::inspect(&file.path, 1)
        .unwrap_err()
        .kind()
        .to_string()
}

#[test]
fn ollamas_file_of_qwen_3_5_is_read_as_llama_cpps_and_its_pictures_stay_in_it() {
    let file = tiny(Architecture::Qwen35, GgmlDType::Q8_0);
    assert_eq!(unused(&file.path), Vec::<String>::new());
    let mut parts = Parts::of(&file);
    for layer in 0..3 {
        let name = format!("blk.{layer}.ssm_dt");
        let bias = parts.tensors.remove(&format!("{name}.bias")).unwrap();
        parts.tensors.insert(name, bias);
    }
    parts.list("qwen35.attention.head_count_kv", &[0, 0, 0, 2]);
    parts.list("qwen35.rope.dimension_sections", &[4, 2, 2]);
    parts
        .entries
        .remove("qwen35.full_attention_interval")
        .unwrap();
    parts
        .entries
        .insert("qwen35.ssm.v_head_reordered".to_owned(), Value::Bool(true));
    parts
        .entries
        .insert("qwen35.vision.block_count".to_owned(), Value::U32(1));
    for (name, dims) in [
        ("v.blk.0.attn_q.weight", [64, 64]),
        ("v.merger.linear_fc1.weight", [128, 64]),
        ("mm.0.weight", [64, 32]),
        ("mtp.fc.weight", [64, 256]),
        ("mtp.layers.0.self_attn.q_proj.weight", [64, 64]),
    ] {
        parts.add(name, &dims);
    }
    let theirs = parts.write();
    assert_eq!(reference(&theirs.path, 2), reference(&file.path, 2));
    assert_eq!(
        unused(&theirs.path),
        ["multi-token prediction (80 KiB)", "vision (56 KiB)"]
    );

    let mut other = Parts::of(&file);
    other
        .entries
        .insert("qwen35.ssm.v_head_reordered".to_owned(), Value::Bool(false));
    assert_eq!(
        refused(&other.write()),
        "metadata `qwen35.ssm.v_head_reordered`: value heads in the publisher's order are not supported"
    );
}

#[test]
fn ollamas_file_of_gemma_3_is_read_as_llama_cpps() {
    let file = tiny(Architecture::Gemma3, GgmlDType::Q8_0);
    let mut parts = Parts::of(&file);
    parts.rename_key("gemma3.rope.freq_base", "gemma3.rope.global.freq_base");
    parts.entries.insert(
        "gemma3.rope.local.freq_base".to_owned(),
        Value::F32(10_000.0),
    );
    parts
        .entries
        .remove("gemma3.attention.layer_norm_rms_epsilon")
        .unwrap();
    parts.add("v.patch_embedding.weight", &[64, 64]);
    // A token that represents an image, without a row in the embedding.
    for (key, item) in [
        ("tokens", Value::String("<image_soft_token>".to_owned())),
        ("token_type", Value::I32(4)),
    ] {
        match parts
            .entries
            .get_mut(&format!("tokenizer.ggml.{key}"))
            .unwrap()
        {
            Value::Array(list) => list.push(item),
            other => panic!("{other:?}"),
        }
    }
    let theirs = parts.write();
    assert_eq!(reference(&theirs.path, 2), reference(&file.path, 2));
    assert_eq!(unused(&theirs.path), ["vision (16 KiB)"]);
}

#[test]
fn both_factors_of_experts_may_lie_in_one_tensor() {
    let file = tiny(Architecture::Qwen3Moe, GgmlDType::Q8_0);
    let mut parts = Parts::of(&file);
    for layer in 0..4 {
        let mut take = |name: &str| {
            let name = format!("blk.{layer}.ffn_{name}_exps.weight");
            parts.tensors.remove(&name).unwrap()
        };
        let (gate, up) = (take("gate"), take("up"));
        let (experts, rows, columns) = gate.shape().dims3().unwrap();
        let [gates, ups] = [&gate, &up].map(|tensor| tensor.data().unwrap().into_owned());
        let step = gates.len() / experts;
        let both = gates.chunks_exact(step).zip(ups.chunks_exact(step));
        let data = both.flat_map(|(gate, up)| [gate, up].concat()).collect();
        let name = format!("blk.{layer}.ffn_gate_up_exps.weight");
        let dims = [experts, 2 * rows, columns];
        parts
            .tensors
            .insert(name, tensor(data, gate.dtype(), &dims));
    }
    assert_eq!(reference(&parts.write().path, 2), reference(&file.path, 2));
}

#[test]
fn keys_that_gemma_4_does_not_use_stay_in_the_file() {
    let file = tiny(Architecture::Gemma4, GgmlDType::Q8_0);
    let mut parts = Parts::of(&file);
    // Converters keep those of layers that use the keys and values of others.
    for name in ["attn_k.weight", "attn_v.weight"] {
        parts.add(&format!("blk.3.{name}"), &[128, 256]);
    }
    parts.add("blk.3.attn_k_norm.weight", &[64]);
    let theirs = parts.write();
    assert_eq!(reference(&theirs.path, 2), reference(&file.path, 2));
    for (key, value, problem) in [
        (
            "attention.shared_kv_layers",
            Value::U32(3),
            "metadata `gemma4.attention.shared_kv_layers`: layer 1 has no earlier layer of its kind among the first 1",
        ),
        (
            "embedding_length_per_layer_input",
            Value::U32(64),
            "tensor `per_layer_token_embd.weight`",
        ),
    ] {
        let mut other = Parts::of(&file);
        other.entries.insert(format!("gemma4.{key}"), value);
        let refused = refused(&other.write());
        assert!(refused.starts_with(problem), "{refused}");
    }
}

#[test]
fn a_file_of_gemma_2_without_caps_and_window_has_those_of_llama_cpp() {
    let mut parts = Parts::of(&tiny(Architecture::Gemma2, GgmlDType::Q8_0));
    for key in [
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "attention.sliding_window",
    ] {
        parts.entries.remove(&format!("gemma2.{key}")).unwrap();
    }
    let header = Model::inspect(&parts.write().path, 1).unwrap().1;
    let spec = Spec::read(&header).unwrap();
    let caps = (spec.attention.score_cap, spec.logit_cap);
    assert_eq!(caps, (Some(50.0), Some(30.0)));
    let windows: Vec<_> = spec.layers.iter().map(|layer| spec.window(layer)).collect();
    assert_eq!(windows, [Some(4096), None, Some(4096), None]);
}

#[test]
fn ollamas_file_of_mistral_3_is_read_as_llama_cpps() {
    let file = tiny(Architecture::Mistral3, GgmlDType::Q8_0);
    let mut parts = Parts::of(&file);
    for (ours, theirs) in [
        ("rope.scaling.yarn_beta_fast", "rope.scaling.beta_fast"),
        ("rope.scaling.yarn_beta_slow", "rope.scaling.beta_slow"),
        (
            "rope.scaling.yarn_log_multiplier",
            "rope.scaling.mscale_all_dim",
        ),
        ("attention.temperature_scale", "rope.scaling_beta"),
    ] {
        parts.rename_key(&format!("mistral3.{ours}"), &format!("mistral3.{theirs}"));
    }
    assert_eq!(reference(&parts.write().path, 2), reference(&file.path, 2));
}

#[test]
fn the_text_part_of_qwen3_vl_is_qwen3() {
    let file = tiny(Architecture::Qwen3Vl, GgmlDType::Q8_0);
    let mut parts = Parts::of(&file);
    let keys: Vec<String> = parts
        .entries
        .keys()
        .filter(|key| key.starts_with("qwen3vl."))
        .cloned()
        .collect();
    for key in keys {
        parts.rename_key(&key, &key.replace("qwen3vl.", "qwen3."));
    }
    let name = Value::String("qwen3".to_owned());
    parts
        .entries
        .insert("general.architecture".to_owned(), name);
    assert_eq!(reference(&parts.write().path, 2), reference(&file.path, 2));
}

#[test]
fn numbers_may_be_given_for_each_layer_and_axes_of_one_element_at_the_end_count_for_nothing() {
    let file = tiny(Architecture::Llama, GgmlDType::Q8_0);
    let mut parts = Parts::of(&file);
    parts.list("llama.attention.head_count", &[4; 4]);
    parts.list("llama.attention.head_count_kv", &[2; 4]);
    parts.list("llama.feed_forward_length", &[256; 4]);
    let tensors = std::mem::take(&mut parts.tensors);
    for (name, old) in tensors {
        let mut dims = vec![1; 4 - old.shape().rank()];
        dims.extend(old.shape().dims());
        let new = tensor(old.data().unwrap().into_owned(), old.dtype(), &dims);
        parts.tensors.insert(name, new);
    }
    assert_eq!(reference(&parts.write().path, 2), reference(&file.path, 2));

    for (key, numbers, problem) in [
        (
            "attention.head_count_kv",
            [2, 1, 2, 2],
            "it differs by layer: 2 and 1",
        ),
        ("attention.head_count", [0; 4], "it is 0"),
    ] {
        let mut parts = Parts::of(&file);
        let key = format!("llama.{key}");
        parts.list(&key, &numbers);
        assert_eq!(
            refused(&parts.write()),
            format!("metadata `{key}`: {problem}")
        );
    }
    let mut parts = Parts::of(&file);
    parts.list("llama.feed_forward_length", &[256, 256, 128, 256]);
    assert_eq!(
        refused(&parts.write()),
        "tensor `blk.2.ffn_gate.weight` has dimensions [256, 256], which do not fit a model whose header says [256, 128]"
    );
    let mut parts = Parts::of(&file);
    parts.entries.insert(
        "llama.block_count".to_owned(),
        Value::String("four".to_owned()),
    );
    assert_eq!(
        refused(&parts.write()),
        "metadata `llama.block_count`: `four` is not a whole number"
    );
}

#[test]
fn a_family_or_type_that_is_not_supported_is_refused_with_the_nearest_that_is() {
    let file = tiny(Architecture::Qwen3, GgmlDType::Q8_0);
    for (name, hint) in [
        (
            "clip",
            "it is the vision part of a model: name the file of the model itself, without `mmproj`",
        ),
        ("gemma3n", "use Gemma 3, for example gemma-3-4b-it Q4_K_M"),
        (
            "qwen3next",
            "use Qwen3-30B-A3B, or a dense Qwen3.5, for example 4B Q4_K_M",
        ),
        (
            "nemotron",
            "use Nemotron 3 Nano, for example NVIDIA-Nemotron-3-Nano-30B-A3B Q4_K_M",
        ),
        (
            "cohere2",
            "use a dense model of about the same size: Qwen3.5, Llama 3.2 or Gemma 3 in Q4_K_M",
        ),
    ] {
        let mut parts = Parts::of(&file);
        let value = Value::String(name.to_owned());
        parts
            .entries
            .insert("general.architecture".to_owned(), value);
        let error = Model::inspect(&parts.write().path, 1).unwrap_err();
        assert_eq!(
            error.kind().to_string(),
            format!(
                "architecture `{name}` is not supported; supported are exaone4, gemma2, gemma3, gemma4, gpt-oss, granite, granitehybrid, lfm2, lfm2moe, llama, mistral3, nemotron_h, nemotron_h_moe, olmo2, phi3, qwen2, \
                 qwen3, qwen3moe, qwen35, qwen35moe, qwen3vl, qwen3vlmoe, smollm3 and stablelm"
            )
        );
        assert_eq!(error.hint(), Some(hint));
    }
    let mut parts = Parts::of(&file);
    parts
        .entries
        .insert("qwen3.expert_count".to_owned(), Value::U32(128));
    let error = Model::inspect(&parts.write().path, 1).unwrap_err();
    let experts = "metadata `qwen3.expert_count`: a mixture of 128 experts is not supported";
    assert_eq!(error.kind().to_string(), experts);
    assert_eq!(
        error.hint(),
        Some("use Qwen3-30B-A3B, or a dense Qwen3.5, for example 4B Q4_K_M")
    );
    for (number, name, hint) in [
        (40u32, "NVFP4", "use the Q4_K_M file of the same model"),
        (18, "IQ3_XXS", "use the Q3_K_M file of the same model"),
        (16, "IQ2_XXS", "use the Q2_K file of the same model"),
        (19, "IQ1_S", "use the Q2_K file of the same model"),
        (29, "IQ1_M", "use the Q2_K file of the same model"),
    ] {
        let mut bytes = fs::read(&file.path).unwrap();
        let tensor = b"blk.2.ffn_up.weight";
        let at = bytes
            .windows(tensor.len())
            .position(|part| part == tensor)
            .unwrap()
            + tensor.len()
            + 4
            + 16;
        bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, bytes).unwrap();
        let error = Model::inspect(&path, 1).unwrap_err();
        let reported = error.kind().to_string();
        assert!(
            reported.starts_with(&format!(
                "tensor `blk.2.ffn_up.weight` has type {name}; supported are F32"
            )),
            "{reported}"
        );
        assert_eq!(error.hint(), Some(hint));
    }
}

#[test]
fn norms_with_a_bias_are_those_of_stablelm_only_and_its_parallel_model_is_refused() {
    let stablelm = tiny(Architecture::StableLm, GgmlDType::Q8_0);
    let mut parts = Parts::of(&stablelm);
    let key = "stablelm.block_count".to_owned();
    parts.entries.insert(key, Value::U32(40));
    assert_eq!(
        refused(&parts.write()),
        "metadata `stablelm.block_count`: a model of 40 layers has parts that compute in parallel, which are not supported"
    );
    let mut parts = Parts::of(&stablelm);
    parts.tensors.remove("blk.2.ffn_norm.bias").unwrap();
    assert_eq!(
        refused(&parts.write()),
        "tensor `blk.2.ffn_norm.bias` is missing"
    );
    for name in ["blk.2.ffn_norm.bias", "output_norm.bias"] {
        let mut parts = Parts::of(&tiny(Architecture::Llama, GgmlDType::Q8_0));
        parts.add(name, &[256]);
        assert_eq!(
            refused(&parts.write()),
            format!("tensor `{name}` is not known in a model of architecture `llama`")
        );
    }
}

#[test]
fn sections_of_rotation_that_do_not_cover_a_head_are_refused() {
    let file = tiny(Architecture::Qwen3Vl, GgmlDType::Q8_0);
    let key = "qwen3vl.rope.dimension_sections";
    let good = Model::inspect(&file.path, 1).map(|_| ());
    assert!(good.is_ok(), "{good:?}");
    for sections in [&[1, 1, 1, 0][..], &[-1, 1, 1, 0], &[2, 2], &[0, 0, 0, 16]] {
        let mut parts = Parts::of(&file);
        let values = sections.iter().map(|&pairs| Value::I32(pairs)).collect();
        parts.entries.insert(key.to_owned(), Value::Array(values));
        let reported = refused(&parts.write());
        let expected = format!("metadata `{key}`: {sections:?} are not three sections of ");
        assert!(reported.starts_with(&expected), "{reported}");
    }
}

#[test]
fn biases_change_the_logits_wherever_they_are() {
    for (architecture, names) in [
        (
            Architecture::Granite,
            &[
                "attn_output.bias",
                "ffn_gate.bias",
                "ffn_up.bias",
                "ffn_down.bias",
            ][..],
        ),
        (Architecture::GraniteHybrid, &["ssm_conv1d.bias"]),
        (
            Architecture::Qwen2,
            &["attn_q.bias", "attn_k.bias", "attn_v.bias"],
        ),
        (
            Architecture::StableLm,
            &["attn_q.bias", "attn_k.bias", "attn_v.bias"],
        ),
    ] {
        let file = write(&Synthetic::tiny(
            architecture,
            TypeMix::All(GgmlDType::F32),
            7,
        ));
        let whole = reference(&file.path, 0);
        let without = names.iter().map(|name| format!("blk.1.{name}"));
        for name in
            without.chain((architecture == Architecture::Qwen2).then(|| "output.bias".to_owned()))
        {
            let mut parts = Parts::of(&file);
            parts.tensors.remove(&name).unwrap();
            assert_ne!(reference(&parts.write().path, 0), whole, "{name}");
        }
    }
}

#[test]
fn scans_whose_heads_do_not_fit_are_refused_and_layers_without_zeros_attend() {
    let file = tiny(Architecture::GraniteHybrid, GgmlDType::Q8_0);
    for (key, number, problem) in [
        (
            "inner_size",
            514,
            "514 is not 4 heads of one multiple of 8 elements",
        ),
        (
            "time_step_rank",
            128,
            "512 is not 128 heads of one multiple of 8 elements",
        ),
        ("group_count", 3, "3 does not divide 4 heads"),
        ("group_count", 0, "it is 0"),
        ("state_size", 60, "60 is no multiple of 8"),
        ("conv_kernel", 1, "1 is below 2"),
    ] {
        let mut parts = Parts::of(&file);
        let full = format!("granitehybrid.ssm.{key}");
        parts.entries.insert(full.clone(), Value::U32(number));
        let refused = refused(&parts.write());
        let named = if problem.contains("multiple of 8 elements") {
            "granitehybrid.ssm.inner_size"
        } else {
            &full
        };
        assert_eq!(refused, format!("metadata `{named}`: {problem}"));
    }
    let mut parts = Parts::of(&file);
    let heads = "granitehybrid.attention.head_count_kv".to_owned();
    parts.entries.insert(heads, Value::U32(2));
    assert_eq!(
        refused(&parts.write()),
        "tensor `blk.0.attn_q.weight` is missing"
    );
}

#[test]
fn widths_of_nemotron_h_decide_the_kinds_of_its_layers() {
    let file = tiny(Architecture::NemotronH, GgmlDType::Q8_0);
    let (_, header) = Model::inspect(&file.path, 1).unwrap();
    let spec = Spec::read(&header).unwrap();
    let kinds: Vec<_> = spec.layers.iter().map(|layer| layer.kind).collect();
    assert_eq!(kinds, [Recurrent, FeedForward, Recurrent, Attention]);
    // Older files have one epsilon.
    let mut parts = Parts::of(&file);
    let epsilon = "nemotron_h.attention.layer_norm_rms_epsilon";
    parts.entries.remove(epsilon).unwrap();
    assert_eq!(reference(&parts.write().path, 2), reference(&file.path, 2));
    for (widths, problem) in [
        ([0; 4], "tensor `blk.1.ssm_in.weight` is missing"),
        ([0, 256, 256, 0], "tensor `blk.2.ffn_up.weight` is missing"),
    ] {
        let mut parts = Parts::of(&file);
        parts.list("nemotron_h.feed_forward_length", &widths);
        assert_eq!(refused(&parts.write()), problem);
    }
}

#[test]
fn experts_of_nemotron_h_in_another_space_or_with_other_weights_are_refused() {
    let file = tiny(Architecture::NemotronHMoe, GgmlDType::Q8_0);
    for (key, value, problem) in [
        (
            "moe_latent_size",
            Value::U32(1024),
            "experts in a space of 1024 elements are not supported",
        ),
        (
            "expert_weights_norm",
            Value::Bool(false),
            "weights whose sum is not one are not supported",
        ),
    ] {
        let mut parts = Parts::of(&file);
        let key = format!("nemotron_h_moe.{key}");
        parts.entries.insert(key.clone(), value);
        let refused = refused(&parts.write());
        assert_eq!(refused, format!("metadata `{key}`: {problem}"));
    }
}

#[test]
fn a_model_of_one_layer_is_computed_in_each_family() {
    for architecture in Architecture::ALL {
        let model = Synthetic {
            layers: 1,
            ..Synthetic::tiny(architecture, TypeMix::All(GgmlDType::Q8_0), 5)
        };
        let file = write(&model);
        // If buffers for 64 tokens take less than a page, they may be too small for more.
        let mut loaded = open(&file.path, &plan(0..1, 128, 100), 1);
        let prompt = PROMPT.repeat(90 / PROMPT.len() + 1);
        let logits = loaded.forward(&prompt, &mut go()).unwrap();
        assert!(
            logits.iter().all(|logit| logit.is_finite()),
            "{architecture:?}"
        );
    }
}
