//! Metadata values in compact form.

use std::fmt;

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A list of values of one type.
    Array(Array),
    /// A boolean.
    Bool(bool),
    /// A number with a fraction; `f32` in the file is widened.
    Float(f64),
    /// A signed integer of any width.
    Int(i64),
    /// A text.
    String(String),
    /// An unsigned integer of any width.
    Uint(u64),
}

/// A list of metadata values in compact form.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    /// Booleans.
    Bool(Vec<bool>),
    /// Numbers with a fraction.
    Float(Vec<f32>),
    /// Integers of up to 32 bits.
    Int(Vec<i32>),
    /// 64-bit integers, and 32-bit ones beyond `i32`.
    Long(Vec<i64>),
    /// Texts.
    Strings(StringTable),
}

/// Texts in one allocation, in the order of the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StringTable {
    text: String,
    ends: Vec<u32>,
}

impl Value {
    /// As a non-negative integer.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::Uint(value) => Some(value),
            Self::Int(value) => u64::try_from(value).ok(),
            _ => None,
        }
    }

    /// As a floating point number.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "model constants are f32 by nature"
    )]
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Self::Float(value) => Some(value as f32),
            Self::Uint(value) => Some(value as f32),
            Self::Int(value) => Some(value as f32),
            _ => None,
        }
    }

    pub(super) fn heap_len(&self) -> usize {
        match self {
            Self::Array(array) => array.heap_len(),
            Self::String(text) => text.len(),
            _ => 0,
        }
    }
}

/// For error messages: numbers verbatim, texts in backticks, lists by length.
impl fmt::Display for Value {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Array(array) => write!(out, "a list of {}", array.len()),
            Self::Bool(value) => write!(out, "`{value}`"),
            Self::Float(value) => write!(out, "`{value}`"),
            Self::Int(value) => write!(out, "`{value}`"),
            Self::String(text) => write!(
                out,
                "`{}`",
                text.chars().take(SHOWN).collect::<String>().escape_debug()
            ),
            Self::Uint(value) => write!(out, "`{value}`"),
        }
    }
}

/// Characters of a text shown in an error.
const SHOWN: usize = 64;

impl Array {
    const fn len(&self) -> usize {
        match self {
            Self::Bool(list) => list.len(),
            Self::Float(list) => list.len(),
            Self::Int(list) => list.len(),
            Self::Long(list) => list.len(),
            Self::Strings(table) => table.len(),
        }
    }

    /// Drops all items after the first `count`.
    pub(super) fn truncate(&mut self, count: usize) {
        match self {
            Self::Bool(list) => list.truncate(count),
            Self::Float(list) => list.truncate(count),
            Self::Int(list) => list.truncate(count),
            Self::Long(list) => list.truncate(count),
            Self::Strings(table) => {
                table.ends.truncate(count);
                table
                    .text
                    .truncate(table.ends.last().map_or(0, |end| *end as usize));
            }
        }
    }

    pub(super) fn heap_len(&self) -> usize {
        match self {
            Self::Bool(list) => list.len(),
            Self::Float(list) => list.len() * 4,
            Self::Int(list) => list.len() * 4,
            Self::Long(list) => list.len() * 8,
            Self::Strings(table) => table.text.len() + table.ends.len() * 4,
        }
    }
}

impl StringTable {
    /// Appends `text`.
    pub fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.ends
            .push(u32::try_from(self.text.len()).unwrap_or(u32::MAX));
    }

    /// Number of texts.
    pub const fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether it is empty.
    pub const fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The text at `index`.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = match index.checked_sub(1) {
            Some(before) => *self.ends.get(before)?,
            None => 0,
        };
        self.text.get(start as usize..end as usize)
    }

    /// The texts in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|index| self.get(index).unwrap_or_default())
    }
}
