//! Plans of the engine: from a model's shape and a number of bytes.
//!
//! A plan says which layers are resident, how many tokens the KV cache may hold, and how many tokens one prefill
//! chunk has. Every byte of it can be computed beforehand from the [`ModelShape`], so that the book and the engine
//! speak of the same number.

mod chunk;
mod path;
mod plans;
mod shape;

pub use self::shape::{
    EnginePlan, FloorError, KvShape, LayerKind, LayerShape, ModelShape, PlanLimits, WindowedKv,
};
#[cfg(test)]
pub(crate) use crate::samples::{sample_shape, small_model};
