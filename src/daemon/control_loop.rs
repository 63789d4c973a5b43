//! Control loop: every event to the arbiter, its actions to the device, on one path.
//!
//! ```text
//!   inbox ────┐
//!   deadline ─┴─► record ─► Arbiter::handle ─► engine plans ─► publish the state ─► perform the actions
//!                    ▲                             (at once)     │
//!                    └── the next renewal of a series ◄──────────┘ (the state is published once for the series)
//! ```
//!
//! The daemon, the simulation, the RPC tests and the fault tests of the watchdog use this loop with different [`Clock`]
//! and [`Perform`].

use std::{collections::BTreeMap, future::Future, sync::Arc};

use tokio::sync::{mpsc, oneshot};

use cotenant_memory::emergency;
use cotenant_policy::{
    arbiter::Arbiter,
    event::{Action, Answer, Event},
    lease::Ticket,
    snapshot::Snapshot,
};
use cotenant_units::{Bytes, Timestamp};

/// Clock of the loop.
pub trait Clock {
    /// Returns the time since the supervisor started; monotonic.
    fn now(&self) -> Timestamp;

    /// Waits until `at`; with `None`, never returns.
    fn sleep_until(&self, at: Option<Timestamp>) -> impl Future<Output = ()> + Send;
}

/// Device that performs actions. No method blocks: outcomes return as events.
pub trait Perform {
    /// Records an iteration of the loop.
    fn wake(&mut self, _now: Timestamp) {}

    /// Records `event`, which `arbiter` has not handled yet.
    fn record_event(&mut self, now: Timestamp, event: &Event, arbiter: &Arbiter);

    /// Records the actions of an event.
    fn record_actions(&mut self, now: Timestamp, actions: &[Action]);

    /// Passes the plans among `actions` to the engine before anything else, because other holders wait for its memory.
    fn apply_plans(&mut self, actions: &[Action]);

    /// Makes the state durable and visible. Runs before `actions` are performed, so that a caller finds the state that
    /// its answer refers to.
    fn publish(&mut self, arbiter: &Arbiter, state: Arc<Snapshot>, actions: &[Action]);

    /// Performs one action, except for answers, which the loop delivers, and plans, which are already applied.
    fn perform(&mut self, action: Action);

    /// Returns when periodic work is due, if any.
    fn next_upkeep(&self) -> Option<Timestamp> {
        None
    }

    /// Performs the periodic work that is due. `sampled` tells whether the last events included a sample.
    fn upkeep(&mut self, _now: Timestamp, _arbiter: &Arbiter, _sampled: bool) {}
}

/// Event, and the caller waiting for the answer to its ticket.
#[derive(Debug)]
pub struct Inbound {
    /// The event.
    pub event: Event,
    /// The caller.
    pub caller: Option<(Ticket, oneshot::Sender<Answer>)>,
}

/// The loop with its state.
#[derive(Debug)]
pub struct ControlLoop<C, P> {
    arbiter: Arbiter,
    clock: C,
    device: P,
    callers: BTreeMap<Ticket, oneshot::Sender<Answer>>,
    /// Actions pending until the state is published.
    decided: Vec<Action>,
    /// Free memory in the last published state.
    free: Bytes,
}

/// Events handled before periodic work is checked: a quarter of the daemon's inbox (our choice).
const BATCH_MAX: usize = 256;

impl Inbound {
    /// Returns whether the event only renews the term of one lease.
    const fn is_renewal(&self) -> bool {
        matches!(self.event, Event::LeaseRenewed(_))
    }
}

impl From<Event> for Inbound {
    fn from(event: Event) -> Self {
        Self {
            event,
            caller: None,
        }
    }
}

impl<C: Clock, P: Perform> ControlLoop<C, P> {
    /// Creates a loop in its initial state.
    pub fn new(arbiter: Arbiter, clock: C, device: P) -> Self {
        Self {
            arbiter,
            clock,
            device,
            callers: BTreeMap::new(),
            decided: Vec::new(),
            free: Bytes::ZERO,
        }
    }

    /// Returns the state machine.
    pub const fn arbiter(&self) -> &Arbiter {
        &self.arbiter
    }

    /// Returns the device.
    pub const fn device(&self) -> &P {
        &self.device
    }

    /// Ends the loop; returns the state machine and the device.
    pub fn into_parts(self) -> (Arbiter, P) {
        (self.arbiter, self.device)
    }

    /// Runs until the inbox closes. Cancel-safe: no event is lost if the future is dropped and the method called again.
    pub async fn run(&mut self, inbox: &mut mpsc::Receiver<Inbound>) {
        loop {
            let deadline = self.arbiter.next_deadline();
            let received = tokio::select! {
                received = inbox.recv() => match received {
                    Some(inbound) => Some(inbound),
                    None => return,
                },
                () = self.clock.sleep_until(deadline) => Some(Event::DeadlineReached.into()),
                () = self.clock.sleep_until(self.device.next_upkeep()) => None,
            };
            self.device.wake(self.clock.now());
            let sampled = received.is_some_and(|first| self.handle_batch(first, inbox));
            // Callers that stopped waiting, and could not cancel because the inbox was full.
            self.callers.retain(|_, caller| !caller.is_closed());
            self.device.upkeep(self.clock.now(), &self.arbiter, sampled);
        }
    }

    /// Handles one event, publishes the state and performs the actions.
    pub fn handle(&mut self, inbound: impl Into<Inbound>) {
        self.device.wake(self.clock.now());
        self.decide(inbound.into());
        self.publish();
    }

    /// Handles `first` and the events queued after it; returns whether they included a sample.
    fn handle_batch(&mut self, first: Inbound, inbox: &mut mpsc::Receiver<Inbound>) -> bool {
        let (mut sampled, mut left) = (false, BATCH_MAX);
        let mut next = Some(first);
        while let Some(inbound) = next.take() {
            left -= 1;
            next = (left > 0).then(|| inbox.try_recv().ok()).flatten();
            sampled |= matches!(inbound.event, Event::Sampled(_));
            // Publishing is more expensive than renewing, so consecutive renewals are published together.
            let continues = inbound.is_renewal() && next.as_ref().is_some_and(Inbound::is_renewal);
            self.decide(inbound);
            if !continues {
                self.publish();
            }
        }
        sampled
    }

    /// Passes an event to the arbiter, and the resulting plans to the engine.
    fn decide(&mut self, Inbound { event, caller }: Inbound) {
        let cancelled = match &event {
            Event::LeaseRequestCancelled { ticket } => Some(*ticket),
            _ => None,
        };
        self.callers.extend(caller);
        let now = self.clock.now();
        let actions = emergency::within_if(!retains_much(&event, self.free), || {
            self.device.record_event(now, &event, &self.arbiter);
            let actions = self.arbiter.handle(now, event);
            self.device.apply_plans(&actions);
            actions
        });
        self.device.record_actions(now, &actions);
        self.decided.extend(actions);
        if let Some(ticket) = cancelled {
            self.callers.remove(&ticket);
        }
    }

    fn publish(&mut self) {
        let state = Arc::new(self.arbiter.snapshot());
        self.free = state.memory.free;
        let decided = std::mem::take(&mut self.decided);
        self.device.publish(&self.arbiter, state, &decided);
        for action in decided {
            match action {
                Action::Answer { ticket, answer } => {
                    if let Some(caller) = self.callers.remove(&ticket) {
                        let _ = caller.send(answer); // the caller may be gone
                    }
                }
                action => self.device.perform(action),
            }
        }
    }
}

/// Returns whether handling an event retains more memory than the emergency reserve allows, without a shed.
fn retains_much(event: &Event, free: Bytes) -> bool {
    match event {
        Event::EngineInspected { .. } | Event::Recovered { .. } => true,
        // With free memory, the lease is granted at once, and retained.
        Event::LeaseRequested { request, .. } => request.max <= free,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, rc::Rc, time::Duration};

    use super::*;
    use cotenant_config::{Config, LoadErrorKind};
    use cotenant_dev::samples::{sample_with, small_model};
    use cotenant_policy::{
        event::{EngineApplied, LeaseCall},
        lease::{Class, LeaseRequest, LeaseView, Peer},
        params::{EngineParams, MachineMemory, Params, Scope},
    };

    const fn mib(mib: u64) -> Bytes {
        Bytes::from_mib(mib)
    }

    #[derive(Clone, Debug, Default)]
    struct HandClock(Rc<Cell<Timestamp>>);

    impl Clock for HandClock {
        fn now(&self) -> Timestamp {
            self.0.get()
        }

        fn sleep_until(&self, at: Option<Timestamp>) -> impl Future<Output = ()> + Send {
            let due = at.is_some_and(|at| at <= self.0.get());
            async move {
                if !due {
                    std::future::pending::<()>().await;
                }
            }
        }
    }

    /// Device that records its calls in order.
    #[derive(Debug, Default)]
    struct Notes {
        calls: Vec<&'static str>,
        planned: Vec<u64>,
        performed: Vec<Action>,
        woken: Vec<Timestamp>,
        states: Vec<Arc<Snapshot>>,
    }

    impl Perform for Notes {
        fn wake(&mut self, now: Timestamp) {
            self.woken.push(now);
        }

        fn record_event(&mut self, _now: Timestamp, _event: &Event, _arbiter: &Arbiter) {
            self.calls.push("record");
        }

        fn record_actions(&mut self, _now: Timestamp, _actions: &[Action]) {}

        fn apply_plans(&mut self, actions: &[Action]) {
            self.planned
                .extend(actions.iter().filter_map(|action| match action {
                    Action::ApplyPlan { revision, .. } => Some(*revision),
                    _ => None,
                }));
        }

        fn publish(&mut self, _arbiter: &Arbiter, state: Arc<Snapshot>, _actions: &[Action]) {
            self.calls.push("publish");
            self.states.push(state);
        }

        fn perform(&mut self, action: Action) {
            self.calls.push("perform");
            self.performed.push(action);
        }
    }

    struct Scene {
        control_loop: ControlLoop<HandClock, Notes>,
        clock: HandClock,
        inbox: mpsc::Sender<Inbound>,
        received: mpsc::Receiver<Inbound>,
        tickets: u64,
    }

    impl Scene {
        fn new(params: Params) -> Self {
            let clock = HandClock::default();
            let (inbox, received) = mpsc::channel(1024);
            let arbiter = Arbiter::new(params).unwrap();
            Self {
                control_loop: ControlLoop::new(arbiter, clock.clone(), Notes::default()),
                clock,
                inbox,
                received,
                tickets: 0,
            }
        }

        fn after(&mut self, wait: Duration, event: Event) {
            self.clock.0.set(self.clock.now() + wait);
            self.control_loop.handle(event);
        }

        fn sample(&mut self, wait: Duration, used: Bytes) {
            self.after(
                wait,
                Event::Sampled(sample_with(used, self.clock.now() + wait)),
            );
        }

        /// Sends an event with a caller to the inbox.
        fn send(&mut self, event: impl FnOnce(Ticket) -> Event) -> oneshot::Receiver<Answer> {
            self.tickets += 1;
            let ticket = Ticket(self.tickets);
            let (sender, answer) = oneshot::channel();
            let caller = Some((ticket, sender));
            let event = event(ticket);
            self.inbox.try_send(Inbound { event, caller }).unwrap();
            answer
        }

        fn run(&mut self) {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .build()
                .unwrap();
            runtime.block_on(async {
                tokio::select! {
                    biased;
                    () = self.control_loop.run(&mut self.received) => {}
                    () = std::future::ready(()) => {}
                }
            });
        }

        fn granted(&mut self, bytes: Bytes) -> LeaseView {
            let mut answer = self.request("camera", bytes);
            self.run();
            match answer.try_recv() {
                Ok(Answer::Lease { lease }) => lease,
                other => panic!("{other:?}"),
            }
        }

        fn request(&mut self, tenant: &str, bytes: Bytes) -> oneshot::Receiver<Answer> {
            let request = LeaseRequest {
                tenant: tenant.to_owned(),
                request_id: String::new(),
                peer: Peer::default(),
                class: Class::Batch,
                min: bytes,
                max: bytes,
                term: Some(Duration::from_secs(300)),
                wait: Duration::from_secs(5),
                validate_only: false,
                cgroup: None,
            };
            self.send(|ticket| Event::LeaseRequested { ticket, request })
        }

        fn renew(&mut self, lease: &LeaseView) -> oneshot::Receiver<Answer> {
            let (lease, generation) = (lease.id, lease.generation);
            self.send(|ticket| {
                Event::LeaseRenewed(LeaseCall {
                    ticket,
                    lease,
                    generation,
                    peer: Peer::default(),
                })
            })
        }

        /// Lets the engine apply the last plan.
        fn apply(&mut self) {
            let actions = &self.control_loop.device.performed;
            let (revision, in_force) = actions
                .iter()
                .rev()
                .find_map(|action| match action {
                    Action::ApplyPlan { revision, plan, .. }
                    | Action::LoadEngine { revision, plan } => Some((*revision, plan.clone())),
                    _ => None,
                })
                .unwrap();
            let used = small_model().plan_bytes(&in_force);
            let event = Event::EngineApplied(EngineApplied {
                freed: mib(1),
                ..EngineApplied::new(revision, in_force, used, Duration::from_millis(5))
            });
            self.after(Duration::from_millis(10), event);
        }
    }

    fn params() -> Params {
        let mut params = Params::for_budget(mib(400), Bytes::ZERO, Scope::Session);
        params.shed.minimum_reclaim = mib(20);
        params.pressure.dwell = Duration::from_millis(300);
        params
    }

    /// Returns a scene with a loaded engine that was asked to shed, and a small lease.
    fn shed_requested() -> (Scene, LeaseView) {
        let mut params = params();
        params.engine = Some(EngineParams::default());
        let mut scene = Scene::new(params);
        scene.after(
            Duration::ZERO,
            Event::EngineInspected {
                shape: small_model(),
            },
        );
        scene.sample(Duration::from_millis(10), Bytes::ZERO);
        scene.apply();
        let lease = scene.granted(mib(1));
        scene.after(
            Duration::from_millis(10),
            Event::OperatorShed {
                ticket: Ticket(99),
                bytes: mib(60),
                by: None,
            },
        );
        (scene, lease)
    }

    #[test]
    fn a_plan_decided_during_a_renewal_reaches_the_engine() {
        let (mut scene, lease) = shed_requested();
        scene.apply();
        // Samples continue, and the dwell ends between two of them: the next event is a renewal.
        let mut answers = Vec::new();
        let planned = scene.control_loop.device.planned.len();
        for _ in 0..200 {
            let due = scene.control_loop.arbiter().next_deadline();
            let step = Duration::from_millis(10);
            if due.is_some_and(|due| due <= scene.clock.now() + step) {
                scene.clock.0.set(scene.clock.now() + step);
                answers.extend([
                    scene.renew(&lease),
                    scene.renew(&lease),
                    scene.renew(&lease),
                ]);
                scene.run();
            } else {
                scene.sample(step, mib(40));
            }
            if scene.control_loop.device.planned.len() > planned {
                break;
            }
        }
        let decided =
            scene
                .control_loop
                .device
                .performed
                .iter()
                .filter_map(|action| match action {
                    Action::ApplyPlan { revision, .. } => Some(*revision),
                    _ => None,
                });
        let decided: Vec<u64> = decided.collect();
        assert!(
            decided.len() >= 2,
            "a shed and a growth are planned: {decided:?}"
        );
        assert_eq!(scene.control_loop.device.planned, decided);
        assert!(!answers.is_empty(), "the plan was decided during a renewal");
        for mut answer in answers {
            assert!(matches!(answer.try_recv(), Ok(Answer::Lease { .. })));
        }
    }

    #[test]
    fn a_shed_that_falls_due_within_renewals_reaches_the_engine() {
        let (mut scene, lease) = shed_requested();
        // The engine does not answer: the shed becomes due again among renewals.
        scene
            .clock
            .0
            .set(scene.clock.now() + EngineParams::default().apply_timeout);
        let answers: Vec<_> = (0..8).map(|_| scene.renew(&lease)).collect();
        scene.run();
        let decided =
            scene
                .control_loop
                .device
                .performed
                .iter()
                .filter_map(|action| match action {
                    Action::ApplyPlan { revision, .. } => Some(*revision),
                    _ => None,
                });
        let decided: Vec<u64> = decided.collect();
        assert_eq!(
            decided.len(),
            2,
            "a shed and the same once more: {decided:?}"
        );
        assert_eq!(
            scene.control_loop.device.planned, decided,
            "handed over as it was decided"
        );
        for mut answer in answers {
            assert!(matches!(answer.try_recv(), Ok(Answer::Lease { .. })));
        }
    }

    #[test]
    fn renewals_that_follow_each_other_are_published_once_and_before_their_answers() {
        let mut scene = Scene::new(params());
        scene.sample(Duration::ZERO, Bytes::ZERO);
        let lease = scene.granted(mib(1));
        scene.control_loop.device.calls.clear();
        let mut answers = [
            scene.renew(&lease),
            scene.renew(&lease),
            scene.renew(&lease),
        ];
        scene.run();
        let calls = &scene.control_loop.device.calls;
        assert_eq!(calls.iter().filter(|call| **call == "record").count(), 3);
        assert_eq!(
            calls.iter().filter(|call| **call == "publish").count(),
            1,
            "{calls:?}"
        );
        for answer in &mut answers {
            assert!(matches!(answer.try_recv(), Ok(Answer::Lease { .. })));
        }
        // Another event between them is published separately.
        let _answers = [scene.renew(&lease), scene.renew(&lease)];
        scene.inbox.try_send(Event::DeadlineReached.into()).unwrap();
        let _last = scene.renew(&lease);
        let before = scene.control_loop.device.states.len();
        scene.run();
        assert_eq!(scene.control_loop.device.states.len(), before + 3);
    }

    #[test]
    fn a_caller_who_cancels_gets_no_answer_and_is_forgotten() {
        let mut scene = Scene::new(params());
        scene.sample(Duration::ZERO, Bytes::ZERO);
        let lease = scene.granted(mib(390));
        let mut waits = scene.request("second", mib(100));
        scene.run();
        assert!(waits.try_recv().is_err(), "{lease:?} leaves no room");
        assert_eq!(scene.control_loop.callers.len(), 1);
        let ticket = Ticket(scene.tickets);
        scene
            .inbox
            .try_send(Event::LeaseRequestCancelled { ticket }.into())
            .unwrap();
        scene.run();
        assert!(scene.control_loop.callers.is_empty());
    }

    /// Returns the ranges that policy accepts, as stated in the checker's messages about values outside them.
    fn accepted_ranges() -> Vec<(String, [String; 2])> {
        let source = include_str!("../config/validate.rs");
        let literals = source.split('"').skip(1).step_by(2).map(str::to_owned);
        let classes = Class::ALL.map(|class| format!("shedding.deadlines.{class}"));
        let restart = [
            "intensity",
            "window",
            "stable_after",
            "backoff",
            "backoff_max",
        ];
        let keys = literals
            .chain(classes)
            .chain(restart.map(|key| format!("llm.restart.{key}")));
        let of_policy = |key: &String| {
            let mut steps = key.split('.');
            matches!(steps.next(), Some("budget" | "shedding" | "leases" | "llm"))
                && steps.next().is_some()
                && steps.all(|step| {
                    step.chars()
                        .all(|c| c.is_ascii_lowercase() || matches!(c, '_' | '-'))
                })
                && !key.contains(|c: char| c.is_whitespace() || c == '{')
        };
        let keys: std::collections::BTreeSet<String> = keys.filter(of_policy).collect();
        let range = |key: &String| {
            ["99999999999", "100000d", "2000000GiB"]
                .iter()
                .find_map(|beyond| {
                    let Err(LoadErrorKind::Faults(faults)) =
                        Config::parse(&document(&[(key, beyond)]))
                    else {
                        return None;
                    };
                    let message = &faults.iter().find(|fault| fault.path == *key)?.message;
                    let (low, high) = message
                        .split_once("is not between ")?
                        .1
                        .split_once(" and ")?;
                    Some([low.to_owned(), high.to_owned()])
                })
        };
        keys.iter()
            .filter_map(|key| Some((key.clone(), range(key)?)))
            .collect()
    }

    /// Returns a configuration with these values, besides those of a small model.
    fn document(values: &[(&str, &str)]) -> String {
        let base = "{budget: {scope: session}, llm: {path: /m.gguf}}";
        let mut whole: serde_yaml::Value = serde_yaml::from_str(base).unwrap();
        for (key, value) in values {
            let mut place = &mut whole;
            for step in key.split('.') {
                if !place.is_mapping() {
                    *place = serde_yaml::Value::Mapping(serde_yaml::Mapping::new());
                }
                place = place
                    .as_mapping_mut()
                    .unwrap()
                    .entry(step.into())
                    .or_insert(serde_yaml::Value::Null);
            }
            *place = serde_yaml::from_str(value).unwrap();
        }
        serde_yaml::to_string(&whole).unwrap()
    }

    /// Sheds and regrows with these settings; invariants are checked after each event. Returns the number of plans sent
    /// to the engine.
    fn shed_and_grow(params: Params) -> usize {
        let budget = params.budget.bytes();
        let mut scene = Scene::new(params);
        scene.after(
            Duration::ZERO,
            Event::EngineInspected {
                shape: small_model(),
            },
        );
        scene.sample(Duration::from_millis(1), Bytes::ZERO);
        let loaded = scene
            .control_loop
            .device
            .performed
            .iter()
            .any(|action| matches!(action, Action::LoadEngine { .. }));
        if !loaded {
            return 0;
        }
        scene.apply();
        let mut planned = 0;
        for (event, used) in [
            (true, Bytes::ZERO),
            (false, budget.saturating_sub(mib(1))),
            (false, Bytes::ZERO),
        ] {
            if event {
                scene.after(
                    Duration::from_millis(1),
                    Event::OperatorShed {
                        ticket: Ticket(99),
                        bytes: mib(60),
                        by: None,
                    },
                );
            }
            for step in [1, 10, 100, 1000, 60_000]
                .into_iter()
                .flat_map(|ms| [Duration::from_millis(ms); 70])
            {
                let (now, due) = (
                    scene.clock.now(),
                    scene.control_loop.arbiter().next_deadline(),
                );
                match due
                    .map(|due| due.saturating_since(now))
                    .filter(|wait| *wait <= step)
                {
                    Some(wait) => scene.after(wait, Event::DeadlineReached),
                    None => scene.sample(step, used),
                }
                if scene.control_loop.device.planned.len() > planned {
                    planned = scene.control_loop.device.planned.len();
                    scene.apply();
                }
            }
        }
        planned
    }

    #[test]
    fn the_loop_sheds_and_grows_at_both_ends_of_every_accepted_range() {
        let ranges = accepted_ranges();
        assert!(ranges.len() >= 30, "{ranges:?}");
        let (mut refused, mut idle) = (Vec::new(), Vec::new());
        for (key, ends) in &ranges {
            for (end, value) in ["least", "most"].iter().zip(ends) {
                let mut values = vec![(key.as_str(), value.as_str())];
                values.extend(
                    COMPANIONS
                        .iter()
                        .filter(|(of, at, ..)| (of, at) == (&key.as_str(), end))
                        .map(|row| (row.2, row.3)),
                );
                let name = format!("{key}: {value}");
                let params = Config::parse(&document(&values))
                    .map(|config| config.params(&MachineMemory::of(Bytes::from_gib(8))));
                match params {
                    Ok(Ok(params)) => {
                        if shed_and_grow(params) < 2 {
                            idle.push(name);
                        }
                    }
                    Ok(Err(_)) | Err(_) => refused.push(name),
                }
            }
        }
        insta::assert_snapshot!(format!(
            "refused: {refused:#?}\nno shed or growth: {idle:#?}"
        ));
    }

    /// Settings required with the end of a range: key and end, other key and its value.
    const COMPANIONS: [(&str, &str, &str, &str); 7] = [
        ("budget.total", "least", "budget.reserve", "0B"),
        (
            "budget.watermarks.critical",
            "least",
            "budget.watermarks.last_resort",
            "0B",
        ),
        ("leases.term_max", "least", "leases.term_min", "100ms"),
        ("leases.term_min", "most", "leases.term_max", "1d"),
        ("llm.kv_floor", "most", "llm.context", "1048576"),
        (
            "llm.restart.backoff_max",
            "least",
            "llm.restart.backoff",
            "1ms",
        ),
        ("shedding.reclaim_min", "least", "budget.hysteresis", "0B"),
    ];

    #[test]
    fn the_loop_notes_when_it_runs_and_not_while_the_device_hangs() {
        let mut scene = Scene::new(params());
        scene.sample(Duration::from_secs(1), Bytes::ZERO);
        let woken = scene.control_loop.device.woken.len();
        scene.clock.0.set(Timestamp::START + Duration::from_secs(9));
        assert_eq!(
            scene.control_loop.device.woken.len(),
            woken,
            "time alone is no sign of life"
        );
        scene.inbox.try_send(Event::DeadlineReached.into()).unwrap();
        scene.run();
        assert_eq!(
            scene.control_loop.device.woken.last(),
            Some(&(Timestamp::START + Duration::from_secs(9)))
        );
    }
}
