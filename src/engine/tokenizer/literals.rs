//! Texts that always form one token.

use std::collections::BTreeMap;

/// Texts that form one token each in any position.
#[derive(Default)]
pub(crate) struct Literals {
    by_first: BTreeMap<char, Vec<(Box<str>, u32)>>,
}

/// A part of a text.
pub(super) enum Fragment<'text> {
    Text(&'text str),
    Token(u32),
}

impl Literals {
    pub(super) fn insert(&mut self, text: &str, token: u32) {
        if let Some(first) = text.chars().next() {
            self.by_first
                .entry(first)
                .or_default()
                .push((text.into(), token));
        }
    }

    /// Longest first, so that the first match is the right one.
    pub(super) fn sorted(mut self) -> Self {
        for list in self.by_first.values_mut() {
            list.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        }
        self
    }

    pub(super) fn find(&self, text: &str) -> Option<u32> {
        self.by_first
            .get(&text.chars().next()?)?
            .iter()
            .find_map(|(literal, token)| (**literal == *text).then_some(*token))
    }

    /// The longest literal at the start of `text`.
    fn at_start(&self, text: &str) -> Option<(usize, u32)> {
        self.by_first
            .get(&text.chars().next()?)?
            .iter()
            .find_map(|(literal, token)| {
                text.starts_with(&**literal)
                    .then_some((literal.len(), *token))
            })
    }

    /// Whether a literal begins with `first`.
    pub(crate) fn begins_with(&self, first: char) -> bool {
        self.by_first.contains_key(&first)
    }

    /// All texts.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &str> {
        self.by_first.values().flatten().map(|(text, _)| &**text)
    }

    /// All texts with their tokens.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&str, u32)> {
        self.by_first
            .values()
            .flatten()
            .map(|(text, token)| (&**text, *token))
    }

    /// The text split at each literal, from left to right; no fragment is empty.
    pub(super) fn split<'text>(&self, text: &'text str) -> Vec<Fragment<'text>> {
        let mut fragments = Vec::new();
        let mut plain_from = 0;
        let mut at = 0;
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            if let Some((length, token)) = self.at_start(rest) {
                fragments.extend(
                    text.get(plain_from..at)
                        .filter(|plain| !plain.is_empty())
                        .map(Fragment::Text),
                );
                fragments.push(Fragment::Token(token));
                at += length;
                plain_from = at;
            } else {
                at += first.len_utf8();
            }
            rest = text.get(at..).unwrap_or_default();
        }
        fragments.extend(
            text.get(plain_from..)
                .filter(|plain| !plain.is_empty())
                .map(Fragment::Text),
        );
        fragments
    }
}
