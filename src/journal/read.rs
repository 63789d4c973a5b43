//! Reading a journal back.

use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
};

use super::JournalEntry;

/// What is in a journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// The lines that could be read, in order.
    pub entries: Vec<JournalEntry>,
    /// Numbers of the lines that could not be read, from 1.
    pub damaged: Vec<u64>,
    /// Whether the last line has no end, as after a crash; it is not among the damaged ones.
    pub torn: bool,
}

/// A journal cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be read.
    #[error("cannot read journal `{path}`")]
    System {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// It is something else.
    #[error("cannot read journal `{path}`: none of its {lines} lines is one of a journal")]
    NotAJournal {
        /// Which.
        path: PathBuf,
        /// Lines in the file.
        lines: u64,
        /// What is wrong with the first.
        #[source]
        source: serde_json::Error,
    },
}

/// Reads a journal. A line that was torn by a crash is left out, wherever it stands.
///
/// # Errors
///
/// When the file cannot be read, or no line of it belongs to a journal.
pub fn read(path: &Path) -> Result<Contents, ReadError> {
    let fails = |source| ReadError::System {
        path: path.to_owned(),
        source,
    };
    let mut reader = BufReader::new(File::open(path).map_err(fails)?);
    let mut contents = Contents::default();
    let mut first_fault = None;
    let mut line = Vec::new();
    let mut number = 0;
    loop {
        line.clear();
        if reader.read_until(b'\n', &mut line).map_err(fails)? == 0 {
            break;
        }
        number += 1;
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        match serde_json::from_slice(&line) {
            Ok(entry) => contents.entries.push(entry),
            Err(error) => {
                if line.ends_with(b"\n") {
                    contents.damaged.push(number);
                } else {
                    contents.torn = true;
                }
                first_fault.get_or_insert(error);
            }
        }
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const LINE: &str =
        r#"{"sequence":2,"boot_id":"a","at":7,"unix_us":9,"kind":"event","body":{"event":"drain_requested"}}"#;

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
    fn another_file_is_not_taken_for_a_journal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        fs::write(&path, b"\xff\xfe garbage\n[1]\n").unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.ends_with("none of its 2 lines is one of a journal"), "{error}");
        fs::write(&path, "").unwrap();
        assert_eq!(read(&path).unwrap(), Contents::default());
    }
}
