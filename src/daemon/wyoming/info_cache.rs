//! Cache of the service description returned for `describe`.
//!
//! Each worker is asked when it becomes ready. Its description is kept in memory and in a file, so that `describe`
//! waits neither for a worker nor for the engine, even after a restart.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::control_handle::ControlHandle;
use cotenant_policy::snapshot::WorkerState;
use cotenant_rpc::supervisor::Supervisor as _;
use cotenant_speech::{
    client::{ClientTimeouts, WyomingClient},
    wyoming::{
        Info,
        info::{Artifact, AsrProgram, Attribution, HandleProgram, Model, TtsProgram},
    },
};
use cotenant_threads::blocking;
use cotenant_units::{causes::in_one_line, lock::locked};
use cotenant_worker::handle::WorkerHandle;

/// Answer to `describe`, kept up to date.
pub(super) struct InfoCache {
    shown: Mutex<Arc<Info>>,
    parts: Parts,
    path: Option<PathBuf>,
}

/// Workers and LLM offered by the API.
#[derive(Clone, Debug, Default)]
pub(super) struct Parts {
    pub(super) asr: Option<String>,
    pub(super) tts: Option<String>,
    pub(super) llm: Option<String>,
    /// Declared languages of the LLM, and of a worker that was never asked.
    pub(super) languages: Vec<String>,
}

/// Descriptions of workers by name.
type Known = BTreeMap<String, Info>;

impl InfoCache {
    /// Creates a cache with the contents of the file at `path`.
    pub(super) fn open(parts: Parts, path: Option<PathBuf>) -> (Arc<Self>, Known) {
        let known = path.as_deref().map(read).unwrap_or_default();
        let shown = Mutex::new(Arc::new(parts.compose(&known)));
        (Arc::new(Self { shown, parts, path }), known)
    }

    /// Returns the current description.
    pub(super) fn info(&self) -> Arc<Info> {
        Arc::clone(&locked(&self.shown))
    }

    fn show(&self, known: &Known) {
        let info = Arc::new(self.parts.compose(known));
        *locked(&self.shown) = info;
    }

    /// Asks each worker for its description when it becomes ready.
    pub(super) async fn keep(
        self: Arc<Self>,
        mut known: Known,
        control: Arc<ControlHandle>,
        workers: Vec<WorkerHandle>,
    ) {
        let mut asked: BTreeMap<String, (Option<u32>, Option<String>)> = BTreeMap::new();
        let mut states = control.snapshot();
        drop(control);
        loop {
            let state = Arc::clone(&states.borrow_and_update());
            let mut failed = false;
            for worker in &workers {
                let name = worker.name();
                let ready = state
                    .workers
                    .iter()
                    .find(|view| view.name == name && view.state == WorkerState::Ready);
                let (Some(ready), Some(endpoint)) = (ready, worker.endpoint()) else {
                    continue;
                };
                let run = (ready.pid, ready.variant.clone());
                if asked.get(name) == Some(&run) {
                    continue;
                }
                match WyomingClient::new(endpoint, ClientTimeouts::default())
                    .describe()
                    .await
                {
                    Ok(info) => {
                        asked.insert(name.to_owned(), run);
                        if known.get(name) != Some(&info) {
                            known.insert(name.to_owned(), info);
                            self.show(&known);
                            self.write(&known).await;
                        }
                    }
                    Err(error) => {
                        failed = true;
                        tracing::debug!(worker = name, "not described: {}", in_one_line(&error));
                    }
                }
            }
            if failed {
                tokio::time::sleep(ASK_AGAIN_AFTER).await;
            }
            if states.changed().await.is_err() {
                return;
            }
        }
    }

    async fn write(&self, known: &Known) {
        let (Some(path), Ok(text)) = (&self.path, serde_json::to_vec(known)) else {
            return;
        };
        let (fresh, file) = (path.with_extension("new"), path.clone());
        let written = blocking(move || {
            fs::write(&fresh, text)?;
            fs::rename(&fresh, file)
        });
        if let Err(error) = written.await.map_err(io::Error::other).flatten() {
            tracing::warn!(path = %path.display(), %error, "cannot store the descriptions of the workers");
        }
    }
}

impl Parts {
    /// Combines the known descriptions.
    fn compose(&self, known: &Known) -> Info {
        let said = |worker: &Option<String>| worker.as_ref().and_then(|name| known.get(name));
        let asr = match (&self.asr, said(&self.asr)) {
            (None, _) => Vec::new(),
            (Some(_), Some(info)) if !info.asr.is_empty() => info.asr.clone(),
            (Some(name), _) => vec![AsrProgram {
                artifact: installed(name, "speech recogniser"),
                models: vec![self.model(name, "speech recogniser")],
                supports_transcript_streaming: false,
            }],
        };
        let tts = match (&self.tts, said(&self.tts)) {
            (None, _) => Vec::new(),
            (Some(_), Some(info)) if !info.tts.is_empty() => info.tts.clone(),
            (Some(name), _) => vec![TtsProgram {
                artifact: installed(name, "voice"),
                voices: vec![self.model(name, "voice")],
                supports_synthesize_streaming: true,
            }],
        };
        let handle = self.llm.iter().map(|name| HandleProgram {
            artifact: installed(name, "assistant"),
            models: vec![self.model(name, "assistant")],
            supports_handled_streaming: true,
            supports_home_control: false,
        });
        Info {
            // Partial transcripts are passed on, so the worker's declaration applies.
            asr,
            tts: tts
                .into_iter()
                .map(|program| TtsProgram {
                    // The pipeline splits text into sentences, regardless of the worker.
                    supports_synthesize_streaming: true,
                    ..program
                })
                .collect(),
            handle: handle.collect(),
            ..Info::default()
        }
    }

    fn model(&self, name: &str, what: &str) -> Model {
        Model {
            artifact: installed(name, what),
            languages: self.languages.clone(),
            speakers: Vec::new(),
        }
    }
}

fn installed(name: &str, what: &str) -> Artifact {
    Artifact {
        name: name.to_owned(),
        attribution: Attribution {
            name: "cotenant".to_owned(),
            url: String::new(),
        },
        installed: true,
        description: Some(format!("{what} `{name}`")),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
    }
}

/// Reads the descriptions in the file; none if it cannot be read, since the workers are asked again.
fn read(path: &Path) -> Known {
    let read = || -> io::Result<Known> {
        if fs::metadata(path)?.len() > FILE_MAX {
            return Err(io::Error::other("it is too long"));
        }
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    };
    match read() {
        Ok(known) => known,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Known::new(),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "cannot read the stored descriptions of the workers");
            Known::new()
        }
    }
}

/// Pause after a worker failed to describe itself.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// Limit on the file: an `info` is bounded by 1 MiB, and there are two.
const FILE_MAX: u64 = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> Parts {
        Parts {
            asr: Some("asr".to_owned()),
            tts: Some("tts".to_owned()),
            llm: Some("demo".to_owned()),
            languages: vec!["en".to_owned()],
        }
    }

    #[tokio::test]
    async fn what_workers_said_is_shown_again_after_a_restart_before_they_are_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("wyoming.json");
        let (cache, mut known) = InfoCache::open(parts(), Some(path.clone()));
        let first = cache.info();
        assert_eq!(
            first.asr[0].artifact.name, "asr",
            "no worker has been asked yet"
        );
        assert!(first.tts[0].voices[0].artifact.installed);
        assert_eq!(first.handle[0].models[0].languages, ["en"]);
        let mut said = Info::default();
        said.asr.push(AsrProgram {
            artifact: installed("whisper", "x"),
            models: vec![Model {
                languages: vec!["de".to_owned(), "en".to_owned()],
                ..Model::default()
            }],
            supports_transcript_streaming: true,
        });
        known.insert("asr".to_owned(), said);
        cache.show(&known);
        cache.write(&known).await;
        let (again, _) = InfoCache::open(parts(), Some(path.clone()));
        for info in [cache.info(), again.info()] {
            assert_eq!(info.asr[0].artifact.name, "whisper");
            assert_eq!(info.asr[0].models[0].languages, ["de", "en"]);
            assert!(
                info.asr[0].supports_transcript_streaming,
                "as the worker says"
            );
            assert_eq!(info.tts[0].artifact.name, "tts");
        }
        fs::write(&path, "{").unwrap();
        let (empty, known) = InfoCache::open(parts(), Some(path));
        assert!(known.is_empty());
        assert_eq!(empty.info().asr[0].artifact.name, "asr");
        let (none, _) = InfoCache::open(Parts::default(), None);
        assert_eq!(*none.info(), Info::default());
    }
}
