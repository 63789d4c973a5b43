//! Preparation of claims: a claim becomes a lease of its pod's control group, and a file for the container runtime.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use tokio::{
    sync::watch,
    time::{Duration, Instant, sleep},
};
use tracing::{info, warn};

use super::{
    book::{self, Held},
    cdi::{CdiError, CdiFiles},
    claim::{Booking, ClaimError, ClaimName, Identity},
    groups::Groups,
    kube::{Client, KubeError},
    pool::{Health, Pool},
    slice::Traits,
    supervisor::{Outlook, Supervisor, SupervisorError},
};
use cotenant_units::{Timestamp, causes::in_one_line, lock::locked};

/// Everything that the parts of the process share.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) own: Identity,
    pub(crate) kube: Client,
    pub(crate) supervisor: Supervisor,
    pub(crate) cdi: CdiFiles,
    pub(crate) groups: Groups,
    /// Bookings that wait for memory; leases grow into nothing meanwhile.
    waiting: AtomicUsize,
    pub(crate) view: View,
}

/// What is published, and to whom it is shown.
#[derive(Debug)]
pub(crate) struct View {
    started: Instant,
    pool: Mutex<Pool>,
    traits: Mutex<Traits>,
    pub(crate) health: watch::Sender<Health>,
    /// Counts changes of what is published.
    pub(crate) changes: watch::Sender<u64>,
}

/// A claim cannot be prepared or reverted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrepareError {
    #[error("cannot read it")]
    Read(#[source] KubeError),
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error(
        "its pod `{0}` has no control group: the pod was removed, or kubelet's groups are elsewhere (--cgroup-root)"
    )]
    NoGroup(String),
    #[error("cannot book {min} for its pod", min = .0)]
    Book(cotenant_units::Bytes, #[source] SupervisorError),
    #[error("cannot release its lease")]
    Release(#[source] SupervisorError),
    #[error(transparent)]
    File(#[from] CdiError),
}

impl View {
    pub(crate) fn new(pool: Pool, traits: Traits) -> Self {
        let health = pool.health(Timestamp::START);
        Self {
            started: Instant::now(),
            pool: Mutex::new(pool),
            traits: Mutex::new(traits),
            health: watch::Sender::new(health),
            changes: watch::Sender::new(0),
        }
    }

    pub(crate) fn now(&self) -> Timestamp {
        Timestamp::START + self.started.elapsed()
    }

    pub(crate) fn instant(&self, at: Timestamp) -> Instant {
        self.started + at.since_start()
    }

    /// Passes the time to the pool; publishes if something changed.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Pool, Timestamp) -> bool) {
        let now = self.now();
        let mut pool = locked(&self.pool);
        let changed = change(&mut pool, now);
        let health = pool.health(now);
        drop(pool);
        self.health.send_if_modified(|known| {
            let differs = *known != health;
            *known = health;
            differs
        });
        if changed {
            self.changes.send_modify(|count| *count += 1);
        }
    }

    pub(crate) fn pool(&self) -> Pool {
        locked(&self.pool).clone()
    }

    pub(crate) fn traits(&self) -> Traits {
        locked(&self.traits).clone()
    }

    /// Sets model and speed; publishes a new model at once, and a new speed if it differs by a tenth.
    pub(crate) fn learn(&self, model: Option<String>, speed: Option<u64>) {
        let mut traits = locked(&self.traits);
        let differs = match (traits.tokens_per_second, speed) {
            (Some(known), Some(speed)) => known.abs_diff(speed) > known / 10,
            (known, speed) => known.is_some() != speed.is_some(),
        };
        if traits.model != model || differs {
            (traits.model, traits.tokens_per_second) = (model, speed);
            drop(traits);
            self.changes.send_modify(|count| *count += 1);
        }
    }
}

impl Driver {
    pub(crate) fn new(
        own: Identity,
        kube: Client,
        supervisor: Supervisor,
        (cdi, groups): (CdiFiles, Groups),
        view: View,
    ) -> Self {
        Self {
            own,
            kube,
            supervisor,
            cdi,
            groups,
            waiting: AtomicUsize::new(0),
            view,
        }
    }

    /// Returns whether a booking waits for memory.
    pub(crate) fn is_booking(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    /// Reads a claim as a booking.
    pub(crate) async fn booking(&self, claim: &ClaimName) -> Result<Booking, PrepareError> {
        let path = format!(
            "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims/{}",
            claim.namespace, claim.name
        );
        let object = self.kube.get(&path).await.map_err(PrepareError::Read)?;
        Ok(Booking::read(&object, claim, &self.own)?)
    }

    /// Books the memory of a claim, and writes its file.
    pub(crate) async fn prepare(
        self: &Arc<Self>,
        claim: &ClaimName,
    ) -> Result<Booking, PrepareError> {
        let booking = self.booking(claim).await?;
        let group = self
            .groups
            .of_pod(&booking.pod)
            .ok_or_else(|| PrepareError::NoGroup(booking.pod.clone()))?;
        let lease = self.book(&booking, &group).await?;
        self.cdi.write(&booking, &lease)?;
        info!(%lease, min = %booking.min, max = %booking.max, %group, "claim prepared");
        Ok(booking)
    }

    /// Releases the lease of a claim and removes its file; an unknown claim is none of ours.
    pub(crate) async fn unprepare(&self, uid: &str) -> Result<(), PrepareError> {
        // The file first: a prepared claim without a lease would be booked again.
        self.cdi.remove(uid)?;
        let held = self.until_there(|| self.supervisor.held()).await;
        let held = held.map_err(PrepareError::Release)?;
        for lease in held
            .iter()
            .filter(|lease| lease.uid == uid && lease.is_live())
        {
            let released = self.supervisor.release(lease).await;
            released.map_err(PrepareError::Release)?;
            info!(lease = %lease.name, "claim released");
        }
        Ok(())
    }

    /// Returns the name of the lease of a booking: the present one, or a new one.
    pub(crate) async fn book(
        &self,
        booking: &Booking,
        group: &str,
    ) -> Result<String, PrepareError> {
        let failed = |error| PrepareError::Book(booking.min, error);
        let held = self
            .until_there(|| self.supervisor.held())
            .await
            .map_err(failed)?;
        let live = |lease: &&Held| lease.uid == booking.claim.uid && lease.is_live();
        if let Some(lease) = held.iter().find(live) {
            if lease.cgroup == group {
                return Ok(lease.name.clone());
            }
            // Of a pod that used the claim before.
            self.supervisor.release(lease).await.map_err(failed)?;
        }
        let _waits = Waits::new(&self.waiting);
        self.make_room(booking, &held).await.map_err(failed)?;
        let booked = self
            .until_there(|| self.supervisor.book(booking, group))
            .await;
        Ok(booked.map_err(failed)?.name)
    }

    /// Takes memory above the minimum of other claims back, if the booking does not fit otherwise.
    async fn make_room(&self, booking: &Booking, held: &[Held]) -> Result<(), SupervisorError> {
        let outlook = self.supervisor.outlook(booking.class, booking.min).await?;
        let Outlook::AtMost(most) = outlook else {
            return Ok(());
        };
        for resize in book::room(held, booking.min.saturating_sub(most)) {
            info!(lease = %resize.lease.name, to = %resize.max, "lowered for another claim");
            if let Err(error) = self.supervisor.resize(&resize).await {
                warn!(lease = %resize.lease.name, error = in_one_line(&error), "cannot lower a lease");
            }
        }
        Ok(())
    }

    /// Repeats a call while the supervisor is away, as during its restart.
    async fn until_there<T, F>(&self, call: impl Fn() -> F) -> Result<T, SupervisorError>
    where
        F: Future<Output = Result<T, SupervisorError>>,
    {
        let deadline = Instant::now() + AWAY_MAX;
        loop {
            match call().await {
                Err(error) if error.is_away() && Instant::now() < deadline => {
                    sleep(AGAIN_AFTER).await;
                }
                result => return result,
            }
        }
    }
}

/// Counts a booking while it waits.
struct Waits<'driver>(&'driver AtomicUsize);

impl<'driver> Waits<'driver> {
    fn new(count: &'driver AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Longest wait for a supervisor that is away. Our choice: a restart takes less, and kubelet gives up after 45 s.
const AWAY_MAX: Duration = Duration::from_secs(8);

/// Pause between attempts.
const AGAIN_AFTER: Duration = Duration::from_millis(100);
