//! `cotenant bench board`: its document, its picture, and its errors.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use cotenant::engine::synthetic::{Synthetic, TypeMix};

const PROGRAM: &str = env!("CARGO_BIN_EXE_cotenant");
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/demo-model/demo.gguf");

fn board(program: &str, model: &str, out: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["bench", "board", "--rounds", "1", "--model", model]);
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command.arg("--out").arg(out).stdin(Stdio::null());
    command
}

#[test]
fn what_cannot_be_measured_or_written_is_an_error_before_the_first_part() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("board");
    // Its header names tensors of 2.6 GB, and the file ends far beyond the memory of any machine.
    let huge = folder.path().join("huge.gguf");
    let file = fs::File::create(&huge).unwrap();
    let model = Synthetic::qwen35_4b(TypeMix::Q4KM, 1);
    model.write_hollow(file.try_clone().unwrap()).unwrap();
    file.set_len(1 << 42).unwrap();
    let text = folder.path().join("text.gguf");
    fs::write(&text, "no model").unwrap();
    let nowhere = folder.path().join("nowhere/board");
    for (model, out, words) in [
        ("/nowhere.gguf", &out, "cannot read it: No such file"),
        (text.to_str().unwrap(), &out, "it is not GGUF"),
        (
            huge.to_str().unwrap(),
            &out,
            "its 4096 GiB and 1 GiB for the system exceed the memory of",
        ),
        (
            MODEL,
            &nowhere,
            "No such file or directory (os error 2) (hint: set --out)",
        ),
    ] {
        let refused = board(PROGRAM, model, out).output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{said}");
        assert!(said.contains(words) && !said.contains("1 of 4"), "{said}");
    }
    assert!(!out.with_extension("json").exists());
}

#[test]
fn an_interrupted_measurement_says_so_and_keeps_its_document() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("board");
    let mut command = board(PROGRAM, MODEL, &out);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    assert!(
        first.starts_with("1 of 4, at most 2 min 30 s: cotenant bench engine"),
        "{first}"
    );
    kill(
        Pid::from_raw(i32::try_from(child.id()).unwrap()),
        Signal::SIGINT,
    )
    .unwrap();
    let rest: Vec<String> = lines.map_while(Result::ok).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest:?}");
    assert!(
        rest.iter()
            .any(|line| line.contains("the measurement was interrupted")),
        "{rest:?}"
    );
    let document = fs::read_to_string(out.with_extension("json")).unwrap();
    let document: Value = serde_json::from_str(&document).unwrap();
    assert_eq!(document["figures"], Value::Array(vec![]));
}

#[test]
fn each_figure_has_a_value_or_a_cause_and_the_command_that_repeats_it() {
    let Ok(release) = std::env::var("COTENANT_RELEASE_BIN") else {
        println!(
            "left out: COTENANT_RELEASE_BIN is not set; `tests/run` sets it to the release build"
        );
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("board");
    let done = board(&release, MODEL, &out).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    let document = fs::read_to_string(out.with_extension("json")).unwrap();
    let document: Value = serde_json::from_str(&document).unwrap();
    assert_eq!(
        document["model"]["bytes"],
        fs::metadata(MODEL).unwrap().len()
    );
    assert_eq!(document["model"]["sha256"].as_str().unwrap().len(), 64);
    assert!(
        document["device"]["backend"]
            .as_str()
            .unwrap()
            .starts_with("cpu ("),
        "{document}"
    );
    let picture = fs::read_to_string(out.with_extension("svg")).unwrap();
    let mut measured = Vec::new();
    for figure in document["figures"].as_array().unwrap() {
        let what = figure["what"].as_str().unwrap();
        assert!(!figure["command"].as_str().unwrap().is_empty(), "{figure}");
        assert!(
            figure["value"].is_f64() || figure["not_measured"].is_string(),
            "{figure}"
        );
        assert!(picture.contains(what), "{what}");
        measured.extend(figure["value"].as_f64().map(|value| (what, value)));
    }
    let spoken = if crate::support::speech_is_installed() {
        3
    } else {
        0
    };
    assert!(measured.len() == 7 + spoken, "{said}");
    assert!(
        measured.contains(&("answers changed by that", 0.0)),
        "{measured:?}"
    );
}
