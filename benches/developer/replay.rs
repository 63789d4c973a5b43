//! `developer replay`: time to replay a day of a voice device.
//!
//! The day is simulated: a machine and its holders sampled every second, an engine and two workers, a tenant that
//! renews its lease, and periodic utterances for which ASR needs memory that the engine sheds and regrows. The daemon's
//! own writer writes the journal, which is then replayed as by `cotenant replay`.

use std::{
    collections::VecDeque,
    path::Path,
    time::{Duration, Instant, SystemTime},
};

use super::rivals::shape;
use cotenant::cli::bench::{
    load::Reading,
    report::{Limit, Report, median},
};
use cotenant::{
    journal::{self, Content, Journal, JournalSettings, Outcome},
    policy::{
        Arbiter,
        event::{Action, Answer, EngineApplied, Event, LeaseCall},
        lease::{Class, LeaseRequest, LeaseView, Peer, Ticket},
        params::{ENGINE_TENANT, EngineParams, Params, Scope, WorkerParams},
        pressure::{GpuReading, MemoryReading, Sample},
        residency::{EnginePlan, ModelShape},
    },
    units::{Bytes, Timestamp},
};

/// Settings of `developer replay`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ReplayArgs {
    /// Hours of the day to write and to replay.
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=168))]
    pub hours: u64,
    /// Times to replay them; the median is reported.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
}

/// Limit on the duration of replaying a day.
const REPLAY_MAX: Duration = Duration::from_secs(2);
const MACHINE: Bytes = Bytes::from_gib(8);
const ENGINE: Bytes = Bytes::from_gib(5);
const OS: Bytes = Bytes::from_mib(1024);
/// Seconds between two utterances (our choice: 3 a minute, day and night), and their duration.
const UTTERANCE_EVERY: u64 = 20;
const UTTERANCE: u64 = 6;
const NEEDED: Bytes = Bytes::from_mib(700);
const TERM: Duration = Duration::from_secs(30);

/// Writes the day, and replays it.
///
/// # Errors
///
/// If the journal cannot be written or read, or a decision differs.
pub(super) fn run(args: &ReplayArgs) -> Result<Report, String> {
    let folder = std::env::temp_dir().join(format!("cotenant-replay-{}", std::process::id()));
    std::fs::create_dir(&folder)
        .map_err(|error| format!("cannot make `{}`: {error}", folder.display()))?;
    let report = measure(args, &folder.join("journal.ndjson"));
    // A remaining folder is only a temporary file.
    let _ = std::fs::remove_dir_all(&folder);
    report
}

fn measure(args: &ReplayArgs, path: &Path) -> Result<Report, String> {
    let mut day = Day::begin(path)?;
    for second in 1..=args.hours * 3600 {
        day.second(second);
    }
    drop(day);
    let bytes = std::fs::metadata(path)
        .map_err(|error| error.to_string())?
        .len();
    let reading = Reading::now();
    let (mut reads, mut all) = (Vec::new(), Vec::new());
    let (mut events, mut actions) = (0, 0);
    for _ in 0..args.rounds {
        let began = Instant::now();
        let contents = journal::read(path).map_err(|error| error.to_string())?;
        reads.push(began.elapsed());
        let runs = journal::replay(&contents.entries);
        all.push(began.elapsed());
        let [run] = runs.as_slice() else {
            return Err(format!(
                "{} runs were found in the journal of one",
                runs.len()
            ));
        };
        if run.outcome != Outcome::Same || run.gaps > 0 {
            return Err(format!("the journal does not replay: {run:?}"));
        }
        (events, actions) = (run.events, run.actions);
    }
    let seconds = |times: &[Duration]| {
        let times: Vec<f64> = times.iter().map(Duration::as_secs_f64).collect();
        median(&times).unwrap_or_default()
    };
    let mut report = Report::new(
        "replay",
        format!(
            "{} h: {events} events and {actions} actions in {} MiB",
            args.hours,
            bytes >> 20
        ),
    );
    let limit = (args.hours == 24).then_some(Limit::AtMost(REPLAY_MAX.as_secs_f64()));
    report.figure("read and replayed: median", "s", seconds(&all), limit);
    report.figure("of which read: median", "s", seconds(&reads), None);
    report.others(&reading);
    Ok(report)
}

struct Day {
    journal: Journal,
    arbiter: Arbiter,
    shape: ModelShape,
    now: Timestamp,
    engine: Bytes,
    orders: VecDeque<(u64, EnginePlan)>,
    starting: Vec<String>,
    to_measure: Vec<String>,
    asr: Option<LeaseView>,
    camera: Option<LeaseView>,
    tickets: u64,
}

impl Day {
    fn begin(path: &Path) -> Result<Self, String> {
        let mut params = Params::for_budget(MACHINE, OS, Scope::Machine);
        params.engine = Some(EngineParams::default());
        params.workers = ["asr", "tts"]
            .map(|name| WorkerParams {
                name: name.to_owned(),
                steady: Bytes::from_mib(700),
                peak: Bytes::from_mib(900),
                ..WorkerParams::default()
            })
            .into();
        let settings = JournalSettings {
            path: Some(path.to_owned()),
            file_max: Bytes::from_gib(16),
            files_kept: 0,
            queue_max: 1 << 22,
        };
        let mut journal =
            Journal::open(&settings, "a day", |_, _| {}).map_err(|error| error.to_string())?;
        let arbiter = Arbiter::new(params.clone()).map_err(|error| error.to_string())?;
        journal.record(
            Timestamp::START,
            SystemTime::UNIX_EPOCH,
            Content::start(params),
        );
        let mut day = Self {
            journal,
            arbiter,
            shape: shape(ENGINE),
            now: Timestamp::START,
            engine: Bytes::ZERO,
            orders: VecDeque::new(),
            starting: Vec::new(),
            to_measure: Vec::new(),
            asr: None,
            camera: None,
            tickets: 0,
        };
        day.sample();
        let shape = day.shape.clone();
        day.tell(Event::EngineInspected { shape });
        day.settle();
        day.ask("camera", Bytes::from_mib(64), Class::Interactive);
        Ok(day)
    }

    fn ticket(&mut self) -> Ticket {
        self.tickets += 1;
        Ticket(self.tickets)
    }

    fn tell(&mut self, event: Event) {
        let at = self.now;
        self.journal
            .record(at, SystemTime::UNIX_EPOCH, Content::Event(event.clone()));
        for action in self.arbiter.handle(at, event) {
            self.journal
                .record(at, SystemTime::UNIX_EPOCH, Content::Action(action.clone()));
            self.perform(action);
        }
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::LoadEngine { revision, plan } | Action::ApplyPlan { revision, plan, .. } => {
                self.orders.push_back((revision, plan));
            }
            Action::StartWorker { worker, .. } => self.starting.push(worker),
            Action::Measure { tenant } => self.to_measure.push(tenant),
            Action::Answer {
                answer: Answer::Lease { lease },
                ..
            } => match lease.tenant.as_str() {
                "camera" => self.camera = Some(lease),
                _ => self.asr = Some(lease),
            },
            _ => {}
        }
    }

    fn settle(&mut self) {
        while let Some((revision, in_force)) = self.orders.pop_front() {
            let used = self.shape.plan_bytes(&in_force);
            let freed = self.engine.saturating_sub(used);
            self.engine = used;
            self.tell(Event::EngineApplied(EngineApplied {
                revision,
                in_force,
                freed,
                used,
                untouched: Bytes::ZERO,
                untouched_given: Bytes::ZERO,
                took: Duration::from_millis(20),
            }));
        }
        for worker in std::mem::take(&mut self.starting) {
            self.tell(Event::WorkerReady { worker, pid: 1 });
        }
        for tenant in std::mem::take(&mut self.to_measure) {
            let used = match tenant.as_str() {
                ENGINE_TENANT => self.engine,
                "asr" | "tts" => Bytes::from_mib(700),
                "camera" => Self::used(self.camera.as_ref()),
                _ => Self::used(self.asr.as_ref()),
            };
            self.measure(&tenant, used);
        }
    }

    fn ask(&mut self, tenant: &str, bytes: Bytes, class: Class) {
        let ticket = self.ticket();
        let request = LeaseRequest {
            tenant: tenant.to_owned(),
            request_id: ticket.0.to_string(),
            peer: Peer::default(),
            class,
            min: bytes,
            max: bytes,
            term: Some(TERM),
            wait: Duration::from_secs(5),
            validate_only: false,
            cgroup: None,
        };
        self.tell(Event::LeaseRequested { ticket, request });
        self.settle();
    }

    fn used(lease: Option<&LeaseView>) -> Bytes {
        lease.map_or(Bytes::ZERO, |lease| lease.memory.held)
    }

    fn sample(&mut self) {
        let workers = Bytes::from_mib(1400);
        let tenants = Self::used(self.asr.as_ref()) + Self::used(self.camera.as_ref());
        // Use by other processes varies slightly.
        let others = OS + Bytes::from_kib(self.tickets * 37 % 4096);
        let free = MACHINE.saturating_sub(others + workers + tenants + self.engine);
        self.tell(Event::Sampled(Sample {
            taken_at: self.now,
            memory: MemoryReading {
                mem_total: MACHINE,
                mem_available: free,
                mem_free: free,
                group: None,
            },
            gpu: GpuReading {
                cma_free: Some(Bytes::ZERO),
                ..GpuReading::default()
            },
            ..Sample::default()
        }));
    }

    fn measure(&mut self, tenant: &str, used: Bytes) {
        self.tell(Event::Measured {
            tenant: tenant.to_owned(),
            used: Some(used),
            taken_at: self.now,
        });
    }

    fn talk(&mut self, requests: u32, kv_used: u32) {
        self.tell(Event::EngineActivity {
            requests,
            kv_used,
            kv_kept: 0,
            kv_prompt: 0,
            kv_most: 0,
            kv_droppable: 0,
            kv_dropped: 0,
            untouched: Bytes::ZERO,
            beside: Vec::new(),
        });
    }

    fn at_work(&mut self, worker: &str, requests: u32) {
        self.tell(Event::WorkerActivity {
            worker: worker.to_owned(),
            requests,
        });
    }

    fn second(&mut self, second: u64) {
        self.pass(Timestamp::from_millis(second * 1000));
        self.sample();
        self.settle();
        let engine = self.engine;
        self.measure(ENGINE_TENANT, engine);
        for worker in ["asr", "tts"] {
            self.measure(worker, Bytes::from_mib(700));
        }
        if let Some(lease) = self.camera.clone() {
            self.measure("camera", lease.memory.held);
            if second.is_multiple_of(TERM.as_secs() / 3) {
                let ticket = self.ticket();
                self.tell(Event::LeaseRenewed(LeaseCall {
                    ticket,
                    lease: lease.id,
                    generation: lease.generation,
                    peer: Peer::default(),
                }));
            }
        }
        match second % UTTERANCE_EVERY {
            0 => {
                self.at_work("asr", 1);
                self.ask("utterance", NEEDED, Class::AudioRealtime);
            }
            1 => {
                self.at_work("asr", 0);
                self.talk(1, 700);
            }
            UTTERANCE => {
                self.talk(0, 0);
                self.at_work("tts", 0);
                if let Some(lease) = self.asr.take() {
                    let ticket = self.ticket();
                    self.tell(Event::LeaseReleased(LeaseCall {
                        ticket,
                        lease: lease.id,
                        generation: lease.generation,
                        peer: Peer::default(),
                    }));
                    self.measure("utterance", Bytes::ZERO);
                }
            }
            of if of < UTTERANCE => {
                self.talk(1, 700 + u32::try_from(of).unwrap_or(0) * 20);
                self.at_work("tts", 1);
            }
            _ => {}
        }
        self.settle();
    }

    /// Advances the time, with every deadline at its instant.
    fn pass(&mut self, until: Timestamp) {
        while let Some(due) = self.arbiter.next_deadline().filter(|due| *due < until) {
            self.now = due.max(self.now);
            self.tell(Event::DeadlineReached);
            self.settle();
        }
        self.now = until;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const TESTS: &[(&str, fn())] = &[(
        "replay::an_hour_of_the_day_is_lively_and_replays",
        an_hour_of_the_day_is_lively_and_replays,
    )];

    fn an_hour_of_the_day_is_lively_and_replays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.ndjson");
        let report = measure(
            &ReplayArgs {
                hours: 1,
                rounds: 1,
            },
            &path,
        )
        .unwrap();
        let reported = serde_json::to_value(&report).unwrap();
        assert!(
            reported["setting"].as_str().unwrap().starts_with("1 h: "),
            "{reported}"
        );
        let entries = journal::read(&path).unwrap().entries;
        let events = entries
            .iter()
            .filter(|entry| matches!(entry.content, Content::Event(_)))
            .count();
        assert!(events > 20_000, "{events} events only");
        let sheds = entries
            .iter()
            .filter(|entry| matches!(entry.content, Content::Action(Action::ApplyPlan { .. })))
            .count();
        // A dwell of a minute or more separates a shed and the next growth; it doubles if growth does not last.
        assert!(sheds > 20, "{sheds} orders to the engine only");
    }
}
