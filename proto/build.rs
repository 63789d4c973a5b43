//! Generates `cotenant.v1`, `grpc.health.v1` and the part of OTLP that is used from the proto files beside it, without protoc,
//! and names the commit of a release build.

use std::{env, error::Error, fs, path::PathBuf, process::Command};

use prost::Message;

/// Relative to this folder.
const FILES: [&str; 4] =
    ["cotenant/v1/lease.proto", "cotenant/v1/llm.proto", "cotenant/v1/operator.proto", "grpc/health/v1/health.proto"];

/// What is spoken to others and not served, so that reflection does not list it.
const SPOKEN: &str = "opentelemetry/trace_service.proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let package = env::var("CARGO_PKG_VERSION")?;
    let commit = commit();
    println!("cargo::rustc-env=COTENANT_GIT={}", commit.as_deref().unwrap_or("unknown"));
    let version = commit.map_or_else(|| package.clone(), |commit| format!("{package} ({commit})"));
    println!("cargo::rustc-env=COTENANT_VERSION={version}");
    let compiled = |files: &[&str]| -> Result<_, protox::Error> {
        let mut compiler = protox::Compiler::new(["proto"])?;
        // Comments of the proto files become the documentation of the generated types.
        compiler.include_source_info(true).include_imports(true);
        compiler.open_files(files)?;
        Ok(compiler.file_descriptor_set())
    };
    let descriptors = compiled(&FILES)?;
    // What reflection serves has no comments: they would be most of what an idle daemon keeps of it.
    let mut served = descriptors.clone();
    served.file.iter_mut().for_each(|file| file.source_code_info = None);

    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    fs::write(out.join("cotenant_descriptor.bin"), served.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    tonic_prost_build::configure().compile_fds(compiled(&[SPOKEN])?)?;
    Ok(())
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
    println!("cargo::rerun-if-changed={}", git(&["rev-parse", "--git-path", "logs/HEAD"])?);
    git(&["describe", "--always", "--dirty", "--abbrev=9"])
}
