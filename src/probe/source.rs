//! Repeatedly read files, and shared pieces of parsers.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// File kept open and read from its start each time: no path lookup, no allocation after the first reading.
#[derive(Debug)]
pub(super) struct Source {
    path: PathBuf,
    file: File,
    buffer: Vec<u8>,
}

impl Source {
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        let file = File::open(&path)?;
        Ok(Self {
            path,
            file,
            buffer: vec![0; FIRST_BUFFER],
        })
    }

    /// Opens the file if it exists and is readable.
    pub(super) fn open_optional(path: PathBuf) -> Option<Self> {
        Self::open(path).ok()
    }

    pub(super) fn read(&mut self) -> io::Result<&[u8]> {
        let mut length = 0;
        loop {
            let free = self.buffer.get_mut(length..).unwrap_or_default();
            match self.file.read_at(free, length as u64) {
                Ok(0) => break,
                Ok(more) => length += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if length >= self.buffer.len() {
                if length >= TEXT_MAX {
                    break;
                }
                self.buffer.resize(length * 2, 0);
            }
        }
        Ok(self.buffer.get(..length).unwrap_or_default())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// Reads at most [`TEXT_MAX`] of a small file.
pub(super) fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    use io::Read;
    let mut bytes = Vec::new();
    File::open(path)?
        .take(TEXT_MAX as u64)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a small file that may be missing or unreadable.
pub(super) fn read_optional(path: &Path) -> Option<Vec<u8>> {
    read_bytes(path).ok()
}

pub(super) fn read_number(path: &Path) -> Option<u64> {
    number(read_optional(path)?.trim_ascii())
}

/// Returns lines with their numbers, from 1.
pub(super) fn lines(text: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    (1..).zip(text.split(|b| *b == b'\n'))
}

/// Returns words separated by blanks and tabs.
pub(super) fn words(line: &[u8]) -> impl Iterator<Item = &[u8]> + Clone {
    line.split(|b| matches!(b, b' ' | b'\t'))
        .filter(|word| !word.is_empty())
}

/// Parses a decimal number without sign.
pub(super) fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |value, digit| {
        let digit = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    })
}

/// Sufficient for `/proc/vmstat`, the longest file of a sample.
const FIRST_BUFFER: usize = 8 * 1024;

/// Longer than any file read here; `iovmm/clients` has about 100 bytes per process.
const TEXT_MAX: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_is_read_again_each_time_and_may_grow() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut source = Source::open(file.path().to_owned()).unwrap();
        assert_eq!(source.read().unwrap(), b"");
        file.write_all(&vec![b'x'; FIRST_BUFFER]).unwrap();
        assert_eq!(source.read().unwrap().len(), FIRST_BUFFER);
        file.write_all(&vec![b'y'; 3 * FIRST_BUFFER]).unwrap();
        assert_eq!(source.read().unwrap().len(), 4 * FIRST_BUFFER);
        file.as_file().set_len(3).unwrap();
        assert_eq!(source.read().unwrap(), b"xxx");
    }

    #[test]
    fn a_file_without_end_is_cut() {
        let mut source = Source::open("/dev/zero".into()).unwrap();
        assert!(source.read().unwrap().len() <= 2 * TEXT_MAX);
        assert_eq!(read_bytes(Path::new("/dev/zero")).unwrap().len(), TEXT_MAX);
    }

    #[test]
    fn numbers_are_digits_alone() {
        assert_eq!(number(b"18446744073709551615"), Some(u64::MAX));
        for text in ["18446744073709551616", "", "-1", "+1", "1 ", "0x1"] {
            assert_eq!(number(text.as_bytes()), None, "{text}");
        }
    }
}
