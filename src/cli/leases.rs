//! `cotenant leases`: list of leases, and release of one.

use clap::{Args, Subcommand};
use serde_json::json;
use tonic::transport::Channel;

use super::{
    Global,
    exit::{self, CliError},
    output, show,
};
use cotenant_rpc::{
    json,
    v1::{Lease, ListLeasesRequest, ReleaseLeaseRequest, lease_service_client::LeaseServiceClient},
};

/// Lists leases, or releases one.
#[derive(Debug, Args)]
pub struct Leases {
    #[command(subcommand)]
    verb: Option<Verb>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List all leases.
    List,
    /// End a lease of any holder; the holder is notified.
    Release {
        /// Lease, such as `asr#7`.
        name: String,
    },
}

pub(super) async fn run(global: &Global, leases: Leases) -> Result<(), CliError> {
    let mut client = LeaseServiceClient::new(global.connect().await?);
    match leases.verb.unwrap_or(Verb::List) {
        Verb::List => {
            let leases = all(global, &mut client).await?;
            let text = || show::leases_table(&leases);
            output::write_list(global.output, leases.iter().map(json::lease), text)
        }
        Verb::Release { name } => {
            let lease = all(global, &mut client)
                .await?
                .into_iter()
                .find(|lease| lease.name == name)
                .ok_or_else(|| {
                    CliError::plain(
                        format!("cannot release `{name}`: no such lease"),
                        exit::REFUSED,
                    )
                    .with_hint("`cotenant leases` lists them".to_owned())
                })?;
            let known = json!({"lease": name, "heldBytes": lease.held_bytes});
            let released = global
                .call(client.release_lease(global.request(ReleaseLeaseRequest {
                    name,
                    boot_id: lease.boot_id,
                    generation: lease.generation,
                })))
                .await?;
            output::write_done(global.output, &released.message, known)
        }
    }
}

/// Returns all leases, page by page.
async fn all(
    global: &Global,
    client: &mut LeaseServiceClient<Channel>,
) -> Result<Vec<Lease>, CliError> {
    let mut leases = Vec::new();
    let mut page_token = String::new();
    loop {
        let page = global
            .call(client.list_leases(global.request(ListLeasesRequest {
                page_size: 0,
                page_token,
            })))
            .await?;
        leases.extend(page.leases);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(leases);
        }
    }
}
