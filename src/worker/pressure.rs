//! Memory-pressure notification of workers, by systemd's protocol.
//!
//! A worker finds the path of a FIFO or socket in `$MEMORY_PRESSURE_WATCH`, opens or connects to it, and releases spare
//! memory whenever it is readable (`docs/PRESSURE.md` of systemd; built into sd-event, GLib and others). The bytes have
//! no meaning and are discarded. `$MEMORY_PRESSURE_WRITE` is not set: nothing has to be written first, and a worker
//! would read its own bytes from a FIFO.
//!
//! A FIFO has one reader; a worker of several processes needs a socket, to which each connects.

use std::{
    fs, io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, OpenOptionsExt, PermissionsExt},
            net::{UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

use nix::{
    errno::Errno,
    sys::stat::Mode,
    unistd::{self, Uid, User},
};

use super::spec::{PressureKind, PressureWatch};
use cotenant_units::lock::locked;

/// Name of the variable with the path.
pub(super) const WATCH_VARIABLE: &str = "MEMORY_PRESSURE_WATCH";

/// Name of the variable with data to write first; never set.
pub(super) const WRITE_VARIABLE: &str = "MEMORY_PRESSURE_WRITE";

/// Value of [`WATCH_VARIABLE`] that disables watching, also if this process inherited a value.
pub(super) const OFF: &str = "/dev/null";

/// Our end for one run of a worker; removes the file on drop.
#[derive(Debug)]
pub(super) struct Tap {
    path: PathBuf,
    end: End,
}

#[derive(Debug)]
enum End {
    /// Open in both directions, so that opening does not block and the reader sees no end of file.
    Fifo(OwnedFd),
    Socket {
        listener: UnixListener,
        connected: Mutex<Vec<UnixStream>>,
    },
}

/// Reason why a worker cannot be notified.
#[derive(Debug, thiserror::Error)]
#[error("cannot create `{path}` for a worker to watch")]
pub struct TapError {
    path: PathBuf,
    source: io::Error,
}

impl Tap {
    /// Creates the file, replacing one left by an earlier run.
    pub(super) fn open(watch: &PressureWatch) -> Result<Self, TapError> {
        let path = watch.path.clone();
        let end = clear(&path).and_then(|()| match watch.kind {
            PressureKind::Fifo => fifo(&path),
            PressureKind::Socket => socket(&path),
        });
        let end = end.and_then(|end| give(&path, watch.owner.as_deref()).map(|()| end));
        match end {
            Ok(end) => Ok(Self { path, end }),
            Err(source) => Err(TapError { path, source }),
        }
    }

    /// Opens the FIFO of a worker that outlived its supervisor; a socket is created again, for clients that reconnect.
    pub(super) fn reopen(watch: &PressureWatch) -> Result<Self, TapError> {
        if watch.kind == PressureKind::Socket {
            return Self::open(watch);
        }
        let path = watch.path.clone();
        match opened(&path) {
            Ok(end) => Ok(Self { path, end }),
            Err(source) => Err(TapError { path, source }),
        }
    }

    /// Leaves the FIFO open in the new process, so that it sees no end of file when this process dies.
    pub(super) fn keep_open_in(&self, command: &mut Command) {
        let End::Fifo(fifo) = &self.end else { return };
        let fd = fifo.as_raw_fd();
        // SAFETY: fcntl is async-signal-safe and touches no memory; the descriptor is open in the new process as in
        // this one, since the worker being started keeps this value until it has ended.
        unsafe {
            command.pre_exec(move || {
                Errno::result(libc::fcntl(fd, libc::F_SETFD, 0))?;
                Ok(())
            });
        }
    }

    /// Notifies watchers that memory is short; returns their number. A watcher that has not yet read the previous
    /// notification counts, since it will read that one.
    pub(super) fn tell(&self) -> usize {
        match &self.end {
            End::Fifo(fifo) => usize::from(has_written(unistd::write(fifo, &SIGN))),
            End::Socket {
                listener,
                connected,
            } => {
                let mut connected = locked(connected);
                while let Ok((stream, _)) = listener.accept() {
                    if connected.len() < WATCHERS_MAX && stream.set_nonblocking(true).is_ok() {
                        connected.push(stream);
                    }
                }
                connected.retain(|stream| has_written(unistd::write(stream, &SIGN)));
                connected.len()
            }
        }
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn has_written(written: Result<usize, Errno>) -> bool {
    matches!(written, Ok(_) | Err(Errno::EAGAIN))
}

fn fifo(path: &Path) -> io::Result<End> {
    unistd::mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR)?;
    opened(path)
}

/// Opens an existing FIFO in both directions.
fn opened(path: &Path) -> io::Result<End> {
    if !fs::symlink_metadata(path)?.file_type().is_fifo() {
        return Err(io::Error::other("it is not a FIFO"));
    }
    let file = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    Ok(End::Fifo(file.into()))
}

fn socket(path: &Path) -> io::Result<End> {
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(End::Socket {
        listener,
        connected: Mutex::default(),
    })
}

/// Gives the file to the worker's user, if that is another one.
fn give(path: &Path, owner: Option<&str>) -> io::Result<()> {
    let Some(owner) = owner else { return Ok(()) };
    let uid = match owner.parse() {
        Ok(number) => Uid::from_raw(number),
        Err(_) => {
            let user = User::from_name(owner)?;
            user.ok_or_else(|| io::Error::other(format!("user `{owner}` does not exist")))?
                .uid
        }
    };
    Ok(unistd::chown(path, Some(uid), None)?)
}

/// Removes the FIFO or socket of an earlier run, and nothing else.
fn clear(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(found) if found.file_type().is_fifo() || found.file_type().is_socket() => {
            fs::remove_file(path)
        }
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "the path has a file that is neither FIFO nor socket",
        )),
    }
}

/// Byte written; its value has no meaning.
const SIGN: [u8; 1] = *b"\n";

/// Limit on watching processes of one worker (our choice: far above those of speech workers).
const WATCHERS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use std::io::{BufRead, Read};

    use super::*;

    fn watch(folder: &tempfile::TempDir, kind: PressureKind) -> PressureWatch {
        PressureWatch {
            path: folder.path().join("asr.pressure"),
            kind,
            owner: None,
        }
    }

    #[test]
    fn a_reader_of_the_fifo_waits_until_it_is_reported_and_sees_no_end() {
        let folder = tempfile::tempdir().unwrap();
        let watch = watch(&folder, PressureKind::Fifo);
        let tap = Tap::open(&watch).unwrap();
        let mut reader = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&watch.path)
            .unwrap();
        let mut bytes = [0; 16];
        assert_eq!(
            reader.read(&mut bytes).unwrap_err().kind(),
            io::ErrorKind::WouldBlock,
            "not notified, and no end"
        );
        assert_eq!(tap.tell(), 1);
        assert_eq!(reader.read(&mut bytes).unwrap(), 1);
        // A worker that never reads does not block us.
        for _ in 0..100_000 {
            assert_eq!(tap.tell(), 1);
        }
        drop(tap);
        assert!(!watch.path.exists());
    }

    #[test]
    fn a_worker_that_outlives_us_sees_no_end_of_its_fifo_and_is_reported_by_the_daemon_that_takes_it_over()
     {
        let folder = tempfile::tempdir().unwrap();
        let watch = watch(&folder, PressureKind::Fifo);
        let tap = Tap::open(&watch).unwrap();
        // It reads two bytes, one after the other; `read` would fail at an end of file.
        let mut command = Command::new("sh");
        command
            .args([
                "-c",
                "exec < \"$0\"; read -r a && echo reported && read -r b && echo reported again",
            ])
            .arg(&watch.path)
            .stdout(std::process::Stdio::piped());
        tap.keep_open_in(&mut command);
        let mut child = command.spawn().unwrap();
        let mut said = io::BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        assert_eq!(tap.tell(), 1);
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "reported\n");

        // As after a kill of the supervisor: its descriptor is closed, and the file remains.
        let path = tap.path.clone();
        let mut tap = std::mem::ManuallyDrop::new(tap);
        if let End::Fifo(fifo) = std::mem::replace(
            &mut tap.end,
            End::Fifo(fs::File::open("/dev/null").unwrap().into()),
        ) {
            drop(fifo);
        }
        assert!(path.exists());
        let taken_over = Tap::reopen(&watch).unwrap();
        assert_eq!(taken_over.tell(), 1);
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "reported\nreported again\n");
        assert!(child.wait().unwrap().success());
        drop(taken_over);
        assert!(!path.exists());
        assert!(Tap::reopen(&watch).is_err(), "there is none to take up");
    }

    #[test]
    fn each_process_that_has_connected_is_reported_and_one_that_is_gone_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let watch = watch(&folder, PressureKind::Socket);
        let tap = Tap::open(&watch).unwrap();
        assert_eq!(tap.tell(), 0);
        let mut one = UnixStream::connect(&watch.path).unwrap();
        let two = UnixStream::connect(&watch.path).unwrap();
        assert_eq!(tap.tell(), 2);
        assert_eq!(one.read(&mut [0; 16]).unwrap(), 1);
        drop(two);
        assert_eq!(tap.tell(), 1);
    }

    #[test]
    fn what_an_earlier_run_left_is_replaced_and_a_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let watch = watch(&folder, PressureKind::Fifo);
        std::mem::forget(Tap::open(&watch).unwrap());
        assert!(watch.path.exists());
        drop(Tap::open(&watch).unwrap());
        fs::write(&watch.path, "data").unwrap();
        let error = Tap::open(&watch).unwrap_err();
        assert!(error.to_string().starts_with("cannot create `"), "{error}");
        assert_eq!(fs::read_to_string(&watch.path).unwrap(), "data");
    }
}
