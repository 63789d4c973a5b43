//! Audio input of a client, and its turns.

use std::{
    mem,
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use tokio::sync::OwnedSemaphorePermit;

use super::{
    super::{
        api::Api,
        fault::{Fault, invalid},
    },
    settings::Turns,
};
use cotenant_speech::{
    audio::{ASR_RATE_HZ, TTS_RATE_HZ},
    resample::{ResampleError, Resampler},
    voice_activity::{EarlyPause, VoiceDetector, VoiceEdge, comes_as_spoken},
};

/// One utterance of a user, 16 kHz mono, with the permit for its memory.
pub(super) struct Utterance {
    pub(super) samples: Vec<i16>,
    pub(super) memory: Option<OwnedSemaphorePermit>,
}

impl Utterance {
    pub(super) fn duration(&self) -> Duration {
        Duration::from_millis(millis(count(&self.samples)))
    }
}

/// Turn boundary found in a piece of audio.
pub(super) enum Turn {
    /// The user has begun to speak; milliseconds since the first audio.
    Started { at_ms: u64 },
    /// The user pauses, and has probably finished.
    Paused,
    /// The user continued after a pause.
    Resumed,
    /// The user has finished.
    Stopped { at_ms: u64, said: Utterance },
}

/// The input audio buffer.
pub(super) struct Input {
    api: Api,
    resampler: Option<Resampler>,
    samples: Vec<i16>,
    /// Position of the first sample, counted from the first of the session.
    start: u64,
    memory: Option<OwnedSemaphorePermit>,
    detector: Option<VoiceDetector>,
    /// Samples before the detector was started.
    detector_start: u64,
    prefix: u64,
    /// Time of the first audio.
    began: Option<Instant>,
}

impl Input {
    pub(super) fn new(api: Api) -> Self {
        Self {
            api,
            resampler: None,
            samples: Vec::new(),
            start: 0,
            memory: None,
            detector: None,
            detector_start: 0,
            prefix: 0,
            began: None,
        }
    }

    /// Detects turns by `turns` from now on, or none, and pauses of the length `early` in them.
    pub(super) fn detect(&mut self, turns: Option<&Turns>, early: EarlyPause) {
        self.detector =
            turns.map(|turns| VoiceDetector::new(TTS_RATE_HZ, turns.threshold, turns.silence));
        self.set_early_pause(early);
        self.detector_start = self.end() + self.behind();
        self.prefix = turns.map_or(0, |turns| samples_in(turns.prefix));
    }

    pub(super) fn set_early_pause(&mut self, early: EarlyPause) {
        if let Some(detector) = &mut self.detector {
            detector.set_early_pause(early.get());
        }
    }

    /// A copy of the buffer, if audio arrives in real time and memory is available.
    pub(super) fn copied(&self) -> Option<Utterance> {
        let spoken = Duration::from_millis(millis(self.end()));
        if !comes_as_spoken(spoken, self.began?.elapsed()) {
            return None;
        }
        let kib = u32::try_from(kib_of(self.samples.len())).ok()?;
        Some(Utterance {
            samples: self.samples.clone(),
            memory: Some(self.api.audio_memory(kib).ok()?),
        })
    }

    /// Adds a piece: base64 of 16-bit samples at [`TTS_RATE_HZ`].
    ///
    /// # Errors
    /// If it is malformed or exceeds the memory. With turn detection the audio so far then becomes a turn.
    pub(super) fn append(&mut self, audio: &str, turns: &mut Vec<Turn>) -> Result<(), Fault> {
        let wrong = |problem: String| {
            Fault::invalid("audio", format!("{} characters", audio.len()), problem)
        };
        let bytes = BASE64
            .decode(audio)
            .map_err(|error| wrong(format!("is not base64: {error}")))?;
        let (pairs, odd) = bytes.as_chunks::<2>();
        if !odd.is_empty() {
            return Err(wrong("is not a whole number of 16-bit samples".to_owned()));
        }
        let piece: Vec<i16> = pairs.iter().map(|&pair| i16::from_le_bytes(pair)).collect();
        if let Err(fault) = self.make_room(at_asr_rate(count(&piece))) {
            let at_ms = millis(self.end());
            let speaking = self.detector.as_mut().is_some_and(|detector| {
                let speaking = detector.is_speaking();
                detector.reset();
                speaking
            });
            if speaking {
                let said = self.take(self.samples.len());
                turns.push(Turn::Stopped { at_ms, said });
            }
            return Err(fault);
        }
        self.began.get_or_insert_with(Instant::now);
        let samples = self.resampled(&piece).map_err(|error| unusable(&error))?;
        self.samples.extend(samples);
        // detection uses the samples before the resampler, which would delay it
        if let Some(detector) = &mut self.detector {
            let edges = detector.push(&piece);
            for &edge in &edges {
                self.turn(edge, turns);
            }
            if let Some(VoiceEdge::Paused(_)) = edges.last() {
                turns.push(Turn::Paused);
            }
        }
        if self
            .detector
            .as_ref()
            .is_some_and(|detector| !detector.is_speaking())
        {
            // keep only samples that may belong to the next turn
            let kept = self.prefix + ONSET_SAMPLES;
            self.forget_before(self.end().saturating_sub(kept));
        }
        Ok(())
    }

    /// Takes the content of the buffer; an error, with the buffer unchanged, if it is too short.
    pub(super) fn commit(&mut self) -> Result<Utterance, Fault> {
        let waits_for_a_turn = self
            .detector
            .as_ref()
            .is_some_and(|detector| !detector.is_speaking());
        let held = if waits_for_a_turn {
            0
        } else {
            count(&self.samples)
        };
        if held < samples_in(COMMIT_MIN) {
            return Err(Fault::bad_request(
                "input_audio_buffer_commit_empty",
                format!(
                    "cannot commit the input audio buffer: it has {} ms of audio, the minimum is {} ms",
                    millis(held),
                    COMMIT_MIN.as_millis()
                ),
            ));
        }
        if let Some(detector) = &mut self.detector {
            detector.reset();
        } else if let Some(rest) = self
            .resampler
            .take()
            .and_then(|resampler| resampler.finish().ok())
        {
            // the filter's delay: a few milliseconds, covered by the reserved memory
            self.samples.extend(rest);
        }
        Ok(self.take(self.samples.len()))
    }

    pub(super) fn clear(&mut self) {
        if let Some(detector) = &mut self.detector {
            detector.reset();
        }
        let _forgotten = self.take(self.samples.len());
    }

    fn resampled(&mut self, piece: &[i16]) -> Result<Vec<i16>, ResampleError> {
        let resampler = match &mut self.resampler {
            Some(resampler) => resampler,
            none => none.insert(Resampler::new(TTS_RATE_HZ, ASR_RATE_HZ)?),
        };
        resampler.push(piece)
    }

    fn turn(&mut self, edge: VoiceEdge, turns: &mut Vec<Turn>) {
        match edge {
            VoiceEdge::Started(at) => {
                let from = (self.detector_start + at_asr_rate(at))
                    .saturating_sub(self.prefix)
                    .max(self.start);
                self.forget_before(from);
                turns.push(Turn::Started {
                    at_ms: millis(from),
                });
            }
            VoiceEdge::Paused(_) => {}
            VoiceEdge::Resumed(_) => turns.push(Turn::Resumed),
            VoiceEdge::Stopped(at) => {
                let at = self.detector_start + at_asr_rate(at);
                let said =
                    self.take(usize::try_from(at.saturating_sub(self.start)).unwrap_or(usize::MAX));
                turns.push(Turn::Stopped {
                    at_ms: millis(at),
                    said,
                });
            }
        }
    }

    /// Samples delayed by the resampler, up to 65 ms.
    fn behind(&self) -> u64 {
        self.resampler.as_ref().map_or(0, Resampler::behind)
    }

    fn end(&self) -> u64 {
        self.start + count(&self.samples)
    }

    fn forget_before(&mut self, position: u64) {
        let first = usize::try_from(position.saturating_sub(self.start)).unwrap_or(usize::MAX);
        let _forgotten = self.take(first);
    }

    /// Removes the first samples from the buffer, with their share of the memory.
    fn take(&mut self, samples: usize) -> Utterance {
        let samples = samples.min(self.samples.len());
        let rest = self.samples.split_off(samples);
        let taken = mem::replace(&mut self.samples, rest);
        self.start += count(&taken);
        let kept = kib_of(self.samples.len());
        let excess = self
            .memory
            .as_ref()
            .map_or(0, |memory| memory.num_permits().saturating_sub(kept));
        Utterance {
            memory: self.memory.as_mut().and_then(|memory| memory.split(excess)),
            samples: taken,
        }
    }

    fn make_room(&mut self, more: u64) -> Result<(), Fault> {
        let limit = self.api.limits().audio_duration_max;
        let wanted = count(&self.samples) + self.behind() + more;
        if millis(wanted) > u64::try_from(limit.as_millis()).unwrap_or(u64::MAX) {
            return invalid(
                "audio",
                "the input audio buffer",
                format!(
                    "is at its limit of {} s: commit or clear it",
                    limit.as_secs()
                ),
            );
        }
        let held = self
            .memory
            .as_ref()
            .map_or(0, OwnedSemaphorePermit::num_permits);
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
        let missing = kib_of(wanted).saturating_sub(held);
        let more = self
            .api
            .audio_memory(u32::try_from(missing).unwrap_or(u32::MAX))
            .map_err(Fault::from)?;
        match &mut self.memory {
            Some(memory) => memory.merge(more),
            none => *none = Some(more),
        }
        Ok(())
    }
}

fn unusable(error: &ResampleError) -> Fault {
    Fault::invalid("audio", "", format!("cannot be used: {error}"))
}

fn count(samples: &[i16]) -> u64 {
    u64::try_from(samples.len()).unwrap_or(u64::MAX)
}

/// Input samples converted to stored samples.
const fn at_asr_rate(samples: u64) -> u64 {
    (samples * ASR_RATE_HZ as u64).div_ceil(TTS_RATE_HZ as u64)
}

const fn millis(samples: u64) -> u64 {
    samples.saturating_mul(1000) / ASR_RATE_HZ as u64
}

fn samples_in(time: Duration) -> u64 {
    u64::try_from(time.as_millis())
        .unwrap_or(u64::MAX)
        .saturating_mul(ASR_RATE_HZ.into())
        / 1000
}

/// KiB of memory for this number of samples, including those held by the resampler.
const fn kib_of(samples: usize) -> usize {
    (samples * 2).div_ceil(1024) + 1
}

/// OpenAI's limit.
const COMMIT_MIN: Duration = Duration::from_millis(100);
/// Samples in which the detector may still find speech: 100 ms.
const ONSET_SAMPLES: u64 = 1600;
