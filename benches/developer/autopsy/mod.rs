//! `developer autopsy`: classification of injected deaths of real processes.
//!
//! Every run is a worker under the daemon's supervisor. The certificate is checked: its class, deaths wrongly
//! classified as out of memory, and its delay.

mod kinds;
mod programs;

use std::{
    collections::BTreeMap,
    fs::OpenOptions,
    io::Write as _,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::timeout};

use self::{
    kinds::{Hand, Kind, Need},
    programs::Programs,
};
use cotenant::cli::{
    Output,
    exit::CliError,
    output::{self, Column, Table},
};
use cotenant::{
    policy::death::{Confidence, DeathCertificate, DeathClass},
    probe::ProbeRoot,
    worker::{
        confine::Groups,
        handle::WorkerHandle,
        report::{WorkerEvent, WorkerEventKind},
    },
};

/// Settings of the measurement.
#[derive(Debug, clap::Args)]
pub(crate) struct AutopsyArgs {
    /// How often each kind of death is injected.
    #[arg(long, value_name = "COUNT", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Only kinds whose name contains this text.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

struct Tally {
    name: &'static str,
    class: DeathClass,
    got: BTreeMap<DeathClass, u32>,
    least: Confidence,
    /// From observing the end to the certificate, µs.
    took_us: Vec<u64>,
    /// From an external signal to receiving the certificate, µs.
    since_signal_us: Vec<u64>,
    /// A wrong sentence, or else the last one.
    sentence: String,
    /// Reason why the kind was skipped.
    skipped: Option<String>,
}

/// Runs the measurement; `false` if a death was misclassified or classified too late.
///
/// # Errors
///
/// If the programs cannot be built, or a worker does not die.
pub(super) async fn run(args: &AutopsyArgs, format: Output) -> Result<bool, CliError> {
    let failed = |problem: String| CliError::plain(problem, cotenant::cli::exit::FAILED);
    let programs = Programs::build().map_err(failed)?;
    let roots = ProbeRoot::default();
    let groups = Groups::open(&roots);
    let wanted = |kind: &Kind| {
        args.only
            .as_ref()
            .is_none_or(|text| kind.name.contains(text.as_str()))
    };
    let mut tallies = Vec::new();
    for kind in kinds::all(&programs).iter().filter(|kind| wanted(kind)) {
        let mut tally = Tally {
            name: kind.name,
            class: kind.class,
            got: BTreeMap::new(),
            least: Confidence::Certain,
            took_us: Vec::new(),
            since_signal_us: Vec::new(),
            sentence: String::new(),
            skipped: lacks(kind.needs, &programs, &groups),
        };
        for number in 0..args.count {
            if tally.skipped.is_some() {
                break;
            }
            let (certificate, since) = one(kind, number, &roots, &groups, &programs)
                .await
                .map_err(|problem| failed(format!("{}: {problem}", kind.name)))?;
            tally.take(certificate, since);
        }
        tallies.push(tally);
    }
    match format {
        Output::Table => output::write(&describe(&tallies))?,
        Output::Json | Output::Ndjson => output::write_json(format, &to_json(&tallies))?,
    }
    Ok(tallies.iter().all(Tally::is_right))
}

/// Returns a missing requirement of a kind.
fn lacks(need: Need, programs: &Programs, groups: &Groups) -> Option<String> {
    match need {
        Need::Nothing => None,
        Need::C | Need::Time | Need::Group if !programs.c => {
            Some("there is no C compiler `cc`".to_owned())
        }
        Need::Cpp => (!programs.cpp).then(|| "there is no C++ compiler `c++`".to_owned()),
        Need::Group => groups.describe().err(),
        Need::C | Need::Time => None,
    }
}

async fn one(
    kind: &Kind,
    number: u32,
    roots: &ProbeRoot,
    groups: &Groups,
    programs: &Programs,
) -> Result<(DeathCertificate, Option<Duration>), String> {
    let log = programs.file("kmsg");
    let mut roots = roots.clone();
    match kind.hand {
        Hand::KernelRecord => {
            std::fs::write(&log, "").map_err(|error| error.to_string())?;
            roots.dev = programs.file("");
        }
        Hand::UnseenProcess(_) => roots.dev = programs.file("no-such-folder"),
        _ => {}
    }
    let (sender, mut events) = mpsc::channel(EVENTS);
    let mut spec = kind.spec.clone();
    // The previous one may still be exiting, together with its control group.
    spec.name = format!("{}-{number}", spec.name);
    let worker = WorkerHandle::new(spec, roots, groups.clone(), sender);
    let started = worker.start(None).await;
    let pid = started.as_ref().ok().copied();
    if kind.hand != Hand::Own && !worker.ready().await {
        return Err("it did not get ready".to_owned());
    }
    let began = Instant::now();
    let stopping = match (kind.hand, pid) {
        (Hand::Stop, _) => Some(tokio::spawn({
            let worker = worker.clone();
            async move {
                worker
                    .stop_because(None, "2 GiB are needed for `llm`")
                    .await
            }
        })),
        (Hand::Hung, _) => Some(tokio::spawn({
            let worker = worker.clone();
            async move {
                worker
                    .end_hung("no answer for 30 s, and none to 3 questions after it")
                    .await
            }
        })),
        (Hand::OtherProcess(signal) | Hand::UnseenProcess(signal), Some(pid)) => {
            strike(pid, signal)?;
            None
        }
        (Hand::KernelRecord, Some(pid)) => {
            let comm = std::fs::read_to_string(format!("/proc/{pid}/comm"))
                .map_err(|error| error.to_string())?;
            let record = kinds::RECORD
                .replace("PID", &pid.to_string())
                .replace("COMM", comm.trim_end());
            let mut file = OpenOptions::new()
                .append(true)
                .open(&log)
                .map_err(|error| error.to_string())?;
            file.write_all(record.as_bytes())
                .map_err(|error| error.to_string())?;
            strike(pid, libc::SIGKILL)?;
            None
        }
        _ => None,
    };
    let certificate = certificate_of(&mut events).await?;
    let since = matches!(
        kind.hand,
        Hand::OtherProcess(_) | Hand::UnseenProcess(_) | Hand::KernelRecord
    )
    .then(|| began.elapsed());
    if let Some(stopping) = stopping {
        let _ = stopping.await;
    }
    Ok((certificate, since))
}

fn strike(pid: u32, signal: libc::c_int) -> Result<(), String> {
    let pid = i32::try_from(pid).map_err(|error| error.to_string())?;
    let signal = Signal::try_from(signal).map_err(|error| error.to_string())?;
    kill(Pid::from_raw(pid), signal).map_err(|error| error.to_string())
}

async fn certificate_of(
    events: &mut mpsc::Receiver<WorkerEvent>,
) -> Result<DeathCertificate, String> {
    while let Some(event) = timeout(PATIENCE, events.recv())
        .await
        .map_err(|_| format!("it has not died within {} s", PATIENCE.as_secs()))?
    {
        if let WorkerEventKind::Died(certificate) = event.kind {
            return Ok(*certificate);
        }
    }
    Err("there was no certificate".to_owned())
}

impl Tally {
    fn take(&mut self, certificate: DeathCertificate, since: Option<Duration>) {
        let right = certificate.verdict.class == self.class;
        *self.got.entry(certificate.verdict.class).or_default() += 1;
        self.least = self.least.min(certificate.verdict.confidence);
        self.took_us.push(certificate.took_us);
        self.since_signal_us
            .extend(since.map(|since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX)));
        if self.sentence.is_empty() || !right {
            self.sentence = certificate.verdict.sentence;
        }
    }

    fn runs(&self) -> u32 {
        self.got.values().sum()
    }

    fn right(&self) -> u32 {
        self.got.get(&self.class).copied().unwrap_or(0)
    }

    fn false_oom(&self) -> u32 {
        let wrong = self
            .got
            .iter()
            .filter(|(class, _)| OUT_OF_MEMORY.contains(class) && **class != self.class);
        wrong.map(|(_, count)| count).sum()
    }

    fn is_right(&self) -> bool {
        let in_time = |us: &u64| *us <= u64::try_from(DELAY_MAX.as_micros()).unwrap_or(u64::MAX);
        self.right() == self.runs() && self.took_us.iter().all(in_time)
    }
}

/// Returns a percentile in ms.
fn percentile_ms(values: &[u64], per_mille: usize) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * per_mille).div_ceil(1000).saturating_sub(1);
    let us = u32::try_from(*sorted.get(rank)?).unwrap_or(u32::MAX);
    Some(f64::from(us) / 1000.0)
}

fn shown(value: Option<f64>) -> String {
    value.map_or_else(String::new, |ms| format!("{ms:.1} ms"))
}

fn describe(tallies: &[Tally]) -> String {
    let mut table = Table::new([
        Column::Text("INJECTED"),
        Column::Text("CLASS"),
        Column::Figure("RIGHT"),
        Column::Text("CONFIDENCE"),
        Column::Figure("P50"),
        Column::Figure("P99"),
        Column::Figure("MAX"),
        Column::Text("CALLED OTHERWISE"),
    ]);
    for tally in tallies {
        let others: Vec<String> = tally
            .got
            .iter()
            .filter(|(class, _)| **class != tally.class)
            .map(|(class, count)| format!("{class} {count}"))
            .collect();
        table.row([
            tally.name.to_owned(),
            tally.class.to_string(),
            format!("{} of {}", tally.right(), tally.runs()),
            format!("{} or more", tally.least),
            shown(percentile_ms(&tally.took_us, 500)),
            shown(percentile_ms(&tally.took_us, 990)),
            shown(percentile_ms(&tally.took_us, 1000)),
            tally
                .skipped
                .as_ref()
                .map_or_else(|| others.join(", "), |reason| format!("left out: {reason}")),
        ]);
    }
    let mut text = table.render();
    let all: Vec<u64> = tallies
        .iter()
        .flat_map(|tally| tally.took_us.iter().copied())
        .collect();
    let struck: Vec<u64> = tallies
        .iter()
        .flat_map(|tally| tally.since_signal_us.iter().copied())
        .collect();
    let sum = |count: fn(&Tally) -> u32| -> u32 { tallies.iter().map(count).sum() };
    text.push_str(&format!(
        "{} kinds, {} deaths: {} called by their name, {} wrongly out of memory\n",
        tallies
            .iter()
            .filter(|tally| tally.skipped.is_none())
            .count(),
        sum(Tally::runs),
        sum(Tally::right),
        sum(Tally::false_oom),
    ));
    text.push_str(&format!(
        "from the end to the certificate: p50 {}, p99 {}, max {}\n",
        shown(percentile_ms(&all, 500)),
        shown(percentile_ms(&all, 990)),
        shown(percentile_ms(&all, 1000)),
    ));
    if !struck.is_empty() {
        text.push_str(&format!(
            "from the signal of another to the certificate in hand: p50 {}, p99 {}, max {}\n",
            shown(percentile_ms(&struck, 500)),
            shown(percentile_ms(&struck, 990)),
            shown(percentile_ms(&struck, 1000)),
        ));
    }
    for tally in tallies.iter().filter(|tally| tally.right() < tally.runs()) {
        text.push_str(&format!("{}: {}\n", tally.name, tally.sentence));
    }
    text
}

fn to_json(tallies: &[Tally]) -> Value {
    let all: Vec<u64> = tallies
        .iter()
        .flat_map(|tally| tally.took_us.iter().copied())
        .collect();
    let kinds: Vec<Value> = tallies
        .iter()
        .map(|tally| {
            json!({
                "kind": tally.name,
                "class": tally.class,
                "runs": tally.runs(),
                "right": tally.right(),
                "falseOom": tally.false_oom(),
                "got": tally.got.iter().map(|(class, count)| (class.name(), count)).collect::<BTreeMap<_, _>>(),
                "leastConfidence": tally.least,
                "p99Ms": percentile_ms(&tally.took_us, 990),
                "maxMs": percentile_ms(&tally.took_us, 1000),
                "sinceSignalMaxMs": percentile_ms(&tally.since_signal_us, 1000),
                "sentence": tally.sentence,
                "leftOut": tally.skipped,
            })
        })
        .collect();
    json!({
        "kinds": kinds,
        "deaths": tallies.iter().map(Tally::runs).sum::<u32>(),
        "right": tallies.iter().map(Tally::right).sum::<u32>(),
        "falseOom": tallies.iter().map(Tally::false_oom).sum::<u32>(),
        "p99Ms": percentile_ms(&all, 990),
        "maxMs": percentile_ms(&all, 1000),
    })
}

/// Longest wait for one death; the longest kind takes a second of processor time.
const PATIENCE: Duration = Duration::from_secs(30);

/// Bound of the event queue of one worker.
const EVENTS: usize = 64;

/// Limit on the delay of a certificate.
const DELAY_MAX: Duration = Duration::from_millis(200);

/// Classes of kills by the kernel for lack of memory.
const OUT_OF_MEMORY: [DeathClass; 2] = [DeathClass::GlobalOom, DeathClass::MemcgOom];
