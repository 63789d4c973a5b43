//! Command line without a supervisor.

use std::{
    fs,
    io::Read as _,
    os::fd::FromRawFd as _,
    process::{Command, Stdio},
};

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
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// Creates a folder with `cotenant.yaml`.
fn configured(text: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("cotenant.yaml"), text).unwrap();
    folder
}

#[test]
fn a_configuration_is_named_with_and_without_the_option() {
    let fits = configured("budget: {total: 1GiB, reserve: 128MiB}\n");
    let wrong = configured("budget: {totl: 1GiB}\n");
    for arguments in [
        &["check", "cotenant.yaml"][..],
        &["check", "--config", "cotenant.yaml"],
    ] {
        assert_eq!(run(&fits, arguments).0, Some(0), "{arguments:?}");
        assert_eq!(run(&wrong, arguments).0, Some(78), "{arguments:?}");
    }
    for arguments in [
        &["serve", "cotenant.yaml"][..],
        &["serve", "--config", "cotenant.yaml"],
    ] {
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
        (
            "budget: {totl: 1GiB}\n".to_owned(),
            78,
            "verdict: the configuration cannot be used",
        ),
    ] {
        let (found, printed, said) = run(&configured(&text), &["check", "cotenant.yaml"]);
        let last = printed.lines().last().unwrap_or_default();
        assert!(last.starts_with(verdict), "{text}: {printed}{said}");
        assert_eq!(found, Some(code), "{text}: {printed}{said}");
    }
}

#[test]
fn a_model_whose_template_no_load_would_take_is_refused_by_the_check() {
    damaged_demo_is_refused("template", |model| {
        let block = place_of(b"{%- for ", model);
        model[block..][..3].copy_from_slice(b"{{-");
    });
}

#[test]
fn a_model_whose_tokenizer_no_load_would_take_is_refused_by_the_check() {
    damaged_demo_is_refused("merge", |model| {
        let key = b"tokenizer.ggml.merges";
        // After the types of the list and of its entries, the number of entries, and the length of the first one.
        let merge = place_of(key, model) + key.len() + 4 + 4 + 8 + 8;
        let space = merge + place_of(b" ", &model[merge..]);
        model[space] = b'x';
    });
}

fn place_of(wanted: &[u8], bytes: &[u8]) -> usize {
    bytes
        .windows(wanted.len())
        .position(|window| window == wanted)
        .unwrap()
}

/// Damages the demo model and runs the check, which must print `word`.
fn damaged_demo_is_refused(word: &str, damage: impl FnOnce(&mut [u8])) {
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/demo-model/demo.gguf");
    let mut model = fs::read(demo).unwrap();
    damage(&mut model);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.gguf");
    fs::write(&path, model).unwrap();
    let config = format!("llm: {{path: {}, name: assistant}}\n", path.display());
    fs::write(folder.path().join("cotenant.yaml"), config).unwrap();
    let (code, stdout, stderr) = run(&folder, &["check", "cotenant.yaml"]);
    assert_eq!(code, Some(78), "{stdout}{stderr}");
    assert!(stderr.contains(word), "{stderr}");
}

#[test]
fn a_model_in_place_of_a_configuration_is_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("model.gguf"), "GGUF\u{3}\0\0\0").unwrap();
    let (code, _, said) = run(&folder, &["check", "model.gguf"]);
    assert_eq!(code, Some(78));
    assert!(
        said.contains("it is a GGUF model") && said.contains("llm: {path: "),
        "{said}"
    );
}

#[test]
fn a_model_that_is_not_there_is_answered_with_those_that_are() {
    let folder = configured("");
    let model = |name: &str| folder.path().join(name);
    for (named, present, said) in [
        (model("a.gguf"), Vec::new(), "no `*.gguf` file in `"),
        (
            model("a.gguf"),
            vec!["b.gguf", "c.txt", "c.gguf"],
            "has `b.gguf`, `c.gguf`\n",
        ),
        (
            model("nowhere/a.gguf"),
            Vec::new(),
            "` is missing or unreadable",
        ),
    ] {
        present
            .iter()
            .for_each(|name| fs::write(model(name), "").unwrap());
        fs::write(
            folder.path().join("cotenant.yaml"),
            format!("llm: {{path: {}}}\n", named.display()),
        )
        .unwrap();
        let (code, _, hint) = run(&folder, &["check", "cotenant.yaml"]);
        assert_eq!(code, Some(78));
        assert!(hint.contains("hint: ") && hint.contains(said), "{hint}");
    }
}

#[test]
fn a_taken_address_is_named_with_its_key() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display();
    let places = format!(
        "state_dir: {path}/state\nruntime_dir: {path}/run\ngrpc: {{socket: {path}/c.sock, abstract_name: none}}\n"
    );
    for (section, key) in [
        (
            format!("http: {{listen: 127.0.0.1:{port}}}\n"),
            "http.listen",
        ),
        (
            format!("http: {{listen: none}}\nwyoming: {{listen: [\"tcp://127.0.0.1:{port}\"]}}\n"),
            "wyoming.listen",
        ),
    ] {
        fs::write(
            folder.path().join("cotenant.yaml"),
            format!("{places}{section}"),
        )
        .unwrap();
        let (code, _, said) = run(&folder, &["serve", "cotenant.yaml"]);
        assert_eq!(code, Some(1), "{said}");
        assert!(
            said.contains(&format!("cannot open `{key}: ")) && said.contains("ss -ltnp"),
            "{said}"
        );
    }
}

/// Returns the output of the program on a terminal.
fn on_a_terminal(command: &mut Command) -> String {
    let (mut master, mut slave) = (0, 0);
    // SAFETY: opens two descriptors, which are owned below; no name and no settings are requested.
    let opened = unsafe {
        libc::openpty(
            &raw mut master,
            &raw mut slave,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    };
    assert_eq!(opened, 0);
    // SAFETY: opened above, without another owner.
    let (master, slave) = unsafe { (fs::File::from_raw_fd(master), fs::File::from_raw_fd(slave)) };
    let mut child = command
        .stdin(Stdio::null())
        .stdout(slave.try_clone().unwrap())
        .stderr(slave)
        .spawn()
        .unwrap();
    // The program's own ends of the terminal close with it, and ours with `command`.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut written = Vec::new();
    // A terminal whose other end is closed returns `EIO` instead of end-of-file.
    let _ended = (&master).read_to_end(&mut written);
    child.wait().unwrap();
    String::from_utf8_lossy(&written).into_owned()
}

#[test]
fn logs_on_a_terminal_are_plain_text() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display();
    // The log warns of a listener open to every network, and the used port ends the start.
    let text = format!(
        "state_dir: {path}/state\nruntime_dir: {path}/run\ngrpc: {{socket: {path}/c.sock, abstract_name: none}}\n\
         http: {{listen: 127.0.0.1:{port}}}\nwyoming: {{listen: [\"tcp://0.0.0.0:0\"]}}\nlog: {{format: text}}\n"
    );
    fs::write(folder.path().join("cotenant.yaml"), text).unwrap();
    let program = env!("CARGO_BIN_EXE_cotenant");
    let said = on_a_terminal(
        Command::new(program)
            .args(["serve", "cotenant.yaml"])
            .current_dir(folder.path()),
    );
    assert!(
        said.contains(" WARN ") && said.contains("without a password"),
        "{said}"
    );
    assert!(
        !said.contains('\u{1b}') && !said.contains("ansi"),
        "{said:?}"
    );
}

#[test]
fn the_usage_does_not_name_what_the_environment_sets() {
    let (code, _, said) = run(&tempfile::tempdir().unwrap(), &["shed"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("Usage: cotenant shed <BYTES>"), "{said}");
}

#[test]
fn arguments_that_are_refused_are_an_object_for_programs() {
    let folder = configured("");
    for arguments in [
        &["shed", "12", "-o", "json"][..],
        &["shed", "12", "--output=ndjson"],
        &["shed", "-ojson", "12"],
    ] {
        let (code, printed, said) = run(&folder, arguments);
        assert_eq!((code, printed.as_str()), (Some(2), ""), "{said}");
        let error: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert_eq!(error["error"]["exitCode"], 2, "{error}");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains("'12'"), "{message}");
    }
    let (_, _, said) = run(&folder, &["shed", "12"]);
    assert!(said.starts_with("error: "), "{said}");
}

#[test]
fn a_check_has_its_errors_in_its_document() {
    let folder = configured("budget: {totl: 1GiB}\n");
    let (code, printed, said) = run(&folder, &["check", "cotenant.yaml", "-o", "json"]);
    assert_eq!((code, said.as_str()), (Some(78), ""), "{printed}");
    let document: serde_json::Value = serde_json::from_str(&printed).unwrap();
    let causes = document["errors"][0]["causes"].to_string();
    assert!(causes.contains("totl"), "{document}");
    assert_eq!(document["ok"], false);
}

#[test]
fn a_line_of_the_journal_is_a_number() {
    for arguments in [&["why", "abc"][..], &["events", "--after", "foo"]] {
        let (code, _, said) = run(&tempfile::tempdir().unwrap(), arguments);
        assert_eq!(code, Some(2));
        assert!(
            said.contains("not a line number; `cotenant events` prints them"),
            "{said}"
        );
    }
}

#[test]
fn without_arguments_the_commands_are_listed() {
    let (code, _, said) = run(&tempfile::tempdir().unwrap(), &[]);
    assert_eq!(code, Some(2));
    for group in [
        "Run:", "Use:", "Observe:", "Explain:", "Control:", "Measure:",
    ] {
        assert!(said.contains(group), "{said}");
    }
}
