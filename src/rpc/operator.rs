//! `OperatorService`: status, events and commands over gRPC.

use std::time::Duration;

use futures_util::stream::{self, BoxStream};
use tonic::{Request, Response, Status};

use super::{
    call::{Call, Context},
    convert::{self, Clock},
    outlet,
    roles::Permission,
    status::{CallError, shorten, unfit},
    v1::{
        ControlWorkerRequest, ControlWorkerResponse, DrainRequest, DrainResponse, GetStatusRequest,
        GetStatusResponse, ListDeathsRequest, ListDeathsResponse, LoadModelRequest,
        LoadModelResponse, RegrowRequest, RegrowResponse, ReloadRequest, ReloadResponse,
        ResizeWorkerRequest, ResizeWorkerResponse, SetKvTypeRequest, SetKvTypeResponse,
        ShedRequest, ShedResponse, WatchEventsRequest, WatchEventsResponse,
        operator_service_server::OperatorService,
    },
};
use cotenant_policy::{
    event::{Answer, Event, Origin, WorkerCommand, WorkerResize},
    lease::Ticket,
};

pub(super) struct Operators {
    context: Context,
}

impl Operators {
    pub(super) const fn new(context: Context) -> Self {
        Self { context }
    }

    /// Sends a command that requires this permission; returns the arbiter's message once it is done.
    async fn done<T>(
        &self,
        name: &'static str,
        request: &Request<T>,
        needed: Permission,
        event: impl FnOnce(Ticket, Option<Origin>) -> Event,
    ) -> Result<String, Status> {
        let call = self.context.admit(name, request, needed)?;
        let by = call.origin(request);
        let answer = self.context.ask(&call, |ticket| event(ticket, by));
        words_in(answer.await?, name)
    }

    /// Checks that a worker with this name exists.
    fn known_worker(&self, name: &str) -> Result<(), CallError> {
        let snapshot = self.context.supervisor.snapshot().borrow().clone();
        if snapshot.workers.iter().any(|worker| worker.name == name) {
            return Ok(());
        }
        let known: Vec<_> = snapshot
            .workers
            .iter()
            .map(|worker| worker.name.as_str())
            .collect();
        Err(CallError::UnknownWorker {
            worker: shorten(name, 80),
            known: if known.is_empty() {
                "none".to_owned()
            } else {
                known.join(", ")
            },
        })
    }
}

/// The text of an answer.
fn words_in(answer: Answer, call: &'static str) -> Result<String, Status> {
    match answer {
        Answer::Done { done } => Ok(done.to_string()),
        Answer::Lease { .. }
        | Answer::WouldGrant { .. }
        | Answer::Shed(_)
        | Answer::Denied { .. } => Err(unfit(call)),
    }
}

#[tonic::async_trait]
impl OperatorService for Operators {
    type WatchEventsStream = BoxStream<'static, Result<WatchEventsResponse, Status>>;

    async fn get_status(
        &self,
        request: Request<GetStatusRequest>,
    ) -> Result<Response<GetStatusResponse>, Status> {
        self.context
            .admit("GetStatus", &request, Permission::Observe)?;
        Ok(Response::new(convert::full_status(
            &*self.context.supervisor,
        )))
    }

    async fn watch_events(
        &self,
        request: Request<WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let call = self
            .context
            .admit("WatchEvents", &request, Permission::Observe)?;
        let slot = self.context.stream_slot(&call)?;
        let message = request.into_inner();
        if message.no_follow {
            self.context.supervisor.events().catch_up(CATCH_UP).await;
        }
        let same_run =
            message.boot_id.is_empty() || message.boot_id == self.context.supervisor.boot_id();
        let reader = Reader {
            after: if same_run { message.after_sequence } else { 0 },
            from_the_oldest: !same_run || message.after_sequence == 0,
            follow: !message.no_follow,
            page: Vec::new(),
            missed: 0,
            context: self.context.clone(),
            call,
        };
        let events = stream::try_unfold(reader, Reader::next);
        Ok(Response::new(outlet::pump(
            events,
            slot,
            self.context.patience,
        )))
    }

    async fn shed(&self, request: Request<ShedRequest>) -> Result<Response<ShedResponse>, Status> {
        let call = self
            .context
            .admit("Shed", &request, Permission::Intervene)?;
        let bytes = convert::size_of("shed_bytes", request.get_ref().shed_bytes)?;
        let by = call.origin(&request);
        let answer = self
            .context
            .ask(&call, |ticket| Event::OperatorShed { ticket, bytes, by })
            .await?;
        let Answer::Shed(outcome) = answer else {
            return Err(unfit("Shed"));
        };
        Ok(Response::new(ShedResponse {
            message: outcome.to_string(),
            asked_bytes: outcome.asked.get(),
            freed_bytes: outcome.freed.get(),
            held_bytes: outcome.held.get(),
            limited_by: outcome
                .limited_by
                .map_or_else(String::new, |limit| limit.to_string()),
        }))
    }

    async fn regrow(
        &self,
        request: Request<RegrowRequest>,
    ) -> Result<Response<RegrowResponse>, Status> {
        let event = |ticket, by| Event::OperatorRegrow { ticket, by };
        let done = self.done("Regrow", &request, Permission::Operate, event);
        let message = done.await?;
        Ok(Response::new(RegrowResponse { message }))
    }

    async fn set_kv_type(
        &self,
        request: Request<SetKvTypeRequest>,
    ) -> Result<Response<SetKvTypeResponse>, Status> {
        let call = self
            .context
            .admit("SetKvType", &request, Permission::Operate)?;
        let kv_type = convert::kv_type_of(request.get_ref().kv_type)?;
        let by = call.origin(&request);
        let answer = self
            .context
            .ask(&call, |ticket| Event::OperatorKvType {
                ticket,
                kv_type,
                by,
            })
            .await?;
        Ok(Response::new(SetKvTypeResponse {
            message: words_in(answer, "SetKvType")?,
        }))
    }

    async fn control_worker(
        &self,
        request: Request<ControlWorkerRequest>,
    ) -> Result<Response<ControlWorkerResponse>, Status> {
        let command = convert::command_of(request.get_ref().command);
        let needed = match command {
            Ok(WorkerCommand::Recycle) => Permission::Intervene,
            _ => Permission::Operate,
        };
        let call = self.context.admit("ControlWorker", &request, needed)?;
        let by = call.origin(&request);
        let (command, message) = (command?, request.into_inner());
        self.known_worker(&message.name)?;
        let answer = self
            .context
            .ask(&call, |ticket| Event::OperatorWorker {
                ticket,
                worker: message.name,
                command,
                by,
            })
            .await?;
        Ok(Response::new(ControlWorkerResponse {
            message: words_in(answer, "ControlWorker")?,
        }))
    }

    async fn resize_worker(
        &self,
        request: Request<ResizeWorkerRequest>,
    ) -> Result<Response<ResizeWorkerResponse>, Status> {
        let call = self
            .context
            .admit("ResizeWorker", &request, Permission::Operate)?;
        let by = call.origin(&request);
        let message = request.into_inner();
        self.known_worker(&message.name)?;
        let variant = convert::name_of("variant", message.variant, VARIANT_MAX)?;
        let wait = convert::span_of("max_wait", message.max_wait, WAIT_MAX)?;
        let answer = self
            .context
            .ask(&call, |ticket| {
                Event::WorkerResizeRequested(WorkerResize {
                    ticket,
                    worker: message.name,
                    variant,
                    wait: call.wait(wait.unwrap_or_default()),
                    by,
                })
            })
            .await?;
        let supervisor = &self.context.supervisor;
        let response = match answer {
            Answer::Lease { lease } => ResizeWorkerResponse {
                message: format!("{} holds {}", lease.name(), lease.memory.held),
                lease: Some(convert::lease(
                    &lease,
                    supervisor.boot_id(),
                    Clock::new(supervisor.now()),
                )),
            },
            answer => ResizeWorkerResponse {
                lease: None,
                message: words_in(answer, "ResizeWorker")?,
            },
        };
        Ok(Response::new(response))
    }

    async fn list_deaths(
        &self,
        request: Request<ListDeathsRequest>,
    ) -> Result<Response<ListDeathsResponse>, Status> {
        self.context
            .admit("ListDeaths", &request, Permission::Observe)?;
        let message = request.into_inner();
        let worker = (!message.worker.is_empty()).then_some(message.worker);
        if let Some(worker) = &worker {
            self.known_worker(worker)?;
        }
        let limit = match message.limit {
            0 => usize::MAX,
            limit => usize::try_from(limit).unwrap_or(usize::MAX),
        };
        let deaths = self
            .context
            .supervisor
            .deaths()
            .last(worker.as_deref(), limit);
        Ok(Response::new(ListDeathsResponse {
            deaths: deaths.iter().map(|death| convert::death(death)).collect(),
        }))
    }

    async fn load_model(
        &self,
        request: Request<LoadModelRequest>,
    ) -> Result<Response<LoadModelResponse>, Status> {
        let event = |ticket, by| Event::OperatorLoad { ticket, by };
        let done = self.done("LoadModel", &request, Permission::Operate, event);
        let message = done.await?;
        Ok(Response::new(LoadModelResponse { message }))
    }

    async fn reload(
        &self,
        request: Request<ReloadRequest>,
    ) -> Result<Response<ReloadResponse>, Status> {
        let call = self
            .context
            .admit("Reload", &request, Permission::Operate)?;
        let by = call.origin(&request);
        let outcome = self
            .context
            .supervisor
            .reload(by)
            .map_err(CallError::from)?;
        let changes = outcome.await.map_err(|_closed| CallError::Stopping)?;
        let changes = changes.map_err(|report| CallError::ConfigInvalid { report })?;
        Ok(Response::new(ReloadResponse {
            message: changes.to_string(),
            applied_keys: changes.applied,
            restart_keys: changes.restart,
        }))
    }

    async fn drain(
        &self,
        request: Request<DrainRequest>,
    ) -> Result<Response<DrainResponse>, Status> {
        let call = self
            .context
            .admit("Drain", &request, Permission::Intervene)?;
        let by = call.origin(&request);
        let off = request.get_ref().off;
        let (event, message) = if off {
            (
                Event::DrainCancelled { by },
                "not draining: requests are admitted",
            )
        } else {
            let message = "draining: new requests are refused, running ones finish; `cotenant drain --off` ends it";
            (Event::DrainRequested { by }, message)
        };
        let supervisor = &self.context.supervisor;
        let mut state = supervisor.snapshot();
        supervisor.submit(event, None).map_err(CallError::from)?;
        // After the response, clients may rely on the new state at every API.
        state
            .wait_for(|state| state.draining != off)
            .await
            .map_err(|_closed| CallError::Stopping)?;
        Ok(Response::new(DrainResponse {
            message: message.to_owned(),
        }))
    }
}

/// A reader of `WatchEvents`. It reads the log at the client's pace and holds at most one page.
struct Reader {
    context: Context,
    call: Call,
    /// Number of the last event sent or missed.
    after: u64,
    /// Whether it starts at the oldest event available, so that no earlier gap is reported.
    from_the_oldest: bool,
    follow: bool,
    /// The page being sent, last event first.
    page: Vec<WatchEventsResponse>,
    missed: u64,
}

impl Reader {
    async fn next(mut self) -> Result<Option<(WatchEventsResponse, Self)>, Status> {
        loop {
            if let Some(mut response) = self.page.pop() {
                response.missed = std::mem::take(&mut self.missed);
                return Ok(Some((response, self)));
            }
            let mut last = self.context.supervisor.events().last_sequence();
            last.mark_unchanged();
            if self.turn_page() {
                continue;
            }
            if !self.follow {
                return Ok(None);
            }
            tokio::select! {
                changed = last.changed() => changed.map_err(|_closed| CallError::Stopping)?,
                allowed = self.call.expired() => return Err(CallError::DeadlinePassed { allowed }.into()),
                () = self.context.stop.cancelled() => return Err(CallError::Stopping.into()),
            }
        }
    }

    /// Reads the next page from the log; returns whether there is one.
    fn turn_page(&mut self) -> bool {
        let supervisor = &self.context.supervisor;
        let page = supervisor.events().after(self.after, PAGE);
        let Some(last) = page.records.last() else {
            return false;
        };
        self.after = last.sequence;
        if !std::mem::take(&mut self.from_the_oldest) {
            self.missed = page.missed;
        }
        self.page = page
            .records
            .iter()
            .rev()
            .map(|record| WatchEventsResponse {
                entry: Some(convert::journal_entry(record, supervisor.boot_id())),
                missed: 0,
            })
            .collect();
        true
    }
}

const PAGE: usize = 64;

/// Longest wait for lines that the journal's writer has not passed on yet. Our choice: a stalled card is worth a wait,
/// and an operator is not kept waiting.
const CATCH_UP: Duration = Duration::from_secs(2);

/// Longest name of a variant.
const VARIANT_MAX: usize = 63;

/// Longest accepted wait in the queue; the arbiter has its own limits.
const WAIT_MAX: Duration = Duration::from_secs(3600);
