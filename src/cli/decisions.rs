//! Lines of the journal as decisions: one line for each, completed by its outcome.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use super::why;
use cotenant_journal::Headlines;
use cotenant_rpc::v1::JournalEntry;

/// Decisions and facts of one run of the supervisor, oldest first.
#[derive(Debug, Default)]
pub(super) struct Decisions {
    /// The lines; the summary of each is its headline.
    pub lines: VecDeque<JournalEntry>,
    headlines: Headlines,
    /// Lines that lack their outcome, by number.
    open: BTreeMap<u64, Open>,
}

#[derive(Debug)]
struct Open {
    since: Instant,
    /// Bytes of its summary that are printed, if it is.
    printed: Option<usize>,
}

impl Decisions {
    /// Takes the next line of the journal. The outcome of a line that is printed becomes a line with its number.
    pub(super) fn add(&mut self, now: Instant, entry: &JournalEntry) {
        let Some(known) = why::entry(entry.clone()) else {
            // A newer supervisor sends lines of unknown kinds.
            return self.lines.push_back(entry.clone());
        };
        for headline in self.headlines.take(&known) {
            let sequence = headline.sequence;
            let mut shown = self.lines.iter_mut().rev();
            let late = self.open.remove(&sequence).and_then(|open| open.printed);
            if let Some(from) = late {
                let outcome = headline.text.get(from..).unwrap_or_default();
                self.lines.push_back(JournalEntry {
                    sequence,
                    summary: format!("…{}", outcome.trim_start_matches(';')),
                    ..entry.clone()
                });
            } else if let Some(line) = shown.find(|line| line.sequence == sequence) {
                line.summary = headline.text;
            } else if sequence == entry.sequence {
                self.lines.push_back(JournalEntry {
                    summary: headline.text,
                    ..entry.clone()
                });
            }
            if headline.is_open {
                let (since, printed) = (now, None);
                self.open.insert(sequence, Open { since, printed });
            }
        }
        if self.open.len() > OPEN_MAX {
            self.open.pop_first();
        }
    }

    /// Returns the time at which the first line is printed without its outcome.
    pub(super) fn due(&self) -> Option<Instant> {
        let open = self.open.get(&self.lines.front()?.sequence)?;
        Some(open.since + OUTCOME_WAIT)
    }

    /// Removes the first line if it is complete or has waited long enough.
    pub(super) fn next(&mut self, now: Instant) -> Option<JournalEntry> {
        if self.due().is_some_and(|due| now < due) {
            return None;
        }
        let line = self.lines.pop_front()?;
        if let Some(open) = self.open.get_mut(&line.sequence) {
            open.printed = Some(line.summary.len());
        }
        Some(line)
    }
}

/// Longest wait of a followed line, and of those after it, for an outcome. Our choice: most plans, changes of a worker
/// and ends take less.
const OUTCOME_WAIT: Duration = Duration::from_secs(1);

/// More lines than the journal's headlines await outcomes at once.
const OPEN_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use cotenant_rpc::v1::EntryKind;

    use super::*;

    fn entry(sequence: u64, body: &str) -> JournalEntry {
        JournalEntry {
            sequence,
            at: Some(prost_types::Duration {
                seconds: i64::try_from(sequence).unwrap(),
                nanos: 0,
            }),
            kind: EntryKind::Event.into(),
            body_json: body.to_owned(),
            ..JournalEntry::default()
        }
    }

    #[test]
    fn a_line_waits_a_second_for_its_outcome_which_otherwise_follows_alone() {
        let wanted = r#"{"event":"worker_wanted","worker":"asr"}"#;
        let ready = r#"{"event":"worker_ready","worker":"asr","pid":7}"#;
        let mut decisions = Decisions::default();
        let start = Instant::now();
        let mut printed = Vec::new();
        for (sequence, body, after_ms) in [
            (1, wanted, 0),
            (2, ready, 10),
            (3, wanted, 20),
            (4, r#"{"event":"book_lost","kept":"a"}"#, 30),
            (5, r#"{"event":"drain_requested"}"#, 1020),
            (6, ready, 2000),
        ] {
            let now = start + Duration::from_millis(after_ms);
            decisions.add(now, &entry(sequence, body));
            let lines = std::iter::from_fn(|| decisions.next(now));
            printed.push(lines.map(|line| (line.sequence, line.summary)).collect());
            if sequence == 4 {
                assert_eq!(decisions.due(), Some(start + Duration::from_millis(1020)));
            }
        }
        let numbers: Vec<Vec<u64>> = printed
            .iter()
            .map(|lines: &Vec<(u64, String)>| lines.iter().map(|(number, _)| *number).collect())
            .collect();
        assert_eq!(
            numbers,
            [vec![], vec![1], vec![], vec![], vec![3, 4], vec![3]]
        );
        assert_eq!(
            printed[1][0].1,
            "a request waits for worker `asr`; ready after 1 s"
        );
        assert_eq!(printed[5][0].1, "… ready after 3 s");
    }
}
