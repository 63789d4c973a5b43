//! Requests of tenants: grant, renewal, resize and release of leases.

use std::path::Path;

use super::{
    context::{Context, above_target},
    serve,
};
use crate::{
    admission::{Want, WantKind},
    decision::{AdmissionDecision, LeaseDecision, LeaseEnd},
    denial::{Denial, NotHolder, Problem, Quota},
    event::{Action, Answer, LeaseCall, LeaseResize},
    lease::{LeaseKind, LeaseRequest, Ticket},
    lease_table::{OF_CGROUP, OF_PROCESS, OF_USER, Phase},
    params::ENGINE_TENANT,
    state::State,
};
use cotenant_units::{Bytes, TimeSpan};

pub(super) fn take_request(
    cx: &mut Context<'_>,
    ticket: Ticket,
    request: LeaseRequest,
) -> Result<(), Denial> {
    check_request(cx.state, &request)?;
    if answer_repeated(cx, ticket, &request)? {
        return Ok(());
    }
    check_cgroup(cx.state, &request)?;
    check_quota(cx.state, &request)?;
    if request.validate_only {
        return answer_validation(cx, ticket, &request);
    }
    let (id, wait) = (cx.leases.next_id(), request.wait);
    let (tenant, class) = (request.tenant.clone(), request.class);
    let want = Want::ours(&tenant, class, id, WantKind::Lease(request), cx.now).asked(ticket, wait);
    serve::ask_or_queue(cx, want, wait);
    Ok(())
}

pub(super) fn take_cancellation(cx: &mut Context<'_>, ticket: Ticket) {
    for want in cx.queue.cancel(ticket) {
        cx.decide(AdmissionDecision::Withdrawn {
            tenant: want.tenant,
        });
    }
}

pub(super) fn take_renewal(cx: &mut Context<'_>, call: &LeaseCall) -> Result<(), Denial> {
    let id = call.lease;
    cx.leases.owned(id, call.generation, &call.peer)?;
    cx.state.leases.renew(id, cx.state.now);
    cx.answer_lease(call.ticket, id);
    Ok(())
}

pub(super) fn take_release(cx: &mut Context<'_>, call: &LeaseCall) -> Result<(), Denial> {
    let (id, peer) = (call.lease, &call.peer);
    let lease = cx.leases.name_of(id);
    let held = cx.ledger.held_by(id);
    if cx.with_leases(|leases, turn| leases.acknowledge_end(call, turn))? {
        let ended = cx.leases.get(id);
        let by_other = !ended.is_some_and(|ended| ended.is_owned_by(peer));
        let by = by_other.then_some(peer.uid);
        cx.decide_for(
            call.ticket,
            LeaseDecision::EndAcknowledged { lease, by, held },
        );
        return Ok(());
    }
    let owned = cx.leases.owned(id, call.generation, peer)?;
    if !owned.is_owned_by(peer) {
        cx.out.push(Action::EndLease {
            lease: lease.clone(),
            end: LeaseEnd::ReleasedByOther { uid: peer.uid },
        });
    }
    // A peer that releases another's lease vouches for the holder, which may not know of the end.
    cx.begin_ending(id, Bytes::ZERO);
    cx.decide_for(call.ticket, LeaseDecision::Released { lease, held });
    Ok(())
}

pub(super) fn take_resize(cx: &mut Context<'_>, call: &LeaseResize) -> Result<(), Denial> {
    let (ticket, id, min, max) = (call.ticket, call.lease, call.min, call.max);
    let lease = cx.leases.owned(id, call.generation, &call.peer)?;
    let (tenant, class, uid) = (lease.tenant.clone(), lease.class, lease.owner.0);
    let held = cx.ledger.held_by(id);
    check_sizes(cx.state, &tenant, min, max)?;
    match &lease.phase {
        Phase::Revoking(revocation) if !revocation.voluntary && max > revocation.target.bytes => {
            return Err(above_target(&tenant, max, revocation.target.bytes));
        }
        _ if min > held => cx.not_draining(&tenant, min)?,
        _ => {}
    }
    // The last call replaces earlier ones that still wait, which would otherwise be granted in addition.
    let replaced = Denial::Replaced {
        lease: cx.leases.name_of(id).to_string(),
    };
    cx.forget_wants_of(id, &replaced);
    if min > held {
        let wait = call.wait.min(cx.params.lease.wait_max);
        let kind = WantKind::Grow { min, max, uid };
        let want = Want::ours(&tenant, class, id, kind, cx.now).asked(ticket, wait);
        serve::ask_or_queue(cx, want, wait);
        return Ok(());
    }
    cx.leases.set_bounds(id, min, max);
    if max < held {
        // Still a reduction, though perhaps to more than the previous request: its deadline stays in force.
        cx.with_leases(|leases, turn| leases.lower_voluntarily(id, max, turn));
    } else {
        cx.forget_wish(id, max);
        if cx.none_waits_before(class) {
            let more = max.saturating_sub(held).min(cx.available(class, true));
            cx.grow_lease(id, held.saturating_add(more));
        }
    }
    cx.answer_lease(ticket, id);
    Ok(())
}

fn check_request(state: &State, request: &LeaseRequest) -> Result<(), Denial> {
    let (tenant, limits) = (&request.tenant, &state.params.lease);
    for (field, text) in [("tenant", tenant), ("request_id", &request.request_id)] {
        let (bytes, limit) = (text.len(), TEXT_MAX);
        if Bytes::of_len(bytes).get() > u64::from(limit) {
            let shown: String = text.chars().take(SHOWN_MAX).collect();
            return Err(Denial::invalid(
                &shown,
                field,
                &shown,
                Problem::TooLong { bytes, limit },
            ));
        }
    }
    let ours = tenant == ENGINE_TENANT
        || (state.workers.contains_key(tenant)
            && (request.cgroup.is_some() || !state.asks_for_itself(tenant)));
    let refused =
        |field, value: &dyn ToString, problem| Err(Denial::invalid(tenant, field, value, problem));
    if tenant.is_empty() || tenant.chars().any(char::is_control) {
        return refused("tenant", tenant, Problem::Unprintable);
    } else if ours {
        return refused("tenant", tenant, Problem::OwnHolder);
    } else if [OF_PROCESS, OF_USER, OF_CGROUP]
        .iter()
        .any(|mark| tenant.contains(mark))
    {
        let marks = (OF_PROCESS.to_owned(), OF_USER.to_owned());
        return refused("tenant", tenant, Problem::Marked { marks });
    }
    check_sizes(state, tenant, request.min, request.max)?;
    let (least, most, limit) = (limits.term_min, limits.term_max, limits.wait_max);
    let wait = request.wait;
    if let Some(term) = request.term.filter(|term| !(least..=most).contains(term)) {
        return refused("term", &TimeSpan(term), Problem::NotBetween { least, most });
    } else if wait > limit {
        return refused("wait", &TimeSpan(wait), Problem::AboveLimit { limit });
    }
    state.not_draining(tenant, request.min)
}

fn check_sizes(state: &State, tenant: &str, min: Bytes, max: Bytes) -> Result<(), Denial> {
    let budget = state.ledger.budget();
    let refused = |field, value, problem| Err(Denial::invalid(tenant, field, value, problem));
    if min == Bytes::ZERO {
        refused("min", &min, Problem::Zero)
    } else if max < min {
        refused("max", &max, Problem::BelowMin { min })
    } else if min > budget {
        Err(Denial::ExceedsBudget {
            tenant: tenant.to_owned(),
            asked: min,
            budget,
        })
    } else {
        Ok(())
    }
}

fn check_quota(state: &State, request: &LeaseRequest) -> Result<(), Denial> {
    let uid = request.peer.uid;
    let tenants = state.leases.values();
    let owners = tenants.filter(|lease| lease.kind == LeaseKind::Tenant && !lease.is_residual());
    let owners: Vec<u32> = owners.map(|lease| lease.owner.0).collect();
    let waiting = state.queue.values().filter_map(|want| match &want.kind {
        WantKind::Lease(request) => Some(request.peer.uid),
        _ => None,
    });
    let of_user = owners.iter().copied().chain(waiting);
    let of_user = of_user.filter(|other| *other == uid).count();
    let per_user = usize::try_from(state.params.lease.leases_per_uid).unwrap_or(usize::MAX);
    let (what, limit) = if owners.len() + state.queue.values().count() >= LEASES_MAX {
        (Quota::Leases, LEASES_MAX)
    } else if of_user >= per_user {
        (Quota::LeasesOf { uid }, per_user)
    } else {
        return Ok(());
    };
    Err(Denial::QuotaExceeded {
        tenant: request.tenant.clone(),
        what,
        limit: Bytes::of_len(limit).get(),
    })
}

/// Refuses a control group that shares processes with the group of another lease or waiting request.
fn check_cgroup(state: &State, request: &LeaseRequest) -> Result<(), Denial> {
    let Some(cgroup) = &request.cgroup else {
        return Ok(());
    };
    let leases = state.leases.iter().filter(|(_, lease)| !lease.is_ending());
    let granted = leases.filter_map(|(id, lease)| Some((id, lease.request.as_ref()?)));
    let waiting = state.queue.values().filter_map(|want| match &want.kind {
        WantKind::Lease(other) => Some((want.lease, other)),
        _ => None,
    });
    for (id, other) in granted.chain(waiting) {
        let held = other.cgroup.as_ref().filter(|held| {
            Path::new(held).starts_with(cgroup) || Path::new(cgroup).starts_with(held)
        });
        if let Some(held) = held {
            return Err(Denial::CgroupHeld {
                tenant: request.tenant.clone(),
                cgroup: cgroup.clone(),
                held: held.clone(),
                lease: format!("{}#{}", other.tenant, id.0),
            });
        }
    }
    Ok(())
}

/// Answers a repeated request: with the same lease, the same place in the queue, or a denial if its id was used for
/// another request.
///
/// A place in the queue belongs to the process that took it: another process that joined would be granted a lease that
/// is measured at the first.
fn answer_repeated(
    cx: &mut Context<'_>,
    ticket: Ticket,
    request: &LeaseRequest,
) -> Result<bool, Denial> {
    if request.request_id.is_empty() || request.validate_only {
        return Ok(false);
    }
    let same_id = |other: &LeaseRequest| {
        (&other.tenant, &other.request_id, other.peer.uid)
            == (&request.tenant, &request.request_id, request.peer.uid)
    };
    let granted = cx.leases.iter().find_map(|(id, lease)| {
        let other = lease.request.as_ref().filter(|other| same_id(other))?;
        (!lease.is_ending()).then(|| (id, same_content(other, request)))
    });
    let waiting = cx.queue.values().find_map(|want| match &want.kind {
        WantKind::Lease(other) if same_id(other) => {
            Some((want.lease, same_content(other, request), other.holder_pid()))
        }
        _ => None,
    });
    match (granted, waiting) {
        (Some((id, true)), _) => cx.answer_lease(ticket, id),
        (None, Some((lease, true, pid))) if pid == request.holder_pid() => {
            cx.queue.join(lease, ticket);
        }
        (None, Some((lease, true, pid))) => {
            return Err(Denial::NotHolder {
                lease: format!("{}#{}", request.tenant, lease.0),
                uid: request.peer.uid,
                problem: NotHolder::Awaited { pid },
            });
        }
        (None, None) => return Ok(false),
        _ => {
            return Err(Denial::RequestIdReused {
                tenant: request.tenant.clone(),
                request_id: request.request_id.clone(),
            });
        }
    }
    Ok(true)
}

fn answer_validation(
    cx: &mut Context<'_>,
    ticket: Ticket,
    request: &LeaseRequest,
) -> Result<(), Denial> {
    let (tenant, class, min) = (&request.tenant, request.class, request.min);
    if let Some(denial) = cx.admission_denial(tenant, class, min) {
        return Err(denial);
    }
    let available = cx.available(class, true);
    let after_shedding = min.saturating_sub(available);
    if after_shedding > cx.reclaimable_for(class) {
        return Err(cx.insufficient(tenant, None, min, class));
    }
    let bytes = request.max.min(available).max(min);
    cx.answer(
        ticket,
        Answer::WouldGrant {
            bytes,
            after_shedding,
        },
    );
    Ok(())
}

/// Returns whether two requests are for the same lease, regardless of their processes.
fn same_content(one: &LeaseRequest, other: &LeaseRequest) -> bool {
    (one.class, one.min, one.max, one.term, &one.cgroup)
        == (other.class, other.min, other.max, other.term, &other.cgroup)
}

/// Longest name or request id, in bytes.
const TEXT_MAX: u32 = 128;

/// Characters of an overlong text that are shown in the denial.
const SHOWN_MAX: usize = 32;

/// Limit on leases of all users and waiting requests. Our choice, above the limit of one user: each event iterates over
/// all of them, and the exit of a holder of 1000 takes milliseconds.
const LEASES_MAX: usize = 1024;
