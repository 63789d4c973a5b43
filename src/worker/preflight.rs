//! Checks of a worker before its start.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{
    autopsy::{find_program, interpreter, library_folders, other_versions, unfit},
    launch::own_program,
    ports,
};
use cotenant_config::{Listen, WorkerConfig};
use cotenant_units::Bytes;

/// Finding of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The worker; `None` for a finding about the machine.
    pub worker: Option<String>,
    /// Stable name of its rule: `missing_library`.
    pub rule: &'static str,
    /// Whether the worker cannot start, or may have trouble.
    pub severity: Severity,
    /// The finding, with figures.
    pub text: String,
    /// Remedy.
    pub remedy: String,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// It starts, but may have trouble.
    Warning,
    /// It cannot start.
    Fault,
}

impl Severity {
    /// Returns its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Warning => "warning",
            Self::Fault => "fault",
        }
    }
}

/// Facts about a worker's program before the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ProgramFacts {
    found: Option<String>,
    executable: bool,
    unfit: Option<String>,
    interpreter: Option<(String, bool)>,
    /// Libraries missing for the dynamic linker, each with files of other versions.
    missing: Vec<(String, Vec<String>)>,
    port_owner: Option<(u16, String)>,
}

/// Facts about the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineFacts {
    /// Whether CPU and GPU share memory.
    pub unified: bool,
    /// Limit on locked memory of a process; `None` is no limit.
    pub lock_limit: Option<Bytes>,
    /// Reason why workers cannot have control groups.
    pub no_groups: Option<String>,
    /// Processes that have `/dev/nvmap` open.
    pub nvmap_holders: Vec<String>,
}

/// Checks every worker and the machine.
pub fn preflight(workers: &[WorkerConfig], machine: &MachineFacts) -> Vec<Found> {
    let mut found: Vec<Found> = workers
        .iter()
        .flat_map(|worker| {
            let mut found = judge_program(&worker.name, &worker.argv, &program_facts(worker));
            found.extend(judge_arguments(
                &worker.name,
                &worker.argv,
                worker.memory.peak,
                machine,
            ));
            found
        })
        .collect();
    found.extend(judge_machine(machine));
    found
}

fn fault(worker: &str, rule: &'static str, text: String, remedy: impl Into<String>) -> Found {
    Found {
        worker: Some(worker.to_owned()),
        rule,
        severity: Severity::Fault,
        text,
        remedy: remedy.into(),
    }
}

fn warning(
    worker: Option<&str>,
    rule: &'static str,
    text: String,
    remedy: impl Into<String>,
) -> Found {
    Found {
        worker: worker.map(str::to_owned),
        rule,
        severity: Severity::Warning,
        text,
        remedy: remedy.into(),
    }
}

fn judge_program(worker: &str, argv: &[String], facts: &ProgramFacts) -> Vec<Found> {
    let program = argv.first().map_or("", String::as_str);
    let mut found = Vec::new();
    if let Some((port, owner)) = &facts.port_owner {
        // It may be our own worker, of a running supervisor.
        found.push(warning(
            Some(worker),
            "port_taken",
            format!("port {port} of 127.0.0.1 is taken by {owner}"),
            "stop that one, or write `port: auto`, unless it is this worker",
        ));
    }
    let Some(path) = &facts.found else {
        found.push(fault(
            worker,
            "program_missing",
            format!("the program `{program}` does not exist"),
            "install it, or correct `argv`; a name without `/` is looked up in PATH",
        ));
        return found;
    };
    if !facts.executable {
        found.push(fault(
            worker,
            "program_not_executable",
            format!("`{path}` may not be executed"),
            format!("chmod +x {path}"),
        ));
    }
    if let Some(unfit) = &facts.unfit {
        found.push(fault(
            worker,
            "program_unfit",
            unfit.clone(),
            "use a program built for this machine, or a script whose first line names its interpreter",
        ));
    }
    if let Some((interpreter, false)) = &facts.interpreter {
        found.push(fault(
            worker,
            "interpreter_missing",
            format!("`{path}` needs `{interpreter}`, which is missing"),
            format!("install `{interpreter}`, or correct the first line of the script"),
        ));
    }
    for (library, others) in &facts.missing {
        found.push(if others.is_empty() {
            fault(
                worker,
                "library_missing",
                format!("`{path}` needs the shared library `{library}`, which is not found"),
                format!(
                    "install the package with `{library}`, or set LD_LIBRARY_PATH in the worker's `env`"
                ),
            )
        } else {
            fault(
                worker,
                "library_of_another_version",
                format!(
                    "`{path}` needs `{library}`, and this machine has {}",
                    others.join(", ")
                ),
                "use a build for the version of this machine, or install that of the build",
            )
        });
    }
    found
}

/// Checks flags of common worker programs for their effect on a machine with unified memory.
fn judge_arguments(
    worker: &str,
    argv: &[String],
    peak: Bytes,
    machine: &MachineFacts,
) -> Vec<Found> {
    let has = |flag: &str| {
        argv.iter()
            .any(|word| word == flag || word.starts_with(&format!("{flag}=")))
    };
    let value = |flag: &str| {
        let at = argv.iter().position(|word| word == flag).map(|at| at + 1);
        let next = at.and_then(|at| argv.get(at)).map(String::as_str);
        next.or_else(|| {
            argv.iter()
                .find_map(|word| word.strip_prefix(flag)?.strip_prefix('='))
        })
    };
    let program = argv
        .first()
        .and_then(|program| program.rsplit('/').next())
        .unwrap_or_default();
    let who = Some(worker);
    let mut found = Vec::new();
    if program == "llama-server" {
        let cache = value("--cache-ram")
            .or_else(|| value("-cram"))
            .and_then(|mib| mib.parse::<i64>().ok());
        let cache = match cache {
            None => Some(LLAMA_CACHE),
            Some(mib) => u64::try_from(mib).ok().map(Bytes::from_mib),
        };
        if cache.is_none_or(|cache| cache > peak) {
            let size = cache.map_or_else(|| "no bound".to_owned(), |cache| cache.to_string());
            found.push(warning(
                who,
                "prompt_cache_above_peak",
                format!("its prompt cache may grow to {size}, and its `memory.peak` is {peak}"),
                "give `--cache-ram` a size that its peak covers, or 0",
            ));
        }
    }
    if has("--mlock")
        && let Some(limit) = machine.lock_limit
        && limit < peak
    {
        found.push(warning(
            who,
            "memlock_below_peak",
            format!(
                "it wants to lock its memory and may lock {limit}, with a `memory.peak` of {peak}"
            ),
            "raise `LimitMEMLOCK` of the unit, or omit `--mlock`",
        ));
    }
    if !machine.unified {
        return found;
    }
    if has("--gpu-memory-utilization") || has("--gpu_memory_utilization") {
        found.push(warning(
            who,
            "gpu_share_of_one_memory",
            "`--gpu-memory-utilization` is a share of all memory here, that of other programs included".to_owned(),
            "give it an absolute size of its KV cache instead",
        ));
    }
    let no_layers = ["-ngl", "--n-gpu-layers", "--gpu-layers"]
        .into_iter()
        .any(|flag| value(flag) == Some("0"));
    let offload = [
        "--cpu-offload-gb",
        "--n-cpu-moe",
        "-ncmoe",
        "--cpu-moe",
        "--no-kv-offload",
        "-nkvo",
    ]
    .into_iter()
    .find(|flag| has(flag));
    if let Some(flag) = offload.or(no_layers.then_some("--n-gpu-layers 0")) {
        found.push(warning(
            who,
            "offload_saves_nothing",
            format!(
                "`{flag}` moves memory from the GPU to the CPU, which share it on this machine"
            ),
            "omit it; use a smaller model, a smaller context or fewer layers in memory",
        ));
    }
    found
}

fn judge_machine(machine: &MachineFacts) -> Vec<Found> {
    let mut found = Vec::new();
    for holder in &machine.nvmap_holders {
        found.push(warning(
            None,
            "nvmap_holder",
            format!("{holder} holds /dev/nvmap: its GPU memory is not in the ledger"),
            "end it if an earlier run left it, or count it in `budget.reserve`",
        ));
    }
    if let Some(reason) = &machine.no_groups {
        found.push(warning(
            None,
            "no_control_groups",
            format!(
                "workers have no control groups, and their memory limits are not in force: {reason}"
            ),
            "run as a unit with `Delegate=memory`",
        ));
    }
    found
}

fn program_facts(worker: &WorkerConfig) -> ProgramFacts {
    let program = worker.argv.first().map_or("", String::as_str);
    let program = match (program, own_program()) {
        ("${SELF}", Some(own)) => own,
        (program, _) => program.to_owned(),
    };
    let found = find_program(&program, &worker.env);
    let mut facts = ProgramFacts {
        port_owner: match worker.listen {
            Listen::Port(port) => ports::listener(port).map(|owner| (port, owner)),
            _ => None,
        },
        ..ProgramFacts::default()
    };
    let Some(path) = found else { return facts };
    facts.executable = fs::metadata(&path)
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
    facts.unfit = unfit(&path);
    facts.interpreter = interpreter(&path).map(|interpreter| {
        let there = Path::new(&interpreter).exists();
        (interpreter, there)
    });
    let is_elf = fs::read(&path).is_ok_and(|bytes| bytes.starts_with(b"\x7fELF"));
    if let (true, None, Some((linker, true))) = (is_elf, &facts.unfit, &facts.interpreter) {
        facts.missing = missing_libraries(linker, &path, &worker.env)
            .into_iter()
            .map(|library| {
                let others = other_versions(&library, &library_folders(&worker.env));
                (library, others)
            })
            .collect();
    }
    facts.found = Some(path.to_string_lossy().into_owned());
    facts
}

/// Returns libraries needed by a program, directly or indirectly, that its dynamic linker does not find. Runs the
/// linker itself, since it has its own search order; it maps the program without executing it.
fn missing_libraries(linker: &str, program: &Path, env: &BTreeMap<String, String>) -> Vec<String> {
    let child = Command::new(linker)
        .arg("--list")
        .arg(program)
        .envs(env)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut child) = child else {
        return Vec::new();
    };
    let deadline = Instant::now() + LINKER_TIME;
    // Its list is far smaller than the pipe, so it can end before the list is read.
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() >= deadline {
            let _ = child.kill();
            break;
        }
        thread::sleep(LINKER_PAUSE);
    }
    let Ok(output) = child.wait_with_output() else {
        return Vec::new();
    };
    not_found(&String::from_utf8_lossy(&output.stdout))
}

/// Parses lines such as `libgone.so.3 => not found`.
fn not_found(list: &str) -> Vec<String> {
    list.lines()
        .filter_map(|line| Some(line.trim().strip_suffix("=> not found")?.trim().to_owned()))
        .collect()
}

/// Default of llama-server's `--cache-ram`, MiB.
const LLAMA_CACHE: Bytes = Bytes::from_mib(8192);

/// Time limit for the dynamic linker, which is slow on a cold SD card.
const LINKER_TIME: Duration = Duration::from_secs(5);

const LINKER_PAUSE: Duration = Duration::from_millis(2);

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn rules(found: &[Found]) -> Vec<&'static str> {
        found.iter().map(|found| found.rule).collect()
    }

    fn orin() -> MachineFacts {
        MachineFacts {
            unified: true,
            lock_limit: Some(Bytes::from_mib(1957)),
            no_groups: Some("`/sys/fs/cgroup/a` cannot be changed".to_owned()),
            nvmap_holders: vec!["python3 (pid 7)".to_owned()],
        }
    }

    #[test]
    fn what_is_wrong_with_a_program_is_reported() {
        let fine = ProgramFacts {
            found: Some("/opt/asr".to_owned()),
            executable: true,
            ..ProgramFacts::default()
        };
        let judge = |change: &dyn Fn(&mut ProgramFacts)| {
            let mut facts = fine.clone();
            change(&mut facts);
            let found = judge_program("asr", &words("/opt/asr --x"), &facts);
            let fault =
                |found: &Found| (found.severity == Severity::Fault) != (found.rule == "port_taken");
            assert!(found.iter().all(fault));
            rules(&found)
        };
        assert!(judge(&|_| {}).is_empty());
        assert_eq!(judge(&|facts| facts.found = None), ["program_missing"]);
        assert_eq!(
            judge(&|facts| facts.executable = false),
            ["program_not_executable"]
        );
        assert_eq!(
            judge(&|facts| facts.unfit = Some("built for RISC-V".to_owned())),
            ["program_unfit"]
        );
        assert_eq!(
            judge(&|facts| facts.interpreter = Some(("/nowhere/python3".to_owned(), false))),
            ["interpreter_missing"]
        );
        assert_eq!(
            judge(&|facts| facts.missing = vec![("libvosk.so.1".to_owned(), vec![])]),
            ["library_missing"]
        );
        assert_eq!(
            judge(&|facts| facts.missing = vec![(
                "libcudart.so.12".to_owned(),
                vec!["libcudart.so.11.0".to_owned()]
            )]),
            ["library_of_another_version"]
        );
        assert_eq!(
            judge(&|facts| facts.port_owner = Some((10_300, "x (pid 1)".to_owned()))),
            ["port_taken"]
        );
    }

    #[test]
    fn flags_that_do_not_do_what_they_say_here_are_reported() {
        let peak = Bytes::from_gib(6);
        for (line, expected) in [
            (
                "/usr/bin/llama-server -m x",
                vec!["prompt_cache_above_peak"],
            ),
            (
                "llama-server --cache-ram -1",
                vec!["prompt_cache_above_peak"],
            ),
            ("llama-server --cache-ram 512", vec![]),
            (
                "llama-server --cache-ram=0 --mlock",
                vec!["memlock_below_peak"],
            ),
            (
                "vllm serve --gpu-memory-utilization 0.9",
                vec!["gpu_share_of_one_memory"],
            ),
            (
                "vllm serve --cpu-offload-gb=4",
                vec!["offload_saves_nothing"],
            ),
            (
                "llama-server -ngl 0 --cache-ram 0",
                vec!["offload_saves_nothing"],
            ),
            ("llama-server -ngl 99 --cache-ram 0", vec![]),
        ] {
            assert_eq!(
                rules(&judge_arguments("llm", &words(line), peak, &orin())),
                expected,
                "{line}"
            );
        }
        let two_memories = MachineFacts::default();
        assert!(
            judge_arguments(
                "llm",
                &words("vllm --cpu-offload-gb 4"),
                peak,
                &two_memories
            )
            .is_empty()
        );
    }

    #[test]
    fn a_machine_that_works_against_us_is_reported() {
        assert_eq!(
            rules(&judge_machine(&orin())),
            ["nvmap_holder", "no_control_groups"]
        );
        assert!(judge_machine(&MachineFacts::default()).is_empty());
    }

    #[test]
    fn the_linker_of_this_machine_finds_what_a_program_of_it_needs() {
        let shell = Path::new("/bin/sh");
        let linker = interpreter(shell).unwrap();
        assert!(missing_libraries(&linker, shell, &BTreeMap::new()).is_empty());
        assert_eq!(
            not_found(
                "\tlinux-vdso.so.1 (0x0)\n\tlibgone.so.3 => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x1)\n"
            ),
            ["libgone.so.3"]
        );
    }
}
