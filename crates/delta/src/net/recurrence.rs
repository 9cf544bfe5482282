//! The recurrence of a layer: the convolutions and the rule, from the projections of tokens to the states after them.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::conv::{convolve, convolve_with_state};
use super::conv_cuda::Convolved;
use super::projections::ConvChannels;
use super::state::CachedState;
use crate::rule::{DeltaOptions, gated_delta_rule, gated_delta_rule_varlen};
use candle_attention_core::internal::NewTokens;
use candle_attention_core::{Backend, PackedSequences};
use candle_attention_modules::base::{part, reshape_linked, transpose_linked};

/// The epsilon that every model adds to the sum of squares of a query or a key.
const QK_EPS: f64 = 1e-6;

/// The parts of a layer on which its states depend, besides the projections.
#[derive(Debug, Clone)]
pub(super) struct Recurrence {
    /// The taps (K, C) of the convolutions.
    pub taps: Tensor,
    pub channels: ConvChannels,
    /// H_k.
    pub key_heads: usize,
    /// H.
    pub value_heads: usize,
    /// D_k.
    pub key_head_dim: usize,
    /// D_v.
    pub value_head_dim: usize,
    pub backend: Backend,
}

/// The projections of tokens (B, T, ..) that the recurrence reads; at padding, betas and decays are 0.
#[derive(Debug, Clone)]
pub(super) struct RecurrentInputs {
    /// The inputs of the convolutions, (B, T, channels).
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    /// (B, T, H).
    pub beta: Tensor,
    /// (B, T, H), or (B, T, H, D_k) of channels.
    pub decay: Tensor,
}

/// The results of the recurrence.
pub(super) struct Recurred {
    /// The outputs of the rule, (B, T, H, D_v).
    pub ys: Tensor,
    /// The last inputs of the convolutions, (B, K - 1, C), if they were requested.
    pub conv_inputs: Option<Tensor>,
    /// The states of the heads, (B, H, D_k, D_v), or of each packed sequence, or those in a pool.
    pub head_states: Tensor,
}

impl Recurrence {
    /// Returns the state before the first token of `b` sequences.
    pub fn initial_state(&self, b: usize, inputs: &RecurrentInputs) -> Result<CachedState> {
        let device = inputs.q.device();
        let conv_shape = (b, self.taps.dim(0)? - 1, self.channels.count());
        let head_shape = (b, self.value_heads, self.key_head_dim, self.value_head_dim);
        Ok(CachedState {
            lens: vec![0; b],
            is_tree: vec![false; b],
            conv_inputs: Tensor::zeros(conv_shape, inputs.q.dtype(), device)?,
            head_states: Tensor::zeros(head_shape, inputs.beta.dtype(), device)?,
        })
    }

    /// Computes the recurrence over sequences that begin after a state, or after zeros. `tokens` says which of the
    /// inputs are tokens, if the last inputs of the convolutions are requested.
    pub fn run(
        &self,
        inputs: &RecurrentInputs,
        before: Option<&CachedState>,
        tokens: Option<&NewTokens>,
    ) -> Result<Recurred> {
        let (b, t, _) = inputs.q.dims3()?;
        let convolved = self.convolve(inputs, before, None, tokens)?;
        let by_head = |rows: &Tensor| transpose_linked(rows, 1, 2);
        let [q, k, v] = self.heads(&convolved, b, t)?;
        let (ys, head_states) = gated_delta_rule(
            &by_head(&q)?,
            &by_head(&k)?,
            &by_head(&v)?,
            Some(&by_head(&inputs.decay)?),
            Some(&by_head(&inputs.beta)?),
            before.map(|state| &state.head_states),
            &self.options(),
        )?;
        Ok(Recurred { ys: ys.transpose(1, 2)?, conv_inputs: joined_state(&convolved)?, head_states })
    }

    /// Computes the recurrence over packed sequences (1, total, ..), which begin after zeros.
    pub fn run_packed(&self, inputs: &RecurrentInputs, sequences: &PackedSequences) -> Result<Recurred> {
        let (b, t, _) = inputs.q.dims3()?;
        let convolved = self.convolve(inputs, None, Some(sequences), None)?;
        let by_token = |rows: &Tensor| rows.squeeze(0);
        let [q, k, v] = self.heads(&convolved, b, t)?;
        let (ys, head_states) = gated_delta_rule_varlen(
            &by_token(&q)?,
            &by_token(&k)?,
            &by_token(&v)?,
            Some(&by_token(&inputs.decay)?),
            Some(&by_token(&inputs.beta)?),
            None,
            sequences,
            &self.options(),
        )?;
        Ok(Recurred { ys: ys.unsqueeze(0)?, conv_inputs: None, head_states })
    }

    fn options(&self) -> DeltaOptions {
        DeltaOptions::default().with_qk_norm(QK_EPS).with_backend(self.backend)
    }

    /// Computes the convolutions of queries, keys and values.
    fn convolve(
        &self,
        inputs: &RecurrentInputs,
        before: Option<&CachedState>,
        packed: Option<&PackedSequences>,
        tokens: Option<&NewTokens>,
    ) -> Result<[Convolved; 3]> {
        let state = match before {
            Some(before) => before.conv_inputs.clone(),
            None => {
                let shape = (inputs.q.dim(0)?, self.taps.dim(0)? - 1, self.channels.count());
                Tensor::zeros(shape, inputs.q.dtype(), inputs.q.device())?
            }
        };
        let apply = |xs: &Tensor, channels: &Range<usize>| -> Result<Convolved> {
            let taps = part(&self.taps, 1, channels.clone())?;
            let own_state = part(&state, 2, channels.clone())?;
            let Some(tokens) = tokens else {
                return Ok(Convolved { ys: convolve(&taps, xs, &own_state, packed)?, next_state: None });
            };
            convolve_with_state(&taps, xs, &own_state, tokens)
        };
        let ConvChannels { q, k, v } = &self.channels;
        Ok([apply(&inputs.q, q)?, apply(&inputs.k, k)?, apply(&inputs.v, v)?])
    }

    /// Returns the convolved queries, keys and values by heads, (B, T, heads, D).
    fn heads(&self, convolved: &[Convolved; 3], b: usize, t: usize) -> Result<[Tensor; 3]> {
        let [q, k, v] = convolved;
        let keys = (b, t, self.key_heads, self.key_head_dim);
        let values = (b, t, self.value_heads, self.value_head_dim);
        Ok([reshape_linked(&q.ys, keys)?, reshape_linked(&k.ys, keys)?, reshape_linked(&v.ys, values)?])
    }
}

/// Returns the last inputs of all channels, (B, K - 1, C), if they were requested.
fn joined_state(convolved: &[Convolved; 3]) -> Result<Option<Tensor>> {
    let states: Vec<_> = convolved.iter().filter_map(|channels| channels.next_state.as_ref()).collect();
    if states.is_empty() { Ok(None) } else { Tensor::cat(&states, 2).map(Some) }
}

impl RecurrentInputs {
    /// Returns the inputs that `change` makes of each tensor.
    pub fn map(&self, mut change: impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            q: change(&self.q)?,
            k: change(&self.k)?,
            v: change(&self.v)?,
            beta: change(&self.beta)?,
            decay: change(&self.decay)?,
        })
    }

    /// Returns the inputs of several sequences (1, T, ..) as one batch (B, T, ..), with zeros after the shorter ones.
    pub fn padded(all: &[&Self]) -> Result<Self> {
        let mut longest = 0;
        for own in all {
            longest = longest.max(own.q.dim(1)?);
        }
        Self::combined(all, |tensors| {
            let rows = tensors.iter().map(|own| own.pad_with_zeros(1, 0, longest - own.dim(1)?));
            Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)?.contiguous()
        })
    }

    /// Returns the inputs of one sequence (1, T, ..), of inputs that follow each other.
    pub fn one_after_the_other(all: &[Self]) -> Result<Self> {
        let all: Vec<_> = all.iter().collect();
        Self::combined(&all, |tensors| Tensor::cat(tensors, 1)?.contiguous())
    }

    /// Combines several inputs to one: each of its tensors is made by `combine` of this tensor of all inputs.
    fn combined(all: &[&Self], combine: impl Fn(&[&Tensor]) -> Result<Tensor>) -> Result<Self> {
        let of = |tensor: fn(&Self) -> &Tensor| {
            let tensors: Vec<_> = all.iter().map(|own| tensor(own)).collect();
            combine(&tensors)
        };
        Ok(Self {
            q: of(|own| &own.q)?,
            k: of(|own| &own.k)?,
            v: of(|own| &own.v)?,
            beta: of(|own| &own.beta)?,
            decay: of(|own| &own.decay)?,
        })
    }

    /// Returns the tensors.
    pub fn all(&self) -> [&Tensor; 5] {
        [&self.q, &self.k, &self.v, &self.beta, &self.decay]
    }
}
