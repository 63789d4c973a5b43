//! Highest measured use of each holder.
//!
//! The need of a worker by its file is a guess; its measured use is not. A peak that is higher than the known one takes
//! its place at once. A lower one has to be seen in several lives, and then counts for a quarter each time, since a
//! peak that did not happen today may happen tomorrow.

use serde::{Deserialize, Serialize};

use cotenant_units::Bytes;

/// The highest measured use of one holder, in one variant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedPeak {
    /// Its name: `asr`, or `llm`.
    pub holder: String,
    /// The variant, or the model; nothing for a worker of one size.
    pub variant: Option<String>,
    /// The most that it used.
    pub bytes: Bytes,
    /// Lives in which it was seen to come up.
    pub lives: u32,
    /// The most that it used until it was measured at rest after a start; `None` before the first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<Bytes>,
    /// What it ran then, as a name; `None` where that is not known, and then it counts whatever it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

impl LearnedPeak {
    /// What a start reserves by it.
    #[must_use]
    pub fn with_margin(&self) -> Bytes {
        with_margin(self.bytes)
    }

    /// The least that a start needs: what requests take comes later, when other holders can give it.
    #[must_use]
    pub fn start_with_margin(&self) -> Option<Bytes> {
        self.start.map(with_margin)
    }
}

fn with_margin(bytes: Bytes) -> Bytes {
    bytes.saturating_add(bytes.per_mille(MARGIN_PER_MILLE))
}

/// The known peak after another one was `seen`: a lower one counts for a quarter.
fn eased(known: Bytes, seen: Bytes) -> Bytes {
    let less = known.saturating_sub(seen);
    seen.max(known.saturating_sub(Bytes::new(less.get() / 4)))
}

/// All peaks that were learned, by holder and variant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Peaks(Vec<LearnedPeak>);

impl Peaks {
    /// The peaks, in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = &LearnedPeak> {
        self.0.iter()
    }

    /// The learned peak of a holder.
    #[must_use]
    pub fn of(&self, holder: &str, variant: Option<&str>) -> Option<&LearnedPeak> {
        let place = self.place(holder, variant).ok()?;
        self.0.get(place)
    }

    /// Takes what a holder uses, or has used at most in this life. Returns whether more was learned than is worth
    /// forgetting.
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

    /// A life has come up with this peak. Returns whether anything was learned by it.
    pub fn lived(&mut self, holder: &str, variant: Option<&str>, bytes: Bytes) -> bool {
        let Some(peak) = self.entry(holder, variant) else {
            return false;
        };
        peak.lives = peak.lives.saturating_add(1);
        peak.start = Some(eased(peak.start.unwrap_or(bytes), bytes));
        peak.bytes = eased(peak.bytes, bytes);
        true
    }

    /// Forgets what was learned of a holder when it ran something else.
    pub fn forget_other_models(&mut self, holder: &str, model: Option<&str>) {
        let other = |peak: &LearnedPeak| {
            peak.model
                .as_deref()
                .zip(model)
                .is_some_and(|(then, now)| then != now)
        };
        self.0.retain(|peak| peak.holder != holder || !other(peak));
    }

    /// Says what a holder runs of which all this was learned.
    pub fn name_model(&mut self, holder: &str, model: Option<&str>) {
        for peak in self.0.iter_mut().filter(|peak| peak.holder == holder) {
            if peak.model.as_deref() != model {
                peak.model = model.map(str::to_owned);
            }
        }
    }

    /// Memory that has to be free before a holder is started that needs `configured` at most and `steady` at rest by
    /// its file.
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
    /// The first of several of the same name counts; beyond the bound they are left out.
    fn from_iter<I: IntoIterator<Item = LearnedPeak>>(peaks: I) -> Self {
        let mut all: Vec<LearnedPeak> = peaks.into_iter().take(PEAKS_MAX).collect();
        all.sort_by(|one, other| (&one.holder, &one.variant).cmp(&(&other.holder, &other.variant)));
        all.dedup_by(|later, first| {
            (&later.holder, &later.variant) == (&first.holder, &first.variant)
        });
        Self(all)
    }
}

/// A start needs 1.1 times the learned peak: what a supervisor of such a board asks for.
const MARGIN_PER_MILLE: u32 = 100;
/// Fewer lives say nothing about what does not happen. Our choice.
const LIVES_LEAST: u32 = 3;
/// A difference within 2 % or 1 MiB is the same peak: whole pages and shared libraries.
const WORTH_PER_MILLE: u32 = 20;
const WORTH: Bytes = Bytes::from_mib(1);
/// Workers, their variants and models of one supervisor; far more than 64 workers with their variants.
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
