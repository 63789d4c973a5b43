//! Entry point: arguments and exit code.

use std::{alloc::System, process::ExitCode};

use cotenant::emergency::EmergencyAllocator;

/// The system's allocator, and before it what the daemon sets aside for sheds.
#[global_allocator]
static ALLOCATOR: EmergencyAllocator<System> = EmergencyAllocator::before(System);

fn main() -> ExitCode {
    cotenant::cli::main(std::env::args_os(), env!("COTENANT_COMMIT"))
}
