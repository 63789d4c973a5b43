//! Generates `cotenant.v1` from the proto files beside it, without protoc.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

/// The files of the package, relative to this folder.
const FILES: [&str; 3] = [
    "cotenant/v1/lease.proto",
    "cotenant/v1/llm.proto",
    "cotenant/v1/operator.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let mut compiler = protox::Compiler::new(["proto"])?;
    // Comments of the proto files become the documentation of the generated types.
    compiler.include_source_info(true).include_imports(true);
    compiler.open_files(FILES)?;
    let descriptors = compiler.file_descriptor_set();

    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    fs::write(out.join("cotenant_descriptor.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
