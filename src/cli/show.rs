//! Messages as text.

use std::io::{self, IsTerminal as _};

use ratatui::crossterm::terminal::size;

use super::output::{Column, Table, counted};
use cotenant_rpc::{
    json::{command_gap_ms, word},
    v1,
};
use cotenant_units::Bytes;

/// Formats a time span for people: `12.3 s`, `4 min 5 s`, `3 h 20 min`.
pub(super) fn span(span: &prost_types::Duration) -> String {
    let seconds = span.seconds.max(0);
    match seconds {
        0..60 => format!("{}.{} s", seconds, span.nanos.max(0) / 100_000_000),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

pub(super) fn leases_table(leases: &[v1::Lease]) -> String {
    use Column::{Figure, Text};
    Table::of(
        leases,
        &[
            (Text("LEASE"), |lease| lease.name.clone()),
            (Text("KIND"), |lease| {
                word(lease.kind().as_str_name(), "LEASE_KIND_")
            }),
            (Text("CLASS"), |lease| {
                word(lease.lease_class().as_str_name(), "LEASE_CLASS_").replace('_', "-")
            }),
            (Text("STATE"), state_of_lease),
            (Figure("HELD"), |lease| bytes(lease.held_bytes)),
            (Figure("USED"), |lease| optional(lease.used_bytes)),
            (Figure("UNACCOUNTED"), |lease| {
                let beyond = |used: u64| used.checked_sub(lease.held_bytes);
                optional(lease.used_bytes.and_then(beyond).filter(|more| *more > 0))
            }),
            (Figure("TARGET"), target_of_lease),
            (Figure("MIN"), |lease| bytes(lease.min_bytes)),
            (Figure("MAX"), |lease| bytes(lease.max_bytes)),
            (Figure("EXPIRES IN"), |lease| {
                lease.expires_in.as_ref().map_or_else(String::new, span)
            }),
            (Text("CONTROL GROUP"), |lease| lease.cgroup.clone()),
        ],
    )
    .render()
}

fn state_of_lease(lease: &v1::Lease) -> String {
    word(lease.state().as_str_name(), "LEASE_STATE_")
}

fn target_of_lease(lease: &v1::Lease) -> String {
    optional(lease.target.as_ref().map(|target| target.target_bytes))
}

fn bytes(bytes: u64) -> String {
    Bytes::new(bytes).to_string()
}

fn optional(figure: Option<u64>) -> String {
    figure.map_or_else(String::new, bytes)
}

/// Renders the state for people, in lines of at most `columns`.
pub(super) fn status_text(status: &v1::GetStatusResponse, columns: usize) -> String {
    let wrapped = |line: &str| wrapped(line, columns);
    let mut lines = vec![format!(
        "cotenant {}, up {}, run {}{}",
        status.version,
        status.uptime.as_ref().map_or_else(String::new, span),
        status.boot_id,
        if status.draining { ", draining" } else { "" },
    )];
    if let Some(budget) = &status.budget {
        let supervisor = budget
            .supervisor_bytes
            .map_or_else(String::new, |own| format!(", supervisor {}", bytes(own)));
        lines.push(format!(
            "budget    {}: held {}, used {}, unaccounted {}, free {}{supervisor}",
            bytes(budget.budget_bytes),
            bytes(budget.held_bytes),
            bytes(budget.used_bytes),
            bytes(budget.unaccounted_bytes),
            bytes(budget.free_bytes),
        ));
        if !status.limited_by.is_empty() {
            let total = bytes(budget.total_bytes);
            lines.push(format!(
                "          limited to {total} by the control group `{}`",
                status.limited_by
            ));
        }
    }
    if let Some(pressure) = &status.pressure {
        let mut line = format!(
            "pressure  {}: headroom {} (Elevated below {}, Critical below {})",
            word(pressure.level().as_str_name(), "PRESSURE_LEVEL_"),
            pressure
                .headroom_bytes
                .map_or_else(|| "unknown".to_owned(), bytes),
            bytes(pressure.elevated_below_bytes),
            bytes(pressure.critical_below_bytes),
        );
        if let Some(available) = pressure.mem_available_bytes {
            line.push_str(&format!(", available {}", bytes(available)));
        }
        if let Some(ratio) = pressure.some_avg10_ratio {
            line.push_str(&format!(
                ", stalled {:.2} % of the last 10 s",
                ratio * 100.0
            ));
        }
        lines.push(line);
        if let Some(left) = &pressure.exhausted_in {
            lines.push(format!(
                "          losing {} per second: exhausted in {}",
                bytes(pressure.losing_bytes_per_second),
                span(left),
            ));
        }
        if !pressure.stall_watch.is_empty() {
            lines.push(format!(
                "          stalls are watched {}",
                pressure.stall_watch
            ));
        }
    }
    lines.extend(
        status
            .reboot_advised
            .iter()
            .map(|why| format!("reboot    advised: {why}")),
    );
    if let Some(engine) = &status.engine {
        lines.push(engine_line(engine));
        if !engine.growth_waits.is_empty() {
            lines.push(format!("          not growing: {}", engine.growth_waits));
        }
        if engine.sheds > 0 {
            lines.push(format!(
                "          {}, {} released, touched or reserved; {} regrown",
                counted(usize::try_from(engine.sheds).unwrap_or(usize::MAX), "shed"),
                bytes(engine.shed_bytes),
                bytes(engine.regrown_bytes),
            ));
        }
    }
    let mut shown: String = lines.iter().map(|line| wrapped(line)).collect();
    if !status.workers.is_empty() {
        shown.push('\n');
        shown.push_str(&workers_table(&status.workers));
        for worker in &status.workers {
            let confinement = worker
                .confinement
                .iter()
                .filter(|line| line.contains("not in force"));
            for line in said_of(worker).iter().chain(confinement) {
                shown.push_str(&wrapped(&format!("{}: {line}", worker.name)));
            }
        }
    }
    shown.push('\n');
    shown.push_str(&holders_table(&status.leases));
    if !status.learned_peaks.is_empty() {
        shown.push('\n');
        shown.push_str(&peaks_table(&status.learned_peaks));
    }
    for line in status
        .locked
        .iter()
        .filter(|line| line.contains("may be paged out"))
    {
        shown.push_str(&wrapped(line));
    }
    for address in &status.absent_addresses {
        shown.push_str(&wrapped(&format!(
            "`{address}` is not an address of this machine; it is served once the machine has it"
        )));
    }
    if status.standby_missed > 0 {
        shown.push_str(&wrapped(&format!(
            "allocations of sheds beyond the emergency reserve: {}; within it: {}",
            status.standby_missed, status.standby_served
        )));
    }
    if let Some(answers @ 1..) = status.running_answers {
        let answers = usize::try_from(answers).unwrap_or(usize::MAX);
        shown.push_str(&format!("running: {}\n", counted(answers, "answer")));
    }
    if status.waiting_requests > 0 {
        let waiting = usize::try_from(status.waiting_requests).unwrap_or(usize::MAX);
        shown.push_str(&format!("waiting: {}\n", counted(waiting, "request")));
    }
    shown
}

/// Wraps a line to `columns`, with continuation lines indented; a longer word has its own line.
pub(super) fn wrapped(line: &str, columns: usize) -> String {
    let mut shown = String::new();
    let mut width = 0;
    let indent = line.len() - line.trim_start().len();
    // A number stays with its unit.
    let is_number = |word: &str| {
        word.starts_with(|first: char| first.is_ascii_digit()) && word.parse::<f64>().is_ok()
    };
    let mut words: Vec<String> = Vec::new();
    for word in line.trim_start().split(' ') {
        match words.last_mut().filter(|last| is_number(last)) {
            Some(number) => number.push_str(&format!(" {word}")),
            None => words.push(word.to_owned()),
        }
    }
    for word in &words {
        let length = word.chars().count();
        if width == 0 {
            shown.push_str(&" ".repeat(indent));
            width = indent;
        } else if width + 1 + length > columns {
            shown.truncate(shown.trim_end().len());
            shown.push_str(&format!("\n{:INDENT$}", ""));
            width = INDENT;
        } else {
            shown.push(' ');
            width += 1;
        }
        shown.push_str(word);
        width += length;
    }
    shown + "\n"
}

/// Returns the width of the terminal on stdout, or the default width if it is none.
pub(super) fn columns() -> usize {
    let size = if io::stdout().is_terminal() {
        size().ok()
    } else {
        None
    };
    size.map_or(WIDTH, |(columns, _)| usize::from(columns).max(COLUMNS_MIN))
}

/// Default width of a terminal, in columns.
const WIDTH: usize = 80;

/// Minimum width for readable output.
const COLUMNS_MIN: usize = 40;

/// Indentation of continuation lines.
const INDENT: usize = 10;

/// Returns notes about a worker: why it waits, or how it last ended.
fn said_of(worker: &v1::Worker) -> Option<String> {
    let class = match worker.death_class.as_str() {
        "" => String::new(),
        class => format!("[{class}] "),
    };
    let remedy = match worker.needs_operator {
        true => format!("; {}", worker.remedy),
        false => String::new(),
    };
    match (worker.waits_for.as_str(), worker.last_exit.as_str()) {
        ("", "") => None,
        ("", exit) => Some(format!("{class}{exit}{remedy}")),
        (waits, _) => Some(format!("waits for memory: {waits}")),
    }
}

/// Renders leases in 80 columns; `cotenant leases` shows all columns.
pub(super) fn holders_table(leases: &[v1::Lease]) -> String {
    use Column::{Figure, Text};
    Table::of(
        leases,
        &[
            (Text("LEASE"), |lease| lease.name.clone()),
            (Text("STATE"), state_of_lease),
            (Figure("HELD"), |lease| bytes(lease.held_bytes)),
            (Figure("USED"), |lease| optional(lease.used_bytes)),
            (Figure("TARGET"), target_of_lease),
            (Figure("MIN"), |lease| bytes(lease.min_bytes)),
            (Figure("MAX"), |lease| bytes(lease.max_bytes)),
        ],
    )
    .render()
}

/// Renders sequences of the LLM, a row each; the class replaces a missing client name.
pub(super) fn sequences_table(sequences: &[v1::Sequence]) -> String {
    let is_saved = sequences.iter().any(|sequence| sequence.disk_bytes > 0);
    let mut head = vec![
        Column::Text("SEQ"),
        Column::Text("STATE"),
        Column::Figure("KV"),
        Column::Figure("SHARED"),
        Column::Figure("TOKENS"),
        Column::Figure("PROMPT"),
        Column::Figure("REUSED"),
        Column::Figure("ANSWER"),
        Column::Text("CLIENT"),
    ];
    if is_saved {
        head.insert(4, Column::Figure("DISK"));
    }
    let mut table = Table::new(head);
    for sequence in sequences {
        let waits = sequence.state() == v1::SequenceState::Waiting;
        // Figures of the last request are known only for the last conversation.
        let is_on_disk = sequence.state() == v1::SequenceState::OnDisk;
        let is_beside = sequence.idle.is_some() || is_on_disk;
        let figure = |is_known: bool, figure: u32| match is_known {
            true => figure.to_string(),
            false => String::new(),
        };
        let mut state = word(sequence.state().as_str_name(), "SEQUENCE_STATE_");
        if let Some(since) = sequence.waited.as_ref().or(sequence.idle.as_ref()) {
            state = format!("{state} {}", span(since));
        }
        let mut row = vec![
            match sequence.id {
                0 => String::new(),
                id => id.to_string(),
            },
            state,
            optional((!waits && !is_on_disk).then_some(sequence.kv_bytes)),
            optional((sequence.shared_bytes > 0).then_some(sequence.shared_bytes)),
            figure(!waits, sequence.kv_tokens),
            figure(!is_beside, sequence.prompt_tokens),
            figure(!waits && !is_beside, sequence.reused_tokens),
            figure(!waits && !is_beside, sequence.generated_tokens),
            match sequence.client.as_str() {
                "" if is_beside => String::new(),
                "" => format!(
                    "({})",
                    word(sequence.lease_class().as_str_name(), "LEASE_CLASS_")
                ),
                client => client.to_owned(),
            },
        ];
        if is_saved {
            row.insert(
                4,
                optional((sequence.disk_bytes > 0).then_some(sequence.disk_bytes)),
            );
        }
        table.row(row);
    }
    table.render()
}

fn engine_line(engine: &v1::Engine) -> String {
    let state = word(engine.state().as_str_name(), "ENGINE_STATE_");
    if engine.model.is_empty() {
        return match engine.failure.as_str() {
            "" => format!("engine    {state}"),
            failure => format!("engine    {state}: {failure}{}", next_try(engine)),
        };
    }
    let mut line = format!(
        "engine    {state}: {} ({}), {} of {} layers resident, KV capacity {} of {} tokens{}, {} of {}",
        engine.model,
        engine.architecture,
        engine.layers_resident,
        engine.layers_total,
        engine.kv_capacity_tokens,
        engine.kv_capacity_full_tokens,
        match engine.kv_type() {
            v1::KvType::Unspecified => "",
            v1::KvType::F16 => " as f16",
            v1::KvType::Q8 => " as q8",
            v1::KvType::Q4 => " as q4",
        },
        Bytes::new(engine.plan_bytes),
        Bytes::new(engine.full_plan_bytes),
    );
    for (tokens, what) in [
        (engine.kv_used_tokens, "in use"),
        (engine.kv_kept_tokens, "kept of earlier answers"),
        (engine.kv_dropped_tokens, "dropped of this one"),
    ] {
        if tokens > 0 {
            line.push_str(&format!(", {tokens} tokens {what}"));
        }
    }
    if engine.kv_untouched_bytes > 0 {
        line.push_str(&format!(
            ", {} of KV untouched",
            Bytes::new(engine.kv_untouched_bytes)
        ));
    }
    if let Some(experts) = &engine.experts {
        line.push_str(&format!(
            ", {} of {} experts in memory",
            experts.resident, experts.total
        ));
        if let Some(found) = (experts.found * 100).checked_div(experts.found + experts.read) {
            line.push_str(&format!(" ({found} % of uses)"));
        }
    }
    if engine.milli_tokens_per_second > 0 {
        let (whole, rest) = (
            engine.milli_tokens_per_second / 1000,
            engine.milli_tokens_per_second % 1000 / 100,
        );
        line.push_str(&format!(", about {whole}.{rest} tokens/s"));
    }
    if engine.prefill_chunk_tokens > 0 {
        line.push_str(&format!(
            ", prompts by {} tokens",
            engine.prefill_chunk_tokens
        ));
    }
    if let Some(ms) = command_gap_ms(engine) {
        line.push_str(&format!(", commands within {ms:.1} ms"));
    }
    if engine.changing {
        line.push_str(", changing");
    }
    if !engine.failure.is_empty() {
        line.push_str(&format!(": {}{}", engine.failure, next_try(engine)));
    }
    line
}

/// Returns when loading a failed engine is retried.
fn next_try(engine: &v1::Engine) -> String {
    match &engine.next_try {
        Some(left) => format!(
            "; next try in {}.{} s",
            left.seconds,
            left.nanos / 100_000_000
        ),
        None if engine.failed_permanently => "; no retry until that changes".to_owned(),
        None => String::new(),
    }
}

fn peaks_table(peaks: &[v1::LearnedPeak]) -> String {
    use Column::{Figure, Text};
    Table::of(
        peaks,
        &[
            (Text("HOLDER"), |peak| peak.holder.clone()),
            (Text("VARIANT"), |peak| peak.variant.clone()),
            (Figure("LEARNED PEAK"), |peak| bytes(peak.peak_bytes)),
            (Figure("RUNS"), |peak| peak.lives.to_string()),
        ],
    )
    .render()
}

/// Returns the state, and why it is stopped: `stopped (idle)`.
fn state_of(worker: &v1::Worker) -> String {
    if worker.state() == v1::WorkerState::Degraded {
        let what = if worker.needs_operator {
            "needs operator"
        } else {
            "given up"
        };
        return format!("failed: {what}");
    }
    let state = word(worker.state().as_str_name(), "WORKER_STATE_").replace('_', "-");
    match (worker.resting.as_str(), worker.winding_up) {
        ("", false) => state,
        ("", true) => format!("{state} (winding up)"),
        (rest, _) => format!("{state} ({rest})"),
    }
}

pub(super) fn workers_table(workers: &[v1::Worker]) -> String {
    use Column::{Figure, Text};
    Table::of(
        workers,
        &[
            (Text("WORKER"), |worker| worker.name.clone()),
            (Text("STATE"), state_of),
            (Figure("PID"), |worker| {
                worker.pid.map_or_else(String::new, |pid| pid.to_string())
            }),
            (Text("VARIANT"), |worker| worker.variant.clone()),
            (Figure("STARTS"), |worker| worker.starts.to_string()),
            (Figure("FAILURES"), |worker| worker.failures.to_string()),
        ],
    )
    .render()
}

/// Renders an event for people: number, time of day (UTC), mark, and the entry on one line.
pub(super) fn entry_text(entry: &v1::JournalEntry) -> String {
    let mark = match entry.kind() {
        v1::EntryKind::Action => ">",
        v1::EntryKind::Dropped => "!",
        v1::EntryKind::Start => "=",
        v1::EntryKind::Event | v1::EntryKind::Unspecified => " ",
    };
    let clock = entry.time.as_ref().map_or_else(|| "-".to_owned(), clock);
    format!("{:>6} {clock} {mark} {}\n", entry.sequence, entry.summary)
}

/// Formats the time of day in UTC to a tenth of a second: `15:04:05.7`.
fn clock(time: &prost_types::Timestamp) -> String {
    let second = time.seconds.rem_euclid(24 * 60 * 60);
    format!(
        "{:02}:{:02}:{:02}.{}",
        second / 3600,
        second / 60 % 60,
        second % 60,
        time.nanos.max(0) / 100_000_000
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wide_terminal_is_used() {
        let line = "engine    ready: a model of some name, with so many layers, of which all are resident, and room for many tokens";
        assert_eq!(wrapped(line, 200), format!("{line}\n"));
        assert!(wrapped(line, WIDTH).lines().count() == 2);
    }

    #[test]
    fn the_state_of_a_busy_device_fits_into_80_columns() {
        let lease = |name: &str| v1::Lease {
            name: name.into(),
            state: v1::LeaseState::Revoking.into(),
            held_bytes: 1023 << 30,
            min_bytes: 1000 << 20,
            max_bytes: 1023 << 20,
            used_bytes: Some(1001 << 20),
            target: Some(v1::Target {
                target_bytes: 999 << 20,
                ..v1::Target::default()
            }),
            ..v1::Lease::default()
        };
        let status = v1::GetStatusResponse {
            version: "0.1.0".into(),
            boot_id: "3f2c8a51-6f0e-4a2e-9a0a-0123456789ab".into(),
            uptime: Some(prost_types::Duration { seconds: 86_000, nanos: 0 }),
            draining: true,
            reboot_advised: vec!["no process holds 2.1 GiB of the 4.7 GiB that the GPU has, for a long time".into()],
            engine: Some(v1::Engine {
                model: "Qwen3-4B-Instruct-2507-Q4_K_M".into(),
                architecture: "qwen3".into(),
                growth_waits: "growing 412 MiB needs headroom of 1.9 GiB, there is 1.2 GiB".into(),
                layers_total: 36,
                sheds: 1,
                milli_tokens_per_second: 12_345,
                experts: Some(v1::Experts {
                    total: 3072,
                    resident: 412,
                    found: 62,
                    read: 38,
                }),
                ..v1::Engine::default()
            }),
            workers: vec![v1::Worker {
                name: "asr".into(),
                state: v1::WorkerState::Degraded.into(),
                pid: Some(4_194_304),
                variant: "grammar".into(),
                failures: 4,
                last_exit: "worker `asr` exited with code 1 after 0.2 s, 4 times within 60 s, and is left alone".into(),
                death_class: "exit_code".into(),
                ..v1::Worker::default()
            }],
            leases: vec![lease("wake-word#12"), lease("vision#7")],
            ..v1::GetStatusResponse::default()
        };
        let text = status_text(&status, WIDTH);
        for line in text.lines() {
            assert!(
                line.chars().count() <= WIDTH && line.trim_end() == line,
                "{line}\n{text}"
            );
        }
        assert!(
            text.contains("412 of 3072 experts")
                && text.contains("reboot    advised: no process")
                && text.contains("failed: given up")
                && text.contains("1 shed,"),
            "{text}"
        );
        assert!(
            text.contains("\nasr: [exit_code] worker `asr` exited with code 1"),
            "{text}"
        );
    }

    #[test]
    fn spans_are_shown_in_two_units() {
        let shown = |seconds| {
            span(&prost_types::Duration {
                seconds,
                nanos: 340_000_000,
            })
        };
        assert_eq!(shown(12), "12.3 s");
        assert_eq!(shown(245), "4 min 5 s");
        assert_eq!(shown(12_000), "3 h 20 min");
    }
}
