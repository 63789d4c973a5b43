//! The process: composition of its parts, signals, exit code.

use std::{ffi::OsString, io, process::ExitCode, sync::Arc, time::SystemTime};

use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info};
use tracing_subscriber::EnvFilter;

use super::{
    cdi::CdiFiles,
    claim::Identity,
    driver::{Driver, View},
    groups::Groups,
    kube::Client,
    kubeconfig::{Access, AccessError},
    kubelet::{SocketError, Sockets},
    pool::{Pool, PoolParams},
    publish,
    settings::Settings,
    slice::{Traits, WallClock},
    supervisor::Supervisor,
    upkeep::Upkeep,
};
use cotenant_probe::{ProbeRoot, board::Board};
use cotenant_rpc::Endpoint;
use cotenant_units::causes::in_one_line;

/// Runs until SIGTERM or SIGINT; leases and slice stay. Returns 1 after an error, 2 for unusable arguments.
#[must_use]
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let settings = match Settings::try_parse_from(arguments) {
        Ok(settings) => settings,
        Err(error) => {
            // Closed standard streams are no reason for another code.
            let _written = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let filter = match EnvFilter::try_new(&settings.log) {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!(
                "error: cannot log by the filter `{}`: {error}",
                settings.log
            );
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(false)
        .init();
    // One thread: the driver waits for others most of the time.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let result = runtime
        .map_err(RunError::Runtime)
        .and_then(|runtime| runtime.block_on(run(settings)));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{}", in_one_line(&error));
            ExitCode::FAILURE
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error("cannot start")]
    Runtime(#[source] io::Error),
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(
        "cannot find control groups: no hierarchy with the memory controller is mounted; name its folder by --cgroup-root"
    )]
    NoGroups,
}

async fn run(settings: Settings) -> Result<(), RunError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(RunError::Runtime)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(RunError::Runtime)?;
    let clock = WallClock {
        started: SystemTime::now(),
    };
    let socket = match &settings.endpoint {
        Endpoint::Path(path) if settings.share_socket => Some(path.as_path()),
        _ => None,
    };
    let cdi = CdiFiles::new(
        &settings.cdi_dir,
        &settings.run_dir,
        &settings.driver,
        socket,
    );
    let sockets = Sockets::new(
        &settings.kubelet_dir,
        &settings.driver,
        settings.pod_uid.as_deref(),
    )?;
    let kube = Client::new(Access::find(settings.kubeconfig.as_deref())?);
    let groups = Groups::open(settings.cgroup_root.as_deref()).ok_or(RunError::NoGroups)?;
    let board = Board::read(&ProbeRoot::default());
    let traits = Traits {
        board: board.model,
        l4t: board.l4t.map(|release| release.to_string()),
        ..Traits::default()
    };
    let pool = Pool::new(PoolParams {
        margin: settings.margin,
        evict: settings.evict_at_critical,
    });
    let own = Identity {
        driver: settings.driver,
        node: settings.node_name,
        class: settings.class,
    };
    let supervisor = Supervisor::new(settings.endpoint, settings.wait);
    let view = View::new(pool, traits);
    let driver = Arc::new(Driver::new(own, kube, supervisor, (cdi, groups), view));
    info!(node = %driver.own.node, driver = %driver.own.driver, "cotenant-dra starts");
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    tokio::select! {
        served = sockets.serve(Arc::clone(&driver), stop) => Ok(served?),
        () = Upkeep::new(Arc::clone(&driver)).run() => Ok(()),
        () = publish::run(Arc::clone(&driver), clock) => Ok(()),
        () = publish::watch(Arc::clone(&driver)) => Ok(()),
    }
}
