//! What metrics count between two states: sheds, reclaims, denials, restarts. Taken from what the loop sees, so that the
//! figures and the journal cannot tell different stories.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    policy::{
        death::DeathClass,
        denial::Denial,
        event::{Action, Answer, Event},
        lease::{LeaseId, LeaseState, LeaseView},
        params::Params,
        pressure::PressureLevel,
        residency::{EnginePlan, ModelShape},
        snapshot::{EngineView, Snapshot},
    },
    telemetry::Metrics,
    units::{Bytes, Timestamp},
};

/// Counts what happens.
pub(super) struct Figures {
    metrics: Arc<Metrics>,
    /// Steady size of each variant of each worker.
    sizes: BTreeMap<(String, String), Bytes>,
    /// Plans by which the engine gives memory up and that it has not answered.
    plans: BTreeMap<u64, Asked>,
    /// Workers and tenants that were asked for memory which is not verified to be back.
    asked: BTreeMap<String, Asked>,
    /// Workers whose last end was unexpected.
    fallen: BTreeMap<String, &'static str>,
}

/// A question for memory.
#[derive(Clone, Copy, Debug)]
struct Asked {
    at: Timestamp,
    level: PressureLevel,
    reason: &'static str,
}

/// What the loop keeps of an event for its figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Noted {
    Applied { revision: u64 },
    Died { worker: String, class: DeathClass },
    ApplyFailed { revision: u64 },
    EngineFailed,
    Exited { worker: String, asked: bool },
    Measured { tenant: String },
    Operator,
    Resized { worker: String },
    Other,
}

impl Noted {
    /// What matters of `event`.
    pub(super) fn of(event: &Event) -> Self {
        match event {
            Event::EngineApplied { revision, .. } => Self::Applied { revision: *revision },
            Event::EngineApplyFailed { revision, .. } => Self::ApplyFailed { revision: *revision },
            Event::EngineFailed { .. } => Self::EngineFailed,
            Event::Measured { tenant, .. } => Self::Measured { tenant: tenant.clone() },
            Event::OperatorShed { .. } | Event::OperatorKvType { .. } => Self::Operator,
            Event::WorkerDied { certificate } => Self::Died {
                worker: certificate.worker.clone(),
                class: certificate.verdict.class,
            },
            Event::WorkerExited { worker, intended, .. } => Self::Exited {
                worker: worker.clone(),
                asked: *intended,
            },
            Event::WorkerResized { worker, .. } => Self::Resized { worker: worker.clone() },
            _ => Self::Other,
        }
    }
}

impl Figures {
    /// Figures of a supervisor with the settings `params`, which go into `metrics`.
    pub(super) fn new(metrics: &Arc<Metrics>, params: &Params) -> Self {
        let sizes = params.workers.iter().flat_map(|worker| {
            let variants = worker.variants.iter();
            variants.map(|variant| ((worker.name.clone(), variant.name.clone()), variant.steady))
        });
        Self {
            metrics: Arc::clone(metrics),
            sizes: sizes.collect(),
            plans: BTreeMap::new(),
            asked: BTreeMap::new(),
            fallen: BTreeMap::new(),
        }
    }

    /// Takes one turn of the loop: what happened, the states around it, and what is to be done. `last_end` says in one
    /// word how a worker ended.
    pub(super) fn turn(
        &mut self,
        event: &Noted,
        before: &Snapshot,
        after: &Snapshot,
        actions: &[Action],
        last_end: impl Fn(&str) -> Option<&'static str>,
    ) {
        let pressed = after.level > PressureLevel::Normal
            && after.headroom.is_some_and(|headroom| headroom < after.elevated_below);
        let now = Asked {
            at: after.at,
            level: after.level,
            reason: match event {
                Noted::Operator => "operator",
                _ if pressed => "pressure",
                _ => "lease",
            },
        };
        let answered = actions.iter().any(|action| matches!(action, Action::Answer { .. }));
        let asked = self.answered(event, before, after, answered);
        if after.sheds > before.sheds {
            self.count_shed(event, before, after, asked, now);
        }
        if let Noted::Died { worker, class } = event {
            self.metrics.worker_died(worker, class.name());
        }
        if let Noted::Exited { worker, asked } = event {
            for kind in ["pss", "rss", "cgroup"] {
                self.metrics.set_worker_memory(worker, kind, None);
            }
            match last_end(worker).filter(|_| !asked) {
                Some(end) => self.fallen.insert(worker.clone(), end),
                None => self.fallen.remove(worker),
            };
        }
        for action in actions {
            self.count(action, before, after, now);
        }
        self.forget_unasked(after);
    }

    /// Drops questions to holders that nothing is asked of any more: they have gone, or their lease has ended otherwise.
    fn forget_unasked(&mut self, after: &Snapshot) {
        if self.asked.is_empty() {
            return;
        }
        let revoking = after.leases.iter().filter(|lease| lease.state == LeaseState::Revoking);
        let revoking: BTreeSet<&str> = revoking.map(LeaseView::holder).collect();
        let is_worker = |name: &str| after.workers.iter().any(|worker| worker.name == name);
        self.asked
            .retain(|holder, _| revoking.contains(holder.as_str()) || is_worker(holder));
    }

    /// The question that `event` answers, if any; it is not open any more.
    fn answered(&mut self, event: &Noted, before: &Snapshot, after: &Snapshot, caller: bool) -> Option<Asked> {
        match event {
            Noted::Applied { revision } => {
                let open = self.plans.split_off(&revision.saturating_add(1));
                let mut answered = std::mem::replace(&mut self.plans, open).into_values();
                answered.next() // what was asked first has waited longest
            }
            Noted::ApplyFailed { revision } => {
                self.plans.remove(revision);
                None
            }
            Noted::EngineFailed => {
                self.plans.clear();
                None
            }
            Noted::Exited { worker, .. } => self.asked.remove(worker),
            // A size that somebody had asked for is no shed.
            Noted::Resized { worker } if caller => {
                self.asked.remove(worker);
                None
            }
            Noted::Measured { tenant: holder } | Noted::Resized { worker: holder } => {
                let verified = after.sheds > before.sheds;
                verified.then(|| self.asked.remove(holder)).flatten()
            }
            Noted::Died { .. } | Noted::Operator | Noted::Other => None,
        }
    }

    /// Counts what the arbiter has counted; what it credited is what came back.
    fn count_shed(&self, event: &Noted, before: &Snapshot, after: &Snapshot, asked: Option<Asked>, now: Asked) {
        let Asked { level, reason, .. } = asked.unwrap_or(now);
        self.metrics.shed(level);
        if let Some(asked) = asked {
            self.metrics.reclaimed(after.at.saturating_since(asked.at));
        }
        let freed = after.shed_bytes.saturating_sub(before.shed_bytes);
        let plans = (&before.engine.shape, &before.engine.in_force, &after.engine.in_force);
        let is_worker = |name: &String| after.workers.iter().any(|worker| worker.name == *name);
        let parts = match (event, plans) {
            (Noted::Applied { .. }, (Some(shape), Some(old), Some(new))) => parts_of(shape, old, new, freed).to_vec(),
            (Noted::Measured { tenant }, _) if !is_worker(tenant) => vec![("tenant", freed)],
            _ => vec![("worker", freed)],
        };
        for (what, bytes) in parts {
            if bytes > Bytes::ZERO {
                self.metrics.shed_bytes(what, reason, bytes);
            }
        }
    }

    fn count(&mut self, action: &Action, before: &Snapshot, after: &Snapshot, now: Asked) {
        match action {
            Action::Answer {
                answer: Answer::Denied { denial, .. },
                ..
            } => self.metrics.lease_denied(name_of(denial)),
            Action::ApplyPlan { revision, plan, .. } if gives_up(&before.engine, plan) => {
                self.plans.insert(*revision, now);
            }
            Action::SetTarget { lease, .. } => {
                if let Some(lease) = lease_of(after, *lease) {
                    self.asked.entry(lease.holder().to_owned()).or_insert(now);
                }
            }
            Action::EndLease { lease, .. } => {
                if let Some(view) = lease_of(before, lease.id) {
                    self.asked.remove(view.holder());
                    if has_missed(view, after.at) {
                        self.metrics.reclaim_missed(&view.tenant);
                    }
                }
            }
            Action::ResizeWorker { worker, variant } if self.shrinks(before, worker, variant) => {
                self.asked.insert(worker.clone(), now);
            }
            Action::StopWorker { worker, .. } => {
                self.asked.entry(worker.clone()).or_insert(now);
            }
            Action::StartWorker { worker, .. } => {
                if let Some(end) = self.fallen.remove(worker) {
                    self.metrics.worker_restarted(worker, end);
                }
            }
            _ => {}
        }
    }

    fn shrinks(&self, before: &Snapshot, name: &str, variant: &str) -> bool {
        let size = |variant: &str| self.sizes.get(&(name.to_owned(), variant.to_owned()));
        let worker = before.workers.iter().find(|worker| worker.name == name);
        let present = worker.and_then(|worker| size(worker.variant.as_deref()?));
        size(variant)
            .zip(present)
            .is_some_and(|(wanted, present)| wanted < present)
    }
}

/// Whether the engine is asked for less than what it was to hold before.
fn gives_up(engine: &EngineView, plan: &EnginePlan) -> bool {
    let goal = engine.asked.as_ref().or(engine.in_force.as_ref());
    match (&engine.shape, goal) {
        (Some(shape), Some(goal)) => shape.plan_bytes(plan) < shape.plan_bytes(goal),
        _ => false,
    }
}

/// Which parts of the engine `freed` came from. What it was credited with bounds all of them.
fn parts_of(shape: &ModelShape, old: &EnginePlan, new: &EnginePlan, freed: Bytes) -> [(&'static str, Bytes); 3] {
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

fn lease_of(snapshot: &Snapshot, id: LeaseId) -> Option<&LeaseView> {
    snapshot.leases.iter().find(|lease| lease.id == id)
}

/// Whether a lease ends because its target was not reached, and not because its term ran out.
fn has_missed(lease: &LeaseView, now: Timestamp) -> bool {
    lease.state == LeaseState::Revoking
        && lease.target.as_ref().is_some_and(|target| target.deadline <= now)
        && lease.expires_at.is_none_or(|at| at > now)
}

/// A denial in one word.
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
        Denial::StaleGeneration { .. } => "stale_generation",
        Denial::StaleSample { .. } => "stale_sample",
        Denial::UnknownLease { .. } => "unknown_lease",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::policy::{
        arbiter::Arbiter,
        event::WorkerCommand,
        lease::{Class, LeaseRequest, Peer, TargetAnswer, Ticket},
        params::{EngineParams, Scope, VariantParams, WorkerParams},
        pressure::Sample,
        residency::{KvShape, LayerKind, LayerShape},
    };
    use crate::units::Tokens;

    const fn mib(mib: u64) -> Bytes {
        Bytes::from_mib(mib)
    }

    /// The real arbiter between its figures, as the loop has it.
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
                figures: Figures::new(&metrics, &params),
                arbiter: Arbiter::new(params).unwrap(),
                metrics,
                now: Timestamp::START,
                actions: Vec::new(),
            }
        }

        fn tell(&mut self, event: Event) {
            self.now = self.now + Duration::from_millis(10);
            let (noted, before) = (Noted::of(&event), self.arbiter.snapshot());
            self.actions = self.arbiter.handle(self.now, event);
            let after = self.arbiter.snapshot();
            let end = |_: &str| Some("killed");
            self.figures.turn(&noted, &before, &after, &self.actions, end);
        }

        fn sample(&mut self, used: Bytes) {
            self.now = self.now + Duration::from_millis(10);
            let taken_at = self.now;
            self.tell(Event::Sampled(Sample {
                taken_at,
                mem_total: Bytes::from_gib(8),
                mem_available: Bytes::from_gib(7),
                scope_used: Some(used),
                ..Sample::default()
            }));
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

        /// The engine carries out what it was just asked for.
        fn apply(&mut self) {
            let asked = self.actions.iter().find_map(|action| match action {
                Action::ApplyPlan { revision, plan, .. } | Action::LoadEngine { revision, plan } => {
                    Some((*revision, plan.clone()))
                }
                _ => None,
            });
            let (revision, in_force) = asked.unwrap_or_else(|| panic!("no plan in {:#?}", self.actions));
            let used = shape().plan_bytes(&in_force);
            self.tell(Event::EngineApplied {
                revision,
                in_force,
                freed: mib(1),
                used,
                untouched: Bytes::ZERO,
                untouched_given: Bytes::ZERO,
                took: Duration::from_millis(5),
            });
        }

        /// The sum of all series of a metric whose labels contain `labels`.
        fn figure(&self, name: &str, labels: &str) -> u64 {
            let text = self.metrics.encode();
            let lines = text
                .lines()
                .filter(|line| line.starts_with(name) && line.contains(labels));
            lines
                .map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
                .sum()
        }

        /// The target that was set last.
        fn target(&self) -> (LeaseId, u64, Bytes) {
            let set = self.actions.iter().find_map(|action| match action {
                Action::SetTarget {
                    lease, nonce, bytes, ..
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
                    term: Duration::from_secs(10),
                    wait: Duration::from_secs(1),
                    validate_only: false,
                },
            });
        }
    }

    fn params() -> Params {
        let mut params = Params::for_budget(mib(400), Bytes::ZERO, Scope::Session);
        params.shed.minimum_reclaim = mib(20);
        params
    }

    fn shape() -> ModelShape {
        ModelShape {
            name: "tiny".to_owned(),
            architecture: "qwen35".to_owned(),
            layers: vec![
                LayerShape {
                    kind: LayerKind::Attention,
                    part: 0,
                    resident_bytes: mib(10),
                };
                8
            ],
            fixed_bytes: mib(16),
            state_bytes: mib(1),
            kv: KvShape {
                attention_layers: 8,
                kv_heads: 2,
                head_dim: 128,
                element_bytes: 2,
                granule: Bytes::ZERO,
                block_tokens: Tokens::new(64),
            },
            context_max: Tokens::new(8192),
            workspace_fixed_bytes: mib(3),
            workspace_bytes_per_token: Bytes::ZERO,
            ring_bytes: mib(4),
        }
    }

    fn with_engine() -> Scene {
        let mut params = params();
        params.engine = Some(EngineParams::default());
        let mut scene = Scene::new(params);
        scene.tell(Event::EngineInspected { shape: shape() });
        scene.sample(Bytes::ZERO);
        scene.apply();
        scene.measured("llm", mib(132));
        scene.sample(mib(132));
        scene
    }

    #[test]
    fn a_shed_of_the_engine_is_counted_by_what_came_back_and_why() {
        let mut scene = with_engine();
        assert_eq!(scene.figure("cotenant_shed_events_total", ""), 0, "a load is no shed");
        scene.tell(Event::OperatorShed {
            ticket: Ticket(1),
            bytes: mib(60),
        });
        scene.apply();
        let credited = scene.arbiter.snapshot().shed_bytes;
        assert!(credited >= mib(60));
        let (kv, layers) = (
            scene.figure("cotenant_shed_bytes_total", r#"what="kv",reason="operator""#),
            scene.figure("cotenant_shed_bytes_total", r#"what="layers",reason="operator""#),
        );
        assert!(kv > 0 && layers > 0, "{}", scene.metrics.encode());
        assert_eq!(scene.figure("cotenant_shed_bytes_total", ""), credited.get());
        assert_eq!(scene.figure("cotenant_shed_events_total", r#"level="normal""#), 1);
        assert_eq!(scene.figure("cotenant_reclaim_seconds_count", ""), 1);
    }

    #[test]
    fn pressure_and_leases_are_told_apart() {
        let mut scene = with_engine();
        scene.sample(mib(380));
        scene.apply();
        assert!(scene.figure("cotenant_shed_bytes_total", r#"reason="pressure""#) > 0);
        assert_eq!(scene.figure("cotenant_shed_events_total", r#"level="normal""#), 0);

        let mut scene = with_engine();
        scene.request("asr", Class::AudioRealtime, mib(300));
        scene.apply();
        assert!(scene.figure("cotenant_shed_bytes_total", r#"reason="lease""#) > 0);
        assert_eq!(
            scene.figure("cotenant_shed_events_total", ""),
            scene.arbiter.snapshot().sheds
        );
    }

    /// A request of class batch, which does not wait.
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
            term: Duration::from_secs(60),
            wait: Duration::ZERO,
            validate_only: false,
        }
    }

    #[test]
    fn a_tenant_that_comes_down_is_counted_and_one_that_does_not_is_missed() {
        for (obeys, sheds, missed) in [(true, 1, 0), (false, 0, 1)] {
            let mut scene = Scene::new(params());
            scene.sample(Bytes::ZERO);
            // The second process of its name; figures go by the name.
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
                scene.tell(Event::TargetAnswered {
                    lease,
                    nonce,
                    answer: TargetAnswer::Applied,
                    claimed: None,
                });
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
            // Two processes of one name; the second one is asked.
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
            assert_eq!(scene.figures.asked.keys().collect::<Vec<_>>(), [&holder]);
            scene.now = scene.now + Duration::from_millis(500);
            if round == 1 {
                scene.tell(Event::TargetAnswered {
                    lease,
                    nonce,
                    answer: TargetAnswer::Applied,
                    claimed: None,
                });
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
    fn only_ends_that_nobody_asked_for_make_a_restart() {
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
            let used = scene.arbiter.snapshot().held;
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
        assert_eq!(scene.figure("cotenant_worker_restarts_total", ""), 0, "the first start");
        scene.tell(exited(false));
        assert!(!scene.metrics.encode().contains("cotenant_worker_memory_bytes{"));
        up(&mut scene);
        assert_eq!(scene.figure("cotenant_worker_restarts_total", r#"reason="killed""#), 1);
        scene.tell(Event::OperatorWorker {
            ticket: Ticket(2),
            worker: "asr".to_owned(),
            command: WorkerCommand::Recycle,
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
            scene.tell(Event::WorkerResizeRequested {
                ticket: Ticket(3),
                worker: "asr".to_owned(),
                variant: variant.to_owned(),
                wait: Duration::from_secs(1),
            });
            scene.tell(Event::WorkerResized {
                worker: "asr".to_owned(),
                variant: variant.to_owned(),
                used: Some(mib(used)),
                error: None,
            });
            scene.measured("asr", mib(used));
        }
        assert_eq!(scene.arbiter.snapshot().workers[0].variant.as_deref(), Some("grammar"));
        assert_eq!(scene.figure("cotenant_shed_events_total", ""), 0);
        assert!(scene.figures.asked.is_empty(), "{:?}", scene.figures.asked);
        scene.request("cache", Class::Batch, Bytes::from_gib(1));
        assert_eq!(
            scene.figure("cotenant_lease_denied_total", r#"reason="exceeds_budget""#),
            1
        );
    }
}
