//! Sandbox: files (Landlock) and system calls (seccomp).

use std::{
    collections::BTreeMap,
    env, io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use landlock::{
    ABI, Access as _, AccessFs, CompatLevel, Compatible as _, PathBeneath, PathFd, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _,
};
use nix::{errno::Errno, sys::prctl};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use super::settings::{Measure, Surroundings};
use cotenant_config::{FileAccess, SyscallFilter};

/// Builds the Landlock rules for files; also returns the measure.
pub(super) fn files(
    access: Option<&FileAccess>,
    around: &Surroundings<'_>,
) -> (Option<OwnedFd>, Option<Measure>) {
    let Some(access) = access else {
        return (None, None);
    };
    let measure = |state| {
        Some(Measure {
            what: "files",
            state,
            asked: true,
        })
    };
    let version = landlock_version();
    if version < 1 {
        return (None, measure(Err("this kernel has no Landlock".to_owned())));
    }
    match ruleset(access, around) {
        Ok(Some(fd)) => {
            let words = format!(
                "Landlock version {version}: {} to read, {} to change, beside the system's own",
                access.read.len(),
                access.write.len()
            );
            (Some(fd), measure(Ok(words)))
        }
        Ok(None) => (
            None,
            measure(Err("this kernel has Landlock switched off".to_owned())),
        ),
        Err(reason) => (None, measure(Err(reason))),
    }
}

fn ruleset(access: &FileAccess, around: &Surroundings<'_>) -> Result<Option<OwnedFd>, String> {
    let words = |error: &dyn std::error::Error| error.to_string();
    // Newest version in use; the crate omits features that the kernel lacks, and the kernel's version is reported.
    let abi = ABI::V5;
    let read = AccessFs::from_read(abi);
    let all = AccessFs::from_all(abi);
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)
        .and_then(Ruleset::create)
        .map_err(|error| words(&error))?;
    let program = program_dir(around.program);
    let readable = SYSTEM_READ
        .iter()
        .map(|path| (Path::new(path), read, false))
        .chain(program.as_deref().map(|path| (path, read, false)))
        .chain(around.working_dir.map(|path| (path, read, false)))
        .chain(access.read.iter().map(|path| (path.as_path(), read, true)));
    let writable = SYSTEM_WRITE
        .iter()
        .map(|path| (Path::new(path), all, false))
        .chain(around.socket_dir.map(|path| (path, all, false)))
        .chain(around.watched.map(|path| (path, all, false)))
        .chain(access.write.iter().map(|path| (path.as_path(), all, true)));
    for (path, rights, must_exist) in readable.chain(writable) {
        let fd = match PathFd::new(path) {
            Ok(fd) => fd,
            Err(error) if must_exist => return Err(format!("`{}`: {error}", path.display())),
            Err(_) => continue,
        };
        // For a file, rights specific to folders are refused.
        let rights = if path.is_dir() {
            rights
        } else {
            rights & AccessFs::from_file(abi)
        };
        ruleset = ruleset
            .add_rule(PathBeneath::new(fd, rights))
            .map_err(|error| words(&error))?;
    }
    Ok(ruleset.into())
}

/// Returns the folder of a program, found as by `execvp`.
fn program_dir(program: &str) -> Option<PathBuf> {
    let path = if program.contains('/') {
        PathBuf::from(program)
    } else {
        env::split_paths(&env::var_os("PATH")?)
            .map(|folder| folder.join(program))
            .find(|path| path.is_file())?
    };
    path.canonicalize().ok()?.parent().map(Path::to_path_buf)
}

/// Returns the kernel's Landlock version; 0 without support.
fn landlock_version() -> i64 {
    // SAFETY: with this flag the call takes no pointer and only returns a number.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<libc::c_void>(),
            0usize,
            LANDLOCK_CREATE_RULESET_VERSION,
        )
    };
    version.max(0)
}

/// Applies the file rules to the calling process and its descendants, by two system calls.
pub(super) fn restrict_files(ruleset: &OwnedFd) -> io::Result<()> {
    // A confined process must not gain rights by executing a program.
    prctl::set_no_new_privs()?;
    // SAFETY: the descriptor is open, and the flags must be 0.
    let result = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0) };
    Ok(Errno::result(result).map(drop)?)
}

/// Builds a Landlock domain that isolates only memory, descriptors and environment of processes: a process in a domain
/// may not trace one outside, not even by `/proc/PID/mem` (`ptrace_access_check`).
pub(super) fn process_wall() -> Result<OwnedFd, String> {
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::MakeBlock)
        .and_then(Ruleset::create)
        .map_err(|error| error.to_string())?;
    Option::<OwnedFd>::from(ruleset)
        .ok_or_else(|| "this kernel has Landlock switched off".to_owned())
}

/// Protects this process's memory from other processes of the same user, for kernels on which Landlock cannot. Does not
/// protect it from root.
pub(super) fn be_undumpable() {
    // It cannot fail with this value.
    let _ = prctl::set_dumpable(false);
}

/// Drops root's capabilities beyond files, signals and ports from the bounding set. Runs between fork and exec: system
/// calls only.
pub(super) fn bound_capabilities() {
    for capability in (0..CAPABILITIES_MAX).filter(|capability| !KEPT.contains(capability)) {
        // SAFETY: passes numbers only. It fails for unknown capabilities, and without the right to drop.
        let _ = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
}

/// Builds the filter of system calls; also returns the measure.
pub(super) fn calls(filter: SyscallFilter) -> (Option<BpfProgram>, Option<Measure>) {
    if filter == SyscallFilter::All {
        return (None, None);
    }
    let measure = |state| {
        Some(Measure {
            what: "system calls",
            state,
            asked: true,
        })
    };
    if !has_seccomp() {
        return (
            None,
            measure(Err("this kernel has no seccomp filters".to_owned())),
        );
    }
    match program() {
        Ok(program) => {
            let apart = match process_wall() {
                Ok(_) => "other processes cannot be looked into (Landlock)",
                Err(_) => "without Landlock the supervisor is not dumpable",
            };
            let words = format!("seccomp refuses {} of them; {apart}", REFUSED.len());
            (Some(program), measure(Ok(words)))
        }
        Err(reason) => (None, measure(Err(reason))),
    }
}

fn program() -> Result<BpfProgram, String> {
    let arch: TargetArch = env::consts::ARCH
        .try_into()
        .map_err(|error| format!("{error}"))?;
    let rules: BTreeMap<i64, Vec<_>> = REFUSED.iter().map(|number| (*number, Vec::new())).collect();
    let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch)
        .and_then(BpfProgram::try_from)
        .map_err(|error| error.to_string())
}

/// Returns whether the kernel supports filters that return an error.
fn has_seccomp() -> bool {
    let action: u32 = libc::SECCOMP_RET_ERRNO;
    // SAFETY: `action` is valid for reads, and the flags must be 0.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_GET_ACTION_AVAIL,
            0,
            std::ptr::from_ref(&action),
        )
    };
    result == 0
}

/// Applies the filter to the calling process and its descendants: system calls only.
pub(super) fn restrict_calls(program: &BpfProgram) -> io::Result<()> {
    // A confined process must not gain rights by executing a program.
    prctl::set_no_new_privs()?;
    let length = libc::c_ushort::try_from(program.len())
        .map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    let filter = libc::sock_fprog {
        len: length,
        filter: program.as_ptr().cast_mut().cast(),
    };
    // SAFETY: `filter` points to `len` instructions in the kernel's layout, which the kernel only reads.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            std::ptr::from_ref(&filter),
        )
    };
    Ok(Errno::result(result).map(drop)?)
}

/// Paths read by programs and their libraries. Missing ones are skipped.
const SYSTEM_READ: [&str; 9] = [
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/sbin",
    "/etc",
    "/proc",
    "/sys",
    "/opt/nvidia",
];

/// Devices, still subject to their own modes and groups. CUDA on a Jetson opens a dozen below `/dev`, and shared memory
/// is in `/dev/shm`.
const SYSTEM_WRITE: [&str; 1] = ["/dev"];

/// From linux/landlock.h.
const LANDLOCK_CREATE_RULESET_VERSION: libc::c_uint = 1;

/// System calls that speech workers never need, and that could inspect other processes or change the machine.
///
/// `pidfd_send_signal` is permitted: it is no more powerful than `kill`, and runtimes end their children with it.
/// Programs that try io_uring continue without it, since containers refuse it too.
const REFUSED: [i64; 34] = [
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_finit_module,
    libc::SYS_init_module,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kcmp,
    libc::SYS_keyctl,
    libc::SYS_mount,
    libc::SYS_move_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_perf_event_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pivot_root,
    libc::SYS_process_madvise,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_quotactl,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_umount2,
    libc::SYS_userfaultfd,
];

/// Capabilities kept by a restricted worker that runs as root: `CAP_CHOWN`, `CAP_DAC_OVERRIDE`, `CAP_DAC_READ_SEARCH`,
/// `CAP_FOWNER`, `CAP_FSETID`, `CAP_KILL`, `CAP_SETGID`, `CAP_SETUID`, `CAP_NET_BIND_SERVICE`, `CAP_IPC_LOCK`,
/// `CAP_SYS_NICE` of linux/capability.h.
const KEPT: [libc::c_ulong; 11] = [0, 1, 2, 3, 4, 5, 6, 7, 10, 14, 23];

/// Bits of a capability set.
const CAPABILITIES_MAX: libc::c_ulong = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_can_be_built_for_this_machine() {
        assert!(program().unwrap().len() > REFUSED.len());
    }

    #[test]
    fn a_path_that_is_not_there_is_named_and_not_left_out() {
        let access = FileAccess {
            read: vec!["/nowhere/models".into()],
            write: Vec::new(),
        };
        let around = Surroundings {
            worker: "asr",
            program: "sh",
            working_dir: None,
            socket_dir: None,
            watched: None,
        };
        let (fd, measure) = files(Some(&access), &around);
        let measure = measure.unwrap();
        assert!(fd.is_none() && measure.state.is_err());
        if landlock_version() > 0 {
            assert!(measure.to_string().contains("/nowhere/models"), "{measure}");
        }
    }
}
