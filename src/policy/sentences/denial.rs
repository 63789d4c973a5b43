//! Denials as English, and what can be done about them.

use std::fmt::{Display, Formatter, Result};

use crate::{
    denial::{Denial, Holders, NotHolder, OPERATOR, Problem, Quota},
    growth_wait::GrowthWait,
    reason::{Share, SpareReason},
};
use cotenant_units::{Bytes, TimeSpan};

impl Display for Denial {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::InsufficientMemory {
                tenant,
                asked,
                reclaimable,
                holders,
                ..
            } if tenant == OPERATOR => match holders.shares.first() {
                None => write!(f, "cannot shed {asked}: no LLM is loaded"),
                Some(Share { held, spared, .. }) => {
                    write!(
                        f,
                        "cannot shed {asked}: the LLM can give back {reclaimable} of the {held} that it holds"
                    )?;
                    match spared {
                        Some(why) => write!(f, ", because it {why}"),
                        None => Ok(()),
                    }
                }
            },
            Self::InsufficientMemory {
                tenant,
                asked,
                free,
                reclaimable,
                budget,
                holders,
            } => write!(
                f,
                "cannot grant {asked} to `{tenant}`: {free} is free and {reclaimable} can be reclaimed, of a {budget} \
                 budget{holders}"
            ),
            Self::ExceedsBudget {
                tenant,
                asked,
                budget,
            } => {
                write!(
                    f,
                    "cannot grant {asked} to `{tenant}`: the whole budget is {budget}"
                )
            }
            Self::Invalid {
                tenant,
                field,
                value,
                problem,
            } => {
                write!(
                    f,
                    "cannot take the request of `{tenant}`: {field}: `{value}` {problem}"
                )
            }
            Self::RequestIdReused { tenant, request_id } => {
                write!(
                    f,
                    "cannot take request `{request_id}` of `{tenant}`: the id was used before with other content"
                )
            }
            Self::QuotaExceeded {
                tenant,
                what,
                limit,
            } => {
                write!(
                    f,
                    "cannot take the request of `{tenant}`: {what} is at its limit of {limit}"
                )
            }
            Self::UnknownLease { lease } => write!(f, "lease {lease} is unknown or has ended"),
            Self::Replaced { lease } => {
                write!(
                    f,
                    "cannot resize lease {lease}: a later call of its holder has replaced this one"
                )
            }
            Self::StaleGeneration {
                lease,
                generation,
                current,
            } => {
                write!(
                    f,
                    "lease {lease} cannot be changed with generation {generation}: it is {current} now"
                )
            }
            Self::NotHolder {
                lease,
                uid,
                problem,
            } => {
                write!(f, "lease {lease} cannot be changed by uid {uid}: {problem}")
            }
            Self::StaleSample {
                tenant,
                asked,
                age,
                limit,
            } => write!(
                f,
                "cannot grant {asked} to `{tenant}`: the last sample is {:.1} s old, and grants need one of at most {:.1} s",
                age.as_secs_f64(),
                limit.as_secs_f64()
            ),
            Self::PressureHigh {
                tenant,
                asked,
                class,
                level,
            } => write!(
                f,
                "cannot grant {asked} to `{tenant}`: pressure is {level} and class {class} waits until it is Normal"
            ),
            Self::NotGrowing { wait } => write!(f, "cannot grow back: {wait}"),
            Self::Draining { tenant, asked } => {
                write!(
                    f,
                    "cannot grant {asked} to `{tenant}`: the supervisor is draining"
                )
            }
        }
    }
}

impl std::error::Error for Denial {}

/// ` (a#1 holds 6 GiB, none of it for batch: interactive is more urgent; …)`, or nothing.
impl Display for Holders {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Self {
            class,
            shares,
            unaccounted,
        } = self;
        let shares = shares.iter().map(|share| match &share.spared {
            Some(why) => format!(
                "{} holds {}, none of it for {class}: {why}",
                share.holder, share.held
            ),
            None => format!(
                "{} holds {} and can give {}",
                share.holder, share.held, share.gives
            ),
        });
        let unaccounted = (*unaccounted > Bytes::ZERO)
            .then(|| format!("{unaccounted} is unaccounted and held by no tenant"));
        let all: Vec<String> = shares.chain(unaccounted).collect();
        if all.is_empty() {
            return Ok(());
        }
        write!(f, " ({})", all.join("; "))
    }
}

impl Display for Quota {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Leases => f.write_str("leases of all users"),
            Self::Queue => f.write_str("the queue"),
            Self::QueueOf { uid } => write!(f, "the share of uid {uid} in the queue"),
            Self::LeasesOf { uid } => write!(f, "leases of uid {uid}"),
        }
    }
}

impl Display for NotHolder {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Supervisor => f.write_str("the supervisor holds it itself"),
            Self::OwnedBy { uid } => write!(f, "it belongs to uid {uid}"),
            Self::Ended { uid, held, left } => write!(
                f,
                "it has ended and belongs to uid {uid}; its {held} are kept for {:.1} s more unless its holder acknowledges the \
                 end",
                left.as_secs_f64()
            ),
            Self::Awaited { pid: Some(pid) } => {
                write!(f, "process {pid} waits for it by the same request id")
            }
            Self::Awaited { pid: None } => {
                f.write_str("another process waits for it by the same request id")
            }
        }
    }
}

impl Display for Problem {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Zero => f.write_str("is zero"),
            Self::BelowMin { min } => write!(f, "is below min of {min}"),
            Self::NotBetween { least, most } => {
                write!(
                    f,
                    "is not between {} and {}",
                    TimeSpan(*least),
                    TimeSpan(*most)
                )
            }
            Self::AboveLimit { limit } => write!(f, "is above the limit of {}", TimeSpan(*limit)),
            Self::TooLong { bytes, limit } => write!(f, "has {bytes} bytes and may have {limit}"),
            Self::Unprintable => f.write_str("is empty or has control characters"),
            Self::OwnHolder => f.write_str("is the name of a holder of ours"),
            Self::Marked {
                marks: (one, other),
            } => {
                write!(
                    f,
                    "has `{one}` or `{other}` in it, which distinguish processes of one name"
                )
            }
            Self::AboveTarget { target } => {
                write!(
                    f,
                    "is above {target}, to which the lease has been asked to come down"
                )
            }
            Self::NotConfigured => f.write_str("is not configured"),
            Self::NoEngine => f.write_str("no engine is configured"),
            Self::EngineBusy => f.write_str(
                "the engine is loading, or failed to change a moment ago; it will be kept so later",
            ),
            Self::NotApplied { revision, reason } => {
                write!(f, "was not applied as plan {revision}: {reason}")
            }
            Self::NotAVariant { known } if known.is_empty() => {
                f.write_str("cannot be had: the worker has no variants")
            }
            Self::NotAVariant { known } => {
                write!(f, "is not one of its variants: {}", known.join(", "))
            }
            Self::NotReady { state } => write!(f, "is {} and cannot change", state.word()),
            Self::ChangingTo { variant } => {
                write!(f, "is changing to `{variant}`; ask again when it has")
            }
            Self::CannotChange => f.write_str("cannot change at present"),
            Self::Kept { error } => write!(f, "was kept: {error}"),
            Self::NotAnswered { within } => {
                write!(
                    f,
                    "was asked for and not answered within {:.1} s",
                    within.as_secs_f64()
                )
            }
            Self::Exited { cause } => write!(f, "exited while it changed: {cause}"),
            Self::Stopping(reason) => write!(f, "is being stopped: {reason}"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

impl Denial {
    /// What the caller or an operator can do about it, if anything.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::InsufficientMemory {
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
                    _ => {
                        "stop a worker by `cotenant stop NAME` to get back the memory that it holds"
                            .to_owned()
                    }
                })
            }
            Self::InsufficientMemory {
                asked,
                free,
                reclaimable,
                ..
            } => {
                let reachable = free.saturating_add(*reclaimable);
                Some(if reachable >= *asked {
                    "let the request wait: what is missing can be reclaimed in time".to_owned()
                } else if reachable > Bytes::ZERO {
                    format!(
                        "ask for {reachable} or less, or let the request wait until others release"
                    )
                } else {
                    "let the request wait until others release, or stop one of the holders"
                        .to_owned()
                })
            }
            Self::ExceedsBudget { budget, .. } => Some(format!(
                "ask for {budget} or less, or raise `budget` in the configuration"
            )),
            Self::RequestIdReused { .. } => {
                Some("use a new request id for a new request".to_owned())
            }
            Self::QuotaExceeded { .. } => {
                Some("release leases that are not needed, or raise the limit".to_owned())
            }
            Self::NotGrowing {
                wait: GrowthWait::Headroom { needs, has, .. },
            } => Some(format!(
                "free {} more, or lower `budget.watermarks.elevated`",
                needs.saturating_sub(*has)
            )),
            Self::NotGrowing {
                wait: GrowthWait::Pressure { .. },
            } => Some(
                "wait until the headroom has recovered; `cotenant status` shows who holds memory"
                    .to_owned(),
            ),
            Self::NotGrowing { .. } => None,
            Self::Replaced { .. } => {
                Some("read the lease again: the later call has its own answer".to_owned())
            }
            Self::StaleGeneration { .. } => {
                Some("read the lease again, and use what it says".to_owned())
            }
            Self::UnknownLease { .. } => {
                Some("ask for a new lease; an ended one does not come back".to_owned())
            }
            Self::PressureHigh { .. } => {
                Some("let the request wait, or ask in a more urgent class".to_owned())
            }
            Self::StaleSample { .. } => {
                Some("let the request wait until the machine is read again".to_owned())
            }
            Self::Draining { .. } => Some(
                "ask again later: an operator ends it by `cotenant drain --off`, or a restart does"
                    .to_owned(),
            ),
            Self::Invalid {
                problem: Problem::NotBetween { .. },
                ..
            } => Some(
                "`leases.term_min` and `leases.term_max` of the configuration are the limits"
                    .to_owned(),
            ),
            Self::Invalid {
                problem: Problem::AboveLimit { .. },
                ..
            } => Some("`leases.wait_max` of the configuration is the limit".to_owned()),
            Self::Invalid { .. } | Self::NotHolder { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::{Class, LeaseId, LeaseName};

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
                "let the request wait: what is missing can be reclaimed in time",
            ),
            (
                40,
                20,
                "ask for 60 MiB or less, or let the request wait until others release",
            ),
            (
                0,
                0,
                "let the request wait until others release, or stop one of the holders",
            ),
        ] {
            assert_eq!(denial(free, reclaimable).hint().as_deref(), Some(words));
        }
    }

    #[test]
    fn a_shed_that_is_refused_for_now_says_when_to_try_again() {
        let held = Bytes::from_mib(132);
        let denial = Denial::InsufficientMemory {
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
                    held,
                    gives: Bytes::ZERO,
                    spared: Some(SpareReason::EngineBusy),
                }],
                unaccounted: Bytes::ZERO,
            },
        };
        assert_eq!(
            denial.to_string(),
            "cannot shed 10 MiB: the LLM can give back 0 B of the 132 MiB that it holds, because it is loading, or failed to \
             shed a moment ago"
        );
        let hint = denial.hint().unwrap();
        assert!(hint.starts_with("try again when"), "{hint}");
    }

    #[test]
    fn a_denial_of_a_value_names_the_setting_that_limits_it() {
        let invalid = |field, problem| Denial::invalid("a", field, &"1h", problem);
        let (least, most) = (
            std::time::Duration::from_secs(2),
            std::time::Duration::from_secs(300),
        );
        let term = invalid("term", Problem::NotBetween { least, most });
        assert_eq!(
            term.to_string(),
            "cannot take the request of `a`: term: `1h` is not between 2 s and 5 min"
        );
        assert!(
            term.hint()
                .is_some_and(|hint| hint.contains("leases.term_max"))
        );
        let wait = invalid("wait", Problem::AboveLimit { limit: most });
        assert!(
            wait.hint()
                .is_some_and(|hint| hint.contains("leases.wait_max"))
        );
        let variant = invalid("variant", Problem::NotAVariant { known: Vec::new() });
        assert!(
            variant
                .to_string()
                .ends_with("variant: `1h` cannot be had: the worker has no variants"),
            "{variant}"
        );
    }

    #[test]
    fn a_denial_names_the_holders_of_what_is_missing() {
        let share = |id, held, spared| Share {
            holder: LeaseName {
                id: LeaseId(id),
                tenant: "a".to_owned(),
            },
            held: Bytes::from_gib(held),
            gives: Bytes::from_gib(1),
            spared,
        };
        let class = Class::Interactive;
        let denial = |shares, unaccounted| Denial::InsufficientMemory {
            tenant: "b".to_owned(),
            asked: Bytes::from_gib(6),
            free: Bytes::from_gib(2),
            reclaimable: Bytes::ZERO,
            budget: Bytes::from_gib(8),
            holders: Holders {
                class,
                shares,
                unaccounted,
            },
        };
        let words =
            "cannot grant 6 GiB to `b`: 2 GiB is free and 0 B can be reclaimed, of a 8 GiB budget";
        assert_eq!(denial(Vec::new(), Bytes::ZERO).to_string(), words);
        let shares = vec![
            share(1, 6, Some(SpareReason::AsUrgent(class))),
            share(2, 3, None),
        ];
        assert_eq!(
            denial(shares, Bytes::from_mib(5)).to_string(),
            format!(
                "{words} (a#1 holds 6 GiB, none of it for interactive: interactive is as urgent; a#2 holds 3 GiB and can give \
                 1 GiB; 5 MiB is unaccounted and held by no tenant)"
            )
        );
        let ended = NotHolder::Ended {
            uid: 1000,
            held: Bytes::from_mib(300),
            left: std::time::Duration::from_millis(7675),
        };
        assert_eq!(
            ended.to_string(),
            "it has ended and belongs to uid 1000; its 300 MiB are kept for 7.7 s more unless its holder acknowledges the end"
        );
    }
}
