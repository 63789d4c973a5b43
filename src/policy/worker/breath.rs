//! Memory of a worker's requests: recurring need and unbounded growth.
//!
//! A speech server takes more memory for a long sentence than for a short one, frees a part, and keeps the rest, up to
//! a stable level. A leak has no such level. They are distinguished by the use after each piece of work, not by a
//! declared size.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use cotenant_units::Bytes;

/// Measured use of one process, during work and at rest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Breath {
    /// Whether it has worked since the last measurement at rest.
    worked: bool,
    /// Highest use since the last measurement at rest.
    most: Bytes,
    /// Highest use of each of the last pieces of work.
    peaks: VecDeque<Bytes>,
    /// Highest use at rest; `None` before the first measurement.
    rest: Option<Bytes>,
    /// Rises of `rest` without a stable period in between.
    rises: u32,
    /// Pieces of work since the last rise.
    calm: u32,
}

impl Breath {
    /// Notes that it works.
    pub(super) const fn works(&mut self) {
        self.worked = true;
    }

    /// Records a measurement of a worker that is `busy` or at rest.
    pub(super) fn measured(&mut self, used: Bytes, busy: bool) {
        self.most = self.most.max(used);
        if busy {
            self.worked = true;
            return;
        }
        let worked = std::mem::take(&mut self.worked);
        if worked {
            if self.peaks.len() >= RECENT {
                self.peaks.pop_front();
            }
            self.peaks.push_back(self.most);
        }
        self.most = used;
        let Some(rest) = self.rest else {
            self.rest = Some(used);
            return;
        };
        if used > rest.saturating_add(rest.per_mille(RISE_PER_MILLE).max(RISE)) {
            self.rest = Some(used);
            self.rises = self.rises.saturating_add(1);
            self.calm = 0;
        } else if worked {
            self.calm = self.calm.saturating_add(1);
            if self.calm >= CALM {
                self.rises = 0;
            }
        }
    }

    /// Returns the highest use of the last pieces of work.
    pub(super) fn need(&self) -> Bytes {
        self.peaks.iter().copied().max().unwrap_or_default()
    }

    /// Returns whether use at rest has risen `RISES` times without a stable period.
    pub(super) const fn leaks(&self) -> bool {
        self.rises >= RISES
    }

    /// Returns whether the rises may become a leak: present use is then no evidence for the need of another start.
    pub(super) const fn may_leak(&self) -> bool {
        self.rises >= RISES - 2
    }
}

/// Pieces of work whose peaks are remembered. Our choice: a need that does not recur within them is no longer reserved.
const RECENT: usize = 8;

/// Smallest rise of use at rest that counts: 1 %, at least 2 MiB. Allocators keep a few pages more or less after each
/// request.
const RISE: Bytes = Bytes::from_mib(2);
const RISE_PER_MILLE: u32 = 10;

/// Rises that make a leak. With sizes that vary at random, each new maximum takes about 1.7 times as many requests as
/// the one before: the eighth comes after some hundreds, and always with [`CALM`] requests in between.
const RISES: u32 = 8;

/// Pieces of work without a rise that make a stable period. Our choice.
const CALM: u32 = 8;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn mib(mib: u64) -> Bytes {
        Bytes::from_mib(mib)
    }

    fn work(breath: &mut Breath, peak: u64, rest: u64) {
        breath.works();
        breath.measured(mib(peak), true);
        breath.measured(mib(rest), false);
    }

    #[test]
    fn a_voice_that_keeps_what_its_longest_sentence_took_does_not_leak() {
        let mut breath = Breath::default();
        breath.measured(mib(52), false);
        // Piper: 52 MiB at rest, 316 with a long sentence, and 290 from then on.
        for (peak, rest) in [
            (80, 75),
            (110, 104),
            (96, 104),
            (190, 181),
            (316, 290),
            (300, 288),
            (312, 291),
        ] {
            work(&mut breath, peak, rest);
            assert!(!breath.leaks(), "{peak}");
        }
        assert_eq!(breath.need(), mib(316));
        // A need that does not recur is forgotten.
        for _ in 0..8 {
            work(&mut breath, 295, 290);
        }
        assert_eq!(breath.need(), mib(295));
        assert!(!breath.may_leak());
    }

    #[test]
    fn growth_that_stays_after_each_request_is_a_leak() {
        for step_kib in [256u64, 1024, 8192] {
            let mut breath = Breath::default();
            let after = |request: u64| Bytes::from_kib(100 * 1024 + request * step_kib);
            breath.measured(after(0), false);
            let found = (1..=200).find(|request| {
                breath.works();
                breath.measured(after(*request), false);
                breath.leaks()
            });
            // Slower growth is treated as ordinary use when memory is short.
            assert_eq!(
                found.is_some(),
                step_kib > 256,
                "{step_kib} KiB for each request"
            );
        }
    }

    #[test]
    fn a_worker_that_grows_without_work_leaks() {
        let mut breath = Breath::default();
        for second in 0..9 {
            assert!(!breath.leaks());
            breath.measured(mib(100 + 10 * second), false);
        }
        assert!(breath.leaks());
    }

    proptest! {
        /// A worker whose use at rest is bounded is not classified as a leak for long, however its sizes vary.
        #[test]
        fn bounded_use_is_no_leak(sizes in prop::collection::vec(50u64..300, 1..200)) {
            let mut breath = Breath::default();
            breath.measured(mib(50), false);
            for size in sizes {
                work(&mut breath, size + 20, size);
            }
            for _ in 0..CALM {
                work(&mut breath, 320, 300);
            }
            work(&mut breath, 320, 300);
            prop_assert!(!breath.leaks());
            prop_assert_eq!(breath.need(), mib(320));
        }
    }
}
