//! Values by their keys, each of which is made once.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::failure::{Attempt, Failure};

/// Values that are made when they are first needed, by their keys.
#[derive(Debug)]
pub struct Attempts<K, V> {
    slots: Mutex<HashMap<K, Arc<Attempt<V>>>>,
    /// Whether a value could not be made.
    has_failed: AtomicBool,
}

impl<K, V> Default for Attempts<K, V> {
    fn default() -> Self {
        Self { slots: Mutex::default(), has_failed: AtomicBool::new(false) }
    }
}

impl<K: Eq + Hash, V: Clone> Attempts<K, V> {
    /// Returns the value of a key, which `make` makes in the first call, and after a failure that may have passed.
    ///
    /// # Errors
    /// If the value cannot be made, or could not in an earlier call.
    pub fn get_or_make(&self, key: K, make: impl FnOnce() -> Result<V, Failure>) -> Result<V, Failure> {
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            slots.entry(key).or_default().clone()
        };
        // Other values can be made meanwhile; threads that need this one wait for it.
        let made = slot.get_or_make(make);
        if made.is_err() {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        made
    }

    /// Returns the failure that the next call would return without another try. `key` is called only if a value could
    /// not be made.
    pub fn known_failure(&self, key: impl FnOnce() -> Option<K>) -> Option<Failure> {
        if !self.has_failed.load(Ordering::Relaxed) {
            return None;
        }
        let wanted = key()?;
        let slot = self.slots.lock().unwrap_or_else(PoisonError::into_inner).get(&wanted).cloned()?;
        slot.known_failure()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_value_is_known_and_others_are_made() {
        let attempts = Attempts::<&str, u32>::default();
        let known = |key| attempts.known_failure(|| Some(key));
        assert_eq!(known("a"), None);
        let failure = Failure::lasting("it does not compile");
        let make = |key, result| attempts.get_or_make(key, || result);
        assert_eq!(make("a", Err(failure.clone())), Err(failure.clone()));
        assert_eq!(known("a"), Some(failure.clone()));
        assert_eq!(make("a", Ok(1)), Err(failure));
        assert_eq!((make("b", Ok(2)), known("b")), (Ok(2), None));
    }
}
