//! Highest measured use of each holder.
//!
//! The configured need of a worker is an estimate; its measured use is not. A higher peak replaces the known one at
//! once. A lower one has to be seen in several runs of the holder, each of which reduces the difference by a quarter,
//! since the old peak may occur again.

use serde::{Deserialize, Serialize};

use cotenant_units::Bytes;

/// The highest measured use of one holder, in one variant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedPeak {
    /// Name of the holder: `asr`, or `llm`.
    pub holder: String,
    /// The variant, or the model; `None` for a worker of one size.
    pub variant: Option<String>,
    /// Highest measured use.
    pub bytes: Bytes,
    /// Number of complete starts seen.
    pub lives: u32,
    /// Highest use from a start until it was measured at rest; `None` before the first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<Bytes>,
    /// Its program and model at that time; `None` if unknown, which matches any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

impl LearnedPeak {
    /// Returns the bytes reserved for a start.
    #[must_use]
    pub fn with_margin(&self) -> Bytes {
        with_margin(self.bytes)
    }

    /// Returns the minimum for a start: memory for requests is needed later, when other holders can release it.
    #[must_use]
    pub fn start_with_margin(&self) -> Option<Bytes> {
        self.start.map(with_margin)
    }
}

fn with_margin(bytes: Bytes) -> Bytes {
    bytes.saturating_add(bytes.per_mille(MARGIN_PER_MILLE))
}

/// Returns the known peak after another one was `seen`; a lower one counts a quarter.
fn eased(known: Bytes, seen: Bytes) -> Bytes {
    let less = known.saturating_sub(seen);
    seen.max(known.saturating_sub(Bytes::new(less.get() / 4)))
}

/// All learned peaks, by holder and variant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Peaks(Vec<LearnedPeak>);

impl Peaks {
    /// Returns the peaks in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = &LearnedPeak> {
        self.0.iter()
    }

    /// Returns the learned peak of a holder.
    #[must_use]
    pub fn of(&self, holder: &str, variant: Option<&str>) -> Option<&LearnedPeak> {
        let place = self.place(holder, variant).ok()?;
        self.0.get(place)
    }

    /// Records the use, or the peak so far, of a running holder. Returns whether the learned peak grew by more than the
    /// tolerance.
    pub fn seen(&mut self, holder: &str, variant: Option<&str>, bytes: Bytes) -> bool {
        let Some(peak) = self.entry(holder, variant) else {
            return false;
        };
        let worth = peak.bytes.per_mille(WORTH_PER_MILLE).max(WORTH);
        let more = bytes > peak.bytes.saturating_add(worth);
        if more {
            peak.bytes = bytes;
        }
        more
    }

    /// Records the peak of a complete start. Returns whether it was stored.
    pub fn lived(&mut self, holder: &str, variant: Option<&str>, bytes: Bytes) -> bool {
        let Some(peak) = self.entry(holder, variant) else {
            return false;
        };
        peak.lives = peak.lives.saturating_add(1);
        peak.start = Some(eased(peak.start.unwrap_or(bytes), bytes));
        peak.bytes = eased(peak.bytes, bytes);
        true
    }

    /// Forgets the peaks of a holder learned with another program or model.
    pub fn forget_other_models(&mut self, holder: &str, model: Option<&str>) {
        let other = |peak: &LearnedPeak| {
            peak.model
                .as_deref()
                .zip(model)
                .is_some_and(|(then, now)| then != now)
        };
        self.0.retain(|peak| peak.holder != holder || !other(peak));
    }

    /// Sets the program and model of a holder's peaks.
    pub fn name_model(&mut self, holder: &str, model: Option<&str>) {
        for peak in self.0.iter_mut().filter(|peak| peak.holder == holder) {
            if peak.model.as_deref() != model {
                peak.model = model.map(str::to_owned);
            }
        }
    }

    /// Returns the bytes that must be free to start a holder with a `configured` peak and a `steady` size.
    #[must_use]
    pub fn expected(
        &self,
        holder: &str,
        variant: Option<&str>,
        configured: Bytes,
        steady: Bytes,
    ) -> Bytes {
        let Some(peak) = self.of(holder, variant) else {
            return configured;
        };
        let with_margin = peak.with_margin();
        if peak.bytes > configured {
            with_margin
        } else if peak.lives >= LIVES_LEAST {
            with_margin.max(steady).min(configured)
        } else {
            configured
        }
    }

    fn place(&self, holder: &str, variant: Option<&str>) -> Result<usize, usize> {
        self.0.binary_search_by(|peak| {
            (peak.holder.as_str(), peak.variant.as_deref()).cmp(&(holder, variant))
        })
    }

    fn entry(&mut self, holder: &str, variant: Option<&str>) -> Option<&mut LearnedPeak> {
        let place = match self.place(holder, variant) {
            Ok(place) => place,
            Err(_) if self.0.len() >= PEAKS_MAX => return None,
            Err(place) => {
                let peak = LearnedPeak {
                    holder: holder.to_owned(),
                    variant: variant.map(str::to_owned),
                    bytes: Bytes::ZERO,
                    lives: 0,
                    start: None,
                    model: None,
                };
                self.0.insert(place, peak);
                place
            }
        };
        self.0.get_mut(place)
    }
}

impl FromIterator<LearnedPeak> for Peaks {
    /// Of several with the same name the first is kept; entries beyond the bound are dropped.
    fn from_iter<I: IntoIterator<Item = LearnedPeak>>(peaks: I) -> Self {
        let mut all: Vec<LearnedPeak> = peaks.into_iter().take(PEAKS_MAX).collect();
        all.sort_by(|one, other| (&one.holder, &one.variant).cmp(&(&other.holder, &other.variant)));
        all.dedup_by(|later, first| {
            (&later.holder, &later.variant) == (&first.holder, &first.variant)
        });
        Self(all)
    }
}

/// A start needs 1.1 times the learned peak, as another supervisor for such a board requires.
const MARGIN_PER_MILLE: u32 = 100;
/// Minimum number of starts before a lower peak is trusted. Our choice.
const LIVES_LEAST: u32 = 3;
/// Tolerance within which peaks are equal, 2 % or 1 MiB: whole pages and shared libraries.
const WORTH_PER_MILLE: u32 = 20;
const WORTH: Bytes = Bytes::from_mib(1);
/// Maximum number of entries; far more than 64 workers with their variants and models need.
const PEAKS_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn mib(mib: u64) -> Bytes {
        Bytes::from_mib(mib)
    }

    #[test]
    fn a_higher_peak_counts_at_once_and_with_a_margin() {
        let mut peaks = Peaks::default();
        let expected = |peaks: &Peaks| peaks.expected("asr", None, mib(1375), mib(1100));
        assert_eq!(expected(&peaks), mib(1375), "nothing is known");
        assert!(peaks.seen("asr", None, mib(1000)));
        assert_eq!(
            expected(&peaks),
            mib(1375),
            "one life says nothing about less"
        );
        assert!(peaks.seen("asr", None, mib(3160)));
        assert_eq!(
            expected(&peaks),
            mib(3476),
            "Moonshine: 1.1 GB at rest, 3.16 GB at its peak"
        );
        assert!(!peaks.seen("asr", None, mib(3160)) && !peaks.seen("asr", None, mib(2)));
    }

    #[test]
    fn a_lower_peak_has_to_be_seen_in_several_lives() {
        let mut peaks = Peaks::default();
        for life in 0..3 {
            assert_eq!(
                peaks.expected("tts", Some("hd"), mib(900), mib(300)),
                mib(900),
                "{life}"
            );
            peaks.lived("tts", Some("hd"), mib(400));
        }
        assert_eq!(
            peaks.expected("tts", Some("hd"), mib(900), mib(300)),
            mib(440)
        );
        assert_eq!(
            peaks.expected("tts", Some("hd"), mib(900), mib(600)),
            mib(600),
            "never below rest"
        );
        peaks.seen("tts", Some("hd"), mib(800));
        peaks.lived("tts", Some("hd"), mib(400));
        assert_eq!(
            peaks.of("tts", Some("hd")).unwrap().bytes,
            mib(700),
            "a quarter each time"
        );
        assert_eq!(peaks.of("tts", None), None);
    }

    #[test]
    fn what_another_model_needed_is_forgotten_and_what_is_of_no_known_model_counts() {
        let mut peaks = Peaks::default();
        peaks.seen("asr", None, mib(300));
        peaks.seen("tts", None, mib(200));
        peaks.forget_other_models("asr", Some("vosk"));
        assert_eq!(
            peaks.of("asr", None).unwrap().bytes,
            mib(300),
            "of whichever model it was"
        );
        peaks.name_model("asr", Some("vosk"));
        peaks.forget_other_models("asr", Some("vosk"));
        assert_eq!(peaks.of("asr", None).unwrap().bytes, mib(300));
        peaks.forget_other_models("asr", Some("whisper"));
        assert_eq!(peaks.of("asr", None), None);
        assert_eq!(peaks.of("tts", None).unwrap().bytes, mib(200));
    }

    proptest! {
        #[test]
        fn what_is_learned_lies_between_what_was_seen(seen in prop::collection::vec((1u64..1 << 40, any::<bool>()), 1..40)) {
            let mut peaks = Peaks::default();
            let (mut least, mut most) = (u64::MAX, 0);
            for (bytes, whole_life) in seen {
                (least, most) = (least.min(bytes), most.max(bytes));
                if whole_life {
                    peaks.lived("w", None, Bytes::new(bytes));
                } else {
                    peaks.seen("w", None, Bytes::new(bytes));
                }
                let learned = peaks.of("w", None).map_or(0, |peak| peak.bytes.get());
                prop_assert!(learned <= most);
                let configured = Bytes::from_mib(100);
                let expected = peaks.expected("w", None, configured, Bytes::from_mib(50));
                prop_assert!(expected <= configured || learned > configured.get());
            }
        }
    }
}
