//! Published models for the demonstration, downloaded with the user's consent.

use std::{
    collections::BTreeMap,
    env, fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::stage::TemporaryFolder;
use cotenant_threads::blocking;
use cotenant_units::Bytes;

/// Download program, for Python 3.
const FETCH: &str = include_str!("fetch");

/// Where published models come from.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Source {
    /// With --real: folder for models and servers. Default: `cotenant/real` in the user's cache.
    #[arg(long, value_name = "FOLDER", requires = "real")]
    cache: Option<PathBuf>,
    /// With --real: folder with models already downloaded, unpacked or as wheels.
    #[arg(long, value_name = "FOLDER", requires = "real")]
    models: Option<PathBuf>,
    /// With --real: confirm the downloads in advance.
    #[arg(long, requires = "real")]
    yes: bool,
}

impl Source {
    /// Downloads missing files, with the user's consent; returns the folder.
    pub(super) fn fetch(&self) -> Result<PathBuf, String> {
        let folder = self.cache.clone().or_else(cache).ok_or(
            "neither XDG_CACHE_HOME nor HOME is set; name a folder for the models with --cache",
        )?;
        let folder = std::path::absolute(&folder).map_err(|error| error.to_string())?;
        let script = TemporaryFolder::new("cotenant-fetch").map_err(|error| error.to_string())?;
        let file = script.path().join("fetch");
        fs::write(&file, FETCH).map_err(|error| error.to_string())?;
        let mut command = Command::new("python3");
        command.arg(&file).arg(&folder);
        if let Some(models) = &self.models {
            command.arg("--models").arg(models);
        }
        if self.yes {
            command.arg("--yes");
        }
        let ended = command
            .stdout(Stdio::null())
            .status()
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => {
                    "`python3` is not installed: apt-get install python3 python3-venv".to_owned()
                }
                _ => format!("cannot start `python3`: {error}"),
            })?;
        if ended.success() {
            Ok(folder)
        } else {
            Err(format!(
                "`fetch` failed with {ended}; see its message above"
            ))
        }
    }
}

/// Returns the folder for downloads in the user's cache.
fn cache() -> Option<PathBuf> {
    let set = |name: &str| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(cache.join("cotenant/real"))
}

/// Returns the prediction of `cotenant plan` for a configuration: memory of the LLM, and the peak of each worker.
pub(super) async fn planned(config: &Path) -> Result<BTreeMap<String, Bytes>, String> {
    let program = env::current_exe().map_err(|error| error.to_string())?;
    let config = config.to_owned();
    let run = move || {
        Command::new(program)
            .args(["plan", "-o", "json", "--config"])
            .arg(config)
            .output()
    };
    let output = blocking(run)
        .await
        .map_err(|error| error.to_string())?
        .map_err(|error| format!("cannot run `cotenant plan`: {error}"))?;
    let said: Value = serde_json::from_slice(&output.stdout).map_err(|_| {
        format!(
            "`cotenant plan` printed no plan: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )
    })?;
    let bytes = |value: Option<&Value>| {
        value
            .and_then(Value::as_u64)
            .map(Bytes::new)
            .unwrap_or_default()
    };
    let mut planned =
        BTreeMap::from([("llm".to_owned(), bytes(said.pointer("/forecast/llm/total")))]);
    for worker in said
        .get("workers")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        if let Some(name) = worker.get("name").and_then(Value::as_str) {
            planned.insert(name.to_owned(), bytes(worker.get("peakBytes")));
        }
    }
    Ok(planned)
}
