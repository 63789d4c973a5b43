//! Errors of loading a model, computing with it and changing its memory.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::disk::{Retained, Stalled};
use cotenant_policy::{engine_failure::Cure, residency::EnginePlan};
use cotenant_units::{Bytes, Tokens};

/// A device that has stopped computing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device has failed: {reason}")]
pub struct DeviceError {
    reason: String,
}

impl DeviceError {
    /// With a reason that reads well after a colon.
    pub fn new(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
        }
    }
}

/// A GPU that cannot be used: a reason that reads well after a colon, and its remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Unavailable {
    reason: String,
    remedy: &'static str,
}

impl Unavailable {
    pub(super) fn new(reason: impl Into<String>, remedy: &'static str) -> Self {
        Self {
            reason: reason.into(),
            remedy,
        }
    }

    /// The remedy.
    pub const fn remedy(&self) -> &'static str {
        self.remedy
    }
}

/// A model that cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[error("cannot load model `{path}`")]
pub struct LoadError {
    path: PathBuf,
    #[source]
    kind: LoadErrorKind,
    left: Box<Retained>,
}

impl LoadError {
    /// An error of the file at `path`.
    pub fn new(path: &Path, kind: LoadErrorKind) -> Self {
        Self {
            path: path.to_owned(),
            kind,
            left: Box::default(),
        }
    }

    /// Adds the memory that hanging reads may keep.
    #[must_use]
    pub fn leaving(mut self, left: Retained) -> Self {
        self.left.add(left);
        self
    }

    /// Memory kept by hanging reads, if they caused the error or accompany it; they may have returned by now. Loading
    /// can be retried once they have.
    #[must_use]
    pub fn hung(&self) -> Option<&Retained> {
        (matches!(self.kind, LoadErrorKind::Stalled(_)) || self.left.hangs()).then_some(&*self.left)
    }

    /// The fault.
    pub const fn kind(&self) -> &LoadErrorKind {
        &self.kind
    }

    /// Condition for loading it again.
    pub fn cure(&self) -> Cure {
        self.kind.cure()
    }

    /// The remedy, if there is one.
    pub fn hint(&self) -> Option<&'static str> {
        self.kind.hint()
    }
}

/// Reason why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadErrorKind {
    /// Its memory cannot be allocated.
    #[error("cannot map {bytes} for {what}")]
    Allocate {
        /// Purpose of the memory.
        what: String,
        /// Requested size.
        bytes: Bytes,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A text meant to choose a vocabulary.
    #[error("cannot choose a vocabulary by `{path}`: {problem}")]
    Vocabulary {
        /// The file.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// A mixture with one tensor for each expert.
    #[error("its experts have separate tensors, a format used until April 2024")]
    OldExperts,
    /// An architecture that the engine does not support.
    #[error("architecture `{architecture}` is not supported; supported are {known}")]
    Architecture {
        /// `general.architecture` of the file.
        architecture: String,
        /// The supported architectures.
        known: String,
    },
    /// A file that was replaced, written or truncated while it was read.
    #[error("`{path}` has changed since its header was read: it had {} bytes and has {}", was.get(), is.get())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Its previous length.
        was: Bytes,
        /// Its current length.
        is: Bytes,
    },
    /// Weights that differ from the saved ones.
    #[error("its weights are damaged: {problem}")]
    Damaged {
        /// The evidence.
        problem: String,
    },
    /// The device has stopped computing.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The requested GPU cannot compute it.
    #[error("no GPU supports it")]
    Gpu(#[from] Unavailable),
    /// The automatically chosen GPU does not start; the CPU is chosen next.
    #[error("the selected GPU does not start")]
    GpuLost(#[source] Unavailable),
    /// A model other than the planned one.
    #[error("it contains a different model than when it was inspected")]
    Replaced,
    /// An empty file.
    #[error("it is empty: it has 0 bytes")]
    Empty,
    /// A Git LFS pointer in place of the file.
    #[error("it is a pointer of Git LFS, not the model itself")]
    GitLfsPointer,
    /// A name that appears twice.
    #[error("`{name}` appears twice in the header")]
    Duplicate {
        /// Key or tensor.
        name: String,
    },
    /// A number in the header that is implausible or does not fit the file.
    #[error("{what} is {value}, at most {limit} is possible")]
    Limit {
        /// Description of the number.
        what: String,
        /// Its value.
        value: u64,
        /// Its limit.
        limit: u64,
    },
    /// A missing or invalid metadata value.
    #[error("metadata `{key}`: {problem}")]
    Metadata {
        /// Its key.
        key: String,
        /// The fault.
        problem: String,
    },
    /// A folder, socket or device.
    #[error("it is not a regular file")]
    NotAFile,
    /// A later part of a model in several files.
    #[error("it is part {part} of {count} of a model")]
    NotFirstPart {
        /// Its number, from 1.
        part: u32,
        /// Number of parts.
        count: u32,
    },
    /// Another kind of file.
    #[error("it is not GGUF: it starts with `{}` instead of `GGUF`", magic.escape_ascii())]
    NotGguf {
        /// Its first four bytes.
        magic: [u8; 4],
    },
    /// The system refuses to open or read it.
    #[error("cannot read it")]
    Open(#[source] io::Error),
    /// A fault in another part of a model in several files.
    #[error("its part `{path}` cannot be used")]
    Part {
        /// The part.
        path: PathBuf,
        /// Its fault.
        source: Box<Self>,
    },
    /// The first part of several, with a name from which the names of the others do not follow.
    #[error("it is the first of {count} parts, but its name does not end in `{suffix}`")]
    PartName {
        /// The expected suffix.
        suffix: String,
        /// Number of parts.
        count: u32,
    },
    /// A plan that does not fit the model.
    #[error("the plan does not fit it: {0}")]
    Plan(String),
    /// The disk did not respond in time.
    #[error(transparent)]
    Stalled(#[from] Stalled),
    /// A tensor at an offset that kernels cannot read.
    #[error("tensor `{tensor}` starts at byte {offset}, which is not a multiple of 4")]
    TensorAlignment {
        /// Its name.
        tensor: String,
        /// Its offset.
        offset: u64,
    },
    /// A missing tensor of the architecture.
    #[error("tensor `{tensor}` is missing")]
    TensorMissing {
        /// Its name.
        tensor: String,
    },
    /// A tensor that begins inside another one.
    #[error(
        "tensor `{tensor}` starts at byte {offset}, inside tensor `{other}`, which ends at byte {end}"
    )]
    TensorOverlap {
        /// Its name.
        tensor: String,
        /// Its offset.
        offset: u64,
        /// The name of the other one.
        other: String,
        /// End of the other one.
        end: u64,
    },
    /// A tensor that ends beyond the file.
    #[error("tensor `{tensor}` ends at byte {}, the file has {}", end.get(), file.get())]
    TensorOutside {
        /// Its name.
        tensor: String,
        /// Its end.
        end: Bytes,
        /// Length of the file.
        file: Bytes,
    },
    /// A tensor whose dimensions do not match its type or the other tensors.
    #[error("tensor `{tensor}` has dimensions {dims:?}, which do not fit {dtype}")]
    TensorShape {
        /// Its name.
        tensor: String,
        /// Its dimensions, fastest first.
        dims: Vec<u64>,
        /// Its type, or the expected dimensions.
        dtype: String,
    },
    /// A tensor of a type that the engine cannot compute with.
    #[error("tensor `{tensor}` has type {dtype}; supported are {KNOWN_TYPES}")]
    TensorType {
        /// Its name.
        tensor: String,
        /// Name of its type.
        dtype: String,
    },
    /// An unknown tensor; ignoring it would change every answer.
    #[error("tensor `{tensor}` is not known in a model of architecture `{architecture}`")]
    TensorUnknown {
        /// Its name.
        tensor: String,
        /// Architecture of the file.
        architecture: String,
    },
    /// The tokenizer or the chat template cannot be used.
    #[error("{message}")]
    Text {
        /// The error and its causes.
        message: String,
        /// The remedy.
        hint: &'static str,
    },
    /// Compute threads cannot be started.
    #[error("cannot start the compute threads")]
    Threads(#[source] io::Error),
    /// The file ends inside the header.
    #[error("it ends inside `{what}` at byte {at} of {}", file.get())]
    Truncated {
        /// The item being read.
        what: String,
        /// Its offset.
        at: u64,
        /// Length of the file.
        file: Bytes,
    },
    /// A file in the other byte order.
    #[error(
        "it is GGUF version {version} for big-endian processors; little-endian files are supported"
    )]
    BigEndian {
        /// Its version.
        version: u32,
    },
    /// A version of GGUF that the engine does not read.
    #[error("it is GGUF version {version}; versions 2 and 3 are supported")]
    Version {
        /// Its version.
        version: u32,
    },
    /// Reading weights failed.
    #[error(transparent)]
    Weights(Box<ReadError>),
}

impl From<ReadError> for LoadErrorKind {
    fn from(error: ReadError) -> Self {
        Self::Weights(Box::new(error))
    }
}

impl LoadErrorKind {
    /// Condition for loading the model again: time, if a read failed or the system lacked a resource; otherwise a
    /// changed file.
    pub fn cure(&self) -> Cure {
        use io::ErrorKind as Kind;
        match self {
            Self::Open(error) => match error.kind() {
                Kind::NotFound
                | Kind::NotADirectory
                | Kind::IsADirectory
                | Kind::PermissionDenied => {
                    let remedy = "put the file there, readable for this user, or set `llm.path` to where it is";
                    Cure::Change {
                        remedy: remedy.to_owned(),
                    }
                }
                _ => Cure::Reread,
            },
            Self::Part { source, .. } if source.cure() == Cure::Reread => Cure::Reread,
            // The plan was made for a GPU; the device chosen instead needs another one.
            Self::GpuLost(_) => Cure::Reread,
            Self::Changed { .. }
            | Self::Replaced
            | Self::Stalled(_)
            | Self::Threads(_)
            | Self::Weights(_) => Cure::Reread,
            // Memory may be available next time, and a device may compute again.
            Self::Allocate { .. } | Self::Device(_) => Cure::Reload,
            _ => Cure::Change {
                remedy: self.hint().unwrap_or_default().to_owned(),
            },
        }
    }

    /// The remedy, if there is one.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Architecture { architecture, .. } => Some(nearest_family(architecture)),
            Self::Damaged { .. } => {
                Some("fetch the file again, and compare its SHA-256 with the publisher's")
            }
            Self::Empty => Some("the download did not begin, or failed: fetch the file again"),
            Self::GitLfsPointer => Some(
                "fetch the model by `git lfs pull` in its repository, or download the file itself",
            ),
            Self::Gpu(error) | Self::GpuLost(error) => Some(error.remedy()),
            Self::Metadata { key, .. } if key.ends_with(".expert_count") => {
                Some(nearest_family(key))
            }
            Self::OldExperts => Some(
                "convert the model again, or fetch a newer file of it: its experts share tensors",
            ),
            Self::BigEndian { .. } => {
                Some("convert a copy of it with `gguf-convert-endian FILE little`")
            }
            Self::NotFirstPart { .. } => {
                Some("name the file of the first part, `…-00001-of-….gguf`")
            }
            Self::Part { .. } => {
                Some("keep all parts of the model in one folder, under their original names")
            }
            Self::PartName { .. } => Some("restore the original names of the parts"),
            Self::NotGguf { .. } => {
                Some("point `llm.path` to a .gguf file, not to safetensors or a download page")
            }
            Self::TensorOutside { .. } | Self::Truncated { .. } => {
                Some("the file is probably an unfinished download: fetch it again")
            }
            Self::TensorOverlap { .. } => Some("the file is damaged: fetch it again"),
            Self::TensorType { dtype, .. } => Some(nearest_type(dtype)),
            Self::Text { hint, .. } => Some(*hint),
            Self::Version { .. } => Some("convert the file with a current llama.cpp"),
            Self::Vocabulary { .. } => {
                Some("name a text in UTF-8, or the number of tokens to keep")
            }
            Self::Changed { .. } => Some("load it again once the file is complete"),
            Self::Replaced => Some("it is inspected again, and loaded with a new plan"),
            Self::Stalled(_) => Some(
                "check that the disk, or the server of its mount, responds (see `dmesg`), then load it again",
            ),
            Self::Allocate { .. } => Some("plan fewer resident layers or a smaller KV capacity"),
            _ => None,
        }
    }
}

/// Hint of encoders.
const OF_VECTORS: &str = "it makes vectors of texts: run it as a worker by `cotenant worker embed`";

/// The supported file closest to one of an unsupported family.
fn nearest_family(architecture: &str) -> &'static str {
    let families = [
        (
            "clip",
            "it is the vision part of a model: name the file of the model itself, without `mmproj`",
        ),
        (
            "deepseek",
            "use DeepSeek-R1-Distill-Qwen or DeepSeek-R1-Distill-Llama, for example 7B Q4_K_M",
        ),
        ("bert", OF_VECTORS),
        ("nomic-bert", OF_VECTORS),
        ("gemma", "use Gemma 3, for example gemma-3-4b-it Q4_K_M"),
        (
            "gptoss",
            "use a file of llama.cpp's converter, for example gpt-oss-20b-mxfp4.gguf of ggml-org",
        ),
        (
            "granite",
            "use a dense Granite 3.3, or Granite 4, for example granite-4.0-h-micro Q4_K_M",
        ),
        (
            "mamba",
            "use Granite 4 hybrid, for example granite-4.0-h-micro Q4_K_M, or Qwen3.5",
        ),
        ("mistral", "use Ministral-3-3B-Instruct Q4_K_M"),
        (
            "nemotron",
            "use Nemotron 3 Nano, for example NVIDIA-Nemotron-3-Nano-30B-A3B Q4_K_M",
        ),
        ("phi", "use Phi-4-mini-instruct Q4_K_M"),
        (
            "qwen",
            "use Qwen3-30B-A3B, or a dense Qwen3.5, for example 4B Q4_K_M",
        ),
    ];
    let found = families
        .iter()
        .find(|(prefix, _)| architecture.starts_with(prefix));
    found.map_or(
        "use a dense model of about the same size: Qwen3.5, Llama 3.2 or Gemma 3 in Q4_K_M",
        |(_, hint)| hint,
    )
}

/// The same for an unsupported type.
fn nearest_type(dtype: &str) -> &'static str {
    match dtype.get(..3) {
        Some("IQ1" | "IQ2" | "TQ1" | "TQ2") => "use the Q2_K file of the same model",
        Some("IQ3") => "use the Q3_K_M file of the same model",
        Some("NVF" | "Q4_") => "use the Q4_K_M file of the same model",
        _ => "use the Q4_K_M or Q8_0 file of the same model",
    }
}

/// A read of weights that failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot read {} bytes of `{what}` at byte {offset} of `{path}`: {problem}", bytes.get())]
pub struct ReadError {
    /// The file.
    pub path: PathBuf,
    /// Tensor or layer.
    pub what: String,
    /// Offset in the file.
    pub offset: u64,
    /// Length.
    pub bytes: Bytes,
    /// Error of the system, as text so that it can be returned to several requests.
    pub problem: String,
    /// Whether the file holds a model other than the opened one and is no longer being written: only a reload helps.
    pub replaced: bool,
}

/// A forward pass that did not complete.
///
/// Except for errors found before any computation ([`Self::KvFull`], [`Self::NoTokens`], [`Self::Token`],
/// [`Self::ContextFull`]) the sequence is lost, and the model needs [`reset`](super::Model::reset).
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// More tokens or results in one pass than the buffers hold.
    #[error("cannot compute {tokens} tokens in one pass: there are buffers for {limit}")]
    BeyondChunk {
        /// Tokens of the pass.
        tokens: usize,
        /// The limit of tokens or results.
        limit: usize,
    },
    /// The checkpoint requested a stop.
    #[error("cancelled at layer {layer} of position {position}")]
    Cancelled {
        /// Position of the first token of the chunk.
        position: u32,
        /// The layer that would have been next.
        layer: u32,
    },
    /// More tokens than the model's context.
    #[error("cannot hold {needed} tokens: the model was made for {limit}")]
    ContextFull {
        /// Tokens needed.
        needed: u32,
        /// Longest context of the model.
        limit: u32,
    },
    /// The device has stopped computing: the engine has to end.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// More tokens than the KV capacity.
    #[error("cannot hold {needed} tokens: the KV capacity is {capacity}")]
    KvFull {
        /// Tokens that the cache may hold.
        capacity: Tokens,
        /// Tokens needed.
        needed: u32,
    },
    /// No tokens to compute.
    #[error("cannot compute 0 tokens")]
    NoTokens,
    /// A result contains NaN or infinity.
    #[error("results at position {position} are not finite: the weights are damaged")]
    NotFinite {
        /// Position of the token.
        position: u32,
    },
    /// Weights could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// An earlier error left the sequence partly computed.
    #[error("the sequence was lost by an earlier error: start a new one")]
    SequenceLost,
    /// The disk did not respond in time.
    #[error(transparent)]
    Stalled(#[from] Stalled),
    /// A token outside the vocabulary.
    #[error("token {token} is not in the vocabulary of {vocabulary}")]
    Token {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: u32,
    },
}

impl ForwardError {
    /// Condition for loading the model again, for errors that end the engine: the device has failed, or the weights
    /// cannot be read or belong to another model by now.
    pub const fn cure(&self) -> Option<Cure> {
        match self {
            Self::Device(_) => Some(Cure::Reload),
            Self::Read(_) => Some(Cure::Reread),
            _ => None,
        }
    }
}

impl ApplyError {
    /// As [`ForwardError::cure`].
    pub const fn cure(&self) -> Option<Cure> {
        match self {
            Self::Device(_) => Some(Cure::Reload),
            Self::Read(_) => Some(Cure::Reread),
            _ => None,
        }
    }
}

/// The remedy for results that are not finite.
pub(super) const NOT_FINITE_REMEDY: &str =
    "the weights are damaged: fetch the file again, or use another one";

/// A plan that was not applied as a whole; [`Model::plan`](super::Model::plan) returns the plan in force.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The kernel refused memory.
    #[error("cannot map {bytes} for {what}")]
    Allocate {
        /// Purpose of the memory.
        what: String,
        /// Requested size.
        bytes: Bytes,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A prefill chunk of no tokens.
    #[error("cannot work with a prefill chunk of {chunk} tokens: it must be 1 to {limit}")]
    Chunk {
        /// Value in the plan.
        chunk: u32,
        /// The largest possible chunk.
        limit: u32,
    },
    /// A plan that grows into memory that the current chunk still needs.
    #[error(
        "cannot grow into the workspace freed by chunks of {wanted} while a prefill chunk of {chunk} tokens is under way: retry later"
    )]
    ChunkUnderWay {
        /// Tokens of the current chunk.
        chunk: u32,
        /// Value in the plan.
        wanted: u32,
    },
    /// The device has stopped computing: the engine has to end.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A plan that names parts that the model lacks.
    #[error("the plan names part {layer} of the weights, the model has {layers}")]
    Plan {
        /// Part of the plan.
        layer: u32,
        /// Parts of the model.
        layers: u32,
    },
    /// Weights could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The disk did not respond in time.
    #[error(transparent)]
    Stalled(#[from] Stalled),
}

/// Result of a change of plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApplyReport {
    /// The plan in force now. Its KV capacity exceeds the requested one if the sequence needs more; it has fewer parts
    /// if growth yielded to another command.
    pub plan: EnginePlan,
    /// Mapped bytes that the plan released.
    pub asked: Bytes,
    /// Released pages that were resident before and are no longer.
    pub freed: Bytes,
    /// Released bytes that had never been touched and so were not resident.
    pub untouched: Bytes,
    /// Mapped bytes that the plan added.
    pub grown: Bytes,
    /// Part of [`Self::held`] that is untouched and not resident.
    pub held_untouched: Bytes,
    /// Tokens of the running sequence dropped for it, if its request allows that.
    pub dropped: Tokens,
    /// Memory of the model now, by its own mappings: the total of [`Model::breakdown`](super::Model::breakdown).
    pub held: Bytes,
    /// Resident set of the process before (`/proc/self/statm`), other threads included.
    pub rss_before: Bytes,
    /// Resident set of the process afterwards.
    pub rss_after: Bytes,
    /// Duration of the change.
    pub took: Duration,
}

const KNOWN_TYPES: &str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, \
     Q6_K, IQ4_NL, IQ4_XS and MXFP4";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_tried_again_and_what_does_not_names_its_remedy() {
        for (errno, may_pass) in [
            (libc::EIO, true),
            (libc::EMFILE, true),
            (libc::ENFILE, true),
            (libc::ENOMEM, true),
            (libc::ESTALE, true),
            (libc::ELOOP, true),
            (libc::ENOENT, false),
            (libc::EACCES, false),
            (libc::ENOTDIR, false),
        ] {
            let open = || LoadErrorKind::Open(io::Error::from_raw_os_error(errno));
            let part = LoadErrorKind::Part {
                path: "part".into(),
                source: Box::new(open()),
            };
            for kind in [open(), part] {
                match kind.cure() {
                    Cure::Reread => assert!(may_pass, "{kind:?}"),
                    Cure::Change { remedy } => assert!(!may_pass && !remedy.is_empty(), "{kind:?}"),
                    Cure::Reload => panic!("{kind:?}"),
                }
            }
        }
        let unknown = LoadErrorKind::Architecture {
            architecture: "mamba".to_owned(),
            known: String::new(),
        };
        assert!(matches!(unknown.cure(), Cure::Change { remedy } if remedy.contains("Qwen3.5")));
        let read = ReadError {
            path: "model".into(),
            what: "blk.0".to_owned(),
            offset: 0,
            bytes: Bytes::new(1),
            problem: "Input/output error".to_owned(),
            replaced: false,
        };
        assert_eq!(ForwardError::from(read.clone()).cure(), Some(Cure::Reread));
        assert_eq!(LoadErrorKind::from(read).cure(), Cure::Reread);
    }
}
