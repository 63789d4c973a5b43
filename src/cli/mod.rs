//! The command line: a client of the daemon, and the verbs that start it.
