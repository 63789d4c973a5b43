//! Conversations that are kept beside the one that is computed.
//!
//! ```text
//!   system prompt ─┬─ kitchen: question, answer         parked
//!                  ├─ hall: question, answer, question  parked
//!                  └─ study: question …                 the sequence
//! ```
//!
//! Each has its tokens here and its blocks in the KV cache, where those of a beginning that several have in common are there
//! once. A prompt goes on from the conversation of its own client with which it has the most tokens in common. They take
//! capacity that the running answer does not need, and are given up one after the other when it does, or when capacity is
//! taken away.

use std::{sync::Arc, time::Instant};

use super::marks::{Mark, take_spare};
use crate::kv::Copy as KvCopy;
use cotenant_policy::kv_type::KvType;
use cotenant_units::Tokens;

/// Who asks, and what.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Conversations of other clients are not gone on from: how fast an answer begins would tell what they contain.
    pub client: Option<&'a Arc<str>>,
    /// All of its tokens.
    pub prompt: &'a [u32],
    /// The number of the request.
    pub request: u64,
}

/// How a prompt begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Selected {
    /// Its first tokens that the sequence has already.
    pub kept: u32,
    /// Where it has parted from another conversation, which may be gone on with as well.
    pub fork: Option<u32>,
}

/// A conversation: its client, and what is known of its tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Conversation {
    pub(super) client: Option<Arc<str>>,
    /// The number of its last request.
    pub(super) request: u64,
    /// Where its next prompt is likely to part from its last one.
    pub(super) end: u32,
}

/// Names a conversation whose answer is under way beside others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane(u64);

/// A conversation that is parked.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) conversation: Conversation,
    pub(super) tokens: Vec<u32>,
    /// Where it can be cut back to, of models that cannot be cut back anywhere.
    pub(super) marks: Vec<Mark>,
    /// The smallest type that any of them has been kept in.
    pub(super) kv_precision: KvType,
    /// Whether a later prompt of the same conversation is likely to have taken its place: one that has everything in common
    /// with it up to its end.
    pub(super) is_superseded: bool,
    /// When it was parked, by a count of all.
    pub(super) turn: u64,
    pub(super) since: Instant,
    /// Whether its answer is under way: it is given up for nothing then.
    pub(super) is_lane: bool,
    /// Its recurrent state, while its answer is under way; `None` where it was lost, and of models without.
    pub(super) state: Option<KvCopy>,
}

/// A conversation that is parked, for those who look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The number of its last request.
    pub request: u64,
    /// Who asked.
    pub client: Option<Arc<str>>,
    /// Tokens of it.
    pub tokens: Tokens,
    /// Tokens in blocks that other conversations have as well.
    pub shared: Tokens,
    /// Capacity that its end would free: that of its own blocks and copies.
    pub alone: Tokens,
    /// Whether another one is likely to have taken its place.
    pub is_superseded: bool,
    /// When it was parked.
    pub since: Instant,
}

/// A conversation that a prompt may go on from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Near {
    pub(super) number: usize,
    /// Tokens that both have in common.
    pub(super) common: u32,
    /// How many of these it can be cut back to.
    pub(super) start: u32,
}

/// All that are parked, in the order of the KV cache.
#[derive(Debug, Default)]
pub(super) struct AllParked {
    all: Vec<Parked>,
    turns: u64,
}

impl AllParked {
    /// The conversation of the client that the most of the prompt can be taken from, and of equals the one that has the most in
    /// common with it; the last parked one of these. `needs_marks` says that it can be cut back to its marks only.
    pub(super) fn nearest(&self, asked: Asked<'_>, needs_marks: bool) -> Option<Near> {
        // At least one token must be left to compute, since the scores after the sequence are not kept.
        let most = u32::try_from(asked.prompt.len().saturating_sub(1)).unwrap_or(u32::MAX);
        let near = |(number, parked): (usize, &Parked)| {
            if parked.conversation.client.as_ref() != asked.client {
                return None;
            }
            let common = common_prefix(&parked.tokens, asked.prompt).min(most);
            let start = if needs_marks {
                last_within(&parked.marks, common)
            } else {
                common
            };
            let near = Near {
                number,
                common,
                start,
            };
            Some((start, common, parked.turn, near))
        };
        let all = self.all.iter().enumerate().filter_map(near);
        let nearest = all.max_by_key(|(start, common, turn, _)| (*start, *common, *turn));
        nearest.map(|(.., near)| near)
    }

    /// The copies of all.
    pub(super) fn copies(&self) -> impl Iterator<Item = &KvCopy> {
        let marks = self.all.iter().flat_map(|one| &one.marks);
        marks.map(|mark| &mark.copy).chain(self.states())
    }

    /// The states of those whose answers are under way.
    pub(super) fn states(&self) -> impl Iterator<Item = &KvCopy> {
        self.all.iter().filter_map(|one| one.state.as_ref())
    }

    /// Gives up all copies.
    pub(super) fn forget_copies(&mut self) {
        for one in &mut self.all {
            one.marks.clear();
            one.state = None;
        }
    }

    /// Gives up a mark of a conversation that has a later one as well, of the one that was parked first; says whether there was
    /// one.
    pub(super) fn pop_spare(&mut self) -> bool {
        // They are in the order in which they were parked.
        self.all.iter_mut().any(|one| take_spare(&mut one.marks))
    }

    pub(super) fn get(&self, number: usize) -> Option<&Parked> {
        self.all.get(number)
    }

    pub(super) fn get_mut(&mut self, number: usize) -> Option<&mut Parked> {
        self.all.get_mut(number)
    }

    /// Whether there are none.
    pub(super) const fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// All of them with their numbers, but those whose answers are under way.
    pub(super) fn idle(&self) -> impl Iterator<Item = (usize, &Parked)> {
        self.all.iter().enumerate().filter(|(_, one)| !one.is_lane)
    }

    /// Parks one more.
    pub(super) fn push(&mut self, mut parked: Parked) -> Lane {
        self.turns += 1;
        parked.turn = self.turns;
        self.all.push(parked);
        Lane(self.turns)
    }

    /// The answer of the one that was parked last is under way, with this state.
    pub(super) fn go_on_with_last(&mut self, state: Option<KvCopy>) {
        if let Some(last) = self.all.last_mut() {
            (last.is_lane, last.state) = (true, state);
        }
    }

    /// The number of one whose answer is under way.
    pub(super) fn number_of(&self, lane: Lane) -> Option<usize> {
        let is = |one: &Parked| one.is_lane && one.turn == lane.0;
        self.all.iter().position(is)
    }

    /// Whether the answer of one is under way.
    pub(super) fn is_lane(&self, number: usize) -> bool {
        self.all.get(number).is_some_and(|one| one.is_lane)
    }

    /// Whether that of any is.
    pub(super) fn has_lanes(&self) -> bool {
        self.all.iter().any(|one| one.is_lane)
    }

    /// Takes one out.
    pub(super) fn remove(&mut self, number: usize) {
        if number < self.all.len() {
            self.all.remove(number);
        }
    }

    /// One that goes on nothing beyond the first of these tokens, of the same client.
    pub(super) fn within(&self, client: Option<&Arc<str>>, tokens: &[u32]) -> Option<usize> {
        self.all.iter().position(|one| {
            !one.is_lane
                && one.conversation.client.as_ref() == client
                && tokens.starts_with(&one.tokens)
        })
    }

    /// One that has been kept in a smaller type than `kind`.
    pub(super) fn less_precise_than(&self, kind: KvType) -> Option<usize> {
        let is = |one: &Parked| !one.is_lane && one.kv_precision < kind;
        self.all.iter().position(is)
    }

    /// Notes that all are kept as `kind` now.
    pub(super) fn converted(&mut self, kind: KvType) {
        for one in &mut self.all {
            one.kv_precision = one.kv_precision.min(kind);
        }
    }

    /// The one that is missed least: of those that another has taken the place of, if there are any, the one that was parked
    /// first.
    pub(super) fn least_useful(&self) -> Option<usize> {
        self.idle()
            .min_by_key(|(_, one)| (!one.is_superseded, one.turn))
            .map(|(number, _)| number)
    }

    /// Whether there are more than may be, in a cache of so many tokens.
    pub(super) fn is_beyond(&self, capacity: Tokens) -> bool {
        let tokens: usize = self.all.iter().map(|one| one.tokens.len()).sum();
        let most = (capacity.get() as usize).saturating_mul(TOKENS_TIMES);
        self.all.len() > PARKED_MAX || tokens > most
    }
}

impl Conversation {
    /// Whether a prompt that has so many tokens in common with it is likely to be its own next one, and to take its place.
    pub(super) const fn is_superseded_at(&self, common: u32) -> bool {
        common > 0 && common >= self.end
    }
}

/// The last place up to `common` tokens that has a mark.
pub(super) fn last_within(marks: &[Mark], common: u32) -> u32 {
    let within = marks.iter().map(|mark| mark.position);
    within
        .filter(|position| *position <= common)
        .max()
        .unwrap_or(0)
}

/// How many tokens two sequences begin with alike.
pub fn common_prefix(one: &[u32], other: &[u32]) -> u32 {
    let common = one
        .iter()
        .zip(other)
        .take_while(|(one, other)| one == other)
        .count();
    u32::try_from(common).unwrap_or(u32::MAX)
}

/// Our choice: each is compared with each prompt.
const PARKED_MAX: usize = 64;
/// The numbers of tokens that several conversations have in common are kept with each: at most 16 bytes on the heap for each
/// token of the capacity, which takes thousands.
const TOKENS_TIMES: usize = 4;
/// A conversation of which fewer tokens would be lost is not parked: they are read as fast.
pub(super) const LOST_MIN: u32 = 16;
