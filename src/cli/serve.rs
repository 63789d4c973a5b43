//! `cotenant serve`: the daemon in the foreground.

use std::{
    error::Error,
    io::{self, IsTerminal as _},
    process::ExitCode,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use nix::sys::stat::{self, Mode};

use super::{config_file::ConfigFile, exit};
use cotenant_config::{self as config, Config};
use cotenant_daemon::{self as daemon, ControlThread};
use cotenant_memory::{emergency, heap};
use cotenant_telemetry as telemetry;
use cotenant_threads as threads;

/// Settings of the daemon that are not in its file.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    #[command(flatten)]
    config: ConfigFile,
}

/// Threads of the runtime for HTTP, speech, sampling and workers' pipes; the loop with gRPC, and the engine, have their
/// own.
const RUNTIME_THREADS_MAX: usize = 3;

/// Threads of the daemon besides runtime and compute threads: the loop, the watchdog, journal and log, the engine with
/// its readers, the starter of workers, and some that wait for disks.
const THREADS_BESIDE: usize = 12;

/// Longest wait for threads that are blocked in the system when the daemon ends.
const SHUTDOWN_MAX: Duration = Duration::from_secs(1);

/// Runs the daemon until a signal ends it.
pub(super) fn run(args: &ServeArgs) -> ExitCode {
    heap::return_early();
    // Files created here or by workers must not be writable by other users, regardless of the inherited umask.
    let umask = Mode::S_IWGRP | Mode::S_IWOTH;
    stat::umask(stat::umask(umask) | umask);
    // SAFETY: no descriptor has been opened yet, and no thread started.
    let sockets = unsafe { daemon::PassedSockets::take() };
    let file = args.config.path();
    let config = match config::load(&file) {
        Ok(config) => config,
        Err(error) => {
            explain_load_error(&error);
            return ExitCode::from(exit::CONFIG);
        }
    };
    let threads = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(RUNTIME_THREADS_MAX);
    let wanted = threads + THREADS_BESIDE + config.llm.as_ref().map_or(0, daemon::threads);
    if let Err(source) = enough_threads(wanted) {
        let error = daemon::RunError::Threads { wanted, source };
        explain(&error, error.hint().as_deref());
        return ExitCode::FAILURE;
    }
    let (guard, log) = match telemetry::init(&config.log.filter, log_format(&config)) {
        Ok(logging) => logging,
        Err(error) => {
            explain(&error, None);
            return ExitCode::FAILURE;
        }
    };
    let started = AtomicUsize::new(0);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .on_thread_start(move || {
            // Threads that wait for disks start later, and are not awaited.
            if started.fetch_add(1, Ordering::Relaxed) < threads {
                emergency::lock_stack();
                if let Err(error) = emergency::be_prompt() {
                    tracing::debug!(%error, "answers may wait for other threads on the same processor");
                }
            }
        })
        .build();
    let started = runtime.and_then(|runtime| {
        threads::start()?;
        Ok((runtime, ControlThread::start()?))
    });
    let result = match started {
        Ok((runtime, control)) => {
            let source = daemon::Source { file, log, sockets };
            let running = daemon::run(config, source, guard.dropped(), control.handle().clone());
            let result = runtime.block_on(running);
            // A thread that reads a model or walks /proc on a stuck disk must not delay the exit.
            control.end(SHUTDOWN_MAX);
            runtime.shutdown_timeout(SHUTDOWN_MAX);
            result
        }
        Err(source) => Err(daemon::RunError::System {
            what: "the runtime",
            source,
        }),
    };
    drop(guard);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            explain(&error, error.hint().as_deref());
            match error {
                daemon::RunError::Private(_)
                | daemon::RunError::Settings(_)
                | daemon::RunError::Params(_) => ExitCode::from(exit::CONFIG),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Checks that this many threads are available at once: the runtime panics if the system refuses one.
fn enough_threads(wanted: usize) -> io::Result<()> {
    let gate = Arc::new(Mutex::new(()));
    let closed = gate.lock();
    let threads: Vec<_> = (0..wanted)
        .map(|_| {
            let gate = Arc::clone(&gate);
            thread::Builder::new()
                .stack_size(PROBE_STACK)
                .spawn(move || drop(gate.lock()))
        })
        .collect();
    drop(closed);
    threads.into_iter().try_for_each(|thread| {
        // It only waits for the gate.
        let _ = thread?.join();
        Ok(())
    })
}

/// Sufficient for waiting.
const PROBE_STACK: usize = 64 << 10;

/// Prints the reason why a configuration cannot be used, with every fault and every remedy.
fn explain_load_error(error: &config::LoadError) {
    explain(error, None);
    for hint in error.kind().hints() {
        eprintln!("hint: {hint}");
    }
}

pub(super) fn explain(error: &dyn Error, hint: Option<&str>) {
    eprintln!("error: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        eprintln!("  caused by: {error}");
        cause = error.source();
    }
    if let Some(hint) = hint {
        eprintln!("hint: {hint}");
    }
}

fn log_format(config: &Config) -> telemetry::LogFormat {
    match config.log.format {
        config::LogFormat::Json => telemetry::LogFormat::Json,
        config::LogFormat::Auto | config::LogFormat::Text if goes_to_the_journal() => {
            telemetry::LogFormat::Journal
        }
        config::LogFormat::Auto if !io::stderr().is_terminal() => telemetry::LogFormat::Json,
        config::LogFormat::Auto | config::LogFormat::Text => telemetry::LogFormat::Text,
    }
}

/// Returns whether stderr is a stream of systemd's journal: `$JOURNAL_STREAM` contains its device and inode
/// (systemd.exec(5)).
fn goes_to_the_journal() -> bool {
    let Ok(stderr) = stat::fstat(io::stderr()) else {
        return false;
    };
    std::env::var("JOURNAL_STREAM")
        .is_ok_and(|stream| stream == format!("{}:{}", stderr.st_dev, stderr.st_ino))
}
