//! Events, decisions and actions as records: written, read and replayed.
//!
//! A journal is a file of JSON lines. The first line of a run has the settings that policy was started with; after it
//! come the events in the order in which the arbiter took them, each followed by the actions that it returned. That is
//! all that a decision depends on, so that [`replay()`] gives the same decisions, and a report from the field becomes a
//! test by copying one file.
//!
//! ```text
//! {"sequence":1,"boot_id":"3f2c…","at":0,"unix_us":1790000000000000,"kind":"start","body":{"version":"0.1.0","params":{…}}}
//! {"sequence":2,"boot_id":"3f2c…","at":1042,"unix_us":…,"kind":"event","body":{"event":"sampled",…}}
//! {"sequence":3,"boot_id":"3f2c…","at":1042,"unix_us":…,"kind":"action","body":{"action":"sample_after",…}}
//! ```
//!
//! A checkpoint is the whole state of the arbiter between two events. One stands at the head of every file that follows
//! another one, and after every gap, so that a file that was put aside can be replayed alone. An old reader counts such
//! a line as damaged; a new reader of an old journal misses nothing but the resumption.
//!
//! A decision is written as an enum with its figures, `{"action":"decided","decision":{"worker":{"starting":{…}}}}`, and
//! made a sentence where it is read; so are reasons, answers and denials. A reader of an older version counts a line with
//! a decision or reason that it has no enum for as damaged.
//!
//! Old readers refuse events that they do not know, since they cannot replay them; new readers take old lines as long as
//! no field that they need is missing.

mod book;
mod entry;
mod own;
mod read;
mod rebuilt;
mod render;
mod replay;
mod why;
mod write;

pub use self::{
    book::{BookError, BookFile, FoundBook, SavedBook},
    entry::{Content, JournalEntry, Start},
    own::open_own,
    read::{Contents, ReadError, read},
    rebuilt::Rebuilt,
    render::{render, render_action},
    replay::{Difference, Outcome, Run, replay},
    why::{Chosen, Why, WhyError, answer_to, why},
    write::{Journal, JournalError, JournalSettings},
};
