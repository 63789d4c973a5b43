//! Rendering of `top`: lines of a given width from one status.

use std::{cmp::Reverse, time::Duration};

use ratatui::{
    crossterm::event::KeyCode,
    style::{Color, Modifier, Style},
    text::{Line, Span, Text},
};

use super::{
    event_list::EventList,
    memory_chart::{Area, Cell, Recent},
};
use crate::{
    exit::escaped,
    show::{self, span},
};
use cotenant_rpc::{
    json::word,
    v1::{Engine, EngineState, GetStatusResponse, Pressure, PressureLevel},
};
use cotenant_units::Bytes;

#[derive(Debug)]
pub(super) struct Screen {
    /// The last status.
    pub status: GetStatusResponse,
    /// Memory of the last minutes.
    pub recent: Recent,
    /// Last events and decisions.
    pub events: EventList,
    /// Whether the figures stay as they are.
    pub is_paused: bool,
    /// Time for which the supervisor has not answered.
    pub silent_for: Option<Duration>,
    /// Palette of the bars.
    pub palette: Palette,
    holder_order: HolderOrder,
    /// Text in place of everything below the memory.
    pane: Option<Pane>,
}

/// Order of the table of holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HolderOrder {
    /// By the time of their grants.
    Granted,
    /// The largest first.
    Memory,
    Name,
}

#[derive(Debug)]
struct Pane {
    lines: Vec<String>,
    /// Index of its first line on the screen.
    from: usize,
}

/// Consequence of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reaction {
    /// Show the explanation of this line.
    Explain(u64),
    Quit,
    Redraw,
}

/// Distinction of owners in bars.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Palette {
    /// By colours.
    Colours,
    /// By their first letters.
    Letters,
}

impl Palette {
    /// Follows <https://no-color.org>: any non-empty value disables colours.
    pub(super) fn of_environment() -> Self {
        match std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()) {
            true => Self::Letters,
            false => Self::Colours,
        }
    }
}

struct Part {
    name: String,
    amount: u64,
    letter: char,
    colour: Color,
}

impl Screen {
    pub(super) fn new(status: GetStatusResponse) -> Self {
        let mut recent = Recent::new();
        recent.observe(&status);
        Self {
            status,
            recent,
            events: EventList::default(),
            is_paused: false,
            silent_for: None,
            palette: Palette::Letters,
            holder_order: HolderOrder::Granted,
            pane: None,
        }
    }

    /// Takes the next status. One of another run of the supervisor clears events and the chart.
    pub(super) fn observe(&mut self, status: GetStatusResponse) {
        if self.status.boot_id != status.boot_id {
            self.events = EventList::default();
            self.recent = Recent::new();
        }
        self.recent.observe(&status);
        self.status = status;
    }

    /// Opens a pane with the selected event and its explanation.
    pub(super) fn explain(&mut self, text: &str, columns: usize) {
        let selected = self.events.selected_line().map(show::entry_text);
        let text = format!("{}\n{text}", selected.unwrap_or_default());
        let wrapped = text
            .lines()
            .map(|line| show::wrapped(&escaped(line), columns));
        self.open(&wrapped.collect::<String>());
    }

    fn open(&mut self, text: &str) {
        let lines = text.lines().map(str::to_owned).collect();
        self.pane = Some(Pane { lines, from: 0 });
    }

    /// Handles a key.
    pub(super) fn press(&mut self, key: KeyCode) -> Reaction {
        match key {
            KeyCode::Char('q') => return Reaction::Quit,
            KeyCode::Esc | KeyCode::Char('?') if self.pane.is_some() => self.pane = None,
            KeyCode::Esc if self.events.selected.is_some() => self.events.selected = None,
            KeyCode::Esc => return Reaction::Quit,
            KeyCode::Char('?') => self.open(HELP),
            KeyCode::Char('p') => self.is_paused = !self.is_paused,
            KeyCode::Char('m') => self.holder_order = HolderOrder::Memory,
            KeyCode::Char('n') => self.holder_order = HolderOrder::Name,
            KeyCode::Char('e') => self.events.shows_every = !self.events.shows_every,
            KeyCode::Up => self.scroll(-1),
            KeyCode::Down => self.scroll(1),
            KeyCode::Enter => {
                if let Some(line) = self.events.selected.filter(|_| self.pane.is_none()) {
                    return Reaction::Explain(line);
                }
            }
            _ => {}
        }
        Reaction::Redraw
    }

    fn scroll(&mut self, by: isize) {
        match &mut self.pane {
            Some(pane) => {
                let last = pane.lines.len().saturating_sub(1);
                pane.from = pane.from.saturating_add_signed(by).min(last);
            }
            None => self.events.select(by),
        }
    }

    /// Renders lines of at most `width` columns and `height` rows.
    pub(super) fn text(&self, width: u16, height: u16) -> Text<'static> {
        let (columns, rows) = (usize::from(width), usize::from(height));
        let mut lines = self.head(columns);
        lines.extend(self.memory(columns));
        if let Some(pane) = &self.pane {
            lines.push(Line::default());
            let shown = pane.lines.iter().skip(pane.from);
            lines.extend(shown.map(|line| Line::from(line.clone())));
        } else {
            let tables = self.tables(columns);
            // The chart has three fifths of what the tables leave, the events the rest.
            let left = rows.saturating_sub(lines.len() + tables.len() + 1);
            let chart = (left * 3 / 5).min(CHART_ROWS_MAX);
            if rows >= CHART_TERMINAL_ROWS && chart >= CHART_ROWS_MIN {
                lines.extend(self.chart(columns, chart));
            }
            lines.extend(tables);
            lines.extend(self.event_lines(columns, rows.saturating_sub(lines.len())));
        }
        lines.truncate(rows);
        Text::from(
            lines
                .into_iter()
                .map(|line| cut(line, columns))
                .collect::<Vec<_>>(),
        )
    }

    /// Renders the next shed, and the tables of the LLM, of workers and of holders.
    fn tables(&self, columns: usize) -> Vec<Line<'static>> {
        let mut lines = Vec::new();
        if !self.status.next_shed.is_empty() {
            lines.extend(wrapped(
                &format!("next to be shed: {}", self.status.next_shed),
                columns,
            ));
        }
        if let Some(engine) = &self.status.engine {
            lines.push(Line::default());
            lines.extend(self.engine(engine, columns));
            if !engine.sequences.is_empty() {
                lines.push(Line::default());
                // More would leave no rows for the rest.
                let shown = engine.sequences.len().min(SEQUENCES_SHOWN);
                lines.extend(plain(&show::sequences_table(
                    engine.sequences.get(..shown).unwrap_or_default(),
                )));
                let more = engine.sequences.len() - shown;
                if more > 0 {
                    lines.push(Line::from(format!("and {more} more")));
                }
            }
        }
        if !self.status.workers.is_empty() {
            lines.push(Line::default());
            lines.extend(plain(&show::workers_table(&self.status.workers)));
        }
        if !self.status.leases.is_empty() {
            lines.push(Line::default());
            let mut leases = self.status.leases.clone();
            match self.holder_order {
                HolderOrder::Granted => {}
                HolderOrder::Memory => leases.sort_by_key(|lease| Reverse(lease.held_bytes)),
                HolderOrder::Name => leases.sort_by(|one, other| one.name.cmp(&other.name)),
            }
            lines.extend(plain(&show::holders_table(&leases)));
        }
        lines
    }

    fn event_lines(&self, columns: usize, rows: usize) -> Vec<Line<'static>> {
        let mut lines = vec![Line::default()];
        if self.events.lines().is_empty() && self.events.last_sequence > 0 {
            lines.push("no decision yet; `e` shows every event".into());
        }
        lines.extend(self.events.window(rows.saturating_sub(1)).map(|entry| {
            let text = shortened(escaped(&show::entry_text(entry)).trim_end(), columns);
            match self.events.selected == Some(entry.sequence) {
                true => Line::styled(text, Modifier::REVERSED),
                false => Line::from(text),
            }
        }));
        lines
    }

    /// Renders memory by owner over the last minutes, with the budget as a line.
    fn chart(&self, columns: usize, rows: usize) -> Vec<Line<'static>> {
        let budget = self.status.budget.unwrap_or_default().budget_bytes;
        let label = bytes(budget);
        let left = label.chars().count() + 3;
        let drawn = self.recent.draw(columns.saturating_sub(left), rows, budget);
        let mut lines = vec![Line::default()];
        for (row, cells) in drawn.rows.iter().enumerate() {
            let is_budget = row == drawn.budget_row;
            let axis = match is_budget {
                true => format!(" {label} ┤"),
                false => format!("{:>left$}", "│"),
            };
            let mut spans = vec![Span::from(axis)];
            for alike in cells.chunk_by(|one, other| one == other) {
                spans.extend(
                    alike
                        .first()
                        .map(|cell| self.cell(*cell, is_budget, alike.len())),
                );
            }
            lines.push(Line::from(spans));
        }
        let ago = span(&prost_types::Duration {
            seconds: i64::try_from(drawn.seconds).unwrap_or(0),
            nanos: 0,
        });
        let ago = format!("{}{ago} ago", " ".repeat(left));
        let gap = columns.saturating_sub(ago.chars().count());
        lines.push(Line::from(format!("{ago}{:>gap$}", "now")));
        lines
    }

    /// Renders equal cells of the chart side by side.
    fn cell(&self, cell: Cell, is_budget: bool, width: usize) -> Span<'static> {
        let colour = |area| match area {
            Some(Area::Owner(hue)) => hue_colour(hue),
            Some(Area::Unaccounted) => Color::DarkGray,
            None => Color::Reset,
        };
        let letter = match if cell.eighths < 4 {
            cell.upper
        } else {
            cell.lower
        } {
            Some(Area::Owner(hue)) => self.recent.owner(hue).chars().next().unwrap_or('x'),
            Some(Area::Unaccounted) => '?',
            None if is_budget => '─',
            None => ' ',
        };
        let block = EIGHTHS.get(cell.eighths).copied().unwrap_or(' ');
        let (shown, style) = match self.palette {
            Palette::Letters => (letter, Style::new()),
            Palette::Colours if is_budget => ('─', Style::new().bg(colour(cell.lower))),
            Palette::Colours => {
                let style = Style::new().fg(colour(cell.lower)).bg(colour(cell.upper));
                (block, style)
            }
        };
        self.styled(shown.to_string().repeat(width), style)
    }

    fn head(&self, columns: usize) -> Vec<Line<'static>> {
        let status = &self.status;
        let level = status
            .pressure
            .as_ref()
            .map_or(PressureLevel::Unspecified, Pressure::level);
        let colour = match level {
            PressureLevel::Normal => Color::Green,
            PressureLevel::Elevated => Color::Yellow,
            PressureLevel::Critical => Color::Red,
            PressureLevel::Unspecified => Color::Reset,
        };
        let uptime = status.uptime.as_ref().map_or_else(String::new, span);
        let mut title = vec![
            self.styled(
                format!("cotenant {}", status.version),
                Style::new().add_modifier(Modifier::BOLD),
            ),
            format!("  up {uptime}  ").into(),
            self.styled(
                word(level.as_str_name(), "PRESSURE_LEVEL_"),
                Style::new().fg(colour).add_modifier(Modifier::BOLD),
            ),
        ];
        if status.draining {
            title.push("  draining".into());
        }
        if self.is_paused {
            title.push("  paused".into());
        }
        let used: usize = title.iter().map(Span::width).sum();
        let keys = "? help  q quits";
        if used + keys.len() + 2 <= columns {
            title.push(" ".repeat(columns - used - keys.len()).into());
            title.push(keys.into());
        }
        let mut lines = vec![Line::from(title)];
        if let Some(silent) = self.silent_for {
            let message = format!(
                "no reply for {} s; the figures below are older",
                silent.as_secs()
            );
            lines.push(Line::from(
                self.styled(message, Style::new().fg(Color::Red)),
            ));
        }
        for why in &status.reboot_advised {
            let style = Style::new().fg(Color::Red);
            let advised = wrapped(&format!("reboot advised: {why}"), columns);
            lines.extend(
                advised
                    .into_iter()
                    .map(|line| self.styled(line.to_string(), style).into()),
            );
        }
        if let Some(pressure) = &status.pressure {
            let headroom = pressure
                .headroom_bytes
                .map_or_else(|| "unknown".to_owned(), bytes);
            let mut line = format!("headroom {headroom}");
            if let Some(available) = pressure.mem_available_bytes {
                line.push_str(&format!(", available {}", bytes(available)));
            }
            if let Some(ratio) = pressure.some_avg10_ratio {
                line.push_str(&format!(", stalled {:.2} %", ratio * 100.0));
            }
            if let Some(left) = &pressure.exhausted_in {
                line.push_str(&format!(", exhausted in {}", span(left)));
            }
            lines.extend(wrapped(&line, columns));
        }
        lines
    }

    fn memory(&self, columns: usize) -> Vec<Line<'static>> {
        let Some(budget) = &self.status.budget else {
            return Vec::new();
        };
        let mut parts = self.owners();
        let mut add = |name: &str, amount, letter, colour| {
            parts.push(Part {
                name: name.to_owned(),
                amount,
                letter,
                colour,
            });
        };
        add(
            "unaccounted",
            budget.unaccounted_bytes,
            '?',
            Color::DarkGray,
        );
        add("free", budget.free_bytes, '.', Color::Reset);
        let own = budget.supervisor_bytes.map(bytes);
        let title = format!(
            "budget {}: held {}, used {}{}",
            bytes(budget.budget_bytes),
            bytes(budget.held_bytes),
            bytes(budget.used_bytes),
            own.map_or_else(String::new, |own| format!(", supervisor {own}"))
        );
        let mut lines = vec![Line::default()];
        lines.extend(wrapped(&title, columns));
        lines.push(self.bar(&parts, columns));
        let mut legend = Vec::new();
        let mut used = 0;
        for part in parts.iter().filter(|part| part.amount > 0) {
            let text = format!(" {} {}  ", part.name, bytes(part.amount));
            let width = text.chars().count() + 1;
            if used > 0 && used + width > columns {
                lines.push(Line::from(std::mem::take(&mut legend)));
                used = 0;
            }
            used += width;
            legend.push(self.block(part, 1));
            legend.push(text.into());
        }
        lines.push(Line::from(legend));
        lines
    }

    fn engine(&self, engine: &Engine, columns: usize) -> Vec<Line<'static>> {
        let mut title = format!(
            "LLM {}",
            word(engine.state().as_str_name(), "ENGINE_STATE_")
        );
        if !engine.model.is_empty() {
            title = format!(
                "LLM {}, {}",
                engine.model,
                word(engine.state().as_str_name(), "ENGINE_STATE_")
            );
        }
        if engine.milli_tokens_per_second > 0 {
            let tenths = engine.milli_tokens_per_second / 100;
            title.push_str(&format!(
                ", {}.{} tokens/s expected",
                tenths / 10,
                tenths % 10
            ));
        }
        if engine.changing {
            title.push_str(", changing");
        }
        let mut lines = wrapped(&title, columns);
        if engine.state() == EngineState::Failed && !engine.failure.is_empty() {
            lines.push(Line::from(self.styled(
                escaped(&engine.failure).into_owned(),
                Style::new().fg(Color::Red),
            )));
        }
        let part = |name: &str, amount: u32, letter, colour| Part {
            name: name.to_owned(),
            amount: amount.into(),
            letter,
            colour,
        };
        if engine.layers_total > 0 {
            let streamed = engine.layers_total.saturating_sub(engine.layers_resident);
            let text = match streamed {
                0 => format!(" {} layers in memory", engine.layers_total),
                _ => format!(
                    " {} of {} layers in memory",
                    engine.layers_resident, engine.layers_total
                ),
            };
            let layers = [
                part("in memory", engine.layers_resident, '#', Color::Blue),
                part("from disk", streamed, '.', Color::Reset),
            ];
            lines.extend(self.labelled("layers  ", &layers, text, columns));
        }
        if engine.kv_capacity_tokens > 0 {
            let occupied = engine.kv_used_tokens.saturating_add(engine.kv_kept_tokens);
            let capacity = engine.kv_capacity_tokens;
            let context = [
                part("in use", engine.kv_used_tokens, '#', Color::Blue),
                part("kept", engine.kv_kept_tokens, '+', Color::Cyan),
                part(
                    "capacity",
                    capacity.saturating_sub(occupied),
                    '-',
                    Color::DarkGray,
                ),
                part(
                    "given up",
                    engine.kv_capacity_full_tokens.saturating_sub(capacity),
                    '.',
                    Color::Reset,
                ),
            ];
            let text = format!(
                " {occupied} of {capacity} tokens, {}{}",
                word(engine.kv_type().as_str_name(), "KV_TYPE_"),
                match capacity < engine.kv_capacity_full_tokens {
                    true => format!(" ({} when memory is back)", engine.kv_capacity_full_tokens),
                    false => String::new(),
                }
            );
            lines.extend(self.labelled("context ", &context, text, columns));
        }
        if !engine.growth_waits.is_empty() {
            lines.extend(wrapped(
                &format!("not growing: {}", engine.growth_waits),
                columns,
            ));
        }
        lines
    }

    /// Places a bar between its label and its text, or below them if too little space remains.
    fn labelled(
        &self,
        label: &str,
        parts: &[Part],
        text: String,
        columns: usize,
    ) -> Vec<Line<'static>> {
        let wide = columns
            .saturating_sub(label.len() + text.chars().count())
            .min(BAR_MAX);
        if wide < BAR_MIN {
            let mut lines = wrapped(&format!("{label}{text}"), columns);
            lines.push(self.bar(parts, columns));
            return lines;
        }
        let mut spans = vec![Span::from(label.to_owned())];
        spans.extend(self.bar(parts, wide).spans);
        spans.push(text.into());
        vec![Line::from(spans)]
    }

    /// Renders a bar over `columns`; every non-zero part has at least one cell, if there are enough.
    fn bar(&self, parts: &[Part], columns: usize) -> Line<'static> {
        let widths = widths(
            &parts.iter().map(|part| part.amount).collect::<Vec<_>>(),
            columns,
        );
        Line::from(
            parts
                .iter()
                .zip(widths)
                .filter(|(_, width)| *width > 0)
                .map(|(part, width)| self.block(part, width))
                .collect::<Vec<_>>(),
        )
    }

    fn block(&self, part: &Part, width: usize) -> Span<'static> {
        let cell = match self.palette {
            Palette::Colours if part.colour == Color::Reset => '░',
            Palette::Colours => '█',
            Palette::Letters => part.letter,
        };
        self.styled(cell.to_string().repeat(width), Style::new().fg(part.colour))
    }

    /// Returns the memory of each owner, in the order of leases.
    fn owners(&self) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        for lease in &self.status.leases {
            match parts.iter_mut().find(|part| part.name == lease.tenant) {
                Some(part) => part.amount = part.amount.saturating_add(lease.held_bytes),
                None => parts.push(Part {
                    name: lease.tenant.clone(),
                    amount: lease.held_bytes,
                    letter: lease.tenant.chars().next().unwrap_or('x'),
                    colour: hue_colour(self.recent.hue_of(&lease.tenant).unwrap_or(0)),
                }),
            }
        }
        parts
    }

    fn styled(&self, text: String, style: Style) -> Span<'static> {
        match self.palette {
            Palette::Colours => Span::styled(text, style),
            Palette::Letters => Span::raw(text),
        }
    }
}

fn hue_colour(hue: usize) -> Color {
    let colour = OWNER_COLOURS.get(hue % OWNER_COLOURS.len());
    colour.copied().unwrap_or(Color::Blue)
}

/// Divides `columns` in proportion to `amounts`: the shares add up to `columns` unless all are zero, and no non-zero
/// share vanishes if there are columns for all.
fn widths(amounts: &[u64], columns: usize) -> Vec<usize> {
    let total: u128 = amounts.iter().map(|amount| u128::from(*amount)).sum();
    if total == 0 {
        return vec![0; amounts.len()];
    }
    let least = |amount: u64| usize::from(amount > 0);
    let mut widths: Vec<usize> = amounts
        .iter()
        .map(|amount| {
            let share = u128::from(*amount) * columns as u128 / total;
            usize::try_from(share)
                .unwrap_or(columns)
                .max(least(*amount))
        })
        .collect();
    // Differences by rounding and by the minimum of one cell are absorbed by the widest part.
    let sum: usize = widths.iter().sum();
    if let Some(widest) = widths.iter_mut().max() {
        *widest = (*widest + columns).saturating_sub(sum);
    }
    widths
}

fn bytes(bytes: u64) -> String {
    Bytes::new(bytes).to_string()
}

/// Breaks text between words; words longer than a line are cut later.
fn wrapped(text: &str, columns: usize) -> Vec<Line<'static>> {
    let text = escaped(text);
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split_whitespace() {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > columns {
            lines.push(Line::from(std::mem::take(&mut line)));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(Line::from(line));
    lines
}

/// Cuts a long event before its last clause, which is the outcome of a decision.
fn shortened(text: &str, columns: usize) -> String {
    if text.chars().count() <= columns {
        return text.to_owned();
    }
    match text.rsplit_once("; ") {
        Some((fact, outcome)) if outcome.chars().count() < columns / 2 => {
            let left = columns - outcome.chars().count() - 2;
            format!("{}; {outcome}", cut(Line::from(fact.to_owned()), left))
        }
        _ => text.to_owned(),
    }
}

fn plain(table: &str) -> Vec<Line<'static>> {
    table
        .lines()
        .map(|line| Line::from(escaped(line).into_owned()))
        .collect()
}

/// Cuts a line to `columns`, with an ellipsis if text is omitted.
fn cut(line: Line<'static>, columns: usize) -> Line<'static> {
    if line.width() <= columns {
        return line;
    }
    let mut left = columns.saturating_sub(1);
    let mut spans = Vec::new();
    for span in line.spans {
        let width = span.width();
        if width <= left {
            left -= width;
            spans.push(span);
            continue;
        }
        let mut text = String::new();
        for letter in span.content.chars() {
            let next = Span::raw(format!("{text}{letter}"));
            if next.width() > left {
                break;
            }
            text.push(letter);
        }
        text.push('…');
        spans.push(Span::styled(text, span.style));
        break;
    }
    Line::from(spans)
}

/// Terminal colours nearest to the hues of the page and of `plot`: the first for the LLM, others as they appeared.
const OWNER_COLOURS: [Color; 6] = [
    Color::Blue,
    Color::Yellow,
    Color::Green,
    Color::Magenta,
    Color::Red,
    Color::Cyan,
];

/// Columns of a bar beside text.
const BAR_MAX: usize = 60;
/// Minimum columns of a useful bar.
const BAR_MIN: usize = 8;
/// Sequences listed (our choice).
const SEQUENCES_SHOWN: usize = 6;
/// Rows of a useful chart.
const CHART_ROWS_MIN: usize = 5;
/// More rows show no more (our choice).
const CHART_ROWS_MAX: usize = 12;
/// Lower terminals show figures only.
const CHART_TERMINAL_ROWS: usize = 24;
/// Blocks by the eighths that they fill, from below.
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

const HELP: &str = "\
?           this list
p           pause, continue
m, n        sort holders by memory, by name
e           every event instead of one line for each decision
Up, Down    select an event; scroll its explanation
Enter       explain the selected event, as `cotenant why` does
Esc         close, deselect, quit
q, Ctrl-C   quit";

#[cfg(test)]
#[path = "screen_tests.rs"]
mod tests;
