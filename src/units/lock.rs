//! Locking of mutexes that ignores poisoning.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Locks the mutex, even if an earlier holder panicked.
pub fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for `changed`.
pub fn waited<'guard, T>(changed: &Condvar, guard: MutexGuard<'guard, T>) -> MutexGuard<'guard, T> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits for `changed` up to `limit`; returns whether that time has passed.
pub fn waited_for<'guard, T>(
    changed: &Condvar,
    guard: MutexGuard<'guard, T>,
    limit: Duration,
) -> (MutexGuard<'guard, T>, bool) {
    let (guard, result) = changed
        .wait_timeout(guard, limit)
        .unwrap_or_else(PoisonError::into_inner);
    (guard, result.timed_out())
}
