//! Tickets: each is answered exactly once; a cancelled one at most once.

use std::collections::BTreeMap;

use cotenant::policy::{
    event::{Action, Event},
    lease::Ticket,
};

use super::{Checker, Step};

#[derive(Default)]
pub(crate) struct Tickets(BTreeMap<Ticket, State>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    Cancelled,
    Answered,
}

impl Tickets {
    /// Unanswered tickets.
    pub(crate) fn open(&self) -> Vec<Ticket> {
        self.0
            .iter()
            .filter(|(_, state)| **state == State::Open)
            .map(|(ticket, _)| *ticket)
            .collect()
    }
}

impl Checker for Tickets {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        match step.event {
            Event::LeaseRequestCancelled { ticket } => {
                let state = self.0.entry(*ticket).or_insert(State::Cancelled);
                if *state == State::Open {
                    *state = State::Cancelled;
                }
            }
            event => {
                let opened = event.ticket().map(|ticket| (ticket, State::Open));
                self.0.extend(opened);
            }
        }
        for action in step.actions {
            if let Action::Answer { ticket, .. } = action {
                match self.0.insert(*ticket, State::Answered) {
                    Some(State::Open | State::Cancelled) => {}
                    Some(State::Answered) => return Err(format!("{ticket:?} is answered twice")),
                    None => return Err(format!("{ticket:?} is answered and was never asked")),
                }
            }
        }
        Ok(())
    }
}
