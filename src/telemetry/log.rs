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

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    Text,
    /// For systemd's journal: each line with its priority, and without the time, which the journal has.
    Journal,
}

/// Logging that could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter is not one.
    #[error("cannot log by the filter `{filter}`")]
    Filter {
        /// As written.
        filter: String,
        /// Why not.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    /// The log has ended.
    #[error("cannot change the filter of the log")]
    Gone {
        /// As the subscriber has it.
        #[source]
        source: reload::Error,
    },
    /// The thread that writes could not be started.
    #[error("cannot start the thread that writes log lines")]
    Thread(#[source] io::Error),
    /// Another subscriber logs already.
    #[error("cannot log: logging has been set up before")]
    Taken,
}

/// Keeps the lines coming; when dropped, waits a moment for those still under way.
#[derive(Debug)]
pub struct LogGuard {
    sender: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

/// Changes which lines are logged.
#[derive(Clone)]
pub struct LogFilter(Arc<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync>);

impl fmt::Debug for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogFilter")
    }
}

impl LogFilter {
    /// Logs by another filter from now on.
    ///
    /// # Errors
    /// When the filter cannot be read, or nothing is logged any more.
    pub fn set(&self, filter: &str) -> Result<(), LogError> {
        (self.0)(parsed(filter)?).map_err(|source| LogError::Gone { source })
    }
}

/// Counts lines that were lost because the reader of the log was too slow.
#[derive(Clone, Debug, Default)]
pub struct LinesDropped(Arc<AtomicU64>);

impl LinesDropped {
    /// Lines lost so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl LogGuard {
    /// The count of lines lost.
    #[must_use]
    pub fn dropped(&self) -> LinesDropped {
        LinesDropped(Arc::clone(&self.dropped))
    }

    /// Waits until everything logged before has been written, at most one second.
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
/// When the filter cannot be read, the thread cannot be started, or logging was set up before.
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

/// Lines of another format behind the priority that journald takes from them (sd-daemon(3)).
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

/// The priority of syslog(3) that a level is.
const fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

fn parsed(filter: &str) -> Result<EnvFilter, LogError> {
    // Levels were once written by the modules of one crate.
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

/// Hands lines to the thread that writes them.
#[derive(Clone, Debug)]
struct LineWriter {
    sender: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

/// One line while it is being formatted; sent off when dropped.
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

/// A writer for `capacity` lines, and its thread.
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

/// Writes lines until the last sender is gone. A closed stderr is no reason to stop.
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

/// Some seconds of a noisy log; at 200 bytes a line it holds 0.4 MB.
const LINES_MAX: usize = 2048;
const LINE_BYTES: usize = 256;
const FLUSH_MAX: Duration = Duration::from_secs(1);
const FLUSH_RETRY: Duration = Duration::from_millis(2);

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc::channel as gate};

    use tracing_subscriber::fmt;

    use super::*;

    /// Writes into a shared buffer, each line only once it has been let through.
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
        // One line may be under way in the thread, four wait in the channel.
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
