//! WAV codings that `hound` lacks: ITU-T G.711, and 64-bit floating point.

use super::resample::from_float;

/// Format chunk of such a file.
#[derive(Clone, Copy)]
pub(super) struct CodedFormat {
    coding: Coding,
    pub(super) channels: u16,
    pub(super) rate_hz: u32,
}

#[derive(Clone, Copy)]
enum Coding {
    ALaw,
    MuLaw,
    Double,
}

/// The coding in a format chunk, if it is unsupported.
pub(super) fn coding_not_read(chunk: &[u8]) -> Option<u16> {
    let coding = coding(chunk)?;
    (![PCM, FLOAT, A_LAW, MU_LAW].contains(&coding)).then_some(coding)
}

/// The coding; the "extensible" format has it in the first two bytes of an identifier.
fn coding(chunk: &[u8]) -> Option<u16> {
    match number(chunk, 0)? {
        EXTENSIBLE => number(chunk, 24),
        coding => Some(coding),
    }
}

fn number(chunk: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*chunk.get(at..)?.first_chunk()?))
}

impl CodedFormat {
    /// The format in a format chunk; `None` if `hound` supports or refuses it.
    pub(super) fn of(chunk: &[u8]) -> Option<Self> {
        let coding = match (coding(chunk)?, number(chunk, 14)?) {
            (A_LAW, 8) => Coding::ALaw,
            (MU_LAW, 8) => Coding::MuLaw,
            (FLOAT, 64) => Coding::Double,
            _ => return None,
        };
        let rate_hz = u32::from_le_bytes(*chunk.get(4..)?.first_chunk()?);
        Some(Self {
            coding,
            channels: number(chunk, 2)?.max(1),
            rate_hz,
        })
    }

    /// The samples of these bytes in the range of 16 bits, channels interleaved; an incomplete last one is ignored.
    pub(super) fn samples(self, bytes: &[u8]) -> impl Iterator<Item = i32> {
        bytes
            .chunks_exact(self.width())
            .map(move |sample| self.coding.decode(sample).into())
    }

    pub(super) fn frame_bytes(self) -> u64 {
        u64::from(self.channels) * self.width() as u64
    }

    const fn width(self) -> usize {
        match self.coding {
            Coding::ALaw | Coding::MuLaw => 1,
            Coding::Double => 8,
        }
    }
}

impl Coding {
    fn decode(self, sample: &[u8]) -> i16 {
        match (self, sample) {
            (Self::ALaw, [byte]) => a_law(*byte),
            (Self::MuLaw, [byte]) => mu_law(*byte),
            #[expect(clippy::cast_possible_truncation, reason = "16 bits of it are kept")]
            (_, bytes) => bytes
                .first_chunk()
                .map_or(0, |bytes| from_float(f64::from_le_bytes(*bytes) as f32)),
        }
    }
}

/// 13 bits: sign, three bits of exponent and four of mantissa, with every other bit inverted.
fn a_law(byte: u8) -> i16 {
    let byte = byte ^ 0x55;
    let (exponent, mantissa) = ((byte >> 4) & 7, i16::from(byte & 15) << 4);
    let magnitude = if exponent == 0 {
        mantissa + 8
    } else {
        (mantissa + 264) << (exponent - 1)
    };
    if byte & 0x80 == 0 {
        -magnitude
    } else {
        magnitude
    }
}

/// 14 bits in the same layout, all inverted, with a bias of 33 quarters.
fn mu_law(byte: u8) -> i16 {
    let byte = !byte;
    let magnitude =
        (((i16::from(byte & 15) << 3) + MU_LAW_BIAS) << ((byte >> 4) & 7)) - MU_LAW_BIAS;
    if byte & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

const MU_LAW_BIAS: i16 = 33 * 4;

/// Codings of WAV files (`mmreg.h`).
const PCM: u16 = 1;
const FLOAT: u16 = 3;
const A_LAW: u16 = 6;
const MU_LAW: u16 = 7;
const EXTENSIBLE: u16 = 0xfffe;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{super::audio::parse_wav, *};

    /// A WAV file with this format and data.
    fn wav(coding: u16, rate: u32, bits: u16, data: &[u8]) -> Vec<u8> {
        let bytes = rate * u32::from(bits / 8);
        let length = u32::try_from(data.len()).unwrap();
        let mut file = b"RIFF".to_vec();
        file.extend((length + 38).to_le_bytes());
        file.extend(b"WAVEfmt ");
        file.extend(18u32.to_le_bytes());
        file.extend([coding, 1].map(u16::to_le_bytes).concat());
        file.extend([rate, bytes].map(u32::to_le_bytes).concat());
        file.extend([bits / 8, bits, 0].map(u16::to_le_bytes).concat());
        file.extend(b"data");
        file.extend(length.to_le_bytes());
        file.extend(data);
        file
    }

    /// Values of the tables 1a to 2b of G.711, in 16 bits, as `sox` 14.4 and ffmpeg decode them.
    #[test]
    fn telephones_are_decoded_as_the_tables_of_g711_say() {
        for (byte, a, mu) in [
            (0x00, -5504, -32_124),
            (0x2a, -32_256, -5372),
            (0x55, -8, -716),
            (0x7f, -848, 0),
            (0x80, 5504, 32_124),
            (0xaa, 32_256, 5372),
            (0xd5, 8, 716),
            (0xff, 848, 0),
        ] {
            assert_eq!((a_law(byte), mu_law(byte)), (a, mu), "{byte:#x}");
        }
    }

    #[test]
    fn files_of_each_coding_are_read() {
        let minute = Duration::from_secs(60);
        let doubles: Vec<u8> = [0.0, 0.5, -1.0, 7.0]
            .into_iter()
            .flat_map(f64::to_le_bytes)
            .collect();
        for (file, samples) in [
            (wav(A_LAW, 8000, 8, &[0x55, 0xaa]), vec![-8, 32_256]),
            (wav(MU_LAW, 8000, 8, &[0x00, 0xff]), vec![-32_124, 0]),
            (
                wav(FLOAT, 48_000, 64, &doubles),
                vec![0, 16_384, -32_767, 32_767],
            ),
        ] {
            assert_eq!(parse_wav(&file, minute).unwrap().samples, samples);
            let error = parse_wav(&file[..file.len() - 1], minute).unwrap_err();
            assert!(
                error.to_string().starts_with("WAV file is truncated"),
                "{error}"
            );
        }
        let adpcm = parse_wav(&wav(0x11, 8000, 4, &[0]), minute).unwrap_err();
        assert_eq!(
            adpcm.to_string(),
            "WAV coding 0x0011 is not supported: use PCM, floating point, A-law or µ-law"
        );
        let error = parse_wav(&wav(MU_LAW, 0, 8, &[0]), minute).unwrap_err();
        assert!(
            error.to_string().starts_with("sample rate of 0 Hz"),
            "{error}"
        );
    }
}
