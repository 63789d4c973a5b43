//! Merges of a model file.

use tokenizers::models::bpe::Vocab;

use super::{error::TokenizerError, terms::KEY_MERGES};
use crate::gguf::Header;

/// The merges of the file, except those whose result is missing from the plain tables.
pub(super) fn merges(
    header: &Header,
    vocabulary: &Vocab,
) -> Result<Vec<(String, String)>, TokenizerError> {
    let mut merges = Vec::new();
    for merge in merge_lines(header)? {
        let (left, right) = merge?;
        let known = |text: &str| vocabulary.contains_key(text);
        if known(left) && known(right) && known(&format!("{left}{right}")) {
            merges.push((left.to_owned(), right.to_owned()));
        }
    }
    Ok(merges)
}

/// The two parts of each merge.
pub(super) fn merge_lines(
    header: &Header,
) -> Result<impl Iterator<Item = Result<(&str, &str), TokenizerError>>, TokenizerError> {
    let lines = header
        .strings(KEY_MERGES)
        .ok_or(TokenizerError::Missing { key: KEY_MERGES })?;
    Ok(lines.iter().enumerate().map(|(at, line)| {
        line.split_once(' ').ok_or_else(|| TokenizerError::Invalid {
            key: KEY_MERGES,
            problem: format!("entry {at} is `{line}`, not two parts"),
        })
    }))
}
