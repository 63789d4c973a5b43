//! The daemon's control loop, driven event by event.
//!
//! Its clock is set by hand, and its device records the actions that reach it.

use std::{
    future::{Future, pending},
    mem,
    sync::{Arc, Mutex, MutexGuard},
};

use cotenant::{
    daemon::control_loop::{Clock, ControlLoop, Perform},
    policy::{
        Arbiter,
        event::{Action, Event},
        snapshot::Snapshot,
    },
    units::Timestamp,
};
use serde::{Serialize, Serializer};

/// The control loop around an arbiter.
pub(crate) struct Driven {
    control: ControlLoop<HandClock, Notes>,
    shared: Shared,
}

/// State of clock and device between two events.
struct Moment {
    now: Timestamp,
    actions: Vec<Action>,
    state: Arc<Snapshot>,
}

#[derive(Clone)]
struct Shared(Arc<Mutex<Moment>>);

/// A clock that is set before each event.
struct HandClock(Shared);

/// A device that records actions without performing them.
struct Notes(Shared);

impl Driven {
    pub(crate) fn new(arbiter: Arbiter) -> Self {
        let state = Arc::new(arbiter.snapshot());
        Self::seen_as(arbiter, state)
    }

    fn seen_as(arbiter: Arbiter, state: Arc<Snapshot>) -> Self {
        let moment = Moment {
            now: state.at,
            actions: Vec::new(),
            state,
        };
        let shared = Shared(Arc::new(Mutex::new(moment)));
        let control = ControlLoop::new(arbiter, HandClock(shared.clone()), Notes(shared.clone()));
        Self { control, shared }
    }

    /// Passes an event to the loop at `now`; returns the decisions, in order.
    pub(crate) fn handle(&mut self, now: Timestamp, event: Event) -> Vec<Action> {
        self.shared.lock().now = now;
        self.control.handle(event);
        mem::take(&mut self.shared.lock().actions)
    }

    /// The last published state.
    pub(crate) fn state(&self) -> Arc<Snapshot> {
        Arc::clone(&self.shared.lock().state)
    }

    pub(crate) fn arbiter(&self) -> &Arbiter {
        self.control.arbiter()
    }
}

impl Clone for Driven {
    fn clone(&self) -> Self {
        Self::seen_as(self.arbiter().clone(), self.state())
    }
}

impl Serialize for Driven {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.arbiter().serialize(serializer)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Moment> {
        self.0.lock().unwrap()
    }
}

impl Clock for HandClock {
    fn now(&self) -> Timestamp {
        self.0.lock().now
    }

    fn sleep_until(&self, _at: Option<Timestamp>) -> impl Future<Output = ()> + Send {
        pending()
    }
}

impl Perform for Notes {
    fn record_event(&mut self, _now: Timestamp, _event: &Event, _arbiter: &Arbiter) {}

    /// These include answers, which the loop would deliver itself.
    fn record_actions(&mut self, _now: Timestamp, actions: &[Action]) {
        self.0.lock().actions.extend_from_slice(actions);
    }

    fn apply_plans(&mut self, _actions: &[Action]) {}

    fn publish(&mut self, _arbiter: &Arbiter, state: Arc<Snapshot>, _actions: &[Action]) {
        self.0.lock().state = state;
    }

    fn perform(&mut self, _action: Action) {}
}
