//! Decoder of audio files: WAV, MP3, AAC, FLAC, Vorbis and Opus in common containers.

use std::{
    io::{self, Cursor},
    time::Duration,
};

use opus_pure::OpusDecoder;
use symphonia::{
    core::{
        codecs::{
            CodecParameters,
            audio::{
                AudioCodecParameters, AudioDecoder, AudioDecoderOptions, well_known::CODEC_ID_OPUS,
            },
        },
        common::Limit,
        errors::Error as MediaError,
        formats::{FormatOptions, FormatReader, TrackType, probe::Hint, well_known::FORMAT_ID_MKV},
        io::{MediaSourceStream, MediaSourceStreamOptions},
        meta::MetadataOptions,
        packet::Packet,
    },
    default::{get_codecs, get_probe},
};

use super::{
    audio::{ASR_RATE_HZ, AudioError, Mixer, MonoAudio, read_wav, supported_rate},
    format::format_of,
    resample::Resampler,
};

/// Supported formats, as listed for clients.
pub const READ_FORMATS: &str = "wav, mp3, m4a or aac (AAC-LC), ogg or webm (Opus, Vorbis), flac";

/// Whether a file is a WAV file.
pub fn is_wav(file: &[u8]) -> bool {
    file.starts_with(b"RIFF")
}

/// Decodes an audio file to 16 kHz mono for a recogniser, and passes the samples on in blocks.
///
/// # Errors
/// If its format is unsupported, it is damaged, truncated, or longer than `limit`, or the samples cannot be passed on.
pub fn decode_for_asr(
    file: &[u8],
    limit: Duration,
    take: &mut dyn FnMut(&[i16]) -> io::Result<()>,
) -> Result<(), AudioError> {
    if file.is_empty() {
        return Err(AudioError::Empty);
    }
    let format = format_of(file);
    if let Some((format, false)) = format {
        return Err(AudioError::NotRead { format });
    }
    let mut output = Output::new(limit, take);
    if is_wav(file) {
        read_wav(file, limit, |rate_hz, samples| {
            output.push(rate_hz, samples)
        })?;
    } else {
        read_container(file, format.map(|(name, _)| name), &mut output)?;
    }
    output.finish()
}

/// The same without blocks; errors as for [`decode_for_asr`].
pub fn decode_whole_for_asr(file: &[u8], limit: Duration) -> Result<MonoAudio, AudioError> {
    let mut samples = Vec::new();
    decode_for_asr(file, limit, &mut |block| {
        samples.extend_from_slice(block);
        Ok(())
    })?;
    Ok(MonoAudio::new(ASR_RATE_HZ, samples))
}

/// Resamples mono audio to 16 kHz.
struct Output<'a> {
    limit: Duration,
    resampler: Option<(u32, Resampler)>,
    /// Samples passed on.
    count: u64,
    take: &'a mut dyn FnMut(&[i16]) -> io::Result<()>,
}

impl<'a> Output<'a> {
    fn new(limit: Duration, take: &'a mut dyn FnMut(&[i16]) -> io::Result<()>) -> Self {
        Self {
            limit,
            resampler: None,
            count: 0,
            take,
        }
    }

    fn push(&mut self, rate_hz: u32, samples: &[i16]) -> Result<(), AudioError> {
        if self
            .resampler
            .as_ref()
            .is_some_and(|(rate, _)| *rate != rate_hz)
        {
            self.end_rate()?;
        }
        if rate_hz == ASR_RATE_HZ {
            return self.hand_on(samples);
        }
        let resampler = match &mut self.resampler {
            Some((_, resampler)) => resampler,
            absent => {
                supported_rate(rate_hz)?;
                &mut absent
                    .insert((rate_hz, Resampler::new(rate_hz, ASR_RATE_HZ)?))
                    .1
            }
        };
        let samples = resampler.push(samples)?;
        self.hand_on(&samples)
    }

    fn end_rate(&mut self) -> Result<(), AudioError> {
        match self.resampler.take() {
            Some((_, resampler)) => self.hand_on(&resampler.finish()?),
            None => Ok(()),
        }
    }

    fn hand_on(&mut self, samples: &[i16]) -> Result<(), AudioError> {
        self.count += u64::try_from(samples.len()).unwrap_or(u64::MAX);
        // A resampler rounds up, by one sample for each rate.
        if self.count.saturating_sub(1)
            > self.limit.as_secs().saturating_mul(u64::from(ASR_RATE_HZ)) + samples_of(self.limit)
        {
            return Err(AudioError::Longer { limit: self.limit });
        }
        (self.take)(samples).map_err(AudioError::Handed)
    }

    fn finish(mut self) -> Result<(), AudioError> {
        self.end_rate()
    }
}

/// Samples of the fractional second of a time.
fn samples_of(time: Duration) -> u64 {
    u64::from(time.subsec_millis()) * u64::from(ASR_RATE_HZ) / 1000
}

fn read_container(
    file: &[u8],
    format: Option<&'static str>,
    output: &mut Output<'_>,
) -> Result<(), AudioError> {
    let source = MediaSourceStream::new(
        Box::new(Cursor::new(file)),
        MediaSourceStreamOptions::default(),
    );
    let metadata = MetadataOptions::default()
        .limit_tag_bytes(Limit::Maximum(TAG_BYTES_MAX))
        .limit_visual_bytes(Limit::Maximum(0));
    let mut reader = get_probe()
        .probe(&Hint::new(), source, FormatOptions::default(), metadata)
        .map_err(|source| match format {
            Some(format) => AudioError::Container { format, source },
            None => AudioError::UnknownFormat {
                first: first_bytes(file),
            },
        })?;
    // For a file with leading data, use the detected format.
    let format = format.unwrap_or(reader.format_info().short_name);
    let unreadable = |source| AudioError::Container { format, source };
    let mut track = Track::of(&*reader, format)?;
    let (mut packets, mut damaged) = (0usize, 0usize);
    loop {
        let packet = match reader.next_packet() {
            Ok(Some(packet)) => packet,
            Ok(None) => break,
            // Concatenated files, as sent by internet radio.
            Err(MediaError::ResetRequired) => {
                track = Track::of(&*reader, format)?;
                continue;
            }
            Err(MediaError::IoError(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                // Recordings of browsers have no lengths, and end without a marker.
                if reader.format_info().format == FORMAT_ID_MKV && packets > 0 {
                    break;
                }
                return Err(AudioError::CutShort);
            }
            Err(error) => return Err(unreadable(error)),
        };
        packets += 1;
        if packets > file.len() {
            return Err(AudioError::Damaged { damaged, packets });
        }
        if packet.track_id == track.id && !track.codec.decode(&packet, output)? {
            damaged += 1;
        }
    }
    // The first packets of a cut stream refer to missing ones.
    if damaged > DAMAGED_FREE && damaged > packets / DAMAGED_SHARE {
        return Err(AudioError::Damaged { damaged, packets });
    }
    Ok(())
}

/// The decoded track of a file.
struct Track {
    id: u32,
    codec: Codec,
}

impl Track {
    fn of(reader: &dyn FormatReader, format: &'static str) -> Result<Self, AudioError> {
        let track = reader
            .default_track(TrackType::Audio)
            .or_else(|| reader.first_track(TrackType::Audio))
            .ok_or(AudioError::NoTrack { format })?;
        let params = track
            .codec_params
            .as_ref()
            .and_then(CodecParameters::audio)
            .ok_or(AudioError::NoTrack { format })?;
        Ok(Self {
            id: track.id,
            codec: Codec::of(params, format)?,
        })
    }
}

enum Codec {
    Opus(Box<Opus>),
    Other(Box<dyn AudioDecoder>, Vec<i16>, &'static str),
}

impl Codec {
    fn of(params: &AudioCodecParameters, format: &'static str) -> Result<Self, AudioError> {
        if params.codec == CODEC_ID_OPUS {
            let head = params.extra_data.as_deref().unwrap_or_default();
            return Ok(Self::Opus(Box::new(Opus::of(head)?)));
        }
        let decoder = get_codecs().make_audio_decoder(params, &AudioDecoderOptions::default());
        Ok(Self::Other(
            decoder.map_err(|source| AudioError::TrackCoding { format, source })?,
            Vec::new(),
            format,
        ))
    }

    /// Decodes a packet and passes its samples on; `false` if it is damaged.
    fn decode(&mut self, packet: &Packet, output: &mut Output<'_>) -> Result<bool, AudioError> {
        let (decoder, interleaved, format) = match self {
            Self::Opus(opus) => return opus.decode(&packet.data, output),
            Self::Other(decoder, interleaved, format) => (decoder, interleaved, *format),
        };
        let decoded = match decoder.decode(packet) {
            Ok(decoded) => decoded,
            Err(
                MediaError::DecodeError(_) | MediaError::IoError(_) | MediaError::ResetRequired,
            ) => return Ok(false),
            Err(source) => return Err(AudioError::TrackCoding { format, source }),
        };
        let rate_hz = decoded.spec().rate();
        let channels = decoded.spec().channels().count();
        decoded.copy_to_vec_interleaved(interleaved);
        let mut mixer = Mixer::new(
            u16::try_from(channels).unwrap_or(u16::MAX),
            decoded.frames(),
        );
        interleaved
            .iter()
            .for_each(|&sample| mixer.push(sample.into()));
        output.push(rate_hz, &mixer.samples)?;
        Ok(true)
    }
}

/// One Opus stream, decoded directly at 16 kHz.
struct Opus {
    decoder: OpusDecoder,
    block: Vec<i16>,
    /// Samples of the codec's delay still to be discarded.
    delay: usize,
}

impl Opus {
    /// A decoder for a stream with this identification header (RFC 7845, section 5.1).
    fn of(head: &[u8]) -> Result<Self, AudioError> {
        let [
            ..,
            pre_skip_low,
            pre_skip_high,
            _,
            _,
            _,
            _,
            gain_low,
            gain_high,
            family,
        ] = *head.first_chunk::<19>().ok_or(AudioError::OpusHeader)?;
        // More than one stream is surround sound; one stream has one or two channels.
        if family != 0 && head.get(19) != Some(&1) {
            return Err(AudioError::OpusChannels);
        }
        let mut decoder =
            OpusDecoder::new(ASR_RATE_HZ.cast_signed(), 1).map_err(AudioError::Opus)?;
        decoder.gain_q8 = i16::from_le_bytes([gain_low, gain_high]).into();
        Ok(Self {
            decoder,
            block: vec![0; OPUS_PACKET_SAMPLES],
            delay: usize::from(u16::from_le_bytes([pre_skip_low, pre_skip_high])) / OPUS_RATE_RATIO,
        })
    }

    fn decode(&mut self, packet: &[u8], output: &mut Output<'_>) -> Result<bool, AudioError> {
        if packet.is_empty() {
            return Ok(false);
        }
        let Ok(count) = self
            .decoder
            .decode_s16(packet, OPUS_PACKET_SAMPLES, &mut self.block)
        else {
            return Ok(false);
        };
        let dropped = self.delay.min(count);
        self.delay -= dropped;
        output.push(
            ASR_RATE_HZ,
            self.block.get(dropped..count).unwrap_or_default(),
        )?;
        Ok(true)
    }
}

/// The first bytes of a file, for an error.
fn first_bytes(file: &[u8]) -> String {
    let first = file.iter().take(FIRST_BYTES_SHOWN);
    let shown: Vec<String> = first.map(|byte| format!("{byte:02x}")).collect();
    shown.join(" ")
}

/// Our choice: the length of magic numbers.
const FIRST_BYTES_SHOWN: usize = 8;

/// The longest Opus packet, 120 ms.
const OPUS_PACKET_SAMPLES: usize = 120 * 16;

/// Opus counts its delay at 48 kHz.
const OPUS_RATE_RATIO: usize = 3;

/// Damaged packets tolerated in any file: the first ones of an MP3 may refer to earlier ones.
const DAMAGED_FREE: usize = 3;

/// One damaged packet in this many is tolerated; with more, the audio no longer represents the speech.
const DAMAGED_SHARE: usize = 20;

/// Longest title or comment stored, though none is used.
const TAG_BYTES_MAX: usize = 4 << 10;

#[cfg(test)]
mod tests {
    use opus_pure::{OggOpusWriter, OpusHead};

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// A second of 440 Hz in two channels of 44.1 kHz, encoded by ffmpeg.
    const TONES: [(&str, &[u8]); 9] = [
        ("mp3", include_bytes!("../../tests/fixtures/audio/tone.mp3")),
        ("m4a", include_bytes!("../../tests/fixtures/audio/tone.m4a")),
        (
            "fragmented mp4",
            include_bytes!("../../tests/fixtures/audio/tone-fragmented.mp4"),
        ),
        ("aac", include_bytes!("../../tests/fixtures/audio/tone.aac")),
        (
            "ogg with Vorbis",
            include_bytes!("../../tests/fixtures/audio/tone.ogg"),
        ),
        (
            "ogg with Opus",
            include_bytes!("../../tests/fixtures/audio/tone.opus"),
        ),
        (
            "webm with Opus",
            include_bytes!("../../tests/fixtures/audio/tone.webm"),
        ),
        (
            "webm with Vorbis",
            include_bytes!("../../tests/fixtures/audio/tone-vorbis.webm"),
        ),
        (
            "flac",
            include_bytes!("../../tests/fixtures/audio/tone.flac"),
        ),
    ];

    #[test]
    fn every_common_format_becomes_16_khz_mono_of_the_same_sound() {
        for (name, file) in TONES {
            let audio = decode_whole_for_asr(file, MINUTE)
                .unwrap_or_else(|error| panic!("{name}: {error:?}"));
            assert_eq!(audio.sample_rate_hz, ASR_RATE_HZ);
            // Codecs add some hundredths of a second of silence.
            let extra = audio.samples.len().abs_diff(16_000);
            assert!(extra <= 16 * 70, "{name}: {} samples", audio.samples.len());
            let middle = &audio.samples[4000..12_000];
            let crossings = middle
                .windows(2)
                .filter(|pair| (pair[0] < 0) != (pair[1] < 0))
                .count();
            assert!(
                crossings.abs_diff(440) <= 2,
                "{name}: {crossings} crossings in half a second"
            );
            let loudest = middle
                .iter()
                .map(|sample| sample.unsigned_abs())
                .max()
                .unwrap();
            assert!((10_000..21_000).contains(&loudest), "{name}: {loudest}");
        }
    }

    #[test]
    fn wav_of_any_rate_and_number_of_channels_becomes_16_khz_mono() {
        let spec = hound::WavSpec {
            channels: 2,
            sample_rate: 44_100,
            bits_per_sample: 16,
            sample_format: hound::SampleFormat::Int,
        };
        let mut file = Cursor::new(Vec::new());
        let mut writer = hound::WavWriter::new(&mut file, spec).unwrap();
        for _ in 0..2 * 44_100 {
            writer.write_sample(5i16).unwrap();
        }
        writer.finalize().unwrap();
        let audio = decode_whole_for_asr(&file.into_inner(), MINUTE).unwrap();
        assert_eq!(
            (audio.sample_rate_hz, audio.samples.len()),
            (16_000, 16_000)
        );
    }

    #[test]
    fn audio_beyond_the_limit_and_files_that_are_no_audio_are_errors() {
        for (name, file) in TONES {
            let error = decode_whole_for_asr(file, Duration::from_millis(500)).unwrap_err();
            assert_eq!(
                error.to_string(),
                "audio is longer than the limit of 0.5 s",
                "{name}"
            );
        }
        for (file, says) in [
            (&b""[..], "the file is empty"),
            (b"ID3\x04 this is an mp3", "the MP3 file cannot be read"),
            (b"OggS\0\0\0\0", "the Ogg file cannot be read"),
            (
                b"<html></html>",
                "the file is HTML or XML, which is not supported",
            ),
            (b"#!AMR\n\x3c", "the file is AMR, which is not supported"),
            (
                &[0; 4000],
                "the file has an unknown format, its first bytes are `00 00 00 00 00 00 00 00`",
            ),
        ] {
            let error = decode_whole_for_asr(file, MINUTE).unwrap_err();
            assert_eq!(error.to_string(), says, "{file:?}");
        }
    }

    #[test]
    fn a_container_without_sound_that_is_read_is_named() {
        let mp4 = include_bytes!("../../tests/fixtures/audio/tone.m4a");
        let entry = mp4.windows(4).position(|part| part == b"mp4a").unwrap();
        let mut amr = mp4.to_vec();
        amr[entry..entry + 4].copy_from_slice(b"samr");
        let error = decode_whole_for_asr(&amr, MINUTE).map(|audio| audio.duration());
        assert_eq!(
            error.unwrap_err().to_string(),
            "the MP4 file has no audio track, or one in an unsupported coding"
        );
        // Replaces the codec in the track's descriptor by AC-3.
        let aac = mp4
            .windows(2)
            .position(|pair| pair == [0x40, 0x15])
            .unwrap();
        let mut ac3 = mp4.to_vec();
        ac3[aac] = 0xa5;
        let error = decode_whole_for_asr(&ac3, MINUTE).map(|audio| audio.duration());
        assert_eq!(
            error.unwrap_err().to_string(),
            "the audio track of the MP4 file has an unsupported coding"
        );
    }

    #[test]
    fn a_file_that_is_cut_or_damaged_is_an_error_or_what_is_left_of_it() {
        for (name, file) in TONES {
            for keep in [file.len() / 3, file.len() - 7] {
                if let Ok(audio) = decode_whole_for_asr(&file[..keep], MINUTE) {
                    assert!(audio.samples.len() < 17_200, "{name}, {keep} bytes");
                }
            }
        }
        let mut file = OggOpusWriter::new(Vec::new(), OpusHead::new(1, 48_000).unwrap()).unwrap();
        // Twenty packets without a valid frame.
        for _ in 0..20 {
            file.write_packet_with_duration(&[0xff, 0], 960).unwrap();
        }
        let error = decode_whole_for_asr(&file.finish().unwrap(), MINUTE).unwrap_err();
        assert_eq!(error.to_string(), "20 of 20 packets are damaged");
    }
}
