//! Instruction sets of the machine, and dispatch of kernels to them.

use std::sync::OnceLock;

/// A set of instructions that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    /// What every machine of the target has (on arm64 that includes NEON).
    Baseline,
    /// Dot products of bytes, which arm64 may have since Armv8.2 (`FEAT_DotProd`).
    #[cfg(target_arch = "aarch64")]
    Dotprod,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The best set that this machine has.
    #[must_use]
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx512f")
                && std::arch::is_x86_feature_detected!("avx512bw")
                && std::arch::is_x86_feature_detected!("avx512dq")
                && std::arch::is_x86_feature_detected!("avx512vl")
                && std::arch::is_x86_feature_detected!("avx512vnni")
                && std::arch::is_x86_feature_detected!("fma")
                && std::arch::is_x86_feature_detected!("f16c")
            {
                return Self::Avx512;
            }
            if std::arch::is_x86_feature_detected!("avx2")
                && std::arch::is_x86_feature_detected!("fma")
                && std::arch::is_x86_feature_detected!("f16c")
            {
                return Self::Avx2;
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("dotprod") {
            return Self::Dotprod;
        }
        Self::Baseline
    }

    /// What backends use: the best set, unless a lesser one was asked for.
    #[must_use]
    pub(crate) fn chosen() -> Self {
        CHOSEN.get().copied().unwrap_or_else(Self::detect)
    }

    /// Lets backends that are made from now on use the set with this name; says whether this machine has it and nobody
    /// asked for another one before.
    pub(crate) fn choose(name: &str) -> bool {
        let found = Self::available().into_iter().find(|set| set.name() == name);
        found.is_some_and(|set| *CHOSEN.get_or_init(|| set) == set)
    }

    /// All sets that this machine has, to compare them.
    pub(crate) fn available() -> Vec<Self> {
        match Self::detect() {
            Self::Baseline => vec![Self::Baseline],
            #[cfg(target_arch = "aarch64")]
            Self::Dotprod => vec![Self::Baseline, Self::Dotprod],
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => vec![Self::Baseline, Self::Avx2],
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => vec![Self::Baseline, Self::Avx2, Self::Avx512],
        }
    }

    /// Its name.
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            #[cfg(target_arch = "aarch64")]
            Self::Dotprod => "dotprod",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
        }
    }
}

/// The set that was asked for.
static CHOSEN: OnceLock<Isa> = OnceLock::new();

/// Defines a function whose body is compiled once for each instruction set and chosen by its first argument.
///
/// The body is the scalar reference and the source of all versions: sums run in fixed lanes and products are fused, so
/// every version yields the same bits.
macro_rules! kernel {
    ($(#[$meta:meta])* pub(crate) fn $name:ident($($arg:ident: $kind:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        #[expect(clippy::too_many_arguments, clippy::allow_attributes, reason = "kernels take plain numbers")]
        #[allow(clippy::too_many_arguments, unfulfilled_lint_expectations, reason = "only some kernels have many")]
        pub(crate) fn $name(isa: $crate::engine::backend::cpu::isa::Isa, $($arg: $kind),*) $(-> $result)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments, clippy::allow_attributes, reason = "only some kernels have many")]
            fn body($($arg: $kind),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments, clippy::allow_attributes, reason = "only some kernels have many")]
            fn avx2($($arg: $kind),*) $(-> $result)? { body($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments, clippy::allow_attributes, reason = "only some kernels have many")]
            fn avx512($($arg: $kind),*) $(-> $result)? { body($($arg),*) }
            match isa {
                $crate::engine::backend::cpu::isa::Isa::Baseline => body($($arg),*),
                #[cfg(target_arch = "aarch64")]
                // Nothing in a body gains by it: what dot products of bytes are for has kernels by hand.
                $crate::engine::backend::cpu::isa::Isa::Dotprod => body($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: this set is only chosen where the machine has it (`Isa::detect`).
                $crate::engine::backend::cpu::isa::Isa::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::engine::backend::cpu::isa::Isa::Avx512 => unsafe { avx512($($arg),*) },
            }
        }
    };
}
pub(crate) use kernel;
