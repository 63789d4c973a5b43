//! Snapshots of output for people.

use crate::weights::Weights as _;
use cotenant::engine::{
    gguf::GgmlDType,
    spec::Architecture,
    synthetic::{Synthetic, TypeMix},
};

use super::installation::{Installation, asr, budget, demo_model, model, said, tts};

/// Returns a command with its complete output and exit code; variable parts are replaced.
fn shown(installation: &Installation, arguments: &[&str]) -> String {
    let output = installation.run(arguments);
    let folder = installation.path("").display().to_string();
    let text = format!(
        "$ cotenant {}\n{}{}→ {}\n",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
        output.status.code().unwrap()
    );
    text.replace(folder.trim_end_matches('/'), "FOLDER")
}

/// `llm:` with a model whose figures do not change when the demo model is retrained.
fn synthetic(installation: &Installation, context: u32) -> String {
    let path = installation.path("model.gguf");
    Synthetic {
        context_max: context,
        kv_heads: 4,
        ..Synthetic::tiny(Architecture::Qwen35, TypeMix::All(GgmlDType::Q8_0), 7)
    }
    .write(&path)
    .unwrap();
    model(&path, context)
}

#[test]
fn a_supervisor_that_does_not_run() {
    let installation = Installation::new("");
    let all: Vec<String> = [
        vec!["status"],
        vec!["leases"],
        vec!["events"],
        vec!["shed", "64MiB"],
        vec!["generate", "hello"],
        vec!["health"],
        vec!["replay", "journal.ndjson"],
    ]
    .iter()
    .map(|arguments| shown(&installation, arguments))
    .collect();
    insta::assert_snapshot!(all.join("\n"));
}

#[test]
fn a_configuration_that_is_checked() {
    let installation = Installation::new("");
    installation.configure(&format!(
        "{}{}workers:\n{}{}",
        budget(512),
        synthetic(&installation, 4096),
        tts(),
        asr()
    ));
    let check = installation.run(&["check", "cotenant.yaml"]);
    assert!(check.status.success(), "{}", said(&check));
    let text = String::from_utf8(check.stdout).unwrap();
    let (machine, rest) = text.split_once("budget\n").unwrap();
    assert!(
        machine.starts_with("this machine\n") && machine.contains("  cuda: "),
        "{machine}"
    );
    // Current figures of this machine vary.
    let rest: String = rest
        .lines()
        .map(|line| {
            if line.trim_start().starts_with("available now") {
                "  available now  …"
            } else {
                line
            }
        })
        .map(|line| format!("{line}\n"))
        .collect();
    insta::assert_snapshot!(rest);
}

#[test]
fn configurations_that_hardly_or_never_work() {
    let installation = Installation::new("");
    let speech = format!("workers:\n{}{}", tts(), asr());
    // A worker whose memory can never be granted.
    installation.configure(&format!("{}{speech}", budget(60)));
    let alone = shown(&installation, &["check", "cotenant.yaml"]);
    // Each can be granted alone, but ever fewer of them together.
    let small = |text: String| text.replace("110MiB, peak: 116MiB", "80MiB, peak: 88MiB");
    let twice = format!("{speech}{}", asr().replace("name: asr\n", "name: asr2\n"));
    let verdicts: Vec<String> = [(157, &speech), (128, &twice), (100, &twice)]
        .into_iter()
        .map(|(mib, workers)| {
            installation.configure(&small(format!(
                "{}{}{workers}",
                budget(mib),
                synthetic(&installation, 65_536)
            )));
            let output = installation.run(&["check", "cotenant.yaml"]);
            let text = String::from_utf8(output.stdout).unwrap();
            let verdict = text.lines().last().unwrap_or_default();
            let hint = String::from_utf8_lossy(&output.stderr);
            format!("{verdict}\n{hint}→ {}\n", output.status.code().unwrap())
        })
        .collect();
    insta::assert_snapshot!(format!("{alone}\n{}", verdicts.join("\n")));
}

/// Every verb that prints data, except those that measure for a minute (`bench`, `calibrate`, `demo`), those that run
/// until ended (`serve`, `top`, `hold`, `worker`), `why`, whose line must be a decision, and `talk`, which needs speech
/// workers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_verb_that_prints_data_prints_json() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(192)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let (url, model) = (format!("http://{}/metrics", daemon.http), demo_path());
    let verbs: Vec<Vec<&str>> = vec![
        vec!["status"],
        vec!["leases"],
        vec!["events"],
        vec!["health"],
        vec!["metrics", "--url", &url],
        vec!["generate", "hello", "--max-tokens", "4"],
        vec!["shed", "1MiB"],
        vec!["regrow"],
        vec!["kv-type", "f16"],
        vec!["reload"],
        vec!["drain"],
        vec!["drain", "--wait", "10s"],
        vec!["drain", "--off"],
        vec!["postmortem"],
        vec!["replay", "journal.ndjson"],
        vec!["plot", "journal.ndjson"],
        vec!["check", "cotenant.yaml"],
        vec!["check", "--audit"],
        vec!["plan", &model, "--device", "orin-nx-16g"],
        vec!["catalogue", "--device", "orin-nano-8g"],
    ];
    for verb in &verbs {
        for form in ["json", "ndjson"] {
            let output = installation.run(&[verb.as_slice(), &["-o", form]].concat());
            let values: Result<Vec<serde_json::Value>, _> =
                serde_json::Deserializer::from_slice(&output.stdout)
                    .into_iter()
                    .collect();
            let values = values
                .unwrap_or_else(|error| panic!("{verb:?} -o {form}: {error}: {}", said(&output)));
            // 4: reached but refused, or nothing to explain; the reason is on stderr.
            let least = match output.status.code() {
                Some(0) => 1,
                Some(4) => 0,
                _ => panic!("{verb:?} -o {form}: {}", said(&output)),
            };
            let fits = form == "ndjson" || (least..=1).contains(&values.len());
            assert!(fits, "{verb:?} -o {form}: {} documents", values.len());
            let has_words_alone = |value: &serde_json::Value| {
                value.get("message").is_some() && value.as_object().is_some_and(|all| all.len() < 2)
            };
            assert!(
                !values.iter().any(has_words_alone),
                "{verb:?} -o {form}: {values:?}"
            );
            if output.status.code() == Some(4) && verb[0] != "health" {
                let error: serde_json::Value = serde_json::from_slice(&output.stderr)
                    .unwrap_or_else(|error| {
                        panic!("{verb:?} -o {form}: {error}: {}", said(&output))
                    });
                assert_eq!(error["error"]["exitCode"], 4, "{error}");
            }
        }
    }
    daemon.end().await;
}

fn demo_path() -> String {
    format!("{}/deploy/demo-model/demo.gguf", env!("CARGO_MANIFEST_DIR"))
}
