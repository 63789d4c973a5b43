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
        .map(|found| (found["worker"].as_str().unwrap(), found["rule"].as_str().unwrap()))
        .collect();
    assert_eq!(faults, [("gone", "program_missing"), ("script", "interpreter_missing")]);
}

/// Each kind of death once; `COTENANT_AUTOPSY_COUNT` asks for more.
#[test]
fn every_injected_death_is_called_by_its_name_and_none_wrongly_out_of_memory() {
    let count = std::env::var("COTENANT_AUTOPSY_COUNT").unwrap_or_else(|_| "1".to_owned());
    let output = Command::new(env!("CARGO_BIN_EXE_cotenant"))
        .args(["bench", "autopsy", "--output", "json", "--count", &count])
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    let kinds = report["kinds"].as_array().unwrap();
    for kind in kinds {
        if let Some(reason) = kind["leftOut"].as_str() {
            eprintln!("skipped: {}: {reason}", kind["kind"]);
            continue;
        }
        assert_eq!(kind["right"], kind["runs"], "{kind:#}");
        assert!(kind["runs"].as_u64().unwrap() >= 1, "{kind:#}");
    }
    assert_eq!(report["falseOom"], 0);
    let injected = kinds.iter().filter(|kind| kind["leftOut"].is_null()).count();
    assert!(injected >= 8, "those that need no compiler: {injected}");
    // The delay is promised for a machine at rest and measured there; what is checked here is that nothing waits.
    assert!(report["maxMs"].as_f64().unwrap() < 2000.0, "{report:#}");
}
