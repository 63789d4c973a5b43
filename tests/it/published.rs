//! Published models compared with llama.cpp's results.
//!
//! `fixtures/published` contains the answers and their origin. `COTENANT_MODELS` is the folder filled by
//! `tests/models`.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use candle_core::{
    Device,
    quantized::{
        GgmlDType, QTensor,
        gguf_file::{self, Value},
    },
    safetensors,
};
use cotenant::{
    engine::{
        Flow, Model, ModelOptions,
        arena::Backing,
        embedding::{EmbedError, Embedder},
        text::TextSide,
    },
    policy::{kv_type::KvType, residency::EnginePlan},
    units::Tokens,
};
use serde::Deserialize;

/// The chat model, and the base model with the largest vocabulary and sliding windows.
pub(crate) const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const GEMMA3: &str = "gemma-3-270m-Q4_K_M.gguf";

/// Margin between the best logits below which different rounding may select another token: the spread between
/// llama.cpp's own two ways is up to 0.5 with these weight types.
const CLOSE_CALL: f32 = 0.5;

#[derive(Deserialize)]
struct Reference {
    texts: Vec<Text>,
    answers: Vec<Greedy>,
    perplexity: Perplexity,
    logits: Logits,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    tokens: Vec<u32>,
}

#[derive(Deserialize)]
struct Greedy {
    prompt: String,
    tokens: Vec<u32>,
    margins: Vec<f32>,
}

#[derive(Deserialize)]
struct Perplexity {
    window: usize,
    windows: usize,
    f16: f64,
    q8: f64,
    q4: f64,
}

#[derive(Deserialize)]
struct Logits {
    tokens: Vec<u32>,
    prompt: usize,
    every: usize,
    plain: Vec<Vec<f32>>,
    repack: Vec<Vec<f32>>,
    f32: Vec<Vec<f32>>,
}

/// Returns the folder with published models; without one, prints that a test is skipped.
pub(crate) fn models() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| std::env::var_os("COTENANT_MODELS").map(PathBuf::from));
    if folder.is_none() {
        println!("left out: COTENANT_MODELS is not set (the folder that tests/models fills)");
    }
    folder.as_deref()
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/published")
        .join(name)
}

fn reference(name: &str) -> Reference {
    serde_json::from_str(&fs::read_to_string(fixture(name)).unwrap()).unwrap()
}

fn plan(resident: impl IntoIterator<Item = u32>, kv_type: KvType) -> EnginePlan {
    EnginePlan {
        resident: resident.into_iter().collect(),
        kv_capacity: Tokens::new(1024),
        prefill_chunk: Tokens::new(128),
        kv_type,
    }
}

/// Opens the model with every layer streamed, and its text side.
fn open(path: &Path) -> (Model, TextSide) {
    let options = ModelOptions {
        compute: 2.into(),
        name: None,
        context: Some(Tokens::new(1024)),
        conversations: 0,
        drafts: true,
        keeps_conversations: false,
        kv_backing: Backing::OnTouch,
        vocabulary: None,
        helper: None,
    };
    let model = Model::open(path, &plan([], KvType::F16), &options).unwrap();
    let text = TextSide::new(model.header(), model.shape().context_max).unwrap();
    (model, text)
}

fn go() -> impl FnMut() -> Flow {
    || Flow::Continue
}

fn best(logits: &[f32]) -> u32 {
    let (at, _) = logits
        .iter()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(b.1))
        .unwrap();
    u32::try_from(at).unwrap()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(x, y)| (x - y).abs())
        .fold(0.0, f32::max)
}

/// Returns sets of resident layers: every layer, every second one, none.
fn residencies(model: &Model) -> [Vec<u32>; 3] {
    let layers = model.shape().layer_count();
    [
        (0..layers).collect(),
        (0..layers).step_by(2).collect(),
        Vec::new(),
    ]
}

/// Compares texts, answers at several residencies, and logits of one model.
fn is_read_as_llama_cpp_does(file: &str, name: &str) {
    let Some(folder) = models() else { return };
    let (mut model, text) = open(&folder.join(file));
    let Reference {
        texts,
        answers,
        logits,
        ..
    } = reference(name);
    let begins = text
        .tokenizer()
        .bos()
        .filter(|_| text.tokenizer().adds_bos());
    let read = |said: &str| {
        let rest = text.tokenizer().encode_rendered(said, None).unwrap();
        begins
            .into_iter()
            .filter(|begin| rest.first() != Some(begin))
            .chain(rest.iter().copied())
            .collect::<Vec<u32>>()
    };
    for Text { text: said, tokens } in &texts {
        assert_eq!(&read(said), tokens, "{said:?}");
    }
    let residencies = residencies(&model);
    let (mut equal, mut written) = (0, 0);
    for (
        Greedy {
            prompt,
            tokens,
            margins,
        },
        resident,
    ) in answers.iter().zip(residencies.iter().cycle())
    {
        model.reset();
        model
            .apply(&plan(resident.iter().copied(), KvType::F16))
            .unwrap();
        let mut next = best(&model.forward(&read(prompt), &mut go()).unwrap());
        written += tokens.len();
        // Small models often have close candidates: the test continues with llama.cpp's token, and selects again after
        // each.
        for (count, (&token, &margin)) in tokens.iter().zip(margins).enumerate() {
            assert!(
                next == token || margin < CLOSE_CALL,
                "{prompt:?}, token {count}: {next}, margin {margin}"
            );
            equal += usize::from(next == token);
            next = best(&model.forward(&[token], &mut go()).unwrap());
        }
    }
    println!("{file}: {equal} of {written} greedy tokens are llama.cpp's");
    assert!(equal * 10 >= written * 9, "{equal} of {written} tokens");
    let Logits {
        tokens,
        prompt,
        every,
        plain,
        repack,
        f32,
    } = logits;
    let mut rows: Vec<Vec<Vec<f32>>> = Vec::new();
    for resident in &residencies {
        model.reset();
        model
            .apply(&plan(resident.iter().copied(), KvType::F16))
            .unwrap();
        let mut read = vec![
            model
                .forward(&tokens[..prompt], &mut go())
                .unwrap()
                .to_vec(),
        ];
        for token in &tokens[prompt..] {
            read.push(model.forward(&[*token], &mut go()).unwrap().to_vec());
        }
        rows.push(
            read.into_iter()
                .map(|row| row.into_iter().step_by(every).collect())
                .collect(),
        );
    }
    assert!(
        rows.iter().all(|one| one == &rows[0]),
        "residency changes logits"
    );
    for (at, ours) in rows[0].iter().enumerate() {
        let spread = distance(&plain[at], &f32[at]).max(distance(&repack[at], &f32[at]));
        let ours = distance(ours, &f32[at]);
        println!("{file}, row {at}: {ours:.4} from F32, llama.cpp's own ways {spread:.4}");
        assert!(ours <= 2.0 * spread, "row {at}: {ours} against {spread}");
    }
}

#[test]
fn a_published_chat_model_is_read_as_llama_cpp_does_at_every_residency() {
    is_read_as_llama_cpp_does(SMOLLM2, "smollm2.json");
    embeds_as_llama_cpp_does(SMOLLM2);
}

#[test]
fn a_published_model_with_sliding_windows_is_read_as_llama_cpp_does_at_every_residency() {
    is_read_as_llama_cpp_does(GEMMA3, "gemma3.json");
    embeds_as_llama_cpp_does(GEMMA3);
}

/// A vector of all-MiniLM-L6-v2.
#[derive(Deserialize)]
struct OfEncoder {
    text: String,
    tokens: u32,
    /// By the published weights in 64 bits.
    original: Vec<f32>,
    /// By llama.cpp with matrices in F16.
    llama: Vec<f32>,
}

/// Writes the published weights of all-MiniLM-L6-v2 as llama.cpp's converter does, with matrices of `dtype`.
fn convert_minilm(from: &Path, to: &Path, dtype: GgmlDType) {
    let words = fs::read_to_string(from.join("vocab.txt")).unwrap();
    let is_special = |word: &str| ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].contains(&word);
    let piece = |word: &str| match word.strip_prefix("##") {
        Some(rest) => rest.to_owned(),
        None if is_special(word) => word.to_owned(),
        None => format!("\u{2581}{word}"),
    };
    let types = words
        .lines()
        .map(|word| if is_special(word) { 3 } else { 1 });
    let pieces = words.lines().map(|word| Value::String(piece(word)));
    let text = |text: &str| Value::String(text.to_owned());
    let mut entries = vec![
        ("general.architecture", text("bert")),
        ("bert.attention.layer_norm_epsilon", Value::F32(1e-12)),
        ("tokenizer.ggml.model", text("bert")),
        ("tokenizer.ggml.tokens", Value::Array(pieces.collect())),
        (
            "tokenizer.ggml.token_type",
            Value::Array(types.map(Value::I32).collect()),
        ),
    ];
    let numbers = [
        ("bert.block_count", 6),
        ("bert.context_length", 512),
        ("bert.embedding_length", 384),
        ("bert.feed_forward_length", 1536),
        ("bert.attention.head_count", 12),
        ("bert.pooling_type", 1),
    ];
    entries.extend(numbers.map(|(key, number)| (key, Value::U32(number))));
    let tensors = safetensors::load(from.join("model.safetensors"), &Device::Cpu).unwrap();
    // The longer of two names that begin alike first.
    let names = [
        ("embeddings.word_embeddings", "token_embd"),
        ("embeddings.position_embeddings", "position_embd"),
        ("embeddings.token_type_embeddings", "token_types"),
        ("embeddings.LayerNorm", "token_embd_norm"),
        ("encoder.layer.", "blk."),
        ("attention.self.query", "attn_q"),
        ("attention.self.key", "attn_k"),
        ("attention.self.value", "attn_v"),
        ("attention.output.dense", "attn_output"),
        ("attention.output.LayerNorm", "attn_output_norm"),
        ("intermediate.dense", "ffn_up"),
        ("output.dense", "ffn_down"),
        ("output.LayerNorm", "layer_output_norm"),
    ];
    let named = |name: &str| {
        let replaced = |name: String, (theirs, ours): &(&str, &str)| name.replace(theirs, ours);
        names.iter().fold(name.to_owned(), replaced)
    };
    let used = tensors
        .iter()
        .filter(|(name, _)| !name.starts_with("pooler") && !name.ends_with("position_ids"));
    let converted: Vec<(String, QTensor)> = used
        .map(|(name, tensor)| {
            let name = named(name);
            let is_matrix = tensor.rank() == 2
                && !["position_embd.weight", "token_types.weight"].contains(&name.as_str());
            let dtype = if is_matrix { dtype } else { GgmlDType::F32 };
            (name, QTensor::quantize(tensor, dtype).unwrap())
        })
        .collect();
    let entries: Vec<_> = entries.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<_> = converted
        .iter()
        .map(|(name, tensor)| (name.as_str(), tensor))
        .collect();
    gguf_file::write(&mut fs::File::create(to).unwrap(), &entries, &tensors).unwrap();
}

#[test]
fn a_published_encoder_has_the_vectors_of_its_publisher_and_of_llama_cpp() {
    let Some(folder) = models() else { return };
    let references: Vec<OfEncoder> =
        serde_json::from_str(&fs::read_to_string(fixture("minilm.json")).unwrap()).unwrap();
    let own = tempfile::tempdir().unwrap();
    let path = own.path().join("minilm.gguf");
    // Weights of 8 bits are further from the publisher's than the arithmetic is.
    for (dtype, least) in [(GgmlDType::F16, 0.9999), (GgmlDType::Q8_0, 0.998)] {
        convert_minilm(&folder.join("all-MiniLM-L6-v2"), &path, dtype);
        let mut model = Embedder::open(&path, Tokens::new(2048), 2).unwrap();
        let found: Vec<Vec<f32>> = references
            .iter()
            .map(|reference| {
                let found = model.embed(&reference.text, None, false).unwrap();
                assert_eq!(found.tokens, reference.tokens, "{:?}", reference.text);
                let vector = found.vector;
                let near =
                    [&reference.original, &reference.llama].map(|other| cosine(&vector, other));
                println!("{dtype:?}, {} tokens: {near:?}", reference.tokens);
                assert!(
                    near.iter().all(|cosine| *cosine >= least),
                    "{:?}: {near:?}",
                    reference.text
                );
                vector
            })
            .collect();
        // A cat on a mat is nearer to a kitten on a rug than to markets.
        assert!(cosine(&found[0], &found[1]) > 0.4 && cosine(&found[0], &found[2]) < 0.2);
        let long = "word ".repeat(511);
        let refused = model.embed(&long, None, false).unwrap_err();
        assert!(
            matches!(
                refused,
                EmbedError::TooLong {
                    tokens: 512,
                    limit: 511
                }
            ),
            "{refused}"
        );
        assert_eq!(model.embed(&long, None, true).unwrap().tokens, 512);
    }
}

#[derive(Deserialize)]
struct Vector {
    text: String,
    /// Greatest distance between llama.cpp's own ways to compute it.
    spread: f32,
    vector: Vec<f32>,
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn embeds_as_llama_cpp_does(file: &str) {
    let Some(folder) = models() else { return };
    let references: BTreeMap<String, Vec<Vector>> =
        serde_json::from_str(&fs::read_to_string(fixture("embeddings.json")).unwrap()).unwrap();
    let mut model = Embedder::open(&folder.join(file), Tokens::new(512), 2).unwrap();
    let mut closest_other = 0f32;
    let texts = &references[file];
    for (number, reference) in texts.iter().enumerate() {
        let Vector {
            text,
            spread,
            vector,
        } = reference;
        let found = model.embed(text, None, false).unwrap();
        let cosine_of = |vector: &[f32]| cosine(&found.vector, vector);
        assert!((cosine_of(&found.vector) - 1.0).abs() < 1e-5);
        let distance = (2.0 - 2.0 * cosine_of(vector)).max(0.0).sqrt();
        println!(
            "{file}, text {number}: {distance} from llama.cpp, whose own ways are {spread} apart"
        );
        assert!(distance <= 2.0 * spread, "{file}, `{text}`");
        for (_, other) in texts.iter().enumerate().filter(|(at, _)| *at != number) {
            closest_other = closest_other.max(cosine_of(&other.vector));
        }
        // Again after others, cut to fewer numbers.
        let few = model.embed(text, Some(64), false).unwrap().vector;
        let scale = cosine(&few, &found.vector[..64]);
        let same = |(few, all): (&f32, &f32)| (few * scale - all).abs() < 1e-6;
        assert!(few.len() == 64 && few.iter().zip(&found.vector).all(same));
    }
    assert!(
        closest_other < 0.99,
        "vectors of other texts are as close: {closest_other}"
    );
    let long = "word ".repeat(600);
    let refused = model.embed(&long, None, false).unwrap_err();
    assert!(
        matches!(refused, EmbedError::TooLong { limit: 512, .. }),
        "{refused}"
    );
    assert_eq!(model.embed(&long, None, true).unwrap().tokens, 512);
    let refused = model.embed("a", Some(10_000), false).unwrap_err();
    assert!(matches!(
        refused,
        EmbedError::Dimensions { wanted: 10_000, .. }
    ));
}

/// Returns the perplexity as computed by `llama-perplexity`.
fn perplexity(model: &mut Model, text: &TextSide, tokens: &[u32], wanted: &Perplexity) -> f64 {
    let window = wanted.window;
    let begins = text
        .tokenizer()
        .bos()
        .filter(|_| text.tokenizer().adds_bos());
    let (mut sum, mut count) = (0.0, 0u32);
    for part in tokens.chunks_exact(window).take(wanted.windows) {
        let mut input = part.to_vec();
        if let Some(begin) = begins {
            input[0] = begin;
        }
        model.reset();
        model
            .forward_all(&input, &mut go(), &mut |at, logits| {
                if at < window / 2 || at + 1 == window {
                    return;
                }
                let most = logits.iter().copied().fold(f32::MIN, f32::max);
                let all: f64 = logits.iter().map(|one| f64::from(one - most).exp()).sum();
                sum += all.ln() - f64::from(logits[part[at + 1] as usize] - most);
                count += 1;
            })
            .unwrap();
    }
    (sum / f64::from(count)).exp()
}

/// Compares perplexity with each KV type to llama.cpp's with the same type.
fn expects_a_text_as_llama_cpp_does(file: &str, name: &str, kv_types: &[KvType]) {
    let Some(folder) = models() else { return };
    let said = fs::read_to_string(fixture("text.txt")).unwrap();
    let (mut model, text) = open(&folder.join(file));
    let wanted = reference(name).perplexity;
    let begins = text
        .tokenizer()
        .bos()
        .filter(|_| text.tokenizer().adds_bos());
    let rest = text.tokenizer().encode_rendered(&said, None).unwrap();
    let tokens: Vec<u32> = begins.into_iter().chain(rest).collect();
    let layers = model.shape().layer_count();
    let types = [
        (KvType::F16, wanted.f16),
        (KvType::Q8, wanted.q8),
        (KvType::Q4, wanted.q4),
    ];
    for (kv_type, theirs) in types.into_iter().filter(|(one, _)| kv_types.contains(one)) {
        model.reset();
        model.apply(&plan(0..layers, kv_type)).unwrap();
        let ours = perplexity(&mut model, &text, &tokens, &wanted);
        let percent = (ours / theirs - 1.0) * 100.0;
        println!("{file}, {kv_type}: {ours:.4}, llama.cpp {theirs}: {percent:+.3} %");
        if kv_type == KvType::Q4 {
            // Four bits cost such small models most; different rounding may double the cost.
            let (cost, their_cost) = ((ours / wanted.f16).ln(), (theirs / wanted.f16).ln());
            assert!(cost <= 2.0 * their_cost, "{file}, {kv_type}: {percent} %");
        } else {
            assert!(percent.abs() <= 0.5, "{file}, {kv_type}: {percent} %");
        }
    }
}

#[test]
fn a_published_chat_model_expects_a_text_as_llama_cpp_does_with_each_kv_type() {
    let all = [KvType::F16, KvType::Q8, KvType::Q4];
    expects_a_text_as_llama_cpp_does(SMOLLM2, "smollm2.json", &all);
}

#[test]
fn a_published_model_with_sliding_windows_expects_a_text_as_llama_cpp_does() {
    // One type takes a minute, mostly for the head of 262,144 tokens.
    expects_a_text_as_llama_cpp_does(GEMMA3, "gemma3.json", &[KvType::F16]);
}
