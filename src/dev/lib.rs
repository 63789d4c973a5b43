//! Test support shared by crates: synthetic weights and sample values. Not in the product.

pub mod refusals;
pub mod samples;
pub mod weights;
