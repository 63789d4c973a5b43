//! Device kernels, compiled by g++ and run thread by thread: see `docs/cuda.md`.
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

/// Compiles kernels and tests where that was not done before; returns the folder.
fn built() -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda");
    let mut build = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/build"));
    succeeds(
        &build.arg(&out).output().expect("bash can be started"),
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
    assert!(output.status.success(), "{what} failed (g++ is needed):\n{out}{err}");
}

#[test]
fn kernels_compute_what_references_in_double_precision_do_and_access_nothing_wrongly() {
    let out = Command::new(built().join("watched")).output().unwrap();
    succeeds(&out, "kernels against references");
}

#[test]
fn each_planted_fault_of_a_kernel_is_found() {
    let out = built();
    let probe = |program: &str, tests: &str| {
        let probe = Command::new(out.join(program)).args(["probe", tests]).output().unwrap();
        let found = String::from_utf8_lossy(&probe.stdout).into_owned();
        println!("{program}: {}", found.lines().take(3).collect::<Vec<_>>().join(" "));
        // A probe that does not come to its end has counted nothing.
        let count = found.lines().next().and_then(|line| line.strip_suffix(" found"));
        count
            .and_then(|count| count.parse::<u32>().ok())
            .expect("a count of findings")
    };
    for tests in ["products", "layers", "attention"] {
        assert_eq!(probe("watched", tests), 0, "sound kernels have findings");
    }
    let faults = fs::read_to_string(out.join("faults")).unwrap();
    let planted: Vec<(&str, &str)> = faults.lines().filter_map(|line| line.split_once(':')).collect();
    assert!(planted.len() >= 12, "{planted:?}");
    let missed: Vec<_> = planted
        .into_iter()
        .filter(|(fault, tests)| probe(&format!("fault-{fault}"), tests) == 0)
        .collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
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
