//! Tensors of a header by name, with checked dimensions.

use crate::{
    error::LoadErrorKind,
    gguf::{GgmlDType, Header, TensorInfo, dtype_name},
};

pub(super) fn tensor<'header>(
    header: &'header Header,
    name: &str,
) -> Result<&'header TensorInfo, LoadErrorKind> {
    header
        .tensor(name)
        .ok_or_else(|| LoadErrorKind::TensorMissing {
            tensor: name.to_owned(),
        })
}

pub(super) fn vector(
    header: &Header,
    name: &str,
    dims: &[usize],
) -> Result<TensorInfo, LoadErrorKind> {
    let info = tensor(header, name)?;
    let wanted: Vec<u64> = dims.iter().map(|&dim| dim as u64).collect();
    if !info.has_dims(&wanted) {
        return Err(bad_shape(info, &format!("{wanted:?}")));
    }
    if !matches!(
        info.dtype,
        GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16
    ) {
        return Err(LoadErrorKind::TensorType {
            tensor: name.to_owned(),
            dtype: format!("{}, which a vector cannot have", dtype_name(info.dtype)),
        });
    }
    Ok(info.clone())
}

pub(super) fn bad_shape(info: &TensorInfo, expected: &str) -> LoadErrorKind {
    LoadErrorKind::TensorShape {
        tensor: info.name.clone(),
        dims: info.dims.clone(),
        dtype: format!("a model whose header says {expected}"),
    }
}
