//! `cotenant pull`: a model from Hugging Face, Ollama's registry or a URL, planned before its weights are fetched.

mod client;
mod download;
mod hub;
mod meter;
mod reference;
#[cfg(test)]
mod tests;

use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use serde_json::{Value, json};

use self::{
    client::{Access, Client, Patience},
    download::{Download, cannot},
    hub::{Hubs, Source},
    meter::Meter,
    reference::Reference,
};
use super::{
    Global, Output,
    exit::{self, CliError},
    output,
    plan::{Planned, calibrate::threads_here},
    stage::TemporaryFolder,
};
use cotenant_engine::{
    Engine, Header, LoadError,
    embedding::{Embedder, OpenError},
};
use cotenant_units::Bytes;

/// Arguments of `pull`.
#[derive(Clone, Debug, clap::Args)]
pub struct PullArgs {
    /// `hf.co/OWNER/REPO[:QUANT]` (default Q4_K_M), `ollama.com/NAME[:TAG]`, or the URL of a .gguf file.
    #[arg(value_name = "MODEL")]
    model: Reference,
    /// Destination folder.
    #[arg(
        long,
        value_name = "FOLDER",
        default_value = "/var/lib/cotenant/models"
    )]
    to: PathBuf,
    /// Expected SHA-256 of the file at a URL, in hexadecimal; hubs publish theirs.
    #[arg(long, value_name = "HEX", value_parser = digest)]
    sha256: Option<String>,
    /// Fetch the model even if this machine cannot load it.
    #[arg(long)]
    force: bool,
}

/// What was fetched.
#[derive(Debug)]
struct Pulled {
    /// Path, length and SHA-256 of each file, and whether the SHA-256 was known before.
    files: Vec<(PathBuf, u64, String, bool)>,
    /// Whether it makes vectors of texts.
    is_encoder: bool,
}

/// Fetches a model; exit code 78 when it cannot be loaded on this machine.
pub(super) fn run(global: &Global, args: &PullArgs) -> Result<ExitCode, CliError> {
    let hubs = Hubs::from_env()?;
    let token = std::env::var("HF_TOKEN").unwrap_or_default();
    let token = Some(token.trim().to_owned()).filter(|token| !token.is_empty());
    let base = format!("{}/", hubs.hugging_face);
    let client = Client::new(Access { base, token }, Patience::default())?;
    let mut plan = Value::Null;
    let pulled = pull(&client, &hubs, args, &mut |planned| {
        plan = planned.json();
        match global.output {
            Output::Table => output::write(&planned.text()),
            _ => Ok(()),
        }
    })?;
    match global.output {
        Output::Table => output::write(&pulled.text())?,
        format => {
            let mut document = pulled.json();
            if let Some(fields) = document.as_object_mut() {
                fields.insert("plan".to_owned(), plan);
            }
            output::write_json(format, &document)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Pulled {
    fn text(&self) -> String {
        let mut text = String::new();
        for (path, bytes, sha256, is_known) in &self.files {
            let known = if *is_known {
                "verified"
            } else {
                "not verified: its server lists none"
            };
            text.push_str(&format!(
                "{}: {}, SHA-256 {sha256}, {known}\n",
                path.display(),
                Bytes::new(*bytes)
            ));
        }
        if let Some((path, ..)) = self.files.first() {
            let path = path.display();
            text.push_str(&match self.is_encoder {
                true => {
                    format!("to run it, add a worker: `cotenant worker embed --model {path}`\n")
                }
                false => format!("to run it, set `llm.path: {path}`\n"),
            });
        }
        text
    }

    fn json(&self) -> Value {
        let files: Vec<_> = self
            .files
            .iter()
            .map(|(path, bytes, sha256, is_known)| {
                json!({"path": path, "bytes": bytes, "sha256": sha256, "verified": is_known})
            })
            .collect();
        json!({"files": files})
    }
}

/// Fetches the files of a model. `show` gets its plan before its weights are fetched.
fn pull(
    client: &Client,
    hubs: &Hubs,
    args: &PullArgs,
    show: &mut dyn FnMut(&Planned) -> Result<(), CliError>,
) -> Result<Pulled, CliError> {
    if args.sha256.is_some() && !matches!(args.model, Reference::Url(_)) {
        let act = "--sha256 is for a file by its URL: a hub lists the SHA-256 of its files";
        return Err(CliError::plain(act, exit::USAGE));
    }
    let folder = std::path::absolute(&args.to)
        .and_then(|folder| fs::create_dir_all(&folder).map(|()| folder))
        .map_err(|error| {
            let hint = "name a writable folder with --to, or pull as the service's user: `sudo -u cotenant`";
            cannot("create", &args.to, error).with_hint(hint.to_owned())
        })?;
    let sources = hubs.resolve(client, &args.model, args.sha256.clone())?;
    let mut meter = Meter::new();
    let (mut downloads, mut had): (Vec<Download<'_>>, Vec<u64>) = Default::default();
    for source in sources {
        match Download::open(client, source, &folder, &mut meter) {
            Ok(download) => {
                had.push(download.have());
                downloads.push(download);
            }
            Err(error) => {
                leave_as_found(&downloads, &had)?;
                return Err(error);
            }
        }
    }
    if let Err(error) = refuse_full_disk(&folder, &downloads) {
        leave_as_found(&downloads, &had)?;
        return Err(error);
    }
    let planned = plan(&mut downloads, &mut meter)?;
    let is_encoder = matches!(planned, Ok(None));
    match planned {
        Ok(None) => {}
        Ok(Some(planned)) => {
            show(&planned)?;
            if !planned.works() {
                let act = format!("it does not fit: {}", planned.verdict());
                refuse(args, &downloads, &had, CliError::plain(act, exit::CONFIG))?;
            }
        }
        Err(error) => refuse(args, &downloads, &had, error)?,
    }
    let whole = downloads.iter().map(|one| one.source().bytes).sum();
    let mut before = 0;
    for download in &mut downloads {
        let bytes = download.source().bytes;
        download.reserve()?;
        meter.count(before, whole);
        download.fill(bytes, &mut meter)?;
        before += bytes;
    }
    let mut files = Vec::new();
    for download in &downloads {
        let Source { bytes, sha256, .. } = download.source();
        let is_known = sha256.is_some();
        files.push((
            download.path().to_owned(),
            *bytes,
            download.verify()?,
            is_known,
        ));
    }
    // The first part last: the model is there when its first file is.
    for download in downloads.iter_mut().rev() {
        download.finish()?;
    }
    Ok(Pulled { files, is_encoder })
}

/// Removes what was begun by this call.
fn leave_as_found(downloads: &[Download<'_>], had: &[u64]) -> Result<(), CliError> {
    let mut begun = downloads.iter().zip(had).filter(|(_, had)| **had == 0);
    begun.try_for_each(|(download, _)| download.discard())
}

/// Refuses a model that cannot be loaded here, unless forced; what it fetched for its plan is removed.
fn refuse(
    args: &PullArgs,
    downloads: &[Download<'_>],
    had: &[u64],
    error: CliError,
) -> Result<(), CliError> {
    if args.force {
        eprintln!(
            "note: {}; fetched because of --force",
            exit::escaped(&error.to_string())
        );
        return Ok(());
    }
    leave_as_found(downloads, had)?;
    let hint = match error.hint() {
        Some(hint) => format!("{hint}; --force fetches it all the same"),
        None => "--force fetches it all the same".to_owned(),
    };
    Err(error.with_hint(hint))
}

/// The plan of a model on this machine, from the headers of its files, unless it is an encoder, which is no LLM; the
/// inner error is a model that cannot be loaded here.
fn plan(
    downloads: &mut [Download<'_>],
    meter: &mut Meter,
) -> Result<Result<Option<Planned>, CliError>, CliError> {
    let folder = TemporaryFolder::new("cotenant-pull")
        .map_err(|error| CliError::failed("cannot create a temporary folder", error))?;
    let is_several = downloads.len() > 1;
    for download in &mut *downloads {
        let Source { name, bytes, .. } = download.source().clone();
        let path = folder.path().join(name);
        let mut reader = download.reader(meter);
        let header = Header::length(&mut reader, Bytes::new(bytes));
        if let Some(error) = reader.into_failure() {
            return Err(error);
        }
        let header = match header {
            Ok(header) => header,
            Err(kind) => return Ok(Err(unloadable(download, &LoadError::new(&path, kind)))),
        };
        // The weights are holes: a plan reads none of them.
        let mut copy = || {
            let mut file = File::create_new(&path)?;
            io::copy(&mut download.reader(meter).take(header.get()), &mut file)?;
            file.set_len(bytes)
        };
        copy().map_err(|error| cannot("write", &path, error))?;
        if is_several {
            // Its server would not wait for the other files.
            download.pause();
        }
    }
    let Some(first) = downloads.first() else {
        return Err(CliError::plain("the hub lists no file", exit::FAILED));
    };
    let path = folder.path().join(&first.source().name);
    match Embedder::is_encoder(&path) {
        Ok(true) => return Ok(Ok(None)),
        Err(OpenError::Load(error)) => return Ok(Err(unloadable(first, &error))),
        Err(error) => {
            let act = format!(
                "this machine cannot load `{}`: {error}",
                first.source().name
            );
            return Ok(Err(CliError::plain(act, exit::CONFIG)));
        }
        Ok(false) => {}
    }
    match Engine::foresee(&path, None, threads_here()) {
        Ok(inspected) => Planned::here(inspected).map(|planned| Ok(Some(planned))),
        Err(error) => Ok(Err(unloadable(first, &error))),
    }
}

/// A model that the engine refuses.
fn unloadable(download: &Download<'_>, error: &LoadError) -> CliError {
    CliError::Failed {
        act: format!("this machine cannot load `{}`", download.source().name),
        hint: error.hint().map(str::to_owned),
        source: std::error::Error::source(error)
            .map(|cause| io::Error::other(cotenant_units::causes::in_one_line(cause)).into()),
        code: exit::CONFIG,
    }
}

fn refuse_full_disk(folder: &Path, downloads: &[Download<'_>]) -> Result<(), CliError> {
    let needed = downloads
        .iter()
        .filter(|download| !download.is_done())
        .fold(Bytes::ZERO, |sum, one| sum.saturating_add(one.needs()));
    let disk = nix::sys::statvfs::statvfs(folder)
        .map_err(|error| cannot("look at the disk of", folder, error.into()))?;
    let free = Bytes::new(disk.blocks_available().saturating_mul(disk.fragment_size()));
    if needed <= free {
        return Ok(());
    }
    let act = format!(
        "cannot fetch {needed} into `{}`: {free} are free",
        folder.display()
    );
    let hint = "free up space, or choose another disk with --to";
    Err(CliError::plain(act, exit::FAILED).with_hint(hint.to_owned()))
}

fn digest(text: &str) -> Result<String, String> {
    hub::sha256(text).ok_or_else(|| "not 64 hexadecimal digits".to_owned())
}
