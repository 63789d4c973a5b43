//! Quantities with units: bytes, tokens, layers, time since the start.
//!
//! Apart from the page size and [`pidfd`], nothing here reads the system. Sizes are whole bytes in a `u64` and never pass through a
//! float.

pub mod causes;
pub mod lock;
pub mod pidfd;
pub mod vector;

use std::{
    fmt,
    iter::Sum,
    ops::{Add, AddAssign, Sub, SubAssign},
    sync::OnceLock,
    time::Duration,
};

use nix::unistd::{SysconfVar, sysconf};
use serde::{Deserialize, Serialize};

/// A number of bytes.
///
/// Addition and subtraction panic on overflow in every profile, because the ledger must not wrap; for a possibly
/// negative difference, use [`Bytes::saturating_sub`] or [`Bytes::checked_sub`].
///
/// ```
/// use cotenant_units::Bytes;
/// assert_eq!(Bytes::from_mib(64).to_string(), "64 MiB");
/// assert_eq!(Bytes::new(1536).to_string(), "1.5 KiB");
/// assert_eq!(Bytes::from_gib(1) - Bytes::from_mib(24), Bytes::from_mib(1000));
/// ```
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(u64);

impl Bytes {
    /// Zero bytes.
    pub const ZERO: Self = Self(0);
    /// The largest representable number.
    pub const MAX: Self = Self(u64::MAX);

    /// Wraps a number of bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// `kib` × 2^10 bytes; saturates.
    pub const fn from_kib(kib: u64) -> Self {
        Self(kib.saturating_mul(1 << 10))
    }

    /// `mib` × 2^20 bytes; saturates.
    pub const fn from_mib(mib: u64) -> Self {
        Self(mib.saturating_mul(1 << 20))
    }

    /// `gib` × 2^30 bytes; saturates.
    pub const fn from_gib(gib: u64) -> Self {
        Self(gib.saturating_mul(1 << 30))
    }

    /// Returns the length of an object in memory as bytes.
    pub const fn of_len(len: usize) -> Self {
        Self(len as u64)
    }

    /// Returns the plain number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the size as a length in memory; saturates at the size of the address space.
    #[must_use]
    pub fn as_len(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }

    /// Returns whole MiB, rounded down.
    #[must_use]
    pub const fn whole_mib(self) -> u64 {
        self.0 >> 20
    }

    /// Returns the sum, or `None` on overflow.
    #[must_use]
    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.0.checked_add(other.0) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// Returns the difference, or `None` if `other` is larger.
    #[must_use]
    pub const fn checked_sub(self, other: Self) -> Option<Self> {
        match self.0.checked_sub(other.0) {
            Some(rest) => Some(Self(rest)),
            None => None,
        }
    }

    /// Returns the saturating sum.
    #[must_use]
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// Returns the difference, or zero if `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Multiplies by `count`; saturates.
    #[must_use]
    pub const fn saturating_mul(self, count: u64) -> Self {
        Self(self.0.saturating_mul(count))
    }

    /// Returns `part` thousandths of it, rounded down; computed exactly in 128 bits.
    #[must_use]
    pub fn per_mille(self, part: u32) -> Self {
        let exact = u128::from(self.0) * u128::from(part) / 1000;
        Self(u64::try_from(exact).unwrap_or(u64::MAX))
    }

    /// Rounds up to a multiple of `unit`; unchanged if `unit` is zero.
    #[must_use]
    pub const fn round_up(self, unit: Self) -> Self {
        match self.0.checked_next_multiple_of(unit.0) {
            Some(rounded) => Self(rounded),
            None => self,
        }
    }
}

/// Returns the kernel's page size, its allocation unit: 4 KiB on x86-64 and on a Jetson, 16 KiB on a Raspberry Pi 5, up
/// to 64 KiB on other arm64 machines.
pub fn page() -> Bytes {
    static PAGE: OnceLock<Bytes> = OnceLock::new();
    *PAGE.get_or_init(|| {
        let size = sysconf(SysconfVar::PAGE_SIZE)
            .ok()
            .flatten()
            .and_then(|size| u64::try_from(size).ok());
        Bytes::new(size.filter(|size| size.is_power_of_two()).unwrap_or(4096))
    })
}

/// Whole milliseconds of a duration; saturates.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Whole microseconds of a duration; saturates.
pub fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl fmt::Display for Bytes {
    /// Prints at most one decimal in the largest binary unit with a non-zero integer part: `1.5 GiB`, `412 MiB`, `17
    /// B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            n if n >= 1 << 30 => (1u64 << 30, "GiB"),
            n if n >= 1 << 20 => (1 << 20, "MiB"),
            n if n >= 1 << 10 => (1 << 10, "KiB"),
            n => return f.pad(&format!("{n} B")),
        };
        let tenths = u128::from(self.0) * 10 / u128::from(unit);
        if tenths.is_multiple_of(10) {
            f.pad(&format!("{} {name}", tenths / 10))
        } else {
            f.pad(&format!("{}.{} {name}", tenths / 10, tenths % 10))
        }
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl SubAssign for Bytes {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Self::add)
    }
}

/// A number of tokens: of a prompt, an answer, or a KV capacity.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Tokens(u32);

impl Tokens {
    /// Zero tokens.
    pub const ZERO: Self = Self(0);

    /// Wraps a number of tokens.
    pub const fn new(tokens: u32) -> Self {
        Self(tokens)
    }

    /// Returns the plain number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0.to_string())
    }
}

/// A number of model layers.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Layers(u32);

impl Layers {
    /// Zero layers.
    pub const ZERO: Self = Self(0);

    /// Wraps a number of layers.
    pub const fn new(layers: u32) -> Self {
        Self(layers)
    }

    /// Returns the plain number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0.to_string())
    }
}

/// A point in time, as the time since the supervisor started.
///
/// Unlike [`std::time::Instant`] it can be constructed, printed, and compared across runs. Stored in whole
/// microseconds, so that a journal read back gives the same value.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The start of the supervisor.
    pub const START: Self = Self(0);
    /// Later than any event.
    pub const NEVER: Self = Self(u64::MAX);

    /// `micros` µs after the start.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// `millis` ms after the start.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1000))
    }

    /// Returns microseconds since the start.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Returns the time since the start.
    #[must_use]
    pub const fn since_start(self) -> Duration {
        Duration::from_micros(self.0)
    }

    /// Returns the time by which this is later than `earlier`; zero if it is not.
    #[must_use]
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;
    /// Saturates at [`Timestamp::NEVER`].
    fn add(self, wait: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(wait.as_micros()).unwrap_or(u64::MAX)),
        )
    }
}

impl fmt::Display for Timestamp {
    /// Prints seconds with three decimals: `12.345s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!(
            "{}.{:03}s",
            self.0 / 1_000_000,
            self.0 / 1000 % 1000
        ))
    }
}

/// A duration for messages: `250 ms`, `1.5 s`, `10 min`, `1 h 30 min`.
///
/// ```
/// use cotenant_units::TimeSpan;
/// use std::time::Duration;
/// assert_eq!(TimeSpan(Duration::from_millis(1500)).to_string(), "1.5 s");
/// assert_eq!(TimeSpan(Duration::from_secs(5400)).to_string(), "1 h 30 min");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeSpan(pub Duration);

impl fmt::Display for TimeSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (micros, seconds) = (self.0.as_micros(), self.0.as_secs());
        let (large, whole, small, rest) = match seconds {
            0 if micros < 1000 => {
                return write!(f, "{micros} {}", if micros == 0 { "s" } else { "µs" });
            }
            0 => return thousandths(f, micros, "ms"),
            1..60 => return thousandths(f, self.0.as_millis(), "s"),
            60..3600 => (seconds / 60, "min", seconds % 60, "s"),
            3600..86_400 => (seconds / 3600, "h", seconds / 60 % 60, "min"),
            _ => (seconds / 86_400, "d", seconds / 3600 % 24, "h"),
        };
        write!(f, "{large} {whole}")?;
        if small > 0 {
            write!(f, " {small} {rest}")
        } else {
            Ok(())
        }
    }
}

/// Prints thousandths of a unit without trailing zeros.
fn thousandths(f: &mut fmt::Formatter<'_>, count: u128, unit: &str) -> fmt::Result {
    let fraction = format!("{:03}", count % 1000);
    match fraction.trim_end_matches('0') {
        "" => write!(f, "{} {unit}", count / 1000),
        fraction => write!(f, "{}.{fraction} {unit}", count / 1000),
    }
}

/// Returns the 64-bit FNV-1a hash of bytes (draft-eastlake-fnv): the same on every machine; not cryptographic.
///
/// ```
/// assert_eq!(cotenant_units::fnv1a(*b"foobar"), 0x8594_4171_f739_67e8);
/// ```
pub fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let bytes = bytes.into_iter();
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_print_in_the_largest_unit_that_leaves_a_whole_part() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1 << 20, "1 MiB"),
            ((1 << 20) + (1 << 19), "1.5 MiB"),
            (u64::MAX, "17179869183.9 GiB"),
        ] {
            assert_eq!(Bytes::new(bytes).to_string(), text);
        }
    }

    #[test]
    fn a_part_of_a_thousand_does_not_overflow() {
        assert_eq!(Bytes::MAX.per_mille(1000), Bytes::MAX);
        assert_eq!(Bytes::from_mib(1000).per_mille(130), Bytes::from_mib(130));
    }

    #[test]
    fn time_saturates() {
        assert_eq!(Timestamp::NEVER + Duration::from_secs(1), Timestamp::NEVER);
        assert_eq!(
            Timestamp::START.saturating_since(Timestamp::from_millis(5)),
            Duration::ZERO
        );
        assert_eq!(Timestamp::from_millis(12_345).to_string(), "12.345s");
    }

    #[test]
    fn a_time_span_has_at_most_two_units_and_no_zeros_at_its_end() {
        for (micros, text) in [
            (0, "0 s"),
            (7, "7 µs"),
            (1000, "1 ms"),
            (1250, "1.25 ms"),
            (1_000_000, "1 s"),
            (59_999_999, "59.999 s"),
            (60_000_000, "1 min"),
            (90_000_000, "1 min 30 s"),
            (3_600_000_000, "1 h"),
            (86_399_000_000, "23 h 59 min"),
            (90_000_000_000, "1 d 1 h"),
        ] {
            assert_eq!(TimeSpan(Duration::from_micros(micros)).to_string(), text);
        }
        assert!(TimeSpan(Duration::MAX).to_string().ends_with(" h"));
    }
}
