//! Streaming encoders of speech: FLAC, MP3, and Opus in Ogg.

use flacenc::{
    bitsink::ByteSink,
    component::{BitRepr, Stream, StreamInfo},
    config,
    error::{Verified, Verify as _},
    source::{Fill as _, FrameBuf},
};
use opus_pure::{Application, MAX_PACKET_BYTES, OggOpusWriter, OpusEncoder, OpusHead};
use rusty_mp3::{Mp3Encode, encoder_header, header::FrameHeader};

/// Encodings of speech.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// FLAC, lossless; about half of PCM.
    Flac,
    /// MP3, 64 kbit/s; a sixth of PCM at 24 kHz.
    Mp3,
    /// Opus in Ogg, 32 kbit/s; a twelfth of PCM.
    Opus,
}

/// Encodes one 16-bit mono stream.
pub struct Encoder(Inner);

enum Inner {
    Flac(Box<Flac>),
    Mp3(Box<Mp3>),
    Opus(Box<Opus>),
}

impl Encoder {
    /// An encoder for this rate, and the first bytes of the file.
    ///
    /// # Errors
    /// If the encoding lacks this rate.
    pub fn new(encoding: Encoding, rate_hz: u32) -> Result<(Self, Vec<u8>), EncodeError> {
        Ok(match encoding {
            Encoding::Flac => {
                let (flac, begin) = Flac::new(rate_hz)?;
                (Self(Inner::Flac(Box::new(flac))), begin)
            }
            Encoding::Mp3 => (Self(Inner::Mp3(Box::new(Mp3::new(rate_hz)?))), Vec::new()),
            Encoding::Opus => {
                let (opus, begin) = Opus::new(rate_hz)?;
                (Self(Inner::Opus(Box::new(opus))), begin)
            }
        })
    }

    /// Encodes samples; returns the available bytes.
    ///
    /// # Errors
    /// If the encoder fails, which valid samples exclude.
    pub fn push(&mut self, samples: &[i16]) -> Result<Vec<u8>, EncodeError> {
        match &mut self.0 {
            Inner::Flac(flac) => flac.push(samples),
            Inner::Mp3(mp3) => mp3.push(samples),
            Inner::Opus(opus) => opus.push(samples),
        }
    }

    /// Returns the last bytes of the file; errors as for [`push`](Self::push).
    pub fn finish(self) -> Result<Vec<u8>, EncodeError> {
        match self.0 {
            Inner::Flac(mut flac) => flac.finish(),
            Inner::Mp3(mut mp3) => mp3.finish(),
            Inner::Opus(opus) => opus.finish(),
        }
    }
}

/// Reason why speech cannot be encoded.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The FLAC encoder's message.
    #[error("cannot encode FLAC: {0}")]
    Flac(String),
    /// The MP3 encoder.
    #[error("cannot encode MP3")]
    Mp3(#[from] rusty_mp3::Error),
    /// The Opus encoder.
    #[error("cannot encode Opus")]
    Opus(#[from] opus_pure::Error),
}

fn flac_error(error: impl std::fmt::Display) -> EncodeError {
    EncodeError::Flac(error.to_string())
}

struct Flac {
    config: Verified<config::Encoder>,
    info: StreamInfo,
    frames: usize,
    pending: Vec<i32>,
}

impl Flac {
    fn new(rate_hz: u32) -> Result<(Self, Vec<u8>), EncodeError> {
        let config = config::Encoder::default()
            .into_verified()
            .map_err(|(_, error)| flac_error(error))?;
        let rate = usize::try_from(rate_hz).map_err(flac_error)?;
        let mut info = StreamInfo::new(rate, 1, 16).map_err(flac_error)?;
        info.set_block_sizes(FLAC_BLOCK, FLAC_BLOCK)
            .map_err(flac_error)?;
        // Neither frame sizes nor the length are known yet.
        info.set_frame_sizes(0, 0).map_err(flac_error)?;
        let begin = bytes_of(&Stream::with_stream_info(info.clone()))?;
        let flac = Self {
            config,
            info,
            frames: 0,
            pending: Vec::new(),
        };
        Ok((flac, begin))
    }

    fn push(&mut self, samples: &[i16]) -> Result<Vec<u8>, EncodeError> {
        self.pending
            .extend(samples.iter().map(|&sample| i32::from(sample)));
        let mut encoded = Vec::new();
        while self.pending.len() >= FLAC_BLOCK {
            let rest = self.pending.split_off(FLAC_BLOCK);
            let block = std::mem::replace(&mut self.pending, rest);
            encoded.extend(self.frame(&block)?);
        }
        Ok(encoded)
    }

    fn frame(&mut self, block: &[i32]) -> Result<Vec<u8>, EncodeError> {
        let mut buffer = FrameBuf::with_size(1, block.len()).map_err(flac_error)?;
        buffer.fill_interleaved(block).map_err(flac_error)?;
        let frame =
            flacenc::encode_fixed_size_frame(&self.config, &buffer, self.frames, &self.info)
                .map_err(flac_error)?;
        self.frames += 1;
        bytes_of(&frame)
    }

    fn finish(&mut self) -> Result<Vec<u8>, EncodeError> {
        let mut block = std::mem::take(&mut self.pending);
        if block.is_empty() {
            return Ok(Vec::new());
        }
        // The encoder accepts no shorter block; the padding is a millisecond of silence.
        block.resize(block.len().max(FLAC_BLOCK_MIN), 0);
        self.frame(&block)
    }
}

fn bytes_of(part: &impl BitRepr) -> Result<Vec<u8>, EncodeError> {
    let mut sink = ByteSink::new();
    part.write(&mut sink).map_err(flac_error)?;
    Ok(sink.into_inner())
}

/// Independent frames at a constant rate. No frame states the length, which is unknown.
struct Mp3 {
    encoder: Mp3Encode,
    header: FrameHeader,
    frame: usize,
    pending: Vec<f32>,
}

impl Mp3 {
    fn new(rate_hz: u32) -> Result<Self, EncodeError> {
        let header = encoder_header(rate_hz, 1, MP3_KBITS_PER_SECOND)?;
        let frame = header.version.samples_per_frame();
        Ok(Self {
            encoder: Mp3Encode::new(),
            header,
            frame,
            pending: Vec::new(),
        })
    }

    fn push(&mut self, samples: &[i16]) -> Result<Vec<u8>, EncodeError> {
        self.pending
            .extend(samples.iter().map(|&sample| f32::from(sample) / 32768.0));
        let whole = self.pending.len() / self.frame * self.frame;
        let frames: Vec<f32> = self.pending.drain(..whole).collect();
        let mut encoded = Vec::new();
        for frame in frames.chunks(self.frame) {
            encoded.extend(self.encoder.encode_frame(&self.header, &[frame], None)?);
        }
        Ok(encoded)
    }

    /// Flushes encoder and decoder.
    fn finish(&mut self) -> Result<Vec<u8>, EncodeError> {
        let padded = (self.pending.len() + MP3_HELD).div_ceil(self.frame) * self.frame;
        self.pending.resize(padded, 0.0);
        self.push(&[])
    }
}

struct Opus {
    encoder: OpusEncoder,
    writer: OggOpusWriter<Vec<u8>>,
    pre_skip: u64,
    /// Samples per packet, and 48 kHz samples per input sample.
    frame: usize,
    ticks: u64,
    taken: u64,
    pending: Vec<i16>,
    packet: Vec<u8>,
}

impl Opus {
    fn new(rate_hz: u32) -> Result<(Self, Vec<u8>), EncodeError> {
        let mut encoder = OpusEncoder::new(rate_hz.cast_signed(), 1, Application::Voip)?;
        encoder.bitrate_bps = OPUS_BITS_PER_SECOND;
        encoder.complexity = OPUS_COMPLEXITY;
        let head = OpusHead::for_encoder(&encoder, rate_hz);
        let pre_skip = head.pre_skip.into();
        let mut writer = OggOpusWriter::new(Vec::new(), head)?;
        writer.set_page_target(OGG_PAGE_TARGET);
        let begin = writer.get_mut().map(std::mem::take).unwrap_or_default();
        let opus = Self {
            encoder,
            writer,
            pre_skip,
            frame: usize::try_from(rate_hz / PACKETS_PER_SECOND).unwrap_or(0),
            ticks: u64::from(OPUS_RATE_HZ / rate_hz),
            taken: 0,
            pending: Vec::new(),
            packet: vec![0; MAX_PACKET_BYTES],
        };
        Ok((opus, begin))
    }

    fn push(&mut self, samples: &[i16]) -> Result<Vec<u8>, EncodeError> {
        self.taken += u64::try_from(samples.len()).unwrap_or(u64::MAX);
        self.pending.extend_from_slice(samples);
        let whole = self.pending.len() / self.frame * self.frame;
        let frames: Vec<i16> = self.pending.drain(..whole).collect();
        for frame in frames.chunks(self.frame) {
            let length = self
                .encoder
                .encode_s16(frame, self.frame, &mut self.packet)?;
            self.writer
                .write_packet(self.packet.get(..length).unwrap_or_default())?;
        }
        Ok(self
            .writer
            .get_mut()
            .map(std::mem::take)
            .unwrap_or_default())
    }

    /// Flushes the encoder, and states where the audio ends (RFC 7845, section 4.4).
    fn finish(mut self) -> Result<Vec<u8>, EncodeError> {
        let held = usize::try_from(self.pre_skip.div_ceil(self.ticks)).unwrap_or(0);
        let padded = (self.pending.len() + held).div_ceil(self.frame) * self.frame;
        self.pending.resize(padded, 0);
        let end = self.pre_skip + self.taken * self.ticks;
        for frame in self.pending.chunks(self.frame) {
            let length = self
                .encoder
                .encode_s16(frame, self.frame, &mut self.packet)?;
            let packet = self.packet.get(..length).unwrap_or_default();
            let left = end.saturating_sub(self.writer.granule().unsigned_abs());
            let whole = u64::try_from(self.frame).unwrap_or(0) * self.ticks;
            self.writer
                .write_packet_with_duration(packet, u32::try_from(left.min(whole)).unwrap_or(0))?;
        }
        Ok(self.writer.finish()?)
    }
}

/// Samples of a FLAC frame: 171 ms at 24 kHz.
const FLAC_BLOCK: usize = 4096;

/// Minimum of the encoder.
const FLAC_BLOCK_MIN: usize = 32;

/// Our choice: mono speech at 24 kHz is indistinguishable from the original at this rate.
const MP3_KBITS_PER_SECOND: u32 = 64;

/// Delay of encoder and decoder in samples, from their filter banks (ISO 11172-3, Layer III).
const MP3_HELD: usize = 1105;

/// Opus packets of the usual 20 ms.
const PACKETS_PER_SECOND: u32 = 50;
const OPUS_RATE_HZ: u32 = 48_000;

/// Our choice: speech is indistinguishable from the original at this rate, and a slow board encodes it in hundredths of
/// its duration.
const OPUS_BITS_PER_SECOND: i32 = 32_000;
const OPUS_COMPLEXITY: i32 = 5;

/// Size at which a page is sent: five packets.
const OGG_PAGE_TARGET: usize = 400;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::decode::decode_whole_for_asr;

    #[test]
    fn what_is_encoded_in_pieces_is_decoded_in_its_length_and_sound() {
        let samples: Vec<i16> = (0..30_011)
            .map(|at| {
                if at * 880 / 24_000 % 2 == 0 {
                    6000
                } else {
                    -6000
                }
            })
            .collect();
        let encodings: [(_, &[u8]); 3] = [
            (Encoding::Flac, b"fLaC"),
            (Encoding::Mp3, b""),
            (Encoding::Opus, b"OggS"),
        ];
        for (encoding, magic) in encodings {
            let (mut encoder, mut file) = Encoder::new(encoding, 24_000).unwrap();
            assert!(file.starts_with(magic));
            let mut first = None;
            for (number, piece) in samples.chunks(977).enumerate() {
                let bytes = encoder.push(piece).unwrap();
                if !bytes.is_empty() {
                    first.get_or_insert(number);
                }
                file.extend(bytes);
            }
            file.extend(encoder.finish().unwrap());
            assert!(
                first.unwrap() <= 5,
                "{encoding:?}: sound comes at once, not in the end"
            );
            let heard = decode_whole_for_asr(&file, Duration::from_secs(9)).unwrap();
            let expected = 30_011 * 2 / 3;
            // MP3 cannot mark the silence of its filter banks around the audio.
            let silence = if encoding == Encoding::Mp3 {
                MP3_HELD + 576
            } else {
                400
            };
            assert!(
                heard.samples.len().abs_diff(expected) <= silence,
                "{encoding:?}: {}",
                heard.samples.len()
            );
            let middle = &heard.samples[4000..12_000];
            let crossings = middle
                .windows(2)
                .filter(|pair| (pair[0] < 0) != (pair[1] < 0))
                .count();
            assert!(crossings.abs_diff(440) <= 4, "{encoding:?}: {crossings}");
        }
    }

    #[test]
    fn silence_without_a_sample_is_a_valid_file() {
        for encoding in [Encoding::Flac, Encoding::Mp3, Encoding::Opus] {
            let (encoder, mut file) = Encoder::new(encoding, 24_000).unwrap();
            file.extend(encoder.finish().unwrap());
            assert!(file.len() >= 42, "{encoding:?}");
        }
    }
}
