//! Generates the part of OTLP that collectors need, without protoc.

use std::error::Error;

/// Folder of the proto files: a link, so that a package of the crate contains them.
const FOLDER: &str = "proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={FOLDER}");
    let mut compiler = protox::Compiler::new([FOLDER])?;
    compiler.include_source_info(true).include_imports(true);
    compiler.open_files([
        "opentelemetry/trace_service.proto",
        "opentelemetry/logs_service.proto",
    ])?;
    tonic_prost_build::configure().compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
