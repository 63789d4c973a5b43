//! Memory supervisor of one device: LLM in process, speech workers, leases that shrink.
//!
//! ```text
//!                samples, exits, answers, requests
//!   probe ─┐                                        ┌─ perform: engine, workers, leases, journal
//!   rpc ───┤        ┌──────────────────────┐        │
//!   http ──┼─event──► policy::Arbiter      ├─action─┤     the outcome comes back as an event
//!   worker ┤        │ (plain values, a     │        │
//!   engine ┘        │  clock passed in)    │        └─ next_deadline() wakes the loop
//!                   └──────────────────────┘
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`units`] | bytes, tokens, layers, time since the start |
//! | [`causes`] | an error and its causes in one line |
//! | [`emergency`] | emergency memory for the shed path |
//! | [`heap`] | the size of JSON trees before they are built, free pages given back |
//! | [`policy`] | decisions, as plain values with methods |
//! | [`conversation`] | messages, forms of answers and what they take, as engine and APIs have them |
//! | [`config`] | the configuration file, checked |
//! | [`probe`] | readings of the machine and of processes |
//! | [`engine`] | the LLM in this process |
//! | [`worker`] | ASR, TTS and others as child processes |
//! | [`speech`] | Wyoming frames, audio, sentences |
//! | [`http`] | OpenAI's and Ollama's APIs, metrics, one page |
//! | [`rpc`] | gRPC for tenants and operators |
//! | [`journal`] | events, decisions and actions as records |
//! | [`daemon`] | composition root, control loop, adapters |
//! | [`cli`] | the command line |

pub use cotenant_cli as cli;
pub use cotenant_config as config;
pub use cotenant_conversation as conversation;
pub use cotenant_daemon as daemon;
pub use cotenant_engine as engine;
pub use cotenant_http as http;
pub use cotenant_journal as journal;
pub use cotenant_memory::{emergency, heap};
pub use cotenant_policy as policy;
pub use cotenant_probe as probe;
pub use cotenant_rpc as rpc;
pub use cotenant_speech as speech;
pub use cotenant_telemetry as telemetry;
pub use cotenant_units::{self as units, causes};
pub use cotenant_worker as worker;
