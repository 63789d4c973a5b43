//! Files installed with the program.

use std::{path::Path, process::Command};

use super::installation::{Installation, said};

fn repository(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

#[test]
fn the_unit_file_is_understood_by_systemd() {
    let verify = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .args(
            [
                "cotenant.service",
                "cotenant-dra.service",
                "cotenant.socket",
                "cotenant-http.socket",
                "cotenant-wyoming.socket",
                "cotenant-metrics.service",
                "cotenant-metrics.timer",
            ]
            .map(|unit| repository("deploy").join(unit)),
        )
        .output();
    let output = match verify {
        Ok(output) => output,
        Err(error) => {
            println!("left out: `systemd-analyze` cannot be run: {error}");
            return;
        }
    };
    // The program is not installed on the test machine, which systemd reports too. Restart backoff needs systemd 254;
    // older versions ignore these keys.
    let known = [
        "is not executable: No such file or directory",
        "Unknown key 'RestartSteps'",
        "Unknown key 'RestartMaxDelaySec'",
    ];
    let faults: Vec<String> = String::from_utf8_lossy(&output.stderr)
        .lines()
        .filter(|line| line.contains("cotenant") && !known.iter().any(|known| line.contains(known)))
        .map(str::to_owned)
        .collect();
    assert!(faults.is_empty(), "{faults:#?}");
    let exposure = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager", "--threshold=30"])
        .arg(repository("deploy/cotenant.service"))
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&exposure.stdout);
    // systemd before 250 cannot rate a file.
    assert!(
        exposure.status.success() || !shown.contains("Overall exposure"),
        "{shown}"
    );
}

#[test]
fn the_unit_file_gives_what_workers_need_and_no_more() {
    let unit = std::fs::read_to_string(repository("deploy/cotenant.service")).unwrap();
    let of = |key: &str| -> Vec<Vec<String>> {
        let lines = unit
            .lines()
            .filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        lines
            .map(|line| line.split_whitespace().map(str::to_owned).collect())
            .collect()
    };
    // For workers' groups with limits on memory, processes and CPU time.
    assert_eq!(of("Delegate"), [["memory", "pids", "cpu"]]);
    // A group that delegates the memory controller accepts no process, including the next daemon while workers survive.
    assert!(
        unit.contains("\nExecStopPost=-") && unit.contains("echo -memory >"),
        "restarts fail in version 2"
    );
    // Answers may complete before SIGTERM; systemd must wait for that.
    let seconds = |text: &str| -> u32 { text.strip_suffix('s').unwrap().parse().unwrap() };
    let stop = &of("ExecStop")[0];
    assert_eq!(
        stop[..3],
        ["-/usr/local/bin/cotenant", "drain", "--wait"],
        "{stop:?}"
    );
    assert!(seconds(&stop[3]) + 10 <= seconds(&of("TimeoutStopSec")[0][0]));
    // Memory is measured with this setting.
    let (name, value) = cotenant::cli::stage::ALLOCATOR;
    assert_eq!(of("Environment"), [[format!("{name}={value}")]]);
    let container = std::fs::read_to_string(repository("deploy/Containerfile")).unwrap();
    assert!(
        container.contains(&format!("\nENV {name}={value}\n")),
        "{container}"
    );
    assert!(
        container.contains("\nHEALTHCHECK CMD [\"cotenant\", \"health\", \"--service\", \"cotenant.v1.OperatorService\"]\n"),
        "a container that drains or loads is not to be restarted"
    );
    for key in ["AmbientCapabilities", "CapabilityBoundingSet"] {
        assert_eq!(of(key), [["CAP_SYS_RESOURCE", "CAP_SYSLOG"]], "{key}");
    }
    // These would hide GPU devices, control groups, other processes, or the kernel log.
    for key in [
        "PrivateDevices",
        "PrivateUsers",
        "ProtectProc",
        "ProtectKernelLogs",
    ] {
        assert!(of(key).is_empty(), "{key}");
    }
    for key in ["ProtectControlGroups", "ProtectKernelTunables"] {
        assert_eq!(of(key), [["no"]], "{key}");
    }
}

#[test]
fn the_documented_configuration_is_accepted_as_it_is() {
    let installation = Installation::new("");
    let check = installation.run(&[
        "check",
        repository("deploy/cotenant.yaml").to_str().unwrap(),
    ]);
    assert!(check.status.success(), "{}", said(&check));
}

#[test]
fn configurations_in_documents_are_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("example.yaml");
    let mut examples = 0;
    for document in [
        "README.md",
        "docs/operating.md",
        "docs/clients/home-assistant.md",
        "docs/clients/langchain.md",
        "docs/clients/livekit-pipecat.md",
        "docs/clients/ollama.md",
        "docs/clients/speech-servers.md",
    ] {
        let text = std::fs::read_to_string(repository(document)).unwrap();
        for example in text
            .split("```yaml\n")
            .skip(1)
            .filter_map(|rest| rest.split("```").next())
        {
            examples += 1;
            std::fs::write(&file, example).unwrap();
            if let Err(error) = cotenant::config::load(&file) {
                panic!("{document}: {error:?}\n{example}");
            }
        }
    }
    assert!(examples > 5, "{examples} examples");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alerts_and_metrics_are_what_promtool_accepts() {
    let promtool = |arguments: &[&str], input: &str| -> Option<std::process::Output> {
        let mut child = Command::new("promtool")
            .args(arguments)
            .current_dir(repository("deploy/prometheus"))
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .ok()?;
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), input.as_bytes()).unwrap();
        Some(child.wait_with_output().unwrap())
    };
    let installation = Installation::new(&super::installation::budget(64));
    let daemon = installation.start().await;
    let url = format!("http://{}/metrics", daemon.http);
    let metrics = installation.tell(&["metrics", "--url", &url]);
    let textfile = installation.path("cotenant.prom");
    installation.tell(&[
        "metrics",
        "--url",
        &url,
        "--textfile",
        textfile.to_str().unwrap(),
    ]);
    assert!(
        std::fs::read_to_string(&textfile)
            .unwrap()
            .contains("cotenant_budget_bytes ")
    );
    assert!(
        installation
            .json(&["metrics", "--url", &url])
            .as_array()
            .unwrap()
            .len()
            > 20
    );
    daemon.end().await;
    let refused = installation.run(&[
        "metrics",
        "--url",
        &url,
        "--textfile",
        textfile.to_str().unwrap(),
    ]);
    assert_eq!(refused.status.code(), Some(3), "{}", said(&refused));
    assert!(
        textfile.exists(),
        "the file of a daemon that has ended keeps its age"
    );
    let runs: [(&[&str], &str); 3] = [
        (&["check", "rules", "cotenant.rules.yml"], ""),
        (&["test", "rules", "cotenant.rules.test.yml"], ""),
        (&["check", "metrics"], &metrics),
    ];
    for (arguments, input) in runs {
        let Some(output) = promtool(arguments, input) else {
            println!("left out: `promtool` cannot be run; `deploy/setup` installs it");
            return;
        };
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{arguments:?}: {}",
            said(&output)
        );
    }
    let rules =
        std::fs::read_to_string(repository("deploy/prometheus/cotenant.rules.yml")).unwrap();
    let count = |what: &str| {
        rules
            .lines()
            .filter(|line| line.trim().starts_with(what))
            .count()
    };
    assert_eq!(count("- alert: "), count("labels: {severity: "));
    assert_eq!(count("- alert: "), count("runbook_url: "));
}

#[test]
fn the_ansible_role_documents_each_variable_with_its_default() {
    let role = repository("deploy/ansible/roles/cotenant");
    let read = |path: &str| std::fs::read_to_string(role.join(path)).unwrap();
    let specs = read("meta/argument_specs.yml");
    let (_, options) = specs.split_once("    options:\n").unwrap();
    let mut documented = Vec::new();
    let mut defaults = Vec::new();
    for line in options.lines() {
        let key = line
            .strip_prefix("      ")
            .filter(|key| !key.starts_with(' '));
        if let Some(key) = key.and_then(|key| key.strip_suffix(':')) {
            documented.push(key);
        } else if let Some(value) = line.trim().strip_prefix("default: ") {
            defaults.push(format!("{}: {value}", documented.last().unwrap()));
        }
    }
    let written = read("defaults/main.yml");
    let written: Vec<&str> = written
        .lines()
        .filter(|line| !line.starts_with('#'))
        .collect();
    assert_eq!(written, defaults);
    for file in [
        "tasks/change.yml",
        "tasks/check.yml",
        "tasks/gate.yml",
        "tasks/main.yml",
        "tasks/rescue.yml",
        "tasks/state.yml",
        "vars/main.yml",
    ] {
        let text = read(file);
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        for word in words.filter(|word| word.starts_with("cotenant_")) {
            assert!(documented.contains(&word), "{file}: `{word}`");
        }
    }
}

#[test]
fn the_container_makes_each_folder_that_the_daemon_writes_to() {
    let file = std::fs::read_to_string(repository("deploy/Containerfile")).unwrap();
    let (before, _) = file.split_once("\nUSER cotenant\n").unwrap();
    let runtime = cotenant::config::Config::parse("").unwrap().runtime_dir;
    assert!(
        before.contains(&format!("-o cotenant -g cotenant {}\n", runtime.display())),
        "{file}"
    );
    // The package creates the state through systemd-tmpfiles.
    let made = std::fs::read_to_string(repository("deploy/cotenant.tmpfiles")).unwrap();
    let state = cotenant::config::Config::parse("").unwrap().state_dir;
    assert!(
        made.lines()
            .any(|line| line.starts_with(&format!("d {} ", state.display()))),
        "{made}"
    );
}

#[test]
fn the_package_has_everything_that_a_service_needs_and_scripts_that_a_shell_understands() {
    if Command::new("dpkg-deb").arg("--version").output().is_err() {
        println!("left out: `dpkg-deb` cannot be run");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        assert!(
            output.status.success(),
            "{program} {arguments:?}: {}",
            said(&output)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let out = folder.path().to_str().unwrap();
    let packed = run(
        repository("deploy/package").to_str().unwrap(),
        &["--program", super::installation::PROGRAM, "--out", out],
    );
    let deb = packed.lines().find(|line| line.ends_with(".deb")).unwrap();
    let listed = run("dpkg-deb", &["-c", deb]);
    for file in [
        "/usr/bin/cotenant",
        "/lib/systemd/system/cotenant.service",
        "/lib/systemd/system/cotenant.socket",
        "/lib/systemd/system/cotenant-http.socket",
        "/lib/systemd/system/cotenant-wyoming.socket",
        "/lib/systemd/system/cotenant-metrics.service",
        "/lib/systemd/system/cotenant-metrics.timer",
        "/usr/lib/sysusers.d/cotenant.conf",
        "/usr/lib/tmpfiles.d/cotenant.conf",
        "/usr/share/cotenant/demo.gguf",
        "/usr/share/man/man1/cotenant.1.gz",
        "/usr/share/man/man1/cotenant-plan.1.gz",
        "/usr/share/bash-completion/completions/cotenant",
        "/usr/share/zsh/vendor-completions/_cotenant",
        "/usr/share/fish/vendor_completions.d/cotenant.fish",
        "/usr/share/doc/cotenant/copyright",
        "/usr/share/doc/cotenant/third-party-notices.gz",
        "/usr/share/doc/cotenant/sbom.cdx.json.gz",
        "/usr/share/doc/cotenant/examples/avahi/cotenant.service",
        "/usr/share/doc/cotenant/troubleshooting.md",
        "/etc/cotenant/cotenant.yaml",
    ] {
        assert!(
            listed
                .lines()
                .any(|line| line.ends_with(&format!(".{file}"))),
            "{file}: {listed}"
        );
    }
    assert!(
        listed.lines().all(|line| line.contains(" root/root ")),
        "{listed}"
    );
    let control = folder.path().join("control");
    run("dpkg-deb", &["-e", deb, control.to_str().unwrap()]);
    for script in ["postinst", "prerm", "postrm"] {
        run("sh", &["-n", control.join(script).to_str().unwrap()]);
    }
    let prerm = std::fs::read_to_string(control.join("prerm")).unwrap();
    assert!(
        prerm.contains("[ \"$1\" = remove ] || exit 0"),
        "an upgrade leaves daemon and workers running"
    );
    let postinst = std::fs::read_to_string(control.join("postinst")).unwrap();
    let drains = postinst.find("cotenant drain --wait 60s ||").unwrap();
    assert!(
        drains < postinst.find("systemctl kill --signal=KILL").unwrap(),
        "an upgrade cuts running answers"
    );
    let conffiles = std::fs::read_to_string(control.join("conffiles")).unwrap();
    assert_eq!(conffiles, "/etc/cotenant/cotenant.yaml\n");

    let root = folder.path().join("root");
    run("dpkg-deb", &["-x", deb, root.to_str().unwrap()]);
    let notices = root.join("usr/share/doc/cotenant/third-party-notices.gz");
    let notices = run("gzip", &["-dc", notices.to_str().unwrap()]);
    for linked in [
        "  tokio 1.",
        "Permission is hereby granted",
        "Apache License",
    ] {
        assert!(notices.contains(linked), "{linked}");
    }
    let unit = std::fs::read_to_string(root.join("lib/systemd/system/cotenant.service")).unwrap();
    assert!(
        unit.contains("ExecStart=/usr/bin/cotenant serve --config /etc/cotenant/cotenant.yaml")
    );
    let config = std::fs::read_to_string(root.join("etc/cotenant/cotenant.yaml")).unwrap();
    let demo = root.join("usr/share/cotenant/demo.gguf");
    assert!(config.contains("path: /usr/share/cotenant/demo.gguf"));
    let installation = Installation::new("");
    let here = folder.path().join("here.yaml");
    std::fs::write(
        &here,
        config.replace("/usr/share/cotenant/demo.gguf", demo.to_str().unwrap()),
    )
    .unwrap();
    let check = installation.run(&["check", here.to_str().unwrap()]);
    assert!(check.status.success(), "{}", said(&check));
}
