//! Batch of a pass: rows of several conversations, and the rows whose logits are computed.
//!
//! ```text
//!   rows    │ lane a: forced │ the sequence: a slice of its prompt │ lane a │ lane b │
//!   results │                                                  └─0─┘   1        2
//! ```
//!
//! Rows with results are adjacent, so that the head reads its weights once for all of them.

use std::ops::Range;

use super::parked::Lane;

/// Tokens of one conversation in a pass.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// Lane of the conversation; `None` for the sequence, whose span is the first.
    pub lane: Option<Lane>,
    /// Its next tokens, at least one.
    pub tokens: &'a [u32],
    /// Number of last tokens whose logits are computed, at least one.
    pub scored: usize,
}

/// Rows of a chunk.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Rows of the sequence.
    own: Range<usize>,
    /// Rows of other conversations in order, before and after `own`.
    others: Vec<Other>,
    /// Result of each row; empty if all rows share the first one.
    results: Vec<usize>,
    /// Rows whose logits are computed, one result each.
    scored: Range<usize>,
}

/// A row of a lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Other {
    pub(super) lane: Lane,
    /// Tokens of the same lane before it in the pass.
    pub(super) ahead: u32,
}

impl Batch {
    /// Returns the batch for a chunk of the sequence, whose rows share one result at a time.
    pub(super) fn of_sequence(rows: usize) -> Self {
        Self {
            own: 0..rows,
            ..Self::default()
        }
    }

    /// Returns the batch of `spans`, and its tokens in row order.
    pub(super) fn of(spans: &[Span<'_>]) -> (Self, Vec<u32>) {
        let (mut batch, mut tokens) = (Self::default(), Vec::new());
        let own = spans.iter().filter(|span| span.lane.is_none());
        let results = |before: &[Span<'_>]| before.iter().map(|span| span.scored).sum::<usize>();
        let mut lanes = Vec::new();
        for (number, span) in spans.iter().enumerate() {
            if let Some(lane) = span.lane {
                let first = results(spans.get(..number).unwrap_or_default());
                let unscored = span.tokens.len().saturating_sub(span.scored);
                lanes.push((lane, first, span.tokens.split_at(unscored)));
            }
        }
        let push = |batch: &mut Self, lane, ahead: usize, result| {
            let ahead = u32::try_from(ahead).unwrap_or(u32::MAX);
            batch.others.push(Other { lane, ahead });
            batch.results.push(result);
        };
        for (lane, first, (unscored, _)) in &lanes {
            tokens.extend_from_slice(unscored);
            for ahead in 0..unscored.len() {
                push(&mut batch, *lane, ahead, *first);
            }
        }
        batch.own = tokens.len()..tokens.len();
        for span in own {
            let unscored = span.tokens.len().saturating_sub(span.scored);
            tokens.extend_from_slice(span.tokens);
            batch.own.end = tokens.len();
            let rows = 0..span.tokens.len();
            batch
                .results
                .extend(rows.map(|row| row.saturating_sub(unscored)));
        }
        let scored = results(spans);
        for (lane, first, (unscored, rest)) in &lanes {
            tokens.extend_from_slice(rest);
            for row in 0..rest.len() {
                push(&mut batch, *lane, unscored.len() + row, first + row);
            }
        }
        batch.scored = tokens.len().saturating_sub(scored)..tokens.len();
        (batch, tokens)
    }

    /// Rows of the sequence.
    pub(super) const fn own(&self) -> &Range<usize> {
        &self.own
    }

    /// Rows whose logits are computed.
    pub(super) fn scored(&self) -> Range<usize> {
        self.scored.clone()
    }

    /// Number of results, at least 1.
    pub(super) fn results(&self) -> usize {
        self.scored.len().max(1)
    }

    /// Returns the index of the result that a row belongs to.
    pub(super) fn result_of(&self, row: usize) -> usize {
        self.results.get(row).copied().unwrap_or(0)
    }

    /// Returns the lane of a row; `None` for rows of the sequence.
    pub(super) fn other(&self, row: usize) -> Option<Other> {
        let number = if row < self.own.start {
            row
        } else if row < self.own.end {
            return None;
        } else {
            row - self.own.len()
        };
        self.others.get(number).copied()
    }

    /// Returns the lane of row `first` (`None` for the sequence), and the number of consecutive rows from `first` on
    /// that belong to the same conversation.
    pub(super) fn conversation(&self, first: usize) -> (Option<Lane>, usize) {
        let Some(other) = self.other(first) else {
            return (None, self.own.end.saturating_sub(first).max(1));
        };
        let goes_on = |row: &usize| self.other(*row).is_some_and(|next| next.lane == other.lane);
        (Some(other.lane), (first..).take_while(goes_on).count())
    }

    /// Number of consecutive rows from `first` on with the same conversation and result; 1 outside the sequence.
    pub(super) fn run(&self, first: usize) -> usize {
        if !self.own.contains(&first) {
            return 1;
        }
        let behind = self.results.get(first..self.own.end).unwrap_or_default();
        let other = behind
            .iter()
            .position(|result| *result != self.result_of(first));
        other.unwrap_or(self.own.end - first)
    }
}
