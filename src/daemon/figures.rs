//! Metrics of decisions: sheds, reclaims, denials, restarts.
//!
//! They are derived from the actions, and therefore agree with the journal.

use std::{collections::BTreeMap, sync::Arc};

use cotenant_policy::{
    decision::{
        ChangeCause, Decision, EngineDecision, LeaseDecision, LeaseEnd, PlanOutcome, WorkerDecision,
    },
    denial::Denial,
    event::{Action, Answer},
    lease::{LeaseId, LeaseState},
    pressure::PressureLevel,
    reason::{PlanReason, ReclaimReason, StopReason},
    residency::{EnginePlan, ModelShape},
    snapshot::Snapshot,
};
use cotenant_telemetry::{Metrics, Tracer};
use cotenant_units::{Bytes, Timestamp};

pub(super) struct Figures {
    metrics: Arc<Metrics>,
    tracer: Tracer,
    /// Holders with an unverified reclaim request.
    asked: BTreeMap<Holder, Asked>,
    /// Plan of the engine according to its last report.
    in_force: Option<EnginePlan>,
    /// Number of sheds last counted by the arbiter.
    sheds: u64,
    /// Regrown bytes last counted by the arbiter.
    regrown: Bytes,
    /// Workers whose last end was unexpected.
    fallen: BTreeMap<String, &'static str>,
}

/// The holder from which memory was reclaimed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Holder {
    /// Plan of the engine, by revision.
    Plan(u64),
    Lease(LeaseId),
    Worker(String),
}

/// Request to return memory.
#[derive(Clone, Copy, Debug)]
struct Asked {
    at: Timestamp,
    level: PressureLevel,
    reason: &'static str,
}

impl Figures {
    /// Creates counters at zero, reported to `metrics`.
    pub(super) fn new(metrics: &Arc<Metrics>, tracer: Tracer) -> Self {
        Self {
            metrics: Arc::clone(metrics),
            tracer,
            asked: BTreeMap::new(),
            in_force: None,
            sheds: 0,
            regrown: Bytes::ZERO,
            fallen: BTreeMap::new(),
        }
    }

    /// Processes one turn of the loop: the state after it, and its actions. `last_end` returns the class of a worker's
    /// last end in one word.
    pub(super) fn turn(
        &mut self,
        after: &Snapshot,
        actions: &[Action],
        last_end: impl Fn(&str) -> Option<&'static str>,
    ) {
        let shed = after.totals.sheds > self.sheds;
        for action in actions {
            match action {
                Action::Answer {
                    answer: Answer::Denied { denial, .. },
                    ..
                } => {
                    self.metrics.lease_denied(name_of(denial));
                }
                Action::ApplyPlan {
                    revision, reason, ..
                } => {
                    if let Some(reason) = shed_by(reason) {
                        self.ask(Holder::Plan(*revision), reason, after);
                    }
                }
                Action::SetTarget { lease, reason, .. } => {
                    self.ask(Holder::Lease(*lease), word(reason), after);
                }
                Action::StopWorker {
                    worker,
                    reason: StopReason::Reclaim { reclaim, .. },
                } => {
                    self.ask(Holder::Worker(worker.clone()), word(reclaim), after);
                }
                Action::EndLease { lease, end } => {
                    self.asked.remove(&Holder::Lease(lease.id));
                    if let LeaseEnd::NotReduced { .. } = end {
                        self.metrics.reclaim_missed(&lease.tenant);
                    }
                }
                Action::StartWorker { worker, .. } => {
                    if let Some(end) = self.fallen.remove(worker) {
                        self.metrics.worker_restarted(worker, end);
                    }
                }
                Action::Decided { decision } => self.decided(decision, shed, after, &last_end),
                _ => {}
            }
        }
        self.sheds = after.totals.sheds;
        let regrown = after.totals.regrown_bytes;
        if regrown > self.regrown {
            let bytes = regrown.saturating_sub(self.regrown);
            self.tracer.event_in_stages(
                "cotenant.grow_back",
                &[("cotenant.bytes", bytes.get().into())],
            );
        }
        self.regrown = regrown;
        self.forget_unasked(after);
    }

    fn decided(
        &mut self,
        decision: &Decision,
        shed: bool,
        after: &Snapshot,
        last_end: &impl Fn(&str) -> Option<&'static str>,
    ) {
        match decision {
            Decision::Engine(EngineDecision::Applied {
                revision, outcome, ..
            }) => {
                let asked = self.plan_answered(*revision);
                let old = std::mem::replace(&mut self.in_force, after.engine.in_force.clone());
                if let PlanOutcome::Shed { credited, .. }
                | PlanOutcome::ChunkEnded { credited, .. } = outcome
                {
                    let plans = after
                        .engine
                        .shape
                        .as_ref()
                        .zip(old.as_ref().zip(self.in_force.as_ref()));
                    let parts =
                        plans.map(|(shape, (old, new))| parts_of(shape, old, new, *credited));
                    self.count_shed(asked, after, &parts.unwrap_or_default());
                }
            }
            Decision::Engine(EngineDecision::NotApplied { revision, .. }) => {
                self.asked.remove(&Holder::Plan(*revision));
            }
            Decision::Engine(EngineDecision::Gone { .. }) => {
                self.asked
                    .retain(|holder, _| !matches!(holder, Holder::Plan(_)));
            }
            Decision::Lease(LeaseDecision::Reduced { lease, freed, .. }) if shed => {
                let is_worker = after
                    .workers
                    .iter()
                    .any(|worker| worker.name == lease.tenant);
                let what = if is_worker { "worker" } else { "tenant" };
                let asked = self.asked.remove(&Holder::Lease(lease.id));
                let changed = || self.asked.remove(&Holder::Worker(lease.tenant.clone()));
                let asked = asked.or_else(changed);
                self.count_shed(asked, after, &[(what, *freed)]);
            }
            Decision::Worker(WorkerDecision::Changing {
                worker,
                cause: ChangeCause::Room { reason },
                ..
            }) => {
                self.ask(Holder::Worker(worker.clone()), word(reason), after);
            }
            Decision::Worker(WorkerDecision::Exited {
                worker,
                expected,
                freed,
                ..
            }) => {
                for kind in ["pss", "rss", "cgroup"] {
                    self.metrics.set_worker_memory(worker, kind, None);
                }
                match last_end(worker).filter(|_| !expected) {
                    Some(end) => self.fallen.insert(worker.clone(), end),
                    None => self.fallen.remove(worker),
                };
                let asked = self.asked.remove(&Holder::Worker(worker.clone()));
                if shed {
                    self.count_shed(asked, after, &[("worker", *freed)]);
                }
            }
            _ => {}
        }
    }

    fn ask(&mut self, holder: Holder, reason: &'static str, after: &Snapshot) {
        self.asked.entry(holder).or_insert(Asked {
            at: after.at,
            level: after.pressure.level,
            reason,
        });
    }

    /// Removes the requests that an applied plan satisfies; returns the oldest one.
    fn plan_answered(&mut self, revision: u64) -> Option<Asked> {
        let answered =
            |holder: &Holder| matches!(holder, Holder::Plan(asked) if *asked <= revision);
        let first = self
            .asked
            .iter()
            .find(|(holder, _)| answered(holder))
            .map(|(_, asked)| *asked);
        self.asked.retain(|holder, _| !answered(holder));
        first
    }

    /// Removes requests that are no longer pending because the holder has exited, or its lease has ended.
    fn forget_unasked(&mut self, after: &Snapshot) {
        self.asked.retain(|holder, _| match holder {
            Holder::Plan(_) => true,
            Holder::Lease(id) => {
                let lease = after.leases.iter().find(|lease| lease.id == *id);
                lease.is_some_and(|lease| lease.state == LeaseState::Revoking)
            }
            Holder::Worker(name) => after.workers.iter().any(|worker| worker.name == *name),
        });
    }

    /// Counts a shed by the bytes that the arbiter credited.
    fn count_shed(&self, asked: Option<Asked>, after: &Snapshot, parts: &[(&'static str, Bytes)]) {
        let level = asked.map_or(after.pressure.level, |asked| asked.level);
        self.metrics.shed(level);
        if let Some(asked) = asked {
            self.metrics.reclaimed(after.at.saturating_since(asked.at));
        }
        let reason = asked.map_or("lease", |asked| asked.reason);
        for (what, bytes) in parts.iter().filter(|(_, bytes)| *bytes > Bytes::ZERO) {
            self.metrics.shed_bytes(what, reason, *bytes);
            let attributes = [
                ("cotenant.shed.what", (*what).into()),
                ("cotenant.shed.reason", reason.into()),
                (
                    "cotenant.pressure.level",
                    level.to_string().to_lowercase().as_str().into(),
                ),
                ("cotenant.bytes", bytes.get().into()),
            ];
            self.tracer.event_in_stages("cotenant.shed", &attributes);
        }
    }
}

/// Returns the reason of a smaller plan in one word; `None` if it is not smaller.
fn shed_by(reason: &PlanReason) -> Option<&'static str> {
    match reason {
        PlanReason::Shed { reclaim, .. } => Some(word(reclaim)),
        PlanReason::KvType { change } => {
            (change.to.bytes < change.from.bytes).then_some("operator")
        }
        _ => None,
    }
}

const fn word(reason: &ReclaimReason) -> &'static str {
    match reason {
        ReclaimReason::Operator { .. } => "operator",
        ReclaimReason::Pressure { .. } | ReclaimReason::OverBudget { .. } => "pressure",
        ReclaimReason::EngineFloor { .. } | ReclaimReason::Request { .. } => "lease",
    }
}

/// Splits `freed` among the parts of the engine, bounded in total by the credited bytes.
fn parts_of(
    shape: &ModelShape,
    old: &EnginePlan,
    new: &EnginePlan,
    freed: Bytes,
) -> [(&'static str, Bytes); 3] {
    let layers = shape
        .layers
        .iter()
        .zip(0u32..)
        .filter(|(_, index)| old.resident.contains(index) && !new.resident.contains(index))
        .map(|(layer, _)| layer.resident_bytes)
        .fold(Bytes::ZERO, Bytes::saturating_add);
    let kv = shape
        .kv
        .capacity_bytes(old.kv_capacity, old.kv_type)
        .saturating_sub(shape.kv.capacity_bytes(new.kv_capacity, new.kv_type));
    let layers = layers.min(freed);
    let kv = kv.min(freed.saturating_sub(layers));
    let rest = freed.saturating_sub(layers).saturating_sub(kv);
    [("layers", layers), ("kv", kv), ("workspace", rest)]
}

/// Returns a denial in one word.
const fn name_of(denial: &Denial) -> &'static str {
    match denial {
        Denial::Draining { .. } => "draining",
        Denial::ExceedsBudget { .. } => "exceeds_budget",
        Denial::InsufficientMemory { .. } => "insufficient_memory",
        Denial::Invalid { .. } => "invalid",
        Denial::NotGrowing { .. } => "not_growing",
        Denial::NotHolder { .. } => "not_holder",
        Denial::PressureHigh { .. } => "pressure_high",
        Denial::QuotaExceeded { .. } => "quota_exceeded",
        Denial::Replaced { .. } => "replaced",
        Denial::RequestIdReused { .. } => "request_id_reused",
        Denial::CgroupHeld { .. } => "cgroup_held",
        Denial::StaleGeneration { .. } => "stale_generation",
        Denial::StaleSample { .. } => "stale_sample",
        Denial::UnknownLease { .. } => "unknown_lease",
    }
}

/// All results of [`name_of`].
pub(super) const DENIALS: [&str; 14] = [
    "cgroup_held",
    "draining",
    "exceeds_budget",
    "insufficient_memory",
    "invalid",
    "not_growing",
    "not_holder",
    "pressure_high",
    "quota_exceeded",
    "replaced",
    "request_id_reused",
    "stale_generation",
    "stale_sample",
    "unknown_lease",
];

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use cotenant_dev::samples::{sample_with, small_model};
    use cotenant_policy::{
        arbiter::Arbiter,
        event::{EngineApplied, Event, TargetAnswered, WorkerCommand, WorkerResize, WorkerResized},
        lease::{Class, LeaseRequest, Peer, TargetAnswer, Ticket},
        params::{EngineParams, Params, Scope, VariantParams, WorkerParams},
    };

    const fn mib(mib: u64) -> Bytes {
        Bytes::from_mib(mib)
    }

    /// The arbiter with its figures, as in the loop.
    struct Scene {
        arbiter: Arbiter,
        figures: Figures,
        metrics: Arc<Metrics>,
        now: Timestamp,
        actions: Vec<Action>,
    }

    impl Scene {
        fn new(params: Params) -> Self {
            let metrics = Arc::new(Metrics::new());
            Self {
                figures: Figures::new(&metrics, Tracer::default()),
                arbiter: Arbiter::new(params).unwrap(),
                metrics,
                now: Timestamp::START,
                actions: Vec::new(),
            }
        }

        fn tell(&mut self, event: Event) {
            self.now = self.now + Duration::from_millis(10);
            self.actions = self.arbiter.handle(self.now, event);
            let after = self.arbiter.snapshot();
            self.figures
                .turn(&after, &self.actions, |_: &str| Some("killed"));
        }

        fn sample(&mut self, used: Bytes) {
            self.now = self.now + Duration::from_millis(10);
            self.tell(Event::Sampled(sample_with(used, self.now)));
        }

        fn measured(&mut self, tenant: &str, used: Bytes) {
            self.now = self.now + Duration::from_millis(10);
            let taken_at = self.now;
            self.tell(Event::Measured {
                tenant: tenant.to_owned(),
                used: Some(used),
                taken_at,
            });
        }

        /// Lets the engine perform its last request.
        fn apply(&mut self) {
            let asked = self.actions.iter().find_map(|action| match action {
                Action::ApplyPlan { revision, plan, .. }
                | Action::LoadEngine { revision, plan } => Some((*revision, plan.clone())),
                _ => None,
            });
            let (revision, in_force) =
                asked.unwrap_or_else(|| panic!("no plan in {:#?}", self.actions));
            let used = small_model().plan_bytes(&in_force);
            self.tell(Event::EngineApplied(EngineApplied {
                freed: mib(1),
                ..EngineApplied::new(revision, in_force, used, Duration::from_millis(5))
            }));
        }

        /// Returns the sum over all series of a metric whose labels contain `labels`.
        fn figure(&self, name: &str, labels: &str) -> u64 {
            let text = self.metrics.encode();
            let lines = text
                .lines()
                .filter(|line| line.starts_with(name) && line.contains(labels));
            lines
                .map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
                .sum()
        }

        fn target(&self) -> (LeaseId, u64, Bytes) {
            let set = self.actions.iter().find_map(|action| match action {
                Action::SetTarget {
                    lease,
                    nonce,
                    bytes,
                    ..
                } => Some((*lease, *nonce, *bytes)),
                _ => None,
            });
            set.unwrap_or_else(|| panic!("no target in {:#?}", self.actions))
        }

        fn request(&mut self, tenant: &str, class: Class, bytes: Bytes) {
            self.tell(Event::LeaseRequested {
                ticket: Ticket(1),
                request: LeaseRequest {
                    tenant: tenant.to_owned(),
                    request_id: String::new(),
                    peer: Peer::default(),
                    class,
                    min: bytes,
                    max: bytes,
                    term: Some(Duration::from_secs(10)),
                    wait: Duration::from_secs(1),
                    validate_only: false,
                    cgroup: None,
                },
            });
        }
    }

    fn params() -> Params {
        let mut params = Params::for_budget(mib(400), Bytes::ZERO, Scope::Session);
        params.shed.minimum_reclaim = mib(20);
        params
    }

    fn with_engine() -> Scene {
        let mut params = params();
        params.engine = Some(EngineParams::default());
        let mut scene = Scene::new(params);
        scene.tell(Event::EngineInspected {
            shape: small_model(),
        });
        scene.sample(Bytes::ZERO);
        scene.apply();
        scene.measured("llm", mib(132));
        scene.sample(mib(132));
        scene
    }

    #[test]
    fn a_shed_of_the_engine_is_counted_by_what_came_back_and_why() {
        let mut scene = with_engine();
        assert_eq!(
            scene.figure("cotenant_shed_events_total", ""),
            0,
            "a load is no shed"
        );
        scene.tell(Event::OperatorShed {
            ticket: Ticket(1),
            bytes: mib(60),
            by: None,
        });
        scene.apply();
        let credited = scene.arbiter.snapshot().totals.shed_bytes;
        assert!(credited >= mib(60));
        let (kv, layers) = (
            scene.figure(
                "cotenant_shed_bytes_total",
                r#"what="kv",reason="operator""#,
            ),
            scene.figure(
                "cotenant_shed_bytes_total",
                r#"what="layers",reason="operator""#,
            ),
        );
        assert!(kv > 0 && layers > 0, "{}", scene.metrics.encode());
        assert_eq!(
            scene.figure("cotenant_shed_bytes_total", ""),
            credited.get()
        );
        assert_eq!(
            scene.figure("cotenant_shed_events_total", r#"level="normal""#),
            1
        );
        assert_eq!(scene.figure("cotenant_reclaim_seconds_count", ""), 1);
    }

    #[test]
    fn pressure_and_leases_are_reported_apart() {
        let mut scene = with_engine();
        scene.sample(mib(380));
        scene.apply();
        assert!(scene.figure("cotenant_shed_bytes_total", r#"reason="pressure""#) > 0);
        assert_eq!(
            scene.figure("cotenant_shed_events_total", r#"level="normal""#),
            0
        );

        let mut scene = with_engine();
        scene.request("asr", Class::AudioRealtime, mib(300));
        scene.apply();
        assert!(scene.figure("cotenant_shed_bytes_total", r#"reason="lease""#) > 0);
        assert_eq!(
            scene.figure("cotenant_shed_events_total", ""),
            scene.arbiter.snapshot().totals.sheds
        );
    }

    /// Returns a request of class batch that does not wait.
    fn batch(tenant: &str, (min, max): (u64, u64), pid: u32) -> LeaseRequest {
        LeaseRequest {
            tenant: tenant.to_owned(),
            request_id: String::new(),
            peer: Peer {
                pid: Some(pid),
                ..Peer::default()
            },
            class: Class::Batch,
            min: mib(min),
            max: mib(max),
            term: Some(Duration::from_secs(60)),
            wait: Duration::ZERO,
            validate_only: false,
            cgroup: None,
        }
    }

    #[test]
    fn a_tenant_that_comes_down_is_counted_and_one_that_does_not_is_missed() {
        for (obeys, sheds, missed) in [(true, 1, 0), (false, 0, 1)] {
            let mut scene = Scene::new(params());
            scene.sample(Bytes::ZERO);
            // Two processes of one name; figures are kept by name.
            for (size, pid) in [((1, 1), 1), ((10, 300), 2)] {
                scene.tell(Event::LeaseRequested {
                    ticket: Ticket(1),
                    request: batch("cache", size, pid),
                });
            }
            scene.measured("cache (pid 2)", mib(300));
            scene.request("asr", Class::AudioRealtime, mib(200));
            let (lease, nonce, bytes) = scene.target();
            if obeys {
                scene.tell(Event::TargetAnswered(TargetAnswered {
                    lease,
                    nonce,
                    answer: TargetAnswer::Applied,
                    claimed: None,
                }));
                scene.measured("cache (pid 2)", bytes);
                assert_eq!(
                    scene.figure("cotenant_shed_bytes_total", r#"what="tenant""#),
                    (mib(300) - bytes).get()
                );
            } else {
                scene.now = scene.now + Duration::from_secs(5);
                scene.tell(Event::DeadlineReached);
            }
            assert_eq!(scene.figure("cotenant_reclaim_seconds_count", ""), sheds);
            assert_eq!(
                scene.figure("cotenant_reclaim_missed_total", r#"tenant="cache""#),
                missed
            );
        }
    }

    #[test]
    fn a_question_goes_with_its_holder_and_the_next_one_of_its_name_has_its_own_time() {
        let mut scene = Scene::new(params());
        let took = |scene: &Scene| {
            let text = scene.metrics.encode();
            let line = text
                .lines()
                .find(|line| line.starts_with("cotenant_reclaim_seconds_sum"));
            line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
                .unwrap()
        };
        for round in 0..2 {
            scene.sample(Bytes::ZERO);
            // Two processes of one name; the second one is asked to shrink.
            for (pid, mib) in [(1, 40), (2, 360)] {
                scene.tell(Event::LeaseRequested {
                    ticket: Ticket(1),
                    request: batch("cache", (40, mib), pid + 10 * round),
                });
            }
            let holder = format!("cache (pid {})", 2 + 10 * round);
            scene.measured("cache", mib(40));
            scene.measured(&holder, mib(360));
            scene.request("asr", Class::AudioRealtime, mib(200));
            let (lease, nonce, bytes) = scene.target();
            assert_eq!(
                scene.figures.asked.keys().collect::<Vec<_>>(),
                [&Holder::Lease(lease)]
            );
            scene.now = scene.now + Duration::from_millis(500);
            if round == 1 {
                scene.tell(Event::TargetAnswered(TargetAnswered {
                    lease,
                    nonce,
                    answer: TargetAnswer::Applied,
                    claimed: None,
                }));
                scene.measured(&holder, bytes);
                assert_eq!(scene.figure("cotenant_reclaim_seconds_count", ""), 1);
                assert!((0.5..0.6).contains(&took(&scene)), "{}", took(&scene));
            }
            let leases = scene.arbiter.snapshot().leases;
            for lease in leases {
                scene.tell(Event::HolderLost {
                    lease: lease.id,
                    pid: None,
                });
            }
            assert!(scene.figures.asked.is_empty(), "{:?}", scene.figures.asked);
            scene.now = scene.now + Duration::from_secs(60);
        }
    }

    #[test]
    fn only_ends_that_were_not_requested_make_a_restart() {
        let mut params = params();
        params.workers = vec![WorkerParams {
            name: "asr".to_owned(),
            steady: mib(40),
            peak: mib(40),
            variants: vec![],
            ..WorkerParams::default()
        }];
        params.workers[0].start.restart.backoff_min = Duration::from_millis(1);
        let mut scene = Scene::new(params);
        let up = |scene: &mut Scene| {
            scene.now = scene.now + Duration::from_secs(1);
            let used = scene.arbiter.snapshot().memory.held;
            scene.sample(used);
            scene.tell(Event::DeadlineReached);
            scene.tell(Event::WorkerReady {
                worker: "asr".to_owned(),
                pid: 7,
            });
            assert_eq!(scene.arbiter.snapshot().workers[0].pid, Some(7), "it is up");
        };
        let exited = |intended| Event::WorkerExited {
            worker: "asr".to_owned(),
            intended,
            cause: "as planted".to_owned(),
        };
        up(&mut scene);
        scene.metrics.set_worker_memory("asr", "pss", Some(mib(40)));
        assert_eq!(
            scene.figure("cotenant_worker_restarts_total", ""),
            0,
            "the first start"
        );
        scene.tell(exited(false));
        assert!(
            !scene
                .metrics
                .encode()
                .contains("cotenant_worker_memory_bytes{")
        );
        up(&mut scene);
        assert_eq!(
            scene.figure("cotenant_worker_restarts_total", r#"reason="killed""#),
            1
        );
        scene.tell(Event::OperatorWorker {
            ticket: Ticket(2),
            worker: "asr".to_owned(),
            command: WorkerCommand::Recycle,
            by: None,
        });
        scene.tell(exited(true));
        up(&mut scene);
        assert_eq!(scene.figure("cotenant_worker_restarts_total", ""), 1);
        assert_eq!(scene.figure("cotenant_shed_events_total", ""), 0);
    }

    #[test]
    fn only_a_variant_that_was_given_up_is_a_shed() {
        let mut params = params();
        let variant = |name: &str, steady| VariantParams {
            name: name.to_owned(),
            steady: mib(steady),
            peak: mib(steady),
        };
        params.workers = vec![WorkerParams {
            name: "asr".to_owned(),
            steady: mib(40),
            peak: mib(40),
            variants: vec![variant("grammar", 40), variant("open", 110)],
            ..WorkerParams::default()
        }];
        let mut scene = Scene::new(params);
        scene.sample(Bytes::ZERO);
        scene.tell(Event::WorkerReady {
            worker: "asr".to_owned(),
            pid: 7,
        });
        scene.measured("asr", mib(40));
        for (variant, used) in [("open", 110), ("grammar", 40)] {
            scene.sample(mib(40));
            scene.tell(Event::WorkerResizeRequested(WorkerResize {
                ticket: Ticket(3),
                worker: "asr".to_owned(),
                variant: variant.to_owned(),
                wait: Duration::from_secs(1),
                by: None,
            }));
            scene.tell(Event::WorkerResized(WorkerResized {
                worker: "asr".to_owned(),
                variant: variant.to_owned(),
                used: Some(mib(used)),
                error: None,
            }));
            scene.measured("asr", mib(used));
        }
        assert_eq!(
            scene.arbiter.snapshot().workers[0].variant.as_deref(),
            Some("grammar")
        );
        assert_eq!(scene.figure("cotenant_shed_events_total", ""), 0);
        assert!(scene.figures.asked.is_empty(), "{:?}", scene.figures.asked);
        scene.request("cache", Class::Batch, Bytes::from_gib(1));
        assert_eq!(
            scene.figure("cotenant_lease_denied_total", r#"reason="exceeds_budget""#),
            1
        );
    }
}
