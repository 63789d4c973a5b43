//! Numbers in requests: integers, also written as `8192.0`, and ranges.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, Unexpected, Visitor},
};
use serde_json::Value;

use super::fault::{Fault, invalid};

/// An integer in a request. Clients that store settings as floating-point numbers send `8192.0`, which every API
/// accepts; `8192.5` is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Whole(i64);

impl Whole {
    pub(super) const fn get(self) -> i64 {
        self.0
    }

    /// The integer value of `value`, if it has one.
    pub(super) fn of(value: &Value) -> Option<Self> {
        Self::deserialize(value).ok()
    }

    /// The same in a smaller type, if it fits.
    pub(super) fn to<T: TryFrom<i64>>(self) -> Option<T> {
        T::try_from(self.0).ok()
    }
}

impl fmt::Display for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WholeVisitor)
    }
}

struct WholeVisitor;

impl Visitor<'_> for WholeVisitor {
    type Value = Whole;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number")
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Whole, E> {
        Ok(Whole(number))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Whole, E> {
        let whole = i64::try_from(number).map(Whole);
        whole.map_err(|_beyond| E::invalid_value(Unexpected::Unsigned(number), &"at most 2^63 - 1"))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Whole, E> {
        // Without a fraction its text has only digits, however large it is.
        let whole = number.to_string().parse().map(Whole);
        whole.map_err(|_fraction| E::invalid_value(Unexpected::Float(number), &self))
    }
}

/// A number within two limits.
pub(super) fn in_range(
    field: &str,
    value: Option<f64>,
    min: f64,
    max: f64,
) -> Result<Option<f64>, Fault> {
    match value {
        Some(value) if !(min..=max).contains(&value) => invalid(
            field,
            value,
            format!("is outside of the limits of {min} and {max}"),
        ),
        value => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::body::parse_json;

    #[test]
    fn a_whole_number_may_be_written_with_a_fraction_of_zero_and_no_other() {
        for (text, expected) in [
            ("7", Some(7)),
            ("-1", Some(-1)),
            ("8192.0", Some(8192)),
            ("-1.0", Some(-1)),
            ("0.0", Some(0)),
            ("-0.0", Some(0)),
            ("1e3", Some(1000)),
            ("9007199254740993", Some(9_007_199_254_740_993)),
            ("8192.5", None),
            ("1e300", None),
            ("18446744073709551615", None),
            ("\"7\"", None),
            ("true", None),
        ] {
            assert_eq!(
                parse_json::<Whole>(text.as_bytes()).ok().map(Whole::get),
                expected,
                "{text}"
            );
            let value: Value = serde_json::from_str(text).unwrap();
            assert_eq!(Whole::of(&value).map(Whole::get), expected, "{text}");
        }
        assert_eq!(Whole::of(&json!(300.0)).and_then(Whole::to::<u8>), None);
    }
}
