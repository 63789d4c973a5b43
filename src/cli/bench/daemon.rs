//! The daemon under measurement: connection, readiness, and its log on failure.

use std::time::{Duration, Instant};

use tonic::transport::Channel;

use crate::{demo::watch, stage::Stage};
use cotenant_rpc::v1::{
    EngineState, GetStatusRequest, GetStatusResponse, HoldLeaseRequest, Lease,
    operator_service_client::OperatorServiceClient,
};

/// Connects to the daemon once it answers.
pub async fn connected(stage: &Stage, patience: Duration) -> Result<Channel, String> {
    watch::connect(&stage.socket(), patience)
        .await
        .map_err(last_words(stage))
}

/// Returns the status once it satisfies `wanted`.
pub async fn until(
    operator: &mut OperatorServiceClient<Channel>,
    patience: Duration,
    wanted: impl Fn(&GetStatusResponse) -> bool,
) -> Result<GetStatusResponse, String> {
    let end = Instant::now() + patience;
    loop {
        let status = operator.get_status(GetStatusRequest {}).await;
        let status = status
            .map_err(|status| status.message().to_owned())?
            .into_inner();
        if wanted(&status) {
            return Ok(status);
        }
        if let Some(engine) = &status.engine
            && engine.state() == EngineState::Failed
        {
            return Err(format!("the engine has failed: {}", engine.failure));
        }
        if Instant::now() >= end {
            return Err(format!(
                "the daemon did not reach the expected state within {patience:?}: {:?}, {:?}, {:?}",
                status.engine, status.pressure, status.workers
            ));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Returns a function that appends the end of the daemon's log to a problem.
pub fn last_words(stage: &Stage) -> impl Fn(String) -> String {
    |problem| stage.last_words(problem)
}

/// Returns the message that identifies a lease on its stream.
pub fn message_of(lease: &Lease) -> HoldLeaseRequest {
    HoldLeaseRequest {
        name: lease.name.clone(),
        boot_id: lease.boot_id.clone(),
        generation: lease.generation,
        ..HoldLeaseRequest::default()
    }
}
