//! The configuration file: as written, checked, and as the rest of the program sees it.
