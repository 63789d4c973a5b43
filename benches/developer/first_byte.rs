//! `developer first-byte`: time from a crossed watermark to the first byte shed.
//!
//! The neighbour is this program: it fills memory with real pages as fast as the machine permits, and records the time
//! of each MiB. The crossing is computed from the daemon's own figures, read beforehand: headroom down to the upper
//! watermark. The first byte is observed from outside, by the resident set of the daemon.

use std::{
    path::Path,
    sync::Arc,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use nix::sys::mman::{self, MapFlags, ProtFlags};

use cotenant::cli::bench::{
    daemon,
    load::Reading,
    report::{Limit, Report, at, milliseconds},
};
use cotenant::{
    cli::{demo::talk::Talk, stage::Stage},
    rpc::v1::{
        EngineState, GetStatusResponse, RegrowRequest, llm_service_client::LlmServiceClient,
        operator_service_client::OperatorServiceClient,
    },
    units::Bytes,
};

/// Settings of the benchmark.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct FirstByteArgs {
    /// Rounds to run.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
}

/// Limit on the delay between crossing the watermark and the first byte shed.
const FIRST_BYTE_MAX: Duration = Duration::from_millis(50);

/// Minimum fill rate of the neighbour, in MiB per second.
const FILL_MIN: f64 = 1024.0;

/// Memory between the initial use and the watermark.
const ROOM: Bytes = Bytes::from_mib(384);

/// Memory that the neighbour takes beyond the watermark, so that a shed becomes necessary.
const BEYOND: Bytes = Bytes::from_mib(64);

const STEP: usize = 1 << 20;

/// KV of 160 MiB of the demo model, most of which can be shed.
const KV_TOKENS: u32 = 81_920;

const PATIENCE: Duration = Duration::from_secs(30);

pub(super) async fn run(args: &FirstByteArgs) -> Result<Report, String> {
    let began = Instant::now();
    let mut stage = Stage::set(configuration).map_err(|error| error.to_string())?;
    let channel = daemon::connected(&stage, PATIENCE).await?;
    let mut operator = OperatorServiceClient::new(channel.clone());
    daemon::until(&mut operator, PATIENCE, whole)
        .await
        .map_err(daemon::last_words(&stage))?;
    let daemon = stage.daemon().pid();
    let talk = Talk::start(LlmServiceClient::new(channel), "tell me a story", began);
    if !talk.stories(1, PATIENCE).await {
        return Err(format!(
            "the LLM does not talk: {:?}",
            talk.outcome().failures
        ));
    }
    let reading = Reading::now();
    let (mut times, mut rates, mut unshed) = (Vec::new(), Vec::new(), 0u32);
    for round in 0..args.rounds {
        let status = daemon::until(&mut operator, PATIENCE, |status| {
            whole(status) && headroom(status).is_some()
        })
        .await
        .map_err(daemon::last_words(&stage))?;
        let headroom = headroom(&status).ok_or("no headroom is known")?;
        let line = status
            .pressure
            .map_or(0, |pressure| pressure.elevated_below_bytes);
        let to_line = headroom.saturating_sub(line);
        let round = tokio::task::spawn_blocking(move || fill(daemon, to_line))
            .await
            .map_err(|error| error.to_string())?
            .map_err(|problem| format!("round {round}: {problem}"))?;
        rates.push(round.mib_per_s);
        match round.first_byte {
            Some(time) => times.push(time),
            None => unshed += 1,
        }
        let _ = operator.regrow(RegrowRequest {}).await;
    }
    let outcome = talk.stop().await;
    rates.sort_unstable_by(f64::total_cmp);
    times.sort_unstable();
    let mut report = Report::new(
        "first-byte",
        format!(
            "{} rounds; the LLM generates, a neighbour fills {BEYOND} more than what there is above the line, about {ROOM}",
            args.rounds
        ),
    );
    report.figure(
        "neighbour's rate: least",
        "MiB/s",
        at(&rates, 0).copied().unwrap_or_default(),
        Some(Limit::AtLeast(FILL_MIN)),
    );
    report.figure(
        "neighbour's rate: median",
        "MiB/s",
        at(&rates, 500).copied().unwrap_or_default(),
        None,
    );
    report.figure(
        "line crossed to first byte shed: median",
        "ms",
        milliseconds(&times, 500),
        None,
    );
    report.figure(
        "line crossed to first byte shed: most",
        "ms",
        milliseconds(&times, 1000),
        Some(Limit::AtMost(FIRST_BYTE_MAX.as_secs_f64() * 1e3)),
    );
    report.figure(
        "rounds without a shed",
        "",
        f64::from(unshed),
        Some(Limit::AtMost(0.0)),
    );
    report.figure(
        "answers aborted or different",
        "",
        f64::from(u32::try_from(outcome.different).unwrap_or(u32::MAX))
            + f64::from(u32::try_from(outcome.failures.len()).unwrap_or(u32::MAX)),
        Some(Limit::AtMost(0.0)),
    );
    report.others(&reading);
    report.note("the line is taken from the daemon's own figures before each round; a negative time counts as zero");
    Ok(report)
}

struct Round {
    mib_per_s: f64,
    /// Time from the crossing to the first decrease of the daemon's resident set; `None` without a decrease.
    first_byte: Option<Duration>,
}

/// Fills memory, and observes when the daemon shrinks.
fn fill(daemon: u32, to_line: u64) -> Result<Round, String> {
    let crossed = Arc::new(AtomicU64::new(0));
    let done = Arc::new(AtomicBool::new(false));
    let began = Instant::now();
    let looking = std::thread::spawn({
        let done = Arc::clone(&done);
        move || look(daemon, began, &done)
    });
    let fill = Bytes::new(to_line).saturating_add(BEYOND);
    let length = std::num::NonZeroUsize::new(fill.as_len()).ok_or("nothing to fill")?;
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice overlaps no memory of ours.
    let start = unsafe {
        mman::mmap_anonymous(
            None,
            length,
            ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
            flags,
        )
    }
    .map_err(|error| format!("cannot map {fill}: {error}"))?;
    for offset in (0..length.get()).step_by(STEP) {
        let step = STEP.min(length.get() - offset);
        // SAFETY: the range lies within the new mapping, which is not shared.
        unsafe { start.as_ptr().cast::<u8>().add(offset).write_bytes(1, step) };
        if crossed.load(Ordering::Relaxed) == 0
            && u64::try_from(offset + step).unwrap_or(u64::MAX) >= to_line
        {
            let at = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
            crossed.store(at.max(1), Ordering::Relaxed);
        }
    }
    let took = began.elapsed().as_secs_f64();
    // Reclaim may take slightly longer.
    let end = Instant::now() + Duration::from_millis(500);
    while Instant::now() < end && !looking.is_finished() {
        std::thread::sleep(Duration::from_millis(1));
    }
    done.store(true, Ordering::Relaxed);
    let fell = looking.join().map_err(|_| "the look-out is gone")?;
    // SAFETY: the mapping is ours and no thread reads it any more.
    unsafe { mman::munmap(start, length.get()) }
        .map_err(|error| format!("cannot unmap: {error}"))?;
    let crossed = match crossed.load(Ordering::Relaxed) {
        0 => {
            return Err(format!(
                "the line was {to_line} bytes away and {fill} did not reach it"
            ));
        }
        at => Duration::from_micros(at),
    };
    #[expect(clippy::cast_precision_loss, reason = "some hundred MiB")]
    let mib = fill.whole_mib() as f64;
    Ok(Round {
        mib_per_s: mib / took.max(f64::EPSILON),
        first_byte: fell.map(|at| at.saturating_sub(crossed)),
    })
}

/// Returns the time since `began` at which the resident set of the daemon first fell 1 MiB below its maximum.
fn look(daemon: u32, began: Instant, done: &AtomicBool) -> Option<Duration> {
    let mut most = 0;
    while !done.load(Ordering::Relaxed) {
        let statm = std::fs::read_to_string(format!("/proc/{daemon}/statm")).ok()?;
        let resident: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
        most = most.max(resident);
        if most - resident >= FALL_PAGES {
            return Some(began.elapsed());
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    None
}

/// 1 MiB in pages of 4 KiB: above the error of the kernel's per-process counter, 64 pages per processor.
const FALL_PAGES: u64 = 256;

fn headroom(status: &GetStatusResponse) -> Option<u64> {
    status
        .pressure
        .as_ref()
        .and_then(|pressure| pressure.headroom_bytes)
}

fn whole(status: &GetStatusResponse) -> bool {
    status.engine.as_ref().is_some_and(|engine| {
        engine.state() == EngineState::Ready
            && !engine.changing
            && engine.kv_capacity_tokens == engine.kv_capacity_full_tokens
    }) && headroom(status).is_some_and(|headroom| {
        let line = status
            .pressure
            .as_ref()
            .map_or(0, |pressure| pressure.elevated_below_bytes);
        // The neighbour of the previous round has ended.
        headroom >= line + (ROOM.get() / 8) * 7
    })
}

fn configuration(folder: &Path) -> String {
    let folder = folder.display();
    // Engine 165 MiB, this program and the daemon some 60, the watermark 64, and the distance to it.
    format!(
        "\
budget:
  total: {}MiB
  reserve: 16MiB
  watermarks: {{elevated: 64MiB, critical: 32MiB, last_resort: 8MiB}}
  hysteresis: 8MiB
  scope: session
  dwell: 100ms
shedding: {{reclaim_min: 32MiB, settle: 50ms}}
llm:
  path: {folder}/demo.gguf
  name: bench
  threads: 1
  context: {KV_TOKENS}
  kv_floor: 512
http: {{listen: none}}
grpc: {{socket: {folder}/cotenant.sock, abstract_name: none}}
journal: {{path: {folder}/journal.ndjson}}
state_dir: {folder}/state
runtime_dir: {folder}
log: {{filter: info, format: text}}
",
        16 + 165 + 60 + 64 + ROOM.whole_mib(),
    )
}
