//! Tracing set-up, metrics table, and spans for a collector.

pub mod build_name;
mod events;
mod llm;
mod log;
mod metrics;
mod node;
pub mod otlp;
mod resource;
mod span;
mod table;

pub use events::{EventExporter, EventRecord};
pub use llm::LlmLoad;
pub use log::{LinesDropped, LogError, LogFilter, LogFormat, LogGuard, init};
pub use metrics::Metrics;
pub use node::NodeInfo;
pub use otlp::{Collector, OtlpProtocol, export};
pub use resource::resource;
pub use span::{Attribute, Span, SpanContext, SpanKind, SpanValue, Tracer};
