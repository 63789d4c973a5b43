//! Deaths of real processes, called by their name.

use std::process::Command;

use serde_json::Value;

/// The check finds, before any start, what each of these workers would have died of.
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
    let output =
        Command::new(env!("CARGO_BIN_EXE_cotenant")).args(["check", "--output", "json"]).arg(&config).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(78), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let faults: Vec<(&str, &str)> = report["findings"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|found| found["severity"] == "fault")
        .map(|found| (found["worker"].as_str().unwrap(), found["rule"].as_str().unwrap()))
        .collect();
    assert_eq!(faults, [("gone", "program_missing"), ("script", "interpreter_missing")]);
}
