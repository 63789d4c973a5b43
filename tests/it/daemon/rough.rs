//! Adverse environments: foreign folders and files, few threads, listeners for all users.

use std::{
    fs,
    os::unix::{
        fs::{MetadataExt as _, PermissionsExt as _, chown, symlink},
        process::CommandExt as _,
    },
    process::{Command, Stdio},
};

use super::installation::{Installation, PROGRAM, budget, workers_ready};

#[test]
fn a_runtime_dir_that_others_can_change_is_refused_with_its_remedy() {
    let installation = Installation::new(&budget(64));
    let folder = installation.path("run");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
    let (status, text) = installation.refuses_to_start();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(
        text.contains("every user may write to it (mode 0777)"),
        "{text}"
    );
    assert!(text.contains("hint: chmod o-w "), "{text}");

    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    if !nix::unistd::geteuid().is_root() {
        println!("left out: only root can give a folder away");
        return;
    }
    chown(&folder, Some(65534), None).unwrap();
    let (status, text) = installation.refuses_to_start();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(
        text.contains("it belongs to uid 65534, and the supervisor runs as uid 0"),
        "{text}"
    );
}

#[test]
fn files_of_the_daemon_that_are_symbolic_links_are_refused_and_what_they_lead_to_is_untouched() {
    for name in ["run/supervisor.lock", "run/book", "journal.ndjson"] {
        let installation = Installation::new(&budget(64));
        let victim = installation.path("victim");
        fs::write(&victim, "precious\n").unwrap();
        fs::create_dir_all(installation.path("run")).unwrap();
        symlink(&victim, installation.path(name)).unwrap();
        let (status, text) = installation.refuses_to_start();
        assert_eq!(status.code(), Some(1), "{text}");
        assert!(
            text.contains(name) && text.contains("is a symbolic link"),
            "{name}: {text}"
        );
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious\n");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_systemd_tells_the_daemon_of_itself_is_not_passed_to_workers() {
    let mut installation = Installation::new(&format!(
        "{}workers:
  - name: teller
    role: other
    argv: [sh, -c, \"env | sed 's/^/has /'; echo reported; exec sleep 1000\"]
    ready: {{kind: log, text: reported}}
    memory: {{steady: 4MiB}}
",
        budget(64)
    ));
    let wrapper = installation.path("as-a-service");
    let script = format!(
        "#!/bin/sh\nCREDENTIALS_DIRECTORY=/creds INVOCATION_ID=7 HF_HOME=/models exec {PROGRAM} \"$@\"\n"
    );
    fs::write(&wrapper, script).unwrap();
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    installation.program = wrapper.to_str().unwrap().to_owned();
    let daemon = installation.start().await;
    daemon
        .until("it has reported its environment", workers_ready)
        .await;
    daemon.end().await;
    let log = installation.log();
    assert!(log.contains("has HF_HOME=/models"), "{log}");
    assert!(
        !log.contains("has CREDENTIALS_DIRECTORY") && !log.contains("has INVOCATION_ID"),
        "{log}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_for_every_network_is_warned_of() {
    let installation = Installation::new(&budget(64));
    installation.configure_with_http(&budget(64), "0.0.0.0:0");
    let daemon = installation.start().await;
    daemon.end().await;
    let log = installation.log();
    let line = log
        .lines()
        .find(|line| line.contains("every network"))
        .unwrap_or_default();
    assert!(
        line.contains("WARN") && line.contains("http.listen"),
        "{log}"
    );
}

#[test]
fn too_few_threads_are_an_error_with_a_remedy_and_no_panic() {
    if !nix::unistd::geteuid().is_root() {
        println!("left out: needs a user without other processes");
        return;
    }
    for threads in [1, 2, 3, 4, 6, 8] {
        let installation = Installation::new(&budget(64));
        let root = installation.config().parent().unwrap().to_owned();
        chown(&root, Some(OTHER_UID), None).unwrap();
        let mut command = Command::new(PROGRAM);
        command
            .args(["serve", "--config"])
            .arg(installation.config())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .uid(OTHER_UID);
        // SAFETY: a system call on numbers.
        unsafe {
            command.pre_exec(move || {
                nix::sys::resource::setrlimit(
                    nix::sys::resource::Resource::RLIMIT_NPROC,
                    threads,
                    threads,
                )
                .map_err(Into::into)
            });
        }
        let mut child = command.spawn().unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(3);
        while child.try_wait().unwrap().is_none() && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let _ = child.kill();
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!text.contains("panicked"), "{threads}: {text}");
        if output.status.code() == Some(1) {
            assert!(
                text.contains("threads") && text.contains("hint: "),
                "{threads}: {text}"
            );
        } else {
            assert!(
                text.contains("cotenant is ready"),
                "{threads}: {:?} {text}",
                output.status
            );
        }
        assert_eq!(fs::metadata(&root).unwrap().uid(), OTHER_UID);
    }
}

/// User without other processes.
const OTHER_UID: u32 = 61_234;
