//! SentencePiece vocabularies (`llama` and `gemma4` in GGUF).
//!
//! The pair whose piece has the highest score is joined first. Since a piece determines its score, this equals
//! byte-pair encoding with every split of a piece into two others as a merge, ordered by the score of the result; so
//! the library's encoder serves here too (as in `transformers`' converter). Files of Gemma 4 list these merges.

use std::collections::HashSet;

use tokenizers::{
    NormalizerWrapper, TokenizerImpl,
    models::bpe::{BPE, Vocab},
    normalizers::replace::Replace,
};

use super::{
    error::TokenizerError,
    merges::merges,
    segments::{Cut, Pairs},
    terms::{Bpe, KEY_SCORES, KEY_TOKENS, Order, PIECE_BYTES_MAX, SPACE, WORDS_REMEMBERED},
};
use crate::gguf::{Header, StringTable};

/// The encoder, and the split positions of long texts.
pub(super) fn build(
    header: &Header,
    order: Order,
    vocabulary: Vocab,
) -> Result<(Bpe, Cut), TokenizerError> {
    let merges = match order {
        Order::Merges => merges(header, &vocabulary)?,
        Order::Scores => merges_by_score(scores(header)?, &vocabulary),
    };
    let cut = Cut::BetweenPieces(Pairs::of(vocabulary.keys().map(String::as_str)));
    let bpe = BPE::builder()
        .vocab_and_merges(vocabulary, merges)
        .byte_fallback(true)
        .cache_capacity(WORDS_REMEMBERED)
        .build()
        .map_err(|error| TokenizerError::library(&error))?;
    let mut bpe = TokenizerImpl::new(bpe);
    let spaces = Replace::new(" ", SPACE).map_err(|error| TokenizerError::library(&error))?;
    bpe.with_normalizer(Some(NormalizerWrapper::from(spaces)))
        .map_err(|error| TokenizerError::library(&error))?;
    Ok((bpe, cut))
}

/// Every split of a piece into two others, by the score of the piece.
fn merges_by_score(scores: &[f32], vocabulary: &Vocab) -> Vec<(String, String)> {
    let mut merges: Vec<(f32, u32, &str, &str)> = Vec::new();
    for (text, &token) in vocabulary {
        let score = scores.get(token as usize).copied().unwrap_or_default();
        merges.extend(
            splits(text)
                .filter(|(left, right)| {
                    vocabulary.contains_key(*left) && vocabulary.contains_key(*right)
                })
                .map(|(left, right)| (score, token, left, right)),
        );
    }
    // Ties are broken by token and then by split, so that the order is independent of a hash table.
    merges.sort_unstable_by(|a, b| {
        b.0.total_cmp(&a.0)
            .then_with(|| a.1.cmp(&b.1))
            .then_with(|| a.2.len().cmp(&b.2.len()))
    });
    merges
        .into_iter()
        .map(|(_, _, left, right)| (left.to_owned(), right.to_owned()))
        .collect()
}

/// The score of each token.
pub(super) fn scores(header: &Header) -> Result<&[f32], TokenizerError> {
    let tokens = header.strings(KEY_TOKENS).map_or(0, StringTable::len);
    let scores = header
        .floats(KEY_SCORES)
        .ok_or(TokenizerError::Missing { key: KEY_SCORES })?;
    if scores.len() < tokens {
        let problem = format!("it has {} entries for {tokens} tokens", scores.len());
        return Err(TokenizerError::Invalid {
            key: KEY_SCORES,
            problem,
        });
    }
    Ok(scores)
}

/// The number of merges that [`build`] would find.
pub(super) fn merges_of(texts: &StringTable) -> usize {
    let known: HashSet<&str> = texts.iter().collect();
    texts
        .iter()
        .flat_map(splits)
        .filter(|(left, right)| known.contains(left) && known.contains(right))
        .count()
}

/// The bytes of a piece: a single one if it is written as `<0xAB>`.
pub(super) fn bytes(text: &str, is_byte: bool) -> Vec<u8> {
    let byte = text
        .strip_prefix("<0x")
        .and_then(|text| text.strip_suffix('>'))
        .filter(|_| is_byte)
        .and_then(|digits| u8::from_str_radix(digits, 16).ok());
    match byte {
        Some(byte) => vec![byte],
        None => text.replace(SPACE, " ").into_bytes(),
    }
}

/// All splits of a piece in two; none if it is too long for a piece. Each split is looked up, which takes time
/// proportional to the text.
fn splits(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let piece = if text.len() <= PIECE_BYTES_MAX {
        text
    } else {
        ""
    };
    piece
        .char_indices()
        .skip(1)
        .filter_map(move |(at, _)| piece.split_at_checked(at))
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::gguf_file::Value;
    use proptest::prelude::*;

    use super::super::{
        super::test_vocabulary::header,
        terms::{KEY_SCORES, PIECE_BYTES_MAX, UNBROKEN_BYTES_MAX},
        *,
    };

    /// Control tokens, bytes, letters, and some words, longer ones first.
    fn vocabulary() -> Vec<String> {
        let mut texts: Vec<String> = ["<unk>", "<s>", "</s>", "<|user|>"]
            .map(str::to_owned)
            .into();
        texts.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
        texts.extend(
            [
                "▁hello", "hello", "▁he", "llo", "he", "ll", "▁w", "▁▁", "orld", "or", "ld",
            ]
            .map(str::to_owned),
        );
        texts.extend(["▁", "h", "e", "l", "o", "w", "r", "d", "é", "\n"].map(str::to_owned));
        texts
    }

    fn tokenizer(name: &str, space_first: bool) -> Tokenizer {
        let texts = vocabulary();
        let kinds = (0..texts.len()).map(|at| match at {
            0 => 2,
            1..=3 => 3,
            4..=259 => 6,
            _ => 1,
        });
        let scores = (0u16..)
            .take(texts.len())
            .map(|at| Value::F32(-f32::from(at)));
        let string = |text: &str| Value::String(text.to_owned());
        Tokenizer::from_header(&header(&[
            ("general.name", string(name)),
            ("tokenizer.ggml.model", string("llama")),
            ("tokenizer.ggml.pre", string("default")),
            (
                "tokenizer.ggml.tokens",
                Value::Array(texts.iter().map(|text| string(text)).collect()),
            ),
            ("tokenizer.ggml.scores", Value::Array(scores.collect())),
            (
                "tokenizer.ggml.token_type",
                Value::Array(kinds.map(Value::I32).collect()),
            ),
            ("tokenizer.ggml.bos_token_id", Value::U32(1)),
            ("tokenizer.ggml.eos_token_id", Value::U32(2)),
            ("tokenizer.ggml.add_space_prefix", Value::Bool(space_first)),
        ]))
        .unwrap()
    }

    fn texts(tokens: &[u32]) -> Vec<String> {
        tokens
            .iter()
            .map(|&token| vocabulary()[token as usize].clone())
            .collect()
    }

    #[test]
    fn pieces_of_the_highest_score_are_joined_first_and_bytes_serve_for_the_rest() {
        let tokenizer = tokenizer("gemma", false);
        assert_eq!(
            texts(&tokenizer.encode("hello world").unwrap()),
            ["hello", "▁w", "orld"]
        );
        assert_eq!(
            texts(&tokenizer.encode("heé你").unwrap()),
            ["he", "é", "<0xE4>", "<0xBD>", "<0xA0>"]
        );
        assert_eq!(
            texts(&tokenizer.encode("he   l").unwrap()),
            ["he", "▁▁", "▁", "l"]
        );
        assert!(tokenizer.adds_bos(), "as these models were trained");
    }

    #[test]
    fn a_text_begins_with_a_space_where_the_file_does_not_deny_it() {
        let tokenizer = tokenizer("llama", true);
        assert_eq!(texts(&tokenizer.encode("hello").unwrap()), ["▁hello"]);
        let rendered = tokenizer.encode_rendered("<s>hello</s>he", None).unwrap();
        assert_eq!(texts(&rendered), ["<s>", "▁hello", "</s>", "▁he"]);
    }

    #[test]
    fn special_tokens_of_phi_3_swallow_white_space() {
        let rendered = |name| {
            let tokens = tokenizer(name, false)
                .encode_rendered("<s>\n<|user|>\n he", None)
                .unwrap();
            texts(&tokens)
        };
        assert_eq!(rendered("Phi-3 mini"), ["<s>", "\n", "<|user|>", "he"]);
        assert_eq!(rendered("other"), ["<s>", "\n", "<|user|>", "\n", "▁he"]);
    }

    /// A text of one line that no token crosses, repeated up to a length.
    fn long(line: &str, bytes: usize) -> String {
        line.repeat(bytes / line.len() + 1)
    }

    #[test]
    fn a_long_text_without_spaces_has_the_tokens_of_its_lines() {
        let tokenizer = tokenizer("gemma", false);
        // Chinese, a table, and JSON without spaces: twice the length that is encoded as a whole.
        for line in [
            "你好，世界。",
            "1,hello,-2.5;he\n",
            "{\"hello\":[1,2,{}],\"wo\":\"he\"},",
        ] {
            let text = long(line, 2 * UNBROKEN_BYTES_MAX);
            let each = tokenizer.encode(line).unwrap();
            let count = text.len() / line.len();
            assert!(
                tokenizer.encode(&text).unwrap() == each.repeat(count),
                "{line}"
            );
        }
    }

    #[test]
    fn one_sign_over_and_over_is_cut_where_it_must_be() {
        let tokenizer = tokenizer("gemma", false);
        let text = "l".repeat(3 * UNBROKEN_BYTES_MAX + 1);
        let tokens = tokenizer.encode(&text).unwrap();
        assert!(tokenizer.decode(&tokens) == text);
        // In steps of two, except at the splits.
        let least = text.len() / 2;
        assert!(
            (least..least + 8).contains(&tokens.len()),
            "{}",
            tokens.len()
        );
    }

    #[test]
    fn a_vocabulary_without_scores_is_refused() {
        let entries = [
            ("tokenizer.ggml.model", Value::String("llama".to_owned())),
            (
                "tokenizer.ggml.tokens",
                Value::Array(vec![Value::String("a".to_owned())]),
            ),
        ];
        let error = Tokenizer::from_header(&header(&entries)).err().unwrap();
        assert_eq!(error, TokenizerError::Missing { key: KEY_SCORES });
    }

    /// A vocabulary of these texts, with `kind` for the last of them.
    fn with_last(model: &str, texts: &[&str], kind: i32) -> Header {
        let mut kinds = vec![Value::I32(1); texts.len() - 1];
        kinds.push(Value::I32(kind));
        let texts = texts.iter().map(|&text| Value::String(text.to_owned()));
        header(&[
            ("tokenizer.ggml.model", Value::String(model.to_owned())),
            ("tokenizer.ggml.pre", Value::String("default".to_owned())),
            (
                "tokenizer.ggml.scores",
                Value::Array(vec![Value::F32(0.0); kinds.len()]),
            ),
            ("tokenizer.ggml.tokens", Value::Array(texts.collect())),
            ("tokenizer.ggml.token_type", Value::Array(kinds)),
        ])
    }

    #[test]
    fn a_piece_of_a_length_that_none_has_is_refused_and_takes_no_work() {
        let long = "a".repeat(400_000);
        for (model, limit) in [("llama", 256), ("gpt2", 2048)] {
            let header = with_last(model, &["a", "aa", &long], 1);
            let expected = TokenizerError::PieceTooLong {
                token: 2,
                bytes: 400_000,
                limit,
            };
            assert_eq!(Tokenizer::check(&header), Err(expected.clone()));
            assert_eq!(Tokenizer::from_header(&header).err(), Some(expected));
        }
        // The lookups: each split hashes all bytes of the text.
        let work = |text: &str| sentence_pieces::splits(text).count() * text.len();
        assert_eq!(work(&long), 0);
        let longest = "a".repeat(PIECE_BYTES_MAX);
        assert_eq!(work(&longest), 255 * 256);
        // Control tokens are not decomposed, so they may have any length.
        let control = with_last("llama", &["a", "aa", &long], 3);
        Tokenizer::check(&control).unwrap();
        let tokenizer = Tokenizer::from_header(&control).unwrap();
        assert_eq!(tokenizer.encode("aaa").unwrap(), [1, 0]);
        assert!(Tokenizer::heap_bytes(&control) > Bytes::ZERO);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn segments_have_the_tokens_of_the_whole_and_text_survives(text in "[helowrdé你 \n]{0,40}", target in 1usize..9) {
            let tokenizer = tokenizer("gemma", false);
            let mut cut = Vec::new();
            tokenizer.encode_in_segments(&text, target, &mut cut).unwrap();
            prop_assert_eq!(&cut, &tokenizer.encode(&text).unwrap());
            let single = Segments { rest: &text, target, cut: &tokenizer.cut }.all(|part| part.len() < 16);
            prop_assert!(single, "{:?}", text);
            prop_assert_eq!(tokenizer.decode(&cut), text);
        }
    }
}
