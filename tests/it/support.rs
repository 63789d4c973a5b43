//! Support shared by several surfaces: real workers in a separate folder.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use cotenant::{
    policy::params::VariantParams,
    probe::ProbeRoot,
    units::Bytes,
    worker::{
        confine::Groups,
        handle::WorkerHandle,
        report::{WorkerEvent, WorkerEventKind},
        spec::{Listen, Readiness, WorkerSpec},
    },
};
use tokio::{sync::mpsc, time::timeout};

/// Time limit of every wait; only a failing test reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Folder for sockets, and the events of the workers in it.
pub(crate) struct Bench {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) events: mpsc::Receiver<WorkerEvent>,
    sender: mpsc::Sender<WorkerEvent>,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let (sender, events) = mpsc::channel(64);
        Self {
            dir: tempfile::tempdir().unwrap(),
            events,
            sender,
        }
    }

    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.sock"))
    }

    /// Returns a specification, to which the caller adds settings.
    pub(crate) fn spec(&self, name: &str, argv: &[&str]) -> WorkerSpec {
        let argv = argv.iter().map(|&word| word.to_owned()).collect();
        WorkerSpec::new(name, argv, Listen::Socket(self.socket(name)))
    }

    /// Returns the specification of a worker without a protocol.
    pub(crate) fn silent_spec(&self, name: &str, argv: &[&str]) -> WorkerSpec {
        WorkerSpec {
            listen: Listen::Nowhere,
            readiness: Readiness::Started,
            ..self.spec(name, argv)
        }
    }

    pub(crate) fn handle(&self, spec: WorkerSpec) -> WorkerHandle {
        self.grouped(
            spec,
            &Groups::none("this supervisor makes no control groups"),
        )
    }

    /// Creates a worker with its own control group, if available.
    pub(crate) fn grouped(&self, spec: WorkerSpec, groups: &Groups) -> WorkerHandle {
        WorkerHandle::new(
            spec,
            ProbeRoot::default(),
            groups.clone(),
            self.sender.clone(),
        )
    }

    /// Creates our recogniser with both sizes.
    pub(crate) fn asr(&self) -> WorkerHandle {
        let grammar = fixture("home.gram");
        let argv = [
            "worker",
            "asr",
            "--socket",
            "${SOCKET}",
            "--vocabulary",
            "${VARIANT}",
            "--grammar",
        ];
        let mut words = vec![env!("CARGO_BIN_EXE_cotenant")];
        words.extend(argv);
        words.push(grammar.to_str().unwrap());
        let mut spec = self.spec("asr", &words);
        let variant = |name: &str, mib| VariantParams {
            name: name.to_owned(),
            steady: Bytes::from_mib(mib),
            peak: Bytes::from_mib(mib + 16),
        };
        spec.memory.variants = vec![variant("grammar", 40), variant("open", 112)];
        self.handle(spec)
    }

    pub(crate) fn tts(&self) -> WorkerHandle {
        let argv = [
            env!("CARGO_BIN_EXE_cotenant"),
            "worker",
            "tts",
            "--socket",
            "${SOCKET}",
        ];
        self.handle(self.spec("tts", &argv))
    }

    /// Returns the next event that is neither a measurement nor a death certificate.
    pub(crate) async fn next(&mut self) -> WorkerEventKind {
        loop {
            let event = timeout(PATIENCE, self.events.recv())
                .await
                .unwrap()
                .unwrap();
            if !matches!(
                event.kind,
                WorkerEventKind::Measured(_) | WorkerEventKind::Died(_)
            ) {
                return event.kind;
            }
        }
    }
}

/// Starts a worker and waits until it is ready.
pub(crate) async fn started(worker: &WorkerHandle) -> u32 {
    let pid = worker.start(None).await.unwrap();
    assert!(worker.ready().await, "{} did not get ready", worker.name());
    pid
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// Returns 16 kHz samples that count as speech: a short silence, then loud samples.
pub(crate) fn voiced(samples: usize) -> Vec<i16> {
    (0..samples)
        .map(|at| {
            if at % 1600 < 320 {
                0
            } else if at % 64 < 32 {
                8000
            } else {
                -8000
            }
        })
        .collect()
}

/// Returns whether the speech libraries are installed. If they are required, their absence fails the test.
pub(crate) fn speech_is_installed() -> bool {
    let missing: Vec<&str> = [
        "libpocketsphinx.so.3",
        "libsphinxbase.so.3",
        "libflite.so.1",
        "libflite_cmu_us_slt.so.1",
    ]
    .into_iter()
    .filter(|name| {
        !["/usr/lib", "/usr/local/lib", "/lib"]
            .iter()
            .any(|folder| holds(Path::new(folder), name, 2))
    })
    .chain(
        [(
            "pocketsphinx-en-us",
            "/usr/share/pocketsphinx/model/en-us/en-us.lm.bin",
        )]
        .into_iter()
        .filter_map(|(package, file)| (!Path::new(file).is_file()).then_some(package)),
    )
    .collect();
    if missing.is_empty() {
        return true;
    }
    let required = ["CI", "COTENANT_REQUIRE_SPEECH"]
        .iter()
        .any(|name| std::env::var_os(name).is_some());
    let remedy = "apt-get install libpocketsphinx3 libsphinxbase3 pocketsphinx-en-us libflite1";
    assert!(
        !required,
        "speech is required here, but {missing:?} is missing: {remedy}"
    );
    eprintln!("left out: {missing:?} is missing ({remedy})");
    false
}

fn holds(folder: &Path, name: &str, depth: usize) -> bool {
    folder.join(name).exists()
        || depth > 0
            && std::fs::read_dir(folder).is_ok_and(|entries| {
                entries.flatten().any(|entry| {
                    entry.file_type().is_ok_and(|kind| kind.is_dir())
                        && holds(&entry.path(), name, depth - 1)
                })
            })
}

/// Waits until `check` holds; the kernel takes a moment to end a killed process.
pub(crate) async fn eventually(what: &str, check: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !check() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Returns processes whose parent is this one.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid: &u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // The name in parentheses may contain any character.
            let rest = stat.rsplit(')').next().unwrap_or_default();
            let mut fields = rest.split_whitespace();
            fields.next() != Some("Z") && fields.next() == Some(&parent.to_string())
        })
        .collect()
}

/// Returns whether a process runs: it exists and is not a zombie.
pub(crate) fn runs(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| {
            stat.rsplit_once(") ")
                .map(|(_, rest)| !rest.starts_with(['Z', 'X']))
        })
        .unwrap_or(false)
}

/// Returns a connection opened by another user: a thread switches to that user, and connects. `None` without the
/// privilege.
pub(crate) async fn channel_of(abstract_name: &str, uid: u32) -> Option<tonic::transport::Channel> {
    let name = abstract_name.to_owned();
    let stream = std::thread::spawn(move || {
        // Unlike the C library's wrapper, the raw call changes only the calling thread.
        // SAFETY: setresuid takes integers and touches no memory; the thread ends with this closure.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) } == 0;
        changed.then(|| {
            let address =
                <std::os::unix::net::SocketAddr as std::os::linux::net::SocketAddrExt>::from_abstract_name(name)
                    .unwrap();
            std::os::unix::net::UnixStream::connect_addr(&address).unwrap()
        })
    })
    .join()
    .unwrap()?;
    stream.set_nonblocking(true).unwrap();
    let mut stream = Some(tokio::net::UnixStream::from_std(stream).unwrap());
    let connector = tower::service_fn(move |_| {
        let stream = stream.take().expect("connects once");
        async move { Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream)) }
    });
    let endpoint = tonic::transport::Endpoint::from_static("http://localhost");
    Some(endpoint.connect_with_connector(connector).await.unwrap())
}
