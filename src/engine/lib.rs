//! The LLM in this process: resident or streamed layers, and a resizable KV capacity.
//!
//! ```text
//!  GGUF file ──header──► gguf ──► shape (size of each piece) ──► policy plans
//!      │
//!      └──extents──► reader ──► arena (resident layers) ──┐
//!                         └───► ring  (streamed pieces) ──┴► model ──► backend (kernels) ──► logits
//!                                                              │
//!                                                  kv blocks, recurrent state, workspace
//! ```
//!
//! Every large piece of memory is a separate mapping ([`arena`]), so that one `munmap`, confirmed by the kernel,
//! returns it, and [`Model::breakdown`] lists everything held.

pub mod answer;
pub mod arena;
pub mod backend;
pub mod breakdown;
pub mod chat;
pub mod constraint;
pub mod disk;
mod drafts;
pub mod embedding;
mod encoder;
mod engine_loop;
pub mod error;
pub mod generate;
pub mod gguf;
mod gguf_model;
pub mod helper;
pub mod hugging_face;
mod jinja;
pub mod kv;
pub mod language_model;
mod mailbox;
pub mod model;
pub mod preemption;
pub mod protocol;
pub mod reader;
pub mod reserve;
pub mod sampling;
pub mod sayable;
pub mod schema;
pub mod shape;
pub mod spec;
pub mod state;
mod stops;
pub mod synthetic;
pub mod tensor_group;
#[cfg(test)]
mod test_vocabulary;
pub mod text;
pub mod thread;
pub mod tokenizer;
pub mod tool_format;
#[cfg(test)]
#[path = "../dev/weights.rs"]
#[expect(unreachable_pub, reason = "it is a module of `cotenant-dev`, too")]
mod weights;
// The file names this crate as others do.
#[cfg(test)]
extern crate self as cotenant_engine;

pub use answer::{AnswerReader, AnswerStyle};
pub use breakdown::Breakdown;
pub use chat::{ChatMessage, Conversation, Role, ToolCall};
pub use constraint::Client;
pub use cotenant_conversation::AnswerForm;
pub use error::{ApplyError, ApplyReport, ForwardError, LoadError, LoadErrorKind};
pub use generate::{
    FinishReason, GenerateError, GenerateEvent, GenerateRequest, Prompt, PromptError, RequestId,
    SubmitError, Usage,
};
pub use gguf::Header;
pub use language_model::LanguageModel;
pub use mailbox::EngineHandle;
pub use model::{Asked, Lane, Logits, Model, ModelOptions, PartTime, Selected};
pub use preemption::{Checkpoint, Flow};
pub use protocol::{
    ApplyFailure, EngineEvent, EngineOptions, EnginePhase, EngineSnapshot, Expected,
    RunningRequest, WaitingRequest,
};
pub use sampling::Sampling;
pub use sayable::Sayable;
pub use thread::Engine;
