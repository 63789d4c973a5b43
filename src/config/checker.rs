//! Readers of single values, which collect every fault.

use std::{
    collections::BTreeSet,
    fmt::Display,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use super::{
    error::Fault,
    raw::{self, Text},
    settings::Watermark,
    size::{self, SizeError},
};
use cotenant_policy::lease::Class;
use cotenant_units::Bytes;

/// Reads values and collects their faults. Every reader returns `None` for a missing and for a faulty value; the latter
/// adds a fault.
#[derive(Default)]
pub(super) struct Checker {
    pub(super) faults: Vec<Fault>,
}

impl Checker {
    pub(super) fn fault(&mut self, path: &str, message: impl Into<String>, hint: Option<&str>) {
        self.faults
            .push(Fault::new(path, message, hint.map(str::to_owned)));
    }

    /// Adds a fault if a required key is missing.
    pub(super) fn require(&mut self, path: &str, text: &Text, hint: &str) {
        if text.0.is_none() {
            self.fault(path, "is required", Some(hint));
        }
    }

    /// Returns the text of a value; adds a fault if the key has none.
    pub(super) fn given<'a>(&mut self, path: &str, text: &'a Text) -> Option<&'a str> {
        let written = text.0.as_deref()?;
        if matches!(written, "" | "~" | "null") {
            self.fault(
                path,
                "has no value",
                Some("write a value, or remove the key to have its default"),
            );
            return None;
        }
        Some(written)
    }

    pub(super) fn size(
        &mut self,
        path: &str,
        text: &Text,
        range: RangeInclusive<Bytes>,
    ) -> Option<Bytes> {
        let written = self.given(path, text)?;
        let parsed = size::parse_size(written);
        self.sized(path, written, parsed, &range)
    }

    pub(super) fn duration(
        &mut self,
        path: &str,
        text: &Text,
        range: RangeInclusive<Duration>,
    ) -> Option<Duration> {
        let written = self.given(path, text)?;
        match size::parse_duration(written) {
            Ok(value) if range.contains(&value) => Some(value),
            Ok(_) => self.outside(path, written, humane(*range.start()), humane(*range.end())),
            Err(error) => self.unit_fault(path, &error),
        }
    }

    /// Reads a percentage of at most `max` thousandths.
    pub(super) fn per_mille(&mut self, path: &str, text: &Text, max: u32) -> Option<u32> {
        let written = self.given(path, text)?;
        match size::parse_per_mille(written) {
            Ok(part) if part <= max => Some(part),
            Ok(_) => self.outside(path, written, "0%", format!("{}%", max / 10)),
            Err(error) => self.unit_fault(path, &error),
        }
    }

    pub(super) fn watermark(&mut self, path: &str, text: &Text) -> Option<Watermark> {
        if self.given(path, text)?.trim_end().ends_with('%') {
            return self.per_mille(path, text, 500).map(Watermark::PerMille);
        }
        self.size(path, text, Bytes::ZERO..=SIZE_MAX)
            .map(Watermark::Bytes)
    }

    pub(super) fn number<T>(
        &mut self,
        path: &str,
        text: &Text,
        range: RangeInclusive<T>,
    ) -> Option<T>
    where
        T: FromStr + PartialOrd + Display,
    {
        let written = self.given(path, text)?;
        let digits = written.strip_prefix('-').unwrap_or(written);
        let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        match written.parse::<T>() {
            Ok(value) if plain && range.contains(&value) => Some(value),
            _ if plain => self.outside(path, written, range.start(), range.end()),
            _ => {
                self.fault(path, format!("`{written}` is not a whole number"), None);
                None
            }
        }
    }

    pub(super) fn class(&mut self, path: &str, text: &Text) -> Option<Class> {
        self.one_of(path, text, &Class::ALL.map(|class| (class.name(), class)))
    }

    pub(super) fn one_of<T: Copy>(
        &mut self,
        path: &str,
        text: &Text,
        words: &[(&'static str, T)],
    ) -> Option<T> {
        let written = self.given(path, text)?;
        if let Some((_, value)) = words.iter().find(|(word, _)| *word == written) {
            return Some(*value);
        }
        let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        let hint = match raw::nearest(written, &known) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("write one of {}", raw::list(&known)),
        };
        self.fault(
            path,
            format!("`{written}` is none of {}", raw::list(&known)),
            Some(&hint),
        );
        None
    }

    /// Reads `true` or `false`; other words that some YAML readers accept as booleans are refused.
    pub(super) fn switch(&mut self, path: &str, text: &Text) -> Option<bool> {
        match self.given(path, text)? {
            "true" => Some(true),
            "false" => Some(false),
            other => {
                self.fault(
                    path,
                    format!("`{other}` is neither `true` nor `false`"),
                    Some("write `true` or `false`; `yes`, `no`, `on` and `off` are plain words"),
                );
                None
            }
        }
    }

    /// Reads a word that is non-empty and contains no NUL.
    pub(super) fn word(&mut self, path: &str, text: &Text) -> Option<String> {
        let written = self.given(path, text)?;
        if written.contains('\0') || written.trim() != written {
            self.fault(
                path,
                format!("`{}` is not a plain word", written.escape_debug()),
                None,
            );
            return None;
        }
        Some(written.to_owned())
    }

    /// Reads an absolute path without `..`.
    pub(super) fn directory(&mut self, path: &str, text: &Text) -> Option<PathBuf> {
        let written = self.given(path, text)?;
        let file = Path::new(written);
        if written.contains('\0') || !file.is_absolute() {
            let hint = if written.starts_with('~') {
                "`~` is not replaced: write the path from `/`"
            } else if path == "grpc.socket" && written.contains(':') {
                "this is a Unix socket: other machines connect by `grpc.tcp` with certificates, or forward the socket with \
                 `ssh -L`"
            } else {
                "write the path from `/`"
            };
            self.fault(
                path,
                format!("`{}` is not an absolute path", written.escape_debug()),
                Some(hint),
            );
            return None;
        }
        Some(file.to_owned())
    }

    pub(super) fn socket(&mut self, path: &str, text: &Text) -> Option<PathBuf> {
        let socket = self.directory(path, text)?;
        self.socket_fits(path, &socket).then_some(socket)
    }

    /// Checks that the path is short enough for a socket.
    pub(super) fn socket_fits(&mut self, path: &str, socket: &Path) -> bool {
        let length = socket.as_os_str().len();
        if length > SOCKET_PATH_MAX {
            let message = format!(
                "the socket path `{}` has {length} bytes, the kernel allows {SOCKET_PATH_MAX}",
                socket.display()
            );
            self.fault(
                path,
                message,
                Some("use a shorter directory, for example `/run/cotenant`"),
            );
        }
        length <= SOCKET_PATH_MAX
    }

    /// Reads a name for logs, leases and metrics.
    pub(super) fn name(&mut self, path: &str, text: &Text) -> Option<String> {
        let written = self.given(path, text)?;
        let plain = written.len() <= NAME_MAX
            && written.starts_with(|c: char| c.is_ascii_lowercase())
            && written
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_'));
        if plain {
            return Some(written.to_owned());
        }
        self.fault(
            path,
            format!("`{}` is not a name", written.escape_debug()),
            Some("names start with a letter and have at most 32 of `a-z`, `0-9`, `-` and `_`"),
        );
        None
    }

    pub(super) fn sized(
        &mut self,
        path: &str,
        written: &str,
        parsed: Result<Bytes, SizeError>,
        range: &RangeInclusive<Bytes>,
    ) -> Option<Bytes> {
        match parsed {
            Ok(value) if range.contains(&value) => Some(value),
            Ok(_) => self.outside(path, written, range.start(), range.end()),
            Err(error) => self.unit_fault(path, &error),
        }
    }

    fn unit_fault<T>(&mut self, path: &str, error: &SizeError) -> Option<T> {
        self.fault(path, error.to_string(), Some(&error.hint()));
        None
    }

    /// Reports a value outside its range.
    fn outside<T>(
        &mut self,
        path: &str,
        written: &str,
        low: impl Display,
        high: impl Display,
    ) -> Option<T> {
        let message = format!("`{written}` is not between {low} and {high}");
        self.fault(path, message, None);
        None
    }

    /// Reports a maximum below its minimum, both with the names of their keys.
    pub(super) fn ordered(&mut self, path: &str, most: (&str, Duration), least: (&str, Duration)) {
        if most.1 < least.1 {
            let (longest, shortest) = (humane(most.1), humane(least.1));
            let message = format!("{longest} is below `{}`, {shortest}", least.0);
            let hint = format!("raise `{}` or lower `{}`", most.0, least.0);
            self.fault(path, message, Some(&hint));
        }
    }
}

/// Formats a duration as in the file: `1m 30s`.
fn humane(duration: Duration) -> String {
    let mut rest = duration.as_micros();
    let mut parts = Vec::new();
    for (unit, micros) in [
        ("d", 86_400_000_000),
        ("h", 3_600_000_000),
        ("m", 60_000_000),
        ("s", 1_000_000),
        ("ms", 1_000),
        ("us", 1),
    ] {
        if rest >= micros {
            parts.push(format!("{}{unit}", rest / micros));
            rest %= micros;
        }
    }
    if parts.is_empty() {
        "0s".to_owned()
    } else {
        parts.join(" ")
    }
}

/// Returns the placeholders of `argv` and `env`: `${NAME}`, without duplicates.
pub(super) fn placeholders(text: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut rest = text;
    while let Some((_, tail)) = rest.split_once("${") {
        let Some((name, tail)) = tail.split_once('}') else {
            break;
        };
        found.insert(name);
        rest = tail;
    }
    found
}

pub(super) const MILLI: Duration = Duration::from_millis(1);
pub(super) const MILLIS_100: Duration = Duration::from_millis(100);
pub(super) const SECOND: Duration = Duration::from_secs(1);
pub(super) const MINUTE: Duration = Duration::from_secs(60);
pub(super) const HOUR: Duration = Duration::from_secs(3600);
pub(super) const DAY: Duration = Duration::from_secs(86_400);

/// Far beyond any device, yet small enough that the sum of a file's sizes cannot overflow.
pub(super) const SIZE_MAX: Bytes = Bytes::from_gib(1 << 20);

/// `sun_path` of `sockaddr_un` has 108 bytes, the last of them NUL (unix(7)).
pub(super) const SOCKET_PATH_MAX: usize = 107;

const NAME_MAX: usize = 32;
