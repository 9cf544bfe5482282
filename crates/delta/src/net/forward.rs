//! The computation of one call of a layer.

use std::ops::Range;

use candle_core::{Module, Result, Tensor};

use super::GatedDeltaNet;
use super::conv::{convolve, convolve_with_state, taps_of};
use super::conv_cuda::Convolved;
use super::gates::{DecayParameters, Gates};
use super::input::{CheckedInput, DeltaInput};
use super::projections::Projections;
use crate::rule::{DeltaOptions, gated_delta_rule, gated_delta_rule_varlen};
use candle_attention_core::PackedSequences;
use candle_attention_core::internal::NewTokens;
use candle_attention_modules::base::{part, reshape_linked, transpose_linked};
use candle_attention_modules::linear::PackedProjection;

/// The epsilon that every model adds to the sum of squares of a query or a key.
const QK_EPS: f64 = 1e-6;

/// Forward pass.
impl GatedDeltaNet {
    /// Computes the layer over inputs (B, T, E), or (T, E) for one sequence. The output has the input's shape.
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_with(xs)
    }

    /// Computes the layer with a cache, padding, or packed sequences, over inputs (B, T, E), or (T, E) for one
    /// sequence. The output has the input's shape.
    ///
    /// # Errors
    /// For an input whose shape, dtype or device does not fit the layer, for padding that does not fit the input, for
    /// packed sequences that do not fit it or come with a cache or padding, for the cache of a layer or batch with
    /// other shapes, and as [`gated_delta_rule`].
    pub fn forward_with<'a>(&self, input: impl Into<DeltaInput<'a>>) -> Result<Tensor> {
        let cfg = &self.config;
        let mut input = input.into();
        let CheckedInput { xs, tokens } = input.check(cfg, self.dtype, self.out.device())?;
        let (b, t, _) = xs.dims3()?;
        let h = cfg.num_value_heads();
        let h_k = cfg.num_key_heads();
        let d_k = cfg.key_head_dim();
        let d_v = cfg.value_head_dim();
        let channels = cfg.conv_channels();
        let conv_shape = [b, cfg.conv_kernel_dim() - 1, channels.count()];
        let cached = match &input.cache {
            Some(cache) => cache.state_for_call(&conv_shape, &[b, h, d_k, d_v], &xs)?,
            None => None,
        };
        let (conv_state, initial_states) = match cached {
            Some(state) => (state.conv_inputs.clone(), Some(state.head_states.clone())),
            None => (Tensor::zeros(&conv_shape, xs.dtype(), xs.device())?, None),
        };

        let projected = self.project(&xs)?;
        let tokens_of_state = input.cache.is_some().then_some(&tokens);
        let convolution =
            Convolution { taps: self.taps()?, state: conv_state, packed: input.packed, tokens: tokens_of_state };
        let by_head =
            |rows: &Tensor| if input.packed.is_some() { rows.squeeze(0) } else { transpose_linked(rows, 1, 2) };
        let convolved_q = convolution.apply(&projected.q, channels.q)?;
        let convolved_k = convolution.apply(&projected.k, channels.k)?;
        let convolved_v = convolution.apply(&projected.v, channels.v)?;
        let next_conv_state = joined_state([&convolved_q, &convolved_k, &convolved_v])?;
        let q = by_head(&reshape_linked(&convolved_q.ys, (b, t, h_k, d_k))?)?;
        let k = by_head(&reshape_linked(&convolved_k.ys, (b, t, h_k, d_k))?)?;
        let v = by_head(&reshape_linked(&convolved_v.ys, (b, t, h, d_v))?)?;
        // Padding neither decays a state nor writes to it.
        let gates = self.gates(&projected)?;
        let beta = by_head(&tokens.without_padding(gates.beta)?)?;
        let decay = by_head(&tokens.without_padding(gates.decay)?)?;
        let options = DeltaOptions::default().with_qk_norm(QK_EPS).with_backend(input.backend);
        let (ys, states) = match input.packed {
            Some(sequences) => {
                let (ys, states) =
                    gated_delta_rule_varlen(&q, &k, &v, Some(&decay), Some(&beta), None, sequences, &options)?;
                (ys.unsqueeze(0)?, states)
            }
            None => {
                let initial_states = initial_states.as_ref();
                let (ys, states) = gated_delta_rule(&q, &k, &v, Some(&decay), Some(&beta), initial_states, &options)?;
                (ys.transpose(1, 2)?, states)
            }
        };

        let gate = match &self.gate_up {
            Some(gate_up) => gate_up.forward(&projected.gate)?,
            None => projected.gate,
        };
        let gate = reshape_linked(&gate, (b, t, h, d_v))?;
        let normed = self.norm.forward_gated(&ys, &gate, cfg.gate_activation())?;
        let residual = input.residual.map(|residual| residual.reshape(xs.shape())).transpose()?;
        let heads = self.out_order.reorder_from_grouped(&reshape_linked(&normed, (b, t, h * d_v))?, 2)?;
        let output = self.out.product(&heads, 0..cfg.embed_dim(), residual.as_ref())?;
        if let (Some(cache), Some(next_conv_state)) = (&mut input.cache, &next_conv_state) {
            cache.advance(tokens.ends().collect(), next_conv_state, &states)?;
        }
        output.reshape(input.xs.shape())
    }

    /// Returns the projections of inputs (B, T, E).
    fn project(&self, xs: &Tensor) -> Result<Projections<Tensor>> {
        Projections::from_vec(PackedProjection::project(&self.projections.all(), xs)?)
    }

    /// Returns the taps (K, C) of the convolutions, with the present values of variables.
    fn taps(&self) -> Result<Tensor> {
        match &self.taps {
            Some(taps) => Ok(taps.clone()),
            None => taps_of(&self.convolution),
        }
    }

    /// Returns the decays and betas of a call from their projections.
    fn gates(&self, projected: &Projections<Tensor>) -> Result<Gates> {
        let full_rank = match &self.decay_up {
            Some(decay_up) => &decay_up.forward(&projected.decay)?,
            None => &projected.decay,
        };
        let parameters = match &self.decay_parameters {
            Some(parameters) => parameters,
            None => &DecayParameters::new(&self.parameters)?,
        };
        Gates::new(&self.config, parameters, &projected.beta, full_rank)
    }
}

impl Module for GatedDeltaNet {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_with(xs)
    }
}

/// The convolution of one call.
struct Convolution<'a> {
    /// (K, C).
    taps: Tensor,
    /// The last inputs of earlier calls, (B, K - 1, C).
    state: Tensor,
    packed: Option<&'a PackedSequences>,
    /// The tokens of the call, if a cache stores their last inputs.
    tokens: Option<&'a NewTokens>,
}

impl Convolution<'_> {
    /// Convolves some of the channels, (B, T, channels).
    fn apply(&self, xs: &Tensor, channels: Range<usize>) -> Result<Convolved> {
        let (taps, state) = (part(&self.taps, 1, channels.clone())?, part(&self.state, 2, channels)?);
        let Some(tokens) = self.tokens else {
            return Ok(Convolved { ys: convolve(&taps, xs, &state, self.packed)?, next_state: None });
        };
        convolve_with_state(&taps, xs, &state, tokens)
    }
}

/// Returns the last inputs of all channels, (B, K - 1, C), if there is a cache.
fn joined_state(convolved: [&Convolved; 3]) -> Result<Option<Tensor>> {
    let states: Vec<_> = convolved.into_iter().filter_map(|channels| channels.next_state.as_ref()).collect();
    if states.is_empty() { Ok(None) } else { Tensor::cat(&states, 2).map(Some) }
}
