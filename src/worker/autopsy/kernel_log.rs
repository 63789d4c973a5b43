//! Kernel log records during the life of a process.
//!
//! `/dev/kmsg` is opened at its end before the start, and read without blocking after the end. A record with the id of
//! the process therefore concerns this process: no other process had the id in between.

use std::{
    fs::{File, OpenOptions},
    io::{ErrorKind, Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::Instant,
};

/// A record that may explain an end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KernelRecord {
    /// Id of the process or one of its threads, in the initial namespace.
    pub(super) pid: u32,
    /// Its name, at most 15 characters.
    pub(super) comm: String,
    pub(super) kind: RecordKind,
    pub(super) text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RecordKind {
    /// Killed because memory of the machine or of a control group was exhausted.
    Oom {
        memcg: bool,
        /// The full group, if logged.
        group: Option<String>,
        /// The group of the process, if logged.
        task_group: Option<String>,
    },
    /// A fault raised by the processor.
    Fault,
    /// A forbidden system call.
    Seccomp,
}

/// Records read from the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KernelLogTail {
    pub(super) records: Vec<KernelRecord>,
    /// Whether records were overwritten before they could be read, or reading was cut short.
    pub(super) incomplete: bool,
    /// Reason why nothing could be read.
    pub(super) unreadable: Option<String>,
}

/// Reader of the kernel's log from a position.
#[derive(Debug)]
pub(super) struct KernelLog {
    file: Result<File, String>,
}

impl KernelLog {
    /// Opens the log at its present end. `path` is `/dev/kmsg`, or a file to which such lines are appended.
    pub(super) fn from_now(path: &Path) -> Self {
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(path)
            .and_then(|mut file| file.seek(SeekFrom::End(0)).map(|_| file));
        Self {
            file: opened.map_err(|error| format!("cannot read `{}`: {error}", path.display())),
        }
    }

    /// Reads the records added since, up to a limit, without blocking.
    pub(super) fn read(&mut self, deadline: Instant) -> KernelLogTail {
        let mut tail = KernelLogTail::default();
        let file = match &mut self.file {
            Ok(file) => file,
            Err(reason) => {
                tail.unreadable = Some(reason.clone());
                return tail;
            }
        };
        let mut buffer = [0; RECORD_BYTES_MAX];
        let mut rest = String::new();
        for reads in 0.. {
            if reads >= READS_MAX || Instant::now() >= deadline {
                tail.incomplete = true;
                break;
            }
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => {
                    // The kernel returns whole records; a line of a file may be read in two pieces.
                    rest.push_str(&String::from_utf8_lossy(
                        buffer.get(..length).unwrap_or_default(),
                    ));
                    while let Some((line, after)) = rest.split_once('\n') {
                        tail.records.extend(parse(line));
                        rest = after.to_owned();
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The reader was overtaken; the next read continues with the oldest remaining record.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => tail.incomplete = true,
                Err(error) => {
                    tail.unreadable = Some(format!("cannot read the kernel log: {error}"));
                    break;
                }
            }
        }
        tail.records.extend(parse(&rest));
        let excess = tail.records.len().saturating_sub(RECORDS_MAX);
        tail.records.drain(..excess);
        tail
    }
}

/// Parses a line of the log, with the prefix of `/dev/kmsg` or `dmesg`, or none; `None` if it explains no end.
pub(super) fn parse(line: &str) -> Option<KernelRecord> {
    let text = text_of(line.trim())?;
    let (pid, comm, kind) = parse_oom(text)
        .or_else(|| parse_killed(text))
        .or_else(|| parse_seccomp(text))
        .or_else(|| parse_fault(text))?;
    Some(KernelRecord {
        pid,
        comm: comm.to_owned(),
        kind,
        text: text.chars().take(TEXT_MAX).collect(),
    })
}

/// Returns the text after the prefix; `None` for a line written by a program to `/dev/kmsg`.
///
/// The prefix begins with `facility * 8 + level`. Facility 0 is the kernel's own; lines of programs never have it
/// (`devkmsg_write` in Linux's `kernel/printk/printk.c`).
fn text_of(line: &str) -> Option<&str> {
    let line = match line.split_once(';') {
        Some((head, text))
            if head
                .split(',')
                .take(3)
                .all(|part| part.parse::<u64>().is_ok()) =>
        {
            let priority: u64 = head.split(',').next()?.parse().ok()?;
            if priority >= LEVELS {
                return None;
            }
            text
        }
        _ => line,
    };
    Some(without_time(line))
}

fn without_time(line: &str) -> &str {
    match line
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("] "))
    {
        Some((time, text)) if time.trim().parse::<f64>().is_ok() => text.trim_start(),
        _ => line,
    }
}

/// Parses `oom-kill:constraint=CONSTRAINT_MEMCG,…,oom_memcg=/a,task_memcg=/a/b,task=name,pid=7,uid=0`.
fn parse_oom(text: &str) -> Option<(u32, &str, RecordKind)> {
    let rest = text.strip_prefix("oom-kill:")?;
    let field = |name: &str| {
        let (_, value) = rest.split_once(&format!("{name}="))?;
        value.split(',').next().map(str::to_owned)
    };
    let constraint = field("constraint")?;
    // The name may contain commas and equal signs; the rest of the line does not.
    let (_, task) = rest.rsplit_once(",task=")?;
    let (before_uid, _) = task.rsplit_once(",uid=")?;
    let (comm, pid) = before_uid.rsplit_once(",pid=")?;
    let kind = RecordKind::Oom {
        memcg: constraint == "CONSTRAINT_MEMCG",
        group: field("oom_memcg"),
        task_group: field("task_memcg"),
    };
    Some((pid.parse().ok()?, comm, kind))
}

/// Parses `Out of memory: Killed process 7 (name) …`, `Memory cgroup out of memory: Killed process 7 (name) …`, and the
/// same with `Kill process … score …` of older kernels.
fn parse_killed(text: &str) -> Option<(u32, &str, RecordKind)> {
    let memcg = text.starts_with("Memory cgroup out of memory: ");
    if !memcg && !text.starts_with("Out of memory") {
        return None;
    }
    let (_, rest) = text.split_once(" process ")?;
    let (pid, rest) = rest.split_once(' ')?;
    let comm = name_in_parentheses(rest)?;
    let kind = RecordKind::Oom {
        memcg,
        group: None,
        task_group: None,
    };
    Some((pid.parse().ok()?, comm, kind))
}

/// Returns the name in `(name) total-vm:…`, which may itself contain parentheses.
fn name_in_parentheses(text: &str) -> Option<&str> {
    let rest = text.strip_prefix('(')?;
    let end = rest
        .find(") total-vm")
        .or_else(|| rest.find(") "))
        .or_else(|| rest.rfind(')'))?;
    rest.get(..end)
}

/// Parses `audit: type=1326 … pid=7 comm="name" … sig=31 … syscall=…`.
fn parse_seccomp(text: &str) -> Option<(u32, &str, RecordKind)> {
    let rest = text
        .strip_prefix("audit: ")
        .filter(|rest| rest.contains("type=1326"))?;
    if !rest.contains(" sig=31") {
        return None;
    }
    let (_, after) = rest.split_once(" pid=")?;
    let (pid, after) = after.split_once(' ')?;
    let comm = after
        .split_once("comm=\"")
        .and_then(|(_, name)| name.split_once('"'))
        .map_or("", |(name, _)| name);
    Some((pid.parse().ok()?, comm, RecordKind::Seccomp))
}

/// Parses `name[7]: segfault at …`, `traps: name[7] trap invalid opcode …`, `name[7]: unhandled exception: …`.
fn parse_fault(text: &str) -> Option<(u32, &str, RecordKind)> {
    let text = text.strip_prefix("traps: ").unwrap_or(text);
    let marks = [
        "]: segfault at ",
        "] trap ",
        "] general protection",
        "]: unhandled ",
        "]: bad frame",
    ];
    let at = marks.iter().find_map(|mark| text.find(mark))?;
    let (comm, pid) = text.get(..at)?.rsplit_once('[')?;
    Some((pid.parse().ok()?, comm, RecordKind::Fault))
}

const LEVELS: u64 = 8;

/// Longest record of `/dev/kmsg` (`CONSOLE_EXT_LOG_MAX` of the kernel).
const RECORD_BYTES_MAX: usize = 8192;

/// Limit on records read for one end. A log of 1 MiB holds about 10 000, at 1 µs each (measured: 430 in 0.4 ms).
const READS_MAX: u32 = 16_384;

/// Limit on records kept: one or two explain an end.
const RECORDS_MAX: usize = 64;

/// Limit on characters kept of a record; the longest useful one has about 400.
const TEXT_MAX: usize = 500;

#[cfg(test)]
mod tests {
    use std::{io::Write, time::Duration};

    use proptest::prelude::*;

    use super::*;

    fn oom(record: &KernelRecord) -> (bool, Option<&str>) {
        match &record.kind {
            RecordKind::Oom { memcg, group, .. } => (*memcg, group.as_deref()),
            other => panic!("{other:?}"),
        }
    }

    fn records(text: &str) -> Vec<KernelRecord> {
        text.lines().filter_map(parse).collect()
    }

    #[test]
    fn records_of_a_killed_group_are_read() {
        // Captured on Linux 5.8; the Jetson samples contain the form of 5.15.
        let text = "    oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/ltp_19257,task_memcg=/ltp_19257,task=memcg_process,pid=19289,uid=0\n\
            \x20   Memory cgroup out of memory: Killed process 19289 (memcg_process) total-vm:2676kB, anon-rss:84kB, file-rss:1468kB, shmem-rss:4kB, UID:0 pgtables:40kB oom_score_adj:0\n\
            \x20   oom_reaper: reaped process 19289 (memcg_process), now anon-rss:0kB";
        let found = records(text);
        assert_eq!(found.len(), 2);
        for record in &found {
            assert_eq!((record.pid, record.comm.as_str()), (19289, "memcg_process"));
            assert!(oom(record).0);
        }
        assert_eq!(oom(&found[0]).1, Some("/ltp_19257"));
    }

    #[test]
    fn records_of_a_machine_without_memory_are_read() {
        let text = "[ 8012.441502] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user.slice/llama-server.service,task=llama-server,pid=902394,uid=1000\n\
            [ 8012.441577] Out of memory: Killed process 902394 (llama-server) total-vm:23640880kB, anon-rss:2788352kB\n\
            Out of memory: Killed process 204356 (tensorrt-edgell) total-vm:21684408kB ...\n\
            Out of memory: Kill process 31 (a (b) c) score 900 or sacrifice child\n\
            3,429,12513578767,-;Out of memory (oom_kill_allocating_task): Killed process 8 (x) total-vm:1kB";
        let found: Vec<_> = records(text)
            .iter()
            .map(|r| (r.pid, r.comm.clone(), oom(r).0))
            .collect();
        assert_eq!(
            found,
            [
                (902_394, "llama-server".to_owned(), false),
                (902_394, "llama-server".to_owned(), false),
                (204_356, "tensorrt-edgell".to_owned(), false),
                (31, "a (b".to_owned(), false),
                (8, "x".to_owned(), false),
            ]
        );
    }

    #[test]
    fn faults_and_forbidden_calls_are_read() {
        let text = "6,1,2265557887,-;reference[2302]: segfault at 6b015ee0 ip 00007fd450365d0f sp 00007fff43b9c470 error 4 in libggml-base.so.0.25.3[32d0f,7fd45034a000+8e000] likely on CPU 3 (core 3, socket 0)\n\
            traps: a b[77] trap invalid opcode ip:401126 sp:7ffd error:0 in a[401000+1000]\n\
            traps: c[78] general protection fault ip:1 sp:2 error:0\n\
            asr[79]: unhandled exception: DABT (lower EL), ESR 0x92000046, level 2 translation fault\n\
            audit: type=1326 audit(1.2:3): auid=0 uid=0 gid=0 ses=1 pid=80 comm=\"tts\" exe=\"/tts\" sig=31 arch=c000003e syscall=169 compat=0 ip=0x7f code=0x80000000\n\
            audit: type=1326 audit(1.2:3): pid=81 comm=\"x\" sig=0 arch=c000003e syscall=169 code=0x7ffc0000";
        let found: Vec<_> = records(text)
            .into_iter()
            .map(|record| (record.pid, record.comm, record.kind))
            .collect();
        assert_eq!(
            found,
            [
                (2302, "reference".to_owned(), RecordKind::Fault),
                (77, "a b".to_owned(), RecordKind::Fault),
                (78, "c".to_owned(), RecordKind::Fault),
                (79, "asr".to_owned(), RecordKind::Fault),
                (80, "tts".to_owned(), RecordKind::Seccomp),
            ]
        );
    }

    #[test]
    fn a_line_that_a_program_wrote_is_no_record() {
        let text = "Out of memory: Killed process 8 (x) total-vm:1kB";
        assert!(parse(&format!("3,429,12513578767,-;{text}")).is_some());
        assert_eq!(parse(&format!("11,430,12513578768,-;{text}")), None);
        assert_eq!(
            parse(&format!("12,431,12513578769,-,caller=T7;{text}")),
            None
        );
    }

    #[test]
    fn only_what_is_added_later_is_read() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        writeln!(
            file,
            "Out of memory: Killed process 1 (before) total-vm:1kB"
        )
        .unwrap();
        let mut log = KernelLog::from_now(file.path());
        let soon = || Instant::now() + Duration::from_secs(5);
        assert_eq!(log.read(soon()), KernelLogTail::default());
        writeln!(
            file,
            "noise\nOut of memory: Killed process 2 (after) total-vm:1kB"
        )
        .unwrap();
        let tail = log.read(soon());
        assert_eq!(tail.records.len(), 1);
        assert_eq!(tail.records[0].pid, 2);
        assert!(!tail.incomplete && tail.unreadable.is_none());
    }

    #[test]
    fn a_log_that_cannot_be_opened_says_why() {
        let mut log = KernelLog::from_now(Path::new("/nowhere/kmsg"));
        let tail = log.read(Instant::now() + Duration::from_secs(5));
        assert!(tail.unreadable.unwrap().contains("`/nowhere/kmsg`"));
    }

    proptest! {
        #[test]
        fn any_line_is_read_or_not(line in ".{0,200}") {
            let _ = parse(&line);
        }

        #[test]
        fn any_name_is_found(comm in "[ -~]{1,15}", pid in 1u32..4_000_000) {
            let line = format!("oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task_memcg=/,task={comm},pid={pid},uid=0");
            let record = parse(&line).unwrap();
            prop_assert_eq!(record.pid, pid);
            prop_assert!(comm.ends_with(record.comm.as_str()));
        }
    }
}
