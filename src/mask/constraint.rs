//! The constraints of a mask, and what each leaves a query: the one place that gives them their meaning.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::ValidLens;

/// One thing that hides keys or changes scores. All of a mask's constraints hold together.
#[derive(Debug, Clone)]
pub(super) enum Constraint {
    /// No key after the query's own but those before all prefixes.
    Causal { alignment: Alignment, prefix: Vec<ValidLens> },
    /// `size` keys with the query's own, and all that come later.
    Window { alignment: Alignment, size: usize },
    /// From `left` keys before the query's own to `right` after it.
    Band { alignment: Alignment, left: usize, right: usize },
    /// Keys at and past the length are hidden.
    ValidLens(ValidLens),
    /// Keys before the start are hidden.
    Starts(ValidLens),
    /// Hides nothing; lifts the causal constraint of a layer that the mask is given to.
    Prefix(ValidLens),
    /// Hides nothing; T_kv of the attention mask that lengths were read from.
    Columns(usize),
    /// u8, 0 hides.
    Keep(Tensor),
    /// Added to the scores.
    Bias(Tensor),
    /// A builder whose meaning depends on the order in which masks were joined: an error where the mask is resolved.
    Unclear { builder: &'static str },
}

/// At which key position a query stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alignment {
    /// The last query stands at the last key.
    End,
    /// Query i stands at key i + n.
    Offset(usize),
}

/// Where the queries of a call, and the rows of keys that it reads, stand in one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placement {
    /// The position of query 0; negative where padding stands before the first token.
    pub query: i128,
    /// Which queries are tokens; the others see nothing.
    pub tokens: Range<usize>,
    /// The positions of the keys that are read: row 0 holds the first of them.
    pub keys: Range<usize>,
    /// The positions of the sequence in all.
    pub end: usize,
}

impl Placement {
    /// All queries and keys of a call by itself: the last query stands at the last key.
    pub fn whole(t_q: usize, t_kv: usize) -> Self {
        Self { query: t_kv as i128 - t_q as i128, tokens: 0..t_q, keys: 0..t_kv, end: t_kv }
    }
}

impl Alignment {
    /// Sums of sizes and positions do not overflow in i128.
    pub fn position(self, placement: &Placement, i: usize) -> i128 {
        let first = match self {
            Self::End => placement.query,
            Self::Offset(n) => n as i128,
        };
        first + i as i128
    }
}

impl Constraint {
    /// The key positions that are left to query `i` of sequence `b`.
    pub fn keys(&self, b: usize, i: usize, placement: &Placement) -> Range<i128> {
        const ALL: Range<i128> = i128::MIN..i128::MAX;
        match self {
            Self::Causal { alignment, prefix } => {
                let prefix = prefix.iter().map(|lens| lens.get(b, i) as i128).min().unwrap_or(0);
                ALL.start..(alignment.position(placement, i) + 1).max(prefix)
            }
            Self::Window { alignment, size } => alignment.position(placement, i) + 1 - *size as i128..ALL.end,
            Self::Band { alignment, left, right } => {
                let position = alignment.position(placement, i);
                position - *left as i128..position + *right as i128 + 1
            }
            Self::ValidLens(lens) => ALL.start..lens.get(b, i) as i128,
            Self::Starts(starts) => starts.get(b, i) as i128..ALL.end,
            Self::Prefix(_) | Self::Columns(_) | Self::Keep(_) | Self::Bias(_) | Self::Unclear { .. } => ALL,
        }
    }

    /// Whether [`keys`](Self::keys) may leave out a key.
    pub fn bounds_keys(&self) -> bool {
        !matches!(self, Self::Prefix(_) | Self::Columns(_) | Self::Keep(_) | Self::Bias(_) | Self::Unclear { .. })
    }

    pub fn alignment(&self) -> Option<Alignment> {
        match self {
            &(Self::Causal { alignment, .. } | Self::Window { alignment, .. } | Self::Band { alignment, .. }) => {
                Some(alignment)
            }
            _ => None,
        }
    }

    /// The lengths that it reads, and their name in errors.
    pub fn lens(&self) -> (&'static str, &[ValidLens]) {
        match self {
            Self::ValidLens(lens) => ("valid_lens", std::slice::from_ref(lens)),
            Self::Starts(starts) => ("starts", std::slice::from_ref(starts)),
            Self::Prefix(prefix) => ("prefix", std::slice::from_ref(prefix)),
            Self::Causal { prefix, .. } => ("prefix", prefix),
            _ => ("", &[]),
        }
    }

    /// What is wrong with it for any lengths, and for `t_kv` keys.
    pub fn check(&self, t_kv: usize) -> Result<()> {
        match self {
            Self::Window { size: 0, .. } => {
                bail!("[attention_mask] window is 0, expected at least 1 (the query's own key)")
            }
            Self::Columns(columns) if *columns != t_kv => {
                bail!("[attention_mask] the attention mask has {columns} columns, expected one for each of {t_kv} keys")
            }
            Self::Unclear { builder } => bail!(
                "[attention_mask] {builder} was called on masks that were joined and whose queries stand at different \
                 positions, expected it on one of them before `and`"
            ),
            _ => Ok(()),
        }
    }
}
