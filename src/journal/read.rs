//! Reader of a journal.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    thread,
};

use super::JournalEntry;

/// Contents of a journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Readable lines, in order.
    pub entries: Vec<JournalEntry>,
    /// Numbers of unreadable lines, from 1.
    pub damaged: Vec<u64>,
    /// Whether the last line is incomplete, as after a crash; it does not count as damaged.
    pub torn: bool,
}

/// A journal cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be read.
    #[error("cannot read journal `{path}`")]
    System {
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a journal.
    #[error("cannot read journal `{path}`: none of its {lines} lines is one of a journal")]
    NotAJournal {
        /// Its path.
        path: PathBuf,
        /// Lines in the file.
        lines: u64,
        /// Error of the first damaged line.
        source: serde_json::Error,
    },
}

/// Reads a journal. Lines torn by a crash are skipped, wherever they are.
///
/// # Errors
///
/// If the file cannot be read, or none of its lines is a journal line.
pub fn read(path: &Path) -> Result<Contents, ReadError> {
    let fails = |source| ReadError::System {
        path: path.to_owned(),
        source,
    };
    let mut text = Vec::new();
    File::open(path)
        .and_then(|mut file| file.read_to_end(&mut text))
        .map_err(fails)?;
    // Lines are independent, and parsing them takes most of the time.
    let threads = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(THREADS_MAX);
    let parts = cut(&text, threads);
    let lines: Vec<Lines> = thread::scope(|scope| {
        let rest = parts.get(1..).unwrap_or_default();
        let rest: Vec<_> = rest
            .iter()
            .map(|part| thread::Builder::new().spawn_scoped(scope, || parse(part)))
            .collect();
        let first = parts.first().map(|part| parse(part));
        let rest = rest.into_iter().zip(parts.iter().skip(1));
        // A part whose thread could not be started, or panicked, is parsed here.
        let rest = rest.map(|(thread, part)| {
            let read = thread.ok().and_then(|thread| thread.join().ok());
            read.unwrap_or_else(|| parse(part))
        });
        first.into_iter().chain(rest).collect()
    });
    let mut contents = Contents::default();
    let mut first_fault = None;
    let mut number = 0;
    for part in lines {
        contents.entries.extend(part.entries);
        contents
            .damaged
            .extend(part.damaged.iter().map(|line| number + line));
        contents.torn |= part.torn;
        first_fault = first_fault.or(part.first_fault);
        number += part.lines;
    }
    match first_fault {
        Some(source) if contents.entries.is_empty() => Err(ReadError::NotAJournal {
            path: path.to_owned(),
            lines: number,
            source,
        }),
        _ => Ok(contents),
    }
}

/// Parsed lines, and the numbers of damaged ones.
#[derive(Default)]
struct Lines {
    lines: u64,
    entries: Vec<JournalEntry>,
    damaged: Vec<u64>,
    torn: bool,
    first_fault: Option<serde_json::Error>,
}

fn parse(text: &[u8]) -> Lines {
    let mut read = Lines::default();
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        read.lines += 1;
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        match serde_json::from_slice(line) {
            Ok(entry) => read.entries.push(entry),
            Err(error) => {
                if line.ends_with(b"\n") {
                    read.damaged.push(read.lines);
                } else {
                    read.torn = true;
                }
                read.first_fault.get_or_insert(error);
            }
        }
    }
    read
}

/// Splits a text into at most this many parts of whole lines.
fn cut(text: &[u8], parts: usize) -> Vec<&[u8]> {
    let size = text.len().div_ceil(parts.max(1)).max(PART_MIN);
    let (mut cut, mut rest) = (Vec::with_capacity(parts), text);
    while !rest.is_empty() {
        let from = size.min(rest.len());
        let (_, behind) = rest.split_at(from);
        let end = behind
            .iter()
            .position(|byte| *byte == b'\n')
            .map(|more| from + more + 1);
        let (part, behind) = rest.split_at(end.unwrap_or(rest.len()));
        cut.push(part);
        rest = behind;
    }
    cut
}

/// Our choice: the cores of typical boards.
const THREADS_MAX: usize = 8;
/// Our choice: a smaller part is not worth a thread.
const PART_MIN: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const LINE: &str = r#"{"sequence":2,"boot_id":"a","at":7,"unix_us":9,"kind":"event","body":{"event":"drain_requested"}}"#;

    #[test]
    fn a_torn_last_line_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        fs::write(&path, format!("{LINE}\n{}", LINE.split_at(40).0)).unwrap();
        let contents = read(&path).unwrap();
        assert_eq!(contents.entries.len(), 1);
        assert!(contents.torn && contents.damaged.is_empty());
    }

    #[test]
    fn a_long_file_is_read_in_parts_and_each_line_keeps_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let mut text = String::new();
        for number in 1..=20_000u64 {
            match number {
                777 | 15_000 => text.push_str("{damaged"),
                _ => text
                    .push_str(&LINE.replace("\"sequence\":2", &format!("\"sequence\":{number}"))),
            }
            text.push('\n');
        }
        fs::write(&path, &text).unwrap();
        let contents = read(&path).unwrap();
        assert_eq!(
            (contents.damaged, contents.torn),
            (vec![777, 15_000], false)
        );
        let read: Vec<u64> = contents
            .entries
            .iter()
            .map(|entry| entry.sequence)
            .collect();
        let expected: Vec<u64> = (1..=20_000)
            .filter(|number| *number != 777 && *number != 15_000)
            .collect();
        assert_eq!(read, expected);
        for parts in 1..9 {
            let cut = cut(text.as_bytes(), parts);
            assert!(cut.len() <= parts && cut.iter().all(|part| part.ends_with(b"\n")));
            assert_eq!(cut.concat(), text.as_bytes());
        }
    }

    #[test]
    fn another_file_is_not_taken_for_a_journal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        fs::write(&path, b"\xff\xfe garbage\n[1]\n").unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(
            error.ends_with("none of its 2 lines is one of a journal"),
            "{error}"
        );
        fs::write(&path, "").unwrap();
        assert_eq!(read(&path).unwrap(), Contents::default());
    }
}
