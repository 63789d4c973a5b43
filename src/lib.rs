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

// Files that tests share with benchmarks name the library.
#[cfg(test)]
extern crate self as cotenant;

pub mod causes;
pub mod cli;
pub mod config;
pub mod conversation;
pub mod daemon;
pub mod emergency;
pub mod engine;
pub mod heap;
pub mod http;
pub mod journal;
pub mod policy;
pub mod probe;
pub mod rpc;
pub mod speech;
pub mod telemetry;
pub mod units;
pub mod worker;
