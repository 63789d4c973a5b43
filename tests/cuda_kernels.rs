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
    let sound = Command::new(out.join("watched")).arg("probe").output().unwrap();
    assert!(!sound.status.success(), "sound kernels have findings: {sound:?}");
    let faults = fs::read_to_string(out.join("faults")).unwrap();
    let missed: Vec<&str> = faults
        .lines()
        .filter(|fault| {
            let probe = Command::new(out.join(format!("fault-{fault}")))
                .arg("probe")
                .output()
                .unwrap();
            println!(
                "{fault}: {}",
                String::from_utf8_lossy(&probe.stdout)
                    .lines()
                    .take(3)
                    .collect::<Vec<_>>()
                    .join(" ")
            );
            !probe.status.success()
        })
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
