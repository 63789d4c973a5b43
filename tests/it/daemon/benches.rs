//! The benchmarks of tenants run through, with what they assert besides time: figures are for a quiet machine.

use serde_json::Value;

use super::house::{House, said};

/// Runs one; returns its figures by name.
fn figures(arguments: &[&str]) -> Vec<(String, f64, Option<bool>)> {
    let house = House::new("");
    let output = house.run(&[&["-o", "json", "bench"], arguments].concat());
    assert!(output.status.success(), "{}", said(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let figures = report["figures"].as_array().unwrap().iter();
    figures
        .map(|figure| {
            let what = figure["what"].as_str().unwrap().to_owned();
            (what, figure["value"].as_f64().unwrap(), figure["met"].as_bool())
        })
        .collect()
}

#[test]
fn grants_and_renewals_are_measured() {
    let grants = figures(&["grants", "--rounds", "20"]);
    assert!(grants.iter().all(|(_, value, _)| *value > 0.0), "{grants:?}");
    for way in [
        &["renewals", "--leases", "8", "--seconds", "1"][..],
        &["renewals", "--leases", "8", "--seconds", "1", "--calls"],
    ] {
        let renewals = figures(way);
        assert!(renewals.iter().all(|(_, value, _)| *value > 0.0), "{renewals:?}");
    }
}

#[test]
fn a_liar_is_found_out_and_nothing_is_granted_of_what_it_keeps() {
    let figures = figures(&["liars", "--rounds", "2"]);
    let met = |what: &str| figures.iter().find(|figure| figure.0.contains(what)).unwrap().2;
    assert_eq!(met("grants out of what was not freed"), Some(true), "{figures:?}");
    assert_eq!(met("grants once the liar was gone"), Some(true), "{figures:?}");
}

#[test]
fn storms_in_a_group_with_a_limit_get_nobody_killed() {
    let house = House::new("");
    let output = house.run(&["-o", "json", "bench", "storm", "--storms", "2"]);
    let told = String::from_utf8_lossy(&output.stderr);
    if told.contains("cannot limit memory here") {
        println!("left out: {told}");
        return;
    }
    assert!(output.status.success(), "{}", said(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let figures = report["figures"].as_array().unwrap();
    let kills = figures
        .iter()
        .find(|figure| figure["what"].as_str().unwrap().contains("kills for memory"));
    assert_eq!(kills.unwrap()["value"], 0.0, "{report}");
}
