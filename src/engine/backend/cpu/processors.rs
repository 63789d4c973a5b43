//! Processor of a thread, its CPU time, and its affinity.
//!
//! Limited to threads of this process, which needs no privilege.

use std::time::Duration;

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity},
    unistd::{Pid, gettid},
};

thread_local! {
    static SELF: i32 = gettid().as_raw();
}

/// The kernel's number of the calling thread.
pub(super) fn this_thread() -> i32 {
    SELF.with(|number| *number)
}

/// The current processor of the calling thread; `None` if unknown.
pub(super) fn current() -> Option<usize> {
    sched_getcpu().ok()
}

/// CPU time of a thread so far; `None` if it has ended.
pub(super) fn time_of(thread: i32) -> Option<Duration> {
    // The kernel's id of a thread's CPU clock (`CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED` of its
    // `include/linux/posix-timers_types.h`), as made by `pthread_getcpuclockid`.
    let clock = (!thread << 3) | 6;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a value to be written to.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return None;
    }
    let (seconds, nanoseconds) = (
        u64::try_from(time.tv_sec).ok()?,
        u64::try_from(time.tv_nsec).ok()?,
    );
    Some(Duration::from_secs(seconds) + Duration::from_nanos(nanoseconds))
}

/// Restricts a thread to `processor`, if its affinity allows that; returns the previous affinity.
pub(super) fn confine(thread: i32, processor: usize) -> Option<CpuSet> {
    let before = sched_getaffinity(Pid::from_raw(thread)).ok()?;
    if !before.is_set(processor).ok()? {
        return None;
    }
    let mut only = CpuSet::new();
    only.set(processor).ok()?;
    allow(thread, &only).then_some(before)
}

/// Keeps a thread off `processors`, if another one is left for it; returns the previous affinity.
pub(super) fn keep_off(thread: i32, processors: impl IntoIterator<Item = usize>) -> Option<CpuSet> {
    let before = sched_getaffinity(Pid::from_raw(thread)).ok()?;
    let mut rest = before;
    for processor in processors {
        rest.unset(processor).ok()?;
    }
    allow(thread, &rest).then_some(before)
}

/// Sets the affinity of a thread; returns whether that succeeded.
pub(super) fn allow(thread: i32, processors: &CpuSet) -> bool {
    sched_setaffinity(Pid::from_raw(thread), processors).is_ok()
}

#[cfg(test)]
mod tests {
    use std::hint;

    use super::*;

    #[test]
    fn a_thread_is_confined_and_let_go() {
        std::thread::spawn(|| {
            let own = this_thread();
            let here = current().unwrap();
            let before = confine(own, here).unwrap();
            assert_eq!(current(), Some(here));
            assert_eq!(keep_off(own, [here]), None, "there is no other one");
            assert!(allow(own, &before));
            assert_eq!(sched_getaffinity(Pid::from_raw(0)).unwrap(), before);
            if let Some(all) = keep_off(own, [here]) {
                assert_ne!(current(), Some(here));
                assert!(allow(own, &all));
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn the_time_of_a_thread_grows_while_it_runs() {
        let own = this_thread();
        let before = time_of(own).unwrap();
        while time_of(own).unwrap() == before {
            hint::spin_loop();
        }
        // Above Linux's thread ids (`PID_MAX_LIMIT`, 2^22).
        assert_eq!(time_of(1 << 23), None);
    }
}
