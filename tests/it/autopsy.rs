//! Classification of deaths of real processes.

use std::{path::Path, process::Command};

use serde_json::Value;

/// A configuration for another board: more memory than exists, a program for another processor, and a GPU.
#[test]
fn a_configuration_for_another_device_is_refused_with_everything_that_does_not_fit_here() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("asr");
    let mut header = vec![0; 64];
    header[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
    // ET_EXEC of x86-64 on arm64, of arm64 elsewhere.
    header[16] = 2;
    header[18] = if cfg!(target_arch = "aarch64") {
        62
    } else {
        183
    };
    std::fs::write(&program, header).unwrap();
    std::fs::set_permissions(
        &program,
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let config = dir.path().join("cotenant.yaml");
    let text = format!(
        "budget: {{total: 4TiB}}\nllm: {{path: {}/deploy/demo-model/demo.gguf, device: cuda}}\nworkers:\n  \
         - {{name: asr, argv: [{}], protocol: none, ready: {{kind: started}}, memory: {{steady: 1MiB, peak: 1MiB}}}}\n",
        env!("CARGO_MANIFEST_DIR"),
        program.display()
    );
    std::fs::write(&config, text).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_cotenant"))
        .args(["check", "--output", "json"])
        .arg(&config)
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let said = report["errors"].to_string();
    assert_eq!(output.status.code(), Some(78), "{said}");
    assert!(
        said.contains("budget.total: `4096 GiB` is above the "),
        "{said}"
    );
    assert!(
        said.contains("no GPU supports it") || Path::new("/dev/nvidia0").exists(),
        "{said}"
    );
    let found = report["findings"]
        .as_array()
        .unwrap()
        .iter()
        .find(|found| found["worker"] == "asr")
        .unwrap();
    assert_eq!(found["rule"], "program_unfit", "{report}");
    assert_eq!(
        report["verdict"],
        "the configuration cannot be used on this machine"
    );
}

/// The check predicts the cause of death of each of these workers.
#[test]
fn a_program_that_could_not_start_is_found_by_the_check() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    std::fs::write(&script, "#!/nowhere/python3\n").unwrap();
    let mut mode = std::fs::metadata(&script).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
    std::fs::set_permissions(&script, mode).unwrap();
    let config = dir.path().join("cotenant.yaml");
    let worker = |name: &str, program: &str| {
        format!(
            "  - {{name: {name}, argv: [{program}], protocol: none, ready: {{kind: started}}, memory: {{steady: 1MiB, peak: 1MiB}}}}\n"
        )
    };
    let text = format!(
        "budget: {{total: 1GiB, reserve: 256MiB}}\nworkers:\n{}{}{}",
        worker("gone", "/nowhere/asr"),
        worker("script", script.to_str().unwrap()),
        worker("fine", "/bin/sh"),
    );
    std::fs::write(&config, text).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_cotenant"))
        .args(["check", "--output", "json"])
        .arg(&config)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(78), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let faults: Vec<(&str, &str)> = report["findings"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|found| found["severity"] == "fault")
        .map(|found| {
            (
                found["worker"].as_str().unwrap(),
                found["rule"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        faults,
        [
            ("gone", "program_missing"),
            ("script", "interpreter_missing")
        ]
    );
}
