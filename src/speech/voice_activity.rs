//! Detector of speech by loudness, for turns of a conversation.
//!
//! ```text
//!             9 loud hops                early pause
//!   quiet ─────────────────► speaking ─────────────────► paused
//!     ▲                          ▲                          │ │
//!     │                          └──────────────────────────┘ │ a frame above the release level
//!     └───────────────────────────────────────────────────────┘ frames below it for the whole pause
//! ```
//! A hop is 5 ms, a quarter of a frame. It is loud if it is above a level and 10 dB above the background, which is the
//! quietest frame of the last 3 s: speech has gaps between words, a fan does not. Nine hops are 45 ms, so speech is
//! found within 50 ms of its first sample, at any alignment.

use std::{mem, time::Duration};

use super::audio::ASR_RATE_HZ;

/// Start or end of speech, in samples since the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VoiceEdge {
    /// Speech began here.
    Started(u64),
    /// Speech paused for the early pause here; it may have ended.
    Paused(u64),
    /// Speech continued here after [`Paused`](Self::Paused).
    Resumed(u64),
    /// Speech ended here, with the full pause.
    Stopped(u64),
}

/// Detects speech in mono audio, piece by piece.
///
/// ```
/// # use std::time::Duration;
/// # use cotenant_speech::voice_activity::{VoiceDetector, VoiceEdge};
/// let mut detector = VoiceDetector::new(16_000, 0.5, Duration::from_millis(200));
/// assert_eq!(detector.push(&[0; 1600]), []);
/// assert_eq!(detector.push(&[5000; 1600]), [VoiceEdge::Started(1600)]);
/// assert_eq!(detector.push(&[0; 4800]), [VoiceEdge::Stopped(6400)]);
/// ```
#[derive(Clone, Debug)]
pub struct VoiceDetector {
    /// Power above which a hop may be speech.
    level: f64,
    /// Frames below the release level that end speech.
    pause: u32,
    /// Frames below it that make an early pause; `None` detects none.
    early: Option<u32>,
    /// Samples of a hop.
    hop: u32,
    /// Energy of the unfinished hop, and of the complete hops of the unfinished frame.
    energy: (f64, f64),
    /// Samples so far.
    position: u64,
    background: Background,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Hops from the first loud one to the last, hops after that, and the greatest energy of a hop.
    Quiet {
        onset: u32,
        gap: u32,
        peak: f64,
    },
    Speaking {
        quiet: u32,
    },
}

impl VoiceDetector {
    /// A detector for this rate, in whole kHz, with a threshold from 0 (−60 dB of full scale) to 1 (−20 dB) and the
    /// pause that ends speech.
    pub fn new(rate_hz: u32, threshold: f64, pause: Duration) -> Self {
        Self {
            level: FULL_SCALE * FULL_SCALE * 10f64.powf(-6.0 + 4.0 * threshold),
            pause: frames(pause),
            early: None,
            hop: (rate_hz / 1000 * FRAME_MS / HOPS).max(1),
            energy: (0.0, 0.0),
            position: 0,
            background: Background::default(),
            state: QUIET,
        }
    }

    /// Also reports pauses of this length, if it is below the one that ends speech.
    pub fn set_early_pause(&mut self, pause: Duration) {
        self.early = Some(frames(pause)).filter(|early| *early < self.pause);
    }

    /// Whether speech is in progress.
    pub const fn is_speaking(&self) -> bool {
        matches!(self.state, State::Speaking { .. })
    }

    /// Ends speech without an event.
    pub const fn reset(&mut self) {
        self.state = QUIET;
    }

    /// Processes a piece and returns its edges, in order.
    pub fn push(&mut self, samples: &[i16]) -> Vec<VoiceEdge> {
        let mut edges = Vec::new();
        for &sample in samples {
            self.energy.0 += f64::from(sample).powi(2);
            self.position += 1;
            if self.position.is_multiple_of(self.hop.into()) {
                edges.extend(self.hop());
            }
        }
        edges
    }

    fn hop(&mut self) -> Option<VoiceEdge> {
        let energy = mem::take(&mut self.energy.0);
        self.energy.1 += energy;
        let frame = u64::from(self.hop * HOPS);
        let power = self.position.is_multiple_of(frame).then(|| {
            let power = mem::take(&mut self.energy.1) / f64::from(self.hop * HOPS);
            self.background.push(power);
            power
        });
        let gate = self.level.max(self.background.power() * ABOVE_BACKGROUND);
        match &mut self.state {
            State::Quiet { onset, gap, peak } => {
                if energy / f64::from(self.hop) > gate {
                    (*onset, *gap, *peak) = (*onset + *gap + 1, 0, peak.max(energy));
                } else if *onset > 0 && *gap < GAP {
                    *gap += 1;
                } else {
                    self.reset();
                    return None;
                }
                let fades = energy < *peak * FADED && *onset < ONSET * 2;
                if *gap > 0 || *onset < ONSET || fades {
                    return None;
                }
                let onset = u64::from(*onset * self.hop);
                self.state = State::Speaking { quiet: 0 };
                Some(VoiceEdge::Started(self.position.saturating_sub(onset)))
            }
            State::Speaking { quiet } => {
                if power? > gate * RELEASE {
                    let paused = self.early.is_some_and(|early| *quiet >= early);
                    *quiet = 0;
                    return paused.then(|| VoiceEdge::Resumed(self.position.saturating_sub(frame)));
                }
                *quiet = quiet.saturating_add(1);
                if *quiet < self.pause {
                    return (self.early == Some(*quiet))
                        .then_some(VoiceEdge::Paused(self.position));
                }
                self.reset();
                Some(VoiceEdge::Stopped(self.position))
            }
        }
    }
}

/// Complete frames of a pause, at least one.
fn frames(pause: Duration) -> u32 {
    let frames = pause.as_millis().div_ceil(u128::from(FRAME_MS));
    u32::try_from(frames).unwrap_or(u32::MAX).max(1)
}

/// The pause after which speech has probably ended, for early work.
///
/// It grows each time speech continued and shrinks each time it had ended, so that about one attempt in six is wasted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlyPause(Duration);

impl Default for EarlyPause {
    fn default() -> Self {
        Self(EARLY_MIN)
    }
}

impl EarlyPause {
    /// The pause, 150 ms to 400 ms.
    pub const fn get(self) -> Duration {
        self.0
    }

    /// Records that speech continued after this pause.
    pub fn went_on(&mut self) {
        self.0 = (self.0 + EARLY_STEP * 5).min(EARLY_MAX);
    }

    /// Records that speech had ended.
    pub fn ended(&mut self) {
        self.0 = self.0.saturating_sub(EARLY_STEP).max(EARLY_MIN);
    }
}

/// Whether audio of this length, which began `elapsed` ago, arrives in real time; faster audio is a file.
pub fn comes_as_spoken(audio: Duration, elapsed: Duration) -> bool {
    audio <= elapsed + AHEAD_MAX
}

/// How far audio may be ahead of real time. Our choice: some buffers of a microphone.
const AHEAD_MAX: Duration = Duration::from_millis(500);

/// Whether a recording contains speech: several consecutive frames are above the least level and well above the
/// quietest tenth of the recording. Silence, hum and fan noise vary less; recognisers turn them into words.
///
/// ```
/// # use cotenant_speech::voice_activity::contains_speech;
/// assert!(!contains_speech(&[0; 16_000]));
/// assert!(!contains_speech(&[5000; 16_000]));
/// assert!(contains_speech(&[[20; 8000], [5000; 8000]].concat()));
/// ```
pub fn contains_speech(samples: &[i16]) -> bool {
    let power = |frame: &[i16]| {
        frame
            .iter()
            .map(|&sample| f64::from(sample).powi(2))
            .sum::<f64>()
            / f64::from(FRAME_SAMPLES)
    };
    let frames: Vec<f64> = samples.chunks_exact(FRAME).map(power).collect();
    let mut sorted = frames.clone();
    sorted.sort_by(f64::total_cmp);
    let background = sorted.get(sorted.len() / 10).copied().unwrap_or(0.0);
    let gate = (FULL_SCALE * FULL_SCALE * LEAST_POWER).max(background * ABOVE_QUIETEST);
    frames
        .windows(WORD)
        .any(|frames| frames.iter().all(|&power| power > gate))
}

/// The quietest frame of the last seconds.
#[derive(Clone, Debug)]
struct Background {
    /// The minimum of each half second, oldest first, the last one incomplete.
    least: [f64; BUCKETS],
    frames: u32,
}

impl Default for Background {
    fn default() -> Self {
        // unknown until the first seconds have passed
        Self {
            least: [0.0; BUCKETS],
            frames: 0,
        }
    }
}

impl Background {
    fn push(&mut self, power: f64) {
        if self.frames.is_multiple_of(BUCKET_FRAMES) {
            self.least.rotate_left(1);
            if let Some(last) = self.least.last_mut() {
                *last = power;
            }
        }
        self.frames = self.frames.wrapping_add(1);
        if let Some(last) = self.least.last_mut() {
            *last = last.min(power);
        }
    }

    fn power(&self) -> f64 {
        self.least.iter().copied().fold(f64::INFINITY, f64::min)
    }
}

/// Our choice, a usual value: long enough for a period of any voice.
const FRAME_MS: u32 = 20;
/// A frame at [`ASR_RATE_HZ`].
const FRAME_SAMPLES: u32 = ASR_RATE_HZ / 1000 * FRAME_MS;
const FRAME: usize = FRAME_SAMPLES as usize;
/// Hops of a frame.
const HOPS: u32 = 4;
/// Hops that start speech. Our choice: 45 ms, longer than a click.
const ONSET: u32 = 9;
/// Hops among them that may be quiet, between two pulses of a low voice.
const GAP: u32 = 2;
/// 15 dB below the loudest hop. Our choice: a knock fades by this much within 45 ms, a voice not within twice that
/// time.
const FADED: f64 = 0.03;
const QUIET: State = State::Quiet {
    onset: 0,
    gap: 0,
    peak: 0.0,
};
/// Loud frames that make a word of a recording. Our choice.
const WORD: usize = 3;
/// 10 dB above the background. Our choice.
const ABOVE_BACKGROUND: f64 = 10.0;
/// 6 dB below the gate, because voices fade at the end of a word. Our choice.
const RELEASE: f64 = 0.25;
/// 6 dB above the quietest tenth of a recording. Our choice: half of the margin that starts a turn, because a wrong
/// decision here discards the recording.
const ABOVE_QUIETEST: f64 = 4.0;
/// −60 dB of full scale, the minimum of the detector's threshold.
const LEAST_POWER: f64 = 1e-6;
/// Our choice: plosives and gaps between words are shorter, and clients end a turn after 500 ms or more.
const EARLY_MIN: Duration = Duration::from_millis(150);
const EARLY_MAX: Duration = Duration::from_millis(400);
const EARLY_STEP: Duration = Duration::from_millis(10);
const FULL_SCALE: f64 = 32_768.0;
/// Half a second each, 3 s in total. Our choice: few people speak this long without a gap.
const BUCKETS: usize = 6;
const BUCKET_FRAMES: u32 = 500 / FRAME_MS;

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_millis(300);

    fn noise(level: i16, millis: usize) -> Vec<i16> {
        let mut state = 1u32;
        (0..millis * 16)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let unit = f64::from(state >> 16) / 32_768.0 - 1.0;
                #[expect(clippy::cast_possible_truncation, reason = "within its range")]
                let sample = (unit * f64::from(level)) as i16;
                sample
            })
            .collect()
    }

    #[test]
    fn silence_hum_and_noise_are_no_speech_and_words_between_them_are() {
        let hum = |millis: usize| -> Vec<i16> {
            let wave = |at: usize| {
                (f64::from(u32::try_from(at).unwrap()) / 16_000.0 * 50.0 * std::f64::consts::TAU)
                    .sin()
            };
            #[expect(clippy::cast_possible_truncation, reason = "within its range")]
            let sample = |at: usize| (wave(at) * 3000.0) as i16;
            (0..millis * 16).map(sample).collect()
        };
        for quiet in [
            Vec::new(),
            noise(0, 3000),
            noise(20, 3000),
            noise(3000, 3000),
            hum(5000),
            noise(9000, 40),
        ] {
            assert!(!contains_speech(&quiet));
        }
        for background in [noise(0, 1000), noise(300, 1000), hum(1000)] {
            let word: Vec<i16> = noise(9000, 300)
                .iter()
                .zip(&background)
                .map(|(a, b)| a.saturating_add(*b))
                .collect();
            assert!(contains_speech(
                &[background.clone(), word, background].concat()
            ));
        }
    }

    #[test]
    fn a_whisper_below_the_threshold_is_no_speech() {
        let mut detector = VoiceDetector::new(ASR_RATE_HZ, 0.5, PAUSE);
        assert_eq!(detector.push(&noise(400, 1000)), []);
        let mut sensitive = VoiceDetector::new(ASR_RATE_HZ, 0.2, PAUSE);
        assert_eq!(sensitive.push(&noise(400, 100)).len(), 1);
    }

    /// Pulses of a voice that ring for some milliseconds.
    fn vowel(rate_hz: u32, pitch_hz: f64, samples: u32) -> Vec<i16> {
        let sample = |at: u32| {
            let time = f64::from(at) / f64::from(rate_hz);
            let since = time - (time * pitch_hz).floor() / pitch_hz;
            let wave = (since * 600.0 * std::f64::consts::TAU).cos();
            #[expect(clippy::cast_possible_truncation, reason = "within its range")]
            let sample = (9000.0 * wave * (-since * 250.0).exp()) as i16;
            sample
        };
        (0..samples).map(sample).collect()
    }

    #[test]
    fn speech_is_found_within_50_ms_of_its_first_sample() {
        for rate in [ASR_RATE_HZ, 24_000] {
            let millisecond = rate as usize / 1000;
            let voices = [70.0, 85.0, 110.0, 200.0, 300.0].map(|hz| vowel(rate, hz, rate / 10));
            for voice in voices.into_iter().chain([noise(2000, 150)]) {
                for before in (300 * millisecond..320 * millisecond).step_by(7) {
                    let mut detector = VoiceDetector::new(rate, 0.5, PAUSE);
                    assert_eq!(detector.push(&vec![0; before]), []);
                    let edges = detector.push(&voice[..50 * millisecond]);
                    let [VoiceEdge::Started(at)] = edges[..] else {
                        panic!("{edges:?} at {rate} Hz, {before} samples before it");
                    };
                    let off = at.abs_diff(before.try_into().unwrap());
                    assert!(off <= 5 * millisecond as u64, "{at}, not {before}");
                }
            }
        }
    }

    #[test]
    fn clicks_knocks_keys_and_fans_are_no_speech() {
        let click = |level: i16, fade_ms: f64| -> Vec<i16> {
            let fade = |(at, &sample): (u32, &i16)| {
                let faded = f64::from(sample) * (-f64::from(at) / 16.0 / fade_ms).exp();
                #[expect(clippy::cast_possible_truncation, reason = "within its range")]
                let faded = faded as i16;
                faded
            };
            (0..).zip(&noise(level, 100)).map(fade).collect()
        };
        let keys = |level: i16| {
            [click(level, 4.0), click(level / 2, 3.0)]
                .concat()
                .repeat(20)
        };
        let modulated: Vec<i16> = (0..)
            .zip(&noise(1500, 3000))
            .map(|(at, &sample)| {
                let beat = (f64::from(at) / 16_000.0 * 10.0 * std::f64::consts::TAU).sin();
                #[expect(clippy::cast_possible_truncation, reason = "within its range")]
                let sample = (f64::from(sample) * (1.0 + 0.6 * beat)) as i16;
                sample
            })
            .collect();
        // 3 s of background, then the sound
        for (what, background, sound) in [
            ("click", noise(20, 3000), noise(20_000, 35)),
            ("knock", noise(20, 3000), click(20_000, 15.0)),
            ("soft keys", noise(20, 3000), keys(6000)),
            ("loud keys", noise(20, 3000), keys(20_000)),
            ("fan", noise(1500, 6000), noise(1500, 9000)),
            ("beating fan", noise(1500, 6000), modulated),
        ] {
            for offset in (0..320).step_by(9) {
                let mut detector = VoiceDetector::new(ASR_RATE_HZ, 0.5, PAUSE);
                detector.push(&vec![0; offset]);
                detector.push(&background);
                assert!(!detector.is_speaking(), "{what}");
                let edges = detector.push(&[&sound[..], &background].concat());
                assert_eq!(edges, [], "{what}, {offset} samples later");
            }
        }
    }

    #[test]
    fn a_gap_within_a_word_ends_nothing_and_a_pause_does() {
        let mut detector = VoiceDetector::new(ASR_RATE_HZ, 0.5, PAUSE);
        let mut edges = Vec::new();
        for (level, millis) in [(0, 100), (5000, 400), (0, 200), (5000, 400), (0, 400)] {
            edges.extend(detector.push(&noise(level, millis)));
        }
        assert_eq!(
            edges,
            [VoiceEdge::Started(1600), VoiceEdge::Stopped(1400 * 16)]
        );
        assert!(!detector.is_speaking());
    }

    #[test]
    fn an_early_pause_is_reported_and_the_next_sound_takes_it_back() {
        let early = Duration::from_millis(150);
        let mut detector = VoiceDetector::new(ASR_RATE_HZ, 0.5, PAUSE);
        detector.set_early_pause(early);
        let mut edges = Vec::new();
        for (level, millis) in [(0, 100), (5000, 400), (0, 200), (5000, 400), (0, 400)] {
            edges.extend(detector.push(&noise(level, millis)));
        }
        assert_eq!(
            edges,
            [
                VoiceEdge::Started(1600),
                VoiceEdge::Paused(660 * 16),
                VoiceEdge::Resumed(700 * 16),
                VoiceEdge::Paused(1260 * 16),
                VoiceEdge::Stopped(1400 * 16),
            ]
        );
        let mut late = VoiceDetector::new(ASR_RATE_HZ, 0.5, PAUSE);
        late.set_early_pause(PAUSE);
        let speech = [noise(5000, 400), noise(0, 400)].concat();
        assert_eq!(late.push(&speech).len(), 2);
    }

    #[test]
    fn the_wait_follows_how_often_speech_went_on() {
        let mut wait = EarlyPause::default();
        assert_eq!(wait.get(), Duration::from_millis(150));
        for _ in 0..20 {
            wait.went_on();
        }
        assert_eq!(wait.get(), Duration::from_millis(400));
        for _ in 0..5 {
            wait.ended();
        }
        assert_eq!(wait.get(), Duration::from_millis(350));
    }

    #[test]
    fn a_noise_that_stays_becomes_the_background_and_a_voice_above_it_is_heard() {
        let mut detector = VoiceDetector::new(ASR_RATE_HZ, 0.5, PAUSE);
        let edges = detector.push(&noise(1500, 6000));
        assert!(
            matches!(edges[..], [VoiceEdge::Started(0), VoiceEdge::Stopped(end)] if end < 4000 * 16),
            "{edges:?}"
        );
        assert_eq!(detector.push(&noise(12_000, 500)).len(), 1);
        assert_eq!(detector.push(&noise(1500, 500)).len(), 1);
    }

    #[test]
    fn edges_do_not_depend_on_the_pieces() {
        let audio: Vec<i16> = [(0, 300), (6000, 700), (0, 500), (6000, 300), (0, 500)]
            .into_iter()
            .flat_map(|(level, millis)| noise(level, millis))
            .collect();
        let whole = VoiceDetector::new(ASR_RATE_HZ, 0.5, PAUSE).push(&audio);
        assert_eq!(whole.len(), 4);
        for size in [1, 319, 321, 4096] {
            let mut detector = VoiceDetector::new(ASR_RATE_HZ, 0.5, PAUSE);
            let edges: Vec<_> = audio
                .chunks(size)
                .flat_map(|piece| detector.push(piece))
                .collect();
            assert_eq!(edges, whole, "{size}");
        }
    }
}
