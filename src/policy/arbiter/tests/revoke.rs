//! Tests of releases, targets, answers, missing answers and ends.

use super::*;
use crate::{
    decision::{Claim, LeaseDecision, LeaseEnd, NotReduced},
    denial::NotHolder,
    lease::{LeaseId, LeaseName, LeaseState, TargetAnswer},
};

#[test]
fn a_released_lease_is_credited_when_it_is_measured_back() {
    let mut rig = Rig::sampled(params());
    rig.request("a", Class::Interactive, 300, 300, 0);
    let a = rig.granted();
    rig.wait(10).measure("a", 280);
    rig.wait(10).releases(&a, peer(1000));
    assert!(matches!(rig.answer(), Answer::Done { .. }));
    assert_eq!(rig.snapshot().memory.free, mib(100));
    rig.wait(10).measure("a", 50);
    assert_eq!(
        (
            rig.snapshot().memory.held,
            rig.snapshot().memory.unaccounted
        ),
        (Bytes::ZERO, mib(50))
    );
    rig.pass(2000);
    assert!(
        rig.actions.contains(&Action::Measure {
            tenant: "a".to_owned()
        }),
        "residual use is measured on"
    );
    rig.measure("a", 0);
    assert_eq!(rig.snapshot().memory.free, mib(400));
    assert_eq!(rig.arbiter.next_deadline(), None);
}

#[test]
fn a_release_by_a_holder_that_cannot_be_measured_waits_for_a_sample() {
    let mut rig = Rig::sampled(params());
    rig.wait(10).request("a", Class::Interactive, 300, 300, 0);
    let a = rig.granted();
    rig.samples(300);
    rig.wait(10).releases(&a, peer(1000));
    let taken_at = rig.wait(5).now;
    rig.tell(Event::Measured {
        tenant: "a".to_owned(),
        used: None,
        taken_at,
    });
    assert_eq!(rig.snapshot().memory.held, mib(300));
    rig.wait(5).sample(300);
    rig.wait(5).sample(300);
    assert_eq!(
        (
            rig.snapshot().memory.held,
            rig.snapshot().memory.unaccounted
        ),
        (Bytes::ZERO, mib(300)),
        "an unmanaged process's now"
    );
}

#[test]
fn a_holder_that_is_gone_is_credited_at_once() {
    let mut rig = Rig::sampled(params());
    rig.request("a", Class::Interactive, 300, 300, 0);
    let a = rig.granted();
    rig.measure("a", 300);
    rig.lost(&a);
    let gone = Decision::from(LeaseDecision::HolderGone {
        lease: LeaseName {
            id: a.id,
            tenant: "a".to_owned(),
        },
        leases: 1,
        free: mib(400),
        budget: mib(400),
    });
    assert!(rig.decisions().eq([&gone]));
    assert_eq!(rig.snapshot().memory.free, mib(400));
}

pub(super) fn applied(lease: LeaseId, nonce: u64) -> Event {
    Event::TargetAnswered(TargetAnswered {
        lease,
        nonce,
        answer: TargetAnswer::Applied,
        claimed: None,
    })
}

fn claims(lease: LeaseId, nonce: u64, bytes: Bytes) -> Event {
    Event::TargetAnswered(TargetAnswered {
        lease,
        nonce,
        answer: TargetAnswer::Applied,
        claimed: Some(bytes),
    })
}

/// Returns a batch tenant with 100 to 300 MiB, all in use, and an audio request for 200 MiB more than is free.
fn revoked() -> (Rig, LeaseView, u64) {
    let mut rig = Rig::sampled(params());
    rig.wait(10).request("batch", Class::Batch, 100, 300, 0);
    let lease = rig.granted();
    rig.wait(10).measure("batch", 300);
    rig.wait(10)
        .request("voice", Class::AudioRealtime, 200, 200, 5000);
    let (nonce, bytes) = rig
        .actions
        .iter()
        .find_map(|action| match action {
            Action::SetTarget { nonce, bytes, .. } => Some((*nonce, *bytes)),
            _ => None,
        })
        .unwrap();
    assert_eq!(bytes, mib(200), "the smallest sufficient set");
    (rig, lease, nonce)
}

#[test]
fn an_honest_holder_shrinks_and_the_waiting_one_is_granted_when_it_is_measured() {
    let (mut rig, lease, nonce) = revoked();
    rig.wait(20).tell(claims(lease.id, nonce, mib(200)));
    assert_eq!(rig.try_answer(), None, "an answer is not a measurement");
    assert!(rig.actions.contains(&Action::Measure {
        tenant: "batch".to_owned()
    }));
    rig.wait(5).measure("batch", 200);
    assert_eq!(rig.granted().memory.held, mib(200));
}

#[test]
fn what_is_still_in_use_above_a_target_is_not_granted_but_asked_for_again() {
    let (mut rig, lease, nonce) = revoked();
    rig.wait(5).tell(applied(lease.id, nonce));
    rig.wait(5).measure("batch", 205);
    assert_eq!(
        (rig.try_answer(), rig.snapshot().memory.free),
        (None, mib(195)),
        "90 % of the promise is enough"
    );
    assert!(acts!(rig, Action::SetTarget { bytes, .. } if *bytes == mib(200)));
}

#[test]
fn low_use_before_the_answer_is_not_credited_since_it_may_rise_again() {
    let (mut rig, lease, nonce) = revoked();
    rig.wait(5).measure("batch", 150);
    assert_eq!(rig.held("batch"), mib(300));
    rig.wait(5).tell(applied(lease.id, nonce));
    rig.wait(5).measure("batch", 150);
    assert_eq!(rig.granted().memory.held, mib(200));
}

/// Ends a lease whose holder did not answer: 200 ms after the deadline of 2 s.
fn unanswered() -> (Rig, LeaseView) {
    let (mut rig, lease, _) = revoked();
    rig.pass(2300);
    assert_eq!(rig.not_reduced(), Some(NotReduced::Unanswered));
    (rig, lease)
}

#[test]
fn a_holder_that_has_not_answered_may_fill_its_lease_until_its_term_is_over_and_no_other_gets_that()
{
    let (mut rig, _, _) = revoked();
    // Below its target after the deadline, but the holder does not know of the end.
    rig.pass(2100);
    rig.measure("batch", 150);
    assert_eq!((rig.try_answer(), rig.held("batch")), (None, mib(300)));
    rig.pass(200);
    assert_eq!(rig.lease("batch").unwrap().state, LeaseState::Gone);
    rig.wait(5).measure("batch", 150);
    assert_eq!((rig.try_answer(), rig.held("batch")), (None, mib(300)));
    // It fills its lease, as it may: no more is in use than the ledger holds.
    rig.wait(100).measure("batch", 300);
    assert_eq!(
        (
            rig.snapshot().memory.held,
            rig.snapshot().memory.unaccounted
        ),
        (mib(300), mib(0))
    );
    // After its term of 10 s only its measured use counts.
    rig.pass(10_000);
    rig.wait(5).measure("batch", 300);
    assert_eq!(
        (
            rig.snapshot().memory.held,
            rig.snapshot().memory.unaccounted
        ),
        (mib(0), mib(300))
    );
}

#[test]
fn who_says_that_it_has_heard_of_the_end_is_credited_when_it_is_measured() {
    let (mut rig, lease) = unanswered();
    rig.release(&lease, peer(1001));
    assert!(
        matches!(rig.denial(), Denial::NotHolder { .. }),
        "not its holder"
    );
    rig.release(&lease, peer(lease.owner.owner_uid));
    assert_eq!(rig.held("batch"), mib(300), "a word is not a measurement");
    rig.wait(5).measure("batch", 0);
    assert_eq!(
        (rig.held("batch"), rig.granted().memory.held),
        (mib(0), mib(200))
    );
}

#[test]
fn a_holder_that_is_gone_after_the_end_of_its_lease_is_credited_at_once() {
    let (mut rig, lease) = unanswered();
    rig.lost(&lease);
    assert_eq!(
        (rig.held("batch"), rig.granted().memory.held),
        (mib(0), mib(200))
    );
}

#[test]
fn who_has_answered_may_take_its_target_until_it_has_heard_of_the_end() {
    let (mut rig, lease, nonce) = revoked();
    rig.wait(20).tell(applied(lease.id, nonce));
    rig.wait(5).measure("batch", 300);
    rig.pass(2300);
    rig.wait(5).measure("batch", 20);
    assert_eq!(
        (rig.held("batch"), rig.granted().memory.held),
        (mib(200), mib(200))
    );
    rig.pass(8000);
    rig.wait(5).measure("batch", 20);
    assert_eq!(
        (rig.held("batch"), rig.snapshot().memory.unaccounted),
        (mib(0), mib(20))
    );
}

#[test]
fn no_request_waits_for_what_a_holder_may_keep_for_a_term() {
    let mut rig = Rig::with_engine_ready(params());
    rig.wait(10).request("batch", Class::Batch, 60, 200, 0);
    let batch = rig.granted();
    rig.wait(10).measure("batch", 10);
    rig.wait(10)
        .request("voice", Class::AudioRealtime, 150, 150, 8000);
    assert!(
        acts!(rig, Action::SetTarget { lease, .. } if *lease == batch.id),
        "{:#?}",
        rig.actions
    );
    rig.engine_applies();
    // The holder is silent, with 8 s left of its term: the missing memory is reclaimed from the engine.
    let actions = rig.pass(2300).to_vec();
    let engine = |action: &Action| matches!(action, Action::ApplyPlan { .. });
    assert!(actions.iter().any(engine), "{actions:#?}");
}

#[test]
fn a_measurement_that_was_overtaken_by_a_newer_one_credits_nothing() {
    let (mut rig, lease, nonce) = revoked();
    rig.wait(5).tell(applied(lease.id, nonce));
    let taken_at = rig.wait(5).now;
    rig.wait(5).measure("batch", 300);
    rig.wait(5).measure_at("batch", 150, taken_at);
    assert_eq!((rig.try_answer(), rig.held("batch")), (None, mib(300)));
}

#[test]
fn a_holder_that_claims_a_downsize_it_did_not_make_is_not_credited() {
    let (mut rig, lease, nonce) = revoked();
    rig.wait(20).tell(claims(lease.id, nonce, mib(200)));
    rig.wait(5).measure("batch", 300);
    assert_eq!(rig.lease("batch").unwrap().state, LeaseState::Revoking);
    rig.pass(2300);
    let measured = NotReduced::Measured {
        used: mib(300),
        claim: Claim::Applied,
    };
    assert_eq!(rig.not_reduced(), Some(measured));
    rig.wait(5).measure("batch", 300);
    let snapshot = rig.snapshot();
    assert_eq!(
        (
            snapshot.memory.held,
            snapshot.memory.unaccounted,
            snapshot.memory.free
        ),
        (mib(200), mib(100), mib(100)),
        "its target is its own until it has heard of the end, or its term is over"
    );
    assert_eq!(rig.lease("batch").unwrap().state, LeaseState::Gone);
    rig.pass(10_000);
    assert!(matches!(rig.denial(), Denial::InsufficientMemory { free, .. } if free == mib(100)));
    rig.wait(5).measure("batch", 300);
    let snapshot = rig.snapshot();
    assert_eq!(
        (
            snapshot.memory.held,
            snapshot.memory.unaccounted,
            snapshot.memory.free
        ),
        (mib(0), mib(300), mib(100))
    );
    let residual = rig.lease("batch").unwrap();
    assert_eq!(
        (residual.state, residual.memory.held, residual.memory.used),
        (LeaseState::Gone, mib(0), Some(mib(300)))
    );
}

/// The deadline is 2 s after the target, and the lease ends 200 ms later.
#[test]
fn who_answers_at_the_last_moment_is_measured_once_more() {
    let ends = |rig: &Rig| {
        let ends = |action: &Action| matches!(action, Action::EndLease { .. });
        rig.actions.iter().any(ends)
    };
    let late = || {
        let (mut rig, lease, nonce) = revoked();
        rig.wait(5).measure("batch", 150);
        let deadline = rig.target_of(&lease).deadline;
        rig.now = deadline + Duration::from_millis(199);
        rig.tell(applied(lease.id, nonce));
        (rig, deadline)
    };
    let (mut rig, deadline) = late();
    rig.wait(40).measure("batch", 150);
    assert!(!ends(&rig));
    assert_eq!(
        (rig.held("batch"), rig.granted().memory.held),
        (mib(200), mib(200))
    );

    let (mut rig, _) = late();
    rig.now = deadline + Duration::from_millis(205);
    rig.tell(Event::DeadlineReached);
    assert!(!ends(&rig), "{:#?}", rig.actions);
    rig.wait(5).measure("batch", 250);
    assert!(
        ends(&rig),
        "a false claim ends the lease with the reading that shows it"
    );
}

/// A measurement may take longer than the grace, for this holder or for others.
#[test]
fn a_holder_that_answered_is_not_ended_by_a_reading_from_before_its_answer() {
    let (mut rig, lease, nonce) = revoked();
    rig.wait(20).tell(applied(lease.id, nonce));
    let answered = rig.now;
    // Taken before the answer, reported after it.
    rig.wait(5).measure_at("batch", 300, answered);
    rig.pass(2300);
    assert_eq!(rig.not_reduced(), None);
    rig.wait(5).measure("batch", 200);
    assert_eq!(
        (rig.held("batch"), rig.granted().memory.held),
        (mib(200), mib(200))
    );
}

#[test]
fn a_holder_that_answered_and_is_never_read_is_ended_as_unmeasurable() {
    let claim = Claim::Applied;
    let (mut rig, lease, nonce) = revoked();
    rig.wait(20).tell(applied(lease.id, nonce));
    rig.pass(4999);
    assert_eq!(rig.not_reduced(), None);
    rig.pass(1);
    assert_eq!(rig.not_reduced(), Some(NotReduced::Unmeasurable { claim }));

    // A failed reading is evidence at once.
    let (mut rig, lease, nonce) = revoked();
    rig.wait(20).tell(applied(lease.id, nonce));
    rig.cannot_measure("batch");
    rig.pass(2200);
    assert_eq!(rig.not_reduced(), Some(NotReduced::Unmeasurable { claim }));
}

#[test]
fn a_second_claim_is_not_judged_by_a_reading_from_before_it() {
    let (mut rig, lease, nonce) = revoked();
    rig.wait(20).tell(Event::TargetAnswered(TargetAnswered {
        lease: lease.id,
        nonce,
        answer: TargetAnswer::Deferred { overage: mib(100) },
        claimed: None,
    }));
    rig.wait(5).measure("batch", 300);
    let deadline = rig.target_of(&lease).deadline;
    rig.now = deadline + ms(199);
    rig.tell(applied(lease.id, nonce));
    rig.wait(40).tell(Event::DeadlineReached);
    assert_eq!(rig.not_reduced(), None);
    rig.wait(1).measure("batch", 200);
    assert_eq!(rig.granted().memory.held, mib(200));
}

#[test]
fn an_answer_to_another_target_is_stale() {
    let (mut rig, lease, nonce) = revoked();
    rig.tell(Event::TargetAnswered(TargetAnswered {
        lease: lease.id,
        nonce: nonce + 7,
        answer: TargetAnswer::Applied,
        claimed: None,
    }));
    assert_eq!(rig.ignored(), Some(Some(nonce)));
}

#[test]
fn an_expired_lease_ends_at_its_instant_and_its_use_is_unaccounted() {
    let mut rig = Rig::sampled(params());
    rig.request("a", Class::Interactive, 100, 100, 0);
    let a = rig.granted();
    assert_eq!(rig.arbiter.next_deadline(), a.expires_at);
    rig.wait(9990).measure("a", 100);
    rig.pass(10);
    assert!(acts!(rig, Action::EndLease { .. }));
    rig.wait(5).measure("a", 100);
    assert_eq!(
        (
            rig.snapshot().memory.held,
            rig.snapshot().memory.unaccounted
        ),
        (Bytes::ZERO, mib(100))
    );
}

impl Rig {
    pub(super) fn resize(&mut self, lease: &LeaseView, min: u64, max: u64, wait_ms: u64) -> Ticket {
        let ticket = self.ticket();
        self.tell(Event::LeaseResizeRequested(LeaseResize {
            ticket,
            lease: lease.id,
            generation: lease.generation,
            peer: peer(lease.owner.owner_uid),
            min: mib(min),
            max: mib(max),
            wait: ms(wait_ms),
        }));
        ticket
    }

    pub(super) fn release(&mut self, lease: &LeaseView, peer: Peer) {
        self.wait(5).releases(lease, peer);
    }

    pub(super) fn releases(&mut self, lease: &LeaseView, peer: Peer) {
        let ticket = self.ticket();
        self.tell(Event::LeaseReleased(LeaseCall {
            ticket,
            lease: lease.id,
            generation: lease.generation,
            peer,
        }));
    }

    pub(super) fn target_of(&self, lease: &LeaseView) -> crate::lease::Target {
        let target = self.lease(&lease.tenant).and_then(|lease| lease.target);
        target.unwrap_or_else(|| panic!("no target in {:#?}", self.actions))
    }

    /// Returns the target in force when the last call ignored an answer.
    fn ignored(&self) -> Option<Option<u64>> {
        self.decisions().find_map(|decision| match decision {
            Decision::Lease(LeaseDecision::AnswerIgnored { current, .. }) => Some(*current),
            _ => None,
        })
    }

    /// Returns why the last call ended a lease whose holder had not reached its target.
    fn not_reduced(&self) -> Option<NotReduced> {
        self.actions.iter().find_map(|action| match action {
            Action::EndLease {
                end: LeaseEnd::NotReduced { cause, .. },
                ..
            } => Some(cause.clone()),
            _ => None,
        })
    }

    fn cannot_measure(&mut self, tenant: &str) {
        let taken_at = self.wait(5).now;
        self.tell(Event::Measured {
            tenant: tenant.to_owned(),
            used: None,
            taken_at,
        });
    }
}

/// Returns a holder of 100 MiB, all in use, and another whose 250 MiB leave no memory for growth.
fn two_holders() -> (Rig, LeaseView, LeaseView) {
    let mut rig = Rig::sampled(params());
    rig.request("other", Class::Interactive, 250, 250, 0);
    let other = rig.granted();
    rig.wait(10).request("a", Class::Interactive, 100, 100, 0);
    let a = rig.granted();
    rig.wait(10).measure("a", 100);
    (rig, a, other)
}

/// A waiting earlier call would be granted in addition to the later one, and then credited by mistake.
#[test]
fn a_later_call_of_a_holder_replaces_the_one_that_waits() {
    let (mut rig, a, other) = two_holders();
    let first = rig.resize(&a, 300, 300, 5000);
    assert_eq!(rig.try_answer(), None, "it waits");
    rig.resize(&a, 20, 20, 0);
    assert!(
        acts!(rig, Action::Answer { ticket, answer: Answer::Denied { denial: Denial::Replaced { .. }, .. } } if *ticket == first),
        "{:#?}",
        rig.actions
    );
    rig.wait(10).lost(&other);
    assert_eq!(
        (rig.try_answer(), rig.held("a")),
        (None, mib(100)),
        "nothing is granted"
    );
    rig.wait(10).measure("a", 20);
    assert_eq!(rig.held("a"), mib(20));
}

#[test]
fn who_lowers_its_lease_and_is_granted_more_then_keeps_what_it_was_granted() {
    let (mut rig, a, other) = two_holders();
    rig.resize(&a, 20, 20, 0);
    rig.resize(&a, 300, 300, 4000);
    rig.wait(10).lost(&other);
    assert_eq!(rig.granted().memory.held, mib(300));
    assert_eq!(rig.lease("a").unwrap().state, LeaseState::Granted);
    rig.wait(10).measure("a", 10);
    assert_eq!(rig.held("a"), mib(300), "it may fill it");
}

#[test]
fn a_wish_for_less_that_is_not_seen_ends_no_lease() {
    let (mut rig, a, _) = two_holders();
    rig.resize(&a, 20, 20, 0);
    rig.pass(6000);
    assert!(decided!(rig, Lease(LeaseDecision::WishNotSeen { .. })));
    let lease = rig.lease("a").unwrap();
    assert_eq!(
        (lease.state, lease.memory.held),
        (LeaseState::Granted, mib(100))
    );
}

#[test]
fn a_wish_for_less_answers_a_target_and_gives_no_more_time() {
    let (mut rig, lease, nonce) = revoked();
    let before = rig.target_of(&lease);
    for _ in 0..8 {
        rig.pass(250);
        rig.resize(&lease, 100, 200, 0);
        assert_eq!(
            rig.target_of(&lease),
            before,
            "its number and its deadline stay"
        );
        rig.wait(5).measure("batch", 300);
    }
    rig.pass(300);
    let measured = NotReduced::Measured {
        used: mib(300),
        claim: Claim::Resized,
    };
    assert_eq!(rig.not_reduced(), Some(measured));
    // A compliant holder answers the target as sent.
    let (mut rig, lease, same) = revoked();
    assert_eq!(nonce, same);
    rig.wait(5).resize(&lease, 50, 150, 0);
    rig.wait(5).tell(applied(lease.id, nonce));
    assert_eq!(rig.ignored(), None);
    rig.wait(5).measure("batch", 150);
    assert_eq!(rig.granted().memory.held, mib(200), "what was asked for it");
    assert_eq!(
        rig.target_of(&lease).bytes,
        mib(150),
        "what it wants less follows"
    );
    rig.wait(5).measure("batch", 150);
    assert_eq!(rig.held("batch"), mib(150));
}

#[test]
fn wishes_for_less_that_never_come_true_do_not_spare_a_holder() {
    let falling: fn(u64) -> u64 = |step| 299 - step;
    for wish in [
        falling,
        |step| 210 + step % 2,
        |step| 101 + step,
        |step| 300 - step % 2 * 90,
    ] {
        let mut rig = Rig::sampled(params());
        rig.wait(10).request("batch", Class::Batch, 100, 300, 0);
        let lease = rig.granted();
        rig.wait(10).measure("batch", 300);
        let step = |rig: &mut Rig, wish: u64| {
            rig.pass(500);
            let kept = Event::LeaseRenewed(LeaseCall {
                ticket: rig.ticket(),
                lease: lease.id,
                generation: lease.generation,
                peer: peer(1000),
            });
            rig.tell(kept);
            rig.resize(&lease, 100, wish, 0);
            rig.measure("batch", 300);
        };
        step(&mut rig, wish(1));
        rig.wait(10)
            .request("voice", Class::AudioRealtime, 200, 200, 60_000);
        // Four times the 5 s of one request, plus a step.
        let asked = (2..43).find(|at| {
            step(&mut rig, wish(*at));
            let target = rig.lease("batch").and_then(|lease| lease.target);
            target.is_some_and(|target| target.bytes == mib(200))
        });
        assert!(
            asked.is_some(),
            "it was never asked: {:?}",
            [wish(1), wish(2), wish(3)]
        );
    }
}

/// The first sample that shows an ended lease as an unmanaged process counts: by the lower of two, its memory would be
/// free.
#[test]
fn what_an_unmeasurable_holder_keeps_is_unaccounted_with_the_first_sample_after_its_end() {
    let mut rig = Rig::sampled(params());
    rig.wait(10).request("a", Class::Interactive, 300, 300, 0);
    let a = rig.granted();
    rig.samples(300);
    rig.wait(10)
        .request("b", Class::Interactive, 300, 300, 5000);
    assert_eq!(rig.try_answer(), None);
    rig.release(&a, peer(1000));
    rig.cannot_measure("a");
    rig.wait(5).sample(300);
    assert_eq!(rig.held("a"), Bytes::ZERO, "off the book");
    assert_eq!(
        (rig.try_answer(), rig.snapshot().memory.unaccounted),
        (None, mib(300))
    );
    rig.samples(0);
    assert_eq!(rig.granted().tenant, "b");
}

#[test]
fn residual_use_that_cannot_be_read_once_is_not_free() {
    let mut rig = Rig::sampled(params());
    rig.wait(10).request("a", Class::Interactive, 300, 300, 0);
    let a = rig.granted();
    rig.samples(300);
    rig.measure("a", 300);
    rig.release(&a, peer(1000));
    rig.wait(5).measure("a", 300);
    rig.samples(300);
    assert_eq!(
        (rig.held("a"), rig.snapshot().memory.unaccounted),
        (mib(0), mib(300))
    );
    rig.request("b", Class::Interactive, 300, 300, 5000);
    rig.cannot_measure("a");
    assert_eq!(
        (rig.try_answer(), rig.snapshot().memory.unaccounted),
        (None, mib(300))
    );
    rig.wait(5).sample(300);
    assert_eq!(
        (rig.try_answer(), rig.snapshot().memory.unaccounted),
        (None, mib(300)),
        "an unmanaged process's"
    );
    assert!(rig.lease("a").is_none());
    rig.samples(0);
    assert_eq!(rig.granted().tenant, "b");
}

#[test]
fn an_operator_releases_an_ended_lease_whose_holder_says_nothing() {
    for (peer, stands) in [
        (
            Peer {
                uid: 0,
                operator: true,
                ..Peer::default()
            },
            0,
        ),
        (
            Peer {
                pid: Some(77),
                ..peer(1000)
            },
            1000,
        ),
    ] {
        let (mut rig, lease) = unanswered();
        rig.wait(5).measure("batch", 0);
        assert_eq!(rig.held("batch"), mib(300), "not acknowledged");
        rig.release(&lease, peer);
        let done = Done::Decided(Decision::from(LeaseDecision::EndAcknowledged {
            lease: LeaseName {
                id: lease.id,
                tenant: "batch".to_owned(),
            },
            by: Some(stands),
            held: mib(300),
        }));
        assert_eq!(rig.done(), done);
        rig.wait(5).measure("batch", 0);
        assert_eq!(
            (rig.held("batch"), rig.granted().memory.held),
            (mib(0), mib(200))
        );
    }
    let (mut rig, lease) = unanswered();
    rig.release(&lease, peer(1001));
    let ended = NotHolder::Ended {
        uid: 1000,
        held: mib(300),
        left: ms(7675),
    };
    assert!(
        matches!(rig.denial(), Denial::NotHolder { problem, .. } if problem == ended),
        "{:?}",
        rig.denial()
    );
}

/// Otherwise a holder that keeps requesting more would never get a target.
#[test]
fn who_waits_to_become_larger_is_asked_all_the_same_and_its_call_is_answered() {
    for pressed in [true, false] {
        let mut rig = Rig::sampled(params());
        rig.request("other", Class::Interactive, 90, 90, 0);
        rig.wait(10).request("batch", Class::Batch, 100, 300, 0);
        let lease = rig.granted();
        rig.wait(10).measure("batch", 300);
        let waits = rig.resize(&lease, 390, 390, 60_000);
        assert_eq!(rig.try_answer(), None);
        if pressed {
            rig.samples(395);
        } else {
            rig.request("voice", Class::AudioRealtime, 100, 100, 5000);
        }
        let target = rig.target_of(&lease);
        assert!(target.bytes < mib(300));
        let reported = |action: &Action| matches!(action, Action::Answer { ticket, answer: Answer::Denied { denial: Denial::Invalid { problem: Problem::AboveTarget { .. }, .. }, .. } } if *ticket == waits);
        assert!(
            rig.actions.iter().any(reported),
            "{pressed}: {:#?}",
            rig.actions
        );
    }
}

/// Unused memory of one process is no evidence that another process of the same name has shrunk, nor the reverse.
#[test]
fn processes_of_one_name_are_measured_and_credited_each_for_itself() {
    for uid in [1000, 1001] {
        let mut rig = Rig::sampled(params());
        let ask = |rig: &mut Rig, sizes, uid, pid| {
            let ticket = rig.ticket();
            let request = of_process("vision", Class::Batch, sizes, uid, pid);
            rig.tell(Event::LeaseRequested { ticket, request });
            rig.granted()
        };
        let one = ask(&mut rig, (20, 200), 1000, 10);
        let other = ask(&mut rig, (180, 180), uid, 11);
        assert_eq!(
            (one.holder(), other.holder()),
            ("vision", "vision (pid 11)")
        );
        assert_eq!(
            ask(&mut rig, (10, 10), 1000, 10).holder(),
            "vision",
            "one process, two leases"
        );
        rig.wait(10).measure("vision", 210);
        rig.measure("vision (pid 11)", 0);
        rig.request("voice", Class::AudioRealtime, 100, 100, 9000);
        let target = rig.target_of(&one);
        assert_eq!(target.bytes, mib(110));
        // It claims to have shrunk, but has not.
        rig.wait(5).tell(applied(one.id, target.nonce));
        rig.wait(5).measure("vision", 210);
        assert_eq!((rig.try_answer(), rig.held("vision")), (None, mib(200)));
        // The other process fills its lease, as it may; the first shrinks, which is measured.
        rig.wait(5).measure("vision (pid 11)", 180);
        rig.wait(5).measure("vision", 120);
        assert_eq!(rig.granted().memory.held, mib(100));
        assert_eq!(rig.snapshot().memory.unaccounted, mib(0));
        // The residual use of the first process counts only for itself.
        rig.lost(&other);
        assert_eq!(rig.lease("vision").unwrap().memory.used, Some(mib(120)));
    }
    let mut rig = Rig::sampled(params());
    rig.request("vision (pid 11)", Class::Batch, 1, 1, 0);
    assert!(matches!(rig.denial(), Denial::Invalid { field, .. } if field == "tenant"));
}
