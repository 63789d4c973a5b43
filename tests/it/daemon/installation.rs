//! A folder in which the program runs as a child process, with helpers to query it.

use std::{
    fs,
    io::Read as _,
    net::SocketAddr,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::Mutex,
    time::{Duration, Instant},
};

use cotenant::{
    cli::stage::ALLOCATOR,
    rpc::{
        Endpoint,
        v1::{
            GetStatusRequest, GetStatusResponse, Worker, lease_service_client::LeaseServiceClient,
            operator_service_client::OperatorServiceClient,
        },
    },
};
use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tonic::transport::Channel;

use crate::{
    http::client::{Answer, Connection, get, post_form, post_json, request, with},
    support::{PATIENCE, eventually, fixture, runs},
};

pub(super) const PROGRAM: &str = env!("CARGO_BIN_EXE_cotenant");

/// Polling interval for slow conditions.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(5);

/// Folder with a configuration, on which daemons run one after another.
pub(super) struct Installation {
    /// Sessions of all daemons started here, which include their workers.
    sessions: Mutex<Vec<u32>>,
    folder: tempfile::TempDir,
    pub(super) program: String,
    /// If set, a neighbour runs in the same session: while a file `come` exists, a process unknown to the daemon
    /// allocates this many MiB within a second, holds them for another, and ends.
    pub(super) neighbour: Option<u32>,
    /// Environment variables for daemons started from now on.
    pub(super) environment: Vec<(String, String)>,
    /// Sockets passed to daemons as by systemd, with their names.
    pub(super) passed: Vec<(&'static str, OwnedFd)>,
    /// `cgroup.procs` of the control group for daemons and commands.
    pub(super) group: Option<PathBuf>,
}

pub(super) struct Daemon<'installation> {
    installation: &'installation Installation,
    child: Guard,
    channel: Channel,
    /// Its HTTP address; port 1 of loopback if it has none.
    pub(super) http: SocketAddr,
}

/// Returns `budget:` and `shedding:` of a small budget that counts only the daemon's own processes.
pub(super) fn budget(mib: u32) -> String {
    format!(
        "budget: {{total: {}MiB, reserve: 64MiB, scope: session, hysteresis: 4MiB, dwell: 300ms, sample_max: 100ms}}\n\
         shedding: {{reclaim_min: 8MiB}}\n",
        mib + 64
    )
}

/// Returns `llm:` with the demo model and this many tokens of context, 2 KiB each.
pub(super) fn demo_model(context: u32) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/demo-model/demo.gguf");
    model(&path, context)
}

/// Returns `llm:` with any model, whose KV capacity is that of its context.
pub(super) fn model(path: &Path, context: u32) -> String {
    format!(
        "llm: {{path: {}, name: demo, threads: 1, context: {context}, kv_floor: 128, conversations: 0}}\n",
        path.display()
    )
}

/// Returns `response_format` for an answer of thousands of tokens.
pub(super) fn long_form() -> Value {
    // Many texts of one form, for which the allowed tokens are computed once.
    let schema =
        json!({"type": "array", "minItems": 160, "items": {"type": "string", "minLength": 60}});
    json!({"type": "json_schema", "json_schema": {"name": "long", "schema": schema}})
}

/// Returns an entry of `workers:` for our recogniser with both sizes.
pub(super) fn asr() -> String {
    format!(
        "  - name: asr
    role: asr
    argv: [\"${{SELF}}\", worker, asr, --socket, \"${{SOCKET}}\", --vocabulary, \"${{VARIANT}}\", --grammar, {}]
    restart: {{backoff: 50ms}}
    memory:
      variants:
        - {{name: grammar, bytes: 40MiB, peak: 48MiB}}
        - {{name: open, bytes: 110MiB, peak: 116MiB}}
",
        fixture("home.gram").display()
    )
}

/// Returns an entry of `workers:` for our voice.
pub(super) fn tts() -> String {
    "  - name: tts
    role: tts
    argv: [\"${SELF}\", worker, tts, --socket, \"${SOCKET}\"]
    memory: {steady: 10MiB, peak: 16MiB, recycle_above: none}
"
    .to_owned()
}

/// Returns an entry of `workers:` for vectors by an encoder.
pub(super) fn encoder() -> String {
    format!(
        "  - name: encoder
    role: embedding
    argv: [\"${{SELF}}\", worker, embed, --model, {}, --port, \"${{PORT}}\", --threads, \"1\"]
    restart: {{backoff: 50ms}}
    memory: {{steady: 20MiB, peak: 40MiB, recycle_above: none}}
",
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures/bert/bert.gguf")
            .display()
    )
}

/// Returns an entry of `workers:` for vectors by the demo model.
pub(super) fn embedder() -> String {
    format!(
        "  - name: embedder
    role: embedding
    argv: [\"${{SELF}}\", worker, embed, --model, {}, --port, \"${{PORT}}\", --context, \"256\", --threads, \"1\"]
    restart: {{backoff: 50ms}}
    memory: {{steady: 40MiB, peak: 60MiB, recycle_above: none}}
",
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("deploy/demo-model/demo.gguf")
            .display()
    )
}

/// Returns an entry of `workers:` that needs nothing installed, and holds 2 MiB.
///
/// It is never recycled: the kernel maps 4 to 24 MiB of a debug build's text, depending on the size of the file's
/// folios in the page cache.
pub(super) fn ballast() -> String {
    "  - name: ballast
    role: other
    argv: [\"${SELF}\", worker, ballast, 2MiB]
    ready: {kind: log, text: holding, timeout: 20s}
    restart: {backoff: 50ms}
    memory: {steady: 12MiB, peak: 16MiB, recycle_above: none}
"
    .to_owned()
}

impl Installation {
    /// Creates a folder with a configuration: `sections`, and those that set the paths.
    pub(super) fn new(sections: &str) -> Self {
        let installation = Self {
            sessions: Mutex::default(),
            folder: tempfile::tempdir().unwrap(),
            program: PROGRAM.to_owned(),
            neighbour: None,
            environment: Vec::new(),
            passed: Vec::new(),
            group: None,
        };
        installation.configure(sections);
        installation
    }

    /// Uses the release build, if there is one, for clients that request many answers.
    pub(super) fn prefer_release(&mut self) {
        if let Some(release) = std::env::var_os("COTENANT_RELEASE_BIN") {
            self.program = release.into_string().unwrap();
        }
    }

    /// Rewrites the configuration, with a free port for HTTP.
    pub(super) fn configure(&self, sections: &str) {
        self.configure_with_http(sections, "127.0.0.1:0");
    }

    /// Rewrites the configuration, with an address for HTTP. `{FOLDER}` in `sections` is replaced by the folder.
    pub(super) fn configure_with_http(&self, sections: &str, listen: &str) {
        let folder = self.folder.path().display();
        let sections = sections.replace("{FOLDER}", &folder.to_string());
        let text = format!(
            "{sections}\
             http: {{listen: {listen}, voices: {{alloy: slt}}}}\n\
             grpc: {{socket: {folder}/cotenant.sock, abstract_name: {}}}\n\
             journal: {{path: {folder}/journal.ndjson}}\n\
             state_dir: {folder}/state\n\
             runtime_dir: {folder}/run\n\
             safe_profile: {{crashes: 0}}\n\
             log: {{filter: info, format: json}}\n",
            self.abstract_name(),
        );
        fs::write(self.config(), text).unwrap();
    }

    /// Rewrites the configuration, with additional lines of `grpc:`.
    pub(super) fn configure_grpc(&self, sections: &str, more: &str) {
        self.configure(sections);
        let text = fs::read_to_string(self.config()).unwrap();
        fs::write(
            self.config(),
            text.replace("grpc: {", &format!("grpc: {{{more}, ")),
        )
        .unwrap();
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) fn config(&self) -> PathBuf {
        self.path("cotenant.yaml")
    }

    /// Returns a name unique to this installation.
    pub(super) fn abstract_name(&self) -> String {
        let name = self.folder.path().file_name().unwrap().to_str().unwrap();
        format!("cotenant-it-{}", name.trim_start_matches('.'))
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.path("cotenant.sock")
    }

    pub(super) fn log(&self) -> String {
        fs::read_to_string(self.path("daemon.log")).unwrap_or_default()
    }

    /// Waits for a text in the log, which a thread of the daemon writes, and returns the log.
    pub(super) async fn logged(&self, text: &str) -> String {
        eventually(text, || self.log().contains(text)).await;
        self.log()
    }

    /// Starts a daemon without waiting.
    pub(super) fn spawn(&self) -> Child {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.path("daemon.log"))
            .unwrap();
        let mut command = match self.neighbour {
            None if !self.passed.is_empty() => {
                let mut command = Command::new("sh");
                command.args(["-c", "LISTEN_PID=$$ exec \"$@\"", "sh", &self.program]);
                command
            }
            None => Command::new(&self.program),
            Some(mib) => {
                let mut command = Command::new("sh");
                command
                    .args(["-c", NEIGHBOURS, "sh"])
                    .arg(self.folder.path())
                    .args([&format!("{mib}MiB"), &self.program]);
                command
            }
        };
        command
            .args(["serve", "--config"])
            .arg(self.config())
            .env_remove("NOTIFY_SOCKET")
            .envs([ALLOCATOR])
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        // Above their final numbers in the child.
        let above = |fd: &OwnedFd| fcntl(fd, FcntlArg::F_DUPFD_CLOEXEC(100)).unwrap();
        let passed: Vec<OwnedFd> =
            // SAFETY: `fcntl` has just created this descriptor.
            self.passed.iter().map(|(_, fd)| unsafe { OwnedFd::from_raw_fd(above(fd)) }).collect();
        if !passed.is_empty() {
            let names: Vec<&str> = self.passed.iter().map(|(name, _)| *name).collect();
            command
                .env("LISTEN_FDS", passed.len().to_string())
                .env("LISTEN_FDNAMES", names.join(":"));
        }
        // SAFETY: `setsid` and `dup2` are async-signal-safe and touch no memory of the parent.
        unsafe {
            // A separate session, so that `scope: session` counts only this daemon and its workers.
            command.pre_exec(move || {
                for (number, fd) in (3..).zip(&passed) {
                    if libc::dup2(fd.as_raw_fd(), number) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                nix::unistd::setsid()
                    .map(drop)
                    .map_err(std::io::Error::from)
            });
        }
        self.join_group(&mut command);
        let child = command.spawn().unwrap();
        self.sessions.lock().unwrap().push(child.id());
        child
    }

    /// Starts a daemon that must fail, and returns its exit status and output.
    pub(super) fn refuses_to_start(&self) -> (ExitStatus, String) {
        let before = self.log().len();
        let mut child = Guard(self.spawn());
        let status = ended(&mut child.0).expect("it runs though it must not");
        (status, self.log()[before..].to_owned())
    }

    /// Starts a daemon and waits until it serves.
    pub(super) async fn start(&self) -> Daemon<'_> {
        let before = self.log().len();
        let mut child = Guard(self.spawn());
        let deadline = Instant::now() + PATIENCE;
        let http = loop {
            let log = self.log();
            if let Some(ready) = log[before..]
                .lines()
                .find(|line| line.contains("cotenant is ready"))
            {
                let ready: Value = serde_json::from_str(ready).unwrap();
                break ready["http"].as_str().unwrap().parse().ok();
            }
            assert!(
                child.0.try_wait().unwrap().is_none(),
                "it ended: {}",
                self.log()
            );
            assert!(
                Instant::now() < deadline,
                "not ready within {PATIENCE:?}: {}",
                self.log()
            );
            tokio::time::sleep(LOOK_AGAIN_AFTER).await;
        };
        let channel = Endpoint::Path(self.socket()).connect().await.unwrap();
        Daemon {
            installation: self,
            child,
            channel,
            http: http.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 1))),
        }
    }

    /// Runs the program as a client of the daemon in this installation.
    pub(super) fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .env(
                "COTENANT_ENDPOINT",
                format!("unix://{}", self.socket().display()),
            )
            .current_dir(self.folder.path());
        self.join_group(&mut command);
        command.output().unwrap()
    }

    /// Makes processes start in the control group.
    fn join_group(&self, command: &mut Command) {
        let Some(group) = &self.group else { return };
        let procs = fs::OpenOptions::new().write(true).open(group).unwrap();
        // SAFETY: a system call on a descriptor that stays open; `0` means the writing process.
        unsafe {
            command.pre_exec(move || {
                match libc::write(procs.as_raw_fd(), c"0".as_ptr().cast(), 1) {
                    1 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
    }

    /// As [`Self::run`], for a command that must succeed. Returns its output.
    pub(super) fn tell(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// As [`Self::tell`], parsed as JSON.
    pub(super) fn json(&self, arguments: &[&str]) -> Value {
        let mut arguments = arguments.to_vec();
        arguments.extend(["-o", "json"]);
        serde_json::from_str(&self.tell(&arguments)).unwrap()
    }

    /// Returns each event and action as text.
    pub(super) fn events(&self) -> String {
        self.tell(&["events", "--verbose"])
    }

    /// Replays the whole journal: every decision must be identical.
    pub(super) fn replay(&self) -> String {
        let output = self.run(&["replay", "journal.ndjson"]);
        assert!(
            output.status.success(),
            "the journal does not replay: {}",
            said(&output)
        );
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(
            text.lines()
                .all(|line| line.ends_with("identical decisions")),
            "{text}"
        );
        text
    }
}

impl Drop for Installation {
    /// A killed daemon, also after a failed test, leaves its workers running.
    fn drop(&mut self) {
        let sessions = self.sessions.get_mut().unwrap();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            let session = nix::unistd::getsid(Some(Pid::from_raw(pid)));
            if session.is_ok_and(|session| sessions.contains(&session.as_raw().unsigned_abs())) {
                let _gone = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }
}

impl Daemon<'_> {
    pub(super) fn pid(&self) -> u32 {
        self.child.0.id()
    }

    pub(super) fn operator(&self) -> OperatorServiceClient<Channel> {
        OperatorServiceClient::new(self.channel.clone())
    }

    pub(super) fn leases(&self) -> LeaseServiceClient<Channel> {
        LeaseServiceClient::new(self.channel.clone())
    }

    pub(super) async fn status(&self) -> GetStatusResponse {
        let answer = self.operator().get_status(GetStatusRequest {}).await;
        answer
            .unwrap_or_else(|status| panic!("{status}: {}", self.installation.log()))
            .into_inner()
    }

    pub(super) async fn until(
        &self,
        what: &str,
        wanted: impl Fn(&GetStatusResponse) -> bool,
    ) -> GetStatusResponse {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status().await;
            if wanted(&status) {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "not within {PATIENCE:?}: {what}: {status:#?}\n{}",
                self.installation.log()
            );
            tokio::time::sleep(LOOK_AGAIN_AFTER).await;
        }
    }

    /// Waits until the engine has its full plan and every worker is ready.
    pub(super) async fn whole(&self) -> GetStatusResponse {
        self.until("whole", |status| whole(status) && workers_ready(status))
            .await
    }

    /// Requests a greedy answer to one question.
    pub(super) async fn ask(&self, question: &str) -> Answer {
        self.chat(json!({ "messages": [{"role": "user", "content": question}] }))
            .await
    }

    /// Calls `/v1/chat/completions` with these fields; greedy unless they set otherwise.
    pub(super) async fn chat(&self, fields: Value) -> Answer {
        post_json(self.http, "/v1/chat/completions", &chat_body(fields)).await
    }

    /// Returns a connection that streams a story, with these fields.
    pub(super) async fn tells(&self, fields: Value) -> Connection {
        let story = json!({
            "stream": true, "temperature": 2.0, "seed": 3, "messages": [{"role": "user", "content": "tell me a story"}],
        });
        let body = chat_body(with(story, &fields)).to_string();
        let head = [("content-type", "application/json")];
        let mut connection = Connection::open(self.http).await;
        let path = "/v1/chat/completions";
        connection
            .send(&request("POST", path, &head, body.as_bytes()))
            .await;
        connection
    }

    /// As [`Self::chat`], with a time limit for the whole answer.
    pub(super) async fn chat_within(&self, silence_max: Duration, fields: Value) -> Answer {
        let body = chat_body(fields).to_string();
        let headers = [("content-type", "application/json")];
        let mut connection = Connection::open(self.http)
            .await
            .with_silence_max(silence_max);
        connection
            .send_lossy(&request(
                "POST",
                "/v1/chat/completions",
                &headers,
                body.as_bytes(),
            ))
            .await;
        connection.answer().await
    }

    pub(super) async fn speak(&self, text: &str) -> Answer {
        let body =
            json!({ "model": "tts-1", "voice": "alloy", "input": text, "response_format": "wav" });
        post_json(self.http, "/v1/audio/speech", &body).await
    }

    pub(super) async fn hear(&self, wav: &[u8]) -> Answer {
        let fields = [
            ("model", None, &b"whisper-1"[..]),
            ("file", Some("a.wav"), wav),
        ];
        post_form(self.http, "/v1/audio/transcriptions", &fields).await
    }

    /// Returns the value of a metric; `name` includes the labels.
    pub(super) async fn metric(&self, name: &str) -> Option<f64> {
        let answer = get(self.http, "/metrics").await;
        let line = answer
            .text()
            .lines()
            .find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim().parse().unwrap())
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill(pid_of(self.pid()), signal).unwrap();
    }

    /// Ends it like a service manager, and checks the result: no process remains, the exit code is 0, no thread
    /// panicked, and the journal replays.
    pub(super) async fn end(self) {
        self.end_after(&[]).await;
    }

    /// [`Self::end`] after injected faults: the log contains errors with these messages, and no others.
    pub(super) async fn end_after(mut self, faults: &[&str]) {
        let workers = pids(&self.status().await);
        self.signal(Signal::SIGTERM);
        let status = ended(&mut self.child.0).expect("it does not end on SIGTERM");
        let log = self.installation.log();
        assert_eq!(status.code(), Some(0), "{log}");
        for pid in workers {
            assert!(!runs(pid), "worker {pid} has outlived its supervisor");
        }
        assert!(!log.contains("panicked"), "{log}");
        let errors = || {
            log.lines()
                .filter(|line| line.contains("\"level\":\"ERROR\""))
        };
        let planted = |line: &str| faults.iter().any(|fault| line.contains(fault));
        assert!(errors().all(planted), "{log}");
        for fault in faults {
            assert!(
                errors().any(|line| line.contains(fault)),
                "no error `{fault}`: {log}"
            );
        }
        self.installation.replay();
    }

    /// Waits for its end without requesting it.
    pub(super) fn ends(mut self) -> ExitStatus {
        ended(&mut self.child.0).expect("it does not end")
    }

    /// Kills it like the OOM killer, and waits for its end.
    pub(super) fn kill(mut self) {
        self.child.0.kill().unwrap();
        self.child.0.wait().unwrap();
    }
}

/// Replaces this process by the daemon, next to neighbours that are not its children.
const NEIGHBOURS: &str = r#"
folder=$1 mib=$2 program=$3
( ( while [ -d "$folder" ] && [ ! -e "$folder/over" ]; do
        [ -e "$folder/come" ] && "$program" worker ballast "$mib" --rate "$mib" --hold 1
        sleep 0.5
    done ) </dev/null >/dev/null 2>&1 & )
shift 2
exec "$@"
"#;

struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

/// Waits for a process to end; `None` on timeout.
fn ended(child: &mut Child) -> Option<ExitStatus> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(LOOK_AGAIN_AFTER);
    }
    None
}

/// Returns the body of a chat request: `fields`, with settings that make the answer reproducible.
pub(super) fn chat_body(mut fields: Value) -> Value {
    let mut body = json!({ "model": "demo", "temperature": 0, "max_tokens": 200 });
    body.as_object_mut()
        .unwrap()
        .append(fields.as_object_mut().unwrap());
    body
}

/// Returns the text of a non-streamed chat answer.
pub(super) fn content(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["choices"][0]["message"]["content"]
        .as_str()
        .unwrap()
        .to_owned()
}

/// Returns whether the engine has its full plan.
pub(super) fn whole(status: &GetStatusResponse) -> bool {
    status.engine.as_ref().is_some_and(|engine| {
        engine.layers_total > 0
            && !engine.changing
            && engine.layers_resident == engine.layers_total
            && engine.kv_capacity_tokens == engine.kv_capacity_full_tokens
    })
}

pub(super) fn workers_ready(status: &GetStatusResponse) -> bool {
    use cotenant::rpc::v1::WorkerState;
    status
        .workers
        .iter()
        .all(|worker| worker.state() == WorkerState::Ready)
}

pub(super) fn worker<'status>(status: &'status GetStatusResponse, name: &str) -> &'status Worker {
    status
        .workers
        .iter()
        .find(|worker| worker.name == name)
        .unwrap()
}

pub(super) fn pids(status: &GetStatusResponse) -> Vec<u32> {
    status
        .workers
        .iter()
        .filter_map(|worker| worker.pid)
        .collect()
}

pub(super) fn pid_of(pid: u32) -> Pid {
    Pid::from_raw(i32::try_from(pid).unwrap())
}

pub(super) fn said(output: &Output) -> String {
    format!(
        "{:?}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Returns the anonymous memory of a process from the kernel, in bytes.
///
/// Not its PSS: the share of the program's own pages changes whenever another process of the same program, such as a
/// concurrent test, starts or ends.
pub(super) fn anonymous(pid: u32) -> u64 {
    let mut text = String::new();
    fs::File::open(format!("/proc/{pid}/smaps_rollup"))
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Anonymous:"))
        .unwrap();
    line.trim()
        .trim_end_matches("kB")
        .trim()
        .parse::<u64>()
        .unwrap()
        * 1024
}
