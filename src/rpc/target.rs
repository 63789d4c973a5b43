//! Evaluation of answers to targets: applied, deferred, stale, conflict, refused.
//!
//! A target is identified by its rising nonce and its bytes. Only the first answer to the newest target counts: a
//! repetition returns the same verdict without effect, and an applied target stays applied, because the measurement
//! decides. After kvcached's revisions of a memory limit.

use cotenant_policy::lease::{Target, TargetAnswer};
use cotenant_units::Bytes;

/// The verdict on an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// The holder reports the memory as returned.
    Applied,
    /// Accepted, but more is still in use.
    Deferred,
    /// The answer is to a target that was replaced or has ended.
    Stale,
    /// The answer names a target that was never sent, or other bytes.
    Conflict,
    /// The holder refuses.
    Refused,
}

/// A verdict, and its effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The verdict.
    pub verdict: Verdict,
    /// Reason: an identifier, or the holder's text.
    pub reason: String,
    /// The answer for the arbiter, if new.
    pub pass_on: Option<TargetAnswer>,
}

/// The newest target sent to a holder, and its answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SentTarget {
    newest: Option<Target>,
    answered: Option<Verdict>,
}

impl SentTarget {
    /// Records a target; returns whether it is new.
    pub fn learn(&mut self, target: Option<&Target>) -> bool {
        // A nonce of zero means no target: the lease is ending.
        let Some(target) = target.filter(|target| target.nonce != 0) else {
            return false;
        };
        if self
            .newest
            .as_ref()
            .is_some_and(|newest| newest.nonce >= target.nonce)
        {
            return false;
        }
        self.newest = Some(target.clone());
        self.answered = None;
        true
    }

    /// Evaluates an answer to the target `nonce` with `bytes`.
    pub fn receive(&mut self, nonce: u64, bytes: Bytes, answer: TargetAnswer) -> Receipt {
        let without_effect = |verdict, reason: &str| Receipt {
            verdict,
            reason: reason.to_owned(),
            pass_on: None,
        };
        let Some(newest) = &self.newest else {
            return without_effect(Verdict::Stale, "no_target_in_force");
        };
        if nonce < newest.nonce {
            return without_effect(Verdict::Stale, "replaced_by_a_newer_target");
        }
        if nonce > newest.nonce {
            return without_effect(Verdict::Conflict, "target_was_never_sent");
        }
        if bytes != newest.bytes {
            return without_effect(Verdict::Conflict, "revision_reused_with_different_target");
        }
        let (verdict, reason) = match &answer {
            TargetAnswer::Applied => (Verdict::Applied, String::new()),
            TargetAnswer::Deferred { .. } => (Verdict::Deferred, "in_use_above_target".to_owned()),
            TargetAnswer::Refused { reason } => (Verdict::Refused, reason.clone()),
        };
        let known = self
            .answered
            .filter(|answered| *answered == Verdict::Applied || *answered == verdict);
        if known.is_none() {
            self.answered = Some(verdict);
        }
        Receipt {
            verdict: known.unwrap_or(verdict),
            reason,
            pass_on: known.is_none().then_some(answer),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use cotenant_units::Timestamp;

    fn target(nonce: u64) -> Target {
        Target {
            nonce,
            bytes: Bytes::new(100),
            deadline: Timestamp::from_millis(1),
        }
    }

    fn sent(nonce: u64) -> SentTarget {
        let mut sent = SentTarget::default();
        assert!(sent.learn(Some(&target(nonce))));
        sent
    }

    const DEFERRED: TargetAnswer = TargetAnswer::Deferred {
        overage: Bytes::new(50),
    };

    fn receive(
        sent: &mut SentTarget,
        nonce: u64,
        bytes: u64,
        answer: TargetAnswer,
    ) -> (Verdict, bool) {
        let receipt = sent.receive(nonce, Bytes::new(bytes), answer);
        (receipt.verdict, receipt.pass_on.is_some())
    }

    #[test]
    fn an_answer_counts_for_the_newest_target_only() {
        for (nonce, bytes, expected) in [
            (5, 100, (Verdict::Applied, true)),
            (4, 100, (Verdict::Stale, false)),
            (6, 100, (Verdict::Conflict, false)),
            (5, 101, (Verdict::Conflict, false)),
        ] {
            let seen = receive(&mut sent(5), nonce, bytes, TargetAnswer::Applied);
            assert_eq!(seen, expected, "{nonce} {bytes}");
        }
        let nothing = receive(&mut SentTarget::default(), 3, 100, TargetAnswer::Applied);
        assert_eq!(nothing, (Verdict::Stale, false), "no target in force");
    }

    #[test]
    fn a_replayed_answer_is_not_passed_on_again() {
        let mut sent = sent(5);
        assert_eq!(
            receive(&mut sent, 5, 100, DEFERRED),
            (Verdict::Deferred, true)
        );
        assert_eq!(
            receive(&mut sent, 5, 100, DEFERRED),
            (Verdict::Deferred, false)
        );
        assert_eq!(
            receive(&mut sent, 5, 100, TargetAnswer::Applied),
            (Verdict::Applied, true)
        );
        assert_eq!(
            receive(&mut sent, 5, 100, TargetAnswer::Applied),
            (Verdict::Applied, false)
        );
        assert_eq!(
            receive(&mut sent, 5, 100, DEFERRED),
            (Verdict::Applied, false),
            "applied stays applied"
        );
        assert!(
            !sent.learn(Some(&target(5))) && !sent.learn(Some(&target(4))) && !sent.learn(None)
        );
        assert!(sent.learn(Some(&target(6))));
        assert_eq!(
            receive(&mut sent, 6, 100, DEFERRED),
            (Verdict::Deferred, true)
        );
    }

    proptest! {
        #[test]
        fn whatever_is_answered_each_target_is_applied_once_at_most(
            letters in prop::collection::vec((0u64..6, 99u64..102, 0u8..4), 0..60),
        ) {
            let mut sent = SentTarget::default();
            let mut newest = 0;
            let mut applied = Vec::new();
            for (nonce, bytes, letter) in letters {
                let answer = match letter {
                    0 => {
                        let is_new = sent.learn(Some(&target(nonce)));
                        prop_assert_eq!(is_new, nonce > newest);
                        newest = newest.max(nonce);
                        continue;
                    }
                    1 => TargetAnswer::Applied,
                    2 => DEFERRED,
                    _ => TargetAnswer::Refused { reason: "busy".to_owned() },
                };
                let receipt = sent.receive(nonce, Bytes::new(bytes), answer.clone());
                if receipt.pass_on.is_some() {
                    prop_assert_eq!((nonce, bytes), (newest, 100));
                    prop_assert!(!applied.contains(&nonce), "nothing after it was applied");
                    if answer == TargetAnswer::Applied {
                        applied.push(nonce);
                    }
                } else {
                    let is_stale = newest == 0 || nonce < newest;
                    prop_assert_eq!(receipt.verdict == Verdict::Stale, is_stale);
                    prop_assert_eq!(receipt.verdict == Verdict::Conflict, !is_stale && (nonce, bytes) != (newest, 100));
                }
            }
        }
    }
}
