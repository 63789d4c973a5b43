//! Last output lines of a worker.

use std::{
    collections::VecDeque,
    fmt, io,
    os::fd::{AsRawFd, OwnedFd},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::{io::AsyncReadExt, net::unix::pipe, sync::watch, task::JoinHandle};

use cotenant_units::{Bytes, lock::locked};

/// Reader of one output stream of a worker.
#[derive(Debug)]
pub(super) struct LogTail {
    lines: Arc<Mutex<VecDeque<LogLine>>>,
    reader: JoinHandle<()>,
    /// Duplicate of the reading end, for checking whether the pipe is empty.
    pipe: OwnedFd,
}

/// Line of output, with control characters escaped for terminals.
#[derive(Clone, Debug)]
pub(super) struct LogLine {
    pub(super) at: Instant,
    pub(super) text: String,
}

#[derive(Clone, Debug)]
pub(super) enum Needle {
    Text(String),
    Pattern(regex::Regex),
}

impl Needle {
    /// Compiles a regular expression that the configuration has already checked.
    pub(super) fn pattern(pattern: &str) -> io::Result<Self> {
        regex::Regex::new(pattern)
            .map(Self::Pattern)
            .map_err(io::Error::other)
    }

    fn is_in(&self, line: &str) -> bool {
        match self {
            Self::Text(text) => line.contains(text.as_str()),
            Self::Pattern(pattern) => pattern.is_match(line),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Stream {
    Stdout,
    Stderr,
}

impl LogTail {
    /// Starts reading. A line that contains `needle` sets `found`.
    pub(super) fn follow(
        pipe: OwnedFd,
        worker: Arc<str>,
        stream: Stream,
        keep: usize,
        needle: Option<Needle>,
        found: watch::Sender<bool>,
    ) -> io::Result<Self> {
        let again = pipe.try_clone()?;
        let pipe = pipe::Receiver::from_owned_fd(pipe)?;
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        let kept = Arc::clone(&lines);
        let reader = tokio::spawn(async move {
            let show = |line: &str| match stream {
                Stream::Stdout => {
                    tracing::info!(target: "worker", worker = &*worker, stream = "stdout", "{line}");
                }
                Stream::Stderr => {
                    tracing::info!(target: "worker", worker = &*worker, stream = "stderr", "{line}");
                }
            };
            let on_output = |output: Output| {
                let (raw, is_shown) = match output {
                    Output::Line { text, is_shown } => (text, is_shown),
                    Output::Omitted(omitted) => return show(&omitted.to_string()),
                };
                let line = printable(&raw);
                if is_shown {
                    show(&line);
                }
                if needle.as_ref().is_some_and(|needle| needle.is_in(&raw)) {
                    found.send_replace(true);
                }
                let mut kept = locked(&kept);
                if kept.len() >= keep {
                    kept.pop_front();
                }
                if keep > 0 {
                    kept.push_back(LogLine {
                        at: Instant::now(),
                        text: line,
                    });
                }
            };
            read_lines(pipe, on_output).await;
        });
        Ok(Self {
            lines,
            reader,
            pipe: again,
        })
    }

    /// Returns the lines kept, once the pipe is empty or `limit` has passed. While other processes hold the pipe open,
    /// an unfinished last line is not included.
    pub(super) async fn so_far(&self, limit: Duration) -> Vec<LogLine> {
        let drained = async {
            let mut empty = 0;
            while !self.reader.is_finished() && empty < EMPTY_LOOKS {
                empty = if left_in(&self.pipe) == 0 {
                    empty + 1
                } else {
                    0
                };
                tokio::time::sleep(LOOK_PAUSE).await;
            }
        };
        let _ = tokio::time::timeout(limit, drained).await;
        let lines = locked(&self.lines);
        lines.iter().cloned().collect()
    }

    /// Returns the lines kept, oldest first; waits briefly for the rest of the pipe.
    pub(super) async fn finish(self) -> Vec<String> {
        // A process that inherited the pipe and continues would keep it open.
        let abort = self.reader.abort_handle();
        if tokio::time::timeout(DRAIN, self.reader).await.is_err() {
            abort.abort();
        }
        let mut lines = locked(&self.lines);
        lines.drain(..).map(|line| line.text).collect()
    }
}

enum Output {
    /// A line, and whether it goes to our log.
    Line { text: String, is_shown: bool },
    /// A window with omitted lines has ended.
    Omitted(Omitted),
}

/// Lines omitted from our log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Omitted {
    lines: u64,
    bytes: Bytes,
}

impl fmt::Display for Omitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lines, bytes } = self;
        let seconds = WINDOW.as_secs();
        write!(
            f,
            "{lines} lines ({bytes}) omitted: the limit is {LINES_PER_WINDOW} lines of each output in {seconds} s"
        )
    }
}

/// Rate limit of one stream's lines in our log.
#[derive(Debug, Default)]
struct Quota {
    /// Start of the present window; `None` before its first line.
    began: Option<Instant>,
    shown: u32,
    omitted: Omitted,
}

impl Quota {
    /// Ends the window if it is over at `now`; returns the omitted lines, if any.
    fn ended(&mut self, now: Instant) -> Option<Omitted> {
        self.began
            .take_if(|began| now.saturating_duration_since(*began) >= WINDOW)?;
        self.close()
    }

    fn close(&mut self) -> Option<Omitted> {
        let Self { omitted, .. } = std::mem::take(self);
        (omitted.lines > 0).then_some(omitted)
    }

    /// Returns whether a line of this length is shown.
    fn shows(&mut self, bytes: usize, now: Instant) -> bool {
        self.began.get_or_insert(now);
        if self.shown < LINES_PER_WINDOW {
            self.shown += 1;
            return true;
        }
        self.omitted.lines += 1;
        self.omitted.bytes = self.omitted.bytes.saturating_add(Bytes::of_len(bytes));
        false
    }

    /// Returns when omitted lines are due to be reported, if there are any.
    fn reports_at(&self) -> Option<Instant> {
        self.began
            .filter(|_| self.omitted.lines > 0)
            .map(|began| began + WINDOW)
    }
}

async fn read_lines(mut pipe: pipe::Receiver, mut on_output: impl FnMut(Output)) {
    let mut quota = Quota::default();
    let mut line = Vec::new();
    let (mut cut, mut returned) = (false, false);
    let mut buffer = Vec::with_capacity(BUFFER_BYTES);
    loop {
        buffer.clear();
        let read = pipe.read_buf(&mut buffer);
        let read = match quota.reports_at() {
            Some(at) => tokio::time::timeout_at(at.into(), read).await.ok(),
            None => Some(read.await),
        };
        let ended = matches!(read, Some(Ok(0) | Err(_)));
        let now = Instant::now();
        if let Some(omitted) = quota.ended(now) {
            on_output(Output::Omitted(omitted));
        }
        let mut take = |line: &[u8], cut| {
            let is_shown = quota.shows(line.len(), now);
            on_output(Output::Line {
                text: text_of(line, cut),
                is_shown,
            });
        };
        for &byte in &buffer {
            // A progress bar returns to the start of its line repeatedly; its last state is kept.
            if returned && byte != b'\n' {
                line.clear();
                cut = false;
            }
            returned = byte == b'\r';
            if returned {
                continue;
            }
            if byte == b'\n' {
                take(&line, cut);
                line.clear();
                cut = false;
            } else if line.len() < LINE_BYTES_MAX {
                line.push(byte);
            } else {
                cut = true;
            }
        }
        if ended {
            if !line.is_empty() {
                take(&line, cut);
            }
            if let Some(omitted) = quota.close() {
                on_output(Output::Omitted(omitted));
            }
            return;
        }
        if quota.omitted.lines > 0 {
            // Block the writer at a full pipe for a moment, to save CPU time.
            tokio::time::sleep(FLOOD_PAUSE).await;
        }
    }
}

fn text_of(line: &[u8], cut: bool) -> String {
    let mut text = String::from_utf8_lossy(line).trim_end().to_owned();
    if cut {
        text.push('…');
    }
    text
}

/// Escapes control characters other than tabs, as Rust does.
fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for char in text.chars() {
        if char.is_control() && char != '\t' {
            shown.extend(char.escape_default());
        } else {
            shown.push(char);
        }
    }
    shown
}

/// Returns the number of unread bytes in a pipe.
fn left_in(pipe: &OwnedFd) -> libc::c_int {
    let mut bytes = 0;
    // SAFETY: FIONREAD writes one integer, and the descriptor is open.
    let result = unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    if result == 0 { bytes } else { 0 }
}

/// Number of times that a pipe must be empty: data taken from it becomes a line slightly later.
const EMPTY_LOOKS: u32 = 3;

/// Pause between these checks.
const LOOK_PAUSE: Duration = Duration::from_millis(1);

/// Length to which lines are truncated: a Python traceback line or a TensorRT message fits.
const LINE_BYTES_MAX: usize = 1024;

const BUFFER_BYTES: usize = 16 << 10;

/// Lines of one stream shown in our log per [`WINDOW`]. Our choice: a traceback, or the start of a model server that
/// reports each tensor; at most 20 KiB/s in the long run.
const LINES_PER_WINDOW: u32 = 400;
const WINDOW: Duration = Duration::from_secs(10);

/// Pause between reads while lines are omitted: limits the rate to 3 MiB/s, a few percent of a core.
const FLOOD_PAUSE: Duration = Duration::from_millis(5);

/// Time limit for the last lines after the process has ended.
const DRAIN: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_of_a_worker_do_not_reach_a_terminal() {
        assert_eq!(
            printable("a\tb \u{1b}]0;title\u{7}\u{1b}[31mred\u{9b}2J\u{7f} é"),
            "a\tb \\u{1b}]0;title\\u{7}\\u{1b}[31mred\\u{9b}2J\\u{7f} é"
        );
    }

    #[test]
    fn a_flood_of_lines_is_counted_and_reported_once_for_each_window() {
        let mut quota = Quota::default();
        let start = Instant::now();
        let shown = (0..100_000).filter(|_| quota.shows(80, start)).count();
        assert_eq!(shown, 400);
        assert_eq!(quota.reports_at(), Some(start + WINDOW));
        assert_eq!(quota.ended(start + WINDOW / 2), None);
        let omitted = quota.ended(start + WINDOW).unwrap();
        assert_eq!(
            omitted,
            Omitted {
                lines: 99_600,
                bytes: Bytes::new(99_600 * 80)
            }
        );
        assert_eq!(
            omitted.to_string(),
            "99600 lines (7.5 MiB) omitted: the limit is 400 lines of each output in 10 s"
        );
        // A new window, in which nothing is omitted.
        assert!(quota.shows(80, start + WINDOW));
        assert_eq!(
            (quota.reports_at(), quota.ended(start + WINDOW * 2)),
            (None, None)
        );
        assert_eq!(quota.close(), None);
    }

    #[tokio::test]
    async fn the_end_of_a_flood_is_kept_although_it_is_not_shown() {
        let (reader, writer) =
            nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC | nix::fcntl::OFlag::O_NONBLOCK)
                .unwrap();
        let written: String = (0..1000).map(|number| format!("line {number}\n")).collect();
        assert_eq!(
            nix::unistd::write(&writer, written.as_bytes()).unwrap(),
            written.len()
        );
        drop(writer);
        let (mut shown, mut kept, mut omitted) = (0, Vec::new(), 0);
        read_lines(
            pipe::Receiver::from_owned_fd(reader).unwrap(),
            |output| match output {
                Output::Line { text, is_shown } => {
                    shown += u32::from(is_shown);
                    kept.push(text);
                }
                Output::Omitted(of) => omitted += of.lines,
            },
        )
        .await;
        assert_eq!((shown, omitted, kept.len()), (400, 600, 1000));
        assert_eq!(kept.last().unwrap(), "line 999");
    }
}
