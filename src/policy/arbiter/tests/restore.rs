//! Tests of state handed from one run to the next.

use super::*;
use crate::policy::{
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

/// The next run, which begins with what the last one has left.
fn next_run(params: Params, book: Book, adopted: Vec<AdoptedWorker>) -> Desk {
    let mut desk = Desk::new(params);
    desk.tell(Event::Recovered { book, adopted });
    desk
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

fn runs(params: Params) -> Desk {
    let mut desk = Desk::sampled(params);
    assert!(desk.starts("asr"));
    desk.answers("asr", 77);
    desk
}

#[test]
fn what_is_held_counts_at_once_and_goes_on_for_a_term() {
    let mut desk = Desk::sampled(params());
    desk.request("a", Class::Interactive, 300, 300, 0);
    let a = desk.granted();
    let mut desk = next_run(params(), desk.arbiter.book(), Vec::new());
    // Before any sample, and before the holder has said a word.
    desk.request("b", Class::Interactive, 101, 101, 0);
    assert!(matches!(desk.denial(), Denial::InsufficientMemory { .. }));
    let ticket = desk.ticket();
    let renewal = |ticket| Event::LeaseRenewed {
        ticket,
        lease: a.id,
        generation: a.generation,
        peer: peer(1000),
    };
    desk.wait(9000).tell(renewal(ticket));
    assert_eq!(desk.granted().held, mib(300));
    // Not renewed in its term it ends, and does not come back in the run after that.
    desk.wait(10_000).tell(Event::DeadlineReached);
    assert_eq!(desk.lease("a").unwrap().state, LeaseState::Gone);
    let mut desk = next_run(params(), desk.arbiter.book(), Vec::new());
    let ticket = desk.ticket();
    desk.tell(renewal(ticket));
    assert!(matches!(desk.denial(), Denial::UnknownLease { .. }));
    // No number is given out twice.
    desk.request("c", Class::Interactive, 1, 1, 0);
    let c = desk.granted();
    assert!(c.id > a.id && c.generation > a.generation);
}

#[test]
fn a_lease_that_was_asked_to_shrink_is_held_in_full_until_it_is_measured() {
    let mut desk = Desk::with_engine_ready(params());
    desk.request("a", Class::Batch, 100, 200, 0);
    let held = desk.granted().held;
    desk.request("asr", Class::AudioRealtime, 180, 180, 60_000);
    let book = desk.arbiter.book();
    let desk = next_run(params(), book, Vec::new());
    assert_eq!(desk.held("a"), held);
}

#[test]
fn a_worker_is_booked_as_it_was_and_serves_when_it_answers() {
    let before = runs(with_worker());
    assert_eq!(before.held("asr"), mib(60), "not measured yet");
    let mut desk = next_run(with_worker(), before.arbiter.book(), vec![adopted("asr")]);
    assert_eq!(desk.held("asr"), mib(60));
    assert!(!desk.starts("asr"));
    assert_eq!(
        (desk.worker("asr").state, desk.worker("asr").starts),
        (WorkerState::Starting, 1)
    );
    desk.answers("asr", 77);
    assert_eq!(desk.worker("asr").state, WorkerState::Ready);
    desk.wait(10).measure("asr", 38);
    assert_eq!(desk.held("asr"), mib(40), "and comes down as it is measured");
    desk.sample(0);
    assert!(!desk.starts("asr"));
}

#[test]
fn that_a_worker_has_answered_outlives_a_run_that_it_has_not_answered_to() {
    let before = runs(with_worker());
    let ready = |desk: &Desk| desk.arbiter.book().workers.iter().any(|worker| worker.run.ready);
    assert!(ready(&before));
    // Killed as soon as it has taken over, twice.
    let second = next_run(with_worker(), before.arbiter.book(), vec![adopted("asr")]);
    assert_eq!(second.worker("asr").state, WorkerState::Starting);
    assert!(ready(&second));
    let third = next_run(with_worker(), second.arbiter.book(), vec![adopted("asr")]);
    assert!(ready(&third));
    // A process that was started since has not answered anybody.
    let gone = next_run(with_worker(), third.arbiter.book(), Vec::new());
    assert!(gone.starts("asr"));
    assert!(!ready(&gone));
}

#[test]
fn a_worker_that_is_gone_starts_as_at_any_start() {
    let before = runs(with_worker());
    let mut desk = next_run(with_worker(), before.arbiter.book(), Vec::new());
    assert_eq!(desk.held("asr"), mib(60), "its start is booked");
    assert!(desk.starts("asr"));
    assert_eq!(desk.worker("asr").starts, 2);
    desk.sample(0);
}

#[test]
fn a_worker_without_a_book_is_booked_with_its_peak() {
    let desk = next_run(with_worker(), Book::default(), vec![adopted("asr")]);
    assert_eq!(desk.held("asr"), mib(60));
    assert_eq!(desk.worker("asr").starts, 1);
}

#[test]
fn what_an_operator_wanted_outlives_the_run() {
    let mut desk = runs(with_worker());
    desk.command("asr", WorkerCommand::Stop);
    assert!(desk.stops("asr"));
    // Killed before it has ended: it is asked again.
    let mut desk = next_run(with_worker(), desk.arbiter.book(), vec![adopted("asr")]);
    assert!(desk.stops("asr"));
    desk.exits("asr", true, "code 0");
    desk.sample(0);
    assert!(!desk.starts("asr"));
    let mut desk = next_run(with_worker(), desk.arbiter.book(), Vec::new());
    desk.sample(0);
    assert!(!desk.starts("asr"), "it stays stopped");
}

#[test]
fn a_worker_that_an_operator_stopped_holds_up_no_other_one_at_the_next_start() {
    let mut params = with_worker();
    params.workers.push(worker("tts", 30));
    let mut desk = runs(params.clone());
    desk.command("asr", WorkerCommand::Stop);
    desk.exits("asr", true, "code 0");
    let desk = next_run(params, desk.arbiter.book(), Vec::new());
    assert!(desk.starts("tts") && !desk.starts("asr"));
}

#[test]
fn what_does_not_fit_into_a_smaller_budget_is_not_promised() {
    let mut desk = runs(with_worker());
    desk.request("a", Class::Interactive, 300, 300, 0);
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
    let mut desk = next_run(smaller, desk.arbiter.book(), vec![adopted("asr")]);
    assert!(desk.stops("asr") && !desk.starts("asr"));
    assert_eq!((desk.held("asr"), desk.held("a")), (mib(50), Bytes::ZERO));
    desk.exits("asr", true, "code 0");
    assert!(desk.starts("asr"));
    assert_eq!(desk.held("asr"), mib(40));
}

#[test]
fn a_book_that_comes_too_late_changes_nothing() {
    let mut other = Desk::new(params());
    other.sample(0);
    other.request("a", Class::Interactive, 300, 300, 0);
    let book = other.arbiter.book();
    let mut desk = Desk::sampled(params());
    desk.request("b", Class::Interactive, 10, 10, 0);
    desk.tell(Event::Recovered {
        book,
        adopted: Vec::new(),
    });
    assert_eq!(desk.snapshot().held, mib(10));
}

#[test]
fn every_change_of_the_book_has_another_number() {
    let mut desk = runs(with_worker());
    let mut last = (desk.arbiter.book(), desk.arbiter.book_changes());
    let mut look = |desk: &Desk| {
        let now = (desk.arbiter.book(), desk.arbiter.book_changes());
        // Targets and places in the queue have numbers of their own, which are not sent before the book is written.
        let same = Book {
            last: last.0.last,
            ..now.0.clone()
        } == last.0;
        assert!(same || now.1 != last.1, "{last:?} became {now:?}");
        last = now;
    };
    desk.request("a", Class::Interactive, 100, 200, 0);
    let a = desk.granted();
    look(&desk);
    for (min, max) in [(50, 200), (50, 150), (10, 300)] {
        desk.resize(&a, min, max, 0);
        look(&desk);
        desk.wait(10).measure("a", max.min(100));
        look(&desk);
    }
    for (worker, millis) in [("asr", 10), ("asr", 5000)] {
        desk.wait(millis).exits(worker, false, "code 1");
        look(&desk);
        desk.wait(millis).tell(Event::DeadlineReached);
        look(&desk);
    }
    desk.wait(60_000).tell(Event::DeadlineReached);
    look(&desk);
}
