//! Runtime, signals and engine thread shared by the built-in workers.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::mpsc as blocking,
    thread,
};

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};
use tokio_util::sync::CancellationToken;

use super::{
    error::VerbError,
    lifeline::{left_alone, tell_ready},
};
use cotenant_speech::{
    client::Endpoint,
    server::{Server, ServerLimits, Service},
    wyoming::info::{Artifact, Attribution},
};
use cotenant_units::Bytes;

/// Where a worker listens.
#[derive(Clone, Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub struct ListenArgs {
    /// Listen on this Unix socket
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Listen on `unix:///path` or `tcp://host:port`
    #[arg(long, value_name = "URI")]
    uri: Option<Endpoint>,
}

impl ListenArgs {
    pub(super) fn endpoint(&self) -> Endpoint {
        // clap requires one of the two.
        self.uri
            .clone()
            .unwrap_or_else(|| Endpoint::Unix(self.socket.clone().unwrap_or_default()))
    }
}

/// Serves until SIGTERM or SIGINT on one thread, with another for the engine.
///
/// `make` runs after the address is bound, so that of two workers on one socket only one loads a model, and before the
/// first connection is accepted, so that accepted connections are served.
pub(super) fn serve<S: Service>(
    endpoint: &Endpoint,
    make: impl FnOnce() -> Result<S, VerbError>,
) -> Result<(), VerbError> {
    on_one_thread(|stop| async move {
        let server = Server::bind(endpoint, ServerLimits::default())
            .await
            .map_err(|source| VerbError::Listen {
                endpoint: endpoint.clone(),
                source,
            })?;
        let service = make()?;
        tracing::info!(%endpoint, "serving");
        tell_ready();
        server.run(service, stop).await;
        Ok(())
    })
}

/// Runs `work` to its end; its token is cancelled by SIGTERM, SIGINT, or a term without a supervisor.
pub(super) fn on_one_thread<F>(work: impl FnOnce(CancellationToken) -> F) -> Result<(), VerbError>
where
    F: Future<Output = Result<(), VerbError>>,
{
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()
        .map_err(VerbError::Runtime)?;
    runtime.block_on(async {
        let stop = CancellationToken::new();
        let mut terminate = signal(SignalKind::terminate()).map_err(VerbError::Runtime)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(VerbError::Runtime)?;
        let on_signal = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                () = left_alone() => {}
            }
            on_signal.cancel();
        });
        work(stop).await
    })
}

/// Thread that owns an engine and performs one job at a time.
#[derive(Debug)]
pub(super) struct EngineThread<J> {
    jobs: blocking::SyncSender<J>,
}

impl<J> Clone for EngineThread<J> {
    fn clone(&self) -> Self {
        Self {
            jobs: self.jobs.clone(),
        }
    }
}

impl<J: Send + 'static> EngineThread<J> {
    /// Starts the thread, which calls `make` once, and `serve` for each job.
    pub(super) fn start<E, M, F>(make: M, serve: F) -> Result<Self, VerbError>
    where
        M: FnOnce() -> Result<E, VerbError> + Send + 'static,
        F: Fn(&mut E, J) + Send + 'static,
    {
        let (jobs, inbox) = blocking::sync_channel(JOBS_QUEUED);
        let (ready, made) = blocking::sync_channel(1);
        thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || {
                let mut engine = match make() {
                    Ok(engine) => engine,
                    Err(error) => {
                        let _ = ready.send(Err(error));
                        return;
                    }
                };
                let _ = ready.send(Ok(()));
                drop(ready);
                for job in inbox {
                    serve(&mut engine, job);
                }
            })
            .map_err(VerbError::Runtime)?;
        made.recv()
            .map_err(|_| VerbError::Runtime(io::Error::other("the engine's thread ended")))??;
        Ok(Self { jobs })
    }

    /// Sends a job to the engine; `None` if its queue is full, or it is gone.
    pub(super) async fn ask<R>(&self, job: impl FnOnce(oneshot::Sender<R>) -> J) -> Option<R> {
        let (reply, answer) = oneshot::channel();
        self.jobs.try_send(job(reply)).ok()?;
        answer.await.ok()
    }
}

/// Returns an installed artifact for an `info` event.
pub(super) fn artifact(name: &str, description: &str, author: &str, url: &str) -> Artifact {
    Artifact {
        name: name.to_owned(),
        attribution: Attribution {
            name: author.to_owned(),
            url: url.to_owned(),
        },
        installed: true,
        description: Some(description.to_owned()),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
    }
}

/// Returns the resident set size of this process from `/proc/self/status`, if readable.
pub(super) fn own_rss() -> Option<Bytes> {
    let text = fs::read_to_string(Path::new("/proc/self/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(Bytes::from_kib(
        line.trim().strip_suffix("kB")?.trim().parse().ok()?,
    ))
}

/// Keeps large allocations in separate mappings, which return to the kernel when freed.
///
/// By default, glibc raises its threshold to the largest block freed so far, up to 32 MiB. After a switch from the open
/// vocabulary to a grammar, the next language model would be allocated in the heap, where later models prevent its
/// return: 61 MiB instead of 36 MiB remained after the second switch.
pub(super) fn keep_large_blocks_apart() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `mallopt` may be called at any time; this parameter takes a number of bytes.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10);
    }
}

/// Returns freed memory to the kernel; otherwise glibc keeps it for later allocations.
pub(super) fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` may be called at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Queue bound of the engine, first in, first out: one job for each connection that a server allows by default.
const JOBS_QUEUED: usize = 16;
