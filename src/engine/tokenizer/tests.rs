//! Tests of the tokenizer with small and damaged vocabularies, and with llama.cpp's.

use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Value;
use proptest::prelude::*;

use super::{
    super::test_vocabulary::TestVocabulary,
    terms::{KEY_PRE, UNBROKEN_BYTES_MAX},
    *,
};

fn tokenizer(vocabulary: &TestVocabulary) -> Tokenizer {
    Tokenizer::from_header(&vocabulary.header()).unwrap()
}

/// Composes texts first, as the rules of the Qwen family do.
fn composed(text: &str) -> String {
    use tokenizers::{NormalizedString, Normalizer};
    let mut text = NormalizedString::from(text);
    NFC.normalize(&mut text).unwrap();
    text.get().to_owned()
}

/// One tokenizer per set of rules.
static FAMILIES: std::sync::LazyLock<Vec<(&str, Tokenizer)>> = std::sync::LazyLock::new(|| {
    [
        "qwen35",
        "qwen2",
        "llama-bpe",
        "gpt-2",
        "gpt-4o",
        "tekken",
        "smollm",
        "default",
    ]
    .map(|pre| {
        let vocabulary = TestVocabulary {
            pre,
            ..TestVocabulary::chatml()
        };
        (pre, tokenizer(&vocabulary))
    })
    .into()
});

/// The words of a text before pairs are merged.
fn words(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _};
    let mut cut = PreTokenizedString::from(text);
    tokenizer
        .bpe
        .get_pre_tokenizer()
        .unwrap()
        .pre_tokenize(&mut cut)
        .unwrap();
    let splits = cut.get_splits(OffsetReferential::Original, OffsetType::Byte);
    splits
        .into_iter()
        .map(|(word, ..)| word.to_owned())
        .collect()
}

#[test]
fn an_unknown_pre_tokenizer_is_refused_by_name() {
    let vocabulary = TestVocabulary {
        pre: "x",
        ..TestVocabulary::chatml()
    };
    let error = Tokenizer::from_header(&vocabulary.header()).err().unwrap();
    assert!(
        matches!(&error, TokenizerError::UnknownPre { pre, .. } if pre == "x"),
        "{error}"
    );
    assert!(error.to_string().contains("`x`"), "{error}");
    for known in [
        "`command-r`, `dbrx`, ",
        "`llama4`",
        "`starcoder` and `tekken`",
    ] {
        assert!(error.to_string().contains(known), "{error}");
    }
}

#[test]
fn another_kind_of_tokenizer_is_refused_by_name() {
    let vocabulary = TestVocabulary {
        model: "bert",
        ..TestVocabulary::chatml()
    };
    let error = Tokenizer::from_header(&vocabulary.header()).err().unwrap();
    assert_eq!(
        error,
        TokenizerError::UnknownModel {
            model: "bert".to_owned()
        }
    );
}

#[test]
fn missing_and_broken_tables_are_refused() {
    for (key, value, part) in [
        (KEY_TOKENS, Value::U32(1), "missing or of another type"),
        (KEY_PRE, Value::U32(1), "missing or of another type"),
        (
            KEY_MERGES,
            Value::Array(vec![Value::String("ab".into())]),
            "not two parts",
        ),
        (
            KEY_TYPES,
            Value::Array(vec![Value::I32(1)]),
            "1 entries for",
        ),
        (KEY_EOS, Value::U32(100_000), "names token 100000"),
    ] {
        let mut vocabulary = TestVocabulary::chatml();
        vocabulary.more.push((key, value));
        let error = Tokenizer::from_header(&vocabulary.header()).err().unwrap();
        assert!(error.to_string().contains(part), "{key}: {error}");
    }
}

#[test]
fn control_tokens_are_recognised_in_templates_and_nowhere_else() {
    let vocabulary = TestVocabulary::chatml();
    let tokenizer = tokenizer(&vocabulary);
    let end = vocabulary.id("<|im_end|>");
    assert_eq!(
        tokenizer.encode_rendered("hello<|im_end|>", None).unwrap(),
        [vocabulary.id("hello"), end]
    );
    let plain = tokenizer.encode("hello<|im_end|>").unwrap();
    assert!(!plain.contains(&end), "{plain:?}");
    assert_eq!(tokenizer.decode(&plain), "hello<|im_end|>");
}

#[test]
fn merges_cannot_make_control_tokens() {
    let mut vocabulary = TestVocabulary::chatml();
    vocabulary.merges = vec!["a b"];
    vocabulary
        .more
        .push((KEY_EOS, Value::U32(vocabulary.id("ab"))));
    let tokenizer = tokenizer(&vocabulary);
    assert_eq!(
        tokenizer.encode("ab").unwrap(),
        [vocabulary.id("a"), vocabulary.id("b")]
    );
    assert!(tokenizer.is_end(vocabulary.id("ab")));
}

#[test]
fn a_stretch_without_a_place_to_cut_is_encoded_in_bounded_pieces() {
    let vocabulary = TestVocabulary::chatml();
    let tokenizer = tokenizer(&vocabulary);
    // The cost of a piece grows superlinearly with its length, so the number of pieces and the longest one bound the
    // work.
    for times in [1, 2, 8] {
        let text = "a".repeat(times * UNBROKEN_BYTES_MAX + 1);
        let pieces: Vec<&str> = Segments {
            rest: &text,
            target: 1,
            cut: &Cut::ByRules,
        }
        .collect();
        assert_eq!(pieces.len(), times + 1);
        assert!(pieces.iter().all(|piece| piece.len() <= UNBROKEN_BYTES_MAX));
        assert_eq!(pieces.concat(), text);
    }
    let text = "\u{1f600}".repeat(UNBROKEN_BYTES_MAX / 2);
    assert!(tokenizer.decode(&tokenizer.encode(&text).unwrap()) == text);
    let tokens = tokenizer
        .encode(&"hello w ".repeat(UNBROKEN_BYTES_MAX / 4))
        .unwrap();
    assert_eq!(tokenizer.decode(&tokens).len(), UNBROKEN_BYTES_MAX * 2);
}

#[test]
fn segments_leave_contractions_and_slashes_with_what_they_belong_to() {
    for (text, parts) in [("on't", ["on", "'t"]), ("no!\n/x", ["no!\n", "/x"])] {
        let mut differs = false;
        for (pre, tokenizer) in FAMILIES.iter() {
            let whole = words(tokenizer, text);
            let apart: Vec<_> = parts
                .iter()
                .flat_map(|part| words(tokenizer, part))
                .collect();
            differs |= apart != whole;
            let mut cut = Vec::new();
            for segment in (Segments {
                rest: text,
                target: 1,
                cut: &Cut::ByRules,
            }) {
                cut.extend(words(tokenizer, segment));
            }
            assert_eq!(cut, whole, "{pre}");
        }
        assert!(differs, "{text:?} would lose tokens if it were cut there");
    }
}

#[test]
fn user_defined_tokens_are_recognised_everywhere_and_are_text() {
    let vocabulary = TestVocabulary::chatml();
    let tokenizer = tokenizer(&vocabulary);
    let think = vocabulary.id("<think>");
    let words = [vocabulary.id("hello"), vocabulary.id("Ġw")];
    assert_eq!(
        tokenizer.encode("<think>hello w").unwrap(),
        [think, words[0], words[1]]
    );
    assert_eq!(tokenizer.decode(&[think]), "<think>");
    assert_eq!(tokenizer.decode(&[vocabulary.id("<|im_end|>")]), "");
}

#[test]
fn the_beginning_is_added_once_where_the_file_wants_it() {
    let mut vocabulary = TestVocabulary::chatml();
    let bos = vocabulary.id("<|endoftext|>");
    vocabulary.more.push((KEY_BOS, Value::U32(bos)));
    let mut tokens = vec![1];
    tokenizer(&vocabulary).begin(&mut tokens);
    assert_eq!(tokens, [1], "qwen35 adds none by default");
    vocabulary.more.push((KEY_ADD_BOS, Value::Bool(true)));
    let with = tokenizer(&vocabulary);
    with.begin(&mut tokens);
    with.begin(&mut tokens);
    assert_eq!(tokens, [bos, 1]);
    vocabulary.more.pop();
    vocabulary.pre = "llama-bpe";
    assert!(
        tokenizer(&vocabulary).adds_bos(),
        "Llama 3 adds it by default"
    );
}

#[test]
fn all_texts_that_end_an_answer_do_so_even_if_the_file_names_one() {
    let mut vocabulary = TestVocabulary::chatml();
    vocabulary
        .more
        .push((KEY_EOS, Value::U32(vocabulary.id("<|endoftext|>"))));
    let tokenizer = tokenizer(&vocabulary);
    assert!(tokenizer.is_end(vocabulary.id("<|im_end|>")));
    assert!(tokenizer.is_end(vocabulary.id("<|endoftext|>")));
    assert!(!tokenizer.is_end(vocabulary.id("<|im_start|>")));
}

#[test]
fn a_character_over_several_tokens_comes_out_whole() {
    let mut stream = TextStream::default();
    let llama = "🦙".as_bytes();
    assert_eq!(stream.push(&llama[..1]), "");
    assert_eq!(stream.push(&llama[1..3]), "");
    assert_eq!(stream.push(&[llama[3], b'!']), "🦙!");
    assert_eq!(stream.push(&[b'a', 0xe2, 0x82]), "a");
    assert_eq!(
        stream.push(b"b"),
        "\u{fffd}b",
        "the beginning of a character that does not go on"
    );
    assert_eq!(stream.push(&[0xff, b'c', 0xf0]), "\u{fffd}c");
    assert_eq!(stream.finish(), "\u{fffd}");
    assert_eq!(stream.finish(), "");
}

proptest! {
    #![proptest_config(ProptestConfig {
        // Counter-examples are stored with the other fixtures.
        failure_persistence: Some(Box::new(proptest::test_runner::FileFailurePersistence::Direct(
            "tests/fixtures/proptest/tokenizer.txt",
        ))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn text_survives_encoding(text in "[\\PC\n\t<|>a-z]{0,40}") {
        let (_, tokenizer) = &FAMILIES[0];
        prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text).unwrap()), composed(&text));
    }

    #[test]
    fn segments_have_the_tokens_of_the_whole(text in "([a-zA-Z你é\u{301}0-9 .,'/。\n\r\t_(-]|'t|'S|\\PC){0,60}", target in 1usize..9) {
        for (pre, tokenizer) in FAMILIES.iter() {
            let text = if pre.starts_with("qwen") { composed(&text) } else { text.clone() };
            let mut cut = Vec::new();
            for segment in (Segments { rest: &text, target, cut: &Cut::ByRules }) {
                cut.extend(words(tokenizer, segment));
            }
            prop_assert_eq!(cut, words(tokenizer, &text), "{}", pre);
            let mut tokens = Vec::new();
            tokenizer.encode_in_segments(&text, target, &mut tokens).unwrap();
            let whole = tokenizer.bpe.encode(text.as_str(), false).unwrap();
            prop_assert_eq!(&tokens, whole.get_ids(), "{}", pre);
        }
    }

    #[test]
    fn a_stream_gives_the_text_of_the_whole(bytes in proptest::collection::vec(any::<u8>(), 0..24), cut in 1usize..5) {
        let mut stream = TextStream::default();
        let mut text = String::new();
        for piece in bytes.chunks(cut) {
            text.push_str(&stream.push(piece));
        }
        text.push_str(&stream.finish());
        prop_assert_eq!(text, String::from_utf8_lossy(&bytes).into_owned());
    }
}

/// llama.cpp's own test cases, next to its vocabularies in `models/` of its source tree.
#[test]
#[ignore = "needs the vocabularies of llama.cpp: COTENANT_LLAMA_VOCABULARIES=<its folder `models`>"]
fn tokens_are_those_of_llama_cpp() {
    let folder = PathBuf::from(std::env::var("COTENANT_LLAMA_VOCABULARIES").unwrap());
    for name in [
        "qwen35",
        "qwen2",
        "llama-bpe",
        "llama-spm",
        "phi-3",
        "gpt-2",
        "starcoder",
        "refact",
        "command-r",
        "gemma-4",
    ] {
        let file = folder.join(format!("ggml-vocab-{name}.gguf"));
        let tokenizer = Tokenizer::from_header(&Header::read(&file).unwrap()).unwrap();
        let read =
            |extension: &str| std::fs::read_to_string(file.with_extension(extension)).unwrap();
        let (inputs, outputs) = (read("gguf.inp"), read("gguf.out"));
        let inputs: Vec<_> = inputs.split("\n__ggml_vocab_test__\n").collect();
        let outputs: Vec<Vec<u32>> = outputs
            .lines()
            .map(|line| {
                line.split_whitespace()
                    .map(|id| id.parse().unwrap())
                    .collect()
            })
            .collect();
        assert!(inputs.len() >= 40, "{}", inputs.len());
        for (input, expected) in inputs.iter().zip(&outputs) {
            if name.starts_with("qwen") && composed(input) != *input {
                continue; // llama.cpp does not compose
            }
            assert_eq!(
                &tokenizer.encode(input).unwrap(),
                expected,
                "{name}: {input:?}"
            );
        }
    }
}

/// A small vocabulary of Gemma 4's kind, with llama.cpp's answers.
fn of_gemma_4(file: &str) -> PathBuf {
    let folder = "../../tests/fixtures/gemma4-tokens";
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join(folder)
        .join(file)
}

/// A file of that folder, or of one for another vocabulary, made by its scripts.
fn compared(file: &str) -> PathBuf {
    let other = std::env::var_os("COTENANT_GEMMA4_TOKENS");
    other.map_or_else(
        || of_gemma_4(file),
        |folder| PathBuf::from(folder).join(file),
    )
}

fn tokenizer_of(file: &Path) -> Tokenizer {
    let header = Header::read(file).unwrap();
    Tokenizer::check(&header).unwrap();
    Tokenizer::from_header(&header).unwrap()
}

/// llama.cpp's tokens of a text, without and with control tokens recognised.
#[derive(serde::Deserialize)]
struct Case(String, Vec<u32>, Vec<u32>);

/// Tokens of texts that user-defined tokens of Gemma 4, which are control tokens here, do not occur in.
#[test]
fn tokens_of_gemma_4_are_those_of_llama_cpp() {
    let tokenizer = tokenizer_of(&compared("vocabulary.gguf"));
    let cases = std::fs::read_to_string(compared("cases.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&cases).unwrap();
    let control = tokenizer.control.entries();
    let shown: Vec<u32> = control
        .map(|(_, token)| token)
        .filter(|token| !tokenizer.bytes(*token).is_empty())
        .collect();
    let mut plain = 0;
    for Case(text, without, with) in &cases {
        assert_eq!(
            &tokenizer.encode_rendered(text, None).unwrap(),
            with,
            "{text:?}"
        );
        if !shown.iter().any(|shown| without.contains(shown)) {
            assert_eq!(&tokenizer.encode(text).unwrap(), without, "{text:?}");
            plain += 1;
        }
        let decoded = tokenizer.decode(&tokenizer.encode(text).unwrap());
        assert_eq!(decoded, text.replace(terms::SPACE, " "));
    }
    assert!(plain > cases.len() / 2, "{plain}");
}

#[test]
fn bytes_and_ends_of_gemma_4_are_those_of_llama_cpp() {
    let tokenizer = tokenizer_of(&compared("vocabulary.gguf"));
    let pieces = std::fs::read_to_string(compared("pieces.txt")).unwrap();
    for (token, line) in (0..).zip(pieces.lines()) {
        let mut ours = format!("{token} {} ", u8::from(tokenizer.is_end(token)));
        for byte in tokenizer.bytes(token) {
            ours.push_str(&format!("{byte:02x}"));
        }
        assert_eq!(ours, line);
    }
    assert_eq!(pieces.lines().count(), tokenizer.vocabulary() as usize);
}

#[test]
fn control_tokens_of_gemma_4_are_shown_but_come_from_templates_only() {
    let tokenizer = tokenizer_of(&of_gemma_4("vocabulary.gguf"));
    assert!(tokenizer.adds_bos(), "although the file denies it");
    let token = |text: &str| tokenizer.control(text).unwrap();
    assert_eq!(tokenizer.suppressed(), [token("<|image|>")]);
    for end in ["<eos>", "<turn|>", "<|tool_response>"] {
        assert!(tokenizer.is_end(token(end)), "{end}");
        assert_eq!(tokenizer.decode(&[token(end)]), "", "{end}");
    }
    for shown in [
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|\"|>",
    ] {
        assert_eq!(tokenizer.decode(&[token(shown)]), shown);
        assert!(!tokenizer.encode(shown).unwrap().contains(&token(shown)));
        assert_eq!(
            tokenizer.encode_rendered(shown, None).unwrap(),
            [token(shown)]
        );
        // Forced bytes are the tokens that the model would choose.
        assert_eq!(
            tokenizer.encode_ahead(format!("{shown}x").as_bytes()),
            [token(shown)]
        );
    }
    let spelled = tokenizer.encode("né\u{1f680}").unwrap();
    let bytes = |token: &u32| tokenizer.bytes(*token).to_vec();
    let bytes: Vec<Vec<u8>> = spelled.iter().map(bytes).collect();
    assert_eq!(bytes.concat(), "né\u{1f680}".as_bytes());
    assert!(spelled.len() > 4, "unknown characters are single bytes");
}

#[test]
fn messages_of_gpt_oss_do_not_end_its_answer() {
    use super::super::test_vocabulary::CHANNEL_TOKENS;
    let vocabulary = |control: &[&'static str]| TestVocabulary {
        control: control.to_vec(),
        ..TestVocabulary::chatml()
    };
    let both = tokenizer(&vocabulary(&CHANNEL_TOKENS));
    for text in CHANNEL_TOKENS {
        let token = both.control(text).unwrap();
        let ends = ["<|return|>", "<|call|>"].contains(&text);
        assert_eq!(both.is_end(token), ends, "{text}");
        assert_eq!(both.decode(&[token]), if ends { "" } else { text });
        assert!(!both.encode(text).unwrap().contains(&token));
    }
    let one = tokenizer(&vocabulary(&["<|end|>", "<|call|>"]));
    assert!(one.is_end(one.control("<|end|>").unwrap()));
}

#[test]
fn a_vocabulary_of_gemma_4_is_recognised_by_either_of_its_names() {
    let tokens = ["<bos>", "<0x61>", "▁", "a", "▁a", "<|\"|>"];
    let kinds = [3, 6, 1, 1, 1, 3];
    let string = |text: &str| Value::String(text.to_owned());
    let header = |model: &str, pre: &str| {
        super::super::test_vocabulary::header(&[
            ("tokenizer.ggml.model", string(model)),
            ("tokenizer.ggml.pre", string(pre)),
            (KEY_TOKENS, Value::Array(tokens.map(string).to_vec())),
            (KEY_TYPES, Value::Array(kinds.map(Value::I32).to_vec())),
            (KEY_MERGES, Value::Array(vec![string("▁ a")])),
        ])
    };
    for (model, pre) in [("gemma4", "default"), ("llama", "gemma4")] {
        let header = header(model, pre);
        Tokenizer::check(&header).unwrap();
        assert!(Tokenizer::heap_bytes(&header) > Bytes::from_kib(256));
        let tokenizer = Tokenizer::from_header(&header).unwrap();
        assert_eq!(tokenizer.encode("a a").unwrap(), [3, 4], "{model}");
        assert_eq!(tokenizer.decode(&[3, 4, 5]), "a a<|\"|>", "{model}");
    }
    let error = Tokenizer::check(&header("llama", "default")).unwrap_err();
    assert_eq!(
        error,
        TokenizerError::Missing {
            key: "tokenizer.ggml.scores"
        }
    );
}
