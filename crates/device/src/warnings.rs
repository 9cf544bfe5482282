//! Warnings of which a process logs each text once.

use std::collections::HashSet;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Logs a warning, unless the process has logged the same text before. Returns whether it did.
pub fn warn_of_each_text(text: &str) -> bool {
    static LOGGED: OnceLock<Mutex<HashSet<String>>> = OnceLock::new();
    let mut logged = LOGGED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let is_new = logged.insert(text.into());
    if is_new {
        log::warn!("{text}");
    }
    is_new
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_warnings_are_logged_once() {
        assert!(warn_of_each_text("the test's own warning"));
        assert!(!warn_of_each_text("the test's own warning"));
        assert!(warn_of_each_text("another warning of the test"));
    }
}
