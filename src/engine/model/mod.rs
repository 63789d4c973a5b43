//! A model that computes: weights resident or streamed, a sequence, and what may be changed between two tokens.

mod calibrate;
mod dropped;
mod embedding;
mod forward;
mod gap;
mod growth;
mod interrupt;
mod loaded;
mod opening;
mod prefix;
mod products;
mod residency;
#[cfg(test)]
mod tests;
mod weights;
mod workspace;

pub use calibrate::PartTime;
pub use growth::{GROWERS, raw_read};
pub use loaded::{Logits, Model, ModelOptions, Scores};
pub use opening::Opening;
