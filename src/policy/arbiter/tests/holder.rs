//! Tests that one process is one holder.

use std::time::Duration;

use super::{Rig, mib, ms, of_process, params, peer, revoke::applied};
use crate::{
    decision::{Decision, LeaseDecision},
    denial::{Denial, Holders, NotHolder, Quota},
    event::{Action, Answer, Event},
    lease::{Class, LeaseId, LeaseKind, LeaseRequest, LeaseView, Peer},
    params::Params,
};
use cotenant_units::Bytes;

/// Requests a batch lease for process 10.
fn ask(rig: &mut Rig, tenant: &str, sizes: (u64, u64)) -> LeaseView {
    ask_as(rig, tenant, sizes, (1000, 10))
}

fn ask_as(rig: &mut Rig, tenant: &str, sizes: (u64, u64), (uid, pid): (u32, u32)) -> LeaseView {
    let ticket = rig.ticket();
    let request = of_process(tenant, Class::Batch, sizes, uid, pid);
    rig.tell(Event::LeaseRequested { ticket, request });
    rig.granted()
}

/// Otherwise its use would be subtracted from a sample twice, and as much memory of an unmanaged process would look
/// free.
#[test]
fn what_a_process_with_two_names_uses_counts_once() {
    let mut rig = Rig::sampled(params());
    let one = ask(&mut rig, "a", (100, 100));
    // The same memory, whatever its uid.
    let other = ask_as(&mut rig, "b", (100, 100), (0, 10));
    assert_eq!((one.holder(), other.holder()), ("a", "a"));
    rig.wait(10).measure("a", 100);
    rig.samples(200);
    let state = rig.snapshot();
    assert_eq!(
        (state.memory.unmanaged, state.memory.free),
        (mib(100), mib(100))
    );
    rig.request("late", Class::Interactive, 101, 101, 0);
    assert!(
        matches!(rig.answer(), Answer::Denied { .. }),
        "{:#?}",
        rig.actions
    );
    // It fills both leases: nothing exceeds the budget.
    rig.wait(10).measure("a", 200);
    rig.samples(300);
    assert_eq!(
        (
            rig.snapshot().memory.unaccounted,
            rig.snapshot().memory.free
        ),
        (mib(100), mib(100))
    );
    // Another process is a separate holder under either name, and the first holder's key is not reused.
    assert_eq!(
        ask_as(&mut rig, "a", (10, 10), (1000, 11)).holder(),
        "a (pid 11)"
    );
    assert_eq!(ask_as(&mut rig, "b", (10, 10), (1000, 12)).holder(), "b");
    assert_eq!(ask(&mut rig, "b", (10, 10)).holder(), "a");
}

/// Otherwise a compliant process would lose its lease for the use allowed by its other one.
#[test]
fn a_process_with_two_names_comes_down_in_one_and_keeps_the_other_full() {
    let mut rig = Rig::sampled(params());
    let one = ask(&mut rig, "a", (10, 200));
    let other = ask(&mut rig, "b", (200, 200));
    rig.wait(10).measure("a", 400);
    rig.request("voice", Class::AudioRealtime, 100, 100, 9000);
    let target = rig.target_of(&one);
    assert_eq!(target.bytes, mib(100));
    rig.wait(5).tell(applied(one.id, target.nonce));
    rig.wait(5).measure("a", 330);
    assert_eq!(rig.try_answer(), None, "30 MiB are not back");
    rig.wait(5).measure("a", 300);
    assert_eq!(rig.granted().memory.held, mib(100));
    assert_eq!((rig.held("a"), rig.held("b")), (mib(100), mib(200)));
    // The end of one lease is measured against the remaining ones.
    rig.release(
        &other,
        Peer {
            pid: Some(10),
            ..peer(1000)
        },
    );
    rig.wait(5).measure("a", 150);
    let left = rig.lease("b").map(|lease| lease.memory.held);
    assert_eq!((left, rig.snapshot().memory.unaccounted), (None, mib(50)));
    // The residual use ends with its process.
    rig.tell(Event::HolderLost {
        lease: one.id,
        pid: Some(10),
    });
    assert_eq!(
        (rig.held("a"), rig.snapshot().memory.unaccounted),
        (mib(0), mib(0))
    );
}

/// Otherwise one page under each name would make the whole budget unavailable.
#[test]
fn what_a_process_keeps_counts_once_by_however_many_names_it_had_leases() {
    let mut rig = Rig::sampled(params());
    for round in 0..20 {
        let name = format!("t{round}");
        let lease = ask(&mut rig, &name, (1, 1));
        assert_eq!(lease.holder(), "t0");
        rig.release(
            &lease,
            Peer {
                pid: Some(10),
                ..peer(1000)
            },
        );
        rig.wait(5).measure("t0", 150);
        rig.wait(5);
    }
    let state = rig.snapshot();
    let residual = state
        .leases
        .iter()
        .filter(|lease| lease.kind == LeaseKind::Tenant)
        .count();
    assert_eq!(
        (residual, state.memory.unaccounted),
        (1, mib(150)),
        "{state:#?}"
    );
    let asked = rig.pass(5000).iter();
    let measured: Vec<_> = asked
        .filter(|action| matches!(action, Action::Measure { .. }))
        .collect();
    assert!(
        measured.iter().all(|action| **action
            == Action::Measure {
                tenant: "t0".to_owned()
            }),
        "{measured:?}"
    );
    assert!(!measured.is_empty());
    // The memory is credited once measured.
    rig.measure("t0", 0);
    assert_eq!(
        (
            rig.snapshot().memory.unaccounted,
            rig.snapshot().leases.len()
        ),
        (mib(0), 0)
    );
}

/// Otherwise the lease would be granted to a process that may have exited.
#[test]
fn a_place_in_the_queue_is_that_of_the_process_that_took_it() {
    let mut rig = Rig::sampled(params());
    rig.request("all", Class::Interactive, 400, 400, 0);
    let all = rig.granted();
    let ask = |rig: &mut Rig, pid: u32| {
        let ticket = rig.ticket();
        let request = LeaseRequest {
            request_id: "one".to_owned(),
            wait: ms(5000),
            ..of_process("vision", Class::Interactive, (100, 100), 1000, pid)
        };
        rig.tell(Event::LeaseRequested { ticket, request });
        ticket
    };
    let first = ask(&mut rig, 10);
    let again = ask(&mut rig, 10);
    assert_eq!((rig.try_answer(), rig.snapshot().waiting), (None, 1));
    ask(&mut rig, 11);
    assert!(matches!(
        rig.denial(),
        Denial::NotHolder { lease, problem: NotHolder::Awaited { pid: Some(10) }, .. } if lease == "vision#2"
    ));
    for ticket in [first, again] {
        assert_eq!(rig.snapshot().waiting, 1);
        rig.tell(Event::LeaseRequestCancelled { ticket });
    }
    assert_eq!(rig.snapshot().waiting, 0);
    // Without a waiting request, any process may use the id, and the lease belongs to that process.
    ask(&mut rig, 11);
    rig.release(&all, peer(1000));
    rig.wait(5).measure("all", 0);
    assert_eq!(rig.granted().owner.owner_pid, Some(11));
}

/// Returns the holders named in the last denial.
fn holders(rig: &Rig) -> Vec<(LeaseId, Bytes)> {
    let Denial::InsufficientMemory {
        holders: Holders { shares, .. },
        ..
    } = rig.denial()
    else {
        panic!("{:?}", rig.denial());
    };
    shares
        .iter()
        .map(|share| (share.holder.id, share.held))
        .collect()
}

#[test]
fn who_has_it_all_is_named_whatever_it_calls_itself() {
    let mut rig = Rig::sampled(params());
    let all = ask(&mut rig, "vision", (380, 380));
    let ticket = rig.ticket();
    let request = of_process("vision", Class::Batch, (100, 100), 1000, 11);
    rig.tell(Event::LeaseRequested { ticket, request });
    assert_eq!(holders(&rig), [(all.id, mib(380))]);
    // Its present lease is part of the requested size.
    rig.resize(&all, 400, 400, 0);
    assert_eq!(rig.granted().memory.held, mib(400));
    rig.resize(&all, 401, 401, 0);
    assert!(matches!(rig.denial(), Denial::ExceedsBudget { .. }));
}

/// So its end costs one pass over the leases instead of one for each.
#[test]
fn the_end_of_a_process_ends_all_of_its_leases_in_one_step() {
    let mut params = params();
    // Upper end of the accepted range.
    params.lease.leases_per_uid = 1000;
    params.lease.queue_max = 1000;
    let took = [250, 1000].map(|count| end_of_a_holder(params.clone(), count));
    // Linear: four times the leases take about four times as long; one pass for each would take sixteen times.
    assert!(
        took[1] < took[0] * 10 + Duration::from_millis(100),
        "{took:?}"
    );
}

/// Returns the time to end a holder with `count` leases.
#[expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test measures what a step of the policy takes"
)]
fn end_of_a_holder(params: Params, count: u64) -> Duration {
    let mut rig = Rig::sampled(params);
    let mut ask = |name: &str, pid| {
        let ticket = rig.ticket();
        let mut request = of_process(name, Class::Interactive, (1, 1), 1000, pid);
        (request.min, request.max) = (Bytes::from_kib(4), Bytes::from_kib(4));
        request.peer.uid += u32::from(pid == 6);
        rig.tell(Event::LeaseRequested { ticket, request });
        rig.granted()
    };
    let other = ask("other", 6);
    let first = ask("many", 7);
    for number in 1..count {
        ask(&format!("many-{number}"), 7);
    }
    let began = std::time::Instant::now();
    rig.tell(Event::HolderLost {
        lease: first.id,
        pid: Some(7),
    });
    let took = began.elapsed();
    assert!(matches!(
        rig.decisions().next(),
        Some(Decision::Lease(LeaseDecision::HolderGone { leases, .. })) if *leases as u64 == count
    ));
    let left: Vec<_> = rig.snapshot().leases.iter().map(|lease| lease.id).collect();
    assert_eq!(
        (left, rig.snapshot().memory.free),
        (vec![other.id], mib(400).saturating_sub(Bytes::from_kib(4)))
    );
    took
}

#[test]
fn the_leases_of_all_users_have_a_bound_too() {
    let mut params = params();
    params.lease.leases_per_uid = 1000;
    let mut rig = Rig::sampled(params);
    let mut granted = 0;
    let denial = loop {
        let ticket = rig.ticket();
        let uid = 1000 + granted % 3;
        let mut request = of_process(
            &format!("many-{granted}"),
            Class::Interactive,
            (1, 1),
            uid,
            7 + uid,
        );
        (request.min, request.max) = (Bytes::from_kib(4), Bytes::from_kib(4));
        rig.tell(Event::LeaseRequested { ticket, request });
        if rig.snapshot().leases.len() == granted as usize {
            break rig.denial();
        }
        granted += 1;
    };
    assert_eq!(granted, 1024);
    assert!(
        matches!(
            denial,
            Denial::QuotaExceeded {
                what: Quota::Leases,
                limit: 1024,
                ..
            }
        ),
        "{denial:?}"
    );
}
