//! Deaths of real processes, called by their name.

use std::process::Command;

use serde_json::Value;

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
