//! Options of all commands, and calls to the supervisor with them.

use std::{fs, io, path::PathBuf, time::Duration};

use clap::Args;
use tonic::transport::Channel;

use super::{
    exit::{self, CliError},
    output::Output,
    quantity,
};
use cotenant_rpc::{Endpoint, client::Identification};
use cotenant_units::TimeSpan;

/// Options of all commands.
#[derive(Clone, Debug, Args)]
pub struct Global {
    /// Socket of the supervisor, `unix:///path` or `unix-abstract:name`, or `https://host:port` [env: COTENANT_ENDPOINT]
    /// [default: unix:///run/cotenant/cotenant.sock].
    #[arg(long, global = true, value_name = "ADDRESS", help_heading = GLOBAL)]
    endpoint: Option<Endpoint>,
    /// Client certificate for an `https` endpoint, PEM.
    #[arg(long, global = true, value_name = "FILE", requires_all = ["key", "ca"], help_heading = GLOBAL)]
    cert: Option<PathBuf>,
    /// Private key of --cert, PEM.
    #[arg(long, global = true, value_name = "FILE", requires = "cert", help_heading = GLOBAL)]
    key: Option<PathBuf>,
    /// CA that signed the supervisor's certificate, PEM.
    #[arg(long, global = true, value_name = "FILE", requires = "cert", help_heading = GLOBAL)]
    ca: Option<PathBuf>,
    /// Output format.
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table, help_heading = GLOBAL)]
    pub output: Output,
    /// Timeout of a call, such as `5s` or `500ms`; streams have none.
    #[arg(
        long,
        global = true,
        default_value = "5s",
        value_name = "DURATION",
        value_parser = quantity::duration,
        help_heading = GLOBAL
    )]
    pub timeout: Duration,
}

const GLOBAL: &str = "Global options";

impl Global {
    fn endpoint(&self) -> Result<Endpoint, CliError> {
        if let Some(endpoint) = &self.endpoint {
            return Ok(endpoint.clone());
        }
        // With clap's own support, an option from the environment would appear in usage errors.
        let named =
            std::env::var("COTENANT_ENDPOINT").unwrap_or_else(|_| DEFAULT_ENDPOINT.to_owned());
        named.parse().map_err(|error| {
            CliError::failed(format!("cannot use COTENANT_ENDPOINT `{named}`"), error)
        })
    }

    pub(super) async fn connect(&self) -> Result<Channel, CliError> {
        let endpoint = match self.endpoint()? {
            Endpoint::Tls(url, _) => Endpoint::Tls(url, self.identification()?),
            local => local,
        };
        match tokio::time::timeout(self.timeout, endpoint.connect()).await {
            Ok(channel) => Ok(channel?),
            Err(_) => Err(self.too_late()),
        }
    }

    /// Returns the certificates of both sides of a TLS connection, if configured.
    fn identification(&self) -> Result<Option<Identification>, CliError> {
        let (Some(cert), Some(key), Some(ca)) = (&self.cert, &self.key, &self.ca) else {
            return Ok(None);
        };
        let read = |file: &PathBuf| {
            fs::read_to_string(file).map_err(|error| {
                CliError::failed(format!("cannot read `{}`", file.display()), error)
            })
        };
        Ok(Some(Identification {
            certificate: read(cert)?,
            key: read(key)?,
            ca: read(ca)?,
        }))
    }

    /// Returns a request with the deadline of `--timeout`.
    pub(super) fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        request.set_timeout(self.timeout);
        request
    }

    /// Makes a call with the deadline of `--timeout`, also enforced locally in case the supervisor hangs.
    pub(super) async fn call<T>(
        &self,
        call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    ) -> Result<T, CliError> {
        // The supervisor's own answer to a deadline contains a reason, so wait slightly longer for it.
        match tokio::time::timeout(self.timeout + ANSWER_GRACE, call).await {
            Ok(Err(status)) if matches!(self.endpoint(), Ok(Endpoint::Tls(..))) => {
                Err(CliError::of_remote(status))
            }
            Ok(response) => Ok(response?.into_inner()),
            Err(_) => Err(self.too_late()),
        }
    }

    pub(super) fn too_late(&self) -> CliError {
        let error = match self.endpoint() {
            Ok(endpoint) => format!(
                "no answer from `{endpoint}` within {}",
                TimeSpan(self.timeout)
            ),
            Err(_) => format!("no answer within {}", TimeSpan(self.timeout)),
        };
        CliError::plain(error, exit::UNREACHABLE).with_hint("raise --timeout".to_owned())
    }
}

const DEFAULT_ENDPOINT: &str = "unix:///run/cotenant/cotenant.sock";

/// Time by which a call may exceed its deadline (our choice).
pub(super) const ANSWER_GRACE: Duration = Duration::from_millis(200);

pub(super) fn runtime() -> Result<tokio::runtime::Runtime, CliError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error: io::Error| CliError::failed("cannot start", error))
}
