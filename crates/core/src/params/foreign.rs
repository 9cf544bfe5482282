//! Parameters of other libraries' attention modules that change the output and that no option of the config describes.

use candle_core::Result;

use super::layout::{PackedNaming, WeightLayout};
use crate::config::MultiHeadAttentionConfig;
use candle_attention_modules::base::ParameterReader;
use candle_attention_modules::linear::Projection::Query;

/// The names of such parameters, below an attention module. Buffers that change nothing (`mask`, `tril`, `masked_bias`,
/// `rotary_emb.inv_freq`) and norms that some libraries store next to the projections of a block are not among them.
const FOREIGN: &[&str] = &[
    // x-transformers.
    "head_scale_params",
    "qk_norm_q_scale",
    "qk_norm_k_scale",
    "q_rmsnorm.gamma",
    "k_rmsnorm.gamma",
    "value_rmsnorm.gamma",
    "head_attn_sink",
    "attend.head_attn_sink",
    "pre_softmax_talking_heads.weight",
    "post_softmax_talking_heads.weight",
    "pre_scale_post_talking_heads.weight",
    "attend.pre_softmax_talking_heads.weight",
    "attend.post_softmax_talking_heads.weight",
    "attend.pre_scale_post_talking_heads.weight",
    "pre_softmax_proj",
    "post_softmax_proj",
    "to_v_gate.weight",
    "to_v_gate.bias",
    "to_v_gate.down.weight",
    "to_v_head_gate.weight",
    "to_v_head_gate.bias",
    "to_output_gate.weight",
    "to_output_gate.down.weight",
    "attend.cope.pos_emb",
    "attend.cope.talking_heads.weight",
    "rel_proj_pos_bias.distance_bank",
    "data_dependent_alibi.to_forget_gates.0.weight",
    "data_dependent_alibi.to_forget_gates.0.bias",
    "to_value_residual_mix.0.weight",
    "to_value_residual_mix.0.bias",
    "to_latent_q.weight",
    "to_latent_kv.weight",
    "to_rotateable_k.weight",
    "hybrid_mix",
    // Other modules of the same author.
    "null_k",
    "null_v",
    "null_kv",
    "temperature",
    "talking_heads.weight",
    "reattn_weights",
    "mix_heads_pre_attn",
    "mix_heads_post_attn",
    "q_norm.gamma",
    "k_norm.gamma",
    // Keras: `use_gate`.
    "gate.kernel",
    "gate_dense.vars.0",
    // fairseq: NormFormer and Magneto.
    "c_attn",
    "q_ln.weight",
    "k_ln.weight",
    "attn_ln.weight",
    // timm: CaiT, ConViT and the Pyramid Vision Transformer.
    "proj_l.weight",
    "proj_w.weight",
    "gating_param",
    "sr.weight",
    // LeViT, TinyViT and EfficientFormer.
    "attention_biases",
    // timm's positions of MaxViT, CoAtNet and Swin V2 CR.
    "rel_pos.relative_position_bias_table",
    "rel_pos.mlp.fc1.weight",
    "rel_pos.bias",
    "rel_pos_t",
    "meta_mlp.fc1.weight",
    "cpb_mlp.0.weight",
    // The differential transformer.
    "lambda_q1",
    "lambda_k1",
    "lambda_q2",
    "lambda_k2",
    "subln.weight",
    "sub_norm.weight",
    // WavLM.
    "gru_rel_pos_linear.weight",
    "gru_rel_pos_const",
    "rel_attn_embed.weight",
    // diffusers.
    "norm_q.weight",
    "norm_k.weight",
    "norm_added_q.weight",
    "norm_added_k.weight",
    "add_q_proj.weight",
    "add_k_proj.weight",
    "add_v_proj.weight",
    "to_add_out.weight",
    // Sinks and scales under other names than the config's `sinks`.
    "sink",
    "attn_sink",
    "attn_sinks",
    "attention_sink",
    "attention_sinks",
    "per_dim_scale",
    "head_scale",
];

/// Factors of normalised queries and keys in modules of the author of x-transformers. Elsewhere these are the scales of
/// quantised caches.
const NORM_SCALES: [&str; 2] = ["q_scale", "k_scale"];

/// Norms that have these names in a config's own norms too, where they are not in an inner module.
const INNER_NORMS: [&str; 4] = ["q_norm.scale", "k_norm.scale", "query_ln.scale", "key_ln.scale"];

/// The norm of the attention output of timm, or of the input in TinyViT. In other layouts it may be a norm that is
/// next to the attention.
const NORM: [&str; 2] = ["norm.weight", "norm.bias"];

/// Refuses parameters that the layer would pass over although the module that saved them uses them.
///
/// # Errors
/// If there is one, with its name.
pub(super) fn refuse_foreign(
    layout: WeightLayout,
    cfg: &MultiHeadAttentionConfig,
    reader: &ParameterReader,
) -> Result<()> {
    const WHY: &str = "the layer has no such parameter, and would pass over it";
    reader.refuse(FOREIGN, WHY)?;
    if let WeightLayout::Packed(PackedNaming::Qkv, _) = layout {
        reader.refuse(NORM, WHY)?;
    }
    if let WeightLayout::XTransformers
    | WeightLayout::Diffusers
    | WeightLayout::Packed(PackedNaming::ToQkv | PackedNaming::ToQkvToOut0, _) = layout
    {
        reader.refuse(NORM_SCALES, WHY)?;
    }
    // Some libraries store the projections in an inner module.
    let heads = if layout.is_stacked() { cfg.num_heads() } else { 1 };
    for head in 0..heads {
        let tensors = layout.tensors(head, true);
        let query = tensors.iter().find(|tensor| tensor.holds(Query)).map(|tensor| tensor.module.as_str());
        if let Some((inner, _)) = query.and_then(|module| module.rsplit_once('.')) {
            reader.pp(inner).refuse(FOREIGN, WHY)?;
            reader.pp(inner).refuse(INNER_NORMS, WHY)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_parameters_belong_to_no_layout() {
        for layout in WeightLayout::all() {
            for tensor in [layout.tensors(0, true), layout.tensors(0, false)].concat() {
                assert!(!FOREIGN.contains(&tensor.name().as_str()), "{} of {layout}", tensor.name());
            }
        }
    }
}
