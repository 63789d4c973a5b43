//! When a worker is stopped rather than the LLM shed.
//!
//! 1. [`why_kept`]: a worker is asked only while it is idle, and for pressure only while memory is below the Critical
//!    watermark; below the last watermark a busy one is asked too. A pinned one never is.
//! 2. [`offer`]: a worker that reacts to pressure notifications is notified first, one with a smaller variant becomes
//!    smaller, and only then is one stopped.
//! 3. [`stop_cost`]: the price of a stop is the time to start it again, more where that takes the memory again, and more than
//!    any start where it is busy. Its weight is 64 times that of shedding from a holder of its class
//!    ([`Candidate::weight`]), so that the LLM sheds first.
//! 4. [`stops_for_what_is_owed`]: a stop is chosen for what is missing now. What a slope foretells comes from others.

use std::time::Duration;

use super::{
    lease::Class,
    lease_table::Phase,
    pressure::PressureLevel,
    reason::SpareReason,
    shedding::{Candidate, Source, choose, micros},
    state::State,
    worker::Worker,
};
use cotenant_units::Bytes;

/// For whom memory is reclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// For a request of this class: only less urgent holders give, and what counts is what the book gets.
    Request(Class),
    /// For the machine: every holder gives, and what counts is what is really in use.
    Pressure(Urgency),
}

/// How far a shed under pressure goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Urgency {
    /// Elevated, with no more to come: nothing that makes the engine slower.
    Warning,
    /// Critical, or about to be.
    Urgent,
    /// Below the last watermark: even work that is under way.
    LastResort,
}

impl Purpose {
    pub(super) fn takes_from(self, class: Class) -> bool {
        match self {
            Self::Request(urgent) => class > urgent,
            Self::Pressure(_) => true,
        }
    }
}

/// Why a worker is not asked to give anything for `purpose`; `None` if it is.
pub(super) fn why_kept(state: &State, worker: &Worker, purpose: Purpose) -> Option<SpareReason> {
    let pressed = matches!(purpose, Purpose::Pressure(_));
    let critical = state.pressure.level() == PressureLevel::Critical;
    if worker.params.pinned {
        Some(SpareReason::Pinned)
    } else if !worker.is_settled() {
        Some(SpareReason::Changing)
    } else if (critical && purpose == Purpose::Pressure(Urgency::LastResort))
        || notification(state, worker, purpose).is_some()
    {
        None
    } else if worker.requests > 0 {
        Some(SpareReason::Busy)
    } else if worker.lease().is_some_and(|id| state.queue.waits_for(id)) {
        Some(SpareReason::WaitsToGrow)
    } else if pressed && !critical {
        Some(SpareReason::WorkersBeforeCritical)
    } else if pressed && !state.pressure.is_critical_now() {
        Some(SpareReason::Recovered)
    } else {
        let until = worker
            .not_worth_stopping_until()
            .filter(|until| *until > state.now);
        until.map(|until| SpareReason::WantedAgain {
            remaining: until.saturating_since(state.now),
        })
    }
}

/// The share of a worker that is not kept: by a notification where it reacts to one, by a smaller variant while it is
/// idle, and else by being stopped, one worker at a time.
pub(super) fn offer(state: &State, worker: &Worker, purpose: Purpose) -> Option<Candidate> {
    if let Some(notified) = notification(state, worker, purpose) {
        return Some(notified);
    }
    let (name, class) = (worker.params.name.clone(), worker.params.class);
    let held = state.worker_held(&name);
    if held == Bytes::ZERO {
        return None; // it holds a lease of its own, and is asked by that
    }
    let reload = micros(worker.reload());
    if worker.requests == 0
        && let Some(smaller) = worker.smaller_variant(held)
    {
        let bytes = held.saturating_sub(worker.params.steady_of(Some(smaller)));
        let variant = Source::WorkerVariant {
            worker: name,
            variant: smaller.to_owned(),
        };
        return Some(Candidate::whole(
            variant,
            class,
            bytes,
            reload.saturating_add(reload / 2),
        ));
    }
    if state.workers.is_any_stopping() {
        return None;
    }
    let lasting = held.saturating_sub(state.start_least(&name));
    let idle = state.now.saturating_since(worker.idle_since);
    let cost_us = stop_cost(worker, idle, (held, lasting));
    Some(Candidate::whole(
        Source::WorkerStop { worker: name },
        class,
        held,
        cost_us,
    ))
}

/// The share of a worker that is notified: of its use under pressure, of its lease for a request.
fn notification(state: &State, worker: &Worker, purpose: Purpose) -> Option<Candidate> {
    let (least, id) = (worker.params.shrinks_to?, worker.lease()?);
    let (name, class) = (&worker.params.name, worker.params.class);
    let pressed = matches!(purpose, Purpose::Pressure(_));
    let spared = !purpose.takes_from(class)
        || worker.params.pinned
        || worker.ignores_pressure()
        || (pressed
            && class < Class::LlmElastic
            && state.pressure.level() < PressureLevel::Critical);
    let granted = matches!(state.leases.get(id)?.phase, Phase::Granted);
    if spared || state.queue.waits_for(id) || !granted || !worker.is_settled() {
        return None;
    }
    let held = state.ledger.held_by(id);
    let has = match state.ledger.measurement(name) {
        Some(measured) if pressed => measured.used,
        _ => held,
    };
    let bytes = has.saturating_sub(least);
    // The memory that it can spare is of some use to it: less than a smaller variant would cost.
    let now_us = micros(worker.reload()) / 4;
    let cost_us = now_us.saturating_add(state.engine.speed().reading_us(bytes));
    let source = Source::WorkerNotified {
        worker: name.clone(),
    };
    (bytes > Bytes::ZERO).then(|| Candidate::whole(source, class, bytes, cost_us))
}

/// The cost of stopping a worker to its user, µs; of what it has `held`, `lasting` bytes stay free when it is started again.
fn stop_cost(worker: &Worker, idle: Duration, (held, lasting): (Bytes, Bytes)) -> u64 {
    let now_us = if worker.requests > 0 { BUSY_STOP_US } else { 0 };
    // One that has been idle for long is not likely to be missed soon.
    let undo_us = micros(worker.reload()).saturating_mul(1 + IDLE_LONG_S / (1 + idle.as_secs()));
    // Of two that are as dear to start, the one that has grown since its start is the better to stop.
    let times = held.get() / lasting.get().max(1);
    now_us.saturating_add(undo_us.saturating_mul(times.clamp(1, LASTING_LEAST)))
}

/// Leaves only those stops among the candidates that are chosen for what is `owed`, what is missing below the watermark.
pub(super) fn stops_for_what_is_owed(candidates: &mut Vec<Candidate>, owed: Bytes) {
    let goes_on = |candidate: &Candidate| !candidate.source.stops();
    let without_stops: Bytes = candidates
        .iter()
        .filter(|candidate| goes_on(candidate))
        .map(Candidate::bytes)
        .sum();
    let stopped = if without_stops >= owed {
        Vec::new()
    } else {
        choose(candidates, owed)
    };
    candidates.retain(|candidate| {
        goes_on(candidate)
            || stopped
                .iter()
                .any(|chosen| chosen.source == candidate.source)
    });
}

/// A day: work that is lost costs more than any start that is waited for, so that a busy worker is stopped only where all idle
/// ones do not suffice.
const BUSY_STOP_US: u64 = 86_400_000_000;
/// A stop of which less than this part lasts costs no more. Our choice.
const LASTING_LEAST: u64 = 8;
/// After this many seconds of idleness a stop costs only the start.
const IDLE_LONG_S: u64 = 60;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        lease::LeaseKind,
        lease_table::{Lease, Turn},
        params::{Params, Scope, WorkerParams},
        pressure::{Pressure, Sample},
    };
    use cotenant_units::Timestamp;

    fn mib(mib: u64) -> Bytes {
        Bytes::from_mib(mib)
    }

    /// An idle worker `tts` that holds 100 MiB of 1000, and the headroom given.
    fn state(headroom: Bytes) -> State {
        let mut params = Params::for_budget(mib(1000), mib(100), Scope::Machine);
        let mut pressure = Pressure::new(params.pressure);
        params.workers.push(WorkerParams {
            name: "tts".to_owned(),
            class: Class::AudioRealtime,
            steady: mib(100),
            peak: mib(100),
            ..WorkerParams::default()
        });
        let mut state = State::new(params).unwrap();
        let (id, now) = (state.leases.next_id(), Timestamp::from_millis(1));
        let kind = (LeaseKind::Worker, Class::AudioRealtime);
        let lease = Lease::of_ours("tts", kind, 1, (mib(100), mib(100)), now);
        let mut turn = Turn {
            now,
            ledger: &mut state.ledger,
            effects: Vec::new(),
        };
        assert!(state.leases.grant((id, lease), None, mib(100), &mut turn));
        let worker = state.workers.get_mut("tts").unwrap();
        worker.start(id, now);
        worker.answered(7, now);
        for taken_at in [now, Timestamp::from_millis(2)] {
            let sample = Sample {
                taken_at,
                ..Sample::default()
            };
            pressure.observe(&sample, headroom);
        }
        state.pressure = pressure;
        state
    }

    #[test]
    fn an_idle_worker_gives_below_the_critical_watermark_and_a_busy_one_at_the_last_resort() {
        let urgent = Purpose::Pressure(Urgency::Urgent);
        let last = Purpose::Pressure(Urgency::LastResort);
        let kept =
            |state: &State, purpose| why_kept(state, state.workers.get("tts").unwrap(), purpose);
        let watermarks = state(Bytes::ZERO).params.pressure;
        let mut critical = state(Bytes::ZERO);
        assert_eq!(kept(&critical, urgent), None);
        let elevated = state(watermarks.critical_below.saturating_add(mib(1)));
        assert_eq!(elevated.pressure.level(), PressureLevel::Elevated);
        assert_eq!(
            kept(&elevated, urgent),
            Some(SpareReason::WorkersBeforeCritical)
        );
        let normal = state(mib(900));
        assert_eq!(kept(&normal, Purpose::Request(Class::AudioRealtime)), None);
        let mut recovered = state(Bytes::ZERO);
        let later = Sample {
            taken_at: Timestamp::from_millis(3),
            ..Sample::default()
        };
        recovered.pressure.observe(&later, mib(900));
        assert_eq!(kept(&recovered, urgent), Some(SpareReason::Recovered));
        let worker = critical.workers.get_mut("tts").unwrap();
        worker.works(1, Timestamp::from_millis(2));
        assert_eq!(kept(&critical, urgent), Some(SpareReason::Busy));
        assert_eq!(kept(&critical, last), None);
        critical.workers.get_mut("tts").unwrap().params.pinned = true;
        assert_eq!(kept(&critical, last), Some(SpareReason::Pinned));
    }
}
