//! Simulation: the daemon's control loop with the real arbiter, on a simulated device.
//!
//! A seed determines the device, the holders, and the kinds of fault. First the faults are active, and every checker
//! must accept every step; then they stop, and everything must settle. The next step is the earlier of the world's next
//! happening and the arbiter's next deadline; no clock is read and nothing sleeps. Each event passes through the
//! daemon's own loop.
//!
//! `COTENANT_SIM_SEED` (default 1) is the seed of the first history and `COTENANT_SIM_STEPS` (default 100 000) the
//! number of events over all histories. `COTENANT_SIM_HISTORIES` (default 200) is the number of short histories, from
//! the same first seed; a proof uses 1 000 000.
#![expect(clippy::unwrap_used, reason = "test helpers")]
#![expect(
    clippy::indexing_slicing,
    reason = "a choice is drawn below the number of choices"
)]
#![expect(clippy::panic, reason = "a checker that is not content ends the test")]

mod checkers;
mod device;
mod driven;
mod engine;
mod exhaustive;
mod faults;
mod history;
mod journal;
mod planted;
mod tenant;
mod worker;
mod world;

use std::{
    env,
    panic::{catch_unwind, resume_unwind},
};

use cotenant::rpc::target::Verdict;

use self::{
    faults::Faults,
    history::{Length, Outcome, run},
    planted::Planted,
};

fn setting(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Runs one history; a violation ends the test with instructions to reproduce it.
fn run_or_tell(seed: u64, length: Length) -> Outcome {
    let (test, amount) = match length {
        Length::Long => ("no_history", "COTENANT_SIM_STEPS=1"),
        Length::Short => ("short_histories", "COTENANT_SIM_HISTORIES=1"),
    };
    let hint =
        format!("reproduce with COTENANT_SIM_SEED={seed} {amount} cargo test --test sim {test}");
    match catch_unwind(|| run(seed, length, None, false)) {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(violation)) => panic!("{violation}\n{hint}"),
        Err(broken) => {
            eprintln!("{hint}");
            resume_unwind(broken);
        }
    }
}

/// Kinds of events missing from a simulation: without them it proves nothing.
fn lacks(seen: &Outcome, length: Length) -> Option<String> {
    let mut lacks = None;
    let mut ask = |is_there: bool, what: String| {
        if !is_there {
            lacks.get_or_insert(what);
        }
    };
    for (what, count) in [
        ("grants", seen.grants),
        ("denials", seen.denials),
        ("sheds", seen.sheds),
        ("regrowths", seen.regrowths),
        ("ended leases", seen.ended_leases),
        ("worker starts", seen.worker_starts),
        ("level changes", seen.level_changes),
        ("restarts", seen.restarts),
    ] {
        ask(
            count > 20,
            format!("only {count} {what} in {} steps", seen.steps),
        );
    }
    // An engine must stream, have measured slow reading, and be idle; and then be asked to shed while a prompt is
    // computed, for which short histories are too short.
    ask(
        seen.larger_chunks > 0,
        format!("no larger chunk in {} steps", seen.steps),
    );
    for (what, count) in [
        ("larger", seen.larger_chunks),
        ("kept", seen.chunks_kept),
        ("given up at their end", seen.chunks_ended),
    ] {
        ask(
            count > 5 || length == Length::Short || seen.steps < 1_000_000,
            format!("only {count} chunks {what} in {} steps", seen.steps),
        );
    }
    // Rare verdicts need more histories than CI has time for.
    let verdicts = [
        Verdict::Applied,
        Verdict::Deferred,
        Verdict::Stale,
        Verdict::Conflict,
        Verdict::Refused,
    ];
    for verdict in verdicts {
        let count = seen.verdicts.get(&verdict).copied().unwrap_or(0);
        ask(
            count > 0 || seen.steps < 1_000_000,
            format!("no answer counted as {verdict:?} in {} steps", seen.steps),
        );
    }
    for (kind, steps) in Faults::KINDS.iter().zip(&seen.faults) {
        ask(*steps > 100, format!("only {steps} steps with {kind}"));
    }
    lacks
}

#[test]
fn no_history_breaks_a_promise_and_all_of_them_settle() {
    let first = setting("COTENANT_SIM_SEED", 1);
    let wanted = setting("COTENANT_SIM_STEPS", 100_000);
    let (mut histories, mut seen) = (0, Outcome::default());
    // Rare events do not occur with every seed in this many steps: up to twenty times as many are then run.
    let asks = wanted >= 50_000;
    let goes_on =
        |seen: &Outcome| asks && seen.steps < 20 * wanted && lacks(seen, Length::Long).is_some();
    while seen.steps < wanted || goes_on(&seen) {
        seen.add(&run_or_tell(first.wrapping_add(histories), Length::Long));
        histories += 1;
    }
    println!("{histories} histories, {} steps: {seen:?}", seen.steps);
    assert_eq!(lacks(&seen, Length::Long).filter(|_| asks), None);
}

#[test]
fn short_histories_break_no_promise_and_settle() {
    let first = setting("COTENANT_SIM_SEED", 1);
    let wanted = setting("COTENANT_SIM_HISTORIES", 200);
    let mut seen = Outcome::default();
    for history in 0..wanted {
        seen.add(&run_or_tell(first.wrapping_add(history), Length::Short));
        if (history + 1) % 100_000 == 0 {
            println!("{} histories, {} steps", history + 1, seen.steps);
        }
    }
    println!(
        "{wanted} histories from seed {first}, {} steps: {seen:?}",
        seen.steps
    );
    assert_eq!(lacks(&seen, Length::Short).filter(|_| wanted >= 5000), None);
}

/// Histories that once violated a promise.
///
/// 447403: the ring of the model was larger than all its layers, so the floor took no less than the full plan, and the
/// engine stayed at the floor.
///
/// 310056171: the engine kept more than its plan because it was in use, and the next shed, to less than it had kept and
/// more than that plan, was taken for growth.
///
/// 430122165: an unanswered shed was requested again, and growth counted the dwell from the first request.
///
/// 500020041: a plan to hold all layers failed half way, and left the ring beside the loaded layers.
///
/// 540025496: memory kept by a second process of a name, which could not be measured, stayed unaccounted forever.
///
/// 810035549: a compliant holder replied at the last moment, and was ended before it was measured.
///
/// 970018291: an engine with a larger prefill chunk and a pending change to a smaller KV type after growth never grew.
#[test]
fn histories_that_once_failed_stay_mended() {
    for seed in [
        447_403,
        310_056_171,
        430_122_165,
        500_020_041,
        540_025_496,
        810_035_549,
        970_018_291,
    ] {
        run_or_tell(seed, Length::Short);
    }
}

#[test]
fn the_same_seed_gives_the_same_transcript() {
    for seed in 1..6 {
        let one = run(seed, Length::Long, None, true).unwrap().transcript;
        let other = run(seed, Length::Long, None, true).unwrap().transcript;
        assert!(one.len() > 100);
        assert_eq!(one, other, "seed {seed}");
    }
    assert_ne!(
        run(1, Length::Long, None, true).unwrap().transcript,
        run(2, Length::Long, None, true).unwrap().transcript
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

/// Runs histories until a checker finds the fault, and returns its name. The first seed finds it quickly.
fn caught(fault: Planted, first: u64) -> String {
    (first..first + 300)
        .find_map(|seed| {
            let violation = run(seed, Length::Long, Some(fault), false).err()?;
            eprintln!("{fault:?} is found by seed {seed}");
            Some(violation)
        })
        .unwrap_or_else(|| panic!("{fault:?} was never caught"))
}

#[test]
fn memory_freed_on_paper_is_caught() {
    let violation = caught(Planted::FreedOnPaper, 1);
    assert!(violation.contains("covers"), "{violation}");
}

#[test]
fn memory_granted_twice_is_caught() {
    let violation = caught(Planted::DoubleGrant, 1);
    assert!(violation.contains("over-commit"), "{violation}");
}

#[test]
fn a_lost_deadline_is_caught() {
    let violation = caught(Planted::LostDeadline, 1);
    assert!(violation.contains("deadline"), "{violation}");
}

#[test]
fn an_expired_lease_that_is_renewed_is_caught() {
    let violation = caught(Planted::ExpiredRenewed, 22);
    assert!(violation.contains("is back"), "{violation}");
}

#[test]
fn a_credit_for_an_answer_without_a_measurement_is_caught() {
    let violation = caught(Planted::LiarCredited, 35);
    assert!(
        violation.contains("credited and not measured"),
        "{violation}"
    );
}

#[test]
fn a_stale_measurement_that_is_credited_is_caught() {
    let violation = caught(Planted::StaleCredited, 769);
    assert!(
        violation.contains("covers") || violation.contains("credited and not measured"),
        "{violation}"
    );
}

#[test]
fn a_silent_holder_that_is_credited_is_caught() {
    let violation = caught(Planted::SilenceCredited, 69);
    assert!(violation.contains("covers"), "{violation}");
}

#[test]
fn others_held_small_for_what_can_never_be_had_are_found() {
    let violation = caught(Planted::HeldSmall, 1);
    assert!(violation.contains("not settled"), "{violation}");
}

#[test]
fn growth_into_the_space_of_a_stopped_worker_is_caught() {
    let violation = caught(Planted::GrownIntoReserved, 136);
    assert!(violation.contains("reserved space"), "{violation}");
}

#[test]
fn growth_into_what_the_engine_holds_and_does_not_use_yet_is_caught() {
    let violation = caught(Planted::UnusedFree, 29);
    assert!(violation.contains("the engine may use"), "{violation}");
}

#[test]
fn what_another_variant_has_used_and_is_learned_is_caught() {
    let violation = caught(Planted::HighWaterRaised, 11);
    assert!(
        violation.contains("learned from another variant"),
        "{violation}"
    );
}
