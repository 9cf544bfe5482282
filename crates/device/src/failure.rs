//! Failures to get a compiler, a compiled program or the result of a check, and the time of another try.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time after which something that failed is tried again. A model asks for every layer and token.
const PAUSE: Duration = Duration::from_secs(10);

/// The reason of a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// A sentence without a full stop.
    pub reason: String,
    /// Whether every later try would fail as well. Memory may be free later, and a file may be there.
    pub is_lasting: bool,
}

impl Failure {
    /// Creates a failure that every later try would have too.
    pub fn lasting(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), is_lasting: true }
    }

    /// Creates a failure that a later try may not have.
    pub fn passing(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), is_lasting: false }
    }
}

/// A value that is made when it is first needed. A lasting failure is kept, and another one is kept for a while.
#[derive(Debug)]
pub struct Attempt<T> {
    state: Mutex<State<T>>,
}

#[derive(Debug)]
enum State<T> {
    Untried,
    Made(T),
    Failed { failure: Failure, at: Instant },
}

impl<T> Default for Attempt<T> {
    fn default() -> Self {
        Self { state: Mutex::new(State::Untried) }
    }
}

impl<T: Clone> Attempt<T> {
    /// Returns the value, which `make` makes in the first call, and after a failure that may have passed. Threads that
    /// need the same value wait for it.
    ///
    /// # Errors
    /// If it could not be made.
    pub fn get_or_make(&self, make: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        self.get_or_make_at(Instant::now(), make)
    }

    fn get_or_make_at(&self, now: Instant, make: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &*state {
            State::Made(value) => return Ok(value.clone()),
            State::Failed { failure, at } if is_kept(failure, *at, now) => return Err(failure.clone()),
            State::Failed { .. } | State::Untried => {}
        }
        let made = make();
        *state = match &made {
            Ok(value) => State::Made(value.clone()),
            Err(failure) => State::Failed { failure: failure.clone(), at: now },
        };
        made
    }

    /// Returns the failure that the next call would return without another try.
    pub fn known_failure(&self) -> Option<Failure> {
        // A value that another thread is making has not failed.
        match &*self.state.try_lock().ok()? {
            State::Failed { failure, at } if is_kept(failure, *at, Instant::now()) => Some(failure.clone()),
            _ => None,
        }
    }
}

/// Returns whether a failure of some time is the answer of a later time.
fn is_kept(failure: &Failure, at: Instant, now: Instant) -> bool {
    failure.is_lasting || now.saturating_duration_since(at) < PAUSE
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how often a failure is tried in calls at these seconds.
    fn tries(failure: &Failure, seconds: &[u64]) -> usize {
        let attempt = Attempt::<u32>::default();
        let start = Instant::now();
        let mut tries = 0;
        for &second in seconds {
            let result = attempt.get_or_make_at(start + Duration::from_secs(second), || {
                tries += 1;
                Err(failure.clone())
            });
            assert_eq!(result, Err(failure.clone()));
        }
        tries
    }

    #[test]
    fn lasting_failure_is_tried_once() {
        assert_eq!(tries(&Failure::lasting("too old"), &[0, 1, 100, 10_000]), 1);
    }

    #[test]
    fn passing_failure_is_tried_again_after_a_pause() {
        assert_eq!(tries(&Failure::passing("no memory"), &[0, 1, 9, 11, 12, 30]), 3);
    }

    #[test]
    fn value_after_a_passing_failure_is_kept() {
        let attempt = Attempt::default();
        let start = Instant::now();
        assert!(attempt.get_or_make_at(start, || Err(Failure::passing("no memory"))).is_err());
        assert_eq!(attempt.known_failure(), Some(Failure::passing("no memory")));
        assert_eq!(attempt.get_or_make_at(start + PAUSE, || Ok(7)), Ok(7));
        assert_eq!(attempt.get_or_make_at(start, || Err(Failure::lasting("not called"))), Ok(7));
        assert_eq!(attempt.known_failure(), None);
    }
}
