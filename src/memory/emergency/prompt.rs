//! Short scheduler slices for latency-sensitive threads.
//!
//! A waking thread is queued behind the running one on its processor, and Linux lets that run until the end of its
//! slice: 3 ms, or a tick of 4 ms. A thread with a shorter slice of its own preempts it (`sched_attr::sched_runtime` of
//! ordinary threads, `PREEMPT_SHORT`, Linux 6.12); its share of time is unchanged. An older kernel ignores the value.

use std::io;

/// The requested slice: the shortest that the kernel supports.
const SLICE_NS: u64 = 100_000;

/// `SCHED_FLAG_RESET_ON_FORK`: threads and workers started by such a thread are scheduled normally.
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

/// Requests a short slice for this thread, at ordinary priority, without inheritance by its children.
///
/// # Errors
/// The kernel's error; nothing has changed then.
pub fn be_prompt() -> io::Result<()> {
    let mut wanted = attributes()?;
    if i64::from(wanted.policy) != i64::from(libc::SCHED_OTHER) {
        // An operator has deliberately given the whole daemon another policy.
        return Ok(());
    }
    wanted.runtime = SLICE_NS;
    wanted.flags |= RESET_ON_FORK;
    // SAFETY: the structure has the length given in its first field, and the kernel only reads it.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const wanted, 0) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

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
    // A later kernel may report more than there was room for.
    found.size = u32::try_from(size_of::<Attributes>()).unwrap_or(0);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_thread_keeps_its_niceness_and_what_it_starts_has_the_usual_policy() {
        std::thread::spawn(|| {
            // SAFETY: takes only numbers; lowering one's own priority is always allowed.
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
            // Kernels before 6.12 report no slice of ordinary threads.
            assert!(
                after.runtime == SLICE_NS || after.runtime == before.runtime,
                "{after:?}"
            );
        })
        .join()
        .unwrap();
    }
}
