//! Drafts: tokens that are likely to come next, since they followed the same tokens before.
//!
//! ```text
//!   … turn on the lamp in the hall. … the lamp in ▏
//!                 └──── match ────┘└─ draft ─┘
//! ```
//!
//! A pass computes a draft with the next token; those that the model would have chosen stay. An answer is the same with drafts
//! as without. How many are worth it follows from how many were right after matches of the same length, and from how much longer
//! a pass takes with them: on a processor a quarter of a pass for each, nothing where layers are read from disk.

use std::time::Duration;

/// How long passes of one answer take, by their tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PassSpeed {
    /// The plan that was in force.
    revision: Option<u64>,
    /// Seconds of a pass with one token; none while it is not known.
    one: Option<f64>,
    /// What each further token adds, as a share of that.
    more: Option<f64>,
}

impl PassSpeed {
    /// Forgets what was measured with another plan in force.
    pub(super) fn with_plan(&mut self, revision: Option<u64>) {
        if self.revision != revision {
            *self = Self {
                revision,
                ..Self::default()
            };
        }
    }

    /// Notes how long a pass took.
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

    /// What a pass with so many tokens takes, in passes with one; none while it is not known.
    fn cost(&self, tokens: usize) -> Option<f64> {
        self.one?;
        let more = self.more.unwrap_or(MORE_UNKNOWN);
        Some(1.0 + more * float(tokens.saturating_sub(1)))
    }
}

/// Drafts of one answer.
#[derive(Clone, Debug)]
pub(super) struct Drafter {
    /// How often a drafted token was right, by the length of the match.
    right: [f64; MATCH_MAX + 1],
    /// The match of the draft under way.
    matched: usize,
    /// Passes since the last one with a draft.
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
            matched: 0,
            without: 0,
        }
    }
}

impl Drafter {
    /// What is likely to follow `tokens`, at most `most` of it, and only as much as makes the answer faster.
    pub(super) fn draft(&mut self, tokens: &[u32], most: usize, speed: PassSpeed) -> Vec<u32> {
        self.without = self.without.saturating_add(1);
        // What a pass takes is measured again now and then.
        if most == 0 || self.without.is_multiple_of(ALONE_EVERY) {
            return Vec::new();
        }
        let Some((start, matched)) = last_match(tokens) else {
            return Vec::new();
        };
        let right = self.right.get(matched).copied().unwrap_or(0.0);
        let mut count = worth(right, most, speed);
        if count == 0 && self.without >= TRY_EVERY && speed.cost(1).is_some() {
            count = 1;
        }
        if count > 0 {
            self.matched = matched;
        }
        // A draft that reaches the end of the text goes on with itself.
        let mut draft: Vec<u32> = Vec::with_capacity(count);
        for number in 0..count {
            let token = tokens.get(start + number).copied();
            let token = token.or_else(|| draft.get(start + number - tokens.len()).copied());
            draft.extend(token);
        }
        draft
    }

    /// Notes how many tokens of the last draft were right.
    pub(super) fn verified(&mut self, accepted: usize, drafted: usize) {
        let Some(right) = self.right.get_mut(self.matched) else {
            return;
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

/// How many drafted tokens make an answer fastest, each of which is right so often once those before it are.
fn worth(right: f64, most: usize, speed: PassSpeed) -> usize {
    let (mut best, mut count) = (1.0 + GAIN_MIN, 0);
    let (mut said, mut all_right) = (1.0, 1.0);
    for tokens in 1..=most {
        all_right *= right;
        said += all_right;
        let Some(cost) = speed.cost(tokens + 1) else {
            return 0;
        };
        if said / cost > best {
            (best, count) = (said / cost, tokens);
        }
    }
    count
}

/// Where the longest match of the end of `tokens` ends, of several the last one, and its length.
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

/// A mean that forgets: one part in eight is new.
fn mean(known: Option<f64>, new: f64) -> f64 {
    known.map_or(new, |known| known + (new - known) / 8.0)
}

fn float(tokens: usize) -> f64 {
    f64::from(u32::try_from(tokens).unwrap_or(u32::MAX))
}

/// The shortest match. Our choice: a pair of words is followed by the same one too seldom.
const MATCH_MIN: usize = 2;
/// From this length on a match is taken to be a repetition.
const MATCH_LONG: usize = 4;
/// Longer matches count as one of this length.
const MATCH_MAX: usize = 8;
/// How often a drafted token is taken to be right before any was verified, after a short match and after a long one. Measured:
/// SmolLM2 135M repeats itself after 2 and 3 equal tokens in about a quarter of all cases, after 4 and more in three of four.
const RIGHT_SHORT: f64 = 0.25;
const RIGHT_LONG: f64 = 0.75;
/// What a further token is taken to add to a pass before it was measured: two cores with AVX-512, SmolLM2 135M Q4_1.
const MORE_UNKNOWN: f64 = 0.25;
/// The least gain of a draft over none: less than what its time is judged by varies.
const GAIN_MIN: f64 = 0.05;
/// After so many passes without a draft one token is drafted, to learn whether it pays by now: 1 % of the time at most.
const TRY_EVERY: u32 = 32;
/// One pass of so many is computed without a draft, whatever it is worth: what a pass takes changes with the context.
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
        let draft = drafter.draft(&[5, 1, 2, 3, 4, 8, 9, 7, 6, 1, 2, 3, 4], 3, free);
        assert_eq!(draft, [8, 9, 7]);
        let draft = drafter.draft(&[1, 2, 1, 2, 1, 2, 1, 2, 1], 7, free);
        assert_eq!(draft, [2, 1, 2, 1, 2, 1, 2]);
    }

    #[test]
    fn nothing_is_drafted_before_the_speed_is_known_nor_where_it_does_not_pay() {
        let repeats: Vec<u32> = (0..40).map(|number| number % 10).collect();
        let mut drafter = Drafter::default();
        assert!(drafter.draft(&repeats, 7, PassSpeed::default()).is_empty());
        assert!(!drafter.draft(&repeats, 7, speed(1.0, 1.1)).is_empty());
        assert!(drafter.draft(&repeats, 7, speed(1.0, 2.0)).is_empty());
        assert!(drafter.draft(&repeats, 0, speed(1.0, 1.0)).is_empty());
        // Drafts that are wrong become fewer, and are tried now and then.
        let (mut passes, mut drafted) = (0, 0);
        for _ in 0..400 {
            let draft = drafter.draft(&repeats, 7, speed(1.0, 1.25));
            passes += 1;
            drafted += draft.len();
            if !draft.is_empty() {
                drafter.verified(0, draft.len());
            }
        }
        assert!(drafted < passes / 8, "{drafted} of {passes}");
    }

    #[test]
    fn another_plan_has_another_speed() {
        let mut speed = speed(1.0, 1.5);
        speed.with_plan(None);
        assert!(speed.cost(2).is_some());
        speed.with_plan(Some(3));
        assert!(speed.cost(2).is_none());
    }
}
