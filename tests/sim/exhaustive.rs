//! Exhaustive search: every order of a few letters, for a few leases, without randomness.
//!
//! A ledger of 100 MiB, up to four tenants, one letter after another: ask, renew, release, come down, ask for more
//! time, refuse, misreport, answer a past or nonexistent target, use little for a while, fill the allowance, learn of
//! the end of a lease, be measured late or in time, die, let time pass, stall. Visited states are not entered again.
//! The promises of the ledger are checked in every state, and the last state of each order must come to rest.
//!
//! `COTENANT_EXHAUSTIVE_STEPS` (default 4; 3 beside an engine) is the length of the orders; 6 covers the whole claim.

mod home;
mod search;

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, Write},
    mem,
    sync::Arc,
    time::Duration,
};

use cotenant::{
    policy::{
        event::{Action, Answer, Event, LeaseCall, TargetAnswered},
        lease::{Class, LeaseId, LeaseKind, LeaseRequest, LeaseState, Peer, TargetAnswer, Ticket},
        params::{Params, Scope},
        pressure::{MemoryReading, PressureLevel, Sample},
        snapshot::Snapshot,
    },
    units::{Bytes, Timestamp},
};

use self::{
    home::Home,
    search::{Book, Search},
};
use crate::{
    device::mib,
    planted::{Planted, Subject},
    setting,
};

const BUDGET: Bytes = mib(100);
const HOLDERS: usize = 4;
const TERM: Duration = Duration::from_secs(2);
/// Longer than the time of an interactive holder for its target, and shorter than the time after which it is ended for
/// that.
const MOMENT: Duration = Duration::from_millis(300);
/// Use of a holder that uses little.
const LITTLE: Bytes = mib(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Letter {
    Ask(Class),
    Renew(usize),
    Release(usize),
    Obey(usize),
    Defer(usize),
    Refuse(usize),
    Lie(usize),
    /// It answers a target before the one in force.
    AnswerOld(usize),
    /// It answers a target that was never sent.
    AnswerNone(usize),
    /// It uses little for a while.
    Spare(usize),
    /// It uses all of its allowance, as far as it knows.
    Fill(usize),
    /// It learns that its lease has ended.
    Hear(usize),
    /// It is measured now.
    Measure(usize),
    /// A measurement of a second ago arrives, from when it used nothing.
    MeasureLate(usize),
    Die(usize),
    Sample,
    /// A sample of a second ago arrives, from when nothing was used.
    SampleLate,
    /// Until the next deadline.
    Tick,
    /// A whole term.
    Wait,
    /// The machine stalls: nothing is served meanwhile.
    Standstill(Duration),
}

#[derive(Clone, Debug, Default, Hash)]
struct Holder {
    used: u64,
    /// Its allowance as far as it knows, and until when it relies on that.
    may_use: u64,
    term_ends: Timestamp,
    /// Its lease has ended, without its knowledge.
    unheard: bool,
    lease: Option<(u64, u64)>,
    /// An ended lease that it tries to renew.
    ended: Option<(u64, u64)>,
    target: Option<(u64, u64)>,
    waits: bool,
    lied: bool,
    asked: bool,
}

#[derive(Clone)]
struct State {
    arbiter: Subject,
    now: Timestamp,
    holders: [Holder; HOLDERS],
    tickets: u64,
    open: BTreeMap<Ticket, Option<usize>>,
    ended: Vec<LeaseId>,
    /// Number of holders with letters.
    acting: usize,
    /// The arbiter's last observed state: only its input changes it.
    seen: Arc<Snapshot>,
}

impl Holder {
    /// It learns that its lease has ended.
    fn hear(&mut self) {
        self.ended = self.lease.take();
        self.target = None;
        self.unheard = false;
        // Honest ones release their memory; others keep it.
        if !self.lied {
            self.used = 0;
        }
    }
}

/// Settings under which a few MiB cause pressure.
fn small_params() -> Params {
    let mut params = Params::for_budget(BUDGET, Bytes::ZERO, Scope::Session);
    params.pressure.dwell = Duration::from_millis(500);
    params.pressure.elevated_below = mib(4);
    params.pressure.critical_below = mib(2);
    params.pressure.last_resort_below = mib(1);
    params.pressure.hysteresis = mib(1);
    params.shed.minimum_reclaim = mib(2);
    params
}

impl State {
    fn new(planted: Option<Planted>) -> Self {
        let arbiter = Subject::new(&small_params(), planted);
        let mut state = Self {
            seen: arbiter.snapshot(),
            arbiter,
            now: Timestamp::from_millis(2000),
            holders: Default::default(),
            tickets: 0,
            open: BTreeMap::new(),
            ended: Vec::new(),
            acting: HOLDERS,
        };
        state.tell(state.sample(state.now)).unwrap();
        state
    }

    fn sample(&self, at: Timestamp) -> Event {
        let used = if at == self.now {
            Bytes::new(self.holders.iter().map(|holder| holder.used).sum())
        } else {
            Bytes::ZERO
        };
        Event::Sampled(Sample {
            taken_at: at,
            memory: MemoryReading {
                mem_total: Bytes::from_gib(1),
                mem_available: Bytes::from_mib(512),
                mem_free: Bytes::from_mib(512),
                group: None,
            },
            scope_used: Some(used),
            ..Sample::default()
        })
    }

    fn ago(&self) -> Timestamp {
        Timestamp::START
            + self
                .now
                .since_start()
                .saturating_sub(Duration::from_secs(1))
    }

    /// The possible letters. Tenants start in order, since they differ only by their class.
    fn possible(&self) -> Vec<Letter> {
        let mut letters = vec![
            Letter::Sample,
            Letter::SampleLate,
            Letter::Wait,
            Letter::Standstill(MOMENT),
            Letter::Standstill(TERM),
        ];
        if self.arbiter.next_deadline().is_some() {
            letters.push(Letter::Tick);
        }
        if self.acting == HOLDERS && self.holders.iter().any(|holder| !holder.asked) {
            letters.extend([Letter::Ask(Class::AudioRealtime), Letter::Ask(Class::Batch)]);
        }
        for (index, holder) in self.holders.iter().enumerate().take(self.acting) {
            if holder.lease.is_some() {
                letters.extend([
                    Letter::Renew(index),
                    Letter::Release(index),
                    Letter::Measure(index),
                    Letter::MeasureLate(index),
                    Letter::Die(index),
                ]);
                if holder.used > LITTLE.get() {
                    letters.push(Letter::Spare(index));
                }
                if holder.used < holder.may_use && self.now < holder.term_ends {
                    letters.push(Letter::Fill(index));
                }
                if holder.unheard {
                    letters.push(Letter::Hear(index));
                }
            } else if holder.ended.is_some() {
                letters.extend([
                    Letter::Renew(index),
                    Letter::Measure(index),
                    Letter::MeasureLate(index),
                ]);
            }
            if holder.target.is_some() {
                letters.extend([
                    Letter::Obey(index),
                    Letter::Defer(index),
                    Letter::Refuse(index),
                    Letter::Lie(index),
                    Letter::AnswerOld(index),
                    Letter::AnswerNone(index),
                ]);
            }
        }
        letters
    }

    fn ticket(&mut self, holder: Option<usize>) -> Ticket {
        self.tickets += 1;
        self.open.insert(Ticket(self.tickets), holder);
        Ticket(self.tickets)
    }

    fn happens(&mut self, letter: Letter) -> Result<(), String> {
        let name = |index: usize| format!("t{index}");
        let peer = Peer {
            uid: 1,
            ..Peer::default()
        };
        match letter {
            Letter::Ask(class) => {
                let index = self
                    .holders
                    .iter()
                    .position(|holder| !holder.asked)
                    .unwrap();
                self.holders[index].asked = true;
                self.holders[index].waits = true;
                let ticket = self.ticket(Some(index));
                self.tell(Event::LeaseRequested {
                    ticket,
                    request: LeaseRequest {
                        tenant: name(index),
                        request_id: String::new(),
                        peer,
                        class,
                        min: mib(30),
                        max: mib(60),
                        term: Some(TERM),
                        wait: Duration::from_secs(5),
                        validate_only: false,
                        cgroup: None,
                    },
                })
            }
            Letter::Renew(index) => {
                let holder = &self.holders[index];
                let (lease, generation) = holder.lease.or(holder.ended).unwrap();
                let ticket = self.ticket(None);
                self.tell(Event::LeaseRenewed(LeaseCall {
                    ticket,
                    lease: LeaseId(lease),
                    generation,
                    peer,
                }))?;
                if self.holders[index].unheard {
                    self.holders[index].hear();
                }
                Ok(())
            }
            Letter::Spare(index) => {
                self.holders[index].used = LITTLE.get();
                Ok(())
            }
            Letter::Fill(index) => {
                let holder = &mut self.holders[index];
                holder.used = holder.used.max(holder.may_use);
                self.check()
            }
            Letter::Hear(index) => {
                self.holders[index].hear();
                Ok(())
            }
            Letter::Release(index) => {
                let holder = &mut self.holders[index];
                let (lease, generation) = holder.lease.take().unwrap();
                (holder.used, holder.target, holder.ended) = (0, None, Some((lease, generation)));
                holder.unheard = false;
                let ticket = self.ticket(None);
                self.tell(Event::LeaseReleased(LeaseCall {
                    ticket,
                    lease: LeaseId(lease),
                    generation,
                    peer,
                }))
            }
            Letter::AnswerOld(index) | Letter::AnswerNone(index) => {
                let (nonce, bytes) = self.holders[index].target.unwrap();
                let lease = LeaseId(self.holders[index].lease.unwrap().0);
                let nonce = if letter == Letter::AnswerOld(index) {
                    nonce - 1
                } else {
                    nonce + 1
                };
                let known = |state: &Self| {
                    let seen = state.arbiter.snapshot();
                    let lease = seen.leases.iter().find(|view| view.id == lease);
                    lease.map(|view| {
                        (
                            view.state,
                            view.memory.held,
                            view.target.as_ref().map(|target| target.nonce),
                        )
                    })
                };
                // Effects of time are not caused by the answer.
                self.tell(Event::DeadlineReached)?;
                let before = known(self);
                self.tell(Event::TargetAnswered(TargetAnswered {
                    lease,
                    nonce,
                    answer: TargetAnswer::Applied,
                    claimed: Some(Bytes::new(bytes)),
                }))?;
                if known(self) != before {
                    return Err(format!(
                        "an answer to target {nonce} of t{index} changed its lease"
                    ));
                }
                Ok(())
            }
            Letter::Obey(index)
            | Letter::Defer(index)
            | Letter::Refuse(index)
            | Letter::Lie(index) => {
                let holder = &mut self.holders[index];
                let (nonce, bytes) = holder.target.unwrap();
                let lease = LeaseId(holder.lease.unwrap().0);
                if !matches!(letter, Letter::Refuse(_)) {
                    holder.may_use = holder.may_use.min(bytes);
                }
                let answer = match letter {
                    Letter::Defer(_) => TargetAnswer::Deferred {
                        overage: Bytes::new(holder.used.saturating_sub(bytes)),
                    },
                    Letter::Refuse(_) => TargetAnswer::Refused {
                        reason: "busy".to_owned(),
                    },
                    Letter::Lie(_) => {
                        holder.lied = true;
                        TargetAnswer::Applied
                    }
                    _ => {
                        holder.used = holder.used.min(bytes);
                        TargetAnswer::Applied
                    }
                };
                self.tell(Event::TargetAnswered(TargetAnswered {
                    lease,
                    nonce,
                    answer,
                    claimed: Some(Bytes::new(bytes)),
                }))
            }
            Letter::Measure(index) | Letter::MeasureLate(index) => {
                let (used, taken_at) = match letter {
                    Letter::Measure(_) => (self.holders[index].used, self.now),
                    _ => (0, self.ago()),
                };
                self.tell(Event::Measured {
                    tenant: name(index),
                    used: Some(Bytes::new(used)),
                    taken_at,
                })
            }
            Letter::Die(index) => {
                let holder = &mut self.holders[index];
                let (lease, generation) = holder.lease.take().unwrap();
                (holder.used, holder.target, holder.ended) = (0, None, Some((lease, generation)));
                holder.unheard = false;
                self.tell(Event::HolderLost {
                    lease: LeaseId(lease),
                    pid: None,
                })
            }
            Letter::Sample => self.tell(self.sample(self.now)),
            Letter::SampleLate => self.tell(self.sample(self.ago())),
            Letter::Tick => {
                self.now = self.arbiter.next_deadline().unwrap().max(self.now);
                self.end_terms();
                self.tell(Event::DeadlineReached)
            }
            Letter::Wait => {
                let end = self.now + TERM;
                self.until(end, false)
            }
            Letter::Standstill(pause) => {
                self.now = self.now + pause;
                self.end_terms();
                Ok(())
            }
        }
    }

    /// Advances time with every deadline at its instant; if `honest`, each asked holder answers and is measured.
    fn until(&mut self, end: Timestamp, honest: bool) -> Result<(), String> {
        for _ in 0..4000 {
            let due = self.arbiter.next_deadline().filter(|due| *due <= end);
            let Some(due) = due else { break };
            self.now = due.max(self.now);
            self.end_terms();
            self.tell(Event::DeadlineReached)?;
            if honest {
                self.answer_honestly()?;
            }
        }
        self.now = end;
        self.end_terms();
        self.tell(Event::DeadlineReached)
    }

    /// A holder without messages from the supervisor for a term ends as if notified.
    fn end_terms(&mut self) {
        let now = self.now;
        for holder in &mut self.holders {
            if holder.lease.is_some() && holder.term_ends <= now {
                holder.hear();
            }
        }
    }

    fn answer_honestly(&mut self) -> Result<(), String> {
        for index in 0..HOLDERS {
            if self.holders[index].unheard {
                self.holders[index].hear();
            }
            if self.holders[index].target.is_some() {
                self.take(Letter::Obey(index))?;
            }
            if self.holders[index].asked {
                self.take(Letter::Measure(index))?;
            }
        }
        Ok(())
    }

    fn tell(&mut self, event: Event) -> Result<(), String> {
        let actions = self.arbiter.handle(self.now, event);
        for action in &actions {
            self.follow(action)?;
        }
        let after = self.arbiter.snapshot();
        if after.memory.held > BUDGET {
            return Err(format!(
                "over-commit: {} is held of {BUDGET}",
                after.memory.held
            ));
        }
        for lease in &after.leases {
            let lives = matches!(lease.state, LeaseState::Granted | LeaseState::Revoking);
            if lives && self.ended.contains(&lease.id) {
                return Err(format!("{} has ended and is back", lease.name()));
            }
            if lease.expires_at.is_some_and(|at| at <= after.at) {
                return Err(format!("{} is past its term", lease.name()));
            }
        }
        let before = mem::replace(&mut self.seen, after);
        self.covers(&before, &self.seen)
    }

    fn check(&self) -> Result<(), String> {
        self.covers(&self.seen, &self.seen)
    }

    /// Whether the ledger covers every holder that relies on its lease.
    fn covers(&self, before: &Snapshot, after: &Snapshot) -> Result<(), String> {
        for (index, holder) in self.holders.iter().enumerate() {
            let Some((id, _)) = holder.lease else {
                continue;
            };
            let held = after.leases.iter().find(|lease| lease.id == LeaseId(id));
            let held = held.map_or(Bytes::ZERO, |lease| lease.memory.held);
            let was = before.leases.iter().find(|lease| lease.id == LeaseId(id));
            let credited = was.is_some_and(|was| was.memory.held > held);
            // Use that a non-compliant holder keeps beyond its end is not covered; memory in use is never credited.
            // After the end of its lease a holder is covered for its allowance as far as it knows; unreturned use
            // beyond that is unaccounted.
            let relies_on = if holder.unheard {
                holder.used.min(holder.may_use)
            } else {
                holder.used
            };
            if held < Bytes::new(relies_on) && (!holder.lied || holder.unheard || credited) {
                return Err(format!(
                    "no book covers t{index}: it really uses {} and holds {held}",
                    Bytes::new(holder.used)
                ));
            }
        }
        Ok(())
    }

    fn follow(&mut self, action: &Action) -> Result<(), String> {
        match action {
            Action::Answer { ticket, answer } => {
                let Some(holder) = self.open.remove(ticket) else {
                    return Err(format!("{ticket:?} is answered twice, or was never asked"));
                };
                if let Answer::Lease { lease } = answer
                    && let Some(holder) = self.holder_of(lease.id)
                {
                    holder.term_ends = lease.expires_at.unwrap();
                }
                if let (Some(index), Answer::Lease { lease }) = (holder, answer) {
                    // It uses its whole grant at once.
                    let holder = &mut self.holders[index];
                    holder.lease = Some((lease.id.0, lease.generation));
                    holder.used = lease.memory.held.get();
                    holder.may_use = holder.used;
                    holder.term_ends = lease.expires_at.unwrap();
                }
                if let Some(index) = holder {
                    self.holders[index].waits = false;
                }
            }
            Action::SetTarget {
                lease,
                nonce,
                bytes,
                ..
            } => {
                if let Some(holder) = self.holder_of(*lease) {
                    holder.target = Some((*nonce, bytes.get()));
                }
            }
            Action::EndLease { lease, .. } => {
                self.ended.push(lease.id);
                if let Some(holder) = self.holder_of(lease.id) {
                    holder.unheard = true;
                    holder.target = None;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The holder that has this lease, as far as it knows.
    fn holder_of(&mut self, lease: LeaseId) -> Option<&mut Holder> {
        self.holders
            .iter_mut()
            .find(|holder| holder.lease.is_some_and(|(id, _)| id == lease.0))
    }

    /// No further letters: every holder answers and is measured, non-compliant holders die. Every request must be
    /// answered, and the ledger empty.
    fn comes_to_rest(mut self) -> Result<(), String> {
        for holder in &mut self.holders {
            if holder.lied && (holder.lease.is_none() || holder.unheard) {
                holder.used = 0;
            }
            holder.lied = false;
        }
        for _ in 0..8 {
            self.answer_honestly()?;
            self.take(Letter::Sample)?;
            let end = self.now + Duration::from_secs(1);
            self.until(end, true)?;
        }
        let snapshot = self.arbiter.snapshot();
        if !self.open.is_empty() || snapshot.waiting > 0 {
            return Err(format!("not settled: {:?} still wait", self.open));
        }
        if let Some(lease) = snapshot
            .leases
            .iter()
            .find(|lease| lease.kind == LeaseKind::Tenant)
        {
            return Err(format!("not settled: {lease:?}"));
        }
        if snapshot.pressure.level != PressureLevel::Normal || snapshot.memory.free != BUDGET {
            return Err(format!(
                "not settled: pressure is {}, {} is free",
                snapshot.pressure.level, snapshot.memory.free
            ));
        }
        Ok(())
    }
}

impl Book for State {
    type Letter = Letter;

    fn letters(&self) -> Vec<Letter> {
        self.possible()
    }

    fn take(&mut self, letter: Letter) -> Result<(), String> {
        self.happens(letter)?;
        self.now = self.now + Duration::from_millis(1);
        self.end_terms();
        Ok(())
    }

    fn settles(self) -> Result<(), String> {
        self.comes_to_rest()
    }

    fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        serde_json::to_writer(Hashed(&mut hasher), &self.arbiter).unwrap();
        (&self.holders, self.acting, self.now).hash(&mut hasher);
        self.open.hash(&mut hasher);
        hasher.finish()
    }
}

/// Hashes its input without storing it.
struct Hashed<'a>(&'a mut DefaultHasher);

impl Write for Hashed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// From an empty ledger, and from one in which a holder has just been asked to come down: all actions of that holder.
fn search(search: Search, steps: u64, planted: Option<Planted>) -> Result<Search, String> {
    let mut state = State::new(planted);
    search.run(state.clone(), &[], steps)?;
    let asked = [
        Class::Interactive,
        Class::AudioRealtime,
        Class::AudioRealtime,
    ]
    .map(Letter::Ask);
    for letter in asked {
        state
            .take(letter)
            .map_err(|problem| search::tell(&problem, &asked))?;
    }
    if planted.is_none() {
        assert!(state.holders[0].target.is_some(), "it has not been asked");
    }
    state.acting = 1;
    search.run(state, &asked, steps)?;
    Ok(search)
}

#[test]
fn every_order_of_a_few_letters_keeps_the_book_and_comes_to_rest() {
    let steps = setting("COTENANT_EXHAUSTIVE_STEPS", 4);
    match search(Search::with_all_threads(), steps, None) {
        Ok(search) => {
            let states = search.states();
            println!(
                "{states} states, {} ends of {steps} letters",
                search.orders()
            );
            assert!(steps < 4 || states > 1000, "only {states} states");
        }
        Err(violation) => panic!("{violation}"),
    }
}

#[test]
fn every_planted_fault_of_the_book_is_found_by_trying_everything() {
    for (planted, words) in [
        (Planted::DoubleGrant, "over-commit"),
        (Planted::FreedOnPaper, "covers"),
        (Planted::LiarCredited, "covers"),
        (Planted::StaleCredited, "covers"),
        (Planted::ExpiredRenewed, "is back"),
        (Planted::SilenceCredited, "covers"),
    ] {
        let found = (3..=4).find_map(|steps| search(Search::new(1), steps, Some(planted)).err());
        let found = found.unwrap_or_else(|| panic!("{planted:?} was never found"));
        println!("{planted:?} is found: {found}");
        assert!(found.contains(words), "{planted:?}: {found}");
    }
}

/// From a ledger shared by an engine and a worker, and from one in which the engine has been asked to make room.
fn search_home(search: Search, steps: u64, planted: Option<Planted>) -> Result<Search, String> {
    let home = Home::new(planted);
    search.run(home.clone(), &[], steps)?;
    if planted.is_none() {
        search.run(home.asked(), &[], steps)?;
    }
    Ok(search)
}

#[test]
fn every_order_of_what_an_engine_a_worker_and_a_tenant_do_keeps_the_book_and_comes_to_rest() {
    let steps = setting("COTENANT_EXHAUSTIVE_STEPS", 3);
    match search_home(Search::with_all_threads(), steps, None) {
        Ok(search) => {
            let states = search.states();
            println!(
                "{states} states, {} ends of {steps} letters",
                search.orders()
            );
            assert!(steps < 3 || states > 1000, "only {states} states");
        }
        Err(violation) => panic!("{violation}"),
    }
}

#[test]
fn every_planted_fault_of_the_book_of_an_engine_is_found_by_trying_everything() {
    for (planted, words) in [
        (Planted::DoubleGrant, "over-commit"),
        (Planted::FreedOnPaper, "covers"),
    ] {
        let found =
            (1..=3).find_map(|steps| search_home(Search::new(1), steps, Some(planted)).err());
        let found = found.unwrap_or_else(|| panic!("{planted:?} was never found"));
        println!("{planted:?} is found: {found}");
        assert!(found.contains(words), "{planted:?}: {found}");
    }
}
