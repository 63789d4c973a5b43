//! gRPC over TCP for fleets, by mutual TLS.

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Certificate, Identity, Server as Transport, ServerTlsConfig};
use tracing::{debug, warn};

use super::{
    connection::{ACCEPT_AGAIN_AFTER, Connection},
    roles::Role,
    slots::Slots,
};
use cotenant_policy::roles::Bounds;

/// A bound TCP listener for other machines.
#[derive(Debug)]
pub struct Remote {
    pub(super) listener: TcpListener,
    pub(super) tls: ServerTlsConfig,
    /// Role of every client with a certificate.
    pub(super) role: Role,
}

/// PEM contents for a [`Remote`].
pub struct Certificates {
    /// The server's certificate chain.
    pub certificate: String,
    /// Its key.
    pub key: String,
    /// Roots for client certificates.
    pub client_ca: String,
}

impl Certificates {
    /// Checks that certificate, key and CA fit together.
    ///
    /// # Errors
    /// If they do not.
    pub fn check(&self) -> Result<(), RemoteError> {
        tls_of(self).map(|_tls| ())
    }
}

/// The listener cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The certificates cannot be used.
    #[error("cannot use the certificate, key and client CA of `grpc.tcp`")]
    Certificates(#[source] tonic::transport::Error),
    /// The address cannot be bound.
    #[error("cannot listen for gRPC on {address}")]
    Listen {
        /// Configured address.
        address: SocketAddr,
        /// Cause.
        source: io::Error,
    },
}

impl Remote {
    /// Serves a listening socket; clients with a certificate trusted by `certificates` have `role`.
    ///
    /// # Errors
    /// If the certificates do not fit together, or the socket cannot be used.
    pub fn on(
        listener: std::net::TcpListener,
        certificates: &Certificates,
        role: Role,
    ) -> Result<Self, RemoteError> {
        let tls = tls_of(certificates)?;
        let address = listener
            .local_addr()
            .unwrap_or_else(|_| SocketAddr::from(([0, 0, 0, 0], 0)));
        let failed = |source| RemoteError::Listen { address, source };
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = TcpListener::from_std(listener).map_err(failed)?;
        Ok(Self {
            listener,
            tls,
            role,
        })
    }

    /// Bound address.
    ///
    /// # Errors
    /// If the system does not provide it.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Checked at startup, so that a faulty file prevents the start.
fn tls_of(certificates: &Certificates) -> Result<ServerTlsConfig, RemoteError> {
    let tls = ServerTlsConfig::new()
        .identity(Identity::from_pem(
            &certificates.certificate,
            &certificates.key,
        ))
        .client_ca_root(Certificate::from_pem(&certificates.client_ca))
        .timeout(HANDSHAKE_MAX);
    Transport::builder()
        .tls_config(tls.clone())
        .map_err(RemoteError::Certificates)?;
    Ok(tls)
}

/// Accepts connections until the server ends; closes those above the limits at once. Connections count from before the
/// handshake.
pub(super) async fn accept(
    listener: TcpListener,
    bounds: Bounds,
    accepted: mpsc::Sender<io::Result<Connection<TcpStream>>>,
    stop: CancellationToken,
    cut: CancellationToken,
) {
    let slots = Slots::new(bounds);
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let (stream, address) = match stream {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "cannot accept a gRPC connection");
                tokio::time::sleep(ACCEPT_AGAIN_AFTER).await;
                continue;
            }
        };
        // Counted by address, like users on a socket.
        let Ok(slot) = slots.open((key_of(address), None)) else {
            debug!(%address, "too many connections; this one is closed");
            continue;
        };
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "cannot set TCP_NODELAY");
        }
        let connection = Connection::new(stream, (), &cut, slot);
        if accepted.send(Ok(connection)).await.is_err() {
            return;
        }
    }
}

/// The common name in the subject of a certificate, in DER, if it is UTF-8 of at most 64 bytes (`ub-common-name` of
/// RFC 5280).
pub(super) fn common_name(subject: &[u8]) -> Option<String> {
    let mut at = subject.windows(COMMON_NAME.len());
    let value = at.position(|it| it == COMMON_NAME)? + COMMON_NAME.len();
    let (_string_type, value) = subject.get(value..)?.split_first()?;
    let (length, value) = value.split_first()?;
    let name = str::from_utf8(value.get(..usize::from(*length))?).ok()?;
    (name.len() <= 64 && !name.contains(char::is_control)).then(|| name.to_owned())
}

/// A number for an address: for IPv6 its network, in which one machine may have many addresses.
fn key_of(address: SocketAddr) -> u32 {
    match address.ip().to_canonical() {
        std::net::IpAddr::V4(address) => address.into(),
        std::net::IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments().map(u32::from);
            ((a << 16) | b) ^ ((c << 16) | d)
        }
    }
}

/// Object identifier 2.5.4.3 in DER; the value of the attribute follows.
const COMMON_NAME: &[u8] = &[6, 3, 0x55, 4, 3];

/// Longest handshake, after which its slot is freed. Our choice: slow links need some round trips.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
