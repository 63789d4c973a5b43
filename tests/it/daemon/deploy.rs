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
}

#[test]
fn the_documented_configuration_is_accepted_as_it_is() {
    let house = House::new("");
    let check = house.run(&["check", repository("deploy/cotenant.yaml").to_str().unwrap()]);
    assert!(check.status.success(), "{}", said(&check));
}
