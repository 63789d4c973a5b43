//! Memory by owner over the last minutes, as cells of a terminal.

use std::{
    collections::{BTreeMap, VecDeque},
    iter::{repeat, repeat_n},
};

use cotenant_policy::params::ENGINE_TENANT;
use cotenant_rpc::v1::GetStatusResponse;

/// Memory by owner of the last ten minutes, second by second, as far as it was seen.
#[derive(Debug)]
pub(super) struct Recent {
    /// Owners in the order of their hues: the LLM, then others as they appeared.
    owners: Vec<String>,
    /// Bytes by area, contiguous in time; `None` where nothing was seen.
    seconds: VecDeque<Option<BTreeMap<Area, u64>>>,
    /// Uptime of the supervisor at the last one, in seconds.
    last: u64,
    is_interrupted: bool,
}

/// Area of a chart: an owner by the index of its hue, or unaccounted memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Area {
    Owner(usize),
    Unaccounted,
}

/// Content of one character: the lowest eighths belong to one area, the others to another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cell {
    pub lower: Option<Area>,
    /// Eighths of `lower`, 0 to 8.
    pub eighths: usize,
    pub upper: Option<Area>,
}

/// Drawn chart.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Drawn {
    /// Rows from the top, each with its cells from the left.
    pub rows: Vec<Vec<Cell>>,
    /// Row with the budget's line.
    pub budget_row: usize,
    /// Time between the left and the right edge, in seconds.
    pub seconds: usize,
}

impl Recent {
    pub(super) fn new() -> Self {
        Self {
            owners: vec![ENGINE_TENANT.to_owned()],
            seconds: VecDeque::new(),
            last: 0,
            is_interrupted: false,
        }
    }

    /// Returns the index of an owner's hue, which it keeps.
    pub(super) fn hue_of(&self, owner: &str) -> Option<usize> {
        self.owners.iter().position(|known| known == owner)
    }

    /// Returns the owner with the hue of this index.
    pub(super) fn owner(&self, hue: usize) -> &str {
        self.owners.get(hue).map_or("", String::as_str)
    }

    /// Leaves the time until the next status blank.
    pub(super) const fn interrupt(&mut self) {
        self.is_interrupted = true;
    }

    /// Takes a status of the same run. Without an interruption, the one before it holds until now.
    pub(super) fn observe(&mut self, status: &GetStatusResponse) {
        let mut names: Vec<&String> = status.leases.iter().map(|lease| &lease.tenant).collect();
        names.sort_unstable();
        for name in names {
            if self.hue_of(name).is_none() {
                self.owners.push(name.clone());
            }
        }
        let (Some(budget), Some(uptime)) = (&status.budget, &status.uptime) else {
            return;
        };
        let mut held = BTreeMap::from([(Area::Unaccounted, budget.unaccounted_bytes)]);
        for lease in &status.leases {
            let hue = self.hue_of(&lease.tenant).unwrap_or(0);
            let bytes = held.entry(Area::Owner(hue)).or_default();
            *bytes = bytes.saturating_add(lease.held_bytes);
        }
        let now = u64::try_from(uptime.seconds).unwrap_or(0);
        let after = usize::try_from(now.saturating_sub(self.last)).unwrap_or(SECONDS_KEPT);
        match self.seconds.back_mut() {
            // Of one second, the largest is shown.
            Some(Some(shown)) if after == 0 => {
                if total(&held) >= total(shown) {
                    *shown = held;
                }
            }
            Some(before) => {
                let before = before.clone().filter(|_| !self.is_interrupted);
                let between = after.saturating_sub(1).min(SECONDS_KEPT);
                self.seconds.extend(repeat_n(before, between));
                self.seconds.push_back(Some(held));
            }
            None => self.seconds.push_back(Some(held)),
        }
        self.last = self.last.max(now);
        self.is_interrupted = false;
        let beyond = self.seconds.len().saturating_sub(SECONDS_KEPT);
        self.seconds.drain(..beyond);
    }

    /// Draws `columns` × `rows` cells, with the last status on the right, and the line of the budget in bytes.
    ///
    /// A column is the shortest round time with which all that was seen fits; the largest total in it is shown.
    pub(super) fn draw(&self, columns: usize, rows: usize, budget: u64) -> Drawn {
        let step = STEPS
            .into_iter()
            .find(|step| step * columns >= self.seconds.len())
            .unwrap_or(SECONDS_KEPT);
        // Columns begin at multiples of the step, so that a peak does not move within its column.
        let ahead = step - 1 - usize::try_from(self.last).unwrap_or(0) % step;
        let mut shown = vec![None; columns];
        for (age, held) in self.seconds.iter().rev().enumerate() {
            let column = columns.checked_sub(1 + (age + ahead) / step);
            if let (Some(held), Some(column)) = (held, column.and_then(|at| shown.get_mut(at)))
                && column.is_none_or(|shown| total(shown) < total(held))
            {
                *column = Some(held);
            }
        }
        // The budget's line has a row of its own above what it allows.
        let budget = u128::from(budget) * rows as u128;
        let most = shown.iter().flatten().map(|held| total(held)).max();
        let scale = (budget / rows.saturating_sub(1).max(1) as u128)
            .max(most.unwrap_or(0))
            .max(1);
        let budget_row = usize::try_from(budget / scale).unwrap_or(0) + 1;
        let columns_drawn: Vec<Vec<Cell>> = shown
            .iter()
            .map(|held| held.map_or_else(Vec::new, |held| self.column(held, scale, rows)))
            .collect();
        let cell = |column: &Vec<Cell>, row| column.get(row).copied().unwrap_or_default();
        Drawn {
            rows: (0..rows)
                .rev()
                .map(|row| columns_drawn.iter().map(|it| cell(it, row)).collect())
                .collect(),
            budget_row: rows.saturating_sub(budget_row),
            seconds: step * columns,
        }
    }

    /// Returns the cells of a column from the bottom, with areas in the order of the page.
    fn column(&self, held: &BTreeMap<Area, u64>, scale: u128, rows: usize) -> Vec<Cell> {
        let mut held: Vec<(Area, u64)> = held.iter().map(|(area, of)| (*area, *of)).collect();
        held.sort_by_key(|(area, _)| match *area {
            Area::Owner(0) => (1, ""),
            Area::Owner(hue) => (0, self.owner(hue)),
            Area::Unaccounted => (2, ""),
        });
        let (areas, amounts): (Vec<_>, Vec<_>) = held.into_iter().unzip();
        cells(&areas, &heights(&amounts, scale, rows), rows)
    }
}

fn total(held: &BTreeMap<Area, u64>) -> u128 {
    held.values().map(|bytes| u128::from(*bytes)).sum()
}

/// Returns the heights of stacked amounts in eighths of a row; they add up to the height of the sum.
fn heights(amounts: &[u64], scale: u128, rows: usize) -> Vec<usize> {
    let full = rows as u128 * 8;
    let (mut sum, mut top) = (0, 0);
    amounts
        .iter()
        .map(|amount| {
            sum += u128::from(*amount);
            let next = (sum * full + scale / 2) / scale.max(1);
            let next = usize::try_from(next.min(full)).unwrap_or(0);
            let height = next - top;
            top = next;
            height
        })
        .collect()
}

/// Returns the cells of a stack from the bottom: the lowest area of each, and the one in the middle of the rest.
fn cells(areas: &[Area], heights: &[usize], rows: usize) -> Vec<Cell> {
    let stacked = areas.iter().zip(heights);
    let eighths: Vec<Option<Area>> = stacked
        .flat_map(|(area, height)| repeat_n(Some(*area), *height))
        .chain(repeat(None))
        .take(rows * 8)
        .collect();
    eighths
        .chunks(8)
        .map(|row| {
            let lower = row.first().copied().flatten();
            let eighths = row.iter().take_while(|area| **area == lower).count();
            let upper = row.get((eighths + 8) / 2).copied().flatten();
            match lower {
                Some(_) => Cell {
                    lower,
                    eighths,
                    upper,
                },
                None => Cell::default(),
            }
        })
        .collect()
}

/// Our choice: longer spans are in the page and in `plot`.
const SECONDS_KEPT: usize = 600;
/// Times of a column, in seconds.
const STEPS: [usize; 7] = [1, 2, 5, 10, 20, 60, 120];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use cotenant_rpc::v1::{Budget, Lease};

    fn status(seconds: i64, leases: &[(&str, u64)], unaccounted: u64) -> GetStatusResponse {
        let lease = |(tenant, held): &(&str, u64)| Lease {
            tenant: (*tenant).to_owned(),
            held_bytes: *held,
            ..Lease::default()
        };
        GetStatusResponse {
            uptime: Some(prost_types::Duration { seconds, nanos: 0 }),
            budget: Some(Budget {
                budget_bytes: 100,
                unaccounted_bytes: unaccounted,
                ..Budget::default()
            }),
            leases: leases.iter().map(lease).collect(),
            ..GetStatusResponse::default()
        }
    }

    fn column(drawn: &Drawn, at: usize) -> Vec<Cell> {
        drawn.rows.iter().map(|row| row[at]).collect()
    }

    #[test]
    fn owners_are_stacked_as_on_the_page_below_the_line_of_the_budget() {
        let mut recent = Recent::new();
        recent.observe(&status(7, &[("llm", 50), ("tts", 10), ("asr", 20)], 20));
        let drawn = recent.draw(4, 6, 100);
        let whole = |area| Cell {
            lower: Some(area),
            eighths: 8,
            upper: None,
        };
        let mixed = Cell {
            lower: Some(Area::Owner(2)),
            eighths: 4,
            upper: Some(Area::Owner(0)),
        };
        let shared = [
            Cell::default(),
            whole(Area::Unaccounted),
            whole(Area::Owner(0)),
            whole(Area::Owner(0)),
            mixed,
            whole(Area::Owner(1)),
        ];
        assert_eq!(column(&drawn, 3), shared);
        assert_eq!(column(&drawn, 2), [Cell::default(); 6]);
        assert_eq!(drawn.budget_row, 0);
        assert_eq!(recent.owner(1), "asr");
    }

    #[test]
    fn a_status_holds_until_the_next_one_unless_interrupted() {
        let mut recent = Recent::new();
        recent.observe(&status(3, &[("llm", 40)], 0));
        recent.observe(&status(6, &[("llm", 80)], 0));
        recent.interrupt();
        recent.observe(&status(9, &[("llm", 10)], 0));
        let seen: Vec<Option<u128>> = recent
            .seconds
            .iter()
            .rev()
            .take(7)
            .map(|held| held.as_ref().map(total))
            .collect();
        let (then, now) = ([Some(80), Some(40), Some(40), Some(40)], Some(10));
        assert_eq!(seen[..3], [now, None, None]);
        assert_eq!(seen[3..], then);
    }

    #[test]
    fn ten_minutes_are_kept_and_a_peak_is_shown_with_any_step() {
        let mut recent = Recent::new();
        for second in 5..5000 {
            let held = if second == 4700 { 100 } else { 10 };
            recent.observe(&status(second, &[("llm", held)], 0));
        }
        assert_eq!(recent.seconds.len(), SECONDS_KEPT);
        for columns in [5, 60, 70, 200, 600] {
            let drawn = recent.draw(columns, 11, 100);
            let peaks = |at: &usize| column(&drawn, *at)[1].lower.is_some();
            assert_eq!((0..columns).filter(peaks).count(), 1, "{columns}");
        }
    }

    proptest! {
        #[test]
        fn any_memory_is_drawn_at_any_size_with_the_height_of_its_sum(
            seen in proptest::collection::vec((0..2000i64, any::<u64>(), 0..1u64 << 40, any::<bool>()), 0..20),
            columns in 0..300usize,
            rows in 0..60usize,
            budget in any::<u64>(),
        ) {
            let mut recent = Recent::new();
            for (second, llm, other, interrupts) in seen {
                if interrupts {
                    recent.interrupt();
                }
                recent.observe(&status(second, &[("llm", llm), ("asr", other)], other / 2));
                prop_assert!(recent.seconds.len() <= SECONDS_KEPT);
            }
            let drawn = recent.draw(columns, rows, budget);
            prop_assert_eq!(drawn.rows.len(), rows);
            prop_assert!(drawn.rows.iter().all(|row| row.len() == columns));
            prop_assert!(rows == 0 || drawn.budget_row < rows);
        }

        #[test]
        fn heights_add_up_and_cells_lose_none(amounts in proptest::collection::vec(0..1u64 << 40, 1..9), rows in 1..40usize) {
            let total: u128 = amounts.iter().map(|amount| u128::from(*amount)).sum();
            let scale = total.max(1) * 5 / 4 + 1;
            let heights = heights(&amounts, scale, rows);
            let sum: usize = heights.iter().sum();
            prop_assert_eq!(sum as u128, (total * rows as u128 * 8 + scale / 2) / scale);
            let areas: Vec<Area> = (0..heights.len()).map(Area::Owner).collect();
            for (row, cell) in cells(&areas, &heights, rows).iter().enumerate() {
                prop_assert_eq!(cell.lower.is_some(), sum > row * 8);
                prop_assert!(cell.eighths <= 8 && (cell.eighths < 8 || cell.upper.is_none()));
            }
        }
    }
}
