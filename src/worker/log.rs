//! The last lines a worker wrote.

use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{io::AsyncReadExt, net::unix::pipe, sync::watch, task::JoinHandle};

/// Reads one output of a worker until it is closed.
#[derive(Debug)]
pub(super) struct LogTail {
    lines: Arc<Mutex<VecDeque<String>>>,
    reader: JoinHandle<()>,
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
        let pipe = pipe::Receiver::from_owned_fd(pipe)?;
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        let kept = Arc::clone(&lines);
        let reader = tokio::spawn(async move {
            let on_line = |line: String| {
                match stream {
                    Stream::Stdout => tracing::info!(target: "worker", worker = &*worker, stream = "stdout", "{line}"),
                    Stream::Stderr => tracing::info!(target: "worker", worker = &*worker, stream = "stderr", "{line}"),
                }
                if needle.as_ref().is_some_and(|needle| needle.is_in(&line)) {
                    found.send_replace(true);
                }
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                if kept.len() >= keep {
                    kept.pop_front();
                }
                if keep > 0 {
                    kept.push_back(line);
                }
            };
            read_lines(pipe, on_line).await;
        });
        Ok(Self { lines, reader })
    }

    /// What was kept, oldest first; waits a moment for what is still in the pipe.
    pub(super) async fn finish(self) -> Vec<String> {
        // Whoever inherited the pipe and lives on would keep it open.
        let abort = self.reader.abort_handle();
        if tokio::time::timeout(DRAIN, self.reader).await.is_err() {
            abort.abort();
        }
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.drain(..).collect()
    }
}

async fn read_lines(mut pipe: pipe::Receiver, mut on_line: impl FnMut(String)) {
    let mut line = Vec::new();
    let mut cut = false;
    let mut buffer = Vec::with_capacity(BUFFER_BYTES);
    loop {
        buffer.clear();
        let ended = matches!(pipe.read_buf(&mut buffer).await, Ok(0) | Err(_));
        for &byte in &buffer {
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

/// What is kept of a longer line: a Python traceback line or a TensorRT message fits.
const LINE_BYTES_MAX: usize = 1024;

/// Bytes read at once.
const BUFFER_BYTES: usize = 4096;

/// How long the last lines may take after the process has ended.
const DRAIN: std::time::Duration = std::time::Duration::from_millis(200);
