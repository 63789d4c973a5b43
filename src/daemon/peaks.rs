//! Learned peaks on disk, kept from one run to the next.
//!
//! The file is replaced atomically. An unreadable file is reported, and kept until it is replaced.

use std::{
    fs::{self, File},
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::parts::Parts;
use cotenant_policy::peaks::{LearnedPeak, Peaks};
use cotenant_threads::blocking;

const FILE: &str = "peaks.json";

/// Longer than a thousand peaks with long names; a longer file is not ours.
const FILE_MAX: u64 = 1 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    peaks: Vec<LearnedPeak>,
}

/// Format version that this reader supports.
const VERSION: u32 = 1;

/// Reason why the peaks of earlier runs are unknown.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the learned peaks in `{path}`; using those of the configuration")]
pub struct PeaksError {
    path: PathBuf,
    #[source]
    kind: PeaksErrorKind,
}

#[derive(Debug, thiserror::Error)]
enum PeaksErrorKind {
    #[error(transparent)]
    Read(#[from] io::Error),
    #[error("it has more than {FILE_MAX} bytes")]
    TooLong,
    #[error(transparent)]
    Parse(#[from] serde_json::Error),
    #[error("it has version {0}, supported is {VERSION}")]
    Version(u32),
}

impl PeaksError {
    /// Returns whether the file exists, but is not readable for this user.
    pub fn is_denied(&self) -> bool {
        matches!(&self.kind, PeaksErrorKind::Read(error) if error.kind() == io::ErrorKind::PermissionDenied)
    }

    /// Returns the remedy.
    pub const fn hint(&self) -> &'static str {
        "remove the file to start over; otherwise the next peak that is learned replaces it"
    }
}

/// Reads the peaks learned in earlier runs; none without a file.
///
/// # Errors
/// If the file cannot be read or parsed.
pub fn learned_peaks(state_dir: &Path) -> Result<Peaks, PeaksError> {
    let path = state_dir.join(FILE);
    read(&path).map_err(|kind| PeaksError { path, kind })
}

fn read(path: &Path) -> Result<Peaks, PeaksErrorKind> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Peaks::default()),
        Err(error) => return Err(error.into()),
    };
    let mut text = Vec::new();
    file.take(FILE_MAX + 1).read_to_end(&mut text)?;
    if u64::try_from(text.len()).is_ok_and(|length| length > FILE_MAX) {
        return Err(PeaksErrorKind::TooLong);
    }
    let stored: Stored = serde_json::from_slice(&text)?;
    if stored.version != VERSION {
        return Err(PeaksErrorKind::Version(stored.version));
    }
    Ok(stored.peaks.into_iter().collect())
}

fn write(path: &Path, peaks: &Peaks) -> io::Result<()> {
    let stored = Stored {
        version: VERSION,
        peaks: peaks.iter().cloned().collect(),
    };
    let text = serde_json::to_vec_pretty(&stored)?;
    let new = path.with_extension("json.new");
    let mut file = File::create(&new)?;
    file.write_all(&text)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    // The directory entry must survive a power failure too.
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

/// Writer of learned peaks, outside the loop; updates during a write are merged into the next one.
#[derive(Clone, Debug)]
pub(super) struct PeakStore(watch::Sender<Peaks>);

impl PeakStore {
    /// Creates a writer to `state_dir`.
    pub(super) fn new(state_dir: &Path, parts: &Parts) -> Self {
        let path = state_dir.join(FILE);
        let (sender, mut learned) = watch::channel(Peaks::default());
        parts.spawn("keeping peaks", async move {
            while learned.changed().await.is_ok() {
                let peaks = learned.borrow_and_update().clone();
                let path = path.clone();
                let shown = path.display().to_string();
                let written = blocking(move || write(&path, &peaks)).await;
                if let Err(error) = written.map_err(io::Error::other).flatten() {
                    tracing::warn!(path = shown, %error, "cannot store the learned peaks; retrying with the next change");
                }
            }
        });
        Self(sender)
    }

    /// Schedules a write of these peaks.
    pub(super) fn store(&self, peaks: Peaks) {
        self.0.send_replace(peaks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_units::Bytes;

    #[test]
    fn what_was_written_is_read_back_and_a_bad_file_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(learned_peaks(folder.path()).unwrap(), Peaks::default());
        let mut peaks = Peaks::default();
        peaks.lived("asr", Some("open"), Bytes::from_mib(160));
        let path = folder.path().join(FILE);
        write(&path, &peaks).unwrap();
        write(&path, &peaks).unwrap();
        assert_eq!(learned_peaks(folder.path()).unwrap(), peaks);
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            1,
            "nothing else is left"
        );
        for (text, cause) in [
            ("", "EOF"),
            ("{\"version\":1,\"peaks\":[{\"holder\":7}]}", "invalid type"),
            ("{\"version\":2,\"peaks\":[]}", "has version 2"),
            ("{\"version\":1,\"peaks\":[],\"more\":1}", "unknown field"),
        ] {
            fs::write(&path, text).unwrap();
            let error = learned_peaks(folder.path()).unwrap_err();
            assert!(
                error.kind.to_string().contains(cause),
                "{text}: {}",
                error.kind
            );
            assert!(error.to_string().contains(FILE));
        }
        fs::write(&path, vec![b' '; 2 << 20]).unwrap();
        assert!(matches!(
            learned_peaks(folder.path()).unwrap_err().kind,
            PeaksErrorKind::TooLong
        ));
    }

    #[tokio::test]
    async fn what_is_learned_is_kept_without_the_loop_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let (parts, _losses) = Parts::new();
        let store = PeakStore::new(folder.path(), &parts);
        let mut peaks = Peaks::default();
        for mib in 1..20 {
            peaks.seen("asr", None, Bytes::from_mib(mib * 10));
            store.store(peaks.clone());
        }
        while learned_peaks(folder.path()).unwrap() != peaks {
            tokio::task::yield_now().await;
        }
    }
}
