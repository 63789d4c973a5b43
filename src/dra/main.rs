//! Entry point: arguments and exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    cotenant_dra::main(std::env::args_os())
}
