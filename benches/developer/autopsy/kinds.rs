//! Kinds of injected death, and the expected class of each.

use std::time::Duration;

use super::programs::Programs;
use cotenant::{
    policy::death::DeathClass,
    units::Bytes,
    worker::{
        confine::Resource,
        spec::{Listen, Readiness, WorkerSpec},
    },
};

pub(super) struct Kind {
    pub(super) name: &'static str,
    pub(super) class: DeathClass,
    pub(super) spec: WorkerSpec,
    pub(super) hand: Hand,
    /// Requirements that may be missing.
    pub(super) needs: Need,
}

/// Cause of the end once it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hand {
    /// The worker itself.
    Own,
    /// The supervisor, once it is ready.
    Stop,
    /// The supervisor, for a hang.
    Hung,
    /// Another process, with this signal.
    OtherProcess(libc::c_int),
    /// Another process, with an unreadable kernel log.
    UnseenProcess(libc::c_int),
    /// The kernel's OOM killer: the record of a real machine with the id of this process, and SIGKILL.
    KernelRecord,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Nothing,
    C,
    Cpp,
    /// Its own control group, and a C compiler.
    Group,
    /// Seconds of processor time per run, and a C compiler.
    Time,
}

/// The OOM record of an Orin NX 16 GB, in the format of its kernel 5.15.
pub(super) const RECORD: &str = "[ 8012.441203] python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n\
    [ 8012.441260]  nvmap_alloc_handle+0x1e8/0x4a0 [nvmap]\n\
    [ 8012.441502] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user.slice/llama-server.service,task=COMM,pid=PID,uid=1000\n\
    [ 8012.441577] Out of memory: Killed process PID (COMM) total-vm:23640880kB, anon-rss:2788352kB, file-rss:5023744kB, shmem-rss:0kB, UID:1000 pgtables:16096kB oom_score_adj:0\n\
    [ 8012.902210] oom_reaper: reaped process PID (COMM), now anon-rss:0kB, file-rss:4218880kB, shmem-rss:0kB\n";

pub(super) fn all(programs: &Programs) -> Vec<Kind> {
    let ways = programs.path("ways");
    let way = |name: &str| spec(&[&ways, name]);
    let shell = |script: &str| spec(&["/bin/sh", "-c", script]);
    let ready = |mut spec: WorkerSpec| {
        spec.readiness = Readiness::LogLine("ready".to_owned());
        spec
    };
    let kind = |name, class, spec, hand, needs| Kind {
        name,
        class,
        spec,
        hand,
        needs,
    };
    let own = |name, class, spec, needs| kind(name, class, spec, Hand::Own, needs);
    let limited = |mut spec: WorkerSpec| {
        spec.confinement.memory = Some(Bytes::from_mib(24));
        spec
    };
    let mut cuda = spec(&[&programs.path("needs_cuda")]);
    cuda.env.insert(
        "LD_LIBRARY_PATH".to_owned(),
        programs.file("cuda-11").to_string_lossy().into_owned(),
    );
    let mut address_space = way("limit");
    address_space
        .confinement
        .resources
        .insert(Resource::AddressSpace, Some(256 << 20));
    let mut late = way("mute");
    late.readiness = Readiness::LogLine("never said".to_owned());
    late.ready_timeout = Duration::from_millis(60);
    let uvicorn = if programs.python {
        spec(&[
            "python3",
            "-S",
            "-c",
            "import sys; print('ERROR: Application startup failed. Exiting.', file=sys.stderr); sys.exit(3)",
        ])
    } else {
        shell("echo 'ERROR: Application startup failed. Exiting.' >&2; exit 3")
    };
    vec![
        own(
            "group out of memory",
            DeathClass::MemcgOom,
            limited(way("eat")),
            Need::Group,
        ),
        kind(
            "killed by SIGKILL (record that the counters deny)",
            DeathClass::KilledExternally,
            ready(way("wait")),
            Hand::KernelRecord,
            Need::C,
        ),
        own(
            "child out of memory, exit 0",
            DeathClass::SilentExit,
            limited(way("child")),
            Need::Group,
        ),
        kind(
            "stopped by us",
            DeathClass::KilledByUs,
            ready(way("wait")),
            Hand::Stop,
            Need::C,
        ),
        kind(
            "stopped by us, deaf to SIGTERM",
            DeathClass::KilledByUs,
            ready(way("deaf")),
            Hand::Stop,
            Need::C,
        ),
        kind(
            "SIGKILL of an unmanaged process",
            DeathClass::KilledExternally,
            ready(way("wait")),
            Hand::OtherProcess(libc::SIGKILL),
            Need::C,
        ),
        kind(
            "SIGTERM of an unmanaged process",
            DeathClass::KilledExternally,
            ready(way("wait")),
            Hand::OtherProcess(libc::SIGTERM),
            Need::C,
        ),
        kind(
            "SIGKILL, kernel log unreadable",
            DeathClass::KilledExternally,
            ready(way("wait")),
            Hand::UnseenProcess(libc::SIGKILL),
            Need::C,
        ),
        own(
            "segmentation fault",
            DeathClass::SegmentationFault,
            way("segfault"),
            Need::C,
        ),
        own(
            "failed assertion",
            DeathClass::Abort,
            way("assert"),
            Need::C,
        ),
        own(
            "std::bad_alloc, memory free",
            DeathClass::AllocationFailed,
            spec(&[&programs.path("bad_alloc")]),
            Need::Cpp,
        ),
        own(
            "nvmap error 12, memory free",
            DeathClass::AllocationFailed,
            shell(NVMAP),
            Need::Nothing,
        ),
        own(
            "ENOMEM by RLIMIT_AS",
            DeathClass::RlimitMemory,
            address_space,
            Need::C,
        ),
        own(
            "missing shared library",
            DeathClass::MissingLibrary,
            spec(&[&programs.path("needs_gone")]),
            Need::C,
        ),
        own(
            "library of another CUDA",
            DeathClass::CudaMismatch,
            cuda,
            Need::C,
        ),
        own(
            "CUDA runtime newer than driver",
            DeathClass::CudaMismatch,
            shell(CUDA),
            Need::Nothing,
        ),
        own(
            "no such program",
            DeathClass::ExecFailed,
            spec(&["/nowhere/asr"]),
            Need::Nothing,
        ),
        own(
            "not executable",
            DeathClass::ExecFailed,
            spec(&[&programs.path("not_executable")]),
            Need::Nothing,
        ),
        own(
            "bad interpreter",
            DeathClass::ExecFailed,
            spec(&[&programs.path("bad_interpreter")]),
            Need::Nothing,
        ),
        own(
            "program of another processor",
            DeathClass::ExecFailed,
            spec(&[&programs.path("foreign")]),
            Need::Nothing,
        ),
        own(
            "exit code 3 (uvicorn)",
            DeathClass::ExitCode,
            uvicorn,
            Need::Nothing,
        ),
        own(
            "exit code 137",
            DeathClass::ExitCode,
            shell("echo Killed >&2; exit 137"),
            Need::Nothing,
        ),
        own(
            "exit code 0, unasked",
            DeathClass::SilentExit,
            shell("echo bye; exit 0"),
            Need::Nothing,
        ),
        kind(
            "hang, ended by us",
            DeathClass::Hang,
            ready(way("hang")),
            Hand::Hung,
            Need::C,
        ),
        own("never ready", DeathClass::StartTimeout, late, Need::C),
        own(
            "truncated mapped file",
            DeathClass::BusError,
            way("bus"),
            Need::C,
        ),
        own(
            "illegal instruction",
            DeathClass::IllegalInstruction,
            way("illegal"),
            Need::C,
        ),
        own(
            "forbidden system call",
            DeathClass::SeccompViolation,
            way("forbidden"),
            Need::C,
        ),
        own("SIGPIPE", DeathClass::OtherSignal, way("pipe"), Need::C),
        own(
            "processor time used up",
            DeathClass::CpuTimeLimit,
            way("cpu"),
            Need::Time,
        ),
    ]
}

fn spec(argv: &[&str]) -> WorkerSpec {
    let argv = argv.iter().map(|&word| word.to_owned()).collect();
    let mut spec = WorkerSpec::new("victim", argv, Listen::Nowhere);
    spec.readiness = Readiness::Started;
    spec.stop_grace = GRACE;
    spec.oom_score_adj = None;
    // Their core files are not needed.
    spec.confinement.resources.insert(Resource::Core, Some(0));
    spec
}

/// Message of llama.cpp on an Orin whose GPU allocator refuses.
const NVMAP: &str = "echo 'NvMapMemAllocInternalTagged: 1075072515 error 12
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory
alloc_tensor_range: failed to allocate CUDA0 buffer of size 4294967296
llama_model_load_from_file_impl: failed to load model' >&2; exit 1";

/// Message of a program whose CUDA runtime is newer than the driver.
const CUDA: &str = "echo 'CUDA error: CUDA driver version is insufficient for CUDA runtime version
  current device: 0, in function ggml_backend_cuda_init' >&2; exit 1";

/// Time between the signals of a stop: long enough for a responsive process, even under load.
const GRACE: Duration = Duration::from_millis(400);
