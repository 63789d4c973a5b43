//! `cotenant` owns the memory of one unified-memory device: it hosts the LLM in its own process, runs ASR and TTS as
//! managed workers, hands out memory by leases that can be shrunk, and gives back part of what the LLM holds when
//! somebody else needs it more.
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
//! | [`causes`] | an error with what caused it, in one line |
//! | [`standby`] | memory that is set aside for the way of a shed |
//! | [`policy`] | every decision, as a plain value with methods |
//! | [`config`] | the configuration file, checked |
//! | [`probe`] | readings of the machine and of processes |
//! | [`engine`] | the LLM in this process |
//! | [`worker`] | ASR, TTS and others as child processes |
//! | [`speech`] | Wyoming frames, audio, and the road from speech to speech |
//! | [`http`] | OpenAI-compatible doors and metrics |
//! | [`rpc`] | gRPC for tenants and operators |
//! | [`journal`] | events and actions as lines |
//! | [`daemon`] | the loop that joins them |
//! | [`cli`] | the command line |

pub mod causes;
pub mod cli;
pub mod config;
pub mod daemon;
pub mod engine;
pub mod http;
pub mod journal;
pub mod policy;
pub mod probe;
pub mod rpc;
pub mod speech;
pub mod standby;
pub mod telemetry;
pub mod units;
pub mod worker;
