//! Speculative decoding by n-gram lookup in prompt and answer, or by the model's draft block.
//!
//! ```text
//!   … turn on the lamp in the hall. … the lamp in ▏
//!                 └──── match ────┘└─ draft ─┘
//! ```
//!
//! One pass computes the next token and the draft; the sampler accepts drafted tokens as long as they equal its own
//! choices, so drafting never changes an answer. The draft length follows from the acceptance rate by match length and
//! from the measured cost of additional tokens in a pass: high when computing is the bottleneck, near zero when layers
//! are read from disk. The block has an acceptance rate beside those of the matches, which is kept from answer to answer;
//! the source with the highest rate drafts.

use std::time::Duration;

/// Measured pass time by number of tokens, and the measured cost and success of the draft block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PassSpeed {
    /// Revision of the plan in force during the measurement.
    revision: Option<u64>,
    /// Seconds of a pass with one token, if measured.
    one: Option<f64>,
    /// Cost of each additional token, relative to `one`.
    more: Option<f64>,
    /// Cost of a token drafted by the block, relative to `one`.
    block: Option<f64>,
    /// Acceptance rate of the block, of all answers.
    right: Option<f64>,
}

/// Source of the next draft.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Draft {
    /// The draft block, for this many tokens.
    Block(usize),
    /// Earlier tokens; none if drafting does not pay.
    Earlier(Vec<u32>),
}

impl PassSpeed {
    /// Discards times of another plan.
    pub(super) fn with_plan(&mut self, revision: Option<u64>) {
        if self.revision != revision {
            *self = Self {
                revision,
                right: self.right,
                ..Self::default()
            };
        }
    }

    /// Records the time of a pass.
    pub(super) fn took(&mut self, tokens: usize, took: Duration) {
        let took = took.as_secs_f64();
        match (self.one, tokens) {
            (_, 0) | (None, 2..) => {}
            (one, 1) => self.one = Some(mean(one, took)),
            (Some(one), tokens) => {
                let share = (took / one.max(1e-9) - 1.0) / float(tokens - 1);
                self.more = Some(mean(self.more, share.max(0.0)));
            }
        }
    }

    /// Records the time in which the block drafted `tokens` tokens.
    pub(super) fn drafted(&mut self, tokens: usize, took: Duration) {
        if let (Some(one), 1..) = (self.one, tokens) {
            let share = took.as_secs_f64() / one.max(1e-9) / float(tokens);
            self.block = Some(mean(self.block, share));
        }
    }

    /// Cost of a pass with `drafted` tokens beside the next one, and of drafting them, relative to a pass with one token;
    /// `None` until that is measured.
    fn cost(&self, drafted: usize, by_block: bool) -> Option<f64> {
        self.one?;
        let mut each = self.more.unwrap_or(MORE_UNKNOWN);
        if by_block {
            each += self.block.unwrap_or(BLOCK_UNKNOWN);
        }
        Some(1.0 + each * float(drafted))
    }
}

/// Draft state of one answer.
#[derive(Clone, Debug)]
pub(super) struct Drafter {
    /// Acceptance rate by match length.
    right: [f64; MATCH_MAX + 1],
    /// Match length of the pending draft; [`BLOCK`] if the block drafted it.
    pending: usize,
    /// Passes since the last rejected draft.
    without: u32,
}

impl Default for Drafter {
    fn default() -> Self {
        let mut right = [RIGHT_SHORT; MATCH_MAX + 1];
        for right in right.iter_mut().skip(MATCH_LONG) {
            *right = RIGHT_LONG;
        }
        Self {
            right,
            pending: 0,
            without: 0,
        }
    }
}

impl Drafter {
    /// Drafts at most `most` tokens to follow `tokens`, or says how many the block is to draft if the model `has_block`.
    pub(super) fn draft(
        &mut self,
        tokens: &[u32],
        most: usize,
        speed: PassSpeed,
        has_block: bool,
    ) -> Draft {
        self.without = self.without.saturating_add(1);
        let nothing = Draft::Earlier(Vec::new());
        // Measure the pass without a draft periodically.
        if most == 0 || self.without.is_multiple_of(ALONE_EVERY) {
            return nothing;
        }
        let rate = |pending: usize| match self.right.get(pending) {
            Some(right) => *right,
            None => speed.right.unwrap_or(RIGHT_LONG),
        };
        let matched = last_match(tokens);
        let by_block = has_block && matched.is_none_or(|(_, length)| rate(BLOCK) >= rate(length));
        let (start, pending) = match matched {
            _ if by_block => (0, BLOCK),
            Some(matched) => matched,
            None => return nothing,
        };
        let mut count = worth(rate(pending), most, speed, by_block);
        if count == 0 && self.without >= TRY_EVERY && speed.cost(1, by_block).is_some() {
            count = 1;
        }
        if count > 0 {
            self.pending = pending;
        }
        if by_block {
            return Draft::Block(count);
        }
        // Beyond the end of the text, the draft repeats itself.
        let mut draft: Vec<u32> = Vec::with_capacity(count);
        for number in 0..count {
            let token = tokens.get(start + number).copied();
            let token = token.or_else(|| draft.get(start + number - tokens.len()).copied());
            draft.extend(token);
        }
        Draft::Earlier(draft)
    }

    /// Records the outcome of the last draft.
    pub(super) fn verified(&mut self, accepted: usize, drafted: usize, speed: &mut PassSpeed) {
        let right = match self.right.get_mut(self.pending) {
            Some(right) => right,
            None => speed.right.get_or_insert(RIGHT_LONG),
        };
        for _ in 0..accepted {
            *right = mean(Some(*right), 1.0);
        }
        if accepted < drafted {
            *right = mean(Some(*right), 0.0);
        }
        if accepted == 0 {
            self.without = 0;
        }
    }
}

/// Draft length with the highest tokens per time, given the acceptance rate of each token.
fn worth(right: f64, most: usize, speed: PassSpeed, by_block: bool) -> usize {
    let (mut best, mut count) = (1.0 + GAIN_MIN, 0);
    let (mut said, mut all_right) = (1.0, 1.0);
    for tokens in 1..=most {
        all_right *= right;
        said += all_right;
        let Some(cost) = speed.cost(tokens, by_block) else {
            return 0;
        };
        if said / cost > best {
            (best, count) = (said / cost, tokens);
        }
    }
    count
}

/// End and length of the longest earlier match of the end of `tokens`; the last one of equals.
fn last_match(tokens: &[u32]) -> Option<(usize, usize)> {
    let (last, before) = tokens.split_last()?;
    let mut found: Option<(usize, usize)> = None;
    for (at, token) in before.iter().enumerate().rev() {
        if token != last {
            continue;
        }
        let own = tokens.iter().rev().take(MATCH_MAX);
        let other = before.iter().take(at + 1).rev();
        let length = own.zip(other).take_while(|(own, other)| own == other);
        let length = length.count();
        if length >= MATCH_MIN && found.is_none_or(|(_, longest)| length > longest) {
            found = Some((at + 1, length));
            if length == MATCH_MAX {
                break;
            }
        }
    }
    found
}

/// Exponential moving average with a weight of 1/8.
fn mean(known: Option<f64>, new: f64) -> f64 {
    known.map_or(new, |known| known + (new - known) / 8.0)
}

fn float(tokens: usize) -> f64 {
    f64::from(u32::try_from(tokens).unwrap_or(u32::MAX))
}

/// Shortest match. Our choice.
const MATCH_MIN: usize = 2;
/// Matches of this length start with [`RIGHT_LONG`]. Our choice.
const MATCH_LONG: usize = 4;
/// Longer matches count as one of this length.
const MATCH_MAX: usize = 8;
/// In place of the length of a match.
const BLOCK: usize = MATCH_MAX + 1;
/// Acceptance rates assumed before the first verification, for short matches and for long ones and the block. Our choice; the rates of the
/// answer replace them.
const RIGHT_SHORT: f64 = 0.25;
const RIGHT_LONG: f64 = 0.75;
/// Cost assumed for each additional token until measured. Two cores of an EPYC with AVX-512, SmolLM2 135M Q4_1: a pass
/// of four answers takes 1.8 times as long as of one.
const MORE_UNKNOWN: f64 = 0.25;
/// Cost assumed for a token drafted by the block until measured: its share of the bytes that a token needs, with the
/// frequent rows of the head. 0.06 for Qwen3.5 0.8B.
const BLOCK_UNKNOWN: f64 = 0.1;
/// Minimum expected gain. Our choice: a margin for the variance of the estimates.
const GAIN_MIN: f64 = 0.05;
/// Passes after which one token is drafted although drafting does not pay, to update the rate. At the assumed cost, 0.8
/// % of the time.
const TRY_EVERY: u32 = 32;
/// Passes after which one is computed without a draft, since pass time changes with the context. Our choice.
const ALONE_EVERY: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn speed(one: f64, two: f64) -> PassSpeed {
        let mut speed = PassSpeed::default();
        speed.took(1, Duration::from_secs_f64(one));
        speed.took(2, Duration::from_secs_f64(two));
        speed
    }

    fn earlier(drafter: &mut Drafter, tokens: &[u32], most: usize, speed: PassSpeed) -> Vec<u32> {
        match drafter.draft(tokens, most, speed, false) {
            Draft::Earlier(draft) => draft,
            Draft::Block(_) => panic!("there is no block"),
        }
    }

    #[test]
    fn the_longest_match_wins_and_of_equals_the_last() {
        assert_eq!(last_match(&[1, 2, 3, 4, 9, 2, 3, 7, 1, 2, 3]), Some((3, 3)));
        assert_eq!(last_match(&[2, 3, 4, 2, 3, 5, 2, 3]), Some((5, 2)));
        assert_eq!(last_match(&[1, 2, 3, 4, 3]), None);
        assert_eq!(last_match(&[]), None);
        assert_eq!(last_match(&[7]), None);
    }

    #[test]
    fn a_draft_goes_on_with_what_followed_and_with_itself() {
        let mut drafter = Drafter::default();
        let free = speed(1.0, 1.0);
        let draft = earlier(
            &mut drafter,
            &[5, 1, 2, 3, 4, 8, 9, 7, 6, 1, 2, 3, 4],
            3,
            free,
        );
        assert_eq!(draft, [8, 9, 7]);
        let draft = earlier(&mut drafter, &[1, 2, 1, 2, 1, 2, 1, 2, 1], 7, free);
        assert_eq!(draft, [2, 1, 2, 1, 2, 1, 2]);
    }

    #[test]
    fn nothing_is_drafted_before_the_speed_is_known_nor_where_it_does_not_pay() {
        let repeats: Vec<u32> = (0..40).map(|number| number % 10).collect();
        let mut drafter = Drafter::default();
        assert!(earlier(&mut drafter, &repeats, 7, PassSpeed::default()).is_empty());
        assert!(!earlier(&mut drafter, &repeats, 7, speed(1.0, 1.1)).is_empty());
        assert!(earlier(&mut drafter, &repeats, 7, speed(1.0, 2.0)).is_empty());
        assert!(earlier(&mut drafter, &repeats, 0, speed(1.0, 1.0)).is_empty());
        // Rejected drafts become rare.
        let (mut passes, mut drafted) = (0, 0);
        for _ in 0..400 {
            let draft = earlier(&mut drafter, &repeats, 7, speed(1.0, 1.25));
            passes += 1;
            drafted += draft.len();
            if !draft.is_empty() {
                drafter.verified(0, draft.len(), &mut PassSpeed::default());
            }
        }
        assert!(drafted < passes / 8, "{drafted} of {passes}");
    }

    #[test]
    fn another_plan_has_another_speed() {
        let mut speed = speed(1.0, 1.5);
        speed.with_plan(None);
        assert!(speed.cost(1, false).is_some());
        speed.with_plan(Some(3));
        assert!(speed.cost(1, false).is_none());
    }

    #[test]
    fn the_source_with_the_best_rate_drafts() {
        let long: Vec<u32> = (0..40).map(|number| number % 10).collect();
        let (mut drafter, mut fast) = (Drafter::default(), speed(1.0, 1.1));
        // Without a match, only the block can.
        assert!(matches!(
            drafter.draft(&[1, 2, 3], 7, fast, true),
            Draft::Block(1..)
        ));
        assert_eq!(
            drafter.draft(&[1, 2, 3], 7, fast, false),
            Draft::Earlier(Vec::new())
        );
        for _ in 0..20 {
            assert!(matches!(
                drafter.draft(&[1, 2, 3], 7, fast, true),
                Draft::Block(_)
            ));
            drafter.verified(0, 1, &mut fast);
        }
        assert!(matches!(
            drafter.draft(&long, 7, fast, true),
            Draft::Earlier(_)
        ));
        // It is asked for nothing while it does not pay.
        let asked = (0..TRY_EVERY - 2).map(|_| drafter.draft(&[1, 2, 3], 7, fast, true));
        assert!(asked.into_iter().all(|draft| draft == Draft::Block(0)));
        // Now and then a pass is measured without a draft, and a draft is tried.
        let asked = [(); 2].map(|()| drafter.draft(&[1, 2, 3], 7, fast, true));
        assert_eq!(asked, [Draft::Earlier(Vec::new()), Draft::Block(1)]);
        // The next answer knows, and another plan changes nothing about it.
        fast.with_plan(Some(3));
        fast.took(1, Duration::from_secs(1));
        let mut next = Drafter::default();
        assert_eq!(next.draft(&[1, 2, 3], 7, fast, true), Draft::Block(0));
    }

    #[test]
    fn the_time_of_the_block_counts() {
        let (mut drafter, mut slow) = (Drafter::default(), speed(1.0, 1.1));
        slow.drafted(2, Duration::from_secs(2));
        assert_eq!(drafter.draft(&[1, 2, 3], 7, slow, true), Draft::Block(0));
    }
}
