//! Where the tokens of a call stand, and what a layer adds to its scores by that.

use candle_core::{Result, Tensor, bail};

use super::{AttentionInput, MultiHeadAttention};
use crate::AttentionMask;
use crate::cache::NewTokens;
use crate::position::{Alibi, Positions};
use crate::sdpa::accumulation_dtype;

/// Where the tokens of a call stand.
pub(super) struct CallPositions {
    pub queries: Positions,
    /// Those that the call brings; `None` where they are the queries'.
    pub keys: Option<Positions>,
    /// Those of the calls before too; `None` where there are none.
    cached: Option<Positions>,
}

impl MultiHeadAttention {
    /// `None` for a layer that has no use for positions; their shape is checked all the same.
    pub(super) fn positions(
        &self,
        input: &AttentionInput,
        (b, t_q, t_kv): (usize, usize, usize),
        new_tokens: Option<&NewTokens>,
    ) -> Result<Option<CallPositions>> {
        let given =
            |name, given: Option<&Tensor>, t| given.map(|given| Positions::from_tensor(name, given, b, t)).transpose();
        let queries = given("positions", input.positions, t_q)?;
        let keys = given("key positions", input.key_positions, t_kv)?;
        if keys.is_some() && !input.is_cross() {
            bail!("[multi_head_attention] key positions are given, but the keys are the queries")
        }
        let adds_bias = matches!(self.alibi, Some(Alibi::Falcon(_))) || self.relative_bias.is_some();
        if self.rotary.is_none() && !adds_bias {
            return Ok(None);
        }
        let or_default = |given: Option<Positions>, t| given.map_or_else(|| Positions::starting_at(&[0], t), Ok);
        let queries = match (queries, new_tokens) {
            (None, Some(new_tokens)) => new_tokens.positions()?,
            (given, _) => or_default(given, t_q)?,
        };
        let keys = input.is_cross().then(|| or_default(keys, t_kv)).transpose()?;
        let length = keys.iter().map(Positions::length).fold(queries.length(), usize::max);
        if let Some(context_length) = self.config.context_length().filter(|&most| length > most) {
            bail!("[multi_head_attention] position {} is not below the context length {context_length}", length - 1)
        }
        let all_cached = |new: &NewTokens| Positions::starting_at(&[0], new.longest());
        let cached = new_tokens.filter(|_| adds_bias).map(all_cached).transpose()?;
        Ok(Some(CallPositions { queries, keys, cached }))
    }

    /// The mask with the biases that follow from positions, apart from slopes, which attention itself works with.
    pub(super) fn with_position_biases(&self, mut mask: AttentionMask, at: &CallPositions) -> Result<AttentionMask> {
        let keys = at.cached.as_ref().or(at.keys.as_ref()).unwrap_or(&at.queries);
        if let Some(Alibi::Falcon(bias)) = &self.alibi {
            mask = mask.with_bias(&bias.at(keys, accumulation_dtype(self.projections.dtype()))?);
        }
        if let Some(bias) = &self.relative_bias {
            mask = mask.with_bias(&bias.between(&at.queries, keys)?);
        }
        Ok(mask)
    }
}
