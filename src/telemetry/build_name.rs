//! Build identification that the program prints at startup.

use std::sync::OnceLock;

static COMMIT: OnceLock<&'static str> = OnceLock::new();
static VERSION: OnceLock<String> = OnceLock::new();

/// Says of which commit this program is. The first one counts; an empty one is none.
pub fn set_commit(commit: &'static str) {
    if !commit.is_empty() {
        COMMIT.get_or_init(|| commit);
    }
}

/// The commit of this program, `unknown` in builds for development.
#[must_use]
pub fn commit() -> &'static str {
    COMMIT.get().copied().unwrap_or("unknown")
}

/// The version, with the commit where it is known.
#[must_use]
pub fn version() -> &'static str {
    let version = env!("CARGO_PKG_VERSION");
    VERSION.get_or_init(|| {
        COMMIT.get().map_or_else(
            || version.to_owned(),
            |commit| format!("{version} ({commit})"),
        )
    })
}
