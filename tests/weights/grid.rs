//! The configs of the round trips, and which of them a layout can hold.

use candle_attention::weights::Storage;
use candle_attention::{MultiHeadAttentionConfig, QkNorm, QkNormKind, QkNormScope, WeightLayout};

/// What a config says, apart from the type that is tested.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub value_head_dim: usize,
    /// `None` without an output projection.
    pub out_dim: Option<usize>,
    /// Query, key, value, output.
    pub biases: [bool; 4],
    pub key_size: usize,
    pub value_size: usize,
    pub extra: Extra,
}

/// What is beside the projections, under the same names in every layout.
#[derive(Debug, Clone, Copy)]
pub enum Extra {
    Nothing,
    Causal,
    NormAndSinks,
    NormOfProjection,
    LearnedKey,
}

pub const EMBED_DIM: usize = 8;
pub const CONTEXT_LENGTH: usize = 5;

/// Every combination of the shapes and biases; the extras take turns.
pub fn grid() -> Vec<Facts> {
    let extras = [Extra::Nothing, Extra::Causal, Extra::NormAndSinks, Extra::NormOfProjection, Extra::LearnedKey];
    let mut all = Vec::new();
    for (num_heads, num_kv_heads, head_dim) in [(1, 1, 8), (4, 4, 2), (4, 2, 2), (4, 1, 2), (2, 2, 3)] {
        for value_head_dim in [head_dim, 5] {
            for (key_size, value_size) in [(8, 8), (6, 6), (8, 3), (6, 8)] {
                for out_dim in [None, Some(8), Some(7)] {
                    for biases in [
                        [false, false, false, false],
                        [true, true, true, true],
                        [true, true, true, false],
                        [false, false, false, true],
                        [true, false, true, true],
                        [true, false, false, false],
                    ] {
                        if out_dim.is_none() && biases[3] {
                            continue;
                        }
                        let extra = extras[all.len() % extras.len()];
                        all.push(Facts {
                            num_heads,
                            num_kv_heads,
                            head_dim,
                            value_head_dim,
                            out_dim,
                            biases,
                            key_size,
                            value_size,
                            extra,
                        });
                    }
                }
            }
        }
    }
    all
}

impl Facts {
    pub fn config(&self) -> MultiHeadAttentionConfig {
        let mut cfg = MultiHeadAttentionConfig::new(EMBED_DIM, self.num_heads)
            .with_num_kv_heads(self.num_kv_heads)
            .with_head_dim(self.head_dim)
            .with_value_head_dim(self.value_head_dim)
            .with_key_size(self.key_size)
            .with_value_size(self.value_size)
            .with_q_bias(self.biases[0])
            .with_k_bias(self.biases[1])
            .with_v_bias(self.biases[2])
            .with_out_bias(self.biases[3]);
        cfg = match self.out_dim {
            Some(out_dim) => cfg.with_out_dim(out_dim),
            None => cfg.with_out_proj(false),
        };
        let norm = |kind, scope| QkNorm { kind, scope, eps: 1e-5 };
        match self.extra {
            Extra::Nothing => cfg,
            Extra::Causal => cfg.with_causal(true).with_context_length(CONTEXT_LENGTH),
            Extra::NormAndSinks => cfg.with_qk_norm(norm(QkNormKind::Rms, QkNormScope::PerHead)).with_sinks(true),
            Extra::NormOfProjection => cfg.with_qk_norm(norm(QkNormKind::Layer, QkNormScope::Projection)),
            Extra::LearnedKey => cfg.with_bias_kv(true),
        }
    }

    /// Whether a layout has a place for all of the layer's parameters: written from what the modules are, not from the
    /// code that loads them.
    pub fn fit(&self, layout: WeightLayout) -> bool {
        let one_input = self.key_size == EMBED_DIM && self.value_size == EMBED_DIM;
        let [q, k, v, o] = self.biases;
        let each_head_has_keys = self.num_heads == self.num_kv_heads;
        match layout {
            WeightLayout::Raw(..) => !(q || k || v || o),
            WeightLayout::StackedHeads(_, Storage::Linear) => self.out_dim.is_none() && each_head_has_keys,
            WeightLayout::StackedHeads(..) => self.out_dim.is_none() && each_head_has_keys && !(q || k || v),
            // One bias flag, one width for all heads, and an output as wide as the queries.
            WeightLayout::Torch => {
                each_head_has_keys
                    && self.out_dim == Some(EMBED_DIM)
                    && self.num_heads * self.head_dim == EMBED_DIM
                    && self.value_head_dim == self.head_dim
                    && [q, k, v].iter().all(|&bias| bias == o)
            }
            // One matrix reads one input, and has one bias.
            WeightLayout::Conv1d | WeightLayout::Packed(..) => one_input && q == k && q == v,
            // Four linear layers.
            _ => true,
        }
    }
}
