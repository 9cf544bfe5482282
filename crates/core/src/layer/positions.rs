//! The positions of a call's queries and keys.

use candle_core::{Result, Tensor, bail};

use super::checks::Inputs;
use super::{AttentionInput, MultiHeadAttention};
use crate::position::{AxisPositions, Positions, RopeConfig};
use crate::sdpa::PackedSequences;

/// The positions of a call's tokens.
pub(super) struct CallPositions {
    pub queries: Positions,
    /// Those of the call's own keys; `None` where they are the queries'.
    pub keys: Option<Positions>,
    /// Those of the calls before too; `None` where there are none.
    pub cached: Option<Positions>,
    /// Those by which queries and keys are rotated, where these are on several axes.
    pub axes: Option<AxisPositions>,
}

impl CallPositions {
    /// Those of all keys that queries may see.
    pub fn all_keys(&self) -> &Positions {
        self.cached.as_ref().or(self.keys.as_ref()).unwrap_or(&self.queries)
    }
}

impl MultiHeadAttention {
    /// `None` for a layer that has no use for positions; their shape is checked all the same.
    pub(super) fn positions(&self, input: &AttentionInput, inputs: &Inputs) -> Result<Option<CallPositions>> {
        let Inputs { b, t_q, t_kv, .. } = *inputs;
        let new_tokens = inputs.new_tokens.as_ref();
        let queries = if new_tokens.is_some() { None } else { input.given_positions((b, t_q))? };
        let keys = input.key_positions.map(|given| Positions::from_tensor("key positions", given, b, t_kv));
        let keys = keys.transpose()?;
        if keys.is_some() && !input.is_cross() {
            bail!("[multi_head_attention] key positions are given, but the keys are the queries")
        }
        let axes = self.axis_positions(input, inputs)?;
        let terms_take_positions = self.terms().any(|term| term.takes_positions());
        if self.rotary.is_none() && self.config.query_scaling().is_none() && !terms_take_positions {
            return Ok(None);
        }
        let queries = match (queries, new_tokens) {
            (None, Some(new_tokens)) => new_tokens.positions()?,
            (Some(given), _) => given,
            (None, None) => input.default_positions(PackedSequences::queries, t_q)?,
        };
        let or_default = || input.default_positions(PackedSequences::keys, t_kv);
        let keys = input.is_cross().then(|| keys.map_or_else(or_default, Ok)).transpose()?;
        let length = keys.iter().map(Positions::length).fold(queries.length(), usize::max);
        if let Some(context_length) = self.config.context_length().filter(|&most| length > most) {
            bail!("[multi_head_attention] position {} is not below the context length {context_length}", length - 1)
        }
        let cached = if terms_take_positions { input.cached_positions(new_tokens)? } else { None };
        Ok(Some(CallPositions { queries, keys, cached, axes }))
    }

    fn axis_positions(&self, input: &AttentionInput, inputs: &Inputs) -> Result<Option<AxisPositions>> {
        let given = |given: &Tensor, axes: usize| AxisPositions::from_tensor(given, axes, inputs.b, inputs.t_q);
        match (self.config.rope().and_then(RopeConfig::axes), input.axis_positions) {
            (None, None) => Ok(None),
            (None, Some(_)) => {
                bail!("[multi_head_attention] axis positions were given, but the config's rope has no axes")
            }
            (Some(_), Some(_)) if input.is_cross() => {
                bail!("[multi_head_attention] axis positions were given beside keys, expected self-attention")
            }
            (Some(axes), Some(positions)) => given(positions, axes.sections().len()).map(Some),
            (Some(axes), None) if axes.is_axial() => bail!(
                "[multi_head_attention] rotary positions are on {} axes, expected a call `with_axis_positions`",
                axes.sections().len()
            ),
            (Some(_), None) => Ok(None),
        }
    }
}
