//! Damage of weights that their header does not show: a tail of zeros, values that are not finite.

use std::time::{Duration, Instant};

use super::loaded::Model;
use crate::{
    backend::cpu::dequantize,
    disk::DiskWatch,
    error::{ForwardError, LoadErrorKind, ReadError},
    gguf::{GgmlDType, Header, TensorInfo},
    preemption::Flow,
    reader::{Extent, WeightFile},
};
use cotenant_units::Tokens;

/// Refuses a file whose zeros at the end begin inside of a matrix, as a download leaves it that reserved the space and did not finish.
///
/// A matrix of zeros alone is one that its maker wrote.
///
/// # Errors
/// When it does, or cannot be read.
pub(super) fn refuse_zeros(
    header: &Header,
    file: &WeightFile,
    watch: &DiskWatch,
) -> Result<(), LoadErrorKind> {
    // Rows of tokens that are never said may be zero.
    let is_of_tokens = |name: &str| name.starts_with("token_embd") || name.starts_with("output");
    let is_matrix = |tensor: &&TensorInfo| {
        tensor.dims.iter().filter(|dim| **dim > 1).count() > 1 && !is_of_tokens(&tensor.name)
    };
    let mut matrices: Vec<&TensorInfo> = header.tensors().filter(is_matrix).collect();
    matrices.sort_by_key(|tensor| std::cmp::Reverse(tensor.offset));
    for matrix in matrices {
        if !is_zero(matrix, 0, file, watch)? {
            return Ok(());
        }
        if is_zero(matrix, SAMPLES - 1, file, watch)? && is_zero(matrix, SAMPLES / 2, file, watch)?
        {
            continue;
        }
        return Err(LoadErrorKind::Damaged {
            problem: format!("tensor `{}` ends in zeros", matrix.name),
        });
    }
    Ok(())
}

/// Whether a tensor holds zeros at one of [`SAMPLES`] places, of which 0 is its end and the last its beginning.
fn is_zero(
    tensor: &TensorInfo,
    place: u64,
    file: &WeightFile,
    watch: &DiskWatch,
) -> Result<bool, LoadErrorKind> {
    let mut sample = vec![0u8; usize::try_from(tensor.bytes.get().min(SAMPLE_BYTES)).unwrap_or(0)];
    let before_last = tensor.bytes.get().saturating_sub(SAMPLE_BYTES);
    let back = before_last / (SAMPLES - 1) * place;
    let offset = tensor.offset.saturating_add(if place == SAMPLES - 1 {
        0
    } else {
        before_last.saturating_sub(back)
    });
    file.read_expected(&extent(tensor, offset, sample.len()), &mut sample, watch)?;
    Ok(sample.iter().all(|byte| *byte == 0))
}

/// Computes one token of an empty sequence, and refuses weights with which that gives no result. The sequence is empty
/// afterwards.
///
/// # Errors
/// When the result is not finite, or the same for all tokens, and when there is none.
pub(super) fn prove(model: &mut Model) -> Result<(), LoadErrorKind> {
    let token = model.vocabulary().saturating_sub(1).min(1);
    if model.plan.kv_capacity == Tokens::ZERO {
        return Ok(());
    }
    let result = model
        .forward(&[token], &mut || Flow::Continue)
        .map(|logits| are_alike(&logits));
    model.reset();
    let problem = match result {
        Ok(false) => return Ok(()),
        Ok(true) => "every token is as likely as any other".to_owned(),
        Err(ForwardError::NotFinite { .. }) => match not_finite(&model.header) {
            Some(tensor) => format!("tensor `{tensor}` has values that are not finite"),
            None => "the first result is not finite".to_owned(),
        },
        Err(ForwardError::Read(error)) => return Err(error.into()),
        Err(ForwardError::Stalled(error)) => return Err(error.into()),
        Err(ForwardError::Device(error)) => return Err(error.into()),
        Err(error) => return Err(LoadErrorKind::Plan(error.to_string())),
    };
    Err(LoadErrorKind::Damaged { problem })
}

/// Whether all scores of tokens that may be said are the same.
fn are_alike(logits: &[f32]) -> bool {
    let mut said = logits.iter().filter(|logit| logit.is_finite());
    said.next()
        .is_some_and(|first| said.next().is_some() && said.all(|logit| logit == first))
}

/// The first tensor of the file with a value that is not finite, as far as [`SEARCH_TIME`] goes.
fn not_finite(header: &Header) -> Option<String> {
    let file = WeightFile::open(header.parts()).ok()?;
    let until = Instant::now() + SEARCH_TIME;
    let mut tensors: Vec<&TensorInfo> = header.tensors().collect();
    tensors.sort_by_key(|tensor| tensor.offset);
    let found = tensors
        .into_iter()
        .take_while(|_| Instant::now() < until)
        .find(|tensor| {
            // What cannot be read is another fault.
            is_finite(tensor, &file, until).is_ok_and(|finite| !finite)
        });
    file.forget_all();
    found.map(|tensor| tensor.name.clone())
}

fn is_finite(tensor: &TensorInfo, file: &WeightFile, until: Instant) -> Result<bool, ReadError> {
    let (block, size) = (tensor.dtype.block_size(), tensor.dtype.type_size());
    let blocks = PIECE_BYTES / size.max(1);
    // Every type is aligned where the widest is.
    let mut memory = vec![0u8; PIECE_BYTES + ALIGNMENT];
    let start = memory.as_ptr().align_offset(ALIGNMENT);
    let piece = memory.get_mut(start..).unwrap_or_default();
    let mut floats = vec![0f32; blocks * block];
    let (mut offset, mut left) = (tensor.offset, tensor.bytes.get() / size.max(1) as u64);
    while left > 0 && Instant::now() < until {
        let count = blocks.min(usize::try_from(left).unwrap_or(usize::MAX));
        let bytes = piece.get_mut(..count * size).unwrap_or_default();
        let floats = floats.get_mut(..count * block).unwrap_or_default();
        file.read_expected(
            &extent(tensor, offset, bytes.len()),
            bytes,
            &DiskWatch::default(),
        )?;
        dequantize(tensor.dtype, bytes, floats);
        // The kernels widen without a look at the exponent of values that are not finite.
        let mut halves = bytes
            .as_chunks()
            .0
            .iter()
            .map(|half| half::f16::from_le_bytes(*half));
        if tensor.dtype == GgmlDType::F16 && halves.any(|half| !half.is_finite()) {
            return Ok(false);
        }
        if floats.iter().any(|value| !value.is_finite()) {
            return Ok(false);
        }
        offset = offset.saturating_add(bytes.len() as u64);
        left -= count as u64;
    }
    Ok(true)
}

fn extent(tensor: &TensorInfo, offset: u64, bytes: usize) -> Extent {
    Extent {
        what: tensor.name.as_str().into(),
        offset,
        bytes,
    }
}

/// Bytes that are looked at in one place: longer than a row of zeros that quantisation leaves.
const SAMPLE_BYTES: u64 = 4096;
/// Places of a matrix that can be looked at.
const SAMPLES: u64 = 16;
/// No type of a weight is aligned to more.
const ALIGNMENT: usize = 16;
/// Bytes that are converted at a time.
const PIECE_BYTES: usize = 1 << 20;
/// For how long the tensor is searched that is to be named: some GiB. Our choice.
const SEARCH_TIME: Duration = Duration::from_secs(10);
