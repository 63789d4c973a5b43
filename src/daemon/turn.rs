//! The loop: one event after the other to the arbiter, and what it wants done.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use super::{
    doors::{Doors, HealthBoard},
    figures::{Figures, Noted},
    hub::{Hub, Inbound},
    notify,
    perform::Device,
    record::Recorder,
    survival::Survival,
    watchdog::Watchdog,
};
use crate::{
    policy::{
        arbiter::Arbiter,
        event::{Action, Event},
        snapshot::Snapshot,
    },
    standby,
    telemetry::Metrics,
};

/// How long what is left may take to end when the daemon ends.
pub(super) const STOP_GRACE: Duration = Duration::from_secs(5);

/// Time between two rounds of measuring every holder, close to a sample. Verifying a shed does not wait for it: the
/// arbiter asks then.
const ROUND: Duration = Duration::from_millis(500);

/// The longest time between two rounds, whether there are samples or not.
const ROUND_MAX: Duration = Duration::from_secs(1);

/// Events that are taken from the inbox together: a quarter of what may wait there (our choice), so that what has to
/// be done by the clock is not late.
const TOGETHER_MAX: usize = 256;

/// Everything that the loop turns.
pub(super) struct Turn {
    pub(super) arbiter: Arbiter,
    pub(super) device: Device,
    pub(super) recorder: Recorder,
    pub(super) survival: Survival,
    pub(super) watchdog: Watchdog,
    pub(super) figures: Figures,
    pub(super) metrics: Arc<Metrics>,
    pub(super) hub: Arc<Hub>,
    pub(super) health: HealthBoard,
    pub(super) beat: Beat,
    /// Taken from the inbox and not handled yet; outlives a turn that is dropped.
    pub(super) waiting: VecDeque<Inbound>,
}

/// What the loop does by the clock.
pub(super) struct Beat {
    work: watch::Receiver<BTreeMap<String, u32>>,
    /// Requests in flight at each worker, as last told.
    told: BTreeMap<String, u32>,
    /// Half of the time that the watchdog leaves us, when there is one.
    alive: Option<Duration>,
    told_alive: Instant,
    round: Instant,
}

/// Why the loop turns.
#[expect(
    clippy::large_enum_variant,
    reason = "one at a time, on the stack, and nearly always the large one"
)]
enum Cause {
    Event(Inbound),
    /// Nothing happened, and something is to be done by the clock.
    Time,
    /// Workers took up or put down work.
    Work,
}

impl Beat {
    /// A beat that begins now; `alive` is how often the watchdog wants to be told.
    pub(super) fn new(hub: &Hub, alive: Option<Duration>) -> Self {
        Self {
            work: hub.work(),
            told: BTreeMap::new(),
            alive,
            told_alive: Instant::now(),
            round: Instant::now(),
        }
    }

    fn next(&self) -> Instant {
        let round = self.round + ROUND_MAX;
        self.alive.map_or(round, |alive| round.min(self.told_alive + alive))
    }

    /// What has changed since the last time.
    fn work(&mut self) -> Vec<Event> {
        let counts = self.work.borrow_and_update().clone();
        let changed = counts
            .iter()
            .filter(|(worker, count)| self.told.get(*worker) != Some(count));
        let events = changed
            .map(|(worker, &requests)| Event::WorkerActivity {
                worker: worker.clone(),
                requests,
            })
            .collect();
        self.told = counts;
        events
    }
}

impl Turn {
    /// Turns until the inbox closes. May be dropped and called again between two events.
    pub(super) async fn forever(&mut self, inbox: &mut mpsc::Receiver<Inbound>) {
        let clock = self.hub.clock();
        loop {
            let beat = self.beat.next();
            let cause = tokio::select! {
                received = inbox.recv() => match received {
                    Some(inbound) => Cause::Event(inbound),
                    None => return,
                },
                () = clock.sleep_until(self.arbiter.next_deadline()) => Cause::Event(Inbound {
                    event: Event::DeadlineReached,
                    answer: None,
                }),
                Ok(()) = self.beat.work.changed() => Cause::Work,
                () = tokio::time::sleep_until(beat) => Cause::Time,
            };
            self.hub.turn();
            let mut sampled = false;
            match cause {
                Cause::Event(inbound) => {
                    self.waiting.push_back(inbound);
                    while self.waiting.len() < TOGETHER_MAX
                        && let Ok(inbound) = inbox.try_recv()
                    {
                        self.waiting.push_back(inbound);
                    }
                    sampled = self.take_waiting().await;
                }
                Cause::Time => {}
                Cause::Work => {
                    for event in self.beat.work() {
                        self.handle(event).await;
                    }
                }
            }
            self.keep_up(sampled);
        }
    }

    /// Takes what waits. A renewal changes the time of one lease and nothing else, so that the state is shown once for
    /// renewals that follow each other; showing costs more than renewing. Returns whether there was a sample.
    async fn take_waiting(&mut self) -> bool {
        let mut sampled = false;
        let mut renewals = Vec::new();
        while let Some(inbound) = self.waiting.pop_front() {
            if let Event::LeaseRenewed { .. } = inbound.event {
                if let Some((ticket, sender)) = inbound.answer {
                    self.device.answers.insert(ticket, sender);
                }
                let now = self.hub.clock().now();
                self.recorder.checkpoint_if_wanted(now, &self.arbiter);
                self.recorder.event(now, &inbound.event);
                let actions = self.arbiter.handle(now, inbound.event);
                for action in &actions {
                    self.recorder.action(now, action);
                }
                renewals.extend(actions);
                if !matches!(
                    self.waiting.front().map(|next| &next.event),
                    Some(Event::LeaseRenewed { .. })
                ) {
                    let before = self.hub.state();
                    let after = self.show(&Noted::Other, &before, std::mem::take(&mut renewals));
                    self.health.show(&after).await;
                }
            } else {
                sampled |= matches!(inbound.event, Event::Sampled(_));
                self.take(inbound).await;
            }
        }
        sampled
    }

    async fn take(&mut self, inbound: Inbound) {
        if let Some((ticket, sender)) = inbound.answer {
            self.device.answers.insert(ticket, sender);
        }
        let cancelled = match &inbound.event {
            Event::LeaseRequestCancelled { ticket } => Some(*ticket),
            _ => None,
        };
        self.handle(inbound.event).await;
        if let Some(ticket) = cancelled {
            self.device.answers.remove(&ticket);
        }
    }

    /// Takes one event, and does what follows from it.
    pub(super) async fn handle(&mut self, event: Event) {
        let now = self.hub.clock().now();
        let leaves_much = leaves_much(&event, &self.hub.state());
        let (noted, before) = (Noted::of(&event), self.hub.state());
        // A sample may be what a shed begins with; whatever comes next brings the checkpoint too.
        if !matches!(event, Event::Sampled(_)) {
            self.recorder.checkpoint_if_wanted(now, &self.arbiter);
        }
        let decide = || {
            self.recorder.event(now, &event);
            let actions = self.arbiter.handle(now, event);
            // Before anything else: what the engine gives back is what others wait for.
            self.device.order(&actions);
            actions
        };
        let actions = standby::within_if(!leaves_much, decide);
        for action in &actions {
            self.recorder.action(now, action);
        }
        let after = self.show(&noted, &before, actions);
        self.health.show(&after).await;
    }

    /// Shows the state as it is now, and does what is wanted. The state comes before the actions: whoever gets an answer
    /// finds in it what it was told, and so does whoever measures.
    fn show(&mut self, noted: &Noted, before: &Snapshot, actions: Vec<Action>) -> Arc<Snapshot> {
        // Before anybody is told: what was promised has to hold when we are killed in the next moment.
        self.survival.keep(&self.arbiter);
        self.hub.publish(self.arbiter.snapshot());
        let after = self.hub.state();
        let workers = &self.device.workers;
        self.figures
            .turn(noted, before, &after, &actions, |worker| workers.last_end(worker));
        for action in actions {
            self.device.perform(action);
        }
        after
    }

    /// What has to be done again and again.
    fn keep_up(&mut self, sampled: bool) {
        let since = self.beat.round.elapsed();
        let state = self.hub.state();
        // Where the next sample would come too late, this one has to do.
        let last_chance = since + state.sample_interval > ROUND_MAX;
        if since >= ROUND_MAX || (sampled && (since >= ROUND || last_chance)) {
            self.beat.round = Instant::now();
            let held = state.leases.iter().filter(|lease| !lease.waits());
            let holders = held.map(|lease| lease.holder().to_owned());
            self.device.measurer.measure(holders);
            // Those who do not wait any more, and could not say so because the inbox was full.
            self.device.answers.retain(|_, caller| !caller.is_closed());
            self.metrics.set_journal_lost(self.recorder.lost());
        }
        if self.watchdog.is_unarmed()
            && let Some(floor) = self.arbiter.floor_plan()
        {
            self.watchdog.arm(floor);
        }
        #[cfg(debug_assertions)]
        hang_if_told();
        if self
            .beat
            .alive
            .is_some_and(|alive| self.beat.told_alive.elapsed() >= alive)
        {
            self.beat.told_alive = Instant::now();
            notify::alive(&state);
        }
    }

    /// Takes nothing new, and turns on until what runs has been answered.
    pub(super) async fn drain(&mut self, inbox: &mut mpsc::Receiver<Inbound>) {
        self.handle(Event::DrainRequested).await;
        let answered = self.device.engine.as_ref().map(super::engine::EngineDriver::drain);
        let mut work = self.hub.work();
        let done = async {
            if let Some(answered) = answered {
                answered.await;
            }
            let _ = work.wait_for(|counts| counts.values().all(|count| *count == 0)).await;
        };
        tokio::select! {
            () = done => {}
            () = self.forever(inbox) => {}
        }
    }

    /// Ends what was started.
    pub(super) async fn finish(self, doors: Doors) {
        self.watchdog.stand_down();
        let Device { engine, workers, .. } = self.device;
        let engine = async {
            if let Some(engine) = engine {
                engine.stop(STOP_GRACE).await;
            }
        };
        tokio::join!(engine, workers.stop_all(STOP_GRACE), doors.close());
        self.survival.close(&self.arbiter);
        match self.recorder.lost() {
            0 => {}
            lines => tracing::warn!(lines, "the journal lost lines"),
        }
    }
}

/// Whether the arbiter keeps more of an event than what little is set aside for sheds can bear, and sheds nothing for it.
fn leaves_much(event: &Event, state: &Snapshot) -> bool {
    match event {
        Event::EngineInspected { .. } | Event::Recovered { .. } => true,
        // With memory free it is on the book at once, and stays there.
        Event::LeaseRequested { request, .. } => request.max <= state.free,
        _ => false,
    }
}

/// Stands still when a test wants to see what happens then: for as many milliseconds as the file says that
/// `COTENANT_DEBUG_HANG` names, once. Not in a release build.
#[cfg(debug_assertions)]
fn hang_if_told() {
    let Some(path) = std::env::var_os("COTENANT_DEBUG_HANG") else {
        return;
    };
    let told = std::fs::read_to_string(&path).ok();
    if let Some(millis) = told.and_then(|text| text.trim().parse().ok()) {
        let _ = std::fs::remove_file(&path);
        std::thread::sleep(Duration::from_millis(millis));
    }
}
