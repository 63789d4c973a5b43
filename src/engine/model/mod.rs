//! A model that computes: resident or streamed weights, a sequence, and changes of plan between two tokens.

mod batch;
mod calibrate;
mod damage;
mod draft;
mod draft_kv;
mod dropped;
mod embedding;
mod experts;
mod forward;
mod growth;
mod layer_input;
mod loaded;
mod marks;
mod mixture;
mod opening;
mod operations;
mod parked;
mod pass;
mod products;
mod residency;
mod saved;
mod sequence;
#[cfg(test)]
mod tests;
mod trial;
mod weights;
mod workspace;

pub use batch::Span;
pub use calibrate::PartTime;
pub(crate) use damage::refuse_zeros;
pub use experts::ExpertCounts;
pub use growth::{GROWERS, raw_read};
pub use loaded::{Logits, Model, ModelOptions};
pub use opening::Opening;
pub(crate) use opening::without_drafts;
pub use parked::{Asked, Kept, Lane, Selected, common_prefix};
pub(crate) use saved::with_transfers;
pub use saved::{OnDisk, SaveDue, SaveStep, SavedCounts, SavedView};
