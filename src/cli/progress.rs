//! Progress of long work on stderr: one redrawn line on a terminal, a few lines elsewhere.

use std::io::{self, IsTerminal as _, Write as _};

/// A line of progress.
pub(super) struct Progress {
    terminal: bool,
    /// `NO_COLOR` is not set (<https://no-color.org>).
    colour: bool,
    drawn: String,
    /// The last tenth that a line was written for.
    tenth: Option<u64>,
}

impl Progress {
    /// A line that is not drawn yet.
    pub(super) fn new() -> Self {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        Self {
            terminal: io::stderr().is_terminal() && !dumb,
            colour: !set("NO_COLOR"),
            drawn: String::new(),
            tenth: None,
        }
    }

    /// As [`Self::show`], and where stderr is no terminal a line for each tenth.
    pub(super) fn step(&mut self, done: u64, whole: u64, what: &str) {
        self.show(done, whole, what);
        let tenth = done.min(whole).saturating_mul(10) / whole.max(1);
        if !self.terminal && self.tenth != Some(tenth) {
            self.tenth = Some(tenth);
            self.write(&format!("{:>3} % {what}\n", tenth * 10));
        }
    }

    /// Draws `done` of `whole`, and the current action; nothing unless stderr is a terminal.
    pub(super) fn show(&mut self, done: u64, whole: u64, what: &str) {
        if self.terminal {
            let line = line(done, whole, what, self.colour);
            if line != self.drawn {
                self.write(&format!("\r{line}\x1b[K"));
                self.drawn = line;
            }
        }
    }

    /// Removes the line; the next one is drawn where it was.
    pub(super) fn clear(&mut self) {
        if !self.drawn.is_empty() {
            self.write("\r\x1b[K");
            self.drawn.clear();
        }
    }

    /// Progress is for waiting people: a terminal that cannot be written to is no fault.
    fn write(&self, text: &str) {
        let mut terminal = io::stderr().lock();
        let _ = terminal
            .write_all(text.as_bytes())
            .and_then(|()| terminal.flush());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

fn line(done: u64, whole: u64, what: &str, colour: bool) -> String {
    let part = done.min(whole).saturating_mul(WIDTH) / whole.max(1);
    let cells: String = (0..WIDTH)
        .map(|cell| if cell < part { '#' } else { '.' })
        .collect();
    let percent = done.min(whole).saturating_mul(100) / whole.max(1);
    if colour {
        format!("\x1b[36m[{cells}]\x1b[0m {percent:>3} % {what}")
    } else {
        format!("[{cells}] {percent:>3} % {what}")
    }
}

/// Leaves room for the action on a terminal of 40 columns.
const WIDTH: u64 = 12;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_bar_and_is_without_colour_where_none_is_wanted() {
        assert_eq!(line(1, 4, "reading", false), "[###.........]  25 % reading");
        assert_eq!(line(9, 4, "reading", false), "[############] 100 % reading");
        assert_eq!(line(0, 0, "", false), "[............]   0 % ");
        assert!(line(1, 4, "reading", true).starts_with("\u{1b}[36m["));
    }

    #[test]
    fn nothing_is_drawn_where_stderr_is_no_terminal() {
        let mut progress = Progress {
            terminal: false,
            colour: true,
            drawn: String::new(),
            tenth: None,
        };
        progress.show(1, 2, "reading");
        assert_eq!(progress.drawn, "");
    }
}
