//! Board model and L4T release.

use std::fmt;

use super::{
    ProbeRoot,
    source::{lines, number, read_optional},
};

/// Release of L4T, NVIDIA's Linux for Jetson.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct L4tRelease {
    /// 36 for JetPack 6.
    pub major: u32,
    /// 4 of 36.4.7.
    pub minor: u32,
    /// 7 of 36.4.7.
    pub patch: u32,
}

impl L4tRelease {
    /// Parses `/etc/nv_tegra_release`: `# R36 (release), REVISION: 4.7, …`.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (_, line) = lines(text).find(|(_, line)| line.starts_with(b"# R"))?;
        let line = std::str::from_utf8(line).ok()?;
        let (major, rest) = line.strip_prefix("# R")?.split_once(' ')?;
        let (_, revision) = rest.split_once("REVISION: ")?;
        let revision = revision.split(',').next()?.trim();
        let (minor, patch) = revision.split_once('.').unwrap_or((revision, "0"));
        let part = |text: &str| u32::try_from(number(text.as_bytes())?).ok();
        Some(Self {
            major: part(major)?,
            minor: part(minor)?,
            patch: part(patch)?,
        })
    }

    /// Returns a known fault of this release, with its remedy.
    pub fn warning(self) -> Option<&'static str> {
        (self == REFUSES_LARGE).then_some(
            "L4T 36.4.7 refuses single GPU allocations of a few GiB with gigabytes free (NVIDIA bug 5602402); \
             weights are allocated one by one here, other programs may fail: upgrade to L4T 36.5 or newer",
        )
    }

    /// Returns whether CUDA memory is nvmap memory; not since R38 (Thor).
    pub fn uses_nvmap(self) -> bool {
        self.major < 38
    }
}

impl fmt::Display for L4tRelease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Contents of the device tree and of the release file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Board {
    /// `NVIDIA Jetson Orin NX Engineering Reference Developer Kit`; `None` without a device tree.
    pub model: Option<String>,
    /// `nvidia,p3768-0000+p3767-0000`, `nvidia,p3767-0000`, `nvidia,tegra234`: from most to least specific.
    pub compatible: Vec<String>,
    /// The release; `None` except on a Jetson.
    pub l4t: Option<L4tRelease>,
}

impl Board {
    /// Reads both.
    pub fn read(root: &ProbeRoot) -> Self {
        let strings = |name: &str| {
            read_optional(&root.proc("device-tree").join(name))
                .map_or_else(Vec::new, |text| strings(&text))
        };
        Self {
            model: strings("model").into_iter().next(),
            compatible: strings("compatible"),
            l4t: read_optional(&root.etc("nv_tegra_release"))
                .and_then(|text| L4tRelease::parse(&text)),
        }
    }

    /// Returns whether this is a Jetson.
    pub fn is_jetson(&self) -> bool {
        self.l4t.is_some()
            || self
                .compatible
                .iter()
                .any(|name| name.starts_with("nvidia,tegra"))
    }

    /// Returns whether the device tree permits the higher clocks of "super" mode.
    pub fn is_super(&self) -> bool {
        self.compatible.iter().any(|name| name.ends_with("-super"))
    }
}

/// Splits a device tree property into its NUL-terminated strings.
fn strings(property: &[u8]) -> Vec<String> {
    property
        .split(|b| *b == 0)
        .filter(|text| !text.is_empty())
        .map(|text| String::from_utf8_lossy(text).trim().to_owned())
        .collect()
}

/// Release with NVIDIA bug 5602402; 36.4.4 and 36.5.0 are free of it.
const REFUSES_LARGE: L4tRelease = L4tRelease {
    major: 36,
    minor: 4,
    patch: 7,
};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    macro_rules! release {
        ($name:literal) => {
            L4tRelease::parse(include_bytes!(concat!(
                "../../tests/fixtures/jetson/nv_tegra_release/",
                $name,
                ".txt"
            )))
            .unwrap()
        };
    }

    #[test]
    fn releases_are_read_and_36_4_7_alone_warns() {
        let warned = release!("r36.4.7");
        assert_eq!(warned.to_string(), "36.4.7");
        assert!(warned.warning().unwrap().contains("36.5"));
        for (release, text) in [
            (release!("r36.4.3_first-line"), "36.4.3"),
            (release!("r36.4.4_fields.RECONSTRUCTED"), "36.4.4"),
            (release!("r38.4.0_thor"), "38.4.0"),
            (
                L4tRelease::parse(b"# R36 (release), REVISION: 5.0, GCID: 1").unwrap(),
                "36.5.0",
            ),
            (
                L4tRelease::parse(b"# R32 (release), REVISION: 7").unwrap(),
                "32.7.0",
            ),
        ] {
            assert_eq!(release.to_string(), text);
            assert_eq!(release.warning(), None);
        }
        assert!(!release!("r38.4.0_thor").uses_nvmap());
    }

    #[test]
    fn what_is_no_release_is_none() {
        for text in [
            "",
            "# R",
            "# R36",
            "# Rxx (release), REVISION: 4.7",
            "# R36 (release), REVISION: 4.7.1, x",
        ] {
            assert_eq!(L4tRelease::parse(text.as_bytes()), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsing_returns_for_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (L4tRelease::parse(&bytes), strings(&bytes));
        }

        #[test]
        fn parsing_returns_for_nearly_valid_text(text in "# R[0-9x]{0,12} \\(release\\), REVISION: [0-9.]{0,24},.{0,9}") {
            let _ = L4tRelease::parse(text.as_bytes());
        }
    }
}
