//! Lifeline of a built-in worker: readiness notification, and exit without a supervisor.
//!
//! A supervisor keeps a file locked, and names it in the environment of its workers. When it ends, the kernel releases
//! the lock; the next supervisor acquires it. A worker without a supervisor for longer than the term of a lease exits,
//! to free its memory.

use std::{
    env,
    fs::File,
    io::{self, Write as _},
    path::{Path, PathBuf},
    time::Duration,
};

use nix::fcntl::{FcntlArg, fcntl};
use tokio::time::{Instant, sleep};

use super::super::adopt::LOCK_VARIABLE;

/// Notifies the parent of readiness by sd_notify(3); does nothing without `NOTIFY_SOCKET`.
pub(super) fn tell_ready() {
    if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        tracing::warn!(%error, "cannot notify that this worker is ready");
    }
}

/// Returns when this worker has had no supervisor for a term; never for one started by hand.
pub(super) async fn left_alone() {
    let Some(lock) = env::var_os(LOCK_VARIABLE).map(PathBuf::from) else {
        return std::future::pending().await;
    };
    let term = env::var(TERM_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok());
    let term = term.map_or(TERM, Duration::from_millis);
    without(&lock, term).await;
    // The reader may be gone, which must not prevent the exit.
    let words = format!(
        "no supervisor for {:.0} s: releasing the memory\n",
        term.as_secs_f64()
    );
    let _ = io::stderr().write_all(words.as_bytes());
}

/// Returns when `lock` has been free for `term`.
async fn without(lock: &Path, term: Duration) {
    let mut alone_since = None;
    loop {
        match is_held(lock) {
            Ok(false) => {
                let since: Instant = *alone_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= term {
                    return;
                }
            }
            // An unreadable lock does not count as free.
            Ok(true) | Err(_) => alone_since = None,
        }
        sleep(LOOK_EVERY.min(term / 4)).await;
    }
}

/// Returns whether the file is locked; a missing one is not.
fn is_held(path: &Path) -> io::Result<bool> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let short = |number| libc::c_short::try_from(number).map_err(io::Error::other);
    let (read, unlocked) = (short(libc::F_RDLCK)?, short(libc::F_UNLCK)?);
    let mut asked = libc::flock {
        l_type: read,
        l_whence: short(libc::SEEK_SET)?,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_OFD_GETLK(&mut asked))?;
    Ok(asked.l_type != unlocked)
}

/// Overrides [`TERM`], in milliseconds.
const TERM_VARIABLE: &str = "COTENANT_ALONE_MS";

/// Default term of a lease.
const TERM: Duration = Duration::from_secs(30);

const LOOK_EVERY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lock_that_is_held_keeps_and_one_that_is_gone_lets_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        assert!(!is_held(&path).unwrap(), "there is no file");
        let file = File::create(&path).unwrap();
        assert!(!is_held(&path).unwrap());
        let wanted = libc::flock {
            l_type: libc::F_WRLCK.try_into().unwrap(),
            l_whence: libc::SEEK_SET.try_into().unwrap(),
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        fcntl(&file, FcntlArg::F_OFD_SETLK(&wanted)).unwrap();
        assert!(is_held(&path).unwrap());
        let term = Duration::from_millis(20);
        tokio::select! {
            biased;
            () = without(&path, term) => panic!("it is held"),
            () = sleep(term * 5) => {}
        }
        drop(file);
        without(&path, term).await;
    }
}
