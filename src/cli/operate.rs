//! Commands for operators: `shed`, `regrow`, `load`, `reload`, `drain`, and those for workers.

use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use tonic::transport::Channel;

use super::{
    Global,
    exit::{self, CliError},
    output,
    progress::Progress,
    quantity,
};
use cotenant_policy::kv_type::KvType;
use cotenant_rpc::{
    json::lease,
    v1::{
        self, ControlWorkerRequest, DrainRequest, EngineState, GetStatusRequest, LoadModelRequest,
        RegrowRequest, ReloadRequest, ResizeWorkerRequest, SetKvTypeRequest, ShedRequest,
        WorkerCommand, operator_service_client::OperatorServiceClient,
    },
};
use cotenant_units::{Bytes, TimeSpan, millis};

/// Takes memory back from the LLM.
#[derive(Debug, Args)]
pub struct Shed {
    /// Amount with its unit: `64MiB`.
    #[arg(value_name = "BYTES", value_parser = quantity::some)]
    bytes: Bytes,
}

/// Keeps the context of the LLM as another type.
#[derive(Debug, Args)]
pub struct KvTypeArgs {
    /// `f16`; `q8`, about half the size; `q4`, about a quarter of it, and less exact.
    #[arg(value_name = "TYPE", value_parser = quantity::kv_type())]
    kv_type: KvType,
}

/// A worker.
#[derive(Debug, Args)]
pub struct Worker {
    /// Its name, as in the configuration.
    name: String,
}

/// Changes the variant of a worker.
#[derive(Debug, Args)]
pub struct Resize {
    /// Its name, as in the configuration.
    name: String,
    /// The variant, as in the configuration.
    variant: String,
    /// Longest wait for memory; effective only below --timeout.
    #[arg(long, value_name = "DURATION", default_value = "4s", value_parser = quantity::duration)]
    wait: Duration,
}

#[derive(Clone, Copy)]
pub(super) enum Control {
    Recycle,
    Start,
    Stop,
}

pub(super) async fn shed(global: &Global, shed: &Shed) -> Result<(), CliError> {
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let request = global.request(ShedRequest {
        shed_bytes: shed.bytes.get(),
    });
    let done = global.call(client.shed(request)).await?;
    let limited_by = (!done.limited_by.is_empty()).then_some(&done.limited_by);
    let figures = json!({
        "askedBytes": done.asked_bytes,
        "freedBytes": done.freed_bytes,
        "heldBytes": done.held_bytes,
        "limitedBy": limited_by,
    });
    output::write_done(global.output, &done.message, figures)
}

pub(super) async fn kv_type(global: &Global, wanted: &KvTypeArgs) -> Result<(), CliError> {
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let kv_type = match wanted.kv_type {
        KvType::F16 => v1::KvType::F16,
        KvType::Q8 => v1::KvType::Q8,
        KvType::Q4 => v1::KvType::Q4,
    };
    let request = global.request(SetKvTypeRequest {
        kv_type: kv_type.into(),
    });
    let done = global.call(client.set_kv_type(request)).await?;
    let known = json!({"kvType": wanted.kv_type.to_string()});
    output::write_done(global.output, &done.message, known)
}

pub(super) async fn regrow(global: &Global) -> Result<(), CliError> {
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let done = global
        .call(client.regrow(global.request(RegrowRequest {})))
        .await?;
    let engine = engine(global, &mut client).await?;
    let known = json!({
        "planBytes": engine.plan_bytes,
        "fullPlanBytes": engine.full_plan_bytes,
        "changing": engine.changing,
    });
    output::write_done(global.output, &done.message, known)
}

/// Loads the model again.
#[derive(Clone, Debug, Args)]
pub struct Load {
    /// Load in the background, and return at once.
    #[arg(long)]
    no_wait: bool,
}

pub(super) async fn load(global: &Global, load: &Load) -> Result<(), CliError> {
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let done = global
        .call(client.load_model(global.request(LoadModelRequest {})))
        .await?;
    if load.no_wait {
        let state = engine(global, &mut client).await?.state();
        return output::write_done(global.output, &done.message, loaded(state, None));
    }
    let began = Instant::now();
    let (mut progress, mut loads) = (Progress::new(), false);
    let state = loop {
        let engine = engine(global, &mut client).await?;
        match engine.state() {
            EngineState::Loading => loads = true,
            EngineState::Failed if loads => {
                drop(progress);
                return Err(CliError::plain(
                    format!("cannot load the model: {}", engine.failure),
                    exit::FAILED,
                ));
            }
            state => break state,
        }
        if engine.load_bytes > 0 {
            let text = reading(engine.load_read_bytes, engine.load_bytes, began.elapsed());
            progress.step(engine.load_read_bytes, engine.load_bytes, &text);
        }
        tokio::time::sleep(LOOK_AGAIN_AFTER).await;
    };
    drop(progress);
    let took = loads.then(|| in_tenths(began.elapsed()));
    let message = took.map_or(done.message, |took| format!("loaded in {}", TimeSpan(took)));
    output::write_done(global.output, &message, loaded(state, took))
}

/// Returns the result of a load, for programs.
fn loaded(state: EngineState, took: Option<Duration>) -> Value {
    json!({
        "state": state.as_str_name(),
        "tookMs": took.map(millis),
    })
}

async fn engine(
    global: &Global,
    client: &mut OperatorServiceClient<Channel>,
) -> Result<v1::Engine, CliError> {
    let request = global.request(GetStatusRequest {});
    let status = global.call(client.get_status(request)).await?;
    Ok(status.engine.unwrap_or_default())
}

/// Renders bytes read and total, rate, and remaining time at that rate.
fn reading(read: u64, whole: u64, took: Duration) -> String {
    let mut text = format!("{} of {}", Bytes::new(read), Bytes::new(whole));
    let rate = u128::from(read) * 1000 / took.as_millis().max(1);
    if let Some(left) = u128::from(whole.saturating_sub(read))
        .saturating_mul(1000)
        .checked_div(rate)
    {
        let left = Duration::from_millis(u64::try_from(left).unwrap_or(u64::MAX));
        let rate = Bytes::new(u64::try_from(rate).unwrap_or(u64::MAX));
        text.push_str(&format!(", {rate}/s, {} left", TimeSpan(in_tenths(left))));
    }
    text
}

fn in_tenths(time: Duration) -> Duration {
    Duration::from_millis(u64::try_from(time.as_millis() / 100 * 100).unwrap_or(u64::MAX))
}

/// Polling interval of a load (our choice: visible progress at no cost).
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(100);

pub(super) async fn reload(global: &Global) -> Result<(), CliError> {
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let done = global
        .call(client.reload(global.request(ReloadRequest {})))
        .await?;
    let keys = json!({
        "appliedKeys": done.applied_keys,
        "restartKeys": done.restart_keys,
    });
    output::write_done(global.output, &done.message, keys)
}

/// Arguments of `cotenant drain`.
#[derive(Clone, Debug, clap::Args)]
pub struct Drain {
    /// End the drain: admit new requests again.
    #[arg(long, conflicts_with = "wait")]
    off: bool,
    /// Wait this long for running answers, such as `60s`; exit code 5 if some are still running. The drain stays in force
    /// until `drain --off` or a restart, even if the wait is interrupted.
    #[arg(long, value_name = "DURATION", value_parser = quantity::wait)]
    wait: Option<Duration>,
}

pub(super) async fn drain(global: &Global, drain: Drain) -> Result<(), CliError> {
    let began = Instant::now();
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let done = global
        .call(client.drain(global.request(DrainRequest { off: drain.off })))
        .await?;
    let Some(wait) = drain.wait else {
        let known = json!({"draining": !drain.off});
        return output::write_done(global.output, &done.message, known);
    };
    let mut quiet = 0;
    loop {
        let request = global.request(GetStatusRequest {});
        let status = global.call(client.get_status(request)).await?;
        if !status.draining {
            let error = "the drain was ended by another operator or by a restart of the supervisor";
            return Err(CliError::plain(error, exit::REFUSED));
        }
        let Some(running) = status.running_answers else {
            let error = "cannot wait for running answers: this version of the supervisor does not count them";
            return Err(CliError::plain(error, exit::REFUSED));
        };
        quiet = if running == 0 { quiet + 1 } else { 0 };
        if quiet == QUIET_LOOKS {
            let took = in_tenths(began.elapsed());
            let message = format!("drained after {}: no answer is running", TimeSpan(took));
            let known = json!({
                "draining": true,
                "runningAnswers": running,
                "tookMs": millis(took),
            });
            return output::write_done(global.output, &message, known);
        }
        let left = wait.saturating_sub(began.elapsed());
        if left.is_zero() && running > 0 {
            return Err(CliError::StillRunning {
                answers: running,
                within: wait,
            });
        }
        tokio::time::sleep(LOOK_AGAIN_AFTER.min(left.max(LOOK_AGAIN_LEAST))).await;
    }
}

/// Consecutive looks without a running answer after which a drain is complete. Our choice: the last bytes of an answer
/// leave the daemon between two looks.
const QUIET_LOOKS: u32 = 2;

/// Shortest polling interval, near the time limit.
const LOOK_AGAIN_LEAST: Duration = Duration::from_millis(10);

pub(super) async fn control(
    global: &Global,
    worker: Worker,
    control: Control,
) -> Result<(), CliError> {
    let command = match control {
        Control::Recycle => WorkerCommand::Recycle,
        Control::Start => WorkerCommand::Start,
        Control::Stop => WorkerCommand::Stop,
    };
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let known = json!({"worker": worker.name, "command": command.as_str_name()});
    let request = global.request(ControlWorkerRequest {
        name: worker.name,
        command: command.into(),
    });
    let done = global.call(client.control_worker(request)).await?;
    output::write_done(global.output, &done.message, known)
}

pub(super) async fn resize(global: &Global, resize: Resize) -> Result<(), CliError> {
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let request = global.request(ResizeWorkerRequest {
        name: resize.name.clone(),
        variant: resize.variant.clone(),
        max_wait: prost_types::Duration::try_from(resize.wait).ok(),
    });
    let done = global.call(client.resize_worker(request)).await?;
    let known = json!({
        "worker": resize.name,
        "variant": resize.variant,
        "lease": done.lease.as_ref().map(lease),
    });
    output::write_done(global.output, &done.message, known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_shows_bytes_rate_and_what_is_left() {
        let mib = |mib: u64| mib << 20;
        assert_eq!(
            reading(mib(300), mib(1200), Duration::from_secs(3)),
            "300 MiB of 1.1 GiB, 100 MiB/s, 9 s left"
        );
        assert_eq!(reading(0, mib(8), Duration::ZERO), "0 B of 8 MiB");
    }
}
