//! `cotenant check`: what a configuration would do on this machine, without starting anything.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use super::{
    exit,
    serve::{DEFAULT_CONFIG, explain, explain_load_error},
};
use crate::{
    config::{self, Config},
    daemon::learned_peaks,
    engine::{Engine, backend},
    policy::{params::Params, residency::ModelShape},
    probe::{
        ProbeRoot, Reading, Sampler,
        capabilities::Capabilities,
        host::{self, Host},
    },
    units::{Bytes, Tokens},
};

/// How many neighbours are shown: those that matter for a budget are few.
const NEIGHBOURS: usize = 5;

/// Settings of the check.
#[derive(Clone, Debug, clap::Args)]
pub struct CheckArgs {
    /// The configuration.
    #[arg(env = "COTENANT_CONFIG", default_value = DEFAULT_CONFIG, value_name = "FILE")]
    pub config: PathBuf,
}

/// Prints what this machine has, and the budget that the configuration makes of it.
#[must_use]
pub(super) fn run(args: &CheckArgs) -> ExitCode {
    let config = match config::load(&args.config) {
        Ok(config) => config,
        Err(error) => {
            explain_load_error(&error);
            return ExitCode::from(exit::CONFIG);
        }
    };
    let root = ProbeRoot::default();
    let host = Host::read();
    print_line("this machine");
    print_line(&format!(
        "  host: {}, {}, Linux {}",
        host.processor, host.system, host.kernel
    ));
    print_line(&match host.lock_limit {
        Some(limit) => format!("  memlock: {limit} at most; only the supervisor's own ranges are worth locking"),
        None => "  memlock: no limit".to_owned(),
    });
    for line in Capabilities::probe(&root).lines() {
        print_line(&format!("  {line}"));
    }
    print_line(&format!("  cuda: {}", backend::cuda::describe()));
    for holder in host::holders_of(Path::new("/dev/nvmap")) {
        print_line(&format!("  holds /dev/nvmap: {} (pid {})", holder.name, holder.pid));
    }
    print_line("largest neighbours now");
    for neighbour in host::largest_processes(NEIGHBOURS) {
        print_line(&format!(
            "  {:<28}{:>12}  pid {}",
            neighbour.name, neighbour.resident, neighbour.pid
        ));
    }
    let reading = match Sampler::open(&root, None).and_then(|mut sampler| sampler.read()) {
        Ok(reading) => reading,
        Err(error) => {
            explain(&error, None);
            return ExitCode::FAILURE;
        }
    };
    let params = match config.params(reading.meminfo.total) {
        Ok(params) => params,
        Err(faults) => {
            eprintln!("error: cannot use `{}` on this machine", args.config.display());
            for fault in faults {
                eprintln!("  caused by: {fault}");
            }
            return ExitCode::from(exit::CONFIG);
        }
    };
    print_budget(&params, &reading);
    print_peaks(&config);
    let shape = match inspect(&config) {
        Ok(shape) => shape,
        Err(code) => return code,
    };
    if print_tenants(&config, &params, shape.as_ref()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(exit::CONFIG)
    }
}

fn inspect(config: &Config) -> Result<Option<ModelShape>, ExitCode> {
    let Some(llm) = &config.llm else { return Ok(None) };
    match Engine::inspect(&llm.path) {
        Ok(shape) => Ok(Some(shape)),
        Err(error) => {
            explain(&error, error.hint());
            Err(ExitCode::from(exit::CONFIG))
        }
    }
}

fn print_budget(params: &Params, reading: &Reading) {
    print_line("budget");
    let row = |name: &str, bytes: Bytes, note: &str| print_line(&format!("  {name:<28}{bytes:>12}  {note}"));
    row("memory", params.budget.total, "");
    row("reserve", params.budget.reserve, "never handed out");
    row("budget", params.budget.bytes(), "memory minus reserve");
    row(
        "available now",
        reading.meminfo.available_low(),
        "MemAvailable minus CmaFree",
    );
    let pool = reading.pool.map_or(Bytes::ZERO, |pool| pool.bytes());
    if reading.pool.is_some() {
        row("nvmap page pool", pool, "to be had by the next GPU allocation");
    }
    let available = reading.meminfo.available_low().saturating_add(pool);
    if params.budget.bytes() > available {
        let short = params.budget.bytes().saturating_sub(available);
        row(
            "used by others",
            short,
            "of the budget, now: it counts as unaccounted as far as it stays",
        );
    }
    row("Elevated below", params.pressure.elevated_below, "of headroom: shed");
    row(
        "Critical below",
        params.pressure.critical_below,
        "of headroom: shed at once",
    );
}

/// Prints what was learned of peaks, which counts before what the configuration says.
fn print_peaks(config: &Config) {
    match learned_peaks(&config.state_dir) {
        Ok(peaks) => {
            let mut peaks = peaks.iter().peekable();
            if peaks.peek().is_some() {
                print_line("learned peaks");
            }
            for peak in peaks {
                let holder = match &peak.variant {
                    Some(variant) => format!("{} ({variant})", peak.holder),
                    None => peak.holder.clone(),
                };
                print_line(&format!(
                    "  {holder:<28}{:>12}  seen in {} lives",
                    peak.bytes, peak.lives
                ));
            }
        }
        Err(error) => explain(&error, Some(error.hint())),
    }
}

/// Prints who wants what; `false` when it cannot work.
fn print_tenants(config: &Config, params: &Params, shape: Option<&ModelShape>) -> bool {
    print_line("wanted at most");
    let row = |name: &str, bytes: Bytes, note: &str| print_line(&format!("  {name:<28}{bytes:>12}  {note}"));
    let mut sum = Bytes::ZERO;
    let mut floors = Bytes::ZERO;
    let mut elastic = Bytes::ZERO;
    for worker in &config.workers {
        // It starts with the first of its variants, and can become the largest.
        let largest = worker.memory.variants.iter().max_by_key(|variant| variant.peak);
        let (most, note) = match largest {
            Some(variant) => (variant.peak, format!("peak, as `{}`", variant.name)),
            None => (worker.memory.peak, "peak".to_owned()),
        };
        row(&worker.name, most, &note);
        sum = sum.saturating_add(most);
        floors = floors.saturating_add(worker.memory.peak);
    }
    if let (Some(llm), Some(shape)) = (&config.llm, shape) {
        let layers: Bytes = shape.layers.iter().map(|layer| layer.resident_bytes).sum();
        let workspace = shape
            .workspace_bytes_per_token
            .saturating_mul(u64::from(llm.prefill_chunk.get()))
            .saturating_add(shape.workspace_fixed_bytes);
        let kv = shape.kv.capacity_bytes(llm.context);
        let whole = [layers, shape.fixed_bytes, shape.state_bytes, workspace, kv]
            .into_iter()
            .fold(Bytes::ZERO, Bytes::saturating_add);
        row(
            &llm.name,
            whole,
            &format!("{} on {} layers", shape.architecture, shape.layers.len()),
        );
        row("  layers", layers, "each can be streamed");
        row("  head, norms, tables", shape.fixed_bytes, "always resident");
        row(
            "  KV cache",
            kv,
            &format!("{} tokens, {} each", llm.context, shape.kv.bytes_per_token()),
        );
        row("  recurrent state", shape.state_bytes, "always resident");
        row(
            "  workspace",
            workspace,
            &format!("prefill in chunks of {} tokens", llm.prefill_chunk),
        );
        let floor = floor_bytes(shape, llm.kv_floor, llm.prefill_chunk);
        row("  floor", floor, "0 layers resident, least KV");
        sum = sum.saturating_add(whole);
        floors = floors.saturating_add(floor);
        elastic = whole.saturating_sub(floor);
    }
    let budget = params.budget.bytes();
    row("sum", sum, "");
    if sum <= budget {
        print_line(&format!("verdict: everything fits, {} to spare", budget - sum));
    } else if sum.saturating_sub(elastic) <= budget {
        print_line(&format!(
            "verdict: {} too much for everything at once: the LLM sheds it, up to {elastic}",
            sum - budget,
        ));
    } else if floors <= budget {
        print_line(&format!(
            "verdict: {} too much for everything at once: the LLM sheds up to {elastic}, and not all workers can have \
             their largest variant together",
            sum - budget,
        ));
    } else {
        print_line(&format!(
            "verdict: cannot work: {floors} at the least, of a budget of {budget}"
        ));
        eprintln!("hint: give fewer workers, smaller variants, a smaller model, or a larger `budget.total`");
        return false;
    }
    true
}

fn floor_bytes(shape: &ModelShape, kv_floor: Tokens, prefill_chunk: Tokens) -> Bytes {
    shape.plan_bytes(&crate::policy::residency::EnginePlan {
        resident: std::collections::BTreeSet::new(),
        kv_capacity: kv_floor,
        prefill_chunk,
    })
}

fn print_line(line: &str) {
    use std::io::Write as _;
    // A closed pipe ends the output, not the check.
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}
