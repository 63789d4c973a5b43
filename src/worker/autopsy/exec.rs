//! Diagnosis of programs that could not be executed.

use std::{
    collections::BTreeMap,
    env, fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::{Instant, SystemTime},
};

use super::collect::unfit;
use cotenant_policy::death::{
    Confidence, DeathCertificate, DeathClass, DeathVerdict, Finding, ProcessEnd,
};
use cotenant_units::micros;

/// Returns a certificate for a failed start. `error` is the cause with its chain in words, `source` the error of
/// `execve` or of an earlier system call.
pub(crate) fn not_started(
    worker: &str,
    start: u64,
    program: &str,
    env: &BTreeMap<String, String>,
    error: &str,
    source: Option<&io::Error>,
) -> DeathCertificate {
    let began = Instant::now();
    let found = find_program(program, env);
    let (what, remedy, needs_operator) = match source.and_then(io::Error::raw_os_error) {
        Some(libc::ENOENT) => match &found {
            Some(path) => {
                let interpreter = interpreter(path).unwrap_or_else(|| "its interpreter".to_owned());
                (
                    format!(
                        "`{}` exists, but `{interpreter}`, which it needs, does not",
                        path.display()
                    ),
                    format!("install `{interpreter}`, or correct the first line of the script"),
                    true,
                )
            }
            None => (
                format!("the program `{program}` does not exist"),
                "install it, or correct `argv`; a name without `/` is looked up in PATH".to_owned(),
                true,
            ),
        },
        Some(libc::EACCES | libc::EPERM) => (
            format!("`{program}` may not be executed"),
            "make it executable (chmod +x) for the user of the worker, on a file system without `noexec`".to_owned(),
            true,
        ),
        Some(libc::ENOEXEC | libc::ELIBBAD) => (
            found
                .as_deref()
                .and_then(unfit)
                .unwrap_or_else(|| format!("`{program}` is not a program of this machine")),
            "use a program built for this machine".to_owned(),
            true,
        ),
        Some(libc::ENOTDIR | libc::EISDIR | libc::ELOOP | libc::ENAMETOOLONG | libc::E2BIG) => (
            format!("`{program}` cannot be executed"),
            "correct `argv`".to_owned(),
            true,
        ),
        Some(libc::EMFILE | libc::ENFILE) => (
            "the supervisor's limit of open files is reached".to_owned(),
            "raise `LimitNOFILE` of the unit (`ulimit -n` in a shell); the start is retried".to_owned(),
            false,
        ),
        Some(libc::EAGAIN) => (
            "its user's limit of processes is reached".to_owned(),
            "raise `LimitNPROC` and `TasksMax` of the unit (`ulimit -u` in a shell); the start is retried".to_owned(),
            false,
        ),
        Some(libc::ENOMEM) => (
            "the machine had no memory for another process".to_owned(),
            "free memory; the start is retried".to_owned(),
            false,
        ),
        Some(_) => (
            format!("`{program}` could not be executed"),
            "see the cause".to_owned(),
            false,
        ),
        None if source.is_some() || error.contains("cannot confine") => (
            "it could not be confined as configured".to_owned(),
            "its cause names the step: correct `user`, `limits` or `sandbox`, or run the supervisor with the rights for it"
                .to_owned(),
            true,
        ),
        // A port or a socket, which may be free next time; unlike a variable.
        None => (
            "its command line could not be built".to_owned(),
            "correct `argv`, `env` or `socket` of the worker".to_owned(),
            error.contains("has no value") || error.contains("argv is empty") || error.contains("has no `}`"),
        ),
    };
    let class = if source.is_some_and(is_for_want) {
        DeathClass::SpawnFailed
    } else {
        DeathClass::ExecFailed
    };
    DeathCertificate {
        worker: worker.to_owned(),
        start,
        took_us: micros(began.elapsed()),
        verdict: DeathVerdict {
            class,
            confidence: Confidence::Certain,
            sentence: format!("worker `{worker}` could not be started: {what}"),
            evidence: vec![Finding::new("execve", error)],
            remedy: Some(remedy),
            needs_operator,
        },
        end: ProcessEnd {
            ended_unix_us: unix_us(),
            ..ProcessEnd::default()
        },
        ..DeathCertificate::default()
    }
}

/// Returns whether the kernel refused a resource that may be available later.
fn is_for_want(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOMEM | libc::EAGAIN | libc::EMFILE | libc::ENFILE)
    )
}

/// Returns the time for certificates, µs since 1970.
pub(super) fn unix_us() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, micros)
}

/// Returns the file of `program`, found as by execvp(3).
pub(crate) fn find_program(program: &str, env: &BTreeMap<String, String>) -> Option<PathBuf> {
    if program.is_empty() {
        return None;
    }
    if program.contains('/') {
        let path = PathBuf::from(program);
        return path.exists().then_some(path);
    }
    let path = env.get("PATH").cloned().or_else(|| env::var("PATH").ok())?;
    let candidates: Vec<PathBuf> = env::split_paths(&path)
        .map(|folder| folder.join(program))
        .collect();
    let executable = |path: &&PathBuf| {
        fs::metadata(path)
            .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    candidates
        .iter()
        .find(executable)
        .or_else(|| candidates.iter().find(|path| path.is_file()))
        .cloned()
}

/// Returns the interpreter in the first line of a script, or the dynamic linker of an ELF file.
pub(crate) fn interpreter(program: &Path) -> Option<String> {
    let bytes = read_head(program)?;
    if let Some(line) = bytes.strip_prefix(b"#!") {
        let line = line.split(|&byte| byte == b'\n').next()?;
        let line = String::from_utf8_lossy(line);
        return line.split_ascii_whitespace().next().map(str::to_owned);
    }
    // In practice, the first page contains the NUL-terminated path of the linker.
    let at = bytes
        .windows(LINKER.len())
        .position(|window| window == LINKER)?;
    let begin = bytes.get(..at)?.iter().rposition(|&byte| byte == 0)? + 1;
    let path = bytes.get(begin..)?.split(|&byte| byte == 0).next()?;
    let path = String::from_utf8_lossy(path);
    path.starts_with('/').then(|| path.into_owned())
}

fn read_head(path: &Path) -> Option<Vec<u8>> {
    use std::io::Read;
    let mut bytes = Vec::new();
    fs::File::open(path)
        .ok()?
        .take(HEAD_BYTES)
        .read_to_end(&mut bytes)
        .ok()?;
    Some(bytes)
}

/// Part of the name of every dynamic linker of Linux: `ld-linux-aarch64.so.1`, `ld-musl-x86_64.so.1`.
const LINKER: &[u8] = b"/ld-";

const HEAD_BYTES: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(program: &str, errno: i32) -> DeathCertificate {
        let error = io::Error::from_raw_os_error(errno);
        not_started(
            "asr",
            3,
            program,
            &BTreeMap::new(),
            &error.to_string(),
            Some(&error),
        )
    }

    #[test]
    fn each_answer_of_the_kernel_has_its_words() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("asr");
        fs::write(&script, "#!/nowhere/python3 -u\nprint(1)\n").unwrap();
        let script = script.to_str().unwrap();
        for (program, errno, words, lasting) in [
            (
                "/nowhere/asr",
                libc::ENOENT,
                "the program `/nowhere/asr` does not exist",
                true,
            ),
            (
                script,
                libc::ENOENT,
                "but `/nowhere/python3`, which it needs, does not",
                true,
            ),
            (script, libc::EACCES, "may not be executed", true),
            (
                "/bin/sh",
                libc::ENOEXEC,
                "not a program of this machine",
                true,
            ),
            (script, libc::EAGAIN, "limit of processes is reached", false),
            (
                script,
                libc::EMFILE,
                "limit of open files is reached",
                false,
            ),
            (
                script,
                libc::ENOMEM,
                "had no memory for another process",
                false,
            ),
        ] {
            let certificate = certificate(program, errno);
            let class = if lasting {
                DeathClass::ExecFailed
            } else {
                DeathClass::SpawnFailed
            };
            let verdict = certificate.verdict;
            assert_eq!(verdict.class, class);
            assert!(verdict.sentence.contains(words), "{}", verdict.sentence);
            assert_eq!(verdict.needs_operator, lasting, "{}", verdict.sentence);
        }
    }

    #[test]
    fn the_linker_of_a_program_is_found() {
        let linker = interpreter(Path::new("/bin/sh")).unwrap();
        assert!(linker.contains("/ld-"), "{linker}");
    }
}
