//! An error and its causes in one line.

use std::error::Error;

/// The error and its causes in one line, the outermost first: `cannot read the model: No such file or directory`.
#[must_use]
pub fn in_one_line(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot open `{0}`")]
    struct Open(&'static str, #[source] std::io::Error);

    #[test]
    fn causes_follow_in_order() {
        let error = Open("a", std::io::Error::other(Open("b", std::io::Error::other("no"))));
        assert_eq!(in_one_line(&error), "cannot open `a`: cannot open `b`: no");
        assert_eq!(in_one_line(&std::io::Error::other("no")), "no");
    }
}
