//! The configs of the round trips, and the configs that a layout supports.

use candle_attention::weights::Storage;
use candle_attention::{
    GateActivation, GateLayout, GateScope, MultiHeadAttentionConfig, OutputGate, QkNorm, QkNormKind, QkNormScope,
    WeightLayout,
};

pub const EMBED_DIM: usize = 8;
pub const CONTEXT_LENGTH: usize = 5;

/// Query heads, key heads, width of a head.
const HEADS: [(usize, usize, usize); 5] = [(1, 1, 8), (4, 4, 2), (4, 2, 2), (4, 1, 2), (2, 2, 3)];
/// Key and value sizes.
const INPUTS: [(usize, usize); 4] = [(8, 8), (6, 6), (8, 3), (6, 8)];
/// Query, key, value, output.
const BIASES: [[bool; 4]; 6] = [
    [false, false, false, false],
    [true, true, true, true],
    [true, true, true, false],
    [false, false, false, true],
    [true, false, true, true],
    [true, false, false, false],
];

/// Lists every combination of shapes and biases. Other parameters, which have the same names in every layout, take
/// turns.
pub fn grid() -> Vec<MultiHeadAttentionConfig> {
    let mut all = Vec::new();
    for n in 0..HEADS.len() * 2 * INPUTS.len() * 3 * BIASES.len() {
        let (num_heads, num_kv_heads, head_dim) = HEADS[n / 144];
        let (kdim, vdim) = INPUTS[n / 18 % 4];
        let out_dim = [None, Some(8), Some(7)][n / 6 % 3];
        let [q, k, v, o] = BIASES[n % 6];
        let cfg = MultiHeadAttentionConfig::new(EMBED_DIM, num_heads)
            .with_num_kv_heads(num_kv_heads)
            .with_head_dim(head_dim)
            .with_value_head_dim([head_dim, 5][n / 72 % 2])
            .with_kdim(kdim)
            .with_vdim(vdim)
            .with_q_bias(q)
            .with_k_bias(k)
            .with_v_bias(v)
            .with_out_bias(o);
        let cfg = match out_dim {
            Some(out_dim) => cfg.with_out_dim(out_dim),
            None if o => continue,
            None => cfg.with_out_proj(false),
        };
        let norm = |kind, scope| QkNorm { kind, scope, eps: 1e-5 };
        let places =
            [GateLayout::FusedWithQuery, GateLayout::Separate { bias: false }, GateLayout::Separate { bias: true }];
        let gate = OutputGate {
            activation: GateActivation::Sigmoid,
            scope: [GateScope::Elementwise, GateScope::PerHead][n / 7 % 2],
            layout: places[n % 3],
        };
        all.push(match all.len() % 6 {
            0 if n % 4 == 0 => cfg.with_causal(true),
            0 => cfg.with_context_length(CONTEXT_LENGTH),
            1 => cfg.with_causal(true).with_context_length(CONTEXT_LENGTH),
            2 => cfg.with_qk_norm(norm(QkNormKind::Rms, QkNormScope::PerHead)).with_sinks(true),
            3 => cfg.with_qk_norm(norm(QkNormKind::Layer, QkNormScope::Projection)),
            4 => cfg.with_output_gate(gate),
            _ => cfg.with_bias_kv(true),
        });
    }
    all
}

/// Returns whether a layout supports all parameters of a layer. It is written from the definition of the modules, not
/// from the code that loads them.
pub fn fits(cfg: &MultiHeadAttentionConfig, layout: WeightLayout) -> bool {
    let q = cfg.q_bias();
    let k = cfg.k_bias();
    let v = cfg.v_bias();
    let any_bias = q || k || v || cfg.out_bias();
    let gate = cfg.output_gate().map(|gate| gate.layout);
    let each_head_has_keys = cfg.num_heads() == cfg.num_kv_heads();
    match layout {
        // A gate is a linear layer, or rows of one.
        WeightLayout::Raw(..)
        | WeightLayout::StackedHeads(..)
        | WeightLayout::Torch
        | WeightLayout::Conv1d
        | WeightLayout::InOut(_)
        | WeightLayout::Dense(_)
        | WeightLayout::Flax
        | WeightLayout::Keras
        | WeightLayout::KerasH5
            if gate.is_some() =>
        {
            false
        }
        WeightLayout::Packed(..) if gate == Some(GateLayout::FusedWithQuery) => false,
        WeightLayout::Raw(..) => !any_bias,
        WeightLayout::StackedHeads(_, storage) => each_head_has_keys && (storage == Storage::Linear || !any_bias),
        // One bias flag, one width for all heads, and an output as wide as the queries.
        WeightLayout::Torch => {
            each_head_has_keys
                && cfg.out_proj()
                && [cfg.out_dim(), cfg.num_heads() * cfg.head_dim()] == [EMBED_DIM; 2]
                && cfg.value_head_dim() == cfg.head_dim()
                && [q, k, v] == [cfg.out_bias(); 3]
        }
        // One matrix reads one input, and GPT-2's has one bias.
        WeightLayout::Conv1d => [cfg.kdim(), cfg.vdim()] == [EMBED_DIM; 2] && q == k && q == v,
        WeightLayout::Packed(..) => [cfg.kdim(), cfg.vdim()] == [EMBED_DIM; 2],
        // Four linear layers.
        _ => true,
    }
}
