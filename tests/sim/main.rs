//! The real arbiter against a device made of numbers.
//!
//! A seed chooses the device, the holders, and which kinds of fault exist at all. First the faults are on, and every
//! checker must be content with every step; then they stop, and everything must settle. The next step is the earliest
//! of the world's next happening and the arbiter's next deadline; no clock is read and nothing waits.
//!
//! `COTENANT_SIM_SEED` (default 1) is the seed of the first history and `COTENANT_SIM_STEPS` (default 120 000) the
//! number of events over all histories.
#![expect(clippy::unwrap_used, reason = "test helpers")]
#![expect(clippy::indexing_slicing, reason = "a choice is drawn below the number of choices")]
#![expect(clippy::panic, reason = "a checker that is not content ends the test")]

mod checkers;
mod device;
mod engine;
mod faults;
mod history;
mod journal;
mod tenant;
mod worker;
mod world;

use std::{
    env,
    panic::{catch_unwind, resume_unwind},
};

use cotenant::policy::params::Planted;

use self::history::{Outcome, run};

fn setting(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn no_history_breaks_a_promise_and_all_of_them_settle() {
    let first = setting("COTENANT_SIM_SEED", 1);
    let wanted = setting("COTENANT_SIM_STEPS", 120_000);
    let (mut steps, mut histories, mut seen) = (0, 0, Outcome::default());
    while steps < wanted {
        let seed = first.wrapping_add(histories);
        let hint =
            format!("reproduce with COTENANT_SIM_SEED={seed} COTENANT_SIM_STEPS=1 cargo test --test sim no_history");
        let outcome = match catch_unwind(|| run(seed, None, false)) {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(violation)) => panic!("{violation}\n{hint}"),
            Err(broken) => {
                println!("{hint}");
                resume_unwind(broken);
            }
        };
        steps += outcome.steps;
        histories += 1;
        seen.add(&outcome);
    }
    println!("{histories} histories, {steps} steps: {seen:?}");
    // A simulation in which nothing happens proves nothing.
    for (what, count) in [
        ("grants", seen.grants),
        ("denials", seen.denials),
        ("sheds", seen.sheds),
        ("regrowths", seen.regrowths),
        ("ended leases", seen.ended_leases),
        ("worker starts", seen.worker_starts),
        ("level changes", seen.level_changes),
    ] {
        assert!(steps < 50_000 || count > 20, "only {count} {what} in {steps} steps");
    }
}

#[test]
fn the_same_seed_gives_the_same_transcript() {
    for seed in 1..6 {
        let one = run(seed, None, true).unwrap().transcript;
        let other = run(seed, None, true).unwrap().transcript;
        assert!(one.len() > 100);
        assert_eq!(one, other, "seed {seed}");
    }
    assert_ne!(
        run(1, None, true).unwrap().transcript,
        run(2, None, true).unwrap().transcript
    );
}

#[test]
fn a_journal_read_back_gives_the_same_actions() {
    for seed in 1..11 {
        history::replay(seed);
    }
}

#[test]
fn an_arbiter_that_goes_on_from_a_checkpoint_decides_the_same() {
    for seed in 1..31 {
        history::resume(seed);
    }
}

/// Runs histories until one is caught, and says by which checker.
fn caught(fault: Planted) -> String {
    (1..200)
        .find_map(|seed| run(seed, Some(fault), false).err())
        .unwrap_or_else(|| panic!("{fault:?} was never caught"))
}

#[test]
fn memory_freed_on_paper_is_caught() {
    let violation = caught(Planted::FreedOnPaper);
    assert!(violation.contains("covers"), "{violation}");
}

#[test]
fn memory_granted_twice_is_caught() {
    let violation = caught(Planted::DoubleGrant);
    assert!(violation.contains("over-commit"), "{violation}");
}

#[test]
fn a_lost_deadline_is_caught() {
    let violation = caught(Planted::LostDeadline);
    assert!(violation.contains("deadline"), "{violation}");
}
