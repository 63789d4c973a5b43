//! Workers of the world.

use cotenant::{policy::params::WorkerParams, units::Bytes};

#[derive(Clone, Debug)]
pub(crate) struct Worker {
    pub(crate) params: WorkerParams,
    pub(crate) state: State,
    pub(crate) used: Bytes,
    /// The most that this life has used.
    pub(crate) high_water: Bytes,
    pub(crate) variant: Option<String>,
    pub(crate) requests: u32,
    /// Rises with every start, so that what was planned for an earlier process does not reach a later one.
    pub(crate) life: u32,
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
    }

    pub(crate) fn exit(&mut self) {
        self.state = State::Gone;
        self.used = Bytes::ZERO;
        self.requests = 0;
    }
}
