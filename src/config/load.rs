//! Loading of a configuration file: read, parse, check.

use std::path::Path;

use super::{Config, LoadError, LoadErrorKind, error, raw, validate};

/// Reads, parses and checks the file at `path`.
///
/// # Errors
/// If the file cannot be read, is not YAML, has an unknown key or a value of the wrong kind, or has values out of
/// range; the last case reports all faults.
pub fn load(path: &Path) -> Result<Config, LoadError> {
    let read = || {
        let text = error::read_limited(path)?;
        if raw::sets_nothing(&text) {
            return Err(LoadErrorKind::Empty(
                "configure `llm: {path: …}` or `workers:`; for leases alone `budget: {scope: machine}`",
            ));
        }
        Config::parse(&text)
    };
    read().map_err(|kind| LoadError::new(path, kind))
}

impl Config {
    /// Parses and checks the text of a configuration file. An empty text gives the defaults.
    ///
    /// ```
    /// use cotenant_config::Config;
    /// use cotenant_units::Bytes;
    /// let config = Config::parse("budget: {total: 1GiB, reserve: 128MiB}").unwrap();
    /// assert_eq!(config.budget.total, Some(Bytes::from_gib(1)));
    /// assert!(Config::parse("budget: {total: 1073741824}").unwrap_err().to_string().contains("has no unit"));
    /// ```
    ///
    /// # Errors
    /// As [`load`], except for those of reading a file.
    pub fn parse(text: &str) -> Result<Self, LoadErrorKind> {
        if error::is_too_deep(text) {
            return Err(LoadErrorKind::TooDeep);
        }
        validate::check(raw::parse(text)?, text)
    }
}
