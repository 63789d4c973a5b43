//! Retry of temporary refusals.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use cotenant_conversation::refusal::Refusal;

/// Retries temporary refusals within `limit` while `helps`, given the refusal and the number of attempts, returns true.
/// A refusal that announces a longer wait than the limit is returned at once.
///
/// # Errors
/// A permanent refusal, or one that outlasts the limit.
pub async fn patiently<T, F>(
    limit: Duration,
    helps: impl Fn(&Refusal, u32) -> bool,
    mut ask: impl FnMut() -> F,
) -> Result<T, Refusal>
where
    F: Future<Output = Result<T, Refusal>>,
{
    let deadline = Instant::now() + limit;
    let mut asked = 0;
    loop {
        let refusal = match ask().await {
            Ok(served) => return Ok(served),
            Err(refusal) => refusal,
        };
        asked += 1;
        let Some(wait) = refusal
            .retry_after()
            .filter(|wait| *wait <= limit && helps(&refusal, asked))
        else {
            return Err(refusal);
        };
        let wait = wait.clamp(AGAIN_MIN, AGAIN_MAX);
        if Instant::now() + wait >= deadline {
            return Err(refusal);
        }
        sleep(wait).await;
    }
}

/// Whether a shed, or growth after it, can resolve the refusal within seconds.
pub(super) const fn is_of_memory(refusal: &Refusal, _asked: u32) -> bool {
    matches!(
        refusal,
        Refusal::InsufficientMemory { .. }
            | Refusal::PressureHigh { .. }
            | Refusal::KvCapacityShed { .. }
            | Refusal::KvReclaimed { .. }
    )
}

/// Our choice: shorter pauses cause load, longer ones outlast a shed.
const AGAIN_MIN: Duration = Duration::from_millis(50);
const AGAIN_MAX: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use cotenant_policy::pressure::PressureLevel;

    fn pressure(retry_after: Duration) -> Refusal {
        Refusal::PressureHigh {
            act: "answer".to_owned(),
            level: PressureLevel::Critical,
            retry_after,
        }
    }

    #[tokio::test]
    async fn what_passes_in_time_is_served_and_the_rest_refused_without_a_useless_wait() {
        let (soon, late) = (Duration::from_millis(1), Duration::from_mins(1));
        for (served_at, retry_after, limit, expected) in [
            (3, soon, late, Ok(3)),
            (u32::MAX, soon, 3 * AGAIN_MIN, Err(2..=3)),
            (2, late, AGAIN_MIN, Err(1..=1)),
            (2, soon, Duration::ZERO, Err(1..=1)),
        ] {
            let asked = Cell::new(0);
            let answer = patiently(limit, is_of_memory, || {
                asked.set(asked.get() + 1);
                let served = asked.get() == served_at;
                async move {
                    if served {
                        Ok(())
                    } else {
                        Err(pressure(retry_after))
                    }
                }
            });
            match (answer.await, expected) {
                (Ok(()), Ok(expected)) => assert_eq!(asked.get(), expected),
                (Err(_), Err(expected)) => assert!(
                    expected.contains(&asked.get()),
                    "{} of {limit:?}",
                    asked.get()
                ),
                (answer, expected) => panic!("{answer:?}, expected {expected:?}"),
            }
        }
        let asked = Cell::new(0);
        let answer = patiently(
            late,
            |_, asked| asked < 2,
            || {
                asked.set(asked.get() + 1);
                async { Err::<(), _>(pressure(soon)) }
            },
        );
        assert!(answer.await.is_err());
        assert_eq!(asked.get(), 2);
    }
}
