//! Tracing set-up and the table of all metrics.
