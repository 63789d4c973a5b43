//! Unusable model files: each is reported with its fault, and nothing else is affected.

use std::{fs, os::fd::AsRawFd as _, path::Path};

use crate::{http::client::get, weights::Weights as _};
use cotenant::{
    engine::{
        gguf::GgmlDType,
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
    },
    rpc::v1::{EngineState, GetStatusResponse, WorkerState},
};

use super::installation::{
    Installation, ballast, budget, content, demo_model, model, said, worker,
};

/// Writes a small model of a real family.
fn write(path: &Path) {
    Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 7)
        .write(path)
        .unwrap();
}

/// Offset of `text` in `bytes`.
fn find(bytes: &[u8], text: &[u8]) -> usize {
    bytes
        .windows(text.len())
        .position(|window| window == text)
        .unwrap()
}

/// Starts a daemon with a bad model: the status, the APIs, `check` and the events must name the fault of the file, and
/// the worker and the leases must still work.
async fn is_refused(break_it: impl Fn(&Path), expected: &[&str]) {
    let installation = Installation::new("");
    let path = installation.path("bad.gguf");
    break_it(&path);
    installation.configure(&format!(
        "{}{}workers:\n{}",
        budget(256),
        model(&path, 1024),
        ballast()
    ));
    let daemon = installation.start().await;
    let status = daemon
        .until("the engine has failed and the worker is ready", |status| {
            status
                .engine
                .as_ref()
                .is_some_and(|engine| engine.state() == EngineState::Failed)
                && worker(status, "ballast").state() == WorkerState::Ready
        })
        .await;
    let failure = status.engine.unwrap().failure;
    let chat = daemon.ask("hello").await;
    assert_eq!(
        (chat.status, chat.error_code().as_str()),
        (500, "model_failed"),
        "{}",
        chat.text()
    );
    let check = installation.run(&["check", installation.config().to_str().unwrap()]);
    assert_eq!(check.status.code(), Some(78), "{}", said(&check));
    for (place, text) in [
        ("the status", failure.clone()),
        ("the answer", chat.text().to_owned()),
        (
            "the check",
            String::from_utf8_lossy(&check.stderr).into_owned(),
        ),
        ("the events", installation.events()),
    ] {
        for word in expected {
            assert!(text.contains(word), "{place} does not say `{word}`: {text}");
        }
    }
    assert!(installation.tell(&["status"]).contains("failed"));
    assert_eq!(daemon.status().await.workers.len(), 1);
    daemon.end_after(&["the LLM has failed"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_model_is_named() {
    is_refused(|_| (), &["bad.gguf", "No such file or directory"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_truncated_model_is_named() {
    let cut = |path: &Path| {
        write(path);
        let bytes = fs::read(path).unwrap();
        fs::write(path, &bytes[..bytes.len() * 2 / 3]).unwrap();
    };
    is_refused(cut, &["bad.gguf", "ends at byte", "unfinished download"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_file_is_named() {
    let foreign = |path: &Path| {
        fs::write(path, "PK\u{3}\u{4} this is an archive, and no model at all").unwrap();
    };
    is_refused(foreign, &["bad.gguf", "GGUF"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_architecture_is_named() {
    let rename = |path: &Path| {
        write(path);
        let mut bytes = fs::read(path).unwrap();
        let at = find(&bytes, b"general.architecture") + "general.architecture".len() + 4 + 8;
        bytes[at..at + 5].copy_from_slice(b"mamba");
        fs::write(path, bytes).unwrap();
    };
    is_refused(rename, &["bad.gguf", "mamba", "qwen35"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_quantisation_is_named() {
    let retype = |path: &Path| {
        write(path);
        let mut bytes = fs::read(path).unwrap();
        let name = b"blk.0.attn_q.weight";
        let at = find(&bytes, name) + name.len() + 4 + 16;
        bytes[at..at + 4].copy_from_slice(&16u32.to_le_bytes()); // IQ2_XXS
        fs::write(path, bytes).unwrap();
    };
    is_refused(retype, &["bad.gguf", "blk.0.attn_q.weight"]).await;
}

/// File that no other process can open: an opener blocks in the kernel until this is dropped, or for
/// `/proc/sys/fs/lease-break-time`, 45 s by default.
struct Shut(fs::File);

impl Shut {
    /// Returns `None` if the file system does not support leases.
    fn new(path: &Path) -> Option<Self> {
        let file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .unwrap();
        // The kernel notifies the owner of the lease about a waiting process by a signal, which is ignored.
        // SAFETY: two calls on a descriptor of our own, with numbers for arguments.
        let taken = unsafe {
            libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGWINCH);
            libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK)
        };
        (taken == 0).then_some(Self(file))
    }
}

/// `F_SETSIG` in `<fcntl.h>`, missing in the library.
const F_SETSIG: libc::c_int = 10;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_on_a_disk_that_hangs_is_reported_and_loaded_when_the_disk_answers() {
    let installation = Installation::new("");
    let path = installation.path("model.gguf");
    fs::copy(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/demo-model/demo.gguf"),
        &path,
    )
    .unwrap();
    let Some(shut) = Shut::new(&path) else {
        eprintln!("left out: this file system has no leases");
        return;
    };
    installation.configure(&format!("{}{}", budget(256), model(&path, 1024)));
    let daemon = installation.start().await;
    let status = daemon
        .until("reported", |status| {
            let engine = status.engine.as_ref();
            engine.is_some_and(|engine| engine.state() == EngineState::Failed)
        })
        .await;
    let failure = status.engine.unwrap().failure;
    for word in [
        "model.gguf",
        "the disk did not respond for 4",
        "the limit is 4000 ms",
        "hint: ",
    ] {
        assert!(failure.contains(word), "{failure}");
    }
    // The daemon survives, and reports the failure.
    assert_eq!(daemon.ask("hello").await.error_code(), "engine_lost");
    assert!(installation.tell(&["status"]).contains("failed"));
    assert!(
        installation
            .events()
            .contains("it is inspected again once the disk responds")
    );
    drop(shut.0);
    daemon.whole().await;
    assert!(!content(&daemon.ask("hello").await).is_empty());
    daemon.end_after(&[]).await;
    assert_eq!(installation.replay().lines().count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_good_model_after_a_bad_one_is_loaded_by_a_new_start() {
    let installation = Installation::new("");
    let path = installation.path("model.gguf");
    fs::write(&path, "nothing").unwrap();
    installation.configure(&format!("{}{}", budget(256), model(&path, 1024)));
    let daemon = installation.start().await;
    daemon
        .until("failed", |status| {
            status
                .engine
                .as_ref()
                .is_some_and(|engine| engine.state() == EngineState::Failed)
        })
        .await;
    daemon.end_after(&["the LLM has failed"]).await;
    installation.configure(&format!("{}{}", budget(256), demo_model(1024)));
    let daemon = installation.start().await;
    daemon.whole().await;
    assert!(!content(&daemon.ask("hello").await).is_empty());
    daemon.end_after(&["the LLM has failed"]).await;
    assert_eq!(installation.replay().lines().count(), 2);
}

/// Starts without the model's file: overall health and chat report the engine's failure, and the worker serves.
async fn failed_for_want_of_a_file(installation: &Installation) -> super::installation::Daemon<'_> {
    let daemon = installation.start().await;
    daemon
        .until("the engine has failed", |status| {
            status
                .engine
                .as_ref()
                .is_some_and(|engine| engine.state() == EngineState::Failed)
        })
        .await;
    let chat = daemon.ask("hello").await;
    assert_eq!(
        (chat.status, chat.error_code().as_str()),
        (500, "model_failed"),
        "{}",
        chat.text()
    );
    assert!(
        installation
            .run(&["health", "--service", "cotenant.engine"])
            .status
            .code()
            != Some(0)
    );
    daemon
}

/// Moves the model into place atomically, as a download does.
fn put_in_place(path: &Path) {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/demo-model/demo.gguf");
    let beside = path.with_extension("part");
    fs::copy(demo, &beside).unwrap();
    fs::rename(beside, path).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_was_missing_is_loaded_when_its_file_appears() {
    let installation = Installation::new("");
    let path = installation.path("model.gguf");
    installation.configure(&format!("{}{}", budget(256), model(&path, 1024)));
    let daemon = failed_for_want_of_a_file(&installation).await;
    put_in_place(&path);
    daemon.whole().await;
    assert!(!content(&daemon.ask("hello").await).is_empty());
    assert_eq!(
        installation
            .run(&["health", "--service", "cotenant.engine"])
            .status
            .code(),
        Some(0)
    );
    daemon.end_after(&["the LLM has failed"]).await;
    assert_eq!(installation.replay().lines().count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_was_missing_is_loaded_by_a_command() {
    let installation = Installation::new("");
    let path = installation.path("model.gguf");
    installation.configure(&format!("{}{}", budget(256), model(&path, 1024)));
    let daemon = failed_for_want_of_a_file(&installation).await;
    put_in_place(&path);
    installation.tell(&["load"]);
    daemon.whole().await;
    assert!(!content(&daemon.ask("hello").await).is_empty());
    daemon.end_after(&["the LLM has failed"]).await;
}

/// Number of log lines reporting a failure of the LLM.
fn failures(installation: &Installation) -> usize {
    installation
        .log()
        .lines()
        .filter(|line| line.contains("the LLM has failed"))
        .count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_is_cut_while_it_answers_fails_permanently_and_comes_back_with_its_file() {
    let installation = Installation::new("");
    let path = installation.path("model.gguf");
    put_in_place(&path);
    installation.configure(&format!("{}{}", budget(256), model(&path, 1024)));
    let daemon = installation.start().await;
    daemon.whole().await;
    assert_eq!(get(daemon.http, "/health").await.status, 200);
    installation.tell(&["shed", "1GiB"]);
    // In place, since the daemon has the file open.
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(0)
        .unwrap();
    assert_ne!(daemon.ask("hello").await.status, 200);
    let failed = |status: &GetStatusResponse| {
        status
            .engine
            .as_ref()
            .is_some_and(|engine| engine.failed_permanently)
    };
    let status = daemon.until("failed permanently", failed).await;
    let failure = status.engine.unwrap().failure;
    assert!(
        failure.contains("it is empty: it has 0 bytes (hint: "),
        "{failure}"
    );
    let lines = failures(&installation);
    for _ in 0..8 {
        let chat = daemon.ask("hello").await;
        assert_eq!(
            (chat.status, chat.error_code().as_str()),
            (500, "model_failed"),
            "{}",
            chat.text()
        );
        assert_eq!(chat.header("x-should-retry"), "false");
    }
    assert_eq!(
        failures(&installation),
        lines,
        "a request that fails is no news: {}",
        installation.log()
    );
    assert!(
        lines <= 2,
        "the read that failed, and what is left of the file: {}",
        installation.log()
    );
    let health = get(daemon.http, "/health").await;
    assert_eq!(
        (health.status, health.json()["llm"]["permanent"].as_bool()),
        (503, Some(true)),
        "{}",
        health.text()
    );
    assert_eq!(get(daemon.http, "/health?live").await.status, 200);
    assert_eq!(
        daemon.metric("cotenant_llm_state{state=\"failed\"}").await,
        Some(1.0)
    );
    let shown = installation.tell(&["status"]);
    let words: Vec<&str> = shown.split_whitespace().collect();
    assert!(
        words.join(" ").contains("no retry until that changes"),
        "{shown}"
    );
    put_in_place(&path);
    daemon.whole().await;
    assert_eq!(daemon.ask("hello").await.status, 200);
    assert_eq!(get(daemon.http, "/health").await.status, 200);
    assert_eq!(
        daemon.metric("cotenant_llm_state{state=\"ready\"}").await,
        Some(1.0)
    );
    daemon.end_after(&["the LLM has failed"]).await;
    assert_eq!(installation.replay().lines().count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_cannot_be_read_now_is_read_again_until_it_can() {
    let installation = Installation::new("");
    let path = installation.path("model.gguf");
    // A link to itself: the error of opening it does not describe the file.
    std::os::unix::fs::symlink(&path, &path).unwrap();
    installation.configure(&format!("{}{}", budget(256), model(&path, 1024)));
    let daemon = installation.start().await;
    let failed = |status: &GetStatusResponse| {
        status
            .engine
            .as_ref()
            .is_some_and(|engine| engine.state() == EngineState::Failed)
    };
    let status = daemon.until("failed", failed).await;
    assert!(!status.engine.unwrap().failed_permanently);
    let again = |status: &GetStatusResponse| {
        // The backoff has doubled, so it has been read more than once.
        let next = status.engine.as_ref().and_then(|engine| engine.next_try);
        next.is_some_and(|left| left.seconds >= 1)
    };
    daemon.until("tried again", again).await;
    let chat = daemon.ask("hello").await;
    assert_eq!(
        (chat.status, chat.error_code().as_str()),
        (503, "engine_lost"),
        "{}",
        chat.text()
    );
    assert_eq!(chat.header("x-should-retry"), "true");
    let log = installation.logged("the LLM has failed").await;
    assert_eq!(failures(&installation), 1, "{log}");
    fs::remove_file(&path).unwrap();
    put_in_place(&path);
    daemon.whole().await;
    assert_eq!(daemon.ask("hello").await.status, 200);
    daemon.end_after(&[]).await;
    assert_eq!(installation.replay().lines().count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_file_and_a_pointer_of_git_lfs_are_named() {
    is_refused(
        |path| fs::write(path, "").unwrap(),
        &["bad.gguf", "it is empty"],
    )
    .await;
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";
    is_refused(
        |path| fs::write(path, pointer).unwrap(),
        &["bad.gguf", "Git LFS", "git lfs pull"],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_ends_in_zeros_is_named() {
    let zeros = |path: &Path| {
        write(path);
        let file = fs::File::options().write(true).open(path).unwrap();
        let bytes = file.metadata().unwrap().len();
        file.set_len(bytes * 2 / 3).unwrap();
        file.set_len(bytes).unwrap();
    };
    is_refused(
        zeros,
        &["bad.gguf", "ends in zeros", "fetch the file again"],
    )
    .await;
}
