//! Reader and writer of WAV and PCM in common formats, to and from 16-bit mono.

use std::{
    io::{self, Cursor, Read as _},
    time::Duration,
};

use hound::{SampleFormat, WavReader, WavSpec, WavWriter};

use super::{
    coded_wav::{CodedFormat, coding_not_read},
    resample::{ResampleError, Resampler, from_float},
    wyoming::AudioFormat,
};

/// Sample rate of recognisers.
pub const ASR_RATE_HZ: u32 = 16_000;

/// Sample rate of OpenAI's `pcm` format, assumed by LiveKit and Pipecat.
pub const TTS_RATE_HZ: u32 = 24_000;

/// One channel of 16-bit samples.
///
/// ```
/// # use std::time::Duration;
/// # use cotenant_speech::audio::{MonoAudio, parse_wav};
/// let beep = MonoAudio::new(8_000, vec![0; 4_000]);
/// let heard = parse_wav(&beep.to_wav()?, Duration::from_secs(1))?;
/// assert_eq!(heard, beep);
/// assert_eq!(heard.resampled(16_000)?.samples.len(), 8_000);
/// # Ok::<(), cotenant_speech::audio::AudioError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MonoAudio {
    /// Samples per second.
    pub sample_rate_hz: u32,
    /// The samples.
    pub samples: Vec<i16>,
}

impl MonoAudio {
    /// Samples at this rate.
    pub const fn new(sample_rate_hz: u32, samples: Vec<i16>) -> Self {
        Self {
            sample_rate_hz,
            samples,
        }
    }

    /// Adds silence before and after. Recognisers lose a word that begins with the first sample.
    pub fn pad(&mut self, before: Duration, after: Duration) {
        let silence = |time: Duration| {
            let samples = time.as_micros() * u128::from(self.sample_rate_hz) / 1_000_000;
            vec![0; usize::try_from(samples).unwrap_or(0)]
        };
        let (front, back) = (silence(before), silence(after));
        self.samples.splice(0..0, front);
        self.samples.extend(back);
    }

    /// Playing time.
    pub fn duration(&self) -> Duration {
        duration_of(
            u64::try_from(self.samples.len()).unwrap_or(u64::MAX),
            self.sample_rate_hz,
        )
    }

    /// Converts to another rate.
    ///
    /// # Errors
    /// If either rate is outside the supported range.
    pub fn resampled(self, sample_rate_hz: u32) -> Result<Self, AudioError> {
        if sample_rate_hz == self.sample_rate_hz {
            return Ok(self);
        }
        let mut resampler = Resampler::new(self.sample_rate_hz, sample_rate_hz)?;
        let mut samples = resampler.push(&self.samples)?;
        samples.extend(resampler.finish()?);
        Ok(Self::new(sample_rate_hz, samples))
    }

    /// Encodes a WAV file.
    ///
    /// # Errors
    /// If it exceeds the 4 GiB of a WAV file, or has no rate.
    pub fn to_wav(&self) -> Result<Vec<u8>, AudioError> {
        if self.sample_rate_hz == 0 {
            return Err(AudioError::Rate { rate_hz: 0 });
        }
        let mut file = Cursor::new(Vec::with_capacity(
            WAV_HEADER_BYTES + 2 * self.samples.len(),
        ));
        let mut writer =
            WavWriter::new(&mut file, mono_spec(self.sample_rate_hz)).map_err(AudioError::Wav)?;
        {
            let bytes = u64::try_from(2 * self.samples.len()).unwrap_or(u64::MAX);
            let count = u32::try_from(bytes).map_err(|_| AudioError::TooManyBytes { bytes })? / 2;
            let mut batch = writer.get_i16_writer(count);
            for &sample in &self.samples {
                batch.write_sample(sample);
            }
            batch.flush().map_err(AudioError::Wav)?;
        }
        writer.finalize().map_err(AudioError::Wav)?;
        Ok(file.into_inner())
    }
}

/// 16-bit samples as little-endian bytes.
pub fn pcm_bytes(samples: &[i16]) -> Vec<u8> {
    samples
        .iter()
        .flat_map(|sample| sample.to_le_bytes())
        .collect()
}

/// Header of a 16-bit mono WAV file of unknown length.
///
/// Both lengths are 2^32−1, as written by `ffmpeg` to pipes; [`parse_wav`] accepts that.
pub fn wav_stream_header(sample_rate_hz: u32) -> Vec<u8> {
    let unknown = u32::MAX.to_le_bytes();
    let mut header = Vec::with_capacity(WAV_HEADER_BYTES);
    header.extend_from_slice(b"RIFF");
    header.extend_from_slice(&unknown);
    header.extend_from_slice(b"WAVEfmt ");
    header.extend_from_slice(&16u32.to_le_bytes());
    header.extend_from_slice(&1u16.to_le_bytes()); // integer PCM
    header.extend_from_slice(&1u16.to_le_bytes()); // channels
    header.extend_from_slice(&sample_rate_hz.to_le_bytes());
    header.extend_from_slice(&sample_rate_hz.saturating_mul(2).to_le_bytes()); // bytes per second
    header.extend_from_slice(&2u16.to_le_bytes()); // bytes per frame
    header.extend_from_slice(&16u16.to_le_bytes()); // bits per sample
    header.extend_from_slice(b"data");
    header.extend_from_slice(&unknown);
    header
}

/// Reads a WAV file as mono: 8, 16, 24 or 32 bits, 32 or 64 bits of floating point, A-law or mu-law, any rate and
/// number of channels.
///
/// A data length that means "unknown" (0 or nearly 2^31 or 2^32) extends to the end of the file. A file without samples
/// is silence, not an error.
///
/// # Errors
/// If it is not a WAV file, is truncated, exceeds `limit`, or has an unsupported rate.
pub fn parse_wav(file: &[u8], limit: Duration) -> Result<MonoAudio, AudioError> {
    let mut samples = Vec::new();
    let sample_rate_hz = read_wav(file, limit, |_rate_hz, block| {
        samples.extend_from_slice(block);
        Ok(())
    })?;
    Ok(MonoAudio::new(sample_rate_hz, samples))
}

/// The same in blocks, each with the rate; returns the rate. Also fails if `take` does.
pub(super) fn read_wav(
    file: &[u8],
    limit: Duration,
    take: impl FnMut(u32, &[i16]) -> Result<(), AudioError>,
) -> Result<u32, AudioError> {
    let data = chunk(file, *b"data");
    let header = match data {
        Some(data) if is_open_ended(data) => Some(with_length(file, data)),
        Some(data) if u64::from(data.declared) > data.present => {
            return Err(AudioError::Truncated {
                declared: data.declared.into(),
                present: data.present,
            });
        }
        _ => None,
    };
    let format = chunk(file, *b"fmt ").and_then(|format| file.get(format.body()..));
    if let Some(coding) = format.and_then(coding_not_read) {
        return Err(AudioError::Coding { coding });
    }
    let format = format.and_then(CodedFormat::of);
    if let (Some(format), Some(data)) = (format, data) {
        let bytes = file.get(data.body()..).unwrap_or_default();
        let declared = usize::try_from(data.declared).unwrap_or(usize::MAX);
        let bytes = if header.is_some() {
            bytes
        } else {
            bytes.get(..declared).unwrap_or(bytes)
        };
        let mut blocks = Blocks::begin(format.channels, format.rate_hz, take)?;
        within(
            bytes.len() as u64 / format.frame_bytes(),
            format.rate_hz,
            limit,
        )?;
        format
            .samples(bytes)
            .try_for_each(|sample| blocks.push(sample))?;
        return blocks.end();
    }
    let header = header.unwrap_or_default();
    let rest = file.get(header.len()..).unwrap_or_default();
    let mut reader = WavReader::new(header.as_slice().chain(rest)).map_err(AudioError::Wav)?;
    let spec = reader.spec();
    let mut blocks = Blocks::begin(spec.channels, spec.sample_rate, take)?;
    within(reader.duration().into(), spec.sample_rate, limit)?;
    match spec.sample_format {
        SampleFormat::Int => {
            let bits = u32::from(spec.bits_per_sample);
            for sample in reader.samples::<i32>() {
                blocks.push(scaled_to_16_bits(sample.map_err(AudioError::Wav)?, bits))?;
            }
        }
        SampleFormat::Float => {
            for sample in reader.samples::<f32>() {
                blocks.push(i32::from(from_float(sample.map_err(AudioError::Wav)?)))?;
            }
        }
    }
    blocks.end()
}

/// Passes samples of a file on as mono blocks.
struct Blocks<F> {
    rate_hz: u32,
    mixer: Mixer,
    take: F,
}

impl<F: FnMut(u32, &[i16]) -> Result<(), AudioError>> Blocks<F> {
    fn begin(channels: u16, rate_hz: u32, take: F) -> Result<Self, AudioError> {
        supported_rate(rate_hz)?;
        Ok(Self {
            rate_hz,
            mixer: Mixer::new(channels, WAV_BLOCK_FRAMES),
            take,
        })
    }

    /// Adds a sample, in the range of 16 bits.
    fn push(&mut self, sample: i32) -> Result<(), AudioError> {
        self.mixer.push(sample);
        if self.mixer.samples.len() < WAV_BLOCK_FRAMES {
            return Ok(());
        }
        let taken = (self.take)(self.rate_hz, &self.mixer.samples);
        self.mixer.samples.clear();
        taken
    }

    /// Passes on the last block; returns the rate.
    fn end(mut self) -> Result<u32, AudioError> {
        (self.take)(self.rate_hz, &self.mixer.samples)?;
        Ok(self.rate_hz)
    }
}

/// Converts raw little-endian PCM to mono samples, piece by piece.
///
/// Pieces may end within a sample or frame; the remainder is kept.
#[derive(Debug)]
pub struct PcmDecoder {
    format: AudioFormat,
    rest: Vec<u8>,
}

impl PcmDecoder {
    /// A decoder of this format.
    ///
    /// # Errors
    /// If the format has no channels, a width other than 1 … 4 bytes, or an unsupported rate.
    pub fn new(format: AudioFormat) -> Result<Self, AudioError> {
        supported_rate(format.rate)?;
        if format.channels == 0 || !(1..=4).contains(&format.width) {
            return Err(AudioError::Format {
                channels: format.channels,
                width: format.width,
            });
        }
        Ok(Self {
            format,
            rest: Vec::new(),
        })
    }

    /// The input format.
    pub const fn format(&self) -> AudioFormat {
        self.format
    }

    /// Returns the samples of all complete frames so far.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<i16> {
        let width = usize::from(self.format.width);
        let frame = width * usize::from(self.format.channels);
        self.rest.extend_from_slice(bytes);
        let whole = self.rest.len() / frame * frame;
        let mut mixer = Mixer::new(self.format.channels, whole / frame);
        for sample in self
            .rest
            .get(..whole)
            .unwrap_or_default()
            .chunks_exact(width)
        {
            // The bytes become the high ones of 32 bits, which preserves the sign of any width.
            let value = sample
                .iter()
                .fold(0, |value, &byte| (value >> 8) | (u32::from(byte) << 24));
            mixer.push(value.cast_signed() >> 16);
        }
        self.rest.drain(..whole);
        mixer.samples
    }
}

/// Reason why audio cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AudioError {
    /// It is not a WAV file, or one of an unsupported kind.
    #[error("not a readable WAV file")]
    Wav(#[source] hound::Error),
    /// Its samples have an unsupported coding.
    #[error("WAV coding {coding:#06x} is not supported: use PCM, floating point, A-law or µ-law")]
    Coding {
        /// Number of the coding in the file.
        coding: u16,
    },
    /// The file is truncated.
    #[error("WAV file is truncated: it declares {declared} bytes of audio and has {present}")]
    Truncated {
        /// Bytes of audio according to its header.
        declared: u64,
        /// Bytes in the file.
        present: u64,
    },
    /// It is too long.
    #[error("audio of {:.1} s is longer than the limit of {:.1} s", duration.as_secs_f64(), limit.as_secs_f64())]
    TooLong {
        /// Its duration.
        duration: Duration,
        /// The limit.
        limit: Duration,
    },
    /// It exceeds a WAV file.
    #[error("audio of {bytes} bytes does not fit the 4294967295 of a WAV file")]
    TooManyBytes {
        /// Its size.
        bytes: u64,
    },
    /// Its rate is not supported.
    #[error("sample rate of {rate_hz} Hz is outside of {RATE_MIN_HZ} to {RATE_MAX_HZ} Hz")]
    Rate {
        /// Samples per second.
        rate_hz: u32,
    },
    /// Its layout is not supported.
    #[error(
        "raw audio of {channels} channels and {width} bytes per sample is not 1 or more of 1 to 4"
    )]
    Format {
        /// Interleaved channels.
        channels: u16,
        /// Bytes per sample.
        width: u16,
    },
    /// Its rate could not be converted.
    #[error(transparent)]
    Resample(#[from] ResampleError),
    /// The file is empty.
    #[error("the file is empty")]
    Empty,
    /// Its format has no decoder.
    #[error("the file is {format}, which is not supported")]
    NotRead {
        /// Name of the format.
        format: &'static str,
    },
    /// Its format is unknown.
    #[error("the file has an unknown format, its first bytes are `{first}`")]
    UnknownFormat {
        /// First bytes, in hexadecimal.
        first: String,
    },
    /// Its headers or packets are invalid.
    #[error("the {format} file cannot be read")]
    Container {
        /// Name of the format.
        format: &'static str,
        /// Cause.
        source: symphonia::core::errors::Error,
    },
    /// It has no audio track.
    #[error("the {format} file has no audio track, or one in an unsupported coding")]
    NoTrack {
        /// Name of the format.
        format: &'static str,
    },
    /// Its audio track has an unsupported coding.
    #[error("the audio track of the {format} file has an unsupported coding")]
    TrackCoding {
        /// Name of the format.
        format: &'static str,
        /// Cause.
        source: symphonia::core::errors::Error,
    },
    /// It is too long, without a length in its header.
    #[error("audio is longer than the limit of {:.1} s", limit.as_secs_f64())]
    Longer {
        /// The limit.
        limit: Duration,
    },
    /// The file ends within a packet.
    #[error("the file is truncated")]
    CutShort,
    /// Too many packets are damaged.
    #[error("{damaged} of {packets} packets are damaged")]
    Damaged {
        /// Damaged packets.
        damaged: usize,
        /// Packets so far.
        packets: usize,
    },
    /// An Opus stream without the header that a decoder requires.
    #[error("the Opus stream has no identification header")]
    OpusHeader,
    /// Surround sound.
    #[error("Opus with more than two channels is not supported")]
    OpusChannels,
    /// The decoder cannot be created.
    #[error("cannot decode Opus")]
    Opus(#[source] opus_pure::Error),
    /// The samples could not be passed on.
    #[error("cannot pass on the samples")]
    Handed(#[source] io::Error),
}

/// Averages the channels of each frame.
pub(super) struct Mixer {
    channels: u16,
    seen: u16,
    sum: i64,
    pub(super) samples: Vec<i16>,
}

impl Mixer {
    pub(super) fn new(channels: u16, frames: usize) -> Self {
        Self {
            channels: channels.max(1),
            seen: 0,
            sum: 0,
            samples: Vec::with_capacity(frames),
        }
    }

    /// Adds a sample, in the range of 16 bits.
    pub(super) fn push(&mut self, sample: i32) {
        self.sum += i64::from(sample);
        self.seen += 1;
        if self.seen == self.channels {
            let mean = self.sum / i64::from(self.channels);
            self.samples.push(saturated(mean));
            (self.seen, self.sum) = (0, 0);
        }
    }
}

/// A chunk of a WAV file.
#[derive(Clone, Copy)]
struct Chunk {
    /// Offset of its length field.
    length_at: usize,
    /// Length in the file.
    declared: u32,
    /// Bytes from its start to the end of the file.
    present: u64,
}

impl Chunk {
    const fn body(self) -> usize {
        self.length_at + 4
    }
}

/// The first chunk of a kind; `None` if the file is too short or not RIFF, for which `hound` has the error.
fn chunk(file: &[u8], wanted: [u8; 4]) -> Option<Chunk> {
    if file.get(..4)? != b"RIFF" {
        return None;
    }
    let mut at = 12usize;
    loop {
        let kind = file.get(at..at.checked_add(4)?)?;
        let length = u32::from_le_bytes(*file.get(at + 4..)?.first_chunk()?);
        let body = at + 8;
        if kind == wanted {
            return Some(Chunk {
                length_at: at + 4,
                declared: length,
                present: u64::try_from(file.len() - body).ok()?,
            });
        }
        at = body.checked_add(usize::try_from(length).ok()?)?;
    }
}

/// Whether a length means "unknown": 0 before audio, or a value close to 2^31 or 2^32 beyond the file, as written by
/// `arecord`, `sox` and `ffmpeg` to pipes.
fn is_open_ended(data: Chunk) -> bool {
    let nearly = |power: u64| (power - (1 << 12)..=power).contains(&u64::from(data.declared));
    data.present > 0 && data.declared == 0
        || u64::from(data.declared) > data.present && (nearly(1 << 31) || nearly(1 << 32))
}

/// The file up to its samples, with the actual length in its data chunk, in whole frames.
fn with_length(file: &[u8], data: Chunk) -> Vec<u8> {
    let mut header = file.get(..data.length_at).unwrap_or_default().to_vec();
    // The frame size is the penultimate field of the format chunk, which comes first in such files.
    let frame = file
        .get(32..)
        .and_then(<[u8]>::first_chunk)
        .map_or(1, |bytes| u64::from(u16::from_le_bytes(*bytes)))
        .max(1);
    let whole = u32::try_from(data.present / frame * frame).unwrap_or(u32::MAX);
    header.extend_from_slice(&whole.to_le_bytes());
    header
}

const fn mono_spec(sample_rate: u32) -> WavSpec {
    WavSpec {
        channels: 1,
        sample_rate,
        bits_per_sample: 16,
        sample_format: SampleFormat::Int,
    }
}

pub(super) fn supported_rate(rate_hz: u32) -> Result<(), AudioError> {
    if (RATE_MIN_HZ..=RATE_MAX_HZ).contains(&rate_hz) {
        Ok(())
    } else {
        Err(AudioError::Rate { rate_hz })
    }
}

fn within(frames: u64, rate_hz: u32, limit: Duration) -> Result<(), AudioError> {
    let duration = duration_of(frames, rate_hz);
    if duration > limit {
        return Err(AudioError::TooLong { duration, limit });
    }
    Ok(())
}

fn duration_of(frames: u64, rate_hz: u32) -> Duration {
    let micros = u128::from(frames) * 1_000_000 / u128::from(rate_hz.max(1));
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}

/// Scales an integer sample of `bits` bits to 16.
fn scaled_to_16_bits(sample: i32, bits: u32) -> i32 {
    match bits {
        16 => sample,
        17.. => sample >> (bits - 16).min(31),
        _ => sample.saturating_mul(1 << (16 - bits)),
    }
}

fn saturated(sample: i64) -> i16 {
    i16::try_from(sample).unwrap_or(if sample < 0 { i16::MIN } else { i16::MAX })
}

/// Lowest supported rate: a quarter of telephone speech.
pub const RATE_MIN_HZ: u32 = 2_000;

/// Highest supported rate: that of the fastest studio converters.
pub const RATE_MAX_HZ: u32 = 384_000;

/// Frames of a WAV file per block.
const WAV_BLOCK_FRAMES: usize = 4096;

/// Length of the header written by `hound` and [`wav_stream_header`].
const WAV_HEADER_BYTES: usize = 44;

#[cfg(test)]
mod tests {
    use std::error::Error;

    use proptest::prelude::*;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn wav<S: hound::Sample + Copy>(spec: WavSpec, samples: &[S]) -> Vec<u8> {
        let mut file = Cursor::new(Vec::new());
        let mut writer = WavWriter::new(&mut file, spec).unwrap();
        for &sample in samples {
            writer.write_sample(sample).unwrap();
        }
        writer.finalize().unwrap();
        file.into_inner()
    }

    fn spec(channels: u16, bits: u16, format: SampleFormat) -> WavSpec {
        WavSpec {
            channels,
            sample_rate: 44_100,
            bits_per_sample: bits,
            sample_format: format,
        }
    }

    #[test]
    fn every_width_becomes_the_same_16_bits() {
        for (bits, full) in [(8, 1i32 << 7), (16, 1 << 15), (24, 1 << 23), (32, i32::MAX)] {
            let samples = [0, full / 2, -(full / 2), -full];
            let audio =
                parse_wav(&wav(spec(1, bits, SampleFormat::Int), &samples), MINUTE).unwrap();
            assert_eq!(audio.sample_rate_hz, 44_100);
            for (found, expected) in audio.samples.iter().zip([0, 16_384, -16_384, -32_768]) {
                assert!(
                    (i32::from(*found) - expected).abs() <= 1,
                    "{bits} bits: {:?}",
                    audio.samples
                );
            }
        }
        let floats = [0.0f32, 0.5, -0.5, -1.0, 7.0, f32::NAN, f32::NEG_INFINITY];
        let audio = parse_wav(&wav(spec(1, 32, SampleFormat::Float), &floats), MINUTE).unwrap();
        assert_eq!(
            audio.samples,
            [0, 16_384, -16_384, -32_767, 32_767, 0, -32_768]
        );
    }

    #[test]
    fn channels_are_averaged() {
        let samples: [i16; 6] = [100, 200, 300, -3, -3, 0];
        let audio = parse_wav(&wav(spec(3, 16, SampleFormat::Int), &samples), MINUTE).unwrap();
        assert_eq!(audio.samples, [200, -2]);
        let loud = parse_wav(&wav(spec(2, 16, SampleFormat::Int), &[i16::MIN; 2]), MINUTE).unwrap();
        assert_eq!(loud.samples, [i16::MIN]);
    }

    #[test]
    fn a_file_without_samples_is_silence() {
        let audio = parse_wav(&wav::<i16>(spec(2, 16, SampleFormat::Int), &[]), MINUTE).unwrap();
        assert!(audio.samples.is_empty());
        assert_eq!(audio.duration(), Duration::ZERO);
    }

    #[test]
    fn what_cannot_be_used_is_reported_apart() {
        let second = wav(spec(1, 16, SampleFormat::Int), &vec![0i16; 44_100]);
        let error = parse_wav(&second, Duration::from_millis(500)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "audio of 1.0 s is longer than the limit of 0.5 s"
        );
        let error = parse_wav(&second[..1000], MINUTE).unwrap_err();
        assert_eq!(
            error.to_string(),
            "WAV file is truncated: it declares 88200 bytes of audio and has 956"
        );
        for broken in [
            b"".as_slice(),
            b"RIFF",
            b"OggS\0\0\0\0",
            &second[..20],
            &second[..40],
        ] {
            let error = parse_wav(broken, MINUTE).unwrap_err();
            assert_eq!(error.to_string(), "not a readable WAV file");
            assert!(error.source().is_some());
        }
        let mut slow = second.clone();
        slow[24..28].copy_from_slice(&100u32.to_le_bytes());
        slow[28..32].copy_from_slice(&200u32.to_le_bytes());
        let error = parse_wav(&slow, MINUTE).unwrap_err();
        assert_eq!(
            error.to_string(),
            "sample rate of 100 Hz is outside of 2000 to 384000 Hz"
        );
    }

    #[test]
    fn a_length_that_is_not_known_means_up_to_the_end() {
        let samples = [1i16, -2, 3];
        let mut streamed = wav_stream_header(24_000);
        streamed.extend(pcm_bytes(&samples));
        // As written by ffmpeg, espeak-ng, arecord and some servers.
        for length in [u32::MAX, 0x7fff_f000, 0x8000_0000, 0] {
            streamed[40..44].copy_from_slice(&length.to_le_bytes());
            // The stream may be truncated within a sample.
            for tail in [0, 1] {
                let mut file = streamed.clone();
                file.extend(std::iter::repeat_n(9, tail));
                let audio = parse_wav(&file, MINUTE).unwrap();
                assert_eq!(
                    audio,
                    MonoAudio::new(24_000, samples.to_vec()),
                    "{length:#x}"
                );
            }
        }
        streamed.truncate(44);
        assert!(parse_wav(&streamed, MINUTE).unwrap().samples.is_empty());
    }

    #[test]
    fn raw_audio_may_be_cut_anywhere() {
        let format = |width, channels| AudioFormat {
            rate: 16_000,
            width,
            channels,
        };
        let bytes = [0x10, 0x20, 0x30, 0x40, 0x50, 0xff];
        for (width, channels, expected) in [
            (1, 1, vec![0x1000, 0x2000, 0x3000, 0x4000, 0x5000, -256]),
            (2, 1, vec![0x2010, 0x4030, -176]),
            (3, 1, vec![0x3020, -176]),
            (2, 3, vec![(0x2010 + 0x4030 - 176) / 3]),
            (4, 1, vec![0x4030]),
        ] {
            for piece in 1..=6 {
                let mut decoder = PcmDecoder::new(format(width, channels)).unwrap();
                let samples: Vec<i16> = bytes
                    .chunks(piece)
                    .flat_map(|piece| decoder.push(piece))
                    .collect();
                assert_eq!(
                    samples, expected,
                    "width {width}, {channels} channels, pieces of {piece}"
                );
            }
        }
        for (width, channels) in [(0, 1), (5, 1), (2, 0)] {
            assert!(matches!(
                PcmDecoder::new(format(width, channels)),
                Err(AudioError::Format { .. })
            ));
        }
        let rate = AudioFormat {
            rate: 0,
            ..format(2, 1)
        };
        assert!(matches!(
            PcmDecoder::new(rate),
            Err(AudioError::Rate { rate_hz: 0 })
        ));
    }

    #[test]
    fn silence_is_put_around() {
        let mut audio = MonoAudio::new(1_000, vec![7; 2]);
        audio.pad(Duration::from_millis(3), Duration::from_millis(1));
        assert_eq!(audio.samples, [0, 0, 0, 7, 7, 0]);
    }

    proptest! {
        #[test]
        fn a_file_holds_what_was_put_in(samples in proptest::collection::vec(any::<i16>(), 0..300)) {
            let audio = MonoAudio::new(22_050, samples);
            prop_assert_eq!(parse_wav(&audio.to_wav().unwrap(), MINUTE).unwrap(), audio);
        }
    }
}
