//! Reactions to the supervisor: figures for the pool, targets, growth, and leases that were lost.
//!
//! The state is read after an event of the supervisor's stream, at once after a change of the level or of a lease, and
//! otherwise once per [`READ_EVERY`]. Free memory also changes with samples, which are no events, such as the first one:
//! without an event the state is read once per [`READ_IDLE`].

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tokio::{
    sync::Mutex,
    time::{Duration, Instant, sleep, sleep_until},
};
use tracing::{info, warn};

use super::{
    book::{self, Held, TargetReply},
    cdi::Prepared,
    driver::{Driver, PrepareError},
    pool::{Figures, Pool},
    supervisor::{Outlook, SupervisorError},
};
use cotenant_rpc::v1::{GetStatusResponse, Pressure, PressureLevel, WatchEventsResponse};
use cotenant_units::{Bytes, causes::in_one_line};

/// Follows the supervisor until the process ends.
pub(crate) struct Upkeep {
    driver: Arc<Driver>,
    /// The last answer to the target of each lease.
    answered: BTreeMap<String, (u64, TargetReply)>,
    /// The last outlook, and the figures for which it was requested.
    outlook: Option<(Basis, Bytes)>,
    /// Claims that are booked again at present.
    again: Arc<Mutex<BTreeSet<String>>>,
    /// The time of the next attempt at lost leases.
    again_at: Instant,
    /// Claims that lost a lease: they are booked again with the minimum, and do not grow.
    restored: BTreeSet<String>,
    is_away: bool,
}

/// Figures on which the outlook depends, in units below which it is not requested again.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Basis {
    boot_id: String,
    level: i32,
    draining: bool,
    waiting: u32,
    free: u64,
    leases: Vec<(String, u64)>,
}

impl Upkeep {
    pub(crate) fn new(driver: Arc<Driver>) -> Self {
        Self {
            driver,
            answered: BTreeMap::new(),
            outlook: None,
            again: Arc::default(),
            again_at: Instant::now(),
            restored: BTreeSet::new(),
            is_away: false,
        }
    }

    pub(crate) async fn run(mut self) {
        loop {
            let ended = self.follow().await;
            if !self.is_away {
                let error = ended.map_or_else(
                    |error| in_one_line(&error),
                    |()| "its stream ended".to_owned(),
                );
                warn!(error, "the supervisor is away");
                self.is_away = true;
            }
            self.driver.view.update(Pool::lose);
            let wait = sleep(AGAIN_AFTER);
            tokio::pin!(wait);
            tokio::select! {
                () = &mut wait => {}
                () = self.deadline() => {
                    self.driver.view.update(Pool::advance);
                    wait.await;
                }
            }
            self.driver.view.update(Pool::advance);
        }
    }

    /// Waits for the next deadline of the pool.
    async fn deadline(&self) {
        match self.driver.view.pool().next_deadline() {
            Some(at) => sleep_until(self.driver.view.instant(at)).await,
            None => std::future::pending().await,
        }
    }

    /// Follows one run of the supervisor until its streams end.
    async fn follow(&mut self) -> Result<(), SupervisorError> {
        let supervisor = &self.driver.supervisor;
        let status = supervisor.status().await?;
        let (after, boot_id) = (status.last_sequence, status.boot_id.clone());
        let mut events = supervisor.watch_events(after, boot_id).await?;
        let mut leases = supervisor.watch_leases().await?;
        info!(version = %status.version, "following the supervisor");
        self.is_away = false;
        self.read(&status).await?;
        let mut read_at = Instant::now();
        let mut due = read_at + READ_IDLE;
        loop {
            tokio::select! {
                event = events.message() => match event? {
                    Some(event) => {
                        let pause = match reaction(&event) {
                            Reaction::Now => READ_PAUSE,
                            Reaction::Later => READ_EVERY,
                            Reaction::None => continue,
                        };
                        due = due.min(read_at + pause);
                    }
                    None => return Ok(()),
                },
                state = leases.message() => match state? {
                    Some(state) => {
                        self.answer_targets(Held::of(&state.leases)).await;
                        due = due.min(read_at + READ_PAUSE);
                    }
                    None => return Ok(()),
                },
                () = sleep_until(due) => {
                    read_at = Instant::now();
                    due = read_at + READ_IDLE;
                    let status = self.driver.supervisor.status().await?;
                    self.read(&status).await?;
                }
                () = self.deadline() => self.driver.view.update(Pool::advance),
            }
        }
    }

    /// Passes a state of the supervisor on.
    async fn read(&mut self, status: &GetStatusResponse) -> Result<(), SupervisorError> {
        let held = Held::of(&status.leases);
        let level = status.pressure.as_ref().map(Pressure::level);
        let figures = Figures {
            level: level.unwrap_or(PressureLevel::Unspecified),
            grantable: self.grantable(status).await?,
            booked: book::booked(&held),
            idle: book::idle(&held),
        };
        self.driver
            .view
            .update(|pool, now| pool.observe(now, figures));
        if let Some(engine) = &status.engine {
            let model = (!engine.model.is_empty()).then(|| engine.model.clone());
            let speed = engine.milli_tokens_per_second / 1000;
            self.driver.view.learn(model, (speed > 0).then_some(speed));
        }
        let prepared = self.driver.cdi.prepared();
        self.grow(status, &held, &prepared).await;
        self.restore(&held, &prepared).await;
        Ok(())
    }

    /// Returns the bytes that a request of the pool's class would be granted.
    async fn grantable(&mut self, status: &GetStatusResponse) -> Result<Bytes, SupervisorError> {
        let budget = status.budget.unwrap_or_default();
        let basis = Basis {
            boot_id: status.boot_id.clone(),
            level: status
                .pressure
                .as_ref()
                .map_or(0, |pressure| pressure.level),
            draining: status.draining,
            waiting: status.waiting_requests,
            free: budget.free_bytes / OUTLOOK_UNIT,
            leases: status
                .leases
                .iter()
                .map(|lease| (lease.name.clone(), lease.held_bytes / OUTLOOK_UNIT))
                .collect(),
        };
        if let Some((known, bytes)) = &self.outlook
            && *known == basis
        {
            return Ok(*bytes);
        }
        let class = self.driver.own.class;
        let mut asked = Bytes::new(budget.budget_bytes.max(1));
        let mut outlook = self.driver.supervisor.outlook(class, asked).await?;
        if let Outlook::Budget(budget) = outlook {
            // It has shrunk meanwhile.
            asked = budget;
            outlook = self.driver.supervisor.outlook(class, asked).await?;
        }
        let bytes = match outlook {
            Outlook::Fits => asked,
            Outlook::AtMost(most) => most,
            Outlook::Budget(_) => Bytes::ZERO,
        };
        self.outlook = Some((basis, bytes));
        Ok(bytes)
    }

    /// Lets leases grow towards the maximum of their claims, into memory that is free.
    async fn grow(&self, status: &GetStatusResponse, held: &[Held], prepared: &[Prepared]) {
        let level = status.pressure.as_ref().map(Pressure::level);
        let free = status.budget.as_ref().map_or(0, |budget| budget.free_bytes);
        if level != Some(PressureLevel::Normal)
            || status.waiting_requests > 0
            || status.draining
            || self.driver.is_booking()
        {
            return;
        }
        let most = |uid: &str| {
            let claim = prepared.iter().find(|one| one.claim.uid == uid);
            let claim = claim.filter(|one| !self.restored.contains(&one.claim.uid));
            claim.map(|one| one.max)
        };
        for resize in book::growth(held, Bytes::new(free), most) {
            if let Err(error) = self.driver.supervisor.resize(&resize).await {
                warn!(lease = %resize.lease.name, error = in_one_line(&error), "cannot grow a lease");
            }
        }
    }

    /// Notifies pods of targets, and answers for them.
    async fn answer_targets(&mut self, held: Vec<Held>) {
        self.answered
            .retain(|name, _| held.iter().any(|lease| lease.name == *name));
        for lease in held {
            let before = self.answered.get(&lease.name).copied();
            let Some(((nonce, target), reply)) = lease.target.zip(lease.reply(before)) else {
                continue;
            };
            if before.is_none_or(|(known, _)| known != nonce) {
                let read = self.driver.cdi.notify(&lease.uid);
                info!(lease = %lease.name, to = %target, notified = read, "target of the supervisor");
            }
            self.answered.insert(lease.name.clone(), (nonce, reply));
            let driver = Arc::clone(&self.driver);
            // Its answer must not wait for those of other leases: targets have deadlines of 250 ms.
            tokio::spawn(async move {
                if let Err(error) = driver.supervisor.answer(&lease, reply).await {
                    warn!(lease = %lease.name, error = in_one_line(&error), "cannot answer a target");
                }
            });
        }
    }

    /// Books prepared claims again whose lease has ended: the supervisor revoked it, or the pod for which it was booked
    /// has left the claim to another one.
    async fn restore(&mut self, held: &[Held], prepared: &[Prepared]) {
        let lost: Vec<&Prepared> = prepared
            .iter()
            .filter(|one| {
                let has = |lease: &Held| lease.uid == one.claim.uid && lease.is_live();
                !held.iter().any(has)
            })
            .collect();
        self.restored
            .retain(|uid| prepared.iter().any(|one| one.claim.uid == *uid));
        if lost.is_empty() || Instant::now() < self.again_at {
            return;
        }
        self.again_at = Instant::now() + RESTORE_EVERY;
        for one in lost {
            let claim = one.claim.clone();
            self.restored.insert(claim.uid.clone());
            if !self.again.lock().await.insert(claim.uid.clone()) {
                continue;
            }
            let (driver, again) = (Arc::clone(&self.driver), Arc::clone(&self.again));
            tokio::spawn(async move {
                if let Err(error) = restore(&driver, &claim).await {
                    let error = in_one_line(&error);
                    warn!(claim = %format!("{}/{}", claim.namespace, claim.name), error, "a prepared claim has no lease");
                }
                again.lock().await.remove(&claim.uid);
            });
        }
    }
}

async fn restore(driver: &Driver, claim: &super::claim::ClaimName) -> Result<(), PrepareError> {
    let mut booking = match driver.booking(claim).await {
        Err(PrepareError::Read(error)) if error.is_absent() => {
            driver.cdi.remove(&claim.uid)?;
            return Ok(());
        }
        booking => booking?,
    };
    // What Kubernetes has given: a pod that did not free more would lose the lease again.
    booking.max = booking.min;
    // Kubelet removes the group before it reverts the preparation.
    let Some(group) = driver.groups.of_pod(&booking.pod) else {
        return Ok(());
    };
    let lease = driver.book(&booking, &group).await?;
    info!(%lease, %group, "booked again");
    if !driver.cdi.has(&claim.uid) {
        driver.unprepare(&claim.uid).await?;
    }
    Ok(())
}

enum Reaction {
    Now,
    Later,
    None,
}

/// Returns when the state is read after an event.
fn reaction(event: &WatchEventsResponse) -> Reaction {
    let Some(entry) = &event.entry else {
        return Reaction::Now;
    };
    match entry.name.as_str() {
        "level_changed" => Reaction::Now,
        // Requests that only ask, of this process too.
        "lease_requested" | "answer" => Reaction::None,
        _ => Reaction::Later,
    }
}

/// Pause between two reads after urgent events. Our choice: a tenth of the time in which a taint has to appear.
const READ_PAUSE: Duration = Duration::from_millis(100);

/// Pause between two reads otherwise: the supervisor samples the machine once per second.
const READ_EVERY: Duration = Duration::from_millis(700);

/// Pause between two reads without an event. Our choice: a pool that is too small for that long delays a pod, no more.
const READ_IDLE: Duration = Duration::from_secs(5);

/// Pause between attempts to reach the supervisor.
const AGAIN_AFTER: Duration = Duration::from_millis(250);

/// Pause between attempts to book a claim again.
const RESTORE_EVERY: Duration = Duration::from_secs(5);

/// Least change of a figure for another outlook. Our choice: a small part of a step.
const OUTLOOK_UNIT: u64 = 1 << 20;
