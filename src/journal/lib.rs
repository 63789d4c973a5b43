//! Events, decisions and actions as records: written, read and replayed.
//!
//! A journal is a file of JSON lines. The first line of a run holds the settings of policy; then come the events in the
//! order in which the arbiter handled them, each followed by the actions it returned. Decisions depend on nothing else,
//! so [`replay()`] reproduces them, and a journal from the field is a test case.
//!
//! ```text
//! {"sequence":1,"boot_id":"3f2c…","at":0,"unix_us":1790000000000000,"kind":"start","body":{"version":"0.1.0","params":{…}}}
//! {"sequence":2,"boot_id":"3f2c…","at":1042,"unix_us":…,"kind":"event","body":{"event":"sampled",…}}
//! {"sequence":3,"boot_id":"3f2c…","at":1042,"unix_us":…,"kind":"action","body":{"action":"sample_after",…}}
//! ```
//!
//! A checkpoint is the complete state of the arbiter between two events. One is written at the head of every file after
//! the first, and after every gap, so that a rotated file can be replayed alone. An old reader counts such a line as
//! damaged; a new reader of an old journal cannot resume within it.
//!
//! A decision is written as an enum with its figures, `{"action":"decided","decision":{"worker":{"starting":{…}}}}`,
//! and rendered as a sentence by the reader; so are reasons, answers and denials. An older reader counts a line with an
//! unknown decision or reason as damaged.
//!
//! Old readers refuse unknown events, since they cannot replay them; new readers accept old lines unless a required
//! field is missing.

mod book;
mod entry;
mod headline;
mod own;
mod read;
mod rebuilt;
mod recent;
mod render;
mod replay;
mod why;
mod write;

pub use self::{
    book::{BookError, BookFile, FoundBook, SavedBook},
    entry::{Content, JournalEntry, Start},
    headline::{Headline, HeadlineKind, Headlines},
    own::open_own,
    read::{Contents, ReadError, read},
    rebuilt::Rebuilt,
    recent::recent,
    render::{render, render_action},
    replay::{Difference, Outcome, Run, replay},
    why::{Chosen, Why, WhyError, answer_to, why},
    write::{Journal, JournalError, JournalSettings},
};
