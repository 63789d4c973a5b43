//! Opening of files that only the supervisor writes.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

/// Opens a regular file owned by this user or root. Symbolic links are refused: in a folder writable by others, one
/// would redirect our writes.
///
/// # Errors
/// If it is another kind of file, belongs to another user, or cannot be opened.
pub fn open_own(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    // Do not block on the other end of a FIFO.
    let file = options
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path);
    let file = file.map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => refused("it is a symbolic link; name the file that it leads to"),
        _ => error,
    })?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(refused("it is not a plain file"));
    }
    let us = nix::unistd::geteuid().as_raw();
    if ![us, 0].contains(&found.uid()) {
        let owner = found.uid();
        return Err(refused(&format!(
            "it belongs to uid {owner}, and the supervisor runs as uid {us}"
        )));
    }
    Ok(file)
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}
