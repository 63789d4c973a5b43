//! Tests of the measurements: each runs with small numbers, and checks everything except time.

use std::{
    fs,
    process::{Command, ExitCode, Output},
};

use crate::weights::Weights as _;
use cotenant::engine::{
    spec::Architecture,
    synthetic::{Synthetic, TypeMix},
};
use libtest_mimic::{Arguments, Trial};
use serde_json::Value;

use crate::{
    engine::{logits_tests, perplexity_tests, ratios_tests},
    replay, rivals,
};

/// Runs the tests selected by the arguments, like the standard harness.
pub(crate) fn run() -> ExitCode {
    let tests: Vec<(&str, fn())> = [
        TESTS,
        rivals::TESTS,
        rivals::rules::tests::TESTS,
        replay::tests::TESTS,
        logits_tests::TESTS,
        perplexity_tests::TESTS,
        ratios_tests::TESTS,
    ]
    .concat();
    let trials = tests
        .into_iter()
        .map(|(name, test)| {
            Trial::test(name, move || {
                test();
                Ok(())
            })
        })
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

const TESTS: &[(&str, fn())] = &[
    (
        "grants_and_renewals_are_measured",
        grants_and_renewals_are_measured,
    ),
    (
        "large_requests_of_every_api_are_given_back",
        large_requests_of_every_api_are_given_back,
    ),
    (
        "a_non_compliant_tenant_is_detected_and_its_memory_is_not_granted",
        a_non_compliant_tenant_is_detected_and_its_memory_is_not_granted,
    ),
    (
        "storms_in_a_group_with_a_limit_get_no_process_killed",
        storms_in_a_group_with_a_limit_get_no_process_killed,
    ),
    ("kill_points_lose_nothing", kill_points_lose_nothing),
    (
        "every_injected_death_is_called_by_its_name_and_none_wrongly_out_of_memory",
        every_injected_death_is_called_by_its_name_and_none_wrongly_out_of_memory,
    ),
    (
        "a_model_of_the_fixtures_can_be_written_by_a_command",
        a_model_of_the_fixtures_can_be_written_by_a_command,
    ),
];

fn developer(arguments: &[&str]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(arguments)
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr]
        .map(|text| String::from_utf8_lossy(text))
        .concat()
}

/// Runs a measurement; returns its figures by name.
fn figures(arguments: &[&str]) -> Vec<(String, f64, Option<bool>)> {
    let output = developer(&[arguments, &["-o", "json"]].concat());
    assert!(output.status.success(), "{}", said(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let figures = report["figures"].as_array().unwrap().iter();
    figures
        .map(|figure| {
            let what = figure["what"].as_str().unwrap().to_owned();
            (
                what,
                figure["value"].as_f64().unwrap(),
                figure["met"].as_bool(),
            )
        })
        .collect()
}

fn grants_and_renewals_are_measured() {
    let grants = figures(&["grants", "--rounds", "20"]);
    assert!(
        grants.iter().all(|(_, value, _)| *value > 0.0),
        "{grants:?}"
    );
    for way in [
        &["renewals", "--leases", "8", "--seconds", "1"][..],
        &["renewals", "--leases", "8", "--seconds", "1", "--calls"],
    ] {
        let renewals = figures(way);
        assert!(
            renewals.iter().all(|(_, value, _)| *value > 0.0),
            "{renewals:?}"
        );
    }
}

fn large_requests_of_every_api_are_given_back() {
    let figures = figures(&[
        "bodies",
        "--requests",
        "300",
        "--clients",
        "4",
        "--rest",
        "2",
    ]);
    assert!(
        figures.iter().all(|(_, _, met)| *met != Some(false)),
        "{figures:?}"
    );
}

fn a_non_compliant_tenant_is_detected_and_its_memory_is_not_granted() {
    let figures = figures(&["noncompliant", "--rounds", "2"]);
    let met = |what: &str| {
        figures
            .iter()
            .find(|figure| figure.0.contains(what))
            .unwrap()
            .2
    };
    assert_eq!(
        met("grants out of what was not freed"),
        Some(true),
        "{figures:?}"
    );
    assert_eq!(
        met("grants once the non-compliant holder was gone"),
        Some(true),
        "{figures:?}"
    );
}

fn storms_in_a_group_with_a_limit_get_no_process_killed() {
    let output = developer(&["storm", "--storms", "2", "-o", "json"]);
    let reported = String::from_utf8_lossy(&output.stderr);
    if reported.contains("cannot limit memory here") {
        println!("left out: {reported}");
        return;
    }
    assert!(output.status.success(), "{}", said(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let figures = report["figures"].as_array().unwrap();
    let kills = figures.iter().find(|figure| {
        figure["what"]
            .as_str()
            .unwrap()
            .contains("kills for memory")
    });
    assert_eq!(kills.unwrap()["value"], 0.0, "{report}");
}

fn kill_points_lose_nothing() {
    let output = developer(&["kill", "--points", "6"]);
    let text = said(&output);
    println!("{text}");
    assert!(output.status.success(), "{text}");
    assert!(text.contains("faults: 0 in 6 points"), "{text}");
}

/// Each kind of death once; `COTENANT_AUTOPSY_COUNT` sets a larger number.
fn every_injected_death_is_called_by_its_name_and_none_wrongly_out_of_memory() {
    let count = std::env::var("COTENANT_AUTOPSY_COUNT").unwrap_or_else(|_| "1".to_owned());
    let output = developer(&["autopsy", "--output", "json", "--count", &count]);
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
    let injected = kinds
        .iter()
        .filter(|kind| kind["leftOut"].is_null())
        .count();
    assert!(injected >= 8, "those that need no compiler: {injected}");
    // The promised delay is measured on an idle machine; this only checks that nothing blocks.
    assert!(report["maxMs"].as_f64().unwrap() < 2000.0, "{report:#}");
}

/// The command given in the fixtures' README writes the same file as the tests.
fn a_model_of_the_fixtures_can_be_written_by_a_command() {
    let folder = tempfile::tempdir().unwrap();
    let (path, wanted) = (
        folder.path().join("model.gguf"),
        folder.path().join("wanted.gguf"),
    );
    let write = || {
        Command::new(std::env::current_exe().unwrap())
            .args([
                "engine",
                "--shape",
                "tiny-qwen35",
                "--type",
                "q4_k_m",
                "--seed",
                "7",
            ])
            .arg("--write")
            .arg(&path)
            .output()
            .unwrap()
    };
    let output = write();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Synthetic::tiny(Architecture::Qwen35, TypeMix::Q4KM, 7)
        .write(&wanted)
        .unwrap();
    let bytes = fs::read(&wanted).unwrap();
    assert!(fs::read(&path).unwrap() == bytes);

    // An existing file is not overwritten.
    let again = write();
    assert!(!again.status.success());
    let message = String::from_utf8_lossy(&again.stderr);
    assert!(
        message.contains("there is a file of this name already"),
        "{message}"
    );
    assert!(fs::read(&path).unwrap() == bytes);
}
