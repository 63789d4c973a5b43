//! Pressure stall information of memory: the file and triggers.
//!
//! Access depends on kernel and rights. Each rung is tried from the top, and the first that works is kept:
//!
//! | rung | condition | detection |
//! |---|---|---|
//! | [`PsiRung::TriggerOneSecond`] | CAP_SYS_RESOURCE | at once, at most one notification per second |
//! | [`PsiRung::TriggerTwoSeconds`] | no capability, kernel 6.4 or newer (also Debian's 6.1) | the same, one per 2 s |
//! | [`PsiRung::ReadOnly`] | the file is read-only, or the kernel refuses both windows | at the next sample |
//! | [`PsiRung::Absent`] | no `CONFIG_PSI`, or `psi=0` | by `meminfo` and `vmstat` only |

use std::{
    fmt,
    fs::{File, OpenOptions},
    io::{self, Write},
    os::{
        fd::{AsRawFd, RawFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
    time::Duration,
};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, PROC_SUPER_MAGIC, fstatfs};
use tokio::io::{Interest, unix::AsyncFd};

use super::{
    ParseError, ProbeError, ProbeRoot,
    source::{lines, number, read_bytes, words},
};
use cotenant_units::TimeSpan;

/// Line of a pressure file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stall {
    /// Share of the last 10 s in which tasks stalled, in hundredths of a percent: 61.42 is 6142.
    pub avg10: u32,
    /// Stalled time since boot, µs.
    pub total_us: u64,
}

/// One reading of a pressure file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Some tasks were waiting for memory.
    pub some: Stall,
    /// All runnable tasks were waiting; kernels before 5.13 have no such line for the CPU.
    pub full: Option<Stall>,
}

impl Pressure {
    /// Reads `/proc/pressure/memory`; `None` if the kernel has none.
    ///
    /// # Errors
    /// If the file exists but cannot be read or parsed.
    pub fn read(root: &ProbeRoot) -> Result<Option<Self>, ProbeError> {
        let path = root.proc(MEMORY);
        match read_bytes(&path) {
            Ok(text) => Self::parse(&text)
                .map(Some)
                .map_err(|error| ProbeError::parse(&path, error)),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(ProbeError::io("pressure", &path, error)),
        }
    }

    /// Parses the text of a pressure file.
    ///
    /// # Errors
    /// If there is no line `some`, or one of its values is not a number.
    pub fn parse(text: &[u8]) -> Result<Self, ParseError> {
        let (mut some, mut full) = (None, None);
        for (line_number, line) in lines(text) {
            let mut words = words(line);
            match words.next() {
                Some(b"some") => some = Some(stall(line_number, words)?),
                Some(b"full") => full = Some(stall(line_number, words)?),
                _ => {}
            }
        }
        Ok(Self {
            some: some.ok_or_else(|| ParseError::missing("`some`"))?,
            full,
        })
    }
}

/// Access to stall information on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PsiRung {
    /// Neither file nor trigger.
    Absent,
    /// The file, without a trigger.
    ReadOnly,
    /// A trigger with a window of 2 s.
    TriggerTwoSeconds,
    /// A trigger with a window of 1 s.
    TriggerOneSecond,
}

impl PsiRung {
    /// Returns the delay with which a stall is noticed, in words.
    pub fn latency(self) -> &'static str {
        match self {
            Self::Absent => "stalls are not seen; memory is read every 10 ms to 1 s",
            Self::ReadOnly => "stalls are seen at the next sample, 10 ms to 1 s later",
            Self::TriggerTwoSeconds => {
                "a stall of 150 ms within 2 s wakes the supervisor, once in 2 s at most"
            }
            Self::TriggerOneSecond => {
                "a stall of 100 ms within 1 s wakes the supervisor, once a second at most"
            }
        }
    }
}

impl fmt::Display for PsiRung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Absent => "absent",
            Self::ReadOnly => "read-only",
            Self::TriggerTwoSeconds => "trigger, 2 s window",
            Self::TriggerOneSecond => "trigger, 1 s window",
        })
    }
}

/// Rung in use, and its trigger.
#[derive(Debug)]
pub struct PsiWatch {
    /// Access on this host.
    pub rung: PsiRung,
    /// Reason why no higher rung is in use; `None` on the highest.
    pub reason: Option<String>,
    /// The armed trigger, on the two upper rungs.
    pub trigger: Option<PsiTrigger>,
}

impl PsiWatch {
    /// Arms the best trigger that this host permits on the memory pressure of the machine.
    pub fn arm(root: &ProbeRoot) -> Self {
        Self::arm_at(&root.proc(MEMORY))
    }

    /// Does the same for any pressure file, for example `memory.pressure` of a control group.
    pub fn arm_at(path: &Path) -> Self {
        if let Err(error) = read_bytes(path) {
            return Self {
                rung: PsiRung::Absent,
                reason: Some(error.to_string()),
                trigger: None,
            };
        }
        let mut reason = None;
        for (rung, stall, window) in [
            (PsiRung::TriggerOneSecond, STALL_1S, Duration::from_secs(1)),
            (PsiRung::TriggerTwoSeconds, STALL_2S, Duration::from_secs(2)),
        ] {
            match PsiTrigger::arm(path, stall, window) {
                Ok(trigger) => {
                    return Self {
                        rung,
                        reason,
                        trigger: Some(trigger),
                    };
                }
                Err(error) => reason = Some(format!("{} window: {error}", TimeSpan(window))),
            }
        }
        Self {
            rung: PsiRung::ReadOnly,
            reason,
            trigger: None,
        }
    }
}

/// An armed trigger with at most one notification per window; dropping it disarms.
#[derive(Debug)]
pub struct PsiTrigger {
    file: File,
}

impl PsiTrigger {
    /// Requests a notification when tasks stall for `stall` within `window`.
    ///
    /// # Errors
    /// If the file is not writable, is not the kernel's, or the kernel refuses the window: without CAP_SYS_RESOURCE
    /// newer kernels accept multiples of 2 s and older ones nothing.
    pub fn arm(path: &Path, stall: Duration, window: Duration) -> io::Result<Self> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        // A folder used as /proc has regular files, which must not be written.
        let kind = fstatfs(&file)?.filesystem_type();
        if kind != PROC_SUPER_MAGIC && kind != CGROUP2_SUPER_MAGIC {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "not a file of the kernel",
            ));
        }
        // The kernel overwrites the last byte with NUL: without the newline the last digit would be lost.
        let text = format!("some {} {}\n", stall.as_micros(), window.as_micros());
        match file.write(text.as_bytes())? {
            written if written == text.len() => Ok(Self { file }),
            written => Err(io::Error::other(format!(
                "the kernel accepted {written} of {} bytes",
                text.len()
            ))),
        }
    }
}

impl AsRawFd for PsiTrigger {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// Trigger as a future.
#[derive(Debug)]
pub struct PsiAlarm {
    fd: AsyncFd<PsiTrigger>,
}

impl PsiAlarm {
    /// Registers a trigger with the runtime of the caller.
    ///
    /// # Errors
    /// If there is no runtime, or it cannot watch the trigger.
    pub fn new(trigger: PsiTrigger) -> io::Result<Self> {
        if tokio::runtime::Handle::try_current().is_err() {
            return Err(io::Error::other("there is no runtime"));
        }
        // SAFETY: the descriptor belongs to the `File` inside `trigger`, which `AsyncFd` owns from here on; it is never
        // replaced, so it stays open and unchanged until the `AsyncFd` is dropped.
        let fd = unsafe {
            AsyncFd::register_with_interest(trigger, Interest::PRIORITY | Interest::ERROR)
        }?;
        Ok(Self { fd })
    }

    /// Waits for the next notification. Dropping the future loses nothing.
    ///
    /// # Errors
    /// If the trigger is gone; it will not fire again.
    pub async fn stalled(&mut self) -> io::Result<()> {
        let mut guard = self.fd.ready(Interest::PRIORITY | Interest::ERROR).await?;
        let ready = guard.ready();
        guard.clear_ready();
        // Another poll would be wrong: each poll consumes the notification, and epoll already did.
        if ready.is_error() {
            return Err(io::Error::new(
                io::ErrorKind::BrokenPipe,
                "the trigger was removed",
            ));
        }
        Ok(())
    }
}

/// Returns whether an error means that the kernel lacks the feature.
fn is_absent(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::EOPNOTSUPP)
}

/// Parses `avg10=0.00 avg60=0.00 avg300=0.00 total=0`.
fn stall<'a>(line: usize, words: impl Iterator<Item = &'a [u8]>) -> Result<Stall, ParseError> {
    let mut stall = Stall::default();
    let mut has_total = false;
    for word in words {
        let Some(equals) = word.iter().position(|b| *b == b'=') else {
            continue;
        };
        let (key, value) = word.split_at(equals);
        let value = value.strip_prefix(b"=").unwrap_or(value);
        match key {
            b"avg10" => {
                stall.avg10 = hundredths(value)
                    .ok_or_else(|| ParseError::value("`avg10`", line, value, "a percentage"))?;
            }
            b"total" => {
                stall.total_us = number(value)
                    .ok_or_else(|| ParseError::value("`total`", line, value, "a number of µs"))?;
                has_total = true;
            }
            _ => {}
        }
    }
    if has_total {
        Ok(stall)
    } else {
        Err(ParseError::value("`total`", line, b"", "a number of µs"))
    }
}

/// Parses `61.42` as 6142.
fn hundredths(text: &[u8]) -> Option<u32> {
    let (whole, fraction) = match text.iter().position(|b| *b == b'.') {
        Some(point) => (text.get(..point)?, text.get(point + 1..)?),
        None => (text, &b"00"[..]),
    };
    if fraction.len() != 2 {
        return None;
    }
    let value = number(whole)?
        .checked_mul(100)?
        .checked_add(number(fraction)?)?;
    u32::try_from(value).ok()
}

const MEMORY: &str = "pressure/memory";

/// lmkd and systemd request 70 to 100 ms of a second.
const STALL_1S: Duration = Duration::from_millis(100);

/// A smaller share than of the shorter window, to compensate for later notifications.
const STALL_2S: Duration = Duration::from_millis(150);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    macro_rules! fixture {
        ($name:literal) => {
            Pressure::parse(include_bytes!(concat!(
                "../../tests/fixtures/jetson/pressure/",
                $name,
                ".txt"
            )))
        };
    }

    #[test]
    fn lines_are_read_in_hundredths_and_microseconds() {
        let thrash = fixture!("memory_thrash.RECONSTRUCTED").unwrap();
        assert_eq!(thrash.some.avg10, 6142);
        assert_eq!(thrash.some.total_us, 948_211_340);
        assert_eq!(thrash.full.unwrap().avg10, 4405);
        assert_eq!(fixture!("memory_zero").unwrap().some, Stall::default());
        assert_eq!(
            fixture!("io_loaded").unwrap().full.unwrap().total_us,
            2_334_731
        );
        assert_eq!(
            fixture!("memory_upstream-doc-format").unwrap().some.avg10,
            22
        );
    }

    #[test]
    fn a_file_without_full_is_no_error() {
        assert_eq!(fixture!("cpu_only-some_pre-5.13").unwrap().full, None);
    }

    #[test]
    fn what_is_not_a_pressure_file_is_reported() {
        for (text, message) in [
            ("", "there is no such line"),
            (
                "some avg10=x avg60=0.00 total=1",
                "line 1: `x` is not a percentage",
            ),
            (
                "some avg10=0.00 total=-1",
                "line 1: `-1` is not a number of µs",
            ),
            ("some avg10=0.00", "line 1: `` is not a number of µs"),
            ("full avg10=0.00 total=1", "there is no such line"),
        ] {
            assert_eq!(
                Pressure::parse(text.as_bytes()).unwrap_err().to_string(),
                message,
                "{text}"
            );
        }
    }

    #[test]
    fn a_plain_file_is_read_and_never_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        let text = include_bytes!("../../tests/fixtures/jetson/pressure/memory_zero.txt");
        std::fs::write(&path, text).unwrap();
        let watch = PsiWatch::arm_at(&path);
        assert_eq!(watch.rung, PsiRung::ReadOnly);
        assert!(watch.reason.unwrap().contains("not a file of the kernel"));
        assert_eq!(std::fs::read(&path).unwrap(), text);
    }

    #[test]
    fn without_the_file_the_rung_is_absent() {
        let folder = tempfile::tempdir().unwrap();
        let root = ProbeRoot::at(folder.path());
        assert_eq!(PsiWatch::arm(&root).rung, PsiRung::Absent);
        assert!(Pressure::read(&root).unwrap().is_none());
        for code in [libc::ENOENT, libc::EOPNOTSUPP] {
            assert!(is_absent(&io::Error::from_raw_os_error(code)));
        }
        assert!(!is_absent(&io::Error::from_raw_os_error(libc::EACCES)));
    }

    proptest! {
        #[test]
        fn parsing_returns_for_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Pressure::parse(&bytes);
        }

        #[test]
        fn parsing_returns_for_nearly_valid_text(text in "(some|full) (avg10|total)=[0-9.]{0,24} total=[0-9]{0,24}") {
            let _ = Pressure::parse(text.as_bytes());
        }
    }
}
