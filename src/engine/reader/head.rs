//! Identity of the first bytes of a file.

use std::hash::{DefaultHasher, Hasher as _};

/// What identifies the first bytes of a file, its header with the table of tensors among them.
#[derive(Clone, Debug, Default)]
pub(in crate::engine) struct Head {
    pub(super) bytes: u64,
    pub(super) hash: DefaultHasher,
}

impl Head {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.hash.write(bytes);
    }
}
