//! History of memory by owner, speed and decisions, for the page.
//!
//! Memory and speed are kept twice: an hour in steps of 2 s, and a day in steps of a minute. A step keeps the reading
//! that differs most from the step before, so that a short shed or peak stays visible. Everything has a bound
//! ([`BYTES_MAX`] in all).

use std::{
    collections::VecDeque,
    io,
    path::Path,
    sync::Mutex,
    time::{Duration, SystemTime},
};

use serde_json::{Map, Value, json};

use cotenant_http::backend::HistoryQuery;
use cotenant_journal::{Content, Headline, Headlines, JournalEntry, Rebuilt, recent};
use cotenant_policy::{event::Event, lease::LeaseView, snapshot::Snapshot, speed::Timing};
use cotenant_units::{Bytes, lock::locked, micros};

/// The history of this run, and of the hour before it.
#[derive(Debug, Default)]
pub(super) struct History {
    kept: Mutex<Kept>,
}

/// Points and marks.
#[derive(Debug)]
pub(super) struct Kept {
    /// Owners by column; the last column has all others.
    owners: Vec<String>,
    hour: Series,
    day: Series,
    headlines: Headlines,
    marks: Marks,
}

/// Points in order of time, one for each step that has a reading.
#[derive(Debug)]
struct Series {
    step_s: u64,
    points_max: usize,
    points: VecDeque<Point>,
}

/// Memory and speed in one step.
#[derive(Clone, Copy, Debug, Default)]
struct Point {
    /// Begin of the step, seconds since 1970.
    at_s: u64,
    memory: Memory,
    speed: Speed,
}

/// Memory in KiB.
#[derive(Clone, Copy, Debug, Default)]
struct Memory {
    budget: u32,
    unaccounted: u32,
    held: [u32; COLUMNS],
}

/// Answers that ended in a step.
#[derive(Clone, Copy, Debug, Default)]
struct Speed {
    /// Tokens after the first ones, and the time for them.
    tokens: u32,
    tokens_us: u64,
    /// Answers with a known time to the first token, and the sum of these times.
    firsts: u32,
    firsts_us: u64,
}

/// Headlines, oldest first.
#[derive(Debug, Default)]
struct Marks {
    lines: VecDeque<Headline>,
    text_bytes: usize,
}

impl Default for Kept {
    fn default() -> Self {
        Self {
            owners: Vec::new(),
            hour: Series::new(HOUR_STEP_S, HOUR_POINTS),
            day: Series::new(DAY_STEP_S, DAY_POINTS),
            headlines: Headlines::default(),
            marks: Marks::default(),
        }
    }
}

impl History {
    /// Records the state at a time, unless the history is being read: the loop does not wait, and the next state follows
    /// within a second.
    pub(super) fn observe(&self, at: SystemTime, state: &Snapshot) {
        if let Ok(mut kept) = self.kept.try_lock() {
            kept.observe(seconds(at), state);
        }
    }

    /// Records an answer: its time to the first token, if known, its further tokens, and the time for them.
    pub(super) fn answered(&self, first: Option<Duration>, timing: Timing) {
        let now = seconds(SystemTime::now());
        locked(&self.kept).answered(now, first.map(micros), timing);
    }

    /// Records a line of the journal.
    pub(super) fn line(&self, entry: &JournalEntry) {
        locked(&self.kept).line(entry);
    }

    /// Returns the requested part as columns of numbers; `null` where nothing is known.
    pub(super) fn document(&self, query: &HistoryQuery) -> Value {
        locked(&self.kept).document(query)
    }

    /// Puts an earlier run before what is known of this one.
    pub(super) fn precede(&self, mut earlier: Kept) {
        let mut kept = locked(&self.kept);
        earlier.follow(&kept);
        earlier.headlines = std::mem::take(&mut kept.headlines);
        *kept = earlier;
    }
}

impl Kept {
    fn observe(&mut self, at_s: u64, state: &Snapshot) {
        let mut memory = Memory {
            budget: kib(state.memory.budget),
            unaccounted: kib(state.memory.unaccounted),
            ..Memory::default()
        };
        let holding = |lease: &&LeaseView| lease.memory.held > Bytes::ZERO;
        for lease in state.leases.iter().filter(holding) {
            let column = self.column(&lease.tenant, &memory);
            if let Some(held) = memory.held.get_mut(column) {
                *held = held.saturating_add(kib(lease.memory.held));
            }
        }
        for series in [&mut self.hour, &mut self.day] {
            let before = series.before(at_s);
            let differs = |memory: &Memory| before.map_or(0, |before| memory.distance(&before));
            series.update(at_s, |point| {
                if !point.is_read() || differs(&memory) >= differs(&point.memory) {
                    point.memory = memory;
                }
            });
        }
    }

    /// Returns the column of an owner. An owner without memory in any point and in the reading `now` gives its column up.
    fn column(&mut self, owner: &str, now: &Memory) -> usize {
        let known = self.owners.iter().position(|known| known == owner);
        if let Some(column) = known {
            return column;
        }
        if self.owners.len() < COLUMNS - 1 {
            self.owners.push(owner.to_owned());
            return self.owners.len() - 1;
        }
        let is_unused = |column: &usize| {
            let points = self.hour.points.iter().chain(&self.day.points);
            let mut readings = points.map(|point| &point.memory).chain([now]);
            readings.all(|memory| memory.held.get(*column) == Some(&0))
        };
        let unused = (0..self.owners.len()).find(is_unused);
        if let Some(name) = unused.and_then(|column| self.owners.get_mut(column)) {
            owner.clone_into(name);
        }
        unused.unwrap_or(COLUMNS - 1)
    }

    fn answered(&mut self, at_s: u64, first_us: Option<u64>, timing: Timing) {
        for series in [&mut self.hour, &mut self.day] {
            series.update(at_s, |point| point.speed.add(first_us, timing));
        }
    }

    fn line(&mut self, entry: &JournalEntry) {
        for headline in self.headlines.take(entry) {
            self.marks.put(headline);
        }
    }

    /// Appends later points and marks.
    fn follow(&mut self, later: &Self) {
        for (own, series) in [(&mut self.hour, &later.hour), (&mut self.day, &later.day)] {
            own.points.retain(|point| {
                series
                    .points
                    .front()
                    .is_none_or(|first| point.at_s < first.at_s)
            });
        }
        let mut columns = Vec::new();
        let mut taken = Memory::default();
        for owner in &later.owners {
            let column = self.column(owner, &taken);
            if let Some(taken) = taken.held.get_mut(column) {
                *taken = 1;
            }
            columns.push(column);
        }
        for (own, series) in [(&mut self.hour, &later.hour), (&mut self.day, &later.day)] {
            for point in &series.points {
                let mut held = [0; COLUMNS];
                for (from, amount) in point.memory.held.iter().enumerate() {
                    let to = columns.get(from).copied().unwrap_or(COLUMNS - 1);
                    if let Some(held) = held.get_mut(to) {
                        *held += amount;
                    }
                }
                own.update(point.at_s, |to| {
                    *to = *point;
                    to.memory.held = held;
                });
            }
        }
        for mark in &later.marks.lines {
            self.marks.put(mark.clone());
        }
    }

    fn document(&self, query: &HistoryQuery) -> Value {
        let series = if query.day { &self.day } else { &self.hour };
        let after_s = query.after_s.unwrap_or(0);
        let points = || series.points.iter().filter(|point| point.at_s >= after_s);
        let column = |of: &dyn Fn(&Point) -> Option<u64>| -> Value { points().map(of).collect() };
        let memory = |of: fn(&Memory) -> u32| {
            column(&|point| Some(u64::from(of(&point.memory)) * KIB).filter(|_| point.is_read()))
        };
        let named = self.owners.iter().map(String::as_str).enumerate();
        let held: Map<String, Value> = named
            .chain([(COLUMNS - 1, OTHERS)])
            .filter(|(owner, _)| points().any(|point| point.held(*owner) > 0))
            .map(|(owner, name)| {
                let held = column(&|point| Some(point.held(owner)).filter(|_| point.is_read()));
                (name.to_owned(), held)
            })
            .collect();
        let marks = self.marks.lines.iter();
        let marks = marks.filter(|mark| mark.unix_us / 1_000_000 >= after_s);
        json!({
            "stepSeconds": series.step_s,
            "time": column(&|point| Some(point.at_s)),
            "budgetBytes": memory(|memory| memory.budget),
            "unaccountedBytes": memory(|memory| memory.unaccounted),
            "heldBytes": held,
            "milliTokensPerSecond": column(&|point| point.speed.milli_tokens_per_second()),
            "firstTokenMs": column(&|point| point.speed.first_token_ms()),
            "marks": marks.map(|mark| json!({
                "sequence": mark.sequence,
                "timeMs": mark.unix_us / 1000,
                "kind": mark.kind.word(),
                "text": mark.text,
                "outcomeUs": mark.outcome.map(|at| micros(at.since_start())),
            })).collect::<Value>(),
        })
    }
}

impl Series {
    fn new(step_s: u64, points_max: usize) -> Self {
        Self {
            step_s,
            points_max,
            // Touched as it fills, and never copied for growth.
            points: VecDeque::with_capacity(points_max + 1),
        }
    }

    /// Returns the memory in the last step before that of a time.
    fn before(&self, at_s: u64) -> Option<Memory> {
        let begin = at_s - at_s % self.step_s;
        let mut points = self.points.iter().rev();
        points
            .find(|point| point.at_s < begin)
            .map(|point| point.memory)
    }

    /// Updates the point of a time. When the clock was set back, later points are dropped.
    fn update(&mut self, at_s: u64, update: impl FnOnce(&mut Point)) {
        let at_s = at_s - at_s % self.step_s;
        while self.points.back().is_some_and(|last| last.at_s > at_s) {
            self.points.pop_back();
        }
        if self.points.back().is_none_or(|last| last.at_s < at_s) {
            self.points.push_back(Point {
                at_s,
                ..Point::default()
            });
        }
        let span = self.step_s * u64::try_from(self.points_max).unwrap_or(u64::MAX);
        while self
            .points
            .front()
            .is_some_and(|first| first.at_s + span <= at_s)
        {
            self.points.pop_front();
        }
        if let Some(last) = self.points.back_mut() {
            update(last);
        }
    }
}

impl Point {
    /// Whether there is a reading of memory, and not an answer alone.
    const fn is_read(&self) -> bool {
        self.memory.budget > 0
    }

    fn held(&self, column: usize) -> u64 {
        self.memory
            .held
            .get(column)
            .map_or(0, |held| u64::from(*held) * KIB)
    }
}

impl Memory {
    /// Returns the memory that has changed its owner, KiB.
    fn distance(&self, other: &Self) -> u64 {
        let held = self.held.iter().zip(&other.held);
        let held = held.map(|(one, two)| u64::from(one.abs_diff(*two)));
        held.sum::<u64>() + u64::from(self.unaccounted.abs_diff(other.unaccounted))
    }
}

impl Speed {
    fn add(&mut self, first_us: Option<u64>, timing: Timing) {
        self.tokens = self.tokens.saturating_add(timing.answer_tokens.get());
        self.tokens_us = self.tokens_us.saturating_add(timing.answer_us);
        if let Some(first_us) = first_us {
            self.firsts = self.firsts.saturating_add(1);
            self.firsts_us = self.firsts_us.saturating_add(first_us);
        }
    }

    fn milli_tokens_per_second(&self) -> Option<u64> {
        (u64::from(self.tokens) * 1_000_000_000)
            .checked_div(self.tokens_us)
            .filter(|speed| *speed > 0)
    }

    fn first_token_ms(&self) -> Option<u64> {
        self.firsts_us.checked_div(u64::from(self.firsts) * 1000)
    }
}

impl Marks {
    /// Adds a headline, or replaces the one with its number; drops the oldest above the bounds.
    fn put(&mut self, mut headline: Headline) {
        if let Some((end, _)) = headline.text.char_indices().nth(TEXT_MAX) {
            headline.text.truncate(end);
            headline.text.push('…');
        }
        headline.text.shrink_to_fit();
        let recent = self.lines.iter_mut().rev().take(REPLACED_AMONG);
        let run_of = |mark: &Headline| mark.unix_us == headline.unix_us;
        let mut same = recent.filter(|mark| mark.sequence == headline.sequence && run_of(mark));
        self.text_bytes += headline.text.len();
        match same.next() {
            Some(mark) => {
                self.text_bytes -= mark.text.len();
                *mark = headline;
            }
            None => self.lines.push_back(headline),
        }
        while self.lines.len() > MARKS_MAX || self.text_bytes > TEXT_BYTES_MAX {
            let Some(oldest) = self.lines.pop_front() else {
                break;
            };
            self.text_bytes -= oldest.text.len();
        }
    }
}

/// Reads the last hour of earlier runs from the journal, and rebuilds the state second by second.
pub(super) fn earlier(path: &Path, own_boot_id: &str) -> io::Result<Kept> {
    let now_s = seconds(SystemTime::now());
    let from_s = now_s.saturating_sub(HOUR_STEP_S * HOUR_POINTS as u64);
    let mut kept = Kept::default();
    let mut rebuilt = Rebuilt::default();
    let mut observed_s = 0;
    recent(path, from_s * 1_000_000, |entry| {
        if entry.boot_id == own_boot_id {
            return false;
        }
        let at_s = entry.unix_us / 1_000_000;
        let is_shown = (from_s..=now_s).contains(&at_s);
        if is_shown {
            kept.line(&entry);
            if let Content::Event(Event::EngineTimed(timing)) = &entry.content {
                kept.answered(at_s, Some(timing.prompt_us), *timing);
            }
        }
        if let Some((arbiter, event)) = rebuilt.at(&entry) {
            let _performed_then = arbiter.handle(entry.at, event.clone());
            if is_shown && at_s > observed_s {
                observed_s = at_s;
                kept.observe(at_s, &arbiter.snapshot());
            }
        }
        true
    })?;
    Ok(kept)
}

fn seconds(at: SystemTime) -> u64 {
    at.duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Returns whole KiB, at most 4 TiB.
fn kib(bytes: Bytes) -> u32 {
    u32::try_from(bytes.get() / KIB).unwrap_or(u32::MAX)
}

const KIB: u64 = 1024;
/// Owners with a column of their own, and one column for all others. Our choice: the page has eight hues.
const COLUMNS: usize = 16;
/// Name of the last column.
const OTHERS: &str = "others";
const HOUR_STEP_S: u64 = 2;
const HOUR_POINTS: usize = 1800;
const DAY_STEP_S: u64 = 60;
const DAY_POINTS: usize = 1440;
/// Marks in memory, their text, and the characters of one. Our choice: more cannot be distinguished on a chart.
const MARKS_MAX: usize = 400;
const TEXT_BYTES_MAX: usize = 160 << 10;
const TEXT_MAX: usize = 600;
/// Latest marks among which the one with the same number is looked for: those that wait for their outcome.
const REPLACED_AMONG: usize = 64;

/// Memory of the history at most: points, marks and their text. Part of the supervisor's measured use.
const BYTES_MAX: usize = (HOUR_POINTS + DAY_POINTS + 2) * size_of::<Point>()
    + 2 * MARKS_MAX * size_of::<Headline>()
    + TEXT_BYTES_MAX;
const _: () = assert!(BYTES_MAX <= 640 << 10, "the history takes at most 640 KiB");

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_journal::{Journal, JournalSettings};
    use cotenant_policy::{
        arbiter::Arbiter,
        lease::{Class, LeaseRequest, Peer, Ticket},
        params::{Params, Scope},
        snapshot::MemoryView,
    };
    use cotenant_units::{Timestamp, Tokens};

    /// Returns the state with these owners and their MiB.
    fn state(owners: &[(&str, u64)]) -> Snapshot {
        let mut control = Arbiter::new(Params::for_budget(
            Bytes::from_gib(64),
            Bytes::ZERO,
            Scope::Session,
        ))
        .unwrap();
        let sample = cotenant_dev::samples::sample_with(Bytes::ZERO, Timestamp::START);
        let _ = control.handle(Timestamp::START, Event::Sampled(sample));
        let request = LeaseRequest {
            tenant: "any".into(),
            request_id: String::new(),
            peer: Peer::default(),
            class: Class::Batch,
            min: Bytes::from_mib(1),
            max: Bytes::from_mib(1),
            term: Some(Duration::from_secs(60)),
            wait: Duration::ZERO,
            validate_only: false,
            cgroup: None,
        };
        let ticket = Ticket(1);
        let asked = Event::LeaseRequested { ticket, request };
        let _ = control.handle(Timestamp::START, asked);
        let template = control.snapshot().leases.remove(0);
        let lease = |(tenant, mib): &(&str, u64)| {
            let mut lease = LeaseView {
                tenant: (*tenant).to_owned(),
                ..template.clone()
            };
            lease.memory.held = Bytes::from_mib(*mib);
            lease
        };
        Snapshot {
            leases: owners.iter().map(lease).collect(),
            memory: MemoryView {
                budget: Bytes::from_gib(1),
                ..MemoryView::default()
            },
            ..Snapshot::default()
        }
    }

    fn held(kept: &Kept, query: &HistoryQuery, owner: &str) -> Vec<u64> {
        let document = kept.document(query);
        let held = document["heldBytes"][owner].as_array();
        let mib = |bytes: &Value| bytes.as_u64().unwrap() >> 20;
        held.into_iter().flatten().map(mib).collect()
    }

    const HOUR: HistoryQuery = HistoryQuery {
        day: false,
        after_s: None,
    };

    #[test]
    fn a_step_keeps_the_reading_that_differs_most() {
        let mut kept = Kept::default();
        for (at_s, mib) in [(10, 90), (12, 90), (13, 30), (14, 90), (15, 140), (16, 90)] {
            kept.observe(at_s, &state(&[("llm", mib)]));
        }
        assert_eq!(held(&kept, &HOUR, "llm"), [90, 30, 140, 90]);
        let day = HistoryQuery { day: true, ..HOUR };
        assert_eq!(
            held(&kept, &day, "llm"),
            [90],
            "the first step has none before"
        );
        let after_s = Some(14);
        let later = HistoryQuery { after_s, ..HOUR };
        assert_eq!(held(&kept, &later, "llm"), [140, 90]);
    }

    #[test]
    fn points_owners_and_marks_have_bounds() {
        let mut kept = Kept::default();
        let days = 2 * DAY_STEP_S * DAY_POINTS as u64;
        for at_s in (0..days).step_by(30) {
            kept.observe(at_s, &state(&[("llm", 1)]));
        }
        assert!(kept.hour.points.len() <= HOUR_POINTS);
        assert_eq!(kept.day.points.len(), DAY_POINTS);
        assert!(kept.hour.points.capacity() <= HOUR_POINTS + 2);
        for tenant in 0..40 {
            kept.observe(days, &state(&[(&format!("tenant{tenant}"), 2)]));
        }
        assert_eq!(kept.owners.len(), COLUMNS - 1);
        for sequence in 0..2000 {
            kept.marks.put(Headline {
                sequence,
                unix_us: sequence,
                kind: cotenant_journal::HeadlineKind::Shed,
                text: "ä".repeat(1000),
                is_open: false,
                outcome: None,
            });
        }
        assert!(kept.marks.lines.len() <= MARKS_MAX && kept.marks.text_bytes <= TEXT_BYTES_MAX);
        // A clock that is set back leaves the order of time.
        kept.observe(days - 100, &state(&[("llm", 1)]));
        assert!(kept.hour.points.iter().is_sorted_by_key(|point| point.at_s));
    }

    #[test]
    fn owners_beyond_the_columns_are_counted_together_until_one_is_gone() {
        let mut kept = Kept::default();
        let many: Vec<String> = (0..20).map(|tenant| format!("t{tenant:02}")).collect();
        let all: Vec<(&str, u64)> = many.iter().map(|tenant| (tenant.as_str(), 1)).collect();
        kept.observe(10, &state(&all));
        assert_eq!(held(&kept, &HOUR, OTHERS), [5]);
        // Nothing of the first ones is left in either series.
        let day = DAY_STEP_S * DAY_POINTS as u64;
        for at_s in [2 * day, 4 * day] {
            kept.observe(at_s, &state(&[("late", 7)]));
        }
        assert_eq!(held(&kept, &HOUR, "late"), [7]);
    }

    #[test]
    fn answers_are_averaged_in_their_step() {
        let mut kept = Kept::default();
        let timing = |tokens, answer_us| Timing {
            prompt_tokens: Tokens::new(5),
            prompt_us: 0,
            answer_tokens: Tokens::new(tokens),
            answer_us,
        };
        kept.answered(20, Some(80_000), timing(10, 1_000_000));
        kept.answered(21, None, timing(30, 1_000_000));
        let document = kept.document(&HOUR);
        assert_eq!(document["milliTokensPerSecond"], json!([20_000]));
        assert_eq!(document["firstTokenMs"], json!([80]));
        assert_eq!(
            document["budgetBytes"],
            json!([null]),
            "memory was not read"
        );
    }

    #[test]
    fn the_hour_before_a_restart_is_read_from_the_journal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.ndjson");
        let settings = JournalSettings {
            path: Some(path.clone()),
            ..JournalSettings::default()
        };
        let now = SystemTime::now();
        let mut journal =
            Journal::open(&settings, "before", |_: &JournalEntry, _: &str| {}).unwrap();
        let params = Params::for_budget(Bytes::from_gib(1), Bytes::ZERO, Scope::Session);
        journal.record(
            Timestamp::START,
            now - Duration::from_secs(9000),
            Content::start(params),
        );
        for (second, ago) in [(1, 8000), (2, 60), (3, 50), (4, 40)] {
            let at = Timestamp::from_millis(second * 1000);
            let sample = cotenant_dev::samples::sample_with(Bytes::from_mib(second), at);
            let time = now - Duration::from_secs(ago);
            journal.record(at, time, Content::Event(Event::Sampled(sample)));
        }
        drop(journal);
        let found = earlier(&path, "this run").unwrap();
        let times: Vec<u64> = found
            .hour
            .points
            .iter()
            .map(|point| seconds(now) - point.at_s)
            .collect();
        assert_eq!(times.len(), 3, "{times:?}");
        assert!(
            found
                .hour
                .points
                .iter()
                .all(|point| u64::from(point.memory.budget) == 1 << 20)
        );

        // This run's own points follow, under its own columns.
        let history = History::default();
        history.observe(now, &state(&[("asr", 3), ("llm", 5)]));
        let mut before = found;
        before.observe(seconds(now) - 30, &state(&[("llm", 4)]));
        history.precede(before);
        let kept = locked(&history.kept);
        assert_eq!(held(&kept, &HOUR, "llm"), [0, 0, 0, 4, 5]);
        assert_eq!(held(&kept, &HOUR, "asr"), [0, 0, 0, 0, 3]);
        assert!(earlier(&path, "before").unwrap().hour.points.is_empty());
    }
}
