//! Text and JSON forms of a plan.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{
    device::Device,
    forecast::{Forecast, ModeForecast, Stack, Verdict},
    rehearsal::Shortage,
};
use crate::output::counted;
use cotenant_engine::{protocol::Inspected, tensor_group::TensorGroup};
use cotenant_policy::params::ENGINE_TENANT;
use cotenant_units::{Bytes, Tokens};

pub(super) fn print(
    device: &Device,
    stack: &Stack,
    inspected: &Inspected,
    forecast: &Forecast,
    safetensors: &[TensorGroup],
) -> String {
    let mut text = String::new();
    let shape = &inspected.shape;
    let mut row = |name: &str, bytes: Bytes, note: &str| {
        let line = format!("  {name:<24}{:>12}  {note}", bytes.to_string());
        text.push_str(line.trim_end());
        text.push('\n');
    };
    let parameters: u64 = inspected.tensors.iter().map(|group| group.elements).sum();
    let title = format!(
        "{}: {} on {} layers, {} parameters, {} in the file",
        shape.name,
        shape.architecture,
        shape.layer_count(),
        millions(parameters),
        inspected.file_bytes,
    );
    for group in &inspected.tensors {
        row(
            group.kind.name(),
            group.bytes,
            &format!(
                "{}, {}",
                counted(group.tensors as usize, "tensor"),
                group.types.join(", ")
            ),
        );
    }
    if !safetensors.is_empty() {
        let whole = safetensors
            .iter()
            .fold(Bytes::ZERO, |sum, group| sum.saturating_add(group.bytes));
        row("safetensors", whole, "as downloaded, before conversion");
    }
    for group in safetensors {
        let name = format!("  {}", group.kind.name());
        row(
            &name,
            group.bytes,
            &format!(
                "{}, {}",
                counted(group.tensors as usize, "tensor"),
                group.types.join(", ")
            ),
        );
    }
    let weights = std::mem::take(&mut text);
    let llm = &forecast.llm;
    let mut row = |name: &str, bytes: Bytes, note: &str| {
        let line = format!("  {name:<24}{:>12}  {note}", bytes.to_string());
        text.push_str(line.trim_end());
        text.push('\n');
    };
    row("layers, head", llm.layers, "each part can be streamed");
    row(
        "norms, tables",
        llm.fixed.saturating_sub(inspected.text),
        "always resident",
    );
    row("tokenizer, grammars", inspected.text, "always reserved");
    let each = shape.kv.bytes_per_token(llm.kv_type);
    let layers = shape.layer_count();
    let attends = match shape.kv.cut_back_max() {
        Some(last) => format!(
            "{} of {layers} layers keep the last {last} tokens",
            shape.kv.windowed_layers()
        ),
        None => format!("{} of {layers} layers attend", shape.kv.attention_layers),
    };
    row(
        "KV cache",
        llm.kv,
        &format!(
            "{} tokens as {}, {each} each; {attends}",
            llm.context, llm.kv_type
        ),
    );
    if llm.conversations > Bytes::ZERO {
        row(
            "conversations",
            llm.conversations,
            "their states, in the KV cache where memory is ample",
        );
    }
    row("recurrent state", llm.state, "always resident");
    row(
        "workspace",
        llm.workspace,
        "activations of a prefill chunk, logits",
    );
    row(
        "LLM",
        llm.total,
        &format!("all resident; at least {}", forecast.floor),
    );
    for worker in &stack.params.workers {
        let learned = stack.params.peaks.of(&worker.name, None).is_some();
        let peak = stack
            .params
            .peaks
            .expected(&worker.name, None, worker.peak, worker.steady);
        let source = if learned { "learned" } else { "declared" };
        row(
            &worker.name,
            peak,
            &format!("{source} peak, {} at rest", worker.steady),
        );
    }
    let budget = &stack.params.budget;
    for (name, bytes, note) in reserved(device, budget.reserve) {
        row(name, bytes, note);
    }
    row(
        "reserve",
        budget.reserve,
        "these together; never handed out",
    );
    row("memory", budget.total, &device.name);
    row(
        "peak",
        forecast.rehearsal.peak,
        &format!("of a budget of {}", budget.bytes()),
    );
    row(
        "headroom after start",
        forecast.rehearsal.headroom,
        &headroom(stack),
    );
    let memory = std::mem::take(&mut text);
    let starts: Vec<_> = forecast
        .rehearsal
        .starts
        .iter()
        .map(|start| format!("{} ({} held)", start.holder, start.held))
        .collect();
    let _ = writeln!(
        text,
        "{title}\n{weights}memory\n{memory}start order\n  {}",
        starts.join(", ")
    );
    let _ = writeln!(text, "under pressure, in mode {}", stack.mode);
    for shortage in &forecast.rehearsal.shortages {
        let _ = writeln!(text, "  {}", line_of(shortage));
    }
    let _ = writeln!(
        text,
        "longest context\n  {} with all layers resident, {} with all layers streamed; the model has {}",
        tokens(forecast.context_resident),
        tokens(forecast.context_streamed),
        tokens(shape.context_max),
    );
    let _ = writeln!(text, "answers, {}", device.name);
    for mode in &forecast.modes {
        let _ = writeln!(
            text,
            "  {}",
            line_of_mode(mode, shape.layer_count(), forecast.room)
        );
    }
    let _ = writeln!(text, "  interval: {}", interval(device));
    let _ = writeln!(text, "verdict: {}", verdict(stack, forecast));
    text
}

pub(super) fn json(
    device: &Device,
    stack: &Stack,
    inspected: &Inspected,
    forecast: &Forecast,
    safetensors: &[TensorGroup],
) -> Value {
    let workers: Vec<_> = stack
        .params
        .workers
        .iter()
        .map(|worker| json!({"name": worker.name, "peakBytes": worker.peak, "steadyBytes": worker.steady}))
        .collect();
    json!({
        "model": {
            "name": inspected.shape.name,
            "architecture": inspected.shape.architecture,
            "layers": inspected.shape.layer_count(),
            "attentionLayers": inspected.shape.kv.attention_layers,
            "windowedLayers": inspected.shape.kv.windowed_layers(),
            "kvBytesPerToken": inspected.shape.kv.bytes_per_token(forecast.llm.kv_type),
            "contextMax": inspected.shape.context_max,
            "fileBytes": inspected.file_bytes,
            "tensors": inspected.tensors,
        },
        "device": device,
        "budgetBytes": stack.params.budget.bytes(),
        "reserveBytes": stack.params.budget.reserve,
        "reserved": reserved(device, stack.params.budget.reserve)
            .map(|(name, bytes, note)| json!({"name": name, "bytes": bytes, "note": note})),
        "safetensors": safetensors,
        "workers": workers,
        "forecast": forecast,
        "verdict": verdict(stack, forecast),
        "ok": forecast.verdict.works(),
    })
}

/// Returns the purposes of the reserve. A part larger than the remaining reserve ends the list.
fn reserved(device: &Device, reserve: Bytes) -> [(&'static str, Bytes, &'static str); 4] {
    let daemon = DAEMON.min(reserve);
    let cma = device.cma.min(reserve.saturating_sub(daemon));
    let system = reserve.saturating_sub(daemon).saturating_sub(cma);
    [
        ("supervisor", daemon, "the daemon without a model"),
        (
            "CMA",
            cma,
            "cameras and displays first; never counted as available",
        ),
        ("OS", system, "kernel, services, display"),
        (
            "CUDA context",
            Bytes::ZERO,
            "planned for the CPU; a GPU's is measured when the model is loaded, and is in its lease",
        ),
    ]
}

/// Memory of the daemon without a model, from `a_daemon_without_a_model_is_small`.
const DAEMON: Bytes = Bytes::from_mib(12);

fn headroom(stack: &Stack) -> String {
    let pressure = &stack.params.pressure;
    format!(
        "Elevated below {}, Critical below {}",
        pressure.elevated_below, pressure.critical_below
    )
}

fn line_of(shortage: &Shortage) -> String {
    let taken: Vec<_> = shortage
        .reclaimed
        .iter()
        .map(|reclaimed| format!("{} ({})", reclaimed.source, reclaimed.bytes))
        .collect();
    let taken = match taken.as_slice() {
        [] => "nothing is reclaimed".to_owned(),
        some => some.join(", then "),
    };
    format!(
        "{}, others take {}: {taken}",
        shortage.level, shortage.taken_by_others
    )
}

fn line_of_mode(mode: &ModeForecast, layers: u32, room: Bytes) -> String {
    let [least, expected, most] = mode.milli_tokens_per_s.map(per_second);
    format!(
        "{:<12}{expected} tokens/s ({least} to {most}); {} of {layers} layers resident, {}, {} of {room}",
        mode.mode.to_string(),
        mode.resident_layers,
        tokens(mode.context),
        mode.bytes,
    )
}

fn interval(device: &Device) -> String {
    let Device {
        rates,
        calibration,
        doubts,
        ..
    } = device;
    let [slow, fast] = rates.disk_interval_mib_per_s;
    let source = match calibration {
        Some(_) => "as `cotenant calibrate` measured here, 95 % of the time",
        None => "which were not measured on this device",
    };
    let doubts: String = doubts
        .iter()
        .map(|doubt| format!("\n    {doubt}"))
        .collect();
    format!(
        "± {} % of {} MiB/s of memory, and {slow} to {fast} MiB/s of disk, {source}{doubts}",
        rates.error_percent, rates.memory_mib_per_s
    )
}

/// Returns the verdict in one sentence.
pub(super) fn verdict(stack: &Stack, forecast: &Forecast) -> String {
    let budget = stack.params.budget.bytes();
    let peak = forecast.rehearsal.peak;
    match forecast.verdict {
        Verdict::Fits => format!("fits: peak {peak} of a budget of {budget}, everything resident"),
        Verdict::Reduced => {
            let plan = forecast.rehearsal.plan.as_ref();
            let capacity = plan.map_or(Tokens::ZERO, |plan| plan.kv_capacity);
            let tokens = capacity.min(forecast.llm.context).get();
            let held = plan.map_or(0, |plan| plan.resident.len());
            format!(
                "runs with less: peak {peak} of a budget of {budget}; the LLM holds {held} of its parts and {tokens} tokens \
                 of {}",
                forecast.llm.context
            )
        }
        Verdict::Impossible => {
            let waiting: Vec<_> = forecast
                .rehearsal
                .waiting
                .iter()
                .map(String::as_str)
                .collect();
            let needs = if waiting.contains(&ENGINE_TENANT) {
                format!("; the LLM needs at least {}", forecast.floor)
            } else {
                String::new()
            };
            format!(
                "cannot work: {} never starts in a budget of {budget}{needs}",
                waiting.join(", ")
            )
        }
    }
}

fn tokens(tokens: Tokens) -> String {
    format!("{tokens} tokens")
}

fn per_second(milli: u64) -> String {
    format!("{}.{}", milli / 1000, milli % 1000 / 100)
}

fn millions(parameters: u64) -> String {
    match parameters {
        0..1_000_000_000 => format!("{} million", parameters / 1_000_000),
        _ => format!(
            "{}.{:02} billion",
            parameters / 1_000_000_000,
            parameters / 10_000_000 % 100
        ),
    }
}
