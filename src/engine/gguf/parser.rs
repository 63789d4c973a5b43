//! Bounded parser of a GGUF header.

use std::io::BufRead;

use super::values::{Array, StringTable, Value};
use crate::error::LoadErrorKind;
use cotenant_units::Bytes;

/// Reads the parts of a header, and validates every number before use.
pub(super) struct Parser<R> {
    pub(super) input: R,
    pub(super) position: u64,
    pub(super) file_bytes: u64,
    pub(super) kept: u64,
}

impl<R: BufRead> Parser<R> {
    pub(super) fn fill(&mut self, what: &str, buffer: &mut [u8]) -> Result<(), LoadErrorKind> {
        self.input.read_exact(buffer).map_err(|source| {
            if source.kind() == std::io::ErrorKind::UnexpectedEof {
                LoadErrorKind::Truncated {
                    what: what.to_owned(),
                    at: self.position,
                    file: Bytes::new(self.file_bytes),
                }
            } else {
                LoadErrorKind::Open(source)
            }
        })?;
        self.position += buffer.len() as u64;
        Ok(())
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], LoadErrorKind> {
        let mut bytes = [0u8; N];
        self.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, LoadErrorKind> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, LoadErrorKind> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of items that each take at least `each` bytes of the rest of the file.
    pub(super) fn count(
        &mut self,
        what: &str,
        limit: u64,
        each: u64,
    ) -> Result<u64, LoadErrorKind> {
        let count = self.u64(what)?;
        let room = (self.file_bytes - self.position.min(self.file_bytes)) / each;
        let limit = limit.min(room);
        if count > limit {
            return Err(LoadErrorKind::Limit {
                what: what.to_owned(),
                value: count,
                limit,
            });
        }
        Ok(count)
    }

    /// Reserves `bytes` of the header's heap limit.
    fn keep(&mut self, what: &str, bytes: u64) -> Result<(), LoadErrorKind> {
        self.kept = self.kept.saturating_add(bytes);
        if self.kept > HEADER_BYTES_MAX {
            return Err(LoadErrorKind::Limit {
                what: format!("header bytes at `{what}`"),
                value: self.kept,
                limit: HEADER_BYTES_MAX,
            });
        }
        Ok(())
    }

    pub(super) fn string(&mut self, what: &str, limit: u64) -> Result<String, LoadErrorKind> {
        let length = self.count(what, limit, 1)?;
        self.keep(what, length + 64)?;
        let mut bytes = vec![0u8; usize::try_from(length).unwrap_or(0)];
        self.fill(what, &mut bytes)?;
        while bytes.last() == Some(&0) {
            bytes.pop();
        }
        // Texts should be UTF-8, but exceptions exist; we depend on none of those bytes.
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }

    pub(super) fn value(&mut self, key: &str, kind: u32) -> Result<Value, LoadErrorKind> {
        Ok(match kind {
            0 | 2 | 4 | 10 => Value::Uint(self.uint(key, kind)?),
            1 | 3 | 5 | 11 => Value::Int(self.int(key, kind)?),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array(key)?))),
            7 => Value::Bool(self.flag(key)?),
            8 => Value::String(self.string(key, TEXT_BYTES_MAX)?),
            9 => Value::Array(self.list(key)?),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            other => {
                return Err(LoadErrorKind::Metadata {
                    key: key.to_owned(),
                    problem: format!("its value type {other} is unknown"),
                });
            }
        })
    }

    fn uint(&mut self, key: &str, kind: u32) -> Result<u64, LoadErrorKind> {
        Ok(match kind {
            0 => u64::from(u8::from_le_bytes(self.array(key)?)),
            2 => u64::from(u16::from_le_bytes(self.array(key)?)),
            4 => u64::from(u32::from_le_bytes(self.array(key)?)),
            _ => u64::from_le_bytes(self.array(key)?),
        })
    }

    fn int(&mut self, key: &str, kind: u32) -> Result<i64, LoadErrorKind> {
        Ok(match kind {
            1 => i64::from(i8::from_le_bytes(self.array(key)?)),
            3 => i64::from(i16::from_le_bytes(self.array(key)?)),
            5 => i64::from(i32::from_le_bytes(self.array(key)?)),
            _ => i64::from_le_bytes(self.array(key)?),
        })
    }

    fn flag(&mut self, key: &str) -> Result<bool, LoadErrorKind> {
        match self.array(key)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(LoadErrorKind::Metadata {
                key: key.to_owned(),
                problem: format!("{other} is neither true nor false"),
            }),
        }
    }

    fn list(&mut self, key: &str) -> Result<Array, LoadErrorKind> {
        let kind = self.u32(key)?;
        let each = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            other => {
                return Err(LoadErrorKind::Metadata {
                    key: key.to_owned(),
                    problem: format!("a list of value type {other} is not supported"),
                });
            }
        };
        let count = self.count(key, LIST_ITEMS_MAX, each)?;
        // Items take at most 8 bytes here, except texts, which are accounted one by one.
        self.keep(key, count * 8)?;
        Ok(match kind {
            6 => Array::Float(
                (0..count)
                    .map(|_| Ok(f32::from_le_bytes(self.array(key)?)))
                    .collect::<Result<_, LoadErrorKind>>()?,
            ),
            7 => Array::Bool(
                (0..count)
                    .map(|_| self.flag(key))
                    .collect::<Result<_, _>>()?,
            ),
            8 => {
                let mut table = StringTable::default();
                // One buffer for all texts that span buffers: a vocabulary and its merges are half a million.
                let mut bytes = Vec::new();
                for _ in 0..count {
                    if self.push_buffered(key, &mut table)? {
                        continue;
                    }
                    let length = self.count(key, TEXT_BYTES_MAX, 1)?;
                    self.keep(key, length)?;
                    bytes.resize(usize::try_from(length).unwrap_or(0), 0);
                    self.fill(key, &mut bytes)?;
                    table.push(&String::from_utf8_lossy(&bytes));
                }
                Array::Strings(table)
            }
            12 => {
                let list: Vec<f64> = (0..count)
                    .map(|_| Ok(f64::from_le_bytes(self.array(key)?)))
                    .collect::<Result<_, LoadErrorKind>>()?;
                Array::Float(
                    list.into_iter()
                        .map(|value| Value::Float(value).as_f32().unwrap_or(0.0))
                        .collect(),
                )
            }
            4 | 5 => self.words(key, kind == 4, count)?,
            _ => {
                let unsigned = matches!(kind, 0 | 2 | 10);
                let mut list = Vec::new();
                for _ in 0..count {
                    list.push(if unsigned {
                        i64::try_from(self.uint(key, kind)?).unwrap_or(i64::MAX)
                    } else {
                        self.int(key, kind)?
                    });
                }
                match list.iter().map(|&value| i32::try_from(value)).collect() {
                    Ok(narrow) => Array::Int(narrow),
                    Err(_) => Array::Long(list),
                }
            }
        })
    }

    /// A list of 32-bit integers, such as the types of all tokens.
    fn words(&mut self, key: &str, unsigned: bool, count: u64) -> Result<Array, LoadErrorKind> {
        let mut block = [0u8; 4096];
        let mut left = usize::try_from(count).unwrap_or(0) * size_of::<i32>();
        let mut list = Vec::new();
        while left > 0 {
            let part = left.min(block.len());
            let bytes = block.get_mut(..part).unwrap_or_default();
            self.fill(key, bytes)?;
            let (words, _) = bytes.as_chunks();
            list.extend(words.iter().map(|word| i32::from_le_bytes(*word)));
            left -= part;
        }
        Ok(if unsigned && list.iter().any(|word| *word < 0) {
            Array::Long(
                list.iter()
                    .map(|word| i64::from(word.cast_unsigned()))
                    .collect(),
            )
        } else {
            Array::Int(list)
        })
    }

    /// Adds the next text to `table` if the buffer contains all of it, which nearly always holds; this is on the path
    /// to the first token.
    fn push_buffered(&mut self, key: &str, table: &mut StringTable) -> Result<bool, LoadErrorKind> {
        let buffer = self.input.fill_buf().unwrap_or_default();
        let Some((length, rest)) = buffer.split_first_chunk() else {
            return Ok(false);
        };
        let length = u64::from_le_bytes(*length);
        let text = usize::try_from(length)
            .ok()
            .and_then(|length| rest.get(..length));
        let Some(text) = text.filter(|_| length <= TEXT_BYTES_MAX) else {
            return Ok(false);
        };
        match str::from_utf8(text) {
            Ok(text) => table.push(text),
            Err(_) => table.push(&String::from_utf8_lossy(text)),
        }
        let passed = size_of::<u64>() + text.len();
        self.input.consume(passed);
        self.position += passed as u64;
        self.keep(key, length)?;
        Ok(true)
    }
}

/// The longest text, such as a chat template or a licence; current templates stay below 64 KiB.
const TEXT_BYTES_MAX: u64 = 1 << 24;
/// The longest list; current vocabularies stay below 300 000 tokens.
const LIST_ITEMS_MAX: u64 = 1 << 24;
/// Heap limit of a header; a vocabulary of 248 000 takes 9 MB.
const HEADER_BYTES_MAX: u64 = 1 << 28;
