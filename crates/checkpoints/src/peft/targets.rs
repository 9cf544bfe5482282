//! Names of modules, and regular expressions for them, as PEFT compares them.

use candle_core::{Error, Result, bail};
use regex_lite::Regex;
use serde::Deserialize;

use super::OP;
use super::names::is_end;

/// PEFT's name for all linear layers but that of the head.
const ALL_LINEAR: &str = "all-linear";

/// A choice of modules.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum Modules {
    /// The last parts of the names of modules, such as `q_proj` or `self_attn.q_proj`.
    Names(Vec<String>),
    /// A regular expression for whole names, or `all-linear`.
    Pattern(WholeNames),
}

/// A regular expression for whole names, compiled once.
#[derive(Debug, Clone, Deserialize)]
#[serde(from = "String")]
pub(super) struct WholeNames {
    text: String,
    /// The expression, or the reason why it is not supported.
    compiled: std::result::Result<NamePattern, String>,
}

impl From<String> for WholeNames {
    fn from(text: String) -> Self {
        Self { compiled: NamePattern::new(&text).map_err(|error| error.to_string()), text }
    }
}

impl Modules {
    /// Returns whether a module is chosen.
    ///
    /// # Errors
    /// For a regular expression that is not supported.
    pub fn include(&self, module: &str) -> Result<bool> {
        match self {
            Self::Names(names) => Ok(names.iter().any(|name| is_end(module, name))),
            Self::Pattern(_) if self.are_all_linear() => Ok(true),
            Self::Pattern(WholeNames { compiled: Ok(pattern), .. }) => Ok(pattern.matches(module)),
            Self::Pattern(WholeNames { compiled: Err(error), .. }) => Err(Error::msg(error)),
        }
    }

    /// Returns whether all linear layers are chosen, which names do not tell from other modules.
    pub fn are_all_linear(&self) -> bool {
        matches!(self, Self::Pattern(pattern) if pattern.text.eq_ignore_ascii_case(ALL_LINEAR))
    }

    /// Returns the names, or the pattern as one name.
    pub fn names(&self) -> &[String] {
        match self {
            Self::Names(names) => names,
            Self::Pattern(pattern) => std::slice::from_ref(&pattern.text),
        }
    }
}

/// A regular expression that has to match a whole name.
#[derive(Debug, Clone)]
pub(super) struct NamePattern(Regex);

impl NamePattern {
    /// Returns the regular expression for whole names.
    ///
    /// # Errors
    /// For an expression that is not valid or not supported, such as one that looks ahead.
    pub fn new(pattern: &str) -> Result<Self> {
        match Regex::new(&format!("^(?:{pattern})$")) {
            Ok(regex) => Ok(Self(regex)),
            Err(error) => bail!(
                "[{OP}] the regular expression {pattern:?} is not supported ({error}), expected one without \
                 look-around and backreferences, or a list of names"
            ),
        }
    }

    /// Returns the regular expression for the ends of names.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_module(pattern: &str) -> Result<Self> {
        Self::new(&format!("(?:.*\\.)?(?:{pattern})"))
    }

    /// Returns whether a whole name matches.
    pub fn matches(&self, module: &str) -> bool {
        self.0.is_match(module)
    }
}
