//! Errors of a configuration file, with remedies.

use std::{
    fmt,
    fs::File,
    io::{self, Read},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use super::FILE_MAX;

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot load `{}`", path.display())]
pub struct LoadError {
    path: PathBuf,
    #[source]
    kind: LoadErrorKind,
}

impl LoadError {
    pub(super) fn new(path: &Path, kind: LoadErrorKind) -> Self {
        Self {
            path: path.to_owned(),
            kind,
        }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reason why it cannot be used.
    pub fn kind(&self) -> &LoadErrorKind {
        &self.kind
    }

    /// Returns the complete message as the command line prints it: the failed action, each cause on a line, each hint
    /// once.
    pub fn report(&self) -> String {
        let mut report = format!("error: {self}\n");
        match &self.kind {
            LoadErrorKind::Faults(faults) => {
                for fault in faults {
                    report += &format!("  caused by: {fault}\n");
                }
            }
            other => report += &format!("  caused by: {other}\n"),
        }
        for hint in self.kind.hints() {
            report += &format!("hint: {hint}\n");
        }
        report
    }
}

/// Reason why a configuration cannot be used.
#[derive(Debug)]
pub enum LoadErrorKind {
    /// It cannot be read.
    Io(io::Error),
    /// It is longer than [`FILE_MAX`].
    TooLong,
    /// The file of keys cannot be read.
    Keys(io::Error),
    /// It sets nothing, usually because a write was truncated. Holds an example.
    Empty(&'static str),
    /// It is a model file.
    Model,
    /// Its values are nested deeper than 64 levels.
    TooDeep,
    /// It is not UTF-8; offset of the first invalid byte.
    NotUtf8(usize),
    /// It holds secrets, and other users may read it or own it; described in words.
    Exposed(String),
    /// It has faults; at least one.
    Faults(Vec<Fault>),
}

impl LoadErrorKind {
    /// Returns the remedies without duplicates, in the order of the faults.
    pub fn hints(&self) -> Vec<String> {
        match self {
            Self::Io(error) if error.kind() == io::ErrorKind::NotFound => vec![
                "name the file with `--config FILE`; `deploy/cotenant.yaml` shows every key with its default"
                    .to_owned(),
            ],
            Self::Io(_) => Vec::new(),
            Self::Keys(_) => vec![format!("{KEYS_HINT}; `http.keys_file: none` disables keys")],
            Self::Exposed(_) => vec!["it must belong to the supervisor's user or root: `chmod 600 FILE`".to_owned()],
            Self::Empty(write) => vec![(*write).to_owned()],
            Self::TooLong => vec!["is this the right file?".to_owned()],
            Self::Model => {
                vec!["write `llm: {path: …}` with this path into a configuration, and check that one".to_owned()]
            }
            Self::TooDeep => vec!["no key of the configuration is nested deeper than 8 levels".to_owned()],
            Self::NotUtf8(_) => vec!["save the file as UTF-8 text".to_owned()],
            Self::Faults(faults) => {
                let mut hints: Vec<String> = Vec::new();
                for hint in faults.iter().filter_map(|fault| fault.hint.as_ref()) {
                    if !hints.contains(hint) {
                        hints.push(hint.clone());
                    }
                }
                hints
            }
        }
    }
}

impl fmt::Display for LoadErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) | Self::Keys(error) => error.fmt(f),
            Self::Exposed(why) => f.write_str(why),
            Self::Empty(_) => f.write_str("it sets nothing"),
            Self::TooLong => write!(f, "it has more than {FILE_MAX}"),
            Self::Model => f.write_str("it is a GGUF model"),
            Self::TooDeep => write!(f, "its values are nested deeper than {DEPTH_MAX} levels"),
            Self::NotUtf8(position) => write!(f, "byte {position} is not UTF-8"),
            Self::Faults(faults) => {
                for (index, fault) in faults.iter().enumerate() {
                    if index > 0 {
                        f.write_str("; ")?;
                    }
                    fault.fmt(f)?;
                }
                Ok(())
            }
        }
    }
}

impl std::error::Error for LoadErrorKind {}

/// One fault of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Position as keys and indices: `workers[0].argv`; empty for the file as a whole.
    pub path: String,
    /// Line and column of the value, from 1, if known.
    pub position: Option<(usize, usize)>,
    /// The fault, with the value and the limit.
    pub message: String,
    /// Correction.
    pub hint: Option<String>,
}

impl Fault {
    /// A fault without a position.
    pub fn new(path: impl Into<String>, message: impl Into<String>, hint: Option<String>) -> Self {
        Self {
            path: path.into(),
            position: None,
            message: message.into(),
            hint,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((line, column)) = self.position {
            write!(f, "{line}:{column}: ")?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}

/// Reads a file of at most [`FILE_MAX`].
pub(super) fn read_limited(path: &Path) -> Result<String, LoadErrorKind> {
    read(File::open(path).map_err(LoadErrorKind::Io)?)
}

/// Reads a text of at most [`FILE_MAX`].
///
/// # Errors
/// When it cannot be read.
pub fn load_text(path: &Path) -> Result<String, LoadError> {
    read_limited(path).map_err(|kind| LoadError::new(path, kind))
}

/// Reads a text of at most [`FILE_MAX`] that is readable only by its owner: this user, root, or the user of the service.
///
/// # Errors
/// If it cannot be read, or other users may read it.
pub fn load_private(path: &Path) -> Result<String, LoadError> {
    read_private(path).map_err(|kind| LoadError::new(path, kind))
}

/// Reads a file of at most [`FILE_MAX`] that is readable only by its owner: this user, root, or the user of the service.
pub(super) fn read_private(path: &Path) -> Result<String, LoadErrorKind> {
    let file = File::open(path).map_err(LoadErrorKind::Io)?;
    let found = file.metadata().map_err(LoadErrorKind::Io)?;
    let (mode, owner) = (found.mode() & 0o7777, found.uid());
    if mode & 0o077 != 0 {
        return Err(LoadErrorKind::Exposed(format!(
            "users other than its owner have access (mode {mode:04o})"
        )));
    }
    if ![0, nix::unistd::geteuid().as_raw()].contains(&owner) && Some(owner) != service_uid() {
        return Err(LoadErrorKind::Exposed(format!("it belongs to uid {owner}")));
    }
    read(file)
}

/// User of the packaged service, whose files root checks before the service reads them.
fn service_uid() -> Option<u32> {
    let user = nix::unistd::User::from_name("cotenant").ok()??;
    Some(user.uid.as_raw())
}

fn read(file: File) -> Result<String, LoadErrorKind> {
    let mut bytes = Vec::new();
    file.take(FILE_MAX.get() + 1)
        .read_to_end(&mut bytes)
        .map_err(LoadErrorKind::Io)?;
    if bytes.starts_with(GGUF) {
        return Err(LoadErrorKind::Model);
    }
    if bytes.len() > FILE_MAX.as_len() {
        return Err(LoadErrorKind::TooLong);
    }
    // Some editors begin a file with a byte order mark.
    if let Some(marked) = bytes.strip_prefix("\u{feff}".as_bytes()) {
        bytes = marked.to_vec();
    }
    String::from_utf8(bytes)
        .map_err(|error| LoadErrorKind::NotUtf8(error.utf8_error().valid_up_to()))
}

pub(super) const KEYS_HINT: &str =
    "write `clients: [{name: …, key: …}]` into a file of the supervisor's user, mode 0600";

/// First bytes of a model file.
const GGUF: &[u8] = b"GGUF";

/// Maximum nesting of a configuration (our choice; its keys need 8).
pub(super) const DEPTH_MAX: usize = 64;

/// Returns whether values of a YAML text are nested deeper than [`DEPTH_MAX`]; the parser's time is quadratic in the
/// depth.
///
/// Brackets in comments and quoted text do not count. A level of indentation needs at least one more column on each of
/// its lines, so the file size bounds the depth by indentation.
pub(super) fn is_too_deep(text: &str) -> bool {
    let (mut flow, mut quote) = (0usize, None::<char>);
    for line in text.lines() {
        let mut before = ' ';
        let mut chars = line.chars().peekable();
        if quote.is_none() && flow == 0 {
            let indicators = line
                .split(' ')
                .take_while(|word| matches!(*word, "-" | "?" | ":" | ""))
                .filter(|word| !word.is_empty())
                .count();
            if indicators > DEPTH_MAX {
                return true;
            }
        }
        while let Some(char) = chars.next() {
            match (quote, char) {
                (Some('"'), '\\') => {
                    chars.next();
                }
                (Some(open), close) if open == close => quote = None,
                (Some(_), _) => {}
                (None, '#') if before.is_whitespace() => break,
                (None, '"' | '\'') if flow > 0 || before.is_whitespace() => quote = Some(char),
                (None, '[' | '{') => flow += 1,
                (None, ']' | '}') => flow = flow.saturating_sub(1),
                (None, _) => {}
            }
            if flow > DEPTH_MAX {
                return true;
            }
            before = char;
        }
    }
    false
}
