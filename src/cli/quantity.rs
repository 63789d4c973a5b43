//! Sizes and durations as arguments.

use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};

use cotenant_config::{SizeError, parse_duration, parse_size};
use cotenant_policy::kv_type::KvType;
use cotenant_units::Bytes;

/// Parses a size with its unit: `64MiB`.
pub(super) fn size(text: &str) -> Result<Bytes, String> {
    parse_size(text).map_err(|error| with_hint(&error))
}

/// Parses a size above zero, with its unit.
pub(super) fn some(text: &str) -> Result<Bytes, String> {
    match size(text)? {
        Bytes::ZERO => Err("not above zero".to_owned()),
        bytes => Ok(bytes),
    }
}

/// Parses a duration with its unit: `5s`, `1m 30s`.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|error| with_hint(&error))
}

/// Parses the duration of a wait, above zero and at most a day.
pub(super) fn wait(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("not above zero".to_owned()),
        long if long > WAIT_MAX => Err("above the limit of one day".to_owned()),
        fits => Ok(fits),
    }
}

/// Our choice: longer than any answer may take.
const WAIT_MAX: Duration = Duration::from_secs(24 * 3600);

/// Returns the parser of KV types, which shells can complete.
pub(super) fn kv_type() -> impl TypedValueParser<Value = KvType> {
    let of_word = |word: String| KvType::ALL.into_iter().find(|kind| kind.word() == word);
    PossibleValuesParser::new(KvType::ALL.map(KvType::word))
        .try_map(move |word| of_word(word).ok_or("not a type of the KV cache"))
}

/// Parses the number of a journal line: `4711`.
pub(super) fn line(text: &str) -> Result<u64, String> {
    text.parse()
        .map_err(|_| "not a line number; `cotenant events` prints them".to_owned())
}

fn with_hint(error: &SizeError) -> String {
    format!("{error}; {}", error.hint())
}
