//! Encoders with random weights compared with llama.cpp, and refused files.

use std::{fs, path::PathBuf};

use cotenant::{
    engine::embedding::{EmbedError, Embedder},
    units::{Tokens, causes::in_one_line},
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    text: String,
    tokens: Vec<u32>,
    /// By each model of [`MODELS`], for some texts.
    #[serde(default)]
    vectors: Vec<Vec<f32>>,
}

/// Positions as rows of a table with the mean of all states, and as rotations with the first state.
const MODELS: [&str; 2] = ["bert.gguf", "nomic-bert.gguf"];

/// Tokens of the longest text in the headers of [`MODELS`].
const CONTEXT: usize = 160;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/bert")
        .join(name)
}

fn cases() -> Vec<Case> {
    serde_json::from_str(&fs::read_to_string(fixture("cases.json")).unwrap()).unwrap()
}

fn open(name: &str, threads: usize) -> Embedder {
    Embedder::open(&fixture(name), Tokens::new(2048), threads).unwrap()
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

#[test]
fn vectors_of_encoders_are_those_of_llama_cpp() {
    for (number, name) in MODELS.into_iter().enumerate() {
        let mut model = open(name, 1);
        let (mut worst, mut compared) = (1f32, 0);
        for case in cases().iter().filter(|case| !case.vectors.is_empty()) {
            let found = model.embed(&case.text, None, false).unwrap();
            assert_eq!(found.tokens as usize, case.tokens.len(), "{:?}", case.text);
            assert!((cosine(&found.vector, &found.vector) - 1.0).abs() < 1e-5);
            worst = worst.min(cosine(&found.vector, &case.vectors[number]));
            compared += 1;
        }
        println!("{name}: {compared} texts, least cosine {worst}");
        assert!(
            worst > 0.9999 && compared > 20,
            "{name}: {worst} of {compared}"
        );
    }
}

#[test]
fn a_vector_has_the_same_bits_after_other_texts_and_with_any_number_of_threads() {
    for name in MODELS {
        let (mut one, mut three) = (open(name, 1), open(name, 3));
        let long = "the light is on and ".repeat(20);
        let texts = ["turn on the light", long.as_str(), "turn on the light"];
        let vectors = texts.map(|text| one.embed(text, None, false).unwrap().vector);
        assert_eq!(vectors[0], vectors[2]);
        assert_ne!(vectors[0], vectors[1]);
        for (text, vector) in texts.iter().zip(&vectors) {
            assert_eq!(three.embed(text, None, false).unwrap().vector, *vector);
        }
        let few = one.embed(texts[0], Some(8), false).unwrap().vector;
        let scale = cosine(&few, &vectors[0][..8]);
        assert!(
            few.iter()
                .zip(&vectors[0])
                .all(|(few, all)| (few * scale - all).abs() < 1e-6)
        );
    }
}

#[test]
fn a_text_beyond_the_positions_of_an_encoder_is_refused_or_cut_before_its_last_token() {
    for name in MODELS {
        let mut model = open(name, 1);
        // A token for each word, beside the first and the last.
        let text = |words: usize| "light ".repeat(words);
        let longest = model.embed(&text(CONTEXT - 2), None, false).unwrap();
        assert_eq!(longest.tokens as usize, CONTEXT);
        let refused = model.embed(&text(CONTEXT - 1), None, false).unwrap_err();
        assert!(
            matches!(
                refused,
                EmbedError::TooLong {
                    tokens: 160,
                    limit: 159
                }
            ),
            "{refused}"
        );
        assert_eq!(model.embed(&text(50_000), None, true).unwrap(), longest);
    }
}

/// A fixture with the bytes after the first `key` replaced.
fn patched(name: &str, key: &str, skip: usize, bytes: &[u8]) -> String {
    let mut file = fs::read(fixture(name)).unwrap();
    let found = file
        .windows(key.len())
        .position(|window| window == key.as_bytes());
    let at = found.unwrap() + key.len() + skip;
    file[at..at + bytes.len()].copy_from_slice(bytes);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, file).unwrap();
    let refused = Embedder::open(&path, Tokens::new(2048), 1).err().unwrap();
    in_one_line(&refused)
}

#[test]
fn encoders_that_would_be_computed_wrongly_are_refused_with_the_reason() {
    for (key, skip, bytes, reason) in [
        // The value of a number follows the number of its type.
        (
            "bert.pooling_type",
            4,
            &4u32.to_le_bytes()[..],
            "pooling type 4 (rank) is not supported",
        ),
        (
            "bert.pooling_type",
            4,
            &0u32.to_le_bytes(),
            "pooling type 0 (none) is not supported",
        ),
        (
            "bert.context_length",
            4,
            &161u32.to_le_bytes(),
            "`position_embd.weight` has dimensions [32, 160]",
        ),
        (
            "bert.attention.head_count",
            4,
            &5u32.to_le_bytes(),
            "heads of 6 and 6 elements",
        ),
        (
            "bert.attention.head_count",
            4,
            &3u32.to_le_bytes(),
            "heads of 10 and 10 elements",
        ),
        ("bert.attention.causal", 4, &[1], "sees only earlier tokens"),
        (
            "tokenizer.ggml.model",
            12,
            b"bart",
            "`tokenizer.ggml.model` is `bart`",
        ),
        (
            "tokenizer.ggml.seperator_token_id",
            4,
            &7777u32.to_le_bytes(),
            "token 7777 is not one of",
        ),
        (
            "token_types.weigh",
            0,
            b"x",
            "tensor `token_types.weighx` is not known",
        ),
        (
            "blk.1.ffn_down.bia",
            0,
            b"x",
            "tensor `blk.1.ffn_down.biax` is not known",
        ),
        (
            "blk.1.attn_output_norm.weigh",
            0,
            b"x",
            "tensor `blk.1.attn_output_norm.weight` is missing",
        ),
    ] {
        let refused = patched("bert.gguf", key, skip, bytes);
        assert!(refused.contains(reason), "{key}: {refused}");
    }
}
