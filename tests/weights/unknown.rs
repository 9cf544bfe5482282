//! Unknown parameters in a layer's file, in every layout.

use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use proptest::prelude::*;

use crate::common::property::for_all;
use crate::{DEVICE, bits, invented, load};

/// Parameters that modules of other libraries use, with a shape for 2 heads over 1 that are 4 wide.
const UNKNOWN: &[(&str, &[usize])] = &[
    // x-transformers.
    ("mem_k", &[1, 2, 4]),
    ("mem_v", &[1, 2, 4]),
    ("qk_norm_q_scale", &[2, 1, 4]),
    ("qk_norm_k_scale", &[1, 1, 4]),
    ("q_rmsnorm.gamma", &[2, 1, 4]),
    ("k_rmsnorm.gamma", &[1, 1, 4]),
    ("head_attn_sink", &[2]),
    ("attend.head_attn_sink", &[2]),
    ("to_v_gate.weight", &[8, 8]),
    ("to_v_head_gate.bias", &[2]),
    ("attend.pre_softmax_talking_heads.weight", &[2, 2, 1, 1]),
    ("attend.post_softmax_talking_heads.weight", &[2, 2, 1, 1]),
    ("head_scale_params", &[1, 2, 1, 1]),
    // lucidrains' others.
    ("null_kv", &[2, 4]),
    ("temperature", &[]),
    ("q_norm.gamma", &[4]),
    // torchtune.
    ("q_norm.scale", &[4]),
    ("k_norm.scale", &[4]),
    // What an option of the config would ask for.
    ("q_norm.weight", &[4]),
    ("k_layernorm.weight", &[4]),
    ("sinks", &[2]),
    ("bias_k", &[1, 1, 4]),
    ("gate_proj.weight", &[8, 8]),
    ("rel_pos_h", &[3, 4]),
    // NormFormer, CaiT, the differential transformer, WavLM, diffusers.
    ("c_attn", &[2]),
    ("proj_l.weight", &[2, 2]),
    ("lambda_q1", &[4]),
    ("gru_rel_pos_const", &[1, 2, 1, 1]),
    ("norm_q.weight", &[4]),
    ("add_k_proj.weight", &[4, 8]),
    ("attention_sinks", &[2]),
];

/// The parameters among these that an option of the config asks for.
const OF_CONFIGS: [&str; 8] =
    ["mem_k", "mem_v", "q_norm.weight", "k_layernorm.weight", "sinks", "bias_k", "gate_proj.weight", "rel_pos_h"];

/// Buffers, which change nothing.
const HARMLESS: &[(&str, &[usize])] = &[
    ("mask", &[5, 5]),
    ("tril", &[5, 5]),
    ("masked_bias", &[]),
    ("causal_mask", &[1, 1, 5, 5]),
    ("rotary_emb.inv_freq", &[2]),
    ("rotary_emb.cos_cached", &[5, 4]),
];

fn config(layout: WeightLayout, has_output: bool) -> MultiHeadAttentionConfig {
    let is_stack = matches!(layout, WeightLayout::StackedHeads(..));
    let key_heads = if is_stack || layout == WeightLayout::Torch { 2 } else { 1 };
    let has_output = has_output || layout == WeightLayout::Torch;
    MultiHeadAttentionConfig::new(8, 2).with_num_kv_heads(key_heads).with_bias(false).with_out_proj(has_output)
}

/// Loads a layer in a layout from the tensors that it would be saved as, and another.
fn load_beside(layout: WeightLayout, has_output: bool, name: &str, shape: &[usize]) -> Result<MultiHeadAttention> {
    let cfg = config(layout, has_output);
    let mut tensors = invented(&cfg, WeightLayout::Canonical)?.state_dict(layout)?;
    tensors.push((name.to_string(), Tensor::ones(shape, DType::F32, &DEVICE)?));
    load(&cfg, layout, &tensors)
}

/// Returns the module in which a layout may have other parameters: the module of its projections, or the first part of
/// their names.
fn inner_module(layout: WeightLayout) -> Option<&'static str> {
    match layout {
        WeightLayout::Bert | WeightLayout::Deberta => Some("self"),
        WeightLayout::Vit => Some("attention"),
        WeightLayout::StackedHeads(..) => Some("heads.1"),
        _ => None,
    }
}

#[test]
fn unknown_parameters_in_files_of_every_layout_are_rejected() {
    let layouts = WeightLayout::all();
    let draws = (0..layouts.len(), 0..UNKNOWN.len(), any::<bool>(), any::<bool>());
    for_all(1500, draws, |(layout, unknown, is_inner, has_output)| {
        let layout = layouts[layout];
        let (name, shape) = UNKNOWN[unknown];
        // The norms, sinks and similar parameters of a config are in the module of the projections alone.
        let is_foreign = !OF_CONFIGS.contains(&name);
        let name = match inner_module(layout) {
            Some(inner) if is_inner && is_foreign => format!("{inner}.{name}"),
            _ => name.to_string(),
        };
        let Err(error) = load_beside(layout, has_output, &name, shape) else {
            panic!("{name} was passed over by the layout {layout}")
        };
        let error = error.to_string();
        assert!(error.contains(&name) && error.contains(&layout.to_string()), "{error}");
        Ok(())
    });
}

#[test]
fn output_projections_of_every_name_are_refused_where_the_config_has_none() -> Result<()> {
    for layout in WeightLayout::all() {
        if layout == WeightLayout::Torch {
            continue;
        }
        for name in ["output_proj.weight", "o_proj.weight", "to_out.0.weight", "W_o", "dense.bias"] {
            let Err(error) = load_beside(layout, false, name, &[8, 8]) else {
                panic!("{name} was passed over by the layout {layout}")
            };
            assert!(error.to_string().contains(name), "{error}");
        }
    }
    Ok(())
}

#[test]
fn buffers_in_files_of_every_layout_change_nothing() -> Result<()> {
    for layout in WeightLayout::all() {
        let expected = bits(&invented(&config(layout, true), WeightLayout::Canonical)?)?;
        for (name, shape) in HARMLESS {
            let layer = load_beside(layout, true, name, shape)?;
            assert_eq!(bits(&layer)?, expected, "{name} beside {layout}");
        }
    }
    Ok(())
}

#[test]
fn builders_that_have_every_name_load_every_layout() -> Result<()> {
    for layout in WeightLayout::all() {
        MultiHeadAttention::load(&config(layout, true), layout, VarBuilder::zeros(DType::F32, &DEVICE))?;
    }
    Ok(())
}
