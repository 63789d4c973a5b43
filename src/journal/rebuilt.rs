//! Arbiter rebuilt from the lines of a journal.

use super::{Content, JournalEntry};
use cotenant_policy::{arbiter::Arbiter, event::Event};

/// State of the arbiter after the lines so far; none between a gap and the next checkpoint.
#[derive(Debug, Default)]
pub struct Rebuilt {
    pub(super) arbiter: Option<Arbiter>,
    boot_id: String,
    last: u64,
}

impl Rebuilt {
    /// Takes the next line. For an event, returns it with the arbiter, if there is one; the caller handles the event.
    pub fn at<'a>(&mut self, entry: &'a JournalEntry) -> Option<(&mut Arbiter, &'a Event)> {
        if entry.sequence != self.last + 1 || entry.boot_id != self.boot_id {
            self.arbiter = None;
            self.boot_id.clone_from(&entry.boot_id);
        }
        self.last = entry.sequence;
        match &entry.content {
            Content::Start(_) | Content::Checkpoint(_) => {
                self.arbiter = begun(&entry.content).and_then(Result::ok);
            }
            Content::Dropped { .. } => self.arbiter = None,
            Content::Action(_) => {}
            Content::Event(event) => return self.arbiter.as_mut().map(|arbiter| (arbiter, event)),
        }
        None
    }
}

/// Returns the arbiter of a line with a complete state, or the reason why it is unusable; `None` for other lines.
pub(super) fn begun(content: &Content) -> Option<Result<Arbiter, String>> {
    match content {
        Content::Start(start) => {
            Some(Arbiter::new(start.params.clone()).map_err(|error| error.to_string()))
        }
        Content::Checkpoint(checkpoint) => Some(
            (**checkpoint)
                .clone()
                .resume()
                .map_err(|error| error.to_string()),
        ),
        Content::Event(_) | Content::Action(_) | Content::Dropped { .. } => None,
    }
}
