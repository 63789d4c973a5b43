//! The configuration file: as written, checked, and as the rest of the program sees it.
//!
//! [`load`] is the door. `raw` mirrors the file, `validate` turns it into a [`Config`] and reports every fault at
//! once, and nothing behind this module sees a value that has not been checked. `deploy/cotenant.yaml` shows every
//! key with its default, unit and range; a test compares it with what is written here.

mod confinement;
mod error;
mod grpc;
mod params;
mod raw;
mod settings;
mod size;
#[cfg(test)]
mod tests;
mod validate;
mod workers;
mod wyoming;

pub use confinement::{IdleConfig, LeaseHolder, LimitsConfig, SandboxConfig};
pub use error::{Fault, LoadError, LoadErrorKind};
pub use settings::{
    BudgetConfig, Config, Endpoint, FILE_MAX, GrpcConfig, GrpcLimits, HttpConfig, IdsConfig, JournalConfig, KvMemory,
    LeaseConfig, LlmConfig, LogConfig, LogFormat, OthersRole, PeerBounds, PressureConfig, PressureWatch, ReadyCheck,
    ReadyConfig, RestartConfig, RolesConfig, SheddingConfig, VocabularyConfig, Watermark, Watermarks, WorkerConfig,
    WorkerMemory, WorkerProtocol, WorkerRole, WorkerVariant, WyomingConfig, WyomingListen, load,
};
pub use size::{SizeError, parse_duration, parse_size};
