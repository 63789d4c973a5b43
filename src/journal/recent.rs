//! Reader of the recent end of a journal, line by line, in constant memory.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, BufRead, BufReader, Read as _, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use super::JournalEntry;

/// Passes the lines of a journal and of its rotated part to `take`, oldest first: those since `from_us` (µs since 1970),
/// and those before them back to the last line with a complete state. Stops when `take` returns false. Damaged lines are
/// skipped.
///
/// # Errors
/// If a file that exists cannot be read.
pub fn recent(
    path: &Path,
    from_us: u64,
    mut take: impl FnMut(JournalEntry) -> bool,
) -> io::Result<()> {
    let mut older = OsString::from(path);
    older.push(".1");
    let mut files = Vec::new();
    for path in [PathBuf::from(older), path.to_owned()] {
        match File::open(&path) {
            Ok(file) => files.push(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    // The place of the first line to pass on, by file and offset.
    let mut begin = (0, 0);
    for (index, file) in files.iter().enumerate() {
        let mut offset = 0;
        let read = each_line(file, |line| {
            let head = Head::of(line);
            if head.is_complete && head.unix_us.is_some_and(|at| at <= from_us) {
                begin = (index, offset);
            }
            offset += u64::try_from(line.len()).unwrap_or_default();
            true
        });
        read?;
    }
    for (index, mut file) in files.iter().enumerate().skip(begin.0) {
        let offset = if index == begin.0 { begin.1 } else { 0 };
        file.seek(SeekFrom::Start(offset))?;
        let mut goes_on = true;
        each_line(file, |line| {
            if let Ok(entry) = serde_json::from_slice(line) {
                goes_on = take(entry);
            }
            goes_on
        })?;
        if !goes_on {
            break;
        }
    }
    Ok(())
}

fn each_line(file: &File, mut take: impl FnMut(&[u8]) -> bool) -> io::Result<()> {
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    // The parts of a longer line are damaged lines.
    while (&mut reader).take(LINE_MAX).read_until(b'\n', &mut line)? > 0 && take(&line) {
        line.clear();
    }
    Ok(())
}

/// The part of a line before its body.
struct Head {
    unix_us: Option<u64>,
    /// Whether the line has the complete state.
    is_complete: bool,
}

impl Head {
    fn of(line: &[u8]) -> Self {
        let head = line.get(..HEAD_BYTES.min(line.len())).unwrap_or_default();
        let head = String::from_utf8_lossy(head);
        let time = head.split_once("\"unix_us\":").map(|(_, rest)| rest);
        let digits = time.and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
        let kind = head.split_once("\"kind\":\"").map(|(_, rest)| rest);
        Self {
            unix_us: digits.and_then(|digits| digits.parse().ok()),
            is_complete: kind.is_some_and(|kind| {
                kind.starts_with("start\"") || kind.starts_with("checkpoint\"")
            }),
        }
    }
}

/// Our choice: many times the complete state of 64 workers and as many leases as are allowed, in bytes.
const LINE_MAX: u64 = 16 << 20;

/// Number, run, times and kind of a line take some 150 bytes.
const HEAD_BYTES: usize = 224;

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Content;
    use cotenant_policy::{
        event::Event,
        params::{Params, Scope},
    };
    use cotenant_units::{Bytes, Timestamp};

    fn line(sequence: u64, unix_us: u64, content: Content) -> String {
        let entry = JournalEntry {
            sequence,
            boot_id: "a".into(),
            at: Timestamp::START,
            unix_us,
            content,
        };
        serde_json::to_string(&entry).unwrap() + "\n"
    }

    fn start() -> Content {
        let params = Params::for_budget(Bytes::from_mib(100), Bytes::ZERO, Scope::Session);
        Content::start(params)
    }

    fn sequences(path: &Path, from_us: u64) -> Vec<u64> {
        let mut found = Vec::new();
        recent(path, from_us, |entry| {
            found.push(entry.sequence);
            true
        })
        .unwrap();
        found
    }

    #[test]
    fn lines_are_read_from_the_last_complete_state_before_the_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.ndjson");
        assert_eq!(sequences(&path, 0), [] as [u64; 0]);
        let drain = || Content::Event(Event::DrainRequested { by: None });
        let older = line(1, 100, start()) + &line(2, 110, drain());
        let newer = [
            line(3, 120, start()),
            line(4, 130, drain()),
            "{torn\n".to_owned(),
            line(5, 140, start()),
            line(6, 150, drain()),
        ];
        fs::write(&path, newer.concat()).unwrap();
        assert_eq!(sequences(&path, 125), [3, 4, 5, 6]);
        fs::write(folder.path().join("journal.ndjson.1"), older).unwrap();
        for (from_us, expected) in [
            (0, &[1, 2, 3, 4, 5, 6][..]),
            (119, &[1, 2, 3, 4, 5, 6]),
            (125, &[3, 4, 5, 6]),
            (1000, &[5, 6]),
        ] {
            assert_eq!(sequences(&path, from_us), expected, "from {from_us}");
        }
        let mut first = Vec::new();
        recent(&path, 0, |entry| {
            first.push(entry.sequence);
            first.len() < 2
        })
        .unwrap();
        assert_eq!(first, [1, 2]);
    }
}
