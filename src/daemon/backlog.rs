//! Backlog of one worker: expected wait, from its recent speed.

use std::time::Duration;

use cotenant_units::Timestamp;

/// Pending requests of a worker, measured as work: the duration of audio to recognise, or of text when spoken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Backlog {
    work: Duration,
    requests: u32,
    /// Time per second of work, in microseconds; `None` before the first answer.
    pace_micros: Option<u64>,
    /// Time of the last answer, or of the first request to an idle worker.
    since: Timestamp,
}

impl Backlog {
    /// Admits a request, unless its answer is expected later than `patience`. Returns the pending work, including it.
    ///
    /// # Errors
    /// Its expected time, if that exceeds `patience`.
    pub(crate) fn admit(
        &mut self,
        now: Timestamp,
        work: Duration,
        patience: Option<Duration>,
    ) -> Result<Duration, Duration> {
        let expected = self.expected(now, work);
        if patience.is_some_and(|patience| expected > patience) {
            return Err(expected);
        }
        if self.requests == 0 {
            self.since = now;
        }
        self.requests = self.requests.saturating_add(1);
        self.work = self.work.saturating_add(work);
        Ok(self.work)
    }

    /// Admits the first part of a request whose answer is complete only after `rest`, in `parts` further parts. Before
    /// each of these, the worker performs one part of every other request.
    ///
    /// # Errors
    /// As [`Self::admit`].
    pub(crate) fn admit_whole(
        &mut self,
        now: Timestamp,
        first: Duration,
        (rest, parts): (Duration, u32),
        patience: Option<Duration>,
    ) -> Result<Duration, Duration> {
        let between = self.work.saturating_mul(parts).saturating_add(rest);
        let expected = self.expected(now, first.saturating_add(between));
        if patience.is_some_and(|patience| expected > patience) {
            return Err(expected);
        }
        self.admit(now, first, None)
    }

    /// Removes an answered request, and measures the speed by it.
    pub(crate) fn answered(&mut self, now: Timestamp, work: Duration) {
        self.answered_in(now, work, now.saturating_since(self.since));
    }

    /// Does the same with a known processing time `took`, since between answers a slow client may have delayed the
    /// worker.
    pub(crate) fn answered_in(&mut self, now: Timestamp, work: Duration, took: Duration) {
        let took = took.as_micros();
        let millis = work.as_millis().max(u128::from(WORK_MIN_MILLIS));
        let pace = u64::try_from(took.saturating_mul(1000) / millis).unwrap_or(u64::MAX);
        // Running mean with a weight of a quarter for the latest answer.
        self.pace_micros = Some(match self.pace_micros {
            None => pace,
            Some(mean) => mean.saturating_mul(3).saturating_add(pace) / 4,
        });
        self.since = now;
        self.dropped(work);
    }

    /// Removes a request that ended without an answer.
    pub(crate) fn dropped(&mut self, work: Duration) {
        self.requests = self.requests.saturating_sub(1);
        self.work = self.work.saturating_sub(work);
    }

    /// Returns the expected time until an answer to further work. Zero before the first measurement, and for an idle
    /// worker whose last measurement is old: refusing then would prevent a new one.
    fn expected(&self, now: Timestamp, work: Duration) -> Duration {
        let old = self.requests == 0 && now.saturating_since(self.since) > PACE_KEPT;
        let Some(pace) = self.pace_micros.filter(|_| !old) else {
            return Duration::ZERO;
        };
        let work = self
            .work
            .saturating_add(work)
            .max(Duration::from_millis(WORK_MIN_MILLIS));
        let micros = work.as_millis().saturating_mul(u128::from(pace)) / 1000;
        let all = Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX));
        let spent = match self.requests {
            0 => Duration::ZERO,
            _ => now.saturating_since(self.since),
        };
        all.saturating_sub(spent)
    }
}

/// Minimum work of a request: one without sound takes time too.
const WORK_MIN_MILLIS: u64 = 500;

/// Validity of a measurement on an idle worker. Our choice: a device that was short of memory, or busy, may have
/// recovered.
const PACE_KEPT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Option<Duration> = Some(Duration::from_secs(10));

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_millis(1000 * seconds)
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn what_cannot_be_answered_in_time_is_refused_at_once_with_the_time_it_would_take() {
        let mut backlog = Backlog::default();
        // Without a measurement, every request is admitted.
        backlog.admit(at(0), seconds(4), PATIENCE).unwrap();
        backlog.answered(at(2), seconds(4));
        // Half a second per second of audio: four of 5 s take 10 s, a fifth does not fit.
        for _ in 0..4 {
            backlog.admit(at(2), seconds(5), PATIENCE).unwrap();
        }
        assert_eq!(
            backlog.admit(at(2), seconds(5), PATIENCE),
            Err(Duration::from_millis(12_500))
        );
        // A request with more patience, or without a limit, is admitted; elapsed time counts.
        let mut later = backlog.clone();
        later.admit(at(2), seconds(5), None).unwrap();
        backlog.admit(at(5), seconds(5), PATIENCE).unwrap();
    }

    #[test]
    fn room_comes_back_with_answers_and_with_requests_that_end() {
        let mut backlog = Backlog::default();
        backlog.admit(at(0), seconds(10), None).unwrap();
        backlog.answered(at(10), seconds(10));
        backlog.admit(at(20), seconds(8), PATIENCE).unwrap();
        backlog.admit(at(20), seconds(5), PATIENCE).unwrap_err();
        backlog.dropped(seconds(8));
        backlog.admit(at(20), seconds(5), PATIENCE).unwrap();
        // The worker has become faster: the mean follows.
        backlog.answered(at(21), seconds(5));
        backlog.admit(at(21), seconds(11), PATIENCE).unwrap();
    }

    #[test]
    fn a_worker_that_was_slow_once_is_tried_again_when_it_has_rested() {
        let mut backlog = Backlog::default();
        backlog.admit(at(0), seconds(1), None).unwrap();
        backlog.answered(at(60), seconds(1));
        assert_eq!(
            backlog.admit(at(61), seconds(1), PATIENCE),
            Err(seconds(60))
        );
        backlog.admit(at(91), seconds(1), PATIENCE).unwrap();
        // Only one request probes the worker.
        backlog.admit(at(91), seconds(1), PATIENCE).unwrap_err();
    }

    #[test]
    fn a_client_that_reads_slowly_does_not_make_its_worker_slow() {
        let mut backlog = Backlog::default();
        assert_eq!(backlog.admit(at(0), seconds(4), None), Ok(seconds(4)));
        backlog.answered_in(at(40), seconds(4), seconds(1));
        backlog.admit(at(40), seconds(20), PATIENCE).unwrap();
        assert_eq!(
            backlog.admit(at(40), seconds(24), PATIENCE),
            Err(seconds(11))
        );
    }

    #[test]
    fn who_waits_for_the_whole_waits_for_others_before_each_part() {
        let mut backlog = Backlog::default();
        backlog.admit(at(0), seconds(1), None).unwrap();
        backlog.answered(at(1), seconds(1));
        backlog.admit(at(1), seconds(2), PATIENCE).unwrap();
        backlog
            .clone()
            .admit_whole(at(1), seconds(1), (seconds(3), 2), PATIENCE)
            .unwrap();
        assert_eq!(
            backlog.admit_whole(at(1), seconds(1), (seconds(3), 3), PATIENCE),
            Err(seconds(12))
        );
        assert_eq!(backlog.admit(at(1), seconds(1), PATIENCE), Ok(seconds(3)));
    }

    #[test]
    fn a_recording_without_sound_is_some_work() {
        let mut backlog = Backlog::default();
        backlog.admit(at(0), Duration::ZERO, None).unwrap();
        backlog.answered(at(1), Duration::ZERO);
        assert_eq!(backlog.expected(at(1), Duration::ZERO), seconds(1));
    }
}
