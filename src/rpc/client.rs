//! gRPC client connection, used by the command line.

use std::{
    fmt, io,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream as StdStream},
    },
    path::PathBuf,
    str::FromStr,
};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Identity, Uri};

/// Address of the supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A path socket: `unix:///run/cotenant/cotenant.sock`, `unix:relative.sock`.
    Path(PathBuf),
    /// An abstract socket: `unix-abstract:cotenant`, `@cotenant`.
    Abstract(String),
    /// Another machine: `https://box.example:8411`, with the certificates of both sides.
    Tls(String, Option<Identification>),
}

/// Certificates of both sides of a TLS connection, PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Identification {
    /// Our certificate.
    pub certificate: String,
    /// Its key.
    pub key: String,
    /// Roots of the server's certificate.
    pub ca: String,
}

impl fmt::Debug for Identification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identification")
    }
}

/// The text is not an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not an endpoint: write `unix:///run/cotenant/cotenant.sock`, `unix-abstract:cotenant` or `https://HOST:PORT`"
)]
pub struct EndpointError {
    text: String,
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    /// Accepts gRPC's names of sockets, an absolute path, and `@name`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let path = |path: &str| Self::Path(path.into());
        let name = |name: &str| Self::Abstract(name.to_owned());
        let endpoint = if let Some(rest) = text.strip_prefix("https://") {
            let plain = !rest.is_empty() && text.parse::<Uri>().is_ok();
            plain.then(|| Self::Tls(text.trim_end_matches('/').to_owned(), None))
        } else if let Some(rest) = text
            .strip_prefix("unix-abstract:")
            .or_else(|| text.strip_prefix('@'))
        {
            (!rest.is_empty()).then(|| name(rest))
        } else if let Some(rest) = text.strip_prefix("unix://") {
            rest.starts_with('/').then(|| path(rest))
        } else if let Some(rest) = text.strip_prefix("unix:") {
            (!rest.is_empty()).then(|| path(rest))
        } else {
            text.starts_with('/').then(|| path(text))
        };
        endpoint.ok_or_else(|| EndpointError {
            text: text.to_owned(),
        })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) if path.is_absolute() => write!(f, "unix://{}", path.display()),
            Self::Path(path) => write!(f, "unix:{}", path.display()),
            Self::Abstract(name) => write!(f, "unix-abstract:{name}"),
            Self::Tls(url, _) => f.write_str(url),
        }
    }
}

impl Endpoint {
    async fn open(&self) -> io::Result<UnixStream> {
        match self {
            Self::Path(path) => UnixStream::connect(path).await,
            Self::Abstract(name) => {
                // Connecting to a Unix socket does not block.
                let stream = StdStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
                stream.set_nonblocking(true)?;
                UnixStream::from_std(stream)
            }
            Self::Tls(..) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Connects to another machine.
    async fn connect_tls(
        url: &str,
        files: &Identification,
    ) -> Result<Channel, tonic::transport::Error> {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&files.ca))
            .identity(Identity::from_pem(&files.certificate, &files.key));
        tonic::transport::Endpoint::from_shared(url.to_owned())?
            .tls_config(tls)?
            .connect()
            .await
    }

    /// Connects.
    ///
    /// # Errors
    /// If no server listens there, or it does not admit this user.
    pub async fn connect(&self) -> Result<Channel, ConnectError> {
        let fails = |source: io::Error| ConnectError {
            endpoint: self.clone(),
            source,
        };
        if let Self::Tls(url, files) = self {
            let Some(files) = files else {
                return Err(fails(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    NO_CERTIFICATE,
                )));
            };
            let connected = Self::connect_tls(url, files).await;
            return connected.map_err(|error| fails(io::Error::other(error)));
        }
        // The first connection is opened here, so that its error is the system's own and not the transport's.
        let mut first = Some(self.open().await.map_err(fails)?);
        let endpoint = self.clone();
        let connector = tower::service_fn(move |_: Uri| {
            let (first, endpoint) = (first.take(), endpoint.clone());
            async move {
                let stream = match first {
                    Some(stream) => stream,
                    None => endpoint.open().await?,
                };
                Ok::<_, io::Error>(TokioIo::new(stream))
            }
        });
        // The authority that gRPC clients other than grpc-core send over a socket.
        tonic::transport::Endpoint::from_static("http://localhost")
            .connect_with_connector(connector)
            .await
            .map_err(|error| fails(io::Error::other(error)))
    }
}

/// The supervisor cannot be reached.
#[derive(Debug, thiserror::Error)]
#[error("cannot reach the supervisor at `{endpoint}`")]
pub struct ConnectError {
    endpoint: Endpoint,
    source: io::Error,
}

impl ConnectError {
    /// The remedy.
    pub fn hint(&self) -> &'static str {
        match self.source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                "is `cotenant serve` running? Name its socket with --endpoint or COTENANT_ENDPOINT"
            }
            io::ErrorKind::PermissionDenied => {
                "the socket is not open to this user: join its group, or use sudo"
            }
            io::ErrorKind::InvalidInput => "name them with --cert, --key and --ca",
            _ if matches!(self.endpoint, Endpoint::Tls(..)) => {
                "check address and port, that --ca is the root of the supervisor's certificate, and that this names the host"
            }
            _ => "name the socket of the supervisor with --endpoint or COTENANT_ENDPOINT",
        }
    }
}

const NO_CERTIFICATE: &str =
    "a connection by TLS needs a certificate, its key and the CA of the supervisor";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_as_grpc_writes_them() {
        for (text, shown) in [
            ("unix:///run/a.sock", "unix:///run/a.sock"),
            ("unix:/run/a.sock", "unix:///run/a.sock"),
            ("/run/a.sock", "unix:///run/a.sock"),
            ("unix:a.sock", "unix:a.sock"),
            ("unix-abstract:cotenant", "unix-abstract:cotenant"),
            ("@cotenant", "unix-abstract:cotenant"),
            ("https://box.example:8411/", "https://box.example:8411"),
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), shown);
        }
        for text in [
            "",
            "@",
            "unix:",
            "unix://a.sock",
            "http://localhost:1",
            "https://",
            "a.sock",
        ] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }
}
