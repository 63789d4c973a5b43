//! Parked conversations: kept beside the sequence that is computed.
//!
//! ```text
//!   system prompt ─┬─ kitchen: question, answer         parked
//!                  ├─ hall: question, answer, question  parked
//!                  └─ study: question …                 the sequence
//! ```
//!
//! Each has its tokens here and its blocks in the KV cache; blocks of a common prefix are stored once. A prompt
//! continues the conversation of its own client with the longest common prefix. Parked conversations use capacity that
//! the running answer does not need, and are evicted one by one when it does or when capacity shrinks.

use std::{sync::Arc, time::Instant};

use super::marks::{Mark, take_spare};
use crate::kv::Copy as KvCopy;
use cotenant_policy::kv_type::KvType;
use cotenant_units::Tokens;

/// A prompt, its client and its request.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Conversations of other clients are not continued: the time to the first token would reveal their contents.
    pub client: Option<&'a Arc<str>>,
    /// The whole prompt.
    pub prompt: &'a [u32],
    /// The number of the request.
    pub request: u64,
}

/// Result of selecting a conversation for a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Selected {
    /// Number of the prompt's first tokens that the sequence holds already.
    pub kept: u32,
    /// Position at which the prompt diverges from another conversation that may also be continued.
    pub fork: Option<u32>,
}

/// A conversation: its client, last request and expected end.
#[derive(Clone, Debug, Default)]
pub(super) struct Conversation {
    pub(super) client: Option<Arc<str>>,
    /// The number of its last request.
    pub(super) request: u64,
    /// Position at which its next prompt is likely to diverge from its last one.
    pub(super) end: u32,
}

/// Handle of a lane: a conversation whose answer is computed beside others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane(u64);

/// A conversation that is parked.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) conversation: Conversation,
    pub(super) tokens: Vec<u32>,
    /// Positions to which it can be cut back, for models that cannot be cut back anywhere.
    pub(super) marks: Vec<Mark>,
    /// The smallest KV type that any of its tokens has been stored in.
    pub(super) kv_precision: KvType,
    /// Whether a later prompt of the same conversation, which shares its tokens up to its end, has probably replaced
    /// it.
    pub(super) is_superseded: bool,
    /// Sequence number of its parking.
    pub(super) turn: u64,
    pub(super) since: Instant,
    /// Whether it is a lane, which is never evicted.
    pub(super) is_lane: bool,
    /// Recurrent state and windows of a lane; `None` if lost, and for models without.
    pub(super) state: Option<KvCopy>,
}

/// Description of a parked conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The number of its last request.
    pub request: u64,
    /// Its client.
    pub client: Option<Arc<str>>,
    /// Its length in tokens.
    pub tokens: Tokens,
    /// Tokens in blocks shared with other conversations.
    pub shared: Tokens,
    /// Capacity that its eviction would free: its own blocks and copies.
    pub alone: Tokens,
    /// Tokens that its next prompt has to compute after its eviction, or that take as long to compute as it takes to
    /// read the saved ones.
    pub lost: Tokens,
    /// Number of the saved conversation that contains it.
    pub saved: Option<u64>,
    /// Whether another conversation has probably replaced it.
    pub is_superseded: bool,
    /// Time of parking.
    pub since: Instant,
}

/// A conversation that a prompt can continue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Near {
    pub(super) number: usize,
    /// Length of the common prefix in tokens.
    pub(super) common: u32,
    /// Length of its longest usable part.
    pub(super) start: u32,
}

/// All parked conversations, in the order of the KV cache.
#[derive(Debug, Default)]
pub(super) struct AllParked {
    all: Vec<Parked>,
    turns: u64,
    /// Number of the last prompts that continued a conversation without a part of its answer, such as the reasoning.
    omitting: u32,
}

impl AllParked {
    /// Returns the client's conversation with the longest reusable prefix of the prompt; of equals the one with the
    /// longest common prefix, then the last parked. With `needs_marks`, a conversation can be cut back to its marks
    /// only.
    pub(super) fn nearest(&self, asked: Asked<'_>, needs_marks: bool) -> Option<Near> {
        // At least one token must be computed, since the logits after the sequence are not kept.
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

    /// All copies.
    pub(super) fn copies(&self) -> impl Iterator<Item = &KvCopy> {
        let marks = self.all.iter().flat_map(|one| &one.marks);
        marks.map(|mark| &mark.copy).chain(self.states())
    }

    /// States of the lanes.
    pub(super) fn states(&self) -> impl Iterator<Item = &KvCopy> {
        self.all.iter().filter_map(|one| one.state.as_ref())
    }

    /// Drops all copies.
    pub(super) fn forget_copies(&mut self) {
        for one in &mut self.all {
            one.marks.clear();
            one.state = None;
        }
    }

    /// Drops a mark of the first parked conversation that also has a later one; returns whether there was one.
    pub(super) fn pop_spare(&mut self) -> bool {
        let omits = self.omits();
        // `all` is in the order of parking.
        let mut all = self.all.iter_mut();
        all.any(|one| take_spare(&mut one.marks, one.conversation.diverges_at(omits)))
    }

    /// Notes whether a prompt that continues a conversation of `length` tokens omits a part of its answer; it shares
    /// `common` tokens of at most `most`.
    pub(super) fn learn(&mut self, of: &Conversation, (common, most): (u32, u32), length: u32) {
        // A prompt that ends within the conversation says nothing.
        if of.is_superseded_at(common) && (common < most || common >= length) {
            let omits = common < length;
            self.omitting = if omits {
                self.omitting.saturating_add(1)
            } else {
                0
            };
        }
    }

    /// As [`Self::learn`], from a parked conversation.
    pub(super) fn learn_from(&mut self, near: Near, most: u32) {
        if let Some(parked) = self.all.get(near.number) {
            let (of, length) = (parked.conversation.clone(), parked.length());
            self.learn(&of, (near.common, most), length);
        }
    }

    /// Whether the next prompts are likely to omit parts of answers, as all have the same chat template.
    const fn omits(&self) -> bool {
        self.omitting >= OMITTING
    }

    /// Returns the last position where the next prompt of a conversation may diverge.
    pub(super) const fn diverges_at(&self, of: &Conversation) -> u32 {
        of.diverges_at(self.omits())
    }

    /// Whether a conversation, not a lane, has continued otherwise.
    pub(super) fn has_superseded(&self) -> bool {
        self.idle().any(|(_, one)| one.is_superseded)
    }

    /// Drops the first mark of a lane; returns whether there was one.
    pub(super) fn pop_of_lane(&mut self) -> bool {
        let mut lanes = self.all.iter_mut().filter(|one| one.is_lane);
        let marked = lanes.find(|one| !one.marks.is_empty());
        marked.map(|one| one.marks.remove(0)).is_some()
    }

    pub(super) fn get(&self, number: usize) -> Option<&Parked> {
        self.all.get(number)
    }

    pub(super) fn get_mut(&mut self, number: usize) -> Option<&mut Parked> {
        self.all.get_mut(number)
    }

    /// All parked conversations with their numbers, except lanes.
    pub(super) fn idle(&self) -> impl Iterator<Item = (usize, &Parked)> {
        self.all.iter().enumerate().filter(|(_, one)| !one.is_lane)
    }

    /// Parks a conversation.
    pub(super) fn push(&mut self, mut parked: Parked) -> Lane {
        self.turns += 1;
        parked.turn = self.turns;
        self.all.push(parked);
        Lane(self.turns)
    }

    /// Makes the last parked conversation a lane with this state.
    pub(super) fn go_on_with_last(&mut self, state: Option<KvCopy>) {
        if let Some(last) = self.all.last_mut() {
            (last.is_lane, last.state) = (true, state);
        }
    }

    /// Returns the number of a lane.
    pub(super) fn number_of(&self, lane: Lane) -> Option<usize> {
        let is = |one: &Parked| one.is_lane && one.turn == lane.0;
        self.all.iter().position(is)
    }

    /// Returns a lane.
    pub(super) fn of_lane(&self, lane: Lane) -> Option<&Parked> {
        self.all.get(self.number_of(lane)?)
    }

    pub(super) fn of_lane_mut(&mut self, lane: Lane) -> Option<&mut Parked> {
        let number = self.number_of(lane)?;
        self.all.get_mut(number)
    }

    /// Whether conversation `number` is a lane.
    pub(super) fn is_lane(&self, number: usize) -> bool {
        self.all.get(number).is_some_and(|one| one.is_lane)
    }

    /// Whether there are lanes.
    pub(super) fn has_lanes(&self) -> bool {
        self.all.iter().any(|one| one.is_lane)
    }

    /// Removes a conversation.
    pub(super) fn remove(&mut self, number: usize) {
        if number < self.all.len() {
            self.all.remove(number);
        }
    }

    /// Returns a conversation of the same client, not a lane, whose tokens are a prefix of `tokens`.
    pub(super) fn within(&self, client: Option<&Arc<str>>, tokens: &[u32]) -> Option<usize> {
        self.all.iter().position(|one| {
            !one.is_lane
                && one.conversation.client.as_ref() == client
                && tokens.starts_with(&one.tokens)
        })
    }

    /// Returns the copy that a conversation of the client has at the end of `prefix`.
    pub(super) fn copy_at(&self, client: Option<&Arc<str>>, prefix: &[u32]) -> Option<&KvCopy> {
        let all = self.all.iter().filter(|one| {
            one.conversation.client.as_ref() == client && one.tokens.starts_with(prefix)
        });
        let mut marks = all.flat_map(|one| &one.marks);
        let at = marks.find(|mark| mark.position as usize == prefix.len());
        at.map(|mark| &mark.copy)
    }

    /// Returns a conversation, not a lane, that has been stored in a smaller KV type than `kind`.
    pub(super) fn less_precise_than(&self, kind: KvType) -> Option<usize> {
        let is = |one: &Parked| !one.is_lane && one.kv_precision < kind;
        self.all.iter().position(is)
    }

    /// Records that all are now stored as `kind`.
    pub(super) fn converted(&mut self, kind: KvType) {
        for one in &mut self.all {
            one.kv_precision = one.kv_precision.min(kind);
        }
    }

    /// Returns the least useful conversation, not a lane: a superseded one if there is any, and of these the first
    /// parked.
    pub(super) fn least_useful(&self) -> Option<usize> {
        self.idle()
            .min_by_key(|(_, one)| (!one.is_superseded, one.turn))
            .map(|(number, _)| number)
    }

    /// Whether there are more conversations or tokens than a cache of `capacity` tokens permits.
    pub(super) fn is_beyond(&self, capacity: Tokens) -> bool {
        let tokens: usize = self.all.iter().map(|one| one.tokens.len()).sum();
        let most = (capacity.get() as usize).saturating_mul(TOKENS_TIMES);
        self.all.len() > PARKED_MAX || tokens > most
    }
}

impl Parked {
    /// Number of its tokens.
    pub(super) fn length(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }
}

impl Conversation {
    /// Returns the last position where its next prompt may diverge, if prompts omit parts of answers or do not.
    const fn diverges_at(&self, omits: bool) -> u32 {
        if omits { self.end } else { u32::MAX }
    }

    /// Whether a prompt that shares `common` tokens is probably the conversation's next one, and replaces it.
    pub(super) const fn is_superseded_at(&self, common: u32) -> bool {
        common > 0 && common >= self.end
    }
}

/// Returns the position of the last mark within the first `common` tokens; 0 if there is none.
pub(super) fn last_within(marks: &[Mark], common: u32) -> u32 {
    let within = marks.iter().map(|mark| mark.position);
    within
        .filter(|position| *position <= common)
        .max()
        .unwrap_or(0)
}

/// Length of the common prefix of two sequences, in tokens.
pub fn common_prefix(one: &[u32], other: &[u32]) -> u32 {
    let common = one
        .iter()
        .zip(other)
        .take_while(|(one, other)| one == other)
        .count();
    u32::try_from(common).unwrap_or(u32::MAX)
}

/// Prompts in a row that omit parts of answers until the next ones are expected to. One may continue an interrupted
/// answer. Our choice.
const OMITTING: u32 = 2;
/// Maximum number of parked conversations: each is compared with every prompt. Our choice.
const PARKED_MAX: usize = 64;
/// Maximum tokens of all parked conversations, as a multiple of the capacity; tokens of a common prefix are stored per
/// conversation. At most 16 bytes of heap per token of capacity, whose KV takes thousands.
const TOKENS_TIMES: usize = 4;
/// A conversation is not parked if fewer tokens would be lost: reading them again is as fast.
pub(super) const LOST_MIN: u32 = 16;
