//! Reduced output vocabulary.
//!
//! Input is unaffected: every prompt token keeps its embedding, read row by row from the file if the head lacks it.
//! Text whose own token is removed is spelled by smaller ones: control tokens and all single bytes always stay, so that
//! every text and every form of an answer can still be generated.

use std::{
    fs::{self, File},
    io,
    ops::Range,
    path::PathBuf,
};

use super::{
    disk::{DiskWatch, WatchedFile},
    error::LoadErrorKind,
    gguf::Header,
    tokenizer::Tokenizer,
};

/// Tokens that a model may generate, besides control tokens and single bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sayable {
    /// The first ones. Vocabularies of merged pairs are ordered by merge, most frequent first.
    First(u32),
    /// Tokens that cover nearly all of the text in this file.
    Text(PathBuf),
}

impl Sayable {
    /// Rows of the head to keep, in whole groups of [`ROWS_TOGETHER`], ascending and disjoint.
    ///
    /// # Errors
    /// The text cannot be read or tokenized.
    pub(super) fn rows(
        &self,
        header: &Header,
        vocabulary: usize,
        watch: &DiskWatch,
    ) -> Result<Vec<Range<usize>>, LoadErrorKind> {
        let mut groups = vec![false; vocabulary.div_ceil(ROWS_TOGETHER)];
        for token in needed(header) {
            if let Some(group) = groups.get_mut(token / ROWS_TOGETHER) {
                *group = true;
            }
        }
        match self {
            Self::First(count) => {
                let first = (*count as usize).div_ceil(ROWS_TOGETHER).min(groups.len());
                for group in groups.iter_mut().take(first) {
                    *group = true;
                }
            }
            Self::Text(path) => {
                let tokens = tokens_of(header, path, watch)?;
                choose_by_use(&mut groups, &tokens);
            }
        }
        let mut rows: Vec<Range<usize>> = Vec::new();
        for (group, _) in groups.iter().enumerate().filter(|(_, stays)| **stays) {
            let (start, end) = (
                group * ROWS_TOGETHER,
                ((group + 1) * ROWS_TOGETHER).min(vocabulary),
            );
            match rows.last_mut() {
                Some(before) if before.end == start => before.end = end,
                _ => rows.push(start..end),
            }
        }
        Ok(rows)
    }
}

/// Tokens needed to generate any text: special tokens and single characters, including all bytes in vocabularies that
/// spell bytes as characters.
fn needed(header: &Header) -> Vec<usize> {
    let kinds = header.ints("tokenizer.ggml.token_type").unwrap_or_default();
    let special = kinds.iter().enumerate().filter(|(_, kind)| **kind != PLAIN);
    let texts = header.strings("tokenizer.ggml.tokens").into_iter();
    let short = texts
        .flat_map(|texts| texts.iter().enumerate())
        .filter(|(_, text)| text.chars().nth(1).is_none());
    special
        .map(|(token, _)| token)
        .chain(short.map(|(token, _)| token))
        .collect()
}

fn tokens_of(
    header: &Header,
    path: &PathBuf,
    watch: &DiskWatch,
) -> Result<Vec<u32>, LoadErrorKind> {
    let wrong = |problem: String| LoadErrorKind::Vocabulary {
        path: path.clone(),
        problem,
    };
    let what = path.to_string_lossy();
    let meta = watch.asking_for(&what, || fs::metadata(path));
    let meta = meta.map_err(|error| wrong(error.to_string()))?;
    if !meta.is_file() {
        return Err(wrong("it is not a regular file".to_owned()));
    }
    let length = meta.len();
    if length > TEXT_MAX {
        return Err(wrong(format!(
            "it has {length} bytes, of at most {TEXT_MAX}"
        )));
    }
    // Each read has its own time limit: a slow disk is not a hanging one.
    let file = watch.asking_for(&what, || File::open(path));
    let text = file.and_then(|file| io::read_to_string(WatchedFile::new(&file, &what, watch)));
    let text = text.map_err(|error| wrong(error.to_string()))?;
    let tokenizer = Tokenizer::from_header(header).map_err(|error| wrong(error.to_string()))?;
    let tokens = tokenizer
        .encode_rendered(&text, None)
        .map_err(|error| wrong(error.to_string()))?;
    if tokens.is_empty() {
        return Err(wrong("it has no text".to_owned()));
    }
    Ok(tokens)
}

/// Adds the most used groups until nearly all of `tokens` are covered.
fn choose_by_use(groups: &mut [bool], tokens: &[u32]) {
    let mut uses = vec![0usize; groups.len()];
    for &token in tokens {
        if let Some(uses) = uses.get_mut(token as usize / ROWS_TOGETHER) {
            *uses += 1;
        }
    }
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by_key(|&group| std::cmp::Reverse(uses.get(group).copied().unwrap_or(0)));
    let stays = |groups: &[bool], group: usize| groups.get(group).copied().unwrap_or(false);
    let mut said: usize = (0..groups.len())
        .filter(|&group| stays(groups, group))
        .filter_map(|group| uses.get(group))
        .sum();
    for group in order {
        if said.saturating_mul(1000) >= tokens.len().saturating_mul(SAID_PER_MILLE) {
            break;
        }
        if let Some(stays) = groups.get_mut(group).filter(|stays| !**stays) {
            *stays = true;
            said += uses.get(group).copied().unwrap_or(0);
        }
    }
}

/// Rows of the head kept or removed together: some tens of KiB, which avoids many small reads.
pub(super) const ROWS_TOGETHER: usize = 64;
/// Share of a text that its chosen tokens cover. Our choice: one word in a thousand is spelled.
const SAID_PER_MILLE: usize = 999;
/// The text is tokenized at every opening of the model: some seconds at this size.
const TEXT_MAX: u64 = 64 << 20;
/// `LLAMA_TOKEN_TYPE_NORMAL` of `llama.h`.
const PLAIN: i32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_groups_that_are_used_most_stay_until_a_text_can_be_said() {
        let mut groups = [true, false, false, false];
        // 1000 tokens: 300 in a group that stays anyway, 600 in the last, 99 in the second, and one in the third.
        let tokens: Vec<u32> = (0..300)
            .map(|_| 5)
            .chain((0..600).map(|_| 200))
            .chain((0..99).map(|_| 64))
            .chain([130])
            .collect();
        choose_by_use(&mut groups, &tokens);
        assert_eq!(groups, [true, true, false, true]);
    }
}
