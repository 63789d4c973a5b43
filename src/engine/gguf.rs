//! GGUF headers: metadata and the positions of tensors.
//!
//! A parser of our own replaces candle's `gguf_file::Content` for three reasons: candle stores each array element as a
//! 32-byte enum plus a heap string (some 50 MB for a vocabulary of 248 000, against 9 MB here); a header of a few MB
//! can make it allocate gigabytes; and its errors name neither the tensor nor the type. A test compares both readers on
//! the same file.

mod dialect;
mod dtype;
mod header;
mod parser;
mod split;
mod values;

pub use dtype::{GgmlDType, SUPPORTED, dtype_name, type_number};
pub(super) use header::OpenFile;
pub use header::{Header, Part, TensorInfo};
pub use values::{Array, StringTable, Value};
