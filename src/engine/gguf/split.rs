//! Models in several files as written by `llama-gguf-split`: `NAME-00001-of-00003.gguf` etc.
//!
//! The parts form one address space with gaps between them, so that readers and layouts use a single offset.

use std::path::{Path, PathBuf};

use super::header::{Header, OpenFile, Part};
use crate::{
    disk::DiskWatch,
    error::{LoadError, LoadErrorKind},
};

impl Header {
    /// Reads the header of the file at `path` and of its further parts; no tensor is read.
    ///
    /// # Errors
    /// The file cannot be read, is not GGUF v2 or v3, contradicts itself, or has a tensor of an unknown type or outside
    /// the file.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        let (header, _) = Self::read_watched(path, &DiskWatch::default())?;
        Ok(header)
    }

    /// As [`Self::read`], recording disk accesses in `watch`; with the files, in the order of the [parts](Self::parts),
    /// and their metadata at opening. Weights read through these files match the header, even after a file is replaced
    /// under its name.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(crate) fn read_watched(
        path: &Path,
        watch: &DiskWatch,
    ) -> Result<(Self, Vec<OpenFile>), LoadError> {
        Self::read_one(path, watch)
            .and_then(|first| join(first, watch))
            .map(|(mut header, files)| {
                header.translate();
                (header, files)
            })
            .map_err(|kind| LoadError::new(path, kind))
    }
}

/// Adds the tensors of the other parts to those of the first.
fn join(
    (mut first, file): (Header, OpenFile),
    watch: &DiskWatch,
) -> Result<(Header, Vec<OpenFile>), LoadErrorKind> {
    let mut files = vec![file];
    let count = first.u32(KEY_COUNT).unwrap_or(0);
    if count <= 1 {
        return Ok((first, files));
    }
    if count > PARTS_MAX {
        return Err(LoadErrorKind::Limit {
            what: KEY_COUNT.to_owned(),
            value: u64::from(count),
            limit: u64::from(PARTS_MAX),
        });
    }
    let number = first.u32(KEY_NUMBER).unwrap_or(0);
    if number != 0 {
        return Err(LoadErrorKind::NotFirstPart {
            part: number.saturating_add(1),
            count,
        });
    }
    for part in 2..=count {
        let path = part_path(&first.path, part, count)?;
        let in_part = |source| LoadErrorKind::Part {
            path: path.clone(),
            source: Box::new(source),
        };
        let (header, file) = Header::read_one(&path, watch).map_err(in_part)?;
        for (key, expected) in [(KEY_NUMBER, part - 1), (KEY_COUNT, count)] {
            let found = header.u32(key);
            if found != Some(expected) {
                return Err(in_part(LoadErrorKind::Metadata {
                    key: key.to_owned(),
                    problem: match found {
                        Some(found) => format!(
                            "`{found}` instead of {expected}: it belongs to another model or place"
                        ),
                        None => format!("it is missing: this is not part {part} of {count}"),
                    },
                }));
            }
        }
        let end = first
            .parts
            .last()
            .map_or(0, |part| part.base + part.bytes.get());
        let base = end.next_multiple_of(GAP) + GAP;
        for mut info in header.tensors.into_values() {
            info.offset += base;
            let name = info.name.clone();
            if first.tensors.insert(name.clone(), info).is_some() {
                return Err(LoadErrorKind::Duplicate { name });
            }
        }
        files.push(file);
        first.file_bytes += header.file_bytes;
        first.parts.push(Part {
            path,
            base,
            bytes: header.file_bytes,
        });
    }
    let found = u32::try_from(first.tensors.len()).unwrap_or(u32::MAX);
    match first.u32(KEY_TENSORS) {
        Some(expected) if expected != found => Err(LoadErrorKind::Metadata {
            key: KEY_TENSORS.to_owned(),
            problem: format!("it declares {expected}, the {count} parts have {found}"),
        }),
        _ => Ok((first, files)),
    }
}

/// Path of part `part`, derived from the first.
fn part_path(first: &Path, part: u32, count: u32) -> Result<PathBuf, LoadErrorKind> {
    let suffix = |part: u32| format!("-{part:05}-of-{count:05}.gguf");
    let name = first
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    match name.strip_suffix(&suffix(1)) {
        Some(stem) => Ok(first.with_file_name(format!("{stem}{}", suffix(part)))),
        None => Err(LoadErrorKind::PartName {
            suffix: suffix(1),
            count,
        }),
    }
}

const KEY_COUNT: &str = "split.count";
const KEY_NUMBER: &str = "split.no";
const KEY_TENSORS: &str = "split.tensors.count";
/// More than any current model; each part has a header and a descriptor of its own.
const PARTS_MAX: u32 = 512;
/// Gap between parts: wider than the gaps that layouts read across.
const GAP: u64 = 1 << 20;
