use super::*;
use crate::{
    decision::AdmissionDecision,
    denial::{NotHolder, Quota},
    pressure::{PressureLevel, sample_with},
};

/// Settings of a session of 8 GiB with small watermarks.
fn large() -> Params {
    let mut params = Params::for_budget(Bytes::from_gib(8), Bytes::ZERO, Scope::Session);
    params.pressure.elevated_below = mib(2);
    params.pressure.critical_below = mib(1);
    params.pressure.last_resort_below = mib(1);
    params.pressure.hysteresis = mib(1);
    params
}

const GIB: u64 = 1024;

#[test]
fn renew_does_not_resurrect() {
    let mut rig = Rig::sampled(large());
    rig.request("a", Class::Interactive, 6 * GIB, 6 * GIB, 0);
    let a = rig.granted();
    rig.wait(9000)
        .request("b", Class::Interactive, 6 * GIB, 6 * GIB, 5000);
    assert_eq!(rig.try_answer(), None);
    rig.wait(1000);
    assert_eq!(a.expires_at, Some(rig.now));
    for wait in [0, 2000] {
        rig.wait(wait);
        rig.renew(&a);
        assert!(matches!(rig.denial(), Denial::UnknownLease { .. }));
    }
    rig.measure("a", 0);
    assert_eq!(rig.granted().tenant, "b");
}

/// A renewal skips the full pass while nothing is due; decisions are the same then and later.
#[test]
fn a_renewal_decides_the_same_whether_or_not_it_goes_through_the_whole_book() {
    let mut rig = Rig::with_engine_ready(params());
    rig.request("a", Class::Interactive, 60, 60, 0);
    let a = rig.granted();
    // Under pressure, with a waiting request and targets in force.
    rig.request("b", Class::AudioRealtime, 240, 240, 9000);
    rig.samples(330);
    let mut thorough = rig.arbiter.clone();
    for step in 0..4000u64 {
        let now = rig.now + ms(step * 7);
        let event = if step.is_multiple_of(40) {
            Event::Sampled(sample_with(mib(200 + step % 170), now))
        } else if thorough.next_deadline().is_some_and(|at| at <= now) {
            Event::DeadlineReached
        } else {
            Event::LeaseRenewed(LeaseCall {
                ticket: Ticket(10_000 + step),
                lease: a.id,
                generation: a.generation,
                peer: peer(1000),
            })
        };
        thorough.idle_until = None;
        let actions = rig.arbiter.handle(now, event.clone());
        assert_eq!(actions, thorough.handle(now, event), "at {now}");
        assert_eq!(rig.arbiter.snapshot(), thorough.snapshot(), "at {now}");
    }
    assert!(
        rig.arbiter
            .snapshot()
            .leases
            .iter()
            .any(|lease| lease.id == a.id)
    );
}

#[test]
fn unknown_is_not_zero() {
    for absent_probe in [true, false] {
        let mut rig = Rig::new(large());
        let unknown = |now| Sample {
            taken_at: now,
            memory: MemoryReading {
                mem_total: Bytes::from_gib(16),
                mem_available: Bytes::from_gib(12),
                ..MemoryReading::default()
            },
            scope_used: None,
            ..Sample::default()
        };
        if !absent_probe {
            let sample = unknown(rig.now);
            rig.tell(Event::Sampled(sample));
            assert_eq!(
                rig.snapshot().pressure.headroom,
                Some(Bytes::from_gib(8)),
                "the book decides"
            );
        }
        rig.wait(10)
            .request("a", Class::Interactive, 6 * GIB, 6 * GIB, 0);
        assert_eq!(rig.granted().memory.used, None, "unverified");
        if !absent_probe {
            let sample = unknown(rig.wait(10).now);
            rig.tell(Event::Sampled(sample));
            assert_eq!(rig.snapshot().pressure.headroom, Some(Bytes::from_gib(2)));
        }
        rig.tell(Event::Measured {
            tenant: "a".to_owned(),
            used: None,
            taken_at: rig.now,
        });
        rig.request("b", Class::Interactive, 6 * GIB, 6 * GIB, 0);
        assert!(matches!(rig.denial(), Denial::InsufficientMemory { .. }));
        rig.request("c", Class::Interactive, 2 * GIB, 2 * GIB, 0);
        rig.granted();
    }
}

#[test]
fn a_request_that_does_not_fit_is_granted_after_a_verified_shed_of_the_engine() {
    let mut rig = Rig::with_engine_ready(params());
    rig.request("other", Class::AudioRealtime, 240, 240, 0);
    rig.granted();
    rig.request("asr", Class::AudioRealtime, 64, 64, 1000);
    assert_eq!(rig.try_answer(), None);
    assert_eq!(rig.held("asr"), Bytes::ZERO, "asking frees nothing");
    rig.wait(3);
    rig.engine_applies();
    assert_eq!(rig.granted().memory.held, mib(64));
    let snapshot = rig.snapshot();
    assert!(snapshot.memory.held <= snapshot.memory.budget);
    assert!(
        snapshot.memory.free < mib(10),
        "no more than needed: {}",
        snapshot.memory.free
    );
}

#[test]
fn the_engine_gives_nothing_to_its_own_class_or_a_lower_one() {
    let mut rig = Rig::with_engine_ready(params());
    for class in [Class::LlmElastic, Class::Batch] {
        rig.request("x", class, 300, 300, 0);
        assert!(
            matches!(rig.denial(), Denial::InsufficientMemory { reclaimable, .. } if reclaimable == Bytes::ZERO)
        );
    }
}

#[test]
fn nothing_is_shed_in_vain() {
    let mut rig = Rig::with_engine_ready(params());
    rig.request("x", Class::AudioRealtime, 390, 390, 500);
    assert_eq!(rig.plan_asked(), None);
    assert!(decided!(
        rig,
        Admission(AdmissionDecision::OutOfReach { .. })
    ));
    rig.pass(600);
    assert!(matches!(rig.denial(), Denial::InsufficientMemory { .. }));
}

fn with_indexer(size: u64) -> Params {
    let mut params = params();
    // A waiting request rises by a class every 3 s, and has its turn for 1 s.
    params.lease.wait_max = ms(6000);
    params.workers = vec![of_class(Class::Batch, by_hand("indexer", size))];
    params
}

/// Interactive requests keep arriving, each before the last one has ended: without a bound on its wait the worker would
/// never be served.
#[test]
fn no_request_starves_behind_a_stream_of_more_urgent_ones() {
    let mut rig = Rig::sampled(with_indexer(300));
    let mut holders: Vec<LeaseView> = Vec::new();
    let mut waiting: usize = 0;
    for round in 0..200 {
        rig.wait(100);
        if round == 5 {
            rig.wanted("indexer");
            assert!(!rig.starts("indexer"));
        }
        rig.tell(Event::DeadlineReached);
        let mut actions = rig.actions.clone();
        if holders.len() + waiting < 4 {
            rig.request(&format!("user{round}"), Class::Interactive, 100, 100, 6000);
            waiting += 1;
            actions.extend(rig.actions.clone());
        }
        // Each lease lasts for 300 ms, one after the other.
        if round % 3 == 0 && !holders.is_empty() {
            let lease = holders.remove(0);
            rig.lost(&lease);
            actions.extend(rig.actions.clone());
        }
        for action in &actions {
            if let Action::Answer {
                answer: Answer::Lease { lease },
                ..
            } = action
            {
                holders.push(lease.clone());
                waiting -= 1;
            }
        }
        if actions
            .iter()
            .any(|action| matches!(action, Action::StartWorker { .. }))
        {
            let after = rig.now.since_start();
            assert!(
                after > ms(6500) && after < ms(7700),
                "in its turn: {after:?}"
            );
            return;
        }
    }
    panic!("it was never started");
}

/// The worker waits for memory that cannot be reclaimed: during its turn no request overtakes it, then the queue
/// continues.
#[test]
fn a_turn_that_brings_nothing_is_over_after_a_while() {
    let mut rig = Rig::sampled(with_indexer(300));
    // The excess over its minimum is not reclaimed for requests of the same or a lower class.
    rig.request("user", Class::Interactive, 50, 200, 0);
    let lease = rig.granted();
    rig.wanted("indexer");
    rig.pass(3500);
    rig.renew(&lease);
    rig.pass(2800);
    let aged = Decision::Admission(AdmissionDecision::Aged {
        tenant: "indexer".to_owned(),
        class: Class::Batch,
        waited: ms(6000),
        rank: Class::Interactive,
    });
    assert!(
        rig.decisions().any(|decision| *decision == aged),
        "{:#?}",
        rig.actions
    );
    rig.request("other", Class::Interactive, 100, 100, 2000);
    assert_eq!(rig.try_answer(), None, "not before its turn is over");
    rig.request("asr", Class::AudioRealtime, 50, 50, 0);
    assert_eq!(
        rig.granted().memory.held,
        mib(50),
        "audio does not wait for the turn of another"
    );
    rig.pass(800);
    assert_eq!(rig.granted().memory.held, mib(100));
    let over = Decision::Admission(AdmissionDecision::TurnOver {
        tenant: "indexer".to_owned(),
        class: Class::Batch,
    });
    assert!(rig.decisions().any(|decision| *decision == over));
    rig.pass(2800);
    assert!(
        !decided!(rig, Admission(AdmissionDecision::Aged { .. })),
        "it ages from the start"
    );
    rig.pass(200);
    assert!(
        decided!(
            rig,
            Admission(AdmissionDecision::Aged {
                rank: Class::LlmElastic,
                ..
            })
        ),
        "{:#?}",
        rig.actions
    );
}

/// A worker of a lower class than the LLM, which does not fit beside the grown LLM.
#[test]
fn a_worker_in_its_turn_takes_from_the_engine_what_it_has_beyond_its_floor() {
    let mut rig = Rig::with_engine_ready(with_indexer(100));
    rig.request("user", Class::Interactive, 200, 200, 0);
    rig.granted();
    rig.wanted("indexer");
    let lease = rig.lease("user").unwrap();
    for _ in 0..5 {
        rig.pass(1000);
        assert_eq!(rig.plan_asked(), None, "not before its turn");
        rig.renew(&lease);
    }
    rig.pass(1000);
    let before = rig.held("llm");
    assert!(rig.engine_applies() < before);
    assert!(rig.starts("indexer"), "{:#?}", rig.actions);
}

#[test]
fn waiting_requests_are_served_by_class_and_then_by_arrival() {
    let mut rig = Rig::sampled(params());
    rig.request("big", Class::AudioRealtime, 400, 400, 0);
    let big = rig.granted();
    for (tenant, class) in [
        ("batch", Class::Batch),
        ("first", Class::Interactive),
        ("second", Class::Interactive),
        ("voice", Class::AudioRealtime),
    ] {
        rig.request(tenant, class, 150, 150, 5000);
    }
    rig.lost(&big);
    let granted: Vec<String> = rig
        .actions
        .iter()
        .filter_map(|action| match action {
            Action::Answer {
                answer: Answer::Lease { lease },
                ..
            } => Some(lease.tenant.clone()),
            _ => None,
        })
        .collect();
    assert_eq!(granted, ["voice", "first"]);
    // 100 MiB are free, but the small request does not overtake.
    rig.request("small", Class::Interactive, 50, 50, 5000);
    assert_eq!(rig.try_answer(), None);
    rig.request("urgent", Class::AudioRealtime, 50, 50, 0);
    rig.granted();
}

#[test]
fn the_same_request_id_books_once_and_other_content_is_refused() {
    let mut rig = Rig::sampled(params());
    let mut request = request("a", Class::Interactive, 100, 100, 0);
    request.request_id = "one".to_owned();
    let mut ids = Vec::new();
    for _ in 0..2 {
        rig.ask(request.clone());
        ids.push(rig.granted().id);
    }
    assert_eq!(ids[0], ids[1]);
    assert_eq!(rig.snapshot().memory.held, mib(100));
    request.max = mib(200);
    rig.ask(request);
    assert!(matches!(rig.denial(), Denial::RequestIdReused { .. }));
}

#[test]
fn no_user_acts_on_the_lease_of_another() {
    let mut rig = Rig::sampled(params());
    rig.request("a", Class::Interactive, 100, 100, 0);
    let a = rig.granted();
    let mut release = |uid, generation| {
        let ticket = rig.ticket();
        rig.tell(Event::LeaseReleased(LeaseCall {
            ticket,
            lease: a.id,
            generation,
            peer: peer(uid),
        }));
        rig.denial()
    };
    let denial = release(1001, a.generation);
    assert!(
        matches!(denial, Denial::NotHolder { problem, .. } if problem == NotHolder::OwnedBy { uid: 1000 })
    );
    let denial = release(1000, 99);
    assert!(matches!(
        denial,
        Denial::StaleGeneration {
            generation: 99,
            current: 1,
            ..
        }
    ));
    assert_eq!(rig.held("a"), mib(100));
}

#[test]
fn a_lease_grows_and_shrinks_by_the_wish_of_its_holder() {
    let mut rig = Rig::sampled(params());
    rig.wait(10).request("a", Class::Interactive, 100, 100, 0);
    let a = rig.granted();
    rig.measure("a", 100);
    let resize = |rig: &mut Rig, min, max| {
        rig.wait(10).resize(&a, min, max, 0);
    };
    resize(&mut rig, 200, 300);
    assert_eq!(rig.granted().memory.held, mib(300));
    resize(&mut rig, 500, 600);
    assert!(matches!(rig.denial(), Denial::ExceedsBudget { .. }));
    rig.wait(10).measure("a", 250);
    resize(&mut rig, 50, 50);
    assert_eq!(
        rig.granted().memory.held,
        mib(300),
        "a shrink is credited when it is measured"
    );
    rig.wait(10).measure("a", 50);
    assert_eq!(rig.held("a"), mib(50));
}

#[test]
fn figures_that_contradict_are_refused() {
    let mut rig = Rig::sampled(params());
    let invalid = |field, value, problem| Denial::invalid("a", field, &value, problem);
    for (min, max, denial) in [
        (0, 10, invalid("min", mib(0), Problem::Zero)),
        (
            20,
            10,
            invalid("max", mib(10), Problem::BelowMin { min: mib(20) }),
        ),
        (
            401,
            500,
            Denial::ExceedsBudget {
                tenant: "a".to_owned(),
                asked: mib(401),
                budget: mib(400),
            },
        ),
    ] {
        rig.request("a", Class::Interactive, min, max, 0);
        assert_eq!(rig.denial(), denial);
    }
    rig.request("llm", Class::Interactive, 1, 1, 0);
    assert!(matches!(rig.denial(), Denial::Invalid { field, .. } if field == "tenant"));
    let mut huge = request("a", Class::Interactive, 1, 1, 0);
    huge.max = Bytes::MAX;
    rig.ask(huge);
    assert_eq!(rig.granted().memory.held, mib(400));
}

#[test]
fn nothing_is_granted_on_a_sample_that_is_too_old() {
    let mut rig = Rig::new(params());
    rig.arbiter = Arbiter::new(params()).unwrap();
    rig.sample(0);
    let limit = params().pressure.sample_age_max;
    rig.now = rig.now + limit;
    rig.request("a", Class::Interactive, 10, 10, 0);
    rig.granted();
    rig.wait(1).request("b", Class::Interactive, 10, 10, 0);
    let age = limit + ms(1);
    assert!(
        matches!(rig.denial(), Denial::StaleSample { age: shown, .. } if shown == age),
        "{:#?}",
        rig.actions
    );
    // A waiting request is served with the next sample.
    rig.request("c", Class::AudioRealtime, 10, 10, 5000);
    assert_eq!(rig.try_answer(), None);
    rig.wait(10).sample(10);
    assert_eq!(rig.granted().memory.held, mib(10));
}

#[test]
fn classes_that_can_wait_are_not_admitted_under_pressure() {
    let mut rig = Rig::new(params());
    rig.samples(360);
    assert_eq!(rig.snapshot().pressure.level, PressureLevel::Elevated);
    rig.request("a", Class::Batch, 1, 1, 0);
    assert!(matches!(rig.denial(), Denial::PressureHigh { .. }));
    rig.request("b", Class::AudioRealtime, 1, 1, 0);
    rig.granted();
}

#[test]
fn the_queue_and_the_leases_of_a_user_have_a_bound() {
    let mut params = params();
    params.lease.queue_max = 3;
    params.lease.leases_per_uid = 3;
    let mut rig = Rig::sampled(params);
    rig.request("a", Class::Interactive, 400, 400, 0);
    for _ in 0..2 {
        rig.request("b", Class::Interactive, 400, 400, 1000);
        assert_eq!(rig.try_answer(), None);
    }
    rig.request("c", Class::Interactive, 1, 1, 1000);
    assert!(
        matches!(rig.denial(), Denial::QuotaExceeded { what, .. } if what == Quota::LeasesOf { uid: 1000 })
    );
    let ask = |rig: &mut Rig, uid| {
        let mut other = request("c", Class::Interactive, 400, 400, 1000);
        other.peer = peer(uid);
        rig.ask(other);
    };
    ask(&mut rig, 7);
    assert_eq!(rig.try_answer(), None);
    ask(&mut rig, 8);
    assert!(matches!(rig.denial(), Denial::QuotaExceeded { what, .. } if what == Quota::Queue));
}

#[test]
fn one_user_does_not_fill_the_queue_with_calls_to_grow_either() {
    let mut params = params();
    params.lease.queue_max = 4;
    let mut rig = Rig::sampled(params);
    rig.request("a", Class::Interactive, 300, 300, 0);
    let leases: Vec<LeaseView> = (0..3)
        .map(|number| {
            rig.request(&format!("b{number}"), Class::Interactive, 10, 10, 0);
            rig.granted()
        })
        .collect();
    for (number, lease) in leases.iter().enumerate() {
        // Repeated calls make one waiting request.
        for again in 0..3 {
            rig.resize(lease, 200, 200 + again, 5000);
        }
        let waiting = u32::try_from(number).unwrap() + 1;
        assert_eq!(rig.snapshot().waiting, waiting.min(2));
    }
    let share = Quota::QueueOf { uid: 1000 };
    assert!(matches!(rig.denial(), Denial::QuotaExceeded { what, limit: 2, .. } if what == share));
    let mut other = request("c", Class::Interactive, 200, 200, 1000);
    other.peer = peer(7);
    rig.ask(other);
    assert_eq!((rig.try_answer(), rig.snapshot().waiting), (None, 3));
}

#[test]
fn draining_answers_all_that_wait() {
    let mut rig = Rig::sampled(params());
    rig.request("a", Class::Interactive, 400, 400, 0);
    rig.request("b", Class::Interactive, 400, 400, 1000);
    rig.tell(Event::DrainRequested { by: None });
    assert!(matches!(rig.denial(), Denial::Draining { .. }));
    rig.request("c", Class::Interactive, 1, 1, 1000);
    assert!(matches!(rig.denial(), Denial::Draining { .. }));
}

#[test]
fn a_drain_that_is_cancelled_admits_requests_again() {
    let mut rig = Rig::sampled(params());
    rig.tell(Event::DrainRequested { by: None });
    rig.tell(Event::DrainCancelled { by: None });
    assert!(!rig.snapshot().draining);
    rig.request("a", Class::Interactive, 1, 1, 1000);
    assert!(matches!(rig.answer(), Answer::Lease { .. }));
}

#[test]
fn an_operator_has_a_model_read_again_unless_it_is_loaded() {
    let inspects = |rig: &Rig| rig.actions.contains(&Action::InspectModel);
    let mut rig = Rig::with_engine_ready(params());
    rig.load();
    assert!(!inspects(&rig) && matches!(rig.answer(), Answer::Done { .. }));
    rig.engine_fails(None);
    rig.load();
    assert!(inspects(&rig));
}

#[test]
fn validation_books_nothing() {
    let mut rig = Rig::with_engine_ready(params());
    let mut request = request("a", Class::AudioRealtime, 300, 300, 0);
    request.validate_only = true;
    rig.ask(request);
    assert_eq!(
        rig.answer(),
        Answer::WouldGrant {
            bytes: mib(300),
            after_shedding: mib(32)
        }
    );
    assert_eq!(rig.plan_asked(), None);
}
