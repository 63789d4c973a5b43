//! Types of tensors: names, numbers and block sizes.

/// The type of a tensor's elements, numbered as `enum ggml_type` in `ggml.h`.
///
/// Candle's enum of this name lacks some of them.
#[expect(missing_docs, reason = "ggml's own names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum GgmlDType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2K = 10,
    Q3K = 11,
    Q4K = 12,
    Q5K = 13,
    Q6K = 14,
    IQ4NL = 20,
    IQ4XS = 23,
    BF16 = 30,
    MXFP4 = 39,
}

impl GgmlDType {
    /// Elements and bytes of a block: the structures in ggml's `ggml-common.h`.
    const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q2K => (256, 84),
            Self::Q3K => (256, 110),
            Self::Q4K => (256, 144),
            Self::Q5K => (256, 176),
            Self::Q6K => (256, 210),
            Self::IQ4NL => (32, 18),
            Self::IQ4XS => (256, 136),
            Self::MXFP4 => (32, 17),
        }
    }

    /// Elements of a block; 1 for floats.
    pub const fn block_size(self) -> usize {
        self.block().0
    }

    /// Bytes of a block.
    pub const fn type_size(self) -> usize {
        self.block().1
    }
}

/// The supported types, in the order of `Type` in `backend/cuda/kernels/weights.cuh`: kernels receive a type as its
/// index in this list.
pub const SUPPORTED: [GgmlDType; 16] = [
    GgmlDType::F32,
    GgmlDType::F16,
    GgmlDType::BF16,
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
    GgmlDType::Q2K,
    GgmlDType::Q3K,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
    GgmlDType::IQ4NL,
    GgmlDType::IQ4XS,
    GgmlDType::MXFP4,
];

/// A supported type by its number in the file.
pub(super) fn dtype_of(kind: u32) -> Option<GgmlDType> {
    SUPPORTED
        .into_iter()
        .find(|&dtype| type_number(dtype) == kind)
}

/// The number of a type in the file.
pub const fn type_number(dtype: GgmlDType) -> u32 {
    dtype as u32
}

/// The name of a supported type, as printed by llama.cpp.
pub fn dtype_name(dtype: GgmlDType) -> &'static str {
    type_name(type_number(dtype)).unwrap_or_default()
}

/// The name of a type by its number in the file, if it exists.
pub(super) fn type_name(kind: u32) -> Option<&'static str> {
    NAMES.split(' ').nth(kind as usize)
}

/// The names of types in the order of their numbers, as printed by llama.cpp; for abandoned types, as kept in `ggml.h`.
const NAMES: &str = "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS \
    IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 \
    TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 IQ4_NL_8_8 MXFP4 NVFP4 Q1_0 Q2_0";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::LoadErrorKind;

    #[test]
    fn a_refused_type_is_answered_with_all_that_are_supported() {
        let refused = LoadErrorKind::TensorType {
            tensor: "t".to_owned(),
            dtype: "IQ3_S".to_owned(),
        }
        .to_string();
        let listed = refused
            .split("supported are ")
            .nth(1)
            .unwrap()
            .replace(" and ", ", ");
        assert_eq!(listed, SUPPORTED.map(dtype_name).join(", "));
    }

    #[test]
    fn types_that_are_refused_have_names_as_far_as_there_are_any() {
        for (kind, name) in [
            (4, "Q4_2"),
            (31, "Q4_0_4_4"),
            (38, "IQ4_NL_8_8"),
            (40, "NVFP4"),
            (42, "Q2_0"),
        ] {
            assert_eq!(type_name(kind), Some(name));
        }
        // `GGML_TYPE_COUNT` is 43.
        assert!((0..43).all(|kind| type_name(kind).is_some()));
        assert_eq!(type_name(43), None);
    }
}
