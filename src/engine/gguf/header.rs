//! Header of one GGUF file.

use std::{
    collections::BTreeMap,
    fs::{self, File, Metadata},
    io::{self, BufRead, BufReader, Read},
    iter::repeat,
    path::{Path, PathBuf},
};

use super::{
    dtype::{GgmlDType, dtype_name, dtype_of, type_name},
    parser::Parser,
    values::{Array, StringTable, Value},
};
use crate::{
    disk::{DiskWatch, Head, WatchedFile},
    error::LoadErrorKind,
};
use cotenant_units::Bytes;

/// Contents of a GGUF header.
#[derive(Clone, Debug)]
pub struct Header {
    pub(super) path: PathBuf,
    pub(super) metadata: BTreeMap<String, Value>,
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    pub(super) file_bytes: Bytes,
    pub(super) parts: Vec<Part>,
}

/// Position and type of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name in the file.
    pub name: String,
    /// Element or block type.
    pub dtype: GgmlDType,
    /// Elements along each axis, fastest first (`ne` in llama.cpp).
    pub dims: Vec<u64>,
    /// First byte, counted from the start of the file, or of the first of several; see [`Part`].
    pub offset: u64,
    /// Length in the file.
    pub bytes: Bytes,
}

impl TensorInfo {
    /// Whether it has these dimensions; trailing axes of one element are ignored.
    pub(crate) fn has_dims(&self, dims: &[u64]) -> bool {
        let axes = self.dims.len().max(dims.len());
        let padded = |dims: &[u64]| -> Vec<u64> {
            dims.iter().copied().chain(repeat(1)).take(axes).collect()
        };
        padded(&self.dims) == padded(dims)
    }
}

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The file.
    pub path: PathBuf,
    /// Offset of its first byte, counted across all parts.
    pub base: u64,
    /// Its length at opening.
    pub bytes: Bytes,
}

/// A file with its parsed header.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) file: File,
    /// Its metadata before the first read.
    pub(crate) was: Metadata,
    pub(crate) head: Head,
}

impl Header {
    pub(super) fn read_one(
        path: &Path,
        watch: &DiskWatch,
    ) -> Result<(Self, OpenFile), LoadErrorKind> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let what = format!("the header of {name}");
        let ask = |ask: &dyn Fn() -> io::Result<Metadata>| {
            let meta = watch.asking_for(&what, ask).map_err(LoadErrorKind::Open)?;
            if meta.is_file() {
                Ok(meta)
            } else {
                Err(LoadErrorKind::NotAFile)
            }
        };
        // Also before it is opened: opening a pipe blocks until a writer arrives.
        ask(&|| fs::metadata(path))?;
        let file = watch.asking_for(&what, || File::open(path));
        let file = file.map_err(LoadErrorKind::Open)?;
        let meta = ask(&|| file.metadata())?;
        let file_bytes = meta.len();
        if file_bytes == 0 {
            return Err(LoadErrorKind::Empty);
        }
        let input = BufReader::with_capacity(BUFFER, WatchedFile::new(&file, &what, watch));
        let (header, parser) = Self::parse(path, input, file_bytes)?;
        let head = parser.input.into_inner().into_head();
        Ok((
            header,
            OpenFile {
                file,
                was: meta,
                head,
            },
        ))
    }

    /// Length of the header of a file with `file_bytes` bytes that starts with `input`, for a file that is not complete
    /// yet. Reads little more of `input` than the header.
    ///
    /// # Errors
    /// As [`Self::read`], for this file alone.
    pub fn length(input: impl Read, file_bytes: Bytes) -> Result<Bytes, LoadErrorKind> {
        let input = BufReader::with_capacity(BUFFER, input);
        let (_, parser) = Self::parse(Path::new(""), input, file_bytes.get())?;
        Ok(Bytes::new(parser.position))
    }

    fn parse<R: BufRead>(
        path: &Path,
        input: R,
        file_bytes: u64,
    ) -> Result<(Self, Parser<R>), LoadErrorKind> {
        let mut parser = Parser {
            input,
            position: 0,
            file_bytes,
            kept: 0,
        };
        let mut magic = [0u8; 4];
        match parser.fill("magic", &mut magic) {
            Ok(()) if magic == *b"GGUF" => {}
            Ok(()) if magic == LFS_MAGIC && file_bytes <= LFS_BYTES_MAX => {
                return Err(LoadErrorKind::GitLfsPointer);
            }
            Ok(()) => return Err(LoadErrorKind::NotGguf { magic }),
            Err(LoadErrorKind::Truncated { .. }) => {
                return Err(LoadErrorKind::NotGguf { magic: [0; 4] });
            }
            Err(other) => return Err(other),
        }
        let version = parser.u32("version")?;
        if !(2..=3).contains(&version) {
            let turned = version.swap_bytes();
            return Err(if (1..=3).contains(&turned) {
                LoadErrorKind::BigEndian { version: turned }
            } else {
                LoadErrorKind::Version { version }
            });
        }
        let tensor_count = parser.count("tensor count", TENSORS_MAX, 8 + 4 + 4 + 8)?;
        let entry_count = parser.count("metadata count", ENTRIES_MAX, 8 + 4 + 1)?;
        let mut metadata = BTreeMap::new();
        for _ in 0..entry_count {
            let key = parser.string("metadata key", KEY_BYTES_MAX)?;
            let kind = parser.u32(&key)?;
            let value = parser.value(&key, kind)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(LoadErrorKind::Duplicate { name: key });
            }
        }
        let mut raw = Vec::new();
        for _ in 0..tensor_count {
            let name = parser.string("tensor name", KEY_BYTES_MAX)?;
            let axes = parser.u32(&name)?;
            if axes > AXES_MAX {
                return Err(LoadErrorKind::Limit {
                    what: format!("axes of tensor `{name}`"),
                    value: u64::from(axes),
                    limit: u64::from(AXES_MAX),
                });
            }
            let dims = (0..axes)
                .map(|_| parser.u64(&name))
                .collect::<Result<Vec<_>, _>>()?;
            let kind = parser.u32(&name)?;
            let offset = parser.u64(&name)?;
            raw.push((name, dims, kind, offset));
        }
        let alignment = match metadata.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(value) => match value.as_u64() {
                Some(alignment) if alignment.is_power_of_two() && alignment <= ALIGNMENT_MAX => {
                    alignment
                }
                _ => {
                    return Err(LoadErrorKind::Metadata {
                        key: "general.alignment".to_owned(),
                        problem: format!("{value} is not a power of two up to {ALIGNMENT_MAX}"),
                    });
                }
            },
        };
        let data_start = parser.position.next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for (name, dims, kind, offset) in raw {
            let info = locate(name, dims, kind, offset, data_start, file_bytes)?;
            let name = info.name.clone();
            if tensors.insert(name.clone(), info).is_some() {
                return Err(LoadErrorKind::Duplicate { name });
            }
        }
        refuse_overlaps(tensors.values())?;
        let header = Self {
            path: path.to_owned(),
            metadata,
            tensors,
            file_bytes: Bytes::new(file_bytes),
            parts: vec![Part {
                path: path.to_owned(),
                base: 0,
                bytes: Bytes::new(file_bytes),
            }],
        };
        Ok((header, parser))
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its parts: one file, or several.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Length at opening, of all parts together.
    pub const fn file_bytes(&self) -> Bytes {
        self.file_bytes
    }

    /// `general.architecture`, or an empty text.
    pub fn architecture(&self) -> &str {
        self.string("general.architecture").unwrap_or_default()
    }

    /// The value of `key`.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// The text of `key`.
    pub fn string(&self, key: &str) -> Option<&str> {
        match self.value(key)? {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// The integer of `key`, if it is not negative and fits.
    pub fn u32(&self, key: &str) -> Option<u32> {
        self.value(key)?
            .as_u64()
            .and_then(|value| u32::try_from(value).ok())
    }

    /// The number of `key`.
    pub fn f32(&self, key: &str) -> Option<f32> {
        self.value(key)?.as_f32()
    }

    /// The boolean of `key`.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.value(key)? {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// The list of texts of `key`, such as `tokenizer.ggml.tokens`.
    pub fn strings(&self, key: &str) -> Option<&StringTable> {
        match self.value(key)? {
            Value::Array(Array::Strings(table)) => Some(table),
            _ => None,
        }
    }

    /// The list of integers of `key`, such as `tokenizer.ggml.token_type`.
    pub fn ints(&self, key: &str) -> Option<&[i32]> {
        match self.value(key)? {
            Value::Array(Array::Int(list)) => Some(list),
            _ => None,
        }
    }

    /// The list of numbers of `key`, such as `tokenizer.ggml.scores`.
    pub fn floats(&self, key: &str) -> Option<&[f32]> {
        match self.value(key)? {
            Value::Array(Array::Float(list)) => Some(list),
            _ => None,
        }
    }

    /// The list of booleans of `key`.
    pub fn bools(&self, key: &str) -> Option<&[bool]> {
        match self.value(key)? {
            Value::Array(Array::Bool(list)) => Some(list),
            _ => None,
        }
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.values()
    }

    /// Heap memory that the header occupies, up to allocator rounding.
    pub fn heap_bytes(&self) -> Bytes {
        let entries: usize = self
            .metadata
            .iter()
            .map(|(key, value)| key.len() + size_of::<(String, Value)>() + value.heap_len())
            .sum();
        let tensors: usize = self
            .tensors
            .values()
            .map(|info| {
                2 * info.name.len() + size_of::<(String, TensorInfo)>() + info.dims.len() * 8
            })
            .sum();
        Bytes::of_len(entries + tensors)
    }

    /// Drops the large lists (vocabulary and merges) after a tokenizer has been built from them.
    pub fn forget_lists(&mut self) {
        self.metadata.retain(
            |_, value| !matches!(value, Value::Array(array) if array.heap_len() > LIST_BYTES_KEPT),
        );
    }
}

/// Checks one tensor entry and converts it to an extent of the file.
fn locate(
    name: String,
    dims: Vec<u64>,
    kind: u32,
    offset: u64,
    data_start: u64,
    file_bytes: u64,
) -> Result<TensorInfo, LoadErrorKind> {
    let Some(dtype) = dtype_of(kind) else {
        let dtype = type_name(kind).map_or_else(|| format!("number {kind}"), str::to_owned);
        return Err(LoadErrorKind::TensorType {
            tensor: name,
            dtype,
        });
    };
    let elements = dims
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim));
    let row = dims.first().copied().unwrap_or(1);
    let block = dtype.block_size() as u64;
    let bytes = elements
        .filter(|_| row.is_multiple_of(block))
        .map(|elements| elements / block)
        .and_then(|blocks| blocks.checked_mul(dtype.type_size() as u64));
    let Some(bytes) = bytes.filter(|&bytes| bytes > 0) else {
        return Err(LoadErrorKind::TensorShape {
            tensor: name,
            dims,
            dtype: format!("blocks of {}", dtype_name(dtype)),
        });
    };
    let start = data_start.saturating_add(offset);
    let end = start.saturating_add(bytes);
    if end > file_bytes {
        return Err(LoadErrorKind::TensorOutside {
            tensor: name,
            end: Bytes::new(end),
            file: Bytes::new(file_bytes),
        });
    }
    if !start.is_multiple_of(TENSOR_ALIGNMENT_MIN) {
        return Err(LoadErrorKind::TensorAlignment {
            tensor: name,
            offset: start,
        });
    }
    Ok(TensorInfo {
        name,
        dtype,
        dims,
        offset: start,
        bytes: Bytes::new(bytes),
    })
}

/// Refuses overlapping tensors, as llama.cpp does, which demands that they are adjacent.
fn refuse_overlaps<'all>(
    tensors: impl Iterator<Item = &'all TensorInfo>,
) -> Result<(), LoadErrorKind> {
    let mut order: Vec<&TensorInfo> = tensors.collect();
    order.sort_by_key(|tensor| tensor.offset);
    for (before, tensor) in order.iter().zip(order.iter().skip(1)) {
        let end = before.offset.saturating_add(before.bytes.get());
        if tensor.offset < end {
            return Err(LoadErrorKind::TensorOverlap {
                tensor: tensor.name.clone(),
                offset: tensor.offset,
                other: before.name.clone(),
                end,
            });
        }
    }
    Ok(())
}

/// Bytes of a header that are read at once.
const BUFFER: usize = 1 << 18;
/// Start of a Git LFS pointer: `version https://git-lfs.github.com/spec/v1`.
const LFS_MAGIC: [u8; 4] = *b"vers";
/// Length limit by its specification.
const LFS_BYTES_MAX: u64 = 1024;

/// Alignment of tensors if the file sets none (`GGUF_DEFAULT_ALIGNMENT` in `gguf.h`).
const DEFAULT_ALIGNMENT: u64 = 32;
/// The largest plausible alignment: a huge page.
const ALIGNMENT_MAX: u64 = 1 << 21;
/// Alignment that kernels need to read `f32` elements in place.
const TENSOR_ALIGNMENT_MIN: u64 = 4;
/// `GGML_MAX_DIMS` in `ggml.h`.
const AXES_MAX: u32 = 4;
/// Qwen3.5-27B has about 900 tensors; current mixtures of experts stay below 4000.
const TENSORS_MAX: u64 = 1 << 16;
/// Current files have 30 to 60 entries.
const ENTRIES_MAX: u64 = 1 << 16;
/// `GGML_MAX_NAME` is 64 in `ggml.h`; keys are longer in some files.
const KEY_BYTES_MAX: u64 = 1 << 16;
/// Lists up to this length survive [`Header::forget_lists`].
const LIST_BYTES_KEPT: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::LoadError;
    use crate::{
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
        weights::Weights as _,
    };

    #[test]
    fn it_finds_what_candles_reader_finds() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        Synthetic::tiny(Architecture::Qwen35, TypeMix::Q4KM, 1)
            .write(&path)
            .unwrap();
        let header = Header::read(&path).unwrap();
        let theirs =
            candle_core::quantized::gguf_file::Content::read(&mut File::open(&path).unwrap())
                .unwrap();
        assert_eq!(header.tensors().count(), theirs.tensor_infos.len());
        for info in header.tensors() {
            let other = &theirs.tensor_infos[&info.name];
            assert_eq!(
                info.offset,
                other.offset + theirs.tensor_data_offset,
                "{}",
                info.name
            );
            let theirs = format!("{:?}", other.ggml_dtype);
            assert_eq!(format!("{:?}", info.dtype), theirs);
            let dims: Vec<u64> = other
                .shape
                .dims()
                .iter()
                .rev()
                .map(|&dim| dim as u64)
                .collect();
            assert_eq!(info.dims, dims);
        }
        assert_eq!(header.metadata.len(), theirs.metadata.len());
        assert_eq!(header.architecture(), "qwen35");
        assert_eq!(header.u32("qwen35.block_count"), Some(4));
        assert_eq!(header.bool("tokenizer.ggml.add_bos_token"), Some(false));
        let tokens = header.strings("tokenizer.ggml.tokens").unwrap();
        let others = theirs.metadata["tokenizer.ggml.tokens"].to_vec().unwrap();
        assert_eq!(tokens.len(), others.len());
        for (token, other) in tokens.iter().zip(others) {
            assert_eq!(token, other.to_string().unwrap());
        }
    }

    #[test]
    fn the_length_of_a_header_is_found_in_the_beginning_of_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        Synthetic::tiny(Architecture::Qwen3, TypeMix::Q4KM, 1)
            .write(&path)
            .unwrap();
        let file = fs::read(&path).unwrap();
        let first = Header::read(&path).unwrap();
        let first = first.tensors().map(|tensor| tensor.offset).min().unwrap();
        let whole = Bytes::of_len(file.len());
        let length = Header::length(&file[..], whole).unwrap();
        assert_eq!(length.get().next_multiple_of(DEFAULT_ALIGNMENT), first);
        let header = &file[..length.as_len()];
        assert_eq!(Header::length(header, whole).unwrap(), length);
        let short = Header::length(&header[..header.len() - 1], whole);
        assert!(matches!(short, Err(LoadErrorKind::Truncated { .. })));
    }

    #[test]
    fn lists_are_compact_and_can_be_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let model = Synthetic {
            vocabulary: 30_000,
            width: 32,
            ..Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 1)
        };
        // Only the header matters here, which is complete for any tensor contents.
        model.write(&path).unwrap();
        let mut header = Header::read(&path).unwrap();
        let before = header.heap_bytes();
        assert!(before < Bytes::from_kib(800), "{before} for 30 000 tokens");
        header.forget_lists();
        assert!(
            header.heap_bytes() < Bytes::from_kib(16),
            "{}",
            header.heap_bytes()
        );
        assert!(header.string("tokenizer.ggml.pre").is_some());
    }

    /// A file without tensors and with one list: its kind, and its encoded items.
    fn with_list(folder: &Path, kind: u32, items: &[Vec<u8>]) -> Result<Header, LoadError> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
        bytes.extend(4u64.to_le_bytes());
        bytes.extend(b"list");
        for number in [9, kind] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend((items.len() as u64).to_le_bytes());
        bytes.extend(items.concat());
        let path = folder.join("list.gguf");
        fs::write(&path, bytes).unwrap();
        Header::read(&path)
    }

    fn text(bytes: &[u8]) -> Vec<u8> {
        [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
    }

    #[test]
    fn texts_are_the_same_wherever_the_buffer_ends_and_whatever_they_are() {
        let folder = tempfile::tempdir().unwrap();
        // Texts of all lengths, so that the buffer ends at every position within a text and its length; and one longer
        // than the buffer.
        let mut wanted: Vec<String> = (0..60_000usize)
            .map(|number| "ä".repeat(number % 23))
            .collect();
        wanted.push("x".repeat(600_000));
        let mut items: Vec<Vec<u8>> = wanted.iter().map(|item| text(item.as_bytes())).collect();
        items.push(text(&[b'a', 0xff, b'b']));
        wanted.push("a\u{fffd}b".to_owned());
        let header = with_list(folder.path(), 8, &items).unwrap();
        let table = header.strings("list").unwrap();
        assert!(table.iter().eq(&wanted));
        assert_eq!(table.get(wanted.len()), None);
        // The last text claims a length beyond the file.
        items.push(u64::MAX.to_le_bytes().to_vec());
        assert!(with_list(folder.path(), 8, &items).is_err());
        items.pop();
        items.push([text(b"abc"), b"d".to_vec()].concat());
        items.push(Vec::new());
        assert!(with_list(folder.path(), 8, &items).is_err());
    }

    #[test]
    fn whole_numbers_of_32_bits_are_as_wide_as_they_need() {
        let folder = tempfile::tempdir().unwrap();
        let many: Vec<i32> = (0..70_000)
            .map(|number| number * 30_000 - 1_000_000_000)
            .collect();
        let items: Vec<Vec<u8>> = many
            .iter()
            .map(|number| number.to_le_bytes().to_vec())
            .collect();
        let header = with_list(folder.path(), 5, &items).unwrap();
        assert_eq!(header.ints("list"), Some(&many[..]));
        let header = with_list(folder.path(), 4, &items[40_000..]).unwrap();
        assert_eq!(header.ints("list"), Some(&many[40_000..]));
        let header = with_list(folder.path(), 4, &[vec![1, 0, 0, 0], vec![255; 4]]).unwrap();
        assert_eq!(
            header.value("list"),
            Some(&Value::Array(Array::Long(vec![1, u32::MAX.into()])))
        );
        let short = [items.clone(), vec![vec![1, 2]]].concat();
        assert!(with_list(folder.path(), 5, &short).is_err());
    }
}
