//! Entry point: arguments and exit code.

use std::{alloc::System, process::ExitCode};

use cotenant::standby::Standby;

/// The system's allocator, and before it what the daemon sets aside for sheds.
#[global_allocator]
static ALLOCATOR: Standby<System> = Standby::before(System);

fn main() -> ExitCode {
    cotenant::cli::main(std::env::args_os())
}
