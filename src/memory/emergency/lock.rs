//! Locking of the reserve, the program's text and stacks in memory.
//!
//! Ranges are locked individually, since the weights and the KV cache of the engine are in the same process and must
//! never be locked. Text is locked on first access (`MLOCK_ONFAULT`), so that locking populates nothing.

use std::{
    env, fmt,
    hint::black_box,
    io,
    sync::{Mutex, PoisonError},
};

use procfs::process::{MMPermissions, MMapPath, Process};

use cotenant_units::Bytes;

/// Result of locking memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Locked {
    what: &'static str,
    bytes: Bytes,
    /// Reason why a part is not locked.
    refused: Option<String>,
}

/// Time at which a range must be populated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// All of it, immediately.
    Now,
    /// Each page at its first access.
    Touched,
}

impl Locked {
    /// Whether all of it is locked.
    pub const fn is_locked(&self) -> bool {
        self.refused.is_none()
    }

    /// Adds the result of another range.
    #[must_use]
    pub fn and(mut self, what: &'static str, other: Self) -> Self {
        self.what = what;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.refused = self.refused.or(other.refused);
        self
    }
}

impl fmt::Display for Locked {
    /// `the program is locked, 9.1 MiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.refused {
            None => write!(
                f,
                "{} cannot be paged out ({} at most)",
                self.what, self.bytes
            ),
            Some(why) => write!(f, "{} may be paged out: {why}", self.what),
        }
    }
}

/// Locks `length` bytes from `start`.
pub(super) fn range(what: &'static str, start: *const u8, length: usize, when: When) -> Locked {
    let flags = match when {
        When::Now => 0,
        When::Touched => libc::MLOCK_ONFAULT,
    };
    // SAFETY: locking changes no content, and unmapped ranges are refused.
    let result = unsafe { libc::mlock2(start.cast(), length, flags) };
    let bytes = Bytes::new(length as u64);
    let refused = (result != 0).then(|| {
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOMEM | libc::EPERM) => {
                format!("{bytes} more would exceed the limit of locked memory (`LimitMEMLOCK` of the unit, `ulimit -l`)")
            }
            _ => error.to_string(),
        }
    });
    Locked {
        what,
        bytes,
        refused,
    }
}

/// Locks the text, constants and data of this program and of its libraries, as far as they are accessed.
///
/// Limited to mappings of executable files and of the program's own file, which excludes memory of the engine.
pub fn lock_program() -> Locked {
    let mut sum = Locked {
        what: "the program",
        bytes: Bytes::ZERO,
        refused: None,
    };
    let (Ok(program), Ok(maps)) = (
        env::current_exe(),
        Process::myself().and_then(|own| own.maps()),
    ) else {
        sum.refused = Some("its mappings cannot be read".to_owned());
        return sum;
    };
    for map in maps {
        let MMapPath::Path(path) = &map.pathname else {
            continue;
        };
        if *path != program && !map.perms.contains(MMPermissions::EXECUTE) {
            continue;
        }
        let (begin, end) = map.address;
        let (Ok(start), Ok(length)) = (
            usize::try_from(begin),
            usize::try_from(end.saturating_sub(begin)),
        ) else {
            continue;
        };
        sum = sum.and(
            "the program",
            range("the program", start as *const u8, length, When::Touched),
        );
    }
    sum
}

/// Populates and locks the expected extent of this thread's stack below the caller; counted by [`stacks`].
#[inline(never)]
pub fn lock_stack() {
    let mut below = [0u8; STACK];
    black_box(&mut below);
    let locked = range(OF_STACKS, below.as_ptr(), below.len(), When::Now);
    let mut all = STACKS.lock().unwrap_or_else(PoisonError::into_inner);
    *all = Some(match all.take() {
        Some(others) => others.and(OF_STACKS, locked),
        None => locked,
    });
}

/// Result for the stacks of all threads that locked theirs; `None` if none did.
pub fn stacks() -> Option<Locked> {
    STACKS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone()
}

static STACKS: Mutex<Option<Locked>> = Mutex::new(None);

const OF_STACKS: &str = "the stacks of control threads";

/// Locked part of a stack (our choice); pages of deeper calls are populated on access as usual.
const STACK: usize = 32 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_is_not_there_is_refused_in_words() {
        let locked = range("nothing", 4096 as *const u8, 4096, When::Touched);
        assert!(!locked.is_locked());
        assert!(
            locked.to_string().starts_with("nothing may be paged out: "),
            "{locked}"
        );
    }

    #[test]
    fn a_sum_is_locked_when_all_of_it_is() {
        let good = Locked {
            what: "a",
            bytes: Bytes::from_mib(1),
            refused: None,
        };
        let bad = Locked {
            refused: Some("no".to_owned()),
            ..good.clone()
        };
        assert_eq!(
            good.clone().and("both", good.clone()).to_string(),
            "both cannot be paged out (2 MiB at most)"
        );
        assert_eq!(
            good.and("both", bad).to_string(),
            "both may be paged out: no"
        );
    }
}
