//! Logs through a bounded channel, so that a slow reader cannot block the daemon.

use std::{
    fmt,
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use tracing::Level;
use tracing_subscriber::{
    EnvFilter,
    fmt::{
        FmtContext, FormatEvent, FormatFields, MakeWriter,
        format::{self, Format, Full, Writer},
    },
    registry::LookupSpan,
    reload,
};

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// Text for people.
    Text,
    /// Text for systemd's journal: with the priority, and without the time, which the journal adds.
    Journal,
}

/// Failure to set up logging.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter is invalid.
    #[error("cannot log by the filter `{filter}`")]
    Filter {
        /// Configured value.
        filter: String,
        /// Cause.
        source: tracing_subscriber::filter::ParseError,
    },
    /// Logging has ended.
    #[error("cannot change the filter of the log")]
    Gone {
        /// Cause.
        source: reload::Error,
    },
    /// The writer thread cannot be started.
    #[error("cannot start the log writer thread")]
    Thread(#[source] io::Error),
    /// Another subscriber is installed.
    #[error("cannot log: logging has been set up before")]
    Taken,
}

/// Keeps logging active; when dropped, waits briefly for pending lines.
#[derive(Debug)]
pub struct LogGuard {
    sender: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

/// Handle to change the log filter.
#[derive(Clone)]
pub struct LogFilter(Arc<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync>);

impl fmt::Debug for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogFilter")
    }
}

impl LogFilter {
    /// Applies another filter.
    ///
    /// # Errors
    /// If the filter is invalid, or logging has ended.
    pub fn set(&self, filter: &str) -> Result<(), LogError> {
        (self.0)(parsed(filter)?).map_err(|source| LogError::Gone { source })
    }
}

/// Counts lines lost because the reader of the log was too slow.
#[derive(Clone, Debug, Default)]
pub struct LinesDropped(Arc<AtomicU64>);

impl LinesDropped {
    /// Lines lost so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl LogGuard {
    /// The counter of lost lines.
    pub fn dropped(&self) -> LinesDropped {
        LinesDropped(Arc::clone(&self.dropped))
    }

    /// Waits until all earlier lines are written, at most one second.
    pub fn flush(&self) {
        let deadline = Instant::now() + FLUSH_MAX;
        let (done, wait) = sync_channel(1);
        let mut message = Message::Flush(done);
        // The channel has no send with a time limit.
        while let Err(TrySendError::Full(back)) = self.sender.try_send(message) {
            if Instant::now() >= deadline {
                return;
            }
            message = back;
            thread::sleep(FLUSH_RETRY);
        }
        let _ = wait.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }
}

impl Drop for LogGuard {
    fn drop(&mut self) {
        self.flush();
    }
}

/// Sends all log lines of this process to stderr.
///
/// # Errors
/// If the filter is invalid, the thread cannot be started, or logging was set up before.
pub fn init(filter: &str, format: LogFormat) -> Result<(LogGuard, LogFilter), LogError> {
    let filter = parsed(filter)?;
    let (writer, guard) = channel(io::stderr(), LINES_MAX).map_err(LogError::Thread)?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer);
    let (result, filter) = match format {
        LogFormat::Json => {
            let builder = builder.json().flatten_event(true).with_filter_reloading();
            let handle = builder.reload_handle();
            let filter = LogFilter(Arc::new(move |filter| handle.reload(filter)));
            (builder.try_init(), filter)
        }
        LogFormat::Text => {
            let builder = builder.with_ansi(false).with_filter_reloading();
            let handle = builder.reload_handle();
            let filter = LogFilter(Arc::new(move |filter| handle.reload(filter)));
            (builder.try_init(), filter)
        }
        LogFormat::Journal => {
            let builder = builder
                .with_ansi(false)
                .event_format(WithPriority(without_time()))
                .with_filter_reloading();
            let handle = builder.reload_handle();
            let filter = LogFilter(Arc::new(move |filter| handle.reload(filter)));
            (builder.try_init(), filter)
        }
    };
    result
        .map(|()| (guard, filter))
        .map_err(|_| LogError::Taken)
}

/// Prefixes lines of another format with the priority for journald (sd-daemon(3)).
struct WithPriority<F>(F);

impl<S, N, F> FormatEvent<S, N> for WithPriority<F>
where
    S: tracing::Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> fmt::Result {
        write!(writer, "<{}>", priority(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

fn without_time() -> Format<Full, ()> {
    format::format().with_ansi(false).without_time()
}

/// The syslog(3) priority of a level.
const fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

fn parsed(filter: &str) -> Result<EnvFilter, LogError> {
    // Modules were once parts of a single crate, whose name older filters contain.
    EnvFilter::try_new(filter.replace("cotenant::", "cotenant_")).map_err(|source| {
        LogError::Filter {
            filter: filter.to_owned(),
            source,
        }
    })
}

enum Message {
    Line(Vec<u8>),
    Flush(SyncSender<()>),
}

/// Sends lines to the writer thread.
#[derive(Clone, Debug)]
struct LineWriter {
    sender: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

/// One line being formatted; sent on drop.
#[derive(Debug)]
struct Line<'a> {
    writer: &'a LineWriter,
    text: Vec<u8>,
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        let text = std::mem::take(&mut self.text);
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            self.writer.sender.try_send(Message::Line(text))
        {
            self.writer.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl<'a> MakeWriter<'a> for LineWriter {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line {
            writer: self,
            text: Vec::with_capacity(LINE_BYTES),
        }
    }
}

/// A writer with a queue of `capacity` lines, and its thread.
fn channel(
    out: impl Write + Send + 'static,
    capacity: usize,
) -> io::Result<(LineWriter, LogGuard)> {
    let (sender, receiver) = sync_channel(capacity);
    let dropped = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&dropped);
    thread::Builder::new()
        .name("log".to_owned())
        .spawn(move || write_lines(&receiver, out, &counter))?;
    let writer = LineWriter {
        sender: sender.clone(),
        dropped: Arc::clone(&dropped),
    };
    Ok((writer, LogGuard { sender, dropped }))
}

/// Writes lines until all senders are gone; continues if stderr is closed.
fn write_lines(receiver: &Receiver<Message>, mut out: impl Write, dropped: &AtomicU64) {
    let mut reported = 0;
    while let Ok(message) = receiver.recv() {
        let lost = dropped.load(Ordering::Relaxed);
        if lost > reported {
            let _ = writeln!(out, "{} log lines were dropped", lost - reported);
            reported = lost;
        }
        match message {
            Message::Line(text) => {
                let _ = out.write_all(&text);
            }
            Message::Flush(done) => {
                let _ = out.flush();
                let _ = done.try_send(());
            }
        }
    }
}

/// Some seconds of a noisy log; 0.4 MB at 200 bytes per line.
const LINES_MAX: usize = 2048;
const LINE_BYTES: usize = 256;
const FLUSH_MAX: Duration = Duration::from_secs(1);
const FLUSH_RETRY: Duration = Duration::from_millis(2);

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc::channel as gate};

    use tracing_subscriber::fmt;

    use super::*;

    /// Writes to a shared buffer, each line once it is released.
    struct Gate {
        open: Receiver<()>,
        text: Arc<Mutex<String>>,
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.open.recv();
            self.text
                .lock()
                .unwrap()
                .push_str(&String::from_utf8_lossy(bytes));
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_slow_reader_costs_lines_and_never_time() {
        let (open, closed) = gate();
        let text = Arc::default();
        let gate = Gate {
            open: closed,
            text: Arc::clone(&text),
        };
        let (writer, guard) = channel(gate, 4).unwrap();
        let subscriber = fmt()
            .with_writer(writer)
            .with_ansi(false)
            .without_time()
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            for number in 0..100 {
                tracing::info!(number, "line");
            }
        });
        // One line may be in the thread, four in the channel.
        let lost = guard.dropped().get();
        assert!((95..=96).contains(&lost), "{lost}");
        drop(open);
        guard.flush();
        let text = text.lock().unwrap();
        assert!(text.contains("line number=0"), "{text}");
        let reported = text
            .lines()
            .filter_map(|line| line.strip_suffix(" log lines were dropped"));
        let reported: u64 = reported.map(|count| count.parse::<u64>().unwrap()).sum();
        assert_eq!(reported, lost, "{text}");
    }

    #[test]
    fn a_wrong_filter_is_reported() {
        let error = init("cotenant=loud", LogFormat::Json).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot log by the filter `cotenant=loud`"
        );
    }
}
