//! Readings of the machine and of processes.
