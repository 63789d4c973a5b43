//! The LLM on a GPU: the unmodified daemon with an imitated driver, compared with the CPU.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use cotenant::rpc::v1::EngineState;
use serde_json::{Value, json};

use super::installation::{Daemon, Installation, budget, content, demo_model, whole};
use crate::{
    http::client::Answer,
    support::{PATIENCE, eventually},
};

/// Two short answers, and three that end at [`TOKENS_MAX`]: more than 256 tokens in total.
const QUESTIONS: [&str; 5] = [
    "tell me a long story",
    "turn on the kitchen light",
    "please tell me a long story",
    "set a timer for ten minutes",
    "tell me a very long story",
];
const TOKENS_MAX: u32 = 88;
/// Time limit of a complete answer: the imitation takes 13 to 22 s of one core for its 5,500 kernels, and a busy
/// machine provides only a part of a core. Slightly above the default of `llm.answer_time_max`, at which the daemon
/// itself ends an answer.
const ANSWER_MAX: Duration = Duration::from_secs(310);

async fn ask(daemon: &Daemon<'_>, question: &str) -> Answer {
    let messages = json!([{"role": "user", "content": question}]);
    daemon
        .chat_within(
            ANSWER_MAX,
            json!({ "messages": messages, "max_tokens": TOKENS_MAX }),
        )
        .await
}

/// Builds the imitated driver (`tests/cuda/driver`) if needed; returns its folder.
fn driver() -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda");
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/build");
    let built = Command::new(build)
        .arg(&out)
        .arg("driver")
        .output()
        .unwrap();
    assert!(built.status.success(), "g++ is needed: {built:?}");
    out.join("driver")
}

/// Returns the configuration of the demo model on `device`. The questions fit the smallest context: a longer answer may
/// be cut short by a shed.
fn sections(device: &str) -> String {
    let model = demo_model(16_384).replace(
        "kv_floor: 128",
        &format!("kv_floor: 1024, device: {device}"),
    );
    format!("{}{model}", budget(256))
}

/// Makes the next daemons of an installation find the imitated driver with these settings; returns its log.
fn with_driver(installation: &mut Installation, settings: &[(&str, &str)]) -> PathBuf {
    let log = installation.path("driver.ndjson");
    installation.environment = vec![
        ("LD_LIBRARY_PATH".to_owned(), driver().display().to_string()),
        ("FAKE_CUDA_LOG".to_owned(), log.display().to_string()),
    ];
    let settings = settings
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    installation.environment.extend(settings);
    log
}

/// Returns the answers to all questions, and their token count.
async fn answers(daemon: &Daemon<'_>) -> (Vec<String>, u64) {
    let (mut texts, mut tokens) = (Vec::new(), 0);
    for question in QUESTIONS {
        let answer = ask(daemon, question).await;
        tokens += answer.json()["usage"]["completion_tokens"]
            .as_u64()
            .unwrap_or(0);
        texts.push(content(&answer));
    }
    (texts, tokens)
}

/// Checks the driver's log of an ended process: everything was released, and no call was wrong. Returns the log.
fn clean_exit(log: &Path) -> Value {
    let text = fs::read_to_string(log).unwrap();
    let notes: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    for note in &notes {
        let left = note["left"].as_object();
        let is_empty = left.is_none_or(|left| left.values().all(|count| count == 0));
        assert!(is_empty && note["event"] != "finding", "{text}");
    }
    let exit = notes
        .into_iter()
        .find(|note| note["event"] == "exit")
        .unwrap();
    assert_eq!(exit["contexts_left"], 0, "{text}");
    exit
}

/// Asks all questions of a daemon on the CPU and of one on the imitated GPU: with ample memory; while memory is shed
/// and regrown; with the whole model streamed; with each KV type.
async fn answers_as_on_the_cpu(settings: &[(&str, &str)]) {
    let mut installation = Installation::new(&sections("cpu"));
    installation.prefer_release();
    let daemon = installation.start().await;
    daemon.whole().await;
    let (expected, tokens) = answers(&daemon).await;
    assert!(tokens >= 256, "{tokens} tokens");
    daemon.end().await;

    let log = with_driver(&mut installation, settings);
    installation.configure(&sections("cuda"));
    let daemon = installation.start().await;
    daemon.whole().await;
    let over = AtomicBool::new(false);
    let asking = async {
        let answers = answers(&daemon).await;
        over.store(true, Ordering::Relaxed);
        answers
    };
    let shedding = async {
        while !over.load(Ordering::Relaxed) {
            for command in [&["shed", "64MiB"][..], &["regrow"]] {
                tokio::time::sleep(Duration::from_millis(300)).await;
                let _refused_at_times = tokio::task::block_in_place(|| installation.run(command));
            }
        }
    };
    let (got, ()) = tokio::join!(asking, shedding);
    assert_eq!(got.0, expected, "{settings:?}");
    let sheds = daemon.status().await.engine.unwrap().sheds;
    assert!(sheds >= 2, "{sheds} sheds only");

    tokio::task::block_in_place(|| installation.run(&["shed", "64MiB"]));
    let engine = daemon.status().await.engine.unwrap();
    assert!(engine.layers_resident < engine.layers_total, "{engine:?}");
    assert_eq!(
        content(&ask(&daemon, QUESTIONS[1]).await),
        expected[1],
        "streamed"
    );
    tokio::task::block_in_place(|| installation.run(&["regrow"]));
    daemon.until("grown back", whole).await;
    for kind in ["q8", "q4", "f16"] {
        tokio::task::block_in_place(|| installation.tell(&["kv-type", kind]));
        assert_eq!(
            content(&ask(&daemon, QUESTIONS[3]).await),
            expected[3],
            "{kind}"
        );
    }
    daemon.end().await;
    let exit = clean_exit(&log);
    println!(
        "{settings:?}: {tokens} tokens, {sheds} sheds, {} kernels",
        exit["executed"]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_computes_at_once_answers_as_the_cpu() {
    answers_as_on_the_cpu(&[("FAKE_CUDA_ORDER", "eager"), ("FAKE_CUDA_DEVICE", "orin")]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_computes_as_late_as_it_may_answers_as_the_cpu() {
    answers_as_on_the_cpu(&[("FAKE_CUDA_ORDER", "late"), ("FAKE_CUDA_DEVICE", "hopper")]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_computes_at_any_moment_answers_as_the_cpu() {
    answers_as_on_the_cpu(&[("FAKE_CUDA_ORDER", "7"), ("FAKE_CUDA_DEVICE", "orin")]).await;
}

/// Requests long answers until the GPU fails: during the first one, since load, calibration and the previous answer
/// take 1,000 kernels, and a token 62. Returns an answer from before, and one from after the recovery.
async fn broken_in_an_answer(installation: &Installation) -> (String, String) {
    let daemon = installation.start().await;
    daemon.whole().await;
    let before = content(&ask(&daemon, QUESTIONS[1]).await);
    let mut lost = None;
    for _ in 0..10 {
        let answer = ask(&daemon, QUESTIONS[0]).await;
        if answer.status != 200 {
            lost = Some(answer);
            break;
        }
    }
    let lost = lost.expect("the GPU has not broken");
    assert!(
        lost.text().contains("CUDA_ERROR_LAUNCH_FAILED"),
        "{}",
        lost.text()
    );
    let mut after = ask(&daemon, QUESTIONS[1]).await;
    let deadline = Instant::now() + PATIENCE;
    while after.status != 200 {
        assert!(
            Instant::now() < deadline,
            "{}\n{}",
            after.text(),
            installation.log()
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
        after = ask(&daemon, QUESTIONS[1]).await;
    }
    let after = content(&after);
    // It is retried automatically, which is a warning, not an error.
    daemon.end().await;
    let log = installation.log();
    let warned = log
        .lines()
        .any(|line| line.contains("\"level\":\"WARN\"") && line.contains("the LLM has failed"));
    assert!(warned, "{log}");
    (before, after)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_breaks_costs_an_answer_and_is_used_again() {
    let mut installation = Installation::new(&sections("cuda"));
    installation.prefer_release();
    let settings = [
        ("FAKE_CUDA_DEVICE", "hopper"),
        ("FAKE_CUDA_FAULTS", "kernel@5000=719!"),
    ];
    let log = with_driver(&mut installation, &settings);
    let (before, after) = broken_in_an_answer(&installation).await;
    assert_eq!(before, after);
    assert_eq!(
        installation.log().matches("cuda (Imitated hopper").count(),
        2,
        "{}",
        installation.log()
    );
    assert!(fs::read_to_string(&log).unwrap().contains("\"code\":719"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cpu_answers_when_the_gpu_is_lost() {
    let mut installation = Installation::new(&sections("auto"));
    installation.prefer_release();
    let settings = [
        ("FAKE_CUDA_DEVICE", "hopper"),
        ("FAKE_CUDA_FAULTS", "kernel@5000=719!!"),
    ];
    with_driver(&mut installation, &settings);
    let (before, after) = broken_in_an_answer(&installation).await;
    assert_eq!(before, after);
    eventually("the CPU takes over", || {
        installation.log().contains("the LLM computes on the CPU")
    })
    .await;
}

/// Otherwise a GPU that passes its trial would be selected and fail again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_passes_its_trial_and_does_not_start_is_not_tried_again_by_itself() {
    let mut installation = Installation::new(&sections("auto"));
    installation.prefer_release();
    let settings = [
        ("FAKE_CUDA_DEVICE", "hopper"),
        ("FAKE_CUDA_FAULTS", "cuModuleLoadData@2=2"),
    ];
    with_driver(&mut installation, &settings);
    let daemon = installation.start().await;
    daemon.whole().await;
    assert!(!content(&ask(&daemon, QUESTIONS[1]).await).is_empty());
    for message in [
        "the selected GPU does not start",
        "the LLM computes on the CPU",
        "cpu (",
    ] {
        installation.logged(message).await;
    }
    let log = installation.log();
    assert!(!log.contains("cuda (Imitated"), "{log}");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_did_not_compute_is_tried_again_for_an_operator_and_its_context_is_on_the_book()
{
    let mut installation = Installation::new(&sections("cuda"));
    installation.prefer_release();
    let log = with_driver(
        &mut installation,
        &[
            ("FAKE_CUDA_DEVICE", "hopper"),
            ("FAKE_CUDA_FAULTS", "cuModuleLoadData@1=2"),
            ("FAKE_CUDA_CONTEXT", "67108864"),
        ],
    );
    let daemon = installation.start().await;
    let status = daemon
        .until("the GPU was refused", |status| {
            let engine = status.engine.as_ref();
            engine.is_some_and(|engine| engine.state() == EngineState::Failed)
        })
        .await;
    let failure = status.engine.unwrap().failure;
    assert!(
        failure.contains("cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY"),
        "{failure}"
    );
    tokio::task::block_in_place(|| installation.tell(&["load"]));
    daemon.whole().await;
    assert!(!content(&ask(&daemon, QUESTIONS[1]).await).is_empty());
    let lease = &installation.json(&["leases"])[0];
    // The rest is its KV cache of 32 MiB, 5 MiB of weights, and small buffers.
    let held = lease["heldBytes"].as_u64().unwrap() >> 20;
    assert!((64 + 32 + 5..64 + 32 + 5 + 32).contains(&held), "{lease}");
    daemon.end_after(&["the LLM has failed"]).await;
    clean_exit(&log);
}

/// Measurements of an integrated GPU at the first start are stored in the state directory, and reused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_is_measured_by_the_first_start_and_again_when_an_operator_wants_it() {
    let mut installation = Installation::new(&sections("cuda"));
    installation.prefer_release();
    let log = with_driver(&mut installation, &[("FAKE_CUDA_DEVICE", "orin")]);
    let daemon = installation.start().await;
    daemon.whole().await;
    daemon.end().await;
    clean_exit(&log);
    let file = installation.path("state/gpu.json");
    let stored = || serde_json::from_str::<Value>(&fs::read_to_string(&file).unwrap()).unwrap();
    let measured = stored();
    assert_eq!(measured["of"]["device"], "Imitated orin");
    let mut other = measured.clone();
    other["room"]["sumBytes"] = json!(77 << 20);
    fs::write(&file, other.to_string()).unwrap();
    let check = |more: &[&str]| {
        let mut check = Command::new(env!("CARGO_BIN_EXE_cotenant"));
        let check = check
            .arg("check")
            .args(more)
            .arg(installation.config())
            .envs(installation.environment.iter().cloned());
        String::from_utf8_lossy(&check.output().unwrap().stdout).into_owned()
    };
    let reported = check(&[]);
    assert!(
        reported.contains("in one piece and 77 MiB in several can be allocated"),
        "{reported}"
    );
    let again = check(&["--reprobe"]);
    assert!(
        again.contains("in one piece and") && !again.contains("77 MiB in several"),
        "{again}"
    );
    assert!(stored()["room"]["sumBytes"].as_u64() >= stored()["room"]["largestBytes"].as_u64());
}
