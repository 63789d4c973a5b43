//! Tests of complete configuration files and of their faults.

use std::path::Path;

use super::*;
use cotenant_policy::{lease::Class, params::MachineMemory};
use cotenant_units::Bytes;

const EXAMPLE: &str = include_str!("../../deploy/cotenant.yaml");

/// Returns the output of `cotenant` for a file with this text.
fn report(text: &str) -> String {
    let kind = Config::parse(text).unwrap_err();
    LoadError::new(Path::new("/etc/cotenant/cotenant.yaml"), kind).report()
}

/// Returns the example with every commented key enabled: lines `# key:` and `#   key:`, not sentences.
fn example_in_full() -> String {
    let is_code = |line: &str| {
        let line = line.trim_start().trim_start_matches("- ");
        let key = line.split(':').next().unwrap();
        let is_key = key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_') && !key.is_empty();
        (is_key && line.contains(':') && !line.ends_with('.')) || line.starts_with('{')
    };
    EXAMPLE
        .lines()
        .map(|line| {
            let indent = line.len() - line.trim_start().len();
            match line.trim_start().strip_prefix("# ") {
                Some(code) if is_code(code) => format!("{}{code}\n", " ".repeat(indent)),
                _ => format!("{line}\n"),
            }
        })
        .collect::<String>()
        .replace("workers: []", "workers:")
        .replace("voices: {}", "voices:")
}

#[test]
fn an_empty_file_gives_the_defaults_and_the_example_says_the_same() {
    let defaults = Config::parse("").unwrap();
    assert_eq!(Config::parse("# nothing\n\n").unwrap(), defaults);
    assert_eq!(Config::parse("---\n").unwrap(), defaults);
    let example = Config::parse(EXAMPLE).unwrap();
    // The example writes watermarks out, the default leaves them to policy: compare the derived values.
    let total = MachineMemory::of(Bytes::from_mib(15_656));
    assert_eq!(example.params(&total), defaults.params(&total));
    let same = Config {
        budget: defaults.budget.clone(),
        ..example
    };
    assert_eq!(same, defaults);
    insta::assert_debug_snapshot!(defaults);
}

#[test]
fn a_file_that_sets_nothing_is_refused_and_one_may_begin_with_a_byte_order_mark() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cotenant.yaml");
    let load_text = |text: &str| {
        std::fs::write(&path, text).unwrap();
        load(&path)
    };
    for text in [
        "",
        "\n\n",
        "# llm: {path: /m.gguf}\n",
        "---\n",
        "{}\n",
        "\u{feff}",
        "\u{feff}---\n# nothing\n...\n",
        "llm:\n",
        "llm: # {path: /m.gguf}\nworkers: ~\nhttp: {}\n",
        "budget:\n  total:\n",
    ] {
        let error = load_text(text).unwrap_err();
        assert!(
            matches!(error.kind(), LoadErrorKind::Empty(_)),
            "{text:?}: {error:?}"
        );
        assert!(
            error.report().contains("it sets nothing") && error.report().contains("hint: "),
            "{}",
            error.report()
        );
    }
    for text in [
        "log: {filter: debug}\n",
        "\u{feff}log: {filter: debug}\n",
        "\u{feff}---\nlog:\n  filter: debug\n",
    ] {
        assert_eq!(load_text(text).unwrap().log.filter, "debug", "{text:?}");
    }
}

#[test]
fn grpc_on_an_address_is_refused_with_what_to_do_instead() {
    for address in [
        "tcp://0.0.0.0:9000",
        "127.0.0.1:9000",
        "\"[::1]:9000\"",
        "https://host:9000",
    ] {
        let reported = report(&format!("grpc: {{socket: {address}}}\n"));
        assert!(reported.contains("grpc.socket"), "{reported}");
        assert!(
            reported.contains("`grpc.tcp` with certificates") && reported.contains("ssh -L"),
            "{reported}"
        );
    }
    let reported = report("journal: {path: \"http://host/journal\"}\n");
    assert!(!reported.contains("gRPC"), "{reported}");
}

#[test]
fn every_key_of_the_example_is_read_when_it_is_switched_on() {
    let config = Config::parse(&example_in_full())
        .unwrap_or_else(|kind| panic!("{kind}\n{}", example_in_full()));
    assert_eq!(config.budget.total, Some(Bytes::from_mib(15_656)));
    assert_eq!(config.workers.len(), 2);
    insta::assert_debug_snapshot!((&config.llm, &config.workers, &config.http.voices));
    let params = config
        .params(&MachineMemory::of(Bytes::from_mib(15_656)))
        .unwrap();
    assert_eq!(params.workers[1].variants[1].peak, Bytes::from_mib(160));
    assert_eq!(params.workers[1].start.start_order, 1);
}

#[test]
fn the_example_names_every_key() {
    let (_, keys) = include_str!("raw.rs").split_once("\nraw! {").unwrap();
    let (keys, _) = keys.split_once("\n}").unwrap();
    let keys = keys
        .split(['{', '}', ',', '\n'])
        .map(|key| key.split(':').next().unwrap().trim());
    for key in keys
        .filter(|key| !key.is_empty() && !key.starts_with(|c: char| c == '#' || c.is_uppercase()))
    {
        let written = [format!("{key}:"), format!("{}:", key.replace('_', "-"))];
        let special = ["port", "text", "path", "kind", "status", "pattern"].contains(&key)
            && EXAMPLE.contains(&format!("`{key}`"));
        assert!(
            special || written.iter().any(|key| EXAMPLE.contains(key.as_str())),
            "deploy/cotenant.yaml does not show `{key}`"
        );
    }
}

#[test]
fn host_names_have_no_port_and_aliases_stand_for_models_that_are_there() {
    for host in ["box.lan", "192.168.1.7", "::1", "[fe80::1]"] {
        Config::parse(&format!("http: {{allowed_hosts: [\"{host}\"]}}\n")).unwrap();
    }
    for host in ["https://box.lan", "box.lan:8410", "", "a b"] {
        let reported = report(&format!("http: {{allowed_hosts: [\"{host}\"]}}\n"));
        assert!(reported.contains("http.allowed_hosts"), "{reported}");
    }
    for address in ["172.30.32.0/24", "box.lan", "172.30.32.2:80", ""] {
        let reported = report(&format!("http: {{trusted_proxies: [\"{address}\"]}}\n"));
        assert!(reported.contains("http.trusted_proxies"), "{reported}");
    }
    let reported = report("http: {models: {gpt-4o: nothing}}\n");
    assert!(
        reported.contains("`gpt-4o: nothing` refers to a model that is not configured"),
        "{reported}"
    );
}

#[test]
fn all_faults_are_reported_at_once_with_their_place() {
    insta::assert_snapshot!(report(
        r#"
budget:
  total: 1GiB
  reserve: 1073741824
  scope: maschine
  watermarks: {elevated: 13, critical: 6.55%, last_resort: 12GB}
  dwell: 2h
  sample_min: 100ms
  sample_max: 50ms
llm:
  context: 100000000
  kv_floor: 12e3
  mode: max-sped
workers:
  - name: ASR 1
role: asr
memory: {steady: 12G}
socket: asr.sock
autostart: no
  - name: tts
role: tts
argv: [piper, --port, "${PROT}"]
protocol: none
oom_score_adj: 1001
memory: {steady: 64MiB, peak: 32MiB}
ready: {kind: log}
http: {listen: localhost}
grpc: {socket: none, abstract_name: none}
log: {filter: "cotenant=loud", format: xml}
"#
    ));
}

#[test]
fn faults_of_form_name_line_key_and_remedy() {
    let mut reported = String::new();
    for (what, text) in [
        ("unknown key", "budget:\n  resreve: 1GiB\n"),
        ("unknown key without a near one", "budget:\n  colour: red\n"),
        ("duplicate key", "state_dir: /a\nstate_dir: /b\n"),
        (
            "duplicate key in a table",
            "http:\n  voices: {alloy: a, alloy: b}\n",
        ),
        ("tab", "budget:\n\ttotal: 1GiB\n"),
        ("list for a value", "state_dir: [a, b]\n"),
        (
            "value for a list",
            "workers:\n  - name: a\n    argv: piper --uri x\n",
        ),
        ("value for a mapping", "budget: 12GiB\n"),
        ("list for a mapping", "budget: [12GiB]\n"),
        (
            "norway",
            "workers: [{name: a, argv: [x], memory: {steady: 1MiB}, autostart: no}]\n",
        ),
        ("no value", "state_dir:\n"),
        ("null", "state_dir: ~\n"),
        ("unclosed", "budget: {total: 1GiB\n"),
        ("two documents", "state_dir: /a\n---\nstate_dir: /b\n"),
        ("anchor without target", "state_dir: *x\n"),
        ("number as key", "1: 2\n"),
        ("a scalar", "hello\n"),
    ] {
        reported += &format!("# {what}\n{}\n", report(text));
    }
    insta::assert_snapshot!(reported);
}

#[test]
fn an_alias_bomb_is_refused_and_not_unfolded() {
    let mut bomb = "a: &a [x,x,x,x,x,x,x,x,x,x]\n".to_owned();
    for (letter, before) in ('b'..='j').zip('a'..) {
        bomb += &format!(
            "{letter}: &{letter} [{}]\n",
            vec![format!("*{before}"); 10].join(",")
        );
    }
    for text in [
        format!("{bomb}workers: *j\n"),
        format!(
            "http: {{voices: {{{}}}}}\n",
            bomb.trim().replace('\n', ", ")
        ),
    ] {
        assert!(Config::parse(&text).is_err());
    }
}

#[test]
fn what_cannot_work_in_the_budget_is_reported() {
    insta::assert_snapshot!(report(
        r"
budget:
  total: 400MiB
  reserve: 64MiB
  watermarks: {elevated: 20MiB, critical: 10%}
  hysteresis: 50%
workers:
  - {name: asr, role: asr, argv: [asr], memory: {variants: [{name: small, bytes: 40MiB}, {name: open, bytes: 330MiB}]}}
  - {name: tts, role: tts, argv: [tts], memory: {steady: 1GiB}}
"
    ));
    assert!(report("budget: {total: 100MiB, reserve: 100MiB}").contains("leaves nothing"));
    let config = Config::parse("workers: [{name: a, argv: [x], memory: {steady: 1GiB}}]").unwrap();
    assert!(
        config
            .params(&MachineMemory::of(Bytes::from_gib(8)))
            .is_ok()
    );
    assert_eq!(
        config
            .params(&MachineMemory::of(Bytes::from_gib(1)))
            .unwrap_err()[0]
            .path,
        "workers[0].memory.peak"
    );
}

#[test]
fn what_is_used_twice_is_reported() {
    insta::assert_snapshot!(report(
        r"
llm: {path: /m.gguf, name: tts}
workers:
  - {name: asr, role: asr, argv: [a], memory: {steady: 1MiB}, socket: /run/cotenant/cotenant.sock}
  - {name: asr, role: asr, argv: [a], memory: {steady: 1MiB}, port: 8410}
  - {name: tts, role: tts, argv: [a], memory: {steady: 1MiB}}
"
    ));
}

#[test]
fn defaults_follow_role_and_protocol() {
    let text = r"
runtime_dir: /tmp/run
workers:
  - {name: asr, role: asr, argv: [a], memory: {steady: 100MiB}}
  - {name: tts, role: tts, protocol: openai, argv: [a, '${PORT}'], memory: {steady: 100MiB, peak: 101MiB}}
  - {name: vision, argv: [a, 8080], env: {A: 1, B: no}, port: 8080, memory: {steady: 100MiB}}
  - {name: batch, argv: [a], memory: {steady: 100MiB}}
";
    let [asr, tts, vision, batch] = Config::parse(text).unwrap().workers.try_into().unwrap();
    assert_eq!(asr.listen, Listen::Socket("/tmp/run/asr.sock".into()));
    assert_eq!(
        (&asr.ready.check, asr.class),
        (&Readiness::Describe, Class::AudioRealtime)
    );
    assert_eq!(asr.memory.peak, Bytes::from_mib(125));
    assert_eq!(
        (&tts.listen, &tts.ready.check),
        (&Listen::FreePort, &Readiness::Connect)
    );
    assert_eq!(tts.memory.peak, Bytes::from_mib(101));
    assert_eq!(
        (&vision.listen, &vision.ready.check),
        (&Listen::Port(8080), &Readiness::Connect)
    );
    assert_eq!(vision.argv, ["a", "8080"]);
    assert_eq!(vision.env["B"], "no");
    assert_eq!(
        (&batch.listen, &batch.ready.check),
        (&Listen::Nowhere, &Readiness::Started)
    );
    assert_eq!(batch.class, Class::Batch);
}

#[test]
fn a_worker_of_another_user_listens_on_a_port_unless_it_has_a_place_for_a_socket() {
    let with = |argument: &str, more: &str| {
        format!(
            "workers:\n  - {{name: asr, role: asr, user: speech, argv: [a, '{argument}'], memory: {{steady: 1MiB}}{more}}}\n"
        )
    };
    let endpoint = |text: &str| Config::parse(text).unwrap().workers.remove(0).listen;
    assert_eq!(
        endpoint(&with("tcp://127.0.0.1:${PORT}", "")),
        Listen::FreePort
    );
    let place = "/srv/speech/asr.sock";
    assert_eq!(
        endpoint(&with("unix://${SOCKET}", &format!(", socket: {place}"))),
        Listen::Socket(place.into())
    );
    let reported = report(&with("unix://${SOCKET}", ""));
    assert!(
        reported.contains("the worker has no socket")
            && reported.contains("in which its `user` may create one"),
        "{reported}"
    );
}

#[test]
fn files_that_cannot_be_read_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.yaml");
    let report = |path: &Path| {
        let folder = folder.path().display().to_string();
        load(path).unwrap_err().report().replace(&folder, "/tmp")
    };
    let mut reported = report(&path);
    std::fs::write(&path, b"log: {filter: \xff}").unwrap();
    reported += &report(&path);
    std::fs::write(&path, vec![b'#'; (1 << 20) + 1]).unwrap();
    reported += &report(&path);
    reported += &report(folder.path());
    insta::assert_snapshot!(reported);
    std::fs::write(&path, "budget: {total: 2GiB}\n").unwrap();
    assert_eq!(load(&path).unwrap().budget.total, Some(Bytes::from_gib(2)));
}

#[test]
fn faults_of_a_workers_limits_order_and_readiness_are_reported() {
    let report = report(
        r"
llm: {path: /m.gguf, after: [tts, absent]}
workers:
  - {name: asr, role: asr, argv: [a], memory: {steady: 1MiB, recycle_above: 1MiB}, after: [asr], lease: ours}
  - name: tts
    role: tts
    protocol: whisper-server
    argv: [a, '${PORT}']
    memory: {steady: 1MiB}
    ready: {kind: log, pattern: '(ready'}
    idle: {shrink_after: 5m, stop_after: 1m}
    limits: {memory: 12, open_files: 3, core: lots}
    sandbox: {read: [models], syscalls: some, required: maybe}
",
    );
    insta::assert_snapshot!(report);
    let orders = |text: &str| {
        let kind = Config::parse(text).unwrap_err();
        LoadError::new(Path::new("c.yaml"), kind).report()
    };
    let mut reported = orders(
        "llm: {path: /m.gguf, after: [tts, absent]}\nworkers: [{name: tts, argv: [a], memory: {steady: 1MiB}, after: [tts]}]",
    );
    reported += &orders(
        "llm: {path: /m.gguf, after: [tts]}\nworkers: [{name: tts, argv: [a], memory: {steady: 1MiB}, after: [llm]}]",
    );
    insta::assert_snapshot!(reported);
}

#[test]
fn what_comes_before_the_llm_brings_what_it_comes_after() {
    let config = Config::parse(
        "llm: {path: /m.gguf, after: [tts]}
workers:
  - {name: asr, argv: [a], memory: {steady: 1MiB}}
  - {name: tts, argv: [a], memory: {steady: 1MiB}, after: [codec]}
  - {name: codec, argv: [a], memory: {steady: 1MiB}}
",
    )
    .unwrap();
    let mut before = confinement::before_llm(&config);
    before.sort();
    assert_eq!(before, ["codec", "tts"]);
}

#[test]
fn deep_nesting_is_refused_before_it_is_parsed() {
    for open in ["[", "{a: ", "- ", "{? "] {
        let text = format!("workers: {}", open.repeat(50_000));
        let text = if open == "- " {
            format!("workers:\n  {}x", open.repeat(50_000))
        } else {
            text
        };
        assert!(
            matches!(Config::parse(&text), Err(LoadErrorKind::TooDeep)),
            "{open:?}"
        );
    }
    // Brackets in text and comments do not nest.
    let argv = "[".repeat(100);
    for text in [
        format!("# {argv}\n"),
        format!(
            "workers: [{{name: a, argv: [/bin/sh, '{argv}', \"\\\"{argv}\"], protocol: none, ready: {{kind: started}}, memory: {{steady: 1MiB, peak: 1MiB}}}}]\n"
        ),
    ] {
        assert!(
            !matches!(Config::parse(&text), Err(LoadErrorKind::TooDeep)),
            "{text}"
        );
    }
}

#[test]
fn the_memory_of_a_worker_may_be_left_to_be_learned() {
    for (memory, peak) in [
        ("", 320),
        ("memory: auto,", 320),
        ("memory: {},", 320),
        ("memory: {peak: 64MiB},", 64),
    ] {
        let text = format!("workers: [{{name: asr, argv: [a], protocol: none, {memory}}}]\n");
        let config = Config::parse(&text).unwrap();
        let (memory, machine) = (
            &config.workers[0].memory,
            MachineMemory::of(Bytes::from_gib(4)),
        );
        assert!(memory.auto && memory.recycle_leaks, "{text}");
        assert_eq!(
            (memory.peak, memory.recycle_above),
            (Bytes::from_mib(peak), None),
            "{text}"
        );
        assert!(
            config.params(&machine).unwrap().workers[0].rest.auto,
            "{text}"
        );
    }
    // A size not stated in the configuration must not make a small budget unusable.
    let text = "budget: {total: 300MiB, reserve: 0MiB}\nworkers: [{name: asr, argv: [a], protocol: none}]\n";
    let params = Config::parse(text)
        .unwrap()
        .params(&MachineMemory::of(Bytes::from_gib(4)))
        .unwrap();
    assert_eq!(params.workers[0].peak, Bytes::from_mib(100));
    let error = Config::parse("workers: [{name: asr, argv: [a], protocol: none, memory: much}]")
        .unwrap_err();
    assert!(
        error.to_string().contains("memory") || format!("{error:?}").contains("auto"),
        "{error:?}"
    );
}
