//! The arbiter, rebuilt along the lines of a journal.

use super::{Content, JournalEntry};
use crate::policy::{arbiter::Arbiter, event::Event};

/// The arbiter as the lines so far have left it. Behind a gap there is none until the next checkpoint.
#[derive(Debug, Default)]
pub struct Rebuilt {
    arbiter: Option<Arbiter>,
    boot_id: String,
    last: u64,
}

impl Rebuilt {
    /// Takes the next line. Where it is an event and there is an arbiter to handle it, both; the caller has it handled.
    pub fn at<'a>(&mut self, entry: &'a JournalEntry) -> Option<(&mut Arbiter, &'a Event)> {
        if entry.sequence != self.last + 1 || entry.boot_id != self.boot_id {
            self.arbiter = None;
            self.boot_id.clone_from(&entry.boot_id);
        }
        self.last = entry.sequence;
        match &entry.content {
            Content::Start(start) => self.arbiter = Arbiter::new(start.params.clone()).ok(),
            Content::Checkpoint(checkpoint) => self.arbiter = (**checkpoint).clone().resume().ok(),
            Content::Dropped { .. } => self.arbiter = None,
            Content::Action(_) => {}
            Content::Event(event) => return self.arbiter.as_mut().map(|arbiter| (arbiter, event)),
        }
        None
    }
}
