//! The environment variables that turn the kernels for GPUs and their checks off.

use std::env;
use std::ffi::{OsStr, OsString};
use std::sync::OnceLock;

use crate::warnings::warn_of_each_text;

/// The switch of the checks of kernels at their first use.
pub static FIRST_USE_CHECKS: Switch = Switch::new("CANDLE_ATTENTION_FIRST_USE_CHECKS");

/// An environment variable that turns a part off if it is `0`. It is read once.
#[derive(Debug)]
pub struct Switch {
    variable: &'static str,
    is_on: OnceLock<bool>,
}

impl Switch {
    /// Makes the switch of a variable.
    pub const fn new(variable: &'static str) -> Self {
        Self { variable, is_on: OnceLock::new() }
    }

    /// Returns whether the part is on.
    pub fn is_on(&self) -> bool {
        *self.is_on.get_or_init(|| is_on(self.variable, env::var_os(self.variable)))
    }

    /// Returns that the variable turns `part` off, if it does: the reason why the part does not run.
    pub fn reason_against(&self, part: &str) -> Option<String> {
        (!self.is_on()).then(|| format!("the environment variable {} is 0, which turns {part} off", self.variable))
    }
}

/// Returns whether a variable has its part turned on. Other values than 0 and 1 are logged, and count as 1.
fn is_on(variable: &str, value: Option<OsString>) -> bool {
    match value.as_deref().and_then(OsStr::to_str) {
        Some("0") => false,
        Some("" | "1") => true,
        None if value.is_none() => true,
        _ => {
            let found = value.unwrap_or_default();
            warn_of_each_text(&format!("{variable} is {found:?}, expected 0 or 1: it counts as 1"));
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switch_of_zero_is_off_and_every_other_value_is_on() {
        let is_on_for = |value: Option<&str>| is_on("VARIABLE", value.map(OsString::from));
        assert!(!is_on_for(Some("0")));
        for value in [None, Some(""), Some("1"), Some("off"), Some("00")] {
            assert!(is_on_for(value), "{value:?}");
        }
    }
}
