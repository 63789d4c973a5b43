//! Kinds of fault in a history, and their rates.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Rate of one kind of fault, as a factor of its usual rate; zero if the kind is absent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fault(f64);

impl Fault {
    pub(crate) fn exists(self) -> bool {
        self.0 > 0.0
    }

    /// Whether it strikes now; `usual` is its probability at the usual rate.
    pub(crate) fn strikes(self, rng: &mut ChaCha8Rng, usual: f64) -> bool {
        self.exists() && rng.random_bool((usual * self.0).min(1.0))
    }
}

macro_rules! kinds {
    ($($(#[doc = $doc:literal])? $kind:ident),* $(,)?) => {
        /// Each kind is present or absent; a history with few kinds goes deeper than one with all.
        #[derive(Clone, Copy, Debug, Default)]
        pub(crate) struct Faults {
            $($(#[doc = $doc])? pub(crate) $kind: Fault,)*
        }

        impl Faults {
            /// Names of all kinds.
            pub(crate) const KINDS: &[&str] = &[$(stringify!($kind)),*];

            pub(crate) fn choose(rng: &mut ChaCha8Rng) -> Self {
                let share = [0.0, 0.1, 0.25, 0.6][rng.random_range(0..4)];
                let mut one = || {
                    let rate = [0.3, 1.0, 1.0, 3.0][rng.random_range(0..4)];
                    Fault(if rng.random_bool(share) { rate } else { 0.0 })
                };
                Self { $($kind: one(),)* }
            }

            /// Whether each kind is present, in the order of [`Faults::KINDS`].
            pub(crate) fn existing(&self) -> Vec<bool> {
                vec![$(self.$kind.exists()),*]
            }
        }
    };
}

kinds! {
    late_samples,
    /// An earlier sample is delivered again.
    stale_samples,
    /// The sampler stalls for a while.
    missing_samples,
    lost_measurements,
    unmeasurable_tenants,
    lying_tenants,
    slow_tenants,
    crashing_tenants,
    silent_tenants,
    greedy_tenants,
    /// Renewals and releases of leases that have ended.
    late_renewals,
    /// A hold stream breaks; targets do not arrive until it is restored.
    lost_streams,
    cancelled_requests,
    strange_requests,
    lost_answers,
    slow_engine,
    /// Loading and starting take ten times as long.
    slow_disk,
    failing_plans,
    dying_engine,
    crashing_workers,
    workers_never_ready,
    lying_workers,
    /// The clock reported to the arbiter steps back for one event.
    clock_back,
    /// The machine stalled: time jumps, and everything is late.
    clock_forward,
    /// The supervisor is killed, and resumes from its checkpoint.
    restarts,
    neighbour,
    /// The neighbour fills memory in large steps, repeatedly.
    storms,
    operators,
}
