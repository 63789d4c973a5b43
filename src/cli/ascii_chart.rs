//! Chart of memory by owner over time, for a terminal.

use crate::chart::{Chart, ChartPoint, clipped, mib_step};
use cotenant_units::{Bytes, Timestamp};

impl Chart {
    /// Renders the chart as lines of text, `width` × about `height` characters, with legend and marks below.
    ///
    /// Owners differ by shading; `colour` adds ANSI colours. `│` is a mark, `─` the budget.
    pub(super) fn to_text(&self, width: usize, height: usize, colour: bool) -> String {
        let owners = self.owners();
        let columns = width.saturating_sub(AXIS_WIDTH).max(10);
        let rows = height.max(4);
        let (from, to) = self.span();
        let most = self.most().max(Bytes::from_mib(1));
        let sampled: Vec<Option<&ChartPoint>> = (0..columns)
            .map(|column| self.in_force(part_of_span(from, to, column + 1, columns)))
            .collect();
        let marked: Vec<Option<usize>> = (0..columns)
            .map(|column| {
                self.mark_in(
                    part_of_span(from, to, column, columns),
                    part_of_span(from, to, column + 1, columns),
                )
            })
            .collect();
        let row_bytes = Bytes::new((most.get() / u64::try_from(rows).unwrap_or(1)).max(1));
        let budget_row =
            usize::try_from(self.budget.get().saturating_sub(1) / row_bytes.get()).unwrap_or(0);
        let labelled = mib_step(most.saturating_mul(2));

        let mut text = String::new();
        for row in (0..=rows).rev() {
            let low = row_bytes.saturating_mul(u64::try_from(row).unwrap_or(0));
            let middle = low.saturating_add(Bytes::new(row_bytes.get() / 2));
            text.push_str(&axis_label(low, row_bytes, labelled));
            for (point, mark) in sampled.iter().zip(&marked) {
                match point.and_then(|point| owner_at(point, &owners, middle)) {
                    Some(owner) => text.push_str(&cell(owner, colour)),
                    None if row == budget_row => text.push('─'),
                    None if mark.is_some() => text.push('│'),
                    None => text.push(' '),
                }
            }
            text.truncate(text.trim_end_matches(' ').len());
            if row == budget_row {
                text.push_str(&format!(
                    " {} {} MiB",
                    self.budget_name,
                    self.budget.whole_mib()
                ));
            }
            text.push('\n');
        }
        text.push_str(&" ".repeat(AXIS_WIDTH - 1));
        text.push('└');
        text.push_str(&"─".repeat(columns));
        text.push('\n');
        let end = self.time(to);
        let gap =
            (AXIS_WIDTH + columns).saturating_sub(AXIS_WIDTH + self.time(from).len() + end.len());
        text.push_str(&format!(
            "{}{}{}{end}\n",
            " ".repeat(AXIS_WIDTH),
            self.time(from),
            " ".repeat(gap)
        ));
        for (index, owner) in owners.iter().enumerate().rev() {
            let swatch: String = std::iter::repeat_n(cell(index, colour), 2).collect();
            text.push_str(&format!(
                "  {swatch} {owner}, at most {} MiB\n",
                self.peak(owner).whole_mib()
            ));
        }
        let mut marks: Vec<_> = self.marks.iter().collect();
        marks.sort_by_key(|mark| mark.at);
        for mark in marks {
            let line = format!("  {:>7} {}", self.time(mark.at), mark.label);
            text.push_str(&clipped(&line, width.max(20)));
            text.push('\n');
        }
        text
    }

    /// Returns the last point at or before `at`, which holds until the next one.
    fn in_force(&self, at: Timestamp) -> Option<&ChartPoint> {
        self.points.iter().rev().find(|point| point.at <= at)
    }

    fn mark_in(&self, from: Timestamp, until: Timestamp) -> Option<usize> {
        self.marks
            .iter()
            .position(|mark| mark.at >= from && mark.at < until)
    }
}

fn part_of_span(from: Timestamp, to: Timestamp, part: usize, parts: usize) -> Timestamp {
    let span = to.saturating_since(from);
    let part = u32::try_from(part).unwrap_or(u32::MAX);
    from + span * part / u32::try_from(parts).unwrap_or(u32::MAX).max(1)
}

/// Returns the index of the owner whose area covers this height.
fn owner_at(point: &ChartPoint, owners: &[&str], height: Bytes) -> Option<usize> {
    let mut top = Bytes::ZERO;
    owners.iter().position(|owner| {
        top = top.saturating_add(point.of(owner));
        height < top
    })
}

/// Renders the axis left of a row, with a label if the row contains a multiple of `step`.
fn axis_label(low: Bytes, row_bytes: Bytes, step: Bytes) -> String {
    let multiple = low.round_up(step);
    let label = if multiple < low.saturating_add(row_bytes) {
        format!("{} MiB ┤", multiple.whole_mib())
    } else {
        "│".to_owned()
    };
    format!("{label:>AXIS_WIDTH$}")
}

fn cell(owner: usize, colour: bool) -> String {
    let shade = SHADES.get(owner % SHADES.len()).copied().unwrap_or('█');
    if colour {
        let code = ANSI.get(owner % ANSI.len()).copied().unwrap_or(37);
        format!("\x1b[{code}m{shade}\x1b[0m")
    } else {
        shade.to_string()
    }
}

/// `12288 MiB ┤`
const AXIS_WIDTH: usize = 11;
const SHADES: [char; 7] = ['█', '▓', '▒', '░', '▞', '▚', '▤'];
/// Foreground colours close to those of the picture.
const ANSI: [u8; 7] = [34, 36, 33, 32, 35, 31, 37];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::tests::sample;

    #[test]
    fn a_chart_in_text_shows_the_shed_and_the_regrow() {
        insta::assert_snapshot!(sample().to_text(88, 14, false));
    }

    #[test]
    fn colours_change_nothing_but_colours() {
        let mut coloured = sample().to_text(60, 10, true);
        for code in ANSI {
            coloured = coloured.replace(&format!("\x1b[{code}m"), "");
        }
        assert_eq!(
            coloured.replace("\x1b[0m", ""),
            sample().to_text(60, 10, false)
        );
    }

    #[test]
    fn any_size_and_no_points_are_drawn() {
        for (width, height) in [(0, 0), (20, 1), (400, 100)] {
            assert!(!sample().to_text(width, height, false).is_empty());
            assert!(!Chart::default().to_text(width, height, false).is_empty());
        }
    }
}
