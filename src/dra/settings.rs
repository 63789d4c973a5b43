//! Arguments and environment.

use std::{path::PathBuf, time::Duration};

use clap::Parser;

use super::{claim, quantity};
use cotenant_rpc::{Endpoint, v1::LeaseClass};
use cotenant_units::Bytes;

/// Publishes the memory pool of cotenant on this node as a resource of Kubernetes, by dynamic resource allocation.
#[derive(Debug, Parser)]
#[command(name = "cotenant-dra", version)]
pub(crate) struct Settings {
    /// Name of this node in Kubernetes.
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub(crate) node_name: String,
    /// Path socket of the supervisor, `unix:///path`.
    #[arg(long, env = "COTENANT_ENDPOINT", default_value = "unix:///run/cotenant/cotenant.sock", value_parser = socket)]
    pub(crate) endpoint: Endpoint,
    /// Address and credentials of the API server; without it, those of the pod in which this process runs.
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Name of the driver, a DNS name.
    #[arg(long, default_value = "memory.cotenant.dev", value_parser = driver_name)]
    pub(crate) driver: String,
    /// Class for which the pool is published, and class of claims that name none: audio-realtime, interactive,
    /// llm-elastic or batch.
    #[arg(long, default_value = "interactive", value_parser = class)]
    pub(crate) class: LeaseClass,
    /// Memory that programs outside of Kubernetes may take between the placement of a pod and its preparation; it is
    /// not published.
    #[arg(long, default_value = "0", value_name = "BYTES", value_parser = bytes)]
    pub(crate) margin: Bytes,
    /// Evict pods with claims while memory pressure is Critical.
    #[arg(long)]
    pub(crate) evict_at_critical: bool,
    /// Mount the supervisor's socket into containers with claims. A container that runs as root is then an operator.
    #[arg(long)]
    pub(crate) share_socket: bool,
    /// Longest wait for the memory of a claim, in seconds; kubelet waits 45 s.
    #[arg(long, default_value = "25", value_name = "SECONDS", value_parser = seconds)]
    pub(crate) wait: Duration,
    /// Folder of kubelet.
    #[arg(long, default_value = "/var/lib/kubelet", value_name = "DIR")]
    pub(crate) kubelet_dir: PathBuf,
    /// Folder of CDI files.
    #[arg(long, default_value = "/var/run/cdi", value_name = "DIR")]
    pub(crate) cdi_dir: PathBuf,
    /// Folder of the FIFOs that notify pods; the same path on the host.
    #[arg(long, default_value = "/run/cotenant-dra", value_name = "DIR")]
    pub(crate) run_dir: PathBuf,
    /// Folder of the host's control groups with the memory controller; without it, the one that this process sees.
    #[arg(long, value_name = "DIR")]
    pub(crate) cgroup_root: Option<PathBuf>,
    /// Uid of the pod in which this process runs, so that two of them can be registered during an update.
    #[arg(long, env = "POD_UID", value_name = "UID")]
    pub(crate) pod_uid: Option<String>,
    /// Filter of the log.
    #[arg(long, env = "COTENANT_LOG", default_value = "info")]
    pub(crate) log: String,
}

fn socket(text: &str) -> Result<Endpoint, String> {
    match text.parse() {
        Ok(Endpoint::Path(path)) if path.is_absolute() => Ok(Endpoint::Path(path)),
        Ok(_) => Err(format!(
            "`{text}` is not a path socket, and only through one are leases of control groups created: write \
             `unix:///run/cotenant/cotenant.sock`"
        )),
        Err(error) => Err(error.to_string()),
    }
}

fn class(text: &str) -> Result<LeaseClass, String> {
    claim::class_named(text).ok_or_else(|| {
        format!("`{text}` is none of audio-realtime, interactive, llm-elastic, batch")
    })
}

fn bytes(text: &str) -> Result<Bytes, String> {
    let bytes = quantity::parse(text).map(Bytes::new);
    bytes.ok_or_else(|| format!("`{text}` is not a quantity of bytes: write `256Mi`"))
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| *seconds <= WAIT_MAX);
    let seconds = seconds.map(Duration::from_secs);
    seconds.ok_or_else(|| format!("`{text}` is not a number of seconds from 0 to {WAIT_MAX}"))
}

fn driver_name(text: &str) -> Result<String, String> {
    let is_part = |part: &str| {
        !part.is_empty()
            && part
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
            && !part.starts_with('-')
            && !part.ends_with('-')
    };
    if text.len() <= DRIVER_MAX && text.split('.').all(is_part) {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "`{text}` is not a DNS name of at most {DRIVER_MAX} lower-case characters"
        ))
    }
}

/// Longest wait: kubelet gives up after 45 s.
const WAIT_MAX: u64 = 40;

/// Longest name of a driver in the API.
const DRIVER_MAX: usize = 63;

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn settings_are_checked_at_the_start() {
        Settings::command().debug_assert();
        let parse = |more: &[&str]| {
            let arguments = ["cotenant-dra", "--node-name", "n"].into_iter();
            let parsed = Settings::try_parse_from(arguments.chain(more.iter().copied()));
            parsed.map_err(|error| error.to_string())
        };
        assert_eq!(
            parse(&["--margin", "256Mi"]).unwrap().margin,
            Bytes::from_mib(256)
        );
        for (arguments, words) in [
            (["--endpoint", "@cotenant"], "is not a path socket"),
            (["--class", "urgent"], "is none of"),
            (["--margin", "many"], "not a quantity"),
            (["--wait", "41"], "from 0 to 40"),
            (["--driver", "A_b"], "not a DNS name"),
        ] {
            let error = parse(&arguments).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
