//! Folders of sockets.

use std::{fs::DirBuilder, os::unix::fs::DirBuilderExt as _, path::Path};

use super::error::RunError;

/// Makes the folder of a socket, closed to other users.
pub(super) fn make_parent(path: &Path) -> Result<(), RunError> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(folder)
            .map_err(|source| RunError::Folder { path: folder.to_owned(), source }),
        _ => Ok(()),
    }
}
