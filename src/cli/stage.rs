//! Daemon in a temporary folder, for the demonstration and the benchmarks.

use std::{
    fs, io,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use super::session::end_with_parent;
use cotenant_units::Bytes;

/// Commands of the recogniser's small variant.
const GRAMMAR: &str = include_str!("home.gram");

/// Returns the path of the demo model: its location in a package, or in the sources of this build.
///
/// # Errors
/// If it is in neither, or the path of this program is unknown.
pub fn demo_model() -> io::Result<PathBuf> {
    // A build folder may be outside the sources, so the current folder is searched too.
    model_of(&std::env::current_exe()?, Path::new(""))
}

fn model_of(program: &Path, current: &Path) -> io::Result<PathBuf> {
    let folders = program.ancestors().skip(1).chain([current]);
    let mut files = folders.flat_map(|folder| PLACES.map(|place| folder.join(place)));
    files.find(|file| file.is_file()).ok_or_else(|| {
        let ([installed, source], program) = (PLACES, program.display());
        let text = format!(
            "no demo model: neither `{installed}` nor `{source}` is in a folder above `{program}`"
        );
        io::Error::new(io::ErrorKind::NotFound, text)
    })
}

/// Locations of the demo model in a package, and in the sources.
const PLACES: [&str; 2] = ["share/cotenant/demo.gguf", "deploy/demo-model/demo.gguf"];

/// Folder that is removed on drop.
#[derive(Debug)]
pub struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    /// Creates a folder `PREFIX-PID-N` in the folder of temporary files.
    pub fn new(prefix: &str) -> io::Result<Self> {
        // A socket's path is limited to 107 bytes, so this path is short.
        for attempt in 0..100u32 {
            let path =
                std::env::temp_dir().join(format!("{prefix}-{}-{attempt}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other("no free name for a temporary folder"))
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Child process that is ended on drop: by SIGTERM, then by SIGKILL.
#[derive(Debug)]
pub struct Process(Child);

impl Process {
    /// Returns its id.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Returns its exit status, if it has ended.
    pub fn ended(&mut self) -> io::Result<Option<std::process::ExitStatus>> {
        self.0.try_wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let Ok(pid) = i32::try_from(self.0.id()) else {
            return;
        };
        let pid = nix::unistd::Pid::from_raw(pid);
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
            let limit = Instant::now() + Duration::from_secs(8);
            while Instant::now() < limit && matches!(self.0.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = self.0.kill();
        }
        let _ = self.0.wait();
    }
}

/// Returns the configuration keys that place all files of the daemon below this folder.
pub fn places(folder: &Path) -> String {
    let folder = folder.display();
    format!(
        "\
grpc: {{socket: {folder}/cotenant.sock, abstract_name: none}}
journal: {{path: {folder}/journal.ndjson}}
state_dir: {folder}/state
runtime_dir: {folder}
log: {{filter: info, format: text}}
"
    )
}

/// Daemon in its own folder.
#[derive(Debug)]
pub struct Stage {
    // Fields are dropped in this order: processes end before their folder is removed.
    daemon: Process,
    folder: TemporaryFolder,
}

impl Stage {
    /// Writes model, grammar and configuration into a new folder, and starts the daemon with them. `configuration`
    /// receives the folder, which contains `home.gram`, and `demo.gguf` if the configuration names it; the socket must
    /// be `cotenant.sock` in it, and the journal `journal.ndjson`.
    pub fn set(configuration: impl FnOnce(&Path) -> String) -> io::Result<Self> {
        let folder = TemporaryFolder::new("cotenant-stage")?;
        let at = |name: &str| folder.0.join(name);
        let configuration = configuration(&folder.0);
        let demo = at("demo.gguf");
        if demo
            .to_str()
            .is_some_and(|demo| configuration.contains(demo))
        {
            fs::copy(demo_model()?, demo)?;
        }
        fs::write(at("home.gram"), GRAMMAR)?;
        fs::write(at("cotenant.yaml"), configuration)?;
        let daemon = start(&folder.0)?;
        Ok(Self { daemon, folder })
    }

    /// Kills the daemon, as the kernel would, and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.daemon.0.kill();
        let _ = self.daemon.0.wait();
    }

    /// Starts another daemon in place of one that has ended.
    pub fn start_again(&mut self) -> io::Result<()> {
        self.daemon = start(&self.folder.0)?;
        Ok(())
    }

    /// Returns the path of the gRPC socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.0.join("cotenant.sock")
    }

    /// Returns the path of the daemon's configuration.
    pub fn config(&self) -> PathBuf {
        self.folder.0.join("cotenant.yaml")
    }

    /// Returns the path of the daemon's journal.
    pub fn journal(&self) -> PathBuf {
        self.folder.0.join("journal.ndjson")
    }

    /// Returns the daemon's process.
    pub fn daemon(&mut self) -> &mut Process {
        &mut self.daemon
    }

    /// Appends the daemon's last output to a problem.
    pub fn last_words(&self, problem: impl std::fmt::Display) -> String {
        let log = self.log_tail(15);
        format!("{problem}; the daemon's last log lines:\n{log}")
    }

    /// Returns the last lines of the daemon's log.
    pub fn log_tail(&self, lines: usize) -> String {
        let text = fs::read_to_string(self.folder.0.join("daemon.log")).unwrap_or_default();
        let all: Vec<&str> = text.lines().collect();
        all.get(all.len().saturating_sub(lines)..)
            .unwrap_or_default()
            .join("\n")
    }

    /// Returns the path of the daemon's log.
    pub fn log(&self) -> PathBuf {
        self.folder.0.join("daemon.log")
    }
}

impl Process {
    /// Starts this program with other arguments, discarding its output.
    pub fn start(arguments: &[String]) -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        end_with_parent(&mut command);
        let child = command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Self(child))
    }

    /// Starts a neighbour that takes `bytes` of memory without a lease, at `rate` per second.
    pub(super) fn ballast(bytes: Bytes, rate: Bytes) -> io::Result<Self> {
        let size = |bytes: Bytes| format!("{}MiB", bytes.whole_mib());
        Self::start(&[
            "worker".to_owned(),
            "ballast".to_owned(),
            size(bytes),
            "--rate".to_owned(),
            size(rate),
        ])
    }
}

/// Setting of glibc's allocator for the daemon, as in `deploy/cotenant.service`; only the environment can set it before
/// the first thread. Two heaps instead of eight per processor, and no per-thread cache of freed chunks (glibc's
/// tcache): up to seven of each of 64 sizes to 1032 bytes, 236 KiB, which fill slowly over hundreds of thousands of
/// requests.
pub const ALLOCATOR: (&str, &str) = (
    "GLIBC_TUNABLES",
    "glibc.malloc.arena_max=2:glibc.malloc.tcache_count=0",
);

fn start(folder: &Path) -> io::Result<Process> {
    let log = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join("daemon.log"))?;
    let mut command = Command::new(std::env::current_exe()?);
    end_with_parent(&mut command);
    let daemon = command
        .arg("serve")
        .arg("--config")
        .arg(folder.join("cotenant.yaml"))
        .env(ALLOCATOR.0, ALLOCATOR.1)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0) // an interrupt at the terminal reaches this program, which then ends the daemon
        .spawn()?;
    Ok(Process(daemon))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_model_is_found_in_a_package_and_in_the_sources_and_missed_with_its_places() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        let (installed, built) = (
            at("usr/bin/cotenant"),
            at("sources/target/release/cotenant"),
        );
        let missing = |program| model_of(program, &at("")).unwrap_err().to_string();
        assert!(
            missing(&installed)
                .starts_with("no demo model: neither `share/cotenant/demo.gguf` nor")
        );
        for (program, model) in [
            (&installed, "usr/share/cotenant/demo.gguf"),
            (&built, "sources/deploy/demo-model/demo.gguf"),
        ] {
            fs::create_dir_all(at(model).parent().unwrap()).unwrap();
            fs::write(at(model), "GGUF").unwrap();
            assert_eq!(model_of(program, &at("")).unwrap(), at(model));
            assert_eq!(
                model_of(Path::new("/elsewhere/cotenant"), &at("sources")).is_ok(),
                program == &built
            );
        }
    }
}
