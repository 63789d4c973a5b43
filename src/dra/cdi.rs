//! CDI files: what the container runtime adds to containers of a claim, and the record of prepared claims.
//!
//! A file is written when a claim is prepared and removed when it is not any more, so that the files are the list of
//! prepared claims after a restart. The lease itself is kept by the supervisor.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::{sys::stat::Mode, unistd::mkfifo};
use serde_json::{Value, json};

use super::claim::{Booking, ClaimName, DEVICE, string};
use cotenant_units::Bytes;

/// Folder of CDI files of one driver.
#[derive(Clone, Debug)]
pub struct CdiFiles {
    folder: PathBuf,
    /// Folder with one folder per claim, for the FIFO of its pod.
    run: PathBuf,
    driver: String,
    /// Socket of the supervisor, if pods get it.
    socket: Option<PathBuf>,
}

/// A prepared claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// The claim.
    pub claim: ClaimName,
    /// Memory up to which its lease may grow.
    pub max: Bytes,
}

/// A file cannot be written, read or removed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {act} `{}`", path.display())]
pub struct CdiError {
    act: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

impl CdiFiles {
    /// Uses files of `driver` in `folder`, and `run` for FIFOs. Containers get the supervisor's
    /// `socket`, if it is given.
    #[must_use]
    pub fn new(folder: &Path, run: &Path, driver: &str, socket: Option<&Path>) -> Self {
        Self {
            folder: folder.to_owned(),
            run: run.to_owned(),
            driver: driver.to_owned(),
            socket: socket.map(Path::to_owned),
        }
    }

    /// Returns the name of a claim's device for the runtime.
    #[must_use]
    pub fn device(&self, uid: &str) -> String {
        format!("{}={uid}", self.kind())
    }

    /// Writes the file of a claim, and creates its FIFO.
    ///
    /// # Errors
    /// If the folders cannot be written.
    pub fn write(&self, booking: &Booking, lease: &str) -> Result<(), CdiError> {
        let uid = &booking.claim.uid;
        let run = self.run.join(uid);
        let fail = |act, path: &Path| {
            let path = path.to_owned();
            move |source| CdiError { act, path, source }
        };
        fs::create_dir_all(&run).map_err(fail("create", &run))?;
        let fifo = run.join(FIFO);
        match mkfifo(&fifo, Mode::from_bits_truncate(0o644)) {
            Ok(()) | Err(nix::errno::Errno::EEXIST) => {}
            Err(error) => return Err(fail("create", &fifo)(error.into())),
        }
        fs::create_dir_all(&self.folder).map_err(fail("create", &self.folder))?;
        let path = self.path(uid);
        let new = path.with_extension("tmp");
        let text = self.content(booking, lease, &run).to_string();
        fs::write(&new, text).map_err(fail("write", &new))?;
        // Complete or not at all: runtimes read the folder at any time.
        fs::rename(&new, &path).map_err(fail("write", &path))
    }

    /// Removes file and FIFO of a claim, if there are any.
    ///
    /// # Errors
    /// If they cannot be removed.
    pub fn remove(&self, uid: &str) -> Result<(), CdiError> {
        let gone = |act, path: &Path, result: io::Result<()>| match result {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(CdiError {
                act,
                path: path.to_owned(),
                source,
            }),
            _ => Ok(()),
        };
        let (path, run) = (self.path(uid), self.run.join(uid));
        gone("remove", &path, fs::remove_file(&path))?;
        gone("remove", &run, fs::remove_dir_all(&run))
    }

    /// Returns whether the claim is prepared.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        self.path(uid).exists()
    }

    /// Returns the prepared claims; files that cannot be read are not among them.
    #[must_use]
    pub fn prepared(&self) -> Vec<Prepared> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let ours = entries.filter(|entry| {
            let name = entry.file_name();
            let name = name.to_str().unwrap_or_default();
            name.starts_with(&self.prefix()) && name.ends_with(".json")
        });
        let read = ours.filter_map(|entry| {
            let text = fs::read(entry.path()).ok()?;
            record(&serde_json::from_slice(&text).ok()?)
        });
        read.collect()
    }

    /// Notifies the pod of a claim that it has to free memory; `false` if it does not read its FIFO.
    #[must_use]
    pub fn notify(&self, uid: &str) -> bool {
        use std::{io::Write as _, os::unix::fs::OpenOptionsExt as _};
        let fifo = fs::OpenOptions::new()
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(self.run.join(uid).join(FIFO));
        // A full FIFO has an unread notification.
        fifo.is_ok_and(|mut fifo| {
            let written = fifo.write_all(b"\n");
            written.is_ok() || written.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
        })
    }

    fn kind(&self) -> String {
        format!("k8s.{}/{DEVICE}", self.driver)
    }

    fn prefix(&self) -> String {
        format!("k8s.{}-{DEVICE}_", self.driver)
    }

    fn path(&self, uid: &str) -> PathBuf {
        self.folder.join(format!("{}{uid}.json", self.prefix()))
    }

    fn content(&self, booking: &Booking, lease: &str, run: &Path) -> Value {
        let Booking {
            claim, min, max, ..
        } = booking;
        let mut env = vec![
            format!("COTENANT_LEASE={lease}"),
            format!("COTENANT_MIN_BYTES={}", min.get()),
            format!("COTENANT_MAX_BYTES={}", max.get()),
        ];
        let bound = |host: &Path, inside: &str, option: &str| json!({ "hostPath": host, "containerPath": inside, "options": ["bind", option] });
        let mut mounts = Vec::new();
        if max > min {
            env.push(format!("MEMORY_PRESSURE_WATCH={INSIDE}/{FIFO}"));
            mounts.push(bound(run, INSIDE, "rw"));
        }
        let socket = self.socket.as_deref();
        let socket =
            socket.and_then(|socket| Some((socket.parent()?, socket.file_name()?.to_str()?)));
        if let Some((folder, name)) = socket {
            env.push(format!("COTENANT_ENDPOINT=unix://{SOCKET_INSIDE}/{name}"));
            // The folder, since a restart of the supervisor replaces the socket.
            mounts.push(bound(folder, SOCKET_INSIDE, "ro"));
        }
        json!({
            "cdiVersion": "0.6.0",
            "kind": self.kind(),
            "annotations": {
                NAMESPACE: claim.namespace,
                NAME: claim.name,
                MAX: max.get().to_string(),
            },
            "devices": [{
                "name": claim.uid,
                "containerEdits": { "env": env, "mounts": mounts },
            }],
        })
    }
}

/// Reads what [`CdiFiles::content`] has written.
fn record(content: &Value) -> Option<Prepared> {
    let annotation = |name: &str| content.get("annotations")?.get(name)?.as_str();
    let uid = string(content, "/devices/0/name")?;
    Some(Prepared {
        claim: ClaimName {
            namespace: annotation(NAMESPACE)?.to_owned(),
            name: annotation(NAME)?.to_owned(),
            uid: uid.to_owned(),
        },
        max: Bytes::new(annotation(MAX)?.parse().ok()?),
    })
}

const NAMESPACE: &str = "cotenant.dev/claim-namespace";
const NAME: &str = "cotenant.dev/claim-name";
const MAX: &str = "cotenant.dev/max-bytes";

/// Name of the FIFO that notifies a pod.
const FIFO: &str = "pressure";

/// Folders in containers.
const INSIDE: &str = "/run/cotenant-claim";
const SOCKET_INSIDE: &str = "/run/cotenant";

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_rpc::v1::LeaseClass;

    #[test]
    fn a_prepared_claim_is_found_again_until_it_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (cdi, run) = (folder.path().join("cdi"), folder.path().join("run"));
        let socket = Path::new("/run/cotenant/cotenant.sock");
        let files = CdiFiles::new(&cdi, &run, "memory.cotenant.dev", Some(socket));
        assert!(files.prepared().is_empty());
        let claim = ClaimName {
            namespace: "default".to_owned(),
            name: "vision".to_owned(),
            uid: "7f-1".to_owned(),
        };
        let booking = Booking {
            claim: claim.clone(),
            pod: "p".to_owned(),
            class: LeaseClass::Interactive,
            min: Bytes::from_mib(64),
            max: Bytes::from_mib(128),
            shares: Vec::new(),
        };
        // Repeated as after a restart of kubelet, beside a file of another driver and a broken one of ours.
        for _ in 0..2 {
            files.write(&booking, "claim-7f-1#3").unwrap();
        }
        fs::write(cdi.join("other.json"), "{}").unwrap();
        fs::write(cdi.join("k8s.memory.cotenant.dev-pool_x.json"), "{").unwrap();
        let max = booking.max;
        assert_eq!(files.prepared(), [Prepared { claim, max }]);
        assert_eq!(files.device("7f-1"), "k8s.memory.cotenant.dev/pool=7f-1");
        let text = fs::read_to_string(files.path("7f-1")).unwrap();
        for part in [
            "COTENANT_LEASE=claim-7f-1#3",
            "MEMORY_PRESSURE_WATCH=/run/cotenant-claim/pressure",
            "COTENANT_ENDPOINT=unix:///run/cotenant/cotenant.sock",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!files.notify("7f-1"), "no pod reads it");
        for _ in 0..2 {
            files.remove("7f-1").unwrap();
        }
        assert!(files.prepared().is_empty() && !files.has("7f-1") && !run.join("7f-1").exists());
    }
}
