//! Tracing set-up and the table of all metrics.

mod log;
mod metrics;

pub use log::{LinesDropped, LogError, LogFilter, LogFormat, LogGuard, init};
pub use metrics::Metrics;
