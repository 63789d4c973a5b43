//! The command line without a supervisor.

use std::{fs, process::Command};

use tempfile::TempDir;

/// Runs the program in a folder; returns its exit code, stdout and stderr.
fn run(folder: &TempDir, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_cotenant"))
        .args(arguments)
        .current_dir(folder.path())
        .env("COTENANT_ENDPOINT", "unix-abstract:cotenant-nowhere")
        .env_remove("COTENANT_CONFIG")
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// A folder with `cotenant.yaml`.
fn configured(text: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("cotenant.yaml"), text).unwrap();
    folder
}

#[test]
fn a_configuration_is_named_with_and_without_the_option() {
    let fits = configured("budget: {total: 1GiB, reserve: 128MiB}\n");
    let wrong = configured("budget: {totl: 1GiB}\n");
    for arguments in [&["check", "cotenant.yaml"][..], &["check", "--config", "cotenant.yaml"]] {
        assert_eq!(run(&fits, arguments).0, Some(0), "{arguments:?}");
        assert_eq!(run(&wrong, arguments).0, Some(78), "{arguments:?}");
    }
    for arguments in [&["serve", "cotenant.yaml"][..], &["serve", "--config", "cotenant.yaml"]] {
        let (code, _, said) = run(&wrong, arguments);
        assert_eq!(code, Some(78), "{arguments:?}: {said}");
    }
}

#[test]
fn a_check_ends_with_a_verdict_that_agrees_with_its_exit_code() {
    let worker = "workers:\n  - {name: asr, argv: [/nowhere/asr], protocol: none, ready: {kind: started}, memory: {steady: 1MiB, peak: 1MiB}}\n";
    let budget = "budget: {total: 1GiB, reserve: 128MiB}\n";
    for (text, code, verdict) in [
        (budget.to_owned(), 0, "verdict: everything fits, "),
        (format!("{budget}{worker}"), 78, "verdict: cannot start: "),
        (
            format!("{budget}llm: {{path: /nowhere/model.gguf}}\n"),
            78,
            "verdict: the model of `llm.path` cannot be loaded",
        ),
        ("budget: {totl: 1GiB}\n".to_owned(), 78, "verdict: the configuration cannot be used"),
    ] {
        let (found, printed, said) = run(&configured(&text), &["check", "cotenant.yaml"]);
        let last = printed.lines().last().unwrap_or_default();
        assert!(last.starts_with(verdict), "{text}: {printed}{said}");
        assert_eq!(found, Some(code), "{text}: {printed}{said}");
    }
}

#[test]
fn a_model_whose_template_no_load_would_take_is_refused_by_the_check() {
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/demo-model/demo.gguf");
    let mut model = fs::read(demo).unwrap();
    let block = b"{%- for ";
    let block = model.windows(block.len()).position(|window| window == block);
    let block = block.expect("the template of the demo model has a loop");
    model[block..][..3].copy_from_slice(b"{{-");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.gguf");
    fs::write(&path, model).unwrap();
    let config = format!("llm: {{path: {}, name: assistant}}\n", path.display());
    fs::write(folder.path().join("cotenant.yaml"), config).unwrap();
    let (code, stdout, stderr) = run(&folder, &["check", "cotenant.yaml"]);
    assert_eq!(code, Some(78), "{stdout}{stderr}");
    assert!(stderr.contains("template"), "{stderr}");
}

#[test]
fn a_model_whose_tokenizer_no_load_would_take_is_refused_by_the_check() {
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/demo-model/demo.gguf");
    let mut model = fs::read(demo).unwrap();
    let key = b"tokenizer.ggml.merges";
    let key = model.windows(key.len()).position(|window| window == key).unwrap() + key.len();
    // Behind the types of the list and of its entries, their number, and the length of the first one.
    let merge = key + 4 + 4 + 8 + 8;
    let space = merge + model[merge..].iter().position(|byte| *byte == b' ').unwrap();
    model[space] = b'x';
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.gguf");
    fs::write(&path, model).unwrap();
    let config = format!("llm: {{path: {}, name: assistant}}\n", path.display());
    fs::write(folder.path().join("cotenant.yaml"), config).unwrap();
    let (code, stdout, stderr) = run(&folder, &["check", "cotenant.yaml"]);
    assert_eq!(code, Some(78), "{stdout}{stderr}");
    assert!(stderr.contains("merge"), "{stderr}");
}

#[test]
fn a_model_in_place_of_a_configuration_is_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("model.gguf"), "GGUF\u{3}\0\0\0").unwrap();
    let (code, _, said) = run(&folder, &["check", "model.gguf"]);
    assert_eq!(code, Some(78));
    assert!(said.contains("it is a GGUF model") && said.contains("llm: {path: "), "{said}");
}

#[test]
fn the_usage_does_not_name_what_the_environment_sets() {
    let (code, _, said) = run(&tempfile::tempdir().unwrap(), &["shed"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("Usage: cotenant shed <BYTES>"), "{said}");
}

#[test]
fn a_line_of_the_journal_is_a_number() {
    for arguments in [&["why", "abc"][..], &["events", "--after", "foo"]] {
        let (code, _, said) = run(&tempfile::tempdir().unwrap(), arguments);
        assert_eq!(code, Some(2));
        assert!(said.contains("not a line number; `cotenant events` prints them"), "{said}");
    }
}

#[test]
fn without_arguments_the_commands_are_listed() {
    let (code, _, said) = run(&tempfile::tempdir().unwrap(), &[]);
    assert_eq!(code, Some(2));
    for group in ["Run:", "Use:", "Look:", "Explain:", "Intervene:", "Measure:"] {
        assert!(said.contains(group), "{said}");
    }
}
