//! `HoldLease`: the stream that renews a lease and delivers targets.
//!
//! ```text
//!   tenant                          supervisor
//!   {name, boot_id, generation} ──►            renews; the first message opens
//!                               ◄── renewed    the current lease
//!                               ◄── target     nonce, bytes, deadline; the current one is sent when the stream opens
//!   {…, nonce, state}           ──►            renews, and answers the target
//!                               ◄── receipt    the verdict: applied, deferred, stale, conflict, refused
//!                               ◄── renewed
//!                               ◄── ended      the lease has ended
//! ```

use futures_util::stream::BoxStream;
use tokio::sync::{broadcast, broadcast::error::RecvError};
use tonic::{Status, Streaming};

use super::{
    call::{Call, Context},
    convert::{self, Clock},
    holders::Holders,
    outlet::{Outlet, Unsent},
    slots::Slot,
    status::{CallError, shorten},
    supervisor::Notice,
    target::{SentTarget, Verdict},
    v1::{self, HoldLeaseRequest, HoldLeaseResponse, TargetState, hold_lease_response},
};
use cotenant_policy::{
    event::{Event, TargetAnswered},
    lease::{LeaseId, LeaseView, Target, TargetAnswer},
};
use cotenant_units::Bytes;

/// Opens the stream; all errors, also of the first message, are reported on it.
pub(super) fn open(
    context: Context,
    holders: Holders,
    call: Call,
    slot: Slot,
    inbound: Streaming<HoldLeaseRequest>,
) -> BoxStream<'static, Result<HoldLeaseResponse, Status>> {
    let (outlet, responses) = Outlet::new(OUTBOUND_MAX, context.patience);
    // Subscribed before the lease is read, so that no target is missed.
    let notices = context.supervisor.notices();
    let given_back = context.given_back.subscribe();
    tokio::spawn(async move {
        let _slot = slot;
        let hold = Hold {
            context,
            holders,
            call,
            inbound,
            notices,
            given_back,
            outlet: outlet.clone(),
            held: None,
        };
        let error = tokio::select! {
            result = hold.run() => result.err(),
            () = outlet.closed() => None,
        };
        if let Some(error) = error {
            outlet.fail(error);
        }
    });
    responses
}

struct Hold {
    context: Context,
    holders: Holders,
    call: Call,
    inbound: Streaming<HoldLeaseRequest>,
    notices: broadcast::Receiver<Notice>,
    given_back: broadcast::Receiver<Notice>,
    outlet: Outlet<HoldLeaseResponse>,
    held: Option<Held>,
}

/// The lease of the stream.
struct Held {
    id: LeaseId,
    name: String,
    /// The last target sent, and its answer.
    sent: SentTarget,
}

/// Next event of a stream.
enum Next {
    Message(Box<HoldLeaseRequest>),
    Notice(Notice),
    Missed,
    Done,
}

impl Hold {
    async fn run(mut self) -> Result<(), Status> {
        loop {
            match self.next().await? {
                Next::Message(message) => self.message(*message).await?,
                Next::Notice(notice) => {
                    if self.notice(notice).await? {
                        return Ok(());
                    }
                }
                Next::Missed => self.catch_up().await?,
                Next::Done => return Ok(()),
            }
        }
    }

    async fn next(&mut self) -> Result<Next, Status> {
        let heard = |notice| match notice {
            Ok(notice) => Ok(Next::Notice(notice)),
            Err(RecvError::Lagged(_)) => Ok(Next::Missed),
            Err(RecvError::Closed) => Err(CallError::Stopping.into()),
        };
        tokio::select! {
            message = self.inbound.message() => Ok(match message? {
                Some(message) => Next::Message(Box::new(message)),
                None => Next::Done,
            }),
            notice = self.notices.recv() => heard(notice),
            notice = self.given_back.recv() => heard(notice),
            allowed = self.call.expired() => Err(CallError::DeadlinePassed { allowed }.into()),
            () = self.context.stop.cancelled() => Err(CallError::Stopping.into()),
        }
    }

    /// Handles a message of the holder.
    async fn message(&mut self, message: HoldLeaseRequest) -> Result<(), Status> {
        let lease = self.context.lease_of(&message.name, &message.boot_id)?;
        if let Some(held) = &self.held
            && held.id != lease
        {
            let problem = format!("is not the lease of this stream, `{}`", held.name);
            return convert::refuse("name", &message.name, &problem);
        }
        let answer = target_answer(&message)?;
        // Detects a foreign or ended lease before its targets are touched.
        let view = self
            .context
            .renew(&self.call, lease, message.generation)
            .await?;
        if answer.is_some() {
            // Only the process that requested the lease, which is measured for it, may report about its memory.
            self.call.check_holds(&view)?;
        }
        if self.held.is_none()
            && let Some(process) = &self.call.peer.process
        {
            self.holders.attach(&view, process);
        }
        let held = self.held.get_or_insert_with(|| Held {
            id: lease,
            name: view.name(),
            sent: SentTarget::default(),
        });
        let new_target = held.sent.learn(view.target.as_ref());
        let receipt = answer.map(|answer| {
            held.sent
                .receive(message.nonce, Bytes::new(message.target_bytes), answer)
        });
        if let Some(receipt) = receipt {
            if let Some(answer) = receipt.pass_on {
                self.context
                    .supervisor
                    .submit(
                        Event::TargetAnswered(TargetAnswered {
                            lease,
                            nonce: message.nonce,
                            answer,
                            claimed: message.used_bytes.map(Bytes::new),
                        }),
                        None,
                    )
                    .map_err(CallError::from)?;
            }
            self.send(hold_lease_response::Message::Receipt(v1::TargetReceipt {
                nonce: message.nonce,
                state: state_of(receipt.verdict).into(),
                reason: receipt.reason,
            }))
            .await?;
        }
        self.send(hold_lease_response::Message::Renewed(self.wire(&view)))
            .await?;
        if new_target && let Some(target) = &view.target {
            self.send_target(target, String::new()).await?;
        }
        Ok(())
    }

    /// Handles a notice of the supervisor; returns whether the lease has ended.
    async fn notice(&mut self, notice: Notice) -> Result<bool, Status> {
        let Some(held) = &mut self.held else {
            return Ok(false);
        };
        if notice.lease() != held.id {
            return Ok(false);
        }
        match notice {
            Notice::Target {
                nonce,
                bytes,
                deadline,
                reason,
                ..
            } => {
                let target = Target {
                    nonce,
                    bytes,
                    deadline,
                };
                // Also if a renewal has reported the target before: only the notice has its reason.
                held.sent.learn(Some(&target));
                self.send_target(&target, reason).await?;
                Ok(false)
            }
            Notice::Ended { reason, .. } => {
                let ended = v1::LeaseEnded {
                    name: held.name.clone(),
                    reason,
                };
                self.send(hold_lease_response::Message::Ended(ended))
                    .await?;
                Ok(true)
            }
        }
    }

    /// Reads the state after missed notices.
    async fn catch_up(&mut self) -> Result<(), Status> {
        let Some(held) = &mut self.held else {
            return Ok(());
        };
        let snapshot = self.context.supervisor.snapshot().borrow().clone();
        let view = snapshot.leases.iter().find(|view| view.id == held.id);
        let Some(view) = view else {
            // If this state is older than the lease, the arbiter answers the next message.
            return Ok(());
        };
        if held.sent.learn(view.target.as_ref())
            && let Some(target) = &view.target
        {
            self.send_target(target, String::new()).await?;
        }
        Ok(())
    }

    fn wire(&self, view: &LeaseView) -> v1::Lease {
        let supervisor = &self.context.supervisor;
        convert::lease(view, supervisor.boot_id(), Clock::new(supervisor.now()))
    }

    async fn send_target(&self, target: &Target, reason: String) -> Result<(), Status> {
        let clock = Clock::new(self.context.supervisor.now());
        self.send(hold_lease_response::Message::Target(convert::target(
            target, reason, clock,
        )))
        .await
    }

    /// Sends, and waits up to the client's patience if it does not read; the lease continues for its term.
    async fn send(&self, message: hold_lease_response::Message) -> Result<(), Status> {
        let response = HoldLeaseResponse {
            message: Some(message),
        };
        self.outlet
            .send(response)
            .await
            .map_err(|unsent| match unsent {
                Unsent::Gone => CallError::Stopping.into(),
                Unsent::Stalled(error) => error.into(),
            })
    }
}

const fn state_of(verdict: Verdict) -> TargetState {
    match verdict {
        Verdict::Applied => TargetState::Applied,
        Verdict::Deferred => TargetState::Deferred,
        Verdict::Stale => TargetState::Stale,
        Verdict::Conflict => TargetState::Conflict,
        Verdict::Refused => TargetState::Refused,
    }
}

/// The answer to a target in a message, if any.
fn target_answer(message: &HoldLeaseRequest) -> Result<Option<TargetAnswer>, CallError> {
    let used = message
        .used_bytes
        .filter(|used| *used != 0)
        .map(|used| convert::size_of("used_bytes", used))
        .transpose()?;
    let state = TargetState::try_from(message.state).map_err(|_| {
        convert::invalid("state", &message.state.to_string(), "is not a known state")
    })?;
    match (message.nonce, state) {
        (0, TargetState::Unspecified) => Ok(None),
        (0, state) => convert::refuse(
            "nonce",
            "0",
            &format!("names no target for state {}", state.as_str_name()),
        ),
        (_, TargetState::Applied) => Ok(Some(TargetAnswer::Applied)),
        (_, TargetState::Deferred) => {
            let used = used.ok_or_else(|| {
                convert::invalid("used_bytes", "", "is not set, which DEFERRED needs")
            })?;
            Ok(Some(TargetAnswer::Deferred {
                overage: used.saturating_sub(Bytes::new(message.target_bytes)),
            }))
        }
        (_, TargetState::Refused) => Ok(Some(TargetAnswer::Refused {
            reason: shorten(&message.error_detail, DETAIL_MAX),
        })),
        (_, TargetState::Unspecified | TargetState::Stale | TargetState::Conflict) => {
            convert::refuse(
                "state",
                state.as_str_name(),
                "is not a reply: use APPLIED, DEFERRED or REFUSED",
            )
        }
    }
}

/// Responses in the queue: a target, a receipt and a renewal, twice.
const OUTBOUND_MAX: usize = 6;

/// Longest stored reason of a holder.
const DETAIL_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(nonce: u64, target_bytes: u64, state: TargetState) -> HoldLeaseRequest {
        HoldLeaseRequest {
            nonce,
            target_bytes,
            state: state.into(),
            used_bytes: Some(150),
            ..HoldLeaseRequest::default()
        }
    }

    #[test]
    fn what_only_the_supervisor_says_is_no_answer() {
        for message in [
            answer(5, 100, TargetState::Stale),
            answer(5, 100, TargetState::Unspecified),
            answer(0, 0, TargetState::Applied),
            HoldLeaseRequest {
                used_bytes: None,
                ..answer(5, 100, TargetState::Deferred)
            },
            HoldLeaseRequest {
                used_bytes: Some(u64::MAX),
                ..answer(5, 100, TargetState::Applied)
            },
        ] {
            assert!(target_answer(&message).is_err(), "{message:?}");
        }
    }
}
