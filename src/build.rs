//! Names the commit of a release build.

use std::{env, process::Command};

fn main() {
    println!("cargo::rerun-if-changed=src/build.rs");
    println!(
        "cargo::rustc-env=COTENANT_COMMIT={}",
        commit().unwrap_or_default()
    );
}

/// The commit that is built; `None` outside a repository, and in builds for development, which need not begin again with
/// each commit.
fn commit() -> Option<String> {
    if env::var("PROFILE").ok()? != "release" {
        return None;
    }
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    println!(
        "cargo::rerun-if-changed={}",
        git(&["rev-parse", "--git-path", "logs/HEAD"])?
    );
    git(&["describe", "--always", "--dirty", "--abbrev=9"])
}
