//! Third-party Wyoming servers as managed workers: started, ready, measured, ended.

use std::{collections::BTreeMap, path::PathBuf};

use cotenant::speech::client::{ClientTimeouts, Endpoint, WyomingClient};

use super::installation::{Installation, budget, workers_ready};
use crate::support::fixture;

/// Workers with role and command line; `{DATA}` is replaced by an empty folder. Each starts without a model, except
/// Whisper, which gets one of random weights: `{MODEL}`.
const SERVERS: [(&str, &str, &str); 4] = [
    (
        "wyoming-faster-whisper",
        "asr",
        "--uri, \"unix://${SOCKET}\", --model, {MODEL}, --language, en, --device, cpu, --data-dir, {DATA}, --local-files-only",
    ),
    (
        "wyoming-piper",
        "tts",
        "--uri, \"unix://${SOCKET}\", --voice, en_US-lessac-medium, --data-dir, {DATA}",
    ),
    (
        "wyoming-openwakeword",
        "other",
        "--uri, \"unix://${SOCKET}\"",
    ),
    ("wyoming_porcupine1", "other", "--uri, \"unix://${SOCKET}\""),
];

/// Returns the command of a server; `python -m` for servers without one.
fn command(venv: &str, name: &str) -> Option<String> {
    let bin = PathBuf::from(venv).join("bin");
    if bin.join(name).is_file() {
        return Some(bin.join(name).display().to_string());
    }
    let found = std::process::Command::new(bin.join("python"))
        .args(["-c", &format!("import {}.__main__", name.replace('-', "_"))])
        .output()
        .is_ok_and(|output| output.status.success());
    found.then(|| format!("{}, -m, {name}", bin.join("python").display()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_of_other_people_start_and_say_what_they_are() {
    // They pin different versions of the protocol's package, so each may need a separate environment.
    let Ok(venvs) = std::env::var("COTENANT_WYOMING_SERVERS") else {
        println!(
            "left out: COTENANT_WYOMING_SERVERS is not set (environments with Wyoming servers, separated by colons)"
        );
        return;
    };
    let installation = Installation::new("");
    let (data, whisper) = (installation.path("data"), installation.path("whisper"));
    let mut commands = BTreeMap::new();
    for venv in venvs.split(':') {
        if PathBuf::from(venv)
            .join("bin/wyoming-faster-whisper")
            .is_file()
        {
            let made = std::process::Command::new(PathBuf::from(venv).join("bin/python"))
                .args([
                    "-B".as_ref(),
                    fixture("tiny_whisper.py").as_os_str(),
                    whisper.as_os_str(),
                ])
                .status();
            assert!(made.unwrap().success(), "there is no model for Whisper");
        }
        for (name, role, arguments) in SERVERS {
            if let Some(command) = command(venv, name) {
                commands.insert(name.replace('_', "-"), (command, role, arguments));
            }
        }
    }
    assert!(!commands.is_empty(), "none of {SERVERS:?} is in {venvs}");
    std::fs::create_dir(&data).unwrap();
    let workers: String = commands
        .iter()
        .map(|(name, (command, role, arguments))| {
            let arguments = arguments.replace("{DATA}", &data.display().to_string());
            let arguments = arguments.replace("{MODEL}", &whisper.display().to_string());
            format!(
                "  - name: {name}
    role: {role}
    protocol: wyoming
    argv: [{command}, {arguments}]
    ready: {{timeout: 60s}}
    memory: {{steady: 150MiB, peak: 300MiB}}
"
            )
        })
        .collect();
    installation.configure(&format!("{}workers:\n{workers}", budget(2048)));
    let daemon = installation.start().await;
    let status = daemon.until("all ready", workers_ready).await;
    for name in commands.keys() {
        let socket = Endpoint::Unix(installation.path(&format!("run/{name}.sock")));
        let info = WyomingClient::new(socket, ClientTimeouts::default())
            .describe()
            .await
            .unwrap();
        let said = serde_json::to_value(&info).unwrap();
        let programs = ["asr", "tts", "handle", "wake"].map(|kind| &said[kind][0]);
        let program = programs
            .into_iter()
            .find(|program| program["name"].is_string())
            .unwrap();
        let worker = super::installation::worker(&status, name);
        println!(
            "{name}: {} {}, pid {:?}",
            program["name"], program["version"], worker.pid
        );
    }
    // A transcript by random weights is arbitrary; only its presence is checked.
    if commands.contains_key("wyoming-faster-whisper") {
        let silence =
            cotenant::speech::audio::MonoAudio::new(16_000, crate::support::voiced(16_000));
        let heard = daemon.hear(&silence.to_wav().unwrap()).await;
        assert_eq!(heard.status, 200, "{}", heard.text());
        assert!(heard.json()["text"].is_string(), "{}", heard.text());
    }
    daemon.end().await;
}
