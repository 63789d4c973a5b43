//! Instruction sets of the machine, and kernel dispatch.

use std::{arch::asm, sync::OnceLock};

/// A set of instructions that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    /// Guaranteed by the target (on arm64 that includes NEON).
    Baseline,
    /// Dot products of bytes, optional on arm64 since Armv8.2 (`FEAT_DotProd`).
    #[cfg(target_arch = "aarch64")]
    Dotprod,
    /// In addition, products of matrices of bytes, optional since Armv8.6 (`FEAT_I8MM`).
    #[cfg(target_arch = "aarch64")]
    I8mm,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2 with FMA, F16C and AVX-VNNI: dot products of bytes without AVX-512.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// In addition, products of pairs of `bf16`.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
}

impl Isa {
    /// All sets of the target, lesser ones first.
    pub(super) const ALL: &[Self] = &[
        Self::Baseline,
        #[cfg(target_arch = "aarch64")]
        Self::Dotprod,
        #[cfg(target_arch = "aarch64")]
        Self::I8mm,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        #[cfg(target_arch = "x86_64")]
        Self::AvxVnni,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512Bf16,
    ];

    /// The best set that this machine has.
    pub(crate) fn detect() -> Self {
        Self::available().last().copied().unwrap_or(Self::Baseline)
    }

    /// The set used by backends: the best one, unless a lesser one was requested.
    pub(crate) fn chosen() -> Self {
        CHOSEN.get().copied().unwrap_or_else(Self::detect)
    }

    /// Makes backends created from now on use the set with this name; returns whether this machine has it and no other
    /// was requested before.
    pub(crate) fn choose(name: &str) -> bool {
        let found = Self::available().iter().find(|set| set.name() == name);
        found.is_some_and(|set| *CHOSEN.get_or_init(|| *set) == *set)
    }

    /// All sets that this machine has, lesser ones first.
    pub(crate) fn available() -> &'static [Self] {
        AVAILABLE.get_or_init(|| Self::usable(Self::is_reported, survives))
    }

    /// The sets reported by the processor whose instructions `survive`.
    fn usable(is_reported: impl Fn(Self) -> bool, survive: impl Fn(fn()) -> bool) -> Vec<Self> {
        let sets = Self::ALL.iter().copied();
        sets.filter(|set| is_reported(*set) && set.instructions().is_none_or(&survive))
            .collect()
    }

    /// Whether the processor reports all instructions of the set.
    fn is_reported(self) -> bool {
        match self {
            Self::Baseline => true,
            #[cfg(target_arch = "aarch64")]
            Self::Dotprod => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Self::I8mm => {
                Self::Dotprod.is_reported() && std::arch::is_aarch64_feature_detected!("i8mm")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                std::arch::is_x86_feature_detected!("avx2")
                    && std::arch::is_x86_feature_detected!("fma")
                    && std::arch::is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => {
                Self::Avx2.is_reported() && std::arch::is_x86_feature_detected!("avxvnni")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_reported()
                    && std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512dq")
                    && std::arch::is_x86_feature_detected!("avx512vl")
                    && std::arch::is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => {
                Self::Avx512.is_reported() && std::arch::is_x86_feature_detected!("avx512bf16")
            }
        }
    }

    /// Executes one instruction of each extension missing from lesser sets: a hypervisor can trap each of them
    /// separately.
    const fn instructions(self) -> Option<fn()> {
        match self {
            Self::Baseline => None,
            #[cfg(target_arch = "aarch64")]
            Self::Dotprod => Some(|| {
                // The assembler accepts the instruction only with the extension named.
                #[target_feature(enable = "dotprod")]
                fn sdot() {
                    // SAFETY: an instruction on registers only; a machine without it ends the process that tries it.
                    unsafe {
                        asm!("sdot v0.4s, v0.16b, v0.16b", out("v0") _, options(nomem, nostack))
                    };
                }
                // SAFETY: as above.
                unsafe { sdot() };
            }),
            #[cfg(target_arch = "aarch64")]
            Self::I8mm => Some(|| {
                // SAFETY: as above.
                unsafe {
                    asm!(".arch_extension i8mm", "smmla v0.4s, v0.16b, v0.16b", out("v0") _, options(nomem, nostack));
                };
            }),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Some(|| {
                // SAFETY: as above.
                unsafe {
                    asm!(
                        "vpaddd ymm0, ymm0, ymm0",
                        "vfmadd231ps ymm0, ymm0, ymm0",
                        "vcvtph2ps ymm0, xmm0",
                        out("ymm0") _,
                        options(nomem, nostack)
                    );
                };
            }),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => Some(|| {
                // SAFETY: as above.
                unsafe {
                    asm!("{{vex}} vpdpbusd ymm0, ymm0, ymm0", out("ymm0") _, options(nomem, nostack));
                };
            }),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Some(|| {
                // SAFETY: as above.
                unsafe {
                    asm!(
                        "vpaddd zmm0, zmm0, zmm0",        // F
                        "vpaddb zmm0, zmm0, zmm0",        // BW
                        "vandps zmm0, zmm0, zmm0",        // DQ
                        "{{evex}} vpaddd ymm0, ymm0, ymm0", // VL
                        "vpdpbusd zmm0, zmm0, zmm0",      // VNNI
                        out("xmm0") _,
                        options(nomem, nostack)
                    );
                };
            }),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Some(|| {
                // SAFETY: as above.
                unsafe {
                    asm!("vdpbf16ps zmm0, zmm0, zmm0", out("xmm0") _, options(nomem, nostack));
                };
            }),
        }
    }

    /// Its name.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            #[cfg(target_arch = "aarch64")]
            Self::Dotprod => "dotprod",
            #[cfg(target_arch = "aarch64")]
            Self::I8mm => "i8mm",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => "avx-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => "avx512-bf16",
        }
    }
}

/// Whether an instruction can be executed on each processor available to this process. A hypervisor may trap
/// instructions reported by the processor, and cores of one machine may differ: a child process tries them, so that a
/// signal ends only the child. If no process can be started, the processor's report counts.
fn survives(instructions: fn()) -> bool {
    survive_on(instructions, |_| ())
}

/// As [`survives`], with `arrive` called on each processor before the instructions.
fn survive_on(instructions: fn(), arrive: fn(usize)) -> bool {
    // SAFETY: the child calls functions that are safe after a fork of several threads, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above; the masks are plain numbers, of their own size.
        unsafe {
            // No handler of this program runs, and no core is dumped.
            libc::signal(libc::SIGILL, libc::SIG_DFL);
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            let mut all: libc::cpu_set_t = std::mem::zeroed();
            libc::sched_getaffinity(0, size_of_val(&all), &raw mut all);
            instructions();
            for number in (0..8 * size_of_val(&all)).filter(|number| libc::CPU_ISSET(*number, &all))
            {
                let mut one: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(number, &mut one);
                if libc::sched_setaffinity(0, size_of_val(&one), &raw const one) == 0 {
                    arrive(number);
                    instructions();
                }
            }
            libc::_exit(0);
        }
    }
    let mut status = 0;
    // SAFETY: `status` is a place for one number.
    while child > 0 && unsafe { libc::waitpid(child, &raw mut status, 0) } < 0 {
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return true;
        }
    }
    !libc::WIFSIGNALED(status)
}

/// The requested set.
static CHOSEN: OnceLock<Isa> = OnceLock::new();

/// The sets that this machine has, tried once.
static AVAILABLE: OnceLock<Vec<Isa>> = OnceLock::new();

/// Defines functions whose bodies are compiled once per instruction set and selected by their first argument.
///
/// A body is the scalar reference and the source of all versions: sums run in fixed lanes and products are fused, so
/// every version yields the same bits.
macro_rules! kernel {
    ($(
        $(#[$meta:meta])* pub(crate) fn $name:ident($($arg:ident: $kind:ty),* $(,)?) $(-> $result:ty)? $body:block
    )*) => { $(
        $(#[$meta])*
        #[expect(clippy::too_many_arguments, clippy::allow_attributes, reason = "kernels take plain numbers")]
        #[allow(clippy::too_many_arguments, unfulfilled_lint_expectations, reason = "only some kernels have many")]
        pub(crate) fn $name(isa: $crate::backend::cpu::isa::Isa, $($arg: $kind),*) $(-> $result)? {
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
                $crate::backend::cpu::isa::Isa::Baseline => body($($arg),*),
                #[cfg(target_arch = "aarch64")]
                // No body profits from them: products of bytes have hand-written kernels.
                $crate::backend::cpu::isa::Isa::Dotprod | $crate::backend::cpu::isa::Isa::I8mm => {
                    body($($arg),*)
                }
                #[cfg(target_arch = "x86_64")]
                // SAFETY: these sets are only chosen if the machine has them (`Isa::available`).
                $crate::backend::cpu::isa::Isa::Avx2 | $crate::backend::cpu::isa::Isa::AvxVnni => unsafe {
                    avx2($($arg),*)
                },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::backend::cpu::isa::Isa::Avx512 | $crate::backend::cpu::isa::Isa::Avx512Bf16 => unsafe {
                    avx512($($arg),*)
                },
            }
        }
    )* };
}
pub(crate) use kernel;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_that_traps_ends_the_child_that_tries_it_alone() {
        assert!(survives(|| ()));
        assert!(!survives(|| {
            // SAFETY: ends the process that executes it.
            unsafe {
                #[cfg(target_arch = "x86_64")]
                asm!("ud2");
                #[cfg(target_arch = "aarch64")]
                asm!("udf #0");
            }
        }));
    }

    #[test]
    fn a_core_whose_instructions_trap_ends_the_set_for_all() {
        assert!(survive_on(|| (), |_| ()));
        // The first processor available to the process, which is the one that lacks them.
        assert!(!survive_on(|| (), |_| std::process::abort()));
    }

    #[test]
    fn a_set_that_is_hidden_or_trapped_is_left_out_and_the_others_stay() {
        let [first, rest @ ..] = Isa::ALL else {
            panic!("a target has a set")
        };
        assert_eq!(Isa::usable(|_| true, |_| true), Isa::ALL);
        for hidden in rest {
            let others: Vec<Isa> = Isa::ALL
                .iter()
                .copied()
                .filter(|set| set != hidden)
                .collect();
            assert_eq!(Isa::usable(|set| set != *hidden, |_| true), others);
        }
        // All instructions beyond a machine's base may be trapped.
        assert_eq!(Isa::usable(|_| true, |_| false), [*first]);
        assert_eq!(Isa::usable(|set| set == *first, |_| true), [*first]);
    }

    #[test]
    fn every_machine_has_a_set_and_lesser_ones_come_first() {
        let sets = Isa::available();
        assert_eq!(sets.first(), Some(&Isa::Baseline));
        assert_eq!(sets.last(), Some(&Isa::detect()));
    }
}
