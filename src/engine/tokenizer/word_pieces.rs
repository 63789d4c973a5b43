//! Word pieces of the BERT family: each word is cut from its start into the longest pieces of the vocabulary.

use std::collections::HashMap;

use tokenizers::{
    NormalizedString, Normalizer as _, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer as _, normalizers::bert::BertNormalizer, pre_tokenizers::bert::BertPreTokenizer,
};

use super::{
    EncodeError, SEGMENT_BYTES, TokenizerError,
    terms::{
        KEY_BOS, KEY_MODEL, KEY_TOKENS, KEY_TYPES, PIECE_BYTES_MAX, SPACE, TYPE_CONTROL,
        TYPE_UNKNOWN,
    },
};
use crate::gguf::Header;

/// The vocabulary of an encoder and its rules.
pub(crate) struct WordPieces {
    /// Pieces as the file writes them: those that begin a word with a mark before them.
    tokens: HashMap<Box<str>, u32>,
    /// Bytes of the longest piece.
    longest: usize,
    normaliser: BertNormalizer,
    begin: u32,
    end: u32,
    unknown: u32,
}

impl WordPieces {
    /// Builds the tokenizer of a model file.
    ///
    /// # Errors
    /// Tables are missing, contradict each other, or are of another kind.
    pub(crate) fn from_header(header: &Header) -> Result<Self, TokenizerError> {
        let text = |key: &'static str| header.string(key).ok_or(TokenizerError::Missing { key });
        let model = text(KEY_MODEL)?;
        if model != MODEL {
            return Err(TokenizerError::NotWordPieces {
                model: model.to_owned(),
            });
        }
        let texts = header.strings(KEY_TOKENS);
        let texts = texts.ok_or(TokenizerError::Missing { key: KEY_TOKENS })?;
        let types = header.ints(KEY_TYPES).unwrap_or_default();
        let (mut tokens, mut longest) = (HashMap::with_capacity(texts.len()), 0);
        for (token, text) in (0u32..).zip(texts.iter()) {
            let kind = types.get(token as usize);
            if matches!(kind, Some(&TYPE_CONTROL | &TYPE_UNKNOWN)) {
                continue;
            }
            if text.len() > PIECE_BYTES_MAX {
                return Err(TokenizerError::PieceTooLong {
                    token,
                    bytes: text.len(),
                    limit: PIECE_BYTES_MAX,
                });
            }
            longest = longest.max(text.len());
            tokens.insert(text.into(), token);
        }
        // llama.cpp's defaults are those of the first BERT.
        let special = |keys: &[&'static str], usual: u32| {
            let named = keys.iter().find_map(|key| Some((*key, header.u32(key)?)));
            let (key, token) = named.unwrap_or((KEY_TOKENS, usual));
            match token as usize >= texts.len() {
                true => Err(TokenizerError::Invalid {
                    key,
                    problem: format!("token {token} is not one of {}", texts.len()),
                }),
                false => Ok(token),
            }
        };
        let is_lower = header.bool(KEY_LOWERCASE).unwrap_or(true);
        let strips = header.bool(KEY_STRIP_ACCENTS).unwrap_or(is_lower);
        Ok(Self {
            tokens,
            longest,
            normaliser: BertNormalizer::new(true, true, Some(strips), is_lower),
            begin: special(&[KEY_BOS, KEY_CLASS], 101)?,
            end: special(&[KEY_SEPARATOR], 102)?,
            unknown: special(&[KEY_UNKNOWN], 100)?,
        })
    }

    /// The token after each text.
    pub(crate) const fn end(&self) -> u32 {
        self.end
    }

    /// Tokenizes a text, after the token that begins each; control tokens have no meaning in it.
    ///
    /// # Errors
    /// The library fails.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        let mut tokens = vec![self.begin];
        let mut rest = text;
        while !rest.is_empty() {
            // As of `Tokenizer`: the library needs many times the memory of its text.
            let longest = rest.floor_char_boundary(SEGMENT_BYTES);
            let (head, _) = rest.split_at(longest);
            let cut = match head.rfind(char::is_whitespace) {
                Some(space) if longest < rest.len() && space > 0 => space,
                _ => longest,
            };
            let (segment, after) = rest.split_at(cut);
            self.encode_segment(segment, &mut tokens)
                .map_err(|error| EncodeError::Library {
                    message: error.to_string(),
                })?;
            rest = after;
        }
        Ok(tokens)
    }

    fn encode_segment(&self, text: &str, tokens: &mut Vec<u32>) -> tokenizers::Result<()> {
        let mut text = NormalizedString::from(text);
        self.normaliser.normalize(&mut text)?;
        let mut words = PreTokenizedString::from(text);
        BertPreTokenizer.pre_tokenize(&mut words)?;
        for (word, ..) in words.get_splits(OffsetReferential::Original, OffsetType::None) {
            let before = tokens.len();
            let marked = format!("{SPACE}{word}");
            let mut rest = marked.as_str();
            while !rest.is_empty() {
                let mut lengths = (1..=rest.len().min(self.longest)).rev();
                let found = lengths.find_map(|length| {
                    let token = self.tokens.get(rest.get(..length)?)?;
                    Some((*token, rest.get(length..)?))
                });
                // A word with one unknown character is one unknown word.
                let Some((token, after)) = found else {
                    tokens.truncate(before);
                    tokens.push(self.unknown);
                    break;
                };
                tokens.push(token);
                rest = after;
            }
        }
        Ok(())
    }
}

/// The kind of vocabulary in the file.
const MODEL: &str = "bert";
const KEY_CLASS: &str = "tokenizer.ggml.cls_token_id";
/// Spelt so in GGUF.
const KEY_SEPARATOR: &str = "tokenizer.ggml.seperator_token_id";
const KEY_UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const KEY_LOWERCASE: &str = "tokenizer.ggml.normalizer.lowercase";
const KEY_STRIP_ACCENTS: &str = "tokenizer.ggml.normalizer.strip_accents";

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Case {
        text: String,
        tokens: Vec<u32>,
    }

    /// A small vocabulary, or one of a folder with the same files.
    fn opened() -> (PathBuf, WordPieces) {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/bert");
        let folder = std::env::var_os("COTENANT_BERT_TOKENS").unwrap_or_else(|| folder.into());
        let folder = PathBuf::from(folder);
        let header = Header::read(&folder.join("bert.gguf")).unwrap();
        (folder, WordPieces::from_header(&header).unwrap())
    }

    /// Characters of which llama.cpp 0.3.36 keeps less than the publishers' tokenizers: syllables of Hangul, of which it
    /// keeps the first letter, and marks beside a letter.
    fn is_shortened(character: char) -> bool {
        matches!(character, '\u{ac00}'..='\u{d7a3}' | '\u{93f}')
    }

    #[test]
    fn texts_have_the_tokens_of_llama_cpp() {
        let (folder, tokenizer) = opened();
        let cases = fs::read_to_string(folder.join("cases.json")).unwrap();
        let cases: Vec<Case> = serde_json::from_str(&cases).unwrap();
        let mut compared = 0;
        for Case { text, tokens } in &cases {
            if !text.contains(is_shortened) {
                let mut found = tokenizer.encode(text).unwrap();
                found.push(tokenizer.end());
                assert_eq!(found, *tokens, "{text:?}");
                compared += 1;
            }
        }
        println!("{compared} of {} texts", cases.len());
        assert!(compared > cases.len() * 4 / 5);
    }

    #[test]
    fn syllables_of_hangul_are_all_their_letters() {
        let (_, tokenizer) = opened();
        let of = |piece: &str| tokenizer.tokens.get(piece).copied().unwrap();
        let wanted = [tokenizer.begin, of("\u{2581}ᄒ"), of("ᅡ"), of("ᆫ")];
        assert_eq!(tokenizer.encode("한").unwrap(), wanted);
        assert_eq!(
            tokenizer.encode("\u{1112}\u{1161}\u{11ab}").unwrap(),
            wanted
        );
    }

    #[test]
    fn long_texts_are_cut_between_words_and_words_of_any_length_into_pieces() {
        let (_, tokenizer) = opened();
        let word = tokenizer.encode(" light").unwrap();
        let many = tokenizer.encode(&" light".repeat(9000)).unwrap();
        assert_eq!(many.len(), 1 + 9000 * (word.len() - 1));
        assert!(
            many[1..]
                .chunks(word.len() - 1)
                .all(|one| *one == word[1..])
        );
        let long = tokenizer.encode(&"x".repeat(100_000)).unwrap();
        assert!(!long.contains(&tokenizer.unknown) && long.len() > 30_000);
        let wide = tokenizer.encode(&"世".repeat(5000)).unwrap();
        assert!(wide.len() == 5001 && !wide.contains(&tokenizer.unknown));
    }

    proptest::proptest! {
        #[test]
        fn any_text_has_tokens_of_the_vocabulary(text in ".*") {
            let (_, tokenizer) = opened();
            let most = tokenizer.tokens.len() + 5;
            let tokens = tokenizer.encode(&text).unwrap();
            assert!(tokens.iter().all(|token| (*token as usize) < most));
        }
    }
}
