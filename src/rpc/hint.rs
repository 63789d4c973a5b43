//! Remedies of denials for callers and operators.

use cotenant_policy::{
    denial::{Denial, OPERATOR, Problem},
    growth_wait::GrowthWait,
    reason::SpareReason,
};
use cotenant_units::Bytes;

pub(super) fn hint(denial: &Denial) -> Option<String> {
    match denial {
        Denial::InsufficientMemory {
            tenant,
            reclaimable,
            holders,
            ..
        } if tenant == OPERATOR => {
            let spared = holders
                .shares
                .first()
                .and_then(|share| share.spared.as_ref());
            Some(match spared {
                _ if *reclaimable > Bytes::ZERO => format!("shed {reclaimable} or less"),
                Some(SpareReason::EngineBusy | SpareReason::ComingDown { .. }) => {
                    "try again when `cotenant status` shows no change of the LLM".to_owned()
                }
                _ => "stop a worker by `cotenant stop NAME` to release its memory".to_owned(),
            })
        }
        Denial::InsufficientMemory {
            asked,
            free,
            reclaimable,
            ..
        } => {
            let reachable = free.saturating_add(*reclaimable);
            Some(if reachable >= *asked {
                "let the request wait: the missing memory can be reclaimed in time".to_owned()
            } else if reachable > Bytes::ZERO {
                format!("request {reachable} or less, or let the request wait until others release")
            } else {
                "let the request wait until others release, or stop one of the holders".to_owned()
            })
        }
        Denial::ExceedsBudget { budget, .. } => Some(format!(
            "request {budget} or less, or raise `budget` in the configuration"
        )),
        Denial::RequestIdReused { .. } => Some("use a new request id for a new request".to_owned()),
        Denial::QuotaExceeded { .. } => {
            Some("release unneeded leases, or raise the limit".to_owned())
        }
        Denial::NotGrowing {
            wait: GrowthWait::Headroom { needs, has, .. },
        } => Some(format!(
            "free {} more, or lower `budget.watermarks.elevated`",
            needs.saturating_sub(*has)
        )),
        Denial::NotGrowing {
            wait: GrowthWait::Pressure { .. },
        } => Some(
            "wait until the headroom has recovered; `cotenant status` shows the holders".to_owned(),
        ),
        Denial::NotGrowing { .. } => None,
        Denial::Replaced { .. } => {
            Some("read the lease again: the later call is answered separately".to_owned())
        }
        Denial::CgroupHeld { lease, .. } => Some(format!(
            "release the other lease by `cotenant leases release {lease}`"
        )),
        Denial::StaleGeneration { .. } => {
            Some("read the lease again, and use its current values".to_owned())
        }
        Denial::UnknownLease { .. } => Some("request a new lease".to_owned()),
        Denial::PressureHigh { .. } => {
            Some("let the request wait, or use a more urgent class".to_owned())
        }
        Denial::StaleSample { .. } => Some("let the request wait until the next sample".to_owned()),
        Denial::Draining { .. } => {
            Some("retry later: `cotenant drain --off` or a restart ends the drain".to_owned())
        }
        Denial::Invalid {
            problem: Problem::NotBetween { .. },
            ..
        } => Some(
            "`leases.term_min` and `leases.term_max` of the configuration are the limits"
                .to_owned(),
        ),
        Denial::Invalid {
            problem: Problem::AboveLimit { .. },
            ..
        } => Some("`leases.wait_max` of the configuration is the limit".to_owned()),
        Denial::Invalid { .. } | Denial::NotHolder { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use cotenant_policy::{
        denial::Holders,
        lease::{Class, LeaseId, LeaseName},
        pressure::PressureLevel,
        reason::Share,
    };

    #[test]
    fn a_denial_for_lack_of_memory_says_how_to_get_it() {
        let denial = |free, reclaimable| Denial::InsufficientMemory {
            tenant: "tts".to_owned(),
            asked: Bytes::from_mib(100),
            free: Bytes::from_mib(free),
            reclaimable: Bytes::from_mib(reclaimable),
            budget: Bytes::from_mib(400),
            holders: Holders {
                class: Class::Batch,
                shares: Vec::new(),
                unaccounted: Bytes::ZERO,
            },
        };
        for (free, reclaimable, words) in [
            (
                40,
                60,
                "let the request wait: the missing memory can be reclaimed in time",
            ),
            (
                40,
                20,
                "request 60 MiB or less, or let the request wait until others release",
            ),
            (
                0,
                0,
                "let the request wait until others release, or stop one of the holders",
            ),
        ] {
            assert_eq!(hint(&denial(free, reclaimable)).as_deref(), Some(words));
        }
    }

    #[test]
    fn a_shed_that_is_refused_says_when_to_try_again_or_what_else_gives_memory() {
        let denial = |spared| Denial::InsufficientMemory {
            tenant: OPERATOR.to_owned(),
            asked: Bytes::from_mib(10),
            free: Bytes::ZERO,
            reclaimable: Bytes::ZERO,
            budget: Bytes::from_mib(400),
            holders: Holders {
                class: Class::AudioRealtime,
                shares: vec![Share {
                    holder: LeaseName {
                        id: LeaseId(1),
                        tenant: "llm".to_owned(),
                    },
                    held: Bytes::from_mib(132),
                    gives: Bytes::ZERO,
                    spared: Some(spared),
                }],
                unaccounted: Bytes::ZERO,
            },
        };
        let busy = hint(&denial(SpareReason::EngineBusy)).unwrap();
        assert!(busy.starts_with("try again when"), "{busy}");
        assert_eq!(
            hint(&denial(SpareReason::AllGiven)).as_deref(),
            Some("stop a worker by `cotenant stop NAME` to release its memory")
        );
    }

    #[test]
    fn a_denial_of_a_value_names_the_setting_that_limits_it() {
        let invalid = |field, problem| Denial::invalid("a", field, &"1h", problem);
        let (least, most) = (Duration::from_secs(2), Duration::from_secs(300));
        let term = hint(&invalid("term", Problem::NotBetween { least, most })).unwrap();
        assert!(term.contains("leases.term_max"), "{term}");
        let wait = hint(&invalid("wait", Problem::AboveLimit { limit: most })).unwrap();
        assert!(wait.contains("leases.wait_max"), "{wait}");
    }

    #[test]
    fn the_remedy_for_growth_under_pressure_is_no_other_class() {
        let wait = GrowthWait::Pressure {
            level: PressureLevel::Critical,
            left: None,
        };
        let hint = hint(&Denial::NotGrowing { wait }).unwrap();
        assert!(!hint.contains("class"), "{hint}");
    }
}
