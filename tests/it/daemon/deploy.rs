//! What is installed beside the program.

use std::{path::Path, process::Command};

use super::house::{House, said};

fn repository(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

#[test]
fn the_unit_file_is_understood_by_systemd() {
    let verify = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .arg(repository("deploy/cotenant.service"))
        .output();
    let output = match verify {
        Ok(output) => output,
        Err(error) => {
            println!("left out: `systemd-analyze` cannot be run: {error}");
            return;
        }
    };
    // The program is not installed where the tests run, which systemd says too.
    let faults: Vec<String> = String::from_utf8_lossy(&output.stderr)
        .lines()
        .filter(|line| line.contains("cotenant") && !line.contains("is not executable: No such file or directory"))
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
    assert!(exposure.status.success() || !shown.contains("Overall exposure"), "{shown}");
}

#[test]
fn the_unit_file_gives_what_workers_need_and_no_more() {
    let unit = std::fs::read_to_string(repository("deploy/cotenant.service")).unwrap();
    let of = |key: &str| -> Vec<Vec<String>> {
        let lines = unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
    };
    // Groups of workers with limits of memory, processes and processor time.
    assert_eq!(of("Delegate"), [["memory", "pids", "cpu"]]);
    for key in ["AmbientCapabilities", "CapabilityBoundingSet"] {
        assert_eq!(of(key), [["CAP_SYS_RESOURCE", "CAP_SYSLOG"]], "{key}");
    }
    // Would hide GPU devices, control groups, other processes, or the kernel log.
    for key in ["PrivateDevices", "PrivateUsers", "ProtectProc", "ProtectKernelLogs"] {
        assert!(of(key).is_empty(), "{key}");
    }
    for key in ["ProtectControlGroups", "ProtectKernelTunables"] {
        assert_eq!(of(key), [["no"]], "{key}");
    }
}

#[test]
fn the_documented_configuration_is_accepted_as_it_is() {
    let house = House::new("");
    let check = house.run(&["check", repository("deploy/cotenant.yaml").to_str().unwrap()]);
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
        "docs/servers.md",
        "docs/clients/home-assistant.md",
        "docs/clients/livekit-pipecat.md",
        "docs/clients/ollama.md",
    ] {
        let text = std::fs::read_to_string(repository(document)).unwrap();
        for example in text.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()) {
            examples += 1;
            std::fs::write(&file, example).unwrap();
            if let Err(error) = cotenant::config::load(&file) {
                panic!("{document}: {error:?}\n{example}");
            }
        }
    }
    assert!(examples > 5, "{examples} examples");
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
        assert!(output.status.success(), "{program} {arguments:?}: {}", said(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let out = folder.path().to_str().unwrap();
    let packed =
        run(repository("deploy/package").to_str().unwrap(), &["--program", super::house::PROGRAM, "--out", out]);
    let deb = packed.lines().find(|line| line.ends_with(".deb")).unwrap();
    let listed = run("dpkg-deb", &["-c", deb]);
    for file in [
        "/usr/bin/cotenant",
        "/lib/systemd/system/cotenant.service",
        "/usr/lib/sysusers.d/cotenant.conf",
        "/usr/lib/tmpfiles.d/cotenant.conf",
        "/usr/share/cotenant/demo.gguf",
        "/usr/share/man/man1/cotenant.1.gz",
        "/usr/share/man/man1/cotenant-plan.1.gz",
        "/usr/share/bash-completion/completions/cotenant",
        "/usr/share/zsh/vendor-completions/_cotenant",
        "/usr/share/fish/vendor_completions.d/cotenant.fish",
        "/usr/share/doc/cotenant/copyright",
        "/etc/cotenant/cotenant.yaml",
    ] {
        assert!(listed.lines().any(|line| line.ends_with(&format!(".{file}"))), "{file}: {listed}");
    }
    assert!(listed.lines().all(|line| line.contains(" root/root ")), "{listed}");
    let control = folder.path().join("control");
    run("dpkg-deb", &["-e", deb, control.to_str().unwrap()]);
    for script in ["postinst", "prerm", "postrm"] {
        run("sh", &["-n", control.join(script).to_str().unwrap()]);
    }
    let prerm = std::fs::read_to_string(control.join("prerm")).unwrap();
    assert!(prerm.contains("[ \"$1\" = remove ] || exit 0"), "an upgrade leaves daemon and workers running");
    let conffiles = std::fs::read_to_string(control.join("conffiles")).unwrap();
    assert_eq!(conffiles, "/etc/cotenant/cotenant.yaml\n");

    let root = folder.path().join("root");
    run("dpkg-deb", &["-x", deb, root.to_str().unwrap()]);
    let unit = std::fs::read_to_string(root.join("lib/systemd/system/cotenant.service")).unwrap();
    assert!(unit.contains("ExecStart=/usr/bin/cotenant serve --config /etc/cotenant/cotenant.yaml"));
    let config = std::fs::read_to_string(root.join("etc/cotenant/cotenant.yaml")).unwrap();
    let demo = root.join("usr/share/cotenant/demo.gguf");
    assert!(config.contains("path: /usr/share/cotenant/demo.gguf"));
    let house = House::new("");
    let here = folder.path().join("here.yaml");
    std::fs::write(&here, config.replace("/usr/share/cotenant/demo.gguf", demo.to_str().unwrap())).unwrap();
    let check = house.run(&["check", here.to_str().unwrap()]);
    assert!(check.status.success(), "{}", said(&check));
}
