//! Certificates of gRPC for other machines.

use super::error::RunError;
use cotenant_config::{TcpConfig, load_private, load_text};
use cotenant_rpc::remote::Certificates;

pub(super) fn certificates_of(tcp: &TcpConfig) -> Result<Certificates, RunError> {
    let certificates = Certificates {
        certificate: load_text(&tcp.cert).map_err(RunError::Private)?,
        key: load_private(&tcp.key).map_err(RunError::Private)?,
        client_ca: load_text(&tcp.client_ca).map_err(RunError::Private)?,
    };
    certificates
        .check()
        .map_err(|source| RunError::Remote { source })?;
    Ok(certificates)
}
