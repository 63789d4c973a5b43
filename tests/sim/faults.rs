//! Which kinds of fault a history has.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Each kind is there or not; a history with few kinds goes deeper than one with all.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) late_samples: bool,
    pub(crate) lost_measurements: bool,
    pub(crate) unmeasurable_tenants: bool,
    pub(crate) lying_tenants: bool,
    pub(crate) slow_tenants: bool,
    pub(crate) crashing_tenants: bool,
    pub(crate) silent_tenants: bool,
    pub(crate) greedy_tenants: bool,
    pub(crate) cancelled_requests: bool,
    pub(crate) strange_requests: bool,
    pub(crate) lost_answers: bool,
    pub(crate) slow_engine: bool,
    pub(crate) failing_plans: bool,
    pub(crate) dying_engine: bool,
    pub(crate) crashing_workers: bool,
    pub(crate) workers_never_ready: bool,
    pub(crate) lying_workers: bool,
    pub(crate) neighbour: bool,
    pub(crate) operators: bool,
}

impl Faults {
    pub(crate) fn choose(rng: &mut ChaCha8Rng) -> Self {
        let share = [0.0, 0.15, 0.4, 0.8][rng.random_range(0..4)];
        let mut one = || rng.random_bool(share);
        Self {
            late_samples: one(),
            lost_measurements: one(),
            unmeasurable_tenants: one(),
            lying_tenants: one(),
            slow_tenants: one(),
            crashing_tenants: one(),
            silent_tenants: one(),
            greedy_tenants: one(),
            cancelled_requests: one(),
            strange_requests: one(),
            lost_answers: one(),
            slow_engine: one(),
            failing_plans: one(),
            dying_engine: one(),
            crashing_workers: one(),
            workers_never_ready: one(),
            lying_workers: one(),
            neighbour: rng.random_bool(0.7),
            operators: rng.random_bool(0.4),
        }
    }
}
