//! File formats by their first bytes.

/// The format of a file by its first bytes, and whether it has a decoder; `None` if they are unknown.
pub(super) fn format_of(file: &[u8]) -> Option<(&'static str, bool)> {
    let read = READ.iter().map(|row| (row, true));
    let mut known = NOT_READ.iter().map(|row| (row, false)).chain(read);
    let known = known.find(|((magic, _), _)| begins_with(file, magic));
    match known {
        Some(((_, name), is_read)) => Some((name, is_read)),
        None => text_of(file).map(|name| (name, false)),
    }
}

/// Whether a file begins with these bytes; `?` matches any.
fn begins_with(file: &[u8], magic: &[u8]) -> bool {
    file.get(..magic.len()).is_some_and(|first| {
        let mut pairs = first.iter().zip(magic);
        pairs.all(|(byte, expected)| byte == expected || *expected == b'?')
    })
}

/// The kind of a text file; `None` for other files.
fn text_of(file: &[u8]) -> Option<&'static str> {
    let first = file.get(..TEXT_BYTES).unwrap_or(file);
    let text = match std::str::from_utf8(first) {
        Ok(text) => text,
        // a character cut by the end of the examined part
        Err(error) if error.error_len().is_none() && first.len() < file.len() => {
            std::str::from_utf8(first.get(..error.valid_up_to())?).ok()?
        }
        Err(_) => return None,
    };
    if text.contains(|char: char| char.is_control() && !char.is_ascii_whitespace()) {
        return None;
    }
    Some(match text.trim_start().chars().next() {
        Some('{' | '[') => "JSON",
        Some('<') => "HTML or XML",
        _ => "text",
    })
}

/// Magic bytes of supported containers.
const READ: [(&[u8], &str); 9] = [
    (b"RIFF", "WAV"),
    (b"ID3", "MP3"),
    (b"fLaC", "FLAC"),
    (b"OggS", "Ogg"),
    (b"????ftyp", "MP4"),
    (b"\x1a\x45\xdf\xa3", "WebM or Matroska"),
    (b"\xff\xf1", "AAC"),
    (b"\xff\xf9", "AAC"),
    (b"\xff\xfb", "MP3"),
];

/// Magic bytes of common unsupported formats.
const NOT_READ: [(&[u8], &str); 24] = [
    (b"#!AMR", "AMR"),
    (b"#!SILK", "SILK"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "WMA or WMV (ASF)"),
    (b"FORM????AIFF", "AIFF"),
    (b"FORM????AIFC", "AIFC"),
    (b"RF64", "RF64"),
    (b"BW64", "BW64"),
    (b"RIFX", "RIFX, a WAV file of big-endian samples"),
    (b"riff\x2e\x91\xcf\x11", "Wave64"),
    (b"caff", "CAF"),
    (b".snd", "AU"),
    (b"ADIF", "AAC in ADIF"),
    (b"MThd", "MIDI"),
    (b"RIFF????RMID", "MIDI"),
    (b"wvpk", "WavPack"),
    (b"MAC ", "Monkey's Audio"),
    (b"RIFF????AVI ", "AVI"),
    (b"FLV\x01", "FLV"),
    (b"\x00\x00\x01\xba", "an MPEG program stream"),
    (b"\x89PNG", "PNG, a picture"),
    (b"\xff\xd8\xff", "JPEG, a picture"),
    (b"%PDF", "PDF"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "compressed by gzip"),
];

/// Bytes examined for text. Our choice.
const TEXT_BYTES: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_magic_is_found_and_none_hides_another() {
        for (rows, is_read) in [(&READ[..], true), (&NOT_READ[..], false)] {
            for (magic, name) in rows {
                let file = [magic, &b"\x00\xff"[..]].concat();
                assert_eq!(format_of(&file), Some((*name, is_read)));
            }
        }
    }

    #[test]
    fn text_is_distinguished_from_sound() {
        let long = "ä".repeat(TEXT_BYTES);
        for (file, name) in [
            ("{\"error\": 7}", "JSON"),
            ("\n[1]", "JSON"),
            ("<!doctype html>", "HTML or XML"),
            ("UklGRiQAAABXQVZF", "text"),
            (&format!("x{long}"), "text"),
        ] {
            assert_eq!(format_of(file.as_bytes()), Some((name, false)), "{file}");
        }
        for file in [
            &[0; 40][..],
            &[0xff; 4],
            b"ab\x01",
            "ä".as_bytes().get(..1).unwrap(),
        ] {
            assert_eq!(format_of(file), None, "{file:?}");
        }
    }
}
