//! The configs of the round trips, and which of them a layout can hold.

use candle_attention::weights::Storage;
use candle_attention::{MultiHeadAttentionConfig, QkNorm, QkNormKind, QkNormScope, WeightLayout};

/// What a config says, apart from the type that is tested.
#[derive(Debug, Clone, Copy, Default)]
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
#[derive(Debug, Clone, Copy, Default)]
pub enum Extra {
    #[default]
    Nothing,
    Causal,
    NormAndSinks,
    NormOfProjection,
    LearnedKey,
}

pub const EMBED_DIM: usize = 8;
pub const CONTEXT_LENGTH: usize = 5;

const EXTRAS: [Extra; 5] =
    [Extra::Nothing, Extra::Causal, Extra::NormAndSinks, Extra::NormOfProjection, Extra::LearnedKey];
/// Query heads, key heads, width of a head.
const HEADS: [(usize, usize, usize); 5] = [(1, 1, 8), (4, 4, 2), (4, 2, 2), (4, 1, 2), (2, 2, 3)];
/// Key and value sizes.
const INPUTS: [(usize, usize); 4] = [(8, 8), (6, 6), (8, 3), (6, 8)];
const BIASES: [[bool; 4]; 6] = [
    [false, false, false, false],
    [true, true, true, true],
    [true, true, true, false],
    [false, false, false, true],
    [true, false, true, true],
    [true, false, false, false],
];

/// Every combination of the shapes and biases; the extras take turns.
pub fn grid() -> Vec<Facts> {
    let mut all = Vec::new();
    for n in 0..HEADS.len() * 2 * INPUTS.len() * 3 * BIASES.len() {
        let (num_heads, num_kv_heads, head_dim) = HEADS[n / 144];
        let value_head_dim = [head_dim, 5][n / 72 % 2];
        let (key_size, value_size) = INPUTS[n / 18 % 4];
        let (out_dim, biases) = ([None, Some(8), Some(7)][n / 6 % 3], BIASES[n % 6]);
        if out_dim.is_some() || !biases[3] {
            let extra = EXTRAS[all.len() % EXTRAS.len()];
            let sizes =
                Facts { num_heads, num_kv_heads, head_dim, value_head_dim, key_size, value_size, ..Facts::default() };
            all.push(Facts { out_dim, biases, extra, ..sizes });
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
