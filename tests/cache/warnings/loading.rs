//! Masks, weights, configs and adapters that are allowed, and that are usually a mistake.

use candle_attention::hf;
use candle_attention::peft::{Adapter, AdapterConfig};
use candle_core::ModuleT;
use candle_nn::{AdamW, Optimizer, VarMap};
use serde_json::json;

use super::{assert_silent, xs};
use crate::*;

/// Makes the mask of a batch whose second text has no padding, with 1 for padding.
pub fn inverted_attention_mask() -> Result<()> {
    let mask = |rows: &[[u32; 4]; 2]| AttentionMask::from_attention_mask(&Tensor::new(rows, &DEVICE)?);
    mask(&[[1, 1, 0, 0], [1; 4]])?;
    AttentionMask::from_attention_mask(&Tensor::zeros((2, 0), DType::U32, &DEVICE)?)?;
    assert_silent("a mask with a token in each row, and one without columns");
    mask(&[[0, 0, 1, 1], [0; 4]])?;
    mask(&[[0, 0, 1, 1], [0; 4]])?;
    Ok(())
}

/// Calls layers with a length above the number of keys, in the mask.
pub fn length_above_the_keys() -> Result<()> {
    let layer = layer(&Config::new(8, 2))?;
    let xs = xs(2, 6)?;
    let run = |lens: Vec<usize>| {
        let mask = AttentionMask::none().with_valid_lens(lens);
        layer.forward_with(AttentionInput::new(&xs).with_mask(&mask))
    };
    run(vec![6, 4])?;
    run(vec![usize::MAX, 4])?;
    let mask = AttentionMask::none().with_valid_lens(vec![9, 4]);
    mask.resolve(2, 6, 6)?;
    let cached = AttentionInput::new(&xs).with_mask(&mask);
    layer.forward_with(cached.with_cache(&mut AttentionCache::default()))?;
    assert_silent("lengths up to the keys, no length at all, a mask alone, and a cache with more calls to come");
    run(vec![9, 4])?;
    run(vec![4, 9])?;
    Ok(())
}

/// Loads weights of a library that rotates neighbours, for positions that rotate halves.
pub fn halves(layout: WeightLayout) -> Result<()> {
    let in_style = |style| Config::new(8, 2).with_rope(RopeConfig::new(100.0).with_style(style));
    let halves = in_style(RopeStyle::RotateHalf);
    let tensors: std::collections::HashMap<_, _> = layer(&halves)?.state_dict(layout)?.into_iter().collect();
    let load = |cfg: &Config| {
        let vb = VarBuilder::from_tensors(tensors.clone(), DType::F32, &DEVICE);
        MultiHeadAttention::load(cfg, layout, vb)
    };
    load(&in_style(RopeStyle::Interleaved))?;
    load(&Config::new(8, 2))?;
    let vars = VarMap::new();
    MultiHeadAttention::load(&halves, layout, VarBuilder::from_varmap(&vars, DType::F32, &DEVICE))?;
    layer(&halves)?;
    assert_silent("neighbours, no positions, new variables, and another layout");
    load(&halves)?;
    load(&halves)?;
    Ok(())
}

/// Reads a config that has a type and no sizes.
pub fn config_without_sizes() -> Result<()> {
    let small = json!({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4});
    assert_eq!(hf::attention_config(&small, 0)?.embed_dim(), 64);
    assert_silent("a config with sizes");
    let bare = json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"]});
    assert_eq!(hf::attention_config(&bare, 0)?, hf::attention_config(&bare, 1)?);
    Ok(())
}

/// Trains a new adapter whose optimizer was made before its variables.
pub fn optimizer_before_the_adapter() -> Result<()> {
    let base = layer(&Config::new(8, 2))?.freeze()?;
    let xs = xs(1, 2)?;
    let train = |is_late: bool| -> Result<()> {
        let vars = VarMap::new();
        let adapter = Adapter::new(AdapterConfig::new(2, 4.0, ["q_proj", "v_proj"])?, &vars, DType::F32, &DEVICE);
        let early = AdamW::new_lr(vars.all_vars(), 1e-2)?;
        let adapted = adapter.load_onto(&base, WeightLayout::Canonical, "layers.0.self_attn")?;
        let mut optimizer = if is_late { AdamW::new_lr(vars.all_vars(), 1e-2)? } else { early };
        for _ in 0..70 {
            optimizer.backward_step(&adapted.forward_t(&xs, true)?.sqr()?.mean_all()?)?;
            adapted.forward(&xs)?;
        }
        Ok(())
    };
    train(true)?;
    assert_silent("an optimizer that was made after its variables");
    train(false)?;
    train(false)
}
