//! Generates the services of kubelet's plugins from their proto files, without protoc.

use std::error::Error;

/// Folder of the proto files: a link, so that a package of the crate contains them.
const FOLDER: &str = "proto";

/// Relative to that folder.
const FILES: [&str; 3] = [
    "kubelet/registration.proto",
    "kubelet/dra.proto",
    "kubelet/dra_health.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={FOLDER}/kubelet");
    let mut compiler = protox::Compiler::new([FOLDER])?;
    compiler.include_source_info(true);
    compiler.open_files(FILES)?;
    tonic_prost_build::configure().compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
