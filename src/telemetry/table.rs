//! Table of metrics, and its kinds of series.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Metric, Registry},
};

/// The registry during its construction.
pub(crate) struct Table(pub(crate) Registry);

impl Table {
    pub(crate) fn add<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        self.with(name, help, M::default())
    }

    pub(crate) fn with<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register(name, help, metric.clone());
        metric
    }
}

/// An integer gauge.
pub(crate) type Size = Gauge<u64, AtomicU64>;

/// The same, absent while unknown: unknown is not zero.
pub(crate) type Known = Family<Labels<0>, Size>;

/// Labels of a series, in output order.
pub(crate) type Labels<const N: usize> = [(&'static str, String); N];

pub(crate) fn labels<const N: usize>(labels: [(&'static str, &str); N]) -> Labels<N> {
    labels.map(|(name, value)| (name, value.to_owned()))
}

/// Raises a counter to a total that is counted elsewhere.
pub(crate) fn raise(counter: &Counter, total: u64) {
    counter.inner().fetch_max(total, Ordering::Relaxed);
}
