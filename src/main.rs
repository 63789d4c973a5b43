//! The program `cotenant`: arguments and exit code, nothing else.

fn main() {}
