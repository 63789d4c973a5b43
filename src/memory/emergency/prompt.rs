//! Short scheduler slices for threads that only answer.
//!
//! A thread that wakes is put beside whatever runs on its processor, and Linux lets that run on until its slice is over:
//! 3 ms, or a tick of 4 ms. A thread with a shorter slice of its own goes first (`sched_attr::sched_runtime` of ordinary
//! threads, `PREEMPT_SHORT`, Linux 6.12); it gets no larger share. An older kernel reads the number and ignores it.

use std::io;

/// The slice that is asked for: the shortest that the kernel gives.
const SLICE_NS: u64 = 100_000;

/// `SCHED_FLAG_RESET_ON_FORK`: what such a thread starts, threads of the engine and workers, is as any other.
const RESET_ON_FORK: u64 = 1;

/// `struct sched_attr` in its first form, 48 bytes (sched_setattr(2)).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Asks for a short slice for this thread, of ordinary priority as it may be, and for nothing that it starts.
///
/// # Errors
/// What the kernel says; everything is as before then.
pub fn be_prompt() -> io::Result<()> {
    let mut wanted = attributes()?;
    if i64::from(wanted.policy) != i64::from(libc::SCHED_OTHER) {
        // An operator has given the whole daemon another policy, on purpose.
        return Ok(());
    }
    wanted.runtime = SLICE_NS;
    wanted.flags |= RESET_ON_FORK;
    // SAFETY: the structure is as long as its first field says, and the kernel only reads it.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const wanted, 0) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// How this thread is scheduled now.
fn attributes() -> io::Result<Attributes> {
    let mut found = Attributes::default();
    // SAFETY: the kernel writes at most as many bytes as the size says.
    let result = unsafe {
        libc::syscall(
            libc::SYS_sched_getattr,
            0,
            &raw mut found,
            size_of::<Attributes>(),
            0,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // A later kernel may have more to report than there was room for.
    found.size = u32::try_from(size_of::<Attributes>()).unwrap_or(0);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_thread_keeps_its_niceness_and_what_it_starts_has_the_usual_policy() {
        std::thread::spawn(|| {
            // SAFETY: takes numbers alone; lowering one's own priority is always allowed.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 3) };
            let before = attributes().unwrap();
            if let Err(error) = be_prompt() {
                println!("left out: this system does not let threads ask ({error})");
                return;
            }
            let after = attributes().unwrap();
            assert_eq!((after.policy, after.nice), (before.policy, 3));
            assert_eq!(after.flags & RESET_ON_FORK, RESET_ON_FORK);
            let child = std::thread::spawn(|| attributes().unwrap()).join().unwrap();
            assert_eq!(
                (child.nice, child.flags & RESET_ON_FORK, child.runtime),
                (3, 0, before.runtime)
            );
            // Kernels before 6.12 tell no slice of ordinary threads.
            assert!(
                after.runtime == SLICE_NS || after.runtime == before.runtime,
                "{after:?}"
            );
        })
        .join()
        .unwrap();
    }
}
