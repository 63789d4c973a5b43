//! Last output lines of a worker.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::{io::AsyncReadExt, net::unix::pipe, sync::watch, task::JoinHandle};

/// Reads one output of a worker until it is closed.
#[derive(Debug)]
pub(super) struct LogTail {
    lines: Arc<Mutex<VecDeque<LogLine>>>,
    reader: JoinHandle<()>,
    /// The reading end once more, to see whether anything is left in the pipe.
    pipe: OwnedFd,
}

/// One line of output, with control characters escaped: it is shown on terminals.
#[derive(Clone, Debug)]
pub(super) struct LogLine {
    /// When it was read.
    pub(super) at: Instant,
    pub(super) text: String,
}

/// What a line must hold.
#[derive(Clone, Debug)]
pub(super) enum Needle {
    Text(String),
    Pattern(regex::Regex),
}

impl Needle {
    /// A regular expression; the configuration has checked it before.
    pub(super) fn pattern(pattern: &str) -> io::Result<Self> {
        regex::Regex::new(pattern).map(Self::Pattern).map_err(io::Error::other)
    }

    fn is_in(&self, line: &str) -> bool {
        match self {
            Self::Text(text) => line.contains(text.as_str()),
            Self::Pattern(pattern) => pattern.is_match(line),
        }
    }
}

/// Which output.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stream {
    Stdout,
    Stderr,
}

impl LogTail {
    /// Begins to read. A line that holds `needle` sets `found`.
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
            let on_line = |raw: String| {
                let line = printable(&raw);
                match stream {
                    Stream::Stdout => tracing::info!(target: "worker", worker = &*worker, stream = "stdout", "{line}"),
                    Stream::Stderr => tracing::info!(target: "worker", worker = &*worker, stream = "stderr", "{line}"),
                }
                if needle.as_ref().is_some_and(|needle| needle.is_in(&raw)) {
                    found.send_replace(true);
                }
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                if kept.len() >= keep {
                    kept.pop_front();
                }
                if keep > 0 {
                    kept.push_back(LogLine { at: Instant::now(), text: line });
                }
            };
            read_lines(pipe, on_line).await;
        });
        Ok(Self { lines, reader, pipe: again })
    }

    /// What was kept so far, once everything that the pipe holds has been read; waits for that no longer than `limit`,
    /// and not for others that hold the pipe open. A last line without an end is not among it while they do.
    pub(super) async fn so_far(&self, limit: Duration) -> Vec<LogLine> {
        let drained = async {
            let mut empty = 0;
            while !self.reader.is_finished() && empty < EMPTY_LOOKS {
                empty = if left_in(&self.pipe) == 0 { empty + 1 } else { 0 };
                tokio::time::sleep(LOOK_PAUSE).await;
            }
        };
        let _ = tokio::time::timeout(limit, drained).await;
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().cloned().collect()
    }

    /// What was kept, oldest first; waits a moment for what is still in the pipe.
    pub(super) async fn finish(self) -> Vec<String> {
        // A process that inherited the pipe and lives on would keep it open.
        let abort = self.reader.abort_handle();
        if tokio::time::timeout(DRAIN, self.reader).await.is_err() {
            abort.abort();
        }
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.drain(..).map(|line| line.text).collect()
    }
}

async fn read_lines(mut pipe: pipe::Receiver, mut on_line: impl FnMut(String)) {
    let mut line = Vec::new();
    let (mut cut, mut returned) = (false, false);
    let mut buffer = Vec::with_capacity(BUFFER_BYTES);
    loop {
        buffer.clear();
        let ended = matches!(pipe.read_buf(&mut buffer).await, Ok(0) | Err(_));
        for &byte in &buffer {
            // A bar of progress goes back to the beginning of its line again and again; the last state of it is kept.
            if returned && byte != b'\n' {
                line.clear();
                cut = false;
            }
            returned = byte == b'\r';
            if returned {
                continue;
            }
            if byte == b'\n' {
                on_line(text_of(&line, cut));
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
                on_line(text_of(&line, cut));
            }
            return;
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

/// The text with control characters escaped as Rust writes them, tabs excepted.
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

/// Bytes in a pipe that are not read yet.
fn left_in(pipe: &OwnedFd) -> libc::c_int {
    let mut bytes = 0;
    // SAFETY: FIONREAD writes one integer, and the descriptor is open.
    let result = unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    if result == 0 { bytes } else { 0 }
}

/// How often a pipe has to be found empty: what was taken from it is a line a moment later.
const EMPTY_LOOKS: u32 = 3;

/// Pause between two looks at a pipe.
const LOOK_PAUSE: Duration = Duration::from_millis(1);

/// What is kept of a longer line: a Python traceback line or a TensorRT message fits.
const LINE_BYTES_MAX: usize = 1024;

/// Bytes read at once.
const BUFFER_BYTES: usize = 4096;

/// How long the last lines may take after the process has ended.
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
}
