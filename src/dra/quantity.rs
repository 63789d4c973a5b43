//! Quantities of Kubernetes, as bytes.

/// Parses a quantity, rounded up to whole bytes: `64Mi`, `1.5Gi`, `2e9`, `100M`, `1500m`. `None` if it is none, is
/// negative, or exceeds 2^64.
#[must_use]
pub fn parse(text: &str) -> Option<u64> {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let scale = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let (times, parts) = match suffix {
        "" => (1, 1),
        "m" => (1, 1000),
        "k" => (1000, 1),
        "M" => (1000_u128.pow(2), 1),
        "G" => (1000_u128.pow(3), 1),
        "T" => (1000_u128.pow(4), 1),
        "P" => (1000_u128.pow(5), 1),
        "E" => (1000_u128.pow(6), 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        _ => (
            10_u128.checked_pow(suffix.strip_prefix(['e', 'E'])?.parse().ok()?)?,
            1,
        ),
    };
    let bytes = digits
        .checked_mul(times)?
        .div_ceil(scale.checked_mul(parts)?);
    u64::try_from(bytes).ok()
}

/// Writes bytes as a quantity, in MiB if they are whole ones.
#[must_use]
pub fn of(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) {
        format!("{}Mi", bytes >> 20)
    } else {
        bytes.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        for (text, bytes) in [
            ("64Mi", 64 << 20),
            ("1.5Gi", 3 << 29),
            ("100M", 100_000_000),
            ("2e9", 2_000_000_000),
            ("1E3", 1000),
            ("1E", 1_000_000_000_000_000_000),
            ("1500m", 2),
            ("0", 0),
            (".5Ki", 512),
            ("7", 7),
        ] {
            assert_eq!(parse(text), Some(bytes), "{text}");
        }
        for text in [
            "",
            "-1",
            "Mi",
            "1.2.3",
            "1 Mi",
            "1mi",
            "17Ei",
            "1e99",
            "1e-3x",
            "99999999999999999999999999999999999999999999",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_written_quantity_is_read_back(bytes in any::<u64>()) {
            prop_assert_eq!(parse(&of(bytes)), Some(bytes));
        }

        #[test]
        fn any_text_returns(text in ".{0,40}") {
            let _ = parse(&text);
        }
    }
}
