//! Marks: positions where prompts diverge, with copies of recurrent state and windows.
//!
//! ```text
//!   conversation A   s s s s s s a a a a a a a|a       s: the common prefix
//!   conversation B   s s s s s s|b b b b b b b|b
//!                               fork          end
//! ```
//!
//! The next prompt of a conversation usually diverges from the previous one near its end (`end`); another conversation
//! diverges where the two first differ (`fork`), which is known when the second one is read. Each kind has copies of
//! its own, so that a long conversation does not evict the copies that others continue from.

use crate::kv::Copy as KvCopy;

/// Why a later prompt may diverge from the sequence at a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Another conversation has diverged here.
    Fork,
    /// End of the conversation's own prompt.
    End,
}

/// Marks of one sequence, and the positions at which the next pass adds more.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// Sorted by position.
    taken: Vec<Mark>,
    /// Positions at which the next pass makes a copy of each kind; `None` if none is wanted.
    fork: Option<u32>,
    end: Option<u32>,
    /// Number of prompts so far.
    prompt: u64,
}

/// Position to which a sequence can be cut back. Several sequences may share the copy.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    pub(super) position: u32,
    pub(super) copy: KvCopy,
    kind: Kind,
    /// Number of the prompt that made it, or of the last one that diverged there.
    used: u64,
}

impl Mark {
    /// Returns a mark that no pass has made: an end, unless `is_fork`.
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
    /// All marks, sorted by position.
    pub(super) fn all(&self) -> &[Mark] {
        &self.taken
    }

    /// The last mark.
    pub(super) fn last(&self) -> Option<&Mark> {
        self.taken.last()
    }

    /// Drops all copies and the wanted positions.
    pub(super) fn clear(&mut self) {
        self.taken.clear();
        self.forget_wanted();
    }

    /// Replaces the marks by those of another sequence.
    pub(super) fn take_up(&mut self, taken: Vec<Mark>) {
        self.taken = taken;
    }

    /// Cancels the copies wanted in the next pass.
    pub(super) const fn forget_wanted(&mut self) {
        (self.fork, self.end) = (None, None);
    }

    /// Drops the copies beyond the first `common` tokens, the prefix that the next prompt shares with the sequence.
    pub(super) fn part_at(&mut self, common: u32) {
        self.prompt += 1;
        self.taken.retain(|mark| mark.position <= common);
        if let Some(last) = self.taken.last_mut()
            && last.serves(common)
        {
            last.used = self.prompt;
        }
    }

    /// Requests a copy where the prompt diverges from another conversation, unless an existing one serves.
    pub(super) fn want_fork(&mut self, position: u32) {
        let is_served = self.taken.iter().any(|mark| mark.serves(position));
        self.fork = (position >= FORK_MIN && !is_served).then_some(position);
    }

    /// Requests a copy at the position where the next prompt is expected to diverge.
    pub(super) fn want_end(&mut self, position: u32) {
        self.end = Some(position).filter(|position| *position > 0);
    }

    /// Returns the first position after `position` at which a chunk must end for a copy. While the model `streams`,
    /// only a fork counts: its copy saves each later prompt more than the extra read of the layers that splitting the
    /// chunk costs.
    pub(super) fn next(&self, position: u32, streams: bool) -> Option<u32> {
        let end = self.end.filter(|_| !streams);
        self.fork
            .into_iter()
            .chain(end)
            .filter(|wanted| *wanted > position)
            .min()
    }

    /// Returns the kinds of copies to make now: at a wanted position, or before it if another chunk of `chunk` tokens
    /// would pass it.
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

    /// Cancels a wanted copy at a fork.
    pub(super) const fn forget_fork(&mut self) {
        self.fork = None;
    }

    /// Drops a copy if this kind has reached its maximum.
    pub(super) fn make_room(&mut self, kind: Kind) {
        let most = match kind {
            Kind::Fork => FORKS_MAX,
            Kind::End => ENDS_MAX,
        };
        if self.taken.iter().filter(|mark| mark.kind == kind).count() >= most {
            self.pop(|mark| mark.kind == kind);
        }
    }

    /// Drops a copy in favour of another; forks that this prompt has used are kept, since the other conversation is
    /// likely to diverge there next. Returns whether a copy was dropped.
    pub(super) fn pop_for_another(&mut self) -> bool {
        let prompt = self.prompt;
        self.pop(|mark| mark.kind == Kind::End || mark.used < prompt)
    }

    /// As [`take_spare`].
    pub(super) fn pop_spare(&mut self, until: u32) -> bool {
        take_spare(&mut self.taken, until)
    }

    /// Whether a copy exists at `position`.
    pub(super) fn has(&self, position: u32) -> bool {
        self.taken.iter().any(|mark| mark.position == position)
    }

    /// Adds a copy.
    pub(super) fn put(&mut self, kind: Kind, position: u32, copy: KvCopy) {
        self.taken.push(Mark {
            position,
            copy,
            kind,
            used: self.prompt,
        });
        self.taken.sort_by_key(|mark| mark.position);
    }

    /// Drops the least useful copy accepted by `among`; returns whether there was one.
    pub(super) fn pop(&mut self, among: impl Fn(&Mark) -> bool) -> bool {
        let index = self.least_useful(among);
        if let Some(index) = index {
            self.taken.remove(index);
        }
        index.is_some()
    }

    /// The least useful copy accepted by `among`: the first end, else the fork that saves the fewest tokens.
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
    /// Whether a prompt that diverges at `position` can continue from this mark at little cost.
    fn serves(&self, position: u32) -> bool {
        position
            .checked_sub(self.position)
            .is_some_and(|behind| behind < FORK_NEAR)
    }
}

/// Removes the first of several ends of a conversation other than the last one up to `until`, where its next prompt is
/// likely to diverge; returns whether there was one.
pub(super) fn take_spare(marks: &mut Vec<Mark>, until: u32) -> bool {
    let is_end = |mark: &Mark| mark.kind == Kind::End;
    let kept = marks
        .iter()
        .rposition(|mark| is_end(mark) && mark.position <= until);
    let mut ends = marks.iter().enumerate().filter(|(_, mark)| is_end(mark));
    let spare = ends.find(|(index, _)| kept.is_some_and(|kept| kept != *index));
    let spare = spare.map(|(index, _)| index);
    if let Some(spare) = spare {
        marks.remove(spare);
    }
    spare.is_some()
}

/// The last two prompts: one to continue from the last, and one to continue from the one before (an answer that is
/// regenerated).
const ENDS_MAX: usize = 2;
/// The prefix common to all conversations, and a longer one common to some.
const FORKS_MAX: usize = 2;
/// Reading fewer tokens takes no longer than a copy.
const FORK_MIN: u32 = 64;
/// Maximum tokens read again instead of making a copy. Our choice.
const FORK_NEAR: u32 = 16;
