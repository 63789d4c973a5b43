//! Classification of a death from evidence, as a pure function.
//!
//! The kernel's record that names the process takes precedence, then our own intent, then the signal or code; the
//! program's output explains only its own actions. Unproven causes are not stated: a SIGKILL without a record has an
//! unknown sender, and 137 is an exit code.

use std::time::Duration;

use super::{
    evidence::{ADDRESS_SPACE, Asked, CPU_TIME, DATA, Evidence},
    kernel_log::{KernelRecord, RecordKind},
    words::{Allocator, LOADER, Quote, Said, asked_for, quotes, shortened},
};
use crate::report::{ExitStatus, Intent, signal_name};
use cotenant_policy::death::{Confidence, DeathClass, DeathVerdict, Finding};
use cotenant_units::Bytes;

/// Result of one rule: class, confidence, event as the rest of a sentence, and remedy.
struct Ruling {
    class: DeathClass,
    confidence: Confidence,
    what: String,
    remedy: Option<String>,
    needs_operator: bool,
}

impl Ruling {
    fn new(class: DeathClass, confidence: Confidence, what: impl Into<String>) -> Self {
        Self {
            class,
            confidence,
            what: what.into(),
            remedy: None,
            needs_operator: false,
        }
    }

    fn certain(class: DeathClass, what: impl Into<String>) -> Self {
        Self::new(class, Confidence::Certain, what)
    }

    fn likely(class: DeathClass, what: impl Into<String>) -> Self {
        Self::new(class, Confidence::Likely, what)
    }

    fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    const fn lasting(mut self) -> Self {
        self.needs_operator = true;
        self
    }
}

pub(super) fn decide(evidence: &Evidence) -> DeathVerdict {
    let words = quotes(evidence.recent_lines());
    let ruling = rule(evidence, &words);
    let mut findings = vec![Finding::new("waitid", status_in_words(evidence.status))];
    findings.extend(log_findings(evidence));
    findings.extend(counter_findings(evidence));
    if let Some(asked) = &evidence.asked {
        findings.push(Finding::new("supervisor", asked_in_words(asked)));
    }
    findings.extend(
        words
            .iter()
            .take(QUOTES_SHOWN)
            .map(|quote| Finding::new("output", &quote.line)),
    );
    if let Some(available) = evidence.available {
        findings.push(Finding::new("memory", format!("{available} was available")));
    }
    for killer in &evidence.found.killers {
        findings.push(Finding::new(
            "processes",
            format!("{killer} runs here and kills under memory pressure"),
        ));
    }
    let lived = evidence.lived.as_secs_f64();
    let never = if evidence.was_ready {
        ""
    } else {
        ", never ready"
    };
    DeathVerdict {
        class: ruling.class,
        confidence: ruling.confidence,
        sentence: format!(
            "worker `{}` (pid {}) {}, {lived:.1} s after its start{never}",
            evidence.worker, evidence.pid, ruling.what
        ),
        evidence: findings,
        remedy: ruling.remedy,
        needs_operator: ruling.needs_operator,
    }
}

fn rule(evidence: &Evidence, words: &[Quote]) -> Ruling {
    let signal = match evidence.status {
        ExitStatus::Signal { signal, .. } => Some(signal),
        _ => None,
    };
    let killable = signal == Some(libc::SIGKILL) || evidence.status == ExitStatus::Unknown;
    if killable && let Some(ruling) = killed_for_memory(evidence) {
        return ruling;
    }
    if let Some(asked) = &evidence.asked
        && let Some(ruling) = killed_by_us(evidence.status, asked)
    {
        return ruling;
    }
    match evidence.status {
        ExitStatus::Unknown => Ruling::new(
            DeathClass::Unknown,
            Confidence::Low,
            "ended, with an exit status that the supervisor could not read",
        ),
        ExitStatus::Signal { signal, .. } => by_signal(evidence, words, signal),
        ExitStatus::Code(code) => by_code(evidence, words, code),
    }
}

/// Recognises a kill by the OOM killer, from kernel evidence.
fn killed_for_memory(evidence: &Evidence) -> Option<Ruling> {
    let named = evidence
        .found
        .log
        .records
        .iter()
        .rev()
        .find_map(|record| match &record.kind {
            RecordKind::Oom { memcg, .. } if names(evidence, record) => Some((*memcg, record)),
            _ => None,
        });
    if let Some((memcg, record)) = named
        && !evidence.counters_deny_kills(memcg)
    {
        // A different name may have been set by the program itself; the id was its own throughout.
        let same_name =
            evidence.found.comm.is_empty() || cut(&evidence.found.comm) == cut(&record.comm);
        let counted = evidence.machine_kills().is_some_and(|kills| kills > 0);
        let confidence = match (
            evidence.found.pid_is_global && same_name && counted,
            evidence.status,
        ) {
            (true, ExitStatus::Signal { .. }) => Confidence::Certain,
            _ => Confidence::Likely,
        };
        return Some(if memcg {
            memcg_oom(evidence, confidence)
        } else {
            Ruling::new(
                DeathClass::GlobalOom,
                confidence,
                "was killed by the kernel: the machine had no memory left",
            )
            .remedy(
                "something used memory beyond the budget: raise `budget.reserve`, give the worker its real peak, or find \
                 the neighbour in `cotenant events`; the victim need not be the one that grew",
            )
        });
    }
    // Without the record, the group's own counter still shows that one of its few processes was killed.
    let blind = evidence.found.log.unreadable.is_some()
        || evidence.found.log.incomplete
        || !evidence.found.pid_is_global;
    let counted = evidence.group_kills().is_some_and(|kills| kills > 0);
    (blind && counted).then(|| memcg_oom(evidence, Confidence::Likely))
}

fn memcg_oom(evidence: &Evidence, confidence: Confidence) -> Ruling {
    let group = evidence.group().filter(|group| group.limit.is_some());
    let limit = group
        .and_then(|group| group.limit)
        .map_or_else(String::new, |limit| format!(" of {limit}"));
    Ruling::new(
        DeathClass::MemcgOom,
        confidence,
        format!("was killed by the kernel: its control group had reached its memory limit{limit}"),
    )
    .remedy("give the worker a larger `memory.peak`, or a smaller model or variant")
}

/// Returns whether a record concerns this process.
fn names(evidence: &Evidence, record: &KernelRecord) -> bool {
    if evidence.found.pid_is_global {
        return record.pid == evidence.pid;
    }
    // Ids differ from those in the log. A record of our own group with its name is the best available match.
    let own_group = evidence.group().map(|group| group.path.as_str());
    let task_group = match &record.kind {
        RecordKind::Oom { task_group, .. } => task_group.as_deref(),
        _ => None,
    };
    !evidence.found.comm.is_empty()
        && cut(&record.comm) == cut(&evidence.found.comm)
        && own_group
            .zip(task_group)
            .is_some_and(|(own, reported)| reported.ends_with(own) && own != "/")
}

/// Truncates a name to 15 characters, like the kernel.
fn cut(name: &str) -> &str {
    name.char_indices()
        .nth(15)
        .map_or(name, |(at, _)| name.get(..at).unwrap_or(name))
}

/// Recognises a requested end; `None` if it ended for another reason before.
fn killed_by_us(status: ExitStatus, asked: &Asked) -> Option<Ruling> {
    let ours = match status {
        ExitStatus::Code(_) | ExitStatus::Unknown => true,
        ExitStatus::Signal { signal, .. } => {
            signal == libc::SIGTERM
                || (signal == libc::SIGKILL && asked.killed)
                || (signal == libc::SIGABRT && asked.intent == Intent::Hung)
        }
    };
    if !ours {
        return None;
    }
    let why = if asked.why.is_empty() {
        String::new()
    } else {
        format!(": {}", asked.why)
    };
    let how = match status {
        ExitStatus::Code(code) => format!("exited with code {code} {}", asked.intent),
        ExitStatus::Unknown => format!("ended {}", asked.intent),
        ExitStatus::Signal { signal, .. } => {
            format!("was killed by {} {}", signal_name(signal), asked.intent)
        }
    };
    Some(match asked.intent {
        Intent::Hung => Ruling::certain(DeathClass::Hang, format!("hung and {how}{why}"))
            .remedy("its output and core file, if any, show where it hung"),
        Intent::NotReady => Ruling::certain(DeathClass::StartTimeout, format!("{how}{why}"))
            .remedy("see its output; raise `ready.timeout`, or correct the readiness check"),
        Intent::Stop | Intent::Abandoned => {
            Ruling::certain(DeathClass::KilledByUs, format!("{how}{why}"))
        }
    })
}

fn by_signal(evidence: &Evidence, words: &[Quote], signal: i32) -> Ruling {
    let name = signal_name(signal);
    let fault = own_record(evidence, &RecordKind::Fault);
    match signal {
        libc::SIGABRT => abort(evidence, words),
        libc::SIGSEGV => {
            let at = fault.map_or_else(String::new, |record| {
                record
                    .text
                    .split_once("]: segfault ")
                    .and_then(|(_, at)| at.split(" likely on").next())
                    .map_or_else(String::new, |at| format!(" {at}"))
            });
            let after = match words.iter().find(|quote| quote.is_final) {
                Some(Quote {
                    said: Said::Allocation(_),
                    ..
                }) => " after an allocation was refused",
                _ => "",
            };
            Ruling::certain(
                DeathClass::SegmentationFault,
                format!("died of {name}{at}{after}{}", core(evidence)),
            )
            .remedy(if after.is_empty() {
                "a fault of the program; a core file or a debug build shows where"
            } else {
                "the program does not handle refused allocations: give it more memory, or a smaller model"
            })
        }
        libc::SIGBUS => Ruling::certain(
            DeathClass::BusError,
            format!(
                "died of {name}: a page of a mapped file or of shared memory was unavailable{}",
                core(evidence)
            ),
        )
        .remedy("a file that it maps was truncated or its disk failed, or /dev/shm is full"),
        libc::SIGILL => Ruling::certain(
            DeathClass::IllegalInstruction,
            format!(
                "died of {name}: an instruction that this processor does not have, or a trap{}",
                core(evidence)
            ),
        )
        .remedy("use a build for this processor, or look for a failed check that ends in a trap")
        .lasting(),
        libc::SIGSYS => Ruling::certain(
            DeathClass::SeccompViolation,
            format!(
                "died of {name}: it made a system call that its sandbox forbids{}",
                own_record(evidence, &RecordKind::Seccomp)
                    .and_then(|record| record.text.split_once("syscall="))
                    .and_then(|(_, rest)| rest.split(' ').next())
                    .map_or_else(String::new, |call| format!(" (number {call})"))
            ),
        )
        .remedy("allow the call in its sandbox, or run it without")
        .lasting(),
        libc::SIGXCPU => cpu_limit(evidence, &name),
        libc::SIGKILL if spent_its_time(evidence) => cpu_limit(evidence, &name),
        libc::SIGKILL | libc::SIGTERM | libc::SIGINT | libc::SIGHUP | libc::SIGQUIT => {
            killed_externally(evidence, &name)
        }
        _ => Ruling::certain(
            DeathClass::OtherSignal,
            format!("died of {name}{}", core(evidence)),
        )
        .remedy(match signal {
            libc::SIGPIPE => "it wrote to a pipe or socket without a reader",
            libc::SIGXFSZ => "it wrote a file larger than its limit `Max file size`",
            libc::SIGFPE => "a division by zero or similar: a fault of the program",
            _ => "the program does not handle this signal; its output may name the sender",
        }),
    }
}

fn killed_externally(evidence: &Evidence, name: &str) -> Ruling {
    let asked_before = match &evidence.asked {
        Some(asked) if !asked.killed => " just after the supervisor asked it to end",
        _ => "",
    };
    let blind = evidence.found.log.unreadable.is_some() || evidence.found.log.incomplete;
    let doubt = match evidence.machine_kills() {
        _ if !blind || name != "SIGKILL" => "",
        // The counter proves that the kernel killed no process for memory.
        Some(0) => "",
        Some(_) => {
            "; the kernel killed a process for memory meanwhile, but its log, which would name it, is unreadable"
        }
        None => "; neither the kernel's log nor its counter of kills for memory can be read",
    };
    Ruling::new(
        DeathClass::KilledExternally,
        if doubt.is_empty() { Confidence::Likely } else { Confidence::Low },
        format!("was killed by {name}, sender unknown{asked_before}{doubt}"),
    )
    .remedy(match evidence.found.killers.first() {
        Some(killer) => {
            format!("see the log of {killer}, which may have sent it; set its floor below cotenant's, or stop it")
        }
        None => "no evidence of exhausted memory: look for a user, script or supervisor that sent it"
            .to_owned(),
    })
}

fn spent_its_time(evidence: &Evidence) -> bool {
    let limit = evidence.found.limits.cpu_hard;
    limit
        .zip(evidence.found.cpu_time)
        .is_some_and(|(limit, used)| used.as_secs_f64() + CPU_SLACK_S >= seconds(limit))
}

/// Processor time limits of more than a century saturate.
fn seconds(limit: u64) -> f64 {
    f64::from(u32::try_from(limit).unwrap_or(u32::MAX))
}

fn cpu_limit(evidence: &Evidence, name: &str) -> Ruling {
    let limit = evidence
        .found
        .limits
        .of(CPU_TIME)
        .map_or_else(String::new, |limit| format!(" of {limit} s"));
    Ruling::certain(
        DeathClass::CpuTimeLimit,
        format!("was killed by {name}: it exceeded its CPU time{limit}"),
    )
    .remedy("raise or remove its limit of CPU time (RLIMIT_CPU)")
}

fn abort(evidence: &Evidence, words: &[Quote]) -> Ruling {
    let mut finals = words.iter().filter(|quote| quote.is_final);
    if let Some(quote) = finals
        .clone()
        .find(|quote| matches!(quote.said, Said::Allocation(_)))
    {
        return allocation(evidence, quote, "aborted");
    }
    if let Some(quote) = finals.find(|quote| quote.said == Said::CudaMismatch) {
        return cuda_mismatch(quote);
    }
    let said = words
        .iter()
        .find(|quote| quote.said == Said::Assertion)
        .map(|quote| quote.line.clone())
        .or_else(|| last_words(evidence.recent_lines()));
    Ruling::certain(
        DeathClass::Abort,
        format!(
            "aborted (SIGABRT){}{}",
            said.map_or_else(String::new, |line| format!(", saying `{line}`")),
            core(evidence)
        ),
    )
    .remedy("an internal check of the program failed; its output says which")
}

fn by_code(evidence: &Evidence, words: &[Quote], code: i32) -> Ruling {
    if let Some(unfit) = &evidence.found.unfit_program {
        return Ruling::likely(
            DeathClass::ExecFailed,
            format!("could not be executed: {unfit} (a shell tried it and exited with code {code})"),
        )
        .remedy("use a program built for this machine, or a script whose first line names its interpreter")
        .lasting();
    }
    if code == 0 {
        return Ruling::certain(
            DeathClass::SilentExit,
            "exited with code 0, unrequested",
        )
        .remedy(
            "a worker must keep running: check that it runs in the foreground, does not fork into the background, and does not end \
             when its standard input is closed",
        );
    }
    // The latest line is closest to the end. Only a final message of a runtime counts.
    for quote in words.iter().filter(|quote| quote.is_final) {
        match &quote.said {
            Said::Allocation(_) => {
                return allocation(evidence, quote, &format!("exited with code {code}"));
            }
            Said::CudaMismatch => return cuda_mismatch(quote),
            Said::MissingLibrary { library } => {
                return missing_library(evidence, code, library, quote);
            }
            Said::UnfitLibrary => return unfit_library(evidence, code, quote),
            // A program continues without locked memory, unless its final message says otherwise.
            Said::Lock | Said::Assertion => {}
        }
    }
    let child = child_killed(evidence);
    let said = last_words(evidence.recent_lines());
    Ruling::certain(
        DeathClass::ExitCode,
        format!(
            "exited with code {code}{}{}",
            child.map_or_else(String::new, |record| format!(
                "; the kernel had killed another process of it for memory, pid {} ({})",
                record.pid, record.comm
            )),
            said.map_or_else(String::new, |line| format!(", saying `{line}`"))
        ),
    )
    .remedy(code_remedy(code, child.is_some(), evidence.recent_lines()))
}

fn code_remedy(code: i32, child_killed: bool, lines: &[String]) -> String {
    if lines
        .iter()
        .any(|line| line.contains("Address already in use") || line.contains("EADDRINUSE"))
    {
        return "its port is in use: pass it `${PORT}`, or stop the other program".to_owned();
    }
    match code {
        _ if child_killed => {
            "give the worker a larger `memory.peak`, or start the server itself rather than a script".to_owned()
        }
        3 => "uvicorn returns 3 if the application did not start; its output says why".to_owned(),
        126 => "a shell returns 126 for a program that it may not execute".to_owned(),
        127 => "a shell returns 127 for a program that it does not find".to_owned(),
        129..=192 => format!(
            "a shell or launcher returns {code} when its child ended by {}; start the program itself (`exec`) to see how \
             it ended. It does not prove that memory ran out",
            signal_name(code - 128)
        ),
        _ if lines.is_empty() => {
            "it wrote nothing before its end: run its command line by hand, see `cotenant check`".to_owned()
        }
        _ => "its output says why".to_owned(),
    }
}

fn allocation(evidence: &Evidence, quote: &Quote, how: &str) -> Ruling {
    let allocator = match quote.said {
        Said::Allocation(allocator) => allocator,
        _ => Allocator::Host,
    };
    let size = asked_for(&quote.line).map_or_else(String::new, |size| format!(" of {size}"));
    let limits = [ADDRESS_SPACE, DATA];
    let limit = limits
        .iter()
        .filter_map(|&name| Some((name, Bytes::new(evidence.found.limits.of(name)?))))
        .min_by_key(|(_, limit)| *limit);
    if allocator == Allocator::Host
        && let Some((name, limit)) = limit
    {
        let refused = format!(
            "{how}: an allocation{size} was refused by its own limit `{name}` of {limit} (`{}`)",
            quote.line
        );
        let remedy =
            format!("raise or remove the limit `{name}`; it counts address space, not memory");
        // Output alone must not disable a worker: unless the kernel counted nearly as much, another start may succeed.
        return if evidence.had_come_near(limit) {
            Ruling::likely(DeathClass::RlimitMemory, refused)
                .remedy(remedy)
                .lasting()
        } else {
            Ruling::new(DeathClass::RlimitMemory, Confidence::Low, refused).remedy(remedy)
        };
    }
    let free = match evidence.available {
        Some(available) => format!("with {available} available"),
        None => "while the machine's memory was not known".to_owned(),
    };
    let by = match allocator {
        Allocator::NvMap => "the GPU's allocator refused an allocation",
        Allocator::Cuda => "CUDA refused an allocation",
        Allocator::Host => "an allocation was refused",
    };
    Ruling::new(
        DeathClass::AllocationFailed,
        // nvmap leaves no trace in the kernel's log, so these lines are the only evidence.
        if allocator == Allocator::Host { Confidence::Likely } else { Confidence::Low },
        format!("{how}: {by}{size} {free}; the kernel killed no process for it (`{}`)", quote.line),
    )
    .remedy(match (allocator, evidence.found.l4t_fault) {
        (Allocator::Host, _) if evidence.found.strict_overcommit => {
            "vm.overcommit_memory is 2, which limits reservations: set it to 0, or reserve less at once"
                .to_owned()
        }
        (Allocator::Host, _) => {
            "it requested more at once than was free, or its allocator is faulty: see its output".to_owned()
        }
        (Allocator::Cuda | Allocator::NvMap, Some(fault)) => format!("{LARGEST_FIRST}; {fault}"),
        (Allocator::Cuda | Allocator::NvMap, None) => LARGEST_FIRST.to_owned(),
    })
}

/// Based on output only. Libraries try CUDA and continue without it, so the next start may succeed.
fn cuda_mismatch(quote: &Quote) -> Ruling {
    Ruling::likely(
        DeathClass::CudaMismatch,
        format!(
            "could not use CUDA: its runtime and the driver are incompatible (`{}`)",
            quote.line
        ),
    )
    .remedy("use a build for the CUDA version of this driver; `cotenant check` shows both")
}

/// Returns whether the dynamic loader ended the process, so that the next start would end alike. Any other exit is the
/// program's own: it ran, and a library that it tried to load may have been optional. The loader fails before the
/// program's first instruction, so the program was never ready, the loader's message is the last line, and little CPU
/// time was used.
fn loader_refused(evidence: &Evidence, code: i32, quote: &Quote) -> bool {
    let is_last = evidence
        .recent_lines()
        .last()
        .is_some_and(|line| shortened(line) == quote.line);
    if evidence.was_ready
        || !is_last
        || evidence
            .found
            .cpu_time
            .is_some_and(|time| time > LOADER_TIME_MAX)
    {
        return false;
    }
    let Some((program, message)) = quote.line.split_once(": ") else {
        return false;
    };
    match code {
        LOADER_EXIT => LOADER
            .iter()
            .any(|(start, rest)| message.starts_with(start) && message.contains(rest)),
        // If a version is missing, glibc returns 1 instead of 127, and names the program before and after it.
        1 => message
            .rsplit_once(" not found (required by ")
            .is_some_and(|(_, by)| by.trim_end() == format!("{program})")),
        _ => false,
    }
}

fn unfit_library(evidence: &Evidence, code: i32, quote: &Quote) -> Ruling {
    let ruling = |confidence| {
        Ruling::new(
            DeathClass::MissingLibrary,
            confidence,
            format!("exited with code {code}: a shared library is incompatible (`{}`)", quote.line),
        )
        .remedy("install the version that it was built with; `cotenant check` shows which file is found")
    };
    if loader_refused(evidence, code, quote) {
        ruling(Confidence::Likely).lasting()
    } else {
        ruling(Confidence::Low)
    }
}

fn missing_library(evidence: &Evidence, code: i32, library: &str, quote: &Quote) -> Ruling {
    if !loader_refused(evidence, code, quote) {
        return Ruling::new(
            DeathClass::MissingLibrary,
            // It ran without the library until now, so the line may be unrelated to its end.
            if evidence.was_ready {
                Confidence::Low
            } else {
                Confidence::Likely
            },
            format!("exited with code {code}, saying `{}`", quote.line),
        )
        .remedy(format!(
            "install `{library}` if it is needed; see its output"
        ));
    }
    let is_cuda = CUDA_LIBRARIES.iter().any(|stem| library.starts_with(stem));
    if is_cuda && !evidence.found.other_versions.is_empty() {
        return Ruling::certain(
            DeathClass::CudaMismatch,
            format!(
                "was built for another CUDA: it needs `{library}`, and this machine has {}",
                evidence.found.other_versions.join(", ")
            ),
        )
        .remedy("use a build for the CUDA version of this machine, or install that of the build")
        .lasting();
    }
    Ruling::certain(
        DeathClass::MissingLibrary,
        format!("could not start: the shared library `{library}` is missing (`{}`)", quote.line),
    )
    .remedy(format!(
        "install the package with `{library}`, or set LD_LIBRARY_PATH in the worker's `env`; `cotenant check` finds all that are missing"
    ))
    .lasting()
}

/// Returns a record of a kill for memory of another process in its group.
fn child_killed(evidence: &Evidence) -> Option<&KernelRecord> {
    let own = evidence.group()?.path.as_str();
    evidence
        .found
        .log
        .records
        .iter()
        .rev()
        .find(|record| match &record.kind {
            RecordKind::Oom {
                task_group: Some(group),
                ..
            } => {
                own != "/"
                    && group.ends_with(own)
                    && !(evidence.found.pid_is_global && record.pid == evidence.pid)
            }
            _ => false,
        })
}

fn own_record<'a>(evidence: &'a Evidence, kind: &RecordKind) -> Option<&'a KernelRecord> {
    let records = || {
        evidence
            .found
            .log
            .records
            .iter()
            .rev()
            .filter(|record| record.kind == *kind)
    };
    if !evidence.found.pid_is_global {
        return None;
    }
    records()
        .find(|record| record.pid == evidence.pid)
        // Fault records name the thread, whose id may differ.
        .or_else(|| {
            records().find(|record| {
                cut(&record.comm) == cut(&evidence.found.comm) && !evidence.found.comm.is_empty()
            })
        })
}

fn log_findings(evidence: &Evidence) -> Vec<Finding> {
    let mut findings = Vec::new();
    for record in &evidence.found.log.records {
        let about = match record.kind {
            RecordKind::Oom { .. } => names(evidence, record),
            RecordKind::Fault | RecordKind::Seccomp => {
                own_record(evidence, &record.kind).is_some_and(|own| own == record)
            }
        };
        let child = child_killed(evidence).is_some_and(|child| child == record);
        if about || child {
            let note = if about { "" } else { "another process of it: " };
            findings.push(Finding::new("kernel log", format!("{note}{}", record.text)));
        }
    }
    if let Some(reason) = &evidence.found.log.unreadable {
        findings.push(Finding::new("kernel log", format!("unreadable: {reason}")));
    } else if findings.is_empty() {
        let gap = if evidence.found.log.incomplete {
            ", with a gap"
        } else {
            ""
        };
        findings.push(Finding::new(
            "kernel log",
            format!("read{gap}: no record names this process"),
        ));
    }
    if !evidence.found.pid_is_global {
        findings.push(Finding::new(
            "kernel log",
            "its numbers are those of another process namespace: matched by name and group only",
        ));
    }
    findings
}

fn counter_findings(evidence: &Evidence) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(group) = evidence.group() {
        let kills = evidence.group_kills().map_or_else(
            || "kills unknown".to_owned(),
            |kills| format!("{kills} killed for memory meanwhile"),
        );
        let hits = evidence
            .found
            .after
            .group
            .as_ref()
            .and_then(|group| group.hits)
            .map_or_else(String::new, |hits| {
                format!(", limit reached {hits} times in all")
            });
        let limit = group.limit.map_or_else(
            || ", no limit".to_owned(),
            |limit| format!(", limit {limit}"),
        );
        findings.push(Finding::new(
            "counters",
            format!("group `{}`: {kills}{hits}{limit}", group.path),
        ));
    }
    findings.push(Finding::new(
        "counters",
        match evidence.machine_kills() {
            Some(kills) => format!("machine: {kills} killed for memory meanwhile"),
            None => "machine: `oom_kill` of /proc/vmstat is not readable".to_owned(),
        },
    ));
    findings
}

fn status_in_words(status: ExitStatus) -> String {
    match status {
        ExitStatus::Code(code) => format!("exited with code {code}"),
        ExitStatus::Signal {
            signal,
            core_dumped,
        } => format!(
            "killed by signal {signal} ({}){}",
            signal_name(signal),
            if core_dumped { ", core dumped" } else { "" }
        ),
        ExitStatus::Unknown => "not readable".to_owned(),
    }
}

fn asked_in_words(asked: &Asked) -> String {
    let what = match asked.intent {
        Intent::Stop => "the supervisor asked it to stop",
        Intent::NotReady => "the supervisor stopped it as not ready",
        Intent::Hung => "the supervisor killed it as hung",
        Intent::Abandoned => "the supervisor released it",
    };
    let why = if asked.why.is_empty() {
        String::new()
    } else {
        format!(": {}", asked.why)
    };
    format!("{what}{why}")
}

fn core(evidence: &Evidence) -> &'static str {
    match evidence.status {
        ExitStatus::Signal {
            core_dumped: true, ..
        } => ", core dumped",
        _ => "",
    }
}

/// Returns the line most likely to explain the end of a program: the last one that mentions an error, else the last
/// one.
fn last_words(lines: &[String]) -> Option<String> {
    let error = lines
        .iter()
        .rev()
        .find(|line| line.to_lowercase().contains("error"));
    let line = error.or(lines.last())?.trim();
    (!line.is_empty()).then(|| line.chars().take(LAST_WORDS_MAX).collect())
}

/// Libraries with CUDA's major version, or built for one.
const CUDA_LIBRARIES: [&str; 8] = [
    "libcudart.so",
    "libcublas.so",
    "libcublasLt.so",
    "libcudnn.so",
    "libcufft.so",
    "libcurand.so",
    "libnvrtc.so",
    "libnvinfer.so",
];

/// Remedy when the GPU's allocator refuses.
const LARGEST_FIRST: &str =
    "start the largest first and let smaller ones follow, or allocate in smaller pieces";

/// Length of a worker's last words in its sentence; the log has them in full.
const LAST_WORDS_MAX: usize = 160;

const QUOTES_SHOWN: usize = 4;

/// The kernel samples processor time per tick, and it is read in whole clock ticks.
const CPU_SLACK_S: f64 = 0.1;

/// Most processor time of a program ended by the loader, including a script that started it (our choice).
const LOADER_TIME_MAX: Duration = Duration::from_secs(5);

/// Exit code of the dynamic loader if a library is missing (glibc), and of shells if no program is found.
const LOADER_EXIT: i32 = 127;

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
