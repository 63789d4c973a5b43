//! Damage of weights that the header does not show: zeros at the end, non-finite values.

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

/// Refuses a file that ends in zeros beginning inside a matrix: the result of an incomplete download into preallocated
/// space.
///
/// A matrix that consists of zeros only is accepted as written by its author.
///
/// # Errors
/// When the file ends so, or cannot be read.
pub(crate) fn refuse_zeros(
    header: &Header,
    file: &WeightFile,
    watch: &DiskWatch,
) -> Result<(), LoadErrorKind> {
    // Rows of unused tokens may be zero.
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

/// Whether a tensor is zero at sample `place` of [`SAMPLES`]: 0 is its end, `SAMPLES - 1` its beginning.
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

/// Computes one token on an empty sequence and refuses weights that give no usable result. Leaves an empty sequence.
///
/// # Errors
/// When the logits are not finite or equal for all tokens, or the pass fails.
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

/// Whether the logits of all sayable tokens are equal.
fn are_alike(logits: &[f32]) -> bool {
    let mut said = logits.iter().filter(|logit| logit.is_finite());
    said.next()
        .is_some_and(|first| said.next().is_some() && said.all(|logit| logit == first))
}

/// Returns the first tensor of the file with a non-finite value, searching for at most [`SEARCH_TIME`].
fn not_finite(header: &Header) -> Option<String> {
    let file = WeightFile::open(header.parts()).ok()?;
    let until = Instant::now() + SEARCH_TIME;
    let mut tensors: Vec<&TensorInfo> = header.tensors().collect();
    tensors.sort_by_key(|tensor| tensor.offset);
    let found = tensors
        .into_iter()
        .take_while(|_| Instant::now() < until)
        .find(|tensor| {
            // A read error is a different fault.
            is_finite(tensor, &file, until).is_ok_and(|finite| !finite)
        });
    file.forget_all();
    found.map(|tensor| tensor.name.clone())
}

fn is_finite(tensor: &TensorInfo, file: &WeightFile, until: Instant) -> Result<bool, ReadError> {
    let (block, size) = (tensor.dtype.block_size(), tensor.dtype.type_size());
    let blocks = PIECE_BYTES / size.max(1);
    // Alignment of the widest type satisfies all.
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
        // The kernels convert F16 without regard to non-finite exponents.
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

/// Bytes per sample: more than a row of zeros left by quantisation.
const SAMPLE_BYTES: u64 = 4096;
/// Samples per matrix.
const SAMPLES: u64 = 16;
/// Largest alignment of a weight type.
const ALIGNMENT: usize = 16;
/// Bytes converted at a time.
const PIECE_BYTES: usize = 1 << 20;
/// Time limit of the search for the damaged tensor: enough for some GiB. Our choice.
const SEARCH_TIME: Duration = Duration::from_secs(10);
