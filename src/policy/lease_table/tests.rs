use super::*;
use crate::{
    policy::lease::Class,
    units::{Bytes, Timestamp},
};

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_millis(seconds * 1000)
}

const fn mib(mib: u64) -> Bytes {
    Bytes::from_mib(mib)
}

/// A table, its ledger, and what followed from the last change.
struct Book {
    table: LeaseTable,
    ledger: Ledger,
    effects: Vec<Effect>,
}

impl Book {
    fn new() -> Self {
        Self {
            table: LeaseTable::new(ShedParams::scaled_to(mib(400)), Duration::from_secs(1)),
            ledger: Ledger::new(mib(400), Bytes::ZERO),
            effects: Vec::new(),
        }
    }

    fn change<T>(&mut self, seconds: u64, change: impl FnOnce(&mut LeaseTable, &mut Turn<'_>) -> T) -> T {
        let mut turn = Turn {
            now: at(seconds),
            ledger: &mut self.ledger,
            effects: Vec::new(),
        };
        let outcome = change(&mut self.table, &mut turn);
        self.effects = turn.effects;
        outcome
    }

    /// Grants 100 MiB for 30 s at the start.
    fn granted(&mut self) -> LeaseId {
        let request = LeaseRequest {
            tenant: "asr".to_owned(),
            request_id: String::new(),
            peer: Peer::default(),
            class: Class::Interactive,
            min: mib(10),
            max: mib(100),
            term: Duration::from_secs(30),
            wait: Duration::ZERO,
            validate_only: false,
        };
        let (id, term) = (self.table.next_id(), request.term);
        let (holder, generation) = (self.table.holder_for(&request), self.table.next_generation());
        let lease = Lease::of_tenant(request, holder, generation, (mib(10), mib(100)), term, at(0));
        assert!(self.change(0, |table, turn| table.grant((id, lease), None, mib(100), turn)));
        assert_eq!(self.effects, [Effect::Granted { more: mib(100) }]);
        id
    }

    fn measured(&mut self, seconds: u64, used: Bytes) {
        self.ledger.measure("asr", used, at(seconds));
        self.change(seconds, |table, turn| {
            table.settle("asr", Some(used), at(seconds), turn);
        });
    }

    fn decisions(&self) -> Vec<&'static str> {
        let name = |effect: &Effect| match effect {
            Effect::Act(Action::EndLease { .. }) => Some("ends"),
            Effect::Act(Action::Measure { .. }) => Some("measure"),
            Effect::Deny { .. } => Some("deny"),
            Effect::Moved => Some("moved"),
            Effect::Reclaimed { .. } => Some("reclaimed"),
            Effect::Act(_) | Effect::Granted { .. } => None,
        };
        self.effects.iter().filter_map(name).collect()
    }
}

#[test]
fn a_lease_that_is_not_renewed_ends_and_is_credited_by_a_later_reading() {
    let mut book = Book::new();
    let id = book.granted();
    book.table.renew(id, at(10));
    assert_eq!(book.table.next_deadline(), Some(at(40)));
    book.change(40, LeaseTable::expire);
    assert_eq!(book.decisions(), ["ends", "deny", "measure"]);
    assert_eq!(book.ledger.held_by(id), mib(100), "an end credits nothing");
    book.measured(41, mib(20));
    assert_eq!((book.ledger.held(), book.table.is_known("asr")), (Bytes::ZERO, true));
    book.change(42, |table, turn| {
        table.tend_residual("asr", Some(Bytes::ZERO), at(42), turn);
    });
    assert!(!book.table.is_known("asr"));
}

#[test]
fn a_target_is_credited_by_a_reading_newer_than_its_answer_and_by_no_other() {
    let mut book = Book::new();
    let id = book.granted();
    let nonce = book.change(1, |table, turn| table.begin_revocation(id, mib(40), at(5), false, turn));
    book.measured(2, mib(40));
    assert_eq!(book.ledger.held_by(id), mib(100), "it may not have heard");
    book.change(3, |table, turn| {
        table.answer_target(id, nonce, TargetAnswer::Applied, None, turn);
    });
    book.measured(4, mib(40));
    assert_eq!(book.ledger.held_by(id), mib(40));
    assert_eq!(book.decisions(), ["reclaimed"]);
}

#[test]
fn a_silent_holder_keeps_all_that_it_may_still_take_until_its_term_is_over() {
    let mut book = Book::new();
    let id = book.granted();
    book.change(1, |table, turn| table.begin_revocation(id, mib(40), at(2), false, turn));
    assert_eq!(book.table.overdue(at(2)), [], "there is a grace");
    assert_eq!(book.table.overdue(at(3)), [id]);
    assert!(book.change(3, |table, turn| table.escalate(id, turn)).is_none());
    assert_eq!(book.decisions(), ["ends", "deny", "measure"]);
    book.measured(10, Bytes::ZERO);
    assert_eq!(book.ledger.held_by(id), mib(100));
    book.measured(31, Bytes::ZERO);
    assert_eq!(book.ledger.held(), Bytes::ZERO);
}

#[test]
fn a_wish_that_is_not_seen_ends_no_lease() {
    let mut book = Book::new();
    let id = book.granted();
    book.change(1, |table, turn| table.lower_voluntarily(id, mib(40), turn));
    assert!(book.table.get(id).is_some_and(|lease| lease.wants_less_than(mib(100))));
    assert!(book.change(20, |table, turn| table.escalate(id, turn)).is_none());
    assert!(book.table.get(id).is_some_and(|lease| lease.phase == Phase::Granted));
}
