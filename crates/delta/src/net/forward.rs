//! The computation of one call of a layer.

use candle_core::{Module, Result, Tensor};

use super::GatedDeltaNet;
use super::conv::taps_of;
use super::drafts::RecordedCall;
use super::gates::{DecayParameters, Gates};
use super::input::{CheckedInput, DeltaInput, PooledTokens};
use super::projections::Projections;
use super::recurrence::{Recurred, Recurrence, RecurrentInputs};
use candle_attention_core::Backend;
use candle_attention_modules::base::reshape_linked;
use candle_attention_modules::linear::PackedProjection;

/// Forward pass.
impl GatedDeltaNet {
    /// Computes the layer over inputs (B, T, E), or (T, E) for one sequence. The output has the input's shape.
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_with(xs)
    }

    /// Computes the layer with a cache, padding, packed sequences or pages, over inputs (B, T, E), or (T, E) for one
    /// sequence. The output has the input's shape.
    ///
    /// # Errors
    /// For an input whose shape, dtype or device does not fit the layer, for padding that does not fit the input, for
    /// packed sequences that do not fit it or come with a cache or padding, for pages that come with another of these
    /// or whose pool is of another table or layer, for the cache of a layer or batch with other shapes, and as [`gated_delta_rule`](crate::gated_delta_rule).
    pub fn forward_with<'a>(&self, input: impl Into<DeltaInput<'a>>) -> Result<Tensor> {
        let cfg = &self.config;
        let mut input = input.into();
        let CheckedInput { xs, tokens, trees } = input.check(cfg, self.dtype, self.out.device())?;
        let (b, t, _) = xs.dims3()?;
        let h = cfg.num_value_heads();
        let d_v = cfg.value_head_dim();
        let conv_shape = [b, cfg.conv_kernel_dim() - 1, cfg.conv_channels().count()];
        let head_shape = [b, h, cfg.key_head_dim(), d_v];
        if let Some(PooledTokens { pool, step }) = input.pages {
            pool.check(step, &conv_shape, &head_shape)?;
        }
        let before = match &input.cache {
            Some(cache) => cache.state_for_call(&conv_shape, &head_shape, &xs)?.cloned(),
            None => None,
        };

        let projected = self.project(&xs)?;
        // Padding neither decays a state nor writes to it.
        let gates = self.gates(&projected)?;
        let inputs = RecurrentInputs {
            q: projected.q,
            k: projected.k,
            v: projected.v,
            beta: tokens.without_padding(gates.beta)?,
            decay: tokens.without_padding(gates.decay)?,
        };
        let recurrence = self.recurrence(input.backend)?;
        let tokens_of_state = input.cache.is_some().then_some(&tokens);
        let Recurred { ys, conv_inputs, head_states } = match (input.pages, input.packed, trees) {
            (Some(PooledTokens { pool, step }), _, _) => recurrence.run_paged(&inputs, pool, step, input.trees)?,
            (None, Some(sequences), _) => recurrence.run_packed(&inputs, sequences)?,
            (None, None, Some(trees)) => recurrence.run_trees(&inputs, before.as_ref(), trees, &tokens)?,
            (None, None, None) => recurrence.run(&inputs, before.as_ref(), tokens_of_state)?,
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
        if let (Some(cache), Some(conv_inputs)) = (&mut input.cache, &conv_inputs) {
            let call = RecordedCall { recurrence: &recurrence, before, inputs: &inputs, tokens: &tokens, trees };
            cache.advance(&call, conv_inputs, &head_states)?;
        }
        output.reshape(input.xs.shape())
    }

    /// Returns the parts of the layer on which its states depend.
    fn recurrence(&self, backend: Backend) -> Result<Recurrence> {
        let cfg = &self.config;
        Ok(Recurrence {
            taps: self.taps()?,
            channels: cfg.conv_channels(),
            key_heads: cfg.num_key_heads(),
            value_heads: cfg.num_value_heads(),
            key_head_dim: cfg.key_head_dim(),
            value_head_dim: cfg.value_head_dim(),
            backend,
        })
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
