//! Progress of a download: bytes, speed, remaining time.

use std::time::{Duration, Instant};

use crate::progress::Progress;
use cotenant_units::{Bytes, TimeSpan, millis};

/// A progress bar over several files.
pub(super) struct Meter {
    progress: Progress,
    /// Bytes of the files before this one, and of all.
    before: u64,
    whole: u64,
    /// When the first byte was counted, and which it was.
    began: Option<(Instant, u64)>,
    drawn: Option<Instant>,
}

impl Meter {
    /// A bar that is not drawn yet.
    pub(super) fn new() -> Self {
        Self {
            progress: Progress::new(),
            before: 0,
            whole: 0,
            began: None,
            drawn: None,
        }
    }

    /// Counts the next bytes as those of a file behind `before` bytes of `whole`.
    pub(super) fn count(&mut self, before: u64, whole: u64) {
        (self.before, self.whole) = (before, whole);
    }

    /// Draws `done` bytes of the file `name`; of `whole` bytes, where no file is counted.
    pub(super) fn show(&mut self, name: &str, done: u64, whole: u64) {
        let now = Instant::now();
        let is_last = done >= whole;
        if self.drawn.is_some_and(|drawn| now - drawn < REDRAWN) && !is_last {
            return;
        }
        self.drawn = Some(now);
        if self.whole == 0 {
            return self.progress.show(done, whole, name);
        }
        let done = self.before.saturating_add(done);
        let (began, first) = *self.began.get_or_insert((now, done));
        let millis = millis(now - began);
        let per_s = done.saturating_sub(first).saturating_mul(1000) / millis.max(1);
        let left = self.whole.saturating_sub(done) / per_s.max(1);
        let mut what = format!("{name}: {} of {}", Bytes::new(done), Bytes::new(self.whole));
        if per_s > 0 {
            what.push_str(&format!(
                ", {}/s, {} left",
                Bytes::new(per_s),
                TimeSpan(Duration::from_secs(left))
            ));
        }
        self.progress.step(done, self.whole, &what);
    }

    /// Writes a line above the bar.
    pub(super) fn note(&mut self, text: &str) {
        self.progress.clear();
        eprintln!("note: {}", crate::exit::escaped(text));
    }
}

/// Redrawn so often (our choice).
const REDRAWN: Duration = Duration::from_millis(200);
