//! Configuration file: raw form, validation and checked form.
//!
//! [`load()`] reads a file. `raw` mirrors it, `validate` turns it into a [`Config`] and reports all faults at once;
//! other modules see only checked values. `deploy/cotenant.yaml` shows every key with its default, unit and range; a
//! test compares it with the code.

mod checker;
mod clients;
mod confinement;
mod error;
mod grpc;
mod load;
mod params;
mod raw;
mod reload;
mod settings;
mod size;
mod telemetry;
#[cfg(test)]
mod tests;
mod validate;
mod workers;
mod wyoming;

pub use clients::{ClientConfig, Secret, load_clients};
pub use error::{Fault, LoadError, LoadErrorKind, load_private, load_text};
pub use load::load;
pub use reload::reloaded;
pub use settings::{
    BudgetConfig, CONVERSATIONS, Config, Confinement, FILE_MAX, FileAccess, GrpcConfig, GrpcLimits,
    HttpConfig, IdleConfig, JournalConfig, Keyless, KvMemory, LeaseConfig, LeaseHolder, Listen,
    LlmConfig, LogConfig, LogFormat, Otlp, OtlpConfig, PressureConfig, PressureWatch, Readiness,
    ReadyConfig, Resource, SafeProfileConfig, SheddingConfig, SyscallFilter, TcpConfig,
    TelemetryConfig, VocabularyConfig, Watermark, Watermarks, WorkerConfig, WorkerMemory,
    WorkerProtocol, WorkerRole, WyomingConfig, WyomingListen,
};
pub use size::{SizeError, parse_duration, parse_size};
