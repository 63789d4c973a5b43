//! The published device: capacity and taints, from the figures of the supervisor and a clock.
//!
//! ```text
//!   figures ──► certain capacity ──► lower than published: at once
//!                                └─► higher: the least of the last 10 s
//!   level, one step not grantable, supervisor away ──► taints, each at once
//! ```
//!
//! Kubernetes subtracts what it has allocated, so the capacity is what claims have already plus what one more would
//! certainly be granted. It is unchanged by claims that come and go; only other holders change it.

use std::time::Duration;

use cotenant_rpc::v1::PressureLevel;
use cotenant_units::{Bytes, TimeSpan, Timestamp};

/// Unit of requests and of the capacity. Our choice, as published.
pub const STEP: Bytes = Bytes::from_mib(64);

/// Figures of the supervisor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Memory pressure.
    pub level: PressureLevel,
    /// Bytes that a request of the pool's class would be granted now.
    pub grantable: Bytes,
    /// Bytes that claims have from Kubernetes.
    pub booked: Bytes,
    /// Bytes above those that no pod uses, and that are taken back for a claim.
    pub idle: Bytes,
}

/// What operators decide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolParams {
    /// Memory that other programs may take between the placement of a pod and its preparation.
    pub margin: Bytes,
    /// Whether Critical evicts pods with claims.
    pub evict: bool,
}

/// Effect of a taint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// Informs only.
    None,
    /// No new pod.
    NoSchedule,
    /// Pods are evicted.
    NoExecute,
}

impl Effect {
    /// Returns its name in the API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}

/// Taint of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taint {
    /// Its name, below the domain of this project.
    pub key: &'static str,
    /// Its value.
    pub value: &'static str,
    /// Its effect.
    pub effect: Effect,
    /// Time since which it applies.
    pub since: Timestamp,
}

/// Health of the device for kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// The supervisor is unreachable.
    Unknown(String),
    /// Memory is granted.
    Healthy(String),
    /// Memory is short.
    Unhealthy(String),
}

/// The device as published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// A multiple of [`STEP`], at least one.
    pub capacity: Bytes,
    /// In a fixed order.
    pub taints: Vec<Taint>,
}

/// Decides what is published.
#[derive(Clone, Debug)]
pub struct Pool {
    params: PoolParams,
    figures: Option<Figures>,
    /// Since when the supervisor is unreachable.
    away_since: Option<Timestamp>,
    offer: Option<Offer>,
    /// Least capacity above the published one since a time.
    higher: Option<(Bytes, Timestamp)>,
}

impl Pool {
    /// Publishes nothing before the first figures.
    #[must_use]
    pub const fn new(params: PoolParams) -> Self {
        Self {
            params,
            figures: None,
            away_since: None,
            offer: None,
            higher: None,
        }
    }

    /// Returns what is published; `None` before the first figures.
    #[must_use]
    pub const fn offer(&self) -> Option<&Offer> {
        self.offer.as_ref()
    }

    /// Observes figures. Returns whether the offer changed.
    pub fn observe(&mut self, now: Timestamp, figures: Figures) -> bool {
        self.figures = Some(figures);
        self.away_since = None;
        self.decide(now)
    }

    /// Notes that the supervisor cannot be reached. Returns whether the offer changed.
    pub fn lose(&mut self, now: Timestamp) -> bool {
        self.away_since.get_or_insert(now);
        self.decide(now)
    }

    /// Applies the passing of time. Returns whether the offer changed.
    pub fn advance(&mut self, now: Timestamp) -> bool {
        self.decide(now)
    }

    /// Returns when [`advance`](Self::advance) changes something, if ever.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let tainted = |key| {
            let offer = self.offer.as_ref();
            offer.is_some_and(|offer| offer.taints.iter().any(|taint| taint.key == key))
        };
        let away = self
            .away_since
            .filter(|_| !tainted(SUPERVISOR))
            .map(|since| since + AWAY_AFTER);
        let higher = self.higher.map(|(_, since)| since + RAISE_AFTER);
        [away, higher].into_iter().flatten().min()
    }

    /// Returns the health for kubelet.
    #[must_use]
    pub fn health(&self, now: Timestamp) -> Health {
        let Some(figures) = self.figures else {
            return Health::Unknown("the supervisor has not been reached yet".to_owned());
        };
        if let Some(since) = self.away_since {
            let away = TimeSpan(now.saturating_since(since));
            return Health::Unknown(format!("the supervisor has been unreachable for {away}"));
        }
        let Figures {
            level,
            grantable,
            booked,
            ..
        } = figures;
        let level = match level {
            PressureLevel::Critical => "Critical",
            PressureLevel::Elevated => "Elevated",
            PressureLevel::Normal | PressureLevel::Unspecified => "Normal",
        };
        let text =
            format!("pressure is {level}; claims have {booked}, and {grantable} can be granted");
        if figures.level == PressureLevel::Critical {
            Health::Unhealthy(text)
        } else {
            Health::Healthy(text)
        }
    }

    fn decide(&mut self, now: Timestamp) -> bool {
        let Some(figures) = self.figures else {
            return false;
        };
        let capacity = self.capacity(now, &figures);
        let taints = self.taints(now, &figures);
        let offer = Some(Offer { capacity, taints });
        let changed = self.offer != offer;
        self.offer = offer;
        changed
    }

    fn capacity(&mut self, now: Timestamp, figures: &Figures) -> Bytes {
        let more = figures
            .grantable
            .saturating_add(figures.idle)
            .saturating_sub(self.params.margin);
        let certain = figures.booked.saturating_add(floor(more)).max(STEP);
        let certain = floor(certain);
        let Some(published) = self.offer.as_ref().map(|offer| offer.capacity) else {
            return certain;
        };
        if certain <= published || self.away_since.is_some() {
            self.higher = None;
            return certain.min(published);
        }
        let (least, since) = match self.higher {
            Some((least, since)) => (least.min(certain), since),
            None => (certain, now),
        };
        if now.saturating_since(since) >= RAISE_AFTER {
            self.higher = None;
            return least;
        }
        self.higher = Some((least, since));
        published
    }

    fn taints(&self, now: Timestamp, figures: &Figures) -> Vec<Taint> {
        let is_away = |since| now.saturating_since(since) >= AWAY_AFTER;
        let critical = if self.params.evict {
            Effect::NoExecute
        } else {
            Effect::NoSchedule
        };
        let pressure = match figures.level {
            PressureLevel::Elevated => Some(("elevated", Effect::None)),
            PressureLevel::Critical => Some(("critical", critical)),
            PressureLevel::Normal | PressureLevel::Unspecified => None,
        };
        let more = figures
            .grantable
            .saturating_add(figures.idle)
            .saturating_sub(self.params.margin);
        let wanted = [
            pressure.map(|(value, effect)| (PRESSURE, value, effect)),
            (more < STEP).then_some((GRANTABLE, "none", Effect::NoSchedule)),
            self.away_since
                .filter(|since| is_away(*since))
                .map(|_| (SUPERVISOR, "unreachable", Effect::NoSchedule)),
        ];
        let before = self.offer.as_ref().map_or(&[][..], |offer| &offer.taints);
        let taint = |(key, value, effect)| {
            let same =
                |taint: &&Taint| (taint.key, taint.value, taint.effect) == (key, value, effect);
            let since = before.iter().find(same).map_or(now, |taint| taint.since);
            Taint {
                key,
                value,
                effect,
                since,
            }
        };
        wanted.into_iter().flatten().map(taint).collect()
    }
}

fn floor(bytes: Bytes) -> Bytes {
    Bytes::new(bytes.get() - bytes.get() % STEP.get())
}

/// Key of the taint of the pressure level: `elevated`, `critical`.
pub const PRESSURE: &str = "cotenant.dev/pressure";

/// Key of the taint while not one step can be granted: `none`.
pub const GRANTABLE: &str = "cotenant.dev/grantable";

/// Key of the taint while the supervisor is away: `unreachable`.
pub const SUPERVISOR: &str = "cotenant.dev/supervisor";

/// Time for which a higher capacity has to last before it is published. Our choice: longer than a placement takes, and
/// shorter than the retry of a pod that waits for room.
pub const RAISE_AFTER: Duration = Duration::from_secs(10);

/// Time without the supervisor before the taint. Our choice: a restart takes less.
pub const AWAY_AFTER: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Timestamp {
        Timestamp::from_millis(1000 * seconds)
    }

    fn figures(grantable: u64, booked: u64) -> Figures {
        Figures {
            level: PressureLevel::Normal,
            grantable: Bytes::from_mib(grantable),
            booked: Bytes::from_mib(booked),
            idle: Bytes::ZERO,
        }
    }

    fn keys(pool: &Pool) -> Vec<(&'static str, &'static str, Effect)> {
        let taints = &pool.offer().unwrap().taints;
        taints
            .iter()
            .map(|taint| (taint.key, taint.value, taint.effect))
            .collect()
    }

    fn mib(pool: &Pool) -> u64 {
        pool.offer().unwrap().capacity.whole_mib()
    }

    #[test]
    fn capacity_falls_at_once_and_rises_to_the_least_of_ten_seconds() {
        let mut pool = Pool::new(PoolParams::default());
        assert!(pool.observe(at(0), figures(1000, 0)));
        assert_eq!(mib(&pool), 960);
        assert!(pool.observe(at(1), figures(600, 0)));
        assert_eq!(mib(&pool), 576);
        assert!(!pool.observe(at(2), figures(1000, 0)));
        assert!(!pool.observe(at(5), figures(800, 0)));
        assert_eq!(pool.next_deadline(), Some(at(12)));
        assert!(pool.advance(at(12)));
        assert_eq!(mib(&pool), 768);
        // A dip ends the wait.
        assert!(!pool.observe(at(13), figures(1000, 0)));
        assert!(!pool.observe(at(20), figures(780, 0)));
        assert!(!pool.observe(at(21), figures(1000, 0)));
        assert!(!pool.advance(at(30)));
        assert!(pool.advance(at(31)));
    }

    #[test]
    fn a_claim_that_comes_or_goes_changes_no_capacity() {
        let mut pool = Pool::new(PoolParams::default());
        pool.observe(at(0), figures(1000, 0));
        assert!(!pool.observe(at(1), figures(1000 - 128, 128)));
        assert!(!pool.observe(at(2), figures(1000, 0)));
    }

    #[test]
    fn a_margin_is_kept_and_unused_surplus_counts() {
        let params = PoolParams {
            margin: Bytes::from_mib(128),
            evict: false,
        };
        let mut pool = Pool::new(params);
        let idle = Bytes::from_mib(256);
        pool.observe(
            at(0),
            Figures {
                idle,
                ..figures(64, 64)
            },
        );
        assert_eq!(mib(&pool), 64 + 192);
        assert!(keys(&pool).is_empty());
        pool.observe(at(1), figures(128, 64));
        assert_eq!(
            (mib(&pool), keys(&pool)),
            (64, vec![(GRANTABLE, "none", Effect::NoSchedule)])
        );
    }

    #[test]
    fn elevated_informs_critical_schedules_nothing_and_evicts_only_by_setting() {
        for (evict, effect) in [(false, Effect::NoSchedule), (true, Effect::NoExecute)] {
            let mut pool = Pool::new(PoolParams {
                margin: Bytes::ZERO,
                evict,
            });
            let of = |level| Figures {
                level,
                ..figures(640, 0)
            };
            pool.observe(at(0), of(PressureLevel::Normal));
            assert!(keys(&pool).is_empty());
            pool.observe(at(1), of(PressureLevel::Elevated));
            assert_eq!(keys(&pool), [(PRESSURE, "elevated", Effect::None)]);
            pool.observe(at(2), of(PressureLevel::Critical));
            assert_eq!(keys(&pool), [(PRESSURE, "critical", effect)]);
            assert!(!pool.observe(at(3), of(PressureLevel::Critical)));
            assert_eq!(pool.offer().unwrap().taints[0].since, at(2));
            assert!(matches!(pool.health(at(3)), Health::Unhealthy(_)));
        }
    }

    #[test]
    fn a_supervisor_that_restarts_is_no_reason_and_one_that_stays_away_is() {
        let mut pool = Pool::new(PoolParams::default());
        assert!(!pool.lose(at(0)), "nothing is published yet");
        pool.observe(at(1), figures(640, 0));
        assert!(!pool.lose(at(2)));
        assert!(matches!(pool.health(at(3)), Health::Unknown(_)));
        assert_eq!(pool.next_deadline(), Some(at(7)));
        assert!(pool.advance(at(7)));
        assert_eq!(
            keys(&pool),
            [(SUPERVISOR, "unreachable", Effect::NoSchedule)]
        );
        assert_eq!(pool.next_deadline(), None);
        assert!(pool.observe(at(9), figures(640, 0)));
        assert!(keys(&pool).is_empty());
    }
}
