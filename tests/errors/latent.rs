//! Latent attention: its config, its tensors, its inputs, and the caches that it shares with other layers.

use candle_attention::{MultiHeadLatentAttention as Latent, MultiHeadLatentAttentionConfig as LatentConfig};

use crate::wrong::{Fitting, Shapes};
use crate::*;

fn base() -> LatentConfig {
    LatentConfig::new(6, 2).with_q_lora_rank(3).with_kv_lora_rank(5).with_nope_head_dim(4).with_rope_head_dim(2)
}

fn layer(cfg: LatentConfig) -> Result<Latent> {
    Latent::new(&cfg, any_weights())
}

#[test]
fn latent_configs() {
    let beyond = u32::MAX as usize + 1;
    let axes = RopeAxes::new(vec![1, 1], RopeAxisLayout::Sections);
    let configs = cases! {
        "no width" => layer(LatentConfig::new(0, 2)),
        "no heads" => layer(LatentConfig::new(6, 0)),
        "axes" => layer(base().with_rope_head_dim(4).with_rope(RopeConfig::new(10_000.0).with_axes(axes))),
        "no rank of queries" => layer(base().with_q_lora_rank(0)),
        "no rank of keys" => layer(base().with_kv_lora_rank(0)),
        "no part without positions" => layer(base().with_nope_head_dim(0)),
        "values beyond u32" => layer(base().with_value_head_dim(beyond)),
        "heads beyond u32" => layer(base().with_nope_head_dim(beyond - 1)),
        "no probability" => layer(base().with_dropout(1.5)),
        "a negative eps" => layer(base().with_norm_eps(-1.0)),
        "an infinite scale" => layer(base().with_scale(f64::INFINITY)),
        "half a pair" => layer(base().with_rope_head_dim(3)),
    };
    assert_reviewed("latent_configs", &[configs]);
}

#[test]
fn latent_tensors() -> Result<()> {
    let biased = base().with_bias(true);
    let [whole, bare] = [&biased, &base()].map(|cfg| wrong::shapes_of_variables(|vb| Latent::new(cfg, vb)));
    let (whole, bare) = (whole?, bare?);
    let load = |cfg: &LatentConfig, shapes: &Shapes| Latent::new(cfg, wrong::builder(shapes));
    let missing = wrong::weights(&whole, |shapes| load(&biased, shapes));
    let surplus = wrong::surplus(&bare, &whole, |shapes| load(&base(), shapes));
    let integers = cases! { "weights of integers" => Latent::new(&base(), VarBuilder::zeros(DType::U8, &CPU)), };
    assert_reviewed("latent_tensors", &[missing, surplus, integers]);
    Ok(())
}

/// A call of another layer with a cache that holds latents of this one.
fn with_cache(forward: impl FnOnce(AttentionInput) -> Result<Tensor>) -> Result<()> {
    let (xs, mut cache) = (zeros((2, 3, 6)), AttentionCache::default());
    layer(base())?.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;
    let outcome = forward(AttentionInput::new(&xs).with_cache(&mut cache)).map(drop);
    assert_eq!(cache.lens(), [3, 3]);
    outcome
}

#[test]
fn latent_inputs() {
    let xs = zeros((2, 3, 6));
    let input = || AttentionInput::new(&xs);
    let others = cases! {
        "one dimension" => layer(base())?.forward(&zeros(6)),
        "keys and values" => layer(base())?.forward_with(input().with_key_value(&xs, &xs)),
        "positions of keys" => layer(base())?.forward_with(input().with_key_positions(&of(DType::U32, 3))),
        "positions on axes" => layer(base())?.forward_with(input().with_axis_positions(&zeros((2, 3)))),
        "lengths without a cache" => layer(base())?.forward_with(input().with_valid_lens(&[1, 2])),
        "tables of other heads" => {
            let rope = RopeConfig::new(10_000.0).with_style(RopeStyle::Interleaved);
            layer(base())?.with_rotary(RotaryEmbedding::new(&rope, 4)?)
        },
        "a cache of other latents" =>
            with_cache(|input| layer(base().with_kv_lora_rank(3).with_rope_head_dim(4))?.forward_with(input)),
        "variables with a cache" =>
            Latent::new(&base(), variables())?.forward_with(input().with_cache(&mut AttentionCache::default())),
        "a cache of latents for heads" => {
            let cfg = Config::new(6, 2).with_num_kv_heads(1).with_head_dim(7).with_value_head_dim(5);
            with_cache(|input| crate::layer(cfg)?.forward_with(input))
        },
    };
    let dims: [Fitting; 2] = [("xs", DType::F32, "2 T 6"), ("positions", DType::U32, "T")];
    let inputs = wrong::tensors("T 3", &dims, |tensors| {
        layer(base())?.forward_with(AttentionInput::new(&tensors[0]).with_positions(&tensors[1]))
    });
    assert_reviewed("latent_inputs", &[inputs, others]);
}
