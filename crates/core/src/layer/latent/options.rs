//! The options of latent attention that few models have: a window, a gate of the attention output, sinks, factors on
//! latents and queries.

use super::config::{LatentScales, MultiHeadLatentAttentionConfig};
use candle_attention_modules::gate::OutputGate;

impl MultiHeadLatentAttentionConfig {
    /// Masks the keys that are `window` positions or more before a query (Dots 3). The default is none.
    pub fn with_window(mut self, window: impl Into<Option<usize>>) -> Self {
        self.window = window.into();
        self
    }

    /// Sets a gate on the attention output of each head, before the output projection. The default is none.
    ///
    /// A gate with its own projection reads the input of the layer (`gate_proj` in Hunyuan 4, `g_proj` in Dots 3). One
    /// in the projection of the queries reads what these are projected from; that projection is then `q_gate_proj`, of
    /// the compressed queries after and before their norm (A.X K2).
    pub fn with_output_gate(mut self, output_gate: impl Into<Option<OutputGate>>) -> Self {
        self.output_gate = output_gate.into();
        self
    }

    /// Sets factors on the compressed queries and on the latent (Dots 3). The default is none.
    pub fn with_latent_scales(mut self, latent_scales: impl Into<Option<LatentScales>>) -> Self {
        self.latent_scales = latent_scales.into();
        self
    }

    /// Sets whether each head has a sink, a learned logit in the softmax (`sinks`, Hunyuan 4). The default is false.
    pub fn with_sinks(mut self, sinks: bool) -> Self {
        self.sinks = sinks;
        self
    }

    /// Sets whether the shared key is normalised before it rotates (`k_rope_only_layernorm`, Dots 3). The default is
    /// false.
    pub fn with_shared_key_norm(mut self, shared_key_norm: bool) -> Self {
        self.shared_key_norm = shared_key_norm;
        self
    }

    /// Sets whether the queries of each head are multiplied by `scale · ln(position + 1) + bias`, where a model learns
    /// both numbers (`softmax_scaling`, Mistral Large 4). Positions count from 0 in each sequence. The default is
    /// false.
    pub fn with_learned_temperature(mut self, learned_temperature: bool) -> Self {
        self.learned_temperature = learned_temperature;
        self
    }

    /// Sets whether queries attend to the keys that the indexer of an earlier layer chose for them (`indexer_types` in
    /// GLM-5 and Hunyuan 4): each call is then given these
    /// ([`AttentionInput::with_chosen_keys`](crate::AttentionInput::with_chosen_keys)). The default is false.
    pub fn with_shared_choice(mut self, shared_choice: bool) -> Self {
        self.shared_choice = shared_choice;
        self
    }

    /// Returns the number of keys that a query attends to, with its own, if there is a window.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Returns the gate on the attention output, if there is one.
    pub fn output_gate(&self) -> Option<OutputGate> {
        self.output_gate
    }

    /// Returns the factors on the compressed queries and on the latent, if there are some.
    pub fn latent_scales(&self) -> Option<LatentScales> {
        self.latent_scales
    }

    /// Returns whether each head has a sink.
    pub fn sinks(&self) -> bool {
        self.sinks
    }

    /// Returns whether the shared key is normalised.
    pub fn shared_key_norm(&self) -> bool {
        self.shared_key_norm
    }

    /// Returns whether queries attend to the keys that an earlier layer's indexer chose.
    pub fn shared_choice(&self) -> bool {
        self.shared_choice
    }

    /// Returns whether queries are multiplied by learned factors of their positions.
    pub fn learned_temperature(&self) -> bool {
        self.learned_temperature
    }
}
