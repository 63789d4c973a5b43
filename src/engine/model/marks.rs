//! Places of the sequence where prompts part, with copies of the recurrent state and of windows there.
//!
//! ```text
//!   conversation A   s s s s s s a a a a a a a|a       s: what both begin with
//!   conversation B   s s s s s s|b b b b b b b|b
//!                               fork          end
//! ```
//!
//! A conversation usually parts from its own last prompt near the end of that; another conversation where the two differ
//! first, which is known when the second of them is read. Each kind of place has copies of its own, so that a conversation
//! that goes on does not push out what the others go on from.

use crate::kv::Copy as KvCopy;

/// Why a later prompt may part from the sequence at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Another conversation has parted here.
    Fork,
    /// The conversation itself, where its prompt ends.
    End,
}

/// The copies of one sequence, and where the next pass makes more.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// By position.
    taken: Vec<Mark>,
    /// Where the next pass is to make one of each kind, as long as it has not come by.
    fork: Option<u32>,
    end: Option<u32>,
    /// Prompts so far.
    prompt: u64,
}

/// A place of a sequence that it can be cut back to. Several sequences may have the copy in common.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    pub(super) position: u32,
    pub(super) copy: KvCopy,
    kind: Kind,
    /// The prompt that has made it, or the last one that parted there.
    used: u64,
}

impl Mark {
    /// A mark that no pass has made: of an end, unless it `is_fork`.
    pub(super) const fn of(position: u32, copy: KvCopy, is_fork: bool) -> Self {
        Self {
            position,
            copy,
            kind: if is_fork { Kind::Fork } else { Kind::End },
            used: 0,
        }
    }

    pub(super) fn is_fork(&self) -> bool {
        self.kind == Kind::Fork
    }
}

impl Marks {
    /// All of them, by position.
    pub(super) fn all(&self) -> &[Mark] {
        &self.taken
    }

    /// The last place.
    pub(super) fn last(&self) -> Option<&Mark> {
        self.taken.last()
    }

    /// Gives up all copies, and marks nothing.
    pub(super) fn clear(&mut self) {
        self.taken.clear();
        self.forget_wanted();
    }

    /// The sequence is one that has these.
    pub(super) fn take_up(&mut self, taken: Vec<Mark>) {
        self.taken = taken;
    }

    /// Marks nothing in the next pass.
    pub(super) const fn forget_wanted(&mut self) {
        (self.fork, self.end) = (None, None);
    }

    /// Gives up the copies behind the first `common` tokens, which is all that the next prompt shares with the sequence.
    pub(super) fn part_at(&mut self, common: u32) {
        self.prompt += 1;
        self.taken.retain(|mark| mark.position <= common);
        if let Some(last) = self.taken.last_mut()
            && last.serves(common)
        {
            last.used = self.prompt;
        }
    }

    /// Wants a copy where the prompt parts from another conversation, unless there is one that serves as well.
    pub(super) fn want_fork(&mut self, position: u32) {
        let is_served = self.taken.iter().any(|mark| mark.serves(position));
        self.fork = (position >= FORK_MIN && !is_served).then_some(position);
    }

    /// Wants a copy where the prompt will part from what follows it.
    pub(super) fn want_end(&mut self, position: u32) {
        self.end = Some(position).filter(|position| *position > 0);
    }

    /// The first place behind `position` where a chunk is to end for a copy: while it `streams` only for a fork, which saves
    /// each later prompt more than the one reading of the layers that the cut costs.
    pub(super) fn next(&self, position: u32, streams: bool) -> Option<u32> {
        let end = self.end.filter(|_| !streams);
        self.fork
            .into_iter()
            .chain(end)
            .filter(|wanted| *wanted > position)
            .min()
    }

    /// The kinds of which a copy is to be made now: where one is wanted, or the last chunk of `chunk` tokens ends before it.
    pub(super) fn due(&mut self, position: u32, chunk: u32, streams: bool) -> [Option<Kind>; 2] {
        let reach = position
            .saturating_add(chunk)
            .min(self.next(position, streams).unwrap_or(u32::MAX));
        let due = |wanted: &mut Option<u32>, kind| {
            let at = (*wanted).filter(|at| position >= *at || reach > *at)?;
            *wanted = None;
            (position <= at).then_some(kind)
        };
        let (mut fork, mut end) = (self.fork, self.end);
        let kinds = [due(&mut fork, Kind::Fork), due(&mut end, Kind::End)];
        (self.fork, self.end) = (fork, end);
        kinds
    }

    /// Wants no copy at a fork.
    pub(super) const fn forget_fork(&mut self) {
        self.fork = None;
    }

    /// Gives up a copy where there are as many of this kind as there may be.
    pub(super) fn make_room(&mut self, kind: Kind) {
        let most = match kind {
            Kind::Fork => FORKS_MAX,
            Kind::End => ENDS_MAX,
        };
        if self.taken.iter().filter(|mark| mark.kind == kind).count() >= most {
            self.pop(|mark| mark.kind == kind);
        }
    }

    /// Gives up a copy for another one: where this prompt has parted from another conversation, that one is likely to part from
    /// this one next. Says whether there was one.
    pub(super) fn pop_for_another(&mut self) -> bool {
        let prompt = self.prompt;
        self.pop(|mark| mark.kind == Kind::End || mark.used < prompt)
    }

    /// Gives up the first of several ends; says whether there was one.
    pub(super) fn pop_spare(&mut self) -> bool {
        take_spare(&mut self.taken)
    }

    /// Whether a copy of `position` is there.
    pub(super) fn has(&self, position: u32) -> bool {
        self.taken.iter().any(|mark| mark.position == position)
    }

    /// Takes a copy.
    pub(super) fn put(&mut self, kind: Kind, position: u32, copy: KvCopy) {
        self.taken.push(Mark {
            position,
            copy,
            kind,
            used: self.prompt,
        });
        self.taken.sort_by_key(|mark| mark.position);
    }

    /// Gives up the copy among some that is missed least; says whether there was one.
    pub(super) fn pop(&mut self, among: impl Fn(&Mark) -> bool) -> bool {
        let index = self.least_useful(among);
        if let Some(index) = index {
            self.taken.remove(index);
        }
        index.is_some()
    }

    /// The copy among some that is missed least: the first of the ends, or the fork that saves the fewest tokens.
    fn least_useful(&self, among: impl Fn(&Mark) -> bool) -> Option<usize> {
        let before = |index: usize| {
            let before = index.checked_sub(1).and_then(|index| self.taken.get(index));
            before.map_or(0, |mark| mark.position)
        };
        let marks = self
            .taken
            .iter()
            .enumerate()
            .filter(|(_, mark)| among(mark));
        let saves = |index: usize, mark: &Mark| match mark.kind {
            Kind::End => (false, 0),
            Kind::Fork => (true, mark.position.saturating_sub(before(index))),
        };
        marks
            .min_by_key(|(index, mark)| saves(*index, mark))
            .map(|(index, _)| index)
    }
}

impl Mark {
    /// Whether a prompt that parts at `position` may as well go on from it.
    fn serves(&self, position: u32) -> bool {
        position
            .checked_sub(self.position)
            .is_some_and(|behind| behind < FORK_NEAR)
    }
}

/// Takes the first end from a conversation that has several; says whether it has.
pub(super) fn take_spare(marks: &mut Vec<Mark>) -> bool {
    let is_end = |mark: &Mark| mark.kind == Kind::End;
    let is_spare = marks.iter().filter(|mark| is_end(mark)).count() > 1;
    let first = marks.iter().position(is_end).filter(|_| is_spare);
    if let Some(first) = first {
        marks.remove(first);
    }
    first.is_some()
}

/// The last two prompts: one that goes on from the last, and one that goes on from the one before (an answer that is
/// asked for again).
const ENDS_MAX: usize = 2;
/// What all conversations have in common, and what some of them have beyond that.
const FORKS_MAX: usize = 2;
/// Fewer tokens than this take no longer to read than a copy.
const FORK_MIN: u32 = 64;
/// Our choice: so few tokens are read again rather than copied for.
const FORK_NEAR: u32 = 16;
