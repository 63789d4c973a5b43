//! Boards made of numbers: the decisions of this crate around the supervisor's own arbiter, on a virtual clock.
//!
//! A board has an LLM, a program of a lesser class, programs of the class of claims that come and go, and pods. The
//! scheduler sees what was published a moment ago, and a pod is prepared later than it is placed. In a cluster, the
//! API server, the driver and kubelet's calls also fail.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use cotenant_policy::{
    Arbiter,
    event::{Action, Answer, EngineApplied, Event, LeaseCall, LeaseResize, TargetAnswered},
    lease::{self, Class, LeaseRequest, LeaseView, Peer, TargetAnswer, Ticket},
    params::{EngineParams, Params, Scope},
    pressure::{MemoryReading, PressureLevel as Level, Sample},
    residency::{EnginePlan, KvShape, LayerKind, LayerShape, ModelShape},
};
use cotenant_rpc::v1::{LeaseState, PressureLevel};
use cotenant_units::{Bytes, Timestamp, Tokens};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::{
    book::{self, Held, Resize, Size},
    claim,
    pool::{Effect, Figures, Offer, Pool, PoolParams, STEP},
};

const BUDGET: Bytes = Bytes::from_mib(6 * 1024);

/// Time after which kubelet gives up a call.
const KUBELET_LIMIT: Duration = Duration::from_secs(45);

/// Uid of the driver, and of other programs.
const DRIVER: u32 = 0;
const OTHERS: u32 = 1000;

/// A claim of a pod.
#[derive(Clone, Copy)]
struct Claim {
    min: Bytes,
    max: Bytes,
    /// Part of its memory that the pod uses, in thousandths, unless it has to free some.
    uses: u32,
}

/// End of a preparation.
enum Outcome {
    /// With the lease of the claim, and the time to it.
    Lease(lease::LeaseId, Duration),
    Refused,
    /// The driver was killed, or kubelet gave up.
    Cut,
}

struct Board {
    arbiter: Arbiter,
    now: Timestamp,
    pool: Pool,
    tickets: u64,
    shape: Option<ModelShape>,
    /// Plans for the engine, each with its number, the time at which it is carried out, and how long that takes.
    orders: VecDeque<(Timestamp, u64, EnginePlan, Duration)>,
    /// End of the LLM's running answer.
    answer_ends: Option<Timestamp>,
    claims: BTreeMap<String, Claim>,
    answers: BTreeMap<u64, Answer>,
    /// Time for which memory was free that a claim could have, and for which claims lacked memory below their maximum.
    idle_while_wanted: Duration,
    wanted: Duration,
}

impl Board {
    fn new(with_engine: bool, margin: Bytes) -> Self {
        let mut params = Params::for_budget(BUDGET, Bytes::ZERO, Scope::Session);
        // Samples are given only where they decide.
        params.pressure.sample_age_max = Duration::from_secs(1 << 20);
        params.lease.leases_per_uid = 256;
        params.engine = with_engine.then(EngineParams::default);
        let evict = false;
        let mut board = Self {
            arbiter: Arbiter::new(params).unwrap(),
            now: Timestamp::START,
            pool: Pool::new(PoolParams { margin, evict }),
            tickets: 0,
            shape: with_engine.then(shape),
            orders: VecDeque::new(),
            answer_ends: None,
            claims: BTreeMap::new(),
            answers: BTreeMap::new(),
            idle_while_wanted: Duration::ZERO,
            wanted: Duration::ZERO,
        };
        board.sample();
        if let Some(shape) = board.shape.clone() {
            board.event(Event::EngineInspected { shape });
        }
        board.settle();
        board.read();
        board
    }

    /// Passes an event to the arbiter, and carries out the actions of holders.
    fn event(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for action in self.arbiter.handle(self.now, event) {
                match action {
                    Action::Answer { ticket, answer } => {
                        self.answers.insert(ticket.0, answer);
                    }
                    Action::LoadEngine { revision, plan }
                    | Action::ApplyPlan { revision, plan, .. } => {
                        // It is in a prompt, or between two tokens.
                        let took = Duration::from_millis(revision * 731 % 1900);
                        self.orders
                            .push_back((self.now + took, revision, plan, took));
                    }
                    Action::SetTarget { lease, nonce, .. } => {
                        let answer = TargetAnswer::Applied;
                        let claimed = None;
                        events.push_back(Event::TargetAnswered(TargetAnswered {
                            lease,
                            nonce,
                            answer,
                            claimed,
                        }));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Carries out the orders to the engine that are due.
    fn carry_out(&mut self) {
        while let Some((_, revision, plan, took)) =
            self.orders.pop_front_if(|(at, ..)| *at <= self.now)
        {
            let shape = self.shape.as_ref().unwrap();
            let before = self.arbiter.snapshot().engine.in_force;
            let before = before.map_or(Bytes::ZERO, |before| shape.plan_bytes(&before));
            let used = shape.plan_bytes(&plan);
            self.event(Event::EngineApplied(EngineApplied {
                freed: before.saturating_sub(used),
                ..EngineApplied::new(revision, plan, used, took)
            }));
        }
    }

    /// Measures the machine and every holder, as the supervisor does once per second.
    fn sample(&mut self) {
        self.carry_out();
        if self.answer_ends.is_some_and(|end| end <= self.now) {
            self.answers_with(0);
        }
        let snapshot = self.arbiter.snapshot();
        let memory = snapshot.memory;
        assert!(memory.held <= memory.budget, "over-commit: {memory:?}");
        // A process with several leases is measured once.
        let mut used: BTreeMap<String, Bytes> = BTreeMap::new();
        let tenants = snapshot.leases.iter();
        for lease in tenants.filter(|lease| lease.kind == lease::LeaseKind::Tenant) {
            *used.entry(lease.holder().to_owned()).or_default() += self.uses(lease);
        }
        let plan = snapshot.engine.in_force.zip(self.shape.as_ref());
        let engine = plan.map_or(Bytes::ZERO, |(plan, shape)| shape.plan_bytes(&plan));
        let scope_used = Some(used.values().copied().sum::<Bytes>() + engine);
        let taken_at = self.now;
        for (tenant, used) in used {
            let used = Some(used);
            self.event(Event::Measured {
                tenant,
                used,
                taken_at,
            });
        }
        let memory = MemoryReading {
            mem_total: BUDGET.saturating_mul(4),
            mem_available: BUDGET.saturating_mul(3),
            mem_free: BUDGET.saturating_mul(3),
            group: None,
        };
        self.event(Event::Sampled(Sample {
            taken_at,
            memory,
            scope_used,
            ..Sample::default()
        }));
    }

    /// Begins an answer of the LLM with so many tokens; none ends it.
    fn answers_with(&mut self, tokens: u32) {
        self.answer_ends = self.answer_ends.filter(|_| tokens > 0);
        self.event(Event::EngineActivity {
            requests: tokens.min(1),
            kv_used: tokens,
            kv_kept: 0,
            kv_prompt: tokens,
            kv_most: tokens,
            kv_droppable: 0,
            kv_dropped: 0,
            untouched: Bytes::ZERO,
            beside: Vec::new(),
        });
    }

    fn uses(&self, lease: &LeaseView) -> Bytes {
        if matches!(
            lease.state,
            lease::LeaseState::Gone | lease::LeaseState::Requested
        ) {
            return Bytes::ZERO;
        }
        let claim = claim::uid_of(&lease.tenant).and_then(|uid| self.claims.get(uid));
        let uses = lease
            .memory
            .held
            .per_mille(claim.map_or(500, |claim| claim.uses));
        lease
            .target
            .as_ref()
            .map_or(uses, |target| uses.min(target.bytes))
    }

    /// Lets time pass, with a measurement each second and a read of the driver 700 ms later at the latest.
    fn pass(&mut self, time: Duration, with_driver: bool) {
        let end = self.now + time;
        while self.now < end {
            let step = Duration::from_millis(900).min(end.saturating_since(self.now));
            let (wanted, idle) = self.lacks();
            if wanted {
                self.wanted += step;
            }
            if idle {
                self.idle_while_wanted += step;
            }
            self.now = self.now + step;
            self.event(Event::DeadlineReached);
            self.sample();
            if with_driver {
                self.read();
            }
        }
    }

    /// Lets a moment pass in which nothing but measurements happens.
    fn settle(&mut self) {
        self.now = self.now + Duration::from_millis(5);
        self.event(Event::DeadlineReached);
        self.sample();
    }

    /// Returns whether claims lack memory below their maximum, and whether there is memory for them.
    fn lacks(&self) -> (bool, bool) {
        let grown = book::growth(&self.held(), Bytes::new(u64::MAX >> 1), |uid| {
            self.max_of(uid)
        });
        let wanted = !grown.is_empty();
        let free = self.arbiter.snapshot().memory.free;
        let possible = book::growth(&self.held(), free, |uid| self.max_of(uid));
        (wanted, !possible.is_empty())
    }

    fn max_of(&self, uid: &str) -> Option<Bytes> {
        self.claims.get(uid).map(|claim| claim.max)
    }

    fn held(&self) -> Vec<Held> {
        let leases = self.arbiter.snapshot().leases;
        let held = leases.iter().filter_map(|lease| {
            let uid = claim::uid_of(&lease.tenant)?;
            Some(Held {
                uid: uid.to_owned(),
                name: lease.id.0.to_string(),
                boot_id: String::new(),
                generation: lease.generation,
                cgroup: lease.owner.cgroup.clone().unwrap_or_default(),
                state: match lease.state {
                    lease::LeaseState::Requested => LeaseState::Requested,
                    lease::LeaseState::Granted => LeaseState::Granted,
                    lease::LeaseState::Revoking => LeaseState::Revoking,
                    lease::LeaseState::Gone => LeaseState::Gone,
                },
                size: Size {
                    min: lease.memory.min,
                    held: lease.memory.held,
                    used: lease.memory.used,
                },
                target: None,
            })
        });
        held.collect()
    }

    /// What the driver does after an event of the supervisor.
    fn read(&mut self) {
        let figures = self.figures();
        self.pool.observe(self.now, figures);
        let snapshot = self.arbiter.snapshot();
        if snapshot.pressure.level == Level::Normal && snapshot.waiting == 0 {
            let held = self.held();
            for resize in book::growth(&held, snapshot.memory.free, |uid| self.max_of(uid)) {
                self.resize(&resize);
            }
        }
    }

    fn figures(&mut self) -> Figures {
        let held = self.held();
        Figures {
            level: match self.arbiter.snapshot().pressure.level {
                Level::Normal => PressureLevel::Normal,
                Level::Elevated => PressureLevel::Elevated,
                Level::Critical => PressureLevel::Critical,
            },
            grantable: self.outlook(BUDGET),
            booked: book::booked(&held),
            idle: book::idle(&held),
        }
    }

    fn ticket(&mut self) -> Ticket {
        self.tickets += 1;
        Ticket(self.tickets)
    }

    /// Returns what is granted of `bytes` at most.
    fn outlook(&mut self, bytes: Bytes) -> Bytes {
        let request = LeaseRequest {
            validate_only: true,
            ..request(
                "kubernetes-outlook",
                Class::Interactive,
                (bytes, bytes),
                DRIVER,
            )
        };
        match self.ask(request) {
            Some(Answer::WouldGrant { .. }) => bytes,
            Some(Answer::Denied {
                denial:
                    cotenant_policy::denial::Denial::InsufficientMemory {
                        free, reclaimable, ..
                    },
                ..
            }) => free.saturating_add(reclaimable),
            _ => Bytes::ZERO,
        }
    }

    fn ask(&mut self, request: LeaseRequest) -> Option<Answer> {
        let ticket = self.ticket();
        self.event(Event::LeaseRequested { ticket, request });
        self.answers.remove(&ticket.0)
    }

    fn resize(&mut self, resize: &Resize) {
        let ticket = self.ticket();
        self.event(Event::LeaseResizeRequested(LeaseResize {
            ticket,
            lease: lease::LeaseId(resize.lease.name.parse().unwrap()),
            generation: resize.lease.generation,
            peer: peer(DRIVER),
            min: resize.lease.size.min,
            max: resize.max,
            wait: Duration::ZERO,
        }));
        self.answers.remove(&ticket.0);
    }

    fn allocated(&self) -> Bytes {
        self.claims.values().map(|claim| claim.min).sum()
    }

    /// Returns whether a claim may be placed by an offer: the scheduler subtracts what it has allocated.
    fn fits(&self, offer: &Offer, min: Bytes) -> bool {
        let blocked = offer.taints.iter().any(|taint| taint.effect > Effect::None);
        !blocked && self.allocated().saturating_add(min) <= offer.capacity
    }

    /// Allocates a claim whose pod uses at least `uses` thousandths of it.
    fn place(&mut self, uid: &str, min: Bytes, uses: u32, rng: &mut ChaCha8Rng) {
        let (times, uses) = (rng.random_range(1..4), rng.random_range(uses..1000));
        let max = min.saturating_mul(times);
        self.claims.insert(uid.to_owned(), Claim { min, max, uses });
    }

    fn lease_of(&self, uid: &str) -> Option<lease::LeaseId> {
        let live = |lease: &&Held| lease.uid == uid && lease.is_live();
        let held = self.held();
        let lease = held.iter().find(live)?;
        Some(lease::LeaseId(lease.name.parse().unwrap()))
    }

    /// Prepares a claim as the driver does, unless it is killed after so many calls, or kubelet gives up.
    fn prepare(&mut self, uid: &str, mut calls: u32, limit: Duration) -> Outcome {
        let (claim, since) = (self.claims[uid], self.now);
        let mut is_killed = || {
            calls = calls.saturating_sub(1);
            calls == 0
        };
        if let Some(lease) = self.lease_of(uid) {
            return Outcome::Lease(lease, Duration::ZERO);
        }
        if is_killed() {
            return Outcome::Cut;
        }
        let most = self.outlook(claim.min);
        for resize in book::room(&self.held(), claim.min.saturating_sub(most)) {
            if is_killed() {
                return Outcome::Cut;
            }
            self.resize(&resize);
        }
        let request = LeaseRequest {
            wait: Duration::from_secs(25),
            cgroup: Some(format!("/kubepods/pod{uid}")),
            term: None,
            ..request(
                &claim::lease_name(uid).unwrap(),
                Class::Interactive,
                (claim.min, claim.max),
                DRIVER,
            )
        };
        let ticket = self.ticket();
        self.event(Event::LeaseRequested { ticket, request });
        loop {
            let waited = self.now.saturating_since(since);
            if is_killed() || waited >= limit {
                // Also if the answer is on its way.
                self.event(Event::LeaseRequestCancelled { ticket });
                return Outcome::Cut;
            }
            match self.answers.remove(&ticket.0) {
                Some(Answer::Lease { lease }) => return Outcome::Lease(lease.id, waited),
                Some(_) => return Outcome::Refused,
                None => {
                    self.now = self.now + Duration::from_millis(50);
                    self.settle();
                }
            }
        }
    }

    fn release(&mut self, tenant: &str) {
        let leases = self.arbiter.snapshot().leases;
        let live = [lease::LeaseState::Granted, lease::LeaseState::Revoking];
        let found = leases
            .iter()
            .find(|lease| lease.tenant == tenant && live.contains(&lease.state));
        let Some(lease) = found else { return };
        let ticket = self.ticket();
        let peer = peer(if tenant.starts_with("claim-") {
            DRIVER
        } else {
            OTHERS
        });
        self.event(Event::LeaseReleased(LeaseCall {
            ticket,
            lease: lease.id,
            generation: lease.generation,
            peer,
        }));
        self.answers.remove(&ticket.0);
        self.settle();
    }

    /// Renews the terms of other programs.
    fn renew(&mut self) {
        for lease in self.arbiter.snapshot().leases {
            if lease.expires_at.is_some() && lease.owner.owner_uid == OTHERS {
                let ticket = self.ticket();
                let (lease, generation) = (lease.id, lease.generation);
                self.event(Event::LeaseRenewed(LeaseCall {
                    ticket,
                    lease,
                    generation,
                    peer: peer(OTHERS),
                }));
            }
        }
    }

    fn unprepare(&mut self, uid: &str) {
        self.release(&claim::lease_name(uid).unwrap());
        self.claims.remove(uid);
        let group = format!("/kubepods/pod{uid}");
        let leases = self.arbiter.snapshot().leases;
        for lease in leases
            .iter()
            .filter(|lease| lease.owner.cgroup.as_deref() == Some(&group))
        {
            self.event(Event::HolderLost {
                lease: lease.id,
                pid: None,
            });
        }
        self.settle();
    }
}

const fn peer(uid: u32) -> Peer {
    Peer {
        uid,
        pid: Some(uid + 7),
        operator: uid == 0,
    }
}

fn request(tenant: &str, class: Class, (min, max): (Bytes, Bytes), uid: u32) -> LeaseRequest {
    LeaseRequest {
        tenant: tenant.to_owned(),
        request_id: tenant.to_owned(),
        peer: peer(uid),
        class,
        min,
        max,
        term: Some(Duration::from_secs(300)),
        wait: Duration::ZERO,
        validate_only: false,
        cgroup: None,
    }
}

/// A model of 2 GiB in 12 layers.
fn shape() -> ModelShape {
    ModelShape {
        name: "model".to_owned(),
        architecture: "qwen35".to_owned(),
        layers: vec![LayerShape::new(LayerKind::Attention, 0, Bytes::from_mib(160)); 12],
        fixed_bytes: Bytes::from_mib(128),
        state_bytes: Bytes::ZERO,
        kv: KvShape {
            attention_layers: 12,
            kv_heads: 2,
            head_dim: 64,
            element_bytes: 2,
            granule: Bytes::ZERO,
            block_tokens: Tokens::new(16),
            windowed: None,
        },
        context_max: Tokens::new(4096),
        workspace_fixed_bytes: Bytes::from_mib(16),
        workspace_bytes_per_token: Bytes::from_kib(16),
        ring_bytes: Bytes::from_mib(128),
    }
}

/// Returns the size of a simulation: all of it in an optimised build, a part otherwise.
const fn size(all: u32) -> u32 {
    if cfg!(debug_assertions) {
        all / 40
    } else {
        all
    }
}

fn steps(count: u64) -> Bytes {
    STEP.saturating_mul(count)
}

/// A board in a cluster: the slice that the API server has, kubelet with its claims, and neighbours of the pods.
struct Cluster {
    board: Board,
    rng: ChaCha8Rng,
    margin: Bytes,
    neighbours: Vec<String>,
    /// The slice; `None` after kubelet has deleted it.
    slice: Option<Offer>,
    /// End of an outage of the API server, and the time of the next attempt to publish.
    api_back: Timestamp,
    publish_at: Timestamp,
    /// Since when the driver is away, and when it is started again.
    killed: Option<(Timestamp, Timestamp)>,
    /// Claims that kubelet prepares, with the time of the next attempt.
    waiting: BTreeMap<String, Timestamp>,
    /// Claims that are prepared, with their leases; and those to be reverted.
    prepared: BTreeMap<String, lease::LeaseId>,
    ending: Vec<String>,
    tally: Tally,
}

#[derive(Debug, Default)]
struct Tally {
    placed: u32,
    /// Refused attempts.
    refused: u32,
    /// Claims that were prepared by a later attempt.
    by_retry: u32,
    cut: u32,
    outages: u32,
    longest: Duration,
}

impl Cluster {
    fn new(seed: u64, margin: Bytes) -> Self {
        let mut board = Board::new(true, margin);
        // Lesser work, which yields to claims down to its minimum.
        let sizes = (Bytes::from_mib(64), Bytes::from_gib(1));
        board.ask(request("backup", Class::Batch, sizes, OTHERS));
        Self {
            board,
            rng: ChaCha8Rng::seed_from_u64(seed),
            margin,
            neighbours: Vec::new(),
            slice: None,
            api_back: Timestamp::START,
            publish_at: Timestamp::START,
            killed: None,
            waiting: BTreeMap::new(),
            prepared: BTreeMap::new(),
            ending: Vec::new(),
            tally: Tally::default(),
        }
    }

    fn api_is_away(&self) -> bool {
        self.board.now < self.api_back
    }

    /// Lets time pass for all of the cluster.
    fn pass(&mut self, time: Duration) {
        let end = self.board.now + time;
        while self.board.now < end {
            let step = Duration::from_millis(900).min(end.saturating_since(self.board.now));
            self.killed = self.killed.filter(|(_, back)| *back > self.board.now);
            self.board.pass(step, self.killed.is_none());
            self.publish();
            let due = |at: &Timestamp| *at <= self.board.now;
            let due = self.waiting.iter().filter(|(_, at)| due(at));
            for uid in Vec::from_iter(due.map(|(uid, _)| uid.clone())) {
                self.prepare(&uid, u32::MAX, KUBELET_LIMIT);
                self.tally.by_retry += u32::from(self.prepared.contains_key(&uid));
            }
            for uid in std::mem::take(&mut self.ending) {
                self.unprepare(uid, false);
            }
            self.check();
            self.board.answers.clear();
        }
    }

    /// Writes the slice as the driver does, or deletes it as kubelet does.
    fn publish(&mut self) {
        let now = self.board.now;
        if self.api_is_away() {
            // The longest pause between two attempts.
            let pause = self.rng.random_range(0..=30_000);
            self.publish_at = self.api_back + Duration::from_millis(pause);
        } else if let Some((since, _)) = self.killed {
            if now.saturating_since(since) >= Duration::from_secs(30) {
                self.slice = None;
            }
        } else if self.publish_at <= now {
            self.slice = self.board.pool.offer().cloned();
        }
    }

    /// No lease is lost, doubled, or left over.
    fn check(&self) {
        let held = self.board.held();
        let live = |uid: &str| {
            let of_uid = held.iter().filter(|one| one.uid == uid && one.is_live());
            Vec::from_iter(of_uid.map(|one| one.name.clone()))
        };
        for (uid, lease) in &self.prepared {
            assert_eq!(
                live(uid),
                [lease.0.to_string()],
                "{uid} at {:?}",
                self.board.now
            );
        }
        for lease in held.iter().filter(|lease| lease.is_live()) {
            assert!(self.board.claims.contains_key(&lease.uid), "{lease:?}");
            assert_eq!(live(&lease.uid).len(), 1, "{lease:?}");
        }
    }

    /// Calls the driver for a claim, as kubelet does, which tries again later.
    fn prepare(&mut self, uid: &str, calls: u32, limit: Duration) {
        let again = self.board.now + Duration::from_secs(75);
        if let Some(at) = self.waiting.get_mut(uid) {
            *at = again;
        }
        if self.api_is_away() || self.killed.is_some() {
            return;
        }
        let Figures {
            grantable,
            booked,
            idle,
            ..
        } = self.board.figures();
        let certain = booked.saturating_add(grantable).saturating_add(idle);
        let is_certain = self.board.allocated() <= certain;
        match self.board.prepare(uid, calls, limit) {
            Outcome::Lease(lease, wait) => {
                self.tally.longest = self.tally.longest.max(wait);
                self.waiting.remove(uid);
                let before = self.prepared.insert(uid.to_owned(), lease);
                assert!(
                    before.is_none_or(|before| before == lease),
                    "{uid} is doubled"
                );
            }
            Outcome::Refused => {
                assert!(!is_certain, "{uid} is refused though {certain} is certain");
                self.tally.refused += 1;
            }
            Outcome::Cut => {
                self.tally.cut += 1;
                if calls < u32::MAX {
                    self.kill();
                }
            }
        }
    }

    /// Reverts a preparation; the driver may be killed before it has released the lease.
    fn unprepare(&mut self, uid: String, is_cut: bool) {
        self.waiting.remove(&uid);
        self.prepared.remove(&uid);
        if is_cut {
            self.kill();
        }
        if self.killed.is_some() {
            self.ending.push(uid);
        } else {
            self.board.unprepare(&uid);
        }
    }

    /// Kills the driver, which is back at once or after a while.
    fn kill(&mut self) {
        let back = [0, 1, 30, 31][self.rng.random_range(0..4)];
        let back = self.board.now + Duration::from_secs(back);
        self.killed = Some((self.board.now, back));
        let evict = false;
        self.board.pool = Pool::new(PoolParams {
            margin: self.margin,
            evict,
        });
    }

    fn neighbour_leaves(&mut self) {
        if !self.neighbours.is_empty() {
            let at = self.rng.random_range(0..self.neighbours.len());
            self.board.release(&self.neighbours.swap_remove(at));
        }
    }

    /// Runs one schedule, in which a neighbour takes up to the margin between placement and preparation, or more if there
    /// is no margin.
    fn schedule(&mut self, number: u32, with_outages: bool) {
        let most = if self.api_is_away() { 300_000 } else { 3000 };
        let time = self.rng.random_range(100..most);
        self.pass(Duration::from_millis(time));
        let claims = self.prepared.keys().chain(self.waiting.keys());
        for uid in Vec::from_iter(claims.cloned()) {
            let is_cut = with_outages && self.rng.random_ratio(1, 20);
            let is_prepared = self.prepared.contains_key(&uid);
            let (part, of) = if is_prepared { (1, 6) } else { (1, 60) };
            if self.rng.random_ratio(part, of) {
                self.unprepare(uid, is_cut);
            } else if is_cut && is_prepared {
                // After a restart of kubelet.
                self.prepare(&uid, u32::MAX, KUBELET_LIMIT);
            }
        }
        if self.rng.random_ratio(1, 4) {
            self.neighbour_leaves();
        }
        if with_outages && self.rng.random_ratio(1, 60) && !self.api_is_away() {
            self.tally.outages += 1;
            self.api_back = self.board.now + Duration::from_secs(3600);
        }
        if with_outages && self.rng.random_ratio(1, 30) {
            self.kill();
        }
        // The scheduler fills the pool to its edge.
        let asked = self.rng.random_range(1..=24);
        let slice = self.slice.clone().filter(|_| !self.api_is_away());
        let fits = |min: &Bytes| {
            slice
                .as_ref()
                .is_some_and(|slice| self.board.fits(slice, *min))
        };
        let placed = (1..=asked).rev().map(steps).find(fits);
        let uid = format!("s{number}");
        if let Some(min) = placed {
            self.tally.placed += 1;
            self.board.place(&uid, min, 0, &mut self.rng);
            self.waiting.insert(uid.clone(), self.board.now);
        }
        // Kubelet starts the pod; neighbours, other pods and users of the LLM do not wait for it.
        let coming = if placed.is_some() { 4 } else { 1 };
        if self.rng.random_ratio(coming, 8) {
            let name = format!("neighbour-{number}");
            let most = if self.margin == Bytes::ZERO {
                1024
            } else {
                self.margin.whole_mib()
            };
            let size = Bytes::from_mib(self.rng.random_range(8..=most));
            let asked = request(&name, Class::Interactive, (size, size), OTHERS);
            if matches!(self.board.ask(asked), Some(Answer::Lease { .. })) {
                self.neighbours.push(name);
            }
        }
        for claim in self.board.claims.values_mut() {
            if self.rng.random_ratio(1, 4) {
                claim.uses = self.rng.random_range(0..1000);
            }
        }
        if self.board.answer_ends.is_none() && self.rng.random_ratio(1, 4) {
            let lasts = Duration::from_millis(self.rng.random_range(500..20_000));
            self.board.answer_ends = Some(self.board.now + lasts);
            self.board.answers_with(self.rng.random_range(16..4096));
        }
        self.board.now = self.board.now + Duration::from_millis(self.rng.random_range(50..2500));
        self.board.settle();
        if placed.is_some() {
            let is_cut = with_outages && self.rng.random_ratio(1, 4);
            let calls = self.rng.random_range(1..8);
            // What is left of the limit if the driver has waited for the supervisor before.
            let limit = Duration::from_millis(self.rng.random_range(0..2000));
            match (is_cut, calls) {
                (false, _) => self.prepare(&uid, u32::MAX, KUBELET_LIMIT),
                (true, 7) => self.prepare(&uid, u32::MAX, limit),
                (true, calls) => self.prepare(&uid, calls, KUBELET_LIMIT),
            }
        }
        self.check();
        self.board.renew();
    }

    /// Ends all neighbours and outages. Every claim that waits is prepared by a retry then.
    fn end(mut self) -> Tally {
        while !self.neighbours.is_empty() {
            self.neighbour_leaves();
        }
        (self.api_back, self.publish_at) = (self.board.now, self.board.now);
        self.pass(Duration::from_secs(200));
        assert!(self.waiting.is_empty() && self.ending.is_empty());
        assert_eq!(self.prepared.len(), self.board.claims.len());
        assert_eq!(self.slice.as_ref(), self.board.pool.offer());
        println!("{:?}", self.tally);
        self.tally
    }
}

fn schedules(seed: u64, count: u32, margin: Bytes, with_outages: bool) -> Tally {
    let mut cluster = Cluster::new(seed, margin);
    for number in 0..count {
        cluster.schedule(number, with_outages);
    }
    cluster.end()
}

#[test]
fn no_claim_within_the_published_capacity_is_refused_beside_neighbours() {
    let tally = schedules(7, size(17_000), Bytes::from_mib(128), false);
    assert!(tally.placed >= size(10_000), "{tally:?}");
    assert_eq!((tally.refused, tally.by_retry), (0, 0), "{tally:?}");
    assert!(tally.longest < Duration::from_secs(25));
    // Neighbours take more than the margin: what is refused was no longer certain, and a retry prepares it.
    let tally = schedules(8, size(4000), Bytes::ZERO, false);
    assert!(tally.refused > 0 && tally.by_retry > 0, "{tally:?}");
}

#[test]
fn an_hour_without_the_api_server_kills_and_retries_lose_and_double_no_lease() {
    let tally = schedules(9, size(8000), Bytes::from_mib(128), true);
    assert!(tally.outages > 0 && tally.cut > 0, "{tally:?}");
}

#[test]
fn a_hundred_boards_are_not_over_committed_and_claims_use_what_is_free() {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let (boards, claims) = (size(100).max(4), size(1000));
    let (mut granted, mut wanted, mut idle) = (0_u32, Duration::ZERO, Duration::ZERO);
    for _ in 0..boards {
        let mut board = Board::new(false, Bytes::ZERO);
        let mut done = 0;
        let mut number = 0_u32;
        while done < claims {
            board.pass(Duration::from_millis(rng.random_range(1500..6000)), true);
            for uid in Vec::from_iter(board.claims.keys().cloned()) {
                if rng.random_ratio(1, 4) {
                    board.unprepare(&uid);
                }
            }
            // Pods wait at the scheduler: several are placed at once.
            while done < claims {
                let min = steps(rng.random_range(1..=16));
                if !board.fits(board.pool.offer().unwrap(), min) {
                    break;
                }
                number += 1;
                let uid = format!("c{number}");
                board.place(&uid, min, 200, &mut rng);
                let outcome = board.prepare(&uid, u32::MAX, KUBELET_LIMIT);
                assert!(matches!(outcome, Outcome::Lease(..)), "{uid} is refused");
                let memory = board.arbiter.snapshot().memory;
                assert!(board.allocated() <= memory.budget && memory.held <= memory.budget);
                done += 1;
                granted += 1;
            }
            board.answers.clear();
        }
        wanted += board.wanted;
        idle += board.idle_while_wanted;
    }
    println!("{granted} claims; {idle:?} idle of {wanted:?} wanted");
    assert_eq!(granted, boards * claims);
    assert!(idle < wanted / 10);
}
