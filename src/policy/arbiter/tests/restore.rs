//! Tests of state handed from one run to the next.

use super::*;
use crate::{
    book::{AdoptedWorker, Book},
    lease::LeaseState,
    snapshot::WorkerState,
};

fn adopted(worker: &str) -> AdoptedWorker {
    AdoptedWorker {
        worker: worker.to_owned(),
        pid: 77,
        variant: None,
    }
}

/// Returns the next run, started from the book of the last one.
fn next_run(params: Params, book: Book, adopted: Vec<AdoptedWorker>) -> Rig {
    let mut rig = Rig::new(params);
    rig.tell(Event::Recovered { book, adopted });
    rig
}

fn with_worker() -> Params {
    let mut params = params();
    params.workers = vec![WorkerParams {
        steady: mib(40),
        peak: mib(60),
        ..worker("asr", 40)
    }];
    params
}

fn runs(params: Params) -> Rig {
    let mut rig = Rig::sampled(params);
    assert!(rig.starts("asr"));
    rig.answers("asr", 77);
    rig
}

#[test]
fn what_is_held_counts_at_once_and_goes_on_for_a_term() {
    let mut rig = Rig::sampled(params());
    rig.request("a", Class::Interactive, 300, 300, 0);
    let a = rig.granted();
    let mut rig = next_run(params(), rig.arbiter.book(), Vec::new());
    // Before any sample or call of the holder.
    rig.request("b", Class::Interactive, 101, 101, 0);
    assert!(matches!(rig.denial(), Denial::InsufficientMemory { .. }));
    let ticket = rig.ticket();
    let renewal = |ticket| {
        Event::LeaseRenewed(LeaseCall {
            ticket,
            lease: a.id,
            generation: a.generation,
            peer: peer(1000),
        })
    };
    rig.wait(9000).tell(renewal(ticket));
    assert_eq!(rig.granted().memory.held, mib(300));
    // Not renewed within its term, it ends, and the run after that does not restore it.
    rig.wait(10_000).tell(Event::DeadlineReached);
    assert_eq!(rig.lease("a").unwrap().state, LeaseState::Gone);
    let mut rig = next_run(params(), rig.arbiter.book(), Vec::new());
    let ticket = rig.ticket();
    rig.tell(renewal(ticket));
    assert!(matches!(rig.denial(), Denial::UnknownLease { .. }));
    // Ids and generations are not reused.
    rig.request("c", Class::Interactive, 1, 1, 0);
    let c = rig.granted();
    assert!(c.id > a.id && c.generation > a.generation);
}

#[test]
fn a_lease_that_was_asked_to_shrink_is_held_in_full_until_it_is_measured() {
    let mut rig = Rig::with_engine_ready(params());
    rig.request("a", Class::Batch, 100, 200, 0);
    let held = rig.granted().memory.held;
    rig.request("asr", Class::AudioRealtime, 180, 180, 60_000);
    let book = rig.arbiter.book();
    let rig = next_run(params(), book, Vec::new());
    assert_eq!(rig.held("a"), held);
}

#[test]
fn a_worker_is_booked_as_it_was_and_serves_when_it_answers() {
    let before = runs(with_worker());
    assert_eq!(before.held("asr"), mib(60), "not measured yet");
    let mut rig = next_run(with_worker(), before.arbiter.book(), vec![adopted("asr")]);
    assert_eq!(rig.held("asr"), mib(60));
    assert!(!rig.starts("asr"));
    assert_eq!(
        (rig.worker("asr").state, rig.worker("asr").starts),
        (WorkerState::Starting, 1)
    );
    rig.answers("asr", 77);
    assert_eq!(rig.worker("asr").state, WorkerState::Ready);
    rig.wait(10).measure("asr", 38);
    assert_eq!(rig.held("asr"), mib(40), "and comes down as it is measured");
    rig.sample(0);
    assert!(!rig.starts("asr"));
}

#[test]
fn that_a_worker_has_answered_outlives_a_run_that_it_has_not_answered_to() {
    let before = runs(with_worker());
    let ready = |rig: &Rig| {
        rig.arbiter
            .book()
            .workers
            .iter()
            .any(|worker| worker.run.ready)
    };
    assert!(ready(&before));
    // The supervisor is killed right after taking over, twice.
    let second = next_run(with_worker(), before.arbiter.book(), vec![adopted("asr")]);
    assert_eq!(second.worker("asr").state, WorkerState::Starting);
    assert!(ready(&second));
    let third = next_run(with_worker(), second.arbiter.book(), vec![adopted("asr")]);
    assert!(ready(&third));
    // A newly started process has not answered yet.
    let gone = next_run(with_worker(), third.arbiter.book(), Vec::new());
    assert!(gone.starts("asr"));
    assert!(!ready(&gone));
}

#[test]
fn a_worker_that_is_gone_starts_as_at_any_start() {
    let before = runs(with_worker());
    let mut rig = next_run(with_worker(), before.arbiter.book(), Vec::new());
    assert_eq!(rig.held("asr"), mib(60), "its start is booked");
    assert!(rig.starts("asr"));
    assert_eq!(rig.worker("asr").starts, 2);
    rig.sample(0);
}

#[test]
fn a_worker_without_a_book_is_booked_with_its_peak() {
    let rig = next_run(with_worker(), Book::default(), vec![adopted("asr")]);
    assert_eq!(rig.held("asr"), mib(60));
    assert_eq!(rig.worker("asr").starts, 1);
}

#[test]
fn what_an_operator_wanted_outlives_the_run() {
    let mut rig = runs(with_worker());
    rig.command("asr", WorkerCommand::Stop);
    assert!(rig.stops("asr"));
    // The supervisor is killed before the worker exits: the stop is repeated.
    let mut rig = next_run(with_worker(), rig.arbiter.book(), vec![adopted("asr")]);
    assert!(rig.stops("asr"));
    rig.exits("asr", true, "code 0");
    rig.sample(0);
    assert!(!rig.starts("asr"));
    let mut rig = next_run(with_worker(), rig.arbiter.book(), Vec::new());
    rig.sample(0);
    assert!(!rig.starts("asr"), "it stays stopped");
}

#[test]
fn a_worker_that_an_operator_stopped_holds_up_no_other_one_at_the_next_start() {
    let mut params = with_worker();
    params.workers.push(worker("tts", 30));
    let mut rig = runs(params.clone());
    rig.command("asr", WorkerCommand::Stop);
    rig.exits("asr", true, "code 0");
    let rig = next_run(params, rig.arbiter.book(), Vec::new());
    assert!(rig.starts("tts") && !rig.starts("asr"));
}

#[test]
fn what_does_not_fit_into_a_smaller_budget_is_not_promised() {
    let mut rig = runs(with_worker());
    rig.request("a", Class::Interactive, 300, 300, 0);
    let smaller = Params {
        budget: Params::for_budget(mib(50), Bytes::ZERO, Scope::Session).budget,
        ..with_worker()
    };
    let smaller = Params {
        pressure: Params::for_budget(mib(50), Bytes::ZERO, Scope::Session).pressure,
        shed: Params::for_budget(mib(50), Bytes::ZERO, Scope::Session).shed,
        workers: vec![worker("asr", 40)],
        ..smaller
    };
    let mut rig = next_run(smaller, rig.arbiter.book(), vec![adopted("asr")]);
    assert!(rig.stops("asr") && !rig.starts("asr"));
    assert_eq!((rig.held("asr"), rig.held("a")), (mib(50), Bytes::ZERO));
    rig.exits("asr", true, "code 0");
    assert!(rig.starts("asr"));
    assert_eq!(rig.held("asr"), mib(40));
}

#[test]
fn a_book_that_comes_too_late_changes_nothing() {
    let mut other = Rig::new(params());
    other.sample(0);
    other.request("a", Class::Interactive, 300, 300, 0);
    let book = other.arbiter.book();
    let mut rig = Rig::sampled(params());
    rig.request("b", Class::Interactive, 10, 10, 0);
    rig.tell(Event::Recovered {
        book,
        adopted: Vec::new(),
    });
    assert_eq!(rig.snapshot().memory.held, mib(10));
}
