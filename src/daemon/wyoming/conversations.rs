//! History of conversations, bounded in number and bytes.

use std::collections::{BTreeMap, VecDeque};

use cotenant_http::backend::{ChatMessage, Role};
use cotenant_units::Bytes;

#[derive(Debug)]
pub(super) struct Conversations {
    limit: usize,
    bytes_max: Bytes,
    known: BTreeMap<String, Conversation>,
    /// Incremented at each use.
    clock: u64,
}

#[derive(Debug, Default)]
struct Conversation {
    turns: Turns,
    used: u64,
}

/// Last turns of one conversation, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Turns(VecDeque<Turn>);

/// Question with its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Turn {
    asked: String,
    answered: String,
}

impl Turn {
    fn bytes(&self) -> Bytes {
        Bytes::of_len(self.asked.len()).saturating_add(Bytes::of_len(self.answered.len()))
    }
}

impl Turns {
    /// Drops the oldest turn; `false` if there is none.
    pub(super) fn forget_oldest(&mut self) -> bool {
        self.0.pop_front().is_some()
    }

    /// Returns the turns as messages for the LLM.
    pub(super) fn messages(&self) -> impl Iterator<Item = ChatMessage> + '_ {
        self.0.iter().flat_map(|turn| {
            [(Role::User, &turn.asked), (Role::Assistant, &turn.answered)]
                .map(|(role, content)| ChatMessage::new(role, content.clone()))
        })
    }

    fn bytes(&self) -> Bytes {
        self.0
            .iter()
            .fold(Bytes::ZERO, |sum, turn| sum.saturating_add(turn.bytes()))
    }
}

impl Conversations {
    /// Creates an empty history of at most `limit` conversations of at most `bytes_max` each.
    pub(super) const fn new(limit: usize, bytes_max: Bytes) -> Self {
        Self {
            limit,
            bytes_max,
            known: BTreeMap::new(),
            clock: 0,
        }
    }

    /// Returns the turns of a conversation so far.
    pub(super) fn recall(&mut self, id: &str) -> Turns {
        self.clock += 1;
        let clock = self.clock;
        self.known.get_mut(id).map_or_else(Turns::default, |known| {
            known.used = clock;
            known.turns.clone()
        })
    }

    /// Adds a turn. Drops the oldest turns of a conversation that grows too long, and the least recently used
    /// conversation if there are too many.
    pub(super) fn remember(&mut self, id: &str, asked: String, answered: String) {
        if self.limit == 0 || id.len() > ID_MAX {
            return;
        }
        self.clock += 1;
        let known = self.known.entry(id.to_owned()).or_default();
        known.used = self.clock;
        known.turns.0.push_back(Turn { asked, answered });
        while known.turns.bytes() > self.bytes_max && known.turns.forget_oldest() {}
        if self.known.len() > self.limit {
            let oldest = self.known.iter().min_by_key(|(_, known)| known.used);
            if let Some(id) = oldest.map(|(id, _)| id.clone()) {
                self.known.remove(&id);
            }
        }
    }
}

/// Longest name of a remembered conversation; Home Assistant's are ULIDs of 26 characters.
const ID_MAX: usize = 128;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn texts(turns: &Turns) -> Vec<String> {
        turns.messages().map(|message| message.content).collect()
    }

    #[test]
    fn a_conversation_keeps_its_last_turns_and_the_oldest_conversation_goes_first() {
        let mut kept = Conversations::new(2, Bytes::new(8));
        kept.remember("a", "1".into(), "one".into());
        kept.remember("a", "2".into(), "two".into());
        assert_eq!(texts(&kept.recall("a")), ["1", "one", "2", "two"]);
        kept.remember("a", "3".into(), "three".into());
        assert_eq!(texts(&kept.recall("a")), ["3", "three"]);
        kept.remember("b", "x".into(), "y".into());
        kept.recall("a");
        kept.remember("c", "x".into(), "y".into());
        assert!(
            texts(&kept.recall("b")).is_empty(),
            "it was not used for longest"
        );
        assert_eq!(texts(&kept.recall("a")), ["3", "three"]);
        let roles: Vec<Role> = kept
            .recall("c")
            .messages()
            .map(|message| message.role)
            .collect();
        assert_eq!(roles, [Role::User, Role::Assistant]);
    }

    proptest! {
        #[test]
        fn neither_number_nor_bytes_pass_their_limits(
            said in proptest::collection::vec(("[a-f]", ".{0,12}", ".{0,12}"), 0..60),
            limit in 0usize..4,
            bytes in 0u64..40,
        ) {
            let mut kept = Conversations::new(limit, Bytes::new(bytes));
            for (id, asked, answered) in said {
                kept.remember(&id, asked, answered);
                prop_assert!(kept.known.len() <= limit);
                prop_assert!(kept.known.values().all(|known| known.turns.bytes() <= Bytes::new(bytes)));
            }
        }
    }
}
