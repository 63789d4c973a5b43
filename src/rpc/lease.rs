//! `LeaseService`: leases over gRPC.

use std::{sync::Arc, time::Duration};

use futures_util::stream::{self, BoxStream};
use tonic::{Request, Response, Status, Streaming};

use super::{
    call::{Call, Context, process},
    convert::{self, Clock},
    hold,
    holders::Holders,
    lease_watch::{States, Watching},
    outlet,
    roles::Permission,
    status::{CallError, shorten, unfit},
    supervisor::{Bar, Notice},
    v1::{
        CreateLeaseRequest, CreateLeaseResponse, HoldLeaseRequest, HoldLeaseResponse,
        ListLeasesRequest, ListLeasesResponse, ReleaseLeaseRequest, ReleaseLeaseResponse,
        RenewLeaseRequest, RenewLeaseResponse, UpdateLeaseRequest, UpdateLeaseResponse,
        WatchLeasesRequest, WatchLeasesResponse, WouldGrant, lease_service_server::LeaseService,
    },
};
use cotenant_policy::{
    event::{Answer, Event, LeaseCall, LeaseResize},
    lease::{LeaseId, LeaseRequest, LeaseView},
};

pub(super) struct Leases {
    context: Context,
    holders: Holders,
    states: Arc<States>,
}

impl Leases {
    pub(super) fn new(context: Context, holders: Holders) -> Self {
        Self {
            context,
            holders,
            states: Arc::default(),
        }
    }

    fn wire(&self, view: &LeaseView) -> super::v1::Lease {
        let supervisor = &self.context.supervisor;
        convert::lease(view, supervisor.boot_id(), Clock::new(supervisor.now()))
    }
}

impl Context {
    /// The id of a lease, with its name and run verified.
    pub(super) fn lease_of(&self, name: &str, boot_id: &str) -> Result<LeaseId, CallError> {
        let lease = convert::lease_id_of(name)?;
        let current = self.supervisor.boot_id();
        if boot_id.is_empty() {
            return convert::refuse("boot_id", "", "is not set: send the one of the grant");
        }
        if !self.supervisor.continues(boot_id) {
            return Err(CallError::BootIdChanged {
                lease: shorten(name, 80),
                given: shorten(boot_id, 80),
                current: current.to_owned(),
            });
        }
        let snapshot = self.supervisor.snapshot();
        let misnamed = snapshot
            .borrow()
            .leases
            .iter()
            .any(|view| view.id == lease && view.name() != name);
        if misnamed {
            return Err(CallError::UnknownLease {
                lease: shorten(name, 80),
            });
        }
        Ok(lease)
    }

    /// Renews a lease and returns its state.
    pub(super) async fn renew(
        &self,
        call: &Call,
        lease: LeaseId,
        generation: u64,
    ) -> Result<LeaseView, Status> {
        let answer = self
            .ask(call, |ticket| {
                Event::LeaseRenewed(LeaseCall {
                    ticket,
                    lease,
                    generation,
                    peer: call.policy_peer(),
                })
            })
            .await?;
        lease_in(answer, "RenewLease")
    }
}

fn lease_in(answer: Answer, call: &'static str) -> Result<LeaseView, Status> {
    match answer {
        Answer::Lease { lease } => Ok(lease),
        Answer::WouldGrant { .. }
        | Answer::Shed(_)
        | Answer::Done { .. }
        | Answer::Denied { .. } => Err(unfit(call)),
    }
}

fn barred(bar: Bar, asked: LeaseRequest) -> CallError {
    let asker = match &asked.cgroup {
        Some(cgroup) => format!("control group `{cgroup}`"),
        None => process(asked.peer.pid),
    };
    let cgroup = asked.cgroup.unwrap_or_default();
    match bar {
        Bar::NotTheWorker { runs_as } => CallError::NotTheWorker {
            worker: asked.tenant,
            runs_as,
            asker,
        },
        Bar::OfWorker { worker, runs_as } => CallError::OfAWorker {
            tenant: asked.tenant,
            worker,
            runs_as,
            asker,
        },
        Bar::NoCgroup { mount } => CallError::UnknownCgroup { cgroup, mount },
        Bar::OurCgroup { worker, runs_as } => CallError::OurCgroup {
            cgroup,
            worker,
            runs_as,
        },
    }
}

#[tonic::async_trait]
impl LeaseService for Leases {
    type HoldLeaseStream = BoxStream<'static, Result<HoldLeaseResponse, Status>>;
    type WatchLeasesStream = BoxStream<'static, Result<WatchLeasesResponse, Status>>;

    async fn create_lease(
        &self,
        request: Request<CreateLeaseRequest>,
    ) -> Result<Response<CreateLeaseResponse>, Status> {
        let needed = match request.get_ref().cgroup.as_str() {
            "" => Permission::Lease,
            _ => Permission::Delegate,
        };
        let call = self.context.admit("CreateLease", &request, needed)?;
        let message = request.into_inner();
        let cgroup = convert::cgroup_of(message.cgroup)?;
        if let Some(cgroup) = cgroup.as_ref().filter(|_| !call.peer.through_path) {
            let cgroup = cgroup.clone();
            return Err(CallError::NotThePathSocket { cgroup }.into());
        }
        let term = convert::span_of("term", message.term, TERM_MAX)?;
        let (min, max) = convert::sizes_of(message.min_bytes, message.max_bytes)?;
        if message.request_id.is_empty() || message.request_id.len() > REQUEST_ID_MAX {
            return convert::refuse(
                "request_id",
                &message.request_id,
                &format!("has not 1 to {REQUEST_ID_MAX} bytes"),
            );
        }
        let wait = convert::span_of("max_wait", message.max_wait, WAIT_MAX)?;
        convert::tenant_kind(message.kind)?;
        let asked = LeaseRequest {
            tenant: convert::name_of("tenant", message.tenant, NAME_MAX)?,
            request_id: message.request_id,
            peer: call.policy_peer(),
            class: convert::class_of(message.lease_class)?,
            min,
            max,
            term: term.or((cgroup.is_none()).then_some(TERM_DEFAULT)),
            wait: call.wait(wait.unwrap_or_default()),
            validate_only: message.validate_only,
            cgroup,
        };
        if let Some(bar) = self.context.supervisor.bar(&asked) {
            return Err(barred(bar, asked).into());
        }
        let answer = self
            .context
            .ask(&call, |ticket| Event::LeaseRequested {
                ticket,
                request: asked,
            })
            .await?;
        let response = match answer {
            Answer::Lease { lease } => {
                // The request is repeated by another process, whose memory would not be measured.
                call.check_holds(&lease)?;
                if let Some(process) = &call.peer.process {
                    self.holders.attach(&lease, process);
                }
                CreateLeaseResponse {
                    lease: Some(self.wire(&lease)),
                    would_grant: None,
                }
            }
            Answer::WouldGrant {
                bytes,
                after_shedding,
            } => CreateLeaseResponse {
                lease: None,
                would_grant: Some(WouldGrant {
                    granted_bytes: bytes.get(),
                    shed_bytes: after_shedding.get(),
                }),
            },
            Answer::Shed(_) | Answer::Done { .. } | Answer::Denied { .. } => {
                return Err(unfit("CreateLease"));
            }
        };
        Ok(Response::new(response))
    }

    async fn hold_lease(
        &self,
        request: Request<Streaming<HoldLeaseRequest>>,
    ) -> Result<Response<Self::HoldLeaseStream>, Status> {
        let call = self
            .context
            .admit("HoldLease", &request, Permission::Lease)?;
        let slot = self.context.stream_slot(&call)?;
        let stream = hold::open(
            self.context.clone(),
            self.holders.clone(),
            call,
            slot,
            request.into_inner(),
        );
        Ok(Response::new(stream))
    }

    async fn renew_lease(
        &self,
        request: Request<RenewLeaseRequest>,
    ) -> Result<Response<RenewLeaseResponse>, Status> {
        let call = self
            .context
            .admit("RenewLease", &request, Permission::Lease)?;
        let message = request.into_inner();
        let lease = self.context.lease_of(&message.name, &message.boot_id)?;
        let view = self.context.renew(&call, lease, message.generation).await?;
        Ok(Response::new(RenewLeaseResponse {
            lease: Some(self.wire(&view)),
        }))
    }

    async fn update_lease(
        &self,
        request: Request<UpdateLeaseRequest>,
    ) -> Result<Response<UpdateLeaseResponse>, Status> {
        let call = self
            .context
            .admit("UpdateLease", &request, Permission::Lease)?;
        let message = request.into_inner();
        let lease = self.context.lease_of(&message.name, &message.boot_id)?;
        let (min, max) = convert::sizes_of(message.min_bytes, message.max_bytes)?;
        let wait = convert::span_of("max_wait", message.max_wait, WAIT_MAX)?;
        // A request for less counts as the holder's confirmation that it needs no more.
        let snapshot = self.context.supervisor.snapshot().borrow().clone();
        if let Some(view) = snapshot.leases.iter().find(|view| view.id == lease) {
            call.check_holds(view)?;
        }
        let answer = self
            .context
            .ask(&call, |ticket| {
                Event::LeaseResizeRequested(LeaseResize {
                    ticket,
                    lease,
                    generation: message.generation,
                    peer: call.policy_peer(),
                    min,
                    max,
                    wait: call.wait(wait.unwrap_or_default()),
                })
            })
            .await?;
        let view = lease_in(answer, "UpdateLease")?;
        Ok(Response::new(UpdateLeaseResponse {
            lease: Some(self.wire(&view)),
        }))
    }

    async fn release_lease(
        &self,
        request: Request<ReleaseLeaseRequest>,
    ) -> Result<Response<ReleaseLeaseResponse>, Status> {
        let call = self
            .context
            .admit("ReleaseLease", &request, Permission::Lease)?;
        let message = request.into_inner();
        let lease = self.context.lease_of(&message.name, &message.boot_id)?;
        let answer = self
            .context
            .ask(&call, |ticket| {
                Event::LeaseReleased(LeaseCall {
                    ticket,
                    lease,
                    generation: message.generation,
                    peer: call.policy_peer(),
                })
            })
            .await?;
        let message = match answer {
            Answer::Done { done } => done.to_string(),
            Answer::Lease { lease } => format!("released {}", lease.name()),
            Answer::WouldGrant { .. } | Answer::Shed(_) | Answer::Denied { .. } => {
                return Err(unfit("ReleaseLease"));
            }
        };
        let ended = Notice::Ended {
            lease,
            reason: message.clone(),
        };
        // There may be no listener.
        let _ = self.context.given_back.send(ended);
        Ok(Response::new(ReleaseLeaseResponse { message }))
    }

    async fn list_leases(
        &self,
        request: Request<ListLeasesRequest>,
    ) -> Result<Response<ListLeasesResponse>, Status> {
        self.context
            .admit("ListLeases", &request, Permission::Observe)?;
        let message = request.into_inner();
        let size = match message.page_size {
            0 => PAGE_DEFAULT,
            size => usize::try_from(size).unwrap_or(PAGE_MAX).min(PAGE_MAX),
        };
        let after = match message.page_token.as_str() {
            "" => None,
            token => Some(LeaseId(token.parse().map_err(|_| {
                convert::invalid("page_token", token, "is not a token of this service")
            })?)),
        };
        let snapshot = self.context.supervisor.snapshot().borrow().clone();
        let mut views: Vec<_> = snapshot
            .leases
            .iter()
            .filter(|view| after.is_none_or(|after| view.id > after))
            .collect();
        views.sort_by_key(|view| view.id);
        let more = views.len() > size;
        views.truncate(size);
        Ok(Response::new(ListLeasesResponse {
            next_page_token: match views.last() {
                Some(last) if more => last.id.0.to_string(),
                _ => String::new(),
            },
            leases: views.into_iter().map(|view| self.wire(view)).collect(),
            boot_id: self.context.supervisor.boot_id().to_owned(),
        }))
    }

    async fn watch_leases(
        &self,
        request: Request<WatchLeasesRequest>,
    ) -> Result<Response<Self::WatchLeasesStream>, Status> {
        let call = self
            .context
            .admit("WatchLeases", &request, Permission::Observe)?;
        let slot = self.context.stream_slot(&call)?;
        let watching = Watching::new(
            self.context.clone(),
            call,
            &self.states,
            &request.into_inner(),
        );
        let states = stream::try_unfold(watching, Watching::next);
        Ok(Response::new(outlet::pump(
            states,
            slot,
            self.context.patience,
        )))
    }
}

/// Longest name of a tenant: as a DNS label, so that it can become one.
const NAME_MAX: usize = 63;

/// Longest request id: a UUID has 36 bytes.
const REQUEST_ID_MAX: usize = 64;

/// Default and maximum of leases per page.
const PAGE_DEFAULT: usize = 100;
const PAGE_MAX: usize = 1000;

/// Default term: etcd's clients renew after a third of it, here every 10 s.
const TERM_DEFAULT: Duration = Duration::from_secs(30);

/// Longest accepted term; the arbiter has its own limits.
const TERM_MAX: Duration = Duration::from_secs(24 * 3600);

/// Longest accepted wait in the queue; the arbiter has its own limits.
const WAIT_MAX: Duration = Duration::from_secs(3600);
