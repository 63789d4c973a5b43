//! `cotenant postmortem`: reports on dead workers.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Args;
use serde_json::Value;

use super::{Global, exit::CliError, global::runtime, output};
use cotenant_journal::Content;
use cotenant_policy::{
    death::{DeathCertificate, MemoryPoint},
    event::Event,
};
use cotenant_rpc::v1::{ListDeathsRequest, operator_service_client::OperatorServiceClient};

/// Says why workers died.
#[derive(Debug, Args)]
pub struct Postmortem {
    /// Worker name. Default: all workers.
    #[arg(value_name = "WORKER")]
    worker: Option<String>,
    /// Number of deaths to report, latest first.
    #[arg(short = 'n', long = "number", value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    number: u32,
    /// Read journal files, oldest first, instead of the supervisor's memory.
    #[arg(long, value_name = "FILE")]
    journal: Vec<PathBuf>,
}

pub(super) fn run(global: &Global, verb: &Postmortem) -> Result<ExitCode, CliError> {
    let deaths = if verb.journal.is_empty() {
        runtime()?.block_on(ask(global, verb))?
    } else {
        read(verb)?
    };
    let text = || {
        if deaths.is_empty() {
            let who = match &verb.worker {
                Some(worker) => format!("worker `{worker}` has not"),
                None => "no worker has".to_owned(),
            };
            return format!("{who} died since the supervisor started\n");
        }
        let texts: Vec<String> = deaths.iter().map(describe).collect();
        texts.join("\n")
    };
    output::write_list(global.output, deaths.iter().map(to_json), text)?;
    Ok(ExitCode::SUCCESS)
}

async fn ask(global: &Global, verb: &Postmortem) -> Result<Vec<DeathCertificate>, CliError> {
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let request = ListDeathsRequest {
        worker: verb.worker.clone().unwrap_or_default(),
        limit: verb.number,
    };
    let response = global
        .call(client.list_deaths(global.request(request)))
        .await?;
    response
        .deaths
        .iter()
        .map(|death| {
            serde_json::from_str(&death.certificate_json).map_err(|error| {
                CliError::failed(
                    format!("cannot read the certificate of worker `{}`", death.worker),
                    error,
                )
            })
        })
        .collect()
}

fn read(verb: &Postmortem) -> Result<Vec<DeathCertificate>, CliError> {
    let mut deaths = Vec::new();
    for path in &verb.journal {
        let act = format!("cannot read the journal `{}`", path.display());
        let contents = output::read_journal(path, act)?;
        deaths.extend(
            contents
                .entries
                .into_iter()
                .filter_map(|entry| match entry.content {
                    Content::Event(Event::WorkerDied { certificate }) => Some(*certificate),
                    _ => None,
                }),
        );
    }
    deaths.reverse();
    if let Some(worker) = &verb.worker {
        deaths.retain(|death| death.worker == *worker);
    }
    deaths.truncate(usize::try_from(verb.number).unwrap_or(usize::MAX));
    Ok(deaths)
}

/// Renders a certificate with proto3 JSON names, as every command does; the journal has its own names.
fn to_json(death: &DeathCertificate) -> Value {
    output::camel_case(serde_json::to_value(death).unwrap_or_default())
}

fn describe(death: &DeathCertificate) -> String {
    let mut text = format!("{}\n", death.verdict.sentence);
    let mut row = |name: &str, value: String| text.push_str(&format!("  {name:<14}{value}\n"));
    row(
        "class",
        format!("{} ({})", death.verdict.class, death.verdict.confidence),
    );
    row("start", format!("number {}", death.start));
    let end = std::time::SystemTime::UNIX_EPOCH + Duration::from_micros(death.end.ended_unix_us);
    row("ended", prost_types::Timestamp::from(end).to_string());
    if let Some(after) = death.end.ready_after_ms {
        row("ready after", format!("{after} ms"));
    }
    if let Some(asked) = &death.end.asked {
        row("by us", asked.clone());
    }
    for finding in &death.verdict.evidence {
        row("evidence", format!("{}: {}", finding.source, finding.text));
    }
    if let Some(progress) = &death.load_progress {
        row("loading", progress.clone());
    }
    if let Some(peak) = death.memory.peak_resident {
        row(
            "peak resident",
            format!("{peak}, of its main process or a child that it reaped"),
        );
    }
    if let Some(course) = course(&death.memory.history) {
        row("memory", course);
    }
    if let Some(lease) = death.memory.lease {
        row(
            "lease",
            format!(
                "{} held, {} to {}; {} of the budget was free",
                lease.held, lease.min, lease.max, lease.free
            ),
        );
    }
    for limit in &death.memory.limits {
        row("limit", limit.clone());
    }
    for line in &death.last_lines {
        row("output", line.clone());
    }
    row(
        "certificate",
        format!(
            "{}.{} ms after its end",
            death.took_us / 1000,
            death.took_us % 1000 / 100
        ),
    );
    if let Some(remedy) = &death.verdict.remedy {
        let who = if death.verdict.needs_operator {
            " (no restart before)"
        } else {
            ""
        };
        text.push_str(&format!("hint: {remedy}{who}\n"));
    }
    text
}

/// Renders the last measurements on one line: `910 MiB, 912 MiB, 2.1 GiB (0.4 s before its end)`.
fn course(history: &[MemoryPoint]) -> Option<String> {
    let last = history.last()?;
    let shown: Vec<String> = history
        .iter()
        .skip(history.len().saturating_sub(COURSE))
        .map(|point| point.used.to_string())
        .collect();
    let available = last.available.map_or_else(String::new, |available| {
        format!(", {available} available to the machine")
    });
    Some(format!(
        "{} ({}.{} s before its end{available})",
        shown.join(", "),
        last.before_end_ms / 1000,
        last.before_end_ms % 1000 / 100
    ))
}

const COURSE: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_policy::death::{
        Confidence, DeathClass, DeathMemory, DeathVerdict, Finding, LeaseAtDeath, ProcessEnd,
    };
    use cotenant_units::Bytes;

    #[test]
    fn a_certificate_reads_as_a_report() {
        let death = DeathCertificate {
            worker: "asr".to_owned(),
            start: 3,
            pid: Some(341_226),
            load_progress: Some("113/2034".to_owned()),
            last_lines: vec!["loading weights 113/2034".to_owned()],
            took_us: 4321,
            verdict: DeathVerdict {
                class: DeathClass::MemcgOom,
                confidence: Confidence::Certain,
                sentence: "worker `asr` (pid 341226) was killed by the kernel".to_owned(),
                evidence: vec![
                    Finding::new("waitid", "killed by signal 9 (SIGKILL)"),
                    Finding::new("counters", "group `/asr`: 1 killed for memory meanwhile"),
                ],
                remedy: Some("give the worker a larger `memory.peak`".to_owned()),
                ..DeathVerdict::default()
            },
            end: ProcessEnd {
                signal: Some(9),
                ended_unix_us: 1_790_000_000_000_000,
                lived_ms: 12_340,
                ready_after_ms: Some(410),
                ..ProcessEnd::default()
            },
            memory: DeathMemory {
                peak_resident: Some(Bytes::from_mib(1000)),
                history: vec![
                    MemoryPoint {
                        before_end_ms: 1450,
                        used: Bytes::from_mib(700),
                        available: None,
                    },
                    MemoryPoint {
                        before_end_ms: 450,
                        used: Bytes::from_mib(980),
                        available: Some(Bytes::from_gib(4)),
                    },
                ],
                lease: Some(LeaseAtDeath {
                    held: Bytes::from_gib(1),
                    min: Bytes::from_mib(512),
                    max: Bytes::from_gib(1),
                    free: Bytes::from_mib(300),
                }),
                limits: vec!["Memory of group `/asr`: 1 GiB".to_owned()],
            },
        };
        insta::assert_snapshot!(describe(&death));
    }
}
