//! Sizes, percentages and durations that carry their unit: `1.5GiB`, `6.5%`, `1m 30s`.
//!
//! Integer arithmetic only. A bare number is refused, because its unit is not visible to the reader of a file; so are
//! `12G` and `12GB`, which mean 10⁹ bytes in some programs and 2³⁰ in others, a silent difference of 7 %.

use std::time::Duration;

use cotenant_units::Bytes;

/// Fault in a size, a percentage or a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Empty text.
    #[error("is not a {0}: it is empty")]
    Empty(&'static str),
    /// Not a number followed by a unit.
    #[error("`{0}` is not a {1}")]
    Malformed(String, &'static str),
    /// A bare number.
    #[error("`{0}` has no unit")]
    NoUnit(String, &'static str),
    /// Ambiguous unit.
    #[error(
        "`{text}` is ambiguous: `{unit}` is 10^{power} bytes to some programs and 2^{shift} to others"
    )]
    Ambiguous {
        /// Text as written.
        text: String,
        /// Its unit.
        unit: String,
        /// Decimal meaning.
        power: u32,
        /// Binary meaning.
        shift: u32,
        /// Probable intention.
        meant: String,
    },
    /// Unknown unit.
    #[error("`{text}` has the unknown unit `{unit}`")]
    UnknownUnit {
        /// Text as written.
        text: String,
        /// Its unit.
        unit: String,
        /// Known units.
        known: &'static str,
    },
    /// Exceeds the representable range.
    #[error("`{0}` is too large")]
    TooLarge(String, &'static str),
    /// A fraction smaller than one byte, nanosecond or thousandth.
    #[error("`{0}` is not a whole number of {2}")]
    Fraction(String, &'static str, &'static str),
}

impl SizeError {
    /// Returns the correction.
    pub fn hint(&self) -> String {
        match self {
            Self::Ambiguous { meant, .. } => {
                format!("write `{meant}`: sizes are powers of 1024 here")
            }
            Self::UnknownUnit { known, .. } => format!("known units are {known}"),
            Self::NoUnit(number, SIZE) => match number.parse::<u64>() {
                Ok(bytes) if bytes >= 1024 => {
                    format!(
                        "write sizes with a unit: {bytes} bytes are `{}`",
                        exact(bytes)
                    )
                }
                _ => SIZE_HINT.to_owned(),
            },
            Self::Empty(kind)
            | Self::NoUnit(_, kind)
            | Self::Malformed(_, kind)
            | Self::TooLarge(_, kind)
            | Self::Fraction(_, kind, _) => match *kind {
                DURATION => DURATION_HINT.to_owned(),
                PERCENTAGE => PERCENTAGE_HINT.to_owned(),
                _ => SIZE_HINT.to_owned(),
            },
        }
    }
}

/// Parses a size: a number, optionally with a decimal fraction, and one of `B`, `KiB`, `MiB`, `GiB`, `TiB`.
///
/// ```
/// use cotenant_config::parse_size;
/// use cotenant_units::Bytes;
/// assert_eq!(parse_size("1.5GiB"), Ok(Bytes::from_mib(1536)));
/// assert_eq!(parse_size("12G").unwrap_err().hint(), "write `12GiB`: sizes are powers of 1024 here");
/// ```
///
/// # Errors
/// If the text is anything else, or not a whole number of bytes.
pub fn parse_size(text: &str) -> Result<Bytes, SizeError> {
    let text = text.trim();
    let (number, unit) = split(text, SIZE)?;
    let scale: u64 = match unit {
        "" => return Err(SizeError::NoUnit(text.to_owned(), SIZE)),
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        other => return Err(size_unit_error(text, number, other)),
    };
    let (whole, rest) =
        scaled(number, scale).ok_or_else(|| SizeError::TooLarge(text.to_owned(), SIZE))?;
    if rest {
        return Err(SizeError::Fraction(text.to_owned(), SIZE, "bytes"));
    }
    Ok(Bytes::new(whole))
}

/// Parses a duration: the sum of one or more numbers, each with one of `us`, `ms`, `s`, `m`, `h`, `d`.
///
/// ```
/// use std::time::Duration;
/// use cotenant_config::parse_duration;
/// assert_eq!(parse_duration("1m 30s"), Ok(Duration::from_secs(90)));
/// assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
/// assert!(parse_duration("90").is_err());
/// ```
///
/// # Errors
/// If the text is anything else, or not a whole number of nanoseconds.
pub fn parse_duration(text: &str) -> Result<Duration, SizeError> {
    let text = text.trim();
    let mut rest = text;
    let mut total: u64 = 0;
    let mut larger = u64::MAX;
    if rest.is_empty() {
        return Err(SizeError::Empty(DURATION));
    }
    while !rest.is_empty() {
        let number_end = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(rest.len());
        let (number, tail) = rest.split_at(number_end);
        if !is_number(number) {
            return Err(SizeError::Malformed(text.to_owned(), DURATION));
        }
        let tail = tail.trim_start();
        let unit_end = tail
            .find(|c: char| c.is_ascii_digit() || c.is_whitespace())
            .unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_end);
        let scale = match unit {
            "" => return Err(SizeError::NoUnit(text.to_owned(), DURATION)),
            "us" | "µs" => 1_000,
            "ms" => 1_000_000,
            "s" => NANOS_PER_SECOND,
            "m" | "min" => 60 * NANOS_PER_SECOND,
            "h" => 3_600 * NANOS_PER_SECOND,
            "d" => 86_400 * NANOS_PER_SECOND,
            other => {
                return Err(SizeError::UnknownUnit {
                    text: text.to_owned(),
                    unit: other.to_owned(),
                    known: "`us`, `ms`, `s`, `m`, `h` and `d`",
                });
            }
        };
        // `1s1s` and `30s 1m` are mistakes: units must decrease.
        if scale >= larger {
            return Err(SizeError::Malformed(text.to_owned(), DURATION));
        }
        larger = scale;
        let (nanos, fraction) =
            scaled(number, scale).ok_or_else(|| SizeError::TooLarge(text.to_owned(), DURATION))?;
        if fraction {
            return Err(SizeError::Fraction(
                text.to_owned(),
                DURATION,
                "nanoseconds",
            ));
        }
        total = total
            .checked_add(nanos)
            .ok_or_else(|| SizeError::TooLarge(text.to_owned(), DURATION))?;
        rest = tail.trim_start();
    }
    Ok(Duration::from_nanos(total))
}

/// Parses a percentage with at most one decimal into thousandths: `6.5%` is 65.
///
/// # Errors
/// If the text is anything else or above 100 %.
pub(super) fn parse_per_mille(text: &str) -> Result<u32, SizeError> {
    let text = text.trim();
    let (number, unit) = split(text, PERCENTAGE)?;
    match unit {
        "%" => {}
        "" => return Err(SizeError::NoUnit(text.to_owned(), PERCENTAGE)),
        _ => return Err(SizeError::Malformed(text.to_owned(), PERCENTAGE)),
    }
    let (part, rest) =
        scaled(number, 10).ok_or_else(|| SizeError::TooLarge(text.to_owned(), PERCENTAGE))?;
    if rest {
        return Err(SizeError::Fraction(
            text.to_owned(),
            PERCENTAGE,
            "thousandths",
        ));
    }
    match u32::try_from(part) {
        Ok(part) if part <= 1000 => Ok(part),
        _ => Err(SizeError::TooLarge(text.to_owned(), PERCENTAGE)),
    }
}

/// Splits `1.5 GiB` into `1.5` and `GiB`.
fn split<'a>(text: &'a str, kind: &'static str) -> Result<(&'a str, &'a str), SizeError> {
    if text.is_empty() {
        return Err(SizeError::Empty(kind));
    }
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    if is_number(number) {
        Ok((number, unit.trim_start()))
    } else {
        Err(SizeError::Malformed(text.to_owned(), kind))
    }
}

/// Formats a number of bytes in the largest unit that divides it: `1GiB`, `1000B`.
fn exact(bytes: u64) -> String {
    let (unit, shift) = match bytes.trailing_zeros() {
        30.. => ("GiB", 30),
        20..30 => ("MiB", 20),
        10..20 => ("KiB", 10),
        _ => ("B", 0),
    };
    format!("{}{unit}", bytes >> shift)
}

/// Accepts digits with at most one point between them, followed by at most [`DECIMALS_MAX`].
fn is_number(text: &str) -> bool {
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    match text.split_once('.') {
        Some((whole, fraction)) => {
            digits(whole) && digits(fraction) && fraction.len() <= DECIMALS_MAX
        }
        None => digits(text),
    }
}

/// Returns `number × scale` and whether a fraction remains; `None` on overflow.
fn scaled(number: &str, scale: u64) -> Option<(u64, bool)> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let mut value = whole.parse::<u64>().ok()?.checked_mul(scale)?;
    let fraction = fraction.trim_end_matches('0');
    if fraction.is_empty() {
        return Some((value, false));
    }
    let ten_to = 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let exact = u128::from(fraction.parse::<u64>().ok()?) * u128::from(scale);
    value = value.checked_add(u64::try_from(exact / ten_to).ok()?)?;
    Some((value, !exact.is_multiple_of(ten_to)))
}

fn size_unit_error(text: &str, number: &str, unit: &str) -> SizeError {
    let lower = unit.to_ascii_lowercase();
    let letter = lower.chars().next().unwrap_or(' ');
    let exact = match letter {
        'k' => Some(("KiB", 3, 10)),
        'm' => Some(("MiB", 6, 20)),
        'g' => Some(("GiB", 9, 30)),
        't' => Some(("TiB", 12, 40)),
        _ => None,
    };
    match (exact, lower.get(letter.len_utf8()..)) {
        (Some((meant, power, shift)), Some("" | "b")) => SizeError::Ambiguous {
            text: text.to_owned(),
            unit: unit.to_owned(),
            power,
            shift,
            meant: format!("{number}{meant}"),
        },
        _ => SizeError::UnknownUnit {
            text: text.to_owned(),
            unit: unit.to_owned(),
            known: "`B`, `KiB`, `MiB`, `GiB` and `TiB`",
        },
    }
}

/// Number of decimal digits that fit into a `u64`.
const DECIMALS_MAX: usize = 18;
const NANOS_PER_SECOND: u64 = 1_000_000_000;
const SIZE: &str = "size";
const DURATION: &str = "duration";
const PERCENTAGE: &str = "percentage";
const SIZE_HINT: &str = "write sizes with a unit, for example `1GiB` or `1024MiB`";
const DURATION_HINT: &str = "write durations with a unit, for example `500ms` or `1m 30s`";
const PERCENTAGE_HINT: &str =
    "write a size such as `2GiB`, or a percentage of the budget such as `13%` or `6.5%`";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_exact_powers_of_1024() {
        for (text, bytes) in [
            ("0B", 0),
            ("17B", 17),
            ("512MiB", 512 << 20),
            (" 512 MiB ", 512 << 20),
            ("1.5GiB", 1536 << 20),
            ("0.0009765625KiB", 1),
            ("16777215.5TiB", u64::MAX - (1 << 39) + 1),
        ] {
            assert_eq!(parse_size(text), Ok(Bytes::new(bytes)), "{text}");
        }
    }

    #[test]
    fn a_bare_number_has_no_unit_whatever_it_is() {
        for text in ["0", "1073741824", "1.5", "00012"] {
            assert!(
                matches!(parse_size(text), Err(SizeError::NoUnit(..))),
                "{text}"
            );
            assert!(
                matches!(parse_duration(text), Err(SizeError::NoUnit(..))),
                "{text}"
            );
            assert!(
                matches!(parse_per_mille(text), Err(SizeError::NoUnit(..))),
                "{text}"
            );
        }
    }

    #[test]
    fn every_refusal_says_what_to_write() {
        let mut reported = String::new();
        for text in [
            "",
            "12G",
            "12GB",
            "12gb",
            "3k",
            "1.5M",
            "2GIB",
            "12 parsecs",
            "GiB",
            "-1GiB",
            "1e9",
            "1.B",
            ".5GiB",
            "1.2.3GiB",
            "1073741824",
            "7",
            "0.3B",
            "99999999999TiB",
            "yes",
            "1,5GiB",
            "1GiB 2MiB",
        ] {
            let error = parse_size(text).unwrap_err();
            reported += &format!("{text:>14}: {error} | {}\n", error.hint());
        }
        for text in [
            "",
            "90",
            "5 parsecs",
            "-1s",
            "1s1",
            "s",
            "9999999999d",
            "0.0001us",
            "1.s",
        ] {
            let error = parse_duration(text).unwrap_err();
            reported += &format!("{text:>14}: {error} | {}\n", error.hint());
        }
        for text in ["", "13", "13 per cent", "6.55%", "101%", "%"] {
            let error = parse_per_mille(text).unwrap_err();
            reported += &format!("{text:>14}: {error} | {}\n", error.hint());
        }
        insta::assert_snapshot!(reported);
    }

    #[test]
    fn durations_add_up() {
        for (text, millis) in [
            ("500ms", 500),
            ("1m 30s", 90_000),
            ("1m30s", 90_000),
            ("1.5s", 1500),
            ("1h", 3_600_000),
            ("1d", 86_400_000),
            ("0s", 0),
            ("1 m", 60_000),
        ] {
            assert_eq!(
                parse_duration(text),
                Ok(Duration::from_millis(millis)),
                "{text}"
            );
        }
    }

    #[test]
    fn units_of_a_duration_come_once_and_fall() {
        for text in ["1s1s", "1s 1s", "30s 1m", "1m 30s 30s", "1m1min", "1ms 1h"] {
            assert!(
                matches!(parse_duration(text), Err(SizeError::Malformed(..))),
                "{text}"
            );
        }
        assert_eq!(
            parse_duration("1d 2h 3m 4s 5ms 6us"),
            Ok(Duration::from_micros(93_784_005_006))
        );
    }

    #[test]
    fn percentages_have_one_decimal() {
        assert_eq!(parse_per_mille("6.5%"), Ok(65));
        assert_eq!(parse_per_mille("13%"), Ok(130));
        assert_eq!(parse_per_mille("100%"), Ok(1000));
    }

    proptest! {
        #[test]
        fn a_whole_size_is_read_back(mib in 0..(1u64 << 40)) {
            prop_assert_eq!(parse_size(&format!("{mib}MiB")), Ok(Bytes::from_mib(mib)));
        }
    }
}
