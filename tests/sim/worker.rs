//! Simulated workers.

use cotenant::{policy::params::WorkerParams, units::Bytes};

/// Use of a leaking worker relative to its peak, unless it is ended earlier.
const LEAKS_TO: u64 = 2;

#[derive(Clone, Debug)]
pub(crate) struct Worker {
    pub(crate) params: WorkerParams,
    pub(crate) state: State,
    pub(crate) used: Bytes,
    /// Peak use of this life.
    pub(crate) high_water: Bytes,
    pub(crate) variant: Option<String>,
    pub(crate) requests: u32,
    /// Incremented at every start, so that events planned for an earlier process do not reach a later one.
    pub(crate) life: u32,
    /// Its use between requests, if those take memory: its declared sizes are a guess.
    pub(crate) breathes: Option<Breath>,
}

/// A worker whose requests take memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Breath {
    /// Its use between requests.
    pub(crate) rest: Bytes,
    /// Memory leaked by each request.
    pub(crate) leak: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Gone,
    Starting,
    Ready,
}

impl Worker {
    pub(crate) fn new(params: &WorkerParams) -> Self {
        Self {
            params: params.clone(),
            state: State::Gone,
            used: Bytes::ZERO,
            high_water: Bytes::ZERO,
            variant: None,
            requests: 0,
            life: 0,
            breathes: None,
        }
    }

    pub(crate) fn start(&mut self, variant: Option<String>) {
        self.state = State::Starting;
        self.used = self.params.peak_of(variant.as_deref());
        self.high_water = self.used;
        self.variant = variant;
        self.requests = 0;
        self.life += 1;
    }

    pub(crate) fn become_ready(&mut self) {
        self.state = State::Ready;
        self.used = self.params.steady_of(self.variant.as_deref());
        if let Some(breath) = &mut self.breathes {
            breath.rest = self.used;
        }
    }

    /// Sets its number of requests; the first takes `more` than its use between requests.
    pub(crate) fn works(&mut self, requests: u32, more: Bytes) {
        let begins = self.requests == 0 && requests > 0;
        let ends = self.requests > 0 && requests == 0;
        self.requests = requests;
        let Some(breath) = &mut self.breathes else {
            return;
        };
        if begins {
            self.used = breath.rest + more;
        } else if ends {
            breath.rest =
                (breath.rest + breath.leak).min(self.params.peak.saturating_mul(LEAKS_TO));
            self.used = breath.rest;
        }
        self.high_water = self.high_water.max(self.used);
    }

    pub(crate) fn exit(&mut self) {
        self.state = State::Gone;
        self.used = Bytes::ZERO;
        self.requests = 0;
    }
}
