//! The program `cotenant`: arguments and exit code, nothing else.

use std::process::ExitCode;

fn main() -> ExitCode {
    cotenant::cli::main(std::env::args_os())
}
