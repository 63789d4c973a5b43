//! Tags of which a streamed text may contain a part.

/// Whether `text` is a proper prefix of `tag`.
pub(super) fn is_begun(text: &str, tag: &str) -> bool {
    text.len() < tag.len() && tag.starts_with(text)
}

/// Offset of a prefix of one of `tags` at the end of `text`.
pub(super) fn held_back(text: &str, tags: &[&str]) -> usize {
    let begun = |at: &usize| {
        tags.iter()
            .any(|tag| is_begun(text.get(*at..).unwrap_or_default(), tag))
    };
    text.char_indices()
        .map(|(at, _)| at)
        .find(begun)
        .unwrap_or(text.len())
}
