//! Error chains rendered on one line.

use std::error::Error;

/// Renders the error and its causes on one line, outermost first: `cannot read the model: No such file or directory`.
/// Causes from other code may have any length: each is truncated to `CHARS_MAX`.
pub fn in_one_line(error: &dyn Error) -> String {
    let mut text = cut(error.to_string());
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {}", cut(error.to_string()));
        cause = error.source();
    }
    text
}

fn cut(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(CHARS_MAX) {
        text.truncate(end);
        text.push('…');
    }
    text
}

/// Our choice: longer than any of our own messages.
const CHARS_MAX: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot open `{0}`")]
    struct Open(&'static str, #[source] std::io::Error);

    #[test]
    fn causes_follow_in_order() {
        let error = Open(
            "a",
            std::io::Error::other(Open("b", std::io::Error::other("no"))),
        );
        assert_eq!(in_one_line(&error), "cannot open `a`: cannot open `b`: no");
        assert_eq!(in_one_line(&std::io::Error::other("no")), "no");
        let long = in_one_line(&std::io::Error::other(Open(
            "a",
            std::io::Error::other("ü".repeat(1 << 20)),
        )));
        assert_eq!(
            long.chars().count(),
            "cannot open `a`: ".len() + CHARS_MAX + 1
        );
    }
}
