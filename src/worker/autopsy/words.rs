//! Causes of death named in the last lines of a program's output.
//!
//! Output is evidence of failures of the program's *own* actions: a refused allocation, a missing library. It never
//! proves a kill by the kernel, so no text leads to an out-of-memory class. A line that merely contains such words,
//! like a transcript, is quoted but decides nothing: a class requires the final message of a runtime in that runtime's
//! format ([`Quote::is_final`]).

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// An allocation was refused.
    Allocation(Allocator),
    /// A failed assertion, an uncaught exception, a corrupt heap.
    Assertion,
    /// The CUDA runtime and the driver are incompatible.
    CudaMismatch,
    /// A shared library of this name is missing.
    MissingLibrary { library: String },
    /// Memory could not be locked.
    Lock,
    /// A shared library is present but incompatible.
    UnfitLibrary,
}

/// Allocator that refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Allocator {
    /// CUDA, or a library based on it.
    Cuda,
    /// `malloc`, `mmap`, `new`, an interpreter.
    Host,
    /// The kernel's GPU allocator of a Jetson, below CUDA.
    NvMap,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Quote {
    pub(super) said: Said,
    pub(super) line: String,
    /// Whether it has format and position of a runtime's final message.
    pub(super) is_final: bool,
}

/// Returns the lines with a meaning, latest first.
pub(super) fn quotes(lines: &[String]) -> Vec<Quote> {
    let first = lines.len().saturating_sub(LINES_MAX);
    let quoted = lines
        .iter()
        .enumerate()
        .skip(first)
        .rev()
        .filter_map(|(at, line)| {
            let said = said(line)?;
            let earlier = lines.get(first..at).unwrap_or_default();
            let is_final = lines.len().saturating_sub(at + 1) <= LINES_AFTER_MAX
                && is_runtimes_own(line.trim(), earlier);
            Some(Quote {
                said,
                line: shortened(line),
                is_final,
            })
        });
    quoted.collect()
}

/// Returns whether a line begins like a message of a runtime, a driver or the dynamic loader. Log lines, including
/// those about other processes, begin with the log's own fields.
fn is_runtimes_own(line: &str, earlier: &[String]) -> bool {
    if RUNTIMES.iter().any(|(start, rest)| {
        line.strip_prefix(start)
            .is_some_and(|after| after.contains(rest))
    }) {
        return true;
    }
    // The C library's message about a call: `malloc: Cannot allocate memory`, `malloc of 12 bytes: Cannot allocate
    // memory`.
    let call = line.split([' ', ':', '(']).next().unwrap_or_default();
    if line.ends_with("Cannot allocate memory") && ALLOCATORS.contains(&call) {
        return true;
    }
    // `PROGRAM: message`, if the program's name contains no blanks.
    let named = line
        .split_once(": ")
        .filter(|(program, _)| !program.contains(char::is_whitespace));
    if named.is_some_and(|(_, message)| {
        LOADER
            .iter()
            .any(|(start, rest)| message.starts_with(start) && message.contains(rest))
    }) {
        return true;
    }
    // `package.KindOfError: message` after a traceback is the exception that ended a Python program.
    let (kind, message) = line.split_once(": ").unwrap_or((line, ""));
    let is_name = kind
        .chars()
        .all(|c| c.is_alphanumeric() || matches!(c, '.' | '_'));
    if !is_name
        || earlier
            .iter()
            .all(|line| line.trim() != "Traceback (most recent call last):")
    {
        return false;
    }
    let marks = HOST_ALLOCATION
        .iter()
        .chain(&CUDA_ALLOCATION)
        .chain(&CUDA_MISMATCH)
        .chain(&EXCEPTIONS);
    kind.ends_with("MemoryError")
        || kind.ends_with("OutOfMemoryError")
        || marks.into_iter().any(|mark| message.starts_with(mark))
        || message
            .split(' ')
            .next()
            .is_some_and(|word| word.contains(".so"))
}

/// Returns a line without indentation, truncated.
pub(super) fn shortened(line: &str) -> String {
    line.trim().chars().take(QUOTE_MAX).collect()
}

/// Returns the size of the failed allocation as written, if the line contains it.
pub(super) fn asked_for(line: &str) -> Option<String> {
    for (mark, unit) in [
        ("allocating ", " MiB"),
        ("buffer of size ", ""),
        ("memory allocation of ", " bytes"),
        ("Tried to allocate ", " GiB"),
        ("Tried to allocate ", " MiB"),
        ("Unable to allocate ", " GiB"),
        ("Unable to allocate ", " MiB"),
    ] {
        let Some((_, rest)) = line.split_once(mark) else {
            continue;
        };
        let end = rest
            .find(|c: char| !(c.is_ascii_digit() || c == '.'))
            .unwrap_or(rest.len());
        let (figure, after) = rest.split_at(end);
        if !figure.is_empty() && after.starts_with(unit) {
            let unit = if unit.is_empty() { " bytes" } else { unit };
            return Some(format!("{}{unit}", figure.trim_end_matches('.')));
        }
    }
    None
}

fn said(line: &str) -> Option<Said> {
    let has = |marks: &[&str]| marks.iter().any(|mark| line.contains(mark));
    // A log line about another process's death is not this program's own failure.
    if line.contains("Killed process") {
        return None;
    }
    if has(&CUDA_MISMATCH) {
        return Some(Said::CudaMismatch);
    }
    if line.contains("NvMapMemAlloc") && line.contains("error 12") {
        return Some(Said::Allocation(Allocator::NvMap));
    }
    if has(&CUDA_ALLOCATION) {
        return Some(Said::Allocation(Allocator::Cuda));
    }
    if has(&LOCK) {
        return Some(Said::Lock);
    }
    if has(&[
        "failed to map segment from shared object",
        "cannot allocate memory in static TLS block",
    ]) {
        return Some(Said::Allocation(Allocator::Host));
    }
    if let Some((before, _)) = line.split_once(": cannot open shared object file") {
        let library = before
            .rsplit([' ', '\'', '"', '('])
            .next()
            .unwrap_or(before);
        return Some(Said::MissingLibrary {
            library: library.rsplit('/').next().unwrap_or(library).to_owned(),
        });
    }
    if has(&UNFIT_LIBRARY) {
        return Some(Said::UnfitLibrary);
    }
    if has(&HOST_ALLOCATION) || line.to_lowercase().contains("out of memory") {
        return Some(Said::Allocation(Allocator::Host));
    }
    has(&ASSERTION).then_some(Said::Assertion)
}

/// Messages of the CUDA runtime, the driver and PyTorch about incompatible versions (NVIDIA, errors 35, 209, 222, 803
/// and 804 of the runtime; `torch/cuda/__init__.py`).
const CUDA_MISMATCH: [&str; 12] = [
    "CUDA driver version is insufficient for CUDA runtime version",
    "forward compatibility was attempted on non supported HW",
    "system has unsupported display driver / cuda driver combination",
    "no kernel image is available for execution on the device",
    "The NVIDIA driver on your system is too old",
    "PTX was compiled with an unsupported toolchain",
    "cudaErrorInsufficientDriver",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "compiled with different CUDA major versions",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
];

/// Messages of ggml, CUDA, cuBLAS, PyTorch on Tegra (an assertion instead of its out-of-memory error), cudarc, MatX,
/// CTranslate2.
const CUDA_ALLOCATION: [&str; 13] = [
    "CUDA failed with error out of memory",
    "cudaMalloc failed",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: the resource allocation failed",
    "failed to allocate CUDA",
    "unable to allocate CUDA",
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",
    "matxOutOfMemory",
    "OutOfMemoryError: CUDA",
];

/// Messages of the C++ library, Python, the C library, Rust, Go, ggml, PyTorch.
const HOST_ALLOCATION: [&str; 11] = [
    "can't allocate memory",
    "std::bad_alloc",
    "std::bad_array_new_length",
    "MemoryError",
    "Cannot allocate memory",
    "cannot allocate memory",
    "memory allocation of ",
    "failed to allocate ",
    "unable to allocate ",
    "Unable to allocate ",
    "mmap failed: Cannot",
];

/// Messages with which runtimes and drivers end a program or report a refusal: the start of the line, and text in its
/// rest. C++ (libstdc++, libc++), Rust, Go, the JVM, V8, shells; ggml and llama.cpp, CUDA, the driver of a Jetson,
/// cudarc, MatX, Ollama, PyTorch without a traceback.
const RUNTIMES: [(&str, &str); 31] = [
    ("terminate called after throwing an instance of '", ""),
    ("what():  ", ""),
    ("libc++abi: terminating due to uncaught exception", ""),
    ("memory allocation of ", " bytes failed"),
    ("fatal error: runtime: ", ""),
    ("runtime: out of memory: ", ""),
    ("Terminating due to java.lang.OutOfMemoryError", ""),
    ("Exception in thread \"", "java.lang.OutOfMemoryError"),
    ("FATAL ERROR: ", "JavaScript heap out of memory"),
    ("bash: ", "annot allocate "),
    ("mmap failed: ", "Cannot allocate memory"),
    ("ggml_", ": "),
    ("alloc_tensor_range: ", ""),
    ("llama_", ": "),
    ("whisper_", ": "),
    ("GGML_ASSERT", ""),
    ("cudaMalloc failed: ", "out of memory"),
    ("CUDA error: ", ""),
    ("CUDA driver version is insufficient", ""),
    ("CUDA_ERROR_", ""),
    ("cudaError", ""),
    ("NvMapMemAlloc", "error 12"),
    ("DriverError(", "CUDA_ERROR_"),
    ("Error: DriverError(", "CUDA_ERROR_"),
    ("Error: llama runner process has terminated: ", ""),
    ("Fail: Unexpected error: matxException (", ""),
    ("RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED", ""),
    ("RuntimeError: CUDA", ""),
    (
        "RuntimeError: The NVIDIA driver on your system is too old",
        "",
    ),
    ("torch.OutOfMemoryError: CUDA", ""),
    ("torch.cuda.OutOfMemoryError: CUDA", ""),
];

/// Calls that fail with ENOMEM.
const ALLOCATORS: [&str; 8] = [
    "aligned_alloc",
    "brk",
    "calloc",
    "malloc",
    "mmap",
    "mremap",
    "posix_memalign",
    "realloc",
];

/// Starts of further Python exception messages: the C library, PyTorch, ONNX Runtime.
const EXCEPTIONS: [&str; 3] = [
    "[Errno 12] Cannot allocate memory",
    "[enforce fail at alloc_cpu",
    "[ONNXRuntimeError]",
];

/// Messages of the dynamic loader after the name of the program: start, and text in the rest.
pub(super) const LOADER: [(&str, &str); 4] = [
    ("error while loading shared libraries: ", ""),
    ("symbol lookup error: ", "undefined symbol: "),
    ("/", "' not found (required by "),
    ("relocation error: ", ""),
];

/// Messages of the dynamic linker about incompatible libraries.
const UNFIT_LIBRARY: [&str; 7] = [
    "symbol lookup error:",
    "undefined symbol:",
    "' not found (required by ",
    "wrong ELF class",
    "invalid ELF header",
    ": file too short",
    "cannot enable executable stack",
];

const LOCK: [&str; 4] = [
    "failed to mlock",
    "mlock failed",
    "mlockall failed",
    "cannot lock memory",
];

/// Messages of programs that abort: assert(3), ggml, PyTorch, the C++ runtime, Rust, glibc's heap and stack checks,
/// Python.
const ASSERTION: [&str; 15] = [
    "Assertion `",
    "Assertion failed",
    "assertion failed",
    "GGML_ASSERT",
    "GGML_ABORT",
    "INTERNAL ASSERT FAILED",
    "terminate called",
    "panicked at",
    "Check failed",
    "stack smashing detected",
    "double free or corruption",
    "malloc():",
    "free():",
    "Fatal Python error",
    "corrupted ",
];

/// Last lines examined: a program's final message is at its end.
const LINES_MAX: usize = 30;

/// Lines that may follow a runtime's message: a note, a disabled backtrace, an addition by a caller (our choice;
/// llama.cpp adds three).
const LINES_AFTER_MAX: usize = 6;

const QUOTE_MAX: usize = 240;

#[cfg(test)]
mod tests {
    use super::*;

    fn one(line: &str) -> Option<Said> {
        said(line)
    }

    #[test]
    fn messages_of_the_field_are_understood() {
        for (line, expected) in [
            // llama.cpp and the driver on an Orin, followed by PyTorch, cudarc and MatX.
            (
                "NvMapMemAllocInternalTagged: 1075072515 error 12",
                Said::Allocation(Allocator::NvMap),
            ),
            (
                "NvMapMemAllocInternalTagged: error 12",
                Said::Allocation(Allocator::NvMap),
            ),
            (
                "cudaMalloc failed: out of memory",
                Said::Allocation(Allocator::Cuda),
            ),
            (
                "CUDA error: out of memory",
                Said::Allocation(Allocator::Cuda),
            ),
            (
                "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
                Said::Allocation(Allocator::Cuda),
            ),
            (
                "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at",
                Said::Allocation(Allocator::Cuda),
            ),
            (
                "Error: DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")",
                Said::Allocation(Allocator::Cuda),
            ),
            (
                "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 437944320",
                Said::Allocation(Allocator::Host),
            ),
            (
                "  what():  std::bad_alloc",
                Said::Allocation(Allocator::Host),
            ),
            ("MemoryError", Said::Allocation(Allocator::Host)),
            (
                "memory allocation of 1073741824 bytes failed",
                Said::Allocation(Allocator::Host),
            ),
            (
                "fatal error: runtime: out of memory",
                Said::Allocation(Allocator::Host),
            ),
            (
                "asr: error while loading shared libraries: libc.so.6: failed to map segment from shared object",
                Said::Allocation(Allocator::Host),
            ),
            (
                "./asr: error while loading shared libraries: libvosk.so.1: cannot open shared object file: No such file or directory",
                Said::MissingLibrary {
                    library: "libvosk.so.1".to_owned(),
                },
            ),
            (
                "OSError: /opt/x/libcudart.so.12: cannot open shared object file: No such file or directory",
                Said::MissingLibrary {
                    library: "libcudart.so.12".to_owned(),
                },
            ),
            (
                "./a: symbol lookup error: ./a: undefined symbol: vosk_new",
                Said::UnfitLibrary,
            ),
            (
                "./a: /lib/libc.so.6: version `GLIBC_2.38' not found (required by ./a)",
                Said::UnfitLibrary,
            ),
            (
                "CUDA driver version is insufficient for CUDA runtime version",
                Said::CudaMismatch,
            ),
            (
                "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
                Said::CudaMismatch,
            ),
            (
                "a.out: a.c:3: main: Assertion `x == 1' failed.",
                Said::Assertion,
            ),
            (
                "GGML_ASSERT: ggml-cuda.cu:256: !\"CUDA error\"",
                Said::Assertion,
            ),
            ("warning: failed to mlock 1234-byte buffer", Said::Lock),
        ] {
            assert_eq!(one(line), Some(expected), "{line}");
        }
    }

    #[test]
    fn ordinary_lines_and_deaths_of_others_say_nothing() {
        for line in [
            "ready",
            "Memory cgroup out of memory: Killed process 7 (asr)",
            "loading shared libraries",
            "allocated 12 MiB",
        ] {
            assert_eq!(one(line), None, "{line}");
        }
    }

    #[test]
    fn the_size_of_a_refused_allocation_is_quoted() {
        for (line, size) in [
            (
                "alloc_buffer: allocating 2493.32 MiB on device 0: cudaMalloc failed",
                Some("2493.32 MiB"),
            ),
            (
                "failed to allocate CUDA0 buffer of size 4294967296",
                Some("4294967296 bytes"),
            ),
            ("memory allocation of 12 bytes failed", Some("12 bytes")),
            (
                "CUDA out of memory. Tried to allocate 2.00 GiB.",
                Some("2.00 GiB"),
            ),
            ("cudaMalloc failed", None),
        ] {
            assert_eq!(asked_for(line).as_deref(), size, "{line}");
        }
    }
}
