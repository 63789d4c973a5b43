//! Event lines of `top`: every event, or one line for each decision.

use std::{collections::VecDeque, time::Instant};

use crate::decisions::Decisions;
use cotenant_rpc::v1::JournalEntry;

/// Last events and decisions of one run of the supervisor, oldest first.
#[derive(Debug, Default)]
pub(super) struct EventList {
    /// Number of the last line that was taken.
    pub last_sequence: u64,
    /// Shows every event instead of decisions.
    pub shows_every: bool,
    /// Number of the selected line.
    pub selected: Option<u64>,
    every: VecDeque<JournalEntry>,
    decisions: Decisions,
}

impl EventList {
    /// Returns the lines to show.
    pub(super) const fn lines(&self) -> &VecDeque<JournalEntry> {
        match self.shows_every {
            true => &self.every,
            false => &self.decisions.lines,
        }
    }

    /// Takes the next line of the journal, and drops the oldest ones beyond the height of any terminal.
    pub(super) fn add(&mut self, entry: JournalEntry) {
        self.last_sequence = entry.sequence;
        if entry.name == "sampled" || entry.summary.is_empty() {
            return;
        }
        self.decisions.add(Instant::now(), &entry);
        // The answer to a request repeats the decision.
        if self
            .every
            .back()
            .is_none_or(|last| last.summary != entry.summary)
        {
            self.every.push_back(entry);
        }
        for lines in [&mut self.every, &mut self.decisions.lines] {
            if lines.len() > LINES_KEPT {
                lines.pop_front();
            }
        }
    }

    /// Selects the line `by` lines below the selected one, at first the last one.
    pub(super) fn select(&mut self, by: isize) {
        let lines = self.lines();
        let end = lines.len().saturating_sub(1);
        let place = match self.selected_place() {
            Some(place) => place.saturating_add_signed(by).min(end),
            None => end,
        };
        self.selected = lines.get(place).map(|line| line.sequence);
    }

    /// Returns at most `rows` lines: the last ones, or earlier ones from the selected line.
    pub(super) fn window(&self, rows: usize) -> impl Iterator<Item = &JournalEntry> {
        let lines = self.lines();
        let last = lines.len().saturating_sub(rows);
        let from = self.selected_place().map_or(last, |place| place.min(last));
        lines.iter().skip(from).take(rows)
    }

    /// Returns the selected line.
    pub(super) fn selected_line(&self) -> Option<&JournalEntry> {
        self.lines().get(self.selected_place()?)
    }

    fn selected_place(&self) -> Option<usize> {
        let selected = self.selected?;
        self.lines()
            .iter()
            .position(|line| line.sequence == selected)
    }
}

/// More rows than any terminal has.
const LINES_KEPT: usize = 300;
