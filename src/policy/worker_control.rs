//! All workers: order of starts.
//!
//! The arbiter books memory and sends actions; the state of each worker is in [`worker`](super::worker).

use std::collections::BTreeMap;

use super::worker::Worker;
use cotenant_units::Timestamp;

/// All workers of the configuration, by name.
pub(super) type Workers = BTreeMap<String, Worker>;

/// Whether a worker is being stopped: only one is stopped at a time.
pub(super) fn is_any_stopping(workers: &Workers) -> bool {
    workers.values().any(Worker::is_stopping)
}

/// Returns the worker to start next. At the start of the supervisor the engine precedes the workers, except those with
/// `before_engine`, since it has the largest allocations; then the workers start one after the other, each once the
/// previous one is ready or its time is over, and the workers in its `after` list are up.
pub(super) fn next_to_start(workers: &Workers, engine_is_up: bool, now: Timestamp) -> Option<&str> {
    let mut order: Vec<&Worker> = workers
        .values()
        .filter(|worker| worker.params.start.autostart)
        .collect();
    order.sort_by_key(|worker| {
        (
            !worker.params.start.before_engine,
            worker.params.start.start_order,
            &worker.params.name,
        )
    });
    // The engine is no worker, and was waited for already.
    let up = |name: &String| {
        workers
            .get(name)
            .is_none_or(|other| !other.is_wanted() || other.has_come_up(now))
    };
    for worker in order {
        if !worker.params.start.before_engine && !engine_is_up {
            return None;
        }
        if worker.awaits_its_start() {
            if worker.params.start.after.iter().all(up) {
                return Some(&worker.params.name);
            }
        } else if !worker.has_come_up(now) {
            return None;
        }
    }
    None
}

/// Whether all workers that start before the engine are up, or their time is over.
pub(super) fn first_are_up(workers: &Workers, now: Timestamp) -> bool {
    let mut first = workers
        .values()
        .filter(|worker| worker.params.start.before_engine && worker.is_wanted());
    first.all(|worker| worker.has_come_up(now))
}
