//! `cotenant check`: effect of a configuration on this machine, without starting anything.

use std::{
    error::Error,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use serde_json::{Map, Value, json};

use super::{
    Global, Output, check_workers,
    config_file::ConfigFile,
    exit,
    output::{self, counted},
    plan::{disk::DiskRates, speeds_here},
};
use cotenant_config::{self as config, Config, LlmConfig};
use cotenant_daemon::{compute, is_here, learned_peaks, obstacles, sayable, threads};
use cotenant_engine::{Engine, backend, helper::THIS_PROGRAM, protocol::Inspected};
use cotenant_policy::{params::Params, residency::ModelShape};
use cotenant_probe::{
    ProbeRoot, Reading, Sampler, audit,
    capabilities::Capabilities,
    host::{self, Host},
    meminfo::Meminfo,
    nvmap::Nvmap,
    sandbox::Sandbox,
};
use cotenant_units::{Bytes, Timestamp};
use cotenant_worker::{
    confine::Groups,
    preflight::{Found, MachineFacts, Severity, preflight},
};

const DISK_TIME: Duration = Duration::from_secs(1);

/// Neighbours shown: only a few matter for a budget.
const NEIGHBOURS: usize = 5;

/// Settings of the check.
#[derive(Clone, Debug, clap::Args)]
pub struct CheckArgs {
    #[command(flatten)]
    config: ConfigFile,
    /// Audit this device for losses of memory or speed, with remedies; needs no configuration.
    #[arg(long, conflicts_with_all = ["file", "config"])]
    audit: bool,
    /// Measure the GPU again instead of using figures of an earlier start.
    #[arg(long, conflicts_with_all = ["audit", "root"])]
    reprobe: bool,
    /// Audit a device from copies of its `proc`, `sys`, `etc` and `var` in this folder.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["file", "config"])]
    root: Option<PathBuf>,
}

/// Prints this machine's capabilities, and the budget that results from the configuration.
pub(super) fn run(global: &Global, args: &CheckArgs) -> ExitCode {
    let mut sheet = Sheet::new(global.output);
    let code = match &args.root {
        Some(root) => audit_alone(&mut sheet, &ProbeRoot::at(root), None),
        None if args.audit => audit_alone(
            &mut sheet,
            &ProbeRoot::default(),
            std::env::current_exe().ok().as_deref(),
        ),
        None => look(&mut sheet, args),
    };
    sheet.finish(code == exit::OK);
    ExitCode::from(code)
}

/// Prints the device's capabilities, and its losses of memory or speed. `read` is a file of the live machine, whose
/// disk is measured.
fn audit_alone(sheet: &mut Sheet, root: &ProbeRoot, read: Option<&Path>) -> u8 {
    sheet.section("machine", "this machine");
    let found = if root.is_live() {
        Capabilities::probe(root)
    } else {
        Capabilities::of_copy(root)
    };
    for line in found.lines() {
        sheet.line(&line);
    }
    print_disk(sheet, read);
    print_software(sheet, root);
    let meminfo = Meminfo::read(root);
    if let Ok(meminfo) = &meminfo {
        let pool = Nvmap::find(root)
            .and_then(|nvmap| nvmap.pool())
            .map_or(Bytes::ZERO, |pool| pool.bytes());
        sheet.section("memory", "memory");
        sheet.row("memory", meminfo.total, "");
        sheet.row(
            "available",
            meminfo.available_low().saturating_add(pool),
            "MemAvailable minus CmaFree, and the page pool",
        );
        sheet.row(
            "nvmap page pool",
            pool,
            "available to the next GPU allocation",
        );
        sheet.row(
            "residual",
            meminfo.residual(),
            "not in /proc/meminfo: drivers, GPU, zram",
        );
    }
    let warnings = print_audit(sheet, root, None);
    if let Err(error) = meminfo {
        sheet.fault(&error, &[]);
        sheet.verdict("cannot audit: the device's memory cannot be read");
        return exit::FAILED;
    }
    sheet.verdict(&format!(
        "{} of {} rules",
        counted(warnings, "warning"),
        audit::rule_count()
    ));
    exit::OK
}

/// Reads `file` for a second and prints the speed of its disk.
fn print_disk(sheet: &mut Sheet, file: Option<&Path>) {
    let Some(file) = file else { return };
    match DiskRates::measure(file, DISK_TIME, &mut |_| {}) {
        Ok(rates) => sheet.line(&format!(
            "disk: reads {} MiB/s of {}",
            rates.burst_mib_per_s,
            file.display()
        )),
        Err(error) => sheet.line(&format!("disk: cannot read {}: {error}", file.display())),
    }
}

/// Prints versions next to those expected for the board's L4T, and the confinement of a running supervisor.
fn print_software(sheet: &mut Sheet, root: &ProbeRoot) {
    let versions = audit::versions(root);
    if !versions.is_empty() {
        sheet.section("versions", "versions");
    }
    for version in versions {
        sheet.entry(&[version.to_string()], json!(version));
    }
    let daemons = Sandbox::of_daemons(root);
    if !daemons.is_empty() {
        sheet.section("supervisors", "running supervisors");
    }
    for daemon in daemons {
        sheet.line(&daemon.to_string());
    }
}

/// Model whose speed on this machine is known or assumed.
struct Served<'a> {
    name: &'a str,
    /// Answer tokens per second, in thousandths, with all layers resident and with all streamed.
    milli_tokens_per_s: [u64; 2],
}

impl Served<'_> {
    /// Returns the loss of this model in thousandths of a token per second.
    fn loses(&self, cost: audit::Cost) -> Option<u64> {
        let [resident, streamed] = self.milli_tokens_per_s;
        let (speed, percent) = match cost {
            audit::Cost::Speed(percent) => (resident, percent),
            audit::Cost::Streaming(percent) => (streamed, percent),
            audit::Cost::Risk | audit::Cost::Memory(_) => return None,
        };
        Some(speed.saturating_mul(percent) / 100)
    }
}

/// Prints the findings of the audit; returns the number of warnings.
fn print_audit(sheet: &mut Sheet, root: &ProbeRoot, model: Option<&Served<'_>>) -> usize {
    let findings = audit::audit(root);
    if !findings.is_empty() {
        sheet.section("audit", "audit of the device");
    }
    for finding in &findings {
        let word = match finding.severity {
            audit::Severity::Note => "note",
            audit::Severity::Warning => "warning",
        };
        let mut value = json!(finding);
        let mut cost = finding.cost.to_string();
        if let Some((model, milli)) =
            model.and_then(|model| Some((model, model.loses(finding.cost)?)))
        {
            if let Some(fields) = value.as_object_mut() {
                fields.insert("milliTokensPerSecond".to_owned(), json!(milli));
            }
            let name = model.name;
            cost.push_str(&format!(
                ", about {}.{} tokens/s of {name}",
                milli / 1000,
                milli % 1000 / 100
            ));
        }
        let lines = [
            format!("{word}: {}; costs {cost}", finding.text),
            format!("  hint: {}", finding.remedy),
        ];
        sheet.entry(&lines, value);
    }
    let is_warning = |finding: &&audit::Finding| finding.severity == audit::Severity::Warning;
    findings.iter().filter(is_warning).count()
}

fn look(sheet: &mut Sheet, args: &CheckArgs) -> u8 {
    let path = args.config.path();
    let config = match config::load(&path) {
        Ok(config) => config,
        Err(error) => {
            sheet.fault(&error, &error.kind().hints());
            sheet.verdict("the configuration cannot be used");
            return exit::CONFIG;
        }
    };
    let root = ProbeRoot::default();
    let host = Host::read();
    let mut found = preflight(&config.workers, &machine_facts(&config, &host));
    // Reported with its worker below.
    found.retain(|found| found.rule != "port_taken");
    sheet.section("machine", "this machine");
    sheet.line(&format!(
        "host: {}, {}, Linux {}",
        host.processor, host.system, host.kernel
    ));
    sheet.line(&match host.lock_limit {
        Some(limit) => {
            format!("memlock: {limit} at most; only the supervisor's own ranges are worth locking")
        }
        None => "memlock: no limit".to_owned(),
    });
    for line in Capabilities::probe(&root).lines() {
        sheet.line(&line);
    }
    backend::cuda::keep_probe_in(&config.state_dir);
    if args.reprobe {
        backend::cuda::forget_probe();
    }
    sheet.line(&format!("cuda: {}", backend::cuda::describe()));
    let model = inspect(sheet, &config);
    let program = std::env::current_exe().ok();
    let read = config
        .llm
        .as_ref()
        .map(|llm| llm.path.as_path())
        .filter(|path| path.is_file());
    print_disk(sheet, read.or(program.as_deref()));
    sheet.section("neighbours", "largest neighbours now");
    for neighbour in host::largest_processes(NEIGHBOURS) {
        sheet.row(
            &neighbour.name,
            neighbour.resident,
            &format!("pid {}", neighbour.pid),
        );
    }
    print_software(sheet, &root);
    let served = config
        .llm
        .as_ref()
        .zip(model.as_ref().ok().and_then(Option::as_ref))
        .and_then(|(llm, model)| {
            let milli_tokens_per_s = speeds_here(model, threads(llm))?;
            Some(Served {
                name: &llm.name,
                milli_tokens_per_s,
            })
        });
    print_audit(sheet, &root, served.as_ref());
    let read = Sampler::open(&root, None).and_then(|mut sampler| {
        let reading = sampler.read()?;
        Ok((sampler.machine(&reading), reading))
    });
    let (machine, reading) = match read {
        Ok(read) => read,
        Err(error) => {
            sheet.fault(&error, &[]);
            sheet.verdict("the memory of this machine cannot be read");
            return exit::FAILED;
        }
    };
    let params = match config.params(&machine) {
        Ok(params) => Some(params),
        Err(faults) => {
            let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
            let message = format!("cannot use `{}` on this machine", path.display());
            sheet.faults(&message, &faults, &[]);
            None
        }
    };
    if let Some(Err(error)) = config.http.keys_file.as_deref().map(config::load_clients) {
        sheet.fault(&error, &error.kind().hints());
        sheet.verdict("the file of `http.keys_file` cannot be used");
        return exit::CONFIG;
    }
    let workers = check_workers::check(&config);
    if !workers.is_empty() {
        sheet.section("workers", "workers");
    }
    for worker in &workers {
        sheet.entry(&worker.lines(), worker.json());
    }
    for (key, address) in config.open_listeners() {
        found.push(Found {
            worker: None,
            rule: "open_listener",
            severity: Severity::Warning,
            text: format!(
                "`{key}: {address}` is reachable from other machines, without a password"
            ),
            remedy: "listen on 127.0.0.1, or restrict access by a firewall".to_owned(),
        });
    }
    for (key, address) in config
        .listeners()
        .into_iter()
        .filter(|(_, address)| !is_here(address.ip()))
    {
        found.push(Found {
            worker: None,
            rule: "address_absent",
            severity: Severity::Warning,
            text: format!("`{key}: {address}` is not currently an address of this machine"),
            remedy: "it is served once the machine has it; `ip address` lists present addresses"
                .to_owned(),
        });
    }
    for obstacle in obstacles(&config) {
        found.push(Found {
            worker: None,
            rule: "cannot_start",
            severity: if obstacle.is_sure {
                Severity::Fault
            } else {
                Severity::Warning
            },
            text: obstacle.text,
            remedy: obstacle.remedy,
        });
    }
    print_found(sheet, &found);
    let Some(params) = params else {
        sheet.verdict("the configuration cannot be used on this machine");
        return exit::CONFIG;
    };
    print_budget(sheet, &params, &reading);
    print_peaks(sheet, &config);
    let model = match model {
        Ok(model) => model,
        Err(code) => {
            sheet.verdict("the model of `llm.path` cannot be loaded");
            return code;
        }
    };
    let fits = print_tenants(sheet, &config, &params, model.as_ref());
    let faults = found
        .iter()
        .filter(|found| found.severity == Severity::Fault)
        .count()
        + workers
            .iter()
            .map(|worker| worker.problems.len())
            .sum::<usize>();
    if faults > 0 {
        sheet.verdict(&format!("cannot start: {} above", counted(faults, "fault")));
    }
    if fits && faults == 0 {
        exit::OK
    } else {
        exit::CONFIG
    }
}

fn machine_facts(config: &Config, host: &Host) -> MachineFacts {
    let nvmap = Path::new("/dev/nvmap");
    let limited = config
        .workers
        .iter()
        .any(|worker| worker.confinement.memory.is_some());
    let groups = Groups::look(&ProbeRoot::default());
    MachineFacts {
        // GPU allocator of a Jetson, which shares the processor's memory.
        unified: nvmap.exists(),
        lock_limit: host.lock_limit,
        no_groups: groups.describe().err().filter(|_| limited),
        nvmap_holders: host::holders_of(nvmap)
            .iter()
            .map(|holder| format!("{} (pid {})", holder.name, holder.pid))
            .collect(),
    }
}

/// Prints findings: faults lead to the exit code for an invalid configuration, warnings do not.
fn print_found(sheet: &mut Sheet, found: &[Found]) {
    if !found.is_empty() {
        sheet.section("findings", "before the start");
    }
    for found in found {
        let who = found
            .worker
            .as_ref()
            .map_or_else(String::new, |worker| format!("worker `{worker}`: "));
        let lines = [
            format!("{}: {who}{}", found.severity.name(), found.text),
            format!("  hint: {}", found.remedy),
        ];
        let value = json!({
            "worker": found.worker,
            "rule": found.rule,
            "severity": found.severity.name(),
            "text": found.text,
            "remedy": found.remedy,
        });
        sheet.entry(&lines, value);
    }
}

fn inspect(sheet: &mut Sheet, config: &Config) -> Result<Option<Inspected>, u8> {
    let Some(llm) = &config.llm else {
        return Ok(None);
    };
    match Engine::check(
        &llm.path,
        sayable(llm).as_ref(),
        compute(llm),
        Some(THIS_PROGRAM.into()),
    ) {
        Ok(inspected) => Ok(Some(
            inspected
                .keeping_conversations(llm.keep_conversations)
                .drafting(llm.drafts),
        )),
        Err(error) => {
            let beside = models_beside(&llm.path);
            let hint = error.hint().map(str::to_owned).or(beside);
            sheet.fault(&error, hint.as_slice());
            Err(exit::CONFIG)
        }
    }
}

/// Lists the models in the folder of a missing file.
fn models_beside(path: &Path) -> Option<String> {
    let folder = path.parent().filter(|_| !path.exists())?;
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Some(format!(
            "the folder `{}` is missing or unreadable",
            folder.display()
        ));
    };
    let names = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut models: Vec<String> = names.filter(|name| name.ends_with(".gguf")).collect();
    models.sort();
    let more = models.len().saturating_sub(NEIGHBOURS);
    models.truncate(NEIGHBOURS);
    Some(match (models.join("`, `"), more) {
        (none, _) if none.is_empty() => format!("no `*.gguf` file in `{}`", folder.display()),
        (names, 0) => format!("`{}` has `{names}`", folder.display()),
        (names, more) => format!("`{}` has `{names}` and {more} more", folder.display()),
    })
}

fn print_budget(sheet: &mut Sheet, params: &Params, reading: &Reading) {
    sheet.section("budget", "budget");
    let mut row = |name: &str, bytes: Bytes, note: &str| sheet.row(name, bytes, note);
    let limited = params
        .machine
        .limited_by
        .as_ref()
        .filter(|_| params.budget.total == params.machine.total);
    let limited = limited.map(|group| format!("limit of the control group `{group}`"));
    row(
        "memory",
        params.budget.total,
        limited.as_deref().unwrap_or_default(),
    );
    row("reserve", params.budget.reserve, "never handed out");
    row("budget", params.budget.bytes(), "memory minus reserve");
    row(
        "available now",
        reading.meminfo.available_low(),
        "MemAvailable minus CmaFree",
    );
    let pool = reading.pool.map_or(Bytes::ZERO, |pool| pool.bytes());
    if reading.pool.is_some() {
        row(
            "nvmap page pool",
            pool,
            "available to the next GPU allocation",
        );
    }
    if let Some(group) = reading.group {
        row(
            "left in the group",
            group.left,
            "lowest of all limits, reclaimable page cache included",
        );
    }
    let available = reading.sample(Timestamp::START).available();
    if params.budget.bytes() > available {
        let short = params.budget.bytes().saturating_sub(available);
        row(
            "used by others",
            short,
            "of the budget at present; unaccounted as long as it remains",
        );
    }
    row(
        "Elevated below",
        params.pressure.elevated_below,
        "of headroom: shed",
    );
    row(
        "Critical below",
        params.pressure.critical_below,
        "of headroom: shed at once",
    );
}

/// Prints learned peaks, which take precedence over the configuration.
fn print_peaks(sheet: &mut Sheet, config: &Config) {
    match learned_peaks(&config.state_dir) {
        Ok(peaks) => {
            let mut peaks = peaks.iter().peekable();
            if peaks.peek().is_some() {
                sheet.section("learnedPeaks", "learned peaks");
            }
            for peak in peaks {
                let holder = match &peak.variant {
                    Some(variant) => format!("{} ({variant})", peak.holder),
                    None => peak.holder.clone(),
                };
                sheet.row(
                    &holder,
                    peak.bytes,
                    &format!(
                        "seen in {}",
                        counted(usize::try_from(peak.lives).unwrap_or(usize::MAX), "run")
                    ),
                );
            }
        }
        // The supervisor's own user can read them.
        Err(error) if error.is_denied() => {
            sheet.line("learned peaks: only root and the supervisor's user may read them");
        }
        Err(error) => sheet.fault(&error, &[error.hint().to_owned()]),
    }
}

/// Prints the demand of each holder; `false` if it cannot be met.
fn print_tenants(
    sheet: &mut Sheet,
    config: &Config,
    params: &Params,
    model: Option<&Inspected>,
) -> bool {
    sheet.section("wanted", "maximum demand");
    let mut row = |name: &str, bytes: Bytes, note: &str| sheet.row(name, bytes, note);
    let mut sum = Bytes::ZERO;
    let mut floors = Bytes::ZERO;
    let mut elastic = Bytes::ZERO;
    // An unreadable file is reported with the peaks.
    let learned = learned_peaks(&config.state_dir).unwrap_or_default();
    for worker in &config.workers {
        // It starts with its first variant, and may switch to the largest.
        let largest = worker
            .memory
            .variants
            .iter()
            .max_by_key(|variant| variant.peak);
        let (most, note) = match largest {
            Some(variant) => (variant.peak, format!("peak, as `{}`", variant.name)),
            None if worker.memory.auto => {
                let first = params
                    .worker(&worker.name)
                    .map_or(worker.memory.peak, |worker| worker.peak);
                match learned.of(&worker.name, None) {
                    Some(peak) => (peak.with_margin(), "as measured in earlier runs".to_owned()),
                    None => (
                        first,
                        "not measured yet; reserved for the first start".to_owned(),
                    ),
                }
            }
            None => (worker.memory.peak, "peak".to_owned()),
        };
        row(&worker.name, most, &note);
        sum = sum.saturating_add(most);
        floors = floors.saturating_add(if worker.memory.auto {
            most
        } else {
            worker.memory.peak
        });
    }
    if let (Some(llm), Some(model)) = (&config.llm, model) {
        let shape = &model.shape;
        let layers: Bytes = shape.layers.iter().map(|layer| layer.resident_bytes).sum();
        let workspace = shape
            .workspace_bytes_per_token
            .saturating_mul(u64::from(llm.prefill_chunk.get()))
            .saturating_add(shape.workspace_fixed_bytes);
        let kv = shape.kv.capacity_bytes(llm.context, llm.kv_type);
        let whole = [layers, shape.fixed_bytes, shape.state_bytes, workspace, kv]
            .into_iter()
            .fold(Bytes::ZERO, Bytes::saturating_add);
        row(&llm.name, whole, &what_it_is(model));
        row("  layers, head", layers, "each part can be streamed");
        row(
            "  norms, tables",
            shape.fixed_bytes.saturating_sub(model.text),
            "always resident",
        );
        row("  tokenizer, grammars", model.text, "always reserved");
        let each = shape.kv.bytes_per_token(llm.kv_type);
        let windows = shape.kv.cut_back_max().map_or_else(String::new, |last| {
            format!(
                "; {} of {} layers keep the last {last} tokens",
                shape.kv.windowed_layers(),
                shape.layer_count()
            )
        });
        row(
            "  KV cache",
            kv,
            &format!(
                "{} tokens as {}, {each} each{windows}",
                llm.context, llm.kv_type
            ),
        );
        row("  recurrent state", shape.state_bytes, "always resident");
        row(
            "  workspace",
            workspace,
            &format!("prefill in chunks of {} tokens", llm.prefill_chunk),
        );
        let floor = floor_bytes(shape, llm);
        row("  floor", floor, "0 layers resident, minimum KV");
        sum = sum.saturating_add(whole);
        floors = floors.saturating_add(floor);
        elastic = whole.saturating_sub(floor);
    }
    let budget = params.budget.bytes();
    row("sum", sum, "");
    if sum <= budget {
        sheet.verdict(&format!("everything fits, {} to spare", budget - sum));
    } else if sum.saturating_sub(elastic) <= budget {
        sheet.verdict(&format!(
            "{} over budget with everything at once: the LLM sheds it, up to {elastic}",
            sum - budget,
        ));
    } else if floors <= budget {
        sheet.verdict(&format!(
            "{} over budget with everything at once: the LLM sheds up to {elastic}, and not all workers can use \
             their largest variant together",
            sum - budget,
        ));
    } else {
        sheet.verdict(&format!(
            "cannot work: at least {floors} needed, of a budget of {budget}"
        ));
        eprintln!(
            "hint: configure fewer workers, smaller variants, a smaller model, or a larger `budget.total`"
        );
        return false;
    }
    true
}

/// Describes the model in a few words.
fn what_it_is(model: &Inspected) -> String {
    let shape = &model.shape;
    let mut words = format!("{} on {} layers", shape.architecture, shape.layer_count());
    if !model.unused.is_empty() {
        words.push_str("; unused and left in the file: ");
        words.push_str(&model.unused.join(", "));
    }
    if let Some(written) = model.without_template {
        words.push_str("; no chat template: ");
        words.push_str(written);
    }
    words
}

fn floor_bytes(shape: &ModelShape, llm: &LlmConfig) -> Bytes {
    shape.plan_bytes(&cotenant_policy::residency::EnginePlan {
        resident: std::collections::BTreeSet::new(),
        kv_capacity: llm.kv_floor,
        prefill_chunk: llm.prefill_chunk,
        kv_type: llm.kv_type_least,
    })
}

/// Output: lines for people, or one document.
struct Sheet {
    output: Output,
    document: Map<String, Value>,
    section: &'static str,
    verdict: String,
}

impl Sheet {
    fn new(output: Output) -> Self {
        Self {
            output,
            document: Map::new(),
            section: "",
            verdict: String::new(),
        }
    }

    fn section(&mut self, key: &'static str, title: &str) {
        self.section = key;
        self.document
            .insert(key.to_owned(), Value::Array(Vec::new()));
        self.print(title);
    }

    fn line(&mut self, text: &str) {
        self.entry(&[text.to_owned()], Value::from(text));
    }

    fn row(&mut self, name: &str, bytes: Bytes, note: &str) {
        let line = format!("{name:<28}{bytes:>12}  {note}");
        let value = json!({"name": name.trim_start(), "bytes": bytes.get(), "note": note});
        self.entry(&[line], value);
    }

    /// Adds an entry of a section, as lines for people and as a value for programs.
    fn entry(&mut self, lines: &[String], value: Value) {
        for line in lines {
            self.print(&format!("  {line}"));
        }
        if let Some(Value::Array(entries)) = self.document.get_mut(self.section) {
            entries.push(value);
        }
    }

    /// Sets the verdict, which is the last line; a later one replaces it.
    fn verdict(&mut self, text: &str) {
        self.verdict = text.to_owned();
    }

    /// Prints a fault: on stderr for people, as an entry of `errors` for programs.
    fn fault(&mut self, error: &dyn Error, hints: &[String]) {
        let mut causes = Vec::new();
        let mut cause = error.source();
        while let Some(error) = cause {
            causes.push(error.to_string());
            cause = error.source();
        }
        self.faults(&error.to_string(), &causes, hints);
    }

    fn faults(&mut self, message: &str, causes: &[String], hints: &[String]) {
        if self.output == Output::Table {
            eprintln!("error: {message}");
            causes
                .iter()
                .for_each(|cause| eprintln!("  caused by: {cause}"));
            hints.iter().for_each(|hint| eprintln!("hint: {hint}"));
            return;
        }
        let errors = self.document.entry("errors").or_insert_with(|| json!([]));
        if let Value::Array(errors) = errors {
            errors.push(json!({"message": message, "causes": causes, "hint": hints.join("; ")}));
        }
    }

    fn print(&self, line: &str) {
        if self.output == Output::Table {
            // A closed pipe ends the output, not the check.
            let _ = output::write(&format!("{line}\n"));
        }
    }

    fn finish(mut self, fine: bool) {
        self.print(&format!("verdict: {}", self.verdict));
        self.document
            .insert("verdict".to_owned(), Value::from(self.verdict));
        self.document.insert("ok".to_owned(), Value::from(fine));
        if self.output != Output::Table {
            let _ = output::write_json(self.output, &Value::Object(self.document));
        }
    }
}
