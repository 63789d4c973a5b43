//! Build identification, printed at startup.

use std::sync::OnceLock;

static COMMIT: OnceLock<&'static str> = OnceLock::new();
static VERSION: OnceLock<String> = OnceLock::new();

/// Sets the commit of this program. The first non-empty value is kept.
pub fn set_commit(commit: &'static str) {
    if !commit.is_empty() {
        COMMIT.get_or_init(|| commit);
    }
}

/// The commit of this program, `unknown` in development builds.
pub fn commit() -> &'static str {
    COMMIT.get().copied().unwrap_or("unknown")
}

/// The version, with the commit if known.
pub fn version() -> &'static str {
    let version = env!("CARGO_PKG_VERSION");
    VERSION.get_or_init(|| {
        COMMIT.get().map_or_else(
            || version.to_owned(),
            |commit| format!("{version} ({commit})"),
        )
    })
}
