//! What tests and measurements share: synthetic weights and values to begin with. Not in the product.

pub mod refusals;
pub mod samples;
pub mod weights;
