//! Generates `cotenant.v1` and `grpc.health.v1` from their proto files, without protoc.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

/// Folder of the proto files: a link, so that a package of the crate contains them.
const FOLDER: &str = "proto";

/// Relative to that folder.
const FILES: [&str; 4] = [
    "cotenant/v1/lease.proto",
    "cotenant/v1/llm.proto",
    "cotenant/v1/operator.proto",
    "grpc/health/v1/health.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={FOLDER}");
    let mut compiler = protox::Compiler::new([FOLDER])?;
    // Comments of the proto files become the documentation of the generated types.
    compiler.include_source_info(true).include_imports(true);
    compiler.open_files(FILES)?;
    let descriptors = compiler.file_descriptor_set();
    // Reflection omits comments: they would be most of its memory in an idle daemon.
    let mut served = descriptors.clone();
    served
        .file
        .iter_mut()
        .for_each(|file| file.source_code_info = None);

    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    fs::write(out.join("cotenant_descriptor.bin"), served.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
