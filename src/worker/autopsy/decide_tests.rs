//! Tests of the classification of deaths.

use std::time::Duration;

use proptest::prelude::*;

use super::{
    super::{
        evidence::{Counters, Gathered, GroupCounters, LOCKED},
        kernel_log::{KernelLogTail, parse},
    },
    *,
};
use cotenant_probe::board::L4tRelease;

const PID: u32 = 341_226;

const MEMCG: &str = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=asr-worker.service,mems_allowed=0,oom_memcg=/app.slice/asr-worker.service,task_memcg=/app.slice/asr-worker.service,task=asr-worker,pid=341226,uid=1000";
const GLOBAL: &str = "Out of memory: Killed process 341226 (asr-worker) total-vm:23640880kB, anon-rss:2788352kB, file-rss:5023744kB, shmem-rss:0kB, UID:1000 pgtables:16096kB oom_score_adj:0";

fn killed(signal: i32) -> ExitStatus {
    ExitStatus::Signal {
        signal,
        core_dumped: false,
    }
}

fn group(kills: u64) -> Counters {
    Counters {
        machine_kills: Some(kills),
        group: Some(GroupCounters {
            path: "/app.slice/asr-worker.service".to_owned(),
            kills: Some(kills),
            hits: Some(1204),
            limit: Some(Bytes::from_gib(1)),
        }),
    }
}

/// Returns evidence of a worker that ended this way on a machine where everything is readable and nothing else
/// happened.
fn evidence(status: ExitStatus) -> Evidence {
    let machine = Counters {
        machine_kills: Some(0),
        group: None,
    };
    Evidence {
        worker: "asr".to_owned(),
        pid: PID,
        status,
        asked: None,
        found: Gathered {
            comm: "asr-worker".to_owned(),
            pid_is_global: true,
            before: machine.clone(),
            after: machine,
            cpu_time: Some(Duration::from_secs(3)),
            ..Gathered::default()
        },
        available: Some(Bytes::from_gib(6)),
        lines: Vec::new(),
        recent: usize::MAX,
        lived: Duration::from_secs(9),
        was_ready: true,
    }
}

fn with(status: ExitStatus, change: impl FnOnce(&mut Evidence)) -> DeathVerdict {
    let mut evidence = evidence(status);
    change(&mut evidence);
    decide(&evidence)
}

fn said(status: ExitStatus, lines: &[&str]) -> DeathVerdict {
    with(status, |evidence| {
        evidence.lines = lines.iter().map(|&line| line.to_owned()).collect();
    })
}

fn logged(lines: &[&str]) -> KernelLogTail {
    KernelLogTail {
        records: lines.iter().filter_map(|line| parse(line)).collect(),
        ..KernelLogTail::default()
    }
}

/// Adds a kernel record, and increments the counter as the kernel would.
fn recorded(evidence: &mut Evidence, record: &str) {
    evidence.found.log = logged(&[record]);
    evidence.found.after.machine_kills = Some(1);
}

fn asked(intent: Intent, killed: bool) -> Option<Asked> {
    Some(Asked {
        intent,
        why: "2 GiB are needed for `llm`".to_owned(),
        killed,
    })
}

#[test]
fn a_full_group_is_named_with_its_limit() {
    let verdict = with(killed(9), |evidence| {
        (evidence.found.before, evidence.found.after) = (group(0), group(1));
        evidence.found.log = logged(&[MEMCG]);
    });
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::MemcgOom, Confidence::Certain)
    );
    assert!(
        verdict.sentence.contains("memory limit of 1 GiB"),
        "{}",
        verdict.sentence
    );
    assert!(
        verdict
            .evidence
            .iter()
            .any(|found| found.text.contains("1 killed for memory"))
    );
}

#[test]
fn a_group_above_its_own_may_be_the_one_that_was_full() {
    let line = MEMCG.replace(
        "oom_memcg=/app.slice/asr-worker.service",
        "oom_memcg=/app.slice",
    );
    let verdict = with(killed(9), |evidence| {
        recorded(evidence, &line);
    });
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::MemcgOom, Confidence::Certain)
    );
}

#[test]
fn a_machine_without_memory_is_named() {
    let verdict = with(killed(9), |evidence| {
        recorded(evidence, GLOBAL);
    });
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::GlobalOom, Confidence::Certain)
    );
}

#[test]
fn a_record_that_the_counters_deny_proves_nothing() {
    for record in [GLOBAL, MEMCG] {
        let verdict = with(killed(9), |evidence| evidence.found.log = logged(&[record]));
        assert_eq!(verdict.class, DeathClass::KilledExternally, "{record}");
    }
    // The machine killed a process outside this group.
    let verdict = with(killed(9), |evidence| {
        (evidence.found.before, evidence.found.after) = (group(0), group(0));
        evidence.found.after.machine_kills = Some(1);
        evidence.found.log = logged(&[MEMCG]);
    });
    assert_eq!(verdict.class, DeathClass::KilledExternally);
    // Without counters, a record is likely but not certain.
    let verdict = with(killed(9), |evidence| {
        evidence.found.after = Counters::default();
        evidence.found.log = logged(&[MEMCG]);
    });
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::MemcgOom, Confidence::Likely)
    );
}

#[test]
fn a_line_from_long_before_the_end_explains_nothing() {
    let warning = "libfoo.so.1: cannot open shared object file: No such file or directory";
    let verdict = with(ExitStatus::Code(1), |evidence| {
        evidence.lines = vec![warning.to_owned()];
        evidence.recent = 0;
    });
    assert_eq!(verdict.class, DeathClass::ExitCode);
    assert!(!verdict.needs_operator);
    assert!(!verdict.sentence.contains("libfoo"), "{}", verdict.sentence);
    // A worker that ran without the library until now is restarted.
    let verdict = said(
        ExitStatus::Code(1),
        &[
            "Traceback (most recent call last):",
            &format!("ImportError: {warning}"),
        ],
    );
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::MissingLibrary, Confidence::Low)
    );
    assert!(!verdict.needs_operator);
}

#[test]
fn a_worker_that_wrote_nothing_has_no_output_to_read() {
    let remedy = with(ExitStatus::Code(1), |_| {}).remedy.unwrap();
    assert!(!remedy.contains("its output says why"), "{remedy}");
}

#[test]
fn a_name_that_is_cut_to_fifteen_characters_is_the_same() {
    let verdict = with(killed(9), |evidence| {
        evidence.found.comm = "tensorrt-edgellm".to_owned();
        recorded(
            evidence,
            "Out of memory: Killed process 341226 (tensorrt-edgell) total-vm:21684408kB ...",
        );
    });
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::GlobalOom, Confidence::Certain)
    );
}

#[test]
fn sigkill_without_a_record_is_of_an_unknown_sender_and_never_out_of_memory() {
    let verdict = with(killed(9), |_| {});
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::KilledExternally, Confidence::Likely)
    );
    assert!(
        verdict
            .sentence
            .contains("was killed by SIGKILL, sender unknown")
    );

    // A record of another process's death, and a counter incremented for it.
    let verdict = with(killed(9), |evidence| {
        evidence.found.log = logged(&[&GLOBAL.replace("341226", "7")]);
        evidence.found.after.machine_kills = Some(1);
    });
    assert_eq!(verdict.class, DeathClass::KilledExternally);
}

#[test]
fn a_log_that_cannot_be_read_lowers_the_confidence_and_is_reported() {
    let unreadable = |evidence: &mut Evidence| {
        evidence.found.log.unreadable =
            Some("cannot read `/dev/kmsg`: Operation not permitted".to_owned());
        evidence.found.after.machine_kills = Some(1);
    };
    let verdict = with(killed(9), unreadable);
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::KilledExternally, Confidence::Low)
    );
    assert!(
        verdict.sentence.contains("is unreadable"),
        "{}",
        verdict.sentence
    );
    assert!(
        verdict
            .evidence
            .iter()
            .any(|found| found.text.contains("Operation not permitted"))
    );

    // The group's own counter is kernel evidence too, though weaker.
    let verdict = with(killed(9), |evidence| {
        unreadable(evidence);
        (evidence.found.before, evidence.found.after) = (group(0), group(1));
    });
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::MemcgOom, Confidence::Likely)
    );
    // If the log is readable and names another process, the counter refers to that one.
    let verdict = with(killed(9), |evidence| {
        (evidence.found.before, evidence.found.after) = (group(0), group(1));
        evidence.found.log = logged(&[&MEMCG.replace("341226", "341227")]);
    });
    assert_eq!(verdict.class, DeathClass::KilledExternally);
}

#[test]
fn numbers_of_another_namespace_are_not_compared() {
    // The id is the same by chance.
    let verdict = with(killed(9), |evidence| {
        evidence.found.pid_is_global = false;
        evidence.found.log = logged(&[GLOBAL]);
    });
    assert_eq!(verdict.class, DeathClass::KilledExternally);
    let verdict = with(killed(9), |evidence| {
        evidence.found.pid_is_global = false;
        (evidence.found.before, evidence.found.after) = (group(0), group(1));
        evidence.found.log = logged(&[&MEMCG.replace("341226", "77")]);
    });
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::MemcgOom, Confidence::Likely)
    );
}

const fn is_oom(class: DeathClass) -> bool {
    matches!(class, DeathClass::GlobalOom | DeathClass::MemcgOom)
}

#[test]
fn out_of_memory_beside_an_exit_belongs_to_a_child() {
    for code in [0, 1, 137] {
        let verdict = with(ExitStatus::Code(code), |evidence| {
            (evidence.found.before, evidence.found.after) = (group(0), group(1));
            evidence.found.log = logged(&[&MEMCG.replace("341226", "341300")]);
        });
        assert!(!is_oom(verdict.class), "{code}: {}", verdict.sentence);
        assert!(
            verdict
                .evidence
                .iter()
                .any(|found| found.text.starts_with("another process of it: oom-kill")),
            "{:?}",
            verdict.evidence
        );
    }
}

#[test]
fn a_code_of_137_is_a_code() {
    // A process's allocator grew from 5 to 13.4 GB, and something returned 137 for it.
    let verdict = said(ExitStatus::Code(137), &["allocating", "Killed"]);
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::ExitCode, Confidence::Certain)
    );
    assert!(
        verdict
            .remedy
            .unwrap()
            .contains("does not prove that memory ran out")
    );
    let verdict = said(
        ExitStatus::Code(137),
        &["Memory cgroup out of memory: Killed process 341226 (asr-worker)"],
    );
    assert_eq!(
        verdict.class,
        DeathClass::ExitCode,
        "what a program prints proves nothing"
    );
}

#[test]
fn our_own_hand_is_named_with_its_reason() {
    for (status, intent, by_force, class) in [
        (killed(15), Intent::Stop, false, DeathClass::KilledByUs),
        (killed(9), Intent::Stop, true, DeathClass::KilledByUs),
        (
            ExitStatus::Code(0),
            Intent::Stop,
            false,
            DeathClass::KilledByUs,
        ),
        (
            ExitStatus::Code(143),
            Intent::Stop,
            false,
            DeathClass::KilledByUs,
        ),
        (
            killed(15),
            Intent::NotReady,
            false,
            DeathClass::StartTimeout,
        ),
        (killed(9), Intent::NotReady, true, DeathClass::StartTimeout),
        (killed(6), Intent::Hung, false, DeathClass::Hang),
        (killed(9), Intent::Hung, true, DeathClass::Hang),
        (ExitStatus::Code(1), Intent::Hung, false, DeathClass::Hang),
        // It ended for another reason while the request was pending.
        (
            killed(11),
            Intent::Stop,
            false,
            DeathClass::SegmentationFault,
        ),
        (killed(9), Intent::Stop, false, DeathClass::KilledExternally),
    ] {
        let verdict = with(status, |evidence| evidence.asked = asked(intent, by_force));
        assert_eq!(verdict.class, class, "{status:?} {intent:?}");
        let reported = verdict
            .evidence
            .iter()
            .any(|found| found.text.contains("2 GiB are needed"));
        assert!(reported, "{:?}", verdict.evidence);
    }
}

#[test]
fn the_kernels_record_goes_before_our_own_intent() {
    let verdict = with(killed(9), |evidence| {
        evidence.asked = asked(Intent::Stop, true);
        recorded(evidence, MEMCG);
    });
    assert_eq!(verdict.class, DeathClass::MemcgOom);
}

#[test]
fn signals_have_their_classes() {
    for (signal, class) in [
        (libc::SIGABRT, DeathClass::Abort),
        (libc::SIGBUS, DeathClass::BusError),
        (libc::SIGFPE, DeathClass::OtherSignal),
        (libc::SIGHUP, DeathClass::KilledExternally),
        (libc::SIGILL, DeathClass::IllegalInstruction),
        (libc::SIGINT, DeathClass::KilledExternally),
        (libc::SIGPIPE, DeathClass::OtherSignal),
        (libc::SIGSEGV, DeathClass::SegmentationFault),
        (libc::SIGSYS, DeathClass::SeccompViolation),
        (libc::SIGTERM, DeathClass::KilledExternally),
        (libc::SIGXCPU, DeathClass::CpuTimeLimit),
        (40, DeathClass::OtherSignal),
    ] {
        assert_eq!(with(killed(signal), |_| {}).class, class, "{signal}");
    }
}

#[test]
fn a_fault_is_reported_with_its_address() {
    let line = "asr-worker[341226]: segfault at 6b015ee0 ip 00007fd450365d0f sp 00007fff43b9c470 error 4 in libggml-base.so.0.25.3[32d0f,7fd45034a000+8e000] likely on CPU 3 (core 3, socket 0)";
    let verdict = with(killed(11), |evidence| evidence.found.log = logged(&[line]));
    assert!(
        verdict
            .sentence
            .contains("SIGSEGV at 6b015ee0 ip 00007fd450365d0f"),
        "{}",
        verdict.sentence
    );
    // The kernel names the thread.
    let of_thread = line.replace("341226", "341230");
    let verdict = with(killed(11), |evidence| {
        evidence.found.log = logged(&[&of_thread]);
    });
    assert!(verdict.sentence.contains("6b015ee0"));
}

#[test]
fn processor_time_that_is_used_up_explains_a_kill() {
    let verdict = with(killed(9), |evidence| {
        evidence.found.limits.cpu_hard = Some(3);
        evidence.found.cpu_time = Some(Duration::from_millis(2990));
    });
    assert_eq!(verdict.class, DeathClass::CpuTimeLimit);
}

#[test]
fn refused_allocations_with_memory_free_are_no_kill() {
    for (status, lines, confidence) in [
        // Drive Thor with 115 GB free.
        (
            killed(6),
            vec![
                "terminate called after throwing an instance of 'std::bad_alloc'",
                "  what():  std::bad_alloc",
            ],
            Confidence::Likely,
        ),
        (
            ExitStatus::Code(1),
            vec![
                "NvMapMemAllocInternalTagged: 1075072515 error 12",
                "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
                "llama_model_load_from_file_impl: failed to load model",
            ],
            Confidence::Low,
        ),
        (
            ExitStatus::Code(1),
            vec!["Traceback (most recent call last):", "MemoryError"],
            Confidence::Likely,
        ),
    ] {
        let verdict = said(status, &lines);
        assert_eq!(
            (verdict.class, verdict.confidence),
            (DeathClass::AllocationFailed, confidence)
        );
        assert!(
            verdict.sentence.contains("6 GiB available"),
            "{}",
            verdict.sentence
        );
    }
    let verdict = said(
        ExitStatus::Code(1),
        &[
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
        ],
    );
    assert!(
        verdict.sentence.contains("an allocation of 4096.00 MiB"),
        "{}",
        verdict.sentence
    );
    // A known fault of an L4T release is mentioned only on a board with that release.
    let remedy = |release: Option<&str>| {
        let release = release.and_then(|text| L4tRelease::parse(text.as_bytes()));
        let verdict = with(ExitStatus::Code(1), |evidence| {
            evidence.lines = vec!["CUDA error: out of memory".to_owned()];
            evidence.found.l4t_fault = release.and_then(L4tRelease::warning);
        });
        verdict.remedy.unwrap()
    };
    for other in [None, Some("# R36 (release), REVISION: 5.0, GCID: 1")] {
        assert!(!remedy(other).contains("L4T"), "{}", remedy(other));
    }
    let faulty = remedy(Some("# R36 (release), REVISION: 4.7, GCID: 1"));
    assert!(faulty.contains("L4T 36.4.7 refuses"), "{faulty}");
}

/// Outputs of real programs under an address space limit of 256 MiB, with their exit status: Python 3.11, `NumPy` 2,
/// C++ with libstdc++, C with `perror`, Rust 1.95.
const REFUSED: [(&[&str], ExitStatus); 5] = [
    (
        &[
            "Traceback (most recent call last):",
            "  File \"/opt/asr.py\", line 6, in <module>",
            "    f()",
            "  File \"/opt/asr.py\", line 5, in f",
            "    while True: l.append(bytearray(1<<20))",
            "                         ^^^^^^^^^^^^^^^^",
            "MemoryError",
        ],
        ExitStatus::Code(1),
    ),
    (
        &[
            "Traceback (most recent call last):",
            "  File \"<string>\", line 3, in <module>",
            "  File \"/opt/venv/lib/python3.11/site-packages/numpy/_core/numeric.py\", line 232, in ones",
            "    a = empty(shape, dtype, order, device=device)",
            "        ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB for an array with shape (1073741824,) and data type float64",
        ],
        ExitStatus::Code(1),
    ),
    (
        &[
            "terminate called after throwing an instance of 'std::bad_alloc'",
            "  what():  std::bad_alloc",
        ],
        ExitStatus::Signal {
            signal: libc::SIGABRT,
            core_dumped: false,
        },
    ),
    (&["malloc: Cannot allocate memory"], ExitStatus::Code(1)),
    (
        &[
            "memory allocation of 1048576 bytes failed",
            "stack backtrace:",
            "note: Some details are omitted, run with `RUST_BACKTRACE=full` for a verbose backtrace.",
        ],
        ExitStatus::Signal {
            signal: libc::SIGABRT,
            core_dumped: false,
        },
    ),
];

/// Returns the verdict on a worker with an address space limit of 256 MiB and this peak.
fn limited(lines: &[&str], status: ExitStatus, peak: Option<Bytes>) -> DeathVerdict {
    with(status, |evidence| {
        evidence.lines = lines.iter().map(|&line| line.to_owned()).collect();
        evidence
            .found
            .limits
            .finite
            .insert(ADDRESS_SPACE.to_owned(), 256 << 20);
        evidence.found.peak_resident = peak;
    })
}

#[test]
fn a_limit_of_its_own_explains_a_refused_allocation_of_a_process_that_came_near_it() {
    for (lines, status) in REFUSED {
        let verdict = limited(lines, status, Some(Bytes::from_mib(230)));
        let found = (verdict.class, verdict.confidence, verdict.needs_operator);
        assert_eq!(
            found,
            (DeathClass::RlimitMemory, Confidence::Likely, true),
            "{lines:?}: {}",
            verdict.sentence
        );
        assert!(
            verdict.sentence.contains("`Max address space` of 256 MiB"),
            "{}",
            verdict.sentence
        );
        // The kernel counted little, or no more than the supervisor's own memory: the next start may succeed.
        for peak in [None, Some(Bytes::from_kib(4400))] {
            let verdict = limited(lines, status, peak);
            let found = (verdict.class, verdict.confidence, verdict.needs_operator);
            assert_eq!(
                found,
                (DeathClass::RlimitMemory, Confidence::Low, false),
                "{lines:?}"
            );
        }
    }
    // The limit does not apply to the GPU's allocator.
    let cuda = limited(
        &["CUDA error: out of memory"],
        ExitStatus::Code(1),
        Some(Bytes::from_mib(250)),
    );
    assert_eq!(
        (cuda.class, cuda.needs_operator),
        (DeathClass::AllocationFailed, false)
    );
}

/// Transcripts, log lines about other processes, and words not in the form of a runtime's message decide nothing, even
/// for a worker close to its limit.
#[test]
fn a_programs_own_words_decide_nothing() {
    let abort = ExitStatus::Signal {
        signal: libc::SIGABRT,
        core_dumped: false,
    };
    for line in [
        "INFO transcript: my phone is out of memory",
        "INFO transcript: out of memory",
        "transcript: MemoryError",
        "the user said out of memory",
        "my phone is out of memory",
        "MemoryError",
        "INFO:root:the recogniser heard std::bad_alloc",
        "DEBUG said: memory allocation of 12 bytes failed",
        "2026-01-05 12:00:00 INFO text='Cannot allocate memory'",
        "INFO transcript: CUDA out of memory",
        "INFO transcript: cudaMalloc failed",
        "INFO transcript: failed to mlock 12 bytes",
        "mlock failed",
        "INFO transcript: libfoo.so: cannot open shared object file",
        "libfoo.so.1: cannot open shared object file: No such file or directory",
        "ERROR unable to allocate a speaker to the utterance",
        "INFO transcript: symbol lookup error: undefined symbol: x",
        "ValueError: the user said out of memory",
        "INFO transcript: CUDA driver version is insufficient for CUDA runtime version",
    ] {
        for (status, class) in [
            (ExitStatus::Code(1), DeathClass::ExitCode),
            (ExitStatus::Code(127), DeathClass::ExitCode),
            (abort, DeathClass::Abort),
        ] {
            for was_ready in [false, true] {
                let verdict = with(status, |evidence| {
                    evidence.lines = vec!["INFO ready".to_owned(), line.to_owned()];
                    evidence.was_ready = was_ready;
                    evidence.found.peak_resident = Some(Bytes::from_mib(250));
                    for name in [ADDRESS_SPACE, LOCKED] {
                        evidence
                            .found
                            .limits
                            .finite
                            .insert(name.to_owned(), 256 << 20);
                    }
                });
                assert_eq!(
                    (verdict.class, verdict.needs_operator),
                    (class, false),
                    "{status:?}: {line}"
                );
            }
        }
    }
    // An exception that quotes a user's text is still an exception.
    let lines = [
        "Traceback (most recent call last):",
        "  File \"a.py\", line 1",
        "ValueError: the user said out of memory",
    ];
    let verdict = limited(&lines, ExitStatus::Code(1), Some(Bytes::from_mib(250)));
    assert_eq!(
        (verdict.class, verdict.needs_operator),
        (DeathClass::ExitCode, false)
    );
}

proptest! {
    /// Without a runtime's message and the kernel's figures, no end disables a worker that was ready.
    #[test]
    fn no_transcript_keeps_a_worker_down(
        text in "[ -~]{0,40}(out of memory|MemoryError|std::bad_alloc|mlock failed|: cannot open shared object file|undefined symbol:)[ -~]{0,20}",
        code in 1i32..255,
        near in any::<bool>(),
    ) {
        let peak = near.then(|| Bytes::from_mib(250));
        let verdict = limited(&[&format!("INFO transcript: {text}")], ExitStatus::Code(code), peak);
        prop_assert!(!verdict.needs_operator, "{}", verdict.sentence);
        prop_assert_eq!(verdict.class, DeathClass::ExitCode);
    }
}

#[test]
fn libraries_that_are_missing_or_of_another_cuda_are_reported_apart() {
    let missing = "./asr: error while loading shared libraries: libcudart.so.12: cannot open shared object file: No such file or directory";
    let verdict = with(ExitStatus::Code(127), |evidence| {
        evidence.lines = vec![missing.to_owned()];
        evidence.was_ready = false;
    });
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::MissingLibrary, Confidence::Certain)
    );
    assert!(verdict.needs_operator);
    let verdict = with(ExitStatus::Code(127), |evidence| {
        evidence.lines = vec![missing.to_owned()];
        evidence.was_ready = false;
        evidence.found.other_versions = vec!["libcudart.so.11.0".to_owned()];
    });
    assert_eq!(verdict.class, DeathClass::CudaMismatch);
    assert!(verdict.sentence.contains("libcudart.so.11.0"));
    let verdict = said(
        ExitStatus::Code(1),
        &["CUDA error: CUDA driver version is insufficient for CUDA runtime version"],
    );
    assert_eq!(verdict.class, DeathClass::CudaMismatch);
}

/// A slow start, a warning about an optional component, and an end for another cause: only the loader's own failure is
/// permanent.
#[test]
fn a_worker_that_never_was_ready_is_started_again_unless_the_loader_refused_it() {
    const OPTIONAL: &str =
        "warning: libfoo.so.1: cannot open shared object file: No such file or directory";
    const VERSION: &str =
        "/opt/asr: /lib/libc.so.6: version `GLIBC_2.99' not found (required by /opt/asr)";
    const IMPORT: &str =
        "ImportError: /lib/libc.so.6: version `GLIBC_2.99' not found (required by /opt/x.so)";
    const CUDA: &str = "CUDA driver version is insufficient for CUDA runtime version";
    const SYMBOL: &str = "/opt/asr: symbol lookup error: /opt/asr: undefined symbol: vosk_new";
    const LOADER: &str = "/opt/asr: error while loading shared libraries: libvosk.so: cannot open shared object file: No such file or directory";
    let ends = |lines: &[&str], code| {
        with(ExitStatus::Code(code), |evidence| {
            evidence.lines = lines.iter().map(|&line| line.to_owned()).collect();
            evidence.was_ready = false;
            evidence.lived = Duration::from_secs(70);
        })
    };
    for (lines, code, class, confidence, lasting) in [
        (
            vec![OPTIONAL],
            1,
            DeathClass::ExitCode,
            Confidence::Certain,
            false,
        ),
        (
            vec![OPTIONAL],
            127,
            DeathClass::ExitCode,
            Confidence::Certain,
            false,
        ),
        (
            vec![LOADER],
            127,
            DeathClass::MissingLibrary,
            Confidence::Certain,
            true,
        ),
        (
            vec![LOADER, "cannot open model.bin"],
            127,
            DeathClass::MissingLibrary,
            Confidence::Likely,
            false,
        ),
        (
            vec![LOADER],
            1,
            DeathClass::MissingLibrary,
            Confidence::Likely,
            false,
        ),
        (
            vec![VERSION],
            1,
            DeathClass::MissingLibrary,
            Confidence::Likely,
            true,
        ),
        (
            vec![VERSION, "cannot open model.bin"],
            1,
            DeathClass::MissingLibrary,
            Confidence::Low,
            false,
        ),
        (
            vec![VERSION],
            2,
            DeathClass::MissingLibrary,
            Confidence::Low,
            false,
        ),
        (
            vec!["Traceback (most recent call last):", IMPORT],
            1,
            DeathClass::MissingLibrary,
            Confidence::Low,
            false,
        ),
        (
            vec![SYMBOL],
            127,
            DeathClass::MissingLibrary,
            Confidence::Likely,
            true,
        ),
        (
            vec![SYMBOL],
            1,
            DeathClass::MissingLibrary,
            Confidence::Low,
            false,
        ),
        (
            vec![CUDA],
            1,
            DeathClass::CudaMismatch,
            Confidence::Likely,
            false,
        ),
    ] {
        let verdict = ends(&lines, code);
        let found = (verdict.class, verdict.confidence, verdict.needs_operator);
        assert_eq!(
            found,
            (class, confidence, lasting),
            "code {code}: {lines:?}"
        );
    }
    // It used more CPU time than the loader does, so it ran.
    let verdict = with(ExitStatus::Code(127), |evidence| {
        evidence.lines = vec![LOADER.to_owned()];
        evidence.was_ready = false;
        evidence.found.cpu_time = Some(Duration::from_secs(60));
    });
    assert!(!verdict.needs_operator, "{}", verdict.sentence);
    // Files of another CUDA version do not explain the end of a program that continued without them.
    let verdict = with(ExitStatus::Code(1), |evidence| {
        evidence.lines = vec![LOADER.replace("libvosk.so", "libcudart.so.12")];
        evidence.found.other_versions = vec!["libcudart.so.11.0".to_owned()];
        evidence.was_ready = false;
    });
    assert_eq!(
        (verdict.confidence, verdict.needs_operator),
        (Confidence::Likely, false)
    );
}

#[test]
fn a_silent_exit_and_an_abort_say_what_they_are() {
    let verdict = said(ExitStatus::Code(0), &["bye"]);
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::SilentExit, Confidence::Certain)
    );
    let verdict = said(killed(6), &["GGML_ASSERT: ggml.c:7: n > 0", "Aborted"]);
    assert_eq!(verdict.class, DeathClass::Abort);
    assert!(
        verdict.sentence.contains("GGML_ASSERT"),
        "{}",
        verdict.sentence
    );
}

#[test]
fn an_end_that_is_not_ours_to_read_is_unknown_unless_the_kernel_names_it() {
    // 113 of 2034 weights, no record, no status: the cause is unknown.
    let verdict = said(ExitStatus::Unknown, &["Loading weights: 113/2034"]);
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::Unknown, Confidence::Low)
    );
    let verdict = with(ExitStatus::Unknown, |evidence| recorded(evidence, MEMCG));
    assert_eq!(
        (verdict.class, verdict.confidence),
        (DeathClass::MemcgOom, Confidence::Likely)
    );
}

#[test]
fn a_machine_without_a_rival_and_one_with_are_reported_apart() {
    let verdict = with(killed(15), |evidence| {
        evidence.found.killers = vec!["earlyoom (pid 812)".to_owned()];
    });
    assert_eq!(verdict.class, DeathClass::KilledExternally);
    assert!(
        verdict
            .remedy
            .unwrap()
            .starts_with("see the log of earlyoom (pid 812), which may have sent it")
    );
}

fn statuses() -> impl Strategy<Value = ExitStatus> {
    prop_oneof![
        (0i32..256).prop_map(ExitStatus::Code),
        (1i32..65, any::<bool>()).prop_map(|(signal, core_dumped)| ExitStatus::Signal {
            signal,
            core_dumped
        }),
        Just(ExitStatus::Unknown),
    ]
}

proptest! {
    /// For any output and exit status, only kernel evidence leads to an out-of-memory class.
    #[test]
    fn nothing_but_the_kernel_says_out_of_memory(
        status in statuses(),
        lines in proptest::collection::vec("[ -~]{0,60}|Out of memory: Killed process 341226 \\(asr-worker\\)|Killed|CUDA out of memory|std::bad_alloc", 0..6),
        machine_kills in 0u64..3,
        other in 1u32..1000,
        killed_by_us in any::<bool>(),
    ) {
        let verdict = with(status, |evidence| {
            evidence.lines = lines;
            evidence.found.after.machine_kills = Some(machine_kills);
            evidence.found.log = logged(&[&MEMCG.replace("341226", &other.to_string()), &GLOBAL.replace("341226", &other.to_string())]);
            evidence.asked = killed_by_us.then(|| asked(Intent::Stop, true)).flatten();
        });
        prop_assert!(!is_oom(verdict.class), "{}", verdict.sentence);
    }

    /// A record that names the process explains every SIGKILL, and no other end.
    #[test]
    fn a_record_that_names_it_explains_sigkill_alone(status in statuses()) {
        let verdict = with(status, |evidence| recorded(evidence, GLOBAL));
        let explained = matches!(status, ExitStatus::Signal { signal: 9, .. } | ExitStatus::Unknown);
        prop_assert_eq!(verdict.class == DeathClass::GlobalOom, explained);
    }
}
