//! Events and actions as lines, to write, to read, and to feed through the arbiter again.
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
//! made a sentence where it is read. A reader of an older version counts such a line as damaged, as a newer one does
//! with a decision that it has no enum for.
//!
//! Old readers refuse events that they do not know, since they cannot replay them; new readers take old lines as long as
//! no field that they need is missing.

mod book;
mod compare;
mod entry;
mod read;
mod render;
mod replay;
mod why;
mod write;

use serde::{Deserialize, Serialize};

pub use self::{
    book::{BookError, BookFile, SavedBook},
    compare::{Comparison, Differing, Tally, compare},
    read::{Contents, ReadError, read},
    render::{name, render, render_action, render_decision, render_lease_end},
    replay::{Difference, Outcome, Run, replay},
    why::{Chosen, Why, WhyError, answer_to, why},
    write::{Journal, JournalError, JournalSettings},
};
use crate::{
    policy::{
        arbiter::Checkpoint,
        event::{Action, Event},
        params::Params,
    },
    units::Timestamp,
};

/// A line of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct JournalEntry {
    /// Its number in this run, from 1, without gaps unless lines were dropped.
    pub sequence: u64,
    /// Names the run of the supervisor.
    pub boot_id: String,
    /// Time since the start of the run, µs.
    pub at: Timestamp,
    /// The same by the wall clock, µs since 1970.
    pub unix_us: u64,
    /// What it says.
    #[serde(flatten)]
    pub content: Content,
}

/// What a line says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", content = "body")]
pub enum Content {
    /// The supervisor started.
    Start(Box<Start>),
    /// The arbiter was told.
    Event(Event),
    /// The arbiter wanted it done.
    Action(Action),
    /// The whole state of the arbiter here.
    Checkpoint(Box<Checkpoint>),
    /// Lines are missing here, since the journal could not keep up.
    Dropped {
        /// How many.
        lines: u64,
    },
}

/// With what a run started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Version of the program.
    pub version: String,
    /// The settings of policy.
    pub params: Params,
}

impl Content {
    /// The start of a run of this version.
    #[must_use]
    pub fn start(params: Params) -> Self {
        Self::Start(Box::new(Start {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            params,
        }))
    }
}
