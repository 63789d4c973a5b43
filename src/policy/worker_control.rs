//! Workers as a whole: who starts when, what is due, what their returns need.
//!
//! The arbiter books memory and sends actions; what each worker is at is in [`worker`](super::worker).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    lease::LeaseId,
    params::WorkerParams,
    reason::StopReason,
    worker::{RestStep, Worker},
};
use cotenant_units::Timestamp;

/// All workers of the configuration, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct WorkerControl(BTreeMap<String, Worker>);

impl WorkerControl {
    pub(super) fn new(params: &[WorkerParams]) -> Self {
        let named = |worker: &WorkerParams| (worker.name.clone(), Worker::new(worker));
        Self(params.iter().map(named).collect())
    }

    pub(super) fn get(&self, name: &str) -> Option<&Worker> {
        self.0.get(name)
    }

    pub(super) fn get_mut(&mut self, name: &str) -> Option<&mut Worker> {
        self.0.get_mut(name)
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// In the order of their names.
    pub(super) fn values(&self) -> impl Iterator<Item = &Worker> {
        self.0.values()
    }

    /// Whether one is being stopped: one at a time is enough.
    pub(super) fn is_any_stopping(&self) -> bool {
        self.values().any(Worker::is_stopping)
    }

    /// The worker to be started next. At the start of the supervisor the engine comes first, since it has the largest
    /// allocations, but for workers that are to come before it; then the workers, one after the other, each when the one
    /// before answers or has had its time, and when all are up that it comes after.
    pub(super) fn next_to_start(&self, engine_is_up: bool, now: Timestamp) -> Option<&str> {
        let mut order: Vec<&Worker> = self
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
            self.get(name)
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

    /// Whether all workers that come before the engine are up, or have had their time.
    pub(super) fn first_are_up(&self, now: Timestamp) -> bool {
        let mut first = self
            .values()
            .filter(|worker| worker.params.start.before_engine && worker.is_wanted());
        first.all(|worker| worker.has_come_up(now))
    }

    /// Takes the next thing that is due.
    pub(super) fn take_due(&mut self, now: Timestamp) -> Option<(String, Option<StopReason>)> {
        let mut workers = self.0.iter_mut();
        workers.find_map(|(name, worker)| Some((name.clone(), worker.take_due(now)?)))
    }

    /// The next step of one that is ready, of those named after `after`.
    pub(super) fn take_rest(
        &mut self,
        after: Option<&str>,
        may_rest: impl Fn(LeaseId) -> bool,
        now: Timestamp,
    ) -> Option<(String, RestStep)> {
        let mut workers = self
            .0
            .iter_mut()
            .filter(|(name, _)| after.is_none_or(|after| name.as_str() > after));
        workers.find_map(|(name, worker)| {
            let may_rest = worker.lease().is_some_and(&may_rest);
            Some((name.clone(), worker.take_rest(may_rest, now)?))
        })
    }

    /// When something is due, or comes to a worker that rests.
    pub(super) fn next_deadline(
        &self,
        may_rest: impl Fn(LeaseId) -> bool,
        now: Timestamp,
    ) -> Option<Timestamp> {
        let next =
            |worker: &Worker| worker.next_deadline(worker.lease().is_some_and(&may_rest), now);
        self.values().filter_map(next).min()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::params::{RestParams, VariantParams};
    use cotenant_units::Bytes;

    /// Becomes smaller when it has been idle for a second.
    fn worker(name: &str) -> WorkerParams {
        let variant = |name: &str, mib| VariantParams {
            name: name.to_owned(),
            steady: Bytes::from_mib(mib),
            peak: Bytes::from_mib(mib),
        };
        WorkerParams {
            name: name.to_owned(),
            variants: vec![variant("open", 100), variant("small", 40)],
            rest: RestParams {
                idle_shrink_after: Some(Duration::from_secs(1)),
                ..RestParams::default()
            },
            ..WorkerParams::default()
        }
    }

    fn comes_up(workers: &mut WorkerControl, name: &str, now: Timestamp) {
        let worker = workers.get_mut(name).unwrap();
        worker.want(now);
        worker.start(LeaseId(1), now);
        worker.answered(7, now);
    }

    #[test]
    fn each_worker_is_looked_at_once_in_the_order_of_names() {
        let mut workers = WorkerControl::new(&[worker("a"), worker("b")]);
        let now = Timestamp::from_millis(1);
        for name in ["a", "b"] {
            comes_up(&mut workers, name, now);
        }
        let now = now + Duration::from_secs(1);
        let (first, _) = workers.take_rest(None, |_| true, now).unwrap();
        let (second, _) = workers.take_rest(Some(&first), |_| true, now).unwrap();
        assert_eq!((first.as_str(), second.as_str()), ("a", "b"));
        assert_eq!(workers.take_rest(Some(&second), |_| true, now), None);
    }
}
