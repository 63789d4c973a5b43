//! Device kernels compiled by g++ and run thread by thread, and the imitated driver.
//!
//! See `docs/cuda.md`.
#![expect(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "test helpers may fail loudly, and figures are shown with a failure"
)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

/// Compiles `kernels` or the `driver` if needed; returns the folder.
fn built(part: &str) -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda");
    let mut build = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/build"));
    succeeds(
        &build
            .arg(&out)
            .arg(part)
            .output()
            .expect("bash can be started"),
        "tests/cuda/build",
    );
    out
}

fn succeeds(output: &Output, what: &str) {
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    println!("{out}");
    assert!(
        output.status.success(),
        "{what} failed (g++ is needed):\n{out}{err}"
    );
}

#[test]
fn kernels_compute_what_references_in_double_precision_do_and_access_nothing_wrongly() {
    let out = Command::new(built("kernels").join("watched"))
        .output()
        .unwrap();
    succeeds(&out, "kernels against references");
}

/// Faults named by `PLANTED` in the kernels, and the tests that must find each.
const FAULTS: [(&str, &[&str]); 3] = [
    (
        "products",
        &[
            "NO_COPY_WAIT",
            "NO_FENCE_AFTER",
            "NO_FENCE_BEFORE",
            "NO_ROUND_BARRIER",
            "NO_TILE_BARRIER",
            "NO_WARP_BARRIER",
            "TAIL_OF_SEGMENT",
        ],
    ),
    (
        "layers",
        &[
            "NO_CONVERT_BARRIER",
            "NO_SUM_BARRIER",
            "NO_TURN_BARRIER",
            "ROW_INDEX",
        ],
    ),
    (
        "attention",
        &[
            "HISTORY_TOO_EARLY",
            "NO_ANSWER_FENCE",
            "NO_CONVOLUTION_BARRIER",
            "NO_EXCHANGE_BARRIER",
            "NO_HISTORY_BARRIER",
            "NO_KEY_BARRIER",
            "NO_SPAN_BARRIER",
            "NO_STAGE_BARRIER",
            "NO_VALUE_BARRIER",
        ],
    ),
];

#[test]
fn each_planted_fault_of_a_kernel_is_found() {
    let program = built("kernels").join("watched");
    let probe = |fault: &str, tests: &str| {
        let probe = Command::new(&program)
            .args(["probe", tests])
            .env("SIMT_FAULT", fault)
            .output()
            .unwrap();
        let found = String::from_utf8_lossy(&probe.stdout).into_owned();
        println!(
            "{fault}: {}",
            found.lines().take(3).collect::<Vec<_>>().join(" ")
        );
        // An incomplete probe has counted nothing.
        let count = found
            .lines()
            .next()
            .and_then(|line| line.strip_suffix(" found"));
        count
            .and_then(|count| count.parse::<u32>().ok())
            .expect("a count of findings")
    };
    for (tests, faults) in FAULTS {
        assert_eq!(probe("", tests), 0, "sound kernels have findings");
        let missed: Vec<_> = faults
            .iter()
            .filter(|fault| probe(fault, tests) == 0)
            .collect();
        assert!(missed.is_empty(), "not found: {missed:?}");
    }
}

#[test]
fn the_imitated_driver_treats_programs_as_a_driver_does() {
    let out = built("driver");
    for library in ["driver", "driver-watched"] {
        let mut test = Command::new(out.join("driver-test"));
        let test = test
            .arg(out.join(library).join("libcuda.so"))
            .arg(&out)
            .output()
            .unwrap();
        succeeds(&test, library);
    }
}

#[test]
fn the_imitated_driver_logs_faults_findings_and_what_is_left() {
    let out = built("driver");
    let log = out.join("driver-log");
    let logged = |case: &str, faults: &str| -> Vec<Value> {
        fs::remove_file(&log).ok();
        let mut test = Command::new(out.join("driver-test"));
        test.arg(out.join("driver/libcuda.so"))
            .args([&out, Path::new(case)]);
        test.env("FAKE_CUDA_LOG", &log)
            .env("FAKE_CUDA_FAULTS", faults)
            .output()
            .unwrap();
        let lines = fs::read_to_string(&log).unwrap();
        lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    };
    let lines = logged("registered memory is discarded", "");
    assert_eq!(
        lines[0]["what"],
        "registered memory was discarded, or mapped again"
    );
    assert_eq!(lines[1]["event"], "exit");
    assert_eq!(lines[1]["calls"]["cuMemHostUnregister"], 2);
    assert_eq!(lines[1]["peak_bytes"], 100);
    assert_eq!(lines[2]["left"]["allocations"], 1);
    assert_eq!(lines[2]["left"]["bytes"], 100);
    let lines = logged("memory freed too early", "cuMemFree_v2@1=1");
    assert_eq!(lines[0]["name"], "cuMemFree_v2");
    assert_eq!(lines[0]["call"], 1);
    assert!(
        lines[1]["what"]
            .as_str()
            .unwrap()
            .contains("convert uses address")
    );
    assert_eq!(
        lines[2]["left"]["modules"], 1,
        "what the destroyed context had: {lines:?}"
    );
}

#[test]
fn images_for_devices_are_made_from_these_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/engine/backend/cuda/images");
    let mut check = Command::new("sha256sum");
    let check = check
        .args(["--check", "--quiet", "--strict", "manifest"])
        .current_dir(folder);
    succeeds(
        &check.output().unwrap(),
        "comparison of hashes; src/engine/backend/cuda/images/make writes the images",
    );
}
